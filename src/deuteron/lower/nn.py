"""Scans, distances, small contractions and resampling: what is better lowered whole.

In: `Value`s. Out: `Value`s. A scan is a tensor of its own (its axis cannot be substituted); a
contraction is generated only where the context's choice says so, else it is a library call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from deuteron.base.scans import EXCHANGED_DTYPES, few_and_long, in_blocks
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, cast, index_value, literal, op
from deuteron.ir.index import Index, const, hint, product
from deuteron.ir.operations import FLOATS, REDUCTIONS
from deuteron.lower.access import compare, loaded, masked, wrap_dim
from deuteron.lower.calls import emit
from deuteron.lower.core import TORCH_DTYPES, LibraryMultiplies, LowerContext, Value, lowering, make
from deuteron.lower.pointwise import broadcast, compute_dtype, gelu, pointwise, relu, scalar
from deuteron.lower.pooling import reduction_of, small_axes
from deuteron.lower.positions import exact as exact_index

# Few long rows are scanned in parts of about so many elements on GPUs, where no blocks are
# (`base.scans`): H200, 64 rows of 1048576 (f32), each by one program, 3 times a copy's time.
SCAN_PART = 4096


# -- scans -----------------------------------------------------------------------------------------
def scanned(
    ctx: LowerContext,
    kind: str,
    shape: Sequence[Index],
    dim: int,
    f: Callable[..., Expr],
    finish: Callable[[Expr], Expr] = lambda e: e,
    only_scan: bool = True,
) -> Value:
    """The inclusive scan of ``f(idx)`` along a dimension, and what `finish` makes of it.
    `only_scan`: whether no other scan follows that reads both."""
    axes = ctx.axes(shape)
    body = f(tuple(a.index for a in axes))
    length = part_length(ctx, shape, dim)
    if length is not None and not (only_scan and scanned_in_blocks(ctx, body.dtype, shape, dim)):
        return split_scan(ctx, kind, shape, dim, length, f, finish)
    sums = ctx.define(Value(axes, E.scan(kind, axes[dim], body)))
    return make(ctx, shape, lambda idx: finish(sums.at(idx)))


def part_length(ctx: LowerContext, shape: Sequence[Index], dim: int) -> int | None:
    """How long the parts are in which long rows are scanned, where there are too few rows for a
    GPU: each row by one program leaves most of it idle."""
    n = shape[dim].value
    if ctx.fake().device.type == "cpu" or n is None or not few_and_long(rows_of(shape, dim), n):
        return None
    return next((k for k in range(SCAN_PART, SCAN_PART // 8, -16) if n % k == 0), None)


def scanned_in_blocks(ctx: LowerContext, dtype: str, shape: Sequence[Index], dim: int) -> bool:
    """Whether programs scan blocks of the rows, which are then read once."""
    fake, rows, length = ctx.fake(), rows_of(shape, dim), hint(shape[dim])
    if ctx.specs is None or not in_blocks(rows, length, ctx.specs(str(fake.device))):
        return False
    refused = ""
    if dtype not in EXCHANGED_DTYPES:
        refused = f"programs cannot exchange {dtype}"
    elif ctx.strides_of(fake)[dim].value != 1:
        refused = "rows do not lie one after another"
    ctx.record.add(
        "decision",
        subject="scan",
        accepted=not refused,
        reason=f"in parts: {refused}" if refused else "in blocks: rows are read once",
        detail=f"{rows} rows of {length}",
        first=ctx.node.name if ctx.node is not None else "",
        second="",
        bytes=0 if refused else rows * length * fake.itemsize,
        us=0.0,
    )
    return not refused


def rows_of(shape: Sequence[Index], dim: int) -> int:
    return hint(product([m for d, m in enumerate(shape) if d != dim]))


def split_scan(
    ctx: LowerContext,
    kind: str,
    shape: Sequence[Index],
    dim: int,
    length: int,
    f: Callable[..., Expr],
    finish: Callable[[Expr], Expr],
) -> Value:
    """Every part's total, a scan of the totals, and a scan of every part that begins with the
    totals before it: always added in the same order. The input is read twice."""
    name = REDUCTIONS[kind].scalar_op
    assert name is not None
    parts = shape[dim] // length
    cut = [*shape[:dim], parts, const(length), *shape[dim + 1 :]]

    def at(idx: Sequence[Index]) -> Expr:
        return f((*idx[:dim], idx[dim] * length + idx[dim + 1], *idx[dim + 2 :]))

    axes = ctx.axes(cut)
    body = at([a.index for a in axes])
    outer = tuple(a for k, a in enumerate(axes) if k != dim + 1)
    totals = ctx.define(Value(outer, E.reduce(kind, (axes[dim + 1],), body)))
    rows = ctx.axes(totals.shape)
    through = ctx.define(Value(rows, E.scan(kind, rows[dim], totals.at([a.index for a in rows]))))
    axes = ctx.axes(cut)
    body = at([a.index for a in axes])
    inner = ctx.define(Value(axes, E.scan(kind, axes[dim + 1], body)))
    neutral = literal(REDUCTIONS[kind].identity(inner.dtype), inner.dtype)

    def element(idx: tuple[Index, ...]) -> Expr:
        before = [*idx[:dim], idx[dim] - 1, *idx[dim + 2 :]]
        start = masked(compare("gt", idx[dim], 0), through.at(before), neutral)
        return finish(op(name, start, inner.at(idx)))

    done = ctx.define(make(ctx, cut, element))

    def element_at(idx: tuple[Index, ...]) -> Expr:
        return done.at((*idx[:dim], idx[dim] // length, idx[dim] % length, *idx[dim + 1 :]))

    return make(ctx, shape, element_at)


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
        return scanned(
            ctx,
            kind,
            x.shape,
            wrap_dim(dim, x.rank),
            lambda idx: cast(cast(x.at(idx), out), wide),
            lambda e: cast(e, out),
        )

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
        # In parts the positions' first kernel is the extremes' last one.
        only_scan = ctx.node is not None and all(user.args[1:] == (0,) for user in ctx.node.users)
        best = scanned(
            ctx, kind, x.shape, dim, lambda idx: cast(x.at(idx), wide), only_scan=only_scan
        )

        def position_at(idx: tuple[Index, ...]) -> Expr:
            # The last position so far that equals the extreme; a NaN is the extreme from then on.
            mine = cast(x.at(idx), wide)
            hit = op("eq", mine, best.at(idx))
            if wide in FLOATS:
                hit = op("logical_or", hit, op("isnan", mine))
            return op("where", hit, index_value(idx[dim]), literal(0, "i64"))

        where = scanned(ctx, "max", x.shape, dim, position_at)
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
            return reduction_of("sum", axes, cast(op("ne", d, literal(0, dtype)), dtype))
        if p == 1:
            return reduction_of("sum", axes, d)
        if p == 2:
            return op("sqrt", reduction_of("sum", axes, op("mul", d, d)))
        if math.isinf(p):
            # Distances are at least 0, also over no dimensions.
            return op("maximum", reduction_of("max", axes, d), literal(0, dtype))
        total = reduction_of("sum", axes, op("pow", d, literal(p, dtype)))
        return op("pow", total, literal(1.0 / p, dtype))

    if dtype not in ("f32", "f64"):
        raise ctx.decline("distances of half numbers")
    return make(ctx, ctx.shape_of(ctx.fake()), element)


# -- contractions ----------------------------------------------------------------------------------
def product_sum(ctx: LowerContext, a: Value, b: Value) -> Callable[[Sequence[Index]], Expr]:
    """``sum_k a[..., m, k] * b[..., k, n]`` in the compute dtype."""
    reason = ctx.choose_contraction(ctx, a, b)
    if reason != "generated":
        raise LibraryMultiplies(reason or "the library multiplies matrices faster")
    wide = compute_dtype(a.dtype)
    axes, (k,) = small_axes(ctx, [a.shape[-1]])
    single = a.shape[-1].value == 1

    def element(idx: Sequence[Index]) -> Expr:
        *batch, m, n = idx
        at = const(0) if single else k
        x, y = a.at([*batch, m, at]), b.at([*batch, at, n])
        if single:  # of vectors, each by each
            return op("mul", cast(x, wide), cast(y, wide))
        return reduction_of("sum", axes, op("mul", cast(x, wide), cast(y, wide)))

    return element


@lowering("aten.convolution.default")
def convolution(ctx: LowerContext, x: Value, w: Value, bias: Value | None, *rest: Any) -> Value:
    """On a GPU the bias is added by the kernel that reads the result: the library would launch one
    of its own for it."""
    reason = "the library's convolution is faster"
    if bias is None or ctx.fake().device.type == "cpu" or ctx.node is None:
        raise ctx.decline(reason)
    plain = emit(ctx, ctx.node, (x, w, None, *rest), {}, reason)
    column = make(ctx, [bias.shape[0], *[const(1)] * (x.rank - 2)], lambda idx: bias.at(idx[:1]))
    return pointwise(ctx, (plain, column), lambda a, b: op("add", a, b))


@lowering("aten.mm.default", "aten.bmm.default")
def matmul(ctx: LowerContext, a: Value, b: Value) -> Value:
    element = product_sum(ctx, a, b)
    return make(ctx, ctx.shape_of(ctx.fake()), lambda idx: cast(element(idx), a.dtype))


def column(ctx: LowerContext, v: Value) -> Value:
    """A vector as a matrix of one column."""
    (i,), (j,) = v.axes, ctx.axes([const(1)])
    return Value((i, j), v.expr)


def row(ctx: LowerContext, v: Value) -> Value:
    """A vector as a matrix of one row."""
    (i,), (j,) = v.axes, ctx.axes([const(1)])
    return Value((j, i), v.expr)


@lowering("aten.mv.default")
def matrix_vector(ctx: LowerContext, a: Value, v: Value) -> Value:
    element = product_sum(ctx, a, column(ctx, v))
    return make(ctx, a.shape[:1], lambda idx: cast(element([*idx, const(0)]), a.dtype))


@lowering("aten.dot.default")
def dot(ctx: LowerContext, a: Value, b: Value) -> Value:
    element = product_sum(ctx, row(ctx, a), column(ctx, b))
    return make(ctx, [], lambda idx: cast(element([const(0), const(0)]), a.dtype))


@lowering("aten.addmv.default")
def addmv(
    ctx: LowerContext, bias: Value, a: Value, v: Value, *, beta: Any = 1, alpha: Any = 1
) -> Value:
    element = product_sum(ctx, a, column(ctx, v))
    return with_addend(ctx, bias, lambda idx: element([*idx, const(0)]), a.dtype, beta, alpha)


@lowering("aten.addmm.default", "aten.baddbmm.default")
def addmm(
    ctx: LowerContext, bias: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1
) -> Value:
    return with_addend(ctx, bias, product_sum(ctx, a, b), a.dtype, beta, alpha)


def with_addend(
    ctx: LowerContext,
    bias: Value,
    element: Callable[[Sequence[Index]], Expr],
    dtype: str,
    beta: Any,
    alpha: Any,
) -> Value:
    """``beta * bias + alpha * product``; with a beta of 0 the bias is not read."""
    wide = compute_dtype(dtype)

    def out(idx: tuple[Index, ...]) -> Expr:
        total = element(idx)
        if alpha != 1:
            total = op("mul", total, scalar(alpha, wide))
        if beta == 0:
            return cast(total, dtype)
        first = cast(broadcast(bias, idx), wide)
        if beta != 1:
            first = op("mul", first, scalar(beta, wide))
        return cast(op("add", first, total), dtype)

    return make(ctx, ctx.shape_of(ctx.fake()), out)


@lowering("aten._addmm_activation.default")
def activated(
    ctx: LowerContext,
    bias: Value,
    a: Value,
    b: Value,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    use_gelu: bool = False,
) -> Value:
    total = addmm(ctx, bias, a, b, beta=beta, alpha=alpha)
    return gelu(ctx, total, approximate="tanh") if use_gelu else relu(ctx, total)


# -- nearest neighbours ----------------------------------------------------------------------------
def whole_factor(small: Index, large: Index, scale: Any) -> Index | None:
    """How many times larger a dimension becomes, where that is a whole number."""
    if small.value == 0:
        return None
    factor = large // small
    if factor.value in (None, 0) or small * factor is not large:
        return None
    return factor if scale is None or scale == factor.value else None


def nearest(ctx: LowerContext, i: Index, n: Index, m: Index, scale: Any, exact: bool) -> Index:
    """The input that output i of m copies, of n: ATen's arithmetic, which is in f32."""
    if isinstance(scale, Value):
        raise ctx.decline("nearest neighbours by a factor that is known at run time only")
    factor = whole_factor(n, m, scale)
    if factor is not None:
        return i // factor
    if n is m and not exact:
        return i
    if scale is None and (n.value is None or m.value is None):
        raise ctx.decline("nearest neighbours by a factor that is known at run time only")
    ratio = 1.0 / scale if scale else float(n.value or 0) / float(m.value or 1)
    place = cast(index_value(i), "f32")
    if exact:
        place = op("add", place, literal(0.5, "f32"))
    place = cast(op("floor", op("mul", place, literal(ratio, "f32"))), "i64")
    place = op("minimum", place, index_value(n - 1))
    known = exact_index(place)
    return known if known is not None else loaded(place)


