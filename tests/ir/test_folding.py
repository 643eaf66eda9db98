"""Folding and rebuilding of expressions keep every value, bit by bit."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, cast, literal, op
from deuteron.ir.index import Axis, Value, atom, const
from deuteron.ir.operations import COMPARISONS, DTYPES, FLOAT8, FLOATS, INTS, SCALAR_OPS
from deuteron.ir.reference import Evaluator
from deuteron.ir.reference_ops import TO_TORCH
from deuteron.ir.verify_expr import facts

I, J = Axis("i", 3), Axis("j", 4)
AXES = (I, J)
PLACES = (
    I.index + J.index,
    I.index * 4 - J.index * 2,
    const(2),
    J.index % 3,
    (I.index * 4 + J.index) // 2,
)
Pair = tuple[Expr, Expr]  # as written, and reduced

torch.manual_seed(0)
_some = torch.randn(3, 4) * 4
_some[0, 0], _some[1, 2], _some[2, 3] = float("nan"), float("inf"), -0.0
TENSORS = {
    d: _some.nan_to_num(1, 100, -100).to(t) if d not in FLOATS else _some.to(t)
    for d, t in TO_TORCH.items()
}

ARITHMETIC = tuple(d for d in DTYPES if d not in FLOAT8)


def leaves(dtype: str) -> st.SearchStrategy[Pair]:
    loads = E.load(dtype, (I.index, J.index), dtype)
    strategies = [
        st.just((loads, loads)),
        st.sampled_from([0, 1, -1, 2, 0.5, -0.0, float("inf"), 100]).filter(
            lambda v: dtype in FLOATS or v == v and abs(v) < 200
        ).map(lambda v: (literal(v, dtype),) * 2),
    ]  # fmt: skip
    if dtype == "i64":
        raw = st.sampled_from(PLACES).map(lambda p: (Expr("index", "i64", (), p), E.index_value(p)))
        strategies.append(raw)
    return st.one_of(strategies)


def names(dtype: str) -> list[str]:
    """Operations whose result does not depend on how torch computes them."""
    if dtype == "bool":
        return ["logical_and", "logical_or", "logical_xor", "logical_not", "eq", "ne"]
    if dtype in INTS:
        return ["add", "sub", "mul", "maximum", "minimum", "lt", "le", "gt", "ge", "eq", "floordiv"]
    return ["add", "sub", "mul", "div", "neg", "abs", "maximum", "lt", "ge", "floor", "isnan"]


@st.composite
def pairs(draw: st.DrawFn, dtype: str, depth: int = 4) -> Pair:
    if depth == 0 or draw(st.integers(0, 4)) == 0:
        return draw(leaves(dtype))
    kind = draw(st.sampled_from(["op", "op", "cast", "where", "load", "compare"]))
    if kind == "cast":
        source = draw(st.sampled_from(ARITHMETIC))
        # floats to integers: only what fits has a meaning
        source = source if dtype in FLOATS or dtype == "bool" or source not in FLOATS else dtype
        a = draw(pairs(source, depth - 1))
        raw = Expr("cast", dtype, (a[0],)) if source != dtype else a[0]
        return raw, cast(a[1], dtype)
    if kind == "where":
        c, a, b = (draw(pairs(d, depth - 1)) for d in ("bool", dtype, dtype))
        return Expr("where", dtype, (c[0], a[0], b[0])), op("where", c[1], a[1], b[1])
    if kind == "load":
        m = draw(pairs("bool", depth - 1))
        fill = draw(st.sampled_from([0, 1, -0.0]))
        at = (I.index, J.index)
        raw = Expr("load", dtype, (m[0],), (dtype, at, literal(fill, dtype).attr))
        return raw, E.load(dtype, at, dtype, m[1], fill)
    if kind == "compare" and dtype == "bool":
        of = draw(st.sampled_from(["i64", "i64", "f32", "u8"]))
        name = draw(
            st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or"])
        )
        a, b = draw(pairs(of, depth - 1)), draw(pairs(of, depth - 1))
        return Expr(name, "bool", (a[0], b[0])), op(name, a[1], b[1])
    name = draw(
        st.sampled_from([n for n in names(dtype) if (n in COMPARISONS) == (dtype == "bool")])
    )
    args = [draw(pairs(dtype, depth - 1)) for _ in range(SCALAR_OPS[name][0])]
    return Expr(name, dtype, tuple(a[0] for a in args)), op(name, *(a[1] for a in args))


def value(e: Expr) -> torch.Tensor:
    got = Evaluator(AXES, {}, TENSORS, "cpu").value(e).expand(3, 4)
    assert got.dtype == TO_TORCH[e.dtype]
    return got


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    nan = a.isnan() & b.isnan()
    return bool((nan | ((a == b) & (a.signbit() == b.signbit()))).all())


typed = st.sampled_from(ARITHMETIC).flatmap(lambda d: pairs(d))


@settings(max_examples=600, deadline=None)
@given(typed)
def test_folding_keeps_values_and_dtypes(pair: Pair) -> None:
    raw, reduced = pair
    assert raw.dtype == reduced.dtype
    facts(reduced)  # every node is well formed
    assert same(value(raw), value(reduced)), f"{raw!r} became {reduced!r}"


@settings(max_examples=300, deadline=None)
@given(typed, st.integers(0, 2), st.integers(0, 3))
def test_substitution_is_evaluation_at_a_point(pair: Pair, i: int, j: int) -> None:
    for e in pair:
        moved = e.substitute({I: const(i), J: const(j)})
        assert same(value(moved), value(e)[i, j].expand(3, 4)), f"{e!r} became {moved!r}"


@settings(max_examples=100, deadline=None)
@given(typed)
def test_gathered_positions_move_along(pair: Pair) -> None:
    """An index that is loaded is rebuilt with what it is loaded from."""
    place = cast(op("where", cast(pair[1], "bool"), literal(1, "i64"), literal(2, "i64")), "i64")
    gather = E.load("f32", (atom(Value(place)), J.index), "f32")
    moved = gather.substitute({I: const(1)})
    assert I not in moved.axes()
    assert same(value(moved), value(gather)[1].expand(3, 4))


def test_a_rounding_leaves_signs_alone() -> None:
    for dtype in ("bf16", "f16", "u8"):
        number = E.load(dtype, (I.index, J.index), dtype)
        for name in ("neg", "abs"):
            signed = op(name, cast(number, "f32"))
            rounded = Expr("cast", dtype, (signed,))
            reduced = cast(rounded, "f32")
            assert same(value(reduced), value(Expr("cast", "f32", (rounded,))))
            assert (reduced is signed) == (dtype != "u8"), "a whole number may have no sign"
