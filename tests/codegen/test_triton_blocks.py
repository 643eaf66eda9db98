"""Blocks are powers of two, whatever is written out beside them, and have room on chip."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from deuteron.base.device import named_gpu
from deuteron.base.options import Options
from deuteron.base.passes import Context
from deuteron.codegen.triton.generate import generate
from deuteron.lower.passes import lower
from deuteron.runtime.build_triton import build
from deuteron.schedule import schedule
from deuteron.schedule.kernel import Kernel
from tests.codegen.misaligned_programs import gradients, norm_back
from tests.lower.harness import trace
from tests.schedule.tools import scheduled, spec_of


@pytest.mark.parametrize("copies", [3, 5, 7])
def test_of_points_that_are_stored_several_times(copies: int) -> None:
    spec = named_gpu("H200")
    assert spec is not None

    def f(x: Tensor) -> Tensor:
        return torch.select_scatter(x, x[0].exp(), 1, 2)

    gm = trace(f, [torch.randn(1, 5, 5).expand(copies, 5, 5)])
    plan = schedule(lower(gm, Context()), Context(specs=lambda _: spec))
    kernels = [k for k in plan.steps if isinstance(k, Kernel)]
    assert kernels
    for kernel in kernels:
        for config in generate(kernel, spec).configs:
            assert all(n & (n - 1) == 0 for _, n in config.constexprs), config


@pytest.mark.parametrize("rows", [64, 1024])
def test_pipelines_have_room(rows: int, tmp_path: Path) -> None:
    """Three stages of what six tensors of float64 give take 384 KB; a program gets 227 KB."""
    xs = [torch.empty(rows, 40_000, dtype=torch.float64) for _ in range(6)]

    def f(*xs: Tensor) -> Tensor:
        return (xs[0] * xs[1] + xs[2] * xs[3] + xs[4] * xs[5]).sum(-1)

    options = Options.make(options={"cache_dir": str(tmp_path)})
    plan = scheduled(f, *xs, device="H200", check=False)
    for kernel in (generate(k, spec_of("H200"), Context(options)) for k in plan.kernels):
        for config in kernel.configs:
            assert build(kernel, config, 90, options).shared <= 227 << 10


def test_loops_over_gathered_rows_are_pipelined(tmp_path: Path) -> None:
    """Threads meet before a row's value is stored only where another of its size may lie there."""

    def f(table: Tensor, places: Tensor, grad: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        x = table[places] * scale
        total = (x * grad.float()).sum(1, keepdim=True)
        return total, (grad.float() - x * total).to(grad.dtype), (grad.float() * x).sum(0)

    half = torch.bfloat16
    args = (
        torch.randn(500, 768, dtype=half),
        torch.randint(0, 500, (16384,)),
        torch.randn(16384, 768, dtype=half),
        torch.randn(16384, 1, dtype=half),
    )
    spec = named_gpu("H200")
    assert spec is not None
    gm = trace(f, args)
    program = lower(gm, Context(like="cuda"))
    steps = schedule(program, Context(specs=lambda _: spec)).steps
    kernel = next(k for k in steps if isinstance(k, Kernel) and k.nests[0].row_split is not None)
    made = generate(kernel, spec)
    assert "debug_barrier" not in made.source.split("tl.range")[1]
    binary = build(made, made.configs[0], 90, Options(cache_dir=str(tmp_path)))
    sizes = dict(made.configs[0].constexprs)
    assert binary.shared > 2 * 2 * 2 * sizes["XBLOCK"] * 768  # two of two blocks are on their way


@pytest.mark.parametrize("width", [3, 8, 12, 16, 64])
def test_programs_have_many_short_rows(width: int) -> None:
    """A GPU starts about one program in a cycle."""

    def f(x: Tensor) -> Tensor:
        return pad(x, (width - 1, 0)).unfold(-1, width, 1).softmax(-1)

    plan = scheduled(f, torch.empty(128, 16384), device="H200", check=False)
    (kernel,) = (generate(k, spec_of("H200")) for k in plan.kernels)
    for config in kernel.configs:
        assert math.prod(n for _, n in config.constexprs) >= 1024, config


@pytest.mark.parametrize(
    ("columns", "dtype", "alone"),
    [
        (128, torch.bfloat16, True),
        (256, torch.bfloat16, True),
        (512, torch.bfloat16, False),
        (768, torch.bfloat16, True),
        (768, torch.float32, False),
        (1024, torch.bfloat16, False),
        (1152, torch.bfloat16, True),
        (2560, torch.bfloat16, False),
    ],
)
def test_splits_of_one_warp(columns: int, dtype: torch.dtype, alone: bool, tmp_path: Path) -> None:
    """They skip what no row has, and have more rows on their way."""
    split_kernel = scheduled(
        norm_back, *gradients(columns, dtype, 16384), device="H200", check=False
    ).kernels[0]
    assert split_kernel.nests[0].row_split is not None
    kernel = generate(split_kernel, spec_of("H200"))
    first = kernel.configs[0]
    assert (first.num_warps == 1) == alone and len(kernel.configs) <= 4
    if alone:
        assert first.num_stages >= 4
        built = build(kernel, first, 90, Options(cache_dir=str(tmp_path)))
        assert 4 * built.shared <= 227 << 10  # splits of a multiprocessor


def test_what_a_thread_has_no_room_for() -> None:
    """Five tensors and two sums of rows of 1152 are 252 values of a warp's thread."""
    rows = [torch.randn(16384, 1152).bfloat16() for _ in range(5)]

    def f(*xs: Tensor) -> tuple[Tensor, ...]:
        x = xs[0].float() * xs[1] + xs[2].float() * xs[3]
        return (x - x.mean(-1, keepdim=True) * xs[4]).bfloat16(), x.sum(0), (x * xs[4]).sum(0)

    kernel = scheduled(f, *rows, device="H200", check=False).kernels[0]
    assert kernel.nests[0].row_split is not None
    assert generate(kernel, spec_of("H200")).configs[0].num_warps > 1
