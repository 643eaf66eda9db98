"""Sums at computed places, turned around: every element adds what comes to it.

In: the places of a scatter as index maps (`positions`). Out: the same sum as a reduction over the
few points whose place an element is, so that nothing is added atomically and results repeat: the
gradients of enlarged pictures, of repeated and strided reads. Invariant: which points those are is
decided by trying all values of an axis; what is not decided stays a scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from deuteron.graph.edit import outside_of_modes
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, index_value, op
from deuteron.ir.index import Atom, Axis, Index, Value, const, floordiv, product, substitute
from deuteron.ir.reference import Evaluator
from deuteron.lower.access import both, inside, masked
from deuteron.lower.core import LowerContext, make
from deuteron.lower.core import Value as Tensor

MAX_AXIS_VALUES = 1 << 15  # values of an axis that are tried, at most
MAX_TERMS = 64  # that are added to one element
# Points that are visited in vain, as a multiple of those that are not: an atomic addition costs
# several reads.
MAX_VISIT_RATIO = 4


@dataclass(frozen=True)
class Preimage:
    """The points of `axis` that are mapped to place j: among ``first(j) + k`` for k < `count`,
    all of these (`all`), or those of them whose place is j."""

    axis: Axis
    place: Index
    shift: int
    count: int
    extent: int
    all: bool

    def at(self, j: Index, k: Index) -> tuple[Expr, Index]:
        """(whether its place is j, the k-th point)"""
        n = self.axis.extent
        i = floordiv(j * n, const(self.extent)) + self.shift + k
        if self.all:
            return E.literal(True, "bool"), i
        same = op("eq", index_value(substitute(self.place, {self.axis: i})), index_value(j))
        return both(inside(i, 0, n), same), i


@lru_cache(maxsize=256)
@outside_of_modes()
def preimage(place: Index, axis: Axis, extent: int) -> Preimage | None:
    """Which points of the axis have which place below `extent`."""
    n = axis.extent.value
    if (
        n is None
        or not 0 < n <= MAX_AXIS_VALUES
        or not 0 < extent <= MAX_AXIS_VALUES
        or place.syms()
    ):
        return None
    points = torch.arange(n)
    places = Evaluator([axis], {}, {}, "cpu").value(index_value(place)).expand(n)
    if bool((places < 0).any()) or bool((places >= extent).any()):
        return None
    late = points - places * n // extent
    shift, count = int(late.min()), int(late.max() - late.min()) + 1
    if count > MAX_TERMS:
        return None
    tried = (torch.arange(extent) * n // extent + shift)[:, None] + torch.arange(count)
    known = (tried >= 0) & (tried < n)
    whole = bool(known.all()) and bool(
        (places[tried.clamp(0, n - 1)] == torch.arange(extent)[:, None]).all()
    )
    return Preimage(axis, place, shift, count, extent, whole)


def preimages_of(axes: Sequence[Axis], place: Sequence[Index], x: Tensor) -> list[Preimage] | None:
    """For each dimension of x the points that come to an element; None where that is not known."""
    preimages: list[Preimage] = []
    for p, n in zip(place, x.shape, strict=True):
        used = p.axes()
        if len(used) != 1 or n.value is None or any(isinstance(a, Value) for a in p.atoms()):
            return None
        (axis,) = used
        axis_preimage = preimage(p, axis, n.value)
        if axis_preimage is None:
            return None
        preimages.append(axis_preimage)
    if sorted(a.key for a in axes) != sorted(p.axis.key for p in preimages):
        return None
    visits, points = 1, 1
    for axis_preimage in preimages:
        visits *= axis_preimage.count
        points *= axis_preimage.axis.extent.value or 1
    elements = product(x.shape).value or 0
    return (
        preimages if visits <= MAX_TERMS and visits * elements <= MAX_VISIT_RATIO * points else None
    )


def gathered(
    ctx: LowerContext, base: Tensor, preimages: Sequence[Preimage], body: Expr, mask: Expr | None
) -> Tensor:
    """`base` plus, at every element, the sum of `body` over the points that come to it."""
    reduced = [p for p in preimages if p.count > 1]
    bound = dict(zip((p.axis for p in reduced), ctx.axes([const(p.count) for p in reduced])))

    def element(idx: tuple[Index, ...]) -> Expr:
        table: dict[Atom, Index] = {}
        here = []
        for p, j in zip(preimages, idx, strict=True):
            k = bound[p.axis].index if p.axis in bound else const(0)
            comes, table[p.axis] = p.at(j, k)
            here.append(comes)
        if mask is not None:
            here.append(mask.substitute(table))
        part = masked(both(*here), body.substitute(table))
        total = E.reduce("sum", tuple(bound.values()), part) if bound else part
        return op("add", base.at(idx), total)

    return make(ctx, base.shape, element)


__all__ = ["gathered", "preimage", "preimages_of"]
