"""One nest of several computations: "do not materialise T", with all that makes and reads it.

In: computations by name, and those whose results others need (sinks). Out: a `Nest` that computes
them from what is in memory, or a `Refusal`. It starts from the last sink and pulls: a load of a
pointwise computation is its body at that place, a load of a reduction is a statement, shared by all
who read it at one place. So a guest may bring axes that the nest does not have, and a reduction
inside another's body becomes a statement of its own.

A reduction along what was joined (an attention's sink beside its scores) is that of the parts: each
is read where it is only.

Axes are unified by tensors only: a reduction that reads ``x[a, r]`` where the nest reads
``x[a, j]``, and r is its own, runs over j. An axis that some index divides is cut in two.

Then *hoist*: what a sum's body is multiplied with or divided by, and does not depend on the summed
axes, leaves it: ``sum c f = c sum f``, through the rounding of a contraction's factor, too (that
factor is then rounded without c: errors of the same size).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import (
    Atom,
    Axis,
    Div,
    Index,
    Mod,
    Value,
    atom,
    bound,
    const,
    is_nonneg,
    product,
    split_points,
    substitute,
)
from deuteron.ir.nest import Nest, Reduce, Statement, Store, roots
from deuteron.ir.operations import HALF, REDUCTIONS
from deuteron.ir.program import Compute
from deuteron.schedule.legality import Refusal

Place = tuple[Index, ...]
Nodes = Mapping[Expr, Expr]


class NoNest(Exception):
    """What is in the way, for the Record."""


def closure(
    computes: Mapping[str, Compute], sinks: Sequence[str], wide: str = "f32"
) -> Nest | Refusal:
    """The nest that stores `sinks`; `computes` in order of execution, makers before readers.
    `wide`: how factors of f32 are multiplied ("f32" | "tf32")."""
    try:
        nest = _Closure(computes, wide).build(sinks)
    except NoNest as why:
        return Refusal("no nest", str(why))
    return _hoisted(_cut(nest))


class _Closure:
    def __init__(self, computes: Mapping[str, Compute], wide: str) -> None:
        self.computes, self.wide = computes, wide
        self.statements: list[Statement] = []
        self.results: dict[tuple[str, Place, Expr | None], Expr] = {}
        self.where: Expr | None = None  # the places there are of what is being read
        self.places: dict[str, list[Place]] = {}  # of computations that are read
        self.along: dict[tuple[str, int, Place], list[Axis]] = {}  # (tensor, dimension, the others)
        self.axes: list[Axis] = []
        self.sinks: Sequence[str] = ()
        for c in computes.values():
            if c.body.op == "scan":
                raise NoNest(f"{c.name} is a scan: its places depend on one another in order")
            if c.target is not None or c.index is not None:
                raise NoNest(f"{c.name} writes at places of its own")
            kinds = {n.attr[0] for n in c.body.walk() if n.op == "reduce"}
            if any(REDUCTIONS[kind].scalar_op is None for kind in kinds):
                raise NoNest(f"{c.name} keeps positions, which reductions of tiles lose")

    def build(self, sinks: Sequence[str]) -> Nest:
        order = list(self.computes)
        self.sinks = sinks
        for name in sorted(sinks, key=order.index, reverse=True):
            c = self.computes[name]
            place = self.place_of(c)
            value = self.value(c, place)
            self.statements.append(Store(name, place, value))
        return Nest(tuple(self.axes), tuple(self.statements))

    def place_of(self, c: Compute) -> Place:
        """Where a sink is stored: at axes of its own, or those at which it is read already."""
        known = self.places.get(c.name)
        if known:
            place = known[0]
            if len(known) > 1:
                raise NoNest(f"{c.name} is read at several places")
            digits = [a for i in place for m, _ in i.terms for a in m]
            axes = {a for i in place for a in i.axes()}
            points, places = (product(a.extent for a in sorted(x)) for x in (axes, c.axes))
            whole = all(_is_whole(i, a.extent) for i, a in zip(place, c.axes, strict=True))
            free = points is places or len(digits) == len(axes)  # no digit tells of another
            if not whole or not free or len(set(digits)) < len(digits):
                raise NoNest(f"{c.name} is not read in its whole")
            return place
        if not self.axes:
            return tuple(atom(self.fresh(a)) for a in c.axes)
        table: dict[Axis, Index] = {}
        todo: list[tuple[Expr, dict[Atom, Index]]] = [(c.body, {})]
        while todo:
            root, at = todo.pop()
            for load in root.loads():
                name, index, _ = load.attr
                here = tuple(substitute(i, at) for i in index)
                for place in self.places.get(name, ())[:1]:
                    if len(place) != len(here):  # a tensor as another view
                        continue
                    for mine, theirs in zip(here, place, strict=True):
                        for a in c.axes:
                            equal = None if a in table else _solved(mine, theirs, a)
                            if equal is not None and all(_apart(equal, i) for i in table.values()):
                                table[a] = equal
                maker = self.computes.get(name)
                if maker is not None:
                    todo.append((maker.body, dict(zip(maker.axes, here, strict=True))))
        if not table:
            raise NoNest(f"{c.name} shares no axes with the others")
        return tuple(table[a] if a in table else atom(self.fresh(a)) for a in c.axes)

    def fresh(self, axis: Axis) -> Axis:
        new = Axis(f"n{len(self.axes)}", axis.extent)
        self.axes.append(new)
        return new

    def value(self, c: Compute, place: Place) -> Expr:
        """A computation's element at a place of the nest."""
        key = (c.name, place, self.where)
        known = self.results.get(key)
        if known is None:
            table: dict[Atom, Index] = dict(zip(c.axes, place, strict=True))
            made = self.reduction if c.body.op == "reduce" else self.expr
            known = self.results[key] = made(c.name, c.body, table)
        return known

    def reduction(self, name: str, root: Expr, table: dict[Atom, Index]) -> Expr:
        kind, axes = root.attr
        (body,) = root.args
        for a in axes:
            end = self.joint(a, body, table)
            if end is not None:
                return self.joined(name, root, table, a, end)
        over = []
        for a in axes:
            axis = self.unified(a, body, table) or self.fresh(a)
            table[a] = atom(axis)
            over.append(axis)
        if len(set(over)) < len(over):
            raise NoNest(f"{name} reduces one axis twice")
        self.note(body, table, deep=True)
        value = self.expr(name, body, table)
        # A factor of ones is none.
        operands = factors_dtype(body) if kind == "sum" and value.op == "mul" else None
        if operands == "f32":
            operands = self.wide
        elif operands is not None:  # the statement says how they are rounded
            value = E.op("mul", *(_exact(x) for x in value.args))
        name = f"{name}_sum" if name in self.sinks else name  # a store has another name
        known = [s for s in self.statements if isinstance(s, Reduce) and s.name == name]
        if known:
            raise NoNest(f"{name} would be computed at two places")
        s = Reduce(name, kind, tuple(over), value, operands)
        self.statements.append(s)
        lives = tuple(a for a in self.axes if a in value.axes() and a not in over)
        return E.load(name, tuple(atom(a) for a in lives), root.dtype)

    def joint(self, axis: Axis, body: Expr, table: dict[Atom, Index]) -> Index | None:
        """Where along `axis` a computation that `body` reads begins or ends."""
        probe = atom(Axis("probe", axis.extent))
        for _, _, mask in self.within(body, {**table, axis: probe}):
            for n in mask.walk() if mask is not None else ():
                if n.op in ("lt", "ge") and all(x.op in ("index", "literal") for x in n.args):
                    here, end = (E.as_position(x) for x in n.args)
                    point = probe - here + end
                    inside = not point.axes() and is_nonneg(point - 1)
                    if inside and is_nonneg(axis.extent - point - 1):
                        return point
        return None

    def within(
        self, body: Expr, table: dict[Atom, Index]
    ) -> Iterator[tuple[str, Place, Expr | None]]:
        """What `body` reads, itself or through the region's pointwise computations: tensor, place,
        and, of a computation, where it is read only."""
        todo: list[tuple[Expr, dict[Atom, Index]]] = [(body, table)]
        while todo:
            root, at = todo.pop()
            for load in root.loads():
                name, index, _ = load.attr
                place = tuple(substitute(i, at) for i in index)
                c = self.computes.get(name)
                mask = load.args[0].substitute(at) if load.args and c is not None else None
                yield name, place, mask
                if c is not None and c.body.op != "reduce":
                    todo.append((c.body, dict(zip(c.axes, place, strict=True))))

    def joined(
        self, name: str, root: Expr, table: dict[Atom, Index], axis: Axis, end: Index
    ) -> Expr:
        """A reduction as that of the places before `end` and of those from there on."""
        kind, axes = root.attr
        scalar = REDUCTIONS[kind].scalar_op
        if scalar is None:
            raise NoNest(f"{name} looks for a position in what is joined")
        parts = []
        for k, (start, count) in enumerate(((const(0), end), (end, axis.extent - end))):
            part = Axis(f"{axis.name}p{k}", count)
            others = tuple(part if a == axis else a for a in axes if a != axis or count.value != 1)
            at: dict[Atom, Index] = {axis: start if count.value == 1 else start + atom(part)}
            (body,) = (a.substitute(at) for a in root.args)
            if others:
                body = E.reduce(kind, others, body)
                parts.append(self.reduction(f"{name}_part{k}", body, dict(table)))
            else:
                parts.append(self.expr(name, body, table))
        return E.op(scalar, *parts)

    def unified(self, axis: Axis, body: Expr, table: dict[Atom, Index]) -> Axis | None:
        """The axis of the nest along which what `body` reads along `axis` is read already; another
        one than those of its place, of which it is only at one point."""
        probe, here = (
            atom(Axis("probe", axis.extent)),
            {a for i in table.values() for a in i.axes()},
        )
        for name, place, _ in self.within(body, {**table, axis: probe}):
            for d, i in enumerate(place):
                known = self.along.get((name, d, _blanked(place, d)), ()) if i is probe else ()
                for found in known:
                    if found.extent is axis.extent and found not in here:
                        return found
        return None

    def note(self, root: Expr, table: dict[Atom, Index], deep: bool = False) -> None:
        """Remembers where, and along which axes, tensors are read; `deep`: those, too, of which
        pointwise computations are made, so that reductions among what is read run along the same
        axes, whichever comes first."""
        for load in root.loads():
            name, index, _ = load.attr
            place = tuple(substitute(i, table) for i in index)
            if name not in self.computes and place not in self.places.setdefault(name, []):
                self.places[name].append(place)
            for d, i in enumerate(place):
                (a,) = i.axes() if len(i.axes()) == 1 else (None,)
                if a is not None and i is atom(a):
                    known = self.along.setdefault((name, d, _blanked(place, d)), [])
                    known += [] if a in known else [a]
            c = self.computes.get(name) if deep else None
            if c is not None and c.body.op != "reduce":
                self.note(c.body, dict(zip(c.axes, place, strict=True)), deep)

    def expr(self, name: str, root: Expr, table: dict[Atom, Index]) -> Expr:
        self.note(root, table)
        done: dict[Expr, Expr] = {}
        for node in root.walk():
            args = tuple(done[a] for a in node.args)
            if node.op in ("reduce", "scan", "check"):
                raise NoNest(f"{name} has a {node.op} inside")
            if any(isinstance(a, Value) for i in E.own_indices(node) for a in i.atoms()):
                raise NoNest(f"{name} reads at places that are loaded")
            new = E.rebuild(node, args, table, done)
            if node.op == new.op == "load" and new.attr[0] in self.computes:
                new = self.local(new)
            elif node.op == new.op == "load" and self.where is not None:
                new = E.with_mask(new, self.where)
            elif node.op == new.op == "cast" and new.attr is not None:
                new = E.cast(new.args[0], new.dtype)  # what is in memory is rounded
            done[node] = new
        return done[root]

    def local(self, load: Expr) -> Expr:
        name, place, fill = load.attr
        places = self.places.setdefault(name, [])
        if place not in places:
            places.append(place)
        if not load.args:
            return self.value(self.computes[name], place)
        outer, (mask,) = self.where, load.args
        self.where = mask if outer is None else E.op("logical_and", outer, mask)
        value = self.value(self.computes[name], place)
        self.where = outer
        return E.op("where", mask, value, E.literal(fill, value.dtype))


