"""Kernels that are alike are generated once; those that are not are told apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from deuteron.backend import collecting, deuteron_backend
from deuteron.codegen.share import structure
from deuteron.schedule.kernel import Kernel
from tests.schedule.tools import scheduled

R = torch.randn


def kernel(f: Callable[..., Any], *args: Any) -> Kernel:
    (made,) = scheduled(f, *args, check=False).kernels
    return made


def alike(f: Callable[..., Any], g: Callable[..., Any], *args: Any, other: Any = None) -> bool:
    a, b = kernel(f, *args), kernel(g, *(args if other is None else other))
    return structure(a) == structure(b)


def test_names_do_not_count() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.softmax(x * 2 + y, -1)

    def g(first: Tensor, second: Tensor) -> Tensor:
        z = first * 2
        return torch.softmax(z + second, -1)

    assert alike(f, g, R(8, 6), R(8, 6))


def test_everything_else_counts() -> None:
    x = R(8, 6)
    assert not alike(lambda x: x + 1, lambda x: x + 2, x)
    assert not alike(lambda x: x * 0.0, lambda x: x * -0.0, x)
    assert not alike(lambda x: x.sin(), lambda x: x.cos(), x)
    assert not alike(lambda x: x.sin(), lambda x: x.sin(), x, other=(R(8, 7),))
    assert not alike(lambda x: x.sin(), lambda x: x.sin(), x, other=(R(6, 8).T,))
    assert not alike(lambda x: x.sin(), lambda x: x.sin(), x, other=(x.double(),))
    assert not alike(lambda x: x.sum(0), lambda x: x.sum(1), x, other=(R(8, 8),))
    assert not alike(lambda x: x.amax(1), lambda x: x.amin(1), x)
    assert not alike(lambda x: (x.sum(1), x.amax(1)), lambda x: (x.amax(1), x.sum(1)), x)


def test_what_a_schedule_has_decided_counts() -> None:
    sine = kernel(lambda x: x.sin(), R(8, 6))
    (written, _), key = sine.writes[0], structure(sine)
    assert structure(replace(sine)) == key
    assert structure(replace(sine, overwrites=frozenset({written}))) != key


def test_order_of_operands_counts() -> None:
    x, y = R(8, 6), R(8, 6)
    assert alike(lambda x, y: x / y, lambda x, y: y / x, x, y)  # with other arguments
    assert not alike(lambda x, y: (x + 1) / y, lambda x, y: y / (x + 1), x, y)
    assert not alike(lambda x, y: x.roll(1, 0) - y, lambda x, y: x - y.roll(1, 0), x, y)


def test_indices_count() -> None:
    x = R(8, 8)
    assert not alike(lambda x: x.roll(1, 0) + x, lambda x: x.roll(2, 0) + x, x)
    assert not alike(lambda x: x.T + x, lambda x: x.flip(0) + x, x)
    i = torch.randint(8, (8,))
    assert alike(lambda x, i: x[i] + 1, lambda y, j: y[j] + 1, x, i)
    assert not alike(lambda x, i: x[i] + 1, lambda x, i: x[:, i] + 1, x, i)


def test_blocks_of_a_model_share_their_kernels() -> None:
    """And each launch has its own arguments."""
    net = nn.Sequential(
        *[
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            for _ in range(6)
        ],
    )
    for p in net.parameters():
        nn.init.normal_(p, std=0.3)
    x = R(40, 32)
    with collecting() as records:
        out = torch.compile(net, backend=deuteron_backend)(x)
        out.square().sum().backward()
    got = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    want = net(x)
    want.square().sum().backward()
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    for g, p in zip(got, net.parameters(), strict=True):
        torch.testing.assert_close(g, p.grad, rtol=1e-3, atol=1e-3)
    kernels = [k for r in records for k in r.of("kernel")]
    shared = [k for k in kernels if k["same_code_as"]]
    assert len(shared) >= len(kernels) // 2
    names = {k["name"] for k in kernels}
    assert all(k["same_code_as"] in names for k in shared)
