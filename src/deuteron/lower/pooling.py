"""Pooling and its gradients, and nearest upsampling's gradient, as reductions over small windows.

In: `Value`s whose last dimensions are spatial. Out: `Value`s. A window that leaves the tensor is
masked. Gradients are in gather form: each input position reduces over the windows that cover it,
so nothing is added atomically and results repeat.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, cast, index_value, literal, op
from deuteron.ir.index import (
    Axis,
    Index,
    as_index,
    const,
    is_nonneg,
    maximum,
    minimum,
    product,
)
from deuteron.ir.operations import FLOATS, REDUCTIONS
from deuteron.lower.access import both, compare, flatten, inside, masked, unflatten
from deuteron.lower.core import LowerContext, Value, lowering, make
from deuteron.lower.pointwise import compute_dtype, scalar

# More windows than this over one position: adding each output's share to it is less work.
MAX_GATHERED_WINDOWS = 64


@dataclass(frozen=True)
class Windows:
    """The windows along one dimension: output `o` covers ``size(o)`` inputs ``start(o) + k*step``.

    `longest` bounds the size. Input `i` is covered by some of the `count` windows
    ``first(i), first(i) + 1, ...``; not all of them need be, or exist.
    """

    inputs: Index
    outputs: Index
    start: Callable[[Index], Index]
    size: Callable[[Index], Index]
    longest: Index
    step: Index
    first: Callable[[Index], Index]
    count: Index
    end: Callable[[Index], Index] | None = None  # where sizes differ: the first input beyond o
    begin: Callable[[Index], Index] | None = None  # where windows begin, if `start` is before that

    def clipped(self) -> Windows:
        """The same inputs; windows longer than the input are walked along the input. (Some models
        average everything by a window of some thousand.)"""
        if self.step.value != 1 or not is_nonneg(self.longest - self.inputs - 1):
            return self
        end, n = self.end or (lambda o: self.start(o) + self.longest), self.inputs
        return replace(self, start=lambda o: const(0), longest=n, end=end, begin=self.start)

    def at(self, o: Index, k: Index) -> tuple[Expr, Index]:
        """The k-th input of window o, and whether there is one."""
        i = self.start(o) + k * self.step
        here = [inside(i, 0, self.inputs)]
        here += [compare("lt", i, self.end(o))] if self.end is not None else []
        here += [compare("ge", i, self.begin(o))] if self.begin is not None else []
        return both(*here), i

    def first_inside(self, o: Index) -> Index:
        """The first input of window o that is none of padding."""
        outside = (maximum(-self.start(o), 0) + self.step - 1) // self.step
        return self.start(o) + outside * self.step

    def covering(self, i: Index, k: Index) -> tuple[Expr, Index]:
        """The k-th window that may cover input i, and whether it exists and does."""
        o = self.first(i) + k
        end = self.end(o) if self.end is not None else self.start(o) + self.longest
        here = [inside(o, 0, self.outputs), compare("lt", i, end), compare("ge", i, self.start(o))]
        return both(*here), o


def fixed(
    ctx: LowerContext,
    inputs: Index,
    outputs: Index,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
) -> Windows:
    k, s, p, d = (ctx.size(v) for v in (kernel, stride, padding, dilation))
    span = (k - 1) * d + 1  # inputs from the first to the last
    count = (span + s - 1) // s
    return Windows(
        inputs,
        outputs,
        start=lambda o: o * s - p,
        size=lambda o: k,
        longest=k if d.value == 1 else span,
        step=d,
        first=lambda i: (i + p) // s - (count - 1),
        count=count,
    )


def adaptive(inputs: Index, outputs: Index) -> Windows:
    """ATen's adaptive windows: from ``floor(o*I/O)`` up to ``ceil((o+1)*I/O)``."""
    whole = inputs % outputs
    if whole.value == 0:
        k = inputs // outputs
        return Windows(
            inputs, outputs, lambda o: o * k, lambda o: k, k, const(1), lambda i: i // k, const(1)
        )

    def end(o: Index) -> Index:
        return ((o + 1) * inputs + outputs - 1) // outputs

    def start(o: Index) -> Index:
        return o * inputs // outputs

    return Windows(
        inputs,
        outputs,
        start,
        lambda o: end(o) - start(o),
        (inputs + outputs - 1) // outputs + 1,
        const(1),
        lambda i: i * outputs // inputs,
        (outputs + inputs - 1) // inputs + 1,
        end,
    )


