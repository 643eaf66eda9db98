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
from deuteron.codegen.cpp.bf16_blocks import in_floats, loads, stores, unrounded
from deuteron.codegen.cpp.emit import Emitter, smaller
from deuteron.codegen.cpp.index_sets import MOST, MOST_PARTS, cuts, pieces, repeats
from deuteron.codegen.cpp.nontemporal import buffer, place_of, streamed
from deuteron.codegen.cpp.passes import KEEP_FLOPS, Pass, plan
from deuteron.codegen.cpp.prefetch_streaming import streamed_reads
from deuteron.codegen.cpp.random_blocks import LANES, draws, fill
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

ROW = Axis(
    "row", 1
)  # provided by the scope of one row: what depends on a reduction's result is not hoisted out of it
# Elements that a long loop of dear arithmetic takes at a time where registers are short: four
# vectors share what the loop itself costs (layer norm and GELU of f32, AVX2: 0.83 of the time with
# 32, 0.87 with 16; with AVX-512 and g++ 13 from 1.00 to 1.09).
UNROLLED = 32


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
    streams: frozenset[str] = frozenset()  # tensors that are written past the caches
    tile_streams: frozenset[str] = frozenset()  # where it is in tiles
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
    turns: bool = False,
) -> None:
    """Nested loops over `axes` (outermost first) and `extra` (name, count), shared among threads;
    `inner` fills them.

    Only as many loops are collapsed as the threads need, so that addresses can be hoisted between
    the others. Where it `turns`, those are one loop (`in_turn`).
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
    if turns:
        in_turn(env, heads, scope.lines)
        return
    env.em.scope.add(*env.omp_for(len(text)), *text[:-1])
    env.em.scope.loop(text[-1], scope.lines)


def in_turn(env: Env, heads: Sequence[tuple[str, str]], lines: Sequence[str]) -> None:
    """One loop over all of `heads` (name, count), which takes a step in each of several ranges."""
    em = env.em
    em.used |= {"d_in_turn", "d_waits"}
    turn, steps, at = em.fresh("t"), em.fresh("steps"), em.fresh("at")
    em.scope.add(f"const long long {steps} = {' * '.join(n for _, n in heads)};")
    places = [f"const long long {at} = d_in_turn<d_places>({turn}, {steps});"]
    left = at
    for name, n in reversed(heads[1:]):
        places.append(f"const long long {name} = {left} % {n};")
        left = f"{left} / {n}"
    places.append(f"const long long {heads[0][0]} = {left};")
    em.scope.add(*env.omp_for(1))
    em.scope.loop(f"for (long long {turn} = 0; {turn} < {steps}; ++{turn})", [*places, *lines])


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


def write_store(env: Env, w: Write, place: str | None = None) -> None:
    """Writes one store at the current point (or to `place`)."""
    em = env.em
    value = em.value(w.value)
    mask = em.value(w.mask) if w.mask is not None else None
    if place is None:
        place = f"{em.tensors[w.tensor]}[{em.index(w.address)}]"
    if w.accumulate is not None:
        old = scalars.from_memory(place, w.dtype, em.used)
        value = combine(w.accumulate, w.dtype, old, value, em.used)
    line = f"{place} = {scalars.to_memory(value, w.dtype, em.used)};"
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
class Segment:
    """A stretch ``low <= v < low + count`` of the vector axis, in which conditions on v may be
    constant.
    """

    axis: Axis
    low: Index
    count: Index
    parts: list[Part]
    keep: list[tuple[Expr, str]]  # values to put into buffers
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
                env.em.result_axes[p.name] = frozenset((*loops.parallel, ROW))
            elif isinstance(p, Scan):
                env.em.result_axes[p.name] = frozenset((*loops.parallel, *loops.reduced, ROW))
        self.env, self.v, self.outer = env, v, list(outer)
        self.plan = plan(loops, env.em.deps, cache, full, merging)
        self.buffers: dict[Expr, str] = {}
        self.columns: dict[str, str] = {}  # cross-row reduction -> array
        self.carries: dict[str, str] = {}  # scan -> array of carries
        self.tiled: dict[Expr, str] = {}  # load -> its element in a staged tile
        self.places: dict[
            Write, str
        ] = {}  # store -> its element in a tile that is written out later
        self.rounded: dict[Write, str] = {}  # store -> its element before a block of it is rounded
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
        for node in self.plan.kept:
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

    def segments(self, p: Pass, k: int) -> list[Segment]:
        """The vector axis cut where conditions on it change."""
        found = self.cut(p, k)
        for _, moved in found:
            self.env.em.follow(moved)
        return [seg for seg, _ in found] or [self.whole(p, k)]

    def cut(self, p: Pass, k: int) -> list[tuple[Segment, dict[Expr, Expr]]]:
        """The pieces of the vector axis, each with what becomes of expressions there; none where it
        stays whole."""
        inside = {n: b for n, b in self.buffers.items() if self.plan.kept[n] < k}
        for most in (MOST_PARTS, MOST):
            marks = cuts(p.roots(), self.v, most)
            if not marks:
                continue
            found = [self.piece(p, low, axis, inside) for low, axis in pieces(self.v, marks)]
            bodies = [[r for x in seg.parts for r in roots_of(x)] for seg, _ in found]
            if len(marks) <= MOST or not repeats(p.roots(), bodies):
                return found
        return []

    def whole(self, p: Pass, k: int) -> Segment:
        """All of the vector axis."""
        inside = {n: b for n, b in self.buffers.items() if self.plan.kept[n] < k}
        keep = [(n, self.buffers[n]) for n in p.keep]
        parts = list(p.parts)
        return Segment(self.v, const(0), self.v.extent, parts, keep, inside, self.linear)

    def piece(
        self, p: Pass, low: Index, axis: Axis, inside: Mapping[Expr, str]
    ) -> tuple[Segment, dict[Expr, Expr]]:
        """A pass where the vector axis is ``low + axis``, and what became of its expressions."""
        move = Rewriter({self.v: low + axis.index}, None, self.env.loops.results)
        segment = Segment(
            axis,
            low,
            axis.extent,
            [move.part(x) for x in p.parts],
            [(move.expr(n), self.buffers[n]) for n in p.keep],
            {move.expr(n): b for n, b in inside.items()},
            move.index(self.linear),
        )
        return segment, move.done

    def buffered(self, seg: Segment, lane_linear: str | None = None) -> dict[Expr, str]:
        """Where the values are that earlier passes kept, at this point."""
        em = self.env.em

        def place(n: Expr) -> str:
            if lane_linear is not None:
                return lane_linear
            deps = em.deps(n)
            deps = deps | {seg.axis} if self.v in deps else deps
            # What conditions that are constant here made independent of an axis is the same all
            # along it, and is read outside its loop.
            same: dict[Atom, Index] = {a: const(0) for a in seg.linear.axes() if a not in deps}
            return em.index(substitute(seg.linear, same))

        return dict(self.tiled) | {n: f"{b}[{place(n)}]" for n, b in seg.buffered.items()}

    def body(
        self,
        seg: Segment,
        accs: dict[str, Accumulator],
        lane: str,
        position: str,
        lane_linear: str | None = None,
    ) -> None:
        """Everything that one point does, into the current scope."""
        em = self.env.em
        em.buffered = self.buffered(seg, lane_linear)
        keep = list(seg.keep)  # of what differs elsewhere, two may be the same in this segment
        only = f"if ({em.guard}) " if em.guard is not None else ""

        def put_kept(ready: Callable[[Expr], bool]) -> None:
            for pair in [x for x in keep if ready(x[0])]:
                keep.remove(pair)
                node, row = pair
                place = lane_linear if lane_linear is not None else em.index(seg.linear)
                em.scope.add(f"{only}{row}[{place}] = {em.value(node)};")

        put_kept(
            lambda n: not any(x.op == "load" and x.attr[0] in self.scan_names for x in n.walk())
        )
        if self.env.unrolled:  # a store may take the memory of what a reduction reads
            for p in seg.parts:
                if isinstance(p, Write):
                    em.value(p.value)
        for p in seg.parts:
            if isinstance(p, Reduce):
                em.scope.add(*accs[p.name].update(lane, em.value(p.body), position, em.guard))
            elif isinstance(p, Scan):
                self._scan(p, lane)
            elif isinstance(p, CrossRowReduce):
                place = em.index(seg.linear)
                cell = f"{self.columns[p.name]}[{place}]"
                em.scope.add(
                    f"{only}{cell} = "
                    f"{combine(p.kind, p.body.dtype, cell, em.value(p.body), em.used)};"
                )
            elif p in self.rounded:
                em.scope.add(f"d_put({self.rounded[p]}, {em.value(unrounded(p.value))});")
            else:
                write_store(self.env, p, self.places.get(p))
        put_kept(lambda n: True)
        em.buffered = {}

    def whole_loop(
        self,
        seg: Segment,
        low: str,
        high: str,
        position: str,
        simd: bool,
        accs: dict[str, Accumulator] | None = None,
        ahead: Callable[[str, int], list[str]] | None = None,
    ) -> None:
        """One loop over a segment. `position` may be ``@``: the loop's variable.

        What it stores past the caches is written by lines, from the first whole line on; a loop
        before that does the ends. `ahead` is what goes with each line (prefetches).
        """
        em = self.env.em
        random = draws(self.env, seg.parts, (seg.axis, self.v)) if simd else []
        if random:
            self.drawn_loop(seg, low, high, position, random, accs)
            return
        if simd and short_loop(self, seg, low, high, accs or {}):
            return
        past = self.past_caches(seg.parts, seg.axis) if simd else []
        name = em.fresh("i_")

        def loop(head: str, lane: str) -> None:
            em.name_axis(seg.axis, f"({name} + l)" if lane else name)
            with em.inside(seg.axis, self.v) as scope:
                at = position.replace("@", em.axis_text[seg.axis])
                self.body(seg, accs or {}, lane or "0", at)
            if simd:
                em.scope.add(em.simd(scope))
            em.scope.loop(head, scope.lines)

        if not past and simd and self.is_dear(seg):
            em.used.add("d_narrow")
            with em.inside() as block, in_floats(self, seg, name, UNROLLED) as halves:
                block.add(*halves.before)
                loop(f"for (int l = 0; l < {UNROLLED}; ++l)", "l")
                block.add(*halves.behind)
            head = f"for (; d_narrow && {name} + {UNROLLED} <= {high}; {name} += {UNROLLED})"
            em.scope.add(f"long long {name} = {low};")
            em.scope.loop(head, block.lines)
            low, name = name, em.fresh("i_")
        if not past:
            loop(f"for (long long {name} = {low}; {name} < {high}; ++{name})", "")
            return
        lanes = max(64 // ITEMSIZE[w.dtype] for w in past)
        out = "d_stream_last" if not self.is_alone and self.has_dear else "d_stream_lanes"
        first, last, end, upto = (em.fresh(s) for s in ("first", "last", "end", "upto"))
        place = place_of(self.env, past[0], seg.axis, low)
        em.scope.add(
            f"const long long {first} = d_line_start({place}, {low}, {high});",
            f"const long long {last} = {high} - ({high} - {first}) % {lanes};",
        )
        with em.inside() as ends:
            ends.add(f"const long long {upto} = {end} ? {high} : {first};")
            loop(f"for (long long {name} = {end} ? {last} : {low}; {name} < {upto}; ++{name})", "")
        em.scope.loop(f"for (int {end} = 0; {end} < 2; ++{end})", ends.lines)
        with em.inside() as block:
            buffers = {w: buffer(self.env, w, lanes) for w in past}
            self.places |= {w: f"{text}[l]" for w, text in buffers.items()}
            if ahead:
                block.add(*ahead(name, lanes))
            elif self.is_alone and seg.axis == self.v:
                block.add(*streamed_reads(self.env, seg.parts, self.v, name, lanes))
            with in_floats(self, seg, name, lanes, buffers) as halves:
                block.add(*halves.before)
                loop(f"for (int l = 0; l < {lanes}; ++l)", "l")
                block.add(*halves.behind)
            for w, text in buffers.items():
                del self.places[w]
                place = place_of(self.env, w, seg.axis, name)
                block.add(f"{out}<{lanes}>({place}, {text});")
        em.scope.loop(
            f"for (long long {name} = {first}; {name} < {last}; {name} += {lanes})", block.lines
        )

    @property
    def is_alone(self) -> bool:
        """Whether the nest has one pass, and stores nothing behind it."""
        return len(self.plan.passes) == 1 and not self.plan.row_writes

    def past_caches(self, parts: Sequence[Part], axis: Axis) -> list[Write]:
        """The stores of a vector loop that go past the caches; of one of several passes, some of
        which are dear, only with AVX-512 (see `streams`)."""
        return streamed(self.env, parts, axis)

    @cached_property
    def has_dear(self) -> bool:
        """Whether some pass has dear arithmetic at every point."""
        reduced = frozenset(self.env.loops.reduced)
        return any(
            flops_of(n for n in unique_nodes(p.roots()) if self.env.em.deps(n) & reduced)
            > KEEP_FLOPS
            for p in self.plan.passes
        )

    def is_dear(self, seg: Segment) -> bool:
        """Whether the arithmetic of a long loop, or how its elements become floats, is worth more
        than one vector at a time."""
        nodes = unique_nodes(r for p in seg.parts for r in roots_of(p))
        dear = flops_of(nodes) > KEEP_FLOPS or bool(loads(seg) or stores(seg))
        return hint(seg.count) >= 2 * UNROLLED and dear

    def drawn_loop(
        self,
        seg: Segment,
        low: str,
        high: str,
        position: str,
        random: Sequence[Expr],
        accs: dict[str, Accumulator] | None,
    ) -> None:
        """A loop by blocks that start with the drawing of their random numbers."""
        em, length = self.env.em, 4 * LANES
        start, end, name = em.fresh("b"), em.fresh("e"), em.fresh("i_")
        with em.inside() as block:
            block.add(f"const long long {end} = {smaller(f'{start} + {length}', high)};")
            names = [fill(self.env, n, seg.axis, start, length) for n in random]
            self.tiled |= {n: f"{x}[{name} - {start}]" for n, x in zip(random, names, strict=True)}
            em.name_axis(seg.axis, name)
            with em.inside(seg.axis, self.v) as scope:
                self.body(seg, accs or {}, "0", position.replace("@", name))
            block.add(em.simd(scope))
            block.loop(f"for (long long {name} = {start}; {name} < {end}; ++{name})", scope.lines)
        for n in random:
            del self.tiled[n]
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
