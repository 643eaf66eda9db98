"""The memory plan: who shares memory with whom, and what the peak is."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deuteron.backend import deuteron_backend
from deuteron.base.passes import Context
from deuteron.capture.stages import Part
from deuteron.ir.index import evaluate
from deuteron.ir.program import Extern, Program, tensors_read
from deuteron.memory.lifetimes import overwritable
from deuteron.memory.plan import ALIGNMENT, MemoryPlan, assign_offsets
from deuteron.pipeline import compiled as through
from deuteron.schedule.kernel import Kernel, Schedule
from deuteron.stages import Loaded

R = torch.randn


def planned(
    f: Callable[..., Any], *args: Any, dynamic: bool = False, **options: Any
) -> tuple[MemoryPlan, Schedule, Program]:
    """The plan of the graph of `f`, which also runs and is compared."""
    seen: list[Loaded] = []

    def runner(part: Part, context: Context) -> Any:
        seen.append(through("rewrite", "guard", part, context))
        return seen[-1].call

    backend = functools.partial(deuteron_backend, runner=runner)
    g = torch.compile(f, backend=backend, fullgraph=True, dynamic=dynamic, options=options)
    torch.testing.assert_close(g(*args), f(*args), rtol=1e-3, atol=1e-3)
    (c,) = seen
    return c.plan, c.schedule, c.program


@pytest.mark.parametrize("seed", range(8))
def test_pieces_that_live_at_once_do_not_overlap(seed: int) -> None:
    rng = random.Random(seed)
    lives, need = [], []
    for _ in range(60):
        first = rng.randrange(30)
        lives.append((first, first + rng.randrange(8)))
        need.append(rng.choice([0, 1, 100, 4096, 5000, 70000, rng.randrange(20000)]))
    at, total = assign_offsets(need, lives)
    for i in range(len(need)):
        assert at[i] % ALIGNMENT == 0
        assert at[i] + need[i] <= total
        for j in range(i):
            both = lives[i][0] <= lives[j][1] and lives[j][0] <= lives[i][1]
            apart = at[i] + need[i] <= at[j] or at[j] + need[j] <= at[i]
            assert not (both and need[i] and need[j]) or apart
    most = max(
        sum(n for n, (a, b) in zip(need, lives, strict=True) if a <= k <= b) for k in range(40)
    )
    assert most <= total <= 1.5 * most + 60 * ALIGNMENT
    assert assign_offsets(need, lives) == (at, total)


def test_nothing_needs_no_memory() -> None:
    assert assign_offsets([], []) == ([], 0)
    assert assign_offsets([0, 0], [(0, 1), (0, 1)]) == ([0, 0], 0)


def disjoint(plan: MemoryPlan, schedule: Schedule, sizes: dict[str, int]) -> None:
    """Simulates the steps: memory that is written keeps what somebody still reads."""
    holds: dict[tuple[int, int], str] = {}  # bytes from, to -> name of what is there
    (arena,) = plan.arenas.values()
    offsets, total = arena.offsets(sizes)

    def where(name: str) -> tuple[int, int] | None:
        slot = plan.slot.get(plan.home.get(name, name))
        if slot is None:
            return None
        low = offsets[slot[1]]
        high = low + evaluate(arena.slots[slot[1]].nbytes, sizes)
        assert high <= total
        return low, high

    for step in schedule.steps:
        if isinstance(step, Kernel):
            reads, writes = [n for n, _ in step.reads], [n for n, _ in step.writes]
        else:
            reads, writes = list(tensors_read(step)), [n for n in step.names if n]
        for name in reads:
            at = where(name)
            assert at is None or name in writes or holds[at] == name, (step, name)
        for name in writes:
            at = where(name)
            if at is not None:
                for other in [o for o in holds if o[0] < at[1] and at[0] < o[1]]:
                    del holds[other]
                holds[at] = name


def blocks(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        y = torch.softmax(x @ w, -1)
        x = (y * x).cumsum(0) @ w + x
    return x


@pytest.mark.parametrize("dynamic", [False, True])
def test_every_reader_finds_what_was_written(dynamic: bool) -> None:
    plan, schedule, program = planned(blocks, R(64, 64), R(64, 64) / 64, dynamic=dynamic)
    sizes = {s.name: s.hint or 1 for s, _ in program.sizes}
    disjoint(plan, schedule, sizes)
    assert plan.slot


def test_operands_of_library_calls_share_the_workspace() -> None:
    inputs = (R(128, 128).double(), R(128, 128).double() / 128)  # products that share no kernel
    plan, schedule, program = planned(blocks, *inputs)
    _, total = plan.arenas["cpu"].offsets({})
    results = [n for s in schedule.steps if isinstance(s, Extern) for n in s.names if n]
    assert len(results) == 8
    # Two to four 128 KiB tensors live at once, whatever the number of blocks.
    assert total <= 5 * 128 * 128 * 8
    outputs = {plan.home.get(o.tensor or "", o.tensor) for o in program.outputs}
    assert set(plan.buffers) == outputs


def test_results_are_not_in_the_workspace() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x.softmax(-1).cumsum(0)
        z = y.cumsum(1)
        return z, z.T, (y * 2).sort().values

    plan, _, program = planned(f, R(8, 8))
    for o in program.outputs:
        assert o.tensor is not None
        assert plan.home.get(o.tensor, o.tensor) not in plan.slot


def chained(f: Callable[..., Any], *args: Any) -> dict[str, str]:
    """Without fusion: who overwrites whom."""
    plan, schedule, _ = planned(f, *args, fusion=False)
    names = {n for s in schedule.steps if isinstance(s, Kernel) for n, _ in s.writes}
    return {n: r for n, r in plan.home.items() if n in names}


def test_a_dying_operand_is_overwritten() -> None:
    assert chained(lambda x: (x + 1).sin().exp(), R(8, 8)) == {"sin": "add", "exp": "add"}


def test_what_lives_on_is_not_overwritten() -> None:
    def f(x: Tensor) -> Tensor:
        a = x + 1
        return a.sin() * a

    assert chained(f, R(8, 8)) == {"mul": "sin"} or chained(f, R(8, 8)) == {"mul": "add"}


def test_other_layouts_are_not_overwritten() -> None:
    assert "exp" not in chained(lambda x: (x + 1).T.contiguous().exp().T, R(8, 8)).get("clone", "")
    assert chained(lambda x: (x + 1).T.exp().contiguous(), R(8, 4)).get("exp") is None
    assert chained(lambda x: (x + 1).sum(0) + 1, R(8, 8)).get("sum_1") is None
    assert chained(lambda x: (x + 1).to(torch.float64) * 2, R(8, 8)).get("_to_copy") is None
    assert chained(lambda x: (x + 1).flip(0).sin(), R(8, 8)).get("sin") in (None, "flip")


def test_reads_elsewhere_forbid_overwriting() -> None:
    """Every point reads its neighbour too."""
    reused = chained(lambda x: (y := x + 1) + y.roll(1, 0), R(8, 8))
    assert reused.get("add_1") is None or reused["add_1"] == "roll"


def test_a_row_value_is_not_written_over_another() -> None:
    """All threads that have a part of the row read what one of them would overwrite."""
    for f, allowed in (
        (lambda x, m: (x - m[:, None]).square().sum(1), False),
        (lambda x, m: m.square() + 1, True),
    ):
        _, schedule, program = planned(f, R(8, 64), R(8))
        (kernel,) = schedule.steps
        assert isinstance(kernel, Kernel)
        (written,) = (n for n, _ in kernel.writes)
        (read,) = (n for n, lay in kernel.reads if len(lay.shape) == 1)
        assert overwritable(kernel, written, read, schedule.layouts) == allowed


def test_what_is_stored_before_a_reduction_is_not_written_over_what_that_reads() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = x * 2
        return z, (z * y).sum(1)

    _, schedule, _ = planned(f, R(8, 64), R(8, 64))
    (kernel,) = schedule.steps
    assert isinstance(kernel, Kernel)
    (written,) = (n for n, lay in kernel.writes if len(lay.shape) == 2)
    own, other = (n for n, _ in kernel.reads)
    assert overwritable(kernel, written, own, schedule.layouts)
    assert not overwritable(kernel, written, other, schedule.layouts)


def test_inputs_are_never_overwritten() -> None:
    plan, _, program = planned(lambda x: x + 1, R(8, 8))
    assert not plan.home
    assert not plan.slot
    assert len(program.outputs) == 1


def peak(plan: MemoryPlan, schedule: Schedule) -> int:
    """Bytes in use at most, besides inputs."""
    nbytes = {n: lay.nbytes_hint for n, lay in schedule.layouts.items()}
    results = {n for s in schedule.steps if isinstance(s, Extern) for n in s.names if n}
    own: set[str] = set()
    live = most = 0
    for k, step in enumerate(schedule.steps):
        own |= {n for n, first in plan.buffers.items() if first == k}
        if isinstance(step, Extern):
            own |= {n for n in step.names if n and n not in plan.slot and n in results}
        live += sum(a.offsets({})[1] for a in plan.arenas.values() if a.first == k)
        most = max(most, live + sum(nbytes[n] for n in own))
        own -= set(plan.dies.get(k, ()))
        live -= sum(plan.arenas[d].offsets({})[1] for d in plan.spaces.get(k, ()))
    return most


def test_large_tensors_leave_the_workspace_where_that_lowers_the_peak() -> None:
    """Large intermediates die before library calls allocate as much."""
    mega = 512 * 512 * 4

    def f(x: Tensor, w: Tensor) -> Tensor:
        a = ((x @ w).sin() @ w).cos() @ w
        y = torch.sort(a).values  # holds two results of 1 and 2 MiB
        z = torch.sort(y * x).values
        return (torch.sort(z + 1).values @ w).sum()

    plan, schedule, _ = planned(f, R(512, 512) / 8, R(512, 512) / 8)
    assert peak(plan, schedule) <= 4 * mega


def test_memory_of_dead_library_results_is_let_go() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.sort(x + 1).values
        return x.sum()

    plan, schedule, _ = planned(f, R(256, 256))
    gone = {n for names in plan.dies.values() for n in names}
    for s in schedule.steps:
        if isinstance(s, Extern):
            assert {n for n in s.names if n} <= gone
