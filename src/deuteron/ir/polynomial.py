"""Polynomials with integer coefficients over axes, sizes, div, mod and loaded values: the terms of
the index algebra, and what needs no fact about ranges. `ir.index` says what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar, Union, cast

from deuteron.base.memo import MEMO

IndexLike = Union["Index", int]


Monomial = tuple["Atom", ...]


class Atom:
    """A factor of a monomial. Interned: equal atoms are the same object.

    `order` sorts atoms, simple ones first; `key` is its text and the same in every process.
    """

    __slots__ = ("__weakref__", "key", "order", "rank")
    _interned: dict[tuple[object, ...], Atom] = MEMO.nodes(lambda a: (type(a), *a.parts()))
    key: str
    rank: int  # how deep atoms nest
    order: tuple[int, str]
    _parts: tuple[str, ...] = ()  # the constructor's arguments

    def __lt__(self, other: Atom) -> bool:
        return self.order < other.order

    def __repr__(self) -> str:
        return self.key

    def parts(self) -> tuple[Any, ...]:
        return tuple(getattr(self, n) for n in self._parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.parts()


_A = TypeVar("_A", bound=Atom)


def _intern_atom(
    cls: type[_A], parts: tuple[object, ...], rank: int, key: str, **slots: object
) -> _A:
    new = object.__new__(cls)
    new.rank, new.key, new.order = rank, key, (rank, key)
    for name, value in slots.items():
        setattr(new, name, value)
    return cast(_A, Atom._interned.setdefault((cls, *parts), new))


class Sym(Atom):
    """A symbolic size. `low` is what is known of it without guarding (0 when nothing is).

    Symbols of one name that differ in `low` or `hint` are different symbols: a fact that was
    proven for one program's ``s0 >= 2`` must not serve another's ``s0 >= 0``. A number that may be
    negative has `low < 0`.
    """

    __slots__ = ("hint", "low", "name")
    _parts = ("name", "low", "hint")
    name: str
    low: int
    hint: int | None

    def __new__(cls, name: str, low: int = 0, hint: int | None = None) -> Sym:
        interned = Atom._interned.get((cls, name, low, hint))
        if interned is not None:
            return cast(Sym, interned)
        key = name if low == 0 and hint is None else f"{name}{{{low},{hint}}}"
        return _intern_atom(cls, (name, low, hint), 0, key, name=name, low=low, hint=hint)

    def __repr__(self) -> str:
        return self.name


class Axis(Atom):
    """A loop variable over ``range(extent)``. The name identifies it within a program."""

    __slots__ = ("extent", "name")
    _parts = ("name", "extent")
    name: str
    extent: Index

    def __new__(cls, name: str, extent: IndexLike) -> Axis:
        extent = as_index(extent)
        interned = Atom._interned.get((cls, name, extent))
        if interned is not None:
            return cast(Axis, interned)
        return _intern_atom(
            cls, (name, extent), 1, f"{name}:{extent.key}", name=name, extent=extent
        )

    def __repr__(self) -> str:
        return self.name

    @property
    def index(self) -> Index:
        return atom(self)


class Div(Atom):
    """``num // den`` (floor), ``den > 0``."""

    __slots__ = ("den", "num")
    _parts = ("num", "den")
    num: Index
    den: Index

    def __new__(cls, num: Index, den: Index) -> Div:
        interned = Atom._interned.get((cls, num, den))
        if interned is not None:
            return cast(Div, interned)
        return _intern_atom(cls, (num, den), 2, f"(({num.key})//({den.key}))", num=num, den=den)

    def __repr__(self) -> str:
        return f"(({self.num!r})//({self.den!r}))"


class Mod(Atom):
    """``num % den`` with the sign of `den`, ``den > 0``."""

    __slots__ = ("den", "num")
    _parts = ("num", "den")
    num: Index
    den: Index

    def __new__(cls, num: Index, den: Index) -> Mod:
        interned = Atom._interned.get((cls, num, den))
        if interned is not None:
            return cast(Mod, interned)
        return _intern_atom(cls, (num, den), 2, f"(({num.key})%({den.key}))", num=num, den=den)

    def __repr__(self) -> str:
        return f"(({self.num!r})%({self.den!r}))"