def per_dim(value: Any, rank: int) -> list[Any]:
    """An argument for each spatial dimension: one number stands for all."""
    given = list(value) if isinstance(value, (list, tuple)) else [value]
    return given * rank if len(given) == 1 else given


def fixed_windows(
    ctx: LowerContext,
    x: Sequence[Index],
    out: Sequence[Index],
    rank: int,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any = 1,
) -> list[Windows]:
    kernel = per_dim(kernel, rank)
    stride = per_dim(stride, rank) if stride not in ([], (), None) else kernel
    rest = zip(kernel, stride, per_dim(padding, rank), per_dim(dilation, rank), strict=True)
    return [
        fixed(ctx, n, m, *params) for n, m, params in zip(x[-rank:], out[-rank:], rest, strict=True)
    ]


def small_axes(ctx: LowerContext, extents: Sequence[Index]) -> tuple[tuple[Axis, ...], list[Index]]:
    """Axes to reduce over and an index per extent; an extent of 1 needs no axis."""
    reduced = [n for n in extents if n.value != 1]
    axes = ctx.axes(reduced)
    left = list(axes)
    return axes, [const(0) if n.value == 1 else left.pop(0).index for n in extents]


def reduction_of(kind: str, axes: tuple[Axis, ...], body: Expr) -> Expr:
    return E.reduce(kind, axes, body) if axes else body


