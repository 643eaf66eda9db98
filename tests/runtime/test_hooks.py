"""Hooks on saved tensors, which may give a backward other strides, and memory that is theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.runtime.support import HOOKS_SEEN


def contiguous(t: Tensor) -> Tensor:
    """As `torch.autograd.graph.save_on_cpu` does."""
    return torch.empty(t.size(), dtype=t.dtype).copy_(t)


def transposed(t: Tensor) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() else t.clone()


def channels_last(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = F.conv2d(x, w).to(memory_format=torch.channels_last)
    return F.max_pool2d(y, 3) * 2, y.sort(-1)[0], y.tanh().exp()


def rows(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = F.layer_norm(x.flatten(1) @ x.flatten(1).mT + w.sum(), x.shape[:1])
    return F.gelu(h), h.softmax(-1).log()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("pack", [contiguous, transposed])
@pytest.mark.parametrize("f", [channels_last, rows])
def test_other_strides(f: Callable[..., Any], pack: Callable[..., Any], dynamic: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(3, 16, 10, 10), torch.randn(32, 16, 3, 3)
    ins = [t.requires_grad_() for t in (x, w)]
    g = torch.compile(f, backend="deuteron", fullgraph=True, dynamic=dynamic)

    def gradients(f: Callable[..., Any]) -> tuple[Tensor, ...]:
        out = f(*ins)
        return torch.autograd.grad([(o * o).sum() for o in out], ins)

    want = gradients(f)
    for hooked in (False, True, False, True):
        if not hooked:
            got = gradients(g)
        else:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                got = gradients(g)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert HOOKS_SEEN


def test_what_hooks_give_is_theirs() -> None:
    """Saved tensors may be overwritten by the last backward; what hooks give may not."""
    x = torch.randn(1 << 21, requires_grad=True)
    kept: list[tuple[Tensor, Tensor]] = []

    def unpack(t: Tensor) -> Tensor:
        kept.append((t, t.clone()))
        return t

    g = torch.compile(lambda x: x.sin().exp().tanh(), backend="deuteron", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
        g(x).sum().backward()
    assert kept
    for t, before in kept:
        assert torch.equal(t, before)
