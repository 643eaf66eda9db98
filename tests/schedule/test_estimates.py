"""What is estimated of arithmetic before and behind products, and how little of it is generated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.base.device import DeviceSpec, named_gpu
from deuteron.base.options import Options
from deuteron.codegen.triton.generate import generate
from deuteron.ir.index import Axis, const
from deuteron.runtime.build_triton import build
from deuteron.schedule import contract
from deuteron.schedule.kernel import Kernel
from deuteron.schedule.lanes import scattered
from deuteron.schedule.tile import candidates, repeated
from deuteron.schedule.tiling import Dim, Tiling
from tests.codegen.cubins import resources
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


def patches(x: Tensor, w: Tensor) -> Tensor:
    """Windows side by side of images whose channels lie last; weights whose channels do not."""
    b, h, _, c = x.shape
    windows = x.view(b, h // 4, 4, h // 4, 4, c).permute(0, 1, 3, 2, 4, 5)
    return windows.reshape(-1, 16 * c) @ w.permute(2, 3, 1, 0).reshape(16 * c, -1)


def test_lanes_that_read_lines_of_their_own_take_their_time() -> None:
    """H200: 123 us in one kernel, whose weights lie 32 bytes apart along the sum; 8 apart."""
    args = torch.empty(8, 28, 28, 128).bfloat16(), torch.empty(128, 128, 4, 4).bfloat16()
    with torch.no_grad():
        plan = planned(patches, *args, device="H200", run=False)
    read = {tuple(lay.shape) for k in plan.contractions for _, lay in k.reads}
    assert not any(len(shape) == 4 and shape[2] == shape[3] for shape in read), "w is copied first"


def test_lanes_share_a_line_where_neighbours_do() -> None:
    i, k = Axis("i", const(64)), Axis("k", const(128))
    c, w = Axis("c", const(32)), Axis("w", const(4))
    tiling = Tiling((Dim("i", (i,), "grid", 64), Dim("k", (k,), "loop", 32)), 4, 3)
    assert scattered(tiling, {i: 128, k: 1}, 2) == pytest.approx(1 / 32 - 2 / 128)
    assert scattered(tiling, {i: 128, k: 1}, 4) == 0.0
    assert scattered(tiling, {i: 1, k: 512}, 2) == pytest.approx(0.0)
    assert scattered(tiling, {i: 512, k: 4}, 2) == 1 - 2 / 128
    assert scattered(tiling, {i: 512, k: None}, 2) == 1 - 2 / 128
    assert scattered(tiling, {}, 4) == 0.0
    both = Tiling((Dim("i", (i,), "grid", 1), Dim("k", (w, c), "loop", 64)), 4, 3)
    assert scattered(both, {i: 9, w: 32, c: 1}, 2) == 0.0  # one goes on where the other ends
    assert scattered(both, {i: 9, w: 1, c: 4}, 2) == 1 - 2 / 128
    assert scattered(both, {i: 9, w: 5}, 2) == pytest.approx(1 / 32 - 2 / 128)  # the same for all


def scores_with_places(x: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """As windows of images have it: a bias by where two pixels lie to one another."""
    n = index.shape[0]
    return torch.softmax(x + table[index.view(-1)].view(n, n, -1).permute(2, 0, 1), -1)


@pytest.mark.parametrize("batch,kernels", [(512, 2), (1, 1)])
def test_what_many_rows_gather_is_gathered_once(batch: int, kernels: int) -> None:
    """H200, 8 images of 384 x 384: 218 us, and 116 with 11 for the bias."""
    args = torch.empty(batch, 4, 49, 49), torch.empty(169, 4), torch.zeros(49, 49).long()
    with torch.no_grad():
        assert len(planned(scores_with_places, *args, device="H200", run=False).kernels) == kernels


def f32_chain(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.gelu(x @ w) @ v


def f32_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1) @ v


@pytest.mark.parametrize(
    "f,shapes",
    [
        (gelu_before, ((1024, 128), (32, 128), (32,))),
        (f32_chain, ((1024, 64), (64, 128), (128, 32))),
        (f32_attention, ((8, 256, 64), (8, 256, 64), (8, 256, 64))),
    ],
)
def test_products_on_the_f32_units_keep_to_their_registers(
    f: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], always: None, tmp_path: Path
) -> None:
    """A model's GELU before a product of 128 took 254 us, 20 where it did not spill."""
    with torch.no_grad():
        plan = planned(f, *(torch.empty(*s) for s in shapes), device="H200", run=False)
    options = Options.make(options={"cache_dir": str(tmp_path)})
    assert plan.contractions
    for kernel in plan.contractions:
        for tiling in tilings(kernel)[:2]:
            assert kernel.contraction is not None
            tiled = replace(kernel, contraction=(kernel.contraction[0], tiling))
            code = generate(tiled, h200())
            binary = build(code, code.configs[0], 90, options)
            _, local = resources(binary.code, tmp_path)
            assert local <= 64, f"{tiling}: {local} bytes of a thread are spilled"
