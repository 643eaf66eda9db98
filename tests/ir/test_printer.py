"""Programs print and read back as the same program."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, cast, literal, op
from deuteron.ir.index import Axis, Index, Sym, Value, atom, const
from deuteron.ir.operations import COMPARISONS, DTYPES, FLOATS, SCALAR_OPS
from deuteron.ir.parser import parse_program
from deuteron.ir.printer import print_program
from deuteron.ir.program import Compute, Extern, Input, Layout, Origin, Output, Program, ViewArg
from deuteron.ir.reference import run_program
from deuteron.schedule.printer import print_schedule
from tests.ir.samples import everything, fused_softmax, lay, read, softmax
from tests.ir.trees import AXES, SYMS, Tree, build, trees

SIZES = tuple((s, ("int", k, 0)) for k, s in enumerate(SYMS))


def back(p: Program, **kwargs: Any) -> Program:
    text = print_program(p)
    q = parse_program(text, p.constants, p.callables, **kwargs)
    assert print_program(q) == text
    return q


@pytest.mark.parametrize("make", [softmax, lambda: everything()[0]])
def test_round_trip(make: Any) -> None:
    assert back(make()) == make()


def test_a_program_that_was_read_runs() -> None:
    program, inputs = everything()
    for a, b in zip(run_program(back(program), inputs), run_program(program, inputs)):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_text_is_readable() -> None:
    assert print_program(softmax()) == (
        "program(num_inputs=1)\n"
        "s0 = size(2, 8, ('shape', 0, 0))\n"
        "x = input(0, f32[s0, 8])\n"
        "#: softmax | aten.softmax.int | model.py:3: y = x.softmax(-1)\n"
        "def top(i=s0, *, j=8) -> f32[s0]:\n"
        "    return reduce_max[j](x[i, j])\n"
        "#: softmax | aten.softmax.int | model.py:3: y = x.softmax(-1)\n"
        "def total(k=s0, *, m=8) -> f32[s0]:\n"
        "    return reduce_sum[m](exp(x[k, m] - top[k]))\n"
        "#: softmax | aten.softmax.int | model.py:3: y = x.softmax(-1)\n"
        "def y(p=s0, q=8) -> f32[s0, 8]:\n"
        "    return exp(x[p, q] - top[p]) / total[p]\n"
        "output('y', (s0, 8), (8, 1), 0)\n"
    )


def of(body: Expr, *indices: Index) -> Program:
    layout = Layout(tuple(a.extent for a in AXES), tuple(const(1) for _ in AXES), body.dtype)
    y = Compute("y", AXES, body, layout)
    views = tuple(Output("y", (i,), (i,), i) for i in indices)
    return Program((Input("x", lay(4, 4), 0), y), views, SIZES)


@settings(max_examples=300, deadline=None)
@given(trees)
def test_every_index_reads_back(tree: Tree) -> None:
    index = build(tree)
    program = of(E.load("x", (index, const(0)), "f32"), *([] if index.axes() else [index]))
    assert back(program) == program


SCALARS = st.sampled_from([n for n, (arity, _) in SCALAR_OPS.items() if arity <= 2])
LITERALS = st.builds(
    literal,
    st.sampled_from([0, 1, -1, 0.1, -0.0, math.inf, -math.inf, 1e-8, 1e30, 3.5]),
    st.sampled_from(FLOATS),
)


def grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    def apply(name: str, a: Expr, b: Expr) -> Expr:
        args = (a, b)[: SCALAR_OPS[name][0]]
        return Expr(name, "bool" if name in COMPARISONS else args[-1].dtype, args)

    return st.one_of(
        st.builds(apply, SCALARS, inner, inner),
        st.builds(cast, inner, st.sampled_from(DTYPES)),
        st.builds(lambda a, d: Expr("cast", d, (a,)), inner, st.sampled_from(DTYPES)),
        st.builds(lambda a: E.load("x", (atom(Value(cast(a, "i64"))), const(1)), "f32"), inner),
        st.builds(lambda m: E.load("x", (const(0), const(1)), "f32", cast(m, "bool"), 0.1), inner),
        st.builds(lambda a: E.reduce("sum", (Axis("r", 7),), a), inner),
        st.builds(lambda a, t: E.random("rand", cast(a, "i64"), 5, build(t), "f64"), inner, trees),
    )  # fmt: skip


exprs = st.recursive(
    st.one_of(
        LITERALS,
        st.integers(-5, 2**63 - 1).map(lambda v: literal(v, "i64")),
        st.integers(-5, 200).map(lambda v: literal(v, "u8")),
        st.booleans().map(lambda v: literal(v, "bool")),
        trees.map(lambda t: E.index_value(build(t))),
        trees.map(lambda t: E.load("x", (build(t), const(0)), "f32")),
        trees.map(lambda t: E.load("x", (build(t), const(0)), "f64")),
    ),
    grow,
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(exprs)
def test_every_expression_reads_back(body: Expr) -> None:
    assert back(of(body)) == of(body)


def test_long_and_shared_expressions() -> None:
    i = Axis("i", 4)
    deep = shared = read("x", i, 0)
    for k in range(3000):
        deep = op("add", op("neg", deep), literal(k, "f32"))
    for _ in range(40):
        shared = op("mul", shared, shared)
    for body in (deep, shared):
        program = Program((Input("x", lay(4, 4), 0), Compute("y", (i,), body, lay(4))), ())
        text = print_program(program)
        assert max(map(len, text.splitlines())) < 200
        assert parse_program(text) == program


@dataclass(frozen=True)
class Thing:
    key: str


def test_library_calls() -> None:
    thing = Thing("graph 1")
    u = Sym("u0", 0, 128)
    args = (
        1, -2.5, math.inf, True, None, "mode", [1, (2, const(3))], 1 + 2j, thing, atom(u) * 2,
        torch.float32, torch.device("cpu"), torch.contiguous_format, torch.strided,
        ViewArg("x", (const(2),), (const(1),), const(4)),
    )  # fmt: skip
    first = Extern(
        ("a", None), "aten.unique.default", args, (("dim", -1),), (lay(atom(u)), None), ("x",),
        ("x", None), (None, u), (Origin("n", "aten.u.default", "f.py:1: a | b"), Origin("m", "o")),
        "because", True,
    )  # fmt: skip
    z = Sym("z0", 0, 5)
    layout = Layout((atom(z),), (const(2),), "bf16", "cuda:0", const(3))
    program = Program((Input("x", lay(4, 4), 0), first, Input("w", layout, 1)), (), num_inputs=2)
    assert back(program, objects={"graph 1": thing}) == program


def test_wrong_text_names_the_line() -> None:
    text = print_program(softmax())
    for old, new, why in (
        ("x[i, j]", "x[i, zz]", "no axis or size 'zz'"),
        ("top[k]", "nothing[k]", "no tensor 'nothing'"),
        ("input(0", "inputt(0", "no definition 'inputt'"),
        ("return reduce_max[j]", "pass; reduce_max[j]", "not a"),
    ):
        with pytest.raises(SyntaxError, match=why):
            parse_program(text.replace(old, new, 1))


def test_a_thousand_definitions_in_a_second() -> None:
    defs: list[Any] = list(softmax().defs)
    for k in range(1000):
        i, j = Axis(f"a{k}", 4), Axis(f"b{k}", 8)
        defs.append(Compute(f"t{k}", (i, j), op("exp", op("neg", read("x", i, j))), lay(4, 8)))
    program = replace(softmax(), defs=tuple(defs))
    start = time.perf_counter()
    text = print_program(program)
    assert parse_program(text) == program
    assert time.perf_counter() - start < 5


def test_schedule_text() -> None:
    assert print_schedule(fused_softmax()) == (
        "kernel k0 on cpu: 0 bytes, 0 flops, 0.0 us\n"
        "    reads x: f32[s0, 8]\n"
        "    writes y: f32[s0, 8]\n"
        "    for i < s0; over j < 8:\n"
        "        top = max[j](x[i, j])\n"
        "        _1 = exp(x[i, j] - top)\n"
        "        total = sum[j](_1)\n"
        "        y[i, j] = _1 / total\n"
    )
