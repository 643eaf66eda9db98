"""Layer norm over rows in Triton: two reductions, of which the second needs the first.

    python examples/layer_norm.py

What bounds it is memory: a row is read once and written once, if it stays in registers between
the mean, the variance and the result. The variance is the mean of squared *differences*, not the
mean of squares less the squared mean: with the row at hand the second reduction costs nothing,
and no digits cancel.
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

ROW_LIMIT = 1 << 15  # elements of a row that stay in a program's registers


@triton.jit
def _layer_norm(x_ptr, w_ptr, b_ptr, y_ptr, columns, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # One program per row; its tile is the row, rounded up to a power of two.
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / columns
    # What sticks out of the row must be zero after the subtraction, too: it is squared and added.
    d = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(d * d, 0) / columns + eps)
    # All programs read the same w and b: after the first ones they come from the L2 cache.
    w = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row + at, d * rstd * w + b, mask=inside)


def layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float = 1e-5) -> Tensor:
    """Over the rows of a contiguous x[M, N], N at most `ROW_LIMIT`; w[N], b[N]."""
    rows, columns = x.shape
    assert columns <= ROW_LIMIT, f"a row of {columns} elements does not stay in registers"
    y = torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    warps = min(16, max(4, block // 1024))  # 32 values per thread, within 4 to 16 warps
    _layer_norm[(rows,)](x, w, b, y, columns, eps, BLOCK=block, num_warps=warps)
    return y


def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


def main() -> int:
    from deuteron.tools.side_by_side import side_by_side

    if torch.cuda.is_available():
        x = torch.randn(32768, 8192, device="cuda", dtype=torch.bfloat16)
    else:
        x = torch.randn(5, 1003) + 7
    w, b = 1 + 0.1 * torch.randn_like(x[0]), torch.randn_like(x[0])
    return side_by_side(plain, layer_norm, (x, w, b), 2.0 * x.nbytes, "B")


if __name__ == "__main__":
    sys.exit(main())
