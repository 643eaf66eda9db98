"""In which pass over a loop the statements of a nest run, and how much of it masks leave each.

In: a nest, and the axes of a loop. Out: passes; what is cut off; by a tiling the shares of loops
that are walked. `codegen.lowering` writes the same passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from deuteron.ir.expr import Expr, as_position
from deuteron.ir.index import Axis
from deuteron.ir.nest import Nest, Reduce, Statement, Store
from deuteron.schedule.kernel import Reduce as RowReduce
from deuteron.schedule.masks import Bound, bounds, hidden, neutral, visited
from deuteron.schedule.online import Chain, Rescaled
from deuteron.schedule.tiling import Dim, Tiling

# What numbers in memory leave of a loop that they mask: assumptions, as only a call knows. Of tiles
# that they hide one by one: by it a kernel that can leave tiles out is better than one that cannot.
# Of ranges that tables hold (documents, padding): H200, 8 documents in 8192 places, blocks of 128 x
# 128, which reach beyond them, 214 us, of 64 x 64 161.
DATA_SHARE, RANGE_SHARE = 0.9, 0.25

# Reductions of a pass; bounds of what it leaves out; where numbers in memory say that it gets none.
Cut = tuple[list[str], tuple[Bound, ...], Expr | None]


class Shares:
    """The shares of a nest's loops that are walked; passes and what they leave out are found once
    for each loop, whatever its blocks."""

    def __init__(self, nest: Nest) -> None:
        self.nest, self.cut = nest, cache(self._cut)

    def of(self, tiling: Tiling) -> dict[str, float]:
        """For reductions in a loop that a mask cuts the share of it that is walked; for what is
        inside such loops the sum over the passes in which it is made."""
        out: dict[str, float] = {}
        for d in (d for d in tiling.dims if d.mode == "loop"):
            passes_cut, inside = self.cut(d.axes)
            walked = [_walked(tiling, d, every, where) for _, every, where in passes_cut]
            for share, (names, _, _) in zip(walked, passes_cut, strict=True):
                out.update(dict.fromkeys(names, share))
            for name in inside:
                out[name] = out.get(name, 1.0) * sum(walked)
        return out

    def _cut(self, axes: tuple[Axis, ...]) -> tuple[list[Cut], list[str]]:
        """Of each pass over a loop its reductions, and what is cut off; results made inside."""
        chain, ends = turns(self.nest, axes)
        found = [
            ([s.name for s in g if isinstance(s, Reduce)], *cut_off(self.nest, axes, g, chain))
            for g in ends.values()
        ]
        every = self.nest.reductions.values()
        return found, [s.name for s in every if set(self.nest.lives(s)) & set(axes)]


def turns(nest: Nest, axes: Sequence[Axis]) -> tuple[Chain, dict[int, list[Statement]]]:
    """The statements of each pass over a loop."""
    chain, of = passes(nest, axes)
    ends: dict[int, list[Statement]] = {}
    for s in nest.statements:
        if s in of and (isinstance(s, Reduce) or set(nest.lives(s)) & set(axes)):
            ends.setdefault(of[s], []).append(s)
    return chain, ends


def _walked(tiling: Tiling, d: Dim, every: Sequence[Bound], where: Expr | None) -> float:
    """The share of a loop that a pass walks of which this is cut off."""
    wide = [x for x in tiling.dims if x is not d and x.block > 1]
    beside = {a for x in wide for a in x.axes}
    reads = [n.axes() for n in where.loads()] if where is not None else []
    known = all(not beside & axes or not axes & set(d.axes) for axes in reads)  # by blocks
    cut = [b for b in every if not b.loaded]
    others = {a for b in cut for a in b.index.axes()}
    rows = next((x for x in tiling.dims if len(others) == 1 and x.axes == tuple(others)), None)
    share = 1.0 if rows is None else visited(cut, d.extent, rows.extent, rows.block, d.block)
    if len(cut) < len(every):  # beyond both ends of a range about half a block
        read = {a for axes in reads for a in axes}
        blocks = d.block + sum(x.block for x in wide if read & set(x.axes))
        return min(share, RANGE_SHARE * share + blocks / (2 * d.extent))
    return DATA_SHARE * share if reads and known else share


def cut_off(
    nest: Nest, axes: Sequence[Axis], group: Sequence[Statement], chain: Chain
) -> tuple[tuple[Bound, ...], Expr | None]:
    """What masks cut off a loop in which these statements run: nothing where one stores; and where
    numbers in memory say that none of them gets anything."""
    reductions = [s for s in group if isinstance(s, Reduce)]
    if len(axes) != 1 or len(reductions) < len(group):
        return (), None
    found = neutral(reductions, chain.reductions.keys(), chain.rules.keys())
    where = hidden(found, nest.reductions.keys())
    tables = [c for c in nest.cuts if c.axis in axes and c.hidden is where]
    cut = (Bound(c.axis, as_position(c.end), c.upper) for c in tables)
    return (*bounds(found, axes[0]), *cut), where


def passes(nest: Nest, axes: Sequence[Axis]) -> tuple[Chain, dict[Statement, int]]:
    """In which pass over `axes` each reduction over them and each store runs; results that live on
    them are made where they are used. The chain has the rules by which reductions share one."""
    inside = set(axes)
    chain = Chain(lambda e: not e.axes() & inside)
    of: dict[Statement, int] = {}
    for s in nest.statements:
        if isinstance(s, Store):
            of[s] = chain.need(s.value)
        elif not set(s.over) & inside:
            chain.ready[s.name] = chain.need(s.body)
        else:
            of[s] = chain.add(RowReduce(s.name, s.kind, s.body))
            rule = chain.rules.get(s.name)
            if rule is not None and not isinstance(rule, Rescaled):  # a rule that is not used here
                del chain.rules[s.name]
                of[s] += 1
                chain.ready[s.name] += 1
    return chain, of


__all__ = ["DATA_SHARE", "Shares", "cut_off", "passes", "turns"]