def _solved(mine: Index, theirs: Index, a: Axis) -> Index | None:
    """What `a` must be for the two to be equal, where that can be read off: of ``a // 4``, too; and
    None where that is not all of `a`, as in a part of what was joined."""
    if mine is atom(a):
        return theirs if _is_whole(theirs, a.extent) else None
    if mine.axes() == {a} and len(theirs.axes()) == 1:
        (other,) = theirs.axes()
        if a.extent is other.extent and substitute(mine, {a: atom(other)}) is theirs:
            return atom(other)
    return None


def _apart(a: Index, b: Index) -> bool:
    """Whether neither tells of the other: they have no digit in common."""
    left, right = ({d for atoms, _ in i.terms for d in atoms} for i in (a, b))
    return not left & (right | b.axes()) and not right & a.axes()


def _is_whole(index: Index, extent: Index) -> bool:
    """Whether it takes each value below `extent`: digits of a mixed radix, all of them."""
    total = const(1)
    for atoms, factor in sorted(index.terms, key=lambda term: term[1]):
        if len(atoms) != 1 or factor != total.value:
            return False
        low, high = (bound(atom(atoms[0]), upper) for upper in (False, True))
        if low is not const(0) or high is None:
            return False
        total = total * (high + 1)
    return total is extent


def _blanked(place: Place, d: int) -> Place:
    return (*place[:d], *place[d + 1 :], Index({}))


