"""Vector lanes along a reduced axis: each row of the parallel axes is walked once per pass.

    for rows (threads):            row-level values
        for each pass:             accumulators of its reductions, one per lane
            for outer reduced axes:
                for the vector axis in steps of the lanes:  the pass's body on all lanes
            lanes combined: row-level results for the next pass
        row stores

With few rows and long ones, threads share each row instead: the outermost reduced axis is cut
into a number of splits that depends on sizes alone, each split leaves partial results, and every
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
    serial_loops,
    size,
    write_store,
)
from deuteron.codegen.cpp.online import OnlineReductions, Walk
from deuteron.codegen.cpp.prefetch import NEXT_ROW_BYTES, PrefetchingWriter
from deuteron.codegen.cpp.random_blocks import RANDOM_BLOCK, neighbouring_randoms, random_block
from deuteron.codegen.cpp.reductions import FLUSH_ADDITIONS, Accumulator
from deuteron.codegen.cpp.row_passes import MIN_BUFFERED_FLOPS, RowPass
from deuteron.codegen.loops import (
    Loops,
    Statement,
    outermost_first,
    unique_nodes,
)
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, hint
from deuteron.ir.operations import ITEMSIZE, REDUCTIONS
from deuteron.schedule.kernel import Scan

MASKED_ROW = 512  # elements of a row below which the last lanes are worth masks instead of a loop
SCAN_LANES = 16  # elements that `d_scan` takes


def pass_lanes(p: RowPass, row: int) -> int:
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
    """Writes the passes over one row (or one split of it)."""

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

    def online(self, p: RowPass) -> OnlineReductions:
        """The reductions of a pass in which some need others."""
        axis = self.outer[0] if self.outer else self.v
        return OnlineReductions(
            self.env, p, axis, tuple(a for a in (*self.outer, self.v) if a != axis)
        )

    def walker(self, k: int) -> Walk:
        def walk(p: RowPass, accs: dict[str, Accumulator], part: tuple[Axis, str, str]) -> int:
            lanes = self.start(p, accs)
            self.walk(p, k, accs, lanes, part)
            return lanes

        return walk

    def bind(self, name: str, acc: Accumulator) -> None:
        self.env.em.scope.texts[
            Expr("load", acc.dtype if not acc.positional else "i64", (), (name, (), None))
        ] = f"{acc.name}_r"

    def start(self, p: RowPass, accs: dict[str, Accumulator]) -> int:
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
        p: RowPass,
        k: int,
        accs: dict[str, Accumulator],
        lanes: int,
        split: tuple[Axis, str, str] | None,
    ) -> None:
        """The loops of a pass over the row; `split` = (axis, low, high) restricts the outermost
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
                mine = split if split and split[0] == self.v else None
                self.vector_loop(k, p, index_set, accs, lanes, blocks, counter, mine)
            if counter and not blocks:
                env.em.scope.add(
                    f"if (++{counter} == {max(1, FLUSH_ADDITIONS // per_v)}) {{ {counter} = 0;"
                )
                for a in flushed:
                    env.em.scope.add(*("  " + s for s in a.flush(lanes)))
                env.em.scope.add("}")

        if split and split[0] != self.v:
            axis, low, high = split
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
        p: RowPass,
        index_set: IndexSet,
        accs: dict[str, Accumulator],
        lanes: int,
        blocks: bool,
        counter: str,
        split: tuple[Axis, str, str] | None,
    ) -> None:
        """The loop over an index set. With `blocks`, sums go to the doubles after blocks of it;
        with a `counter` besides, after as many elements of this and other rows."""
        env, em = self.env, self.env.em
        low, high = "0", env.extent(index_set.count)
        if split:
            low, high = split[1], split[2]
            if index_set.axis != self.v:
                start, low, high = env.extent(index_set.low), em.fresh("lo"), em.fresh("hi")
                em.scope.add(
                    f"const long long {low} = {difference(split[1], start)};",
                    f"const long long {high} = "
                    f"{smaller(f'{split[2]} - {start}', env.extent(index_set.count))};",
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
        lines = self.lane_block(index_set, accs, lanes, base, (block, end), prefetches, bool(split))
        if blocks:
            in_blocks(lines)
        else:
            em.scope.add(*lines)

    def lane_block(
        self,
        index_set: IndexSet,
        accs: dict[str, Accumulator],
        lanes: int,
        base: str,
        bounds: tuple[str, str],
        prefetches: list[str],
        is_split: bool,
    ) -> list[str]:
        """The loop in steps of the lanes, with the body on all of them, and what is left."""
        env, em = self.env, self.env.em
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
        if index_set.count.value is None or is_split or index_set.count.value % lanes:
            em.guard, em.guard_level = f"(l < r_{base})", len(em.chain)
            with em.inside(index_set.axis, self.v) as tail:
                self.body(index_set, accs, "l", self.position(index_set))
            em.guard = None
            rest = tail
        for n in random:
            del self.staged[n]
        return lane_loops(
            em,
            base,
            *bounds,
            lanes,
            scope,
            rest,
            [*prefetches, *conversion.before],
            random_lines.lines,
            conversion.after,
        )

    def scans_blocks(self, p: RowPass) -> bool:
        """Whether the scans of a pass run by blocks of lanes: sums and products in double, whose
        operations may have another order (one after the other, each waits for the last)."""
        plain = all(s.kind in ("sum", "prod") and carry_dtype(s) == "f64" for s in p.scans)
        return bool(p.scans) and plain and not p.reductions and self.v not in self.conflicts

    def scan_blocks(
        self, p: RowPass, index_set: IndexSet, accs: dict[str, Accumulator], low: str, high: str
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
