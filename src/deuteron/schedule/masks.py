"""Where statements of a nest contribute nothing: masks as intervals.

In: a nest, an axis that reductions run over. Out: `Bound`s, outside of which no block of the axis
contributes: the loop is cut there. They follow from comparisons of positions: an element is minus
infinity in a maximum, 0 in a sum, or false in an `any`, where such a comparison holds (a causal
mask, a window; a number of keys that is loaded: where the loop ends is then arithmetic at run
time). The
exponential of minus infinity is 0, whatever it is subtracted from that is finite; products with it
count as 0, also with what is not finite: what a mask hides is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial

from deuteron.ir.expr import Expr, as_position
from deuteron.ir.index import Axis, Index, Value, atom, const, fits_int, hint, substitute
from deuteron.ir.nest import Reduce

Positive = tuple[Index, bool]  # an index that is above 0, or (False) at least 0
UNKNOWN = ("reduce", "scan", "random")
OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


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


def bounds(
    reductions: Sequence[Reduce],
    axis: Axis,
    results: AbstractSet[str] = frozenset(),
    moved: AbstractSet[str] = frozenset(),
) -> tuple[Bound, ...]:
    """What cuts a loop over `axis` in which all of `reductions` run. `results` over the whole axis
    may be minus infinity in a row without elements: an exponential of a difference from one is
    0 only in sums that are `moved` with their maximum."""
    common: dict[Positive, None] | None = None
    for s in reductions:
        own = dict.fromkeys(_neutral(s, frozenset() if s.name in moved else results))
        common = own if common is None else {p: None for p in common if p in own}
    out = []
    for index, strict in common or ():
        step = index.coefficient(axis)
        if step is None or step.value not in (1, 0, -1):
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


def _neutral(s: Reduce, unknown: AbstractSet[str]) -> list[Positive]:
    if s.kind == "max":
        return _low(s.body)
    if s.kind in ("any", "all"):
        return _any(s.body, s.kind == "all")
    return _zero(s.body, unknown) if s.kind == "sum" else []


def _low(e: Expr) -> list[Positive]:
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


def _zero(e: Expr, unknown: AbstractSet[str]) -> list[Positive]:
    """Where it is 0, whatever the `unknown` results are."""
    match e.op:
        case "where":
            return _chosen(e, 0, partial(_zero, unknown=unknown))
        case "exp" | "exp2":
            far = any(n.attr[0] in unknown for n in e.args[0].loads())
            return [] if far else _low(e.args[0])
        case "mul":
            return [*_zero(e.args[0], unknown), *_zero(e.args[1], unknown)]
        case "div" | "cast":
            return _zero(e.args[0], unknown)
    return []


def _chosen(e: Expr, value: float, inside: Callable[[Expr], list[Positive]]) -> list[Positive]:
    condition, a, b = e.args
    if a.op == "literal" and a.attr == value:
        return [*_any(condition, True), *inside(b)]
    if b.op == "literal" and b.attr == value:
        return [*_any(condition, False), *inside(a)]
    return []


def _any(e: Expr, holds: bool) -> list[Positive]:
    """Comparisons of positions each of which makes `e` true (or false, where not `holds`)."""
    match e.op:
        case "logical_not":
            return _any(e.args[0], not holds)
        case "logical_or" | "logical_and":
            if (e.op == "logical_or") is holds:
                return [*_any(e.args[0], holds), *_any(e.args[1], holds)]
            return []
        case "eq" | "ne":
            for x, c in (e.args, e.args[::-1]):
                if c.op == "literal" and c.attr == float("-inf") and (e.op == "eq") is holds:
                    return _low(x)
        case "lt" | "le" | "gt" | "ge":
            sides = [_position(x) for x in e.args]
            name = e.op if holds else OPPOSITE[e.op]
            a, b = sides if name in ("lt", "le") else sides[::-1]
            if a is None or b is None:
                return []
            return [(b - a, name in ("lt", "gt"))]
    return []


def _position(e: Expr) -> Index | None:
    if e.op == "cast" and e.dtype == "i32" and e.args[0].op == "index" and fits_int(e.args[0].attr):
        (e,) = e.args
    whole = e.dtype == "i64" or e.dtype == "i32" and e.op != "literal"
    return as_position(e) if whole and all(n.op not in UNKNOWN for n in e.walk()) else None


def visited(bound: Sequence[Bound], extent: int, other: int, block: int) -> float:
    """The share of the axis that a loop walks, on average over blocks of the one other axis that
    the bounds depend on."""
    total, blocks = 0, range(0, max(1, other), block)
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
        total += max(0, stop - start)
    return total / (extent * len(blocks))


__all__ = ["Bound", "bounds", "visited"]
