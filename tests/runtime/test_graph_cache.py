"""Graphs that another process compiled: what they give, which are kept, and calls that do not go
directly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from deuteron.backend import collecting
from deuteron.base.options import environment
from deuteron.codegen.assemble import EmittedModule
from deuteron.codegen.launch_groups import Launches
from deuteron.codegen.products import Product, Side
from deuteron.runtime.artifact import Artifact
from deuteron.runtime.recordable import Recordable
from tests.codegen.triton_programs import kernels, planned

R = torch.randn
Step = Callable[..., Any]


def norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w).sin() + torch.arange(16)


def anew(f: Step, folder: Path, **options: Any) -> Step:
    """Compiled as in a new process."""
    torch._dynamo.reset()
    asked = {"cache_dir": str(folder), "keep_graphs": True, **options}
    return torch.compile(f, backend="deuteron", options=asked)


def trained(g: Step, *args: Tensor, steps: int = 2) -> tuple[list[Tensor], list[Any]]:
    """Results and gradients, and the Records."""
    out: list[Tensor] = []
    with collecting() as records:
        for _ in range(steps):
            y = g(*args)
            wanted = [t for t in args if t.requires_grad]
            if isinstance(g, nn.Module):
                wanted += [p for p in g.parameters() if p.requires_grad]
            out = [
                y,
                *(torch.autograd.grad(y, wanted, y.detach().cos()) if y.requires_grad else ()),
            ]
    return out, records


def decisions(records: list[Any]) -> list[tuple[bool, str]]:
    entries = [e for r in records for e in r.of("decision") if e["subject"] == "graph cache"]
    return [(e["accepted"], e["detail"]) for e in entries]


def twice(f: Step, folder: Path, *args: Tensor, **options: Any) -> list[Any]:
    """The Records of the second time, whose results are the first's."""
    first, records = trained(anew(f, folder, **options), *args)
    assert not any(accepted for accepted, _ in decisions(records))
    assert any(r.of("stage") for r in records)
    torch.manual_seed(0)
    second, records = trained(anew(f, folder, **options), *args)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
        assert a.requires_grad == b.requires_grad
    return records


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(dtype: torch.dtype, grad: bool, tmp_path: Path) -> None:
    x, w = (R(*s, dtype=dtype, requires_grad=grad) for s in ((6, 16), (16,)))
    records = twice(norm, tmp_path, x, w)
    assert all(accepted for accepted, _ in decisions(records)) and len(records) == 1 + grad
    assert not any(r.of("stage") for r in records)
    assert all(r.of("kernel") and r.of("kernel")[0]["source"] for r in records)


def test_a_network_that_writes_to_its_buffers(tmp_path: Path) -> None:
    """Batch norm's statistics go on from where they were."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    other = nn.Sequential(*(type(m)(*a) for m, a in zip(net, ((3, 8, 3), (8,), (), ()))))
    other.load_state_dict(net.state_dict())
    x = R(2, 3, 6, 6)
    _, records = trained(anew(net, tmp_path), x)
    assert not any(accepted for accepted, _ in decisions(records))
    kept = anew(net, tmp_path)
    _, records = trained(kept, x)
    assert [accepted for accepted, _ in decisions(records)] == [True, True]
    for _ in range(4):
        other(x)
    for a, b in zip(net.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    assert dict(kept.named_parameters()).keys()
    kept.eval()
    torch.testing.assert_close(kept(x), other.eval()(x))


PROGRAM = """
import torch
from deuteron.backend import collecting
def f(x):
    return torch.softmax(x, -1) * 2
with collecting() as records:
    y = torch.compile(f, backend="deuteron")(torch.arange(40.).reshape(4, 10))
