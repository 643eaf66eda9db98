"""Vector lanes along a parallel axis: a block of rows is reduced side by side, one lane each.

    for other parallel axes and blocks of lanes (threads):
        for each pass:                      an array of accumulators, one per lane
            values per lane that the pass needs at every point
            for reduced axes:
                for lanes: the pass's body
        row stores, for all lanes

With few blocks and long columns the outermost reduced axis is cut into splits as in `rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from deuteron.codegen.cpp import scalars
from deuteron.codegen.cpp.bodies import IndexSet, carry_dtype
from deuteron.codegen.cpp.emit import Scope, difference, smaller
from deuteron.codegen.cpp.environment import (
    ROW_SCOPE,
    Env,
    parallel_loops,
    serial_loops,
    size,
    write_store,
)
from deuteron.codegen.cpp.lanes import OnlineColumns
from deuteron.codegen.cpp.nests import PassWriter
from deuteron.codegen.cpp.nontemporal import (
    nontemporal_stores,
    store_address,
    store_buffer,
    transpose_function,
)
from deuteron.codegen.cpp.online import Walk
from deuteron.codegen.cpp.prefetch_streaming import MAX_PREFETCHES, PREFETCH_BYTES, prefetch_lines
from deuteron.codegen.cpp.reductions import FLUSH_ADDITIONS, Accumulator
from deuteron.codegen.cpp.row_nests import MAX_SPLITS, MIN_SPLIT_OPS, split_counts
from deuteron.codegen.cpp.row_passes import RowPass
from deuteron.codegen.loops import (
    Write,
    outermost_first,
    points_visited,
    roots_of,
    stride,
    unique_nodes,
)
from deuteron.ir.expr import Expr, children
from deuteron.ir.index import Axis, const, hint
from deuteron.ir.operations import ITEMSIZE, REDUCTIONS
from deuteron.schedule.kernel import Scan

VECTOR_LANES = 8  # lanes that some vector takes together
TRANSPOSED_LANES = 128  # lanes of a block with such stores: their tile is in the first cache
MIN_PREFETCH_ROWS = 8  # least rows between what a loop reads and what it fetches
TILE_ROWS = 64  # rows of a tile through which stores along the reduced axis are transposed


class Columns(PassWriter):
    """Writes the passes over one block of lanes."""

    def __init__(self, env: Env, v: Axis, cache: int, width: int, merging: bool = False) -> None:
        loops = env.loops
        outer = outermost_first(loops, loops.reduced)
        super().__init__(env, v, outer, cache, frozenset((*loops.reduced, v)), merging)
        self.width = width
        self.count = str(width)  # C text of the lanes in use
        self.base = "0"

    def lane_loop(self, body: Scope, simd: bool = True) -> None:
        if simd:
            self.env.em.scope.add(self.env.em.simd(body))
        self.env.em.scope.loop(f"for (int l = 0; l < {self.count}; ++l)", body.lines)

    def passes(self) -> None:
        for k, p in enumerate(self.plan.passes):
            accs = self.start(p, k)
            self.walk(p, k, accs, None)
            for name, a in accs.items():
                self.env.em.scope.add(*a.flush_lanes(self.count), *a.settle_lanes(self.count))
                self.bind(name, a)

    def bind(self, name: str, a: Accumulator) -> None:
        """What a later pass reads as the reduction's result in lane l."""
        text = f"(long long){a.name}_i[l]" if a.positional else f"{a.name}[l]"
        if a.dtype == "bool" and not a.positional:
            text = f"({text} != 0)"
        self.env.em.scope.texts[
            Expr("load", "i64" if a.positional else a.dtype, (), (name, (), None))
        ] = text

    def walker(self, k: int) -> Walk:
        def walk(p: RowPass, accs: dict[str, Accumulator], part: tuple[Axis, str, str]) -> int:
            self.start(p, k, accs)
            self.walk(p, k, accs, part[1:])
            return self.width

        return walk

    def start(
        self, p: RowPass, k: int, accs: dict[str, Accumulator] | None = None
    ) -> dict[str, Accumulator]:
        em = self.env.em
        if accs is None:
            accs = {
                f.name: Accumulator(
                    em.fresh("f"), f.kind, f.body.dtype, em.used, em.wide, reads_only_bytes(f.body)
                )
                for f in p.reductions
            }
        for a in accs.values():
            em.scope.add(*a.declare(str(self.width), str(self.width)))
        for s in p.scans:
            name = self.carries[s.name] = em.fresh("carry")
            kind = carry_dtype(s)
            neutral = scalars.literal(REDUCTIONS[s.kind].identity(kind), kind)
            em.scope.add(
                f"alignas(64) {scalars.REGISTER_TYPES[kind]} {name}[{self.width}];",
                f"for (int l = 0; l < {self.width}; ++l) {name}[l] = {neutral};",
            )
        self.per_lane(p, k)
        return accs

    def per_lane(self, p: RowPass, k: int) -> None:
        """Computes once per lane what the pass needs at every point and does not depend on the
        point.
        """
        em = self.env.em
        reduced = frozenset(self.env.loops.reduced)
        buffered = {n for n in self.buffers if self.plan.row_buffered[n] < k}
        per_lane: dict[Expr, None] = {}
        seen: set[Expr] = set()
        stack = [r for part in p.statements for r in roots_of(part)]
        while stack:
            n = stack.pop()
            if n in seen or n in buffered:
                continue
            seen.add(n)
            deps = em.deps(n)
            if deps & reduced:
                stack.extend(children(n))
            elif self.v in deps and n.op not in ("index", "load"):
                if em.lookup(n) is None:
                    per_lane[n] = None
        if not per_lane:
            return
        em.axis_text[self.v] = f"({self.base} + l)"
        names = []
        with em.inside(self.v) as scope:
            for n in per_lane:
                text, name = em.value(n), em.fresh("lane")
                kind = scalars.REGISTER_TYPES[n.dtype]
                scope.add(f"{name}[l] = {text};")
                names.append((n, name, kind))
        for _, name, kind in names:
            em.scope.add(f"alignas(64) {kind} {name}[{self.width}];")
        self.lane_loop(scope)
        for n, name, _ in names:
            em.scope.texts[n] = f"{name}[l]"

    def walk(
        self, p: RowPass, k: int, accs: dict[str, Accumulator], split: tuple[str, str] | None
    ) -> None:
        em = self.env.em
        flushed = [a for a in accs.values() if a.flushed]
        known = all(a.extent.value is not None for a in self.outer)
        counter = ""
        if flushed and not (known and size(self.outer) <= 2 * FLUSH_ADDITIONS):
            counter = em.fresh("n")
            em.scope.add(f"int {counter} = 0;")

        cut = self.cut_index_sets(p, k) or [(self.whole_index_set(p, k), {})]
        for _, moved in cut:
            em.carry_over(moved)

        def innermost() -> None:
            em.axis_text[self.v] = f"({self.base} + l)"
            row = f"({em.index(self.linear)})*{self.width} + " if self.buffers else ""
            position = em.axis_text[self.outer[0]] if len(self.outer) == 1 else "0"
            simd = self.v not in self.conflicts
            nontemporal = self.nontemporal_rows(p) if simd else []
            names = {
                w: store_buffer(self.env, w, self.width)
                for w in nontemporal
                if w not in self.store_cells
            }
            self.store_cells |= {w: f"{n}[l]" for w, n in names.items()}
            if nontemporal:
                em.scope.add(*self.prefetches(p, k))
            em.axis_text[self.v] = f"({self.base} + l)"
            for index_set, moved in cut:
                with self.lanes_in(p, index_set, moved, simd) as first:
                    self.body(index_set, accs, "l", position, (row + "l", row + first))
            for w, n in names.items():
                del self.store_cells[w]
                address = store_address(self.env, w, self.v, self.base)
                em.scope.add(f"d_nontemporal({address}, {n}, {self.count});")
            em.axis_text[self.v] = f"({self.base} + l)"
            if counter:
                em.scope.add(
                    f"if (++{counter} == {2 * FLUSH_ADDITIONS}) {{ {counter} = 0;",
                    *("  " + s for a in flushed for s in a.flush_lanes(self.count)),
                    "}",
                )

        # The lanes that no vector takes are stored one by one. Where all rows are written out, g++
        # 12 makes vectors of such stores and forgets which came last (random program 54008321).
        rolled = ["#pragma GCC unroll 1"] if self.width % VECTOR_LANES else []
        transposed = [] if split else self.transposed_stores(p)
        if transposed:
            serial_loops(
                self.env, self.outer[:-1], lambda: self.tiled_stores(transposed, innermost)
            )
        elif split is None:
            serial_loops(self.env, self.outer, innermost, rolled)
        else:
            axis = self.outer[0]
            name = em.name_axis(axis)
            with em.inside(axis) as scope:
                serial_loops(self.env, self.outer[1:], innermost, rolled)
            em.scope.loop(
                f"for (long long {name} = {split[0]}; {name} < {split[1]}; ++{name})", scope.lines
            )

    @contextmanager
    def lanes_in(
        self, p: RowPass, index_set: IndexSet, moved: Mapping[Expr, Expr], simd: bool
    ) -> Iterator[str]:
        """The loop over the lanes of an index set; its first lane, or another where it has none.
        What is known of expressions and stores on all lanes is known of what they become there."""
        em = self.env.em
        start, end = "0", self.count
        if index_set.axis != self.v:
            ends = index_set.low, index_set.low + index_set.count
            low, high = map(self.env.extent, ends)
            em.axis_text[index_set.axis] = f"({self.base} + l - {low})"
            start, end = difference(low, self.base), smaller(difference(high, self.base), end)
        stores = {
            b: self.store_cells[a]
            for a, b in zip(p.statements, index_set.statements, strict=True)
            if isinstance(a, Write) and isinstance(b, Write) and a in self.store_cells and b != a
        }
        self.store_cells |= stores
        lanes = frozenset((index_set.axis, self.v))
        with em.inside(*lanes) as scope:
            for old, new in moved.items():
                text = em.lookup(old) if old is not new else None
                # In a single lane the same for all; who needs it stands before the loop.
                if text is not None and em.deps(new) & lanes:
                    scope.texts[new] = text
            yield smaller(start, str(self.width - 1))
        for store in stores:
            del self.store_cells[store]
        if simd:
            em.scope.add(em.simd(scope))
        em.scope.loop(f"for (int l = {start}; l < {end}; ++l)", scope.lines)

    def nontemporal_rows(self, p: RowPass) -> list[Write]:
        """Rows that are stored non-temporally: long ones, and those of whole lines that follow
        each other (batch norm, relu and sum of 12 MiB, channels last, two cores of a Xeon: 0.74 of
        the time with what it fetches, its gradients 0.67)."""
        long = nontemporal_stores(self.env, p.statements, self.v, tiles=True)
        return long + [
            w
            for w in p.statements
            if isinstance(w, Write)
            and w not in long
            and w.tensor in self.env.nontemporal
            and w.accumulate is None
            and w.mask is None
            and stride(w.address, self.v) == 1
            and stride(w.address, self.outer[-1]) == hint(self.v.extent) == self.width
            and self.width * ITEMSIZE[w.dtype] % 64 == 0
        ]

    def prefetches(self, p: RowPass, k: int) -> list[str]:
        """With AVX-512, in a pass with non-temporal stores, prefetches of later rows: two pages on,
        or a few rows where they are long. Where nothing is stored they cost more than they gain
        (sums of columns
        1.10 of the time)."""
        env, axis = self.env, self.outer[-1]
        axes, most = (*env.loops.parallel, *self.outer), env.machine.l2_bytes
        seen = {n for q in self.plan.passes[:k] for n in unique_nodes(q.roots())}
        lines: list[str] = []
        for n in unique_nodes(p.roots()):
            if n.op != "load" or not n.attr[1] or n.args or len(lines) >= MAX_PREFETCHES:
                continue
            address, item = n.attr[1][0], ITEMSIZE[n.dtype]
            step = stride(address, axis)
            block = item * self.width * points_visited(address, self.outer)
            if not step or step < 0 or item * points_visited(address, axes) <= most:
                continue
            if n not in seen or block > most:
                distance = step * max(MIN_PREFETCH_ROWS, PREFETCH_BYTES // (item * step))
                lines += prefetch_lines(
                    env, self.v, n.attr[0], address, item, self.base, self.width, distance
                )
        env.em.used |= {"d_short_vectors"} if lines else set()
        return [f"if (!d_short_vectors) {line}" for line in lines]

    def transposed_stores(self, p: RowPass) -> list[Write]:
        """Stores that are contiguous along the innermost reduced axis and far apart along the
        lanes.
        """
        return [
            w
            for w in p.statements
            if isinstance(w, Write)
            and w.accumulate is None
            and w.mask is None
            and abs(stride(w.address, self.v) or 0) > 4
            and stride(w.address, self.outer[-1]) == 1
        ]

    def tiled_stores(self, transposed: Sequence[Write], innermost: Callable[[], None]) -> None:
        """The innermost reduced axis in blocks; a block's stores go to tiles that are then
        transposed into place.
        """
        env, em, u = self.env, self.env.em, self.outer[-1]
        block, count, row = em.fresh("b"), em.fresh("m"), em.fresh("u")
        n = env.extent(u)
        em.used.add("d_transpose")
        with em.inside() as outer:
            outer.add(f"const int {count} = (int){smaller(f'{n} - {block}', str(TILE_ROWS))};")
            for w in transposed:
                tile = em.fresh("tile")
                outer.add(
                    f"alignas(64) {scalars.MEMORY_TYPES[w.dtype]} {tile}[{TILE_ROWS * self.width}];"
                )
                self.store_cells[w] = f"{tile}[{row} * {self.width} + l]"
            em.name_axis(u, f"({block} + {row})")
            with em.inside(u) as scope:
                innermost()
            outer.loop(f"for (int {row} = 0; {row} < {count}; ++{row})", scope.lines)
            em.name_axis(u, block)
            em.name_axis(self.v, self.base)
            for w in transposed:
                step = w.address.coefficient(self.v)
                assert step is not None
                with em.inside(u, self.v) as corner:
                    address, step_text = em.index(w.address), em.index(step)
                tile = self.store_cells.pop(w).split("[")[0]
                outer.add(
                    *corner.lines,
                    f"{transpose_function(env, w)}({tile}, {self.width}, "
                    f"{em.tensors[w.tensor]} + {address}, {step_text}, {count}, {self.count});",
                )
        em.scope.loop(
            f"for (long long {block} = 0; {block} < {n}; {block} += {TILE_ROWS})", outer.lines
        )

    def row_writes(self) -> None:
        em = self.env.em
        if not self.plan.row_writes:
            return
        em.axis_text[self.v] = f"({self.base} + l)"
        with em.inside(self.v) as scope:
            for w in self.plan.row_writes:
                write_store(self.env, w)
        self.lane_loop(scope, self.v not in self.conflicts)


def reads_only_bytes(body: Expr) -> bool:
    """Whether all that an expression reads are bytes."""
    return all(ITEMSIZE[n.dtype] == 1 for n in body.loads())


def block_lanes(env: Env, v: Axis, passes: int) -> int:
    """Lanes of a block: wide for one pass (long contiguous reads), narrow enough for several that
    the block stays in L2.
    """
    loops = env.loops
    n = hint(v.extent) if v.extent.value is not None else 1 << 30
    if passes <= 1:
        return max(1, min(512, n))
    bytes_per_lane = sum(a.itemsize for a in loops.accesses) * size(loops.reduced)
    fit = max(1, env.machine.l2_bytes // 2 // max(1, bytes_per_lane))
    width = 64
    while width * 2 <= min(fit, 512):
        width *= 2
    return max(1, min(width, n))


def write_columns(env: Env, v: Axis) -> None:
    """Writes the nest with lanes along the parallel axis `v`."""
    em, loops = env.em, env.loops
    probe = Columns(env, v, 0, 1)
    width = block_lanes(env, v, len(probe.plan.passes))
    if any(probe.transposed_stores(p) for p in probe.plan.passes):
        width = min(width, TRANSPOSED_LANES)
    others = outermost_first(loops, [a for a in loops.parallel if a != v])
    free = [a for a in others if a not in probe.conflicts]
    meet = [a for a in others if a in probe.conflicts]
    has_scan = any(isinstance(p, Scan) for p in loops.statements)
    blocks = -(-hint(v.extent) // width)
    sharable = not has_scan and probe.conflicts.isdisjoint(loops.reduced)
    need = 2 * env.machine.threads
    if env.threaded and size(free) * blocks < need and not meet:
        n = hint(v.extent)
        if sharable and size(loops.reduced) * n >= 8 * MIN_SPLIT_OPS and size(loops.reduced) >= 64:
            write_shared_columns(env, v, others, len(probe.plan.passes))
            return
        least = 64 if v.extent.value is not None else 256
        while width > least and size(free) * -(-n // width) < need:
            width = max(least, width // 2)
    row_bytes = env.machine.l2_bytes // 2 // width
    cols = Columns(env, v, row_bytes, width)
    em.scope.add(*cols.allocate(const(width)))
    parallel = v not in cols.conflicts
    count, block = em.fresh("blocks"), em.fresh("b")
    em.scope.add(f"const long long {count} = ({env.extent(v)} + {width - 1}) / {width};")

    def inner() -> None:
        declare_block(env, cols, v, block)
        with em.inside(ROW_SCOPE) as scope:
            cols.passes()
            cols.row_writes()
        em.scope.add(*scope.lines)

    if parallel:
        parallel_loops(env, free, [(block, count)], lambda: serial_loops(env, meet, inner))
        return

    def serial_blocks() -> None:
        with em.inside() as scope:
            inner()
        em.scope.loop(f"for (long long {block} = 0; {block} < {count}; ++{block})", scope.lines)

    parallel_loops(env, free, [], lambda: serial_loops(env, meet, serial_blocks))


def declare_block(env: Env, cols: Columns, v: Axis, block: str) -> None:
    """Declares the first lane of a block and the number of its lanes."""
    em, width = env.em, cols.width
    n = env.extent(v)
    exact = v.extent.value is not None and v.extent.value % width == 0
    if exact and v.extent.value == width:
        cols.base = "0"
    else:
        cols.base = em.fresh("v")
        em.scope.add(f"const long long {cols.base} = {block} * {width};")
    cols.count = str(width)
    if not exact:
        cols.count = em.fresh("m")
        em.scope.add(f"const int {cols.count} = (int){smaller(f'{n} - {cols.base}', str(width))};")


def write_shared_columns(env: Env, v: Axis, others: Sequence[Axis], passes: int) -> None:
    """All threads work on each block of columns: splits of rows leave partial results that are
    combined in order.
    """
    em, loops = env.em, env.loops
    width = min(1024, hint(v.extent)) if v.extent.value is not None else 512
    read = size((v, *loops.reduced)) * sum(a.itemsize for a in loops.accesses if not a.store)
    cols = Columns(env, v, 0, width, read > env.machine.threads * env.machine.l2_bytes // 2)
    axis = cols.outer[0]
    per_step = size([a for a in loops.reduced if a != axis]) * width
    length, count = split_counts(env, axis, per_step, 1)
    block, blocks = em.fresh("b"), em.fresh("blocks")
    em.scope.add(f"const long long {blocks} = ({env.extent(v)} + {width - 1}) / {width};")

    def inner() -> None:
        with em.inside(ROW_SCOPE) as scope:
            declare_block(env, cols, v, block)
            for k, p in enumerate(cols.plan.passes):
                _shared_pass(env, cols, k, p, length, count)
            if cols.plan.row_writes:
                _store_once(env, cols)
            else:
                em.scope.add("#pragma omp barrier")
        em.scope.loop(f"for (long long {block} = 0; {block} < {blocks}; ++{block})", scope.lines)

    serial_loops(env, others, inner)


def _shared_pass(env: Env, cols: Columns, k: int, p: RowPass, length: str, count: str) -> None:
    em, axis, width = env.em, cols.outer[0], cols.width
    if p.rules:
        online = OnlineColumns(env, p, cols.outer[0], tuple(cols.outer[1:]), cols)
        online.in_splits(cols.walker(k), length, count, MAX_SPLITS)
        return
    cols.per_lane(p, k)
    c = em.fresh("c")
    n = env.extent(axis)
    shared: list[tuple[str, Accumulator]] = []
    with em.inside() as scope:
        low, high = em.fresh("lo"), em.fresh("hi")
        scope.add(
            f"const long long {low} = {c} * {length};",
            f"const long long {high} = {smaller(f'{low} + {length}', n)};",
        )
        accs = cols.start(RowPass(list(p.reductions)), k) if p.reductions else {}
        cols.walk(p, k, accs, (low, high))
        for name, a in accs.items():
            shared.append((name, a))
            kind = "double" if a.flushed else a.type
            env.share(f"{a.name}_p", kind, MAX_SPLITS * width)
            extra = ""
            if a.positional:
                env.share(f"{a.name}_pi", "long long", MAX_SPLITS * width)
                extra = f" {a.name}_pi[{c} * {width} + l] = {a.name}_i[l];"
            scope.add(*a.flush_lanes(cols.count))
            value = f"{a.name}_d[l]" if a.flushed else f"{a.name}[l]"
            with em.inside() as out:
                out.add(f"{a.name}_p[{c} * {width} + l] = {value};{extra}")
            cols.lane_loop(out)
    em.scope.add("#pragma omp for schedule(static)")
    em.scope.loop(f"for (long long {c} = 0; {c} < {count}; ++{c})", scope.lines)
    for name, a in shared:
        em.scope.add(*a.gather_lanes(str(width), count, cols.count))
        cols.bind(name, a)


def _store_once(env: Env, cols: Columns) -> None:
    em = env.em
    em.scope.add("#pragma omp barrier", "#pragma omp single")
    with em.inside() as scope:
        cols.row_writes()
    em.scope.loop("", scope.lines)
