"""Hand-built kernels for the Triton generator, and a program that runs them under Triton's
interpreter.

``python triton_cases.py NAME...`` (with TRITON_INTERPRET=1) runs cases and prints one JSON line
each: the largest error relative to what is allowed, by output. The same cases are compiled ahead of
time by test_triton.py.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deuteron.base.device import named_gpu
from deuteron.codegen.triton.generate import Config, TritonKernel, generate
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, cast, index_value, literal, load, op
from deuteron.ir.index import Axis, Index, IndexLike, Sym, as_index, atom, evaluate
from deuteron.ir.program import Layout, contiguous, contiguous_strides
from deuteron.schedule.kernel import Kernel, Nest, Reduce, Scan, Store
from dev.check.quick import by_halves, quicken

SPEC = named_gpu("H200")
TORCH = {"bool": torch.bool, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16,
         "i32": torch.int32, "i64": torch.int64, "f16": torch.float16, "bf16": torch.bfloat16,
         "f32": torch.float32, "f64": torch.float64}  # fmt: skip


@dataclass
class Case:
    """A kernel, its inputs, and what its outputs must be."""

    nests: Sequence[Nest]
    layouts: dict[str, Layout]
    inputs: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]
    sizes: dict[str, int] = field(default_factory=dict)
    tolerance: float = 2e-6
    blocks: dict[str, int] = field(default_factory=dict)  # overrides of constexprs in the run

    def kernel(self, name: str) -> Kernel:
        outs = tuple((n, self.layouts[n]) for n in self.expected)
        ins = tuple((n, self.layouts[n]) for n in self.inputs)
        return Kernel(name, tuple(self.nests), ins, outs, (), "cuda", 0, 0.0, 0.0)


CASES: dict[str, Callable[[], Case]] = {}


def case(f: Callable[[], Case]) -> Callable[[], Case]:
    CASES[f.__name__] = f
    return f


def axis(name: str, extent: IndexLike) -> Axis:
    return Axis(name, extent)


def lay(*shape: IndexLike, dtype: str = "f32") -> Layout:
    return contiguous(tuple(as_index(n) for n in shape), dtype, "cuda")


def strided(shape: Sequence[int], strides: Sequence[int], dtype: str = "f32") -> Layout:
    return Layout(tuple(map(as_index, shape)), tuple(map(as_index, strides)), dtype, "cuda")


def at(name: str, *indices: Axis | IndexLike, dtype: str = "f32") -> Expr:
    return load(
        name, tuple(i.index if isinstance(i, Axis) else as_index(i) for i in indices), dtype
    )


def local(name: str, *axes: Axis, dtype: str = "f32") -> Expr:
    return load(name, tuple(a.index for a in axes), dtype)


def store(
    tensor: str, indices: Sequence[Axis | IndexLike], value: Expr, level: str = "point", **more: Any
) -> Store:
    return Store(
        tensor,
        tuple(i.index if isinstance(i, Axis) else as_index(i) for i in indices),
        value,
        level,
        **more,
    )


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ------------------------------------------------------------------------------------- pointwise


@case
def pointwise() -> Case:
    i, j = axis("i", 7), axis("j", 33)
    x, b = at("x", i, j), at("b", j)
    y = op("div", op("sin", op("mul", x, b)), op("add", op("exp", x), literal(1.5, "f32")))
    inputs = {"x": rand(7, 33), "b": rand(33, seed=1)}
    want = torch.sin(inputs["x"] * inputs["b"]) / (torch.exp(inputs["x"]) + 1.5)
    return Case(
        [Nest((i, j), (), (store("y", (i, j), y),))],
        {"x": lay(7, 33), "b": lay(33), "y": lay(7, 33)},
        inputs,
        {"y": want},
    )


@case
def flat_half() -> Case:
    i, j = axis("i", 4), axis("j", 128)
    x = cast(at("x", i, j, dtype="bf16"), "f32")
    y = cast(op("mul", op("sigmoid", x), x), "bf16")
    data = rand(4, 128, dtype=torch.bfloat16)
    return Case(
        [Nest((i, j), (), (store("y", (i, j), y),))],
        {"x": lay(4, 128, dtype="bf16"), "y": lay(4, 128, dtype="bf16")},
        {"x": data},
        {"y": (data.float() * torch.sigmoid(data.float())).bfloat16()},
        tolerance=1e-2,
    )


@case
def transposed() -> Case:
    i, j = axis("i", 48), axis("j", 40)
    y = op("add", at("x", i, j), at("z", i, j))
    x, z = rand(40, 48).t(), rand(48, 40, seed=1)
    return Case(
        [Nest((i, j), (), (store("y", (i, j), y),))],
        {"x": strided((48, 40), (1, 48)), "z": lay(48, 40), "y": lay(48, 40)},
        {"x": x, "z": z},
        {"y": x + z},
        tolerance=0,
    )


@case
def permuted_batch() -> Case:
    n, c, s = axis("n", 3), axis("c", 20), axis("s", 35)
    x = rand(3, 20, 35)
    return Case(
        [Nest((n, s, c), (), (store("y", (n, s, c), op("neg", at("x", n, c, s))),))],
        {"x": lay(3, 20, 35), "y": lay(3, 35, 20)},
        {"x": x},
        {"y": -x.transpose(1, 2).contiguous()},
        tolerance=0,
    )


@case
def dtypes() -> Case:
    i = axis("i", 50)
    a, b = at("a", i, dtype="i32"), at("b", i, dtype="i32")
    f = at("f", i)
    mixed = op(
        "where", op("logical_and", at("m", i, dtype="bool"), op("lt", a, b)), cast(a, "f32"), f
    )
    stores = (
        store("q", (i,), op("floordiv", a, b)), store("t", (i,), op("truncdiv", a, b)),
        store("r", (i,), op("remainder", a, b)), store("w", (i,), mixed),
        store("c", (i,), op("ge", f, literal(0.0, "f32"))), store("h", (i,), cast(f, "f16")),
        store("k", (i,), cast(f, "i64")),
        store("d", (i,), op("mul", cast(f, "f64"), literal(0.1, "f64"))),
        store("u", (i,), cast(a, "u8")), store("p", (i,), index_value(i.index * 3 + 1)),
        store("s", (i,), op("lshift", b, literal(3, "i32"))),
        store("n", (i,), op("logical_not", at("m", i, dtype="bool"))),
    )  # fmt: skip
    g = torch.Generator().manual_seed(3)
    ta = torch.randint(-40, 40, (50,), generator=g, dtype=torch.int32)
    tb = torch.randint(1, 9, (50,), generator=g, dtype=torch.int32) * torch.tensor(
        [1, -1] * 25, dtype=torch.int32
    )
    tf, tm = rand(50) * 10, torch.rand(50, generator=g) < 0.5
    want = {
        "q": torch.div(ta, tb, rounding_mode="floor"),
        "t": torch.div(ta, tb, rounding_mode="trunc"),
        "r": torch.remainder(ta, tb),
        "w": torch.where(tm & (ta < tb), ta.float(), tf), "c": tf >= 0,
        "h": tf.half(), "k": tf.long(), "d": tf.double() * 0.1, "u": ta.to(torch.uint8),
        "p": torch.arange(50) * 3 + 1, "s": tb << 3, "n": ~tm,
    }  # fmt: skip
    kinds = dict(
        a="i32",
        b="i32",
        f="f32",
        m="bool",
        q="i32",
        t="i32",
        r="i32",
        w="f32",
        c="bool",
        h="f16",
        k="i64",
        d="f64",
        u="u8",
        p="i64",
        s="i32",
        n="bool",
    )
    return Case(
        [Nest((i,), (), stores)],
        {n: lay(50, dtype=d) for n, d in kinds.items()},
        {"a": ta, "b": tb, "f": tf, "m": tm},
        want,
        tolerance=0,
    )


UNARY = [
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "erf",
    "erfc",
    "erfinv",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "floor",
    "ceil",
    "trunc",
    "round",
    "abs",
    "sign",
    "lgamma",
    "digamma",
    "i0",
    "i0e",
    "i1",
    "i1e",
    "ndtri",
    "isnan",
    "isinf",
    "signbit",
]


@case
def functions() -> Case:
    i = axis("i", 40)
    special = {
        "i0": "i0",
        "i0e": "special.i0e",
        "i1": "special.i1",
        "i1e": "special.i1e",
        "ndtri": "special.ndtri",
    }
    x = torch.cat(
        [rand(30) * 2, torch.rand(6), torch.tensor([0.0, -0.0, float("inf"), float("nan")])]
    )
    stmts, want, layouts = [], {}, {"x": lay(40)}
    for name in UNARY:
        out = op(name, at("x", i))
        stmts.append(store(f"y_{name}", (i,), out))
        f: Any = torch
        for part in special.get(name, name).split("."):
            f = getattr(f, part)
        want[f"y_{name}"] = torch.where(x.isnan(), 0.0, f(x)) if name == "sign" else f(x)
        layouts[f"y_{name}"] = lay(40, dtype=out.dtype)
    return Case([Nest((i,), (), tuple(stmts))], layouts, {"x": x}, want, tolerance=4e-6)


@case
def binary_functions() -> Case:
    i = axis("i", 60)
    a, b = at("a", i), at("b", i)
    names = [
        "pow",
        "atan2",
        "hypot",
        "fmod",
        "remainder",
        "floordiv",
        "truncdiv",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "copysign",
        "nextafter",
    ]
    ta, tb = rand(60) * 5, rand(60, seed=1)
    ta[3], tb[5], ta[7] = float("nan"), float("nan"), float("inf")
    ref = {
        "truncdiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        "floordiv": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    }
    want = {f"y_{n}": ref.get(n, getattr(torch, n, None))(ta, tb) for n in names}
    stmts = tuple(store(f"y_{n}", (i,), op(n, a, b)) for n in names)
    return Case(
        [Nest((i,), (), stmts)],
        {n: lay(60) for n in ("a", "b", *want)},
        {"a": ta, "b": tb},
        want,
        tolerance=4e-6,
    )


@case
def symbolic() -> Case:
    n, m = Sym("s0", 0, 64), Sym("s1", 0, 30)
    i, j = axis("i", atom(n)), axis("j", atom(m))
    flat = i.index * atom(m) + j.index
    y = op("mul", at("x", i, j), at("b", j))
    stmts = (store("y", (i, j), y), store("z", (flat,), op("add", y, literal(1.0, "f32"))))
    x, b = rand(9, 13), rand(13, seed=1)
    return Case(
        [Nest((i, j), (), stmts)],
        {
            "x": lay(atom(n), atom(m)),
            "b": lay(atom(m)),
            "y": lay(atom(n), atom(m)),
            "z": lay(atom(n) * atom(m)),
        },
        {"x": x, "b": b},
        {"y": x * b, "z": (x * b + 1).flatten()},
        sizes={"s0": 9, "s1": 13},
    )


@case
def masked_load() -> Case:
    """A pad by one on both sides."""
    i = axis("i", 22)
    inside = op(
        "logical_and",
        op("ge", index_value(i.index), literal(1, "i64")),
        op("lt", index_value(i.index), literal(21, "i64")),
    )
    y = load("x", (i.index - 1,), "f32", inside, -2.5)
    x = rand(20)
    return Case(
        [Nest((i,), (), (store("y", (i,), y),))],
        {"x": lay(20), "y": lay(22)},
        {"x": x},
        {"y": torch.nn.functional.pad(x, (1, 1), value=-2.5)},
        tolerance=0,
    )


@case
def gather() -> Case:
    i, j = axis("i", 11), axis("j", 24)
    row = E.as_position(at("idx", i, dtype="i64"))
    w, idx = rand(30, 24), torch.randint(0, 30, (11,), generator=torch.Generator().manual_seed(0))
    return Case(
        [Nest((i, j), (), (store("y", (i, j), load("w", (row, j.index), "f32")),))],
        {"w": lay(30, 24), "idx": lay(11, dtype="i64"), "y": lay(11, 24)},
        {"w": w, "idx": idx},
        {"y": w[idx]},
        tolerance=0,
    )


@case
def scatter_add() -> Case:
    i, j = axis("i", 11), axis("j", 8)
    row = E.as_position(at("idx", i, dtype="i64"))
    stmt = store("y", (row, j.index), at("g", i, j), accumulate="sum")
    g, y = rand(11, 8), rand(5, 8, seed=1)
    idx = torch.randint(0, 5, (11,), generator=torch.Generator().manual_seed(0))
    return Case(
        [Nest((i, j), (), (stmt,))],
        {"g": lay(11, 8), "idx": lay(11, dtype="i64"), "y": lay(5, 8)},
        {"g": g, "idx": idx, "y": y},
        {"y": y.clone().index_add_(0, idx, g)},
    )


@case
def scatter_max() -> Case:
    i = axis("i", 40)
    place = E.as_position(at("idx", i, dtype="i64"))
    keep = op("gt", at("g", i), literal(-1.0, "f32"))
    stmt = store("y", (place,), at("g", i), accumulate="max", mask=keep)
    g, y = rand(40), torch.zeros(6)
    idx = torch.randint(0, 6, (40,), generator=torch.Generator().manual_seed(0))
    want = y.clone().scatter_reduce_(0, idx[g > -1], g[g > -1], "amax")
    return Case(
        [Nest((i,), (), (stmt,))],
        {"g": lay(40), "idx": lay(40, dtype="i64"), "y": lay(6)},
        {"g": g, "idx": idx, "y": y},
        {"y": want},
        tolerance=0,
    )


@case
def aliased_stores() -> Case:
    """Values are computed before stores: the first store may write where a later value is read."""
    i = axis("i", 20)
    stmts = (
        store("b", (i,), op("add", at("a", i), literal(1.0, "f32"))),
        store("c", (i,), op("mul", at("b", i), literal(2.0, "f32"))),
    )
    a, b = rand(20), rand(20, seed=1)
    return Case(
        [Nest((i,), (), stmts)],
        {n: lay(20) for n in "abc"},
        {"a": a, "b": b},
        {"b": a + 1, "c": b * 2},
        tolerance=0,
    )


@case
def random_numbers() -> Case:
    from deuteron.graph import random_ops

    i, j = axis("i", 5), axis("j", 9)
    seed = load("seed", (), "i64")
    where = i.index * 9 + j.index
    stmts = (
        store("u", (i, j), E.random("rand", seed, 3, where, "f32")),
        store("n", (i, j), E.random("randn", seed, 4, where, "f32")),
        store("v", (i, j), E.random("rand", seed, 5, where, "f64")),
        store("b", (i, j), E.random("rand_bits", seed, 6, where, "i64")),
    )
    del random_ops
    tseed = torch.tensor(0x123456789ABCDEF)
    rand_op, randn_op = torch.ops.deuteron.rand, torch.ops.deuteron.randn
    words = torch.ops.deuteron.randint64(tseed, 6, 0, 2**62, [5, 9])
    want = {
        "u": rand_op(tseed, 3, [5, 9], torch.float32),
        "n": randn_op(tseed, 4, [5, 9], torch.float32),
        "v": rand_op(tseed, 5, [5, 9], torch.float64),
        "b": words,
    }
    stmts = (
        *stmts[:3],
        store(
            "b",
            (i, j),
            op(
                "remainder",
                op("bitwise_and", stmts[3].value, literal(2**63 - 1, "i64")),
                literal(2**62, "i64"),
            ),
        ),
    )
    return Case(
        [Nest((i, j), (), stmts)],
        {
            "seed": lay(dtype="i64"),
            "u": lay(5, 9),
            "n": lay(5, 9),
            "v": lay(5, 9, dtype="f64"),
            "b": lay(5, 9, dtype="i64"),
        },
        {"seed": tseed},
        want,
        tolerance=2e-6,
    )


@case
def side_by_side() -> Case:
    i, j = axis("i", 30), axis("j", 12)
    k, r = axis("k", 4), axis("r", 10)
    s = Reduce("s", "sum", at("z", k, r))
    nests = [
        Nest((i,), (), (store("y", (i,), op("neg", at("x", i))),)),
        Nest((k,), (r,), (s, store("t", (k,), local("s", k), "row"))),
        Nest((j,), (), (store("w", (j,), op("abs", at("v", j))),)),
    ]
    x, z, v = rand(30), rand(4, 10), rand(12)
    return Case(
        nests,
        {"x": lay(30), "y": lay(30), "z": lay(4, 10), "t": lay(4), "v": lay(12), "w": lay(12)},
        {"x": x, "z": z, "v": v},
        {"y": -x, "t": z.sum(1), "w": v.abs()},
    )


@case
def pooling_window() -> Case:
    """A short reduction over windows that overlap: written out."""
    n, i, j, u, v = (axis(k, e) for k, e in zip("nijuv", (2, 9, 16, 3, 3)))
    row, col = i.index * 2 + u.index - 1, j.index * 2 + v.index - 1
    mask = None
    for index, size in ((row, 18), (col, 32)):
        low = op("ge", index_value(index), literal(0, "i64"))
        both = op("logical_and", low, op("lt", index_value(index), literal(size, "i64")))
        mask = both if mask is None else op("logical_and", mask, both)
    at_row = (n.index, row, col)
    top, mean = (load("x", at_row, "f32", mask, fill) for fill in (float("-inf"), 0.0))
    stmts = (
        Reduce("m", "max", top),
        Reduce("s", "sum", mean),
        store("y", (n, i, j), local("m", n, i, j), "row"),
        store("z", (n, i, j), op("mul", local("s", n, i, j), literal(1 / 9, "f32")), "row"),
    )
    x = rand(2, 18, 32)
    want = {
        "y": torch.nn.functional.max_pool2d(x, 3, 2, 1),
        "z": torch.nn.functional.avg_pool2d(x, 3, 2, 1),
    }
    layouts = {"x": lay(2, 18, 32), "y": lay(2, 9, 16), "z": lay(2, 9, 16)}
    return Case([Nest((n, i, j), (u, v), stmts)], layouts, {"x": x}, want)


@case
def folds_inside() -> Case:
    """Reductions inside expressions: a long one is a loop, a short one is written out."""
    i, j, k, m = axis("i", 6), axis("j", 9), axis("k", 40), axis("m", 5)
    dot = E.reduce("sum", (k,), op("mul", at("a", i, k), at("b", k, j)))
    top = E.reduce("max", (m,), at("a", i, m))
    low = E.reduce("min", (k,), at("b", k, 3))
    value = op("sub", op("sub", op("neg", dot), top), low)
    total = Reduce("f", "sum", op("tanh", dot))
    nests = [
        Nest((i, j), (), (store("y", (i, j), value),)),
        Nest((i,), (j,), (total, store("z", (i,), local("f", i), "row"))),
    ]
    a, b = rand(6, 40), rand(40, 9, seed=1)
    want = {
        "y": -(a @ b) - a[:, :5].amax(1, keepdim=True) - b[:, 3].amin(),
        "z": (a @ b).tanh().sum(1),
    }
    layouts = {"a": lay(6, 40), "b": lay(40, 9), "y": lay(6, 9), "z": lay(6)}
    return Case(nests, layouts, {"a": a, "b": b}, want, tolerance=1e-5)


@case
def scatter_half() -> Case:
    """Updates without an instruction: compare and swap."""
    i = axis("i", 30)
    place = E.as_position(at("idx", i, dtype="i64"))
    g = at("g", i, dtype="bf16")
    kinds = {"s": "sum", "p": "prod", "m": "max", "n": "min"}
    stmts = tuple(store(n, (place,), g, accumulate=k) for n, k in kinds.items())
    tg = (torch.arange(30) % 4 - 1).to(torch.bfloat16)
    idx = torch.arange(30) % 7
    outs = {n: torch.ones(7, dtype=torch.bfloat16) for n in kinds}
    want = {
        n: outs[n].clone().scatter_reduce_(0, idx, tg, {"max": "amax", "min": "amin"}.get(k, k))
        for n, k in kinds.items()
    }
    layouts = {n: lay(7, dtype="bf16") for n in kinds}
    return Case(
        [Nest((i,), (), stmts)],
        {"g": lay(30, dtype="bf16"), "idx": lay(30, dtype="i64"), **layouts},
        {"g": tg, "idx": idx, **outs},
        want,
        tolerance=0,
    )


# ------------------------------------------------------------------------------------------ rows


def softmax_stmts(x: Expr, i: Sequence[Axis], r: Axis, out: str = "y") -> tuple:
    m = Reduce("m", "max", x)
    e = op("exp", op("sub", x, local("m", *i)))
    s = Reduce("s", "sum", e)
    return m, s, store(out, (*i, r), op("div", e, local("s", *i)))


def softmax(rows: int, cols: int, **more: Any) -> Case:
    i, r = axis("i", rows), axis("r", cols)
    x = rand(rows, cols)
    x[0, : cols // 2] = float("-inf")
    if rows > 2:
        x[1, :] = float("-inf")
        x[2, 3] = float("nan")
        x[3, :] = torch.finfo(torch.float32).min
    return Case(
        [Nest((i,), (r,), softmax_stmts(at("x", i, r), (i,), r))],
        {"x": lay(rows, cols), "y": lay(rows, cols)},
        {"x": x},
        {"y": torch.softmax(x.double(), 1).float()},
        **more,
    )


@case
def softmax_persistent() -> Case:
    return softmax(5, 50)


@case
def softmax_online() -> Case:
    n = Sym("s0", 0, 100)
    base = softmax(5, 50)
    i, r = axis("i", 5), axis("r", atom(n))
    base.nests = [Nest((i,), (r,), softmax_stmts(at("x", i, r), (i,), r))]
    base.layouts = {"x": lay(5, atom(n)), "y": lay(5, atom(n))}
    base.sizes, base.blocks = {"s0": 50}, {"RBLOCK": 16}
    return base


def layer_norm(rows: int, cols: int, extent: IndexLike, dtype: str = "f32", **more: Any) -> Case:
    i, r = axis("i", rows), axis("r", extent)
    x = cast(at("x", i, r, dtype=dtype), "f32")
    n = cast(index_value(as_index(extent)), "f32")
    mean = op("div", local("s", i), n)
    d = op("sub", x, mean)
    rstd = op("rsqrt", op("add", op("div", local("v", i), n), literal(1e-5, "f32")))
    y = cast(op("add", op("mul", op("mul", d, rstd), at("w", r)), at("b", r)), dtype)
    stmts = (
        Reduce("s", "sum", x),
        Reduce("v", "sum", op("mul", d, d)),
        store("y", (i, r), y),
        store("mean", (i,), mean, "row"),
        store("rstd", (i,), rstd, "row"),
    )
    tx = (rand(rows, cols) * 3 + 100).to(TORCH[dtype])
    tw, tb = rand(cols, seed=1), rand(cols, seed=2)
    wide = tx.double()
    mu, var = wide.mean(1, keepdim=True), wide.var(1, unbiased=False, keepdim=True)
    want = {
        "y": ((wide - mu) / (var + 1e-5).sqrt() * tw + tb).to(TORCH[dtype]),
        "mean": mu[:, 0].float(),
        "rstd": (1 / (var + 1e-5).sqrt())[:, 0].float(),
    }
    return Case(
        [Nest((i,), (r,), stmts)],
        {
            "x": lay(rows, extent, dtype=dtype),
            "w": lay(extent),
            "b": lay(extent),
            "y": lay(rows, extent, dtype=dtype),
            "mean": lay(rows),
            "rstd": lay(rows),
        },
        {"x": tx, "w": tw, "b": tb},
        want,
        **more,
    )


@case
def layer_norm_persistent() -> Case:
    return layer_norm(5, 70, 70, tolerance=3e-5)


@case
def layer_norm_half() -> Case:
    return layer_norm(3, 64, 64, "f16", tolerance=3e-3)


@case
def layer_norm_welford() -> Case:
    return layer_norm(
        5, 70, atom(Sym("s0", 0, 90)), sizes={"s0": 70}, blocks={"RBLOCK": 16}, tolerance=3e-5
    )


def misaligned(cols: int, **more: Any) -> Case:
    """Rows that are not aligned to 16 bytes."""
    i, r = axis("i", 5), axis("r", atom(Sym("s0", 0, 8191)))
    x = cast(at("x", i, r, dtype="f16"), "f32")
    stmts = (
        *softmax_stmts(x, (i,), r),
        Reduce("a", "argmax", x),
        store("p", (i,), local("a", i, dtype="i64"), "row"),
    )
    n = atom(Sym("s0", 0, 8191))
    layouts = {"x": lay(5, n, dtype="f16"), "y": lay(5, n), "p": lay(5, dtype="i64")}
    tx = rand(5, cols, dtype=torch.float16)
    want = {"y": torch.softmax(tx.double(), 1).float(), "p": tx.argmax(1)}
    return Case(
        [Nest((i,), (r,), stmts)],
        layouts,
        {"x": tx},
        want,
        {"s0": cols},
        blocks={"RBLOCK": 16},
        **more,
    )


@case
def misaligned_rows() -> Case:
    return misaligned(51)


@case
def misaligned_short_rows() -> Case:
    return misaligned(13)


@case
def full_sum() -> Case:
    r = axis("r", 300)
    x = rand(300)
    return Case(
        [Nest((), (r,), (Reduce("s", "sum", at("x", r)), store("y", (), local("s"), "row")))],
        {"x": lay(300), "y": lay()},
        {"x": x},
        {"y": x.sum()},
    )


@case
def column_sum() -> Case:
    i, r = axis("i", 40), axis("r", 50)
    x = rand(50, 40)
    return Case(
        [
            Nest(
                (i,),
                (r,),
                (Reduce("s", "sum", at("x", r, i)), store("y", (i,), local("s", i), "row")),
            )
        ],
        {"x": lay(50, 40), "y": lay(40)},
        {"x": x},
        {"y": x.sum(0)},
    )


@case
def column_max_looped() -> Case:
    i, r = axis("i", 24), axis("r", atom(Sym("s0", 0, 500)))
    x = rand(50, 24)
    x[3, 5] = float("nan")
    return Case(
        [
            Nest(
                (i,),
                (r,),
                (Reduce("s", "max", at("x", r, i)), store("y", (i,), local("s", i), "row")),
            )
        ],
        {"x": lay(atom(Sym("s0", 0, 500)), 24), "y": lay(24)},
        {"x": x},
        {"y": x.amax(0)},
        sizes={"s0": 50},
        blocks={"RBLOCK": 8},
        tolerance=0,
    )


@case
def batch_norm_sums() -> Case:
    """Two reduced axes around a parallel one."""
    c, n, s = axis("c", 6), axis("n", 3), axis("s", 20)
    x = rand(3, 6, 20)
    return Case(
        [
            Nest(
                (c,),
                (n, s),
                (Reduce("a", "sum", at("x", n, c, s)), store("y", (c,), local("a", c), "row")),
            )
        ],
        {"x": lay(3, 6, 20), "y": lay(6)},
        {"x": x},
        {"y": x.sum((0, 2))},
    )


def positions(extent: IndexLike, **more: Any) -> Case:
    i, r = axis("i", 6), axis("r", extent)
    x = rand(6, 40)
    x[0, 7] = x[0, 30] = 9.0
    x[1, 20] = x[1, 23] = x[1, 36] = float("nan")
    x[2] = float("-inf")
    x[3, 39] = 8.0
    pooled = torch.nn.functional.max_pool1d(x, 40, return_indices=True)[1][:, 0]
    xs = at("x", i, r)
    stmts = (
        Reduce("a", "argmax", xs),
        Reduce("b", "argmin", xs),
        Reduce("c", "max", xs),
        Reduce("d", "argmax_last_nan", xs),
        store("p", (i,), local("a", i, dtype="i64"), "row"),
        store("q", (i,), local("b", i, dtype="i64"), "row"),
        store("v", (i,), local("c", i), "row"),
        store("w", (i,), local("d", i, dtype="i64"), "row"),
    )
    places = {name: lay(6, dtype="i64") for name in "pqw"}
    return Case(
        [Nest((i,), (r,), stmts)],
        {"x": lay(6, extent), "v": lay(6), **places},
        {"x": x},
        {"p": x.argmax(1), "q": x.argmin(1), "v": x.amax(1), "w": pooled},
        tolerance=0,
        **more,
    )


@case
def argmax_persistent() -> Case:
    return positions(40)


@case
def argmax_looped() -> Case:
    return positions(atom(Sym("s0", 0, 64)), sizes={"s0": 40}, blocks={"RBLOCK": 16})


@case
def other_reductions() -> Case:
    i, r = axis("i", 4), axis("r", 21)
    f, k = at("x", i, r), at("k", i, r, dtype="i64")
    big = op("gt", f, literal(0.5, "f32"))
    reductions = {
        "prod": f,
        "min": f,
        "any": big,
        "all": op("gt", f, literal(-1.5, "f32")),
        "sum": k,
    }
    x, ks = rand(4, 21), torch.arange(84).reshape(4, 21) * 3
    want = {
        "prod": x.prod(1),
        "min": x.amin(1),
        "any": (x > 0.5).any(1),
        "all": (x > -1.5).all(1),
        "sum": ks.sum(1),
        "imax": ks.to(torch.int32).amax(1),
    }
    stmts: list = [Reduce(f"f_{n}", n, b) for n, b in reductions.items()]
    stmts.append(Reduce("f_imax", "max", cast(k, "i32")))
    kinds = {"prod": "f32", "min": "f32", "any": "bool", "all": "bool", "sum": "i64", "imax": "i32"}
    stmts += [store(n, (i,), local(f"f_{n}", i, dtype=d), "row") for n, d in kinds.items()]
    return Case(
        [Nest((i,), (r,), tuple(stmts))],
        {
            "x": lay(4, 21),
            "k": lay(4, 21, dtype="i64"),
            **{n: lay(4, dtype=d) for n, d in kinds.items()},
        },
        {"x": x, "k": ks},
        want,
    )


def scans(extent: IndexLike, **more: Any) -> Case:
    i, r = axis("i", 3), axis("r", extent)
    xs = at("x", i, r)
    p = Scan("p", "sum", xs)
    q = Scan("q", "max", xs)
    total = Reduce("t", "sum", xs)
    ps, qs = load("p", (i.index, r.index), "f32"), load("q", (i.index, r.index), "f32")
    stmts = (
        p,
        q,
        total,
        store("a", (i, r), ps),
        store("b", (i, r), qs),
        store("c", (i, r), op("div", ps, local("t", i))),
    )
    x = rand(3, 37).abs()
    want = {"a": x.cumsum(1), "b": x.cummax(1)[0], "c": x.cumsum(1) / x.sum(1, keepdim=True)}
    return Case(
        [Nest((i,), (r,), stmts)],
        {n: lay(3, extent) for n in "xabc"},
        {"x": x},
        want,
        tolerance=4e-6,
        **more,
    )


@case
def scan_persistent() -> Case:
    return scans(37)


@case
def scan_looped() -> Case:
    return scans(atom(Sym("s0", 0, 64)), sizes={"s0": 37}, blocks={"RBLOCK": 8})


# ---------------------------------------------------------------------------------------- chunks


def norm_backward(rows: int, cols: int, count: int, extent: IndexLike, **more: Any) -> Case:
    """dx of an RMS-like norm, and its partial column sums, in one pass."""
    i, r = axis("i", rows), axis("r", extent)
    g, x, w = at("g", i, r), at("x", i, r), at("w", r)
    gx = op("mul", g, x)
    s = Reduce("s", "sum", op("mul", gx, w))
    dx = op("sub", op("mul", g, w), op("mul", x, local("s", i)))
    stmts = (
        s,
        store("dx", (i, r), dx),
        Reduce("dw", "sum", gx, partial=True),
        Reduce("db", "sum", g, partial=True),
    )
    tg, tx, tw = rand(rows, cols), rand(rows, cols, seed=1), rand(cols, seed=2)
    each = -(-rows // count)
    parts = {"dw": torch.zeros(count, cols), "db": torch.zeros(count, cols)}
    for k in range(count):
        part = slice(k * each, min((k + 1) * each, rows))
        parts["dw"][k], parts["db"][k] = (tg * tx)[part].sum(0), tg[part].sum(0)
    want = {"dx": tg * tw - tx * (tg * tx * tw).sum(1, keepdim=True), **parts}
    return Case(
        [Nest((i,), (r,), stmts, (i, count))],
        {
            "g": lay(rows, extent),
            "x": lay(rows, extent),
            "w": lay(extent),
            "dx": lay(rows, extent),
            "dw": lay(count, extent),
            "db": lay(count, extent),
        },
        {"g": tg, "x": tx, "w": tw},
        want,
        tolerance=1e-5,
        **more,
    )


@case
def split_persistent() -> Case:
    return norm_backward(13, 20, 4, 20)


@case
def split_looped() -> Case:
    return norm_backward(13, 20, 4, atom(Sym("s0", 0, 64)), sizes={"s0": 20}, blocks={"RBLOCK": 8})


@case
def split_empty() -> Case:
    return norm_backward(5, 20, 4, atom(Sym("s0", 0, 64)), sizes={"s0": 20}, blocks={"RBLOCK": 8})


@case
def split_columns() -> Case:
    i, r = axis("i", 29), axis("r", 45)
    stmts = (
        Reduce("p", "sum", at("x", i, r), partial=True),
        Reduce("q", "max", at("x", i, r), partial=True),
    )
    x = rand(29, 45)
    cut = [x[k * 6 : (k + 1) * 6] for k in range(5)]
    want = {"p": torch.stack([c.sum(0) for c in cut]), "q": torch.stack([c.amax(0) for c in cut])}
    return Case(
        [Nest((i,), (r,), stmts, (i, 5))],
        {"x": lay(29, 45), "p": lay(5, 45), "q": lay(5, 45)},
        {"x": x},
        want,
    )


# ------------------------------------------------------------------------------------------- run


def build(name: str) -> tuple[Case, TritonKernel]:
    made = CASES[name]()
    return made, generate(made.kernel(name), SPEC)


def config_of(made: Case, kernel: TritonKernel, number: int = 0) -> Config:
    """A candidate with the case's own block sizes; blocks small enough for the interpreter."""
    chosen = kernel.configs[number]
    values = tuple((n, made.blocks.get(n, v)) for n, v in chosen.constexprs)
    return Config(values, chosen.num_warps, chosen.num_stages)


