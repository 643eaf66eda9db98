"""Symbolic floats of torch (a scale that depends on sizes) as scalar expressions.

In: a `SymFloat`. Out: an f64 `Expr` of sizes, computed at run time as Python would; no guard is
added. Declines what has no scalar form.
"""

from __future__ import annotations

from typing import Any

import torch

from deuteron.ir.expr import Expr, cast, index_value, literal, op
from deuteron.lower.core import LowerContext


def float_value(ctx: LowerContext, x: torch.SymFloat) -> Expr:
    return _converted(ctx, x.node.expr)


def _converted(ctx: LowerContext, e: Any) -> Expr:
    kind = type(e).__name__
    if e.is_Float or (e.is_Rational and not e.is_Integer):
        return literal(float(e), "f64")
    if kind == "ToFloat":
        return _converted(ctx, e.args[0])
    if kind in ("FloatTrueDiv", "IntTrueDiv"):
        return op("div", _converted(ctx, e.args[0]), _converted(ctx, e.args[1]))
    if e.is_integer:
        return cast(index_value(ctx.size(e)), "f64")
    if e.is_Add or e.is_Mul:
        out = _converted(ctx, e.args[0])
        for a in e.args[1:]:
            out = op("add" if e.is_Add else "mul", out, _converted(ctx, a))
        return out
    raise ctx.decline(f"a number that is computed from sizes by {kind}")


__all__ = ["float_value"]
