"""Peephole rules: one cheaper Triton expression for a group of scalar operations, exact, or within
the error that the option `precision` allows.

In: a node, whose operands' text an `Emitter` has. Out: text, or None where no rule matches.
Kernels with long chains of arithmetic take the time of their instructions, not of their bytes.
"""

from __future__ import annotations

import math

from deuteron.codegen.precision import gelu_factors, scaled_factor
from deuteron.codegen.ranges import divisor_bounds
from deuteron.codegen.triton.state import TileState
from deuteron.ir.expr import Expr


def peephole(em: TileState, node: Expr) -> str | None:
    if node.op == "mul":
        return _gelu(em, node)
    if node.op == "exp":
        return _exp2_of_multiple(em, node)
    if node.op in ("add", "sub"):
        return _fma(em, node)
    if node.op == "lt" and node.args[0].op == "random" and node.args[1].op == "literal":
        return _bernoulli(em, node.args[0], node.args[1].attr)
    return None


def _gelu(em: TileState, node: Expr) -> str | None:
    """GELU's ``y * 0.5 * (1 + erf(x * c))``."""
    factors = gelu_factors(node)
    if factors is None or factors[1] not in em.inexact.approximate:
        return None
    y, erf = factors
    x, scale = scaled_factor(erf.args[0])
    by = em.inexact.exponentials.get(erf)
    kind, decay = ("fast", "") if by is None else ("by", f", {em.value(by)}")
    half = f"libm.erf_half_{kind}({em.value(x)}, {scale!r}{decay})"
    return half if y is None else f"{em.value(y)} * {half}"


def _exp2_of_multiple(em: TileState, node: Expr) -> str | None:
    """An exponential of a multiple, as a power of two of another multiple."""
    (power,) = node.args
    if node not in em.inexact.approximate or power.op not in ("mul", "neg"):
        return None
    if power.op == "neg":
        return f"libm.exp2_fast({em.value(power.args[0])} * {-1 / math.log(2)!r})"
    for x, scale in (power.args, power.args[::-1]):
        if scale.op == "literal" and x.op != "literal":
            return f"libm.exp2_fast({em.value(x)} * {scale.attr / math.log(2)!r})"
    return None


def _fma(em: TileState, node: Expr) -> str | None:
    """A product and a sum, rounded once."""
    if node not in em.inexact.fused:
        return None
    product, other = sorted(node.args, key=lambda a: a.op != "mul")
    if em.deps(product) != em.deps(node):
        return None
    a, b, c = (em.value(x) for x in (*product.args, other))
    if node.op == "sub":
        # Triton's own minus takes it from a positive zero, which makes that of a zero positive.
        a, c = (f"{a} * -1.0", c) if product is node.args[1] else (a, f"{c} * -1.0")
    return f"tl.fma({a}, {b}, {c})"


def has_safe_reciprocal(em: TileState, b: Expr, fast: bool) -> bool:
    """Whether the reciprocal of a divisor needs no scale: that of one of `em.softmax_sums`, and,
    where it need not be exact, of what is at least 2^-64, like ``maximum(x, 1e-12) / 448``."""
    if b.op == "load":
        return b.attr[0] in em.softmax_sums
    limit, share, _ = divisor_bounds(b)
    return fast and limit * share >= 2.0**-64


def divided_by_reciprocal(em: TileState, a: Expr, b: Expr, fast: bool) -> str:
    """A quotient by what is `has_safe_reciprocal`, by its reciprocal. Of what may be more than
    2^126 that is below the normal numbers, which only the exact one gives, and still has 21
    bits."""
    divisor, scope = em.value(b), em.chain[em.level(em.deps(b))]
    if fast and (b.op == "load" or divisor_bounds(b)[1] <= 0.25):
        exact, text = "fast", f"libm.reciprocal_fast({divisor})"
    else:
        exact, text = "exact", f"libm.div(tl.full([], 1.0, tl.float32), {divisor})"
    if (b, exact) not in scope.sums:
        scope.sums[b, exact] = em.fresh("inverse")
        scope.add(f"{scope.sums[b, exact]} = {text}")
    text, inverse = em.value(a), scope.sums[b, exact]
    if fast:
        return f"{text} * {inverse}"
    return f"libm.div_by_unit({text}, {divisor}, {inverse}, {a.op == 'exp'})"


def _bernoulli(em: TileState, random: Expr, limit: float) -> str | None:
    """Whether random numbers, which are multiples of 2^-24, are below a constant."""
    dist, stream, element = random.attr
    end = math.ceil(limit * 2**24) if 0 < limit < 1 else 0
    lanes = em.neighbours(element) if (dist, random.dtype) == ("rand", "f32") else None
    if lanes is None or not 0 < end < 2**24:
        return None
    seed = em.value(random.args[0])
    return f"libm.rand_below({seed}, {stream}, {lanes}, {em.rank}, {end})"


__all__ = ["divided_by_reciprocal", "peephole", "has_safe_reciprocal"]
