"""Vector lanes along a reduced axis: each row of the parallel axes is walked once per pass.

    for rows (threads):            row-level values
        for each pass:             accumulators of its reductions, one per lane
            for outer reduced axes:
                for the vector axis in steps of the lanes:  the pass's body on all lanes
            lanes combined: row-level results for the next pass
        row stores

With few rows and long ones, threads share each row instead: the outermost reduced axis is cut
into a number of chunks that depends on sizes alone, each chunk leaves partial results, and every
thread combines them in order (results repeat).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deuteron.codegen.cpp import scalars
from deuteron.codegen.cpp.axes import flops_of
from deuteron.codegen.cpp.bf16_blocks import blocks_as_floats
from deuteron.codegen.cpp.bodies import IndexSet, carry_dtype
from deuteron.codegen.cpp.emit import Emitter, Scope, difference, smaller
from deuteron.codegen.cpp.environment import (
    ROW_SCOPE,
    Env,
    parallel_loops,
    serial_loops,
    size,
    write_store,
)
from deuteron.codegen.cpp.online import OnlineReductions, Walk
from deuteron.codegen.cpp.passes import MIN_BUFFERED_FLOPS, Pass
from deuteron.codegen.cpp.prefetch import NEXT_ROW_BYTES, PrefetchingWriter
from deuteron.codegen.cpp.random_blocks import RANDOM_BLOCK, neighbouring_randoms, random_block
from deuteron.codegen.cpp.reductions import FLUSH_ADDITIONS, Accumulator
from deuteron.codegen.loops import (
    SPLIT,
    CrossRowReduce,
    Loops,
    Statement,
    outermost_first,
    unique_nodes,
)
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, hint
from deuteron.ir.operations import ITEMSIZE, REDUCTIONS
from deuteron.schedule.kernel import Scan

MAX_CHUNKS = 64  # most chunks of a shared row
MASKED_ROW = 512  # elements of a row below which the last lanes are worth masks instead of a loop
SCAN_LANES = 16  # elements that `d_scan` takes
MIN_CHUNK_OPS = 16384  # least element operations of a chunk (about 2 us)


def pass_lanes(p: Pass, row: int) -> int:
    """Lanes of a pass: 64 (four registers of f32) hide the latency of a cheap body; costly or short
    ones take 16, but a register of the smallest elements in memory: with fewer lanes than that the
    compiler takes smaller registers for all (exp of bf16: 256 bits with 16 lanes, 512 with 32).
    """
    nodes = unique_nodes(p.roots())
    cost = flops_of(nodes)
    narrow = any(r.dtype in ("f64", "i64") for r in p.roots())
    if cost > MIN_BUFFERED_FLOPS or row < 256:
        small = min((ITEMSIZE[n.dtype] for n in nodes if n.op == "load" and n.attr[1]), default=4)
        small = min([small, *(ITEMSIZE[w.dtype] for w in p.writes)])
        most = 16
        while most < min(64 // small, row):
            most *= 2
        random = any(n.op == "random" for n in nodes)
        return max(most, RANDOM_BLOCK) if random and row >= RANDOM_BLOCK else most
    return 32 if narrow or any(f.kind.startswith("arg") for f in p.reductions) else 64


class Rows(PrefetchingWriter):
    """Writes the passes over one row (or one chunk of it)."""

    def __init__(self, env: Env, v: Axis, cache: int, merging: bool = False) -> None:
        loops = env.loops
        outer = outermost_first(loops, [a for a in loops.reduced if a != v])
        super().__init__(env, v, outer, cache, frozenset(loops.reduced), merging)

    def row(self) -> None:
        """All of one row, in a scope of its own: reductions' results are known there, not
        outside."""
        with self.env.em.inside(ROW_SCOPE) as scope:
            self.passes()
            for w in self.plan.row_writes:
                write_store(self.env, w)
        self.env.em.scope.add(*scope.lines)

    def passes(self) -> None:
        for k, p in enumerate(self.plan.passes):
            if p.rules:
                online = self.online(p)
                online.blocks(self.walker(k), "0", self.env.extent(online.axis))
                online.finish()
                continue
            em = self.env.em
            accs = {
                f.name: Accumulator(em.fresh("f"), f.kind, f.body.dtype, em.used, em.wide)
                for f in p.reductions
            }
            lanes = self.start(p, accs)
            self.walk(p, k, accs, lanes, None)
            for f in p.reductions:
                self.env.em.scope.add(*accs[f.name].finish(lanes))
                self.bind(f.name, accs[f.name])

    def online(self, p: Pass) -> OnlineReductions:
        """The reductions of a pass in which some need others."""
        axis = self.outer[0] if self.outer else self.v
        return OnlineReductions(
            self.env, p, axis, tuple(a for a in (*self.outer, self.v) if a != axis)
        )

    def walker(self, k: int) -> Walk:
        def walk(p: Pass, accs: dict[str, Accumulator], part: tuple[Axis, str, str]) -> int:
            lanes = self.start(p, accs)
            self.walk(p, k, accs, lanes, part)
            return lanes

        return walk

    def bind(self, name: str, acc: Accumulator) -> None:
        self.env.em.scope.texts[
            Expr("load", acc.dtype if not acc.positional else "i64", (), (name, (), None))
        ] = f"{acc.name}_r"

    def start(self, p: Pass, accs: dict[str, Accumulator]) -> int:
        """Declares accumulators; returns the number of lanes (1 where the pass is serial)."""
        env = self.env
        serial = bool(p.scans)
        lanes = 1 if serial else pass_lanes(p, hint(self.v.extent))
        for a in accs.values():
            env.em.scope.add(*a.declare(str(lanes)))
        for s in p.scans:
            name = self.carries[s.name] = env.em.fresh("carry")
            kind = carry_dtype(s)
            neutral = scalars.literal(REDUCTIONS[s.kind].identity(kind), kind)
            env.em.scope.add(f"{scalars.REGISTER_TYPES[kind]} {name}[1] = {{{neutral}}};")
        return lanes

    def walk(
        self,
        p: Pass,
        k: int,
        accs: dict[str, Accumulator],
        lanes: int,
        chunk: tuple[Axis, str, str] | None,
    ) -> None:
        """The loops of a pass over the row; `chunk` = (axis, low, high) restricts the outermost
        one.
        """
        env = self.env
        flushed = [a for a in accs.values() if a.flushed]
        per_v = max(1, hint(self.v.extent) // lanes)
        inner = size(self.outer) * per_v
        known = all(a.extent.value is not None for a in (*self.outer, self.v))
        counter = ""
        # A row whose length is only known later may be long, whatever its hint is.
        blocks = bool(flushed) and (per_v > FLUSH_ADDITIONS or self.v.extent.value is None)
        if (
            flushed
            and self.outer
            and per_v <= FLUSH_ADDITIONS
            and not (known and inner <= 2 * FLUSH_ADDITIONS)
        ):
            counter = env.em.fresh("n")
            env.em.scope.add(f"long long {counter} = 0;")

        def innermost() -> None:
            for index_set in self.index_sets(p, k):
                mine = chunk if chunk and chunk[0] == self.v else None
                self.vector_loop(k, p, index_set, accs, lanes, blocks, counter, mine)
            if counter and not blocks:
                env.em.scope.add(
                    f"if (++{counter} == {max(1, FLUSH_ADDITIONS // per_v)}) {{ {counter} = 0;"
                )
                for a in flushed:
                    env.em.scope.add(*("  " + s for s in a.flush(lanes)))
                env.em.scope.add("}")

        if chunk and chunk[0] != self.v:
            axis, low, high = chunk
            name = env.em.name_axis(axis)
            with env.em.inside(axis) as scope:
                serial_loops(env, self.outer[1:], innermost)
            env.em.scope.loop(
                f"for (long long {name} = {low}; {name} < {high}; ++{name})", scope.lines
            )
        else:
            serial_loops(env, self.outer, innermost)

    def vector_loop(
        self,
        k: int,
        p: Pass,
        index_set: IndexSet,
        accs: dict[str, Accumulator],
        lanes: int,
        blocks: bool,
        counter: str,
        chunk: tuple[Axis, str, str] | None,
    ) -> None:
        """The loop over an index set. With `blocks`, sums go to the doubles after blocks of it;
        with a `counter` besides, after as many elements of this and other rows."""
        env, em = self.env, self.env.em
        low, high = "0", env.extent(index_set.count)
        if chunk:
            low, high = chunk[1], chunk[2]
            if index_set.axis != self.v:
                start, low, high = env.extent(index_set.low), em.fresh("lo"), em.fresh("hi")
                em.scope.add(
                    f"const long long {low} = {difference(chunk[1], start)};",
                    f"const long long {high} = "
                    f"{smaller(f'{chunk[2]} - {start}', env.extent(index_set.count))};",
                )
        if self.scans_blocks(p):
            low = self.scan_blocks(p, index_set, accs, low, high)
        base = em.name_axis(index_set.axis)
        serial = bool(p.scans) or self.v in self.conflicts
        prefetches = [] if serial or index_set.axis != self.v else self.prefetches(k, base, lanes)
        block, end = (em.fresh("b"), em.fresh("e")) if blocks else (low, high)

        def in_blocks(inner: Sequence[str]) -> None:
            length = FLUSH_ADDITIONS * (1 if serial else lanes)
            flush = [s for a in accs.values() for s in a.flush(lanes)]
            if counter:
                full = f"if (({counter} += {end} - {block}) >= {length}) {{ {counter} = 0;"
                flush = [full, *("  " + s for s in flush), "}"]
            limit = f"const long long {end} = {smaller(f'{block} + {length}', high)};"
            head = f"for (long long {block} = {low}; {block} < {high}; {block} += {length})"
            em.scope.loop(head, [limit, *inner, *flush])

        nontemporal = (
            [] if serial or accs else self.nontemporal_stores(index_set.statements, index_set.axis)
        )
        if (
            serial
            or nontemporal
            or (not accs and not prefetches and hint(self.v.extent) > MASKED_ROW)
        ):
            at = self.position(index_set, "@")
            if not blocks:
                prefetch = (lambda i, n: self.prefetches(k, i, n)) if prefetches else None
                self.index_set_loop(index_set, low, high, at, not serial, accs, prefetch)
                return
            with em.inside() as whole:
                self.index_set_loop(index_set, block, end, at, not serial, accs)
            in_blocks(whole.lines)
            return
        random = (
            neighbouring_randoms(env, index_set.statements, (index_set.axis, self.v))
            if lanes % RANDOM_BLOCK == 0
            else []
        )
        with em.inside() as random_lines:
            for n in random:
                self.staged[n] = f"{random_block(env, n, index_set.axis, base, lanes)}[l]"
        with blocks_as_floats(self, index_set, base, lanes) as conversion:
            em.name_axis(index_set.axis, f"({base} + l)")
            with em.inside(index_set.axis, self.v) as scope:
                self.body(index_set, accs, "l", self.position(index_set))
        rest: Scope | None = None
        if index_set.count.value is None or chunk or index_set.count.value % lanes:
            em.guard, em.guard_level = f"(l < r_{base})", len(em.chain)
            with em.inside(index_set.axis, self.v) as tail:
                self.body(index_set, accs, "l", self.position(index_set))
            em.guard = None
            rest = tail
        for n in random:
            del self.staged[n]
        prefetches += conversion.before
        lines = lane_loops(
            em,
            base,
            block,
            end,
            lanes,
            scope,
            rest,
            prefetches,
            random_lines.lines,
            conversion.after,
        )
        if blocks:
            in_blocks(lines)
        else:
            em.scope.add(*lines)

    def scans_blocks(self, p: Pass) -> bool:
        """Whether the scans of a pass run by blocks of lanes: sums and products in double, whose
        operations may have another order (one after the other, each waits for the last)."""
        plain = all(s.kind in ("sum", "prod") and carry_dtype(s) == "f64" for s in p.scans)
        return bool(p.scans) and plain and not p.reductions and self.v not in self.conflicts

    def scan_blocks(
        self, p: Pass, index_set: IndexSet, accs: dict[str, Accumulator], low: str, high: str
    ) -> str:
        """Scans of whole blocks; returns where the rest begins."""
        em, lanes = self.env.em, SCAN_LANES
        base = em.fresh("i_")
        em.name_axis(index_set.axis, f"({base} + l)")
        em.used |= {"d_lanes", "d_scan"}
        with em.inside() as block:
            for s in (x for x in index_set.statements if isinstance(x, Scan)):
                array = em.fresh("scan")
                block.add(f"alignas(64) double {array}[{lanes}];")
                with em.inside(index_set.axis, self.v) as scope:
                    em.buffered = self.buffered(index_set)
                    scope.add(f"{array}[l] = {em.value(s.body)};")
                    em.buffered = {}
                block.add(em.simd(scope))
                block.loop(f"for (int l = 0; l < {lanes}; ++l)", scope.lines)
                block.add(f"d_scan_{s.kind}({array}, {self.carries[s.name]});")
                bound = Expr("load", s.body.dtype, (), (s.name, (), None))
                block.texts[bound] = f"(({scalars.REGISTER_TYPES[s.body.dtype]}){array}[l])"
            rest: list[Statement] = [x for x in index_set.statements if not isinstance(x, Scan)]
            with em.inside(index_set.axis, self.v) as scope:
                self.body(replace(index_set, statements=rest), accs, "l", self.position(index_set))
            block.add(em.simd(scope))
            block.loop(f"for (int l = 0; l < {lanes}; ++l)", scope.lines)
        em.scope.add(f"long long {base} = {low};")
        em.scope.loop(
            f"for (; {base} + {lanes} <= {high}; {base} += {lanes})",
            block.lines,
        )
        return base

    def position(self, index_set: IndexSet, text: str | None = None) -> str:
        """The place along the reduced axis, for argmax (then there is one reduced axis)."""
        text = text or self.env.em.axis_text[index_set.axis]
        return text if index_set.low.value == 0 else f"{self.env.extent(index_set.low)} + {text}"


def lane_loops(
    em: Emitter,
    base: str,
    low: str,
    high: str,
    lanes: int,
    body: Scope,
    rest: Scope | None,
    prefetches: Sequence[str] = (),
    random_lines: Sequence[str] = (),
    after: Sequence[str] = (),
) -> list[str]:
    """``for base in low..high step lanes: for l in lanes: body``; `rest` is the body for the last
    lanes, guarded; `prefetches` go with each step, `random_lines` is what each needs first, of
    the last lanes too, `after` ends a step.
    """
    out = [
        f"long long {base} = {low};",
        f"for (; {base} + {lanes} <= {high}; {base} += {lanes}) {{",
        *prefetches,
        *random_lines,
        em.simd(body),
        f"for (int l = 0; l < {lanes}; ++l) {{",
        *body.lines,
        *(["}", *after, "}"] if after else ["} }"]),
    ]
    if rest is not None:
        count = "r_" + base
        out += [
            f"const int {count} = (int)({high} - {base});",
            f"if ({count} > 0) {{",
            *random_lines,
            em.simd(rest),
            f"for (int l = 0; l < {lanes}; ++l) {{",
            *rest.lines,
            "} }",
        ]
    return ["{", *("  " + s for s in out), "}"]


def write_rows(env: Env, v: Axis) -> None:
    """Writes the nest with lanes along the reduced axis `v`."""
    loops = env.loops
    cache = env.machine.l2_bytes // 2
    rows = Rows(env, v, cache, row_bytes(loops) > cache)
    parallel = outermost_first(loops, loops.parallel)
    work = size(loops.reduced)
    conflict = [a for a in parallel if a in rows.conflicts]
    free = [a for a in parallel if a not in rows.conflicts]
    has_scan = any(q.scans for q in rows.plan.passes)
    shared_row = rows.conflicts.isdisjoint(loops.reduced) and not has_scan
    if (
        env.threaded
        and size(free) < 2 * env.machine.threads
        and work >= 4 * MIN_CHUNK_OPS
        and shared_row
    ):
        write_shared_rows(env, v, parallel)
        return
    prelude = rows.allocate()
    env.em.scope.add(*prelude)

    rows.step = next(reversed(free + conflict), None)
    interleaved = not conflict and interleaves_rows(env, free)
    parallel_loops(env, free, [], lambda: serial_loops(env, conflict, rows.row), interleaved)


def interleaves_rows(env: Env, rows: Sequence[Axis]) -> bool:
    """Whether a loop over short rows is cut into ranges, of which it takes a row each, one after
    the other.

    The caches' own prefetchers follow several ranges, each to the end of a page, where they wait
    to see it go on: with others at work memory does not wait with them. AVX2 (Zen 3), two cores:
    sums of 262144 rows of 64 f32 0.80, of 131072 rows of 160 0.93, maxima 0.77, mean squares of 100
    0.89 of the time; AVX-512 (an EPYC), two cores, at 4, 8 and 16 places: sums of 64 0.95, 0.86 and
    1.7. Nothing is gained where a second tensor is as large (softmax, layer norm), of bf16, which
    is prefetched (`PrefetchingWriter.prefetch_loads`; on a Xeon f32 too), with rows of 1 KiB, and
    in caches.
    """
    loops = env.loops
    large = [
        a for a in loops.accesses
        if set(loops.reduced) <= a.address.axes() and set(rows) & a.address.axes()
    ]  # fmt: skip
    if len(large) != 1 or large[0].store or large[0].itemsize < 4:
        return False
    row = large[0].itemsize * size(loops.reduced)
    far = size(rows) * row > env.machine.l3_bytes > 0
    return far and row < NEXT_ROW_BYTES[0]


def row_bytes(loops: Loops) -> int:
    """Bytes that one row reads, at hinted sizes."""
    reduced = set(loops.reduced)
    reads = [a for a in loops.accesses if not a.store]
    return sum(a.itemsize * size([x for x in reduced if x in a.address.axes()]) for a in reads)


def chunk_counts(env: Env, axis: Axis, ops: int, round_to: int, least: int = 1) -> tuple[str, str]:
    """C names of the chunk length along `axis` (`least` or longer) and of the number of chunks,
    from sizes alone."""
    em = env.em
    least = max(least, round_to, -(-MIN_CHUNK_OPS // max(1, ops)) // round_to * round_to)
    n = env.extent(axis)
    length, count = em.fresh("len"), em.fresh("chunks")
    em.chain[0].add(
        f"const long long {length}_0 = (({n} + {MAX_CHUNKS - 1}) / {MAX_CHUNKS} + {round_to - 1})"
        f" / {round_to} * {round_to};",
        f"const long long {length} = {length}_0 > {least} ? {length}_0 : {least};",
        f"const long long {count} = ({n} + {length} - 1) / {length};",
    )
    return length, count


def write_shared_rows(env: Env, v: Axis, parallel: Sequence[Axis]) -> None:
    """All threads work on each row; see the module's docstring."""
    em, loops = env.em, env.loops
    cached = env.machine.threads * env.machine.l2_bytes // 2
    rows = Rows(env, v, 0, row_bytes(loops) > cached)
    axis = rows.outer[0] if rows.outer else v
    per_step = size([a for a in loops.reduced if a != axis])
    length, count = chunk_counts(env, axis, per_step, 64 if axis == v else 1)

    def row() -> None:
        with em.inside(ROW_SCOPE) as scope:
            for k, p in enumerate(rows.plan.passes):
                shared_pass(env, rows, k, p, axis, length, count)
            if rows.plan.row_writes:
                for w in rows.plan.row_writes:
                    em.value(w.value)  # every thread has read what the stores may overwrite
                scope.add("#pragma omp barrier", "#pragma omp single")
                with em.inside() as stores:
                    for w in rows.plan.row_writes:
                        write_store(env, w)
                scope.loop("", stores.lines)
            elif parallel:
                scope.add("#pragma omp barrier")
        em.scope.add(*scope.lines)

    serial_loops(env, parallel, row)


