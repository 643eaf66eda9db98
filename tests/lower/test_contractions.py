"""Who multiplies: the times of both are compared, and are in the Record."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deuteron  # noqa: F401
from deuteron.base import products
from deuteron.base.device import DeviceSpec, device_spec, named_gpu
from deuteron.base.passes import Context
from deuteron.base.products import Product, generated_us, library_us
from deuteron.base.record import Record
from deuteron.ir.program import Compute, Extern, Program
from deuteron.lower.passes import lower
from tests.lower.harness import trace


def lowered(f: Any, *args: Any) -> tuple[Program, Record]:
    record = Record()
    spec = device_spec("cpu")
    return lower(trace(f, args), Context(record=record, specs=lambda _: spec)), record


def calls(p: Program) -> list[Extern]:
    return [d for d in p.defs if isinstance(d, Extern)]


def product(m: int, k: int, n: int, dtype: str = "f32", *, along: bool, around: bool) -> Product:
    size = {"f32": 4, "f64": 8, "bf16": 2, "f16": 2}[dtype]
    return Product(1, m, k, n, dtype, size, (along, along), around)


def test_one_row_is_generated_and_many_are_called() -> None:
    w = torch.randn(700, 900).t()
    p, record = lowered(lambda x, w: torch.relu(x @ w), torch.randn(1, 900), w)
    assert not calls(p)
    (d,) = [d for d in record.of("decision") if d["subject"] == "product"]
    assert "1x900 by 900x700: generated" in d["detail"] and "the library" in d["detail"]
    p, _ = lowered(lambda x, w: torch.relu(x @ w), torch.randn(130, 900), w)
    (call,) = calls(p)
    assert "130x900 by 900x700: the library" in call.reason and "the schedule" in call.reason


@pytest.mark.parametrize("f", [
    lambda w, v, b: w.mv(v),
    lambda w, v, b: torch.addmv(b, w, v, beta=0.5, alpha=2),
    lambda w, v, b: torch.relu(w.mv(v)) + b,
])  # fmt: skip
def test_vectors_are_columns(f: Any) -> None:
    """A matrix that is contiguous along the sum is walked by loops; down its columns the library is
    faster. Halves are walked by loops."""
    v, b = torch.randn(900), torch.randn(2000)
    p, record = lowered(f, torch.randn(2000, 900), v, b)
    assert not calls(p)
    (d,) = [d for d in record.of("decision") if d["subject"] == "product"]
    assert "2000x900 by 900x1: generated" in d["detail"]
    p, _ = lowered(f, torch.randn(900, 2000).t(), v, b)
    (call,) = calls(p)
    assert "2000x900 by 900x1: generated" in call.reason and "the library" in call.reason
    p, _ = lowered(f, torch.randn(900, 2000).t().bfloat16(), v.bfloat16(), b.bfloat16())
    assert not calls(p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(5, 7), (0, 4), (4, 0), (1, 513), (301, 1), (1200, 700)])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_vectors_as_eager(dtype: torch.dtype, shape: tuple[int, int], transposed: bool) -> None:
    """Values, strides and gradients."""

    def f(w: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = torch.addmv(b, w, v, beta=2, alpha=3)
        return w.mv(v) + 1, total, total.dot(b), w[:, ::2].mv(v[::2]), b.vdot(b)

    torch._dynamo.reset()
    m, k = shape
    w = torch.randint(-3, 4, (k, m) if transposed else (m, k)).to(dtype)
    args = (
        w.t() if transposed else w,
        torch.randint(-3, 4, (k,)).to(dtype),
        torch.ones(m, dtype=dtype),
    )
    results = []
    for g in (f, torch.compile(f, backend="deuteron")):
        xs = [x.detach().clone().requires_grad_(dtype.is_floating_point) for x in args]
        outs = g(*xs)
        if dtype.is_floating_point:
            sum(o.sum() for o in outs[:4]).backward()
        results.append([*outs, *(x.grad for x in xs)])
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, check_stride=True, rtol=1.6e-2, atol=1e-5)


def test_figures_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the library twice as fast, it would multiply."""
    slow = {k: tuple(tuple(r / 40 for r in side) for side in v) for k, v in
            products.GENERATED_RATES.items()}  # fmt: skip
    monkeypatch.setattr(products, "GENERATED_RATES", slow)
    p, _ = lowered(lambda x, w: torch.relu(x @ w), torch.randn(1, 900), torch.randn(700, 900).t())
    assert len(calls(p)) == 1


