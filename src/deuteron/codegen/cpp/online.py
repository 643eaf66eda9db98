"""Dependent reductions over a row that no cache holds, in one pass: block by block of the row.

In: the reductions of a pass, some of which need others of it (`schedule.online`). Out: C++ lines.

    state of the row: nothing yet
    for each block (a few thousand elements, in the L1 cache):
        reductions that need nothing, over the block
        reductions that need those: with the block's own results in place of the row's
        the block's results into the state
    the row's results

The rules' identities hold for any parts; here the parts are blocks, so that the inner loops are
those of independent reductions, and one exponential per block moves a sum to another maximum.
States are doubles: what is merged is rounded once, however many blocks there are. States of parts
of a row that threads share are merged in the same way, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from deuteron.codegen.cpp import scalars
from deuteron.codegen.cpp.emit import smaller
from deuteron.codegen.cpp.environment import ROW_SCOPE, Env, size
from deuteron.codegen.cpp.reductions import Accumulator, combine
from deuteron.codegen.cpp.row_passes import RowPass
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis
from deuteron.schedule.kernel import Reduce
from deuteron.schedule.online import (
    Products,
    Rescaled,
    Rule,
    local_body,
    local_shift,
    power_of,
)

BLOCK_SCOPE = Axis("block", 1)  # provided by the scope of a block, as `ROW` is by that of a row
BLOCK_ELEMENTS = 4096  # of a block: 16 KB of f32

Walk = Callable[[RowPass, dict[str, Accumulator], tuple[Axis, str, str]], int]


@dataclass(frozen=True)
class State:
    """A C variable of the row's state: its type and what it holds before the first block."""

    name: str
    type: str
    start: str
    scalar: bool = False  # one for all lanes


