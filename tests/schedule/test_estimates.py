"""What is estimated of arithmetic before and behind products, and how little of it is generated."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.base.device import DeviceSpec, named_gpu
from deuteron.codegen.triton.generate import generate
from deuteron.schedule import contract
from deuteron.schedule.kernel import Kernel
from deuteron.schedule.tile import candidates, repeated
from deuteron.schedule.tiling import Tiling
from tests.schedule.planning import planned


def gelu_before(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.gelu(x), w, b)


def gelu_behind(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def h200() -> DeviceSpec:
    spec = named_gpu("H200")
    assert spec is not None
    return spec


def planned_linear(f: Callable[..., Tensor], m: int, k: int, n: int) -> list[Kernel]:
    shapes = (m, k), (n, k), (n,)
    args = [torch.empty(*s, dtype=torch.bfloat16) for s in shapes]
    with torch.no_grad():
        return planned(f, *args, device="H200", run=False).contractions


def tilings(kernel: Kernel) -> list[Tiling]:
    assert kernel.contraction is not None
    layouts = dict(kernel.reads) | dict(kernel.writes)
    return [t for t, _ in candidates(kernel.contraction[0], layouts, h200())]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel whatever is estimated."""
    monkeypatch.setattr(contract, "MIN_GAIN", -math.inf)


def test_a_factor_that_is_computed_is_made_by_all_warps_together(always: None) -> None:
    (kernel,) = planned_linear(gelu_before, 512, 256, 128)
    assert kernel.contraction is not None
    nest = kernel.contraction[0]
    (s,) = nest.reductions.values()
    c = nest.contraction(s)
    assert c is not None and (c.a.op, c.b.op) == ("mul", "cast")
    for tiling in tilings(kernel):
        places = [tiling.dims.index(tiling.dim_of(axes[0])) for axes in (c.m, c.n)]
        assert places[0] > places[1], "it is the right one, which is in shared memory"
        if tiling.dims[places[1]].block >= 64:
            assert repeated(nest, tiling, s, h200())[0] == 1.0


def test_warps_beside_one_another_compute_a_left_factor_again(always: None) -> None:
    (kernel,) = planned_linear(gelu_behind, 512, 256, 512)
    assert kernel.contraction is not None
    nest = kernel.contraction[0]
    (s,) = nest.reductions.values()
    found = {}
    for t in tilings(kernel):
        rows, columns = (d.block for d in t.dims if d.mode == "grid")
        found[rows, columns, t.num_warps] = repeated(nest, t, s, h200())
    assert found[128, 256, 8] == (1.0, 1.0), "eight warps below one another"
    assert found[64, 256, 4] == (1.0, 1.0)
    assert found[32, 64, 4] == (2.0, 2.0), "two by two, by smaller instructions"
    assert found[16, 64, 4] == (4.0, 1.0)


@pytest.mark.parametrize(
    "f,m,k,n,kernels",
    [
        (gelu_before, 4096, 3072, 768, 0),  # H200: 107 us in one kernel, 45 apart
        (gelu_before, 6272, 1024, 128, 0),  # 28 and 14
        (gelu_behind, 1568, 320, 1280, 1),  # 6.7 and 8.6
    ],
)
def test_what_is_measured_is_chosen(
    f: Callable[..., Tensor], m: int, k: int, n: int, kernels: int
) -> None:
    assert len(planned_linear(f, m, k, n)) == kernels


@pytest.mark.parametrize("f", [gelu_before, gelu_behind])
def test_one_and_an_error_function_are_one_function(f: Callable[..., Tensor], always: None) -> None:
    (kernel,) = planned_linear(f, 512, 256, 512)
    text = generate(kernel, h200()).source
    assert "libm.erfc_fast(" in text and "libm.erf(" not in text
