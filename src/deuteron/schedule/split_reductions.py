"""Reductions of a row, dependent ones too, as reductions of parts of the row and a combination of
those.

In: a group of reductions whose chain one pass can do (`online`). Out: computations for the partial
results, which live on the rows and on the parts, and under the reductions' own names the
computations that combine them, in a fixed order. Everything is ordinary IR: each part's reduction
needs the partial results of its own part only, and the combination is a reduction over parts.

    max, sum, ...    the reduction of the parts' reductions
    rescaled         sum of the parts' sums, each times what its own maximum lacks of the row's
    products         sum of the parts' sums about their own means, moved to the row's center
    centered         sum of what is left about the parts' own means, moved to the row's center
    argmax, argmin   the first part that has the row's extreme element, and the position there
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import (
    Axis,
    Index,
    const,
    floordiv,
    hint,
    mod,
    product,
    substitute,
)
from deuteron.ir.operations import REDUCTIONS, extreme
from deuteron.ir.program import Compute, Layout, contiguous
from deuteron.schedule.group import Group, Member, result_name
from deuteron.schedule.kernel import Nest, Reduce, Scan
from deuteron.schedule.online import (
    Centered,
    Chain,
    Products,
    Rescaled,
    local_body,
    local_shift,
    power_of,
    recenter,
    rescale,
)
from deuteron.schedule.space import Map, dense, flat


def one_pass(group: Group, layouts: Mapping[str, Layout]) -> Chain | None:
    """The chain of the group's reductions, where one pass over the row is enough for all of
    them."""
    if any(m.kind in ("scan", "column", "write") for m in group.members):
        return None
    nest = group.nest(dict(layouts), ())
    reduced = set(nest.reduced)
    chain = Chain(lambda e: not (e.axes() & reduced), centering=True)
    for s in nest.stmts:
        assert not isinstance(s, Scan)
        if isinstance(s, Reduce) and chain.add(s):
            return None
    return chain


@dataclass(frozen=True)
class RowCut:
    """How reduced loops are cut: `parts` are loops over parts, `inner` what a part reduces over;
    `table` gives the old loops. `inside`: whether a point is one of the row, where not all are.
    """

    parts: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    table: Map
    inside: Expr | None
    count: Expr  # points of a part, as i64

    def number(self) -> int:
        return hint(product(a.extent for a in self.parts))


def cut_rows(nest: Nest, layouts: Mapping[str, Layout], wish: int) -> RowCut | None:
    """About `wish` parts, cut along the outermost loops."""
    taken = {a.name for a in nest.parallel}
    names = (f"p{k}" for k in range(1 << 20) if f"p{k}" not in taken)
    parts: list[Axis] = []
    inner = list(nest.reduced)
    table: Map = {}
    inside: Expr | None = None
    rest = const(1)
    have = 1
    for a in outermost_first(nest, layouts):
        n = hint(a.extent)
        if n <= 1:
            continue
        if have * n <= wish and a.extent.value is not None and len(inner) > 1:
            part = Axis(next(names), a.extent)
            table[a] = part.index
            inner.remove(a)
            parts.append(part)
            have *= n
            continue
        count = min(wish // have, n)
        if a.extent.value is not None:
            count = divisor(a.extent.value, count)
        if count < 2:
            break
        length = floordiv(a.extent + (count - 1), count)
        part, left = Axis(next(names), count), Axis(a.name, length)
        place = part.index * length + left.index
        table[a] = place
        inner[inner.index(a)] = left
        parts.append(part)
        if a.extent.value is None or a.extent.value % count:
            inside = E.op("lt", E.index_value(place), E.index_value(a.extent))
            ahead = E.index_value(a.extent - part.index * length)
            zero, most = E.literal(0, "i64"), E.index_value(length)
            points = E.op("minimum", E.op("maximum", ahead, zero), most)
            rest = product(x.extent for x in inner if x is not left)
            count_of = E.op("mul", points, E.index_value(rest))
            return RowCut(tuple(parts), tuple(inner), table, inside, count_of)
        break
    if not parts or not inner:
        return None
    total = E.index_value(product(x.extent for x in inner))
    return RowCut(tuple(parts), tuple(inner), table, None, total)


def outermost_first(nest: Nest, layouts: Mapping[str, Layout]) -> list[Axis]:
    """The reduced loops by the stride with which they walk the largest tensor that they read."""
    best: Index | None = None
    size = -1
    local = nest.locals()
    for load in (n for e in nest.exprs() for n in e.loads()):
        name, index, _ = load.attr
        if name not in local:
            touched = hint(product(a.extent for a in {a for i in index for a in i.axes()}))
            if touched > size:
                best, size = layouts[name].address(index), touched

    def stride(a: Axis) -> int:
        c = best.coefficient(a) if best is not None else None
        return 0 if c is None or c.axes() else abs(hint(c))

    return sorted(nest.reduced, key=lambda a: (-stride(a), nest.reduced.index(a)))


def divisor(n: int, wish: int) -> int:
    """A divisor of `n` near `wish` (not much smaller), else `wish`."""
    for d in range(wish, max(1, wish // 2), -1):
        if n % d == 0:
            return d
    return wish


@dataclass
class SplitReductions:
    """The computations that take the place of a group's reductions."""

    group: Group
    nest: Nest
    chain: Chain
    cut: RowCut
    layouts: Mapping[str, Layout]
    made: dict[str, tuple[Compute, int]] = field(default_factory=dict)  # partial results
    combined: list[tuple[Compute, int]] = field(default_factory=list)
    late: dict[str, Compute] = field(default_factory=dict)  # tensors that only combinations need
    rests: dict[Expr, str] = field(default_factory=dict)  # sums about parts' means
    taken: frozenset[str] = frozenset()  # tensors of partial results that there are

    def build(self) -> bool:
        """Whether every reduction of the group has found its place."""
        members = {result_name(m): m for m in self.group.members if m.kind == "reduction"}
        for f in self.nest.stmts:
            assert isinstance(f, Reduce)
            m = members[f.name]
            places = self.places(m)
            if places is None:
                return False
            rule = self.chain.rules.get(f.name)
            if f.kind.startswith("arg"):
                self.position(f, m, places)
            elif isinstance(rule, Rescaled):
                self.rescaled(f, m, rule, places)
            elif isinstance(rule, Products):
                self.products(f, m, rule, places)
            elif f.name in self.chain.centers:
                self.centered(m, self.chain.centers[f.name], places)
            else:
                self.partial(self.named(m.name), f.kind, f.body, m)
                self.combine(m, f.kind, self.read(self.named(m.name), places))
        return True

    # -- partial results ---------------------------------------------------------------------------
    def named(self, name: str) -> str:
        """The tensor of partial results of `name`: a reduction of many partial results may itself
        be split."""
        made = f"{name}.part"
        return made if made not in self.taken else f"{name}.part2"

    def partial(self, name: str, kind: str, body: Expr, m: Member) -> None:
        """A reduction of every part: ``name[rows, parts]``."""
        neutral = REDUCTIONS[kind].identity(body.dtype)
        self.store(name, kind, self.guarded(body, neutral), m)

    def guarded(self, body: Expr, neutral: Any) -> Expr:
        """`body` at a point of the part, `neutral` where that is not one of the row."""
        moved, inside = body.substitute(self.cut.table), self.cut.inside
        if inside is None:
            return moved
        moved = masked(moved, inside, set(self.cut.inner))
        return E.op("where", inside, moved, E.literal(neutral, body.dtype))

    def store(self, name: str, kind: str, body: Expr, m: Member) -> None:
        axes = (*self.nest.parallel, *self.cut.parts)
        value = E.reduce(kind, self.cut.inner, body)
        layout = contiguous(tuple(a.extent for a in axes), value.dtype, m.compute.layout.device)
        c = Compute(name, axes, value, layout, origins=m.compute.origins)
        self.made[name] = (c, m.position)

    def here(self, name: str) -> Expr:
        """A partial result of the part that is being computed."""
        index = tuple(a.index for a in (*self.nest.parallel, *self.cut.parts))
        return E.load(name, index, self.made[name][0].body.dtype)

    # -- combinations ------------------------------------------------------------------------------
    def places(self, m: Member) -> Map | None:
        """The nest's rows as indices over the axes of the member's tensor."""
        c = m.compute
        shape = [a.extent for a in c.axes]
        rows = [a for a in self.nest.parallel if a.extent.value != 1]
        digits = dense(flat(m.index, shape), rows)
        if digits is None or len(digits) != len(rows):
            return None
        number = flat([a.index for a in c.axes], shape)
        out: Map = {a: const(0) for a in self.nest.parallel}
        for k, (a, w) in enumerate(digits):
            out[a] = (
                floordiv(number, w) if k == len(digits) - 1 else mod(floordiv(number, w), a.extent)
            )
        return out

    @property
    def part_axes(self) -> tuple[Axis, ...]:
        return tuple(Axis(f"r{k}", a.extent) for k, a in enumerate(self.cut.parts))

    def read(self, name: str, places: Map) -> Expr:
        """A partial result, in the combination of a tensor whose rows are at `places`."""
        rows = tuple(places[a] for a in self.nest.parallel)
        index = (*rows, *(a.index for a in self.part_axes))
        return E.load(name, index, self.made[name][0].body.dtype)

    def combine(self, m: Member, kind: str, body: Expr) -> None:
        c = replace(m.compute, body=E.reduce(kind, self.part_axes, body))
        self.combined.append((c, m.position))

    def outside(self, e: Expr, places: Map) -> Expr:
        """What is constant in a row, in a combination: registers are tensors there."""
        members = {result_name(m): m for m in self.group.members if m.kind == "reduction"}
        table: dict[Expr, Expr] = {}
        for n in e.loads():
            m = members.get(n.attr[0])
            if m is not None:
                index = tuple(substitute(i, places) for i in m.index)
                table[n] = E.load(m.name, index, n.dtype)
        return e.substitute(places, table)

    # -- dependent reductions
    # -----------------------------------------------------------------------
    def rescaled(self, f: Reduce, m: Member, rule: Rescaled, places: Map) -> None:
        top = self.named(rule.maximum.removesuffix(".r"))
        name = self.named(m.name)
        shift = local_shift(rule, self.here(top))
        if rule.factor is None:  # minus infinity, beyond the row, adds nothing
            element = self.guarded(rule.element, float("-inf"))
            self.store(name, "sum", power_of(rule, E.op("sub", element, shift)), m)
        else:
            self.partial(name, "sum", local_body(rule, f.body, shift), m)
        local = local_shift(rule, self.read(top, places))
        shift = self.outside(rule.shift, places)
        self.combine(m, "sum", rescale(rule, self.read(name, places), local, shift))

    def products(self, f: Reduce, m: Member, rule: Products, places: Map) -> None:
        """About the parts' means, which are rounded: the sums of what is left, 0 but for rounding,
        make up for it where the elements are far from 0 (`recenter`).
        """
        dtype, name = f.body.dtype, self.named(m.name)
        sides = (
            {"x": (rule.x, rule.a)}
            if rule.square
            else {"x": (rule.x, rule.a), "y": (rule.y, rule.b)}
        )
        deviations = [self._about_part_mean(x, m, side) for side, (x, _) in sides.items()]
        self.partial(name, "sum", E.op("mul", deviations[0], deviations[-1]), m)
        moved = [self.moved(x, a, m, side, places) for side, (x, a) in sides.items()]
        far, rest = zip(*(moved * 2 if rule.square else moved))
        total = self.read(name, places)
        self.combine(m, "sum", recenter(total, E.cast(self.points(), dtype), far, rest))

    def centered(self, m: Member, rule: Centered, places: Map) -> None:
        far, rest = self.moved(rule.x, rule.a, m, "x", places)
        count = E.cast(self.points(), far.dtype)
        self.combine(m, "sum", E.op("add", rest, E.op("mul", count, far)))

    def _about_part_mean(self, x: Expr, m: Member, side: str) -> Expr:
        """The elements less their part's mean."""
        n = E.cast(at_least_one(self.cut.count), x.dtype)
        return E.op("sub", x, E.op("div", self.here(self.sum_of(x, m, side)), n))

    def moved(self, x: Expr, a: Expr, m: Member, side: str, places: Map) -> tuple[Expr, Expr]:
        """In a combination: what a part's mean is apart from the row's center `a`, and the sum of
        what is left about it."""
        if x not in self.rests:
            self.rests[x] = self.named(f"{m.name}.{side}.rest")
            self.partial(self.rests[x], "sum", self._about_part_mean(x, m, side), m)
        many = E.cast(at_least_one(self.points()), x.dtype)
        mean = E.op("div", self.read(self.sum_of(x, m, side), places), many)
        return E.op("sub", mean, self.outside(a, places)), self.read(self.rests[x], places)

    def points(self) -> Expr:
        """Elements of a part, in a combination."""
        table: Map = {a: b.index for a, b in zip(self.cut.parts, self.part_axes, strict=True)}
        return self.cut.count.substitute(table)

    def sum_of(self, x: Expr, m: Member, side: str) -> str:
        """The partial sums of `x`: those of a reduction of the group, or some of their own."""
        for f in self.nest.stmts:
            assert isinstance(f, Reduce)
            name = self.named(f.name.removesuffix(".r"))
            if f.kind == "sum" and f.body is x and name in self.made:
                return name
        name = self.named(f"{m.name}.{side}")
        if name not in self.made:
            self.partial(name, "sum", x, m)
        return name

    def position(self, f: Reduce, m: Member, places: Map) -> None:
        """The place, along the one reduced loop, of an extreme element: the first of the parts that
        have the row's, and the place in it.
        """
        best, at = self.named(f"{m.name}.best"), self.named(m.name)
        which = f"{at}.which"
        self.partial(best, extreme(f.kind), f.body, m)
        self.partial(at, f.kind, f.body, m)
        (part_axis,) = self.part_axes
        c = m.compute
        layout = contiguous(tuple(a.extent for a in c.axes), "i64", c.layout.device)
        first = E.reduce(f.kind, (part_axis,), self.read(best, places))
        self.late[which] = Compute(which, c.axes, first, layout, origins=c.origins)
        self.combined.append((self.late[which], m.position))
        part = E.index_value(part_axis.index)
        chosen = E.op("eq", part, E.load(which, tuple(a.index for a in c.axes), "i64"))
        (loop,) = self.nest.reduced
        start = substitute(self.cut.table[loop], {self.cut.inner[0]: const(0)})
        start = substitute(start, {self.cut.parts[0]: part_axis.index})
        place = E.op("add", self.read(at, places), E.index_value(start))
        self.combine(m, "sum", E.op("where", chosen, place, E.literal(0, "i64")))


