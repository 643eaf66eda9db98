"""Reads and writes at positions that tensors hold: gathers and scatters.

In: `Value`s, integer tensors among them. Out: a gather is a load whose index is a loaded value; a
scatter is a copy of its base with stores at loaded indices (`LowerContext.scatter`). Invariants:
where ATen counts negative positions from the end, so does the index; nothing else is done to
positions: generated code checks them against the tensor, as eager does, unless told otherwise.

Sums of half types and of narrow integers accumulate in f32 and i32 memory and round once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, cast, index_value, literal, op
from deuteron.ir.index import Axis, Index, const, product
from deuteron.ir.operations import FLOATS, REDUCTIONS
from deuteron.lower import additions, adjoint, compared, ordered
from deuteron.lower.access import (
    both,
    computed,
    flatten,
    loaded,
    masked,
    nothing,
    read,
    unflatten,
    wrap,
    wrap_dim,
)
from deuteron.lower.core import TO_TORCH, TORCH_DTYPES, LowerContext, Value, lowering, make
from deuteron.lower.pointwise import broadcast, compute_dtype, operand, scalar
from deuteron.lower.positions import exact, inlined

ACCUMULATE_KINDS = {
    "add": "sum",
    "sum": "sum",
    "multiply": "prod",
    "prod": "prod",
    "amax": "max",
} | {
    "amin": "min",
    "mean": "sum",
}
# Steps of an unrolled binary search; each depends on a load of the one before.
MAX_UNROLLED_STEPS = 12


# -- several index tensors -------------------------------------------------------------------------
class Places:
    """Index tensors of ``x[...]``: their broadcast shape, and where its dimensions go."""

    def __init__(
        self, ctx: LowerContext, x: Value, indices: Sequence[Value | None], unsafe: bool = False
    ) -> None:
        """With `unsafe` no position that is computed here is negative."""
        given = [(d, i) for d, i in enumerate(indices) if i is not None]
        for _, i in given:
            if i.dtype in ("bool", "u8"):
                raise ctx.decline("how many elements a mask selects is known at run time only")
        self.ctx, self.x, self.given, self.unsafe = ctx, x, dict(given), unsafe
        dims = [d for d, _ in given]
        self.shape = broadcast_shape([i.shape for _, i in given])
        self.rest = [d for d in range(x.rank) if d not in self.given]
        together = bool(dims) and dims == list(range(dims[0], dims[0] + len(dims)))
        self.first = dims[0] if together else 0  # of the index dimensions in the result

    def result_shape(self) -> list[Index]:
        rest = [self.x.shape[d] for d in self.rest]
        return [*rest[: self.first], *self.shape, *rest[self.first :]]

    def at(self, idx: Sequence[Index]) -> list[Index]:
        """The place in x of the result's element `idx`."""
        end = self.first + len(self.shape)
        mine, others = idx[self.first : end], [*idx[: self.first], *idx[end:]]
        out = [const(0)] * self.x.rank
        for d, i in zip(self.rest, others, strict=True):
            out[d] = i
        for d, v in self.given.items():
            out[d] = self.position(broadcast(v, mine), self.x.shape[d])
        return out

    def position(self, e: Expr, extent: Index) -> Index:
        known = exact(inlined(self.ctx, e))
        if known is None:
            return loaded(e, extent)
        return known if self.unsafe else computed(wrap(known, extent), extent)


def broadcast_shape(shapes: Sequence[Sequence[Index]]) -> list[Index]:
    rank = max((len(s) for s in shapes), default=0)
    out = [const(1)] * rank
    for s in shapes:
        for k, n in enumerate(s, rank - len(s)):
            if out[k].value == 1:
                out[k] = n
    return out


@lowering("aten.index.Tensor")
def index(
    ctx: LowerContext, x: Value, indices: Sequence[Value | None], unsafe: bool = False
) -> Value:
    places = Places(ctx, x, indices, unsafe)

    def element(idx: tuple[Index, ...]) -> Expr:
        return x.at(places.at(idx)) if unsafe else read(ctx, x, places.at(idx))

    return make(ctx, ctx.shape_of(ctx.fake()), element)


@lowering("aten._unsafe_index.Tensor")
def unsafe_index(ctx: LowerContext, x: Value, indices: Sequence[Value | None]) -> Value:
    return index(ctx, x, indices, unsafe=True)


