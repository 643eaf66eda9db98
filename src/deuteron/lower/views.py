"""Views and data movement of ATen as index maps.

In: `Value`s. Out: `Value`s whose element at an index is the argument's element at a mapped index
(masked where the map leaves the argument). Nothing here defines a tensor except the scatter form of
`as_strided_scatter`. Shapes are the fake results'; no question is asked of a symbolic size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deuteron.graph.aliasing import overlaps
from deuteron.graph.ops import STRIDED_OPERATORS, is_view, packet
from deuteron.ir.expr import Expr, cast, index_value, literal, op
from deuteron.ir.index import Index, const, is_nonneg, maximum, minimum, product
from deuteron.lower.access import (
    both,
    compare,
    flatten,
    inside,
    masked,
    nothing,
    reshaped,
    unflatten,
    wrap,
    wrap_dim,
)
from deuteron.lower.core import TORCH_DTYPES, LowerContext, Value, lowering, make
from deuteron.lower.pointwise import broadcast, scalar
from deuteron.lower.strided import argument, storage_order

# More inputs than this are joined by a library call: each costs every element a comparison.
MAX_CONCATENATED = 16


def result_shape(ctx: LowerContext) -> tuple[Index, ...]:
    return ctx.shape_of(ctx.fake())


def fakes(ctx: LowerContext) -> Sequence[torch.Tensor]:
    """All fake results of the node."""
    assert ctx.node is not None
    return ctx.node.meta["val"]


# -- the same elements in another order ------------------------------------------------------------
@lowering(
    "aten.view.default",
    "aten._unsafe_view",
    "aten.reshape",
    "aten._reshape_alias",
    "aten.view_copy.default",
    "aten._reshape_copy",
)
def view(ctx: LowerContext, x: Value, *args: Any, **kwargs: Any) -> Value:
    shape = result_shape(ctx)
    if any(n.value == 0 for n in shape):
        return nothing(ctx, shape, x.dtype)
    return make(ctx, shape, lambda idx: x.at(reshaped(idx, shape, x.shape)))


@lowering("aten.permute", "aten.permute_copy")
def permute(ctx: LowerContext, x: Value, dims: Sequence[int]) -> Value:
    order = [wrap_dim(d, x.rank) for d in dims]
    places = [order.index(d) for d in range(x.rank)]
    shape = [x.axes[d].extent for d in order]
    return make(ctx, shape, lambda idx: x.at([idx[p] for p in places]))


@lowering("aten.t", "aten.transpose.int", "aten.transpose_copy.int", "aten.t_copy")
def transpose(ctx: LowerContext, x: Value, a: int = 0, b: int = 1) -> Value:
    if x.rank < 2:
        return x
    order = list(range(x.rank))
    a, b = wrap_dim(a, x.rank), wrap_dim(b, x.rank)
    order[a], order[b] = order[b], order[a]
    return permute(ctx, x, order)


@lowering("aten.expand", "aten.expand_copy", "aten.expand_as", "aten.broadcast_to")
def expand(ctx: LowerContext, x: Value, *args: Any, **kwargs: Any) -> Value:
    return make(ctx, result_shape(ctx), lambda idx: broadcast(x, idx))


@lowering("prims.broadcast_in_dim")
def broadcast_in_dim(ctx: LowerContext, x: Value, shape: Any, dims: Sequence[int]) -> Value:
    def element(idx: tuple[Index, ...]) -> Expr:
        at = [idx[d] for d in dims]
        return x.at([const(0) if n.value == 1 else i for i, n in zip(at, x.shape, strict=True)])

    return make(ctx, result_shape(ctx), element)


@lowering("aten.unsqueeze", "aten.unsqueeze_copy")
def unsqueeze(ctx: LowerContext, x: Value, dim: int) -> Value:
    dim %= x.rank + 1
    shape = [*x.shape[:dim], const(1), *x.shape[dim:]]
    return make(ctx, shape, lambda idx: x.at([*idx[:dim], *idx[dim + 1 :]]))


@lowering("aten.squeeze", "aten.squeeze_copy")
def squeeze(ctx: LowerContext, x: Value, dim: Any = None) -> Value:
    given = range(x.rank) if dim is None else [dim] if isinstance(dim, int) else dim
    dropped = {wrap_dim(d, x.rank) for d in given}
    kept_dims = [d for d in range(x.rank) if d not in dropped or x.axes[d].extent.value != 1]

    def element(idx: tuple[Index, ...]) -> Expr:
        at = [const(0)] * x.rank
        for d, i in zip(kept_dims, idx, strict=True):
            at[d] = i
        return x.at(at)

    return make(ctx, [x.axes[d].extent for d in kept_dims], element)


@lowering("aten.flip", "prims.rev")
def flip(ctx: LowerContext, x: Value, dims: Sequence[int]) -> Value:
    turned = {wrap_dim(d, x.rank) for d in dims} if x.rank else set()
    return make(
        ctx,
        x.shape,
        lambda idx: x.at([x.shape[d] - 1 - i if d in turned else i for d, i in enumerate(idx)]),
    )


@lowering("aten.roll")
def roll(ctx: LowerContext, x: Value, shifts: Any, dims: Any = ()) -> Value:
    shifts = [shifts] if isinstance(shifts, (int, Index)) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if any(n.value == 0 for n in x.shape):
        return nothing(ctx, x.shape, x.dtype)

    def turned(i: Index, by: Any, n: Index) -> Index:
        return (i - ctx.size(by)) % n

    if not dims:
        size = product(x.shape)
        return make(
            ctx,
            x.shape,
            lambda idx: x.at(unflatten(turned(flatten(idx, x.shape), shifts[0], size), x.shape)),
        )

    def element(idx: tuple[Index, ...]) -> Expr:
        at = list(idx)
        for s, d in zip(shifts, dims, strict=True):
            d = wrap_dim(d, x.rank)
            at[d] = turned(at[d], s, x.shape[d])
        return x.at(at)

    return make(ctx, x.shape, element)


# -- parts -----------------------------------------------------------------------------------------
def slice_start(ctx: LowerContext, start: Any, n: Index) -> Index:
    """A slice's first position, as Python clamps it from below.

    A start beyond the end makes an empty slice, of which no element is read.
    """
    if start is None:
        return const(0)
    s = ctx.size(start)
    first = wrap(s, n)
    return first if is_nonneg(s) else maximum(first, 0)


@lowering("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_(
    ctx: LowerContext, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Value:
    dim = wrap_dim(dim, x.rank)
    first, step = slice_start(ctx, start, x.shape[dim]), ctx.size(step)

    def element(idx: tuple[Index, ...]) -> Expr:
        at = list(idx)
        at[dim] = idx[dim] * step + first
        return x.at(at)

    return make(ctx, result_shape(ctx), element)


@lowering("aten.select.int", "aten.select_copy.int")
def select(ctx: LowerContext, x: Value, dim: int, index: Any) -> Value:
    dim = wrap_dim(dim, x.rank)
    at = wrap(ctx.size(index), x.shape[dim])
    shape = [*x.shape[:dim], *x.shape[dim + 1 :]]
    return make(ctx, shape, lambda idx: x.at([*idx[:dim], at, *idx[dim:]]))


def parts(ctx: LowerContext, x: Value, dim: int, sizes: Sequence[Index]) -> tuple[Value, ...]:
    dim = wrap_dim(dim, x.rank)
    out, start = [], const(0)
    for n in sizes:
        shape = [*x.shape[:dim], n, *x.shape[dim + 1 :]]

        def element(idx: tuple[Index, ...], first: Index = start) -> Expr:
            return x.at([*idx[:dim], idx[dim] + first, *idx[dim + 1 :]])

        out.append(make(ctx, shape, element))
        start = start + n
    return tuple(out)


@lowering(
    "aten.split",
    "aten.split_with_sizes",
    "aten.split_copy",
    "aten.split_with_sizes_copy",
    "aten.unsafe_split",
    "aten.unsafe_split_with_sizes",
    "aten.chunk",
    "aten.tensor_split",
)
def split(
    ctx: LowerContext, x: Value, sizes: Any = None, dim: int = 0, **kwargs: Any
) -> tuple[Value, ...]:
    dim = wrap_dim(dim, x.rank)
    return parts(ctx, x, dim, [ctx.size(f.shape[dim]) for f in fakes(ctx)])


@lowering("aten.unbind", "aten.unbind_copy")
def unbind(ctx: LowerContext, x: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(select(ctx, x, dim, k) for k in range(len(fakes(ctx))))


@lowering("aten.diagonal", "aten.diagonal_copy")
def diagonal(ctx: LowerContext, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    dim1, dim2 = wrap_dim(dim1, x.rank), wrap_dim(dim2, x.rank)
    rest = [d for d in range(x.rank) if d not in (dim1, dim2)]

    def element(idx: tuple[Index, ...]) -> Expr:
        at = [const(0)] * x.rank
        for d, i in zip(rest, idx, strict=False):
            at[d] = i
        at[dim1] = idx[-1] + max(0, -offset)
        at[dim2] = idx[-1] + max(0, offset)
        return x.at(at)

    return make(ctx, result_shape(ctx), element)


@lowering("aten.unfold", "aten.unfold_copy")
def unfold(ctx: LowerContext, x: Value, dim: int, size: Any, step: Any) -> Value:
    step = ctx.size(step)
    if x.rank == 0:
        return make(ctx, result_shape(ctx), lambda idx: x.at(()))
    dim = wrap_dim(dim, x.rank)

    def element(idx: tuple[Index, ...]) -> Expr:
        *at, k = idx
        at[dim] = at[dim] * step + k
        return x.at(at)

    return make(ctx, result_shape(ctx), element)


# -- more elements ---------------------------------------------------------------------------------
@lowering("aten.repeat", "aten.tile")
def repeat(ctx: LowerContext, x: Value, repeats: Any) -> Value:
    shape = result_shape(ctx)
    if any(n.value == 0 for n in x.shape):
        return nothing(ctx, shape, x.dtype)

    def element(idx: tuple[Index, ...]) -> Expr:
        tail = idx[len(idx) - x.rank :] if x.rank else ()
        sizes = shape[len(idx) - x.rank :]
        return x.at(
            [
                i if n is total else const(0) if n.value == 1 else i % n
                for i, n, total in zip(tail, x.shape, sizes, strict=True)
            ]
        )

    return make(ctx, shape, element)


@lowering("aten.constant_pad_nd")
def constant_pad_nd(ctx: LowerContext, x: Value, pad: Sequence[Any], value: Any = 0) -> Value:
    before = pads(ctx, pad, x.rank)
    fill = scalar(value, x.dtype)

    def element(idx: tuple[Index, ...]) -> Expr:
        at = [i - low for i, (low, _) in zip(idx, before, strict=True)]
        checks = [
            inside(i, 0, n)
            for i, n, p in zip(at, x.shape, before, strict=True)
            if p != (const(0), const(0))
        ]
        return masked(both(*checks), x.at(at), fill)

    return make(ctx, result_shape(ctx), element)


def pads(ctx: LowerContext, pad: Sequence[Any], rank: int) -> list[tuple[Index, Index]]:
    """(before, after) per dimension; ATen lists pairs from the last dimension on."""
    pairs = [(ctx.size(a), ctx.size(b)) for a, b in zip(pad[::2], pad[1::2], strict=True)]
    return [(const(0), const(0))] * (rank - len(pairs)) + pairs[::-1]


@lowering("aten.reflection_pad1d", "aten.reflection_pad2d", "aten.reflection_pad3d")
def reflection_pad(ctx: LowerContext, x: Value, pad: Sequence[Any]) -> Value:
    def before(i: Index, n: Index) -> Index:
        return -i

    def after(i: Index, n: Index) -> Index:
        return (n - 1) * 2 - i

    return edge_padded(ctx, x, pads(ctx, pad, x.rank), before, after)


@lowering("aten.replication_pad1d", "aten.replication_pad2d", "aten.replication_pad3d")
def replication_pad(ctx: LowerContext, x: Value, pad: Sequence[Any]) -> Value:
    def before(i: Index, n: Index) -> Index:
        return const(0)

    def after(i: Index, n: Index) -> Index:
        return n - 1

    return edge_padded(ctx, x, pads(ctx, pad, x.rank), before, after)


def edge_padded(
    ctx: LowerContext,
    x: Value,
    pad: Sequence[tuple[Index, Index]],
    before: Callable[[Index, Index], Index],
    after: Callable[[Index, Index], Index],
) -> Value:
    """Padding that repeats elements: those at ``before(i, n)`` where ``i < 0`` and at
    ``after(i, n)`` where ``i >= n``.

    Along the last dimension the edges are cases of their own, so that the index in its middle stays
    affine; along the others the index is computed (there it is the same for a whole row).
    """

    def clamped_index(i: Index, n: Index, low: Index, high: Index) -> Index:
        i = i - low
        if low.value != 0:
            i = maximum(i, before(i, n))
        return i if high.value == 0 else minimum(i, after(i, n))

    def element(idx: tuple[Index, ...]) -> Expr:
        rows = [clamped_index(i, n, *p) for i, n, p in zip(idx[:-1], x.shape, pad, strict=False)]
        i, n = idx[-1] - pad[-1][0], x.shape[-1]
        left = masked(compare("lt", i, 0), x.at([*rows, before(i, n)]))
        right = masked(compare("ge", i, n), x.at([*rows, after(i, n)]), left)
        return masked(inside(i, 0, n), x.at([*rows, i]), right)

    return make(ctx, result_shape(ctx), element)


# -- joins -----------------------------------------------------------------------------------------
@lowering("aten.cat", "aten.concat")
def cat(ctx: LowerContext, tensors: Sequence[Value], dim: int = 0) -> Value:
    shape, dtype = result_shape(ctx), TORCH_DTYPES[ctx.fake().dtype]
    dim = wrap_dim(dim, len(shape))
    # Tensors of shape (0,) are let pass whatever the rank of the others.
    given = [x for x in tensors if x.rank == len(shape) and x.shape[dim].value != 0]
    if not given:
        return nothing(ctx, shape, dtype)
    if len(given) > MAX_CONCATENATED:
        raise ctx.decline(
            f"{len(given)} tensors are joined, at most {MAX_CONCATENATED} are generated"
        )
    ends = [const(0)]
    for x in given:
        ends.append(ends[-1] + x.shape[dim])

    def element(idx: tuple[Index, ...]) -> Expr:
        p = idx[dim]
        out: Expr = literal(0, dtype)
        for k in reversed(range(len(given))):
            value = given[k].at([*idx[:dim], p - ends[k], *idx[dim + 1 :]])
            here = [compare("ge", p, ends[k])] if k else []
            here += [compare("lt", p, ends[k + 1])] if k + 1 < len(given) else []
            out = masked(both(*here), cast(value, dtype), out)
        return out

    return make(ctx, shape, element)


@lowering("aten.stack")
def stack(ctx: LowerContext, tensors: Sequence[Value], dim: int = 0) -> Value:
    dim %= tensors[0].rank + 1
    return cat(ctx, [unsqueeze(ctx, x, dim) for x in tensors], dim)


# -- a tensor with a part replaced -----------------------------------------------------------------
SCATTER_VIEWS = ("aten.slice_scatter", "aten.select_scatter", "aten.diagonal_scatter", "aten.copy")


def check_no_overlap(ctx: LowerContext) -> None:
    """Eager writes into a copy with the same strides: where elements of the tensor share memory so
    do those of the copy, and more are replaced than the part."""
    if overlaps(argument(ctx, 0, "self")):
        raise ctx.decline("a part is written to a tensor whose elements share memory")
    without_gaps(ctx)


def without_gaps(ctx: LowerContext) -> None:
    """Eager's copy also has what lies between the elements, which strides may read."""
    fake = argument(ctx, 0, "self")
    sizes = [ctx.size(n) for n in fake.shape]
    if storage_order(sizes, ctx.strides_of(fake)) is None and read_by_strides(ctx.node):
        raise ctx.decline("memory between the elements is read, by strides that are given")


