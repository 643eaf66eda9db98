"""Which part of a nest runs in which pass over the reduced axes, when a row does not fit into
registers.

In: `Loops`. Out: a list of `RowPass`; pass k+1 may use the reductions of pass k. A point store
runs in the last pass that still reads memory: the memory planner may give a result the memory of an
operand that dies here, and later passes must still find it.

A reduction that needs an earlier reduction over the same axes costs one more pass, unless a rule of
`schedule.online` lets both run in one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deuteron.codegen.loops import CrossRowReduce, Loops, Statement, Write, roots_of
from deuteron.ir.expr import Expr
from deuteron.schedule.kernel import Reduce, Scan
from deuteron.schedule.online import Centered, Chain, Moment, Products, Rescaled, Rule


@dataclass
class RowPass:
    """Parts that run in one pass over the reduced axes, in order; `merged` says which reductions
    run by an identity.
    """

    statements: list[Statement] = field(default_factory=list)
    merged: dict[str, Rule | Centered | Moment] = field(default_factory=dict)

    def roots(self) -> list[Expr]:
        """What is computed at every point of the pass."""
        out: list[Expr] = []
        for p in self.statements:
            rule = self.merged.get(p.name) if isinstance(p, Reduce) else None
            if isinstance(rule, Rescaled):
                out.extend([rule.factor] if rule.factor is not None else [])
            elif isinstance(rule, Products):
                out.extend([rule.x] if rule.square else [rule.x, rule.y])
            elif isinstance(rule, Centered):
                out.append(rule.x)
            elif isinstance(rule, Moment):
                continue  # the reduction of its maximum reads the elements
            else:
                out.extend(roots_of(p))
        return out


def single(loops: Loops) -> RowPass:
    """Everything in one pass: the row is in registers."""
    return RowPass(list(loops.statements))


def plan(loops: Loops, row_level: Callable[[Expr], bool]) -> tuple[list[RowPass], list[Write]]:
    """Passes and the row stores that follow them. `row_level(e)`: whether e is constant along the
    reduced axes.
    """
    chain = Chain(row_level, centering=True, moments=True)
    placed: list[tuple[int, Statement]] = []
    row_writes: list[Write] = []
    for p in loops.statements:
        if isinstance(p, Write) and p.level == "row":
            row_writes.append(p)
        elif isinstance(p, (Reduce, Scan)):
            placed.append((chain.add(p), p))
        else:
            placed.append((chain.need(*roots_of(p)), p))
    passes = [RowPass() for _ in range(max((k for k, _ in placed), default=-1) + 1)]
    for k, p in placed:
        if not isinstance(p, Write):
            passes[k].statements.append(p)
            if isinstance(p, Reduce):
                for rules in (chain.rules, chain.centers, chain.weighted):
                    passes[k].merged.update({p.name: rules[p.name]} if p.name in rules else {})
    _repeat_scans(loops, placed, passes)
    last = max((k for k, q in enumerate(passes) if _reads(q, row_level)), default=0)
    last = max([last, *(k for k, p in placed if isinstance(p, Write))])
    for _, p in placed:
        if isinstance(p, Write):
            passes[last].statements.append(p)
    _repeat_scans(loops, [(last, p) for _, p in placed if isinstance(p, Write)], passes)
    return passes, row_writes


def _reads(q: RowPass, row_level: Callable[[Expr], bool]) -> bool:
    return any(
        n.op == "load" and n.attr[1] and not row_level(n) for r in q.roots() for n in r.walk()
    )


def _repeat_scans(
    loops: Loops, placed: Sequence[tuple[int, Statement]], passes: list[RowPass]
) -> None:
    """A scan whose values a later pass needs runs again there."""
    scans = {p.name: p for p in loops.statements if isinstance(p, Scan)}
    for k, p in placed:
        todo = list(roots_of(p))
        repeated: list[Scan] = []
        while todo:
            for n in todo.pop().walk():
                scan = scans.get(n.attr[0]) if n.op == "load" else None
                if scan is not None and scan not in passes[k].statements and scan not in repeated:
                    repeated.append(scan)
                    todo.append(scan.body)
        statements = passes[k].statements + repeated
        # A scan may need those before it; no other part of its pass.
        passes[k].statements = [q for q in scans.values() if q in statements]
        passes[k].statements += [q for q in statements if not isinstance(q, Scan)]


__all__ = ["CrossRowReduce", "RowPass", "plan", "single"]
