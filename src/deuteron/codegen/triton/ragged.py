"""Folds that end where each row says (`ir.ragged`), in a tile of rows and columns.

In: such a fold and the emitter that is to write it. Out: a loop up to the end of the longest row of
the tile, which reads nothing of terms that do not exist. Where a tile has one row, the place of the
rows holds several terms: they are read at once, each lane folds its own, and the lanes are combined
at last. The order of additions depends on the block sizes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deuteron.codegen.triton import scalars
from deuteron.codegen.triton.scope import Scope, bound_name
from deuteron.ir.expr import REDUCTIONS, Expr
from deuteron.ir.index import Axis, hint, product
from deuteron.ir.ragged import ends

if TYPE_CHECKING:
    from deuteron.codegen.loops import Loops
    from deuteron.codegen.triton.emit import Emitter

# Columns in a tile at most, elements of a thread, and terms at once.
WIDEST, EACH, TERMS = 1024, 8, 4
# With fewer columns a tile has several rows instead of several terms, and so many elements.
LEAST_WIDE, ELEMENTS = 64, 256

Tile = tuple[tuple[Axis, ...], tuple[Axis, ...], tuple[int, int, int]]


def rows_and_columns(loops: Loops, order: Sequence[Axis]) -> Tile | None:
    """The axes that ends depend on and the others, with the sizes of a tile: rows, columns, terms.
    None where nothing has an end of its own."""
    found = [end for root in loops.roots() for end in ends(root).values()]
    own = {a for end in found for a in end.axes()}
    y, x = tuple(a for a in order if a in own), tuple(a for a in order if a not in own)
    if not y:
        return None
    columns, rows = (max(1, hint(product(a.extent for a in axes))) for axes in (x, y))
    wide = min(1 << (columns - 1).bit_length(), WIDEST)
    if wide >= LEAST_WIDE:
        return y, x, (1, wide, TERMS)
    return y, x, (min(1 << (rows - 1).bit_length(), ELEMENTS // wide), wide, 1)


def write_ragged(em: Emitter, fold: Expr, end: Expr, name: str) -> None:
    """Writes the fold into the current scope; `name` is its value, neutral so far."""
    (kind, (axis,)), (body,), outer = fold.attr, fold.args, em.scope
    many, dtype = em.terms > 1, body.dtype
    text, last = em.value(end), em.fresh("end")
    longest = f"tl.max({text})" if em.deps(end) else text
    outer.add(f"{last} = tl.minimum({longest}, {em.index(axis.extent)}).to({em.index_type})")
    first, k, folded = em.fresh("k"), em.fresh("k"), em.fresh("fold") if many else name
    em.chain.append(Scope(outer.dims | {bound_name(axis)}))
    em.scope.axes[axis] = k
    lanes = f"tl.arange(0, {em.terms}){'' if em.rank == 1 else '[:, None]'}"
    wide = "" if em.index_type == "tl.int32" else f".to({em.index_type})"
    em.scope.add(f"{k} = {first} + {lanes}{wide}")
    if many:
        neutral = scalars.literal(REDUCTIONS[kind].identity(dtype), dtype)
        shape = em.shape(em.deps(body))
        outer.add(f"{folded} = tl.full({shape}, {neutral}, {scalars.TYPE[dtype]})")
    before, em.within = em.within, body.args[0]
    em.scope.add(f"{folded} = {scalars.fold_step(kind, dtype, folded, em.value(body))}")
    em.within = before
    outer.block(f"for {first} in tl.range(0, {last}, {em.terms})", em.chain.pop().lines)
    if many:
        outer.add(f"{name} = libm.cols_{kind}({folded})")


__all__ = ["rows_and_columns", "write_ragged"]
