"""Reductions along the rows that one split walks: a result for each column.

In registers where a row is (`Columns`); else the split's row of the result is the accumulator.
"""

from __future__ import annotations

from collections.abc import Sequence

from deuteron.codegen.loops import CrossRowReduce
from deuteron.codegen.triton.emit import Emitter
from deuteron.codegen.triton.reductions import clean, constant, masked_value, step
from deuteron.codegen.triton.scalars import reduction_step
from deuteron.codegen.triton.scope import Dims, R, X
from deuteron.codegen.triton.tiling import Tiling


class Columns:
    """What a split reduces along its rows, in registers: an accumulator for each element of a
    tile, or, with `dims` R, for each of its columns."""

    def __init__(self, dims: Dims) -> None:
        self.dims, self.names = dims, dict[str, str]()

    def declare(self, em: Emitter, p: CrossRowReduce) -> None:
        name = self.names[p.name] = em.fresh(f"{clean(p.name)}_")
        em.scope.add(f"{name} = {constant(em.shape(self.dims), p.kind, p.body.dtype)}")

    def update(self, em: Emitter, p: CrossRowReduce) -> None:
        name, mask = self.names[p.name], em.mask(X)
        if self.dims == R:
            value = f"libm.cols_{p.kind}({masked_value(em, p.kind, p.body, mask)})"
            em.scope.add(f"{name} = {reduction_step(p.kind, p.body.dtype, name, value)}")
            return
        text = step(em, p, name)
        em.scope.add(f"{name} = tl.where({mask}, {text}, {name})" if mask else f"{name} = {text}")

    def store(self, em: Emitter, p: CrossRowReduce) -> None:
        name, mask = self.names[p.name], em.mask(R)
        value = name if self.dims == R else f"libm.cols_{p.kind}({name})"
        tail = f", {mask}" if mask else ""
        em.scope.add(f"tl.store({column_place(em, p)}, {value}{tail})")


def in_threads(tiling: Tiling) -> bool:
    """Whether a row of a tile has 16 bytes of half numbers for every thread, so that a column's
    elements are in one. H200, backward of an embedding with layer norm, 768 columns, two rows a
    tile, three sums, us: an accumulator for each element, which spills, 63, for each column 52."""
    tile = tiling.candidates[0]
    return tile.of("x") > 1 and tile.of("r") >= 8 * 32 * tile.num_warps


def column_place(em: Emitter, p: CrossRowReduce) -> str:
    index = em.spread(em.index(p.address), em.index_deps(p.address), R)
    em.guard("store", p.tensor, p.address, R, em.mask(R), em.scope)
    return f"{em.pointers[p.tensor]} + {index}"


def clear_columns(em: Emitter, reductions: Sequence[CrossRowReduce]) -> None:
    """Columns too many for registers: the split's row of the result is the accumulator."""
    r = em.dims["r"]
    with em.inside() as scope:
        em.enter(r, "roffset")
        mask = em.mask(R)
        tail = f", {mask}" if mask else ""
        for p in reductions:
            neutral = constant(em.shape(R), p.kind, p.body.dtype)
            scope.add(f"tl.store({column_place(em, p)}, {neutral}{tail})")
    em.scope.block(f"for roffset in range(0, rnumel, {r.block})", scope.lines)
    em.scope.add("tl.debug_barrier()")


def update_column_in_memory(em: Emitter, p: CrossRowReduce) -> None:
    dtype = p.body.dtype
    value = masked_value(em, p.kind, p.body, em.mask(X))
    old, mask, place = em.fresh("old"), em.mask(R), column_place(em, p)
    tail = f", {mask}" if mask else ""
    new = reduction_step(p.kind, dtype, old, f"libm.cols_{p.kind}({value})")
    em.scope.add(
        f"{old} = tl.load({place}{tail})",
        f"tl.store({place}, {new}{tail})",
        "tl.debug_barrier()",
    )


__all__ = ["Columns", "clear_columns", "in_threads", "update_column_in_memory"]
