"""Programs with products that become one kernel on a GPU with tensor cores, as users write them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

B, H, S, D = 2, 3, 70, 32


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]))


def ahead(s: Tensor) -> Tensor:
    rows, columns = (torch.arange(n) for n in s.shape[-2:])
    return rows[:, None] < columns[None, :]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores(q, k), -1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return torch.softmax(s.masked_fill(ahead(s), float("-inf")), -1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    i = torch.arange(s.shape[-1])
    behind = i[:, None] - i[None, :] >= 16
    return torch.softmax(s.masked_fill(ahead(s) | behind, float("-inf")), -1) @ v


def soft_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = 20.0 * torch.tanh(scores(q, k) / 20.0)
    return torch.softmax(s.masked_fill(ahead(s), float("-inf")), -1) @ v


def bias(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return torch.softmax(scores(q, k) + b, -1) @ v


def in_f32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    wide = s.to(torch.promote_types(s.dtype, torch.float32))
    return torch.softmax(wide, -1).to(q.dtype) @ v


def shared_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return causal(q, k, v)


def transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return plain(q, k, v).transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


def standardized(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k).to(torch.promote_types(q.dtype, torch.float32))
    s = (s - s.mean(-1, keepdim=True)) * torch.rsqrt(s.var(-1, keepdim=True) + 1e-3)
    return torch.softmax(s, -1).to(q.dtype) @ v


def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(scores(q, k)) @ v


def sinks(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """A column is joined and dropped again."""
    s = scores(q, k)
    s = s.masked_fill(ahead(s), float("-inf"))
    column = sink[:, None, None].expand(s.shape[0], -1, s.shape[2], 1)
    return torch.softmax(torch.cat([s, column], -1), -1)[..., :-1] @ v


DOCUMENTS = torch.tensor([7] * 20 + [3] * 9 + [4] * 41)
LENGTHS = torch.tensor([2**40, 29])  # more than there are, too
STARTS = torch.tensor([-3] * 20 + [20] * 9 + [29] * 41, dtype=torch.int32)

MASK = torch.arange(S) % 7 < torch.tensor([[7], [3]])


def documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    apart = DOCUMENTS[:, None] != DOCUMENTS[None, :]
    return torch.softmax(s.masked_fill(apart | ahead(s), float("-inf")), -1) @ v


def lengths(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    inside = torch.arange(s.shape[-1]) < LENGTHS[:, None, None, None]
    return torch.softmax(torch.where(inside, s, float("-inf")), -1) @ v


def starts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first key of each query is loaded."""
    s = scores(q, k)
    before = torch.arange(s.shape[-1], dtype=torch.int32) < STARTS[:, None]
    return torch.softmax(s.masked_fill(before | ahead(s), float("-inf")), -1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask of keys; its rows begin at odd bytes."""
    return torch.softmax(scores(q, k).masked_fill(~MASK[:, None, None], float("-inf")), -1) @ v


def nobody_sees(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows that see no key are 0."""
    s = scores(q, k)
    s = s.masked_fill(ahead(s) | (torch.arange(s.shape[-2]) < 5)[:, None], float("-inf"))
    return torch.where((s == float("-inf")).all(-1, True), 0, torch.softmax(s, -1)) @ v


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(torch.softmax(scores(q, k), -1), 0.5, True) @ v


def dropped_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return F.dropout(torch.softmax(s.masked_fill(ahead(s), float("-inf")), -1), 0.1, True) @ v


def linear_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def added(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.linear(x, w, b) * 0.5 + r


def rms_linear(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * g).to(x.dtype) @ w


def gated(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return F.silu(x @ w) * (x @ u)


def mlp(x: Tensor, g: Tensor, w: Tensor, b: Tensor, u: Tensor, c: Tensor) -> Tensor:
    y = F.layer_norm(x, x.shape[-1:], g)
    return F.linear(F.gelu(F.linear(y, w, b)), u, c)


HEADS = [(B, H, S, D)] * 3
SHAPES: dict[Callable[..., Tensor], list[tuple[int, ...]]] = {
    plain: HEADS,
    causal: HEADS,
    window: HEADS,
    soft_cap: HEADS,
    bias: [*HEADS, (H, S, S)],
    sinks: [*HEADS, (H,)],
    in_f32: HEADS,
    shared_heads: HEADS,
    transposed: [(B, S, H, D)] * 3,
    sigmoid: HEADS,
    documents: HEADS,
    lengths: HEADS,
    starts: HEADS,
    padded: HEADS,
    nobody_sees: HEADS,
    standardized: HEADS,
    mlp: [(S, 40), (40,), (160, 40), (160,), (40, 160), (40,)],
    linear_gelu: [(S, 96), (130, 96), (130,)],
    added: [(S, 96), (130, 96), (130,), (S, 130)],
    rms_linear: [(S, 96), (96,), (96, 130)],
    gated: [(S, 96), (96, 130), (96, 130)],
}
# Whose numbers are not eager's; rows of the second begin at multiples of 4 elements.
RANDOM: dict[str, Callable[..., Tensor]] = {f.__name__: f for f in (dropped, dropped_causal)}
SHAPES |= {dropped: HEADS, dropped_causal: [(B, H, S + 2, D)] * 3}
PROGRAMS = {f.__name__: f for f in SHAPES if f.__name__ not in RANDOM}
CHAINS = [n for n, f in PROGRAMS.items() if SHAPES[f][0] in ((B, H, S, D), (B, S, H, D))]


def inputs(name: str, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(name))
    shapes = SHAPES[(PROGRAMS | RANDOM)[name]]
    return [torch.randn(*s, generator=generator).to(dtype) for s in shapes]


__all__ = ["CHAINS", "PROGRAMS", "RANDOM", "inputs"]