def factors_dtype(body: Expr) -> str | None:
    """The type of both factors of a product that is summed in f32: a half type, or f32 itself."""
    if body.op != "mul" or body.dtype != "f32":
        return None
    kinds = {x.args[0].dtype if x.op == "cast" else "f32" for x in body.args}
    return kinds.pop() if len(kinds) == 1 and kinds <= set(HALF) else "f32"


def _exact(x: Expr) -> Expr:
    """The f32 number that a widened factor was rounded from."""
    return E.unrounded(x.args[0]) if x.op == "cast" and x.args[0].op == "cast" else x


# -- axes ------------------------------------------------------------------------------------------


def _cut(nest: Nest) -> Nest:
    """No index divides an axis by what divides its extent; results are read where they live."""
    for count in range(12):
        indices = [i for s in nest.statements for i in _indices(s)]
        point = next(
            (
                p
                for i in indices
                for a in i.atoms()
                if isinstance(a, (Div, Mod))
                for p in split_points(a)
                if p[0] in nest.axes
            ),
            None,
        )
        if point is None:
            break
        axis, size, outer_extent = point
        outer, inner = (
            Axis(f"{axis.name}o{count}", outer_extent),
            Axis(f"{axis.name}i{count}", size),
        )
        pair = (outer, inner)
        table: dict[Atom, Index] = {axis: atom(outer) * size + atom(inner)}
        axes = tuple(x for a in nest.axes for x in (pair if a == axis else (a,)))
        nest = Nest(axes, tuple(_moved(s, table, axis, pair) for s in nest.statements))
    return settled(_rowed(nest))


