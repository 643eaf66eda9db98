"""Generated C++ against torch: every way of writing a nest, with hand-built kernels."""

from __future__ import annotations

import math

import pytest
import torch

from deuteron.codegen.cpp import Machine
from deuteron.ir.expr import as_position, cast, index_value, load, op
from deuteron.ir.index import Sym, atom
from deuteron.ir.program import contiguous
from deuteron.schedule.kernel import Nest, Reduce, Scan, Store
from tests.codegen.cpp_tools import (
    NAMES,
    Runner,
    ax,
    idx,
    kernel,
    layer_norm_nest,
    ld,
    lit,
    ref,
    run,
    softmax_nest,
)


@pytest.mark.parametrize("shape", [(7,), (3, 50), (64, 64), (1,), (0,), (5, 0), (300, 1000)])
def test_pointwise(shape: tuple[int, ...]) -> None:
    x, y = torch.randn(shape), torch.empty(shape)
    axes = tuple(ax(f"a{i}", n) for i, n in enumerate(shape))
    value = op("sin", op("mul", op("add", ld("x", *axes), lit(1.0)), lit(2.0)))
    run(Nest(axes, (), (Store("y", idx(*axes), value, "point"),)), {"x": x, "y": y}, ["y"])
    torch.testing.assert_close(y, torch.sin((x + 1) * 2))


@pytest.mark.parametrize("dtype", list(NAMES))
def test_dtypes(dtype: torch.dtype) -> None:
    n = NAMES[dtype]
    x = (
        torch.randint(0, 2, (1000,)).to(dtype)
        if dtype is torch.bool
        else (torch.randn(1000) * 60).to(dtype)
    )
    a = ax("i", 1000)
    wide = cast(ld("x", a, dtype=n), "f32")
    y, z, m = torch.empty(1000), torch.empty_like(x), torch.empty_like(x)
    run(
        Nest(
            (a,),
            (),
            (
                Store("y", idx(a), wide, "point"),
                Store("z", idx(a), cast(op("mul", wide, lit(0.7)), n), "point"),
                Store("m", idx(a), op("maximum", ld("x", a, dtype=n), lit(1, n)), "point"),
            ),
        ),
        {"x": x, "y": y, "z": z, "m": m},
        ["y", "z", "m"],
    )
    assert torch.equal(y, x.float())
    assert torch.equal(z, (x.float() * 0.7).to(dtype))
    assert torch.equal(m, torch.maximum(x, torch.ones((), dtype=dtype)))


@pytest.mark.parametrize("shape", [(4, 7), (33, 64), (100, 1000), (2, 100000), (1, 3), (6, 4096)])
@pytest.mark.parametrize("dim", [0, 1])
def test_softmax(shape: tuple[int, int], dim: int) -> None:
    x = torch.randn(shape)
    a, b = ax("i", shape[0]), ax("j", shape[1])
    y = torch.empty(shape)
    run(softmax_nest((b if dim == 0 else a,), a if dim == 0 else b, a, b), {"x": x, "y": y}, ["y"])
    torch.testing.assert_close(y, torch.softmax(x, dim))


def pooled(x: torch.Tensor) -> torch.Tensor:
    """Where ATen's pooling finds the largest element of each row: of several NaN the last."""
    return torch.nn.functional.max_pool1d(x, x.shape[1], return_indices=True)[1][:, 0]


