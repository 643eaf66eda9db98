"""Rules for operators whose traced strides are not eager's.

In: an operator's rule, or none. Out: a rule whose results have the strides that eager's kernels
give: torch's own rules and fake kernels are wrong about them where inputs are permuted. Where they
are right nothing is added to the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
Rule = Callable[..., Any]


def dense_format(x: Tensor) -> torch.memory_format:
    return torch._prims_common.suggest_memory_format(x)


def is_contiguous(x: Tensor) -> bool:
    """As far as that is known: of sizes that depend on data it may not be asked."""
    return torch._prims_common.is_contiguous_or_false(x)


def is_fixed(x: Tensor) -> bool:
    """Whether its sizes and strides are numbers."""
    return all(type(n) is int for n in (*x.shape, *x.stride()))


def same(a: Any, b: Any) -> bool:
    """Whether two sizes or strides are known to be equal, without a guard."""
    if type(a) is int and type(b) is int:
        return a == b
    return statically_known_true(a == b)


def is_one(n: Any) -> bool:
    """Of sizes that may change none is taken for 1: torch traces those that are 1 as numbers."""
    return type(n) is int and n == 1


def has_one(x: Tensor) -> bool:
    """Whether it has elements, and a dimension of one of them."""
    numbers = [n for n in x.shape if type(n) is int]
    return 1 in numbers and 0 not in numbers


def follow(shape: Sequence[Any], strides: Sequence[Any], order: Sequence[int]) -> bool:
    """Whether the dimensions of more than one element lie densely, in this order from the fastest
    on."""
    if any(type(n) is int and n == 0 for n in shape):
        return True
    step: Any = 1
    for d in order:
        if not is_one(shape[d]):
            if not same(strides[d], step):
                return False
            step = step * shape[d]
    return True


def steps_in(shape: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """The strides of a dense tensor whose dimensions have the given order in memory, innermost
    first."""
    step: Any = 1
    out: list[Any] = [0] * len(shape)
    for d in order:
        out[d] = step
        step = step * shape[d]
    return out


def in_order(x: Tensor) -> bool:
    """Whether it is contiguous, with the usual strides also where there is one element: those
    decide the order of dimensions in which eager lays out a result."""
    if not is_fixed(x) and not has_one(x):
        return is_contiguous(x)
    step: Any = 1
    for n, s in zip(x.shape[::-1], x.stride()[::-1]):
        if not same(s, step):
            return False
        step = step if type(n) is int and n == 0 else step * n
    return True


def is_dense(shape: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Whether the elements are known to fill their memory, each a place of its own."""
    left = [d for d, n in enumerate(shape) if not is_one(n)]
    step: Any = 1
    while left:
        d = next((d for d in left if same(strides[d], step)), None)
        if d is None:
            return False
        left.remove(d)
        step = step * shape[d]
    return True


# Operators that are being traced without their rule.
_AS_THEY_ARE: ContextVar[frozenset[Any]] = ContextVar("as_they_are", default=frozenset())


def as_it_is(target: Any, *args: Any, **kwargs: Any) -> Any:
    token = _AS_THEY_ARE.set(_AS_THEY_ARE.get() | {target})
    try:
        return target(*args, **kwargs)
    finally:
        _AS_THEY_ARE.reset(token)


def traced_as_it_is(target: Any) -> bool:
    return target in _AS_THEY_ARE.get()


