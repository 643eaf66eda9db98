"""What the ways of writing a nest share: the environment, loop headers, bodies of passes, stores.

In: `loops.Loops` and its `passes.Plan`. Out: C++ lines in the emitter's scopes. `rows`, `columns`
and `points` decide which loops run where; this module writes what stands inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from deuteron.codegen.cpp import scalars
from deuteron.codegen.cpp.axes import flops_of
from deuteron.codegen.cpp.bf16_blocks import (
    before_rounding,
    bf16_loads,
    bf16_stores,
    blocks_as_floats,
)
from deuteron.codegen.cpp.emit import Emitter, smaller
from deuteron.codegen.cpp.index_sets import (
    MAX_CUTS,
    MAX_INDEX_SETS,
    cut_positions,
    pieces,
    repeats_code,
)
from deuteron.codegen.cpp.nontemporal import nontemporal_stores, store_address, store_buffer
from deuteron.codegen.cpp.passes import MIN_BUFFERED_FLOPS, Pass, plan
from deuteron.codegen.cpp.prefetch_streaming import nontemporal_prefetches
from deuteron.codegen.cpp.random_blocks import RANDOM_BLOCK, neighbouring_randoms, random_block
from deuteron.codegen.cpp.reductions import Accumulator, combine
from deuteron.codegen.cpp.short_loops import short_loop
from deuteron.codegen.loops import (
    CrossRowReduce,
    Loops,
    Part,
    Rewriter,
    Write,
    roots_of,
    unique_nodes,
)
from deuteron.ir.expr import ITEMSIZE, Expr
from deuteron.ir.index import Atom, Axis, Index, const, determined, hint, product, substitute
from deuteron.schedule.kernel import Reduce, Scan

ROW_SCOPE = Axis(
    "row", 1
)  # provided by the scope of one row: what depends on a reduction's result is not hoisted out of it
# Elements that a long loop of costly arithmetic takes at a time where registers are short: four
# vectors share what the loop itself costs (layer norm and GELU of f32, AVX2: 0.83 of the time with
# 32, 0.87 with 16; with AVX-512 and g++ 13 from 1.00 to 1.09).
UNROLLED_ELEMENTS = 32


@dataclass(frozen=True)
class Machine:
    """What the generator must know of the CPU. Bytes are per core."""

    threads: int
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int = 0  # of all cores; 0 where there is none


@dataclass
class Env:
    """The environment of one nest."""

    loops: Loops
    em: Emitter
    machine: Machine
    threaded: bool  # inside a parallel region
    shared: list[str] = field(
        default_factory=list
    )  # declarations that all threads of the region share
    nontemporal: frozenset[str] = frozenset()  # tensors with non-temporal stores
    nontemporal_tiles: frozenset[str] = frozenset()  # those stored so in tiles
    unrolled: bool = (
        False  # whether stores hold the reductions of the nest, which come before all stores
    )

    def extent(self, axis: Axis | Index) -> str:
        """C text of a size, which may stand in a product or a difference."""
        text = self.em.index(axis.extent if isinstance(axis, Axis) else axis, 0)
        return text if text.isidentifier() or text.isdigit() else f"({text})"

    def share(self, name: str, kind: str, count: int) -> None:
        """Declares an array that all threads see, in memory of its own that the calling thread
        keeps.
        """
        self.em.used.add("d_shared")
        memory = f"d_shared<{len(self.shared)}>({count}LL * sizeof({kind}))"
        self.shared.append(f"{kind}* const {name} = ({kind}*){memory};")

    def omp_for(self, collapse: int, nowait: bool = True) -> list[str]:
        if not self.threaded:
            return []
        both = f" collapse({collapse})" if collapse > 1 else ""
        return [f"#pragma omp for{both} schedule(static){' nowait' if nowait else ''}"]


def size(axes: Sequence[Axis]) -> int:
    return hint(product(a.extent for a in axes))


def parallel_loops(
    env: Env,
    axes: Sequence[Axis],
    extra: Sequence[tuple[str, str]],
    inner: Callable[[], None],
    interleaved: bool = False,
) -> None:
    """Nested loops over `axes` (outermost first) and `extra` (name, count), shared among threads;
    `inner` fills them.

    Only as many loops are collapsed as the threads need, so that addresses can be hoisted between
    the others. Where they are `interleaved`, those are one loop (`interleaved_loop`).
    """
    em, need = env.em, 16 * env.machine.threads
    count, have = 0, 1
    if extra:
        count = len(axes)
    else:
        while count < len(axes) and have < need:
            have *= max(1, hint(axes[count].extent))
            count += 1
    outer, rest = axes[:count], axes[count:]
    heads = [(em.name_axis(a), env.extent(a)) for a in outer] + list(extra)
    with em.inside(*outer) as scope:
        serial_loops(env, rest, inner)
    text = [f"for (long long {n} = 0; {n} < {e}; ++{n})" for n, e in heads]
    if not text:
        once = "#pragma omp single nowait"
        env.em.scope.add(*([once] if env.threaded else []))
        env.em.scope.loop("", scope.lines)
        return
    if interleaved:
        interleaved_loop(env, heads, scope.lines)
        return
    env.em.scope.add(*env.omp_for(len(text)), *text[:-1])
    env.em.scope.loop(text[-1], scope.lines)


def interleaved_loop(env: Env, heads: Sequence[tuple[str, str]], lines: Sequence[str]) -> None:
    """One loop over all of `heads` (name, count), which takes a step in each of several ranges."""
    em = env.em
    em.used |= {"d_interleaved", "d_reads_stall"}
    step, steps, at = em.fresh("t"), em.fresh("steps"), em.fresh("at")
    em.scope.add(f"const long long {steps} = {' * '.join(n for _, n in heads)};")
    position = [f"const long long {at} = d_interleaved<d_interleaved_ranges>({step}, {steps});"]
    left = at
    for name, n in reversed(heads[1:]):
        position.append(f"const long long {name} = {left} % {n};")
        left = f"{left} / {n}"
    position.append(f"const long long {heads[0][0]} = {left};")
    em.scope.add(*env.omp_for(1))
    em.scope.loop(f"for (long long {step} = 0; {step} < {steps}; ++{step})", [*position, *lines])


def serial_loops(
    env: Env, axes: Sequence[Axis], inner: Callable[[], None], pragma: Sequence[str] = ()
) -> None:
    """Nested loops over `axes` in the thread that comes by, each behind `pragma`."""
    if not axes:
        inner()
        return
    axis, em = axes[0], env.em
    name = em.name_axis(axis)
    with em.inside(axis) as scope:
        serial_loops(env, axes[1:], inner, pragma)
    em.scope.add(*pragma)
    em.scope.loop(f"for (long long {name} = 0; {name} < {env.extent(axis)}; ++{name})", scope.lines)


def write_store(env: Env, w: Write, target: str | None = None) -> None:
    """Writes one store at the current point (or to `place`)."""
    em = env.em
    value = em.value(w.value)
    mask = em.value(w.mask) if w.mask is not None else None
    if target is None:
        target = f"{em.tensors[w.tensor]}[{em.index(w.address)}]"
    if w.accumulate is not None:
        old = scalars.from_memory(target, w.dtype, em.used)
        value = combine(w.accumulate, w.dtype, old, value, em.used)
    line = f"{target} = {scalars.to_memory(value, w.dtype, em.used)};"
    if em.guard is not None:
        mask = em.guard if mask is None else f"{em.guard} & {mask}"
    em.scope.add(f"if ({mask}) {line}" if mask is not None else line)


def ordered_conflicts(loops: Loops) -> set[Axis]:
    """Axes along which two points may store to the same element: run in order, by one thread."""
    out: set[Axis] = set()
    for p in loops.parts:
        if isinstance(p, Write):
            domain = {*loops.parallel, *(loops.reduced if p.level == "point" else ())}
            if p.scattered or p.accumulate is not None:
                out |= domain - determined(p.address)
            else:  # whoever computes all elements of a tensor computes each once
                out |= {a for a in domain if a not in p.address.axes()}
    return out


@dataclass
class IndexSet:
    """The part ``low <= v < low + count`` of the vector axis, in which conditions on v may be
    constant.
    """

    axis: Axis
    low: Index
    count: Index
    parts: list[Part]
    to_buffer: list[tuple[Expr, str]]  # values to put into buffers
    buffered: dict[Expr, str]  # values to take from buffers
    linear: Index  # the element of a row buffer


class PassWriter:
    """Writes the bodies of passes; knows the vector axis, buffers, and arrays of cross-row
    reductions."""

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
        for p in loops.parts:
            if isinstance(p, Reduce):
                env.em.result_axes[p.name] = frozenset((*loops.parallel, ROW_SCOPE))
            elif isinstance(p, Scan):
                env.em.result_axes[p.name] = frozenset((*loops.parallel, *loops.reduced, ROW_SCOPE))
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
            kind = scalars.REGISTER[node.dtype] if node.dtype != "bool" else "unsigned char"
            lines.append(f"{kind}* const {name} = ({kind}*)(scratch + {env.extent(total)});")
            item = 4 if node.dtype in scalars.HALF else ITEMSIZE[node.dtype]
            total = total + (count * item + 63) // 64 * 64
        if lines:
            env.em.used.add("d_scratch")
            lines.insert(0, f"char* const scratch = d_scratch({env.extent(total)});")
        return lines

    def index_sets(self, p: Pass, k: int) -> list[IndexSet]:
        """The vector axis cut where conditions on it change."""
        index_sets = self.cut_index_sets(p, k)
        for _, moved in index_sets:
            self.env.em.carry_over(moved)
        return [index_set for index_set, _ in index_sets] or [self.whole_index_set(p, k)]

    def cut_index_sets(self, p: Pass, k: int) -> list[tuple[IndexSet, dict[Expr, Expr]]]:
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
                [r for x in index_set.parts for r in roots_of(x)] for index_set, _ in index_sets
            ]
            if len(marks) <= MAX_CUTS or not repeats_code(p.roots(), bodies):
                return index_sets
        return []

    def whole_index_set(self, p: Pass, k: int) -> IndexSet:
        """All of the vector axis."""
        inside = {n: b for n, b in self.buffers.items() if self.plan.row_buffered[n] < k}
        to_buffer = [(n, self.buffers[n]) for n in p.to_buffer]
        parts = list(p.parts)
        return IndexSet(self.v, const(0), self.v.extent, parts, to_buffer, inside, self.linear)

    def index_set_at(
        self, p: Pass, low: Index, axis: Axis, inside: Mapping[Expr, str]
    ) -> tuple[IndexSet, dict[Expr, Expr]]:
        """A pass where the vector axis is ``low + axis``, and what became of its expressions."""
        move = Rewriter({self.v: low + axis.index}, None, self.env.loops.results)
        index_set = IndexSet(
            axis,
            low,
            axis.extent,
            [move.part(x) for x in p.parts],
            [(move.expr(n), self.buffers[n]) for n in p.to_buffer],
            {move.expr(n): b for n, b in inside.items()},
            move.index(self.linear),
        )
        return index_set, move.done

    def buffered(self, index_set: IndexSet, lane_linear: str | None = None) -> dict[Expr, str]:
        """Where the values are that earlier passes left in row buffers, at this point."""
        em = self.env.em

        def cell(n: Expr) -> str:
            if lane_linear is not None:
                return lane_linear
            deps = em.deps(n)
            deps = deps | {index_set.axis} if self.v in deps else deps
            # What conditions that are constant here made independent of an axis is the same all
            # along it, and is read outside its loop.
            same: dict[Atom, Index] = {
                a: const(0) for a in index_set.linear.axes() if a not in deps
            }
            return em.index(substitute(index_set.linear, same))

        return dict(self.staged) | {n: f"{b}[{cell(n)}]" for n, b in index_set.buffered.items()}

    def body(
        self,
        index_set: IndexSet,
        accs: dict[str, Accumulator],
        lane: str,
        position: str,
        lane_linear: str | None = None,
    ) -> None:
        """Everything that one point does, into the current scope."""
        em = self.env.em
        em.buffered = self.buffered(index_set, lane_linear)
        to_buffer = list(index_set.to_buffer)  # of what differs elsewhere, two may be the same here
        only = f"if ({em.guard}) " if em.guard is not None else ""

        def fill_row_buffers(ready: Callable[[Expr], bool]) -> None:
            for pair in [x for x in to_buffer if ready(x[0])]:
                to_buffer.remove(pair)
                node, row = pair
                place = lane_linear if lane_linear is not None else em.index(index_set.linear)
                em.scope.add(f"{only}{row}[{place}] = {em.value(node)};")

        fill_row_buffers(
            lambda n: not any(x.op == "load" and x.attr[0] in self.scan_names for x in n.walk())
        )
        if self.env.unrolled:  # a store may take the memory of what a reduction reads
            for p in index_set.parts:
                if isinstance(p, Write):
                    em.value(p.value)
        for p in index_set.parts:
            if isinstance(p, Reduce):
                em.scope.add(*accs[p.name].update(lane, em.value(p.body), position, em.guard))
            elif isinstance(p, Scan):
                self._scan(p, lane)
            elif isinstance(p, CrossRowReduce):
                place = em.index(index_set.linear)
                cell = f"{self.columns[p.name]}[{place}]"
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

    def index_set_loop(
        self,
        index_set: IndexSet,
        low: str,
        high: str,
        position: str,
        simd: bool,
        accs: dict[str, Accumulator] | None = None,
        prefetch: Callable[[str, int], list[str]] | None = None,
    ) -> None:
        """One loop over an index set. `position` may be ``@``: the loop's variable.

        Non-temporal stores write whole lines, from the first one on; a loop
        before that does the ends. `prefetch` gives the prefetches that go with each line.
        """
        em = self.env.em
        random = (
            neighbouring_randoms(self.env, index_set.parts, (index_set.axis, self.v))
            if simd
            else []
        )
        if random:
            self.random_block_loop(index_set, low, high, position, random, accs)
            return
        if simd and short_loop(self, index_set, low, high, accs or {}):
            return
        nontemporal = self.nontemporal_stores(index_set.parts, index_set.axis) if simd else []
        name = em.fresh("i_")

        def loop(head: str, lane: str) -> None:
            em.name_axis(index_set.axis, f"({name} + l)" if lane else name)
            with em.inside(index_set.axis, self.v) as scope:
                at = position.replace("@", em.axis_text[index_set.axis])
                self.body(index_set, accs or {}, lane or "0", at)
            if simd:
                em.scope.add(em.simd(scope))
            em.scope.loop(head, scope.lines)

        if not nontemporal and simd and self.is_costly(index_set):
            em.used.add("d_short_vectors")
            with (
                em.inside() as block,
                blocks_as_floats(self, index_set, name, UNROLLED_ELEMENTS) as conversion,
            ):
                block.add(*conversion.before)
                loop(f"for (int l = 0; l < {UNROLLED_ELEMENTS}; ++l)", "l")
                block.add(*conversion.after)
            em.scope.add(f"long long {name} = {low};")
            count = UNROLLED_ELEMENTS
            head = f"for (; d_short_vectors && {name} + {count} <= {high}; {name} += {count})"
            em.scope.loop(head, block.lines)
            low, name = name, em.fresh("i_")
        if not nontemporal:
            loop(f"for (long long {name} = {low}; {name} < {high}; ++{name})", "")
            return
        lanes = max(64 // ITEMSIZE[w.dtype] for w in nontemporal)
        copy_out = (
            "d_nontemporal_last"
            if not self.is_single_pass and self.has_costly_pass
            else "d_nontemporal_lanes"
        )
        first, last, end, upto = (em.fresh(s) for s in ("first", "last", "end", "upto"))
        place = store_address(self.env, nontemporal[0], index_set.axis, low)
        em.scope.add(
            f"const long long {first} = d_line_start({place}, {low}, {high});",
            f"const long long {last} = {high} - ({high} - {first}) % {lanes};",
        )
        with em.inside() as ends:
            ends.add(f"const long long {upto} = {end} ? {high} : {first};")
            loop(f"for (long long {name} = {end} ? {last} : {low}; {name} < {upto}; ++{name})", "")
        em.scope.loop(f"for (int {end} = 0; {end} < 2; ++{end})", ends.lines)
        with em.inside() as block:
            buffers = {w: store_buffer(self.env, w, lanes) for w in nontemporal}
            self.store_cells |= {w: f"{text}[l]" for w, text in buffers.items()}
            if prefetch:
                block.add(*prefetch(name, lanes))
            elif self.is_single_pass and index_set.axis == self.v:
                block.add(*nontemporal_prefetches(self.env, index_set.parts, self.v, name, lanes))
            with blocks_as_floats(self, index_set, name, lanes, buffers) as conversion:
                block.add(*conversion.before)
                loop(f"for (int l = 0; l < {lanes}; ++l)", "l")
                block.add(*conversion.after)
            for w, text in buffers.items():
                del self.store_cells[w]
                place = store_address(self.env, w, index_set.axis, name)
                block.add(f"{copy_out}<{lanes}>({place}, {text});")
        em.scope.loop(
            f"for (long long {name} = {first}; {name} < {last}; {name} += {lanes})", block.lines
        )

    @property
    def is_single_pass(self) -> bool:
        """Whether the nest has one pass, and stores nothing behind it."""
        return len(self.plan.passes) == 1 and not self.plan.row_writes

    def nontemporal_stores(self, parts: Sequence[Part], axis: Axis) -> list[Write]:
        """The non-temporal stores of a vector loop; of one of several passes, some of which are
        costly, only with AVX-512 (see `nontemporal`)."""
        return nontemporal_stores(self.env, parts, axis)

    @cached_property
    def has_costly_pass(self) -> bool:
        """Whether some pass has costly arithmetic at every point."""
        reduced = frozenset(self.env.loops.reduced)
        return any(
            flops_of(n for n in unique_nodes(p.roots()) if self.env.em.deps(n) & reduced)
            > MIN_BUFFERED_FLOPS
            for p in self.plan.passes
        )

    def is_costly(self, index_set: IndexSet) -> bool:
        """Whether the arithmetic of a long loop, or how its elements become floats, is worth more
        than one vector at a time."""
        nodes = unique_nodes(r for p in index_set.parts for r in roots_of(p))
        costly = flops_of(nodes) > MIN_BUFFERED_FLOPS or bool(
            bf16_loads(index_set) or bf16_stores(index_set)
        )
        return hint(index_set.count) >= 2 * UNROLLED_ELEMENTS and costly

    def random_block_loop(
        self,
        index_set: IndexSet,
        low: str,
        high: str,
        position: str,
        random: Sequence[Expr],
        accs: dict[str, Accumulator] | None,
    ) -> None:
        """A loop by blocks that start with the drawing of their random numbers."""
        em, length = self.env.em, 4 * RANDOM_BLOCK
        start, end, name = em.fresh("b"), em.fresh("e"), em.fresh("i_")
        with em.inside() as block:
            block.add(f"const long long {end} = {smaller(f'{start} + {length}', high)};")
            names = [random_block(self.env, n, index_set.axis, start, length) for n in random]
            self.staged |= {n: f"{x}[{name} - {start}]" for n, x in zip(random, names, strict=True)}
            em.name_axis(index_set.axis, name)
            with em.inside(index_set.axis, self.v) as scope:
                self.body(index_set, accs or {}, "0", position.replace("@", name))
            block.add(em.simd(scope))
            block.loop(f"for (long long {name} = {start}; {name} < {end}; ++{name})", scope.lines)
        for n in random:
            del self.staged[n]
        em.scope.loop(
            f"for (long long {start} = {low}; {start} < {high}; {start} += {length})", block.lines
        )

    @property
    def scan_names(self) -> set[str]:
        return {p.name for p in self.env.loops.parts if isinstance(p, Scan)}

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
        em.scope.add(f"const {scalars.REGISTER[p.body.dtype]} {name} = {out};")
        em.scope.texts[Expr("load", p.body.dtype, (), (p.name, (), None))] = name


def carry_dtype(p: Scan) -> str:
    """What a scan carries: eager's cumsum and cumprod of f32 carry a double."""
    return "f64" if p.kind in ("sum", "prod") and p.body.dtype == "f32" else p.body.dtype
