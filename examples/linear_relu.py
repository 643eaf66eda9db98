"""relu(x @ w + b) in Triton: a matrix product on tensor cores, with its epilogue on chip.

    python examples/linear_relu.py

What bounds it is arithmetic: M x N x K multiplications for M x K + K x N + M x N numbers of
traffic, if every number that is loaded is used many times. So a program computes a *tile* of the
result, BM x BN numbers that stay in registers, and walks along K: it loads a BM x BK tile of x
and a BK x BN tile of w, and each number of them is used BN or BM times. Bias and ReLU are applied
to the tile before it is stored; as operations of their own they would read and write the result
twice more.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import triton
import triton.language as tl


@triton.jit
def _linear_relu(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, b_ptr, y_ptr, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Which tile. Programs that run at the same time have numbers in a row. Row by row they would
    # need all of w for one row of tiles; in groups of GROUP rows of tiles they share tiles of both
    # x and w in the L2 cache.
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
    # The walk along K. `num_stages` loads run ahead of the products, through shared memory.
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        left = kk < k - start
        x = tl.load(x_at, mask=(i < m)[:, None] & left[None, :], other=0.0)
        w = tl.load(w_at, mask=left[:, None] & (j < n)[None, :], other=0.0)
        total = tl.dot(x, w, total)
        x_at += BK
        w_at += BK * n
    # The epilogue, in float32 and on chip.
    b = tl.load(b_ptr + j, mask=j < n, other=0.0).to(tl.float32)
    y = tl.maximum(total + b[None, :], 0.0)
    y_at = y_ptr + i[:, None].to(tl.int64) * n + j[None, :]
    tl.store(y_at, y, mask=(i < m)[:, None] & (j < n)[None, :])


def linear_relu(
    x: Tensor, w: Tensor, b: Tensor, tile: tuple[int, int, int] = (128, 256, 64)
) -> Tensor:
    """Of contiguous x[M, K], w[K, N], b[N]. `tile`: BM, BN, BK; the default suits an H100 or H200
    in bfloat16."""
    (m, k), n = x.shape, w.shape[1]
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    bm, bn, bk = tile
    grid = (triton.cdiv(m, bm) * triton.cdiv(n, bn),)
    _linear_relu[grid](
        x, w, b, y, m, n, k, BM=bm, BN=bn, BK=bk, GROUP=8, num_warps=8, num_stages=3
    )  # fmt: skip
    return y


def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Deuteron gives this to cuBLAS, bias and ReLU included: it generates no products on tensor
    cores."""
    return F.relu(x @ w + b)


def small(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return linear_relu(x, w, b, (32, 32, 16))


def main() -> int:
    from deuteron.tools.side_by_side import side_by_side

    on_gpu = torch.cuda.is_available()
    m, n, k = (8192, 4096, 4096) if on_gpu else (70, 50, 45)
    made = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {}
    x, w, b = torch.randn(m, k, **made), torch.randn(k, n, **made) * k**-0.5, torch.randn(n, **made)
    kernel = linear_relu if on_gpu else small
    return side_by_side(plain, kernel, (x, w, b), 2.0 * m * n * k, "FLOP")


if __name__ == "__main__":
    sys.exit(main())