# -- forward ---------------------------------------------------------------------------------------
def extents(windows: Sequence[Windows]) -> list[Index]:
    return [w.longest if w.step.value == 1 else (w.longest - 1) // w.step + 1 for w in windows]


def read(x: Value, windows: Sequence[Windows], idx: Sequence[Index], k: Sequence[Index]) -> Any:
    """(whether there is one, the k-th element of the window of output `idx`)."""
    r = len(windows)
    places = [w.at(o, j) for w, o, j in zip(windows, idx[-r:], k, strict=True)]
    return both(*(here for here, _ in places)), x.at([*idx[:-r], *(i for _, i in places)])


def max_pool(
    ctx: LowerContext, x: Value, windows: Sequence[Windows], places: bool = False
) -> tuple[Value, Value]:
    """Values, and positions within the flattened spatial dimensions; or, as `places`, within the
    flattened window. Of several NaN ATen takes the last."""
    shape = ctx.shape_of(ctx.fake())
    wide, r = compute_dtype(x.dtype), len(windows)
    lowest = REDUCTIONS["max"].identity(x.dtype)
    kernel = extents(windows)
    # One loop over the window for both, so that one kernel reads it once.
    flat, (position,) = small_axes(ctx, [product(kernel)])
    offsets = list(unflatten(position, kernel))

    def value(idx: tuple[Index, ...]) -> Expr:
        here, element = read(x, windows, idx, offsets)
        return cast(reduction_of("max", flat, cast(masked(here, element, lowest), wide)), x.dtype)

    def index(idx: tuple[Index, ...]) -> Expr:
        here, element = read(x, windows, idx, offsets)
        wanted = cast(masked(here, element, lowest), wide)
        # Windows are small: 32 bits for the place in one (no machine divides vectors of 64).
        left = cast(E.reduce("argmax_last_nan", flat, wanted) if flat else literal(0, "i64"), "i32")
        if places:
            # Where everything is the lowest number that is place 0, which may be outside: then it
            # is the first inside. All others that are inside come after that one.
            starts = [maximum(-w.start(o), 0) for w, o in zip(windows, idx[-r:], strict=True)]
            first = cast(index_value(flatten(starts, kernel)), "i32")
            return cast(op("maximum", left, first), "i8")
        out = literal(0, "i64")
        digits: list[Expr] = []
        for n in reversed(kernel[1:]):
            size = cast(index_value(n), "i32")
            above = op("truncdiv", left, size)
            digits.insert(0, op("sub", left, op("mul", above, size)))
            left = above
        for w, o, digit in zip(windows, idx[-r:], [left, *digits], strict=True):
            place = op("mul", cast(digit, "i64"), index_value(w.step))
            at = op("add", index_value(w.start(o)), place)
            # Where everything is the lowest number, the first place of the window may be outside:
            # then it is the first inside.
            at = op("maximum", at, index_value(w.first_inside(o)))
            out = op("add", op("mul", out, index_value(w.inputs)), at)
        return out

    return make(ctx, shape, value), make(ctx, shape, index)


@lowering("aten.max_pool2d_with_indices.default")
def max_pool2d(
    ctx: LowerContext,
    x: Value,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    rank: int = 2,
) -> tuple[Value, Value]:
    out = ctx.shape_of(ctx.fake())
    windows = fixed_windows(ctx, x.shape, out, rank, kernel, stride, padding, dilation)
    return max_pool(ctx, x, windows)


@lowering("deuteron.max_pool")
def max_pool_places(
    ctx: LowerContext, x: Value, kernel: Any, stride: Any, padding: Any, ceil_mode: bool
) -> tuple[Value, Value]:
    """As `graph.windows` has it."""
    r = len(kernel)
    windows = fixed_windows(ctx, x.shape, ctx.shape_of(ctx.fake()), r, kernel, stride, padding)
    return max_pool(ctx, x, windows, places=True)


@lowering("aten.max_pool3d_with_indices.default")
def max_pool3d(ctx: LowerContext, x: Value, *args: Any, **kwargs: Any) -> tuple[Value, Value]:
    return max_pool2d(ctx, x, *args, rank=3, **kwargs)


@lowering("aten.adaptive_max_pool2d")
def adaptive_max_pool2d(ctx: LowerContext, x: Value, size: Any, rank: int = 2) -> Any:
    out = ctx.shape_of(ctx.fake())
    return max_pool(ctx, x, adaptive_windows(ctx, x.shape, out, rank))


@lowering("aten.adaptive_max_pool3d")
def adaptive_max_pool3d(ctx: LowerContext, x: Value, size: Any) -> Any:
    return adaptive_max_pool2d(ctx, x, size, 3)


def adaptive_windows(
    ctx: LowerContext, x: Sequence[Index], out: Sequence[Index], rank: int
) -> list[Windows]:
    if any(n.value == 0 for n in (*x[-rank:], *out[-rank:])):
        raise ctx.decline("adaptive pooling from or to nothing")
    return [adaptive(n, m) for n, m in zip(x[-rank:], out[-rank:], strict=True)]


Divisor = Callable[[Sequence[Index]], list[Index]]  # factors


def average_divisor(
    windows: Sequence[Windows], padding: Sequence[Any], include: bool, override: Any
) -> Divisor:
    """What the sum of a window is divided by: its elements, with or without padding."""

    def divisor(o: Sequence[Index]) -> list[Index]:
        if override is not None:
            return [as_index(override)]
        out = []
        for w, at, p in zip(windows, o, padding, strict=True):
            start = w.start(at)
            if include and is_nonneg(w.inputs + p - w.start(w.outputs - 1) - w.longest):
                out.append(w.longest)  # every window is whole
            elif include:
                out.append(minimum(start + w.longest, w.inputs + p) - start)
            else:
                end = minimum(start + w.longest, w.inputs)
                out.append(end - maximum(start, 0))
        return out

    return divisor


def divided(name: str, value: Expr, factors: Iterable[Index]) -> Expr:
    """The value over the product of the factors. Numbers are multiplied, not indices, whose product
    would be a long polynomial."""
    numbers = [scalar(f, value.dtype) for f in factors]
    return op(name, value, functools.reduce(lambda a, b: op("mul", a, b), numbers))


def mean_pool(ctx: LowerContext, x: Value, windows: Sequence[Windows], divisor: Divisor) -> Value:
    wide, r, walked = compute_dtype(x.dtype), len(windows), [w.clipped() for w in windows]
    axes, k = small_axes(ctx, extents(walked))

    def element(idx: tuple[Index, ...]) -> Expr:
        here, value = read(x, walked, idx, k)
        total = reduction_of("sum", axes, cast(masked(here, value), wide))
        name = "div" if wide in FLOATS else "truncdiv"
        return cast(divided(name, total, divisor(idx[-r:])), x.dtype)

    return make(ctx, ctx.shape_of(ctx.fake()), element)


@lowering("aten.avg_pool2d.default")
def avg_pool2d(
    ctx: LowerContext,
    x: Value,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
    rank: int = 2,
) -> Value:
    out = ctx.shape_of(ctx.fake())
    windows = fixed_windows(ctx, x.shape, out, rank, kernel, stride, padding)
    divisor = average_divisor(windows, per_dim(padding, rank), count_include_pad, divisor_override)
    return mean_pool(ctx, x, windows, divisor)


@lowering("aten.avg_pool3d.default")
def avg_pool3d(ctx: LowerContext, x: Value, *args: Any, **kwargs: Any) -> Value:
    return avg_pool2d(ctx, x, *args, rank=3, **kwargs)


def adaptive_divisor(windows: Sequence[Windows]) -> Divisor:
    return lambda o: [w.size(i) for w, i in zip(windows, o, strict=True)]


@lowering("aten._adaptive_avg_pool2d")
def adaptive_avg_pool2d(ctx: LowerContext, x: Value, size: Any, rank: int = 2) -> Value:
    windows = adaptive_windows(ctx, x.shape, ctx.shape_of(ctx.fake()), rank)
    return mean_pool(ctx, x, windows, adaptive_divisor(windows))


@lowering("aten._adaptive_avg_pool3d")
def adaptive_avg_pool3d(ctx: LowerContext, x: Value, size: Any) -> Value:
    return adaptive_avg_pool2d(ctx, x, size, 3)


# -- backward --------------------------------------------------------------------------------------
def spread(
    ctx: LowerContext,
    grad: Value,
    windows: Sequence[Windows],
    share: Callable[[Expr, Sequence[Index], Sequence[Index]], Expr],
) -> Value:
    """Every input's sum of ``share(gradient, output, input)`` over the windows that cover it."""
    wide, r = compute_dtype(grad.dtype), len(windows)
    counts = [w.count for w in windows]
    most = product(counts)
    if most.value is None or most.value > MAX_GATHERED_WINDOWS:
        raise ctx.decline("many windows cover one input")
    axes, k = small_axes(ctx, counts)

    def element(idx: tuple[Index, ...]) -> Expr:
        inputs = idx[-r:]
        places = [w.covering(i, j) for w, i, j in zip(windows, inputs, k, strict=True)]
        outputs = [o for _, o in places]
        here = both(*(condition for condition, _ in places))
        value = cast(grad.at([*idx[:-r], *outputs]), wide)
        part = masked(here, share(value, [*idx[:-r], *outputs], inputs))
        return cast(reduction_of("sum", axes, part), grad.dtype)

    return make(ctx, ctx.shape_of(ctx.fake()), element)


def spread_mean(
    ctx: LowerContext, grad: Value, windows: Sequence[Windows], divisor: Divisor
) -> Value:
    r = len(windows)

    def share(value: Expr, output: Sequence[Index], inputs: Sequence[Index]) -> Expr:
        return divided("div", value, divisor(output[-r:]))

    return spread(ctx, grad, windows, share)


@lowering("aten.avg_pool2d_backward.default")
def avg_pool2d_backward(
    ctx: LowerContext,
    grad: Value,
    x: Value,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: Any,
    rank: int = 2,
) -> Value:
    windows = fixed_windows(ctx, x.shape, grad.shape, rank, kernel, stride, padding)
    divisor = average_divisor(windows, per_dim(padding, rank), count_include_pad, divisor_override)
    return spread_mean(ctx, grad, windows, divisor)


@lowering("aten.avg_pool3d_backward.default")
def avg_pool3d_backward(ctx: LowerContext, grad: Value, *args: Any, **kwargs: Any) -> Value:
    return avg_pool2d_backward(ctx, grad, *args, rank=3, **kwargs)


@lowering("aten._adaptive_avg_pool2d_backward.default")
def adaptive_avg_pool2d_backward(ctx: LowerContext, grad: Value, x: Value, rank: int = 2) -> Value:
    windows = adaptive_windows(ctx, x.shape, grad.shape, rank)
    return spread_mean(ctx, grad, windows, adaptive_divisor(windows))


@lowering("aten._adaptive_avg_pool3d_backward.default")
def adaptive_avg_pool3d_backward(ctx: LowerContext, grad: Value, x: Value) -> Value:
    return adaptive_avg_pool2d_backward(ctx, grad, x, 3)


def spread_max(ctx: LowerContext, grad: Value, windows: Sequence[Windows], indices: Value) -> Value:
    """Each output's gradient goes to the one input that it came from."""
    sizes = [w.inputs for w in windows]

    def share(value: Expr, output: Sequence[Index], inputs: Sequence[Index]) -> Expr:
        mine = index_value(flatten(inputs, sizes))
        is_extreme = op("eq", cast(indices.at(output), "i64"), mine)
        return op("where", is_extreme, value, literal(0, value.dtype))

    return spread(ctx, grad, windows, share)


@lowering("deuteron.max_pool_backward")
def max_pool_places_backward(
    ctx: LowerContext,
    grad: Value,
    places: Value,
    size: Any,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    format: Any,
) -> Value:
    """As `graph.windows` has it."""
    r = len(kernel)
    windows = fixed_windows(
        ctx, [ctx.size(n) for n in size], grad.shape, r, kernel, stride, padding
    )

    def share(value: Expr, output: Sequence[Index], inputs: Sequence[Index]) -> Expr:
        spots = zip(windows, output[-r:], inputs, strict=True)
        mine = flatten([i - w.start(o) for w, o, i in spots], [as_index(k) for k in kernel])
        is_extreme = op("eq", cast(places.at(output), "i32"), cast(index_value(mine), "i32"))
        return op("where", is_extreme, value, literal(0, value.dtype))

    return spread(ctx, grad, windows, share)


@lowering("aten.max_pool2d_with_indices_backward.default")
def max_pool2d_backward(
    ctx: LowerContext,
    grad: Value,
    x: Value,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Value,
    rank: int = 2,
) -> Value:
    windows = fixed_windows(ctx, x.shape, grad.shape, rank, kernel, stride, padding, dilation)
    return spread_max(ctx, grad, windows, indices)


@lowering("aten.max_pool3d_with_indices_backward.default")
def max_pool3d_backward(ctx: LowerContext, grad: Value, *args: Any, **kwargs: Any) -> Value:
    return max_pool2d_backward(ctx, grad, *args, rank=3, **kwargs)


@lowering("aten.adaptive_max_pool2d_backward.default")
def adaptive_max_pool2d_backward(
    ctx: LowerContext, grad: Value, x: Value, indices: Value, rank: int = 2
) -> Value:
    return spread_max(ctx, grad, adaptive_windows(ctx, x.shape, grad.shape, rank), indices)


@lowering("aten.adaptive_max_pool3d_backward.default")
def adaptive_max_pool3d_backward(ctx: LowerContext, grad: Value, x: Value, indices: Value) -> Value:
    return adaptive_max_pool2d_backward(ctx, grad, x, indices, 3)
