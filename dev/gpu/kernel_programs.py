"""Kernels in the schedule's form, with inputs and what eager makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deuteron.ir.expr import Expr, cast, index_value, literal, load, op
from deuteron.ir.index import Axis, IndexLike, as_index
from deuteron.ir.program import Layout, contiguous
from deuteron.schedule.kernel import Nest, Reduce, Store

CUDA = torch.cuda.is_available()


TORCH = {"i64": torch.int64, "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


Tensors = dict[str, torch.Tensor]


@dataclass
class Program:
    """A kernel at a realistic size; `reference` computes its outputs from its inputs."""

    nests: tuple[Nest, ...]
    layouts: dict[str, Layout]
    outputs: tuple[str, ...]
    reference: Callable[[Tensors], Tensors]
    tolerance: float = 1e-5
    high: int = 0  # integer inputs are below it


PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(f: Callable[..., Program], name: str, *args: Any) -> None:
    PROGRAMS[name] = lambda: f(*args)


def at(name: str, *indices: Axis | IndexLike, dtype: str = "f32") -> Expr:
    position = tuple(i.index if isinstance(i, Axis) else as_index(i) for i in indices)
    return (
        cast(load(name, position, dtype), "f32") if dtype != "i64" else load(name, position, dtype)
    )


def local(name: str, *axes: Axis, dtype: str = "f32") -> Expr:
    return load(name, tuple(a.index for a in axes), dtype)


def lay(*shape: int, dtype: str = "f32") -> Layout:
    return contiguous(tuple(as_index(n) for n in shape), dtype, "cuda")


def put(
    name: str, axes: tuple[Axis, ...], value: Expr, dtype: str = "f32", level: str = "point"
) -> Store:
    return Store(name, tuple(a.index for a in axes), cast(value, dtype), level)


def gelu(n: int, dtype: str) -> Program:
    i = Axis("i", n)
    x = op("add", at("x", i, dtype=dtype), at("z", i, dtype=dtype))
    phi = op(
        "add", literal(1.0, "f32"), op("erf", op("mul", x, literal(0.7071067811865476, "f32")))
    )
    y = op("mul", op("mul", x, literal(0.5, "f32")), phi)
    return Program(
        (Nest((i,), (), (put("y", (i,), y, dtype),)),),
        {k: lay(n, dtype=dtype) for k in "xzy"},
        ("y",),
        lambda t: {"y": torch.nn.functional.gelu(t["x"].float() + t["z"].float())},
        1e-2,
    )


def bias_relu(rows: int, cols: int, dtype: str) -> Program:
    i, j = Axis("i", rows), Axis("j", cols)
    y = op(
        "maximum",
        op("add", at("x", i, j, dtype=dtype), at("b", j, dtype=dtype)),
        literal(0.0, "f32"),
    )
    return Program(
        (Nest((i, j), (), (put("y", (i, j), y, dtype),)),),
        {
            "x": lay(rows, cols, dtype=dtype),
            "b": lay(cols, dtype=dtype),
            "y": lay(rows, cols, dtype=dtype),
        },
        ("y",),
        lambda t: {"y": torch.relu(t["x"].float() + t["b"].float())},
        1e-2,
    )


def transpose(n: int, dtype: str) -> Program:
    i, j = Axis("i", n), Axis("j", n)
    return Program(
        (Nest((i, j), (), (put("y", (i, j), at("x", j, i, dtype=dtype), dtype),)),),
        {"x": lay(n, n, dtype=dtype), "y": lay(n, n, dtype=dtype)},
        ("y",),
        lambda t: {"y": t["x"].t().float()},
        1e-6,
    )


def channels_last(n: int, c: int, s: int) -> Program:
    b, i, j = Axis("b", n), Axis("c", c), Axis("s", s)
    return Program(
        (Nest((b, j, i), (), (put("y", (b, j, i), at("x", b, i, j)),)),),
        {"x": lay(n, c, s), "y": lay(n, s, c)},
        ("y",),
        lambda t: {"y": t["x"].transpose(1, 2)},
    )


def softmax(rows: int, cols: int, dtype: str) -> Program:
    i, r = Axis("i", rows), Axis("r", cols)
    x = at("x", i, r, dtype=dtype)
    e = op("exp", op("sub", x, local("m", i)))
    nest = Nest(
        (i,),
        (r,),
        (
            Reduce("m", "max", x),
            Reduce("s", "sum", e),
            put("y", (i, r), op("div", e, local("s", i)), dtype),
        ),
    )
    return Program(
        (nest,),
        {"x": lay(rows, cols, dtype=dtype), "y": lay(rows, cols, dtype=dtype)},
        ("y",),
        lambda t: {"y": torch.softmax(t["x"].float(), 1)},
        1e-2 if dtype != "f32" else 1e-5,
    )


def cross_entropy(rows: int, cols: int, dtype: str) -> Program:
    i, r = Axis("i", rows), Axis("r", cols)
    x = at("x", i, r, dtype=dtype)
    e = op("exp", op("sub", x, local("m", i)))
    hit = op("eq", index_value(r.index), at("t", i, dtype="i64"))
    p = Reduce("p", "sum", op("where", hit, x, literal(0.0, "f32")))
    loss = op("sub", op("add", op("log", local("s", i)), local("m", i)), local("p", i))
    nest = Nest(
        (i,),
        (r,),
        (Reduce("m", "max", x), Reduce("s", "sum", e), p, put("y", (i,), loss, level="row")),
    )
    return Program(
        (nest,),
        {"x": lay(rows, cols, dtype=dtype), "t": lay(rows, dtype="i64"), "y": lay(rows)},
        ("y",),
        lambda t: {
            "y": torch.nn.functional.cross_entropy(t["x"].float(), t["t"], reduction="none")
        },
        1e-4,
        cols,
    )


def layer_norm(rows: int, cols: int, dtype: str) -> Program:
    i, r = Axis("i", rows), Axis("r", cols)
    x, n = at("x", i, r, dtype=dtype), literal(cols, "f32")
    mean = op("div", local("s", i), n)
    d = op("sub", x, mean)
    rstd = op("rsqrt", op("add", op("div", local("v", i), n), literal(1e-5, "f32")))
    y = op("add", op("mul", op("mul", d, rstd), at("w", r, dtype=dtype)), at("b", r, dtype=dtype))
    nest = Nest(
        (i,),
        (r,),
        (
            Reduce("s", "sum", x),
            Reduce("v", "sum", op("mul", d, d)),
            put("y", (i, r), y, dtype),
            put("mean", (i,), mean, level="row"),
            put("rstd", (i,), rstd, level="row"),
        ),
    )

    def reference(t: Tensors) -> Tensors:
        y, mean, rstd = torch.native_layer_norm(
            t["x"].float(), [cols], t["w"].float(), t["b"].float(), 1e-5
        )
        return {"y": y, "mean": mean[:, 0], "rstd": rstd[:, 0]}

    return Program(
        (nest,),
        {
            "x": lay(rows, cols, dtype=dtype),
            "w": lay(cols, dtype=dtype),
            "b": lay(cols, dtype=dtype),
            "y": lay(rows, cols, dtype=dtype),
            "mean": lay(rows),
            "rstd": lay(rows),
        },
        ("y", "mean", "rstd"),
        reference,
        2e-2 if dtype != "f32" else 1e-4,
    )


def norm_backward(rows: int, cols: int, count: int, dtype: str) -> Program:
    """Layer norm's backward: dx, and the partial sums of dw and db, in one pass."""
    i, r = Axis("i", rows), Axis("r", cols)
    g, x, w = at("g", i, r, dtype=dtype), at("x", i, r, dtype=dtype), at("w", r, dtype=dtype)
    h = op("mul", op("sub", x, at("mean", i)), at("rstd", i))
    gw, n = op("mul", g, w), literal(1.0 / cols, "f32")
    a, b = Reduce("a", "sum", gw), Reduce("b", "sum", op("mul", gw, h))
    inner = op(
        "sub", op("sub", gw, op("mul", local("a", i), n)), op("mul", h, op("mul", local("b", i), n))
    )
    stmts = (
        a,
        b,
        put("dx", (i, r), op("mul", at("rstd", i), inner), dtype),
        Reduce("dw", "sum", op("mul", g, h), partial=True),
        Reduce("db", "sum", g, partial=True),
    )
    each = -(-rows // count)

    def reference(t: Tensors) -> Tensors:
        g, x, w = t["g"].float(), t["x"].float(), t["w"].float()
        h = (x - t["mean"][:, None]) * t["rstd"][:, None]
        gw = g * w
        dx = t["rstd"][:, None] * (
            gw - gw.mean(1, keepdim=True) - h * (gw * h).mean(1, keepdim=True)
        )

        def parts(v: torch.Tensor) -> torch.Tensor:
            padded = torch.nn.functional.pad(v, (0, 0, 0, each * count - rows))
            return padded.view(count, each, cols).sum(1)

        return {"dx": dx, "dw": parts(g * h), "db": parts(g)}

    full, row = lay(rows, cols, dtype=dtype), lay(cols, dtype=dtype)
    return Program(
        (Nest((i,), (r,), stmts, (i, count)),),
        {
            "g": full,
            "x": full,
            "w": row,
            "mean": lay(rows),
            "rstd": lay(rows),
            "dx": full,
            "dw": lay(count, cols),
            "db": lay(count, cols),
        },
        ("dx", "dw", "db"),
        reference,
        3e-2 if dtype != "f32" else 1e-3,
    )


def row_sum(rows: int, cols: int, dtype: str) -> Program:
    i, r = Axis("i", rows), Axis("r", cols)
    nest = Nest(
        (i,),
        (r,),
        (
            Reduce("s", "sum", at("x", i, r, dtype=dtype)),
            put("y", (i,), local("s", i), level="row"),
        ),
    )
    return Program(
        (nest,),
        {"x": lay(rows, cols, dtype=dtype), "y": lay(rows)},
        ("y",),
        lambda t: {"y": t["x"].float().sum(1)},
        1e-3,
    )


def column_sum(rows: int, cols: int, dtype: str) -> Program:
    i, r = Axis("i", cols), Axis("r", rows)
    nest = Nest(
        (i,),
        (r,),
        (
            Reduce("s", "sum", at("x", r, i, dtype=dtype)),
            put("y", (i,), local("s", i), level="row"),
        ),
    )
    return Program(
        (nest,),
        {"x": lay(rows, cols, dtype=dtype), "y": lay(cols)},
        ("y",),
        lambda t: {"y": t["x"].float().sum(0)},
        1e-2,
    )


def column_parts(rows: int, cols: int, count: int, dtype: str) -> Program:
    i, r = Axis("i", rows), Axis("r", cols)
    nest = Nest(
        (i,), (r,), (Reduce("p", "sum", at("x", i, r, dtype=dtype), partial=True),), (i, count)
    )
    return Program(
        (nest,),
        {"x": lay(rows, cols, dtype=dtype), "p": lay(count, cols)},
        ("p",),
        lambda t: {"p": t["x"].float().view(count, rows // count, cols).sum(1)},
        1e-3,
    )


def batch_norm_sums(n: int, c: int, s: int, dtype: str) -> Program:
    k, b, p = Axis("c", c), Axis("n", n), Axis("s", s)
    x = at("x", b, k, p, dtype=dtype)
    nest = Nest(
        (k,),
        (b, p),
        (
            Reduce("a", "sum", x),
            Reduce("q", "sum", op("mul", x, x)),
            put("y", (k,), local("a", k), level="row"),
            put("z", (k,), local("q", k), level="row"),
        ),
    )
    return Program(
        (nest,),
        {"x": lay(n, c, s, dtype=dtype), "y": lay(c), "z": lay(c)},
        ("y", "z"),
        lambda t: {"y": t["x"].float().sum((0, 2)), "z": t["x"].float().square().sum((0, 2))},
        1e-2,
    )


def embedding(rows: int, cols: int, count: int, dtype: str) -> Program:
    from deuteron.ir.expr import as_position

    i, j = Axis("i", count), Axis("j", cols)
    y = load("w", (as_position(load("t", (i.index,), "i64")), j.index), dtype)
    return Program(
        (Nest((i, j), (), (put("y", (i, j), y, dtype),)),),
        {
            "w": lay(rows, cols, dtype=dtype),
            "t": lay(count, dtype="i64"),
            "y": lay(count, cols, dtype=dtype),
        },
        ("y",),
        lambda t: {"y": t["w"][t["t"]].float()},
        1e-6,
        rows,
    )
