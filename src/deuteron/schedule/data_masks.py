"""Where masks that data decides leave something: tables for the loops of nests with products.

In: a nest, its tiling. Out: the nest with a `Cut` for each loop of which numbers in memory say that
some places get nothing (`masks.hidden`: ids of documents that differ, padding, a table of blocks),
and the computations that say where: of each block of rows the first place along the loop that some
row may need, and the end of the last. The loop then goes from the least to the largest of a
program's rows, and stays one loop: what lies in between is masked as ever.

Of a block of rows the least and the largest of what is compared are known, of a place of the loop
the number itself; a predicate of those is three-valued: it holds for all rows, for none, or nobody
knows. Only what holds for all is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, atom, const, floordiv, minimum
from deuteron.ir.nest import Cut, Nest
from deuteron.ir.operations import COMPARE
from deuteron.ir.program import Compute, Origin, contiguous
from deuteron.schedule.loop_passes import cut_off, turns
from deuteron.schedule.masks import OPPOSITE
from deuteron.schedule.normalize import canonical
from deuteron.schedule.space import Map
from deuteron.schedule.tiling import Tiling

SWAPPED = {"logical_or": "logical_and", "logical_and": "logical_or"}
Place = tuple[str, str, tuple[Origin, ...]]  # how names begin; a device; what it is made for
MIN_ROWS = 16  # in a block of a table


def tabled(
    nest: Nest, tiling: Tiling, device: str, origins: tuple[Origin, ...]
) -> tuple[Nest, list[Compute]]:
    """The nest with cuts, and what makes their tables, in order of execution."""
    cuts: list[Cut] = []
    made: list[Compute] = []
    for d in (d for d in tiling.dims if d.mode == "loop" and d.count > 1):
        chain, passes = turns(nest, d.axes)
        every = (cut_off(nest, d.axes, group, chain)[1] for group in passes.values())
        for where in dict.fromkeys(e for e in every if e is not None):
            block = max((tiling.dim_of(a).block for a in where.axes() - set(d.axes)), default=1)
            none, halved = None, block
            while none is None and halved >= min(block, MIN_ROWS):
                place = f"{nest.stores[0].tensor}.cut{len(cuts)}", device, origins
                table = _Table(nest, tiling, d.axes[0], place, halved)
                none, halved = table.surely(where, True), halved // 2
            if none is not None:
                cuts += table.cuts(where, none)
                made += table.made
    return replace(nest, cuts=tuple(cuts)), made


class _Table:
    def __init__(self, nest: Nest, tiling: Tiling, axis: Axis, place: Place, block: int) -> None:
        self.nest, self.axis, self.place, self.block = nest, axis, place, block
        self.rows = [a for a in nest.axes if a != axis and tiling.dim_of(a).block > 1]
        count = {a: floordiv(a.extent + block - 1, const(block)) for a in self.rows}
        self.of = {a: Axis(f"{a.name}b", count[a]) if a in count else a for a in nest.axes}
        self.inside = {a: Axis(f"{a.name}r", const(block)) for a in self.rows}
        self.at: Map = {a: atom(self.of[a]) * block + atom(r) for a, r in self.inside.items()}
        self.made: list[Compute] = []

    def stored(self, name: str, body: Expr, lives: list[Axis]) -> Expr:
        """A computation; what reads it on these axes of the nest's."""
        (stem, device, origins), axes = self.place, tuple(self.of[a] for a in lives)
        layout = contiguous(tuple(a.extent for a in axes), body.dtype, device)
        name = f"{stem}.{name}"
        self.made.append(canonical(Compute(name, axes, body, layout, origins=origins)))
        return E.load(name, tuple(map(atom, axes)), body.dtype)

    def cuts(self, where: Expr, none: Expr) -> list[Cut]:
        """From where to where some row may need something."""
        places = (atom(self.axis), self.axis.extent, atom(self.axis) + 1)
        here, end, behind = map(E.index_value, places)
        lives = [a for a in self.nest.axes if a != self.axis and self.of[a] in none.axes()]
        blocks: Map = {self.of[a]: floordiv(atom(a), const(self.block)) for a in self.rows}
        start = E.reduce("min", (self.axis,), E.op("where", none, end, here))
        stop = E.reduce("max", (self.axis,), E.op("where", none, E.literal(0, "i64"), behind))
        first, last = self.stored("start", start, lives), self.stored("stop", stop, lives)
        ends = ((first, False), (last, True))
        return [Cut(self.axis, where, e.substitute(blocks), upper) for e, upper in ends]

    def over_rows(self, kind: str, e: Expr) -> Expr | None:
        """What it is at all rows of a block; of numbers the least or the largest, where no place of
        the loop counts."""
        body = e.substitute(self.at)
        if body.axes().isdisjoint(self.inside.values()):
            return body
        if self.axis in body.axes():
            return None
        body = e.substitute({a: minimum(self.at[a], a.extent - 1) for a in self.rows})
        lives = [a for a in self.nest.axes if self.of[a] in body.axes()]
        root = E.reduce(kind, tuple(a for a in self.inside.values() if a in body.axes()), body)
        return self.stored(f"{kind}{len(self.made)}", root, lives)

    def surely(self, e: Expr, holds: bool) -> Expr | None:
        """Where `e` holds (or does not) at all rows of a block; None where nobody knows."""
        if e.op == "logical_not":
            return self.surely(e.args[0], not holds)
        if e.op in ("logical_or", "logical_and"):
            name = e.op if holds else SWAPPED[e.op]
            return self.joined(name, [self.surely(a, holds) for a in e.args])
        if e.op in COMPARE and not e.axes().isdisjoint(self.rows):
            found = self.compared(e.op if holds else OPPOSITE[e.op], *e.args)
            if found is not None:
                return found
        return self.over_rows("all", e if holds else E.op("logical_not", e))

    def compared(self, name: str, a: Expr, b: Expr) -> Expr | None:
        """Where all numbers that `a` is at rows of a block compare so with all that `b` is."""
        if name in ("eq", "ne"):
            both = [self.compared("le" if name == "eq" else "lt", *x) for x in ((a, b), (b, a))]
            return self.joined("logical_and" if name == "eq" else "logical_or", both)
        if name in ("gt", "ge"):
            return self.compared("lt" if name == "gt" else "le", b, a)
        last, first = self.over_rows("max", a), self.over_rows("min", b)
        return None if last is None or first is None else E.op(name, last, first)

    def joined(self, name: str, parts: Sequence[Expr | None]) -> Expr | None:
        """Of what holds all parts, or of what holds any those that are known."""
        found = [p for p in parts if p is not None]
        if not found or name == "logical_and" and len(found) < len(parts):
            return None
        return functools.reduce(functools.partial(E.op, name), found)


__all__ = ["tabled"]