def shared_pass(env: Env, rows: Rows, k: int, p: Pass, axis: Axis, length: str, count: str) -> None:
    em = env.em
    if p.rules:
        rows.online(p).in_chunks(rows.walker(k), length, count, MAX_CHUNKS)
        return
    accs = {
        f.name: Accumulator(em.fresh("f"), f.kind, f.body.dtype, em.used, em.wide)
        for f in p.reductions
    }
    c = em.fresh("c")
    for a in accs.values():
        kind = "double" if a.flushed else scalars.REGISTER_TYPES[a.dtype]
        env.shared.append(f"alignas(64) {kind} {a.name}_p[{MAX_CHUNKS}];")
        if a.positional:
            env.shared.append(f"alignas(64) long long {a.name}_pi[{MAX_CHUNKS}];")
    with em.inside() as scope:
        low, high = em.fresh("lo"), em.fresh("hi")
        scope.add(
            f"const long long {low} = {c} * {length};",
            f"const long long {high} = {smaller(f'{low} + {length}', env.extent(axis))};",
        )
        lanes = rows.start(p, accs)
        rows.walk(p, k, accs, lanes, (axis, low, high))
        for a in accs.values():
            scope.add(*a.finish(lanes))
            scope.add(
                f"{a.name}_p[{c}] = {a.name}_{'d' if a.flushed else 'b' if a.positional else 'r'};"
            )
            if a.positional:
                scope.add(f"{a.name}_pi[{c}] = {a.name}_r;")
    em.scope.add("#pragma omp for schedule(static)")
    em.scope.loop(f"for (long long {c} = 0; {c} < {count}; ++{c})", scope.lines)
    for f in p.reductions:
        em.scope.add(*accs[f.name].gather(count))
        rows.bind(f.name, accs[f.name])


