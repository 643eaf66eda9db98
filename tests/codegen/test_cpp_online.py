"""C++ kernels whose rows no cache holds: dependent reductions in one pass over the row, values and
passes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deuteron.codegen.cpp import Machine, row_nests
from deuteron.schedule.kernel import Kernel
from tests.codegen.cpp_tools import Runner
from tests.schedule.test_online import RULES, inputs
from tests.schedule.tools import Scheduled, scheduled

INF = float("inf")
ONE_CORE = Machine(threads=1, l2_bytes=1 << 10)
EIGHT_CORES = Machine(threads=8, l2_bytes=1 << 10)


def run(
    compiled: Scheduled, args: list[Tensor], machine: Machine
) -> tuple[list[Tensor], list[str]]:
    """Outputs and sources; every kernel compiled for a machine whose cache holds nothing."""
    memory: dict[str, Tensor] = {}
    for d in compiled.program.defs:
        if hasattr(d, "position"):
            memory[d.name] = args[d.position]
    sources = []
    for k in compiled.kernels:
        assert isinstance(k, Kernel)
        for name, lay in k.writes:
            shape = [int(n.value or 0) for n in lay.shape]
            dtypes = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16,
                      "i64": torch.int64, "bool": torch.bool}  # fmt: skip
            memory[name] = torch.empty(shape, dtype=dtypes[lay.dtype])
        runner = Runner(k, machine)
        sources.append(runner.cpp.source)
        runner(memory)
    return [memory[o.tensor] for o in compiled.program.outputs if o.tensor is not None], sources


def check(f: Callable[..., Any], args: list[Tensor], machine: Machine) -> list[str]:
    compiled = scheduled(f, *args, check=False)
    got, sources = run(compiled, args, machine)
    listed = [torch.utils._pytree.tree_leaves(f(*xs)) for xs in (args, [a.double() for a in args])]
    for g, e, exact in zip(got, *listed, strict=True):
        if not e.is_floating_point():
            assert torch.equal(g, e)
            continue
        assert torch.equal(g.isnan(), e.isnan()) and torch.equal(g.isinf(), e.isinf())
        plain = exact.isfinite() & e.isfinite()
        ours, eager = ((t.double() - exact)[plain].abs().max() for t in (g, e))
        assert ours <= 2 * eager + 2e-7 * (1 + exact[plain].abs().max())
    return sources


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few thousand elements are long."""
    monkeypatch.setattr(row_nests, "MIN_SPLIT_OPS", 512)


def blocks(source: str) -> int:
    """Loops over blocks of a row."""
    return len(re.findall(r"b\d+ \+= 4096\)", source))


@pytest.mark.parametrize("machine", [ONE_CORE, EIGHT_CORES], ids=["alone", "shared"])
@pytest.mark.parametrize("name", RULES)
def test_rules(name: str, machine: Machine, small: None) -> None:
    _, f, count = RULES[name]
    sources = check(f, inputs(count, 3, 10_007), machine)
    assert sum(map(blocks, sources)) >= 1


@pytest.mark.parametrize("machine", [ONE_CORE, EIGHT_CORES], ids=["alone", "shared"])
@pytest.mark.parametrize("name", ["softmax", "logsumexp", "variance"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(name: str, dtype: torch.dtype, machine: Machine, small: None) -> None:
    _, f, count = RULES[name]
    check(f, inputs(count, 3, 9000, dtype=dtype), machine)


@pytest.mark.parametrize("machine", [ONE_CORE, EIGHT_CORES], ids=["alone", "shared"])
@pytest.mark.parametrize("name", ["softmax", "logsumexp", "base 2", "weights"])
def test_exceptional_rows(name: str, machine: Machine, small: None) -> None:
    _, f, count = RULES[name]
    args = inputs(count, 6, 9000)
    x = args[0]
    x[0, :] = -INF
    x[1, :5000] = -INF
    x[2, 200] = INF
    x[3, 8000] = float("nan")
    x[4] *= 100
    x[5, 6000:] = -INF
    check(f, args, machine)


@pytest.mark.parametrize("machine", [ONE_CORE, EIGHT_CORES], ids=["alone", "shared"])
def test_several_loops_and_others(machine: Machine, small: None) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        centered = x - x.mean((0, 2), keepdim=True)
        return (centered * centered).sum((0, 2)), x.amin((0, 2)), (x > 1).any(0).any(-1), x * 2

    check(f, inputs(1, 40, 3, 700), machine)


@pytest.mark.parametrize("name", ["softmax", "logsumexp", "weights", "variance", "covariance"])
def test_columns(name: str, small: None) -> None:
    """Rows side by side, few enough that threads share them."""
    _, f, count = RULES[name]
    args = [a.t().contiguous() for a in inputs(count, 24, 6000)]
    if name in ("softmax", "logsumexp"):
        args[0][:, 3] = -INF
        args[0][:4000, 4] = -INF
        args[0][77, 5] = float("nan")
    sources = check(lambda *xs: f(*(x.t() for x in xs)), args, EIGHT_CORES)
    # What softmax stores would lie across memory: the cost model turns rows first.
    assert name == "softmax" or any(re.search(r"b\d+ \+= 64\)", s) for s in sources)


@pytest.mark.parametrize("machine", [ONE_CORE, EIGHT_CORES], ids=["alone", "shared"])
def test_far_from_the_mean(machine: Machine, small: None) -> None:
    x = torch.randn(3, 10_007) + 100
    check(lambda x: (torch.var(x, -1), x.argmax(-1)), [x], machine)