assert abs(float(y.sum()) - 8) < 1e-5
print(sum(len(r.of("stage")) for r in records))
"""


def test_another_process(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    given = environment(DEUTERON_CACHE_DIR=str(tmp_path / "cache"), DEUTERON_KEEP_GRAPHS="1")
    command = [sys.executable, str(tmp_path / "program.py")]
    done = [
        subprocess.run(command, env=given, capture_output=True, text=True, timeout=300)
        for _ in range(2)
    ]
    assert [d.returncode for d in done] == [0, 0], done[0].stderr + done[1].stderr
    assert [int(d.stdout) for d in done] == [10, 0]


@torch.compiler.allow_in_graph
def users(x: Tensor) -> Tensor:
    return x.sin()


class Own(Tensor):
    pass


SHARED_STORAGE = torch.ones(4)


@pytest.mark.parametrize(
    ("f", "args", "reason"),
    [
        (lambda x: users(x) + 1, (R(4),), "users is not torch's"),
        (
            lambda x, y: x.add_(1) + y,
            (SHARED_STORAGE[:3], SHARED_STORAGE[1:]),
            "inputs share memory",
        ),
        (lambda x: torch.nonzero(x) + 1, (R(4),), "sizes are symbols"),
        (lambda x: x.sin() + 1, (R(4).as_subclass(Own),), "an input is a Own"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_has_no_name(f: Step, args: Any, reason: str, tmp_path: Path) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        _, records = trained(anew(f, tmp_path), *args)
    assert any(not ok and reason in why for ok, why in decisions(records)), decisions(records)
    assert not list(tmp_path.rglob("*.graph"))


def test_random_numbers_are_the_seed_s(tmp_path: Path) -> None:
    def f(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) * 2

    x, drawn = R(8, 64, requires_grad=True), []
    for _ in range(2):
        g = anew(f, tmp_path)
        trained(g, x)
        torch.manual_seed(3)
        drawn.append([trained(g, x, steps=1)[0] for _ in range(2)])
    (a, b), (c, d) = drawn
    assert torch.equal(a[0], c[0]) and torch.equal(a[1], c[1]) and torch.equal(b[0], d[0])
    assert not torch.equal(a[0], b[0])
    assert len(list(tmp_path.rglob("*.graph"))) == 1


def test_symbols_and_watching_options(tmp_path: Path) -> None:
    x = R(5, 4)
    torch._dynamo.mark_dynamic(x, 0)
    _, records = trained(anew(torch.sin, tmp_path), x)
    assert any("SymInt" in why for _, why in decisions(records))
    for options in ({"verify": True}, {"debug_dir": str(tmp_path / "d")}, {"keep_graphs": False}):
        trained(anew(torch.sin, tmp_path, **options), R(4))
    assert not list(tmp_path.rglob("*.graph"))


def test_settings_and_inputs_are_part_of_the_name(tmp_path: Path) -> None:
    x, w = R(4, 4), R(4)

    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(x, (4,), w).exp()

    def again(*args: Tensor) -> bool:
        _, records = trained(anew(f, tmp_path), *args)
        return any(accepted for accepted, _ in decisions(records))

    assert not again(x, w) and again(x, w)
    assert not again(x.t(), w) and not again(x, w.clone().requires_grad_())
    assert not again(x.double(), w.double()) and not again(x, nn.Parameter(w))
    with torch.autocast("cpu"):
        assert not again(x, w)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert not again(x, w)
    finally:
        torch.set_float32_matmul_precision(before)
    assert again(x, w)


def test_a_damaged_entry_is_compiled_again(tmp_path: Path) -> None:
    x, w = R(6, 16), R(16)
    twice(norm, tmp_path, x, w)
    (entry,) = tmp_path.rglob("*.graph")
    entry.write_bytes(entry.read_bytes()[:-10])
    out, records = trained(anew(norm, tmp_path), x, w)
    assert not any(accepted for accepted, _ in decisions(records))
    torch.testing.assert_close(out[0], norm(x, w))


def test_unusual_calls(tmp_path: Path) -> None:
    """Hooks on saved tensors, other layouts, graphs of gradients: as when compiled here."""
    x, w = R(6, 16, requires_grad=True), R(16, requires_grad=True)
    twice(norm, tmp_path, x, w)
    g = anew(norm, tmp_path)
    dy = R(16, 6).t()
    expected = torch.autograd.grad(norm(x, w), (x, w), dy)
    torch.testing.assert_close(torch.autograd.grad(g(x, w), (x, w), dy), expected)
    grads = torch.autograd.grad(g(x, w), (x, w), dy, create_graph=True)
    torch.testing.assert_close(grads, expected)
    assert grads[0].requires_grad
    with pytest.raises(RuntimeError, match="double backward"):
        grads[0].sum().backward()
    y = g(x, w)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(y, (x, w), dy, retain_graph=True), expected)
    with save_on_cpu():
        y = g(x, w)
    torch.testing.assert_close(torch.autograd.grad(y, (x, w), dy), expected)
    y = g(x, w)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
            y.backward(dy)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_graph_of_a_gpu_as_text() -> None:
    """Kernels, launches, products and constants come back as they were."""
    made = {k.name: k for k in kernels(planned("softmax"), "softmax")}
    first, k = next(iter(made.items()))  # every field of a kernel and of its configurations counts
    limited = tuple(replace(c, num_stages=3, registers=64) for c in k.configs)
    made[first] = replace(k, configs=limited, cluster=True, fp_fusion=True)
    launches = Launches("gpu_0", "cuda:0", tuple(made), ((0, 1),) * len(made), ("s0",))
    sides = [Side(k == 1, 16, 0) for k in range(3)]
    product = Product(4, 8, 16, 1, "bf16", *sides, True, "relu")
    constant = torch.arange(6, dtype=torch.int16).reshape(2, 3).t()
    emitted = EmittedModule(
        "text", "", (), (launches,), {"c": constant}, {"mul_0": (product, "cuda:0")}
    )
    recordable = Recordable("", 0, 3, (0, 1), ("args[2]",), True)
    artifact = Artifact("inference", emitted, made, recordable)
    back = Artifact.from_json(json.loads(json.dumps(artifact.to_json("<kept>"))))
    c = back.emitted.objects.pop("c")
    emitted.objects.pop("c")
    assert back.code == compile("text", "<kept>", "exec")
    assert replace(back, code=None) == artifact
    assert torch.equal(c, constant) and c.stride() == constant.stride()
    assert not artifact.why_not_stored()
    emitted.objects["f"] = len
    assert "f is a builtin" in artifact.why_not_stored()
