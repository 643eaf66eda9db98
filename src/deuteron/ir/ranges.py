"""Ranges of indices: what is proven about an index for every value of its axes and sizes.

In: an `Index`. Out: bounds that are polynomials in sizes, proofs of ``>= 0`` and of
``0 <= index < extent``, and the axes that an index determines. A proof may assume that every axis
has a value (a statement about the elements of an empty axis holds), that divisors are at least 1
and that sizes are at least their `low`. What is not proven may still hold.

Part of `deuteron.ir.index`; import these names from there.
"""

from __future__ import annotations

from deuteron.base.memo import MEMO
from deuteron.ir.index import (
    Atom,
    Axis,
    Div,
    Index,
    IndexLike,
    MinMax,
    Mod,
    Monomial,
    Sym,
    Value,
    as_index,
    atom,
    const,
    divide_exact,
    floordiv,
    hint,
    maximum,
    minimum,
    substitute,
)

_BOUNDS: dict[tuple[Atom, bool], Index | None] = MEMO.answers()


def _nonempty(extent: Index) -> Index:
    """What the extent is where its axis has any value: ``max(0, n)`` is n there."""
    if len(extent.terms) == 1 and len(extent.terms[0][0]) == 1 and extent.terms[0][1] == 1:
        a = extent.terms[0][0][0]
        if isinstance(a, MinMax) and a.kind == "max":
            for x, y in ((a.a, a.b), (a.b, a.a)):
                if x.value is not None and x.value <= 0:
                    return y
    return extent


def _atom_bound(a: Atom, upper: bool) -> Index | None:
    known = _BOUNDS.get((a, upper), _BOUNDS)
    if known is not _BOUNDS:
        return known  # type: ignore[return-value]
    out: Index | None = None
    if isinstance(a, Sym):
        out = atom(a)
    elif isinstance(a, Axis):
        out = _nonempty(a.extent) - 1 if upper else const(0)
    elif isinstance(a, Div):
        inner = bound(a.num, upper)
        if inner is not None and not a.den.axes():
            out = floordiv(inner, a.den)
        elif not upper and is_nonneg(a.num):
            out = const(0)
    elif isinstance(a, Mod):
        out = (a.den - 1 if not a.den.axes() else bound(a.den - 1, True)) if upper else const(0)
    elif isinstance(a, MinMax):
        x, y = bound(a.a, upper), bound(a.b, upper)
        if x is not None and y is not None:
            out = minimum(x, y) if a.kind == "min" else maximum(x, y)
        elif upper == (a.kind == "min"):
            out = x if x is not None else y
    elif isinstance(a, Value) and a.expr.op == "check":  # 0 where it is out of range
        out = a.expr.attr - 1 if upper else const(0)
    _BOUNDS[(a, upper)] = out
    return out


def bound(index: Index, upper: bool) -> Index | None:
    """A bound of `index` over all axes, as a polynomial in sizes; None where nothing is known."""
    total = const(0)
    for m, c in index.terms:
        part = const(c)
        take_upper = upper == (c > 0)
        for a in m:
            if len(m) > 1:  # products of bounds bound the product where nothing is negative
                low = _atom_bound(a, False)
                if low is None or not _size_nonneg(low):
                    return None
            b = _atom_bound(a, take_upper)
            if b is None:
                return None
            part = part * b
        total = total + part
    return total


def _size_nonneg(size: Index, depth: int = 0) -> bool:
    """Whether a polynomial in sizes is non-negative for all sizes at or above their `low`."""
    if size.value is not None:
        return size.value >= 0
    plain = all(_plainly_nonneg(a) for m, _ in size.terms for a in m)
    if plain and all(c >= 0 for _, c in size.terms):
        return True
    shifted = const(0)
    for m, c in size.terms:
        part = const(c)
        for a in m:
            if isinstance(a, Sym) and a.low != 0:
                part = part * (atom(Sym(a.name + "'")) + a.low)
            elif _plainly_nonneg(a):
                part = part * atom(a)
            else:
                break
        else:
            shifted = shifted + part
            continue
        break
    else:
        if all(c >= 0 for _, c in shifted.terms):
            return True
    return depth < 4 and _nonneg_by_cases(size, depth + 1)


