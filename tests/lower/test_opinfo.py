"""PyTorch's own samples of operators that this package lowers: each lowers completely and gives
eager's values."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from deuteron.lower.core import Declined
from tests.lower.harness import clones, lowered, no_worse, same, tensors, trace

NAMES = """
    T adjoint as_strided_scatter atleast_1d atleast_3d block_diag broadcast_tensors broadcast_to
    bucketize cat cdist chunk clone column_stack constant_pad_nd contiguous cummax cummin cumprod
    cumsum cumulative_trapezoid diag diag_embed diagflat diagonal diagonal_copy diagonal_scatter
    diff dsplit dstack einsum expand expand_as expand_copy eye fill flatten flip fliplr flipud full
    full_like gather hsplit hstack index_add index_copy index_fill index_put index_reduce
    index_select kron linspace logspace masked_fill meshgrid movedim narrow_copy new_full new_ones
    new_zeros nn.functional.adaptive_avg_pool2d nn.functional.adaptive_max_pool2d
    nn.functional.avg_pool1d nn.functional.avg_pool2d nn.functional.avg_pool3d
    nn.functional.channel_shuffle nn.functional.embedding nn.functional.fold nn.functional.glu
    nn.functional.interpolate nn.functional.max_pool1d nn.functional.max_pool2d
    nn.functional.max_pool3d nn.functional.nll_loss nn.functional.pad nn.functional.pixel_shuffle
    nn.functional.pixel_unshuffle nn.functional.unfold nn.functional.upsample_bilinear
    nn.functional.upsample_nearest ones ones_like permute put ravel repeat repeat_interleave reshape
    reshape_as roll rot90 scatter scatter_add scatter_reduce searchsorted select select_scatter
    slice slice_scatter split split_with_sizes squeeze stack swapaxes t take_along_dim tensor_split
    tile trace transpose trapezoid tril triu unbind unflatten unfold unfold_copy unsafe_chunk
    unsafe_split unsqueeze vander view view_as view_copy vsplit vstack zeros zeros_like
"""
# Samples whose results are library calls for a stated reason, and those that no tracer takes.
REASONS = (
    "library",
    "known at run time only",
    "sorter",
    "whole",
    "size of the result",
    "or to nothing",
    "embedding_renorm",
)
SAMPLES = 6


def cases() -> list[Any]:
    out, names = [], set(NAMES.split())
    for op in op_db:
        if op.name in names:
            for dtype in (torch.float32, torch.int64, torch.bfloat16):
                if dtype in op.supported_dtypes("cpu"):
                    name = f"{op.name}-{op.variant_test_name}-{str(dtype)[6:]}".replace("--", "-")
                    out.append(pytest.param(op, dtype, id=name))
    return out


@pytest.mark.parametrize(("op", "dtype"), cases())
def test_samples(op: Any, dtype: torch.dtype) -> None:
    checked = 0
    for sample in islice(op.sample_inputs("cpu", dtype), SAMPLES):
        checked += one(op, sample, dtype)
    assert checked, "no sample was lowered"


def one(op: Any, sample: Any, dtype: torch.dtype) -> bool:
    flat, spec = tree_flatten(([sample.input, *sample.args], sample.kwargs))
    places = [k for k, x in enumerate(flat) if isinstance(x, torch.Tensor)]
    inputs = [flat[k].detach() for k in places]

    def f(*xs: Any) -> list[torch.Tensor]:
        mine = list(flat)
        for k, x in zip(places, xs, strict=True):
            mine[k] = x
        args, kwargs = tree_unflatten(mine, spec)
        return tensors([op.op(*args, **kwargs)])

    expected = f(*clones(inputs))
    try:
        low = lowered(trace(f, inputs))
    except (Declined, RuntimeError) as e:
        reason = str(e)
        if isinstance(e, Declined) and not any(r in reason for r in REASONS):
            raise
        return False
    got = low.run(*clones(inputs))
    if dtype != torch.bfloat16:
        for g, e in zip(got, expected, strict=True):
            same(g, e, 1e-5, 1e-5)
        return True
    exact = f(*(x.double() if x.dtype == dtype else x for x in clones(inputs)))
    for g, e, x in zip(got, expected, exact, strict=True):
        no_worse(g, e, x)
    return True