def upsampled(ctx: LowerContext, x: Value, scales: Sequence[Any], exact: bool) -> Value:
    shape = ctx.shape_of(ctx.fake())
    r = len(scales)

    def element(idx: tuple[Index, ...]) -> Expr:
        sizes = zip(idx[-r:], x.shape[-r:], shape[-r:], scales, strict=True)
        return x.at([*idx[:-r], *(nearest(ctx, i, n, m, s, exact) for i, n, m, s in sizes)])

    return make(ctx, shape, element)


def gathered(ctx: LowerContext, grad: Value, scales: Sequence[Any], exact: bool) -> Value:
    """Each input's gradient: the sum over its copies."""
    shape = ctx.shape_of(ctx.fake())
    r, wide = len(scales), compute_dtype(grad.dtype)
    factors: list[Index] = []
    for n, m, s in zip(shape[-r:], grad.shape[-r:], scales, strict=True):
        factor = whole_factor(n, m, s)
        if factor is None:
            raise ctx.decline("gradient of nearest neighbours by a factor that is not whole")
        factors.append(factor)
    axes, k = small_axes(ctx, factors)

    def element(idx: tuple[Index, ...]) -> Expr:
        copies = [i * f + j for i, f, j in zip(idx[-r:], factors, k, strict=True)]
        value = cast(grad.at([*idx[:-r], *copies]), wide)
        return cast(reduction_of("sum", axes, value), grad.dtype)

    return make(ctx, shape, element)


def _nearest(rank: int, exact: bool, backward: bool) -> Callable[..., Value]:
    def lower(ctx: LowerContext, x: Value, *args: Any) -> Value:
        scales = list(args[2 if backward else 1 :]) or [None] * rank
        if len(scales) == 1 and isinstance(scales[0], (list, tuple)):
            scales = list(scales[0])  # overloads "vec" list them
        scales = scales if scales != [None] else [None] * rank
        return (gathered if backward else upsampled)(ctx, x, scales, exact)

    return lower


for _r in (1, 2, 3):
    for _name, _exact in (("upsample_nearest", False), ("_upsample_nearest_exact", True)):
        for _overload in ("default", "vec"):
            lowering(f"aten.{_name}{_r}d.{_overload}")(_nearest(_r, _exact, False))
        lowering(f"aten.{_name}{_r}d_backward.default")(_nearest(_r, _exact, True))
