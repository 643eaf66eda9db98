"""Pooling, resampling, scans and distances, forwards and their gradients in gather form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deuteron.base.device import named_gpu
from deuteron.base.passes import Context
from deuteron.base.record import Record
from deuteron.ir.index import as_index
from deuteron.ir.program import Compute
from deuteron.lower import nn
from deuteron.lower.passes import lower
from tests.lower.harness import check, check_half, declines, trace

aten = torch.ops.aten
torch.manual_seed(0)
X = torch.randn(2, 3, 9, 8)
CUBES = torch.randn(2, 2, 5, 6, 7)
# kernel, stride, padding, dilation, ceil_mode
POOLS = [
    ([2, 2], [2, 2], [0, 0], 1, False),
    ([3, 3], [2, 2], [1, 1], 1, False),
    ([3, 3], [2, 2], [1, 1], 1, True),
    ([2, 3], [1, 2], [1, 1], 2, False),
    ([3, 3], [1, 1], [1, 1], 1, False),
    ([5, 5], [3, 3], [2, 2], 1, True),
    ([9, 8], [9, 8], [0, 0], 1, False),
]


@pytest.mark.parametrize("pool", POOLS)
def test_max_pool(pool: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        k, s, p, d, c = pool
        v, i = aten.max_pool2d_with_indices(x, k, s, p, d, c)
        grad = aten.max_pool2d_with_indices_backward(v * 2, x, k, s, p, [d, d], c, i)
        return v, i, grad

    low = check(f, X)
    assert all(d.accumulate is None for d in low.program.defs if isinstance(d, Compute))


@pytest.mark.parametrize("divisor", [None, 3])
@pytest.mark.parametrize("include_pad", [True, False])
@pytest.mark.parametrize("pool", [p for p in POOLS if p[3] == 1])
def test_avg_pool(pool: Any, include_pad: bool, divisor: int | None) -> None:
    def f(x: torch.Tensor) -> Any:
        k, s, p, _, c = pool
        v = aten.avg_pool2d(x, k, s, p, c, include_pad, divisor)
        return v, aten.avg_pool2d_backward(v * 1.5, x, k, s, p, c, include_pad, divisor)

    check(f, X)


def test_pools_of_halves() -> None:
    check_half(lambda x: F.avg_pool2d(x, 3, 2, 1), X.bfloat16())
    check_half(lambda x: F.max_pool2d(x, 3, 2, 1), X.half())


def test_max_pool_of_odd_inputs() -> None:
    def f(x: torch.Tensor) -> Any:
        return aten.max_pool2d_with_indices(x, [3, 3], [2, 2], 1)

    check(f, torch.full((1, 1, 5, 5), -float("inf")))
    check(f, torch.randint(-5, 5, (1, 2, 5, 5)))
    check(f, X[0])
    check(f, X[:0])


def test_3d() -> None:
    def f(x: torch.Tensor) -> Any:
        mean = aten._adaptive_avg_pool3d(x, (2, 3, 3))
        return (
            aten.max_pool3d_with_indices(x, [2, 2, 2], [1, 2, 2], [1, 0, 1]),
            aten.avg_pool3d(x, [2, 3, 2], [2, 2, 2], [1, 1, 0], True, False),
            mean,
            aten._adaptive_avg_pool3d_backward(mean, x),
        )

    check(f, CUBES)


@pytest.mark.parametrize("size", [(3, 4), (1, 1), (4, 3), (9, 8), (12, 5), (2, 20)])
def test_adaptive(size: tuple[int, int]) -> None:
    def f(x: torch.Tensor) -> Any:
        mean = aten._adaptive_avg_pool2d(x, size)
        best, where = aten.adaptive_max_pool2d(x, size)
        return (
            mean,
            best,
            where,
            aten._adaptive_avg_pool2d_backward(mean, x),
            aten.adaptive_max_pool2d_backward(best, x, where),
        )

    check(f, X)


def test_windows_without_overlap_need_no_reduction() -> None:
    def f(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return aten.avg_pool2d_backward(g, x, [2, 2], [2, 2], [0, 0], False, True, None)

    low = check(f, X[..., :8, :], torch.randn(2, 3, 4, 4))
    (d,) = [d for d in low.program.defs if isinstance(d, Compute)]
    assert not any(n.op == "reduce" for n in d.body.walk())


def test_nearest() -> None:
    check(
        lambda x: (
            aten.upsample_nearest2d(x, [18, 24]),
            aten._upsample_nearest_exact2d(x, [18, 8], 2.0, 1.0),
            aten.upsample_nearest2d(x, [13, 8]),
            aten._upsample_nearest_exact2d(x, [4, 19]),
            aten.upsample_nearest2d(x, [20, 18], 2.3, 2.3),
            F.interpolate(x, scale_factor=2),
            F.interpolate(x[0], 21, mode="nearest-exact"),
        ),
        X,
    )


def test_nearest_gradient() -> None:
    def f(g: torch.Tensor) -> Any:
        return (
            aten.upsample_nearest2d_backward(g, [18, 24], [2, 3, 9, 8]),
            aten._upsample_nearest_exact2d_backward(g, [18, 24], [2, 3, 9, 8], 2.0, 3.0),
        )

    check(f, X.repeat(1, 1, 2, 3))
    odd = torch.randn(1, 1, 7, 8)
    assert "whole" in declines(
        lambda g: aten.upsample_nearest2d_backward(g, [7, 8], [1, 1, 3, 4]), odd
    )


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_interpolation(mode: str) -> None:
    check(lambda x: F.interpolate(x, (5, 13), mode=mode), X, rtol=1e-5)


def test_grid_sample() -> None:
    grid = torch.rand(2, 4, 5, 2) * 2.4 - 1.2
    check(lambda x, g: F.grid_sample(x, g, align_corners=False), X, grid, rtol=1e-5)


def test_scans() -> None:
    x = torch.randn(4, 7, 5)
    check(
        lambda x: (
            x.cumsum(1),
            x.cumsum(-1, dtype=torch.float64),
            x.cumprod(0),
            x.long().cumsum(1),
            (x > 0).cumsum(2),
            x.cumsum(1) * 2 + x,
            x[0, 0, 0].cumsum(0),
        ),
        x,
    )
    check_half(lambda x: x.cumsum(0), torch.randn(300).bfloat16())


def test_running_extremes() -> None:
    nan = float("nan")
    odd = torch.tensor([1.0, 3.0, 3.0, nan, 2.0, nan, 5.0, 3.0])
    for x in (odd, torch.randint(0, 3, (4, 20)).to(torch.int32), torch.randn(3, 1)):
        check(lambda x: (x.cummax(-1), x.cummin(0)), x)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.5, float("inf")])
def test_distances(p: float) -> None:
    x, y = torch.randn(4, 7, 5), torch.randn(1, 3, 5)
    check(lambda x, y: aten._cdist_forward(x, y, p, None), x, y)


def test_matrices_are_the_librarys() -> None:
    a = torch.randn(3, 3)
    assert "library" in declines(lambda a: a @ a, a)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("kind", ["cumsum", "cumprod", "cummax", "cummin"])
def test_scans_in_parts(kind: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows on GPUs: totals of parts, a scan of those, scans of the parts."""
    monkeypatch.setattr(nn, "part_length", lambda ctx, shape, dim: 6)
    f = getattr(torch, kind)
    low = check(lambda x: f(x, dim), torch.rand(12, 18, 24) + 0.5)
    scans = [d for d in low.program.defs if isinstance(d, Compute) and d.body.op == "scan"]
    assert {d.body.attr[1].extent.value for d in scans} == {6, (2, 3, 4)[dim]}


