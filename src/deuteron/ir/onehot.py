"""Sums over an axis of what is the same at all places but one.

In: the body of a sum, and the axis. Out: the sum without a loop. Gradients of losses that pick one
class of each row are made of such terms: ``sum over c of where(c == target, -1, 0) * g``, and with
smoothed labels ``where(c == target, -1, 0) * g - e``.
"""

from __future__ import annotations

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis

WIDE_FLOATS = ("f32", "f64")  # products of a count round no worse than the sum in these


def single_term(body: Expr, axis: Axis) -> Expr | None:
    """The sum of `body` over an axis of known extent, if it is zero, or one floating number,
    wherever the axis is not equal to one position. Zero times an infinity or NaN stays NaN, as in
    the sum."""
    if (axis.extent.value or 0) < 2:
        return None
    places: dict[Expr, Expr] = {}  # comparisons of the axis with a position
    for node in body.walk():
        if node.op == "eq" and node.args[0].dtype == "i64":
            for here, other in (node.args, node.args[::-1]):
                if here.op == "index" and here.attr is axis.index and axis not in other.axes():
                    places[node] = other
    if len(set(places.values())) != 1:
        return None
    there, elsewhere = (
        body.substitute({}, dict.fromkeys(places, E.literal(known, "bool")))
        for known in (True, False)
    )
    zero = _zero(elsewhere)
    if axis in there.axes() or axis in elsewhere.axes() or not (zero or body.dtype in WIDE_FLOATS):
        return None
    (at,) = set(places.values())
    inside = E.op(
        "logical_and",
        E.op("ge", at, E.literal(0, "i64")),
        E.op("lt", at, E.index_value(axis.extent)),
    )
    if not zero:

        def times(n: int) -> Expr:
            return E.op("mul", elsewhere, E.literal(float(n), body.dtype))

        n = axis.extent.value
        assert n is not None
        return E.op("where", inside, E.op("add", times(n - 1), there), times(n))
    picked = E.op("where", inside, there, elsewhere)
    return picked if elsewhere.op == "literal" else E.op("add", picked, elsewhere)


def _zero(e: Expr) -> bool:
    """Whether it is zero, or NaN."""
    if e.op == "literal":
        return bool(e.attr == 0)
    if e.op in ("neg", "abs", "cast"):
        return _zero(e.args[0])
    return e.op == "mul" and any(map(_zero, e.args))


__all__ = ["single_term"]
