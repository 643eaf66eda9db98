"""What both targets need to write reductions out: a body at each of a few static points."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from deuteron.codegen.loops import Loops, Rewriter, Statement, Write
from deuteron.ir.expr import Expr, index_value, op
from deuteron.ir.index import Atom, Axis, Index, const, hint
from deuteron.ir.operations import FLOATS
from deuteron.schedule.kernel import Reduce


class Element(Rewriter):
    """Everything at one point of axes that disappear; results of reductions are their values."""

    def __init__(self, table: dict[Atom, Index], values: dict[str, Expr]) -> None:
        super().__init__(table)
        self.values = values

    def _node(self, node: Expr) -> Expr:
        if node.op == "load" and node.attr[0] in self.values:
            return self.values[node.attr[0]]
        return super()._node(node)


def points_of(axes: Sequence[Axis]) -> list[dict[Atom, Index]]:
    """Every point of static axes; the last axis changes fastest."""
    ranges = [range(hint(a.extent)) for a in axes]
    return [
        {a: const(i) for a, i in zip(axes, at, strict=True)} for at in itertools.product(*ranges)
    ]


def unrolled(loops: Loops, reduced: Callable[[str, list[Expr], list[Expr]], Expr]) -> Loops:
    """The nest without its reduced axes: a reduction is what `reduced` makes of its kind, its terms
    and their positions, a point store is one store per element."""
    tables = points_of(loops.reduced)
    values: dict[str, Expr] = {}
    statements: list[Statement] = []
    for p in loops.statements:
        elements = [Element(t, values) for t in tables]
        if isinstance(p, Reduce):
            at = [index_value(t[loops.reduced[0]]) for t in tables]
            values[p.name] = reduced(p.kind, [e.expr(p.body) for e in elements], at)
        elif isinstance(p, Write):
            statements.extend(
                e.statement(p) for e in (elements if p.level == "point" else elements[:1])
            )
    return replace(loops, reduced=(), statements=tuple(statements), results=frozenset())


def pairwise(name: str, terms: list[Expr]) -> Expr:
    """Pairs, so that a sum's error grows with the logarithm of its length."""
    while len(terms) > 1:
        pairs = [op(name, a, b) for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[len(terms) // 2 * 2 :]
    return terms[0]


def position_of(kind: str, best: Expr, terms: list[Expr], at: list[Expr]) -> Expr:
    """The position of the first extreme term; the first NaN where there is one, which then is the
    extreme: of the terms that equal it (`best`), or are NaN, the first. Or the last NaN, where the
    kind says so: no term equals that."""
    floats, last_nan = terms[0].dtype in FLOATS, kind == "argmax_last_nan"
    position = at[-1]
    for term, i in zip(terms[-2::-1], at[-2::-1], strict=True):
        is_best = op("eq", term, best)
        if floats and not last_nan:
            is_best = op("logical_or", is_best, op("isnan", term))
        position = op("where", is_best, i, position)
    for term, i in zip(terms, at, strict=True) if floats and last_nan else ():
        position = op("where", op("isnan", term), i, position)
    return position


__all__ = ["pairwise", "points_of", "position_of", "unrolled"]
