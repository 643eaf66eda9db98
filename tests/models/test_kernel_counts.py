"""How many kernels the whole compiler makes of common programs, forward and backward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deuteron
from deuteron.tools.demo_worker import count_inductor


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def x(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


PRODUCTS = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"}
Case = tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], int, int | None]
# program, arguments, most kernels forward, most backward
CASES: dict[str, Case] = {
    "sin((x+1)*2)": (lambda a: ((a + 1) * 2).sin(), lambda: (x(64, 128),), 1, 1),
    "written-out GELU": (gelu, lambda: (x(64, 128),), 1, 1),
    "softmax": (lambda a: a.softmax(-1), lambda: (x(64, 128),), 1, 1),
    "layer norm": (
        lambda a, w, b: F.layer_norm(a, (128,), w, b),
        lambda: (x(64, 128), x(128), x(128)),
        1,
        2,
    ),
    "RMS norm": (rms_norm, lambda: (x(64, 128), x(128)), 1, 2),
    "cross-entropy": (F.cross_entropy, lambda: (x(64, 128), torch.randint(0, 128, (64,))), 1, 1),
    "SwiGLU": (lambda a, b: F.silu(a) * b, lambda: (x(64, 128), x(64, 128)), 1, 1),
    "add, dropout, layer norm": (
        lambda a, r, w, b: F.layer_norm(a + F.dropout(r, 0.1), (128,), w, b),
        lambda: (x(64, 128), x(64, 128), x(128), x(128)),
        1,
        None,
    ),
    "GroupNorm, SiLU": (
        lambda a, w, b: F.silu(F.group_norm(a, 4, w, b)),
        lambda: (x(4, 16, 8, 8), x(16), x(16)),
        2,
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_counts(name: str) -> None:
    f, make, forward, backward = CASES[name]
    report = deuteron.explain(f, *make(), backward=True)
    kernels = [len(g.of("kernel")) for g in report.graphs]
    assert kernels[0] <= forward
    assert backward is None or kernels[1] <= backward
    # The seed of the dropout is drawn by a call; nothing else is.
    assert {c["op"] for c in report.library_calls} <= {"deuteron.seed.default"}


class Block(nn.Module):
    """A block of a small GPT, on tokens."""

    def __init__(self, width: int = 64, heads: int = 4, classes: int = 100) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(classes, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        h = self.embed(tokens)
        b, t, c = h.shape
        q, k, v = self.qkv(self.norm1(h)).split(c, -1)
        q, k, v = (m.view(b, t, self.heads, -1).transpose(1, 2) for m in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(a.transpose(1, 2).reshape(b, t, c))
        h = h + self.down(F.gelu(self.up(self.norm2(h)), approximate="tanh"))
        return F.cross_entropy(self.head(h).flatten(0, 1), target.flatten())


def test_gpt_block_against_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPT block's train step against Inductor in the same process.

    No more kernels beside the products, which are the library's there and kernels here where those
    are faster, and no more launches in all.
    """
    if " " in sys.prefix:
        pytest.skip("Inductor's own builds fail in a path with spaces")
    from torch._inductor.graph import GraphLowering

    block = Block()
    args = torch.randint(0, 100, (4, 32)), torch.randint(0, 100, (4, 32))
    sources: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(sources.append))
    torch._dynamo.reset()
    torch.compile(block, backend="inductor")(*args).backward()
    theirs = count_inductor(sources)
    ours = deuteron.explain(block, *args, backward=True)
    assert theirs["kernels"] > 5
    products = [k for k in ours.kernels if any(op in PRODUCTS for op in k["ops"])]
    assert len(ours.kernels) - len(products) <= theirs["kernels"]
    assert len(ours.kernels) + len(ours.library_calls) <= theirs["kernels"] + theirs["library"]