def _rowed(nest: Nest) -> Nest:
    """Of products that read one another's results those of one row as products: a factor in memory
    that has no axis for itself (one query of each head) gets an axis of one place."""
    row = atom(Axis("row", 1))
    products = {s.name for s in nest.reductions.values() if s.operands}
    lives: set[str] = set()  # results that have the axis
    out: list[Statement] = []
    if not any(n.attr[0] in products for s in products for n in nest.reductions[s].body.loads()):
        return nest
    for s in nest.statements:
        (root,) = roots(s)
        read = {n.attr[0] for n in root.loads()} & lives
        if isinstance(s, Reduce) and s.operands and not read:
            a, b = sorted(root.args, key=lambda x: len(x.axes()))
            loads = [n for n in a.loads() if n.attr[0] not in nest.reductions]
            if loads and a.axes() < b.axes():
                name, at, fill = loads[0].attr
                mask = next(iter(loads[0].args), None)
                new = {loads[0]: E.load(name, _beside(at, row), loads[0].dtype, mask, fill)}
                sides = (x.substitute({}, new if x is a else {}) for x in root.args)
                s = replace(s, body=E.op("mul", *sides))
                lives.add(s.name)
        if isinstance(s, Reduce) and read:
            lives.add(s.name)
        elif isinstance(s, Store) and read:
            if not s.index:
                return nest  # a number has no place for the axis
            s = replace(s, index=_beside(s.index, row))
        out.append(s)
    return Nest((*nest.axes, *row.axes()), tuple(out)) if lives else nest


def _beside(place: Place, row: Index) -> Place:
    """A place with an axis of one place more."""
    d = next((d for d, i in enumerate(place) if i.value == 0), len(place) - 1)
    return (*place[:d], place[d] + row, *place[d + 1 :])


def _indices(s: Statement) -> Sequence[Index]:
    return s.body.indices() if isinstance(s, Reduce) else (*s.value.indices(), *s.index)


def _moved(
    s: Statement, table: dict[Atom, Index], axis: Axis, pair: tuple[Axis, Axis]
) -> Statement:
    if isinstance(s, Store):
        return Store(
            s.tensor, tuple(substitute(i, table) for i in s.index), _replaced(s.value, table)
        )
    over = tuple(x for a in s.over for x in (pair if a == axis else (a,)))
    return replace(s, over=over, body=_replaced(s.body, table))


