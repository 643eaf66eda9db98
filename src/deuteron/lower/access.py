"""Index arithmetic that lowerings share: masked reads, reshapes, positions from tensors.

In: indices and expressions. Out: indices and expressions that stay inside their tensors. No tensor
is defined here. Invariant: a read that may fall outside is masked, or its index was proven inside,
or it comes from a tensor and the generated code checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deuteron.ir import elements
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, as_position, cast, checked, index_value, literal, op
from deuteron.ir.index import (
    Index,
    IndexLike,
    as_index,
    const,
    floordiv,
    in_range,
    is_nonneg,
    maximum,
    minimum,
    mod,
    product,
)
from deuteron.lower.core import LowerContext, Value, make

TRUE = literal(True, "bool")


# -- conditions ------------------------------------------------------------------------------------
def both(*conditions: Expr) -> Expr:
    """All of them hold."""
    out = TRUE
    for c in conditions:
        out = op("logical_and", out, c)
    return out


def compare(name: str, a: IndexLike, b: IndexLike) -> Expr:
    """``a < b`` and the like on indices; a literal where it is proven."""
    return op(name, index_value(a), index_value(b))


def inside(i: IndexLike, low: IndexLike, end: IndexLike) -> Expr:
    """``low <= i < end``."""
    return both(compare("ge", i, low), compare("lt", i, end))


def within(idx: Sequence[Index], shape: Sequence[Index]) -> Expr:
    """Whether a position is inside a tensor."""
    return both(*(inside(i, 0, n) for i, n in zip(idx, shape, strict=True)))


# -- masked reads ----------------------------------------------------------------------------------
def masked(mask: Expr, value: Expr, fill: Any = 0) -> Expr:
    """`value` where `mask` holds, elsewhere `fill` (a number or an expression); reads nothing
    there."""
    other = fill if isinstance(fill, Expr) else literal(fill, value.dtype)
    if mask.op == "literal":
        return value if mask.attr else other
    if value.op == "load" and not value.args and other.op == "literal":
        at = value.attr[1]
        if elements.holds(value) == elements.CHECKS:  # made only where the mask holds
            at = E.with_mask(value, mask).attr[1]
        return E.load(value.attr[0], at, value.dtype, mask, other.attr)
    return op("where", mask, E.with_mask(value, mask, unused=True), other)


# -- positions -------------------------------------------------------------------------------------
def wrap_dim(dim: int, rank: int) -> int:
    return dim % max(rank, 1)


def wrap(i: IndexLike, n: Index) -> Index:
    """``i + n`` where i is negative, else i; for sizes whose sign may be unknown."""
    i = as_index(i)
    if is_nonneg(i):
        return i
    if is_nonneg(-i - 1):
        return i + n
    return i + n * minimum(maximum(-i, 0), 1)


def computed(place: Index, extent: Index) -> Index:
    """A position that the program computes from axes and sizes: where it is not proven to be below
    `extent`, generated code checks it, as it does those that are loaded."""
    if in_range(place, extent):
        return place
    return as_position(checked(index_value(place), extent))


def loaded(position: Expr, extent: Index | None = None, end: Index | None = None) -> Index:
    """A tensor's element as an index; with `extent`, negative ones count from the end. `end`: the
    extent of a dimension where they do not."""
    position = cast(position, "i64")
    known = position.op in ("index", "literal")
    if extent is None:
        place = as_position(position)
        return computed(place, end) if known and end is not None else place
    if known:
        return computed(wrap(as_position(position), extent), extent)
    shifted = op("add", position, index_value(extent))
    negative = op("lt", position, literal(0, "i64"))
    return as_position(op("where", negative, shifted, position))


def read(ctx: LowerContext, x: Value, at: Sequence[Index]) -> Expr:
    """The element of x at positions that may be loaded; those stay checked, whatever x is."""
    return elements.element(x.axes, x.expr, at, ctx.layouts)


# -- reshapes --------------------------------------------------------------------------------------
def flatten(idx: Sequence[Index], shape: Sequence[Index]) -> Index:
    """The row-major position."""
    out = const(0)
    for i, n in zip(idx, shape, strict=True):
        out = out * n + i
    return out


def unflatten(position: Index, shape: Sequence[Index]) -> tuple[Index, ...]:
    """The indices at a row-major position, which must be inside; no extent may be the number 0."""
    out: list[Index] = []
    for d in reversed(range(len(shape))):
        if shape[d].value == 1:
            out.append(const(0))
        elif all(n.value == 1 for n in shape[:d]):
            out.append(position)
        else:
            out.append(mod(position, shape[d]))
            position = floordiv(position, shape[d])
    return tuple(reversed(out))


def reshaped(idx: Sequence[Index], new: Sequence[Index], old: Sequence[Index]) -> list[Index]:
    """Where element `idx` of shape `new` is in shape `old`; no extent may be the number 0.

    Dimensions are cut into groups with equal products from both ends, so that only those are
    flattened together that a reshape mixes.
    """
    out = [const(0)] * len(old)
    a = [d for d, n in enumerate(new) if n.value != 1]
    b = [d for d, n in enumerate(old) if n.value != 1]
    for ga, gb in _groups([new[d] for d in a], [old[d] for d in b]):
        da, db = [a[k] for k in ga], [b[k] for k in gb]
        position = flatten([idx[d] for d in da], [new[d] for d in da])
        for d, i in zip(db, unflatten(position, [old[d] for d in db]), strict=True):
            out[d] = i
    return out


def _groups(a: Sequence[Index], b: Sequence[Index]) -> list[tuple[range, range]]:
    """Ranges of `a` and of `b` whose products are equal."""
    front = _matches(a, b)
    i, j = front[-1]
    back = [
        (len(a) - x, len(b) - y) for x, y in _matches(list(reversed(a[i:])), list(reversed(b[j:])))
    ]
    cuts = front + [p for p in reversed(back) if p != (i, j)]
    return [
        (range(i0, i1), range(j0, j1)) for (i0, j0), (i1, j1) in zip(cuts, cuts[1:], strict=False)
    ]


def _matches(a: Sequence[Index], b: Sequence[Index]) -> list[tuple[int, int]]:
    """Increasing (i, j) with the products of the first i of `a` and the first j of `b` equal."""
    where: dict[Index, int] = {}
    for j in range(len(b) + 1):
        where.setdefault(product(b[:j]), j)
    out = [(0, 0)]
    for i in range(1, len(a) + 1):
        matched = where.get(product(a[:i]))
        if matched is not None and matched > out[-1][1]:
            out.append((i, matched))
    return out


# -- values ----------------------------------------------------------------------------------------
def nothing(ctx: LowerContext, shape: Sequence[IndexLike], dtype: str) -> Value:
    """A tensor without elements."""
    return make(ctx, shape, lambda idx: literal(0, dtype))


def fake_of(x: Any) -> torch.Tensor:
    """The fake tensor of an FX node."""
    val = x.meta["val"]
    return val[0] if isinstance(val, (tuple, list)) else val


__all__ = [
    "TRUE",
    "both",
    "compare",
    "fake_of",
    "flatten",
    "inside",
    "loaded",
    "masked",
    "nothing",
    "read",
    "reshaped",
    "unflatten",
    "within",
    "wrap",
    "wrap_dim",
]
