"""What capture does differently for CUDA tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deuteron.graph.random_ops import RAND, RANDINT64
from tests.capture.helpers import Traced, same

pytestmark = pytest.mark.gpu


def grad(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", requires_grad=True)


def test_numbers_do_not_depend_on_the_device():
    seed = torch.tensor(-5)
    for dtype in (torch.float32, torch.float64):
        a, b = RAND(seed, 2, [5000], dtype), RAND(seed.cuda(), 2, [5000], dtype)
        assert torch.equal(a, b.cpu())
    assert torch.equal(
        RANDINT64(seed, 2, -3, 9, [500]), RANDINT64(seed.cuda(), 2, -3, 9, [500]).cpu()
    )


def test_dropout():
    traced = Traced()
    x = grad(4000)
    y = traced.compile(lambda x: F.dropout(x, 0.3) * 1.5)(x)
    y.sum().backward()
    assert torch.equal(y == 0, x.grad == 0)
    assert not any("native_dropout" in t for t in traced.targets())


def test_user_triton_kernel():
    triton = pytest.importorskip("triton")
    import triton.language as tl

    @triton.jit
    def add_one(x, y, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)

    def f(x):
        x = x.sin()
        y = torch.empty_like(x)
        add_one[(triton.cdiv(x.numel(), 128),)](x, y, x.numel(), BLOCK=128)
        return y.cos()

    traced = same(f, torch.randn(1000, device="cuda"))
    assert any("triton_kernel_wrapper" in t for t in traced.targets())


def test_convolution_bias_gradient_is_a_reduction():
    net = nn.Conv2d(3, 8, 3).cuda()
    traced = same(lambda x: net(x).relu(), grad(2, 3, 16, 16), tolerance=1e-3)
    assert any("sum" in t for t in traced.targets("backward"))


def test_attention_stays_a_library_call():
    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    args = [grad(2, 4, 64, 64).detach().half().requires_grad_() for _ in range(3)]
    traced = same(f, *args, tolerance=1e-3)
    assert any("scaled_dot_product" in t for t in traced.targets("forward"))
    assert any("scaled_dot_product" in t for t in traced.targets("backward"))


def test_normalization_layers():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU()
    ).cuda()
    same(lambda x: net(x), grad(2, 3, 16, 16), tolerance=1e-3)