@pytest.mark.parametrize(
    "kind",
    ["sum", "prod", "max", "min", "argmax", "argmin", "argmax_last_nan", "any", "all"],
)
@pytest.mark.parametrize(
    "shape,dim",
    [
        ((40, 70), 0),
        ((40, 70), 1),
        ((3, 200000), 1),
        ((200000, 3), 0),
        ((5000, 600), 0),
        ((3, 5), 0),
        ((3, 5), 1),
    ],
)
def test_reductions(kind: str, shape: tuple[int, int], dim: int) -> None:
    x = (
        1 + 0.01 * torch.randn(shape)
        if kind == "prod" and max(shape) < 100
        else torch.randn(shape).clamp(-1.5, 1.5)
    )
    if kind == "prod" and max(shape) > 100:
        x = 1 + 0.001 * x
    if kind.removeprefix("arg").startswith("max"):
        x[1, 2] = x[-1, 2] = x[1, -1] = math.nan
    a, b = ax("i", shape[0]), ax("j", shape[1])
    p, r = (b, a) if dim == 0 else (a, b)
    body = (
        ld("x", a, b)
        if kind not in ("any", "all")
        else op("gt", ld("x", a, b), lit(1.4 if kind == "any" else -1.4))
    )
    dtype = "i64" if kind.startswith("arg") else body.dtype
    expect = {
        "sum": lambda: x.double().sum(dim).float(),
        "prod": lambda: x.prod(dim),
        "max": lambda: x.amax(dim),
        "min": lambda: x.amin(dim),
        "argmax": lambda: x.argmax(dim),
        "argmax_last_nan": lambda: pooled(x.movedim(dim, 1)),
        "argmin": lambda: x.argmin(dim),
        "any": lambda: (x > 1.4).any(dim),
        "all": lambda: (x > -1.4).all(dim),
    }[kind]()
    y = torch.empty_like(expect)
    run(
        Nest((p,), (r,), (Reduce("f", kind, body), Store("y", idx(p), ref("f", dtype), "row"))),
        {"x": x, "y": y},
        ["y"],
    )
    if kind == "argmax_last_nan":
        assert torch.equal(y, expect)
    elif kind.startswith("arg"):
        first = x.isnan() if x.isnan().any() else None
        if kind == "argmin" or first is None:
            best = (
                (x == x.amin(dim, keepdim=True))
                if kind == "argmin"
                else (x == x.amax(dim, keepdim=True))
            )
        else:
            best = torch.where(
                x.isnan().any(dim, keepdim=True), x.isnan(), x == x.amax(dim, keepdim=True)
            )
        assert torch.equal(y, best.int().argmax(dim))
    else:
        torch.testing.assert_close(
            y, expect, equal_nan=True, rtol=1e-4 if kind == "prod" else 1e-5, atol=1e-4
        )


@pytest.mark.parametrize("shape", [(8192, 96), (96, 8192), (1, 1000000), (1000000, 1)])
@pytest.mark.parametrize("dim", [0, 1])
def test_sum_error(shape: tuple[int, int], dim: int) -> None:
    x = torch.rand(shape)
    a, b = ax("i", shape[0]), ax("j", shape[1])
    p, r = (b, a) if dim == 0 else (a, b)
    y = torch.empty(shape[1 - dim])
    run(
        Nest((p,), (r,), (Reduce("f", "sum", ld("x", a, b)), Store("y", idx(p), ref("f"), "row"))),
        {"x": x, "y": y},
        ["y"],
    )
    exact = x.double().sum(dim)
    assert (y - exact).abs().max() <= 2 * (
        x.sum(dim) - exact
    ).abs().max() + 1e-7 * exact.abs().max()


