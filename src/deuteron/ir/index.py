"""Integer index algebra: canonical polynomials over axes, symbolic sizes, div, mod and loaded values.

An `Index` is an immutable, interned sum of monomials with integer coefficients. Its atoms are

* `Sym`    a symbolic size (a non-negative integer known at run time),
* `Axis`   a loop variable that runs over ``0 <= axis < extent``,
* `Div`, `Mod`  floor division and modulo by a positive index,
* `MinMax` the smaller or larger of two indices,
* `Value`  an integer that the program computes (a gather's index).

Equal polynomials are the same object, so ``is`` and ``==`` agree and hashing is cheap. All rewriting that needs
facts about ranges (``(i*64 + j)//64 == i`` for ``0 <= j < 64``) asks `lower_bound`, which works on symbolic sizes:
a polynomial in sizes is non-negative when it is so after substituting ``size = lowest + t`` with ``t >= 0``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from deuteron.ir.expr import Expr

IndexLike = Union["Index", int]
Monomial = tuple["Atom", ...]


class Atom:
    """A factor of a monomial. `key` orders and identifies atoms; equal keys are equal atoms."""

    __slots__ = ("key", "rank")
    key: str
    rank: int  # how deep atoms nest; orders atoms so that simple ones come first

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Atom) and self.key == other.key)

    def __lt__(self, other: Atom) -> bool:
        return (self.rank, self.key) < (other.rank, other.key)

    def __repr__(self) -> str:
        return self.key


class Sym(Atom):
    """A symbolic size. `low` is what is known of it without guarding (0 when nothing is)."""

    __slots__ = ("hint", "low", "name")

    def __init__(self, name: str, low: int = 0, hint: int | None = None) -> None:
        self.name, self.low, self.hint, self.key, self.rank = name, low, hint, name, 0


class Axis(Atom):
    """A loop variable over ``range(extent)``. The name identifies it within a program."""

    __slots__ = ("extent", "name")

    def __init__(self, name: str, extent: IndexLike) -> None:
        self.name, self.extent, self.rank = name, as_index(extent), 1
        self.key = f"{name}:{self.extent!r}"

    def __repr__(self) -> str:
        return self.name

    @property
    def index(self) -> Index:
        return atom(self)


class Div(Atom):
    """``num // den`` (floor), ``den > 0``."""

    __slots__ = ("den", "num")

    def __init__(self, num: Index, den: Index) -> None:
        self.num, self.den, self.key, self.rank = num, den, f"({num.key})//({den.key})", 2

    def __repr__(self) -> str:
        return f"({self.num!r})//({self.den!r})"


class Mod(Atom):
    """``num % den`` with the sign of `den`, ``den > 0``."""

    __slots__ = ("den", "num")

    def __init__(self, num: Index, den: Index) -> None:
        self.num, self.den, self.key, self.rank = num, den, f"({num.key})%({den.key})", 2

    def __repr__(self) -> str:
        return f"({self.num!r})%({self.den!r})"


class MinMax(Atom):
    """``min(a, b)`` or ``max(a, b)``."""

    __slots__ = ("a", "b", "kind")

    def __init__(self, kind: str, a: Index, b: Index) -> None:
        self.kind, self.a, self.b, self.key, self.rank = kind, a, b, f"{kind}({a.key},{b.key})", 2

    def __repr__(self) -> str:
        return f"{self.kind}({self.a!r}, {self.b!r})"


class Value(Atom):
    """An integer computed by the program, e.g. loaded from an index tensor. Its range is not known."""

    __slots__ = ("expr",)

    def __init__(self, expr: Expr) -> None:
        self.expr, self.key, self.rank = expr, f"[{expr.key}]", 3

    def __repr__(self) -> str:
        return f"[{self.expr!r}]"


