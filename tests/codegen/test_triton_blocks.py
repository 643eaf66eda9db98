"""Blocks are powers of two, whatever is written out beside them, and have room on chip."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import deuteron.schedule as scheduling
from deuteron.base.device import named_gpu
from deuteron.base.options import Options
from deuteron.base.record import Record
from deuteron.codegen.triton.generate import generate
from deuteron.lower.graph import lower
from deuteron.runtime.build_triton import build
from deuteron.schedule.kernel import Kernel
from tests.lower.harness import trace
from tests.schedule.tools import scheduled, spec_of


@pytest.mark.parametrize("copies", [3, 5, 7])
def test_of_points_that_are_stored_several_times(
    copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = named_gpu("H200")
    assert spec is not None
    monkeypatch.setattr(scheduling, "device_spec_for", lambda device, options: spec)

    def f(x: Tensor) -> Tensor:
        return torch.select_scatter(x, x[0].exp(), 1, 2)

    gm = trace(f, [torch.randn(1, 5, 5).expand(copies, 5, 5)])
    found = scheduling.schedule(lower(gm, Record()), Options.make(), Record())
    kernels = [k for k in found.steps if isinstance(k, Kernel)]
    assert kernels
    for kernel in kernels:
        for config in generate(kernel, spec, Options()).configs:
            assert all(n & (n - 1) == 0 for _, n in config.constexprs), config


@pytest.mark.parametrize("rows", [64, 1024])
def test_pipelines_have_room(rows: int, tmp_path: Path) -> None:
    """Three stages of what six tensors of float64 give take 384 KB; a program gets 227 KB."""
    xs = [torch.empty(rows, 40_000, dtype=torch.float64) for _ in range(6)]

    def f(*xs: Tensor) -> Tensor:
        return (xs[0] * xs[1] + xs[2] * xs[3] + xs[4] * xs[5]).sum(-1)

    options = Options.make(options={"cache_dir": str(tmp_path)})
    found = scheduled(f, *xs, device="H200", check=False)
    for kernel in (generate(k, spec_of("H200"), options) for k in found.kernels):
        for config in kernel.configs:
            assert build(kernel, config, 90, options).shared <= 227 << 10