class MinMax(Atom):
    """``min(a, b)`` or ``max(a, b)``."""

    __slots__ = ("a", "b", "kind")
    _parts = ("kind", "a", "b")
    kind: str
    a: Index
    b: Index

    def __new__(cls, kind: str, a: Index, b: Index) -> MinMax:
        interned = Atom._interned.get((cls, kind, a, b))
        if interned is not None:
            return cast(MinMax, interned)
        return _intern_atom(cls, (kind, a, b), 2, f"{kind}({a.key},{b.key})", kind=kind, a=a, b=b)

    def __repr__(self) -> str:
        return f"{self.kind}({self.a!r}, {self.b!r})"


class Value(Atom):
    """An integer that the program computes, e.g. a loaded index. Its range is unknown."""

    __slots__ = ("expr",)
    _parts = ("expr",)
    expr: Any  # an `ir.expr.Expr`, which has indices itself

    def __new__(cls, expr: Any) -> Value:
        interned = Atom._interned.get((cls, expr))
        if interned is not None:
            return cast(Value, interned)
        return _intern_atom(cls, (expr,), 3, f"[{expr.key}]", expr=expr)

    def __repr__(self) -> str:
        return f"[{self.expr!r}]"


def _order_terms(term: tuple[Monomial, int]) -> tuple[int, list[tuple[int, str]]]:
    return len(term[0]), [a.order for a in term[0]]


def _order_atom(a: Atom) -> tuple[int, str]:
    return a.order


class Index:
    """A canonical polynomial: monomials (sorted tuples of atoms) with non-zero coefficients."""

    __slots__ = ("__weakref__", "_atoms", "_axes", "_hint", "_key", "_syms", "terms", "value")
    _interned: dict[tuple[tuple[Monomial, int], ...], Index] = MEMO.nodes(lambda i: i.terms)

    terms: tuple[tuple[Monomial, int], ...]
    value: int | None  # the integer, when the index is a constant
    _key: str | None
    _atoms: tuple[Atom, ...] | None
    _axes: frozenset[Axis] | None
    _hint: int | None
    _syms: frozenset[Sym] | None

    # Division asks for ranges, which are sums and quotients again: `ir.division` sets these.
    simplified_sum: ClassVar[Callable[[dict[Monomial, int]], Index]]
    floordiv: ClassVar[Callable[[Index, Index], Index]]
    mod: ClassVar[Callable[[Index, Index], Index]]

    def __new__(cls, terms: Mapping[Monomial, int]) -> Index:
        nonzero = [t for t in terms.items() if t[1]]
        if len(nonzero) > 1:
            nonzero.sort(key=_order_terms)
        items = tuple(nonzero)
        interned = cls._interned.get(items)
        if interned is None:
            interned = object.__new__(cls)
            interned.terms = items
            interned._key = interned._atoms = interned._axes = interned._hint = interned._syms = (
                None
            )
            interned.value = (
                0 if not items else items[0][1] if len(items) == 1 and not items[0][0] else None
            )
            interned = cls._interned.setdefault(items, interned)
        return interned

    def __reduce__(self) -> tuple[Any, ...]:
        return Index, (dict(self.terms),)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.value == other
        return self is other

    @property
    def key(self) -> str:
        """The index as text that is the same in every process."""
        if self._key is None:
            self._key = _text(self, lambda a: a.key)
        return self._key

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
        return Index.simplified_sum(out)

    __radd__ = __add__

    def __neg__(self) -> Index:
        return Index({m: -c for m, c in self.terms})

    def __sub__(self, other: IndexLike) -> Index:
        other = as_index(other)
        if not other.terms:
            return self
        out = dict(self.terms)
        for m, c in other.terms:
            out[m] = out.get(m, 0) - c
        return Index.simplified_sum(out)

    def __rsub__(self, other: IndexLike) -> Index:
        return as_index(other) + (-self)

    def __mul__(self, other: IndexLike) -> Index:
        other = as_index(other)
        if other.value is not None:
            if other.value == 1:
                return self
            if self.value is not None:
                return const(self.value * other.value)
        elif self.value == 1:
            return other
        out: dict[Monomial, int] = {}
        for m1, c1 in self.terms:
            for m2, c2 in other.terms:
                m = tuple(sorted(m1 + m2, key=_order_atom)) if m1 and m2 else m1 or m2
                out[m] = out.get(m, 0) + c1 * c2
        return Index(out)

    __rmul__ = __mul__

    def __floordiv__(self, other: IndexLike) -> Index:
        return Index.floordiv(self, as_index(other))

    def __mod__(self, other: IndexLike) -> Index:
        return Index.mod(self, as_index(other))

    def atoms(self) -> tuple[Atom, ...]:
        """Every atom, also those inside div, mod, min, max and loaded values' own indices."""
        if self._atoms is None:
            seen: dict[Atom, None] = {}
            todo = [a for m, _ in self.terms for a in m]
            while todo:
                a = todo.pop()
                if a in seen:
                    continue
                seen[a] = None
                for inner in _children(a):
                    todo.extend(x for m, _ in inner.terms for x in m)
            self._atoms = tuple(seen)
        return self._atoms

    def axes(self) -> frozenset[Axis]:
        if self._axes is None:
            self._axes = frozenset(a for a in self.atoms() if a.rank == 1 and isinstance(a, Axis))
        return self._axes

    def syms(self) -> set[Sym]:
        """The sizes that it depends on, those of its axes' extents included."""
        if self._syms is None:
            sizes: set[Sym] = set()
            for a in self.atoms():
                if isinstance(a, Sym):
                    sizes.add(a)
                elif isinstance(a, Axis):
                    sizes |= a.extent.syms()
            self._syms = frozenset(sizes)
        return set(self._syms)

    def coefficient(self, axis: Axis) -> Index | None:
        """What multiplies `axis` where the index is affine in it (0 where absent); else None."""
        out: dict[Monomial, int] = {}
        for m, c in self.terms:
            count = m.count(axis)
            if count > 1:
                return None
            if count == 1:
                rest = tuple(a for a in m if a != axis)
                out[rest] = out.get(rest, 0) + c
                m = rest
            if any(axis in atom(a).atoms() for a in m if a.rank >= 2):
                return None
        return Index(out)