class Index:
    """A canonical polynomial: monomials (sorted tuples of atoms) with non-zero integer coefficients."""

    __slots__ = ("__weakref__", "_hash", "key", "terms")
    _interned: dict[tuple[tuple[Monomial, int], ...], Index] = {}

    terms: tuple[tuple[Monomial, int], ...]
    key: str

    def __new__(cls, terms: Mapping[Monomial, int]) -> Index:
        items = tuple(
            sorted(
                ((m, c) for m, c in terms.items() if c),
                key=lambda t: (len(t[0]), [(a.rank, a.key) for a in t[0]]),
            )
        )
        found = cls._interned.get(items)
        if found is None:
            found = object.__new__(cls)
            found.terms, found._hash = items, hash(items)
            found.key = _text(found, lambda a: a.key)
            cls._interned[items] = found
        return found

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            other = const(other)
        return self is other

    def __repr__(self) -> str:
        return _text(self, repr)

    def __add__(self, other: IndexLike) -> Index:
        other = as_index(other)
        if not other.terms:
            return self
        if not self.terms:
            return other
        out = dict(self.terms)
        for m, c in other.terms:
            out[m] = out.get(m, 0) + c
        return _recombine(out)

    __radd__ = __add__

    def __neg__(self) -> Index:
        return Index({m: -c for m, c in self.terms})

    def __sub__(self, other: IndexLike) -> Index:
        return self + (-as_index(other))

    def __rsub__(self, other: IndexLike) -> Index:
        return as_index(other) + (-self)

    def __mul__(self, other: IndexLike) -> Index:
        other = as_index(other)
        if other.value == 1:
            return self
        out: dict[Monomial, int] = {}
        for m1, c1 in self.terms:
            for m2, c2 in other.terms:
                m = tuple(sorted(m1 + m2)) if m1 and m2 else m1 or m2
                out[m] = out.get(m, 0) + c1 * c2
        return Index(out)

    __rmul__ = __mul__

    def __floordiv__(self, other: IndexLike) -> Index:
        return floordiv(self, as_index(other))

    def __mod__(self, other: IndexLike) -> Index:
        return mod(self, as_index(other))

    @property
    def value(self) -> int | None:
        """The integer, when the index is a constant."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and not self.terms[0][0]:
            return self.terms[0][1]
        return None

    def atoms(self) -> Iterable[Atom]:
        """Every atom, also those inside div, mod, min, max and loaded values' own indices."""
        seen: set[Atom] = set()
        todo = [a for m, _ in self.terms for a in m]
        while todo:
            a = todo.pop()
            if a in seen:
                continue
            seen.add(a)
            yield a
            for inner in _children(a):
                todo.extend(x for m, _ in inner.terms for x in m)
            if isinstance(a, Value):
                for inner in a.expr.indices():
                    todo.extend(x for m, _ in inner.terms for x in m)

    def axes(self) -> set[Axis]:
        return {a for a in self.atoms() if isinstance(a, Axis)}

    def syms(self) -> set[Sym]:
        found = {a for a in self.atoms() if isinstance(a, Sym)}
        for axis in self.axes():
            found |= axis.extent.syms()
        return found

    def coefficient(self, axis: Axis) -> Index | None:
        """What multiplies `axis` where the index is affine in it; None where it is not. 0 where absent."""
        out: dict[Monomial, int] = {}
        for m, c in self.terms:
            count = m.count(axis)
            if count > 1:
                return None
            if count == 1:
                rest = tuple(a for a in m if a != axis)
                out[rest] = out.get(rest, 0) + c
                m = rest
            if any(axis in Index({(a,): 1}).axes() for a in m if a.rank >= 2):
                return None
        return Index(out)


def _text(index: Index, show: Callable[[Atom], str]) -> str:
    parts = []
    for m, c in reversed(index.terms):
        body = "*".join(show(a) for a in m)
        text = body if c == 1 and body else f"{abs(c)}*{body}" if body and c != -1 else body or str(abs(c))
        parts.append(("-" if c < 0 else "+", text))
    if not parts:
        return "0"
    head = ("-" if parts[0][0] == "-" else "") + parts[0][1]
    return head + "".join(f" {sign} {text}" for sign, text in parts[1:])


