"""Nests without reductions: every point stores what it computes.

for outer axes and blocks of the vector axis (threads):
    for axes along which stores may meet (in order):
        for the vector axis: the body
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace

from deuteron.codegen.cpp import scalars
from deuteron.codegen.cpp.axes import flops_of, vector_axis
from deuteron.codegen.cpp.bodies import IndexSet
from deuteron.codegen.cpp.emit import difference, smaller
from deuteron.codegen.cpp.environment import (
    Env,
    ordered_conflicts,
    parallel_loops,
    serial_loops,
    size,
)
from deuteron.codegen.cpp.nests import PassWriter
from deuteron.codegen.cpp.tiles import Tiles, transposed_axis
from deuteron.codegen.cpp.unroll import interleaved_axis, unroll_parallel
from deuteron.codegen.index_sets import row_masks
from deuteron.codegen.loops import (
    Loops,
    Rewriter,
    Write,
    outermost_first,
    roots_of,
    unique_nodes,
)
from deuteron.ir.expr import Expr, literal
from deuteron.ir.index import Axis, const, hint
from deuteron.ir.operations import ITEMSIZE

# Points of a block: long enough that its start costs nothing, short enough to share evenly.
BLOCK_POINTS = 4096
# sin of 10 M floats on one core: 8.0 ms with arguments of any size, 2.6 ms in blocks like these.
FAST_CALL_BLOCK, FAST_CALL_FLOPS = 256, 8.0
MAX_ROW_CASES, MAX_CASE_NODES = 4, 1200  # of conditions of a row, and of operations in all of them


class Points(PassWriter):
    """Writes the one pass over the points."""

    def write(self) -> None:
        env, em, v = self.env, self.env.em, self.v
        axes = outermost_first(env.loops, [a for a in env.loops.parallel if a != v])
        free = [a for a in axes if a not in self.conflicts]
        meet = [a for a in axes if a in self.conflicts]
        extra: list[tuple[str, str]] = []
        block = self.block(size(free), size(meet))
        if block:
            length, count = em.fresh("len"), em.fresh("blocks")
            n = env.extent(v)
            em.scope.add(
                f"const long long {length} = {block};",
                f"const long long {count} = ({n} + {length} - 1) / {length};",
            )
            extra.append((em.fresh("b"), count))

        def inner() -> None:
            low, high = "0", env.extent(v)
            if extra:
                low, high = em.fresh("lo"), em.fresh("hi")
                whole = n.isdigit() and int(n) % int(block) == 0  # a known number of vectors
                end = f"{low} + {length}" if whole else smaller(f"{low} + {length}", n)
                em.scope.add(
                    f"const long long {low} = {extra[0][0]} * {length};",
                    f"const long long {high} = {end};",
                )
            serial_loops(env, meet, lambda: self.points(low, high))

        parallel_loops(env, free, extra, inner)

    def block(self, free: int, meet: int) -> str:
        """The length of blocks of the vector axis, where its blocks must be shared among threads;
        else ''.
        """
        env = self.env
        need = 8 * env.machine.threads
        if not env.threaded or free >= need or self.v in self.conflicts:
            return ""
        n = hint(self.v.extent)
        if meet > 1:
            # Stores that may meet are ordered within a block: as few blocks as feed the threads,
            # of whole lines (65536 rows of 64 f32, added at random: 1.45 ms with a half of each for
            # either thread, 1.95 ms when one did them all).
            per = -(-n // max(1, env.machine.threads)) if self.v.extent.value is not None else 256
            writes = [p for p in env.loops.statements if isinstance(p, Write)]
            line = max((64 // ITEMSIZE[w.dtype] for w in writes), default=64)
            return str(max(line, -(-per // line) * line))
        if free * n <= need * BLOCK_POINTS and self.v.extent.value is not None:
            return str(max(256, -(-n // max(1, need // max(1, free))) // 64 * 64))
        return str(BLOCK_POINTS)

    def points(self, low: str, high: str) -> None:
        env, em = self.env, self.env.em
        cut = self.index_sets(self.plan.passes[0], 0)
        for index_set in cut:
            start, end = low, high
            if index_set.axis != self.v:
                s, n = env.extent(index_set.low), env.extent(index_set.count)
                if high == env.extent(self.v):
                    start, end = "0", n  # all of the axis
                else:
                    start, end = em.fresh("lo"), em.fresh("hi")
                    em.scope.add(
                        f"const long long {start} = {difference(low, s)};",
                        f"const long long {end} = {smaller(f'{high} - {s}', n)};",
                    )
            self.guarded_loop(index_set, start, end)

    def guarded_loop(self, index_set: IndexSet, start: str, end: str) -> None:
        """The loop over an index set; where loads are guarded by conditions of the row, once with
        them all true, and once for each other case, or for all others together where these are
        many.
        """
        em = self.env.em
        inner = {self.v, index_set.axis}
        roots = [r for p in index_set.statements for r in roots_of(p)]
        masks = row_masks(roots, lambda n: bool(em.deps(n) & inner))
        if not masks:
            self.loop(index_set, start, end)
            return
        nodes = unique_nodes(roots)
        count = 2 ** len(masks)
        all_cases = count <= MAX_ROW_CASES and count * len(nodes) <= MAX_CASE_NODES
        cases = itertools.product((True, False), repeat=len(masks))  # made as they are needed
        branches = []
        for case in cases if all_cases else itertools.islice(cases, 1):
            move = Rewriter({}, None, self.env.loops.results)
            known = dict(zip(masks, case, strict=True))
            for row, needed in masks.items():
                if known[row]:
                    move.done |= dict.fromkeys(row, literal(True, "bool"))
                else:
                    move.done |= dict.fromkeys(needed, literal(False, "bool"))
            for n in nodes:  # what is loaded and checked before the test stays guarded
                if n.op in ("load", "check") and not em.deps(n) & inner:
                    move.done[n] = n
            test = [em.value(c) for row in masks if known[row] for c in sorted(row, key=_number)]
            body = replace(index_set, statements=[move.statement(p) for p in index_set.statements])
            em.carry_over(move.done)
            branches.append((" & ".join(dict.fromkeys(test)), body))
        if not all_cases:
            branches.append(("", index_set))
        written = []
        for test_text, body in branches:  # what they share is defined before the first
            with em.inside() as scope:
                self.loop(body, start, end)
            written.append((f"if ({test_text})" if test_text else "", scope.lines))
        for k, (head, lines) in enumerate(written):
            em.scope.loop(f"{'else ' if k else ''}{head}".strip(), lines)

    def loop(self, index_set: IndexSet, start: str, end: str) -> None:
        """One vector loop; calls that have a fast version for small arguments get it per block."""
        em = self.env.em
        calls = self.calls_with_fast_version(index_set)
        if not calls:
            self.plain_loop(index_set, start, end)
            return
        low, high = em.fresh("b"), em.fresh("e")
        with em.inside() as block:
            block.add(
                f"const long long {high} = {smaller(f'{low} + {FAST_CALL_BLOCK}', end)};",
                "int far = 0;",
            )
            name = em.name_axis(index_set.axis)
            with em.inside(index_set.axis, self.v) as scope:
                for n in calls:
                    near = scalars.FAST_TESTS[n.op, n.dtype].format(em.value(n.args[0]))
                    scope.add(f"far |= !({near});")
            extra = ", bad" if scope.checked else ""
            block.add(f"#pragma omp simd reduction(|:far{extra})")
            block.loop(f"for (long long {name} = {low}; {name} < {high}; ++{name})", scope.lines)
            branches = []
            for fast in (frozenset(), frozenset(calls)):
                em.fast_calls = fast
                with em.inside() as branch:
                    self.plain_loop(index_set, low, high)
                branches.append(branch.lines)
            em.fast_calls = frozenset()
            block.loop("if (far)", branches[0])
            block.loop("else", branches[1])
        em.scope.loop(
            f"for (long long {low} = {start}; {low} < {end}; {low} += {FAST_CALL_BLOCK})",
            block.lines,
        )

    def calls_with_fast_version(self, index_set: IndexSet) -> list[Expr]:
        """Calls in the loop whose arguments are cheap enough to be computed twice."""
        em, inner = self.env.em, {self.v, index_set.axis}
        if self.v in self.conflicts:
            return []
        nodes = unique_nodes(r for p in index_set.statements for r in roots_of(p))
        calls = [n for n in nodes if (n.op, n.dtype) in scalars.FAST_TESTS and em.deps(n) & inner]
        below = unique_nodes(n.args[0] for n in calls)
        costs = {"random", "reduce", "check", *(name for name, _ in scalars.FAST_TESTS)}
        costly = any(n.op in costs for n in below)
        return [] if costly or flops_of(below) > FAST_CALL_FLOPS else calls

    def plain_loop(self, index_set: IndexSet, start: str, end: str) -> None:
        self.index_set_loop(index_set, start, end, "0", self.v not in self.conflicts)


def _number(e: Expr) -> int:
    return e.id


def _vector(loops: Loops, meeting: Collection[Axis]) -> Axis:
    axis = vector_axis(loops, [a for a in loops.parallel if a not in meeting] or loops.parallel)
    assert axis is not None
    return axis


def write_points(env: Env) -> None:
    loops = env.loops
    if not loops.parallel:
        env.loops = loops = replace(loops, parallel=(Axis("one", const(1)),))
    meeting = ordered_conflicts(loops)
    short_axis = interleaved_axis(loops) if not meeting else None
    v = _vector(loops, meeting)
    if short_axis is not None:
        env.loops = loops = unroll_parallel(loops, short_axis)
        v = _vector(loops, meeting)
    other_axis = transposed_axis(loops, v) if not meeting else None
    if other_axis is not None:
        Tiles(env, v, other_axis).write()
    else:
        Points(env, v, [], 0, frozenset()).write()