@pytest.mark.parametrize("order", ["along", "across"])
def test_half_precision_goes_where_it_is_faster(order: str) -> None:
    """The library's f16 is fast along the sum and slow across it."""
    x, w = torch.randn(1, 2000).half(), torch.randn(1500, 2000).half()
    f = (lambda x, w: x @ w.t()) if order == "along" else (lambda x, w: x @ w)
    p, _ = lowered(f, x, w if order == "along" else w.t().contiguous())
    assert len(calls(p)) == (order == "along")


def test_outer_products_are_pointwise() -> None:
    a, b = torch.randn(70, 1), torch.randn(1, 90)
    p, _ = lowered(lambda a, b: (a @ b) * 2 + 1, a, b)
    assert not calls(p)
    assert not any(d.is_reduction for d in p.defs if isinstance(d, Compute))
    got = torch.compile(lambda a, b: (a @ b) * 2 + 1, backend="deuteron")(a, b)
    torch.testing.assert_close(got, (a @ b) * 2 + 1)


@pytest.mark.parametrize("spec", [device_spec("cpu"), named_gpu("H200")])
def test_times_grow_with_the_work(spec: DeviceSpec) -> None:
    for us in (generated_us, library_us):
        last = 0.0
        for n in (64, 256, 1024, 4096):
            now = us(product(1, n, n, along=True, around=False), spec)
            assert now > last * 0.999
            last = now
    large = product(512, 512, 512, along=True, around=True)
    assert generated_us(large, spec) > library_us(large, spec)
    one = product(1, 512, 512, "bf16", along=False, around=True)
    assert generated_us(one, spec) < library_us(one, spec)


SMALL = [
    (3, 3, 3),
    (4, 4, 4),
    (4, 64, 4),
    (8, 32, 8),
    (8, 8, 8),
    (4, 32, 64),
    (16, 64, 8),
    (9, 9, 9),
    (64, 5, 3),
]


@pytest.mark.parametrize("order", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("sizes", SMALL)
def test_small_products_in_any_order(sizes: tuple[int, int, int], order: str) -> None:
    m, k, n = sizes
    x, y = torch.randn(150, m, k), torch.randn(150, k, n)
    x = x.mT.contiguous().mT if order[0] == "t" else x
    y = y.mT.contiguous().mT if order[1] == "t" else y
    torch._dynamo.reset()
    got = torch.compile(lambda x, y: torch.relu(x @ y) + 1, backend="deuteron")(x, y)
    torch.testing.assert_close(
        got.double(), torch.relu(x.double() @ y.double()) + 1, rtol=1e-5, atol=1e-5
    )


def test_results_of_few_columns_take_the_library_longer() -> None:
    """And each matrix of a batch, however small, takes it some time; loops that lie along short
    sums end each of them."""
    spec = device_spec("cpu")

    def us(f: Any, b: int, m: int, k: int, n: int, along: tuple[bool, bool]) -> float:
        return float(f(Product(b, m, k, n, "f32", 4, along, False), spec))

    wide = us(library_us, 1, 8, 256, 4096, (True, False))
    narrow = us(library_us, 1, 4096, 256, 8, (True, False))
    assert wide < us(library_us, 1, 4096, 256, 8, (True, True)) < narrow
    assert us(library_us, 4096, 4, 4, 4, (True, False)) > us(
        library_us, 1, 64, 64, 64, (True, False)
    )
    short, long = (us(generated_us, 1024, 8, k, 8, (True, True)) / k for k in (16, 128))
    assert short > 1.5 * long


def test_matrices_of_a_few_elements_are_loops() -> None:
    """A program of tiles for each would take longer than the loops."""
    few = torch.randn(16384, 4, 4), torch.randn(16384, 4, 4)
    p, record = lowered(lambda x, y: x @ y, *few)
    assert not calls(p)
    more = torch.randn(512, 8, 32), torch.randn(512, 32, 8)
    p, record = lowered(lambda x, y: x @ y, *more)
    (call,) = calls(p)
    assert "the schedule" in call.reason


def test_lanes_lie_where_a_product_reads_no_strides() -> None:
    """Its factors are read again and again, so a stride costs each time: lanes along 8 columns, of
    which a vector has 16, not along a sum whose second factor lies across."""
    from deuteron.base.observing import observed_by
    from deuteron.tools.observe import Observations

    seen = Observations()
    x, y = torch.randn(16, 3, 64), torch.randn(16, 64, 8)
    torch._dynamo.reset()
    with observed_by(seen):
        got = torch.compile(torch.bmm, backend="deuteron")(x, y)
    torch.testing.assert_close(got, torch.bmm(x, y))
    ((_, part),) = seen.parts
    (kernel,) = part.loaded.kernels.values()
    assert "+ l)*8LL" not in kernel.source and "d_lanes_flush" not in kernel.source