def module(kernel: TritonKernel, folder: Path) -> Any:
    path = folder / f"{kernel.name}.py"
    path.write_text(kernel.source)
    spec = importlib.util.spec_from_file_location(kernel.name, path)
    assert spec is not None and spec.loader is not None
    out = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(out)
    return getattr(out, kernel.name)


def strides_of(layout: Layout, sizes: dict[str, int]) -> tuple[list[int], list[int]]:
    def number(i: Index) -> int:
        return evaluate(i, sizes)

    return [number(n) for n in layout.shape], [
        number(s) for s in layout.strides or contiguous_strides(())
    ]


def launch(
    function: Any, made: Case, kernel: TritonKernel, config: Config, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Runs the kernel on copies of the inputs; the outputs."""
    memory: dict[str, torch.Tensor] = {}
    for n, layout in made.layouts.items():
        shape, strides = strides_of(layout, made.sizes)
        memory[n] = torch.empty_strided(shape, strides, dtype=TORCH[layout.dtype], device=device)
        if n in made.inputs:
            memory[n].copy_(made.inputs[n])
        elif layout.dtype != "bool":
            memory[n].fill_(77)
    args = [memory[v] if kind == "tensor" else made.sizes[v.name] for kind, v in kernel.args]
    grid = kernel.grid(config, made.sizes)
    function[(grid,)](*args, **kernel.constants(config, kernel.is_wide(made.sizes)))
    return {n: memory[n].cpu() for n in made.expected}


def error(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> float:
    """The largest error over what is allowed (at most 1 is right)."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    a, b = got.double(), want.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if tolerance == 0:
        return 0.0 if bool(same.all()) else float("inf")
    scale = tolerance * (1 + b.abs())
    off = torch.where(same, 0.0, (a - b).abs() / scale)
    return float(off.nan_to_num(float("inf")).max()) if off.numel() else 0.0


FUZZ_POINTS = 1500  # of a kernel: the interpreter takes about 50 us for each 100


def fuzz(low: int, high: int, folder: Path) -> None:
    """Random kernels of seeds low .. high against the reference executor."""
    from deuteron.schedule.reference import run_kernel
    from tests.codegen.test_cpp_fuzz import Maker

    for seed in range(low, high):
        maker = Maker(seed)
        kernel = maker.kernel()
        loops = [[maker.extent(a) for a in (*n.parallel, *n.reduced)] for n in kernel.nests]
        if sum(math.prod(extents) for extents in loops) > FUZZ_POINTS:
            continue
        sizes = {s.name: v for s, v in maker.sizes.items()}
        tensors = dict(maker.tensors)
        for n in maker.writes:
            base = maker.tensors[n]
            tensors[n] = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype)
            tensors[n].copy_(base)
        run_kernel(kernel, tensors, sizes)
        out: dict[str, Any] = {"case": f"seed {seed}", "errors": {}}
        try:
            made = generate(kernel, SPEC)
            args = [
                maker.tensors[v] if kind == "tensor" else sizes[v.name] for kind, v in made.args
            ]
            grid = made.grid(made.configs[0], sizes)
            if grid:
                module(made, folder)[(grid,)](*args, **made.constants(made.configs[0]))
            for n in maker.writes:
                half = maker.tensors[n].dtype == torch.bfloat16
                allowed = 2e-2 if half else 2e-4
                out["errors"][n] = error(maker.tensors[n], tensors[n], allowed)
        except Exception as e:  # reported to the test that asked
            out["failure"] = f"{type(e).__name__}: {e}"
        print(json.dumps(out), flush=True)


def main(names: Sequence[str]) -> None:
    quicken()
    by_halves()
    if names and names[0] == "--fuzz":
        with tempfile.TemporaryDirectory() as folder:
            fuzz(int(names[1]), int(names[2]), Path(folder))
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            made, kernel = build(name)
            out: dict[str, Any] = {"case": name, "errors": {}}
            try:
                got = launch(module(kernel, Path(folder)), made, kernel, config_of(made, kernel))
                out["errors"] = {
                    n: error(got[n], made.expected[n], made.tolerance) for n in made.expected
                }
            except Exception as e:  # reported to the test that asked
                out["failure"] = f"{type(e).__name__}: {e}"
            print(json.dumps(out), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
