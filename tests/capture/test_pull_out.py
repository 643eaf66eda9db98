"""Sums of rows of what is multiplied with a product: by what is already computed, or left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from deuteron.base.record import Record
from deuteron.graph.pull_out import pull_out

B, S, D = 3, 20, 8
Program = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def gradient(w: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """What a softmax's gradient needs: w are weights, g the gradient of w v."""
    return torch.bmm(w, v), (torch.bmm(g, v.mT) * w).sum(-1, keepdim=True)


def of_heads(w: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and their gradients have another shape than the products'."""
    weights = w.view(1, B, S, -1)
    out = torch.bmm(weights.expand(1, B, S, -1).reshape(B, S, -1), v)
    scores = torch.bmm(g, v.permute(0, 2, 1)).view(1, B, S, -1)
    return out, (scores * weights).sum([-1], keepdim=True)


def dropped(w: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """A mask and its scale are on both sides."""
    mask = (w > 0).to(w.dtype)
    out = torch.bmm(w * mask * 1.25, v)
    return out, (torch.bmm(g, v.mT) * mask * 1.25 * w).sum(-1)


def in_halves(w: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Weights are rounded before they are multiplied."""
    low, values = w.to(torch.bfloat16), v.to(torch.bfloat16)
    out, scores = torch.bmm(low, values), torch.bmm(g.to(torch.bfloat16), values.mT)
    return out.to(w.dtype), (scores.to(w.dtype) * w).sum(-1)


def other_weights(w: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return torch.bmm(w.sin(), v), (torch.bmm(g, v.mT) * w).sum(-1)


def other_values(w: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return torch.bmm(w, v.sin()), (torch.bmm(g, v.mT) * w).sum(-1)


def other_rows(w: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return torch.bmm(w, v), (torch.bmm(g, v.mT) * w).sum(1)


def one_more_factor(w: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return torch.bmm(w, v), (torch.bmm(g, v.mT) * w * w).sum(-1)


def broadcast(w: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """One row for all is no factor of each element."""
    return torch.bmm(w, v), (torch.bmm(g, v.mT) * w[:, :1]).sum(-1)


def too_late(w: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    rows = (torch.bmm(g, v.mT) * w).sum(-1)
    return torch.bmm(w, v), rows


def traced(f: Program, width: int = D, mode: str = "fake") -> tuple[torch.fx.GraphModule, int]:
    args = inputs(width)
    gm = make_fx(f, tracing_mode=mode)(*args)
    count = pull_out(gm, Record())
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm, count


def inputs(width: int = D) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(B, S, S), torch.randn(B, S, width), torch.randn(B, S, width)


@pytest.mark.parametrize("f", [gradient, of_heads, dropped, in_halves])
def test_the_sum_is_the_results(f: Program) -> None:
    gm, count = traced(f)
    assert count == 1
    assert str(gm.graph).count("aten.bmm") == 1, "scores are no longer needed"
    tolerance = 5e-2 if f is in_halves else 1e-5
    for got, wanted in zip(gm(*inputs()), f(*inputs()), strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "f", [other_weights, other_values, other_rows, one_more_factor, broadcast, too_late]
)
def test_others_stay(f: Program) -> None:
    gm, count = traced(f)
    assert count == 0
    for got, wanted in zip(gm(*inputs()), f(*inputs()), strict=True):
        assert torch.equal(got, wanted)


def test_wide_results_stay() -> None:
    assert traced(gradient, width=2 * S)[1] == 0


def test_sums_of_few_rows_stay() -> None:
    """Scores of one query are in memory."""
    torch.manual_seed(0)
    w, v, g = torch.randn(B, 1, S), torch.randn(B, S, D), torch.randn(B, 1, D)
    assert pull_out(make_fx(gradient, tracing_mode="fake")(w, v, g), Record()) == 0


def test_sizes_that_change_get_no_guard() -> None:
    gm, count = traced(gradient, mode="symbolic")
    assert count == 0
    env = next(n for n in gm.graph.nodes).meta["val"].fake_mode.shape_env
    sizes = {str(g.expr) for g in env.guards}
    before = make_fx(gradient, tracing_mode="symbolic")(*inputs())
    own = next(n for n in before.graph.nodes).meta["val"].fake_mode.shape_env
    assert len(sizes) == len({str(g.expr) for g in own.guards})


@pytest.mark.parametrize(
    "dtype, device, count",
    [
        (torch.float32, "cuda", 0),
        (torch.bfloat16, "cuda", 1),
        (torch.float32, "cpu", 1),
    ],
)
def test_sums_of_scores_in_memory_stay(dtype: torch.dtype, device: str, count: int) -> None:
    """Exact products of f32 on a GPU are not computed again: their rows are summed where they are,
    as eager does, which is closer."""
    with FakeTensorMode():
        w = torch.empty(B, S, S, dtype=dtype, device=device)
        v, g = (torch.empty(B, S, D, dtype=dtype, device=device) for _ in range(2))
        gm = make_fx(gradient, tracing_mode="real")(w, v, g)
    assert pull_out(gm, Record()) == count