@pytest.mark.parametrize("shape", [(5, 17), (64, 768), (1, 40000), (2, 300000)])
def test_layer_norm(shape: tuple[int, int]) -> None:
    x, w, b = torch.randn(shape), torch.randn(shape[1]), torch.randn(shape[1])
    y, mean, rstd = torch.empty(shape), torch.empty(shape[0]), torch.empty(shape[0])
    run(
        layer_norm_nest(ax("i", shape[0]), ax("j", shape[1]), shape[1]),
        {"x": x, "w": w, "b": b, "y": y, "mean": mean, "rstd": rstd},
        ["y", "mean", "rstd"],
    )
    torch.testing.assert_close(
        y, torch.nn.functional.layer_norm(x, (shape[1],), w, b), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(mean, x.mean(1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("dim", [0, 1])
def test_scan(kind: str, dim: int) -> None:
    shape = (60, 90)
    x = torch.randn(shape)
    a, b = ax("i", shape[0]), ax("j", shape[1])
    p, r = (b, a) if dim == 0 else (a, b)
    y, z = torch.empty(shape), torch.empty(shape)
    run(
        Nest(
            (p,),
            (r,),
            (
                Scan("c", kind, ld("x", a, b)),
                Store("y", idx(a, b), op("mul", ref("c"), lit(2.0)), "point"),
                Reduce("m", "max", ref("c")),
                Store("z", idx(a, b), op("sub", ref("c"), ref("m")), "point"),
            ),
        ),
        {"x": x, "y": y, "z": z},
        ["y", "z"],
    )
    c = {"sum": torch.cumsum, "prod": torch.cumprod}.get(kind)
    c = c(x, dim) if c else {"max": torch.cummax, "min": torch.cummin}[kind](x, dim).values
    torch.testing.assert_close(y, c * 2)
    torch.testing.assert_close(z, c - c.amax(dim, keepdim=True))


@pytest.mark.parametrize("n", [64, 65, 100, 4096, 5003])
def test_dear_loops_of_several_vectors(n: int) -> None:
    """Each element once, whatever is left over; a second pass over rows, and points."""
    x, y, z = torch.randn(3, n), torch.empty(3, n), torch.empty(3, n)
    a, r = ax("i", 3), ax("j", n)
    top = Reduce("m", "max", ld("x", a, r))
    value = op("exp", op("mul", op("sub", ld("x", a, r), ref("m")), lit(0.5)))
    rows = Nest((a,), (r,), (top, Store("y", idx(a, r), value, "point")))
    value = op("add", ld("z", a, r), op("exp", ld("x", a, r)))
    points = Nest((a, r), (), (Store("z", idx(a, r), value, "point"),))
    z.fill_(1)
    k = run([rows, points], {"x": x, "y": y, "z": z}, ["y", "z"], reads=["x"])
    assert ("d_short_vectors &&" in k.cpp.source) == (n >= 64)
    wide = x.double()
    torch.testing.assert_close(y.double(), ((wide - wide.amax(1, True)) * 0.5).exp())
    torch.testing.assert_close(z.double(), wide.exp() + 1)


def test_error_function_in_a_sum() -> None:
    """Where only 1 + erf(x) is used, its error is that of the sum; not where erf(x) is, too."""
    x, y = torch.randn(4000) * 3, torch.empty(4000)
    i = ax("i", 4000)
    erf = op("erf", op("mul", ld("x", i), lit(0.7071067811865476)))
    more = op("add", erf, lit(1.0))
    wide = x.double()
    e = torch.erf(wide * 0.7071067811865476)
    for value, want, loose in ((more, 1 + e, True), (op("mul", more, erf), (1 + e) * e, False)):
        r = run(Nest((i,), (), (Store("y", idx(i), value, "point"),)), {"x": x, "y": y}, ["y"])
        assert ("d_erf_for_one_plus(" in r.cpp.source) == loose
        eager = 1 + torch.erf(x * 0.7071067811865476)
        eager = eager if loose else eager * torch.erf(x * 0.7071067811865476)
        assert (y - want).abs().max() <= 2 * (eager - want).abs().max()


def test_logarithm_of_one_and_a_decay() -> None:
    """Needs no range but that from 0 to 1, nor does the exponential more than what is below 1."""
    x, y = torch.cat([torch.randn(100) * 9, torch.tensor([0.0, 200.0, math.inf])]), torch.empty(103)
    i = ax("i", 103)
    value = op("log1p", op("exp", op("neg", op("abs", ld("x", i)))))
    r = run(Nest((i,), (), (Store("y", idx(i), value, "point"),)), {"x": x, "y": y}, ["y"])
    assert "d_log1p_unit(" in r.cpp.source and "d_exp_nonpositive(" in r.cpp.source
    want = x.double().abs().neg().exp().log1p()
    torch.testing.assert_close(y.double(), want, rtol=5e-7, atol=1e-40)


@pytest.mark.parametrize("threads, columns", [(1, 64), (2, 32), (3, 32), (8, 16)])
def test_columns_of_added_rows_are_shared(threads: int, columns: int) -> None:
    """In whole lines, since rows that are added to one go on in order."""
    g, at = torch.randn(300, 64), torch.randint(0, 9, (300,))
    total = torch.zeros(9, 64)
    want = total.double().index_add(0, at, g.double())
    i, j = ax("i", 300), ax("j", 64)
    place = as_position(ld("at", i, dtype="i64"))
    nest = Nest((i, j), (), (Store("total", (place, j.index), ld("g", i, j), "point", "sum"),))
    machine = Machine(threads, 1 << 20)
    r = run(nest, {"g": g, "at": at, "total": total}, ["total"], machine, ["g", "at"])
    torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=1e-5)
    if threads > 1:
        assert f"const long long len0 = {columns};" in r.cpp.source


def test_one_and_a_tangent() -> None:
    """Is one call, unless the tangent is used besides."""
    x, y = torch.randn(100).clamp(-4, 4) * 5, torch.empty(100)
    i = ax("i", 100)
    tangent = op("tanh", ld("x", i))
    more = op("add", tangent, lit(1.0))
    for value, alone in ((op("mul", ld("x", i), more), True), (op("mul", tangent, more), False)):
        r = run(Nest((i,), (), (Store("y", idx(i), value, "point"),)), {"x": x, "y": y}, ["y"])
        assert ("d_one_plus_tanh(" in r.cpp.source) == alone
        wide = x.double()
        want = (wide if alone else wide.tanh()) * (1 + wide.tanh())
        torch.testing.assert_close(y.double(), want, rtol=5e-7, atol=1e-11 if alone else 1e-7)


def test_one_and_an_exponential() -> None:
    """Is one call, unless the exponential is used besides."""
    x, y = torch.randn(100).clamp(-4, 4) * 20, torch.empty(100)
    i = ax("i", 100)
    power = op("exp", op("neg", ld("x", i)))
    more = op("add", lit(1.0), power)
    for value, alone in ((op("div", ld("x", i), more), True), (op("div", power, more), False)):
        r = run(Nest((i,), (), (Store("y", idx(i), value, "point"),)), {"x": x, "y": y}, ["y"])
        assert ("d_one_plus_exp(" in r.cpp.source) == alone
        wide = x.double()
        e = torch.exp(-wide)
        want = (wide if alone else e) / (1 + e)
        torch.testing.assert_close(y.double(), want, rtol=5e-7, atol=1e-37)


def test_gather_and_scatter_add() -> None:
    n, k, d = 500, 37, 96
    table, where = torch.randn(k, d), torch.randint(0, k, (n,))
    i, j = ax("i", n), ax("j", d)
    at = as_position(ld("where", i, dtype="i64"))
    y = torch.empty(n, d)
    run(
        Nest((i, j), (), (Store("y", idx(i, j), load("table", (at, j.index), "f32"), "point"),)),
        {"table": table, "where": where, "y": y},
        ["y"],
    )
    assert torch.equal(y, table[where])
    grad, total = torch.randn(n, d), torch.zeros(k, d)
    nest = Nest((i, j), (), (Store("total", (at, j.index), ld("grad", i, j), "point", "sum"),))
    run(nest, {"grad": grad, "where": where, "total": total}, ["total"])
    torch.testing.assert_close(
        total, torch.zeros(k, d).index_add(0, where, grad), rtol=1e-4, atol=1e-4
    )
    flat = torch.zeros(k)
    run(
        Nest((i,), (), (Store("flat", (at,), ld("g", i), "point", "sum"),)),
        {"g": grad[:, 0].contiguous(), "where": where, "flat": flat},
        ["flat"],
    )
    torch.testing.assert_close(
        flat, torch.zeros(k).index_add(0, where, grad[:, 0]), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("n,m,count", [(100, 70, 4), (1030, 64, 8), (7, 5, 3), (3, 8, 8)])
def test_row_split(n: int, m: int, count: int) -> None:
    """Layer norm's backward in one pass: a row result, and column sums as partial results."""
    x, g = torch.randn(n, m), torch.randn(n, m)
    i, j = ax("i", n), ax("j", m)
    prod = op("mul", ld("x", i, j), ld("g", i, j))
    dx, dw, db = torch.empty(n, m), torch.empty(count, m), torch.empty(count, m)
    run(
        Nest(
            (i,),
            (j,),
            (
                Reduce("s", "sum", prod),
                Reduce("dw", "sum", prod, True),
                Reduce("db", "sum", ld("g", i, j), True),
                Store(
                    "dx",
                    idx(i, j),
                    op("sub", ld("g", i, j), op("mul", ld("x", i, j), ref("s"))),
                    "point",
                ),
            ),
            (i, count),
        ),
        {"x": x, "g": g, "dx": dx, "dw": dw, "db": db},
        ["dx", "dw", "db"],
    )
    torch.testing.assert_close(dx, g - x * (x * g).sum(1, keepdim=True), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dw.sum(0), (x * g).sum(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(db.sum(0), g.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(40, 70), (512, 1024), (3, 1000)])
def test_transposed(shape: tuple[int, int]) -> None:
    x, b = torch.randn(shape), torch.randn(shape[::-1])
    i, j = ax("i", shape[1]), ax("j", shape[0])
    y = torch.empty(shape[::-1])
    run(
        Nest(
            (i, j), (), (Store("y", idx(i, j), op("add", ld("x", j, i), ld("b", i, j)), "point"),)
        ),
        {"x": x, "b": b, "y": y},
        ["y"],
    )
    assert torch.equal(y, x.t() + b)


def test_symbolic_sizes() -> None:
    n, m = Sym("s0", 0, 100), Sym("s1", 0, 50)
    i, j = ax("i", atom(n)), ax("j", atom(m))
    lay = contiguous((atom(n), atom(m)), "f32")
    row = contiguous((atom(n),), "f32")
    nest = softmax_nest((i,), j, i, j)
    nest = Nest(nest.parallel, nest.reduced, (*nest.stmts, Store("z", idx(i), ref("m"), "row")))
    r = Runner(kernel([nest], {"x": lay}, {"y": lay, "z": row}))
    col = Runner(kernel([softmax_nest((j,), i, i, j)], {"x": lay}, {"y": lay}))
    poi = Runner(
        kernel(
            [Nest((i, j), (), (Store("y", idx(i, j), op("neg", ld("x", i, j)), "point"),))],
            {"x": lay},
            {"y": lay},
        )
    )
    for a, b in ((100, 50), (3, 4), (1, 100000), (0, 4), (5, 1), (200, 3000)):
        x, y, z = torch.randn(a, b), torch.empty(a, b), torch.empty(a)
        r({"x": x, "y": y, "z": z}, {n: a, m: b})
        torch.testing.assert_close(y, torch.softmax(x, 1))
        col({"x": x, "y": y}, {n: a, m: b})
        torch.testing.assert_close(y, torch.softmax(x, 0))
        poi({"x": x, "y": y}, {n: a, m: b})
        assert torch.equal(y, -x)


def test_pad_and_concatenate() -> None:
    a, b = torch.randn(40, 60), torch.randn(40, 30)
    y = torch.empty(40, 95)
    i, j = ax("i", 40), ax("j", 95)
    left = op("lt", index_value(j.index), lit(60, "i64"))
    right = op(
        "logical_and",
        op("ge", index_value(j.index), lit(60, "i64")),
        op("lt", index_value(j.index), lit(90, "i64")),
    )
    value = op(
        "where",
        left,
        load("a", (i.index, j.index), "f32", left, 0.0),
        load("b", (i.index, j.index - 60), "f32", right, 7.0),
    )
    run(Nest((i, j), (), (Store("y", idx(i, j), value, "point"),)), {"a": a, "b": b, "y": y}, ["y"])
    assert torch.equal(y, torch.cat([a, b, torch.full((40, 5), 7.0)], 1))
    z = torch.empty(40)
    run(
        Nest((i,), (j,), (Reduce("s", "sum", value), Store("z", idx(i), ref("s"), "row"))),
        {"a": a, "b": b, "z": z},
        ["z"],
    )
    torch.testing.assert_close(z, y.sum(1), rtol=1e-4, atol=1e-4)


def test_reshaped_axes() -> None:
    """Heads split and swapped: div and mod leave the inner loop."""
    x, w = torch.randn(2, 10, 768), torch.randn(768)
    y = torch.empty(2, 12, 10, 64)
    b, t, c = ax("b", 2), ax("t", 10), ax("c", 768)
    nest = Nest(
        (b, t, c),
        (),
        (
            Store(
                "y",
                (b.index, c.index // 64, t.index, c.index % 64),
                op("mul", ld("x", b, t, c), ld("w", c)),
                "point",
            ),
        ),
    )
    r = run(nest, {"x": x, "w": w, "y": y}, ["y"])
    assert torch.equal(y, (x * w).view(2, 10, 12, 64).transpose(1, 2))
    assert "%" not in r.cpp.source and "/ 64" not in r.cpp.source


def test_several_nests_and_full_reduction() -> None:
    x, y = torch.randn(300, 400), torch.randn(1000)
    s, z = torch.empty(()), torch.empty(1000)
    i, j, k = ax("i", 300), ax("j", 400), ax("k", 1000)
    run(
        [
            Nest((), (i, j), (Reduce("f", "sum", ld("x", i, j)), Store("s", (), ref("f"), "row"))),
            Nest((k,), (), (Store("z", idx(k), op("exp", ld("y", k)), "point"),)),
        ],
        {"x": x, "y": y, "s": s, "z": z},
        ["s", "z"],
    )
    torch.testing.assert_close(s, x.sum(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(z, y.exp())


def test_integers_wrap_around() -> None:
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        n = NAMES[dtype]
        info = torch.iinfo(dtype)
        x = torch.randint(info.min, info.max, (500,), dtype=dtype)
        y = torch.randint(info.min, info.max, (500,), dtype=dtype)
        y[y == 0] = 3
        a = ax("i", 500)
        ops = {
            "add": x + y,
            "mul": x * y,
            "sub": x - y,
            "bitwise_xor": x ^ y,
            "floordiv": x // y,
            "remainder": x % y,
        }
        outs = {k: torch.empty_like(x) for k in ops}
        run(
            Nest(
                (a,),
                (),
                tuple(
                    Store(k, idx(a), op(k, ld("x", a, dtype=n), ld("y", a, dtype=n)), "point")
                    for k in ops
                ),
            ),
            {"x": x, "y": y, **outs},
            list(outs),
        )
        for k, v in ops.items():
            assert torch.equal(outs[k], v), (dtype, k)


def test_in_place_operand() -> None:
    """The planner may give the result the memory of an operand that dies: later passes still find
    the operand.
    """
    x = torch.randn(40, 300)
    want = torch.softmax(x, 1)
    i, j = ax("i", 40), ax("j", 300)
    run(softmax_nest((i,), j, i, j), {"x": x, "y": x}, ["y"])
    torch.testing.assert_close(x, want)