@lowering("aten.index_put", "aten._unsafe_index_put")
def index_put(
    ctx: LowerContext,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Value:
    masks = [i for i in indices if i is not None and i.dtype in ("bool", "u8")]
    if masks:
        if len(masks) > 1 or any(i is not None for i in indices if i is not masks[0]):
            raise ctx.decline("a mask among other indices")
        return masked_put(ctx, x, masks[0], indices.index(masks[0]), values, accumulate)
    places = Places(ctx, x, indices)
    axes = ctx.axes(places.result_shape())
    idx = tuple(a.index for a in axes)
    body = broadcast(values, idx)
    return scatter_into(ctx, x, axes, places.at(idx), body, "sum" if accumulate else None)


def masked_put(
    ctx: LowerContext, x: Value, mask: Value, first: int, values: Value, accumulate: bool
) -> Value:
    """``x[mask] = number``: the same for every selected element, so where they are is enough."""
    if any(n.value != 1 for n in values.shape):
        raise ctx.decline("which value a selected element gets is known at run time only")
    wide = compute_dtype(x.dtype)

    def element(idx: tuple[Index, ...]) -> Expr:
        old = x.at(idx)
        new = cast(values.at([const(0)] * values.rank), x.dtype)
        if accumulate and x.dtype != "bool":
            new = cast(op("add", cast(old, wide), cast(new, wide)), x.dtype)
        elif accumulate:
            new = op("logical_or", old, new)
        here = cast(mask.at(idx[first : first + mask.rank]), "bool")
        return op("where", here, new, old)

    return make(ctx, x.shape, element)


def scatter_into(
    ctx: LowerContext,
    x: Value,
    axes: tuple[Axis, ...],
    place: Sequence[Index],
    body: Expr,
    kind: str | None,
    mask: Expr | None = None,
) -> Value:
    """A copy of x with ``copy[place] (kind)= body`` at every point of the axes."""
    if any(a.extent.value == 0 for a in axes):
        return ctx.define(x)
    if kind is None:
        return ctx.scatter(x, axes, tuple(place), cast(body, x.dtype), None, mask)
    preimages = adjoint.preimages_of(axes, place, x) if kind == "sum" else None
    if preimages is not None:
        wide = compute_dtype(x.dtype) if x.dtype in FLOATS else x.dtype
        base = make(ctx, x.shape, lambda idx: cast(x.at(idx), wide))
        body = cast(cast(body, x.dtype), wide)
        out = adjoint.gathered(ctx, base, preimages, body, mask)
        return make(ctx, x.shape, lambda idx: cast(out.at(idx), x.dtype))
    wide = additions.ACCUMULATORS.get(x.dtype, x.dtype)
    body = cast(cast(body, x.dtype), wide)
    if ctx.on_gpu() and kind in ("sum", "prod") and x.dtype != "bool":
        repeat = x.dtype in FLOATS and torch.are_deterministic_algorithms_enabled()
        rows = additions.rows_of(axes, place, x) if kind == "sum" else None
        way = additions.choose(ctx, x, rows, repeat) if rows is not None else "atomic"
        if rows is not None and way == "compared":
            return compared.summed(ctx, x, rows, place, body, mask)
        if rows is not None and way == "ordered":
            return ordered.Ordered(ctx, x, rows, place, body, mask).sum()
        if repeat:
            raise ctx.decline("atomic additions have no fixed order, and results are to repeat")
    base = make(ctx, x.shape, lambda idx: cast(x.at(idx), wide))
    out = ctx.scatter(base, axes, tuple(place), body, kind, mask)
    return make(ctx, x.shape, lambda idx: cast(out.at(idx), x.dtype))


# -- one index tensor ------------------------------------------------------------------------------
@lowering("aten.embedding.default")
def embedding(ctx: LowerContext, weight: Value, indices: Value, *args: Any, **kw: Any) -> Value:
    shape = [*indices.shape, weight.shape[1]]

    def element(idx: tuple[Index, ...]) -> Expr:
        return read(ctx, weight, [loaded(indices.at(idx[:-1]), end=weight.shape[0]), idx[-1]])

    return make(ctx, shape, element)


@lowering("aten.index_select")
def index_select(ctx: LowerContext, x: Value, dim: int, indices: Value) -> Value:
    x, indices = at_least_1d(ctx, x), at_least_1d(ctx, indices)
    dim = wrap_dim(dim, x.rank)
    shape = ctx.shape_of(ctx.fake())

    def element(idx: tuple[Index, ...]) -> Expr:
        at = list(idx) or [const(0)]
        at[dim] = loaded(indices.at([at[dim]]), end=x.shape[dim])
        return read(ctx, x, at)

    return make(ctx, shape, element)


def as_type(ctx: LowerContext, x: Value, dtype: str) -> Value:
    return make(ctx, x.shape, lambda idx: cast(x.at(idx), dtype))


def at_least_1d(ctx: LowerContext, x: Value) -> Value:
    return x if x.rank else make(ctx, [const(1)], lambda idx: x.at(()))


@lowering("aten.gather.default")
def gather(ctx: LowerContext, x: Value, dim: int, indices: Value, **kwargs: Any) -> Value:
    dim, rank = wrap_dim(dim, x.rank), indices.rank
    if any(n.value == 0 for n in indices.shape):
        return nothing(ctx, indices.shape, x.dtype)
    x = at_least_1d(ctx, x)

    def element(idx: tuple[Index, ...]) -> Expr:
        at = list(idx) if rank else [const(0)] * x.rank
        at[dim] = loaded(indices.at(idx), end=x.shape[dim])
        return read(ctx, x, at)

    return make(ctx, indices.shape, element)


def element_place(position: Expr, x: Value) -> tuple[Index, ...]:
    """Where the element of x is that a tensor names by its row-major position. Of a single element
    the position is kept as well: it is to be checked."""
    i = loaded(position, product(x.shape))
    place = unflatten(i, x.shape)
    return (i, *place[1:]) if place and product(x.shape).value == 1 else place


@lowering("aten.take")
def take(ctx: LowerContext, x: Value, indices: Value) -> Value:
    def element(idx: tuple[Index, ...]) -> Expr:
        return read(ctx, x, element_place(indices.at(idx), x))

    if any(n.value == 0 for n in x.shape):
        raise ctx.decline("elements of an empty tensor are taken")
    x = at_least_1d(ctx, x)
    return make(ctx, indices.shape, element)


@lowering("aten.put")
def put(
    ctx: LowerContext, x: Value, indices: Value, source: Value, accumulate: bool = False
) -> Value:
    if any(n.value == 0 for n in x.shape):
        raise ctx.decline("elements of an empty tensor are written")
    if any(n.value == 0 for n in indices.shape):
        return ctx.define(x)
    axes = ctx.axes(indices.shape)
    idx = tuple(a.index for a in axes)
    place = element_place(indices.at(idx), x)
    position = flatten(idx, indices.shape)
    body = source.at(unflatten(position, source.shape) if source.rank else ())
    return scatter_into(ctx, x, axes, place, body, "sum" if accumulate else None)


# -- scatter along a dimension ---------------------------------------------------------------------
def scatter_along(
    ctx: LowerContext,
    x: Value,
    dim: int,
    indices: Value,
    source: Any,
    kind: str | None,
    include_self: bool = True,
    mean: bool = False,
) -> Value:
    """``out[.., indices[i], ..] (kind)= source[i]``, with `source` a tensor or a number."""
    if any(n.value == 0 for n in indices.shape):
        return ctx.define(x)
    scalar_result = x.rank == 0
    x, indices = at_least_1d(ctx, x), at_least_1d(ctx, indices)
    source = at_least_1d(ctx, source) if isinstance(source, Value) else source
    dtype = x.dtype
    if mean and additions.ACCUMULATORS.get(dtype) == "f32":  # rounded once, after the division
        x = as_type(ctx, x, "f32")
    dim = wrap_dim(dim, x.rank)

    def points() -> tuple[tuple[Axis, ...], list[Index]]:
        axes = ctx.axes(indices.shape)
        place = [a.index for a in axes]
        place[dim] = loaded(indices.at(place), end=x.shape[dim])
        return axes, place

    axes, place = points()
    at = [a.index for a in axes]
    body = operand(source, at, x.dtype)
    out = reduced(ctx, x, (axes, place), points(), body, kind, include_self)
    if mean:
        out = averaged(ctx, out, points(), include_self)
    shape = [] if scalar_result else out.shape
    return make(ctx, shape, lambda idx: cast(out.at(idx or [const(0)]), dtype))


Points = tuple[tuple[Axis, ...], list[Index]]


def reduced(
    ctx: LowerContext,
    x: Value,
    points: Points,
    again: Points,
    body: Expr,
    kind: str | None,
    include_self: bool,
) -> Value:
    """The scatter; without the elements that were there, they become the neutral one first."""
    if kind is not None and not include_self:
        identity = REDUCTIONS[kind].identity(x.dtype)
        x = scatter_into(ctx, x, *again, literal(identity, x.dtype), None)
    return scatter_into(ctx, x, *points, body, kind)


def averaged(ctx: LowerContext, total: Value, points: Points, include_self: bool) -> Value:
    """Sums divided by how many numbers went into each, which is at least one."""
    wide = "f32" if total.dtype in ("f16", "bf16") else total.dtype
    counted = "i32" if wide in FLOATS else wide
    zero = make(ctx, total.shape, lambda idx: literal(1 if include_self else 0, counted))
    count = scatter_into(ctx, zero, *points, literal(1, counted), "sum")

    def element(idx: tuple[Index, ...]) -> Expr:
        n = cast(op("maximum", count.at(idx), literal(1, counted)), wide)
        name = "div" if wide in FLOATS else "floordiv"
        return cast(op(name, cast(total.at(idx), wide), n), total.dtype)

    return make(ctx, total.shape, element)


def one_each(
    ctx: LowerContext, x: Value, dim: int, indices: Value, source: Any, add: bool
) -> Value | None:
    """A scatter of one element per row, as a comparison at every element of the row (one-hot
    vectors, the gradient of a gather): nothing is written twice, and it fuses like arithmetic.

    An index outside the row is reported, as everywhere.
    """
    if not x.rank or indices.rank != x.rank:
        return None
    dim = wrap_dim(dim, x.rank)
    if indices.shape[dim].value != 1 or any(
        a is not b for d, (a, b) in enumerate(zip(indices.shape, x.shape)) if d != dim
    ):
        return None
    wide = compute_dtype(x.dtype)

    def element(idx: tuple[Index, ...]) -> Expr:
        first = [const(0) if d == dim else i for d, i in enumerate(idx)]
        place = E.checked(cast(indices.at(first), "i64"), x.shape[dim])
        here = op("eq", index_value(idx[dim]), place)
        old = x.at(idx)
        new = (
            cast(source.at(first), x.dtype)
            if isinstance(source, Value)
            else scalar(source, x.dtype)
        )
        if add:
            new = cast(op("add", cast(old, wide), cast(new, wide)), x.dtype)
        return op("where", here, new, old)

    return make(ctx, x.shape, element)


@lowering("aten.scatter.src", "aten.scatter.value")
def scatter(ctx: LowerContext, x: Value, dim: int, indices: Value, source: Any) -> Value:
    elementwise = one_each(ctx, x, dim, indices, source, False)
    return (
        elementwise
        if elementwise is not None
        else scatter_along(ctx, x, dim, indices, source, None)
    )


@lowering("aten.scatter.reduce", "aten.scatter.value_reduce")
def scatter_with(
    ctx: LowerContext, x: Value, dim: int, indices: Value, source: Any, *, reduce: str
) -> Value:
    return scatter_along(ctx, x, dim, indices, source, ACCUMULATE_KINDS[reduce])


@lowering("aten.scatter_add.default")
def scatter_add(ctx: LowerContext, x: Value, dim: int, indices: Value, source: Value) -> Value:
    elementwise = one_each(ctx, x, dim, indices, source, True) if x.dtype != "bool" else None
    return (
        elementwise
        if elementwise is not None
        else scatter_along(ctx, x, dim, indices, source, "sum")
    )


@lowering("aten.scatter_reduce.two")
def scatter_reduce(
    ctx: LowerContext,
    x: Value,
    dim: int,
    indices: Value,
    source: Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> Value:
    return scatter_along(
        ctx, x, dim, indices, source, ACCUMULATE_KINDS[reduce], include_self, reduce == "mean"
    )


@lowering("aten.index_reduce")
def index_reduce(
    ctx: LowerContext,
    x: Value,
    dim: int,
    indices: Value,
    source: Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> Value:
    x1, source, along = (at_least_1d(ctx, v) for v in (x, source, indices))
    dim = wrap_dim(dim, x1.rank)
    # Each position stands for a whole slice of the source.
    spread = make(ctx, source.shape, lambda idx: along.at([idx[dim]]))
    return scatter_along(
        ctx, x, dim, spread, source, ACCUMULATE_KINDS[reduce], include_self, reduce == "mean"
    )


# -- search ----------------------------------------------------------------------------------------
def search(
    ctx: LowerContext, sorted_: Value, values: Any, right: bool, shape: Sequence[Index]
) -> Value:
    """How many elements of a sorted row are below each value (`right`: below or equal).

    Branch-free binary search: the answer is built from its highest bit down.
    """
    n = sorted_.shape[-1].value
    if n is None or n.bit_length() > MAX_UNROLLED_STEPS:
        raise ctx.decline("a binary search over a long or unknown number of boundaries")
    dtype = sorted_.dtype
    if isinstance(values, Value) and values.dtype != dtype:
        raise ctx.decline("values and boundaries of two types")
    if not isinstance(values, Value):  # compared as torch compares a number with them
        kind = bool if isinstance(values, bool) else float if isinstance(values, float) else int
        if torch.result_type(torch.empty(1, dtype=TO_TORCH[dtype]), kind(1)) != TO_TORCH[dtype]:
            raise ctx.decline("a number and boundaries of two types")
    out = TORCH_DTYPES[ctx.fake().dtype]
    wide = compute_dtype(dtype)

    def element(idx: tuple[Index, ...]) -> Expr:
        value = cast(operand(values, idx, dtype), wide)
        row = list(idx[: sorted_.rank - 1])
        below = literal(0, "i64")
        for bit in reversed(range(n.bit_length())):
            tried = op("add", below, literal(1 << bit, "i64"))
            legal = op("le", tried, literal(n, "i64"))
            place = loaded(op("sub", tried, literal(1, "i64")))
            probe = masked(legal, sorted_.at([*row, place]))
            # NaN is above everything: a comparison that fails moves on.
            stop = op("gt" if right else "ge", cast(probe, wide), value)
            below = op("where", both(legal, op("logical_not", stop)), tried, below)
        return cast(below, out)

    return make(ctx, shape, element)


@lowering("aten.bucketize.Tensor", "aten.bucketize.Scalar")
def bucketize(
    ctx: LowerContext,
    values: Any,
    boundaries: Value,
    *,
    out_int32: bool = False,
    right: bool = False,
) -> Value:
    shape = values.shape if isinstance(values, Value) else ()
    return search(ctx, boundaries, values, right, shape)


@lowering("aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def searchsorted(
    ctx: LowerContext,
    sorted_: Value,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Value:
    if sorter is not None:
        raise ctx.decline("a binary search through a sorter")
    shape = values.shape if isinstance(values, Value) else ()
    return search(ctx, sorted_, values, right or side == "right", shape)


# -- what stays a library call ---------------------------------------------------------------------
LIBRARY_REASONS = {
    "the size of the result depends on values": (
        "aten.nonzero aten.masked_select deuteron.unique_consecutive deuteron.unique_dim "
        "deuteron.unique2 aten.repeat_interleave.Tensor aten.bincount"
    ),
    "an order is computed, which library code does best": (
        "aten.sort aten.argsort aten.topk aten.kthvalue aten.mode aten.median aten.nanmedian "
        "aten.msort aten.randperm aten.multinomial"
    ),
    "each value's place depends on how many were selected before it": (
        "aten.masked_scatter aten.masked_scatter_backward"
    ),
}


def _declined(reason: str) -> Any:
    def lower(ctx: LowerContext, *args: Any, **kwargs: Any) -> Value:
        raise ctx.decline(reason)

    return lower


for _reason, _names in LIBRARY_REASONS.items():
    for _name in _names.split():
        lowering(_name)(_declined(_reason))

__all__ = ["Places", "broadcast_shape", "scatter_along", "scatter_into"]
