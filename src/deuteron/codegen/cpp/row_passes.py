"""Which part of a nest runs in which pass over the reduced axes, and which values row
buffers keep between passes.

In: `loops.Loops`. Out: a list of `RowPass`; pass k+1 may use the reductions of pass k.

A reduction whose body uses a reduction of pass k lives in pass k+1 or later. A point store runs in
the last pass that still reads memory: the memory planner may give a result the memory of an operand
that dies here, and later passes must still find the operand. Values that are costly to compute and
needed in several passes are kept in a row buffer when the row fits the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deuteron.codegen.loops import CrossRowReduce, Loops, Statement, Write, roots_of
from deuteron.ir.expr import Expr, children
from deuteron.ir.index import Axis, hint, product
from deuteron.ir.operations import ITEMSIZE, SCALAR_OPS
from deuteron.schedule.kernel import Reduce, Scan
from deuteron.schedule.online import Chain, Rule

Deps = Callable[[Expr], frozenset[Axis]]
# A value this costly (vector FLOPs) goes to a row buffer; a reload from L1 or L2 costs about as
# much as 4 of them.
MIN_BUFFERED_FLOPS = 8.0


@dataclass
class RowPass:
    """Parts that run in one pass over the reduced axes, in order; `keep` are values to put into row
    buffers.
    """

    statements: list[Statement] = field(default_factory=list)
    to_buffer: list[Expr] = field(default_factory=list)
    rules: dict[str, Rule] = field(
        default_factory=dict
    )  # of reductions that need others of the pass

    @property
    def reductions(self) -> list[Reduce]:
        return [p for p in self.statements if isinstance(p, Reduce)]

    @property
    def scans(self) -> list[Scan]:
        return [p for p in self.statements if isinstance(p, Scan)]

    @property
    def writes(self) -> list[Write]:
        return [p for p in self.statements if isinstance(p, Write)]

    def roots(self) -> list[Expr]:
        return [r for p in self.statements for r in roots_of(p)]


@dataclass
class Plan:
    passes: list[RowPass]
    row_writes: list[Write]
    row_buffered: dict[Expr, int]  # value -> pass that computes it


def plan(
    loops: Loops, deps: Deps, cache_bytes: int, full: frozenset[Axis], merging: bool = False
) -> Plan:
    """Orders the parts. `deps(expr)` gives the axes of a value; `cache_bytes` is what row buffers
    may take, of values that depend on all the axes in `full`. `merging`: dependent reductions share
    a pass where a rule allows it (`online`), for rows that no cache holds."""
    reduced = frozenset(loops.reduced)
    merging = merging and not any(isinstance(p, (Scan, CrossRowReduce)) for p in loops.statements)
    chain = Chain(lambda e: not deps(e) & reduced, merging)
    placed: list[tuple[int, Statement]] = []
    row_writes: list[Write] = []
    for p in loops.statements:
        if isinstance(p, Write) and p.level == "row" and loops.reduced:
            row_writes.append(p)
        elif isinstance(p, (Reduce, Scan)):
            placed.append((chain.add(p), p))
        else:
            placed.append((chain.need(*roots_of(p)), p))
    ready = chain.ready
    count = max((k for k, _ in placed), default=-1) + 1
    passes = [RowPass() for _ in range(count)]
    for k, p in placed:
        if not isinstance(p, Write):
            passes[k].statements.append(p)
            if isinstance(p, Reduce) and p.name in chain.rules:
                passes[k].rules[p.name] = chain.rules[p.name]
    _place_writes(loops, placed, passes, deps)
    row_buffered = _choose_row_buffered(loops, passes, ready, deps, cache_bytes, full)
    return Plan(passes, row_writes, row_buffered)


def _place_writes(
    loops: Loops, placed: list[tuple[int, Statement]], passes: list[RowPass], deps: Deps
) -> None:
    """Point stores in program order, each in the last pass that reads memory at its points."""
    reduced = frozenset(loops.reduced)

    def reads(k: int) -> bool:
        return any(
            n.op == "load" and n.attr[1] and deps(n) & reduced
            for r in passes[k].roots()
            for n in r.walk()
        )

    last = max((k for k in range(len(passes)) if reads(k)), default=0)
    last = max([last, *(k for k, p in placed if isinstance(p, Write))])
    for _, p in placed:
        if isinstance(p, Write):
            passes[last].statements.append(p)


def _choose_row_buffered(
    loops: Loops,
    passes: Sequence[RowPass],
    ready: dict[str, int],
    deps: Deps,
    cache_bytes: int,
    full: frozenset[Axis],
) -> dict[Expr, int]:
    """Values used in several passes that are costly (or carried by a scan), as long as the row of
    them fits.
    """
    if len(passes) < 2:
        return {}
    reduced = frozenset(loops.reduced)
    scans = {p.name: k for k, q in enumerate(passes) for p in q.scans}
    where: dict[Expr, list[int]] = {}
    for k, q in enumerate(passes):
        seen: set[Expr] = set()
        for r in q.roots():
            for n in r.walk():
                if n not in seen:
                    seen.add(n)
                    where.setdefault(n, []).append(k)
                    if n.op == "load" and scans.get(n.attr[0], k) not in where[n]:
                        where[n].insert(0, scans[n.attr[0]])
    row = hint(product(a.extent for a in loops.reduced))
    row_buffered: dict[Expr, int] = {}
    budget = cache_bytes
    shared = [n for n, ks in where.items() if len(ks) > 1 and full <= deps(n)]
    inside = set(shared)
    used_by: dict[Expr, list[Expr]] = {}
    for n in where:
        for c in children(n):
            used_by.setdefault(c, []).append(n)
    for n in sorted(shared, key=lambda e: e.id, reverse=True):
        carried = n.op == "load" and n.attr[0] in scans
        frontier = any(
            u not in inside or where[u][-1] < where[n][-1] for u in used_by.get(n, ())
        ) or _is_root(n, passes)
        cost = _own_cost(n, reduced, deps, row_buffered)
        if n.op in ("literal", "index") or (
            not carried and (not frontier or cost < MIN_BUFFERED_FLOPS)
        ):
            continue
        if carried or ITEMSIZE[n.dtype] * row <= budget:
            row_buffered[n] = scans[n.attr[0]] if carried else where[n][0]
            budget -= ITEMSIZE[n.dtype] * row
            passes[row_buffered[n]].to_buffer.append(n)
    return row_buffered


def _is_root(n: Expr, passes: Sequence[RowPass]) -> bool:
    return any(n in q.roots() for q in passes)


def _own_cost(
    root: Expr, reduced: frozenset[Axis], deps: Deps, row_buffered: dict[Expr, int]
) -> float:
    """Vector FLOPs to compute the value again at every point."""
    total, stack, seen = 0.0, [root], set()
    while stack:
        n = stack.pop()
        if n in seen or (n in row_buffered and n is not root) or not deps(n) & reduced:
            continue
        seen.add(n)
        if n.op in SCALAR_OPS:
            total += SCALAR_OPS[n.op][1]
        elif n.op == "random":
            total += 40.0
        elif n.op == "load" and n.args:
            total += 2.0
        elif n.op == "load" and any(a.rank == 3 for i in n.attr[1] for a in i.atoms()):
            total += 12.0  # a gather
        stack.extend(children(n))
    return total