class OnlineReductions:
    """The reductions of one pass over a row in blocks."""

    def __init__(self, env: Env, p: RowPass, axis: Axis, rest: tuple[Axis, ...]) -> None:
        self.env, self.p, self.axis = env, p, axis
        self.rest = rest  # loops inside the one that is cut
        self.rules: Mapping[str, Rule] = p.rules
        self.first = [f for f in p.reductions if f.name not in self.rules]
        self.second = [f for f in p.reductions if f.name in self.rules]
        self.sums: dict[
            tuple[str, str], str
        ] = {}  # (reduction, side) -> the reduction of its elements
        for f in self.second:
            rule = self.rules[f.name]
            if isinstance(rule, Products):
                for side, e in (("x", rule.x), ("y", rule.y)):
                    self.sums[f.name, side] = self._sum(f, side, e)
        em = env.em
        row = frozenset(a for a in (*env.loops.parallel, ROW_SCOPE))
        self.stems = {f.name: em.fresh("j") for f in (*self.first, *self.second)}
        for f in self.first:
            for tag in ("block", "old", "new", "row"):
                own = row if tag == "row" else row | {BLOCK_SCOPE}
                em.result_deps[f"{f.name} {tag}"] = own
        for (name, side), _ in self.sums.items():
            em.result_deps[f"{name} mean {side}"] = row | {BLOCK_SCOPE}

    def _sum(self, f: Reduce, side: str, e: Expr) -> str:
        for other in self.first:
            if other.kind == "sum" and other.body is e:
                return other.name
        own = Reduce(f"{f.name} {side}", "sum", e)
        self.first.append(own)
        return own.name

    def placeholder(self, f: Reduce, tag: str) -> Expr:
        dtype = "i64" if f.kind.startswith("arg") else f.body.dtype
        return Expr("load", dtype, (), (f"{f.name} {tag}", (), None))

    # -- the state ---------------------------------------------------------------------------------
    def states(self) -> list[State]:
        out: list[State] = []
        if self.sums:
            out.append(State(self.count, "double", "0", scalar=True))
        for f in self.first:
            a = Accumulator(
                self.stems[f.name], f.kind, f.body.dtype, self.env.em.used, self.env.em.wide
            )
            if a.flushed:
                out.append(State(a.name, "double", "0"))
            else:
                out.append(State(a.name, scalars.REGISTER_TYPES[a.dtype], a.identity))
            if a.positional:
                out.append(State(f"{a.name}_at", "long long", "0"))
        out += [State(self.stems[f.name], "double", "0") for f in self.second]
        return out

    @property
    def count(self) -> str:
        return f"{self.stems[self.second[0].name]}_n"

    # -- how it is written: one row at a time (`lanes` has several) ------------------------------
    elements = BLOCK_ELEMENTS

    def cell(self, name: str) -> str:
        """The text of a variable of the state."""
        return name

    def partial(self, name: str, number: str) -> str:
        """The same, as part `number` left it."""
        return f"{name}_p[{number}]"

    @contextmanager
    def per_row(self) -> Iterator[None]:
        """Where lines for one row stand."""
        yield

    def declare(self) -> None:
        self.env.em.scope.add(*(f"{s.type} {s.name} = {s.start};" for s in self.states()))

    # -- one block ---------------------------------------------------------------------------------
    def in_splits(self, walk: Walk, length: str, count: str, most: int) -> None:
        """The pass by all threads: each of `count` splits (at `most`) leaves its state."""
        em = self.env.em
        c, low, high = em.fresh("c"), em.fresh("lo"), em.fresh("hi")
        with em.inside() as scope:
            end = smaller(f"{low} + {length}", self.env.extent(self.axis))
            scope.add(
                f"const long long {low} = {c} * {length};", f"const long long {high} = {end};"
            )
            self.blocks(walk, low, high)
            self.share(c, most)
        em.scope.add("#pragma omp for schedule(static)")
        em.scope.loop(f"for (long long {c} = 0; {c} < {count}; ++{c})", scope.lines)
        self.gather(count)
        self.finish()

    def blocks(self, walk: Walk, low: str, high: str) -> None:
        """Declares the state and reductions ``low <= axis < high`` into it."""
        em, env = self.env.em, self.env
        self.declare()
        step = max(1, self.elements // max(1, size(self.rest)))
        b, end = em.fresh("b"), em.fresh("e")
        with em.inside(BLOCK_SCOPE) as scope:
            scope.add(f"const long long {end} = {smaller(f'{b} + {step}', high)};")
            part = (self.axis, b, end)
            points = "*".join([f"(double)({end} - {b})", *(env.extent(a) for a in self.rest)])
            results = self.reduce(RowPass(list(self.first)), walk, part)
            n = ""
            if self.sums:
                n = em.fresh("n")
                scope.add(f"const double {n} = {points};")
                self.means(results, n)
            later = [Reduce(f.name, f.kind, self.local(f)) for f in self.second]
            results |= self.reduce(RowPass([*later, *self.p.writes]), walk, part)
            self.merge(results, n)
        em.scope.loop(f"for (long long {b} = {low}; {b} < {high}; {b} += {step})", scope.lines)

    def reduce(
        self, p: RowPass, walk: Walk, part: tuple[Axis, str, str]
    ) -> dict[str, tuple[str, str | None]]:
        """The reductions over a block: their results (sums of f32 as doubles), and positions."""
        em = self.env.em
        accs = {
            f.name: Accumulator(em.fresh("f"), f.kind, f.body.dtype, em.used, em.wide)
            for f in p.reductions
        }
        lanes = walk(p, accs, part)
        out: dict[str, tuple[str, str | None]] = {}
        for f in p.reductions:
            a = accs[f.name]
            em.scope.add(*a.finish(lanes))
            if a.positional:
                out[f.name] = (f"{a.name}_b", f"{a.name}_r")
            else:
                out[f.name] = (f"{a.name}_{'d' if a.flushed else 'r'}", None)
                em.scope.texts[self.placeholder(f, "block")] = f"{a.name}_r"
        return out

    def means(self, results: Mapping[str, tuple[str, str | None]], n: str) -> None:
        em = self.env.em
        for (name, side), total in self.sums.items():
            dtype = next(f.body.dtype for f in self.second if f.name == name)
            kind, mean = scalars.REGISTER_TYPES[dtype], em.fresh("mean")
            em.scope.add(f"const {kind} {mean} = ({kind})({results[total][0]} / {n});")
            em.scope.texts[self.mean(name, side, dtype)] = mean

    def mean(self, name: str, side: str, dtype: str) -> Expr:
        return Expr("load", dtype, (), (f"{name} mean {side}", (), None))

    def local(self, f: Reduce) -> Expr:
        """The reduction's body with the block's results in place of the row's."""
        rule = self.rules[f.name]
        if isinstance(rule, Rescaled):
            top = next(g for g in self.first if g.name == rule.maximum)
            return local_body(rule, f.body, local_shift(rule, self.placeholder(top, "block")))
        sides = (("x", rule.x), ("y", rule.y))
        x, y = (E.op("sub", e, self.mean(f.name, s, f.body.dtype)) for s, e in sides)
        return E.op("mul", x, x if rule.square else y)

    # -- merging -----------------------------------------------------------------------------------
    def merge(self, results: Mapping[str, tuple[str, str | None]], n: str) -> None:
        """Takes results of a part of `n` elements into the state."""
        em = self.env.em
        with self.per_row():
            for f in self.first:
                text = f"{self.stems[f.name]}_before"
                if self._is_maximum(f):
                    kind = scalars.REGISTER_TYPES[f.body.dtype]
                    em.scope.add(f"const {kind} {text} = {self.cell(self.stems[f.name])};")
                    em.scope.texts[self.placeholder(f, "old")] = text
            for f in self.second:
                rule = self.rules[f.name]
                if isinstance(rule, Products):  # while the state's sums are those before
                    self._products(f, rule, results, n)
            for f in self.first:
                self._plain(f, *results[f.name])
                em.scope.texts[self.placeholder(f, "new")] = self.cell(self.stems[f.name])
            for f in self.second:
                rule = self.rules[f.name]
                if isinstance(rule, Rescaled):
                    self._rescaled(f, rule, results[f.name][0])
        if self.sums:
            em.scope.add(f"{self.count} += {n};")

    def _is_maximum(self, f: Reduce) -> bool:
        return any(isinstance(r, Rescaled) and r.maximum == f.name for r in self.rules.values())

    def _plain(self, f: Reduce, value: str, position: str | None) -> None:
        em, name = self.env.em, self.cell(self.stems[f.name])
        a = Accumulator(name, f.kind, f.body.dtype, em.used, em.wide)
        if position is not None:
            at = self.cell(f"{self.stems[f.name]}_at")
            em.scope.add(*a.merge_position(name, at, value, position))
        elif a.flushed:
            em.scope.add(f"{name} += {value};")
        else:
            em.scope.add(f"{name} = {combine(f.kind, f.body.dtype, name, value, em.used)};")

    def _rescaled(self, f: Reduce, rule: Rescaled, value: str) -> None:
        """Both sums at the shift of both: each times its own exponential. A sum of 0 stays 0."""
        em, name = self.env.em, self.cell(self.stems[f.name])
        top = next(g for g in self.first if g.name == rule.maximum)
        new = local_shift(rule, self.placeholder(top, "new"))
        texts = []
        for tag, total in (("old", name), ("block", value)):
            shift = local_shift(rule, self.placeholder(top, tag))
            weight = em.value(power_of(rule, E.op("sub", shift, new)))
            texts.append(f"({total} == 0 ? 0 : {total} * {weight})")
        em.scope.add(f"{name} = {' + '.join(texts)};")

    def _products(
        self, f: Reduce, rule: Products, results: Mapping[str, tuple[str, str | None]], n: str
    ) -> None:
        """Chan, Golub, LeVeque, after the block's sum is moved to its true means."""
        em, name, dtype = self.env.em, self.cell(self.stems[f.name]), f.body.dtype
        corrections, differences = [], []
        for side in ("x",) if rule.square else ("x", "y"):
            total = self.sums[f.name, side]
            mine, theirs = self.cell(self.stems[total]), results[total][0]
            center = em.scope.texts.get(self.mean(f.name, side, dtype))
            d, r = em.fresh("d"), em.fresh("d")
            em.scope.add(
                f"const double {d} = {self.count} > 0 ? {theirs} / {n} - {mine} / {self.count} : 0;"
            )
            differences.append(d)
            if center is not None:
                em.scope.add(f"const double {r} = {center} - {theirs} / {n};")
                corrections.append(r)
        square = "*".join(differences if len(differences) == 2 else differences * 2)
        moved = (
            f" - {n} * {'*'.join(corrections if len(corrections) == 2 else corrections * 2)}"
            if corrections
            else ""
        )
        both = f"{self.count} * {n} / ({self.count} + {n})"
        em.scope.add(f"{name} += {results[f.name][0]}{moved} + {square} * {both};")

    # -- parts that threads share ------------------------------------------------------------------
    def share(self, number: str, most: int) -> None:
        """Keeps the state of part `number` where all threads see it."""
        for s in self.states():
            self.env.shared.append(f"alignas(64) {s.type} {s.name}_p[{most}];")
            self.env.em.scope.add(f"{s.name}_p[{number}] = {s.name};")

    def gather(self, count: str) -> None:
        """The state of the row from those of its parts, in order."""
        em = self.env.em
        self.declare()
        c = em.fresh("c")
        with em.inside(BLOCK_SCOPE) as scope:
            results: dict[str, tuple[str, str | None]] = {}
            for f in (*self.first, *self.second):
                stem = self.stems[f.name]
                at = self.partial(f"{stem}_at", c) if f.kind.startswith("arg") else None
                results[f.name] = (self.partial(stem, c), at)
                if self._is_maximum(f):
                    scope.texts[self.placeholder(f, "block")] = self.partial(stem, c)
            n = ""
            if self.sums:
                n = em.fresh("n")
                scope.add(f"const double {n} = {self.count}_p[{c}];")
            self.merge(results, n)
        em.scope.loop(f"for (long long {c} = 0; {c} < {count}; ++{c})", scope.lines)

    # -- the row -----------------------------------------------------------------------------------
    def finish(self) -> None:
        """Binds the results of the reductions in the current scope."""
        em = self.env.em
        for f in self.p.reductions:
            if f.name not in self.rules:
                a = Accumulator(self.stems[f.name], f.kind, f.body.dtype, em.used, em.wide)
                text = self.cell(f"{a.name}_at" if a.positional else a.name)
                self.result(f, partial(str, f"({a.result_type}){text}"))
        for f in self.second:
            rule = self.rules[f.name]
            if isinstance(rule, Products):
                self.result(f, partial(self._finished_products, f, rule))
            else:
                self.result(f, partial(self._finished_rescaled, f, rule))

    def _finished_products(self, f: Reduce, rule: Products) -> str:
        texts = []
        for side, center in (("x", rule.a), ("y", rule.b)):
            mean = f"{self.cell(self.stems[self.sums[f.name, side]])} / {self.count}"
            texts.append(f"({mean} - {self.env.em.value(center)})")
        name, kind = self.cell(self.stems[f.name]), scalars.REGISTER_TYPES[f.body.dtype]
        whole = f"{name} + {self.count} * {texts[0]} * {texts[1]}"
        return f"({kind})({self.count} > 0 ? {whole} : 0)"

    def _finished_rescaled(self, f: Reduce, rule: Rescaled) -> str:
        em, name = self.env.em, self.cell(self.stems[f.name])
        top = next(g for g in self.first if g.name == rule.maximum)
        row = em.lookup(self.result_load(top))
        assert row is not None
        em.scope.texts[self.placeholder(top, "row")] = row
        local = local_shift(rule, self.placeholder(top, "row"))
        weight = em.value(power_of(rule, E.op("sub", local, rule.shift)))
        nothing = em.value(E.op("sub", rule.shift, rule.shift))
        return (
            f"({scalars.REGISTER_TYPES[f.body.dtype]})({name} == 0 ? {nothing} : {name} * {weight})"
        )

    def result_load(self, f: Reduce) -> Expr:
        dtype = "i64" if f.kind.startswith("arg") else f.body.dtype
        return Expr("load", dtype, (), (f.name, (), None))

    def result(self, f: Reduce, text: Callable[[], str]) -> None:
        """Names the reduction's result."""
        em = self.env.em
        name, dtype = em.fresh("t"), self.result_load(f).dtype
        em.scope.add(f"const {scalars.REGISTER_TYPES[dtype]} {name} = {text()};")
        em.scope.texts[self.result_load(f)] = name


__all__ = ["OnlineReductions"]
