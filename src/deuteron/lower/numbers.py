"""Numbers of the graph as Python text, computed in the order in which the program computes them.

In: an FX node (or a number) that is no tensor. Out: an expression over the names of the program's
sizes, which the emitted module evaluates with Python's own arithmetic, as eager does: its rounding,
its floor division, its exceptions. Sympy, in whose terms torch keeps the same number, orders the
operands of sums and products anew and knows by now what the program has yet to assert.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from deuteron.ir.index import Index, Sym
from deuteron.ir.program import Extern
from deuteron.lower.core import LowerContext, Value, whole_tensor

INFIX_OPERATORS = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/",
    operator.floordiv: "//", operator.mod: "%", operator.pow: "**", operator.eq: "==",
    operator.ne: "!=", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
    operator.and_: "&", operator.or_: "|", operator.xor: "^", operator.lshift: "<<",
    operator.rshift: ">>",
}  # fmt: skip
PREFIX_OPERATORS = {
    operator.neg: "-",
    operator.pos: "+",
    operator.not_: "not ",
    operator.invert: "~",
}
# Functions of builtins and of `torch` that take plain numbers, by the name that a module knows.
CALLED_FUNCTIONS = {f: f.__name__ for f in (abs, round, min, max, int, float, bool, pow)} | {
    operator.abs: "abs",
    math.trunc: "math.trunc",
}
TORCH_FUNCTIONS = ("sym_float", "sym_int", "sym_max", "sym_min", "sym_ite", "sym_not")


class NoText(Exception):
    """A number that has no text: what computes it is not known, or a tensor's element is in it."""


def text(ctx: LowerContext, x: Any) -> str:
    """Raises `NoText`."""
    if isinstance(x, Index):
        raise NoText("an index")
    if not isinstance(x, fx.Node):
        return literal(x)
    known = ctx.number_text.get(x)
    if known is None:
        known = ctx.number_text[x] = _computed(ctx, x)
    return known


def literal(x: Any) -> str:
    if isinstance(x, float):
        return repr(x) if math.isfinite(x) else f"float({str(x)!r})"
    if isinstance(x, (bool, int)):
        return repr(x) if x >= 0 else f"({x!r})"
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return of_sympy(x.node.expr)
    raise NoText(f"a {type(x).__name__}")


def of_sympy(e: Any) -> str:
    """Torch's own expression of a number."""
    from torch.utils._sympy.printers import PythonPrinter

    return f"({PythonPrinter().doprint(e)})"


def _computed(ctx: LowerContext, node: fx.Node) -> str:
    target, val = node.target, node.meta.get("val")
    if node.op != "call_function" or isinstance(val, (bool, int, float)):
        return literal(val)
    name = str(target)
    if name.startswith(("aten.sym_size.int", "aten.sym_stride.int")):
        return _dimension(ctx, node)
    if target in INFIX_OPERATORS and len(node.args) == 2:
        a, b = (text(ctx, n) for n in node.args)
        return f"({a} {INFIX_OPERATORS[target]} {b})"
    if target in PREFIX_OPERATORS:
        return f"({PREFIX_OPERATORS[target]}{text(ctx, node.args[0])})"
    if target is getattr(torch, "sym_sum", None):
        return f"({' + '.join(text(ctx, n) for n in node.args[0])})"
    called = CALLED_FUNCTIONS.get(target) or _of_module(target)
    if called is not None and not node.kwargs:
        return f"{called}({', '.join(_argument(ctx, n) for n in node.args)})"
    element = ctx.env.get(node)
    if isinstance(element, Value) and not isinstance(val, torch.Tensor):
        return fetched(ctx, element).name
    return literal(val)


def _argument(ctx: LowerContext, x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return f"({''.join(text(ctx, y) + ', ' for y in x)})"
    return text(ctx, x)


def _of_module(target: Any) -> str | None:
    """A function of `math`, or of torch's for numbers."""
    name = getattr(target, "__name__", "")
    if getattr(math, name, None) is target:
        return f"math.{name}"
    known = name in TORCH_FUNCTIONS or name.startswith("_sym_")
    return f"torch.{name}" if known and getattr(torch, name, None) is target else None


def _dimension(ctx: LowerContext, node: fx.Node) -> str:
    """A tensor's size, as the call that made the tensor tells it."""
    source, dim = node.args
    sized = ctx.env.get(source) if isinstance(source, fx.Node) else None  # type: ignore[arg-type]
    tensor = whole_tensor(sized) if isinstance(sized, Value) else None
    known = ctx.dims.get((tensor, dim)) if "size" in str(node.target) else None
    return known if known is not None else literal(node.meta["val"])


def fetched(ctx: LowerContext, number: Value) -> Sym:
    """A tensor without dimensions as a Python number: the size by which the program knows it."""
    ctx.set_device_of(number)
    known = Sym(ctx.fresh_name("number"), 0)
    ctx.add(
        Extern(
            (None,),
            "aten._local_scalar_dense.default",
            (ctx.view_arg(number),),
            (),
            (None,),
            (),
            (None,),
            (known,),
            ctx.origins(),
            "a number is returned",
        )
    )
    return known


__all__ = ["NoText", "fetched", "literal", "of_sympy", "text"]
