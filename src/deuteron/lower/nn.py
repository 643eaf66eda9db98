"""Scans, distances, small contractions and resampling: what is better lowered whole.

In: `Value`s. Out: `Value`s. A scan is a tensor of its own (its axis cannot be substituted); a
contraction is generated only where the context's choice says so, else it is a library call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from deuteron.ir import expr as E
from deuteron.ir.expr import FLOATS, Expr, cast, index_value, literal, op
from deuteron.ir.index import Index, const
from deuteron.lower.access import wrap_dim
from deuteron.lower.core import TORCH_DTYPES, LowerContext, Value, lowering, make
from deuteron.lower.pointwise import broadcast, compute_dtype, scalar
from deuteron.lower.pooling import fold_of, small_axes


# -- scans -----------------------------------------------------------------------------------------
def scanned(
    ctx: LowerContext, kind: str, shape: Sequence[Index], dim: int, f: Callable[..., Expr]
) -> Value:
    """The inclusive scan of ``f(idx)`` along a dimension."""
    axes = ctx.axes(shape)
    body = f(tuple(a.index for a in axes))
    return ctx.define(Value(axes, E.scan(kind, axes[dim], body)))


def accumulated_in(ctx: LowerContext, dtype: str) -> str:
    """ATen's running sums of floats: f64 on CPUs, f32 on GPUs."""
    if dtype in ("f16", "bf16", "f32"):
        return "f64" if ctx.fake().device.type == "cpu" else "f32"
    return dtype


def _running(kind: str) -> Callable[..., Value]:
    def lower(ctx: LowerContext, x: Value, dim: int, *, dtype: Any = None) -> Value:
        out = TORCH_DTYPES[ctx.fake().dtype]
        wide = accumulated_in(ctx, out)
        if x.rank == 0:
            return make(ctx, [], lambda idx: cast(x.at(idx), out))
        sums = scanned(
            ctx, kind, x.shape, wrap_dim(dim, x.rank), lambda idx: cast(cast(x.at(idx), out), wide)
        )
        return make(ctx, x.shape, lambda idx: cast(sums.at(idx), out))

    return lower


lowering("aten.cumsum.default")(_running("sum"))
lowering("aten.cumprod.default")(_running("prod"))


def _running_extreme(kind: str) -> Callable[..., tuple[Value, Value]]:
    def lower(ctx: LowerContext, x: Value, dim: int) -> tuple[Value, Value]:
        if x.dtype == "bool":
            raise ctx.decline("running extremes of bools")
        if x.rank == 0:
            return x, make(ctx, [], lambda idx: literal(0, "i64"))
        dim = wrap_dim(dim, x.rank)
        wide = compute_dtype(x.dtype)
        best = scanned(ctx, kind, x.shape, dim, lambda idx: cast(x.at(idx), wide))

        def place(idx: tuple[Index, ...]) -> Expr:
            # The last position so far that equals the extreme; a NaN is the extreme from then on.
            mine = cast(x.at(idx), wide)
            hit = op("eq", mine, best.at(idx))
            if wide in FLOATS:
                hit = op("logical_or", hit, op("isnan", mine))
            return op("where", hit, index_value(idx[dim]), literal(0, "i64"))

        where = scanned(ctx, "max", x.shape, dim, place)
        return make(ctx, x.shape, lambda idx: cast(best.at(idx), x.dtype)), where

    return lower


lowering("aten.cummax.default")(_running_extreme("max"))
lowering("aten.cummin.default")(_running_extreme("min"))


@lowering("aten.logcumsumexp.default")
def logcumsumexp(ctx: LowerContext, x: Value, dim: int) -> Value:
    raise ctx.decline("a running log of sums of exponentials has no fixed scale")


# -- distances -------------------------------------------------------------------------------------
@lowering("aten._cdist_forward.default")
def cdist(ctx: LowerContext, x: Value, y: Value, p: float, compute_mode: Any = None) -> Value:
    """``out[..., m, n]``: the p-norm of ``x[..., m, :] - y[..., n, :]``."""
    dtype = x.dtype
    axes, (k,) = small_axes(ctx, [x.shape[-1]])

    def element(idx: tuple[Index, ...]) -> Expr:
        *batch, m, n = idx
        a, b = broadcast(x, [*batch, m, k]), broadcast(y, [*batch, n, k])
        d = op("abs", op("sub", a, b))
        if p == 0:
            return fold_of("sum", axes, cast(op("ne", d, literal(0, dtype)), dtype))
        if p == 1:
            return fold_of("sum", axes, d)
        if p == 2:
            return op("sqrt", fold_of("sum", axes, op("mul", d, d)))
        if math.isinf(p):
            # Distances are at least 0, also over no dimensions.
            return op("maximum", fold_of("max", axes, d), literal(0, dtype))
        total = fold_of("sum", axes, op("pow", d, literal(p, dtype)))
        return op("pow", total, literal(1.0 / p, dtype))

    if dtype not in ("f32", "f64"):
        raise ctx.decline("distances of half numbers")
    return make(ctx, ctx.shape_of(ctx.fake()), element)


