"""What rounding may do to the values of a reference.

In: tensors, or a computation by ATen's operators that runs inside `Roundings`. Out: the same with
each number moved by a unit in the last place. Which way follows from the number's own bits: what is
computed twice moves alike, so a maximum stays one of the numbers that it is the maximum of.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

# Operators that choose or move elements, or give them away: nothing is rounded.
MOVING_NAMES = """
clone copy_ _to_copy cat stack index index_select gather take embedding where roll flip
constant_pad_nd reflection_pad1d replication_pad1d max min amax amin aminmax cummax cummin sort
topk maximum minimum fmax fmin relu clamp clamp_min clamp_max threshold abs neg sign sgn floor
ceil round trunc frac copysign nan_to_num masked_fill index_fill index_put scatter slice_scatter
select_scatter tril triu diag_embed repeat arange full full_like zeros zeros_like ones ones_like
new_zeros new_full empty empty_like empty_strided new_empty new_empty_strided rand rand_like randn
randn_like bernoulli scalar_tensor lift_fresh max_pool2d_with_indices slice_backward
select_backward index_select_backward bucketize
"""
EXACT_OPERATORS = frozenset(MOVING_NAMES.split())
# Those whose results are moved as far as what they get is.
SCALING_OPERATORS = frozenset(["mul", "div", "reciprocal", "sqrt", "rsqrt"])
# Integers of as many bytes as a number has, and odd factors: the first bit of a number's bits times
# the factor depends on all of them.
BITS = {
    1: (torch.int8, 0x35),
    2: (torch.int16, 0x79B1),
    4: (torch.int32, 0x9E3779B1 - (1 << 32)),
    8: (torch.int64, 0x9E3779B97F4A7C15 - (1 << 64)),
}


def way(t: Tensor) -> Tensor:
    """1 or -1 for each number, as integers of its size."""
    kind, factor = BITS[t.itemsize]
    return (t.view(kind) * factor).bitwise_right_shift_(8 * t.itemsize - 1).bitwise_or_(1)


def inexact(t: Tensor) -> Tensor:
    """Where numbers may have been rounded: they are not whole, or so large that all are."""
    out = t.trunc() != t
    large = 1 / torch.finfo(t.dtype).eps
    low, high = (float(x) for x in t.aminmax()) if t.numel() else (0.0, 0.0)
    if low > -large and high < large:
        return out
    size = t.abs()
    return (out | (size >= large)) & (size < torch.finfo(t.dtype).max)


def moved(t: Tensor) -> Tensor:
    """Each floating number that may have been rounded, moved by a unit in its last place."""
    if not t.dtype.is_floating_point:
        return t
    kind, _ = BITS[t.itemsize]
    step = way(t).mul_(inexact(t.float() if t.itemsize == 1 else t))
    return step.add_(t.view(kind)).view(t.dtype)


def moved_sum(total: Tensor, size: Tensor, terms: Tensor) -> Tensor:
    """A sum or mean moved by a unit in the last place of `size`, that of the terms' magnitudes: in
    another order they are rounded otherwise."""
    if terms.numel() == total.numel():
        return total
    eps = torch.finfo(torch.float32 if terms.itemsize < 4 else terms.dtype).eps
    other = (total.double() + way(total) * (eps * size.double())).to(total.dtype)
    return torch.where((inexact(total) | inexact(size)) & other.isfinite(), other, total)


@cache
def name_of(func: Any) -> str:
    return str(func.overloadpacket._qualified_op_name).removeprefix("aten::")


@cache
def rounds(func: Any) -> bool:
    """Whether an operator's results differ by more than what it gets."""
    shares = any(r.alias_info is not None for r in func._schema.returns)
    return not shares and name_of(func) not in EXACT_OPERATORS | SCALING_OPERATORS


class Roundings(TorchDispatchMode):
    """Moves what operators compute. Half types stay as they are: what is computed in them is
    computed in float32, and where that is rounded the program says."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = name_of(func)
        if name == "_to_copy":  # references add in float64
            narrows = args[0].dtype is torch.float64 and out.dtype is torch.float32
            return moved(out) if narrows else out
        if not rounds(func):
            return out
        if name in ("sum", "mean", "cumsum") and args[0].dtype.is_floating_point:
            return moved_sum(out, func(args[0].abs(), *args[1:], **kwargs), args[0])
        if name == "var_mean":
            size = func(args[0].abs(), *args[1:], **kwargs)[1]
            return result(out[0]), moved_sum(out[1], size, args[0])
        return tree_map_only(Tensor, result, out)


def result(t: Tensor) -> Tensor:
    return moved(t) if t.dtype in (torch.float32, torch.float64) else t


__all__ = ["EXACT_OPERATORS", "Roundings", "moved"]
