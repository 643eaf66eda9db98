"""Dependent reductions over rows that lie side by side, in one pass: `online` with a row in every
lane.

In: the reductions of a pass and the `Lanes` that it is computed in. Out: C++ lines: the state of
the rows is an array per variable, what `online` does for a row stands in loops over the lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from deuteron.codegen.cpp import scalars
from deuteron.codegen.cpp.emit import Scope
from deuteron.codegen.cpp.environment import Env
from deuteron.codegen.cpp.online import OnlineReductions, Walk
from deuteron.codegen.cpp.reductions import Accumulator
from deuteron.codegen.cpp.row_passes import RowPass
from deuteron.ir.index import Axis
from deuteron.schedule.kernel import Reduce


class Lanes(Protocol):
    """A block of rows side by side: what `columns.Columns` is to the reductions over it."""

    v: Axis
    base: str  # C text: the first lane's row
    count: str  # C text: how many lanes are in use
    width: int

    def lane_loop(self, body: Scope, simd: bool = True) -> None: ...


class OnlineColumns(OnlineReductions):
    """The reductions of one pass over a block of columns."""

    elements = 64  # rows of a block; times the lanes they are in the L2 cache

    def __init__(
        self, env: Env, p: RowPass, axis: Axis, rest: tuple[Axis, ...], columns: Lanes
    ) -> None:
        super().__init__(env, p, axis, rest)
        self.columns = columns

    def cell(self, name: str) -> str:
        return f"{name}[l]"

    def partial(self, name: str, number: str) -> str:
        return f"{name}_p[{number} * {self.columns.width} + l]"

    @contextmanager
    def per_row(self) -> Iterator[None]:
        columns, em = self.columns, self.env.em
        em.axis_text[columns.v] = f"({columns.base} + l)"
        with em.inside(columns.v) as scope:
            yield
        columns.lane_loop(scope)

    def declare(self) -> None:
        em, width = self.env.em, self.columns.width
        for s in self.states():
            if s.scalar:
                em.scope.add(f"{s.type} {s.name} = {s.start};")
            else:
                em.scope.add(
                    f"alignas(64) {s.type} {s.name}[{width}];",
                    f"for (int l = 0; l < {width}; ++l) {s.name}[l] = {s.start};",
                )

    def reduce(
        self, p: RowPass, walk: Walk, part: tuple[Axis, str, str]
    ) -> dict[str, tuple[str, str | None]]:
        em, count = self.env.em, self.columns.count
        accs = {
            f.name: Accumulator(em.fresh("f"), f.kind, f.body.dtype, em.used, em.wide)
            for f in p.reductions
        }
        walk(p, accs, part)
        out: dict[str, tuple[str, str | None]] = {}
        for f in p.reductions:
            a = accs[f.name]
            em.scope.add(*a.flush_lanes(count), *a.settle_lanes(count))
            if a.positional:
                out[f.name] = (f"{a.name}[l]", f"{a.name}_i[l]")
            else:
                out[f.name] = (f"{a.name}{'_d' if a.flushed else ''}[l]", None)
                em.scope.texts[self.placeholder(f, "block")] = f"{a.name}[l]"
        return out

    def means(self, results: Mapping[str, tuple[str, str | None]], n: str) -> None:
        em, width = self.env.em, self.columns.width
        for (name, side), total in self.sums.items():
            dtype = next(f.body.dtype for f in self.second if f.name == name)
            kind, mean = scalars.REGISTER_TYPES[dtype], em.fresh("mean")
            em.scope.add(f"alignas(64) {kind} {mean}[{width}];")
            with self.per_row():
                em.scope.add(f"{mean}[l] = ({kind})({results[total][0]} / {n});")
            em.scope.texts[self.mean(name, side, dtype)] = f"{mean}[l]"

    def share(self, number: str, most: int) -> None:
        em, width = self.env.em, self.columns.width
        for s in self.states():
            if s.scalar:
                self.env.shared.append(f"alignas(64) {s.type} {s.name}_p[{most}];")
                em.scope.add(f"{s.name}_p[{number}] = {s.name};")
                continue
            self.env.share(f"{s.name}_p", s.type, most * width)
            with self.per_row():
                em.scope.add(f"{self.partial(s.name, number)} = {s.name}[l];")

    def result(self, f: Reduce, text: Callable[[], str]) -> None:
        em, dtype = self.env.em, self.result_load(f).dtype
        name = em.fresh("t")
        em.scope.add(f"alignas(64) {scalars.REGISTER_TYPES[dtype]} {name}[{self.columns.width}];")
        with self.per_row():
            em.scope.add(f"{name}[l] = {text()};")
        em.scope.texts[self.result_load(f)] = f"{name}[l]"


__all__ = ["OnlineColumns"]
