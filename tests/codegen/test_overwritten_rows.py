"""What a row has one of and a program overwrites, where several programs share the row: each of
them reads it, and another may have stored by then."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deuteron.base.device import named_gpu
from deuteron.codegen.triton.generate import generate
from deuteron.codegen.triton.kernel import TritonKernel
from tests.schedule.planning import planned

Program = Callable[[Tensor, Tensor, Tensor], Tensor]


def statistics(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.silu(F.batch_norm(x, mean, var, training=True))


WEIGHT, BIAS = torch.randn(64), torch.randn(64)


def affine(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Weights lie as the statistics do, in memory of their own."""
    return F.silu(F.batch_norm(x, mean, var, WEIGHT, BIAS, training=True))


def away_from_the_last(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """The elements need what the statistics were before, too."""
    y = F.batch_norm(x, mean.clone(), var.clone(), training=True)
    out = y - mean[:, None, None]
    mean.copy_(mean * 0.9 + x.mean((0, 2, 3)) * 0.1)
    return out


def kernels(f: Program) -> list[TritonKernel]:
    """Those of a program with 64 rows of 131072 elements, which overwrite something."""
    spec = named_gpu("H200")
    assert spec is not None
    inputs = torch.randn(8, 64, 128, 128), torch.randn(64), torch.rand(64)
    plan = planned(f, *inputs, run=False)
    return [generate(k, spec) for k in plan.kernels if k.overwrites]


@pytest.mark.parametrize("f", [statistics, affine])
def test_one_program_stores_what_a_row_has_one_of(f: Program) -> None:
    shared = [k for k in kernels(f) if k.programs_per_row > 1]
    assert shared
    for k in shared:
        stored = re.findall(r"tl\.store\((\w+) \+ \(xindex\), .*\)", k.source)
        alone = re.findall(r"tl\.store\((\w+) \+ \(xindex\), .*, rank == 0\)", k.source)
        assert stored == alone
        assert sum(name.endswith("new_ptr") for name in alone) >= 2, "running mean and variance"


def test_what_elements_need_is_not_overwritten_by_another_program() -> None:
    seen = 0
    for k in kernels(away_from_the_last):
        reads = re.findall(r"tl\.load\((\w+) \+ \(xindex\)\)", k.source)
        rows = re.findall(r"tl\.store\((\w+) \+ \(xindex\)", k.source)
        if any(f"{name.removesuffix('_ptr')}_new_ptr" in rows for name in reads):
            assert k.programs_per_row == 1
            seen += 1
    assert seen, "a kernel reads what it overwrites"