def _nonneg_by_cases(size: Index, depth: int) -> bool:
    """Takes the first min, max or division out of a polynomial in sizes.

    ``min(a, b)`` is a or b: both cases must hold, or one where it makes the polynomial no larger.
    ``d*(x//d)`` lies between ``x - d + 1`` and ``x``.
    """
    for a in sorted({a for m, _ in size.terms for a in m if a.rank == 2}):
        own = [(m, c) for m, c in size.terms if a in m]
        linear = all(
            m.count(a) == 1 and all(x is a or _plainly_nonneg(x) for x in m) for m, _ in own
        )
        if isinstance(a, MinMax):
            smaller = linear and all((c < 0) == (a.kind == "min") for _, c in own)
            cases = (_size_nonneg(_replace(size, a, x), depth) for x in (a.a, a.b))
            if any(cases) if smaller else all(cases):
                return True
        elif (
            isinstance(a, Div)
            and linear
            and a.den.value
            and all(c % a.den.value == 0 for _, c in own)
        ):
            low = size
            for m, c in own:
                rest = list(m)
                rest.remove(a)
                num = a.num if c < 0 else a.num - (a.den.value - 1)
                low = low - Index({m: c}) + Index({tuple(rest): c // a.den.value}) * num
            if _size_nonneg(low, depth):
                return True
    return False


def _replace(size: Index, old: Atom, new: Index) -> Index:
    """`size` with one factor of its monomials replaced."""
    total = const(0)
    for m, c in size.terms:
        part = const(c)
        for a in m:
            part = part * (new if a is old else atom(a))
        total = total + part
    return total


def _plainly_nonneg(a: Atom) -> bool:
    if isinstance(a, (Axis, Mod)):
        return True
    if isinstance(a, Sym):
        return a.low >= 0
    if isinstance(a, Div):
        return is_nonneg(a.num)
    if isinstance(a, MinMax):
        test = all if a.kind == "min" else any
        return test(is_nonneg(x) for x in (a.a, a.b))
    return False


_NONNEG: dict[Index, bool] = MEMO.answers()


def is_nonneg(index: Index) -> bool:
    """Whether ``index >= 0`` is proven for every value of the axes and sizes."""
    if index.value is not None:
        return index.value >= 0
    proven = _NONNEG.get(index)
    if proven is None:
        _NONNEG[index] = False  # a proof that needs itself is no proof
        low = bound(index, False)
        proven = low is not None and (
            _size_nonneg(low) or _size_nonneg(_where_nonempty(low, index))
        )
        _NONNEG[index] = proven
    return proven


def _where_nonempty(low: Index, index: Index) -> Index:
    """`low` with the sizes that are extents of the index's axes known to be at least 1."""
    table: dict[Atom, Index] = {}
    for axis in index.axes():
        if len(axis.extent.terms) == 1 and axis.extent.terms[0][1] > 0:
            syms = [a for a in axis.extent.terms[0][0] if isinstance(a, Sym)]
            if len(syms) == len(axis.extent.terms[0][0]) and all(s.low >= 0 for s in syms):
                table.update({s: atom(Sym(s.name, max(s.low, 1), s.hint)) for s in syms})
    return substitute(low, table)


def in_range(index: Index, extent: IndexLike) -> bool:
    """Whether ``0 <= index < extent`` is proven.

    An empty axis makes the upper bound negative and every statement about its elements true, which
    is why ``extent - 1`` as the upper end needs no guard that the extent is positive.
    """
    return is_nonneg(index) and is_nonneg(as_index(extent) - 1 - index)


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
        low, high, total = _atom_bound(a, False), _atom_bound(a, True), reach[-1]
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
