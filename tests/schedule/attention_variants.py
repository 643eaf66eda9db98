"""Attention as users write it: a table of variants in plain code, each of a size that one likes.

In: a variant's name, a length, a dtype. Out: the function and its inputs. The steps beside a name
are what an H200 has of 16 heads of 2,048 queries (`tests/schedule/test_attention_variants.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

INF = float("-inf")
Results: TypeAlias = "Tensor | tuple[Tensor, ...]"
VARIANTS: dict[str, Variant] = {}


@dataclass(frozen=True)
class Variant:
    """`shapes`: of the inputs, letters are sizes: s the length of queries, t of keys. `ints`:
    inputs of whole numbers below a size, after these. `steps`: at most so many kernels and calls of
    the library forward and backward, of which one is for sums of rows; `square`: whether what is of
    all queries times keys, for each batch and head, is in memory; `why`: a reason in the Record
    where that is so, or there are more."""

    f: Callable[..., Results]
    shapes: tuple[str, ...]
    ints: tuple[tuple[str, str], ...] = ()
    steps: tuple[int, int] = (1, 3)
    square: bool = False
    why: str = ""
    keys: Callable[[int], int] = lambda s: s
    random: bool = False

    def sizes(self, s: int, heads: int, width: int) -> dict[str, int]:
        t = self.keys(s)
        return {"b": 2, "h": heads, "g": max(1, heads // 2), "s": s, "t": t, "d": width} | {
            "e": width * 2 // 3,
            "m": heads * width,
            "one": 1,
            "n": 33,
        }

    def inputs(
        self, s: int, dtype: torch.dtype, heads: int = 2, width: int = 16, empty: bool = False
    ) -> list[Tensor]:
        sizes = self.sizes(s, heads, width)
        generator = torch.Generator().manual_seed(len(self.shapes) + s)

        def shape(text: str) -> list[int]:
            return [sizes[x] for x in text.split()]

        if empty:
            floats = [torch.zeros(shape(x), dtype=dtype) for x in self.shapes]
        else:
            floats = [torch.randn(shape(x), generator=generator).to(dtype) for x in self.shapes]
        ints = [
            torch.randint(0, sizes[most], shape(x), generator=generator) for x, most in self.ints
        ]
        return [*floats, *ints]


HEADS = ("b h s d", "b h t d", "b h t d")


def variant(*more: str, **row: Any) -> Callable[[Callable[..., Results]], Callable[..., Results]]:
    """A row of the table: `more` shapes behind those of queries, keys and values."""

    def note(f: Callable[..., Results]) -> Callable[..., Results]:
        shapes = row.pop("shapes", HEADS)
        VARIANTS[f.__name__] = Variant(f, (*shapes, *more), **row)
        return f

    return note


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def places(s: Tensor) -> tuple[Tensor, Tensor]:
    """Of queries and keys; the last query is at the last key."""
    n, m = s.shape[-2:]
    keys = torch.arange(m, device=s.device)
    return keys[m - n :, None], keys[None, :]


def causal(s: Tensor) -> Tensor:
    i, j = places(s)
    return s.masked_fill(i < j, INF)


# -- scales and biases -----------------------------------------------------------------------------


@variant()
def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores(q, k), -1) @ v


@variant()
def scaled_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((q * q.shape[-1] ** -0.5) @ k.mT, -1) @ v


@variant("h")
def bounded_scale(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * torch.sigmoid(scale)[:, None, None] * 0.4, -1) @ v


@variant("h")
def learned_scale(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * torch.exp(scale)[:, None, None] * 0.2, -1) @ v


@variant()
def scaled_by_layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k) / 3.0
    return torch.softmax(causal(s).float() * 3.0, -1).type_as(v) @ v


@variant("h s t", steps=(1, 4))
def bias(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return torch.softmax(scores(q, k) + b, -1) @ v


@variant("b one one t", steps=(1, 8), square=True)
def bias_of_keys(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return torch.softmax(scores(q, k) + b, -1) @ v


@variant("n h", steps=(1, 6))
def t5(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    s = q @ k.mT
    i, j = places(s)
    bucket = (j - i).clamp(-16, 16) + 16
    return torch.softmax(s + table[bucket].permute(2, 0, 1), -1) @ v


@variant("n h", steps=(2, 8))
def t5_buckets(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Far keys share buckets, by the logarithm of their distance."""
    s = q @ k.mT
    i, j = places(s)
    distance = (j - i).abs()
    far = 8 + (torch.log(distance.float() / 8) / math.log(16) * 8).to(torch.long)
    bucket = (j > i).to(torch.long) * 16 + torch.where(distance < 8, distance, far.clamp(max=15))
    return torch.softmax(s + F.embedding(bucket, table).permute(2, 0, 1), -1) @ v