# -- contractions ----------------------------------------------------------------------------------
def product_sum(ctx: LowerContext, a: Value, b: Value) -> Callable[[Sequence[Index]], Expr]:
    """``sum_k a[..., m, k] * b[..., k, n]`` in the compute dtype."""
    reason = ctx.choose_contraction(ctx, a, b)
    if reason != "generated":
        raise ctx.decline(reason or "the library multiplies matrices faster")
    wide = compute_dtype(a.dtype)
    axes, (k,) = small_axes(ctx, [a.shape[-1]])

    def element(idx: Sequence[Index]) -> Expr:
        *batch, m, n = idx
        x, y = a.at([*batch, m, k]), b.at([*batch, k, n])
        return fold_of("sum", axes, op("mul", cast(x, wide), cast(y, wide)))

    return element


@lowering("aten.mm.default", "aten.bmm.default")
def matmul(ctx: LowerContext, a: Value, b: Value) -> Value:
    element = product_sum(ctx, a, b)
    return make(ctx, ctx.shape_of(ctx.fake()), lambda idx: cast(element(idx), a.dtype))


@lowering("aten.addmm.default", "aten.baddbmm.default")
def addmm(
    ctx: LowerContext, bias: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1
) -> Value:
    """``beta * bias + alpha * (a @ b)``; with a beta of 0 the bias is not read."""
    element = product_sum(ctx, a, b)
    wide = compute_dtype(a.dtype)

    def out(idx: tuple[Index, ...]) -> Expr:
        total = element(idx)
        if alpha != 1:
            total = op("mul", total, scalar(alpha, wide))
        if beta == 0:
            return cast(total, a.dtype)
        first = cast(broadcast(bias, idx), wide)
        if beta != 1:
            first = op("mul", first, scalar(beta, wide))
        return cast(op("add", first, total), a.dtype)

    return make(ctx, ctx.shape_of(ctx.fake()), out)


# -- nearest neighbours ----------------------------------------------------------------------------
def whole_factors(
    ctx: LowerContext, small: Sequence[Index], large: Sequence[Index], scales: Sequence[Any]
) -> list[Index]:
    """How many times larger each dimension is; declines where that is no whole number."""
    out = []
    for n, m, scale in zip(small, large, scales, strict=True):
        factor = m // n if n.value != 0 else const(0)
        if factor.value in (None, 0) or n * factor is not m or scale not in (None, factor.value):
            raise ctx.decline("nearest neighbours by a factor that is no whole number")
        out.append(factor)
    return out


def upsampled(ctx: LowerContext, x: Value, scales: Sequence[Any]) -> Value:
    shape = ctx.shape_of(ctx.fake())
    r = len(scales)
    factors = whole_factors(ctx, x.shape[-r:], shape[-r:], scales)

    def element(idx: tuple[Index, ...]) -> Expr:
        near = [i // f for i, f in zip(idx[-r:], factors, strict=True)]
        return x.at([*idx[:-r], *near])

    return make(ctx, shape, element)


def gathered(ctx: LowerContext, grad: Value, scales: Sequence[Any]) -> Value:
    """Each input's gradient: the sum over its copies."""
    shape = ctx.shape_of(ctx.fake())
    r, wide = len(scales), compute_dtype(grad.dtype)
    factors = whole_factors(ctx, shape[-r:], grad.shape[-r:], scales)
    axes, k = small_axes(ctx, factors)

    def element(idx: tuple[Index, ...]) -> Expr:
        copies = [i * f + j for i, f, j in zip(idx[-r:], factors, k, strict=True)]
        value = cast(grad.at([*idx[:-r], *copies]), wide)
        return cast(fold_of("sum", axes, value), grad.dtype)

    return make(ctx, shape, element)


def _nearest(rank: int, backward: bool) -> Callable[..., Value]:
    def lower(ctx: LowerContext, x: Value, *args: Any) -> Value:
        sizes = 2 if backward else 1
        scales = list(args[sizes:]) or [None] * rank
        return (gathered if backward else upsampled)(ctx, x, scales)

    return lower


for _r in (1, 2, 3):
    for _name in ("upsample_nearest", "_upsample_nearest_exact"):
        lowering(f"aten.{_name}{_r}d.default")(_nearest(_r, False))
        lowering(f"aten.{_name}{_r}d_backward.default")(_nearest(_r, True))
