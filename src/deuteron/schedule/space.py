"""Iteration spaces and the maps between them.

In: index maps of one tensor, as seen from two loop nests. Out: which loop of one nest is which loop
(or which part of a loop) of the other, as a substitution of axes.

A tensor is seen through the flat number of its element, row-major. Where a nest walks a tensor
densely (``Σ weight·axis`` with weights that are products of the inner extents), each of its axes is
``(number // weight) % extent``, whatever loops the other nest computes the number with. Reshapes,
splits and permutations of loops need no case of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

from deuteron.base.memo import MEMO
from deuteron.ir.index import (
    Atom,
    Axis,
    Index,
    atom,
    const,
    divide_exact,
    floordiv,
    hint,
    mod,
    product,
    substitute,
)

Map = dict[Atom, Index]
# Loops that are told from one number: their orders are tried.
MAX_DIGITS = 5


@dataclass(frozen=True)
class Space:
    """The loops of a nest. Without `reduced` the points are all parallel."""

    parallel: tuple[Axis, ...]
    reduced: tuple[Axis, ...] = ()

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        return self.parallel + self.reduced

    @cached_property
    def points(self) -> Index:
        return product(a.extent for a in self.axes)

    @cached_property
    def rows(self) -> Index:
        return product(a.extent for a in self.parallel)

    @cached_property
    def row(self) -> Index:
        """Points of a row."""
        return product(a.extent for a in self.reduced)

    def size(self) -> int:
        """Points at hinted sizes."""
        return hint(self.points)


_NUMBERS: dict[tuple[tuple[Index, ...], tuple[Index, ...]], Index] = MEMO.answers()


def flat(indices: Sequence[Index], shape: Sequence[Index]) -> Index:
    """The row-major number of an element."""
    key = (tuple(indices), tuple(shape))
    known = _NUMBERS.get(key)
    if known is None:
        known = const(0)
        for i, n in zip(*key, strict=True):
            known = known * n + i
        _NUMBERS[key] = known
    return known


def steps(number: Index, axes: Iterable[Axis]) -> list[tuple[Axis, Index]] | None:
    """The axes that `number` is linear in, with their weights; None where it is not linear."""
    known = set(axes)
    out: list[tuple[Axis, Index]] = []
    rest = number
    for a in number.atoms():
        if not isinstance(a, Axis):
            if a.rank:  # not a size
                return None
            continue
        if a not in known:
            return None
        weight = number.coefficient(a)
        if weight is None or weight.axes():
            return None
        out.append((a, weight))
        rest = rest - weight * a.index
    return out if not rest.axes() else None


def dense(number: Index, axes: Iterable[Axis]) -> list[tuple[Axis, Index]] | None:
    """Innermost first, the axes of a number that runs over ``0 .. product(extents)`` exactly once;
    None where it does not."""
    weights = steps(number, axes)
    if weights is None:
        return None
    rest = number
    for a, w in weights:
        rest = rest - w * a.index
    if rest.value != 0:
        return None
    by_weight = {w: a for a, w in weights}
    if len(by_weight) != len(weights):
        return None
    out: list[tuple[Axis, Index]] = []
    step = const(1)
    while by_weight:
        if step not in by_weight:
            return None
        a = by_weight.pop(step)
        out.append((a, step))
        step = step * a.extent
    return out


def paired(u: Index, v: Index, ours: Iterable[Axis], theirs: Iterable[Axis]) -> Map:
    """Axes of `v` that appear with the same weight and extent as one axis of `u`."""
    a, b = steps(u, ours), steps(v, theirs)
    if a is None or b is None:
        return {}
    table = {(w, x.extent): x for x, w in a}
    if len(table) != len(a):
        return {}
    return {y: table[w, y.extent].index for y, w in b if (w, y.extent) in table}


@dataclass(frozen=True)
class Equation:
    """One tensor's element as both nests number it. `exact`: `ours` is known to be one-to-one."""

    tensor: str
    ours: Index
    theirs: Index
    exact: bool
    count: Index  # elements of the tensor


_SOLVED: dict[Hashable, Map] = MEMO.answers()


def solve(equations: Sequence[Equation], ours: Space, theirs: Sequence[Axis]) -> Map:
    """For each axis of their nest, its value in terms of our axes; axes that no equation
    determines are missing."""
    said = dict.fromkeys((e.ours, e.theirs, e.exact, e.count) for e in equations)
    key = (tuple(said), ours.axes, tuple(theirs))
    known = _SOLVED.get(key)
    if known is None:
        known = _SOLVED[key] = _solve(equations, ours, theirs)
    return dict(known)