@variant(
    "n h", ints=(("s t", "n"),), steps=(4, 11), square=True, why="reads at places that are loaded"
)
def swin(q: Tensor, k: Tensor, v: Tensor, table: Tensor, index: Tensor) -> Tensor:
    n, m = index.shape
    b = table[index.view(-1)].view(n, m, -1).permute(2, 0, 1).contiguous()
    return torch.softmax(scores(q, k) + b.unsqueeze(0), -1) @ v


@variant()
def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    i, j = places(s)
    slopes = torch.exp2(-torch.arange(1, q.shape[1] + 1, device=q.device).float())
    return torch.softmax(causal(s + slopes[:, None, None] * (j - i)), -1).to(v.dtype) @ v


@variant("h", steps=(1, 8))
def learned_slopes(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    s = scores(q, k)
    i, j = places(s)
    return torch.softmax(causal(s - slopes[:, None, None] * (i - j).abs() * 0.1), -1) @ v


# -- masks -----------------------------------------------------------------------------------------


@variant()
def causal_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(causal(scores(q, k)), -1) @ v


@variant(steps=(1, 4))
def triangle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    mask = torch.tril(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device))
    return torch.softmax(torch.where(mask, s, torch.finfo(s.dtype).min), -1) @ v


@variant()
def added_triangle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    least = torch.finfo(s.dtype).min
    mask = torch.full(s.shape[-2:], least, dtype=s.dtype, device=s.device).triu(1)
    return torch.softmax(s + mask, -1) @ v


@variant()
def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    i, j = places(s)
    return torch.softmax(s.masked_fill((i < j) | (i - j >= 9), INF), -1) @ v


@variant()
def symmetric_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    i, j = places(s)
    return torch.softmax(s.masked_fill((i - j).abs() > 5, INF), -1) @ v


@variant()
def prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    i, j = places(s)
    return torch.softmax(torch.where((j <= i) | (j < 11), s, INF), -1) @ v


