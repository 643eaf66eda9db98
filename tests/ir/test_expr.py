"""Scalar expressions: interning, exact folding, rebuilding."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, cast, literal, op
from deuteron.ir.index import Axis, Sym, Value, atom, const
from deuteron.ir.operations import DTYPES, FLOATS, SCALAR_OPS
from deuteron.ir.reference_ops import TO_TORCH, scalar_op

n = atom(Sym("n"))
i, j = Axis("i", n), Axis("j", 8)
x = E.load("x", (i.index, j.index), "f32")
idx = E.load("idx", (j.index,), "i64")

numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 0.1, math.inf, -math.inf, math.nan, 65519.9, 65520.0, 1e300]),
    st.floats(), st.integers(-(2**70), 2**70), st.booleans(),
)  # fmt: skip


def same(a: Any, b: Any) -> bool:
    return (a != a and b != b) or (a == b and math.copysign(1, a) == math.copysign(1, b))


@settings(deadline=None, max_examples=300)
@given(st.floats(), st.sampled_from(FLOATS))
def test_float_literals_are_numbers_of_their_dtype(value: float, dtype: str) -> None:
    got = literal(value, dtype).attr
    expected = torch.tensor(value, dtype=torch.float64).to(
        torch.float32 if dtype != "f64" else torch.float64
    )
    assert same(got, expected.to(TO_TORCH[dtype]).item())


@settings(deadline=None, max_examples=500)
@given(numbers, st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_cast_of_a_literal_is_torchs(value: Any, source: str, target: str) -> None:
    if source not in FLOATS and isinstance(value, float) and not math.isfinite(value):
        return
    try:
        lit = literal(value, source)
    except OverflowError:  # an integer beyond f64's range has no literal
        return
    got = cast(lit, target)
    if got.op == "literal":
        expected = torch.tensor(lit.attr, dtype=TO_TORCH[source]).to(TO_TORCH[target]).item()
        assert same(got.attr, expected) and type(got.attr) is type(expected)


@pytest.mark.parametrize("dtype", ["i8", "i64", "u8", "bool"])
def test_integers_have_no_roots(dtype: str) -> None:
    k = E.load("k", (i.index,), dtype)
    for name in E.FLOATS_ONLY:
        with pytest.raises(E.WrongDtype, match=f"{name} of {dtype}"):
            op(name, *[k] * SCALAR_OPS[name][0])


def test_literals_that_python_calls_equal_are_different_nodes() -> None:
    assert literal(0.0, "f32") is not literal(-0.0, "f32")
    assert literal(float("nan"), "f32") is literal(-float("nan"), "f32")
    mask = op("lt", idx, literal(3, "i64"))
    plus, minus = (E.load("x", (i.index, j.index), "f32", mask, z) for z in (0.0, -0.0))
    assert plus is not minus and math.copysign(1, minus.attr[2]) == -1
    nan = [E.load("x", (i.index, j.index), "f32", mask, float("nan")) for _ in range(2)]
    assert nan[0] is nan[1]


def test_the_same_structure_is_the_same_object() -> None:
    assert op("add", x, literal(1, "f32")) is op("add", x, literal(1.0, "f32"))
    assert pickle.loads(pickle.dumps(op("mul", x, x))) is op("mul", x, x)
    gather = E.load("x", (i.index, atom(Value(idx)) + 1), "f32")
    assert pickle.loads(pickle.dumps(gather)) is gather


def test_folding_keeps_the_dtype() -> None:
    flag = E.load("b", (j.index,), "bool")
    assert op("logical_and", literal(True, "bool"), flag) is flag
    assert op("logical_or", literal(True, "bool"), flag) is literal(True, "bool")
    assert op("logical_and", literal(1, "i64"), idx).dtype == "bool"
    assert op("logical_and", idx, idx).dtype == "bool"
    assert op("mul", x, literal(1, "f32")) is x
    assert op("add", x, literal(0, "f32")) is not x  # -0 + 0 is 0
    assert op("where", literal(False, "bool"), x, literal(0, "f32")) is literal(0, "f32")


def test_isnan_of_a_number_is_known() -> None:
    for value in (float("nan"), float("inf"), -0.0, 1.5):
        for dtype in ("f16", "bf16", "f32", "f64"):
            folded = op("isnan", literal(value, dtype))
            assert folded is literal(value != value, "bool")


def test_positions_fold_and_compare() -> None:
    a, b = E.index_value(i.index), E.index_value(j.index)
    assert op("add", a, b) is E.index_value(i.index + j.index)
    assert op("lt", b, literal(8, "i64")) is literal(True, "bool")
    assert op("ge", b, literal(8, "i64")) is literal(False, "bool")
    assert op("lt", a, E.index_value(n)) is literal(True, "bool")
    assert op("lt", a, b).op == "lt"


def test_substitute_reaches_loaded_indices_and_masks() -> None:
    mask = op("lt", E.index_value(j.index), literal(3, "i64"))
    gather = E.load("x", (i.index, atom(Value(idx)) + j.index), "f32", mask, 0.0)
    k = Axis("k", 8)
    moved = gather.substitute({j: k.index})
    assert k in moved.axes() and j not in moved.axes()
    at_two = gather.substitute({j: const(2)})
    assert at_two.args == ()  # the mask is known to hold
    assert at_two.attr[1][1] is atom(Value(E.load("idx", (const(2),), "i64"))) + 2
    known = E.rewrite(gather, lambda node, args: None, None, {idx: literal(5, "i64")})
    assert known.attr[1][1] is j.index + 5


def test_bound_axes_are_renamed_and_walk_is_bottom_up() -> None:
    total = E.reduce("sum", (j,), op("mul", x, x))
    k = Axis("k", 8)
    assert total.substitute({j: k.index}).attr == ("sum", (k,))
    seen: set[Expr] = set()
    for node in op("add", total, E.reduce("max", (j,), x)).walk():
        assert all(a in seen for a in E.children(node))
        seen.add(node)


def test_depth_has_no_limit() -> None:
    deep = x
    for _ in range(20000):
        deep = op("neg", deep)
    assert len(list(deep.walk())) == 20001
    assert deep.substitute({i: const(0)}).loads()[0].attr[1][0] is const(0)
    assert len(deep.key) == 32


def test_arity_and_every_scalar_op_has_a_reference() -> None:
    with pytest.raises(AssertionError):
        op("add", x)
    for name, (arity, _) in SCALAR_OPS.items():
        dtype = "i64" if name in ("bitwise_not", "lshift", "rshift") or "bitwise" in name else "f64"
        args = [torch.tensor([0.5, 0.25]).to(TO_TORCH[dtype]) for _ in range(arity)]
        if name == "where":
            args[0] = torch.tensor([True, False])
        assert scalar_op(name, args).shape == (2,), name
