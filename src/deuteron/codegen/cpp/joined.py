"""Nests over joined tensors, as a nest for each part (index-set splitting).

In: `codegen.loops.Loops`. Out: the same points, once each, in several `Loops`. A parallel axis is
cut where conditions on it change, if it is not the one that vectors walk along (`index_sets` cuts
that), or if the nest goes in tiles (`tiles`), whose axes are whole. A row then belongs to one
part; otherwise it would ask at every element which one it is. In tiles a part moreover becomes
what it is without conditions: a copy along another axis, or no tile at all. (AVX-512, one core,
f32: 16 channels in NCHW and 4 x 16 in NHWC joined to [2, 80, 32, 32] in NHWC with a batch norm
behind: 365 us whole, 29 in parts.)
"""

from __future__ import annotations

from deuteron.codegen.cpp.axes import vector_axis
from deuteron.codegen.cpp.environment import ordered_conflicts
from deuteron.codegen.cpp.tiles import transposed_axis
from deuteron.codegen.index_sets import (
    MAX_CUTS,
    MAX_INDEX_SETS,
    cut_positions,
    operation_count,
    pieces,
    repeats_code,
)
from deuteron.codegen.loops import Loops, Write, restricted
from deuteron.ir.index import Axis, hint

# Conditions of a row that a loop has branches for (`points.MAX_ROW_CASES`); with more, nests are
# cut.
MAX_BRANCHES = 2
# Code of all pieces, in that of the nest: where each is one part of a join they have less than
# twice as much, since what the parts share is repeated.
MAX_CODE_GROWTH = 2
# Points of a piece at least, on average: less are over before their loops pay.
MIN_PIECE_POINTS = 1024


def split_index_sets(loops: Loops) -> list[Loops]:
    """The nest in pieces, or as it is."""
    if loops.row_split is not None:
        return [loops]
    axes = [*loops.parallel, *loops.reduced]
    walked, meeting = vector_axis(loops, axes), ordered_conflicts(loops)
    if (
        walked is not None
        and not meeting
        and goes_in_tiles(loops, walked)
        and mask_count(loops, walked)
    ):
        cut_nests = cut_axis(loops, walked, vectors=True)
        if cut_nests:
            return cut_nests
    for axis in loops.parallel:
        if axis != walked and axis not in meeting and mask_count(loops, axis) > MAX_BRANCHES:
            cut_nests = cut_axis(loops, axis)
            if cut_nests:
                return cut_nests
    return [loops]


def goes_in_tiles(loops: Loops, walked: Axis) -> bool:
    """Whether a nest goes in tiles, in which `index_sets` does not cut the axis of vectors."""
    plain = walked in loops.parallel and all(isinstance(p, Write) for p in loops.statements)
    return plain and transposed_axis(loops, walked) is not None


def mask_count(loops: Loops, axis: Axis) -> int:
    """Distinct masks of loads that depend on an axis."""
    masks = {n.args[0] for n in loops.nodes if n.op == "load" and n.args}
    return sum(axis in m.axes() for m in masks)


def cut_axis(loops: Loops, axis: Axis, vectors: bool = False) -> list[Loops]:
    """The nest between conditions on one of its axes; none where that gains nothing. The axis of
    `vectors` may be cut as often as `index_sets` would."""
    marks = cut_positions(loops.roots(), axis, MAX_INDEX_SETS, of_loads=False)
    points = 1
    for a in (*loops.parallel, *loops.reduced):
        points *= max(1, hint(a.extent))
    if not marks or points < MIN_PIECE_POINTS * (len(marks) + 1):
        return []
    cut_nests = [restricted(loops, axis, low, piece) for low, piece in pieces(axis, marks)]
    if vectors:
        few = len(marks) <= MAX_CUTS or not repeats_code(
            loops.roots(), [x.roots() for x in cut_nests]
        )
        return cut_nests if few else []
    code = sum(operation_count(x.roots()) for x in cut_nests)
    return cut_nests if code <= MAX_CODE_GROWTH * operation_count(loops.roots()) else []


__all__ = ["split_index_sets"]
