"""Reductions of ATen as reductions (`Reduce`) with their prologues and epilogues.

Sums of half types accumulate in f32 and round once at the end, as ATen's do; integer sums in i64.
Means divide the sum, variances are two reductions (the mean, then squares about it), or three (what
rounding left of the mean): how many passes that takes is the scheduler's concern.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deuteron.base.errors import DeuteronError
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, cast, literal, op
from deuteron.ir.index import Index, const, is_nonneg, product
from deuteron.ir.operations import FLOATS
from deuteron.lower.core import TORCH_DTYPES, LowerContext, Value, lowering, make
from deuteron.lower.pointwise import _truth, compute_dtype, scalar


def dims_of(x: Value, dim: Any) -> tuple[int, ...]:
    if dim is None or (isinstance(dim, (list, tuple)) and len(dim) == 0):
        return tuple(range(x.rank))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return tuple(sorted({d % max(x.rank, 1) for d in dims})) if x.rank else ()


def reduce(
    ctx: LowerContext,
    x: Value,
    dims: Sequence[int],
    keepdim: bool,
    kind: str,
    body: Callable[[Expr], Expr],
    after: Callable[[Expr], Expr] = lambda e: e,
) -> Value:
    """``after(reduction of body(x) over dims)``."""
    kept_dims = [d for d in range(x.rank) if d not in dims]
    bound = ctx.axes([x.axes[d].extent for d in dims])
    shape: list[Index] = []
    for d in range(x.rank):
        if d in dims:
            if keepdim:
                shape.append(const(1))
        else:
            shape.append(x.axes[d].extent)

    def element(idx: tuple[Index, ...]) -> Expr:
        at: list[Index] = [const(0)] * x.rank
        for axis, d in zip(bound, dims, strict=True):
            at[d] = axis.index
        places = kept_dims if not keepdim else range(x.rank)
        for i, d in zip(idx, places, strict=True):
            if d not in dims:
                at[d] = i
        inner = body(x.at(at))
        return after(E.reduce(kind, bound, inner) if bound else _of_one(kind, inner))

    return make(ctx, shape, element)


def _of_one(kind: str, x: Expr) -> Expr:
    return literal(0, "i64") if kind.startswith("arg") else x


def count(x: Value, dims: Sequence[int]) -> Index:
    return product(x.axes[d].extent for d in dims)


def _total(ctx: LowerContext, x: Value, kind: str, dim: Any, keepdim: bool, dtype: Any) -> Value:
    out = TORCH_DTYPES[ctx.fake().dtype]
    acc = compute_dtype(out)
    # An explicit dtype casts the elements first (and rounds them to it), then accumulates in its
    # compute dtype.
    return reduce(
        ctx,
        x,
        dims_of(x, dim),
        keepdim,
        kind,
        lambda e: cast(cast(e, out) if dtype else e, acc),
        lambda e: cast(e, out),
    )


@lowering("aten.sum")
def sum_(
    ctx: LowerContext, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    return _total(ctx, x, "sum", dim, keepdim, dtype)


@lowering("aten.mean")
def mean(
    ctx: LowerContext, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    out = TORCH_DTYPES[ctx.fake().dtype]
    acc, dims = compute_dtype(out), dims_of(x, dim)
    n = scalar(count(x, dims), acc)
    return reduce(
        ctx,
        x,
        dims,
        keepdim,
        "sum",
        lambda e: cast(cast(e, out) if dtype else e, acc),
        lambda e: cast(op("div", e, n), out),
    )


@lowering("aten.prod")
def prod(
    ctx: LowerContext, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    return _total(ctx, x, "prod", dim, keepdim, dtype)


def not_empty(x: Value, dims: Sequence[int]) -> None:
    """An extreme of nothing, which torch's fake kernels let pass, raises as in eager."""
    if any(x.shape[d].value == 0 for d in dims):
        raise DeuteronError(
            f"max(), min(): expected the reduced dimensions {list(dims)} to have non-zero sizes"
        )