def _solve(equations: Sequence[Equation], ours: Space, theirs: Sequence[Axis]) -> Map:
    table: Map = {a: const(0) for a in theirs if a.extent.value == 1}
    # What the guest reads of the base is at one place; what both read may be at several.
    for e in sorted(equations, key=lambda e: (-len(e.theirs.axes()), not e.exact)):
        solution = _from_dense(e, ours, theirs) or paired(e.ours, e.theirs, ours.axes, theirs)
        for a, i in solution.items():
            table.setdefault(a, i)
    for e in equations:
        if not e.theirs.axes() <= table.keys():
            for a, i in _renamed(e.ours, e.theirs, ours.axes, theirs).items():
                table.setdefault(a, i)
    return table


def _renamed(u: Index, v: Index, ours: Iterable[Axis], theirs: Iterable[Axis]) -> Map:
    """The axes of `v` as axes of `u`, where those are the same but for the names of the axes, of
    which places need not be linear (rolled, in windows)."""
    a, b = ([x for x in axes if x in i.axes()] for axes, i in ((ours, u), (theirs, v)))
    if len(a) != len(b) or len(a) > MAX_DIGITS:
        return {}
    extents = [y.extent for y in b]
    for order in permutations(a):
        if [x.extent for x in order] == extents:
            table: Map = {y: x.index for x, y in zip(order, b, strict=True)}
            if substitute(v, table) is u:
                return table
    return {}


def _from_dense(e: Equation, ours: Space, theirs: Sequence[Axis]) -> Map:
    digits = dense(e.theirs, theirs)
    if digits is None:
        return {}
    total = product(a.extent for a, _ in digits)
    mine = dense(e.ours, ours.axes)
    if mine is not None:
        if product(a.extent for a, _ in mine) is not total:
            return {}
    elif total is not e.count:
        return {}
    out: Map = {}
    for k, (a, w) in enumerate(digits):
        i = floordiv(e.ours, w)
        out[a] = i if k == len(digits) - 1 else mod(i, a.extent)
    return out


def match_rest(table: Map, free: Sequence[Axis], theirs: Sequence[Axis]) -> bool:
    """Pairs the axes of theirs that are not in `table` with `free`, in order, by extent."""
    left = [a for a in theirs if a not in table]
    mine = [a for a in free if a.extent.value != 1]
    if [a.extent for a in left] != [a.extent for a in mine]:
        return False
    table.update({b: a.index for a, b in zip(mine, left, strict=True)})
    return True


def image(table: Mapping[Atom, Index], axes: Iterable[Axis]) -> set[Axis]:
    """The axes of ours that the images of `axes` depend on."""
    out: set[Axis] = set()
    for a in axes:
        out |= table[a].axes()
    return out


def one_to_one(axes: Sequence[Axis], table: Mapping[Atom, Index]) -> bool:
    """Whether different points of our loops that the images of their loops `axes` depend on are
    different points of theirs, and all of them: no loop of ours stands for two of theirs, unless
    these are its digits (quotients and remainders of one number)."""
    shares: list[tuple[set[Axis], list[Axis]]] = []  # loops of ours, and theirs that they make
    for a in axes:
        if a.extent.value == 1:
            continue
        used, sharing, independent = set(table[a].axes()), [a], []
        for ours, theirs in shares:
            if ours & used:
                used, sharing = used | ours, [*theirs, *sharing]
            else:
                independent.append((ours, theirs))
        shares = [*independent, (used, sharing)]
    return all(_digits(theirs, ours, table) for ours, theirs in shares)


def _digits(theirs: Sequence[Axis], ours: set[Axis], table: Mapping[Atom, Index]) -> bool:
    """Whether the images of `theirs`, in some order, are the digits of one number that `ours` count
    without gaps."""
    same = {b for a in theirs for b in ours if table[a] is b.index and a.extent is b.extent}
    if len(same) == len(ours) == len(theirs):  # the same loops: mostly
        return True
    count = product(a.extent for a in theirs)
    if product(a.extent for a in ours) is not count or len(theirs) > MAX_DIGITS:
        return False
    for order in permutations(theirs):
        digits = dense(flat([table[a] for a in order], [a.extent for a in order]), ours)
        if digits is not None and product(a.extent for a, _ in digits) is count:
            return True
    return False


def same_element(u: Sequence[Index], v: Sequence[Index], shape: Sequence[Index]) -> bool:
    """Whether two index vectors name the same element at every point."""
    if tuple(u) == tuple(v):
        return True
    return flat(u, shape) is flat(v, shape)


def moved(indices: Sequence[Index], table: Mapping[Atom, Index]) -> tuple[Index, ...]:
    return tuple(substitute(i, table) for i in indices)


__all__ = [
    "Equation",
    "Map",
    "Space",
    "atom",
    "dense",
    "divide_exact",
    "flat",
    "image",
    "match_rest",
    "moved",
    "one_to_one",
    "paired",
    "same_element",
    "solve",
    "steps",
]
