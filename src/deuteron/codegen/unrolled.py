"""What both targets need to write reductions out: a body at each of a few static points."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from deuteron.codegen.loops import Rewriter
from deuteron.ir.expr import Expr, op
from deuteron.ir.index import Atom, Axis, Index, const, hint
from deuteron.ir.operations import FLOATS


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


__all__ = ["Element", "points_of", "position_of"]
