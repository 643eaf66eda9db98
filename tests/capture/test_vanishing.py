"""Gradients of what is subtracted from a row are 0 before what does not depend on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from deuteron.base.record import Record
from deuteron.capture import decompositions
from deuteron.graph.vanishing import drop_vanishing

Program = Callable[[Tensor], Tensor]


def maximum(x: Tensor) -> Tensor:
    return torch.softmax(x - x.max(-1, keepdim=True).values, -1)


def without_dims(x: Tensor) -> Tensor:
    return torch.softmax(x - x.max(-1).values.unsqueeze(-1), -1)


def by_hand(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def mean(x: Tensor) -> Tensor:
    return torch.softmax((x - x.mean(-1, keepdim=True)) * 3, -1)


def of_columns(x: Tensor) -> Tensor:
    return torch.softmax(x - x.amax(1, keepdim=True), 1)


def half(x: Tensor) -> Tensor:
    """Not what it is divided by."""
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / (e.sum(-1, keepdim=True) + 1)


def other_rows(x: Tensor) -> Tensor:
    return torch.softmax(x - x.amax(1, keepdim=True), -1)


def squared(x: Tensor) -> Tensor:
    return (x - x.amax(-1, keepdim=True)) ** 2


def turned(x: Tensor) -> Tensor:
    """As long in both directions: a row's sum is not a column's."""
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True).mT


def traced(
    f: Program, dtype: torch.dtype = torch.float64
) -> tuple[Callable[[Tensor, Tensor], Tensor], int, Tensor, Tensor]:
    def gradient(x: Tensor, g: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(f(leaf), leaf, g)[0]

    torch.manual_seed(0)
    x, g = (torch.randn(2, 9, 9, dtype=dtype) for _ in range(2))
    table = decompositions.table(False)
    gm = make_fx(gradient, decomposition_table=table, tracing_mode="fake")(x, g)
    wanted = gm(x, g)
    count = drop_vanishing(gm, Record())
    gm.graph.lint()
    gm.recompile()
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(gm(x, g), wanted, rtol=tolerance, atol=tolerance)
    return gm, count, x, g


@pytest.mark.parametrize("f", [maximum, without_dims, by_hand, mean, of_columns])
def test_what_vanishes_goes(f: Program) -> None:
    gm, count, x, _ = traced(f)
    assert count == 1
    # Rows without numbers have none.
    x[0, 3, 4], x[1, 2] = float("nan"), float("-inf")
    leaf = x.clone().requires_grad_()
    f(leaf).sum().backward()
    assert torch.equal(gm(x, torch.ones_like(x)).isnan(), leaf.grad.isnan())


@pytest.mark.parametrize("f", [half, other_rows, squared, turned])
def test_others_stay(f: Program) -> None:
    assert traced(f)[1] == 0


def test_sums_that_are_rounded_to_a_half_type_stay() -> None:
    """What is added makes up for their rounding; a softmax's are of f32."""
    assert traced(by_hand, torch.bfloat16)[1] == 0
    assert traced(maximum, torch.bfloat16)[1] == 1
