"""Variances over short runs of memory: values, and which are taken apart."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from deuteron.base.record import Record
from deuteron.graph.runs import long_dimensions_first
from tests.capture.helpers import same

VAR_MEAN = torch.ops.aten.var_mean.correction


def taken_apart(x: Tensor, dims: list[int], **kwargs: Any) -> tuple[list[Tensor], bool]:
    """Results after the rewrite, and whether it took place."""
    graph = fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = x
    both = graph.call_function(VAR_MEAN, (given, dims), kwargs)
    both.meta["val"] = VAR_MEAN(x, dims, **kwargs)
    parts = []
    for k in (0, 1):
        part = graph.call_function(operator.getitem, (both, k))
        part.meta["val"] = both.meta["val"][k]
        parts.append(part)
    graph.output(tuple(parts))
    gm = fx.GraphModule({}, graph)
    count = long_dimensions_first(gm, Record())
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return list(gm(x)), count > 0


def groups(n: int, g: int, each: int, pixels: int, dtype: torch.dtype) -> Tensor:
    """[n, g, each, pixels] of an image that lies channels last, far from 0."""
    return (torch.randn(n, pixels, g, each, dtype=dtype) + 100).permute(0, 2, 3, 1)


@pytest.mark.parametrize("correction", (0, 1, None, 3))
@pytest.mark.parametrize("keepdim", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_values(correction: int | None, keepdim: bool, dtype: torch.dtype) -> None:
    x = groups(3, 5, 4, 77, dtype)
    got, apart = taken_apart(x, [2, 3], correction=correction, keepdim=keepdim)
    assert apart
    want = VAR_MEAN(x.double(), [2, 3], correction=correction, keepdim=keepdim)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "x,dims",
    [
        (groups(2, 4, 16, 100, torch.float32), [2, 3]),  # long runs
        (groups(2, 4, 4, 20, torch.float32), [2, 3]),  # little between two elements of a run
        (groups(2, 4, 4, 100, torch.float32).contiguous(), [2, 3]),
        (groups(2, 4, 4, 100, torch.float32), [1, 2, 3]),  # the run goes on
    ],
)
def test_what_stays(x: Tensor, dims: list[int]) -> None:
    _, apart = taken_apart(x, dims, correction=0, keepdim=True)
    assert not apart


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_group_norms_channels_last(dtype: torch.dtype) -> None:
    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.silu(F.group_norm(x, 8, w, b))

    x = torch.randn(2, 32, 9, 11).to(dtype=dtype, memory_format=torch.channels_last)
    args = (x.requires_grad_(), *(torch.randn(32, dtype=dtype).requires_grad_() for _ in "wb"))
    same(f, *args, tolerance=1e-4 if dtype == torch.float32 else 5e-2)
