"""Ranges of indices as numbers: the least and the most, what fits 64 bits, what they determine."""

from __future__ import annotations

from deuteron.base.memo import MEMO
from deuteron.ir.division import atom_bound, bound, is_nonneg
from deuteron.ir.evaluate import hint
from deuteron.ir.polynomial import (
    Atom,
    Axis,
    Div,
    Index,
    MinMax,
    Mod,
    Monomial,
    Sym,
    Value,
    atom,
    const,
    divide_exact,
)

# What sizes are taken to be below, where a value that is computed from them must not leave 64 bits.
LARGEST_SIZE = 2**31


def fits(index: Index) -> bool:
    """Whether the exact number is proven to be one of 64 bits, with a sign, as are the sums of
    any of its terms: arithmetic of integers, which wraps around, then gives the same. Sizes
    (numbers that cannot be negative) are below `LARGEST_SIZE`."""
    if index.value is not None:
        return -(2**63) <= index.value < 2**63
    terms = [_term(m, c) for m, c in index.terms]
    known = [t for t in terms if t is not None]
    low, high = sum(min(a, 0) for a, _ in known), sum(max(b, 0) for _, b in known)
    return len(known) == len(terms) and low > -(2**63) and high < 2**63


def fits_int(index: Index) -> bool:
    """Whether the value is proven to fit a 32-bit int (vector lanes of floats stay as wide)."""
    low, high = bound(index, False), bound(index, True)
    return (
        low is not None
        and high is not None
        and low.value is not None
        and high.value is not None
        and low.value > -(2**31)
        and high.value < 2**31
    )


def interval(index: Index) -> tuple[int, int] | None:
    """Numbers between which an index is; None where nothing is known."""
    terms = [_term(m, c) for m, c in index.terms]
    known = [t for t in terms if t is not None]
    if len(known) < len(terms):
        return None
    return sum(a for a, _ in known), sum(b for _, b in known)


def _term(m: Monomial, c: int) -> tuple[int, int] | None:
    """The least and the most of one monomial, as numbers."""
    term = (c, c)
    for a in m:
        limits = _limits(a)
        if limits is None:
            return None
        products = [x * y for x in term for y in limits]
        term = min(products), max(products)
    return term


_LIMITS: dict[Atom, tuple[int, int] | None] = MEMO.answers()


def _limits(a: Atom) -> tuple[int, int] | None:
    """The least and the most that an atom is, as numbers; None where that is not known."""
    known = _LIMITS.get(a, _LIMITS)
    if known is _LIMITS:
        known = _LIMITS[a] = _computed_limits(a)
    return known  # type: ignore[return-value]


def _computed_limits(a: Atom) -> tuple[int, int] | None:
    if isinstance(a, Sym):
        return (a.low, LARGEST_SIZE) if a.low >= 0 else None
    if isinstance(a, Axis):
        return _below(a.extent)
    if isinstance(a, Mod):
        return _below(a.den)
    if isinstance(a, Div):
        num, den = interval(a.num), a.den.value or 1  # a divisor is at least 1
        if num is None or a.den.value:
            return None if num is None else (num[0] // den, num[1] // den)
        return min(num[0], 0), max(num[1], 0)
    if isinstance(a, MinMax):
        x, y, pick = interval(a.a), interval(a.b), min if a.kind == "min" else max
        return None if x is None or y is None else (pick(x[0], y[0]), pick(x[1], y[1]))
    if isinstance(a, Value) and a.expr.op == "check":
        return _below(a.expr.attr)
    if isinstance(a, Value) and a.expr.op == "cast":  # of fewer bits
        bits = {"bool": 1, "u8": 8, "i8": 7, "i16": 15, "i32": 31}.get(a.expr.args[0].dtype, 63)
        return -(2**bits), 2**bits - 1
    return -(2**63), 2**63 - 1


def _below(extent: Index) -> tuple[int, int] | None:
    most = interval(extent)
    return None if most is None else (0, max(0, most[1] - 1))


def determined(index: Index) -> frozenset[Axis]:
    """Axes that have the same value at any two points where the index has the same value, proven.

    The terms are the digits of a number: where each weighs more than all below it can add up to,
    equal numbers have equal digits, from the highest on. Terms that do not are one digit together,
    which says nothing of them; what lies below it is determined if all of them are multiples of
    something that weighs more than that.
    """
    weights: dict[Atom, Index] = {}
    for m, c in index.terms:
        moving = [a for a in m if isinstance(a, Value) or atom(a).axes()]
        if len(moving) > 1:
            return frozenset()
        if moving:
            rest = Index({tuple(a for a in m if a is not moving[0]): c})
            weights[moving[0]] = weights.get(moving[0], const(0)) + rest
    digits: list[tuple[list[Index], list[Atom]]] = []  # weights and atoms of each, lowest first
    reach: list[Index | None] = [const(0)]  # what all below each digit add up to at most; and all
    for a, signed in sorted(weights.items(), key=lambda item: abs(hint(item[1]))):
        low, high, total = atom_bound(a, False), atom_bound(a, True), reach[-1]
        weight = own = signed if is_nonneg(signed) else -signed
        parts, atoms, below = [own], [a], total
        while below is None or not is_nonneg(weight - 1 - below):
            if not digits:
                return frozenset()
            lower, more = digits.pop()
            reach.pop()
            parts, atoms, weight, below = lower + parts, more + atoms, lower[0], reach[-1]
            if any(divide_exact(p, weight) is None for p in parts):
                below = None
        digits.append((parts, atoms))
        if total is None or low is None or high is None or not is_nonneg(own):
            reach.append(None)
        else:
            reach.append(total + own * (high - low))
    return frozenset(a for _, (a, *more) in digits if isinstance(a, Axis) and not more)
