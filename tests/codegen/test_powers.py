"""Exponentials by powers of two, as hardware computes them: a product and a difference at once."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deuteron.codegen.powers import binary
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr


def computed(e: Expr, values: dict[str, float]) -> np.float32:
    """In float32; a product that something is taken from is not rounded."""
    if e.op == "load":
        return np.float32(values[e.attr[0]])
    if e.op == "literal":
        return np.float32(e.attr)
    if e.op == "sub" and e.args[0].op == "mul":
        a, b = (float(computed(x, values)) for x in e.args[0].args)
        return np.float32(a * b - float(computed(e.args[1], values)))
    args = [computed(a, values) for a in e.args]
    if e.op == "where":
        return args[1] if args[0] else args[2]
    functions = {"sub": np.subtract, "mul": np.multiply, "exp2": np.exp2}
    return np.float32(functions[e.op](*args))


@pytest.mark.parametrize("low", [-1e4, -1e6, -1e8, -1e9, -1e20, -1e30, -3e38])
@pytest.mark.parametrize("scale", [1.0, 0.125, 0.17])
def test_rows_that_far_numbers_hide_have_finite_terms(low: float, scale: float) -> None:
    product, most = (E.load(n, (), "f32") for n in ("product", "most"))
    score = E.op("mul", product, E.literal(scale, "f32"))
    masked = E.op("where", E.load("hidden", (), "bool"), E.literal(low, "f32"), score)
    power = binary(E.op("exp", E.op("sub", masked, most)), frozenset(("product",)))
    with np.errstate(all="ignore"):
        whole = computed(power, {"hidden": 1.0, "product": 3.0, "most": low})
        seen = computed(power, {"hidden": 0.0, "product": 3.0, "most": np.float32(4 * scale)})
        gone = computed(power, {"hidden": 1.0, "product": 3.0, "most": 4 * scale})
    assert 2.0**-9 < whole < 2.0**9, "a row's terms are all about 1"
    assert math.isclose(seen, math.exp(-scale), rel_tol=1e-6) and gone == 0.0
