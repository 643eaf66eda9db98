"""Copies of transposed factors that only products read (`graph/copies.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from deuteron.base.record import Record
from deuteron.graph.copies import keep_order
from deuteron.graph.verify import verify_graph

R = torch.randn


def turned_halves(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As models write it: heads are a part of the last dimension, and keys are turned about."""
    b, s, w = q.shape
    q, k, v = (x.view(b, s, 4, w // 4).transpose(1, 2) for x in (q, k, v))
    k = k * 0.8 + turned_halves(k) * 0.6
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def keys_read_again(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    turned = k.transpose(1, 2).transpose(-1, -2).contiguous()
    return q @ turned, turned * 2


def of_one_position(q: Tensor, k: Tensor) -> Tensor:
    return q @ k[:, :1].transpose(1, 2).transpose(-1, -2).contiguous()


def in_order(q: Tensor, k: Tensor) -> Tensor:
    return q.transpose(-1, -2) @ k.transpose(1, 2).contiguous()


def graph(f: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    return make_fx(f, tracing_mode="fake")(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_transposed_keys_lies_as_the_keys_do(dtype: torch.dtype) -> None:
    args = [R(2, 48, 64).to(dtype) for _ in range(3)]
    gm = graph(attention, *args)
    assert keep_order(gm, Record()) == 1
    verify_graph(gm, "order of copies")
    scores = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.bmm.default)
    assert tuple(scores.args[1].meta["val"].stride())[1:] == (1, 16)
    gm.recompile()
    torch.testing.assert_close(gm(*args), attention(*args))
    assert keep_order(gm, Record()) == 0


@pytest.mark.parametrize("f", [keys_read_again, of_one_position, in_order])
def test_others_stay(f: Callable[..., Any]) -> None:
    k = R(2, 24, 3, 16)
    q = R(2, 3, 16, 16) if f is not in_order else R(2, 3, 24, 16)
    assert keep_order(graph(f, q, k), Record()) == 0


@pytest.mark.parametrize("shape", [(2, 48, 64), (1, 17, 36), (0, 8, 32), (3, 1, 32)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_values_and_gradients(shape: tuple[int, ...], dynamic: bool) -> None:
    args = [R(*shape, requires_grad=True) for _ in range(3)]
    exact = [a.detach().double().requires_grad_() for a in args]
    compiled = torch.compile(attention, backend="deuteron", dynamic=dynamic)
    out, wanted = compiled(*args), attention(*exact)
    given = R(*shape[:1], 4, shape[1], shape[2] // 4)
    grads = torch.autograd.grad(out, args, given)
    close = torch.testing.assert_close
    close(out.double(), wanted, rtol=1e-4, atol=1e-4)
    for got, right in zip(grads, torch.autograd.grad(wanted, exact, given.double()), strict=True):
        close(got.double(), right, rtol=1e-4, atol=1e-4)
