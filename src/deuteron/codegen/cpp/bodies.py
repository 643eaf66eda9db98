"""What a pass of a C++ nest does at one point: values into buffers, reductions, scans, stores.

In: `loops.Loops` and its `row_passes.Plan`. Out: lines in the current scope of the emitter; `nests`
writes the loops over points around them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deuteron.codegen.cpp import scalars
from deuteron.codegen.cpp.environment import ROW_SCOPE, Env, ordered_conflicts, write_store
from deuteron.codegen.cpp.reductions import Accumulator, combine
from deuteron.codegen.cpp.row_passes import RowPass, plan
from deuteron.codegen.index_sets import (
    MAX_CUTS,
    MAX_INDEX_SETS,
    cut_positions,
    pieces,
    repeats_code,
)
from deuteron.codegen.loops import (
    CrossRowReduce,
    Rewriter,
    Statement,
    Write,
    roots_of,
)
from deuteron.ir.expr import Expr
from deuteron.ir.index import Atom, Axis, Index, const, substitute
from deuteron.ir.operations import ITEMSIZE
from deuteron.schedule.kernel import Reduce, Scan

Cells = tuple[str, str]  # elements of a row buffer: of each lane, of one of them


@dataclass
class IndexSet:
    """The part ``low <= v < low + count`` of the vector axis, in which conditions on v may be
    constant.
    """

    axis: Axis
    low: Index
    count: Index
    statements: list[Statement]
    to_buffer: list[tuple[Expr, str]]  # values to put into buffers
    buffered: dict[Expr, str]  # values to take from buffers
    linear: Index  # the element of a row buffer


class PassBody:
    """Writes what passes do at one point; knows the vector axis, its index sets, buffers, and
    the arrays of cross-row reductions.
    """

    def __init__(
        self,
        env: Env,
        v: Axis,
        outer: Sequence[Axis],
        cache: int,
        full: frozenset[Axis],
        merging: bool = False,
    ) -> None:
        loops = env.loops
        for p in loops.statements:
            if isinstance(p, Reduce):
                env.em.result_deps[p.name] = frozenset((*loops.parallel, ROW_SCOPE))
            elif isinstance(p, Scan):
                env.em.result_deps[p.name] = frozenset((*loops.parallel, *loops.reduced, ROW_SCOPE))
        self.env, self.v, self.outer = env, v, list(outer)
        self.plan = plan(loops, env.em.deps, cache, full, merging)
        self.buffers: dict[Expr, str] = {}
        self.columns: dict[str, str] = {}  # cross-row reduction -> array
        self.carries: dict[str, str] = {}  # scan -> array of carries
        self.staged: dict[Expr, str] = {}  # load -> its element in a staged tile
        self.store_cells: dict[
            Write, str
        ] = {}  # store -> its element in a tile that is written out later
        self.unrounded_cells: dict[
            Write, str
        ] = {}  # store -> its element before a block of it is rounded
        order = [*self.outer, v] if v in loops.reduced else list(self.outer)
        self.linear = const(0)
        step = const(1)
        for a in reversed(order):
            self.linear = self.linear + a.index * step
            step = step * a.extent
        self.row_size = step
        self.conflicts = ordered_conflicts(env.loops)

    def allocate(self, width: Index | None = None) -> list[str]:
        """Declares the row buffers (times `width` lanes) in thread-local scratch memory."""
        lines = []
        total = const(0)
        env = self.env
        count = self.row_size * (width if width is not None else const(1))
        for node in self.plan.row_buffered:
            name = env.em.fresh("row")
            self.buffers[node] = name
            kind = scalars.REGISTER_TYPES[node.dtype] if node.dtype != "bool" else "unsigned char"
            lines.append(f"{kind}* const {name} = ({kind}*)(scratch + {env.extent(total)});")
            item = 4 if node.dtype in scalars.HALF else ITEMSIZE[node.dtype]
            total = total + (count * item + 63) // 64 * 64
        if lines:
            env.em.used.add("d_scratch")
            lines.insert(0, f"char* const scratch = d_scratch({env.extent(total)});")
        return lines

    def index_sets(self, p: RowPass, k: int) -> list[IndexSet]:
        """The vector axis cut where conditions on it change."""
        index_sets = self.cut_index_sets(p, k)
        for _, moved in index_sets:
            self.env.em.carry_over(moved)
        return [index_set for index_set, _ in index_sets] or [self.whole_index_set(p, k)]

    def cut_index_sets(self, p: RowPass, k: int) -> list[tuple[IndexSet, dict[Expr, Expr]]]:
        """The pieces of the vector axis, each with what becomes of expressions there; none where it
        stays whole."""
        inside = {n: b for n, b in self.buffers.items() if self.plan.row_buffered[n] < k}
        for most in (MAX_INDEX_SETS, MAX_CUTS):
            marks = cut_positions(p.roots(), self.v, most)
            if not marks:
                continue
            index_sets = [
                self.index_set_at(p, low, axis, inside) for low, axis in pieces(self.v, marks)
            ]
            bodies = [
                [r for x in index_set.statements for r in roots_of(x)]
                for index_set, _ in index_sets
            ]
            if len(marks) <= MAX_CUTS or not repeats_code(p.roots(), bodies):
                return index_sets
        return []

    def whole_index_set(self, p: RowPass, k: int) -> IndexSet:
        """All of the vector axis."""
        inside = {n: b for n, b in self.buffers.items() if self.plan.row_buffered[n] < k}
        to_buffer = [(n, self.buffers[n]) for n in p.to_buffer]
        statements = list(p.statements)
        return IndexSet(self.v, const(0), self.v.extent, statements, to_buffer, inside, self.linear)

    def index_set_at(
        self, p: RowPass, low: Index, axis: Axis, inside: Mapping[Expr, str]
    ) -> tuple[IndexSet, dict[Expr, Expr]]:
        """A pass where the vector axis is ``low + axis``, and what became of its expressions."""
        move = Rewriter({self.v: low + axis.index}, None, self.env.loops.results)
        index_set = IndexSet(
            axis,
            low,
            axis.extent,
            [move.statement(x) for x in p.statements],
            [(move.expr(n), self.buffers[n]) for n in p.to_buffer],
            {move.expr(n): b for n, b in inside.items()},
            move.index(self.linear),
        )
        return index_set, move.done

    def buffered(self, index_set: IndexSet, cells: Cells | None = None) -> dict[Expr, str]:
        """Where the values are that earlier passes left in row buffers, at this point."""
        em = self.env.em

        def cell(n: Expr) -> str:
            deps = em.deps(n)
            # What conditions that are constant here made independent of an axis is the same all
            # along it, and is read outside its loop.
            if cells is not None:
                return cells[not deps & {index_set.axis, self.v}]
            deps = deps | {index_set.axis} if self.v in deps else deps
            free = index_set.linear.axes() - deps
            same: dict[Atom, Index] = dict.fromkeys(free, const(0))
            return em.index(substitute(index_set.linear, same))

        return dict(self.staged) | {n: f"{b}[{cell(n)}]" for n, b in index_set.buffered.items()}

    def body(
        self,
        index_set: IndexSet,
        accs: dict[str, Accumulator],
        lane: str,
        position: str,
        cells: Cells | None = None,
    ) -> None:
        """Everything that one point does, into the current scope. `cells`: of row buffers that have
        one for each lane."""
        em = self.env.em
        em.buffered = self.buffered(index_set, cells)
        to_buffer = list(index_set.to_buffer)  # of what differs elsewhere, two may be the same here
        only = f"if ({em.guard}) " if em.guard is not None else ""

        def fill_row_buffers(ready: Callable[[Expr], bool]) -> None:
            for pair in [x for x in to_buffer if ready(x[0])]:
                to_buffer.remove(pair)
                node, row = pair
                element = cells[0] if cells is not None else em.index(index_set.linear)
                em.scope.add(f"{only}{row}[{element}] = {em.value(node)};")

        fill_row_buffers(
            lambda n: not any(x.op == "load" and x.attr[0] in self.scan_names for x in n.walk())
        )
        if self.env.unrolled:  # a store may take the memory of what a reduction reads
            for p in index_set.statements:
                if isinstance(p, Write):
                    em.value(p.value)
        for p in index_set.statements:
            if isinstance(p, Reduce):
                em.scope.add(*accs[p.name].update(lane, em.value(p.body), position, em.guard))
            elif isinstance(p, Scan):
                self._scan(p, lane)
            elif isinstance(p, CrossRowReduce):
                cell = f"{self.columns[p.name]}[{em.index(index_set.linear)}]"
                em.scope.add(
                    f"{only}{cell} = "
                    f"{combine(p.kind, p.body.dtype, cell, em.value(p.body), em.used)};"
                )
            elif p in self.unrounded_cells:
                em.scope.add(
                    f"d_put_float({self.unrounded_cells[p]}, {em.value(before_rounding(p.value))});"
                )
            else:
                write_store(self.env, p, self.store_cells.get(p))
        fill_row_buffers(lambda n: True)
        em.buffered = {}

    @property
    def scan_names(self) -> set[str]:
        return {p.name for p in self.env.loops.statements if isinstance(p, Scan)}

    def _scan(self, p: Scan, lane: str) -> None:
        """One step of a scan: the carry of this lane takes in the value and is the scan's value
        here.
        """
        em = self.env.em
        kind = carry_dtype(p)
        value = em.value(p.body)
        wide = scalars.convert(value, p.body.dtype, kind, em.used)
        cell = f"{self.carries[p.name]}[{lane}]"
        em.scope.add(f"{cell} = {combine(p.kind, kind, cell, wide, em.used)};")
        name = em.fresh("t")
        out = scalars.convert(cell, kind, p.body.dtype, em.used)
        em.scope.add(f"const {scalars.REGISTER_TYPES[p.body.dtype]} {name} = {out};")
        em.scope.texts[Expr("load", p.body.dtype, (), (p.name, (), None))] = name


def carry_dtype(p: Scan) -> str:
    """What a scan carries: eager's cumsum and cumprod of f32 carry a double."""
    return "f64" if p.kind in ("sum", "prod") and p.body.dtype == "f32" else p.body.dtype


def before_rounding(value: Expr) -> Expr:
    """What is rounded when `value`, a bf16, is stored."""
    known = value.op == "cast" and value.args[0].dtype == "f32"
    return value.args[0] if known else value
