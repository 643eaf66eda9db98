"""Non-temporal stores: which results take them, and that odd addresses are right."""

from __future__ import annotations

import pytest
import torch

from deuteron.codegen.cpp import Machine
from deuteron.codegen.cpp.nontemporal import nontemporal_tensors, read_later
from deuteron.ir.expr import op
from deuteron.schedule.kernel import Nest, Reduce, Schedule, Store
from tests.codegen.cpp_tools import NAMES, ax, idx, kernel, layout, ld, lit, ref, run, softmax_nest

CACHE = 4 << 20
MACHINE = Machine(2, 1 << 20, CACHE)


@pytest.mark.parametrize(
    "elements,again,wanted",
    [(CACHE // 4, False, True), (CACHE // 4, True, True), (CACHE // 16, False, True)]
    + [(CACHE // 16, True, False), (CACHE // 64, False, False)],
)
def test_what_is_stored_non_temporally(elements: int, again: bool, wanted: bool) -> None:
    """Results that the graph returns, and results that no cache holds until they are read."""
    x = torch.empty(elements)
    a = ax("i", elements)
    nest = Nest((a,), (), (Store("y", idx(a), op("neg", ld("x", a)), "point"),))
    k = kernel([nest], {"x": layout(x)}, {"y": layout(x)})
    soon = frozenset({"y"} if again else ())
    assert nontemporal_tensors(k, MACHINE, soon) == ({"y"} if wanted else set())
    assert not nontemporal_tensors(k, Machine(2, 1 << 20), soon)


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("mib", [4, 16])
def test_a_core_counts_on_a_part_of_a_large_cache(mib: int, tiles: bool) -> None:
    """Results that the graph returns; what is read soon stays in it, whatever a core counts on."""
    x = torch.empty(mib << 18)
    a = ax("i", x.numel())
    nest = Nest((a,), (), (Store("y", idx(a), op("neg", ld("x", a)), "point"),))
    k = kernel([nest], {"x": layout(x)}, {"y": layout(x)})
    machine = Machine(2, 1 << 20, 260 << 20)
    assert nontemporal_tensors(k, machine, frozenset(), tiles) == (
        {"y"} if tiles or mib == 16 else set()
    )
    soon = nontemporal_tensors(k, machine, frozenset("y"), tiles)
    assert soon == ({"y"} if tiles and mib == 16 else set())
    assert not nontemporal_tensors(k, Machine(64, 1 << 20, 260 << 20), frozenset(), tiles)


def test_what_is_added_to_stays_in_the_cache() -> None:
    """The zeros to which another kernel adds are read again, though it only stores to them."""
    x = torch.empty(1 << 20)
    k = kernel([], {}, {"zeros": layout(x)}, "fill")
    added = kernel([], {"x": layout(x)}, {"sums": layout(x)}, "add")
    again = read_later(Schedule((k, added), {"sums": "zeros"}, {}))
    assert again == {"fill": {"zeros"}, "add": set()}


@pytest.mark.parametrize("rows,n", [(1, 70_001), (40, 1024), (40, 1031), (9, 9000)])
def test_what_is_read_is_prefetched(rows: int, n: int) -> None:
    """Where a row of what is read follows another, or is long; not what a cache holds."""
    x, bias, y = torch.randn(rows, n), torch.randn(n), torch.empty(rows, n)
    a, b = ax("i", rows), ax("j", n)
    nest = Nest(
        (a, b), (), (Store("y", idx(a, b), op("add", ld("x", a, b), ld("bias", b)), "point"),)
    )
    tensors = {"x": x, "bias": bias, "y": y}
    r = run(nest, tensors, ["y"], Machine(1, 72 << 10, 64))
    assert "if (!d_short_vectors) __builtin_prefetch(p0_x" in r.cpp.source
    assert ("__builtin_prefetch(p1_bias" in r.cpp.source) is (rows == 1)
    assert torch.equal(y, x + bias)
    r = run(nest, tensors, ["y"], Machine(1, 1 << 20, 64))
    assert "d_nontemporal_lanes" in r.cpp.source and "__builtin_prefetch" not in r.cpp.source


@pytest.mark.parametrize("offset", [0, 1, 7, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [5000, 70_001])
def test_addresses(offset: int, dtype: torch.dtype, n: int) -> None:
    """Whole lines go past the caches, what is left at both ends does not; nothing else changes."""
    name = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    x, memory = torch.randn(n).to(dtype), torch.full((n + 64,), 7.0).to(dtype)
    y = memory[offset : offset + n]
    a = ax("i", n)
    value = op("add", ld("x", a, dtype=name), lit(1.0, name))
    nest = Nest((a,), (), (Store("y", idx(a), value, "point"),))
    r = run(nest, {"x": x, "y": y}, ["y"], Machine(2, 1 << 20, 64))
    assert "d_nontemporal_lanes" in r.cpp.source
    assert torch.equal(y, x + 1)
    assert memory[:offset].eq(7).all() and memory[offset + n :].eq(7).all()


@pytest.mark.parametrize(
    "shape", [(33, 1500), (40, 1100), (3, 4096), (900, 64), (3000, 16), (501, 32)]
)
@pytest.mark.parametrize("offset", [3, 16])
def test_softmax(shape: tuple[int, int], offset: int) -> None:
    """Down columns: of long rows, and of short ones that follow each other."""
    x = torch.randn(shape)
    memory = torch.full((x.numel() + offset,), 7.0)
    y = memory[offset:].view(shape)
    a, b = ax("i", shape[0]), ax("j", shape[1])
    nest = softmax_nest((b,), a, a, b)
    r = run(nest, {"x": x, "y": y}, ["y"], Machine(2, 1 << 20, 64))
    assert "d_nontemporal" in r.cpp.source
    torch.testing.assert_close(y, x.softmax(0), rtol=1e-5, atol=1e-6)
    assert memory[:offset].eq(7).all()
    r = run(nest, {"x": x, "y": y}, ["y"], Machine(2, 16 << 10, 64))
    fetched = "if (!d_short_vectors) __builtin_prefetch(p0_x" in r.cpp.source
    assert fetched is (shape[0] > 100)  # else a core's cache holds what it works on
    torch.testing.assert_close(y, x.softmax(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize(
    "shape,offset",
    [((256, 320), 0), ((256, 320), 3), ((250, 333), 0), ((272, 336), 0), ((528, 336), 0)],
)
def test_transposed(dtype: torch.dtype, shape: tuple[int, int], offset: int) -> None:
    """Also where rows do not begin with whole registers; with sums, along the other axis."""
    x = (torch.randn(shape) * 40).to(dtype)
    memory = torch.zeros(x.numel() + 64, dtype=dtype)
    y = memory[offset : offset + x.numel()].view(shape[1], shape[0])
    a, b, name = ax("i", shape[0]), ax("j", shape[1]), NAMES[dtype]
    value = op("neg", ld("x", a, b, dtype=name))
    store = Store("y", idx(b, a), value, "point")
    machine = Machine(2, 1 << 20, 64)
    r = run(Nest((a, b), (), (store,)), {"x": x, "y": y}, ["y"], machine)
    assert "d_transpose_nontemporal" in r.cpp.source
    assert torch.equal(y, (-x).t())
    z = torch.empty(shape[1], dtype=dtype)
    reduction = Reduce("f", "max", ld("x", a, b, dtype=name))
    parts = (reduction, store, Store("z", idx(b), ref("f", name), "row"))
    memory.zero_()
    run(Nest((b,), (a,), parts), {"x": x, "y": y, "z": z}, ["y", "z"], machine)
    assert torch.equal(y, (-x).t()) and torch.equal(z, x.amax(0))
    assert memory[:offset].eq(0).all() and memory[offset + x.numel() :].eq(0).all()


@pytest.mark.parametrize("offset", [0, 3, 16])
@pytest.mark.parametrize("rows,n", [(5, 1024), (3, 5003), (1, 70_000)])
@pytest.mark.parametrize("costly", [False, True])
def test_last_of_several_passes(rows: int, n: int, offset: int, costly: bool) -> None:
    """Rows that are read twice: non-temporal stores where both passes are cheap, whatever the
    addresses."""
    x, memory = torch.randn(rows, n), torch.full((rows * n + 64,), 7.0)
    y = memory[offset : offset + rows * n].view(rows, n)
    z, total = torch.empty(rows), ref("f", "f32")
    a, b = ax("i", rows), ax("j", n)
    each = op("sub", ld("x", a, b), op("div", total, lit(float(n), "f32")))
    value = op("exp", each) if costly else each
    parts = (
        Reduce("f", "sum", ld("x", a, b)),
        Store("y", idx(a, b), value, "point"),
        Store("z", idx(a), total, "row"),
    )
    r = run(
        Nest((a,), (b,), parts),
        {"x": x, "y": y, "z": z},
        ["y", "z"],
        Machine(1, 1 << 20, 64),
    )
    assert ("d_nontemporal_last<" in r.cpp.source) is costly
    assert ("d_nontemporal_lanes<" in r.cpp.source) is not costly
    want = x - x.mean(1, keepdim=True)
    torch.testing.assert_close(y, want.exp() if costly else want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(z, x.sum(1), rtol=1e-5, atol=1e-3)
    assert memory[:offset].eq(7).all() and memory[offset + rows * n :].eq(7).all()


@pytest.mark.parametrize("n", [50, 1024, 1031])
@pytest.mark.parametrize("costly", [False, True])
def test_what_rows_prefetch_beside_non_temporal_stores(n: int, costly: bool) -> None:
    """With AVX-512 cheap passes what comes two pages later, costly ones the next row; and what the
    first pass does not read."""
    rows = (1 << 19) // n
    x, z, y = torch.randn(rows, n), torch.randn(rows, n), torch.empty(rows, n)
    a, b = ax("i", rows), ax("j", n)
    each = op("mul", op("sub", ld("x", a, b), ref("f", "f32")), ld("z", a, b))
    value = op("exp", each) if costly else each
    parts = (Reduce("f", "max", ld("x", a, b)), Store("y", idx(a, b), value, "point"))
    tensors = {"x": x, "z": z, "y": y}
    r = run(Nest((a,), (b,), parts), tensors, ["y"], Machine(1, 1 << 20, 64))
    first, second = r.cpp.source.split("const float f")[:2]
    wide = "if (!d_short_vectors) __builtin_prefetch(p"
    assert (wide + "0_x" in first) is (n == 50 or not costly)
    assert (wide + "1_z" in second) is (n > 1000)
    assert ("  __builtin_prefetch(p0_x" in second) is (n > 1000 and costly)
    want = (x - x.amax(1, keepdim=True)) * z
    torch.testing.assert_close(y, want.exp() if costly else want, rtol=1e-5, atol=1e-5)
