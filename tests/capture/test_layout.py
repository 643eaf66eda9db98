"""Channels-last memory (`graph/layout.py`): which graphs are left as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from deuteron.base.record import Record
from deuteron.graph.layout import channels_last


def network(kernel: int, stride: int) -> Callable[..., Tensor]:
    """A strided convolution in front of one that makes channels-last worth while."""

    def f(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = F.conv2d(x, first, stride=stride, padding=kernel // 2)
        return F.conv2d(y.relu(), second, padding=1)

    return f


def traced(channels: int, kernel: int, stride: int, backward: bool = False) -> fx.GraphModule:
    f = network(kernel, stride)
    given = [
        torch.randn(2, channels, 16, 16),
        torch.randn(32, channels, kernel, kernel),
        torch.randn(32, 32, 3, 3),
    ]
    if not backward:
        return make_fx(f, tracing_mode="fake")(*given)

    def step(*args: Tensor) -> tuple[Tensor, ...]:
        leaves = [a.detach().requires_grad_() for a in args]
        return torch.autograd.grad(f(*leaves).sum(), leaves)

    return make_fx(step, tracing_mode="fake")(*given)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("channels", [4, 8])
def test_where_the_library_would_write_out_of_bounds(channels: int, backward: bool) -> None:
    """The CPU's weight gradient of strided 1x1 convolutions of few channels destroys memory in
    channels-last order (torch 2.13: eager does, too), so the whole graph keeps its order."""
    gm = traced(channels, kernel=1, stride=2, backward=backward)
    before = [str(n) for n in gm.graph.nodes]
    assert channels_last(gm, Record()) == 0
    assert [str(n) for n in gm.graph.nodes] == before


@pytest.mark.parametrize(
    ("channels", "kernel", "stride"), [(4, 3, 2), (4, 1, 1), (16, 1, 2), (32, 1, 2)]
)
def test_others_are_converted(channels: int, kernel: int, stride: int) -> None:
    assert channels_last(traced(channels, kernel, stride), Record()) > 0
    assert channels_last(traced(channels, kernel, stride, backward=True), Record()) > 0


def test_training_of_such_a_network() -> None:
    """Values and strides of the gradients, through the compiler."""
    f = network(1, 2)
    shapes = ((2, 4, 16, 16), (32, 4, 1, 1), (32, 32, 3, 3))
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]
    want = torch.autograd.grad(f(*given).square().mean(), given)
    got = torch.autograd.grad(
        torch.compile(f, backend="deuteron", fullgraph=True)(*given).square().mean(), given
    )
    for a, b in zip(got, want, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