def _extreme(kind: str) -> Callable[..., Value]:
    def lower(ctx: LowerContext, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
        acc = compute_dtype(x.dtype)
        if acc == "bool":
            return reduce(
                ctx, x, dims_of(x, dim), keepdim, "any" if kind == "max" else "all", lambda e: e
            )
        return reduce(
            ctx,
            x,
            dims_of(x, dim),
            keepdim,
            kind,
            lambda e: cast(e, acc),
            lambda e: cast(e, x.dtype),
        )

    return lower


lowering("aten.amax")(_extreme("max"))
lowering("aten.amin")(_extreme("min"))


@lowering("aten.max.default", "aten.min.default")
def extreme(ctx: LowerContext, x: Value) -> Value:
    assert ctx.node is not None
    not_empty(x, dims_of(x, None))
    return _extreme("max" if "max" in str(ctx.node.target) else "min")(ctx, x)


def _position(ctx: LowerContext, x: Value, kind: str, dim: int | None, keepdim: bool) -> Value:
    acc = compute_dtype(x.dtype)
    acc = "i32" if acc == "bool" else acc
    if dim is None:
        flat = _flatten(ctx, x)
        out = reduce(ctx, flat, (0,), False, kind, lambda e: cast(e, acc))
        if not keepdim:
            return out
        return make(ctx, [const(1)] * x.rank, lambda idx: out.at(()))
    return reduce(ctx, x, dims_of(x, dim), keepdim, kind, lambda e: cast(e, acc))


def _flatten(ctx: LowerContext, x: Value) -> Value:
    def element(idx: tuple[Index, ...]) -> Expr:
        left, at = idx[0], []
        for a in reversed(x.axes):
            at.append(left % a.extent if a.extent.value != 1 else const(0))
            left = left // a.extent if a.extent.value != 0 else left
        return x.at(tuple(reversed(at)))

    if any(a.extent.value == 0 for a in x.axes):
        raise ctx.decline("position of an extreme element of an empty tensor")
    return make(ctx, (product(x.shape),), element)


@lowering("aten.argmax", "aten.argmin")
def arg_extreme(
    ctx: LowerContext, x: Value, dim: int | None = None, keepdim: bool = False
) -> Value:
    assert ctx.node is not None
    kind = "argmax" if "argmax" in str(ctx.node.target) else "argmin"
    return _position(ctx, x, kind, dim, keepdim)


@lowering("aten.max.dim", "aten.min.dim")
def extreme_dim(
    ctx: LowerContext, x: Value, dim: int, keepdim: bool = False
) -> tuple[Value, Value]:
    assert ctx.node is not None
    not_empty(x, dims_of(x, dim))
    kind = "max" if "max" in str(ctx.node.target) else "min"
    return _extreme(kind)(ctx, x, dim, keepdim), _position(ctx, x, "arg" + kind, dim, keepdim)


@lowering("aten.any", "aten.all")
def any_all(ctx: LowerContext, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    assert ctx.node is not None
    kind = "any" if "any" in str(ctx.node.target) else "all"
    out = TORCH_DTYPES[ctx.fake().dtype]
    return reduce(
        ctx,
        x,
        dims_of(x, dim),
        keepdim,
        kind,
        lambda e: _truth(cast(e, compute_dtype(e.dtype))),
        lambda e: cast(e, out),
    )


def moments(
    ctx: LowerContext, x: Value, dim: Any, correction: Any, keepdim: bool, fine: bool = False
) -> tuple[Value, Value]:
    """(variance, mean) in the compute dtype. `fine`: what rounding left of the mean is added to it,
    so that the mean of equal numbers is that number, and their variance 0, as Welford's is."""
    acc, dims = compute_dtype(x.dtype), dims_of(x, dim)
    n = count(x, dims)
    size = scalar(n, acc)
    wish = f"{ctx.node.name if ctx.node else 't'}_mean"

    def average(v: Value) -> Value:
        return reduce(
            ctx, v, dims, True, "sum", lambda e: cast(e, acc), lambda e: op("div", e, size)
        )

    def deviation(center: Value) -> Value:
        return make(
            ctx,
            x.shape,
            lambda idx: op(
                "sub",
                cast(x.at(idx), acc),
                center.at([const(0) if d in dims else i for d, i in enumerate(idx)]),
            ),
        )

    center = ctx.define(average(x), wish=wish)
    if fine:
        rough, left = center, average(deviation(center))
        both = make(ctx, rough.shape, lambda idx: op("add", rough.at(idx), left.at(idx)))
        center = ctx.define(both, wish=wish)
    correction = 1 if correction is None else correction
    if isinstance(correction, Index):
        correction = correction.value
    if isinstance(correction, int) or float(correction).is_integer():
        # max(0, n - correction), as ATen: too few elements divide by zero
        rest = n - int(correction)
        divisor = (
            scalar(rest, acc)
            if is_nonneg(rest)
            else op("maximum", scalar(rest, acc), scalar(0, acc))
        )
    else:
        divisor = op("maximum", op("sub", size, scalar(correction, acc)), scalar(0, acc))

    var = reduce(
        ctx,
        deviation(center),
        dims,
        keepdim,
        "sum",
        lambda e: op("mul", e, e),
        lambda e: op("div", e, divisor),
    )
    if keepdim:
        return var, center
    kept_shape = [a.extent for d, a in enumerate(x.axes) if d not in dims]

    def dropped(idx: tuple[Index, ...]) -> Expr:
        left = list(idx)
        return center.at([const(0) if d in dims else left.pop(0) for d in range(x.rank)])

    return var, make(ctx, kept_shape, dropped)


def _rounded(ctx: LowerContext, v: Value, dtype: str) -> Value:
    return make(ctx, v.shape, lambda idx: cast(v.at(idx), dtype))


def tight(x: Value) -> bool:
    """Whether a mean in the compute dtype is rounded where the numbers are equal: sums of halves
    have digits to spare."""
    return compute_dtype(x.dtype) == x.dtype


@lowering("aten.var_mean.correction")
def var_mean(
    ctx: LowerContext, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    var, center = moments(ctx, x, dim, correction, keepdim)
    return _rounded(ctx, var, x.dtype), _rounded(ctx, center, x.dtype)


@lowering("aten.var.correction")
def var_(
    ctx: LowerContext, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Value:
    return _rounded(ctx, moments(ctx, x, dim, correction, keepdim, tight(x))[0], x.dtype)


@lowering("aten.std.correction")
def std_(
    ctx: LowerContext, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Value:
    var, _ = moments(ctx, x, dim, correction, keepdim, tight(x))
    return make(ctx, var.shape, lambda idx: cast(op("sqrt", var.at(idx)), x.dtype))


__all__ = ["FLOATS", "moments", "reduce"]
