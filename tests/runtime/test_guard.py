"""The guard: a kernel that the cost model thinks fast and that is slow does not stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.backend import collecting
from deuteron.base.options import Options
from deuteron.runtime import guard
from deuteron.schedule import profit

Decisions = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cost model that does not see strides: two products of one row are one nest, which walks
    down the columns of the second matrix."""
    monkeypatch.setattr(profit, "strided_bytes", lambda *_: 0)


def chain(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.relu(x @ a.t()) @ b.t()


def operands() -> list[Tensor]:
    return [torch.randn(1, 1024), torch.randn(2048, 1024), torch.randn(1024, 2048) / 50]


def run(f: Any, *args: Any, cache: Path, **options: Any) -> tuple[Any, Decisions]:
    """The second call's result (of the form that was chosen), after the first was checked."""
    torch._dynamo.reset()
    given = {"guard": "measure", "cache_dir": str(cache), "keep_graphs": False, **options}
    with collecting() as records:
        g = torch.compile(f, backend="deuteron", options=given)
        first, second = g(*args), g(*args)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)
    return second, [d for r in records for d in r.of("decision") if d["subject"] == "guard"]


def test_a_slow_kernel_is_replaced_and_remembered(
    blind: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = operands()
    measure = guard.Guard.measure

    def slowed(self: Any, given: list[Any]) -> frozenset[str]:
        """The fused form's steps take a tenth of a second longer, whatever machine this is."""
        make = self.form

        def form(unfused: frozenset[str]) -> Any:
            made = make(unfused)
            if not unfused:
                note = made.clock.note
                made.clock.note = lambda step, us: note(step, us + 1e5)
            return made

        self.form = form
        return measure(self, given)

    monkeypatch.setattr(guard.Guard, "measure", slowed)
    with torch.no_grad():
        got, entries = run(chain, *args, cache=tmp_path)
        torch.testing.assert_close(got, chain(*args), rtol=1e-4, atol=1e-4)
        (d,) = [d for d in entries if d["accepted"]]
        assert "fused" in d["detail"] and "unfused" in d["detail"], d
        # Another process: nothing is measured, and the better form is compiled at once.
        monkeypatch.setattr(guard.Guard, "measure", lambda *_: pytest.fail("measured again"))
        got, entries = run(chain, *args, cache=tmp_path)
        torch.testing.assert_close(got, chain(*args), rtol=1e-4, atol=1e-4)
    (d,) = entries
    assert d["accepted"] and d["reason"].startswith("remembered, unfused: mm"), d


def test_a_good_kernel_stays(tmp_path: Path) -> None:
    """Without its kernel the sum would read 8 MB that nobody needs in memory."""

    def f(x: Tensor) -> Tensor:
        y = torch.where(x > 0, x, torch.where(x < -1, x * 2, torch.where(x > -0.5, x, -x)))
        return torch.where(y > 3, y.exp(), y).sum(-1)

    x = torch.randn(2048, 1024)
    got, entries = run(f, x, cache=tmp_path)
    torch.testing.assert_close(got, f(x), rtol=1e-4, atol=1e-3)
    assert entries and not any(d["accepted"] for d in entries), entries
    assert "many conditions" in entries[0]["detail"]


def test_what_is_written_to_is_written_once(blind: None, tmp_path: Path) -> None:
    def f(count: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        count.add_(1)
        return chain(x, a, b) + count

    args = operands()
    count = torch.zeros(1024)
    with torch.no_grad():
        g = torch.compile(
            f, backend="deuteron", options={"guard": "measure", "cache_dir": str(tmp_path)}
        )
        for k in range(1, 4):
            got = g(count, *args)
            assert torch.equal(count, torch.full((1024,), float(k)))
            torch.testing.assert_close(got, chain(*args) + k, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_training_with_random_numbers(blind: None, tmp_path: Path, dynamic: bool) -> None:
    """A seed gives the same numbers in the measured call and in later ones; gradients are right."""
    w = [torch.randn(900, 600, requires_grad=True), torch.randn(600, 900, requires_grad=True)]

    def f(x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(x @ w[0].t() / 30), 0.5) @ w[1].t() / 30

    x = torch.randn(1, 600)
    options = {"guard": "measure", "cache_dir": str(tmp_path)}
    g = torch.compile(f, backend="deuteron", options=options, dynamic=dynamic)
    seen = []
    for _ in range(3):
        torch.manual_seed(7)
        y = g(x)
        y.square().sum().backward()
        seen.append([y.detach().clone(), *(p.grad for p in w)])
        for p in w:
            p.grad = None
    for later in seen[1:]:
        for one, other in zip(seen[0], later, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    after = torch.rand(3)
    torch.manual_seed(7)
    g(x)
    assert torch.equal(after, torch.rand(3))


def test_measurements_that_fail_leave_the_call_alone(
    blind: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for a copy")

    monkeypatch.setattr(guard.Guard, "measure", no_memory)
    args = operands()
    with torch.no_grad():
        got, (d,) = run(chain, *args, cache=tmp_path)
    torch.testing.assert_close(got, chain(*args), rtol=1e-4, atol=1e-4)
    assert not d["accepted"] and "no memory for a copy" in d["detail"]


def test_the_mode_that_measures_guards() -> None:
    assert Options.make("max-autotune").guard == "measure"
    assert Options.make().guard == "off"
