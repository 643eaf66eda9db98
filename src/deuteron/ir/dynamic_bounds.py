"""Reductions that end where each row says: of how many terms, and how many there are to expect.

In: a reduction inside an expression, ``reduce(kind, (k,), where(k < end, term, neutral))`` with an
`end` that does not depend on k. Out: that end. It means what it says for every k; who runs the
reduction, or reckons what it costs, may stop at the end. Rows of such lengths share out one list
(the positions of each key in a sorted list): together they have as many terms as the axis has
values.
"""

from __future__ import annotations

from collections.abc import Iterator

from deuteron.base.memo import MEMO
from deuteron.ir.expr import Expr, index_value, literal
from deuteron.ir.index import Axis, hint, product
from deuteron.ir.operations import REDUCTIONS


def end_of(reduction: Expr) -> Expr | None:
    """Where the terms of a reduction end, as an i64 value; None where nothing says so."""
    if (
        reduction.op != "reduce"
        or len(reduction.attr[1]) != 1
        or reduction.attr[0].startswith("arg")
    ):
        return None
    (kind, (axis,)), (body,) = reduction.attr, reduction.args
    neutral = literal(REDUCTIONS[kind].identity(body.dtype), body.dtype)
    if body.op != "where" or body.args[2] is not neutral:
        return None
    here = index_value(axis.index)
    for c in conjuncts(body.args[0]):
        if c.op == "lt" and c.args[0] is here and axis not in c.args[1].axes():
            return c.args[1]
    return None


def conjuncts(condition: Expr) -> Iterator[Expr]:
    """The conditions that must all hold."""
    todo = [condition]
    while todo:
        c = todo.pop()
        if c.op == "logical_and":
            todo.extend(c.args)
        else:
            yield c


_ENDS: dict[Expr, dict[Axis, Expr]] = MEMO.answers()


def ends(root: Expr) -> dict[Axis, Expr]:
    """The axes of reductions with data-dependent bounds under `root`, and their bounds."""
    known = _ENDS.get(root)
    if known is None:
        reductions = ((n, end_of(n)) for n in root.walk() if n.op == "reduce")
        known = _ENDS[root] = {n.attr[1][0]: end for n, end in reductions if end is not None}
    return known


def expected(axis: Axis, end: Expr) -> int:
    """Terms of one row, on average, at hinted sizes."""
    rows = hint(product(a.extent for a in end.axes()))
    return max(1, -(-hint(axis.extent) // max(1, rows)))


__all__ = ["end_of", "ends", "expected"]
