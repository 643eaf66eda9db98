"""Each invariant of programs has broken programs that the verifier catches, by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deuteron.base.errors import VerifyError
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, literal, op
from deuteron.ir.index import Axis, Index, Sym, Value, atom, const
from deuteron.ir.program import Check, Compute, Def, Extern, Input, Output, Program, ViewArg
from deuteron.ir.verify import verify_program
from tests.ir.samples import N, S, at, everything, lay, read, softmax, whole

i, j, k = Axis("i", 8), Axis("j", 4), Axis("k", 4)
X = Input("x", lay(8, 4), 0)
IDS = Input("ids", lay(8, dtype="i64"), 1)
x = read("x", i, j)
one = literal(1.0, "f32")


def make(*defs: Def, outputs: tuple[Output, ...] = (), **kwargs: Any) -> Program:
    return Program((X, IDS, *defs), outputs, **kwargs)


def pointwise(body: Expr, *axes: Axis, name: str = "y", **kwargs: Any) -> Compute:
    axes = axes or (i, j)
    layout = lay(*(a.extent for a in axes), dtype=body.dtype)
    return Compute(name, axes, body, **{"layout": layout, **kwargs})


def column(at_: Index | int, **kwargs: Any) -> Compute:
    return pointwise(read("x", i, at_, **kwargs), i)


def call(*names: str, **kwargs: Any) -> Extern:
    args = {"args": (ViewArg("x", (const(8),), (const(4),), const(0)),), "kwargs": ()}
    return Extern(
        names, "aten.neg.default", **{**args, "layouts": (lay(8),) * len(names), **kwargs}
    )


gather = atom(Value(read("ids", i, dtype="i64")))
scatter = Compute("y", (i,), one, lay(8, 4), "x", (i.index, const(0)))
seed = read("ids", 0, dtype="i64")
other = Sym("other")
wide = Expr("load", "f64", (), ("x", at(i, j), None))

BROKEN: dict[str, tuple[str, Callable[[], Program]]] = {
    "defined twice": ("names", lambda: make(pointwise(x), pointwise(x))),
    "read before definition": (
        "names", lambda: make(pointwise(read("z", i, j)), pointwise(x, name="z"))),
    "unknown target": ("names", lambda: make(replace(scatter, target="z"))),
    "unknown view": (
        "names", lambda: make(call("y", args=(ViewArg("z", (), (), const(0)),)))),
    "unknown output": ("names", lambda: make(outputs=(whole("z", lay(8)),))),
    "two inputs in one place": ("names", lambda: make(Input("z", lay(8), 0))),
    "no such input": ("names", lambda: make(Input("z", lay(8), 9), num_inputs=2)),
    "missing constant": ("names", lambda: replace(everything()[0], constants={})),
    "two ranks": ("layouts", lambda: make(pointwise(x, layout=replace(lay(8, 4), strides=at(i))))),
    "index of another rank": ("layouts", lambda: make(pointwise(read("x", i), i))),
    "store of another rank": ("layouts", lambda: make(replace(scatter, index=(i.index,)))),
    "axes beside the shape": ("layouts", lambda: make(pointwise(x, layout=lay(4, 8)))),
    "output of two ranks": (
        "layouts", lambda: make(outputs=(Output("x", (const(8),), ()),))),
    "view that goes back": (
        "layouts",
        lambda: Program(
            (Input("x", lay(N), 0),
             call("y", args=(ViewArg("x", (atom(S),), (-atom(S),), atom(S)),))),
            (), ((S, ("shape", 0, 0)),), num_inputs=1)),
    "axis twice": ("axes", lambda: make(pointwise(one, i, i))),
    "foreign axis": ("axes", lambda: make(pointwise(x, i))),
    "foreign axis in a gather": (
        "axes", lambda: make(pointwise(read("x", atom(Value(read("ids", j, dtype="i64"))), 0), i))),
    "foreign axis of a store": ("axes", lambda: make(replace(scatter, index=at(i, j)))),
    "foreign axis of a scan": ("axes", lambda: make(pointwise(E.scan("sum", k, x), i, j))),
    "reduction binds an axis": ("axes", lambda: make(pointwise(E.reduce("sum", (j,), x), i, j))),
    "reduction over nothing": ("axes", lambda: make(pointwise(E.reduce("sum", (), x)))),
    "mixed dtypes": (
        "dtypes", lambda: make(pointwise(Expr("add", "f32", (x, literal(1.0, "f64")))))),
    "wrong result dtype": ("dtypes", lambda: make(pointwise(Expr("lt", "f32", (x, one))))),
    "condition is a number": (
        "dtypes", lambda: make(pointwise(Expr("where", "f32", (x, x, one))))),
    "mask is a number": (
        "dtypes", lambda: make(pointwise(Expr("load", "f32", (one,), ("x", at(i, j), 0.0))))),
    "load of another dtype": ("dtypes", lambda: make(pointwise(wide))),
    "store of another dtype": ("dtypes", lambda: make(pointwise(x, layout=lay(8, 4, dtype="f16")))),
    "scatter of another dtype": (
        "dtypes", lambda: make(replace(scatter, body=literal(1, "i64"),
                                       layout=lay(8, 4, dtype="i64")))),
    "position of 32 bits": (
        "dtypes",
        lambda: make(column(atom(Value(E.cast(read("ids", i, dtype="i64"), "i32")))))),
    "no dtype": ("dtypes", lambda: make(pointwise(Expr("neg", "f8", (x,)), layout=lay(8, 4)))),
    "reduction of another dtype": (
        "dtypes", lambda: make(pointwise(Expr("reduce", "f64", (x,), ("sum", (j,))), i))),
    "unrounded number that is no half": (
        "dtypes", lambda: make(pointwise(Expr("cast", "f32", (x,), E.UNROUNDED)))),
    "any of numbers": ("dtypes", lambda: make(pointwise(E.reduce("any", (j,), x), i))),
    "seed is a float": (
        "dtypes", lambda: make(pointwise(E.random("rand", one, 0, i.index, "f32")))),
    "unknown operation": ("kinds", lambda: make(pointwise(Expr("frobnicate", "f32", (x,))))),
    "two arguments too few": ("kinds", lambda: make(pointwise(Expr("fma", "f32", (x,))))),
    "unknown reduction": (
        "kinds", lambda: make(pointwise(Expr("reduce", "f32", (x,), ("xor", (j,))), i))),
    "unknown scan": ("kinds", lambda: make(pointwise(E.scan("any", j, x)))),
    "two positions": ("kinds", lambda: make(
        Compute("y", (), E.reduce("argmax", (i, j), x), lay(dtype="i64")))),
    "unknown distribution": (
        "kinds", lambda: make(pointwise(E.random("cauchy", read("ids", 0, dtype="i64"), 0,
                                                 i.index, "f32")))),
    "literal of another kind": ("kinds", lambda: make(pointwise(Expr("literal", "f32", (), 1)))),
    "mask without fill": (
        "kinds", lambda: make(pointwise(Expr("load", "f32", (op("lt", x, one),),
                                             ("x", at(i, j), None))))),
    "mask without target": ("kinds", lambda: make(pointwise(x, mask=op("lt", x, one)))),
    "accumulates nowhere": ("kinds", lambda: make(pointwise(x, accumulate="sum"))),
    "unique places nowhere": ("kinds", lambda: make(pointwise(x, unique=True))),
    "unique places that do not fill": (
        "kinds", lambda: make(replace(scatter, target=None, unique=True))),
    "unknown accumulation": ("kinds", lambda: make(replace(scatter, accumulate="xor"))),
    "reads beyond the end": ("range", lambda: make(pointwise(read("x", i.index + 1, j)))),
    "reads before the start": ("range", lambda: make(pointwise(read("x", i, j.index - 1)))),
    "reads at a constant outside": ("range", lambda: make(column(4))),
    "writes beyond the end": (
        "range", lambda: make(replace(scatter, index=(i.index + 1, const(0))))),
    "reads beyond a size": (
        "range", lambda: Program((Input("x", lay(N), 0), pointwise(read("x", N))), (),
                                 ((S, ("shape", 0, 0)),))),
    "read after overwriting": (
        "overwritten", lambda: make(scatter, pointwise(x, name="z"))),
    "returned after overwriting": (
        "overwritten", lambda: make(scatter, outputs=(whole("x", lay(8, 4)),))),
    "overwritten twice by an old name": (
        "overwritten", lambda: make(scatter, replace(scatter, name="z"))),
    "view of what is overwritten": (
        "overwritten",
        lambda: make(call("v", aliases=("x",)), scatter, pointwise(read("v", i), i))),
    "passed after overwriting": ("overwritten", lambda: make(scatter, call("z"))),
    "overwriter reads elsewhere": (
        "overwritten", lambda: make(replace(scatter, body=read("x", i, 1)))),
    "unknown size": (
        "sizes", lambda: make(pointwise(literal(1.0, "f32"), Axis("a", atom(other))))),
    "size of another program": (
        "sizes", lambda: Program((Input("x", lay(atom(Sym("s0"))), 0),), (),
                                 ((S, ("shape", 0, 0)),))),
    "unknown size of an output": (
        "sizes", lambda: make(outputs=(Output(None, value=atom(other)),))),
    "size before its call": (
        "sizes", lambda: make(pointwise(one, Axis("a", atom(other))),
                              call("z", sizes=(other,)))),
    "result of a size that nobody tells": (
        "sizes", lambda: make(call("z", layouts=(lay(atom(other)),)),
                              pointwise(read("z", i), i))),
    "size of a later result": (
        "sizes", lambda: make(pointwise(one, Axis("a", atom(other))), call("z"),
                              sizes=((other, ("result", "z", 0)),))),
    "size made of a later one": (
        "sizes", lambda: make(pointwise(one, Axis("a", atom(other))), call("z", sizes=(Sym("u"),)),
                              sizes=((other, ("expr", "u + 1", 0)),))),
    "check of what nobody tells": ("sizes", lambda: make(checks=(Check("(u == 1)", ""),))),
    "size defined twice": (
        "sizes", lambda: make(call("v", sizes=(other,)), call("z", sizes=(other,)))),
    "results without layouts": ("calls", lambda: make(call("v", layouts=()))),
    "result without layout": ("calls", lambda: make(call("v", layouts=(None,)))),
    "aliases of other results": ("calls", lambda: make(call("v", aliases=(None, None)))),
    "index of 32 bits": (
        "dtypes", lambda: make(pointwise(Expr("index", "i32", (), i.index), i))),
    "cast of two values": ("kinds", lambda: make(pointwise(Expr("cast", "f64", (x, x))))),
    "scan along a number": (
        "kinds", lambda: make(pointwise(Expr("scan", "f32", (x,), ("sum", 1))))),
    "scan of another dtype": (
        "dtypes", lambda: make(pointwise(Expr("scan", "f64", (x,), ("sum", j))))),
    "random number of another dtype": (
        "dtypes", lambda: make(pointwise(E.random("rand", seed, 0, i.index, "i64"), i))),
    "stream that is no number": (
        "kinds", lambda: make(pointwise(Expr("random", "f32", (seed,), ("rand", "0", i.index)),
                                        i))),
    "check of a float": (
        "dtypes", lambda: make(pointwise(Expr("check", "i64", (x,), const(4))))),
    "check under a number": (
        "dtypes",
        lambda: make(
            pointwise(Expr("check", "i64", (E.index_value(i.index), x), const(4)), i)
        ),
    ),
    "check by what moves": (
        "axes",
        lambda: make(pointwise(Expr("check", "i64", (E.index_value(i.index),), i.index), i))),
    "tensor of no dtype": ("dtypes", lambda: make(Input("z", lay(8, dtype="f9"), 2))),
    "scatter masked by a number": ("dtypes", lambda: make(replace(scatter, mask=one))),
    "view of two ranks": (
        "layouts",
        lambda: make(call("y", args=(ViewArg("x", (const(8),), (const(1),) * 2, const(0)),)))),
    "view by a stride of unknown sign": (
        "layouts",
        lambda: make(call("y", args=(ViewArg("x", (const(8),), (N - 9,), const(0)),)))),
    "mask that lets through": (
        "range", lambda: make(pointwise(read(
            "x", i, j.index - 1, mask=op("ge", E.index_value(i.index), literal(1, "i64")))))),
    "mask one too late": (
        "range", lambda: make(pointwise(read(
            "x", i, j.index + 1, mask=op("lt", E.index_value(j.index), literal(4, "i64")))))),
    "store masked beside the end": (
        "range", lambda: make(replace(
            scatter, index=(i.index + 1, const(0)),
            mask=op("lt", E.index_value(i.index), literal(8, "i64"))))),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_program_is_caught(case: str) -> None:
    invariant, build = BROKEN[case]
    with pytest.raises(VerifyError) as caught:
        verify_program(build(), "some-pass")
    assert caught.value.invariant == invariant, str(caught.value)
    assert caught.value.guilty == "some-pass" and caught.value.node


def test_good_programs_pass() -> None:
    verify_program(softmax(), "lower", strict=True)
    verify_program(everything()[0], "lower", strict=True)
    named = replace(scatter, name="z")
    verify_program(make(pointwise(x), named, pointwise(read("z", i, j), name="w")), "lower")
    verify_program(make(column(gather)), "lower", strict=True)  # lowering checks gathers
    masked = read("x", i, j.index - 1, mask=op("ge", E.index_value(j.index), literal(1, "i64")))
    verify_program(make(pointwise(masked)), "lower", strict=True)
    in_place = replace(scatter, body=op("mul", read("x", i, 0), one))
    verify_program(make(in_place), "lower", strict=True)


def test_what_is_open_passes_unless_strict() -> None:
    n, m = Sym("n", 0, 8), Sym("m", 0, 8)
    a = Axis("a", atom(n))
    # (a*a) % m has no bound that is proven below n, and m == n makes it hold at the hints
    body = read("x", a.index % atom(m) * 0 + a.index * a.index // (a.index + 1))
    p = Program(
        (Input("x", lay(atom(n)), 0), pointwise(body, a)), (),
        ((n, ("shape", 0, 0)), (m, ("int", 1, 0))),
    )  # fmt: skip
    verify_program(p, "lower")
    with pytest.raises(VerifyError, match="range"):
        verify_program(p, "lower", strict=True)


def test_the_error_names_the_users_line_and_an_example() -> None:
    bad = softmax()
    y = bad.defs[-1]
    assert isinstance(y, Compute)
    shifted = replace(y, body=y.body.substitute({y.axes[1]: y.axes[1].index + 1}))
    with pytest.raises(VerifyError) as caught:
        verify_program(replace(bad, defs=(*bad.defs[:-1], shifted)), "lower")
    text = str(caught.value)
    assert "model.py:3" in text and "q + 1" in text and "q = 7" in text


def test_deep_and_wide_programs_take_linear_time() -> None:
    deep = x
    for _ in range(30000):
        deep = op("neg", deep)
    shared = x
    for _ in range(60):
        shared = op("add", shared, shared)  # 2**60 paths
    verify_program(make(pointwise(deep), pointwise(shared, name="z")), "lower")