@pytest.mark.parametrize("device", ["H200", "A100"])
@pytest.mark.parametrize(("rows", "length"), [(64, 1 << 20), (1, 1 << 26)])
def test_which_scans_are_in_blocks(
    rows: int, length: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole; what programs cannot exchange is scanned in parts."""
    monkeypatch.setattr(nn, "accumulated_in", lambda ctx, dtype: dtype)
    monkeypatch.setattr(nn, "part_length", lambda ctx, shape, dim: 4096)
    spec = named_gpu(device)
    assert spec is not None

    def scans(f: Any, *shape: int) -> tuple[int, list[str]]:
        record = Record()
        gm = trace(f, [torch.empty(shape)])
        program = lower(gm, Context(record=record, specs=lambda _: spec))
        computes = [d for d in program.defs if isinstance(d, Compute) and d.body.op == "scan"]
        said = [d for d in record.of("decision") if d["subject"] == "scan"]
        assert all(d["accepted"] == d["reason"].startswith("in blocks") for d in said)
        return len(computes), [d["reason"] for d in said]

    once, narrow = "in blocks: rows are read once", "in parts: programs cannot exchange i64"
    assert scans(lambda x: x.cumsum(1), rows, length) == (1, [once])
    # Of an extreme nobody needs the place, or what finds it reads both.
    assert scans(lambda x: x.cummax(1)[0], rows, length) == (1, [once, narrow])
    assert scans(lambda x: x.cummax(1), rows, length) == (4, [narrow])
    assert scans(lambda x: x.long().cumsum(1), rows, length) == (2, [narrow])
    reason = "in parts: rows do not lie one after another"
    assert scans(lambda x: x.cumsum(0), length, rows + 1) == (2, [reason])


def test_which_scans_are_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        device = torch.device("cuda")

    class Context:
        def fake(self) -> Fake:
            return Fake()

    def length(*shape: int) -> int | None:
        return nn.part_length(Context(), [as_index(n) for n in shape], len(shape) - 1)  # type: ignore

    assert length(64, 1 << 20) == 4096 and length(3, 96 * 1024) == 4096
    assert length(64, 70_000 + 16) is None  # no part divides it
    assert length(64, 4096) is None and length(1 << 16, 1 << 16) is None
