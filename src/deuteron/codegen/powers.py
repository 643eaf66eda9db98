"""Exponentials by powers of two, which the machine has, positive scales out of maxima, and GELU's
``1 + erf(x)``.

In: expressions of nests with products. Out: the same in fewer operations an element.
"""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet

from deuteron.codegen.precision import erf_of_one_plus
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr

# Numbers below it times log2(e) are rounded by at most 8: by so many powers of two are all terms of
# a row off whose maximum it is.
FAR = 2.0**27
LOG2_E = 1.4426950408889634


def binary(root: Expr, products: AbstractSet[str]) -> Expr:
    """Exponentials of differences by powers of two, which the machine has: of what is made of
    `products` one multiplication and subtraction at once. Far numbers, with which a program may
    hide a whole row (-1e9, a dtype's least), and those from memory, which may be such, are
    subtracted first: times log2(e) they are infinite, or rounded by more than there are powers."""

    def rule(n: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if n.op != "exp" or n.dtype != "f32" or args[0].op != "sub":
            return None
        if not _moderate(args[0].args[0], products):
            return E.op("exp2", E.op("mul", args[0], E.literal(LOG2_E, "f32")))
        parts = (scaled(a) for a in args[0].args)
        return E.op(
            "exp2", E.op("sub", *(E.op("mul", a, E.literal(c * LOG2_E, "f32")) for c, a in parts))
        )

    return E.rewrite(root, rule)


def tails(root: Expr) -> Expr:
    """``1 + erf(x)``, of GELU, as the one function that it is: erfc(-x)."""

    def rule(n: Expr, args: tuple[Expr, ...]) -> Expr | None:
        erf = erf_of_one_plus(E.op(n.op, *args)) if n.op == "add" and n.dtype == "f32" else None
        return None if erf is None else E.op("erfc", E.op("neg", *erf.args))

    return E.rewrite(root, rule)


def _moderate(e: Expr, products: AbstractSet[str]) -> bool:
    """Whether it is made of products and numbers that are not far (or minus infinity)."""
    if e.op == "load":
        return e.attr[0] in products
    if e.op == "literal":
        return e.attr == -math.inf or abs(e.attr) < FAR
    values = e.args[1:] if e.op == "where" else e.args
    return all(_moderate(a, products) for a in values)


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


__all__ = ["binary", "scaled", "tails"]
