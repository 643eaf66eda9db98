"""Between which numbers a value is, and so which comparisons cannot hold.

In: an expression, and the bodies of the nest's reductions that are maxima. Out: bounds, as far as
limits (`clamp`) and divisors (the largest magnitude of a row) give them. What is no number is
between none, and no comparison with it holds.

Before 2.12 torch makes NaN of what is too large for an 8-bit float. A value that is clamped, or
divided by the largest of its row, is not; and a quotient that nothing compares need not be exact.
RMS norm of bf16 with a scale for each row of 4096, for an sm_90: 27 instructions an element, 13
without the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from deuteron.ir.expr import Expr
from deuteron.ir.operations import FLOATS, ITEMSIZE

# By how much a quotient whose last bits are wrong, and its divisor's, exceed the exact one.
QUOTIENT_MARGIN = 1 + 2.0**-20

Bounds = tuple[float, float]


def is_never_true(node: Expr, maxima: Mapping[str, Expr]) -> bool:
    """Whether it is a comparison of floats that no value fulfils."""
    if node.op not in ("lt", "le", "gt", "ge") or node.args[0].dtype not in FLOATS:
        return False
    smaller, larger = node.args if node.op in ("lt", "le") else node.args[::-1]
    low, high = bounds(smaller, maxima)[0], bounds(larger, maxima)[1]
    return low > high or low == high and node.op in ("lt", "gt")


def bounds(e: Expr, maxima: Mapping[str, Expr], depth: int = 4) -> Bounds:
    """The least and the most that a float can be; `maxima` are bodies of reductions by name."""
    if e.op == "literal" and e.attr == e.attr:
        return e.attr, e.attr
    if e.op in ("minimum", "maximum") and depth:
        (a, b), (c, d) = (bounds(x, maxima, depth - 1) for x in e.args)
        of = min if e.op == "minimum" else max
        return of(a, c), of(b, d)
    if e.op == "abs" and depth:
        low, high = bounds(e.args[0], maxima, depth - 1)
        return 0.0, max(abs(low), abs(high))
    most = _max_quotient(e, maxima) if e.op == "div" else math.inf
    return -most, most


def divisor_bounds(b: Expr) -> tuple[float, float, Expr | None]:
    """What is known of a divisor ``maximum(x, low) * share``: `low` (0 for others), the share,
    and x."""
    share = 1.0
    if b.op in ("mul", "div") and b.args[1].op == "literal" and b.args[1].attr > 0:
        share = b.args[1].attr if b.op == "mul" else 1 / b.args[1].attr
        b = b.args[0]
    if b.op == "maximum":
        for x, limit in (b.args, b.args[::-1]):
            if limit.op == "literal":
                return limit.attr, share, x
    return 0.0, share, None


def _max_quotient(quotient: Expr, maxima: Mapping[str, Expr]) -> float:
    """The most that one of several can be of the largest of them."""
    a, b = quotient.args
    limit, share, largest = divisor_bounds(b)
    if largest is None or limit * share < 2.0**-64:  # below, the product may have lost bits
        return math.inf
    largest = _without_exact_casts(largest, a)
    body = maxima.get(largest.attr[0]) if largest.op == "load" and not largest.attr[1] else None
    of = _without_exact_casts(body, a) if body is not None else None
    return (
        QUOTIENT_MARGIN / share
        if of is not None and of.op == "abs" and of.args[0] is a
        else math.inf
    )


def _without_exact_casts(e: Expr, a: Expr) -> Expr:
    """Without casts that change no magnitude of a's: to a wider type, and to the floats it was."""
    was = a.args[0].dtype if a.op == "cast" and a.args[0].dtype in FLOATS else None
    while e.op == "cast" and (e.dtype == was or ITEMSIZE[e.dtype] > ITEMSIZE[e.args[0].dtype]):
        e = e.args[0]
    return e


__all__ = ["bounds", "divisor_bounds", "is_never_true"]