def _replaced(e: Expr, table: Mapping[Atom, Index], loads: Nodes | None = None) -> Expr:
    """`Expr.substitute`, of which most leaves most as it is."""
    loads = {n: x for n, x in (loads or {}).items() if n is not x}
    return e.substitute(table, loads) if loads or not e.axes().isdisjoint(table) else e


def settled(nest: Nest) -> Nest:
    """Statements in order, each result read at the axes on which it lives; what nobody reads and
    axes that nobody uses are gone."""
    lives: dict[str, tuple[Axis, ...]] = {}
    out: list[Statement] = []
    for s in nest.statements:
        body = s.body if isinstance(s, Reduce) else s.value
        table = {
            n: E.load(n.attr[0], tuple(atom(a) for a in lives[n.attr[0]]), n.dtype)
            for n in body.loads()
            if n.attr[0] in lives
        }
        body = _replaced(body, {}, table)
        s = replace(s, body=body) if isinstance(s, Reduce) else replace(s, value=body)
        out.append(s)
        if isinstance(s, Reduce):
            lives[s.name] = nest.lives(s)
    needed: set[str] = set()
    kept: list[Statement] = []
    for s in reversed(out):
        if isinstance(s, Store) or s.name in needed:
            kept.append(s)
            body = s.value if isinstance(s, Store) else s.body
            needed.update(n.attr[0] for n in body.loads())
    kept = [
        replace(s, operands=None)
        if isinstance(s, Reduce) and s.operands and nest.contraction(s) is None
        else s
        for s in kept
    ]
    used = {a for s in kept for i in _indices(s) for a in i.axes()}
    used.update(a for s in kept if isinstance(s, Reduce) for a in s.over)
    return Nest(tuple(a for a in nest.axes if a in used), tuple(reversed(kept)))


# -- hoist -----------------------------------------------------------------------------------------


def _hoisted(nest: Nest) -> Nest:
    """``sum c f = c sum f``."""
    values: dict[Expr, Expr] = {}  # a result's load -> the hoisted factor times it
    out: list[Statement] = []
    for s in nest.statements:
        body = s.body if isinstance(s, Reduce) else s.value
        body = _replaced(body, {}, {n: values[n] for n in body.loads() if n in values})
        if isinstance(s, Store):
            out.append(replace(s, value=body))
            continue
        before = E.load(s.name, tuple(atom(a) for a in nest.lives(s)), body.dtype)
        inner, outer = (body, []) if s.kind != "sum" else factored(body, frozenset(s.over))
        if outer:
            body = inner
            load = E.load(
                s.name, tuple(atom(a) for a in nest.axes_of(inner) if a not in s.over), body.dtype
            )
            for how, c in reversed(outer):
                load = with_factor(how, load, c)
            values[before] = load
        out.append(replace(s, body=body))
    return settled(Nest(nest.axes, tuple(out)))


def with_factor(how: str, x: Expr, c: Expr) -> Expr:
    zero = E.literal(0, x.dtype)
    if how == "zero where":
        return E.op("where", c, zero, x)
    return E.op("where", c, x, zero) if how == "zero but where" else E.op(how, x, c)


def factored(e: Expr, over: frozenset[Axis]) -> tuple[Expr, list[tuple[str, Expr]]]:
    """(f, factors): `e` is f, multiplied with, divided by or made 0 by what does not depend on
    `over`."""
    if e.op == "where" and not e.args[0].axes() & over:
        condition, a, b = e.args
        for x, other, how in ((a, b, "zero but where"), (b, a, "zero where")):
            if other.op == "literal" and other.attr == 0:
                inner, outer = factored(x, over)
                return inner, [(how, condition), *outer]
    if e.op == "div" and not e.args[1].axes() & over:
        inner, outer = factored(e.args[0], over)
        return inner, [("div", e.args[1]), *outer]
    if e.op == "mul":
        for x, c in (e.args, e.args[::-1]):
            if not c.axes() & over and x.axes() & over:
                inner, outer = factored(x, over)
                return inner, [("mul", c), *outer]
        (a, left), (b, right) = (factored(x, over) for x in e.args)
        if left or right:
            return E.op("mul", a, b), [*left, *right]
    return e, []


__all__ = ["closure", "factored", "settled"]
