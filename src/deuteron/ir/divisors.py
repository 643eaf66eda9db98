"""Divisors of whole numbers, which eager refuses on a CPU where they are 0.

In: a divisor. Out: the same value, with a node ``check`` in it that generated code evaluates.
"""

from __future__ import annotations

from deuteron.ir.expr import Expr, cast, checked, literal, op
from deuteron.ir.index import const
from deuteron.ir.operations import INTS


def nonzero(divisor: Expr) -> Expr:
    """`divisor` (whole numbers), which must not be 0: generated code reports where it is."""
    if divisor.dtype not in INTS or divisor.op == "literal" and divisor.attr:
        return divisor
    zero = cast(op("eq", divisor, literal(0, divisor.dtype)), "i64")
    return op("add", divisor, cast(checked(zero, const(1)), divisor.dtype))


def is_divisor(check: Expr) -> bool:
    """Whether a check is one of `nonzero`."""
    value = check.args[0]
    return value.op == "literal" or value.op == "cast" and value.args[0].dtype == "bool"


__all__ = ["is_divisor", "nonzero"]
