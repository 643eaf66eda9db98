"""Points that may be stored to the same element run in order; those that cannot run in parallel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import deuteron


def diagonals(x: Tensor, values: Tensor) -> Tensor:
    """Element (i, j) of the values is added at i + j: no axis by itself meets anything."""
    n, m = values.shape
    places = torch.arange(n)[:, None] + torch.arange(m)
    return x.index_put((places,), values, accumulate=True)


def pairs(x: Tensor, values: Tensor) -> Tensor:
    places = torch.arange(values.shape[0]) // 2
    return x.index_put((places,), values, accumulate=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (diagonals, ((1400,), (700, 700))),
        (diagonals, ((40,), (7, 31))),
        (pairs, ((20000,), (40000,))),
        (pairs, ((9, 70), (17, 70))),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_computed_places_that_meet(
    f: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, dynamic: bool
) -> None:
    x, values = (torch.randint(-9, 9, s).to(dtype) for s in shapes)  # sums without rounding
    compiled = torch.compile(f, backend="deuteron", fullgraph=True, dynamic=dynamic)
    for _ in range(3):
        assert torch.equal(compiled(x, values), f(x, values))


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_gradient_of_volumes_made_larger(mode: str) -> None:
    x = torch.randn(2, 3, 4, 4, 4, dtype=torch.float64, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return F.interpolate(x, size=(5, 5, 5), mode=mode)

    compiled = torch.compile(f, backend="deuteron", fullgraph=True)
    want = f(x)
    given = torch.randn_like(want)
    (grad,) = torch.autograd.grad(want, x, given)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x, given)[0], grad)


def test_rows_at_loaded_places_are_vectors() -> None:
    def f(table: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
        return table.index_add(0, ids, rows)

    table, rows = torch.randn(50, 64), torch.randn(300, 64)
    ids = torch.randint(0, 50, (300,))
    torch.testing.assert_close(
        torch.compile(f, backend="deuteron", fullgraph=True)(table, ids, rows), f(table, ids, rows)
    )
    text = "".join(k["source"] for k in deuteron.explain(f, table, ids, rows).kernels)
    assert "#pragma omp simd" in text
