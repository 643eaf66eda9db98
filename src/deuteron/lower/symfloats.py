"""Numbers that torch traces symbolically: floats and truth values made of sizes, or of elements.

In: a `SymFloat` or `SymBool`. Out: a `Value` without dimensions (f64 or bool), computed where it is
used; no guard is added. The element that ``x.item()`` gives is a read of x, so nobody waits for it.
Declines what has no scalar form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from deuteron.ir.expr import Expr, cast, index_value, literal, op
from deuteron.ir.index import Sym, atom
from deuteron.ir.program import Extern, Layout
from deuteron.lower import numbers
from deuteron.lower.core import Declined, LowerContext, Value, make

RELATIONS = {
    "Equality": "eq",
    "Unequality": "ne",
    "StrictLessThan": "lt",
    "LessThan": "le",
    "StrictGreaterThan": "gt",
    "GreaterThan": "ge",
}
# Torch's sympy functions of floats.
UNARY_FUNCTIONS = {
    f"OpaqueUnaryFn_{n}": n
    for n in ("sqrt", "exp", "log", "log2", "sin", "cos", "tan", "sinh", "cosh", "tanh")
    + ("asin", "acos", "atan")
} | {"Abs": "abs"}
BINARY_FUNCTIONS = {"FloatTrueDiv": "div", "IntTrueDiv": "div", "FloatPow": "pow"}


def number_value(
    ctx: LowerContext, x: torch.SymFloat | torch.SymBool, node: fx.Node | None = None
) -> Value:
    """The number, which `node` computes, as a tensor without dimensions. Kernels compute what is as
    exact there as in Python and cannot raise; the module computes the rest."""
    e = x.node.expr
    convert: Callable[..., Expr] = _truth if isinstance(x, torch.SymBool) else _converted
    if node is not None and not simple(ctx, e):
        return hosted(ctx, node, "bool" if isinstance(x, torch.SymBool) else "f64")
    try:
        return make(ctx, [], lambda idx: convert(ctx, e))
    except Declined:
        if node is None:
            raise
        return hosted(ctx, node, "bool" if isinstance(x, torch.SymBool) else "f64")


def simple(ctx: LowerContext, e: Any) -> bool:
    """Whether kernels may compute a number. Elements of tensors are theirs as far as they have the
    functions: nobody waits for them."""
    parts = list(sympy.preorder_traversal(e))
    if any(p in ctx.floats for p in parts):
        return True
    for p in parts:
        kind = type(p).__name__
        if kind in ("FloatTrueDiv", "IntTrueDiv"):
            if not p.args[1].is_nonzero:
                return False  # Python raises where it is 0
        elif kind in BINARY_FUNCTIONS or kind in UNARY_FUNCTIONS and kind != "Abs":
            return False
        elif kind in ("FloorDiv", "Mod", "PythonMod", "CleanDiv"):
            if not (p.args[0].is_integer and p.args[1].is_integer and p.args[1].is_nonzero):
                return False
        elif p.is_Pow and not (p.exp.is_Integer and p.exp.is_nonnegative):
            return False
    return True


def hosted(ctx: LowerContext, node: fx.Node, dtype: str) -> Value:
    """A number that Python computes in each call, as an element in memory."""
    try:
        text = numbers.text(ctx, node)
    except numbers.NoText as e:
        raise ctx.decline(f"a number that is computed by {e}") from None
    sym = ctx.symbols.number(text)
    ctx.number_text[node] = sym.name
    return in_memory(ctx, sym, dtype, "cpu")


def in_memory(ctx: LowerContext, sym: Sym, dtype: str, device: str) -> Value:
    """A number as an element in memory of a device."""
    name = ctx.fresh_name("number")
    kind = torch.bool if dtype == "bool" else torch.float64
    settings = (("dtype", kind), ("device", torch.device(device)))
    layout, reason = Layout((), (), dtype, device), "a number that is computed as Python does"
    made = Extern((name,), "aten.scalar_tensor.default", (atom(sym),), settings, (layout,))
    ctx.add(replace(made, origins=ctx.origins(), reason=reason))
    ctx.hosted[name] = sym
    return ctx.load(name)


def element(ctx: LowerContext, x: Value, number: Any) -> Value | None:
    """``x.item()``, traced as `number`: its symbol stands for the element of `x` from now on. None
    where the number is a size, which the program must know itself."""
    dtype = {torch.SymFloat: "f64", torch.SymBool: "bool"}.get(type(number))
    if dtype is None or dtype == "bool" and counts(ctx):
        return None
    ctx.set_device_of(x)
    value = ctx.define(make(ctx, [], lambda idx: cast(x.at([0] * x.rank), dtype)))
    ctx.floats[number.node.expr] = value
    return value


def counts(ctx: LowerContext) -> bool:
    """Whether the truth value that the node gives is used as a size, beyond torch's own assertions
    that it is 0 or 1."""
    assert ctx.node is not None
    whole = [u for u in ctx.node.users if u.target is torch.sym_ite]
    checks = [v for u in whole for v in u.users]
    return any(not str(w.target).startswith("aten._assert") for v in checks for w in v.users)


def _converted(ctx: LowerContext, e: Any) -> Expr:
    kind = type(e).__name__
    if e in ctx.floats:
        return ctx.floats[e].at(())
    if e.is_Float or (e.is_Rational and not e.is_Integer):
        return literal(float(e), "f64")
    if kind == "ToFloat":
        return _converted(ctx, e.args[0])
    if kind in BINARY_FUNCTIONS or kind in UNARY_FUNCTIONS:
        return op(
            BINARY_FUNCTIONS.get(kind) or UNARY_FUNCTIONS[kind],
            *(_converted(ctx, a) for a in e.args),
        )
    if e.is_integer:
        return cast(index_value(ctx.size(e)), "f64")
    if kind in ("Max", "Min") or e.is_Add or e.is_Mul:
        name = {"Max": "maximum", "Min": "minimum"}.get(kind) or ("add" if e.is_Add else "mul")
        out = _converted(ctx, e.args[0])
        for a in e.args[1:]:
            out = op(name, out, _converted(ctx, a))
        return out
    if e.is_Pow:
        return op("pow", _converted(ctx, e.base), _converted(ctx, e.exp))
    raise ctx.decline(f"a number that is computed by {kind}")


def _truth(ctx: LowerContext, e: Any) -> Expr:
    kind = type(e).__name__
    if e in ctx.floats:
        return ctx.floats[e].at(())
    if kind in ("BooleanTrue", "BooleanFalse"):
        return literal(kind == "BooleanTrue", "bool")
    if kind in RELATIONS:
        whole = all(a.is_integer for a in e.args)
        sides = [index_value(ctx.size(a)) if whole else _converted(ctx, a) for a in e.args]
        return op(RELATIONS[kind], *sides)
    if kind in ("And", "Or"):
        out = _truth(ctx, e.args[0])
        for a in e.args[1:]:
            out = op(f"logical_{kind.lower()}", out, _truth(ctx, a))
        return out
    if kind == "Not":
        return op("logical_not", _truth(ctx, e.args[0]))
    raise ctx.decline(f"a truth value that is computed by {kind}")


__all__ = ["element", "in_memory", "number_value"]
