"""Short rows: overlapping blocks, operands copied apart, cases of a row's conditions."""

from __future__ import annotations

import math

import pytest
import torch

from deuteron.ir.expr import Expr, cast, index_value, load, op
from deuteron.ir.index import Axis, Index
from deuteron.schedule.kernel import Nest, Reduce, Store
from tests.codegen.cpp_tools import NAMES, SERIAL, ax, idx, ld, lit, ref, run


@pytest.mark.parametrize("n", [16, 27, 100, 300])
@pytest.mark.parametrize("step", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_steps(n: int, step: int, dtype: torch.dtype) -> None:
    """Windows of a row and the row below; the last element read is the tensor's last."""
    wide, m = step * (n - 1) + 5, 5
    x = (torch.randn(m + 1, wide) * 30).to(dtype)
    y, name = torch.empty(m, n, dtype=dtype), NAMES[dtype]
    a, b = ax("i", m), ax("j", n)
    parts = [load("x", (a.index + i, b.index * step + k), name) for i in (0, 1) for k in (0, 1, 4)]
    value = parts[0]
    for p in parts[1:]:
        value = op("maximum", value, p)
    r = run(Nest((a, b), (), (Store("y", idx(a, b), value, "point"),)), {"x": x, "y": y}, ["y"])
    assert f"d_copy_strided<{step}>" in r.cpp.source
    seen = [x[i : m + i, k : k + step * (n - 1) + 1 : step] for i in (0, 1) for k in (0, 1, 4)]
    assert torch.equal(y, torch.stack(seen).amax(0))


@pytest.mark.parametrize("n", [17, 40])
def test_in_place(n: int) -> None:
    """Elements are computed once where an operand may be overwritten."""
    x = torch.randn(6, n)
    want = x * 2 + 1
    a, b = ax("i", 6), ax("j", n)
    value = op("add", op("mul", ld("x", a, b), lit(2.0)), lit(1.0))
    run(Nest((a, b), (), (Store("y", idx(a, b), value, "point"),)), {"x": x, "y": x}, ["y"], SERIAL)
    assert torch.equal(x, want)
    z = torch.randn(6, n)
    want = z + x
    add = Store("z", idx(a, b), ld("x", a, b), "point", "sum")
    run(Nest((a, b), (), (add,)), {"x": x, "z": z}, ["z"], SERIAL, ["x"])
    assert torch.equal(z, want)


def inside(index: Index, size: int) -> Expr:
    low = op("ge", index_value(index), lit(0, "i64"))
    return op("logical_and", low, op("lt", index_value(index), lit(size, "i64")))


@pytest.mark.parametrize("taps", [1, 2, 3])
@pytest.mark.parametrize("n", [20, 33])
def test_rows_outside(taps: int, n: int) -> None:
    """Rows above and below, each with conditions of its own: four cases, or one and the others."""
    x, y = torch.randn(4, 9, n), torch.empty(4, 9, n)
    c, i, j = ax("c", 4), ax("i", 9), ax("j", n)
    offsets = (-2, 1, 4)[:taps]
    total: Expr | None = None
    for k in offsets:
        part = load("x", (c.index, i.index + k, j.index), "f32", inside(i.index + k, 9), 0.5)
        total = part if total is None else op("add", total, part)
    assert total is not None
    run(Nest((c, i, j), (), (Store("y", idx(c, i, j), total, "point"),)), {"x": x, "y": y}, ["y"])
    padded = torch.nn.functional.pad(x, (0, 0, 4, 4), value=0.5)
    want = sum(padded[:, 4 + k : 13 + k] for k in offsets)
    torch.testing.assert_close(y, want)


@pytest.mark.parametrize("kind", ["argmax", "argmin", "argmax_last_nan"])
@pytest.mark.parametrize("width", [20, 56])
def test_first_place_of_an_extreme(kind: str, width: int) -> None:
    """Of equal values the first, of NaN the first (or the last): in windows that are written
    out."""
    x = torch.randint(0, 3, (40, width)).float()
    x[::3][torch.rand(x[::3].shape) < 0.2] = math.nan
    x[5], x[6] = math.inf, -math.inf
    n = width - 4
    y = torch.empty(40, n, dtype=torch.int64)
    a, b, k = ax("i", 40), ax("j", n), Axis("k", 5)
    reduction = Reduce("f", kind, load("x", (a.index, b.index + k.index), "f32"))
    nest = Nest((a, b), (k,), (reduction, Store("y", idx(a, b), ref("f", "i64"), "row")))
    run(nest, {"x": x, "y": y}, ["y"])
    if kind == "argmax_last_nan":
        want = torch.nn.functional.max_pool1d(x, 5, 1, return_indices=True)[1] - torch.arange(n)
    else:
        want = getattr(torch, kind)(x.unfold(1, 5, 1), dim=-1)
    assert torch.equal(y, want)


@pytest.mark.parametrize("n", [4, 8, 9, 15, 31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_stored(n: int, dtype: torch.dtype) -> None:
    """Softmax of short rows: written out up to 8 elements; g++ took minutes for 31 of bf16."""
    name = NAMES[dtype]
    x, y = torch.randn(40, n).to(dtype), torch.empty(40, n, dtype=dtype)
    a, k = ax("i", 40), ax("k", n)
    value = cast(load("x", (a.index, k.index), name), "f32")
    shifted = op("exp", op("sub", value, ref("m")))
    stored = cast(op("div", shifted, ref("s")), name)
    reductions = (Reduce("m", "max", value), Reduce("s", "sum", shifted))
    r = run(
        Nest((a,), (k,), (*reductions, Store("y", idx(a, k), stored, "point"))),
        {"x": x, "y": y},
        ["y"],
    )
    torch.testing.assert_close(y.float(), torch.softmax(x.float(), 1).to(dtype).float())
    written_out = r.cpp.source.count("d_exp(") >= n
    assert written_out == (n <= 8)