def _text(index: Index, show: Callable[[Atom], str]) -> str:
    parts = []
    for m, c in reversed(index.terms):
        body = "*".join(show(a) for a in m)
        text = (
            body
            if c == 1 and body
            else f"{abs(c)}*{body}"
            if body and c != -1
            else body or str(abs(c))
        )
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
    if isinstance(a, Value):
        return a.expr.indices()
    return ()


_CONSTANTS: dict[int, Index] = MEMO.answers()


def const(value: int) -> Index:
    known = _CONSTANTS.get(value)
    if known is None:
        known = _CONSTANTS[value] = Index({(): int(value)})
    return known


_ATOMS: dict[Atom, Index] = MEMO.answers()


def atom(a: Atom) -> Index:
    known = _ATOMS.get(a)
    if known is None:
        known = _ATOMS[a] = Index({(a,): 1})
    return known


def as_index(value: IndexLike) -> Index:
    return value if isinstance(value, Index) else const(value)


def product(values: Iterable[IndexLike]) -> Index:
    out = const(1)
    for v in values:
        out = out * v
    return out


def only(index: Index) -> Atom | None:
    """The atom that the index is, if it is one."""
    if len(index.terms) != 1 or index.terms[0][1] != 1 or len(index.terms[0][0]) != 1:
        return None
    return index.terms[0][0][0]


def divide_term(m: Monomial, c: int, den: Index) -> tuple[Monomial, int] | None:
    """The term divided by `den`, a single term, where that is exact, else None."""
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
            q = divide_term(m, c, den)
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
            q = divide_term(m, c, Index({lead[0]: lead[1]}))
            if q is not None:
                step = Index({q[0]: q[1]})
                quotient, rest = quotient + step, rest - step * den
                break
        else:
            return None
    return None
