"""Kernels written by hand in Triton for the suite `seeds`: what a specialist would write.

GELU (tanh form), softmax over rows, layer norm, x @ w + b with ReLU, and causal FlashAttention
(forward). Each function takes contiguous tensors on one device and returns a new tensor of the
dtype of its first argument; arithmetic is in float32. Imports Triton: where it is absent, importing
this module fails.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows to this length stay in registers; longer ones are read twice, with online statistics.
ROW_LIMIT = 1 << 15


@triton.jit
def _gelu(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    # 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)), with u = sqrt(2 / pi) (x + 0.044715 x^3)
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    tl.store(y_ptr + at, x / (1.0 + tl.exp(-2.0 * u)), mask=at < n)


@triton.jit
def _softmax_row(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row + at, e / tl.sum(e, 0), mask=at < columns)


@triton.jit
def _softmax_long(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * columns
    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + lanes
        x = tl.load(x_ptr + row + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        # A lane that has seen nothing but -inf keeps its zero.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - safe) + tl.exp(x - safe)
        top = higher
    most = tl.max(top, 0)
    total_all = tl.sum(total * tl.exp(top - most), 0)
    for start in range(0, columns, BLOCK):
        at = start + lanes
        x = tl.load(x_ptr + row + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        tl.store(y_ptr + row + at, tl.exp(x - most) / total_all, mask=at < columns)


@triton.jit
def _layer_norm(x_ptr, w_ptr, b_ptr, y_ptr, columns, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / columns
    d = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(d * d, 0) / columns + eps)
    w = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row + at, d * rstd * w + b, mask=inside)


@triton.jit
def _linear_relu(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, b_ptr, y_ptr, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Programs in groups of GROUP rows of tiles, so that those at work share tiles of w in L2.
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    program = tl.program_id(0)
    first = program // (GROUP * tiles_n) * GROUP
    rows = min(tiles_m - first, GROUP)
    inner = program % (GROUP * tiles_n)
    i = (first + inner % rows) * BM + tl.arange(0, BM)
    j = (inner // rows) * BN + tl.arange(0, BN)
    kk = tl.arange(0, BK)
    x_at = x_ptr + i[:, None].to(tl.int64) * k + kk[None, :]
    w_at = w_ptr + kk[:, None] * n + j[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        left = kk < k - start
        x = tl.load(x_at, mask=(i < m)[:, None] & left[None, :], other=0.0)
        w = tl.load(w_at, mask=left[:, None] & (j < n)[None, :], other=0.0)
        total = tl.dot(x, w, total)
        x_at += BK
        w_at += BK * n
    b = tl.load(b_ptr + j, mask=j < n, other=0.0).to(tl.float32)
    y = tl.maximum(total + b[None, :], 0.0)
    y_at = y_ptr + i[:, None].to(tl.int64) * n + j[None, :]
    tl.store(y_at, y, mask=(i < m)[:, None] & (j < n)[None, :])


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, k_ptr, v_ptr, total, top, sums, i, begin, end, t, scale,
    D: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys from `begin` to `end`, by blocks: running maximum, sum of exponentials, and output."""
    d = tl.arange(0, D)
    for start in range(begin, end, BN):
        j = start + tl.arange(0, BN)
        inside = j < t
        k = tl.load(k_ptr + j[None, :] * D + d[:, None], mask=inside[None, :], other=0.0)
        scores = tl.dot(q, k) * scale
        if MASKED:
            scores = tl.where((j[None, :] <= i[:, None]) & inside[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
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
    # The last rows attend to most keys: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) * t * D
    i, d = block * BM + tl.arange(0, BM), tl.arange(0, D)
    at = head + i[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=(i < t)[:, None], other=0.0)
    total = tl.zeros((BM, D), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    sums = tl.zeros((BM,), tl.float32)
    # Blocks left of the diagonal need no mask.
    total, top, sums = _attend(
        q, k_ptr + head, v_ptr + head, total, top, sums, i, 0, block * BM, t, scale, D, BN, False
    )
    last = tl.minimum(block * BM + BM, t)
    total, top, sums = _attend(
        q, k_ptr + head, v_ptr + head, total, top, sums, i, block * BM, last, t, scale, D, BN, True
    )
    tl.store(o_ptr + at, total / sums[:, None], mask=(i < t)[:, None])


def _warps(block: int) -> int:
    """32 values per thread, within 4 to 16 warps."""
    return min(16, max(4, block // 1024))


def gelu(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _gelu[(triton.cdiv(x.numel(), 2048),)](x, y, x.numel(), BLOCK=2048, num_warps=8)
    return y


def softmax(x: Tensor) -> Tensor:
    """Over the rows of x[M, N]."""
    rows, columns = x.shape
    y = torch.empty_like(x)
    if columns <= ROW_LIMIT:
        block = triton.next_power_of_2(columns)
        _softmax_row[(rows,)](x, y, columns, BLOCK=block, num_warps=_warps(block))
    else:
        _softmax_long[(rows,)](x, y, columns, BLOCK=8192, num_warps=16)
    return y


def layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float = 1e-5) -> Tensor:
    """Over the rows of x[M, N], N at most `ROW_LIMIT`; w[N], b[N]."""
    rows, columns = x.shape
    assert columns <= ROW_LIMIT, columns
    y = torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    _layer_norm[(rows,)](x, w, b, y, columns, eps, BLOCK=block, num_warps=_warps(block))
    return y


def linear_relu(
    x: Tensor, w: Tensor, b: Tensor, tile: tuple[int, int, int] = (128, 256, 64)
) -> Tensor:
    """relu(x[M, K] @ w[K, N] + b[N])."""
    (m, k), n = x.shape, w.shape[1]
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    bm, bn, bk = tile
    grid = (triton.cdiv(m, bm) * triton.cdiv(n, bn),)
    _linear_relu[grid](
        x, w, b, y, m, n, k, BM=bm, BN=bn, BK=bk, GROUP=8, num_warps=8, num_stages=3
    )  # fmt: skip
    return y


def attention(q: Tensor, k: Tensor, v: Tensor, tile: tuple[int, int] = (128, 64)) -> Tensor:
    """Causal attention of q, k, v[B, H, T, D]; D a power of two."""
    b, h, t, d = q.shape
    out = torch.empty_like(q)
    bm, bn = tile
    assert bm % bn == 0, tile
    scale = d**-0.5 * 1.4426950408889634  # exponentials are of base 2
    grid = (triton.cdiv(t, bm), b * h)
    _attention[grid](q, k, v, out, t, scale, D=d, BM=bm, BN=bn, num_warps=8, num_stages=3)
    return out
