"""Kernels that wait for another one that they may join."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import deuteron.schedule as scheduling
from deuteron.base.passes import Context
from deuteron.base.record import Record
from deuteron.codegen.triton.generate import generate
from deuteron.lower.passes import lower
from deuteron.schedule.kernel import Kernel
from deuteron.schedule.verify import verify_schedule
from tests.codegen.misaligned_programs import norm_back
from tests.lower.harness import trace
from tests.schedule.planning import planned
from tests.schedule.tools import Scheduled, scheduled, spec_of


def gradients(
    dy: Tensor, table: Tensor, w: Tensor, mean: Tensor, rest: Tensor, places: Tensor
) -> tuple[Tensor, ...]:
    """Of a norm of rows at places of a table: the table's, and the norm's weights'."""
    dx, dw, db = norm_back(dy, table[places], w, mean, rest)
    return torch.zeros_like(table).index_put((places,), dx, accumulate=True), dw, db


def test_short_kernels_wait() -> None:
    """Sums of columns are done, by the norm's gradient, long before the places have been ranked:
    they run beside a later kernel that has no more to compute than they."""
    torch.manual_seed(0)
    half, rows, size, columns = torch.bfloat16, 8192, 3000, 64
    args = [
        torch.randn(rows, columns).to(half),
        torch.randn(size, columns).to(half),
        torch.randn(columns).to(half),
        torch.randn(rows, 1),
        torch.rand(rows, 1),
        torch.randint(0, size, (rows,)),
    ]
    gm, record = trace(gradients, args), Record()
    program = lower(gm, Context(record=record, like="cuda"))
    plan = scheduling.schedule(program, Context(record=record, specs=lambda _: spec_of("H200")))
    verify_schedule(plan, program)
    outcome = Scheduled(program, plan, record)
    kernels = [s for s in plan.steps if isinstance(s, Kernel)]
    sums = next(k for k, step in enumerate(kernels) if len(step.nests) >= 3)
    assert sums >= 2 and len(kernels[1].nests) == 1  # behind ranks, with others
    stored = {name for name, _ in kernels[sums].writes}
    assert any({d["first"], d["second"]} <= stored for d in outcome.accepted("horizontal"))
    for got, expected in zip(outcome.run(args), gradients(*args), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-1)


def test_cooperative_rows_have_a_kernel_of_their_own() -> None:
    x, y = torch.empty(2048, 131072, dtype=torch.bfloat16), torch.empty(4096)
    for f in (lambda x, y: (x.softmax(-1), y + 1), lambda x, y: (y + 1, x.softmax(-1))):
        kernels = scheduled(f, x, y, device="H200", check=False).kernels
        made = [generate(k, spec_of("H200")) for k in kernels]
        assert sorted(k.programs_per_row for k in made) == [1, 16]


def test_what_is_tiny_runs_early() -> None:
    """Numbers that follow from parameters: beside the first kernel that is as short, past a call;
    what needs the call stays behind it."""

    def f(x: Tensor, w: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
        y = torch.mm(torch.relu(x), w)
        scale = (variance + 1e-5).rsqrt()
        return scale, torch.mm(y, w), y[0].cos()

    args = [torch.randn(512, 2048), torch.randn(2048, 2048), torch.rand(3000)]
    plan = planned(f, *args, device="H200")
    [steps] = [s.steps for s in plan.schedules]
    made = [{n for n, _ in s.writes} if isinstance(s, Kernel) else None for s in steps]
    assert made == [{"relu", "rsqrt"}, None, None, {"cos"}]
    for got, wanted in zip(plan.results, f(*args), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-2)
