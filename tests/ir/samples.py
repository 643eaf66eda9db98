"""Programs and schedules that the tests of this folder run, print and break."""

from __future__ import annotations

from typing import Any

import torch

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, cast, literal, op
from deuteron.ir.index import Axis, Index, IndexLike, Sym, Value, as_index, atom, const
from deuteron.ir.program import (
    Check,
    Compute,
    Constant,
    Extern,
    Input,
    Layout,
    Origin,
    Output,
    Program,
    ViewArg,
    contiguous,
)
from deuteron.schedule.kernel import Kernel, Nest, Reduce, Schedule, Store

S = Sym("s0", 2, 8)
N = atom(S)


def lay(*shape: IndexLike, dtype: str = "f32") -> Layout:
    return contiguous(tuple(as_index(n) for n in shape), dtype)


def read(name: str, *at: Any, dtype: str = "f32", mask: Expr | None = None, fill: Any = 0) -> Expr:
    index = tuple(a.index if isinstance(a, Axis) else as_index(a) for a in at)
    return E.load(name, index, dtype, mask, fill)


def whole(name: str, layout: Layout) -> Output:
    return Output(name, layout.shape, layout.strides)


def softmax() -> Program:
    """Rows of x[s0, 8], by a maximum and a sum."""
    x, row = lay(N, 8), lay(N)
    i, j, k, m, p, q = (
        Axis("i", N), Axis("j", 8), Axis("k", N), Axis("m", 8), Axis("p", N), Axis("q", 8),
    )  # fmt: skip
    shifted = op("exp", op("sub", read("x", k, m), read("top", k)))
    out = op("exp", op("sub", read("x", p, q), read("top", p)))
    here = (Origin("softmax", "aten.softmax.int", "model.py:3: y = x.softmax(-1)"),)
    return Program(
        (
            Input("x", x, 0),
            Compute("top", (i,), E.reduce("max", (j,), read("x", i, j)), row, origins=here),
            Compute("total", (k,), E.reduce("sum", (m,), shifted), row, origins=here),
            Compute("y", (p, q), op("div", out, read("total", p)), x, origins=here),
        ),
        (whole("y", x),),
        ((S, ("shape", 0, 0)),),
        num_inputs=1,
    )


def everything() -> tuple[Program, list[Any]]:
    """Constants, calls, sizes, gathers, masks, scatters, scans, random numbers, casts."""
    i, j, a, b, c, d, e, f, g, h = (Axis(n, N if n in "iacegh" else 4) for n in "ijabcdefgh")
    z, ranks = Axis("z", 4), lay(N, dtype="i64")
    ids = cast(read("ids", a, dtype="i64"), "i64")
    inside = op("lt", E.index_value(b.index), literal(3, "i64"))
    gather = E.load(
        "table", (atom(Value(ids)), b.index + 1), "f32", op("logical_and", inside, inside), -0.0
    )
    half = cast(cast(op("mul", read("x", i, j), literal(0.1, "f32")), "bf16"), "f32")
    seed = read("seed", dtype="i64")
    noise = E.random("rand", seed, 3, c.index * 4 + d.index, "f32")
    kept = op("where", op("lt", noise, literal(0.5, "f32")), read("got", c, d), literal(0, "f32"))
    product = ViewArg("half", (N, const(4)), (const(4), const(1)), const(0))
    turned = ViewArg("weight", (const(4), const(4)), (const(1), const(4)), const(0))
    flip = read("mm", e, const(3) - f.index)
    program = Program(
        (
            Input("x", lay(N, 4), 0),
            Input("ids", lay(N, dtype="i64"), 1),
            Input("table", lay(5, 4), 2),
            Input("seed", lay(dtype="i64"), 3),
            Constant("weight", lay(4, 4), "digest-of-weight"),
            Compute("half", (i, j), half, lay(N, 4)),
            Compute("got", (a, b), gather, lay(N, 4)),
            Compute("kept", (c, d), kept, lay(N, 4)),
            Extern(("mm",), "aten.mm.default", (product, turned), (), (lay(N, 4),), reason="why"),
            Extern(
                (None, "sorted_"), "aten.sort.stable",
                (ViewArg("ids", (N,), (const(1),), const(0)),), (("stable", True), ("dim", -1)),
                (None, lay(N, dtype="i64")),
            ),  # fmt: skip
            Compute("scan", (e, f), E.scan("sum", f, flip), lay(N, 4)),
            Compute("base", (Axis("y", 5),), literal(1, "f32"), lay(5)),
            Compute(
                "counts", (g,), read("kept", g, 0), lay(5), "base",
                (atom(Value(read("ids", g, dtype="i64"))),), "sum",
                mask=op("lt", E.index_value(g.index), literal(5, "i64")),
            ),  # fmt: skip
            Compute("best", (h,), E.reduce("argmax", (z,), read("scan", h, z)), ranks),
        ),
        (
            whole("kept", lay(N, 4)), whole("scan", lay(N, 4)), whole("counts", lay(5)),
            whole("best", lay(N)), whole("sorted_", lay(N)),
            Output("half", (const(4), N), (const(1), const(4)), const(0)),
            Output(None, value=N * 2), Output(None, value=None), Output(None, value=1.5),
        ),
        ((S, ("shape", 0, 0)),),
        {"weight": torch.arange(16.0).view(4, 4) / 7},
        num_inputs=4,
        checks=(Check("(s0 <= 9)", "it's at most \"nine\"", "model.py:3: y"),),
    )  # fmt: skip
    torch.manual_seed(1)
    inputs = [
        torch.randn(6, 4), torch.tensor([4, 0, 2, 2, 1, 4]), torch.randn(5, 4),
        torch.tensor(-(2**61) + 7),
    ]  # fmt: skip
    return program, inputs


def fused_softmax() -> Schedule:
    """`softmax` in one kernel."""
    x = lay(N, 8)
    i, j = Axis("i", N), Axis("j", 8)
    shifted = op("exp", op("sub", read("x", i, j), read("top", i)))
    nest = Nest(
        (i,),
        (j,),
        (
            Reduce("top", "max", read("x", i, j)),
            Reduce("total", "sum", shifted),
            Store("y", (i.index, j.index), op("div", shifted, read("total", i)), "point"),
        ),
    )
    return schedule_of((nest,), ("x",), ("y",), {"x": x, "y": x})


def schedule_of(
    nests: tuple[Nest, ...],
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    layouts: dict[str, Layout],
    aliases: dict[str, str] | None = None,
) -> Schedule:
    read_, written = (tuple((n, layouts[n]) for n in names) for names in (reads, writes))
    kernel = Kernel("k0", nests, read_, written, (), "cpu", 0, 0.0, 0.0)
    return Schedule((kernel,), aliases or {}, layouts)


def at(*axes: Axis) -> tuple[Index, ...]:
    return tuple(a.index for a in axes)
