"""Views with strides given by hand (as_strided), and writing through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deuteron.graph.ops import is_view
from deuteron.ir.expr import cast
from deuteron.ir.index import Index, const, is_nonneg, product
from deuteron.ir.program import Extern, ViewArg
from deuteron.lower.access import (
    fake_of,
    inside,
    nothing,
    unflatten,
)
from deuteron.lower.calls import storage as storage_key
from deuteron.lower.core import LowerContext, Value, lowering, make


def argument(ctx: LowerContext, position: int, name: str) -> torch.Tensor:
    """The fake tensor that the node has as an argument."""
    assert ctx.node is not None
    args = ctx.node.args
    return fake_of(args[position] if len(args) > position else ctx.node.kwargs[name])


def storage_order(shape: Sequence[Index], strides: Sequence[Index]) -> list[int] | None:
    """Dimensions from the outermost in memory to the innermost, where the strides leave no holes;
    those of size 1 are left out."""
    left = [d for d, n in enumerate(shape) if n.value != 1]
    order: list[int] = []
    step = const(1)
    while left:
        axis = next((d for d in left if strides[d] is step), None)
        if axis is None:
            return None
        left.remove(axis)
        order.insert(0, axis)
        step = step * shape[axis]
    return order


@dataclass(frozen=True)
class Storage:
    """Elements by their place in memory, which counts from the first of `value`. `order` is None
    where they leave holes or overlap."""

    value: Value
    order: list[int] | None

    def holds(self, first: Index, shape: Sequence[Index], strides: Sequence[Index]) -> bool:
        """Whether a strided view is proven inside."""
        last = first
        for n, s in zip(shape, strides, strict=True):
            last = last + (n - 1) * s
        filled = self.order is not None
        return filled and is_nonneg(first) and is_nonneg(product(self.value.shape) - 1 - last)

    def at(self, position: Index) -> list[Index]:
        """The index of the element at a place."""
        assert self.order is not None
        shape = self.value.shape
        out = [const(0)] * len(shape)
        for d, i in zip(self.order, unflatten(position, [shape[d] for d in self.order])):
            out[d] = i
        return out


def address(first: Index, strides: Sequence[Index], idx: Sequence[Index]) -> Index:
    """The place of an element of a strided view."""
    for i, s in zip(idx, strides, strict=True):
        first = first + i * s
    return first


def owner_of(ctx: LowerContext, x: Value, fake: torch.Tensor) -> ViewArg | None:
    """`x` as a view of the tensor in whose memory it lies as traced."""
    view, strides = ctx.strided(x), ctx.strides_of(fake)
    if view is None or any(
        a is not b and n.value != 1 for a, b, n in zip(view.strides, strides, x.shape, strict=True)
    ):
        return None
    return view


def given_strides(
    ctx: LowerContext, fake: torch.Tensor, size: Any, stride: Any, offset: Any
) -> tuple[list[Index], list[Index], Index]:
    """Shape, strides, and the place of the first element, counted from that of `fake`."""
    own = ctx.size(fake.storage_offset())
    first = const(0) if offset is None else ctx.size(offset) - own
    return [ctx.size(n) for n in size], [ctx.size(s) for s in stride], first


@lowering("aten.as_strided", "aten.as_strided_copy")
def as_strided(ctx: LowerContext, x: Value, size: Any, stride: Any, offset: Any = None) -> Value:
    fake = argument(ctx, 0, "self")
    shape, strides, first = given_strides(ctx, fake, size, stride, offset)
    if any(n.value == 0 for n in shape):
        return nothing(ctx, shape, x.dtype)
    owner = owner_of(ctx, x, fake)
    if owner is None:
        storage = Storage(x, storage_order(x.shape, ctx.strides_of(fake)))
    else:
        layout, first = ctx.layouts[owner.tensor], first + owner.offset
        storage = Storage(ctx.load(owner.tensor), storage_order(layout.shape, layout.strides))
    if storage.holds(first, shape, strides):
        at = lambda idx: storage.at(address(first, strides, idx))  # noqa: E731
        return make(ctx, shape, lambda idx: storage.value.at(at(idx)))
    if owner is None:
        raise ctx.decline("strides are given for what is not in memory as traced")
    return viewed(ctx, owner.tensor, first, shape, strides)


def viewed(
    ctx: LowerContext, tensor: str, first: Index, shape: Sequence[Index], strides: Sequence[Index]
) -> Value:
    """A strided view that is not proven inside its tensor, or of one with holes. The library is
    given the first element: an offset would count from where torch's storage begins, in which the
    tensor is somewhere."""
    assert ctx.node is not None
    name, fake = ctx.fresh_name(ctx.node.name), ctx.fake()
    ctx.storages[name] = storage_key(fake)
    ctx.add(
        Extern(
            (name,),
            str(ctx.node.target),
            (ViewArg(tensor, (), (), first), tuple(shape), tuple(strides)),
            (),
            (ctx.layout_of(fake),),
            aliases=(tensor if is_view(ctx.node) else None,),
            origins=ctx.origins(),
            reason="strides are given that are not proven to stay in a tensor without holes",
        )
    )
    return ctx.load(name)


@lowering("aten.as_strided_scatter")
def as_strided_scatter(
    ctx: LowerContext, x: Value, src: Value, size: Any, stride: Any, offset: Any = None
) -> Value:
    if any(n.value == 0 for n in src.shape):
        return ctx.define(x)
    fake = argument(ctx, 0, "self")
    shape, strides, first = given_strides(ctx, fake, size, stride, offset)
    storage = Storage(x, storage_order(x.shape, ctx.strides_of(fake)))
    if storage.order is None:
        raise ctx.decline("strides are given for a tensor that has holes or overlaps")
    axes = ctx.axes(src.shape)
    idx = tuple(a.index for a in axes)
    position, mask = address(first, strides, idx), None
    if not storage.holds(first, shape, strides):
        mask = inside(position, 0, product(x.shape))
    written = cast(src.at(idx), x.dtype)
    return ctx.scatter(x, axes, tuple(storage.at(position)), written, mask=mask)
