"""What a chain of products reads at a digit of a key's number, as a product with ones and zeros.

In: a nest and its tiling, on tensor cores. Out: the same, in which no element of a tile is read at
an address of its own. A bias of a key's row and one of its column (decomposed relative positions)
live on queries and on one axis of the two that a tile's keys are walked along: each query has a
table of few places, of which each key picks one. With e over the places,

    t[i, y(j)]  =  sum over e of t[i, e] (y(j) == e)

on tensor cores, from a table that is read once. Numbers of 16 bits come out as they are, but for
the sign of a zero; what is not finite would spoil the others, and is picked by a code of its own: 1
and -1 for the infinities, 2 for NaN. H200, 200 x 12 windows of 14 x 14 by 64, bf16: 864 us, 300 so
(210 without codes).
"""

from __future__ import annotations

import math
from dataclasses import replace

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, cast, index_value, literal, op
from deuteron.ir.index import Axis
from deuteron.ir.nest import Nest, Reduce, Statement, Store, roots
from deuteron.schedule.dimensions import is_nested
from deuteron.schedule.tiling import Dim, Tiling

# Places of a table at most, an assumption; the least side of what tensor cores multiply.
MAX_PLACES, MIN_SIDE = 32, 16


def tables(nest: Nest) -> list[Expr]:
    """What may be picked in a nest of chained products, whatever its tiling: loads of numbers of 16
    bits, of which an axis that has few places is an index."""
    if not any(is_nested(nest, nest.reductions[n]) for n in nest.contractions):
        return []
    sides = {e for c in nest.contractions.values() for e in (c.a, c.b) if e.op == "load"}
    reductions = (s for s in nest.statements if isinstance(s, Reduce))
    every = dict.fromkeys(n for s in reductions for e in roots(s) for n in e.loads())
    return [
        n
        for n in every
        if not n.args
        and n.dtype in ("bf16", "f16")
        and n.attr[0] not in nest.reductions
        and n not in sides
        and any(_few(n, a) for a in n.axes())
    ]


def _few(load: Expr, a: Axis) -> bool:
    places = all(i is a.index or a not in i.axes() for i in load.attr[1])
    return places and (a.extent.value or math.inf) <= MAX_PLACES


def picks(tiling: Tiling, load: Expr) -> Axis | None:
    """The axis by which the elements of a tile pick from a table."""
    axes = load.axes()
    if not tiling.num_warps:
        return None
    dims = [d for d in tiling.dims if d.varies(axes)[0]]
    if len(dims) != 2 or min(d.block for d in dims) < MIN_SIDE:
        return None
    for d in dims:
        used = [a for a in d.axes if a in axes]
        if len(d.axes) > 1 and len(used) == 1 and _few(load, used[0]):
            return used[0]
    return None


def places_of(axis: Axis) -> int:
    """Those of a table, as tensor cores have them."""
    return max(MIN_SIDE, 1 << ((axis.extent.value or 1) - 1).bit_length())


def picked(nest: Nest, tiling: Tiling) -> tuple[Nest, Tiling]:
    """The nest with such products, and a dimension for each table's places."""
    made: list[Statement] = []
    instead: dict[Expr, Expr] = {}
    axes, dims = list(nest.axes), list(tiling.dims)
    for k, load in enumerate(tables(nest)):
        axis = picks(tiling, load)
        if axis is None:
            continue
        place = Axis(f"pick{k}", axis.extent)
        table = load.substitute({axis: place.index})
        same = op("eq", index_value(axis.index), index_value(place.index))
        lives = tuple(a for a in nest.axes if a in load.axes())
        parts = []
        for what, side in zip(("picked", "special"), finite_and_special(table)):
            name = f"{load.attr[0]}.{what}{k}"  # no tensor has it
            ones = op("where", same, literal(1.0, "f32"), literal(0.0, "f32"))
            body = op("mul", cast(side, "f32"), ones)
            made.append(Reduce(name, "sum", (place,), body, load.dtype))
            parts.append(E.load(name, tuple(a.index for a in lives), "f32"))
        number = together(*parts)
        instead |= {cast(load, "f32"): number, load: cast(number, load.dtype)}
        axes.append(place)
        first = min(i for i, d in enumerate(dims) if d.varies(load.axes())[0])
        dims.insert(first + 1, Dim(f"e{k}", (place,), "whole", places_of(axis)))
    if not made:
        return nest, tiling
    statements = (*made, *(_with(s, instead) for s in nest.statements))
    return replace(nest, axes=tuple(axes), statements=statements), replace(tiling, dims=tuple(dims))


def finite_and_special(x: Expr) -> tuple[Expr, Expr]:
    """A number, or 0 and its code where it is not finite."""
    wide = cast(x, "f32")
    zero, infinity = literal(0.0, "f32"), literal(math.inf, "f32")
    finite = op("lt", op("abs", wide), infinity)
    sign = op("where", op("gt", wide, zero), literal(1.0, "f32"), literal(-1.0, "f32"))
    code = op("where", op("eq", wide, wide), sign, literal(2.0, "f32"))
    return op("where", finite, wide, zero), op("where", finite, zero, code)


def together(finite: Expr, code: Expr) -> Expr:
    """The number again."""
    infinity = op("mul", code, literal(math.inf, "f32"))
    special = op("where", op("eq", code, literal(2.0, "f32")), literal(math.nan, "f32"), infinity)
    return op("where", op("eq", code, literal(0.0, "f32")), finite, special)


def _with(s: Statement, instead: dict[Expr, Expr]) -> Statement:
    (root,) = roots(s)
    root = E.rewrite(root, lambda n, args: None, nodes=instead)
    return replace(s, value=root) if isinstance(s, Store) else replace(s, body=root)


__all__ = ["picked", "picks", "places_of", "tables"]
