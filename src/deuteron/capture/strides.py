"""Rules for operators whose traced strides are not eager's.

In: an operator's rule, or none. Out: a rule whose results have the strides that eager's kernels
give: torch's own rules and fake kernels are wrong about them where inputs are permuted. Where they
are right nothing is added to the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

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
    fixed = all(type(s) is int for s in (*x.shape, *x.stride()))
    return x.stride() == torch.empty(x.shape, device="meta").stride() if fixed else is_contiguous(x)


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


def one_layout(target: Any, rule: Rule | None) -> Rule:
    """Torch traces other strides than eager's for these where the operands' differ."""

    def wrapped(a: Any, b: Any, *rest: Any, **kwargs: Any) -> Any:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            same = a.shape == b.shape and a.stride() == b.stride()
            if not same and not (is_contiguous(a) and is_contiguous(b)):
                dtype = torch.result_type(a, b)
                order = torch._prims_common.compute_elementwise_output_logical_to_physical_perm
                shape = torch.broadcast_shapes(a.shape, b.shape)
                x, y = a.expand(shape), b.expand(shape)
                perm = list(order(x, y)[0])
                back = [perm.index(d) for d in range(len(perm))]
                a, b = (
                    t.to(dtype).permute(perm).clone(memory_format=torch.contiguous_format)
                    for t in (x, y)
                )
                a, b = a.permute(back), b.permute(back)
                return target(a, b, *rest, **kwargs)
        return NotImplemented if rule is None else rule(a, b, *rest, **kwargs)

    return wrapped


ONE_LAYOUT = (
    "aten.copysign.Tensor",
    "aten.floor_divide.default",
    "aten.div.Tensor_mode",
    "aten.logical_and.default",
    "aten.logical_or.default",
    "aten.logical_xor.default",
    "aten.xlogy.Tensor",
    "aten.special_xlog1py.default",
    "aten.heaviside.default",
    "aten.logaddexp.default",
    "aten.logaddexp2.default",
    "aten.logit_backward.default",
)


def less(a: Any, b: Any) -> bool:
    """As far as that is known of sizes."""
    return a < b if type(a) is int and type(b) is int else guard_or_false(a < b)


def repeated(t: Tensor) -> bool:
    """Whether a dimension was expanded."""
    return any(type(s) is int and s == 0 and n != 1 for n, s in zip(t.shape, t.stride()))


def memory_order(shape: Sequence[Any], strides: Sequence[Sequence[Any]]) -> list[int]:
    """The dimensions of a pointwise result, from the fastest on, for operands of these strides (0
    where they are broadcast). As eager sorts them: of two dimensions the first operand decides
    that has both and tells them apart."""

    def order(a: int, b: int) -> int:
        for s in strides:
            if type(s[a]) is int and s[a] == 0 or type(s[b]) is int and s[b] == 0:
                continue
            if less(s[a], s[b]):
                return -1
            if less(s[b], s[a]) or less(shape[b], shape[a]):
                return 1
        return 0

    out = list(range(len(shape)))[::-1]
    for i in range(1, len(out)):
        at = i
        for k in range(i - 1, -1, -1):
            found = order(out[k], out[at])
            if found > 0:
                out[k], out[at] = out[at], out[k]
                at = k
            elif found < 0:
                break
    return out


def dense_strides(t: Tensor) -> list[Any]:
    """Those of a copy of `t` that keeps its order."""
    step: Any = 1
    out: list[Any] = [0] * t.dim()
    for d in memory_order(t.shape, [t.stride()]):
        out[d] = step
        step = step * t.shape[d]
    return out


def over(shape: Sequence[Any], t: Tensor, strides: Sequence[Any]) -> list[Any]:
    """`strides` of `t` when it is broadcast to `shape`."""
    new = len(shape) - t.dim()
    return [0] * new + [
        0 if n == 1 and m != 1 else s for n, m, s in zip(t.shape, shape[new:], strides)
    ]


def given_strides(t: Tensor, operands: Sequence[Tensor]) -> Sequence[Any]:
    """What eager's loop sees: on the CPU a copy of what has not the common dtype."""
    common = torch.result_type(operands[0], operands[-1])
    return dense_strides(t) if t.device.type == "cpu" and t.dtype != common else t.stride()


def of_repeated(target: Any, rule: Rule | None) -> Rule:
    """Torch's rules and fake kernels compute in another dtype or in steps, and forget on the way
    which operands were expanded, of which eager asks nothing about the order of the result, and
    the strides of dimensions of one element, of which it does."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        alpha = kwargs.get("alpha", 1)  # a number that is not known is not asked about
        expanded = any(repeated(t) for t in tensors)
        stepped = (  # torch multiplies first; operands of one layout keep it
            (type(alpha) not in (int, float) or alpha != 1)
            and not all(map(in_order, tensors))
            and any(t.shape != tensors[0].shape for t in tensors)
        )
        if (expanded or stepped) and len(tensors) > 1:
            shape = torch.broadcast_shapes(*(t.shape for t in tensors))
            want = memory_order(shape, [over(shape, t, given_strides(t, tensors)) for t in tensors])
            seen = memory_order(shape, [over(shape, t, dense_strides(t)) for t in tensors])
            if expanded and rule is not None or stepped or want != seen:
                perm = want[::-1]
                back = [perm.index(d) for d in range(len(perm))]
                whole = [
                    t.expand(shape)
                    .permute(perm)
                    .clone(memory_format=torch.contiguous_format)
                    .permute(back)
                    for t in tensors
                ]
                rest = iter(whole)
                return target(*(next(rest) if isinstance(a, Tensor) else a for a in args), **kwargs)
        return NotImplemented if rule is None else rule(*args, **kwargs)

    return wrapped


OF_REPEATED = (
    *(
        f"aten.{n}.Tensor"
        for n in [
            "add",
            "sub",
            "mul",
            "div",
            "fmod",
            "remainder",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
        ]
    ),
    *("aten.clamp_max.Tensor", "aten.clamp_min.Tensor", "aten.pow.Tensor_Tensor"),
    *(
        f"aten.{n}.default"
        for n in ["atan2", "fmax", "fmin", "hypot", "igamma", "igammac", "maximum", "minimum"]
    ),
    *(f"aten.{n}_backward.default" for n in ["gelu", "sigmoid", "silu", "tanh"]),
)


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
