"""Positions that are computed from the loop variables alone become index maps.

In: an integer expression. Out: the same number as an `Index`, or None where it has no such form.
With it `x[arange(n) // 2]`, and torch's decompositions of upsampling, rolling and padding, read
memory at an index that the scheduler and the code generators can reason about, not at one that is
loaded. Invariant: equal for every value of the axes; float arithmetic is decided by trying all.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from deuteron.graph.edit import outside_of_modes
from deuteron.ir.expr import Expr, as_position, flops
from deuteron.ir.index import (
    Atom,
    Axis,
    Index,
    const,
    fits,
    floordiv,
    in_range,
    is_nonneg,
    maximum,
    minimum,
    mod,
)
from deuteron.ir.operations import FLOATS, SCALAR_OPS
from deuteron.ir.program import Compute
from deuteron.ir.reference import Evaluator
from deuteron.lower.core import LowerContext

MAX_AXIS_VALUES = 1 << 15  # values of an axis that are tried, at most
MAX_RECOMPUTED_FLOPS = 64.0  # of what is computed again at each use instead of being read


def reads_nothing(e: Expr) -> bool:
    """Whether the expression is cheap arithmetic on loop variables, sizes and numbers."""
    plain = all(n.op in ("literal", "index", "cast") or n.op in SCALAR_OPS for n in e.walk())
    return plain and flops(e) <= MAX_RECOMPUTED_FLOPS


def inlined(ctx: LowerContext, e: Expr) -> Expr:
    """`e` with reads of tensors replaced that are computed from nothing, at any depth."""
    while True:
        loads = [n for n in e.loads() if not n.args]
        if not loads or len(loads) < len(e.loads()):
            return e
        table: dict[Expr, Expr] = {}
        computes = {d.name: d for d in ctx.defs if isinstance(d, Compute)}
        for n in loads:
            d = computes.get(n.attr[0])
            if d is None or d.target is not None or not small(d.body):
                return e
            at: dict[Atom, Index] = dict(zip(d.axes, n.attr[1], strict=True))
            table[n] = d.body.substitute(at)
        new = e.substitute({}, table)
        if flops(new) > MAX_RECOMPUTED_FLOPS:
            return e
        e = new


def small(e: Expr) -> bool:
    """Whether the expression is cheap arithmetic on loop variables, sizes, numbers and tensors."""
    plain = ("literal", "index", "cast", "load")
    return flops(e) <= MAX_RECOMPUTED_FLOPS and all(
        n.op in plain or n.op in SCALAR_OPS for n in e.walk()
    )


def exact(e: Expr) -> Index | None:
    """The expression's value as an index."""
    if e.dtype in FLOATS or e.dtype == "bool":
        return None
    if e.op in ("index", "literal"):
        return as_position(e)
    if e.op == "cast":
        (x,) = e.args
        if x.dtype in FLOATS:
            return fitted(e)
        i = exact(x)
        same = i is not None and (e.dtype == "i64" or e.dtype == "i32" and in_range(i, 2**31))
        return i if same else None
    if e.dtype != "i64" or not e.args:
        return None
    args = [exact(a) for a in e.args]
    if any(a is None for a in args):
        return None
    combined = _combined(e.op, [a for a in args if a is not None])
    # Integers of 64 bits wrap around: then the number is another than the index.
    return combined if combined is not None and fits(combined) else None


def _combined(name: str, args: list[Index]) -> Index | None:
    a, b = args[0], args[-1]
    divisor = len(args) == 2 and b.value is not None and b.value > 0
    if name == "add":
        return a + b
    if name == "sub":
        return a - b
    if name == "mul":
        return a * b
    if name == "neg":
        return -a
    if name == "abs":
        return a if is_nonneg(a) else maximum(a, -a)
    if name in ("maximum", "minimum"):
        return maximum(a, b) if name == "maximum" else minimum(a, b)
    if divisor and (name == "floordiv" or name == "truncdiv" and is_nonneg(a)):
        return floordiv(a, b)
    if divisor and (name == "remainder" or name == "fmod" and is_nonneg(a)):
        return mod(a, b)
    return None


def fitted(e: Expr) -> Index | None:
    """An integer made of float arithmetic on one axis, as ``(i*m + s)//k + b``: tried on all of its
    values."""
    axes = e.axes()
    if len(axes) != 1 or not reads_nothing(e) or any(i.syms() for i in e.indices()):
        return None
    (axis,) = axes
    n = axis.extent.value
    return _fit(e, axis, n) if n is not None and 0 < n <= MAX_AXIS_VALUES else None


@lru_cache(maxsize=1024)
@outside_of_modes()
def _fit(e: Expr, axis: Axis, n: int) -> Index | None:
    i = torch.arange(n)
    values = Evaluator([axis], {}, {}, "cpu").value(e).to(torch.int64).expand(n)
    first = int(values[0])
    steps = values[1:] - values[:-1]
    changes = steps.nonzero().flatten()
    if len(changes) == 0:
        return const(first)
    step = int(steps[0])
    if bool((steps == step).all()):
        return axis.index * step + first
    # Runs of k equal values; the first and the last may be shorter, or longer where the position
    # is kept inside a tensor.
    last = int(values[-1])
    start = int(changes[0]) + 1
    k = int(changes[1]) + 1 - start if len(changes) > 1 else max(start, n - start)
    place = (i - start) // k + first + 1
    shift = -start % k
    index = floordiv(axis.index + shift, k) + (first + 1 - (start + shift) // k)
    if int(place[0]) < first:
        place, index = place.clamp_min(first), maximum(index, first)
    if int(place[-1]) > last:
        place, index = place.clamp_max(last), minimum(index, last)
    return index if bool((place == values).all()) else None


__all__ = ["exact", "inlined", "reads_nothing"]
