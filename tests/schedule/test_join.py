"""Kernels that wait for another one that they may join."""

from __future__ import annotations

import torch
from torch import Tensor

import deuteron.schedule as scheduling
from deuteron.base.options import Options
from deuteron.base.record import Record
from deuteron.lower.graph import lower
from deuteron.schedule.kernel import Kernel
from deuteron.schedule.verify import verify_schedule
from tests.codegen.turned_rows import norm_back
from tests.lower.harness import trace
from tests.schedule.tools import Scheduled, spec_of


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
    program = lower(gm, record, like="cuda")
    plan = scheduling.schedule(program, Options.make(), record, spec_of("H200"))
    verify_schedule(plan, program)
    found = Scheduled(program, plan, record)
    kernels = [s for s in plan.steps if isinstance(s, Kernel)]
    sums = next(k for k, step in enumerate(kernels) if len(step.nests) >= 3)
    assert sums >= 2 and len(kernels[1].nests) == 1  # behind ranks, with others
    assert any(d["first"].startswith("_to_copy") for d in found.accepted("join"))
    for got, expected in zip(found.run(args), gradients(*args), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-1)