def _children(a: Atom) -> tuple[Index, ...]:
    if isinstance(a, (Div, Mod)):
        return (a.num, a.den)
    if isinstance(a, MinMax):
        return (a.a, a.b)
    return ()


def const(value: int) -> Index:
    return Index({(): int(value)})


def atom(a: Atom) -> Index:
    return Index({(a,): 1})


def as_index(value: IndexLike) -> Index:
    return value if isinstance(value, Index) else const(value)


def product(values: Iterable[IndexLike]) -> Index:
    out = const(1)
    for v in values:
        out = out * v
    return out


def _recombine(out: dict[Monomial, int]) -> Index:
    """``k*(x//k) + x%k == x``, the identity that undoes an unflatten that is flattened again."""
    for m, c in list(out.items()):
        for at in m:
            if not isinstance(at, Mod) or m not in out:
                continue
            rest = tuple(a for a in m if a is not at)
            pair = Index({rest: c}) * floordiv_atom(at) * at.den
            if all(out.get(pm) == pc for pm, pc in pair.terms):
                for pm, _ in pair.terms:
                    del out[pm]
                del out[m]
                return Index(out) + Index({rest: c}) * at.num
    return Index(out)


def floordiv_atom(at: Mod) -> Index:
    return floordiv(at.num, at.den)


def _divide_term(m: Monomial, c: int, den: Index) -> tuple[Monomial, int] | None:
    """The term divided by `den` where that is exact, else None."""
    if len(den.terms) != 1:
        return None
    dm, dc = den.terms[0]
    if c % dc:
        return None
    rest = list(m)
    for a in dm:
        if a not in rest:
            return None
        rest.remove(a)
    return tuple(rest), c // dc


def divide_exact(num: Index, den: IndexLike) -> Index | None:
    """``num / den`` where it is a polynomial, else None."""
    den = as_index(den)
    if den.value == 1:
        return num
    if num is den:
        return const(1)
    if len(den.terms) == 1:
        out: dict[Monomial, int] = {}
        for m, c in num.terms:
            q = _divide_term(m, c, den)
            if q is None:
                return None
            out[q[0]] = out.get(q[0], 0) + q[1]
        return Index(out)
    # Polynomial long division by the leading term; a handful of steps for the sizes that occur.
    rest, quotient = num, const(0)
    lead = den.terms[-1]
    for _ in range(8):
        if not rest.terms:
            return quotient
        for m, c in reversed(rest.terms):
            q = _divide_term(m, c, Index({lead[0]: lead[1]}))
            if q is not None:
                step = Index({q[0]: q[1]})
                quotient, rest = quotient + step, rest - step * den
                break
        else:
            return None
    return None


def _split(num: Index, den: Index) -> tuple[Index, Index]:
    """``num == quotient*den + rest`` with every term that divides exactly moved to the quotient."""
    if len(den.terms) != 1:
        exact = divide_exact(num, den)
        return (exact, const(0)) if exact is not None else (const(0), num)
    quotient: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    d = den.value
    for m, c in num.terms:
        q = _divide_term(m, c, den)
        if q is not None:
            quotient[q[0]] = quotient.get(q[0], 0) + q[1]
        elif d is not None and abs(c) > d:
            low = c % d if not m else c - d * int(c / d)
            quotient[m] = quotient.get(m, 0) + (c - low) // d
            rest[m] = rest.get(m, 0) + low
        else:
            rest[m] = rest.get(m, 0) + c
    if d is not None and () in rest and not 0 <= rest[()] < d:
        q0, r0 = divmod(rest[()], d)
        rest[()] = r0
        quotient[()] = quotient.get((), 0) + q0
    return Index(quotient), Index(rest)


def _gcd(num: Index, den: Index) -> int:
    g = 0
    for _, c in (*num.terms, *den.terms):
        g = math.gcd(g, c)
    return g


