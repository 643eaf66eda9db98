"""Which part of a nest runs in which pass over the reduced axes, when a row does not fit into
registers.

In: `Loops`. Out: a list of `Pass`; pass k+1 may use the folds of pass k. A point store runs in the
last pass that still reads memory: the memory planner may give a result the memory of an operand
that dies here, and later passes must still find it.

A fold that needs an earlier fold over the same axes costs one more pass, unless an identity lets
both run in one. Two are known; both are recognised by their form alone:

    online    s = sum g exp(b - m), m = max b: the running sum is rescaled when the maximum grows
    welford   v = sum (b - e)^2, e constant in a row: v = M2 + n (mean - e)^2 with Welford's running
              mean and M2 of b
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deuteron.codegen.triton.loops import ColumnFold, Loops, Part, Write, roots_of
from deuteron.ir.expr import FLOATS, Expr, children, op
from deuteron.schedule.kernel import Fold, Prefix


@dataclass(frozen=True)
class Online:
    """``sum(factor * exp(b - m))`` where the fold `maximum` is m, over b; `factor` None stands for
    1.
    """

    maximum: str
    factor: Expr | None


@dataclass(frozen=True)
class Welford:
    """``sum((body - center)**2)``; `center` is constant in a row and may need folds of the same
    pass.
    """

    body: Expr
    center: Expr


Merge = Online | Welford


@dataclass
class Pass:
    """Parts that run in one pass over the reduced axes, in order; `merged` says which folds run by
    an identity.
    """

    parts: list[Part] = field(default_factory=list)
    merged: dict[str, Merge] = field(default_factory=dict)

    def roots(self) -> list[Expr]:
        """What is computed at every point of the pass."""
        out: list[Expr] = []
        for p in self.parts:
            rule = self.merged.get(p.name) if isinstance(p, Fold) else None
            if isinstance(rule, Online):
                out.extend([rule.factor] if rule.factor is not None else [])
            elif isinstance(rule, Welford):
                out.append(rule.body)
            else:
                out.extend(roots_of(p))
        return out


def single(loops: Loops) -> Pass:
    """Everything in one pass: the row is in registers."""
    return Pass(list(loops.parts))


def plan(loops: Loops, row_level: Callable[[Expr], bool]) -> tuple[list[Pass], list[Write]]:
    """Passes and the row stores that follow them. `row_level(e)`: whether e is constant along the
    reduced axes.
    """
    folds = {p.name: p for p in loops.parts if isinstance(p, Fold)}
    ready: dict[str, int] = {}  # result -> first pass that may use it
    placed: list[tuple[int, Part]] = []
    row_writes: list[Write] = []
    merged: dict[str, Merge] = {}
    for p in loops.parts:
        if isinstance(p, Write) and p.level == "row":
            row_writes.append(p)
            continue
        k = max((need(r, ready) for r in roots_of(p)), default=0)
        if isinstance(p, Fold):
            rule = merge(p, k, folds, ready, row_level) if k else None
            if rule is not None:
                merged[p.name] = rule
                k -= 1
            ready[p.name] = k + 1
        elif isinstance(p, Prefix):
            ready[p.name] = k
        placed.append((k, p))
    passes = [Pass() for _ in range(max((k for k, _ in placed), default=-1) + 1)]
    for k, p in placed:
        if not isinstance(p, Write):
            passes[k].parts.append(p)
            if isinstance(p, Fold) and p.name in merged:
                passes[k].merged[p.name] = merged[p.name]
    _repeat_scans(loops, placed, passes)
    last = max((k for k, q in enumerate(passes) if _reads(q, row_level)), default=0)
    last = max([last, *(k for k, p in placed if isinstance(p, Write))])
    for _, p in placed:
        if isinstance(p, Write):
            passes[last].parts.append(p)
    _repeat_scans(loops, [(last, p) for _, p in placed if isinstance(p, Write)], passes)
    return passes, row_writes


def need(root: Expr, ready: Mapping[str, int]) -> int:
    """The first pass in which the value can be computed."""
    memo: dict[Expr, int] = {}
    for node in root.walk():
        out = max((memo[c] for c in children(node)), default=0)
        if node.op == "load":
            out = max(out, ready.get(node.attr[0], 0))
        memo[node] = out
    return memo[root]


def _reads(q: Pass, row_level: Callable[[Expr], bool]) -> bool:
    return any(
        n.op == "load" and n.attr[1] and not row_level(n) for r in q.roots() for n in r.walk()
    )


def _repeat_scans(loops: Loops, placed: Sequence[tuple[int, Part]], passes: list[Pass]) -> None:
    """A scan whose values a later pass needs runs again there."""
    scans = {p.name: p for p in loops.parts if isinstance(p, Prefix)}
    for k, p in placed:
        todo = list(roots_of(p))
        found: list[Prefix] = []
        while todo:
            for n in todo.pop().walk():
                scan = scans.get(n.attr[0]) if n.op == "load" else None
                if scan is not None and scan not in passes[k].parts and scan not in found:
                    found.append(scan)
                    todo.append(scan.body)
        order = [q for q in loops.parts if q in found]
        passes[k].parts[:0] = order


def merge(
    f: Fold,
    k: int,
    folds: Mapping[str, Fold],
    ready: Mapping[str, int],
    row_level: Callable[[Expr], bool],
) -> Merge | None:
    """The identity by which a fold of pass k can run in pass k-1."""
    if f.kind != "sum" or f.body.dtype not in FLOATS:
        return None
    return _online(f.body, k, folds, ready) or _welford(f.body, k, ready, row_level)


def _factors(root: Expr) -> list[Expr]:
    out, stack = [], [root]
    while stack:
        n = stack.pop()
        if n.op == "mul":
            stack.extend(reversed(n.args))
        else:
            out.append(n)
    return out


def _online(
    body: Expr, k: int, folds: Mapping[str, Fold], ready: Mapping[str, int]
) -> Online | None:
    factors = _factors(body)
    for i, e in enumerate(factors):
        if e.op != "exp" or e.args[0].op != "sub":
            continue
        b, m = e.args[0].args
        fold = folds.get(m.attr[0]) if m.op == "load" else None
        if fold is None or fold.kind != "max" or fold.body is not b or ready[fold.name] != k:
            continue
        rest = factors[:i] + factors[i + 1 :]
        if need(b, ready) >= k or any(need(g, ready) >= k for g in rest):
            continue
        factor: Expr | None = None
        for g in rest:
            factor = g if factor is None else op("mul", factor, g)
        return Online(fold.name, factor)
    return None


def _welford(
    body: Expr, k: int, ready: Mapping[str, int], row_level: Callable[[Expr], bool]
) -> Welford | None:
    if body.op != "mul" or body.args[0] is not body.args[1] or body.args[0].op != "sub":
        return None
    b, e = body.args[0].args
    if row_level(e) and not row_level(b) and need(b, ready) < k:
        return Welford(b, e)
    return None


__all__ = ["ColumnFold", "Merge", "Online", "Pass", "Welford", "merge", "need", "plan", "single"]
