"""Sums at computed places, turned around: every element adds what comes to it.

In: the places of a scatter as index maps (`positions`). Out: the same sum as a reduction over the
few points whose place an element is, so that nothing is added atomically and results repeat: the
gradients of enlarged pictures, of repeated and strided reads. Invariant: which points those are is
decided by trying all values of an axis, or by the strides of windows; what is not decided stays a
scatter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from deuteron.graph.edit import outside_of_modes
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, index_value, op
from deuteron.ir.index import (
    Atom,
    Axis,
    Index,
    Value,
    const,
    floordiv,
    in_range,
    product,
    substitute,
)
from deuteron.ir.reference import Evaluator
from deuteron.lower.access import TRUE, both, compare, inside, masked
from deuteron.lower.core import LowerContext, make
from deuteron.lower.core import Value as Tensor

MAX_AXIS_VALUES = 1 << 15  # values of an axis that are tried, at most
MAX_UNROLLED = 9  # terms that are added one by one
MAX_TERMS = 64  # that are added to one element
# Points that are visited in vain, as a multiple of those that are not: an atomic addition costs
# several reads.
MAX_VISIT_RATIO = 4


class Preimage(Protocol):
    """The points of `axes` that are mapped to place j of a dimension: among the k-th for k <
    `count`, those for which `at` says so."""

    @property
    def axes(self) -> tuple[Axis, ...]: ...
    @property
    def count(self) -> int: ...
    def at(self, j: Index, k: Index) -> tuple[Expr, dict[Atom, Index]]:
        """(whether its place is j, the k-th point)"""


@dataclass(frozen=True)
class Itself:
    """A dimension whose places are the axis'."""

    axis: Axis
    count = 1

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (self.axis,)

    def at(self, j: Index, k: Index) -> tuple[Expr, dict[Atom, Index]]:
        return TRUE, {self.axis: j}


@dataclass(frozen=True)
class Tried:
    """Points ``first(j) + k``: all of these (`all`), or those whose place is j."""

    axis: Axis
    place: Index
    shift: int
    count: int
    extent: int
    all: bool

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (self.axis,)

    def at(self, j: Index, k: Index) -> tuple[Expr, dict[Atom, Index]]:
        n = self.axis.extent
        i = floordiv(j * n, const(self.extent)) + self.shift + k
        if self.all:
            return TRUE, {self.axis: i}
        same = compare("eq", substitute(self.place, {self.axis: i}), j)
        return both(inside(i, 0, n), same), {self.axis: i}


@dataclass(frozen=True)
class Window:
    """Windows that overlap: the place is ``stride * outer + step * inner + start``."""

    outer: Axis
    inner: Axis
    stride: int
    step: int
    start: Index

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.outer, self.inner

    @property
    def count(self) -> int:
        """Of the windows that a place is in, at most."""
        inner = self.inner.extent.value or 1
        return self.step * (inner - 1) // self.stride + 1

    def at(self, j: Index, k: Index) -> tuple[Expr, dict[Atom, Index]]:
        outer = floordiv(j - self.start, const(self.stride)) - k
        rest = j - self.start - outer * self.stride
        inner = floordiv(rest, const(self.step))
        known = both(inside(outer, 0, self.outer.extent), inside(inner, 0, self.inner.extent))
        exact = compare("eq", inner * self.step, rest) if self.step > 1 else TRUE
        return both(known, exact), {self.outer: outer, self.inner: inner}


@lru_cache(maxsize=256)
@outside_of_modes()
def tried(place: Index, axis: Axis, extent: int) -> Tried | None:
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
    return Tried(axis, place, shift, count, extent, whole)


def window(place: Index, axes: Collection[Axis]) -> Window | None:
    """Two axes of a place as a window's, so that a place is in few of them."""
    steps = {a: (substitute(place, {a: a.index + 1}) - place).value for a in axes}
    start = substitute(place, {a: const(0) for a in axes})
    found = [
        Window(outer, inner, stride, step, start)
        for (outer, stride), (inner, step) in itertools.permutations(steps.items(), 2)
        if stride and step and min(stride, step) > 0 and inner.extent.value
    ]
    return min(found, key=lambda w: w.count, default=None) if len(axes) == 2 else None


def preimage(place: Index, extent: Index) -> Preimage | None:
    """The points that come to a place of a dimension; None where that is not known."""
    axes = place.axes()
    if any(isinstance(a, Value) for a in place.atoms()) or not axes:
        return None
    if len(axes) > 1:
        return window(place, axes) if in_range(place, extent) else None
    (axis,) = axes
    if place is axis.index and axis.extent is extent:
        return Itself(axis)
    return tried(place, axis, extent.value) if extent.value is not None else None


def preimages_of(axes: Sequence[Axis], place: Sequence[Index], x: Tensor) -> list[Preimage] | None:
    """For each dimension of x the points that come to an element; None where that is not known, or
    most of the points that would be visited for an element are others'."""
    preimages: list[Preimage] = []
    visits, points, elements = 1, 1, 1
    for p, n in zip(place, x.shape, strict=True):
        found = preimage(p, n)
        if found is None:
            return None
        preimages.append(found)
        if not isinstance(found, Itself):
            visits *= found.count
            points *= product(a.extent for a in found.axes).value or 0
            elements *= n.value or 1
    if sorted(a.key for a in axes) != sorted(a.key for p in preimages for a in p.axes):
        return None
    few = visits <= MAX_TERMS and visits * elements <= MAX_VISIT_RATIO * points
    return preimages if few else None


def gathered(
    ctx: LowerContext, base: Tensor, preimages: Sequence[Preimage], body: Expr, mask: Expr | None
) -> Tensor:
    """`base` plus, at every element, the sum of `body` over the points that come to it."""
    reduced = [p for p in preimages if p.count > 1]
    bound = dict(zip(reduced, ctx.axes([const(p.count) for p in reduced])))
    visits = math.prod(p.count for p in preimages)

    def part(idx: Sequence[Index], which: Mapping[Preimage, Index]) -> Expr:
        """What the point brings of which each dimension has its k-th."""
        table: dict[Atom, Index] = {}
        here = []
        for p, j in zip(preimages, idx, strict=True):
            comes, points = p.at(j, which.get(p, const(0)))
            table |= points
            here.append(comes)
        if mask is not None:
            here.append(mask.substitute(table))
        return masked(both(*here), body.substitute(table))

    def element(idx: tuple[Index, ...]) -> Expr:
        if visits <= MAX_UNROLLED:
            total = base.at(idx)
            for each in itertools.product(*(range(p.count) for p in reduced)):
                total = op("add", total, part(idx, dict(zip(reduced, map(const, each)))))
            return total
        every = {p: a.index for p, a in bound.items()}
        return op("add", base.at(idx), E.reduce("sum", tuple(bound.values()), part(idx, every)))

    return make(ctx, base.shape, element)


__all__ = ["gathered", "preimage", "preimages_of"]