def floordiv(num: Index, den: IndexLike) -> Index:
    """Floor division by a positive index, simplified by exact terms, ranges and common factors."""
    den = as_index(den)
    if den.value is not None and den.value <= 0:
        raise ZeroDivisionError(f"index division of {num!r} by {den!r}: the divisor must be positive")
    if den.value == 1:
        return num
    if num.value is not None and den.value is not None:
        return const(num.value // den.value)
    quotient, rest = _split(num, den)
    if in_range(rest, den):
        return quotient
    g = _gcd(rest, den) if den.value is not None else 1
    if den.value is not None and g == 1 and () in dict(rest.terms):
        # floor((g*a + c) / (g*b)) == floor(a / b) for 0 <= c < g
        bare = Index({m: c for m, c in rest.terms if m})
        g2 = _gcd(bare, den)
        if g2 > 1 and 0 <= dict(rest.terms)[()] < g2:
            rest, g = bare, g2
    if g > 1:
        return quotient + floordiv(Index({m: c // g for m, c in rest.terms}), Index({m: c // g for m, c in den.terms}))
    if len(rest.terms) == 1 and rest.terms[0][1] == 1 and len(rest.terms[0][0]) == 1:
        inner = rest.terms[0][0][0]
        if isinstance(inner, Div):
            return quotient + floordiv(inner.num, inner.den * den)
    if not rest.terms:
        return quotient
    return quotient + atom(Div(rest, den))


def mod(num: Index, den: IndexLike) -> Index:
    """Modulo by a positive index (result in ``[0, den)``)."""
    den = as_index(den)
    if den.value is not None and den.value <= 0:
        raise ZeroDivisionError(f"index modulo of {num!r} by {den!r}: the divisor must be positive")
    if den.value == 1:
        return const(0)
    if num.value is not None and den.value is not None:
        return const(num.value % den.value)
    _, rest = _split(num, den)
    if in_range(rest, den):
        return rest
    g = _gcd(rest, den) if den.value is not None else 1
    if g > 1:
        return mod(Index({m: c // g for m, c in rest.terms}), Index({m: c // g for m, c in den.terms})) * g
    if len(rest.terms) == 1 and rest.terms[0][1] == 1 and len(rest.terms[0][0]) == 1:
        inner = rest.terms[0][0][0]
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


_BOUNDS: dict[tuple[Atom, bool], Index | None] = {}


def _atom_bound(a: Atom, upper: bool) -> Index | None:
    found = _BOUNDS.get((a, upper), _BOUNDS)
    if found is not _BOUNDS:
        return found  # type: ignore[return-value]
    out: Index | None = None
    if isinstance(a, Sym):
        out = atom(a)
    elif isinstance(a, Axis):
        out = a.extent - 1 if upper else const(0)
    elif isinstance(a, Div):
        inner = bound(a.num, upper)
        if inner is not None and a.den.value is not None:
            out = floordiv(inner, a.den)
        elif not upper and is_nonneg(a.num):
            out = const(0)
        elif upper and inner is not None and not a.den.axes() and is_nonneg(inner):
            out = floordiv(inner, a.den)
    elif isinstance(a, Mod):
        out = (a.den - 1 if not a.den.axes() else bound(a.den - 1, True)) if upper else const(0)
    elif isinstance(a, MinMax):
        x, y = bound(a.a, upper), bound(a.b, upper)
        if x is not None and y is not None:
            out = minimum(x, y) if a.kind == "min" else maximum(x, y)
        elif upper == (a.kind == "min"):
            out = x if x is not None else y
    _BOUNDS[(a, upper)] = out
    return out


def bound(index: Index, upper: bool) -> Index | None:
    """A bound of `index` over all axes, as a polynomial in sizes; None where nothing is known."""
    total = const(0)
    for m, c in index.terms:
        part = const(c)
        take_upper = upper == (c > 0)
        for a in m:
            low = _atom_bound(a, False)
            if low is None or (len(m) > 1 and not _size_nonneg(low)):
                return None
            b = low if not take_upper else _atom_bound(a, True)
            if b is None:
                return None
            part = part * b
        total = total + part
    return total


def _size_nonneg(size: Index) -> bool:
    """Whether a polynomial in sizes is non-negative for all sizes at or above their known lowest."""
    if size.value is not None:
        return size.value >= 0
    if all(c >= 0 for _, c in size.terms) and all(_plainly_nonneg(a) for m, _ in size.terms for a in m):
        return True
    shifted = const(0)
    for m, c in size.terms:
        part = const(c)
        for a in m:
            if isinstance(a, Sym):
                part = part * (atom(Sym(a.name + "'")) + a.low)
            elif _plainly_nonneg(a):
                part = part * atom(a)
            else:
                return False
        shifted = shifted + part
    return all(c >= 0 for _, c in shifted.terms)


def _plainly_nonneg(a: Atom) -> bool:
    if isinstance(a, (Sym, Axis, Mod)):
        return True
    if isinstance(a, Div):
        return is_nonneg(a.num)
    if isinstance(a, MinMax):
        test = all if a.kind == "min" else any
        return test(is_nonneg(x) for x in (a.a, a.b))
    return False


_NONNEG: dict[Index, bool] = {}


def is_nonneg(index: Index) -> bool:
    """Whether ``index >= 0`` is proven for every value of the axes and sizes."""
    if index.value is not None:
        return index.value >= 0
    found = _NONNEG.get(index)
    if found is None:
        _NONNEG[index] = False  # a proof that needs itself is no proof
        low = bound(index, False)
        found = low is not None and _size_nonneg(low)
        _NONNEG[index] = found
    return found


def in_range(index: Index, extent: IndexLike) -> bool:
    """Whether ``0 <= index < extent`` is proven.

    With symbolic sizes an empty axis makes the upper bound negative and every statement about its elements
    vacuously true, which is why ``extent - 1`` as the upper end needs no guard that the extent is positive.
    """
    return is_nonneg(index) and is_nonneg(as_index(extent) - 1 - index)


def substitute(index: Index, table: Mapping[Atom, Index]) -> Index:
    """`index` with atoms replaced, re-simplified."""
    if not table or not any(a in table for a in index.atoms()):
        return index
    total = const(0)
    for m, c in index.terms:
        part = const(c)
        for a in m:
            part = part * _substitute_atom(a, table)
        total = total + part
    return total


def _substitute_atom(a: Atom, table: Mapping[Atom, Index]) -> Index:
    found = table.get(a)
    if found is not None:
        return found
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


def evaluate(index: Index, env: Mapping[str, int], value: Callable[[Expr], int] | None = None) -> int:
    """The integer for given axis and size values (by name)."""
    total = 0
    for m, c in index.terms:
        for a in m:
            if isinstance(a, (Sym, Axis)):
                c *= env[a.name]
            elif isinstance(a, Div):
                c *= evaluate(a.num, env, value) // evaluate(a.den, env, value)
            elif isinstance(a, Mod):
                c *= evaluate(a.num, env, value) % evaluate(a.den, env, value)
            elif isinstance(a, MinMax):
                pick = min if a.kind == "min" else max
                c *= pick(evaluate(a.a, env, value), evaluate(a.b, env, value))
            elif isinstance(a, Value) and value is not None:
                c *= value(a.expr)
            else:
                raise TypeError(f"cannot evaluate {a!r} in {index!r}")
        total += c
    return total


def hint(index: IndexLike) -> int:
    """The size that the cost model assumes: symbols at their hints, axes at their extents' end."""
    index = as_index(index)
    if index.value is not None:
        return index.value
    env: dict[str, int] = {}
    for s in index.syms():
        env[s.name] = s.hint if s.hint is not None else max(s.low, 128)
    for a in index.axes():
        env[a.name] = max(0, evaluate(a.extent, env) - 1)
    return evaluate(index, env)