def at_least_one(count: Expr) -> Expr:
    """The number of elements of a part, 1 where it has none."""
    if count.op == "literal" and count.attr >= 1:
        return count
    return E.op("maximum", count, E.literal(1, "i64"))


def masked(root: Expr, mask: Expr, loops: set[Axis]) -> Expr:
    """`root` with every load that depends on `loops` restricted to where `mask` holds: the others
    are there in any case.
    """
    done: dict[Expr, Expr] = {}
    for node in root.walk():
        new = E.rebuild(node, tuple(done[a] for a in node.args), {}, done)
        if new.op == "load" and new.axes() & loops:
            name, idx, fill = new.attr
            when = E.op("logical_and", mask, new.args[0]) if new.args else mask
            new = E.load(name, idx, new.dtype, when, fill if fill is not None else 0)
        done[node] = new
    return done[root]


def split_into_parts(
    group: Group, layouts: Mapping[str, Layout], wish: int
) -> SplitReductions | None:
    """The group's reductions in about `wish` parts of each row."""
    chain = one_pass(group, layouts)
    if chain is None:
        return None
    nest = group.nest(dict(layouts), ())
    positions = any(isinstance(s, Reduce) and s.kind.startswith("arg") for s in nest.stmts)
    if positions and len(nest.reduced) > 1:
        return None  # the place is one along a single loop
    division = cut_rows(nest, layouts, wish)
    if division is None:
        return None
    taken = frozenset(n for n in group.reads if n in layouts)
    reductions = SplitReductions(group, nest, chain, division, layouts, taken=taken)
    return reductions if reductions.build() else None


__all__ = ["SplitReductions", "split_into_parts", "one_pass"]
