"""Exponentials by powers of two, which the machine has, and positive scales out of maxima.

In: expressions of an online softmax. Out: the same in fewer operations an element.
"""

from __future__ import annotations

import math

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr

LOG2_E = 1.4426950408889634


def binary(root: Expr) -> Expr:
    """Exponentials of differences by powers of two, which the machine has: of what is computed for
    a maximum one multiplication and subtraction at once."""

    def rule(n: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if n.op != "exp" or n.dtype != "f32" or args[0].op != "sub":
            return None
        parts = (scaled(a) for a in args[0].args)
        return E.op(
            "exp2", E.op("sub", *(E.op("mul", a, E.literal(c * LOG2_E, "f32")) for c, a in parts))
        )

    return E.rewrite(root, rule)


def scaled(e: Expr) -> tuple[float, Expr]:
    """(c, x) with c x = e and a number c above 0: the maximum of e is c times that of x, exactly.
    What a mask hides is minus infinity, of x as of e."""
    if e.op == "mul" and e.dtype == "f32":
        for x, c in (e.args, e.args[::-1]):
            if c.op == "literal" and 0 < c.attr < math.inf:
                return c.attr, x
    if e.op == "where":
        for k, low in ((1, e.args[1]), (2, e.args[2])):
            if low.op == "literal" and low.attr == -math.inf:
                factor, x = scaled(e.args[3 - k])
                sides = (low, x) if k == 1 else (x, low)
                return factor, E.op("where", e.args[0], *sides)
    return 1.0, e


__all__ = ["binary", "scaled"]