def write_row_split(env: Env, v: Axis) -> None:
    """Rows in chunks, one worker each; cross-row reductions of a worker go to its own row of the
    partial results.
    """
    em, loops = env.em, env.loops
    assert loops.row_split is not None
    axis, count = loops.row_split
    rows = Rows(env, v, env.machine.l2_bytes // 4)
    others = outermost_first(loops, [a for a in loops.parallel if a != axis])
    cols = [p for p in loops.statements if isinstance(p, CrossRowReduce)]
    split = em.name_axis(SPLIT)
    low, high, row_name = em.fresh("lo"), em.fresh("hi"), em.name_axis(axis)
    rows_each = -(-hint(axis.extent) // count) * size(others)
    known = all(a.extent.value is not None for a in others)
    two_level = rows_each > 4 * FLUSH_ADDITIONS or axis.extent.value is None or not known
    em.scope.add(*rows.allocate())
    accs: list[tuple[CrossRowReduce, Accumulator]] = []
    n = env.extent(rows.row_size)
    total = ["0"]
    scratch = em.fresh("cols")
    for p in cols:
        a = Accumulator(em.fresh("col"), p.kind, p.body.dtype, em.used, em.wide)
        accs.append((p, a))
        rows.columns[p.name] = a.name
        em.scope.add(f"{a.type}* const {a.name} = ({a.type}*)({scratch} + ({' + '.join(total)}));")
        total.append(f"({n} * (long long)sizeof({a.type}) + 63) / 64 * 64")
        if a.flushed and two_level:
            em.scope.add(
                f"double* const {a.name}_d = (double*)({scratch} + ({' + '.join(total)}));"
            )
            total.append(f"({n} * 8LL + 63) / 64 * 64")
    where = len(em.scope.lines) - sum(1 + (a.flushed and two_level) for _, a in accs)
    em.used.add("d_scratch_columns")
    em.scope.lines.insert(where, f"char* const {scratch} = d_scratch_columns({' + '.join(total)});")
    rows_per_split = env.extent((axis.extent + (count - 1)) // count)
    with em.inside(SPLIT) as outer:
        outer.add(
            f"const long long {low} = {split} * {rows_per_split};",
            f"const long long {high} = {smaller(f'{low} + {rows_per_split}', env.extent(axis))};",
        )
        for _, a in accs:
            double = f" {a.name}_d[l] = 0;" if a.flushed and two_level else ""
            outer.add(
                f"for (long long l = 0; l < {n}; ++l) {{ {a.name}[l] = {a.identity};{double} }}"
            )
        with em.inside(axis) as scope:
            rows.step = others[-1] if others else axis
            flush = [s for _, a in accs if two_level for s in a.flush_lanes(n)]
            if flush and not known:  # how many rows go to one step of the worker is seen then
                counter = em.fresh("n")
                outer.add(f"int {counter} = 0;")
                flush = [f"{counter} = 0;", *flush]

            def row() -> None:
                rows.row()
                if flush and not known:
                    em.scope.loop(f"if (++{counter} == {FLUSH_ADDITIONS * 2})", flush)

            serial_loops(env, others, row)
            if flush and known:
                every = max(1, FLUSH_ADDITIONS * 2 // size(others))
                scope.loop(f"if (({row_name} - {low}) % {every} == {every - 1})", flush)
        outer.loop(
            f"for (long long {row_name} = {low}; {row_name} < {high}; ++{row_name})", scope.lines
        )
        for p, a in accs:
            if two_level:
                outer.add(*a.flush_lanes(n))
            value = f"({a.type}){a.name}_d" if a.flushed and two_level else a.name
            store_columns(env, rows, p, value)
    em.scope.add(*env.omp_for(1))
    em.scope.loop(f"for (long long {split} = 0; {split} < {count}; ++{split})", outer.lines)


def store_columns(env: Env, rows: Rows, p: CrossRowReduce, array: str) -> None:
    """Copies one worker's column results to memory."""
    em = env.em
    v = rows.v

    def innermost() -> None:
        name = em.name_axis(v)
        with em.inside(v) as scope:
            value = f"{array}[{em.index(rows.linear)}]"
            cell = f"{em.tensors[p.tensor]}[{em.index(p.address)}]"
            scope.add(f"{cell} = {scalars.to_memory(value, p.body.dtype, em.used)};")
        em.scope.add("#pragma omp simd")
        em.scope.loop(
            f"for (long long {name} = 0; {name} < {env.extent(v)}; ++{name})", scope.lines
        )

    serial_loops(env, rows.outer, innermost)
