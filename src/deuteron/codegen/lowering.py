"""A nest and a tiling become tile code: where each value is computed, in which loops, with which
masks and accumulators.

In: an `ir.nest.Nest`, a `schedule.tile.Tiling`, layouts. Out: a list of `codegen.tile_code.Code`.

A value stands in the innermost of the loops that it needs. Reductions over a loop's dimension are
made when they are first asked for, all at once that can run in one pass (`schedule.online`): a
reduction that needs another one over the same dimension runs with it where a rule says how its
partial result follows the other's, else in a later pass. A reduction inside a loop (scores) is made
where it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from deuteron.codegen.powers import binary, scaled, tails
from deuteron.codegen.tile_code import Code, Let, Loop, Value, Write
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Index, atom, const, fits_int, product, substitute
from deuteron.ir.index import Value as Loaded
from deuteron.ir.nest import Nest, Reduce, Statement, Store
from deuteron.ir.operations import COMPARISONS, REDUCTIONS
from deuteron.ir.program import Layout
from deuteron.schedule import online
from deuteron.schedule.boxes import Box, box_of
from deuteron.schedule.loop_passes import cut_off, passes
from deuteron.schedule.tiling import Dim, Tiling


@dataclass(frozen=True)
class Tiles:
    """What a target's tiles are. `whole`: they have all places of their blocks, of which those that
    do not exist are masked; else loops end where the places do. `powers`: exponentials of
    differences are powers of two (`binary`). `reciprocals`: a tile divided by a smaller one is
    multiplied with its reciprocal, which is infinite of divisors up to 2^-128, and ``1 + erf(x)``
    is one function (`tails`). `quarters`: random
    numbers of four neighbours are drawn at once."""

    whole: bool
    powers: bool
    reciprocals: bool
    quarters: bool


@dataclass
class Scope:
    """A loop's body, or the whole program: what is known there."""

    dim: str | None
    code: list[Code] = field(default_factory=list)
    values: dict[Any, Value] = field(default_factory=dict)
    results: dict[str, Value] = field(default_factory=dict)  # of reductions


def lower_nest(
    nest: Nest, tiling: Tiling, layouts: Mapping[str, Layout], tiles: Tiles
) -> list[Code]:
    for rule in (_compared_whole,) * tiles.quarters + (tails,) * tiles.reciprocals:
        nest = replace(nest, statements=tuple(_rewritten(s, rule) for s in nest.statements))
    lowering = Lowering(nest, tiling, layouts, tiles)
    for s in nest.stores:
        lowering.store(s)
    return lowering.scopes[0].code


def _rewritten(s: Statement, rule: Callable[[Expr], Expr]) -> Statement:
    if isinstance(s, Store):
        return replace(s, value=rule(s.value))
    return replace(s, body=rule(s.body))