def filled_format(x: Tensor) -> torch.memory_format:
    """Also channels last where `x` lies so, but strides of one element do not say it."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    for usual in (torch.contiguous_format, last) if last is not None and is_fixed(x) else ():
        if x.is_contiguous(memory_format=usual):
            return usual
    return dense_format(x)


def in_format_of(out: Tensor, x: Tensor) -> Tensor:
    return out.contiguous(memory_format=dense_format(x))


def in_memory_format(
    rule: Rule, format_of: Callable[[Tensor], torch.memory_format] = dense_format
) -> Rule:
    """Eager's result is contiguous, or channels last where the input is."""

    @wraps(rule)
    def wrapped(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = rule(x, *args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        wanted, dims = format_of(x), [*range(first.dim())][::-1]
        order = dims if wanted == torch.contiguous_format else [1, *dims[:-2], 0]
        moved = with_steps(first.contiguous(memory_format=wanted), steps_in(first.shape, order))
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
    """As eager composes it; from torch 2.12 on exactly where the exponent is a whole number."""
    exact = torch._C._dispatch_has_kernel_for_dispatch_key(
        "aten::ldexp.Tensor", "CompositeExplicitAutograd"
    )
    if not exact or not x.dtype.is_floating_point or n.dtype.is_floating_point or n.is_complex():
        return x * aten.pow.Scalar(2.0, n)
    # In f64 and in three steps, of which none leaves its range where the result is in it. Beyond
    # these exponents every result is 0 or infinite.
    most = 2200 if x.dtype == torch.float64 else 400
    whole = n.long().clamp(-most, most)
    first = torch.div(whole, 3, rounding_mode="trunc")
    second = torch.div(whole - first, 2, rounding_mode="trunc")
    out = x.double()
    for part in (first, second, whole - first - second):
        out = out * torch.exp2(part.double())
    return out.float().to(x.dtype) if x.dtype != torch.float64 else out


def power_of_number(base: float, x: Tensor) -> Any:
    """Eager's result is contiguous, whatever the strides of `x`."""
    return NotImplemented if in_order(x) else aten.pow.Scalar(base, contiguous(x))


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


def scatter_into_clone(target: Any) -> Rule:
    """A rule for scatters. Eager writes into a clone of an expanded tensor; torch's fake kernel
    (2.11) repeats the expanded strides instead."""

    def rule(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        steps = [s for s, n in zip(x.stride(), x.shape) if not is_one(n)]
        if not any(type(s) is int and s == 0 for s in steps) or is_contiguous(x):
            return NotImplemented
        return target(x.clone(), *args, **kwargs)

    return rule


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


def viewed_steps(x: Tensor, size: Sequence[Any]) -> list[Any] | None:
    """The strides of ``x.view(size)`` as eager computes them, those of one element included: from
    the last dimension on, for each stretch of dimensions of `x` that follow one another. None where
    that is not known."""
    out: list[Any] = [0] * len(size)
    d = len(size) - 1
    base: Any = x.stride(-1)
    held: Any = 1
    given: Any = 1
    for k in reversed(range(x.dim())):
        held = held * x.shape[k]
        if k > 0 and (is_one(x.shape[k - 1]) or same(x.stride(k - 1), held * base)):
            continue
        while d >= 0 and (not same(given, held) or is_one(size[d])):
            out[d] = given * base
            given = given * size[d]
            d -= 1
        if not same(given, held):
            return None
        if k > 0:
            base, held, given = x.stride(k - 1), 1, 1
    return out


def expanded_steps(x: Tensor, size: Sequence[Any]) -> list[Any]:
    """The strides of ``x.expand(size)`` as eager computes them."""
    out: list[Any] = []
    new = len(size) - x.dim()
    for d in reversed(range(len(size))):
        n, s = (x.shape[d - new], x.stride(d - new)) if d >= new else (1, 1)
        if d < new and out:
            s = size[d + 1] * out[0]
        out.insert(0, 0 if is_one(n) and not is_one(size[d]) else s)
    return out


def with_steps(x: Tensor, steps: Sequence[Any]) -> Tensor:
    """A view of `x` with these strides of dimensions of one element, as far as views make them: any
    number above 0, and what a new dimension has somewhere."""
    for d in reversed(range(x.dim())):
        if not is_one(x.shape[d]) or same(x.stride(d), steps[d]):
            continue
        rest = x.squeeze(d)
        last = rest.dim()  # where the stride is 1
        places = sorted(range(last + 1), key=lambda k: k != d)
        made = [rest.shape[k] * rest.stride(k) if k < last else 1 for k in places]
        at = next((k for k, s in zip(places, made) if same(s, steps[d])), last)
        if at == last and not same(1, steps[d]):
            if type(steps[d]) is not int or steps[d] < 1:
                continue
            x = aten.slice.Tensor(rest.unsqueeze(last), last, 0, 1, steps[d])
        else:
            x = rest.unsqueeze(at)
        if at != d:
            other_dims = [k for k in range(x.dim()) if k != at]
            x = x.permute([*other_dims[:d], at, *other_dims[d:]])
    return x


def contiguous(x: Tensor) -> Tensor:
    """With the usual strides also of dimensions of one element."""
    out = x.contiguous()
    if not has_one(out) or in_order(out):
        return out
    return with_steps(out, steps_in(out.shape, range(out.dim())[::-1]))


def view_as_in_eager(target: Any, steps_of: Callable[..., list[Any] | None]) -> Rule:
    """Of dimensions of one element torch's fake kernels give other strides than eager; these decide
    about memory formats, and the order of dimensions that nothing else tells apart."""

    def rule(x: Tensor, size: Sequence[Any], **kwargs: Any) -> Any:
        plain = x.layout == torch.strided and x.dim() > 0
        large = all(type(n) is int and n > 1 for n in size)  # no dimension of one element
        if traced_as_it_is(target) or not plain or large:
            return NotImplemented
        out = as_it_is(target, x, size, **kwargs)
        steps = steps_of(x, out.shape) if has_one(out) else None
        return out if steps is None else with_steps(out, steps)

    return rule


def made_like(target: Any, rule: Rule | None = None) -> Rule:
    """Eager makes the result like the first tensor: where that fills its memory, with the same
    strides, also those of dimensions of one element, which torch's fake kernels do not keep."""

    def wrapped(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        usual = kwargs.get("memory_format") in (None, torch.preserve_format)
        usual &= kwargs.get("layout") in (None, torch.strided) and x.layout == torch.strided
        odd = usual and has_one(x) and not in_order(x) and is_dense(x.shape, x.stride())
        if traced_as_it_is(target) or not odd:
            return NotImplemented if rule is None else rule(x, *args, **kwargs)
        out = (rule or partial(as_it_is, target))(x, *args, **kwargs)
        if isinstance(out, tuple):
            return tuple(with_steps(y, x.stride()) for y in out)
        return with_steps(out, x.stride()) if out.dim() == x.dim() else out  # a loss, reduced

    return wrapped


def flip(x: Tensor, dims: Sequence[int]) -> Any:
    """Of nothing, eager keeps the strides, with holes, too."""
    if any(isinstance(n, int) and n == 0 for n in x.shape) and not in_order(x):
        return x.new_empty_strided(x.shape, x.stride())
    return made_like(aten.flip.default)(x, dims)


LIKE_FIRST_NAMES = """
full_like.default zeros_like.default ones_like.default empty_like.default rand_like.default
randn_like.default randint_like.default randint_like.low_dtype sort.default sort.stable
nan_to_num.default index_fill.int_Scalar index_fill.int_Tensor hardtanh.default deg2rad.default
rad2deg.default huber_loss.default binary_cross_entropy.default
"""
LIKE_FIRST = tuple(f"aten.{n}" for n in LIKE_FIRST_NAMES.split())

SCATTERS = ("as_strided_scatter", "diagonal_scatter", "select_scatter", "slice_scatter")

RULES: dict[str, Rule] = {
    "aten.view.default": view_as_in_eager(aten.view.default, viewed_steps),
    "aten.expand.default": view_as_in_eager(aten.expand.default, expanded_steps),
    "aten.flip.default": flip,
    "aten.ldexp.Tensor": ldexp,
    "aten.pow.Scalar": power_of_number,
    "aten.normal.Tensor_Tensor": normal,
    "aten.resize_as.default": resize_as,
    **{f"aten.{n}.default": scatter_into_clone(getattr(aten, n).default) for n in SCATTERS},
}
