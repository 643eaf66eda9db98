"""Unroll-and-jam: short parallel axes written out.

In: `loops.Loops` that only compute and store points. Out: the same, in which a short axis whose
points differ in what they read (even and odd columns of a pooling window's input, the copies of an
enlarged picture, the tensors of a concatenation) is unrolled: one lane computes all its points, in
which conditions are constants and neighbours share what they read. Where elements come one by one a
lane has a few points of a longer axis, too.

Where the points of the axis lie side by side in memory they are stored together: the values of a
`Write` with an `unrolled_axis` are joined, so that a program still writes whole lines. Its address
keeps the axis, whose place is behind the axis `along` (the fastest of the nest: see `tiling`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from deuteron.base.device import DeviceSpec
from deuteron.codegen.loops import (
    Loops,
    Rewriter,
    Statement,
    Write,
    rearranged,
    stride,
)
from deuteron.codegen.triton.access_statistics import size
from deuteron.codegen.triton.tiling import point_order, single_elements
from deuteron.ir.expr import Expr, as_position, own_flops, own_indices
from deuteron.ir.index import Atom, Axis, Div, Index, MinMax, Mod, const, divide_exact, hint

# Points that one lane computes at most, and nodes of the text (registers; compile time).
MAX_UNROLLED_POINTS = 8
MAX_NODES = 600
# Unrolling pays if at most this share of the work remains: unrolled code needs more registers.
MAX_WORK_SHARE = 0.8
# Where elements come one by one, a lane computes so many neighbouring points of an axis, if that is
# not more work: more is on its way. H200, bf16, us, 1, 4 and 8: maximum of 3x3 windows 51, 41, 38
# and with its place 72, 65; their mean 55, 44, 45; gradient of an enlarged picture 32, 28, 27.
WINDOW_COUNTS, MAX_WINDOW_WORK = (8, 4, 2), 1.05
LANES_PER_CORE = 2048  # of a multiprocessor
# Of these, how many are left at least: H200, f32, a batch norm and the copies of its heads, 8
# points of each of 31360 lanes: 16.6 us, of which memory takes 3.
LANES_LEFT = 1024
# A part of an axis that is cut has at least so many points.
MIN_AXIS_PART = 64
# Instructions, about: an element of 16 bytes, an element alone with its address, a division.
VECTOR_COST, SCALAR_COST, DIVISION_COST = 1.5, 4.0, 4.0
POSITION_OPS = ("index", "literal")


def unroll_and_jam(loops: Loops, spec: DeviceSpec) -> Loops:
    """The nest with every axis written out that makes its work less."""
    if loops.row_split is not None or not all(isinstance(p, Write) for p in loops.statements):
        return loops
    if loops.reduced and any(isinstance(p, Write) and p.level == "row" for p in loops.statements):
        return loops
    unrolled, lanes = 1, size(point_order(loops)) // (LANES_LEFT * spec.cores)
    while (
        best := _best(loops, candidates(loops, min(lanes, MAX_UNROLLED_POINTS) // unrolled))
    ) is not None:
        loops, n = best
        unrolled *= n
    if unrolled == 1 and single_elements(loops, spec):
        loops, _ = _best(loops, _windows(loops, LANES_PER_CORE * spec.cores), MAX_WINDOW_WORK) or (
            loops,
            1,
        )
    return loops


def _best(
    loops: Loops, choices: Iterable[tuple[Loops, Axis]], worth: float = MAX_WORK_SHARE
) -> tuple[Loops, int] | None:
    """The nest without an axis that has least work, and how many points that had."""
    best, least = None, worth * work(loops)
    for whole, axis in choices:
        n = hint(axis.extent)
        new = _without(whole, axis)
        if new is not None and work(new) / n < least:
            best, least = (new, n), work(new) / n
    return best


def _windows(loops: Loops, lanes: int) -> Iterator[tuple[Loops, Axis]]:
    """Axes in parts of a few points (windows, which may share elements), where so many lanes are
    left."""
    order = point_order(loops)
    count = size(order)
    for axis in order[:-1]:
        n = axis.extent.value or 1
        for k in (k for k in WINDOW_COUNTS if n % k == 0 and n >= 2 * k and count >= k * lanes):
            new, _, inner = _axis_in_parts(loops, axis, k)
            yield new, inner


def candidates(loops: Loops, most: int) -> Iterator[tuple[Loops, Axis]]:
    """Axes with at most so many points, and nests with axes that are cut into so many parts where
    conditions change (the tensors of a concatenation)."""
    axes = (*loops.parallel, *loops.reduced)
    for a in axes:
        n = a.extent.value
        if n is not None and 1 < n <= most:
            yield loops, a
    for axis, places in sorted(_changes(loops).items(), key=lambda item: item[0].key):
        n = axis.extent.value
        if n is None or axis not in axes:
            continue
        part = math.gcd(n, *(k for k in places if 0 < k < n))
        if MIN_AXIS_PART <= part < n <= part * most:
            new, outer, _ = _axis_in_parts(loops, axis, part)
            yield new, outer


def _axis_in_parts(loops: Loops, axis: Axis, part: int) -> tuple[Loops, Axis, Axis]:
    """The nest with an axis in parts of so many points; which part, and which point of one."""
    outer = Axis(f"{axis.name}p", (axis.extent.value or part) // part)
    inner = Axis(f"{axis.name}q", part)
    groups = [
        [x for a in group for x in ((outer, inner) if a == axis else (a,))]
        for group in (loops.parallel, loops.reduced)
    ]
    table: dict[Atom, Index] = {axis: outer.index * part + inner.index}
    return rearranged(loops, table, *groups), outer, inner


def _changes(loops: Loops) -> dict[Axis, set[int]]:
    """The places of each axis at which a comparison with a number changes."""
    changes: dict[Axis, set[int]] = {}
    for n in nodes(loops):
        if n.op not in ("lt", "le", "gt", "ge") or any(a.op not in POSITION_OPS for a in n.args):
            continue
        left, right = (as_position(a) for a in n.args)
        difference = left - right
        for axis in difference.axes():
            step = difference.coefficient(axis)
            rest = (difference - axis.index * step).value if step is not None else None
            if step is not None and step.value in (1, -1) and rest is not None:
                # where the difference is 0, or behind that
                at = -rest * (step.value or 1)
                late = (n.op in ("le", "gt")) == (step.value == 1)
                changes.setdefault(axis, set()).add(at + late)
    return changes


def nodes(loops: Loops) -> set[Expr]:
    return {n for r in loops.roots() for n in r.walk()}


def work(loops: Loops) -> float:
    """Instructions of one lane, about."""
    total = 0.0
    inner = point_order(loops)[-1] if loops.parallel or loops.reduced else None
    for access in loops.accesses:
        step = stride(access.address, inner) if inner is not None else 0
        total += VECTOR_COST if step in (0, 1) else SCALAR_COST
    divisions = set()
    for n in nodes(loops):
        total += n.op not in ("load", "literal", "cast", "index") and max(1.0, own_flops(n))
        for i in own_indices(n):
            divisions |= {a for a in i.atoms() if isinstance(a, (Div, Mod, MinMax))}
    return total + DIVISION_COST * len(divisions)


def _without(loops: Loops, axis: Axis) -> Loops | None:
    """The nest with the axis written out; None where stores would be scattered."""
    count = hint(axis.extent)
    if len(nodes(loops)) * count > MAX_NODES:
        return None
    left, inner = ([a for a in g if a != axis] for g in (loops.parallel, loops.reduced))
    at = [Rewriter({axis: const(k)}, None, loops.results) for k in range(count)]
    statements: list[Statement] = []
    for p in loops.statements:
        assert isinstance(p, Write)
        along = _axis_behind(p, axis, (*left, *inner))
        if (
            along is not None
            and p.unrolled_axis is None
            and p.mask is None
            and p.accumulate is None
        ):
            values = [r.expr(p.value) for r in at]
            statements.append(
                replace(
                    p, value=values[0], others=tuple(values[1:]), unrolled_axis=axis, along=along
                )
            )
        elif _scattered(p, axis, (*left, *inner)):
            return None
        else:
            statements += [r.statement(p) for r in at]
    behind = {p.along for p in statements if isinstance(p, Write) and p.along is not None}
    if len(behind) > 1:
        return None
    return replace(loops, parallel=tuple(left), reduced=tuple(inner), statements=tuple(statements))


def _axis_behind(w: Write, axis: Axis, others: tuple[Axis, ...]) -> Axis | None:
    """The axis behind whose points the points of `axis` lie side by side, as a power of two."""
    count = hint(axis.extent)
    if stride(w.address, axis) != 1 or count & (count - 1):
        return None
    if divide_exact(w.address - axis.index, const(count)) is None:
        return None
    return next((a for a in others if stride(w.address, a) == count), None)


def _scattered(w: Write, axis: Axis, others: tuple[Axis, ...]) -> bool:
    """Whether a store at one point of the axis is not of neighbours in memory."""
    if w.unrolled_axis is not None:
        return stride(w.address, axis) == 1
    steps = [stride(w.address, a) for a in others]
    return axis in w.address.axes() and 1 not in steps


__all__ = ["unroll_and_jam"]
