"""Products that the library multiplies keep their meaning as computations.

In: a library call for a product of matrices, and its lowering. Out: the emitted call, whose
`product` holds what it computes, so that the schedule can compare the call and the kernels around
it with one kernel. It reads the tensors that the call reads: others need not be in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from deuteron.ir.program import Compute, Extern, ViewArg
from deuteron.lower.calls import emit
from deuteron.lower.core import LowerContext, Value, whole_tensor


def keep_product(
    ctx: LowerContext, lower: Callable[..., Value], call: tuple[Any, ...], given: Any
) -> Any:
    """Emits the library call (node, arguments, keywords, reason); notes what it computes of the
    operands `given`."""
    made = emit(ctx, *call)
    name = whole_tensor(made) if isinstance(made, Value) else None
    calls = [k for k, d in enumerate(ctx.defs) if isinstance(d, Extern) and name in d.names]
    if name is None or not calls:
        return made
    emitted = ctx.defs[calls[0]]
    assert isinstance(emitted, Extern)
    operands = [as_called(ctx, x, arg) for x, arg in zip(given, emitted.args, strict=False)]
    if len(operands) < len(given) or None in operands:
        return made
    choose, mark = ctx.choose_contraction, len(ctx.defs)
    ctx.choose_contraction = lambda *_: "generated"
    try:
        value = lower(ctx, *operands, **call[2])
    finally:
        ctx.choose_contraction = choose
    layout = ctx.layouts[name]
    body = ctx.own_reductions(value, name, layout)
    parts = ctx.defs[mark:]
    del ctx.defs[mark:]
    computes = tuple(d for d in parts if isinstance(d, Compute))
    for d in computes:
        del ctx.layouts[d.name]
    last = Compute(name, value.axes, body, layout, origins=ctx.origins())
    assert len(computes) == len(parts)
    ctx.defs[calls[0]] = replace(emitted, product=(*computes, last))
    return made


def as_called(ctx: LowerContext, operand: Any, arg: Any) -> Any:
    """An operand as a reading of the tensor that the call is given; None where it is not known to
    be one."""
    if not isinstance(operand, Value):
        return operand
    if not isinstance(arg, ViewArg):
        return None
    e = operand.expr
    if e.op == "load" and not e.args and e.attr[0] == arg.tensor:
        return operand
    layout = ctx.layouts[arg.tensor]
    whole = arg.shape == layout.shape and arg.strides == layout.strides
    return ctx.load(arg.tensor) if whole and arg.offset.value == 0 else None


__all__ = ["keep_product"]
