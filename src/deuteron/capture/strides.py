"""Rules for operators whose traced strides are not eager's.

In: an operator's rule, or none. Out: a rule whose results have the strides that eager's kernels
give: torch's own rules and fake kernels are wrong about them where inputs are permuted. Where they
are right nothing is added to the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Rule = Callable[..., Any]


def dense_format(x: Tensor) -> torch.memory_format:
    return torch._prims_common.suggest_memory_format(x)


def is_contiguous(x: Tensor) -> bool:
    """As far as that is known: of sizes that depend on data it may not be asked."""
    return torch._prims_common.is_contiguous_or_false(x)


def in_order(x: Tensor) -> bool:
    """Whether it is contiguous, with the usual strides also where there is one element: those
    decide the order of dimensions in which eager lays out a result."""
    if not all(type(s) is int for s in (*x.shape, *x.stride())):
        return is_contiguous(x)
    step = 1
    for n, s in zip(x.shape[::-1], x.stride()[::-1]):
        if s != step:
            return False
        step *= max(n, 1)
    return True


def in_format_of(out: Tensor, x: Tensor) -> Tensor:
    return out.contiguous(memory_format=dense_format(x))


def in_memory_format(rule: Rule) -> Rule:
    """Eager's result is contiguous, or channels last where the input is."""

    @wraps(rule)
    def wrapped(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = rule(x, *args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        moved = in_format_of(first, x)
        return (moved, *out[1:]) if isinstance(out, tuple) else moved

    return wrapped


def on_cpu(wrap: Callable[[Rule], Rule]) -> Callable[[Rule], Rule]:
    def both(rule: Rule) -> Rule:
        wrapped = wrap(rule)
        return wraps(rule)(
            lambda x, *args, **kwargs: (wrapped if x.device.type == "cpu" else rule)(
                x, *args, **kwargs
            )
        )

    return both


def ldexp(x: Tensor, n: Tensor) -> Tensor:
    """As eager composes it."""
    return x * aten.pow.Scalar(2.0, n)


def power_of_number(base: float, x: Tensor) -> Any:
    """Eager's result is contiguous, whatever the strides of `x`."""
    return NotImplemented if is_contiguous(x) else aten.pow.Scalar(base, x.contiguous())


def normal(mean: Tensor, std: Tensor, **kwargs: Any) -> Any:
    """Eager fills a contiguous tensor, whatever the parameters' strides."""
    if is_contiguous(mean) and is_contiguous(std):
        return NotImplemented
    return aten.normal.Tensor_Tensor(mean.contiguous(), std.contiguous(), **kwargs)


def resize_as(
    x: Tensor, other: Tensor, *, memory_format: torch.memory_format | None = None
) -> Tensor:
    """Eager leaves strides alone where nothing is resized."""
    if memory_format is None and x.shape == other.shape:
        return x.clone()
    return aten.resize.default(x, other.shape, memory_format=memory_format)


def as_strided_scatter(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Eager's copy of an expanded tensor is contiguous; torch's fake kernel repeats the strides."""
    if not any(type(s) is int and s == 0 for s in x.stride()) or is_contiguous(x):
        return NotImplemented
    return aten.as_strided_scatter.default(x.contiguous(), *args, **kwargs)


def unique_dim(x: Tensor, dim: int, *args: Any, **kwargs: Any) -> Any:
    """Eager compares slices moved to the front, and moves them back."""
    dim = dim % max(x.dim(), 1)
    if dim == 0 or x.device.type != "cpu":
        return NotImplemented
    out, *rest = aten.unique_dim.default(x.movedim(dim, 0), 0, *args, **kwargs)
    return (out.movedim(0, dim), *rest)


def unique_consecutive(
    x: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Along a dimension torch's fake kernel gives sizes and strides that do not fit each other."""
    if dim is None or x.dim() == 0 or dim == 0:
        return NotImplemented
    if x.device.type != "cpu":
        return (
            aten.unique_consecutive.default(x, return_inverse, return_counts, dim % x.dim())
            if (dim < 0)
            else NotImplemented
        )
    moved = x.movedim(dim, 0)
    out, *rest = aten.unique_consecutive.default(moved, return_inverse, return_counts, 0)
    return (out.movedim(0, dim), *rest)


RULES: dict[str, Rule] = {
    "aten.unique_consecutive.default": unique_consecutive,
    "aten.ldexp.Tensor": ldexp,
    "aten.pow.Scalar": power_of_number,
    "aten.normal.Tensor_Tensor": normal,
    "aten.resize_as.default": resize_as,
    "aten.unique_dim.default": unique_dim,
    "aten.as_strided_scatter.default": as_strided_scatter,
}
