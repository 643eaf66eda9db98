"""Where statements of a nest contribute nothing: masks as intervals.

In: a nest, an axis that reductions run over. Out: `Bound`s, outside of which no block of the axis
contributes: the loop is cut there. They follow from comparisons of positions: an element is minus
infinity in a maximum, 0 in a sum, or false in an `any`, where such a comparison holds (a causal
mask, a window; a number of keys that is loaded: where the loop ends is then arithmetic at run
time). Where other comparisons hold, of numbers in memory (`hidden`), tables say
(`data_masks`). The exponential of minus infinity is 0, whatever it is subtracted from that is
finite; products with it count as 0, also with what is not finite: what a mask hides is not read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, as_position
from deuteron.ir.index import Axis, Index, Value, atom, const, fits_int, hint, substitute
from deuteron.ir.nest import Reduce

Positive = tuple[Index, bool]  # an index that is above 0, or (False) at least 0
Condition = Positive | tuple[Expr, bool]  # or what holds, or (False) does not
UNKNOWN = ("reduce", "scan", "random")
SAMPLES = 64  # of the blocks of a grid, for an average
OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


@dataclass(frozen=True)
class Bound:
    """Along `axis` nothing contributes from the largest `index` of a block of the other axes on
    (`upper`), or before the least one."""

    axis: Axis
    index: Index
    upper: bool

    @property
    def loaded(self) -> bool:
        """Whether tensors say where it is."""
        return any(isinstance(a, Value) for a in self.index.atoms())


def neutral(
    reductions: Sequence[Reduce], results: AbstractSet[str], moved: AbstractSet[str]
) -> dict[Condition, None]:
    """Conditions of which each makes all of the reductions get nothing. `results` over the whole
    axis may be minus infinity in a row without elements: an exponential of a difference from one
    is 0 only in sums that are `moved` with their maximum."""
    every = [dict.fromkeys(_neutral(s, results, s.name in moved)) for s in reductions]
    return {c: None for c in every[0] if all(c in x for x in every)} if every else {}


def bounds(conditions: Iterable[Condition], axis: Axis) -> tuple[Bound, ...]:
    """What cuts a loop over `axis` in which no more is made than what is `neutral`."""
    out = []
    for index, strict in conditions:
        step = index.coefficient(axis) if isinstance(index, Index) else None
        if isinstance(index, Expr) or step is None or step.value not in (1, 0, -1):
            continue
        rest = index - atom(axis) * step
        end = const(1 if strict else 0) - rest
        if step.value == 1:  # axis > -rest
            out.append(Bound(axis, end, True))
        elif step.value == -1:  # axis < rest
            out.append(Bound(axis, const(1) - end, False))
        elif (bound := Bound(axis, axis.extent * end, True)).loaded:  # all of the axis, or nothing
            out.append(bound)
    return tuple(out)


def hidden(conditions: Iterable[Condition], made: AbstractSet[str]) -> Expr | None:
    """Where numbers in memory say that nothing is got; those that are `made` are not there."""
    found = [
        e if holds else E.op("logical_not", e)
        for e, holds in conditions
        if isinstance(e, Expr) and e.loads() and not made & {n.attr[0] for n in e.loads()}
    ]
    found = [e for e in found if e.op != "logical_and" or e.args[0] not in found]
    return functools.reduce(partial(E.op, "logical_or"), found) if found else None


def _neutral(s: Reduce, results: AbstractSet[str], moved: bool) -> list[Condition]:
    if s.kind == "max":
        return _low(s.body)
    if s.kind in ("any", "all"):
        return _any(s.body, s.kind == "all")
    return _zero(s.body, results, moved) if s.kind == "sum" else []


def _low(e: Expr) -> list[Condition]:
    """Where it is minus infinity."""
    match e.op:
        case "where":
            return _chosen(e, float("-inf"), _low)
        case "add":
            return [*_low(e.args[0]), *_low(e.args[1])]
        case "sub" | "cast":
            return _low(e.args[0])
        case "mul":
            for x, c in (e.args, e.args[::-1]):
                if c.op == "literal" and c.attr > 0:
                    return _low(x)
    return []


def _zero(e: Expr, results: AbstractSet[str], moved: bool) -> list[Condition]:
    """Where it is 0, whatever the results are, or as they are where it is moved with them."""
    zero = partial(_zero, results=results, moved=moved)
    match e.op:
        case "where":
            return _chosen(e, 0, zero)
        case "exp" | "exp2":
            if any(n.attr[0] in results for n in e.args[0].loads()):
                return _low(e.args[0]) if moved else []
            return [_where(c, e.args[0]) for c in _low(e.args[0])]
        case "mul":
            return [*zero(e.args[0]), *zero(e.args[1])]
        case "add" | "sub":
            other = zero(e.args[1])
            return [c for c in zero(e.args[0]) if c in other]
        case "div" | "cast":
            return zero(e.args[0])
    return []


def _chosen(e: Expr, value: float, inside: Callable[[Expr], list[Condition]]) -> list[Condition]:
    condition, a, b = e.args
    if a.op == "literal" and a.attr == value:
        return [*_any(condition, True), *inside(b)]
    if b.op == "literal" and b.attr == value:
        return [*_any(condition, False), *inside(a)]
    return []


def _where(c: Condition, e: Expr) -> Condition:
    """A condition on data, where what is in memory and subtracted in `e` is not infinite, too: a
    row without elements has no numbers."""
    while e.op == "cast":
        (e,) = e.args
    if not isinstance(c[0], Expr) or e.op != "sub" or not e.args[1].loads():
        return c
    own = c[0] if c[1] else E.op("logical_not", c[0])
    return E.op("logical_and", own, E.op("gt", e.args[1], E.literal(float("-inf"), e.dtype))), True


def _any(e: Expr, holds: bool) -> list[Condition]:
    """Comparisons each of which makes `e` true (or false, where not `holds`)."""
    match e.op:
        case "logical_not":
            return _any(e.args[0], not holds)
        case "logical_or" | "logical_and":
            if (e.op == "logical_or") is holds:
                return [*_any(e.args[0], holds), *_any(e.args[1], holds)]
        case "eq" | "ne":
            for x, c in (e.args, e.args[::-1]):
                if c.op == "literal" and c.attr == float("-inf") and (e.op == "eq") is holds:
                    return _low(x)
        case "lt" | "le" | "gt" | "ge":
            sides = [_position(x) for x in e.args]
            name = e.op if holds else OPPOSITE[e.op]
            a, b = sides if name in ("lt", "le") else sides[::-1]
            placed = any(x.axes() and not x.loads() for x in e.args)  # a position, or its limit
            if a is not None and b is not None and (placed or not e.loads()):
                return [(b - a, name in ("lt", "gt"))]
    return [(e, holds)] if all(n.op not in UNKNOWN for n in e.walk()) else []


def _position(e: Expr) -> Index | None:
    if e.op == "cast" and e.dtype == "i32" and e.args[0].op == "index" and fits_int(e.args[0].attr):
        (e,) = e.args
    whole = e.dtype == "i64" or e.dtype == "i32" and e.op != "literal"
    return as_position(e) if whole and all(n.op not in UNKNOWN for n in e.walk()) else None


def visited(bound: Sequence[Bound], extent: int, other: int, block: int, step: int) -> float:
    """The share of the axis that a loop in blocks of `step` walks, on average over (some) blocks of
    the one other axis that the bounds depend on."""
    total, blocks = 0, range(0, max(1, other), block)
    blocks = blocks[:: -(-len(blocks) // SAMPLES)]
    for first in blocks:
        ends = (first, min(first + block, other) - 1)
        start, stop = 0, extent
        for b in bound:
            values = [
                hint(substitute(b.index, {a: const(x) for a in b.index.axes()})) for x in ends
            ]
            if b.upper:
                stop = min(stop, max(values))
            else:
                start = max(start, min(values))
        if start < stop:
            total += min(extent, -(-stop // step) * step) - start // step * step
    return total / (extent * len(blocks))


__all__ = ["OPPOSITE", "Bound", "bounds", "hidden", "neutral", "visited"]
