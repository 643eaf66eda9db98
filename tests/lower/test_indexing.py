"""Gathers and scatters against eager, over dtypes, negative positions and broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deuteron.ir.program import Compute
from tests.lower.harness import check, check_half, declines

aten = torch.ops.aten
torch.manual_seed(0)
X = torch.randn(5, 6, 4)
I = torch.tensor([0, -1, 3, 2])
J = torch.tensor([[1], [5]])
ROWS = torch.tensor([0, 4, 4, 1, 0, 2, 4])
G = torch.randint(0, 5, (3, 6, 2))
SOURCE = torch.randn(3, 6, 2)

GATHERS: dict[str, Callable[..., Any]] = {
    "first": lambda x, i, j: x[i],
    "middle": lambda x, i, j: x[:, i],
    "last": lambda x, i, j: x[..., i],
    "broadcast": lambda x, i, j: x[i, j],
    "apart": lambda x, i, j: x[i, :, i],
    "together": lambda x, i, j: x[:, j, i],
    "with a slice": lambda x, i, j: x[1:, i, ::2],
    "of a computed index": lambda x, i, j: x[(i + 1) * 1 - 1],
    "of a padded tensor": lambda x, i, j: F.pad(x, (1, 1))[..., i],
    "of a transposed tensor": lambda x, i, j: x.transpose(0, 2)[i, j],
    "narrow index": lambda x, i, j: x[i.to(torch.int32)],
    "no elements": lambda x, i, j: x[i[:0]],
}


@pytest.mark.parametrize("name", GATHERS)
def test_gather(name: str) -> None:
    check(GATHERS[name], X, I, J)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16])
def test_gather_dtypes(dtype: torch.dtype) -> None:
    check(lambda x, i: (x[i], x[:, i], x.gather(0, i.abs().view(4, 1, 1))), X.to(dtype), I)


def test_along_a_dimension() -> None:
    check(lambda x, g: (x.gather(0, g), x.gather(-2, g), x.gather(0, g[:0])), X, G)
    check(lambda x, r: (x.index_select(0, r), x.index_select(1, r[:0]), torch.take(x, r)), X, ROWS)


def test_scalars() -> None:
    x, i = torch.tensor(3.0), torch.tensor(0)
    check(
        lambda x, i: (
            x.gather(0, i),
            x.scatter(0, i, 1.0),
            x.scatter_add(0, i, x),
            x.index_select(0, i),
        ),
        x,
        i,
    )


def test_embedding() -> None:
    w, i = torch.randn(7, 3), torch.tensor([[0, 6], [3, 2]])
    check(lambda w, i: F.embedding(i, w), w, i)
    check(lambda w, i: F.embedding(i, w, padding_idx=2), w.half(), i.to(torch.int32))


def test_gather_without_negative_positions_is_one_load() -> None:
    """`embedding` and `gather` do not count from the end, so nothing is compared."""
    low = check(lambda w, i: F.embedding(i, w), torch.randn(7, 3), torch.tensor([0, 6]))
    (d,) = [d for d in low.program.defs if isinstance(d, Compute)]
    assert d.body.op == "load" and not any(n.op == "where" for n in d.body.walk())


PUTS: dict[str, Callable[..., Any]] = {
    "one": lambda x, i, j: x.index_put((i,), torch.ones(4)),
    "pairs": lambda x, i, j: x.index_put((i, j), x[i, j] * 2, accumulate=True),
    "middle": lambda x, i, j: aten.index_put(x, [None, j], torch.tensor(2.0)),
    "duplicates": lambda x, i, j: x.index_put((i * 0,), torch.ones(4, 6, 4), accumulate=True),
    "nothing": lambda x, i, j: x.index_put((i[:0],), torch.ones(4)),
    "put": lambda x, i, j: x.put(i, torch.arange(4.0)),
    "put add": lambda x, i, j: x.put(i * 0, torch.arange(4.0), accumulate=True),
}


@pytest.mark.parametrize("name", PUTS)
def test_index_put(name: str) -> None:
    check(PUTS[name], X, I, J)


def test_masks() -> None:
    def f(x: torch.Tensor, m: torch.Tensor) -> Any:
        y, z = x.clone(), x.clone()
        y[m] = 3.0
        z[m[:, 0, 0]] = 1.0
        added = aten.index_put(x, [m], torch.tensor([2.0]), True)
        return y, z, x.masked_fill(m, 1.0), added

    check(f, X, X > 0)


def test_index_functions() -> None:
    check(
        lambda x, r: (
            x.index_add(0, r, torch.ones(7, 6, 4), alpha=2),
            x.index_copy(0, r[:1], torch.ones(1, 6, 4)),
            x.index_fill(1, r, 7.0),
        ),
        X,
        ROWS,
    )


def test_scatter() -> None:
    check(
        lambda x, g, s: (
            x.scatter(0, g, 2.0),
            x.scatter(0, g[:1], s[:1]),
            x.scatter_add(0, g, s),
            x.scatter_add(-2, g, s),
            x.scatter(0, g, s, reduce="multiply"),
            x.scatter(0, g, 3.0, reduce="add"),
            x.scatter(0, g[:0], 3.0),
        ),
        X,
        G,
        SOURCE,
    )


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("kind", ["sum", "prod", "mean", "amax", "amin"])
def test_scatter_reduce(kind: str, include_self: bool) -> None:
    def f(x: torch.Tensor, g: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x.scatter_reduce(0, g, s, kind, include_self=include_self)

    def by_rows(x: torch.Tensor, r: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x.index_reduce(0, r, s, kind, include_self=include_self)

    check(f, X, G, SOURCE)
    check(f, (X * 10).long(), G, (SOURCE * 10).long())
    if kind != "sum":
        check(by_rows, X, ROWS, torch.randn(7, 6, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.uint8])
def test_sums_of_narrow_types(dtype: torch.dtype) -> None:
    x, s = (X * 3).to(dtype), (SOURCE * 3).to(dtype)
    same = check_half if dtype.is_floating_point else check
    same(lambda x, g, s: x.scatter_add(0, g, s), x, G, s)
    same(lambda x, r: x.index_put((r,), torch.ones_like(x[r]), accumulate=True), x, ROWS)


def test_sums_of_bools() -> None:
    check(lambda x, r: x.index_put((r,), x[r + 1 - 1], accumulate=True), X > 0, ROWS)


def test_search() -> None:
    b = torch.tensor([-1.0, 0.0, 0.0, 0.5, 2.0])
    v = torch.tensor([[float("nan"), 0.0, 2.0], [-7.0, 9.0, 0.3], [float("inf"), -1.0, 0.5]])
    check(
        lambda v, b: (
            torch.bucketize(v, b),
            torch.bucketize(v, b, right=True, out_int32=True),
            torch.searchsorted(b, v, side="right"),
            torch.bucketize(v, b[:0]),
        ),
        v,
        b,
    )
    check(lambda b, v: torch.searchsorted(b, v), torch.randn(3, 9).sort().values, v)


def test_nll_and_its_gradient() -> None:
    def f(x: torch.Tensor, t: torch.Tensor) -> Any:
        loss, weight = aten.nll_loss_forward(x, t, None, 1, -100)
        return loss, aten.nll_loss_backward(loss, x, t, None, 1, -100, weight)

    check(f, torch.randn(5, 9), torch.tensor([1, 8, -100, 0, 3]))


def test_embedding_gradient() -> None:
    i = torch.tensor([[0, 6, 6], [3, 2, 6]])
    grad = torch.randn(2, 3, 4)
    check(lambda g, i: aten.embedding_dense_backward(g, i, 7, 2, False), grad, i)


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda x: torch.sort(x).values, "order"),
        (lambda x: torch.topk(x, 2).values, "order"),
        (lambda x: aten.index_put(x, [x > 0], x.view(-1)[:3]), "which value"),
    ],
)
def test_reasons(f: Callable[..., Any], reason: str) -> None:
    assert reason in declines(f, X)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x[torch.arange(3).flip(0) * 2],
        lambda x: x.index_select(0, torch.arange(3) * 2),
        lambda x: x.gather(0, (torch.arange(3) * 2)[:, None].expand(3, 4)),
        lambda x: torch.nn.functional.embedding(torch.arange(3) * 2, x),
        lambda x: x.index_add(0, torch.arange(3) * 2, torch.ones(3, 4)),
        lambda x: x[torch.arange(5) - 5],
    ],
    ids=["index", "index_select", "gather", "embedding", "index_add", "negative"],
)
def test_computed_positions_are_checked_where_they_may_be_outside(f: Any) -> None:
    """Positions made of sizes and constants, of tensors whose sizes change: eager raises too."""
    from deuteron.backend import deuteron_backend

    for dynamic in (True, False):
        torch._dynamo.reset()
        g = torch.compile(f, backend=deuteron_backend, dynamic=dynamic)
        torch.testing.assert_close(g(torch.ones(8, 4)), f(torch.ones(8, 4)))
        with pytest.raises(IndexError):
            g(torch.ones(3, 4))
