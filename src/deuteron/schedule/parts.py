"""A loop of a nest in parts, each of which has programs of its own, and a nest that merges them.

In: a nest with contractions whose grid keeps too little of the device busy (one query of each head,
that reads many keys), one of its loops, how many parts. Out: the nest of partial results, which
lives on the parts, too, and the nest that stores what the first one did, from those. By the rules
of `schedule.online`, as `split_reductions` does it for rows:

    max, sum, ...    the reduction of the parts' reductions
    rescaled         the sum of the parts' sums, each times what its own maximum lacks of the row's

Partial results are in memory, in the dtype of the sums; the order of their merger is fixed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import Atom, Axis, Index, atom, floordiv
from deuteron.ir.nest import Nest, Reduce, Statement, Store
from deuteron.ir.operations import REDUCTIONS
from deuteron.ir.program import Layout, contiguous
from deuteron.schedule.closure import settled
from deuteron.schedule.loop_passes import passes
from deuteron.schedule.online import Rescaled, bare, local_body, local_shift, rescale

PART = 64  # places of which a part has a multiple, where the parts are not equal


@dataclass(frozen=True)
class Parted:
    """The nests of the parts and of their merger, and the tensors between them."""

    partial: Nest
    merger: Nest
    layouts: dict[str, Layout]


def parted(nest: Nest, axis: Axis, count: int, device: str) -> Parted | None:
    """The nest with `count` parts of a loop over `axis`; None where one pass over that is not
    enough, or what follows it multiplies again."""
    outer = [s for s in nest.reductions.values() if axis in s.over]
    _, of = passes(nest, (axis,))
    whole = (s.over == (axis,) and not of[s] and REDUCTIONS[s.kind].scalar_op for s in outer)
    if not outer or not all(whole) or any(axis in nest.lives(s) for s in nest.stores):
        return None
    parts = _Parts(nest, axis, count, device)
    partial, merger = parts.nests()
    both = {s.name for s in outer} & partial.reductions.keys() & merger.reductions.keys()
    return None if merger.contractions or not both else Parted(partial, merger, parts.layouts)


class _Parts:
    def __init__(self, nest: Nest, axis: Axis, count: int, device: str) -> None:
        self.nest, self.axis, self.device = nest, axis, device
        self.chain, _ = passes(nest, (axis,))
        length = floordiv(axis.extent, count)
        whole = (length * count) is axis.extent
        if not whole:
            length = floordiv(axis.extent + (count * PART - 1), count * PART) * PART
        self.part, self.left = Axis(f"{axis.name}p", count), Axis(axis.name, length)
        place = atom(self.part) * length + atom(self.left)
        self.at: dict[Atom, Index] = {axis: place}
        here, end = E.index_value(place), E.index_value(axis.extent)
        self.inside = None if whole else E.op("lt", here, end)
        self.layouts: dict[str, Layout] = {}

    def nests(self) -> tuple[Nest, Nest]:
        partial: list[Statement] = []
        merger: list[Statement] = []
        for s in self.nest.statements:
            if isinstance(s, Store):
                merger.append(s)
            elif self.axis in s.over:
                made = self.reduction(s)
                partial += [made, self.kept(s)]
                merger.append(self.merged(s))
            else:
                partial.append(replace(s, body=self.placed(s.body)))
                merger.append(s)
        return self.made(partial, (self.part, self.left)), self.made(merger, (self.part,))

    def made(self, statements: list[Statement], axes: tuple[Axis, ...]) -> Nest:
        every = (axes if a == self.axis else (a,) for a in self.nest.axes)
        return settled(Nest(tuple(a for x in every for a in x), tuple(statements)))

    # -- the parts ---------------------------------------------------------------------------------

    def reduction(self, s: Reduce) -> Reduce:
        """Over a part: about its own maximum, where the rule says so."""
        body, rule = s.body, self.chain.rules.get(s.name)
        if isinstance(rule, Rescaled):
            top = self.nest.reductions[rule.maximum]
            own = replace(rule, element=self.guarded(rule.element))
            body = local_body(own, body, local_shift(own, self.result(top)))
        if s.kind == "max":
            body = self.guarded(body)
        elif s.operands:
            body = E.op("mul", *map(self.zeroed, body.args))
        elif self.inside is not None:
            neutral = REDUCTIONS[s.kind].identity(body.dtype)
            body = E.op("where", self.inside, body, E.literal(neutral, body.dtype))
        return replace(s, over=(self.left,), body=self.placed(body))

    def guarded(self, e: Expr) -> Expr:
        """An element of a maximum: minus infinity behind the last place."""
        if self.inside is None:
            return e
        low = E.literal(REDUCTIONS["max"].identity(bare(e).dtype), bare(e).dtype)
        return e.substitute({}, {bare(e): E.op("where", self.inside, bare(e), low)})

    def zeroed(self, factor: Expr) -> Expr:
        """A factor: 0 behind the last place; what is in memory is not read there."""
        plain = bare(factor)
        stored = plain.op == "load" and plain.attr[0] not in self.nest.reductions
        if self.inside is None or stored:
            return factor
        return E.op("where", self.inside, factor, E.literal(0, factor.dtype))

    def placed(self, root: Expr) -> Expr:
        """At a place of a part; what is behind the last one is not read."""
        results, inside = self.nest.reductions, self.inside

        def rule(n: Expr, args: tuple[Expr, ...]) -> Expr | None:
            stored = n.op == "load" and n.attr[0] not in results
            if inside is None or not stored or self.axis not in n.axes():
                return None
            return E.with_mask(E.rebuild(n, args, self.at, {}), inside)

        return E.rewrite(root, rule, self.at)

    # -- what lies between, and the merger ---------------------------------------------------------

    def result(self, s: Reduce) -> Expr:
        return E.load(s.name, tuple(map(atom, self.nest.lives(s))), s.body.dtype)

    def index(self, s: Reduce) -> tuple[Index, ...]:
        return tuple(map(atom, (self.part, *self.nest.lives(s))))

    def kept(self, s: Reduce) -> Store:
        name, axes = f"{s.name}.parts", (self.part, *self.nest.lives(s))
        self.layouts[name] = contiguous(tuple(a.extent for a in axes), s.body.dtype, self.device)
        return Store(name, self.index(s), self.result(s))

    def partial(self, s: Reduce) -> Expr:
        return E.load(f"{s.name}.parts", self.index(s), s.body.dtype)

    def merged(self, s: Reduce) -> Reduce:
        rule, body = self.chain.rules.get(s.name), self.partial(s)
        if isinstance(rule, Rescaled):
            top = self.partial(self.nest.reductions[rule.maximum])
            body = rescale(rule, body, local_shift(rule, top), rule.shift)
        return Reduce(s.name, s.kind, (self.part,), body)


__all__ = ["Parted", "parted"]
