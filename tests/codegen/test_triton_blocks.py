"""Blocks are powers of two, whatever is written out beside them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import deuteron.schedule as scheduling
from deuteron.base.device import named_gpu
from deuteron.base.options import Options
from deuteron.base.record import Record
from deuteron.codegen.triton.generate import generate
from deuteron.lower.graph import lower
from deuteron.schedule.kernel import Kernel
from tests.lower.harness import trace


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
