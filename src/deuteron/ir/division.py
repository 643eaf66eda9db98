"""Division and ranges of indices: quotients are simplified by what is proven of ranges, and bounds
of quotients are quotients of bounds, so that both are one recursion.

In: an `Index`. Out: simplified sums, quotients, remainders, minima and maxima; bounds that are
polynomials in sizes; proofs of ``>= 0`` and of ``0 <= index < extent``. A proof may assume that
every axis has a value (a statement about the elements of an empty axis holds), that divisors are
at least 1 and that sizes are at least their `low`. What is not proven may still hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from deuteron.base.memo import MEMO
from deuteron.ir.polynomial import (
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
    divide_term,
    only,
)


def _recombine(out: dict[Monomial, int]) -> Index:
    """``k*(x//k) + x%k == x``, the identity that undoes an unflatten that is flattened again."""
    for m, c in out.items():
        for at in m:
            if at.rank != 2 or not c or not isinstance(at, Mod):
                continue
            left = list(m)
            left.remove(at)
            rest = Index({tuple(left): c})
            for whole in _with_remainder(at, out):
                for quotient in _quotients(whole, at.den):
                    pair = rest * quotient * at.den
                    if all(pm != m and out.get(pm) == pc for pm, pc in pair.terms):
                        others = dict(out)
                        for pm, _ in pair.terms:
                            del others[pm]
                        del others[m]
                        return Index(others) + rest * whole
    return Index(out)


def _quotients(num: Index, den: Index) -> Iterator[Index]:
    """The forms of ``num // den``: also with one division for two, (i + k//2)//3 = (2*i + k)//6."""
    yield floordiv(num, den)
    for m, c in num.terms:
        if c == 1 and len(m) == 1 and isinstance(m[0], Div):
            inner = m[0]
            yield floordiv((num - atom(inner)) * inner.den + inner.num, inner.den * den)


def _with_remainder(at: Mod, out: dict[Monomial, int]) -> list[Index]:
    """What leaves the remainder `at`: x of x%k, and those x%(n*k) whose quotient is in `out`."""
    dividends = [at.num]
    for a in (a for m in out for a in m if isinstance(a, Div) and a.den is at.den):
        inner = only(a.num)
        if isinstance(inner, Mod) and inner.num is at.num:
            dividends += [a.num] if divide_exact(inner.den, at.den) is not None else []
    return dividends


def _split(num: Index, den: Index) -> tuple[Index, Index]:
    """``num == quotient*den + rest`` with every term that divides exactly moved to the quotient."""
    if len(den.terms) != 1:
        exact = divide_exact(num, den)
        return (exact, const(0)) if exact is not None else (const(0), num)
    quotient: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    d = den.value
    for m, c in num.terms:
        q = divide_term(m, c, den)
        if q is not None:
            quotient[q[0]] = quotient.get(q[0], 0) + q[1]
        elif d is not None and abs(c) > d:
            # Coefficients are cut towards zero: 3*i - 5*j over 4 keeps 3*i - j, not 3*i + 3*j.
            whole = c // d if c > 0 or not m else -(-c // d)
            quotient[m] = quotient.get(m, 0) + whole
            rest[m] = rest.get(m, 0) + c - whole * d
        else:
            rest[m] = rest.get(m, 0) + c
    if d is not None and () in rest and not 0 <= rest[()] < d:
        q0, r0 = divmod(rest[()], d)
        rest[()] = r0
        quotient[()] = quotient.get((), 0) + q0
    return Index(quotient), Index(rest)


def _factored(num: Index, den: Index) -> tuple[Index, Index, int] | None:
    """``num == big*g + small`` with ``0 <= small < g`` and g > 1 a factor of the number `den`:
    the quotient is then that of ``big`` by ``den/g``, and small is left of the remainder."""
    if den.value is None:
        return None
    for g in sorted({math.gcd(den.value, c) for m, c in num.terms if m}, reverse=True):
        if g > 1:
            big = {m: c // g for m, c in num.terms if c % g == 0}
            small = Index({m: c for m, c in num.terms if c % g})
            if in_range(small, const(g)):
                return Index(big), small, g
    return None


_QUOTIENTS: dict[tuple[Index, Index], Index] = MEMO.answers()


_REMAINDERS: dict[tuple[Index, Index], Index] = MEMO.answers()


def floordiv(num: Index, den: IndexLike) -> Index:
    """Floor division by a positive index, simplified by exact terms, ranges and common factors."""
    den = as_index(den)
    known = _QUOTIENTS.get((num, den))
    if known is None:
        known = _QUOTIENTS[num, den] = _floordiv(num, den)
    return known


def _floordiv(num: Index, den: Index) -> Index:
    if den.value is not None and den.value <= 0:
        raise ZeroDivisionError(
            f"index division of {num!r} by {den!r}: the divisor must be positive"
        )
    if den.value == 1:
        return num
    if num.value is not None and den.value is not None:
        return const(num.value // den.value)
    quotient, rest = _split(num, den)
    if in_range(rest, den):
        return quotient
    if _just_below(rest, den):
        return quotient - 1
    factored = _factored(rest, den)
    if factored is not None:
        big, _, g = factored
        return quotient + floordiv(big, (den.value or 1) // g)
    inner = only(rest)
    if isinstance(inner, Div):
        return quotient + floordiv(inner.num, inner.den * den)
    if not rest.terms:
        return quotient
    return quotient + atom(Div(rest, den))


def _just_below(rest: Index, den: Index) -> bool:
    """Whether ``-den <= rest < 0`` is proven. A divisor is at least 1, so -1 is."""
    return rest.value == -1 or in_range(rest + den, den)


def mod(num: Index, den: IndexLike) -> Index:
    """Modulo by a positive index (result in ``[0, den)``)."""
    den = as_index(den)
    known = _REMAINDERS.get((num, den))
    if known is None:
        known = _REMAINDERS[num, den] = _mod(num, den)
    return known


def _mod(num: Index, den: Index) -> Index:
    if den.value is not None and den.value <= 0:
        raise ZeroDivisionError(f"index modulo of {num!r} by {den!r}: the divisor must be positive")
    if den.value == 1:
        return const(0)
    if num.value is not None and den.value is not None:
        return const(num.value % den.value)
    _, rest = _split(num, den)
    if in_range(rest, den):
        return rest
    if _just_below(rest, den):
        return rest + den
    factored = _factored(rest, den)
    if factored is not None:
        big, small, g = factored
        return mod(big, (den.value or 1) // g) * g + small
    inner = only(rest)
    if isinstance(inner, Mod) and divide_exact(inner.den, den) is not None:
        return mod(inner.num, den)
    return atom(Mod(rest, den))


def minimum(a: IndexLike, b: IndexLike) -> Index:
    a, b = as_index(a), as_index(b)
    if is_nonneg(b - a):
        return a
    if is_nonneg(a - b):
        return b
    return atom(MinMax("min", *sorted((a, b), key=lambda x: x.key)))


def maximum(a: IndexLike, b: IndexLike) -> Index:
    a, b = as_index(a), as_index(b)
    if is_nonneg(a - b):
        return a
    if is_nonneg(b - a):
        return b
    return atom(MinMax("max", *sorted((a, b), key=lambda x: x.key)))


_SUBSTITUTED: dict[tuple[Index, tuple[tuple[Atom, Index], ...]], Index] = MEMO.answers()


def substitute(index: Index, table: Mapping[Atom, Index]) -> Index:
    """`index` with atoms replaced, re-simplified."""
    if not table or table.keys().isdisjoint(index.atoms()):
        return index
    key = (index, tuple(table.items()))
    known = _SUBSTITUTED.get(key)
    if known is None:
        known = _SUBSTITUTED[key] = _substitute(index, table)
    return known


def _substitute(index: Index, table: Mapping[Atom, Index]) -> Index:
    total = const(0)
    for m, c in index.terms:
        part = const(c)
        for a in m:
            part = part * _substitute_atom(a, table)
        total = total + part
    return total


def _substitute_atom(a: Atom, table: Mapping[Atom, Index]) -> Index:
    replacement = table.get(a)
    if replacement is not None:
        return replacement
    if isinstance(a, Div):
        return floordiv(substitute(a.num, table), substitute(a.den, table))
    if isinstance(a, Mod):
        return mod(substitute(a.num, table), substitute(a.den, table))
    if isinstance(a, MinMax):
        pick = minimum if a.kind == "min" else maximum
        return pick(substitute(a.a, table), substitute(a.b, table))
    if isinstance(a, Value):
        return atom(Value(a.expr.substitute(table)))
    return atom(a)


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


def atom_bound(a: Atom, upper: bool) -> Index | None:
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
                low = atom_bound(a, False)
                if low is None or not _size_nonneg(low):
                    return None
            b = atom_bound(a, take_upper)
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


def split_points(a: Div | Mod) -> list[tuple[Axis, Index, Index]]:
    """(axis, size of its inner part, extent of its outer part) that would simplify a div or mod."""
    out = []
    for axis in sorted(a.num.axes()):
        c = a.num.coefficient(axis)
        if c is None or c.value == 0 or a.den.axes():
            continue
        size = divide_exact(a.den, c)
        if size is not None and not is_nonneg(size):  # the axis is walked backwards
            size = -size
        if size is None or size.value == 1 or not is_nonneg(size):
            continue
        outer = divide_exact(axis.extent, size)
        if outer is not None and outer.value != 1:
            out.append((axis, size, outer))
    return out


Index.simplified_sum = staticmethod(_recombine)
Index.floordiv = staticmethod(floordiv)
Index.mod = staticmethod(mod)
