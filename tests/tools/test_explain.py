"""`deuteron.explain`: collects what compilation recorded, and leaves nothing behind."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deuteron.backend import deuteron_backend, run_as_traced
from deuteron.tools import explain as module
from deuteron.tools.explain import explain


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that records one kernel and one library call per graph and runs ATen."""

    def runner(part: Any, context: Any) -> Any:
        record = context.record
        origins = [{"node": "exp", "op": "aten.exp", "line": "user.py:3: x.exp()"}]
        record.add("kernel", name="cpp_poi_fused_exp_0", ops=["aten.exp", "aten.exp"],
                   origins=origins, bytes=2048, flops=1e6, predicted_us=3.25)  # fmt: skip
        record.add("library", op="aten.mm", reason="large", origins=origins)
        record.add("decision", subject="fuse", accepted=False, reason="iteration spaces differ",
                   detail="[i, j] and [j]", first="a", second="b", bytes=4096, us=1.5)  # fmt: skip
        return run_as_traced(part.gm)

    backend = functools.partial(deuteron_backend, runner=runner)
    monkeypatch.setattr(module, "deuteron_backend", backend)


def test_text_and_json() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    report = explain(model, torch.randn(3, 4))
    text = str(report)
    for word in ("forward:", "backward:", "kernel cpp_poi_fused_exp_0: 2.05 kB, 1 MFLOP",
                 "predicted 3.2 us", "aten.exp x2", "from user.py:3: x.exp()",
                 "library aten.mm: large", "fuse: 1 refused",
                 "a + b: iteration spaces differ ([i, j] and [j]) [4.1 kB, 1.50 us]"):  # fmt: skip
        assert word in text, word
    data = json.loads(report.to_json())
    phases = [e["phase"] for g in data["graphs"] for e in g if e["kind"] == "graph"]
    assert phases == ["forward", "backward"]
    assert len(report.kernels) == len(report.library_calls) == 2


def test_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    explain(model, torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_mutated_argument_is_put_back() -> None:
    def f(x: Tensor) -> Tensor:
        return x.add_(1).sin()

    x = torch.zeros(3)
    explain(f, x)
    assert torch.equal(x, torch.zeros(3))


def test_backward_on_request() -> None:
    def f(x: Tensor) -> Tensor:
        return x.exp()

    phases = [r.of("graph")[0]["phase"] for r in explain(f, torch.ones(2)).graphs]
    assert phases == ["inference"]
    x = torch.ones(2, requires_grad=True)
    assert len(explain(f, x, backward=False).graphs) == 1
    with pytest.raises(ValueError, match="no backward"):
        explain(f, torch.ones(2), backward=True)


def test_graph_breaks_are_told() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    report = explain(f, torch.ones(2))
    assert len(report.graphs) == 2
    assert report.breaks and "graph break: " in str(report)


def test_a_compiled_module_is_explained_again() -> None:
    model = torch.compile(nn.Linear(3, 3), backend="eager")
    model(torch.ones(2, 3))
    assert len(explain(model, torch.ones(2, 3)).graphs) == 2


def test_a_graph_break_is_told_once() -> None:
    def f(x: Tensor, *, scale: float = 2.0) -> Tensor:
        print("break")
        return x * scale

    assert len(explain(f, torch.ones(2)).breaks) == 1
