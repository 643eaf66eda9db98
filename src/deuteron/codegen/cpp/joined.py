"""Nests over joined tensors, as a nest for each part (index-set splitting).

In: `codegen.loops.Loops`. Out: the same points, once each, in several `Loops`. A parallel axis is
cut where conditions on it change, if it is not the one that vectors walk along (`segments` cuts
that), or if the nest goes in tiles (`tiles`), which have no segments. A row then belongs to one
part; otherwise it would ask at every element which one it is. In tiles a part moreover becomes
what it is without conditions: a copy along another axis, or no tile at all. (AVX-512, one core,
f32: 16 channels in NCHW and 4 x 16 in NHWC joined to [2, 80, 32, 32] in NHWC with a batch norm
behind: 365 us whole, 29 in parts.)
"""

from __future__ import annotations

from deuteron.codegen.cpp.axes import vector
from deuteron.codegen.cpp.index_sets import MOST, MOST_PARTS, cuts, operations, pieces, repeats
from deuteron.codegen.cpp.nests import ordered_conflicts
from deuteron.codegen.cpp.tiles import crossing
from deuteron.codegen.loops import Loops, Write, stretch
from deuteron.ir.index import Axis, hint

# Conditions of a row that a loop has branches for (`points.MOST_CASES`); with more, nests are cut.
FEW = 2
# Code of all pieces, in that of the nest: where each is one part of a join they have less than
# twice as much, since what the parts share is repeated.
MOST_CODE = 2
# Points of a piece at least, on average: less are over before their loops pay.
LEAST = 1024


def by_parts(loops: Loops) -> list[Loops]:
    """The nest in pieces, or as it is."""
    if loops.chunk is not None:
        return [loops]
    axes = [*loops.parallel, *loops.reduced]
    walked, meeting = vector(loops, axes), ordered_conflicts(loops)
    if walked is not None and not meeting and tiled(loops, walked) and conditions(loops, walked):
        found = cut(loops, walked, vectors=True)
        if found:
            return found
    for axis in loops.parallel:
        if axis != walked and axis not in meeting and conditions(loops, axis) > FEW:
            found = cut(loops, axis)
            if found:
                return found
    return [loops]


def tiled(loops: Loops, walked: Axis) -> bool:
    """Whether a nest goes in tiles, in which `segments` does not cut the axis of vectors."""
    plain = walked in loops.parallel and all(isinstance(p, Write) for p in loops.parts)
    return plain and crossing(loops, walked) is not None


def conditions(loops: Loops, axis: Axis) -> int:
    """Distinct masks of loads that depend on an axis."""
    masks = {n.args[0] for n in loops.nodes if n.op == "load" and n.args}
    return sum(axis in m.axes() for m in masks)


def cut(loops: Loops, axis: Axis, vectors: bool = False) -> list[Loops]:
    """The nest between conditions on one of its axes; none where that gains nothing. The axis of
    `vectors` may be cut as often as `segments` would."""
    marks = cuts(loops.roots(), axis, MOST_PARTS, turns=False)
    points = 1
    for a in (*loops.parallel, *loops.reduced):
        points *= max(1, hint(a.extent))
    if not marks or points < LEAST * (len(marks) + 1):
        return []
    found = [stretch(loops, axis, low, piece) for low, piece in pieces(axis, marks)]
    if vectors:
        few = len(marks) <= MOST or not repeats(loops.roots(), [x.roots() for x in found])
        return found if few else []
    code = sum(operations(x.roots()) for x in found)
    return found if code <= MOST_CODE * operations(loops.roots()) else []


__all__ = ["by_parts"]