def _compared_whole(root: Expr) -> Expr:
    """Random numbers that are only compared with one stay whole: they are multiples of 2^-24."""

    def rule(n: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if n.op != "lt" or args[0].op != "random" or args[1].op != "literal":
            return None
        (dist, stream, element), limit = args[0].attr, args[1].attr
        if (dist, args[0].dtype) != ("rand", "f32") or not 0 < limit < 1:
            return None
        end = f"rand<{math.ceil(limit * 2**24)}"
        return E.random(end, args[0].args[0], stream, element, "bool")

    return E.rewrite(root, rule)


class Lowering:
    def __init__(
        self, nest: Nest, tiling: Tiling, layouts: Mapping[str, Layout], tiles: Tiles
    ) -> None:
        self.nest, self.tiling, self.layouts, self.tiles = nest, tiling, layouts, tiles
        self.statements = nest.reductions
        self.products = nest.contractions.keys()
        self.dims = {d.name: d for d in tiling.dims}
        self.dim_of = {a: d for d in tiling.dims for a in d.axes}
        self.scopes = [Scope(None)]
        sides = [e for c in nest.contractions.values() for e in (c.a, c.b)]
        self.fetched = {n for e in sides for n in e.loads()} if tiling.fetches else set()
        self.stored: set[int] = set()
        self.depths: dict[str, int] = {}  # of values
        self.count = 0

    # -- values ------------------------------------------------------------------------------------

    def fresh(self, dims: Sequence[str], dtype: str, stem: str = "t") -> Value:
        self.count += 1
        ordered = tuple(d for d in self.dims if d in dims)
        return Value(f"{stem}{self.count}", ordered, dtype)

    def let(
        self,
        depth: int,
        kind: str,
        dims: Sequence[str],
        dtype: str,
        args: Sequence[Value] = (),
        attr: Any = None,
    ) -> Value:
        value = self.fresh(dims, dtype)
        self.depths[value.name] = depth
        self.scopes[depth].code.append(Let(value, kind, tuple(args), attr))
        return value

    def together(self, *values: Value) -> int:
        """The innermost depth of the values; sums are made when their loop is closed."""
        return min(max(self.depths.get(v.name, 0) for v in values), len(self.scopes) - 1)

    def spanned(self, axes: Sequence[Axis] | frozenset[Axis]) -> set[str]:
        """The dimensions within whose blocks a value on these axes can differ."""
        return {d.name for d in self.dims_of(axes) if d.varies({*axes})[0]}

    def dims_of(self, axes: Sequence[Axis] | frozenset[Axis]) -> set[Dim]:
        return {self.dim_of[a] for a in axes}

    def depth_of(self, axes: Sequence[Axis] | frozenset[Axis]) -> int:
        """The innermost open loop over these axes."""
        return self.innermost({d.name for d in self.dims_of(axes)})

    def changes_at(self, axes: Sequence[Axis] | frozenset[Axis]) -> int:
        """The innermost open loop in which a value on these axes is not always the same."""
        if not self.tiles.whole:  # what a block has is known inside of its loop
            return self.depth_of(axes)
        return self.innermost({d.name for d in self.dims_of(axes) if d.varies({*axes})[1]})

    def innermost(self, dims: AbstractSet[str]) -> int:
        return max((k for k, s in enumerate(self.scopes) if s.dim in dims), default=0)

    def value(self, root: Expr) -> Value:
        """The value of an expression, computed in the outermost scope where it can be."""
        for n in root.walk():
            if self._known(n) is None:
                self._compute(n)
        found = self._known(root)
        assert found is not None
        return found

    def _known(self, n: Expr) -> Value | None:
        for s in reversed(self.scopes):
            if n in s.values:
                return s.values[n]
            if n.op == "load" and n.attr[0] in s.results:
                return s.results[n.attr[0]]
        return None

    def known_at(self, name: str) -> int | None:
        """The depth at which a reduction's result is known."""
        return next((k for k, s in enumerate(self.scopes) if name in s.results), None)

    def _depth(self, n: Expr) -> int:
        known = [self.known_at(m.attr[0]) or 0 for m in n.loads()]
        return max([self.changes_at(n.axes()), *known])

    def _compute(self, n: Expr) -> None:
        if n.op == "load" and n.attr[0] in self.statements:
            s, inner = self.statements[n.attr[0]], self.scopes
            self.scopes = inner[: self.depth_of(self.nest.lives(s)) + 1]  # it stands before loops
            self.reduce(s)
            self.scopes = inner
            return
        places = [position(a) for a in n.args] if n.op in COMPARISONS else [None]
        if None in places:
            args = [self.value(a) for a in n.args]
        else:  # 64 bits would be several instructions
            args = [self.index(p) for p in places if p is not None]
        depth = self._depth(n)
        dims: set[str] = set().union(*(a.dims for a in args))
        match n.op:
            case "literal":
                made = self.let(depth, "literal", (), n.dtype, attr=n.attr)
            case "index":
                made = self.index(n.attr, n.dtype)
            case "load":
                made = self.load(n, args)
            case "cast":
                made = self.let(depth, "cast", args[0].dims, n.dtype, args, n.args[0].dtype)
            case "random":
                made = self.random(n, args[0])
            case "div" if self.tiles.reciprocals and n.dtype == "f32" and set(args[1].dims) < dims:
                factors = (args[0], self.reciprocal(args[1]))
                made = self.let(depth, "op", tuple(dims), n.dtype, factors, "mul")
            case _:
                made = self.let(depth, "op", tuple(dims), n.dtype, args, n.op)
        self.scopes[depth].values[n] = made

    def reciprocal(self, x: Value) -> Value:
        """1 / x, once for all that is divided by it."""
        depth = self.together(x)
        known = self.scopes[depth].values.get(("reciprocal", x.name))
        if known is None:
            one = self.let(depth, "literal", (), x.dtype, attr=1.0)
            known = self.let(depth, "op", x.dims, x.dtype, (one, x), "div")
            self.scopes[depth].values["reciprocal", x.name] = known
        return known

    def index(self, index: Index, dtype: str = "i32") -> Value:
        """The number that an index is at each place of its tile."""
        depth = self.changes_at(index.axes())
        key = (index, dtype)
        known = self.scopes[depth].values.get(key)
        if known is None:
            axes = sorted(index.axes())
            args = [self.axis(a) for a in axes]
            dims = set().union(*(a.dims for a in args)) if args else set()
            known = self.let(
                depth, "index", tuple(dims), dtype, args, (index, dict(zip(axes, args)))
            )
            self.scopes[depth].values[key] = known
        return known

    def axis(self, a: Axis) -> Value:
        depth = self.changes_at((a,))
        known = self.scopes[depth].values.get(a)
        if known is None:
            dim = self.dim_of[a]
            at = dim.axes.index(a)
            below = product(x.extent for x in dim.axes[at + 1 :])
            inside, between = dim.varies({a})
            between |= inside and not self.tiles.whole
            dims = (dim.name,) if inside else ()
            if inside or between:
                attr = (dim.name, between, below, a.extent if at else None)
                known = self.let(depth, "place", dims, "i32", (), attr)
            else:
                known = self.let(depth, "literal", (), "i32", attr=0)
            self.scopes[depth].values[a] = known
        return known

    def load(self, n: Expr, args: Sequence[Value]) -> Value:
        name, index, fill = n.attr
        box = None if args or n not in self.fetched else self.box(name, index)
        if box is not None:
            at, attr = self.corner(box), (name, box)
            return self.let(self._depth(n), "fetch", box.dims, n.dtype, at, attr)
        address = self.index(self.layouts[name].address(index))
        axes = frozenset().union(*(i.axes() for i in index))
        mask = self.bounds(self.spanned(axes) | set(args[0].dims if args else ()))
        if args:
            mask = args[0] if mask is None else self._both(args[0], mask)
        depth = self._depth(n)
        dims = set(address.dims) | set(mask.dims if mask is not None else ())
        given = (address, mask) if mask is not None else (address,)
        return self.let(depth, "load", tuple(dims), n.dtype, given, (name, fill or 0))

    def random(self, n: Expr, seed: Value) -> Value:
        """Numbers of elements: whatever the tiling, each has its own (`graph.random_ops`)."""
        dist, stream, element = n.attr
        along = self.quartered(element) if dist.partition("<")[0] == "rand" else None
        dims: tuple[str, ...] = ()
        if along is not None and n.dtype != "f64":
            element, dims = (element - atom(along.axes[0])) // 4, (along.name,)
        place, depth = self.index(element, "i64"), self._depth(n)
        attr = (dist, stream, *(dims or (None,)))
        return self.let(depth, "random", (*place.dims, *dims), n.dtype, (seed, place), attr)

    def quartered(self, element: Index) -> Dim | None:
        """The dimension along which four neighbours, from a multiple of 4 on, share a counter."""
        if not self.tiles.quarters or len(self.spanned(element.axes())) > 2:
            return None
        for dim in self.dims.values():
            rest = element - atom(dim.axes[0])
            whole = dim.block % 4 == 0 and (rest % 4).value == 0
            if whole and len(dim.axes) == 1 and dim.axes[0] not in rest.axes():
                return dim
        return None

    def box(self, name: str, index: Sequence[Index]) -> Box | None:
        return box_of(self.tiling, self.layouts[name], tuple(index))

    def corner(self, box: Box) -> tuple[Value, ...]:
        """The first place along each of its dimensions of what a program has of a box."""

        def first(name: str) -> Value:
            depth = next((k for k, s in enumerate(self.scopes) if s.dim == name), 0)
            return self.let(depth, "edge", (), "i32", (), (name, False))

        return tuple(first(d) if a is None else self.axis(a) for d, a in box.places)

    def _both(self, a: Value, b: Value) -> Value:
        dims = tuple({*a.dims, *b.dims})
        return self.let(self.together(a, b), "op", dims, "bool", (a, b), "logical_and")

    def bounds(self, dims: set[str]) -> Value | None:
        """Where the places of these dimensions exist; None where all do."""
        mask: Value | None = None
        for d in self.dims.values():
            if d.name not in dims or not d.ragged or not self.tiles.whole:
                continue
            depth = next((k for k, s in enumerate(self.scopes) if s.dim == d.name), 0)
            own = self.scopes[depth].values.get(("bounds", d.name))
            if own is None:
                own = self.let(depth, "inside", (d.name,), "bool", (), d.name)
                self.scopes[depth].values["bounds", d.name] = own
            mask = own if mask is None else self._both(mask, own)
        return mask

    def masked(self, value: Value, neutral: Any, over: Sequence[Axis]) -> Value:
        """`value` with `neutral` where a place of `over` does not exist."""
        dims = {self.dim_of[a].name for a in over}
        mask = self.bounds(dims & set(value.dims))
        if mask is None:
            return value
        depth = self.together(value, mask)
        fill = self.let(depth, "literal", (), value.dtype, attr=neutral)
        both = tuple({*value.dims, *mask.dims})
        return self.let(depth, "op", both, value.dtype, (mask, value, fill), "where")

    # -- reductions --------------------------------------------------------------------------------

    def loops_of(self, s: Reduce | Store) -> list[Dim]:
        """Loops that the statement needs and that are not open, outermost first: those on which it
        lives, then those over which it reduces."""
        opened = {x.dim for x in self.scopes}
        lives = set(self.nest.lives(s))
        axes = lives | set(s.over if isinstance(s, Reduce) else ())
        found = [
            d
            for d in self.dims.values()
            if d.mode == "loop" and d.name not in opened and axes & set(d.axes)
        ]
        return sorted(found, key=lambda d: not lives & set(d.axes))

    def store(self, s: Store) -> None:
        loops = self.loops_of(s)
        if loops and id(s) not in self.stored:
            self.loop(loops[0], s)
        if id(s) not in self.stored:
            self.stored.add(id(s))
            self.write(s)

    def write(self, s: Store) -> None:
        value = self.value(s.value)
        axes = frozenset().union(*(i.axes() for i in s.index)) | s.value.axes()
        depth = max(self.depth_of(axes), self._depth(s.value))
        box = self.box(s.tensor, s.index) if self.tiling.puts else None
        if box is not None:
            self.let(depth, "put", (), "", (value, *self.corner(box)), (s.tensor, box))
            return
        address = self.index(self.layouts[s.tensor].address(s.index))
        mask = self.bounds(self.spanned(axes))
        self.scopes[depth].code.append(Write(s.tensor, address, value, mask))

    def reduce(self, s: Reduce) -> None:
        loops = self.loops_of(s)
        if loops:
            self.loop(loops[0], s)
            return
        self.scopes[-1].results[s.name] = self.whole(s, s.body)

    def whole(self, s: Reduce, body: Expr, before: Value | None = None) -> Value:
        """The reduction over all that the program has of its axes at once; added to `before`."""
        product_of = replace(s, body=body)
        c = self.nest.contraction(product_of) if s.operands else None
        if c is not None:
            dims = [self.spanned(x) for x in (c.m, c.n, c.over)]
            if all(len(x) == 1 for x in dims) and not self.spanned(c.batch):
                return self.dot(s, c.a, c.b, dims, before)
        depth = len(self.scopes) - 1
        scale, body = scaled(body) if s.kind == "max" and self.tiles.powers else (1.0, body)
        value, summed = self.value(body), self.spanned(s.over)
        if not summed <= set(value.dims) and s.kind not in ("max", "min"):
            every = tuple({*value.dims, *summed})
            value = self.let(depth, "spread", every, value.dtype, (value,))
        over = tuple(d for d in self.dims if d in summed & set(value.dims))
        value = self.masked(value, REDUCTIONS[s.kind].identity(body.dtype), s.over)
        left = tuple(d for d in value.dims if d not in over)
        if over:
            value = self.let(depth, "reduce", left, value.dtype, (value,), (s.kind, over))
        if scale != 1.0:
            factor = self.let(depth, "literal", (), value.dtype, attr=scale)
            value = self.let(depth, "op", value.dims, value.dtype, (value, factor), "mul")
        if before is None:
            return value
        step = REDUCTIONS[s.kind].scalar_op
        return self.let(depth, "op", before.dims, before.dtype, (before, value), step)

    def dot(
        self, s: Reduce, a: Expr, b: Expr, dims: Sequence[set[str]], before: Value | None
    ) -> Value:
        (m,), (n,), (k,) = dims
        order = list(self.dims)
        if order.index(n) < order.index(m):  # the result as values have its dimensions
            (m, a), (n, b) = (n, b), (m, a)
        depth = len(self.scopes) - 1
        left, right = self.factor(s, a, (m, k)), self.factor(s, b, (k, n))
        if before is None:
            before = self.let(depth, "full", (m, n), "f32", attr=0.0)
        out = self.fresh((m, n), "f32")
        self.depths[out.name] = depth
        self.scopes[depth].code.append(
            Let(out, "dot", (left, right, before), (m, k, n, s.operands))
        )
        return out

    def factor(self, s: Reduce, e: Expr, dims: tuple[str, str]) -> Value:
        """One factor of a contraction in the dtype of its operands, 0 where it does not exist."""
        narrow = E.cast(e, s.factors)
        value = self.value(narrow)
        if narrow.op != "load" or narrow.attr[0] in self.statements:
            value = self.masked(value, 0, s.over)
        if set(value.dims) != set(dims):
            depth = self.together(value)
            value = self.let(depth, "spread", dims, value.dtype, (value,))
        return value

    # -- loops -------------------------------------------------------------------------------------

    def loop(self, dim: Dim, wanted: Reduce | Store) -> None:
        """Opens a loop over a dimension for all that can run with `wanted`."""
        chain, of = passes(self.nest, dim.axes)
        number = of[wanted]
        statements = (s for s in self.nest.statements if of.get(s) == number)
        group = [s for s in statements if self.pending(s, dim)]
        reductions = [s for s in group if isinstance(s, Reduce)]
        depth = len(self.scopes) - 1
        states = {s.name: self.state(s, depth) for s in reductions}
        loop = Loop(dim.name, *self.limits(dim, group, chain))
        self.scopes.append(Scope(dim.name, loop.body))
        current = dict(states)
        for s in reductions:
            rule = chain.rules.get(s.name)
            if isinstance(rule, online.Rescaled):
                new = self.rescaled(s, rule, states, current)
            else:
                new = self.whole(s, s.body, states[s.name])
            current[s.name] = new
            loop.carried.append((states[s.name], new))
        for w in group:
            if isinstance(w, Store):
                self.store(w)
        self.scopes.pop()
        self.scopes[depth].code.append(loop)
        for s in reductions:
            self.scopes[depth].results[s.name] = states[s.name]
        for s in reductions:
            rule = chain.rules.get(s.name)
            if isinstance(rule, online.Rescaled):
                self.scopes[depth].results[s.name] = self.finished(s, rule)

    def limits(
        self, dim: Dim, group: Sequence[Reduce | Store], chain: online.Chain
    ) -> tuple[Value | None, Value | None]:
        """From where to where a loop must go: outside its reductions get nothing."""
        start: Value | None = None
        stop: Value | None = None
        for bound in cut_off(self.nest, dim.axes, group, chain)[0]:
            edge = self.edge(bound.index, bound.upper)
            if edge is None:
                continue
            if bound.upper:
                stop = edge if stop is None else self.chosen("minimum", stop, edge)
            else:
                start = edge if start is None else self.chosen("maximum", start, edge)
        return start, stop

    def chosen(self, name: str, a: Value, b: Value) -> Value:
        wide = max(a.dtype, b.dtype)  # "i64" where one is loaded
        return self.let(self.together(a, b), "op", (), wide, (a, b), name)

    def edge(self, index: Index, largest: bool) -> Value | None:
        """The largest or least value of an index over what a program has of its axes."""
        values: dict[Axis, Value] = {}
        loaded = {a for m, _ in index.terms for a in m if isinstance(a, Loaded)}
        stands = {a: Axis(f"loaded{k}", const(1)) for k, a in enumerate(sorted(loaded, key=str))}
        rest = substitute(index, {a: atom(x) for a, x in stands.items()})
        for a in sorted(rest.axes()):
            step = rest.coefficient(a)
            if (
                step is None or step.value is None or len(loaded) > 1
            ):  # their difference may be near
                return None
            last = largest is (step.value > 0)
            source = next((v for v, x in stands.items() if x is a), None)
            found = self.last(a, last) if source is None else self.farthest(source.expr, last)
            if found is None:
                return None
            values[a] = found
        dtype = "i64" if loaded else "i32"
        depth = self.together(*values.values()) if values else 0
        return self.let(depth, "index", (), dtype, tuple(values.values()), (rest, values))

    def last(self, a: Axis, largest: bool) -> Value | None:
        """An axis' largest or least value in what a program has of it; None where it has all."""
        dim = self.dim_of[a]
        if len(dim.axes) != 1 or not self.at_hand(dim):
            return None
        return self.let(self.depth_of((a,)), "edge", (), "i32", (), (dim.name, largest))

    def at_hand(self, dim: Dim) -> bool:
        return dim.mode != "loop" or any(s.dim == dim.name for s in self.scopes)

    def farthest(self, e: Expr, largest: bool) -> Value | None:
        """The largest or least of numbers in memory, as far as positions go."""
        inside = any(n.attr[0] in self.statements for n in e.loads())
        if inside or not all(self.at_hand(self.dim_of[a]) for a in e.axes()):
            return None
        for name, limit in (("maximum", -FAR), ("minimum", FAR)):
            e = E.op(name, e, E.literal(limit, "i64"))
        value, kind = self.value(e), "max" if largest else "min"
        if value.dims:
            value = self.masked(value, REDUCTIONS[kind].identity(value.dtype), sorted(e.axes()))
            how = (kind, value.dims)
            value = self.let(self.together(value), "reduce", (), value.dtype, (value,), how)
        return value

    def pending(self, s: Reduce | Store, dim: Dim) -> bool:
        if id(s) in self.stored or isinstance(s, Reduce) and self.known_at(s.name) is not None:
            return False
        loops = self.loops_of(s)
        if not loops or loops[0] is not dim:
            return False
        lives = {self.dim_of[a].name for a in self.nest.lives(s)}
        if any(x.dim not in lives for x in self.scopes[1:]):  # it belongs outside of this loop
            return False
        return isinstance(s, Store) or bool(set(s.over) & set(dim.axes))

    def state(self, s: Reduce, depth: int) -> Value:
        """The accumulator of a reduction before its loop."""
        dims = self.spanned(self.nest.lives(s))
        neutral = REDUCTIONS[s.kind].identity(s.body.dtype)
        value = self.fresh(tuple(dims), s.body.dtype, "acc")
        self.depths[value.name] = depth + 1  # it changes in the loop
        self.scopes[depth].code.append(Let(value, "full", (), neutral))
        return value

    def rescaled(
        self,
        s: Reduce,
        rule: online.Rescaled,
        before: Mapping[str, Value],
        now: Mapping[str, Value],
    ) -> Value:
        """One block of ``sum f(exp(c (b - r)))``: what was summed is moved to the new maximum."""
        old, new = self.given(before[rule.maximum]), self.given(now[rule.maximum])
        was, shift = online.local_shift(rule, old), online.local_shift(rule, new)
        weight = online.power_of(rule, E.op("sub", was, shift))
        one = E.literal(1, weight.dtype)
        low = E.literal(float("-inf"), old.dtype)
        weight = E.op("where", E.op("eq", old, low), one, self.power(weight))  # nothing was summed
        depth = len(self.scopes) - 1
        state, factor = before[s.name], self.value(weight)
        moved = self.let(depth, "op", state.dims, state.dtype, (state, factor), "mul")
        return self.whole(s, self.power(online.local_body(rule, s.body, shift)), moved)

    def power(self, root: Expr) -> Expr:
        return binary(root, self.products) if self.tiles.powers else root

    def finished(self, s: Reduce, rule: online.Rescaled) -> Value:
        """Where no element was above minus infinity, the sum is r - r."""
        top = self.given(self.scopes[-1].results[rule.maximum])
        total = self.given(self.scopes[-1].results[s.name])
        nothing = E.cast(E.op("sub", rule.shift, rule.shift), total.dtype)
        low = E.literal(float("-inf"), top.dtype)
        return self.value(E.op("where", E.op("eq", top, low), nothing, total))

    def given(self, value: Value) -> Expr:
        """An expression that stands for a value."""
        name = f".{value.name}"
        self.scopes[-1].results[name] = value
        return E.load(name, (), value.dtype)


def position(e: Expr) -> Index | None:
    """What a number is, of positions, that is known to fit into 32 bits, or into as many as a call
    takes for its sizes."""
    if e.op not in ("index", "literal") or e.dtype not in ("i32", "i64"):
        return None
    index: Index = e.attr if e.op == "index" else const(int(e.attr))
    return index if fits_int(index) or index.syms() else None


FAR = 2**31  # beyond all positions; times one of them it fits into 64 bits


__all__ = ["Tiles", "lower_nest"]
