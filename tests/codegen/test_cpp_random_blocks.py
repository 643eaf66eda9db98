"""Random numbers by blocks are those of single elements, bit by bit."""

from __future__ import annotations

import pytest
import torch

from deuteron.graph.random_ops import RAND
from deuteron.ir.expr import cast, literal, op, random
from deuteron.schedule.kernel import Nest, Reduce, Store
from tests.codegen.cpp_tools import NAMES, SERIAL, ax, idx, ld, lit, ref, run

SEED = -6_123_456_789_012_345_678


@pytest.mark.parametrize("m,n", [(3, 1000), (5, 257), (1, 64), (2, 30)])
@pytest.mark.parametrize("row", [False, True])
def test_blocks(m: int, n: int, row: bool) -> None:
    """Rows begin at any of the four elements of a counter, and end anywhere."""
    x, y, z = torch.randn(m, n), torch.empty(m, n), torch.empty(m)
    a, b = ax("i", m), ax("j", n)
    drawn = random("rand", literal(SEED, "i64"), 3, a.index * n + b.index, "f32")
    store = Store("y", idx(a, b), op("add", drawn, lit(0.0)), "point")
    if row:
        reduction = Reduce("f", "max", op("exp", ld("x", a, b)))
        parts = (reduction, store, Store("z", idx(a), ref("f"), "row"))
        r = run(Nest((a,), (b,), parts), {"x": x, "y": y, "z": z}, ["y", "z"], SERIAL)
        torch.testing.assert_close(z, x.exp().amax(1))
    else:
        r = run(Nest((a, b), (), (store,)), {"y": y}, ["y"], SERIAL)
    assert torch.equal(y, RAND(torch.tensor(SEED), 3, [m, n], torch.float32))
    assert row or "d_rand_lanes" in r.cpp.source


def test_a_reduction_of_numbers() -> None:
    y = torch.empty(7)
    a, b = ax("i", 7), ax("j", 500)
    drawn = random("rand", literal(SEED, "i64"), 1, a.index * 500 + b.index, "f32")
    nest = Nest((a,), (b,), (Reduce("f", "sum", drawn), Store("y", idx(a), ref("f"), "row")))
    r = run(nest, {"y": y}, ["y"], SERIAL)
    assert "d_rand_lanes" in r.cpp.source
    want = RAND(torch.tensor(SEED), 1, [7, 500], torch.float32).double().sum(1)
    torch.testing.assert_close(y, want.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_truth_as_a_number(dtype: torch.dtype) -> None:
    m, y = torch.rand(300) < 0.5, torch.empty(300, dtype=dtype)
    a = ax("i", 300)
    value = cast(ld("m", a, dtype="bool"), NAMES[dtype])
    run(Nest((a,), (), (Store("y", idx(a), value, "point"),)), {"m": m, "y": y}, ["y"])
    assert torch.equal(y, m.to(dtype))
