"""Causal attention (the forward of FlashAttention) in Triton: two products around a softmax.

    python examples/attention.py

As the formula says it, the scores q @ k^T are a T x T matrix per head that is written and read
several times: memory bounds it. Here no score leaves the chip. A program holds BM rows of q and
walks along the keys, BN at a time: a tile of scores, its exponentials, and their product with a
tile of v, which is added to BM rows of the result. The softmax is *online* as in softmax.py:
where the maximum of a row grows, sum and result so far shrink by exp(old - new). What bounds it
is then arithmetic: the products on tensor cores, and the exponentials beside them.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, k_ptr, v_ptr, total, top, sums, i, begin, end, t, scale,
    D: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The keys from `begin` to `end`, BN at a time. total[BM, D], top[BM] and sums[BM] are the
    result, the maximum and the sum of exponentials of the rows so far."""
    d = tl.arange(0, D)
    for start in range(begin, end, BN):
        j = start + tl.arange(0, BN)
        inside = j < t
        # k is loaded transposed, so that the product needs no transposition.
        k = tl.load(k_ptr + j[None, :] * D + d[:, None], mask=inside[None, :], other=0.0)
        scores = tl.dot(q, k) * scale
        if MASKED:
            scores = tl.where((j[None, :] <= i[:, None]) & inside[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # exp(x) is 2^(x log2(e)): the hardware has 2^x, and log2(e) is part of the scale.
        p = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        sums = sums * shrink + tl.sum(p, 1)
        v = tl.load(v_ptr + j[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(p.to(v.dtype), v, total * shrink[:, None])
        top = higher
    return total, top, sums


@triton.jit
def _attention(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, o_ptr, t, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    # The last rows attend to most keys: they start first, so that no long program is left over at
    # the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) * t * D
    i, d = block * BM + tl.arange(0, BM), tl.arange(0, D)
    at = head + i[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=(i < t)[:, None], other=0.0)
    total = tl.zeros((BM, D), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    sums = tl.zeros((BM,), tl.float32)
    # Tiles left of the diagonal need no mask; those right of it are not computed at all.
    total, top, sums = _attend(
        q, k_ptr + head, v_ptr + head, total, top, sums, i, 0, block * BM, t, scale, D, BN, False
    )
    # Tiles on the diagonal.
    last = tl.minimum(block * BM + BM, t)
    total, top, sums = _attend(
        q, k_ptr + head, v_ptr + head, total, top, sums, i, block * BM, last, t, scale, D, BN, True
    )
    tl.store(o_ptr + at, total / sums[:, None], mask=(i < t)[:, None])


def attention(q: Tensor, k: Tensor, v: Tensor, tile: tuple[int, int] = (128, 64)) -> Tensor:
    """Of contiguous q, k, v[B, H, T, D]; D a power of two. `tile`: BM, a multiple of BN."""
    b, h, t, d = q.shape
    out = torch.empty_like(q)
    bm, bn = tile
    assert bm % bn == 0, f"tiles of {bn} keys do not divide {bm} rows"
    scale = d**-0.5 * LOG2_E
    grid = (triton.cdiv(t, bm), b * h)
    _attention[grid](q, k, v, out, t, scale, D=d, BM=bm, BN=bn, num_warps=8, num_stages=3)
    return out


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula. Deuteron computes mask and softmax in one kernel between two library products;
    the scores go through memory."""
    t, d = q.shape[-2:]
    keep = torch.ones(t, t, dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(-2, -1)) * d**-0.5
    return scores.masked_fill(~keep, float("-inf")).softmax(-1) @ v


def small(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, (32, 16))


def main() -> int:
    from deuteron.tools.side_by_side import side_by_side

    on_gpu = torch.cuda.is_available()
    b, h, t, d = (4, 16, 4096, 128) if on_gpu else (1, 2, 75, 16)
    made = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {}
    q, k, v = (torch.randn(b, h, t, d, **made) for _ in range(3))
    # Half of the scores are needed, each for two products of 2 D FLOPs.
    flops = 2.0 * b * h * t * t * d
    return side_by_side(plain, attention if on_gpu else small, (q, k, v), flops, "FLOP")


if __name__ == "__main__":
    sys.exit(main())