def read_by_strides(node: Any) -> bool:
    """Whether strides are given for a tensor, or for a view or a changed copy of it."""
    left = [node]
    while left:
        base = left.pop()
        for user in (u for u in base.users if u.args and u.args[0] is base):
            if packet(user.target) in STRIDED_OPERATORS:
                return True
            if is_view(user) or packet(user.target) in SCATTER_VIEWS:
                left.append(user)
    return False


def replaced(base: Value, part: Expr, here: Expr, idx: Sequence[Index]) -> Expr:
    return masked(here, cast(part, base.dtype), base.at(idx))


@lowering("aten.slice_scatter")
def slice_scatter(
    ctx: LowerContext,
    x: Value,
    src: Value,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> Value:
    check_no_overlap(ctx)
    dim = wrap_dim(dim, x.rank)
    n, step = x.shape[dim], ctx.size(step)
    first = slice_start(ctx, start, n)
    count = slice_length(ctx, first, end, step, n)

    def element(idx: tuple[Index, ...]) -> Expr:
        i = idx[dim] - first
        k = i // step
        here = [compare("ge", i, 0), compare("lt", k, count)]
        if step.value != 1:
            here.append(op("eq", index_value(i % step), literal(0, "i64")))
        part = broadcast(src, [*idx[:dim], k, *idx[dim + 1 :]])
        return replaced(x, part, both(*here), idx)

    return make(ctx, x.shape, element)


def slice_length(ctx: LowerContext, first: Index, end: Any, step: Index, n: Index) -> Index:
    """How many positions ``first, first + step, ...`` are before `end`."""
    last = n if end is None else minimum(wrap(ctx.size(end), n), n)
    return maximum((last - first + step - 1) // step, 0)


@lowering("aten.select_scatter")
def select_scatter(ctx: LowerContext, x: Value, src: Value, dim: int, index: Any) -> Value:
    check_no_overlap(ctx)
    dim = wrap_dim(dim, x.rank)
    at = wrap(ctx.size(index), x.shape[dim])

    def element(idx: tuple[Index, ...]) -> Expr:
        here = op("eq", index_value(idx[dim]), index_value(at))
        return replaced(x, src.at([*idx[:dim], *idx[dim + 1 :]]), here, idx)

    return make(ctx, x.shape, element)


@lowering("aten.diagonal_scatter")
def diagonal_scatter(
    ctx: LowerContext, x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    check_no_overlap(ctx)
    dim1, dim2 = wrap_dim(dim1, x.rank), wrap_dim(dim2, x.rank)
    rest = [d for d in range(x.rank) if d not in (dim1, dim2)]

    def element(idx: tuple[Index, ...]) -> Expr:
        k = idx[dim1] - max(0, -offset)
        here = op("eq", index_value(idx[dim2] - idx[dim1]), literal(offset, "i64"))
        part = src.at([*(idx[d] for d in rest), k])
        return replaced(x, part, both(here, inside(k, 0, src.shape[-1])), idx)

    return make(ctx, x.shape, element)


# -- strides given by hand -------------------------------------------------------------------------


# -- the same tensor, or a copy --------------------------------------------------------------------
@lowering("aten.alias", "aten.detach", "aten.lift_fresh", "prims.view_of")
def alias(ctx: LowerContext, x: Value) -> Value:
    return x


@lowering("aten.clone", "aten.lift_fresh_copy", "aten.alias_copy", "aten.detach_copy")
def clone(ctx: LowerContext, x: Value, **kwargs: Any) -> Value:
    """A tensor of its own: an output may not share memory with `x`, nor see what is written to it
    later. The scheduler drops it where nobody needs it."""
    return ctx.define(x, ctx.dense_layout(ctx.fake()))


@lowering("aten.copy")
def copy(ctx: LowerContext, x: Value, src: Value, non_blocking: bool = False) -> Value:
    source = ctx.node.args[1] if ctx.node is not None else None  # or a number
    if isinstance(source, torch.fx.Node) and (
        argument(ctx, 0, "self").device != source.meta["val"].device
    ):
        raise ctx.decline("copies between devices")
    without_gaps(ctx)
    value = make(ctx, x.shape, lambda idx: cast(broadcast(src, idx), x.dtype))
    return ctx.define(value, ctx.dense_layout(ctx.fake()))


@lowering("aten.view.dtype", "aten.view_copy.dtype")
def view_dtype(ctx: LowerContext, x: Value, dtype: torch.dtype) -> Value:
    if TORCH_DTYPES.get(dtype) == x.dtype:
        return x
    raise ctx.decline("the bits of numbers are read as another type")
