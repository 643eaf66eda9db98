"""Sums at few places: every row of the result looks at all points and adds those that come to it.

In: a scatter that adds, as `additions.Rows`, their places and what they add. Out: the same sum as
one reduction, so that nothing is added atomically, nothing is sorted, and results repeat: gradients
of buckets of distances, of the kinds of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, cast, index_value, literal, op
from deuteron.ir.index import Atom, Index
from deuteron.lower.access import both
from deuteron.lower.additions import Rows
from deuteron.lower.core import LowerContext, make
from deuteron.lower.core import Value as Tensor


def summed(
    ctx: LowerContext,
    x: Tensor,
    rows: Rows,
    place: Sequence[Index],
    body: Expr,
    mask: Expr | None,
) -> Tensor:
    """x plus, at each of its elements, what the points bring whose place it is."""
    wish = ctx.node.name if ctx.node is not None else "t"
    base = Tensor(x.axes, ctx.own_reductions(x, wish))
    body = ctx.own_reductions(Tensor((*rows.points, *rows.along), body), wish)
    at = {d: E.checked(index_value(place[d]), x.shape[d]) for d in rows.rows}

    def element(idx: tuple[Index, ...]) -> Expr:
        columns: dict[Atom, Index] = {
            a: idx[d] for d, a in zip(rows.columns, rows.along, strict=True)
        }
        here = [op("eq", at[d], index_value(idx[d])) for d in rows.rows]
        if mask is not None:
            here.append(mask)
        each = op("where", both(*here), body, literal(0, body.dtype)).substitute(columns)
        total = E.reduce("sum", rows.points, each)
        return cast(op("add", cast(base.at(idx), body.dtype), total), x.dtype)

    return make(ctx, x.shape, element)


__all__ = ["summed"]