@variant()
def blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    i, j = places(s)
    return torch.softmax(s.masked_fill(i // 8 != j // 8, INF), -1) @ v


@variant()
def block_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    i, j = places(s)
    return torch.softmax(s.masked_fill(i // 8 < j // 8, INF), -1) @ v


@variant()
def dilated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    i, j = places(s)
    return torch.softmax(s.masked_fill((i < j) | ((i - j) % 3 != 0), INF), -1) @ v


@variant(ints=(("s", "n"),))
def documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    s = scores(q, k)
    i, j = places(s)
    apart = (ids[:, None] // 9 != ids[None, :] // 9) | (i < j)
    return torch.softmax(s.masked_fill(apart, INF), -1) @ v


@variant(ints=(("b s", "n"),), steps=(3, 3))
def ended_documents(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Tensor:
    """Packed in rows, each of which ends with a token."""
    s, doc = scores(q, k), (tokens < 2).cumsum(-1)
    i, j = places(s)
    seen = (doc[:, None, :, None] == doc[:, None, None, :]) & (i >= j)
    return torch.softmax(torch.where(seen, s, INF), -1) @ v


@variant(ints=(("b s", "n"),))
def padded_segments(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
    """What is padding attends to nothing."""
    segment = numbers // 11 - 1
    rows, columns = segment[:, None, :, None], segment[:, None, None, :]
    return torch.softmax(scores(q, k).masked_fill((rows != columns) | (rows < 0), INF), -1) @ v


@variant(ints=(("s", "n"),))
def ranked(q: Tensor, k: Tensor, v: Tensor, ranks: Tensor) -> Tensor:
    hidden = ~(ranks[:, None] >= ranks[None, :])
    return torch.softmax(scores(q, k).masked_fill(hidden, INF), -1) @ v


@variant(ints=(("n n", "n"),), steps=(2, 3))
def table_of_blocks(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
    s = scores(q, k)
    i, j = places(s)
    allowed = (numbers > 20)[i // 64, j // 64] | (i // 4 == j // 4)
    return torch.softmax(s.masked_fill(~allowed, INF), -1) @ v


@variant(ints=(("b", "t"),))
def lengths(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    s = scores(q, k)
    outside = torch.arange(s.shape[-1], device=s.device) > length[:, None, None, None]
    return torch.softmax(s.masked_fill(outside, INF), -1) @ v


@variant(ints=(("b t", "n"),), steps=(2, 3))
def padded(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Tensor:
    """As BERT's: 1 minus the mask, times the least number, is added."""
    mask = (tokens > 4).to(q.dtype)[:, None, None, :]
    s = scores(q, k) + (1.0 - mask) * torch.finfo(q.dtype).min
    return torch.softmax(s, -1) @ v


@variant(ints=(("s t", "n"),), steps=(2, 3))
def mask_of_data(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
    s = scores(q, k)
    return torch.softmax(s.masked_fill(numbers < 9, -1e4), -1) @ v


@variant(square=True, steps=(1, 2))
def hidden_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    i, _ = places(s)
    weights = torch.softmax(s.masked_fill(i < 3, INF), -1)
    return weights.nan_to_num(0.0) @ v


@variant()
def least_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of the first keys, more than a block, nothing is seen but by a dtype's least number; of the
    last queries nothing at all."""
    s = scores(q, k).float()
    i, j = places(s)
    unseen = (j < s.shape[-1] - 9) | (i > s.shape[-2] - 5)
    return torch.softmax(torch.where(unseen, torch.finfo(s.dtype).min, s), -1).to(v.dtype) @ v


@variant(shapes=("one one d s", "one s one d", "one one s d"), steps=(1, 3))
def largest_weights(q: Tensor, k: Tensor, v: Tensor) -> Results:
    """A maximum of weights, whose gradient looks for the weight that it is."""
    s = (q.mT.unsqueeze(-2) * k.transpose(1, 2).unsqueeze(-3)).sum(-1) * 0.25
    p = torch.log_softmax(causal(s.float()), -1).exp()
    return p.to(v.dtype) @ v, p.amax(-1)


@variant(shapes=("one s m", "m m", "one h t d", "one h t d"), steps=(2, 4))
def projected_queries(x: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = F.linear(x, w).unflatten(-1, k.shape[1::2]).transpose(1, 2)
    e = torch.exp(causal(scores(q, k)) - 2)
    return e / (1 + e.sum(-1, keepdim=True)) @ v


# -- what is done to scores, and in place of a softmax ---------------------------------------------


@variant()
def soft_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(causal(20.0 * torch.tanh(scores(q, k) / 20.0)), -1) @ v


@variant()
def in_f32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(causal(scores(q, k)), -1, dtype=torch.float32).to(q.dtype) @ v


@variant()
def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = torch.exp(s - s.detach().amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True) @ v


@variant()
def normed_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = torch.exp(s - s.detach().amax(-1, keepdim=True))
    return e @ v / e.sum(-1, keepdim=True)


@variant()
def off_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    top = s.detach().amax(-1, keepdim=True).clamp(min=0)
    e = torch.exp(s - top)
    return e / (e.sum(-1, keepdim=True) + torch.exp(-top)) @ v


@variant()
def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(scores(q, k) - math.log(q.shape[-2])) @ v


@variant()
def squared_relu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    i, j = places(s)
    return F.relu(s).square().masked_fill(i < j, 0.0) / k.shape[-2] @ v


@variant()
def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, without a softmax."""
    s = scores(q, k)
    i, j = places(s)
    return torch.where(i >= j, s, 0.0) @ v


@variant()
def decaying(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Retention."""
    s = scores(q, k)
    i, j = places(s)
    gamma = 1 - torch.exp2(-5.0 - torch.arange(q.shape[1], device=q.device))
    d = torch.where(i >= j, gamma[:, None, None] ** (i - j).clamp(min=0), 0.0)
    return (s * d).to(v.dtype) @ v


@variant(steps=(2, 2))
def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slots compete for each key."""
    return torch.softmax(scores(q, k), -2) @ v


@variant(steps=(2, 4), square=True, why="computed at two places")
def over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores(q, k), 1) @ v


@variant("h")
def sinks(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    s = causal(scores(q, k))
    column = sink[None, :, None, None].expand(s.shape[0], -1, s.shape[2], 1)
    return torch.softmax(torch.cat([s, column], -1), -1)[..., :-1] @ v


@variant("h", shapes=("b h s d", "b g t d", "b g t d"), steps=(1, 5))
def shared_sinks(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """In a window, with heads of keys that several heads of queries share."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = causal(scores(q, k))
    i, j = places(s)
    s = s.masked_fill(i - j >= 9, INF)
    s = torch.cat([s, sink[None, :, None, None].expand(s.shape[0], -1, s.shape[2], 1)], -1)
    return torch.softmax(s, -1)[..., :-1] @ v


@variant("h")
def shifted_sinks(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """Below the maximum, which has a gradient: none."""
    s = causal(scores(q, k))
    s = torch.cat([s, sink[None, :, None, None].expand(s.shape[0], -1, s.shape[2], 1)], -1)
    s = s - s.max(-1, keepdim=True).values
    return torch.softmax(s, -1, dtype=s.dtype)[..., :-1] @ v


@variant(square=True)
def maximum_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sums in bfloat16 are rounded: the gradient of the maximum makes up for that, and stays."""
    s = scores(q, k)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True) @ v


@variant("b h s d", "b h t d", "h", steps=(3, 3))
def differential(q: Tensor, k: Tensor, v: Tensor, p: Tensor, r: Tensor, share: Tensor) -> Tensor:
    first, second = (torch.softmax(causal(scores(*x)), -1) for x in ((q, k), (p, r)))
    return (first - share[:, None, None] * second) @ v


@variant(random=True, steps=(2, 3))
def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(torch.softmax(causal(scores(q, k)), -1), 0.1, True) @ v


# -- behind ----------------------------------------------------------------------------------------


@variant("b h s d")
def gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return torch.softmax(causal(scores(q, k)), -1) @ v * torch.sigmoid(g)


@variant("m m", steps=(2, 5))
def projected(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    o = torch.softmax(causal(scores(q, k)), -1) @ v
    return o.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1) @ w


@variant()
def with_logarithm(q: Tensor, k: Tensor, v: Tensor) -> Results:
    s = causal(scores(q, k))
    return torch.softmax(s, -1) @ v, torch.logsumexp(s.float(), -1)


@variant("b h s d")
def residual(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    return x + torch.softmax(scores(q, k), -1) @ v


# -- heads, widths, lengths, layouts ---------------------------------------------------------------

SHARED = ("b h s d", "b g t d", "b g t d")


@variant(shapes=SHARED, steps=(1, 5))
def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return torch.softmax(causal(scores(q, k)), -1) @ v


@variant(shapes=SHARED, steps=(1, 5))
def expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, g, n, _ = k.shape
    r = q.shape[1] // g
    k, v = (x[:, :, None].expand(-1, -1, r, -1, -1).reshape(b, g * r, n, -1) for x in (k, v))
    return torch.softmax(causal(scores(q, k)), -1) @ v


@variant(shapes=SHARED)
def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries in groups of heads, without a repetition of keys."""
    b, h, n, d = q.shape
    q = q.view(b, k.shape[1], -1, n, d)
    s = causal(torch.einsum("bgrsd,bgtd->bgrst", q, k) * d**-0.5)
    return torch.einsum("bgrst,bgtd->bgrsd", torch.softmax(s, -1), v).reshape(b, h, n, -1)


@variant(shapes=("b h s d", "b h t d", "b h t e"))
def other_widths(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(causal(scores(q, k)), -1) @ v


@variant(keys=lambda s: 2 * s + 3)
def more_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(causal(scores(q, k)), -1) @ v


@variant(keys=lambda s: s // 2 + 1)
def fewer_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores(q, k), -1) @ v


@variant(ints=(("one", "t"),), keys=lambda s: s + 40)
def cached(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Tensor:
    """Keys up to a position that is loaded."""
    s = scores(q, k)
    i, j = (torch.arange(n, device=s.device) for n in s.shape[-2:])
    return torch.softmax(s.masked_fill(i[:, None] + start < j, INF), -1) @ v


@variant(shapes=("b s h d", "b t h d", "b t h d"))
def transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = torch.softmax(causal(scores(q, k)), -1) @ v
    return o.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


@variant(shapes=("b s m", "b s m", "b s m"), steps=(4, 5))
def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads are parts of rows."""
    q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in (q, k, v))
    return (torch.softmax(scores(q, k), -1) @ v).transpose(1, 2).flatten(2)


@variant(shapes=("b s d", "b t d", "b t d"), steps=(2, 4))
def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(torch.softmax(torch.bmm(q, k.mT) * 0.3, -1), v)


@variant()
def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("bhsd,bhtd->bhst", q, k) * 0.3
    return torch.einsum("bhst,bhtd->bshd", torch.softmax(s, -1), v)


@variant("s d", "s d", steps=(2, 6))
def rotated(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    def turn(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    return torch.softmax(causal(scores(turn(q), turn(k))), -1) @ v


@variant("d", "d", steps=(2, 6))
def normed(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    q, k = F.rms_norm(q, q.shape[-1:], a), F.rms_norm(k, k.shape[-1:], b)
    return torch.softmax(causal(scores(q, k)), -1) @ v


# -- scaled_dot_product_attention ------------------------------------------------------------------


@variant()
def sdpa_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = (torch.arange(x.shape[-2], device=x.device) for x in (q, k))
    mask = (i[:, None] >= j) & (i[:, None] - j < 9)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@variant()
def sdpa_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = (torch.arange(x.shape[-2], device=x.device) for x in (q, k))
    b = -(i[:, None] - j).abs().to(q.dtype) * 0.1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=b)


@variant("h s t", steps=(5, 9), square=True)
def sdpa_given(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=b[None])


@variant(shapes=SHARED, steps=(1, 5))
def sdpa_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = (torch.arange(x.shape[-2], device=x.device) for x in (q, k))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=i[:, None] >= j, enable_gqa=True)


__all__ = ["VARIANTS", "Variant"]
