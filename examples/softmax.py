"""Softmax over rows in Triton: a reduction whose result the whole row needs again.

    python examples/softmax.py

What bounds it is memory, and how often a row is read. The formula reads it three times (maximum,
sum of exponentials, division). A row that fits in a program's registers is read once:
`_softmax_row`. A longer one is read twice: `_softmax_long` finds maximum and sum in one pass, by
an *online* recurrence, and divides in a second one.
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

# Rows to this length stay in registers, 64 values per thread of 16 warps; longer ones are read
# twice.
ROW_LIMIT = 1 << 15


@triton.jit
def _softmax_row(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # One program per row; its tile is the row, rounded up to a power of two. What sticks out is
    # -inf, which neither a maximum nor a sum of exponentials notices.
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    # The maximum is taken off first, so that no exponential overflows.
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row + at, e / tl.sum(e, 0), mask=at < columns)


@triton.jit
def _softmax_long(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * columns
    lanes = tl.arange(0, BLOCK)
    # Each lane has a maximum and a sum of its own, of every BLOCK-th element: the loop has no
    # reduction across lanes in it.
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + lanes
        x = tl.load(x_ptr + row + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        # A lane that has seen nothing but -inf keeps its zero.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        # The recurrence: where the maximum grew, the sum so far shrinks by exp(old - new).
        total = total * tl.exp(top - safe) + tl.exp(x - safe)
        top = higher
    # Once per row the lanes are brought to one maximum, by the same rule, and added.
    most = tl.max(top, 0)
    total_all = tl.sum(total * tl.exp(top - most), 0)
    # The second pass. Of rows that fit in the L2 cache it costs no memory traffic.
    for start in range(0, columns, BLOCK):
        at = start + lanes
        x = tl.load(x_ptr + row + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        tl.store(y_ptr + row + at, tl.exp(x - most) / total_all, mask=at < columns)


def softmax(x: Tensor) -> Tensor:
    """Over the rows of a contiguous x[M, N]; the arithmetic is in float32."""
    rows, columns = x.shape
    y = torch.empty_like(x)
    if columns <= ROW_LIMIT:
        block = triton.next_power_of_2(columns)
        warps = min(16, max(4, block // 1024))  # 32 values per thread, within 4 to 16 warps
        _softmax_row[(rows,)](x, y, columns, BLOCK=block, num_warps=warps)
    else:
        _softmax_long[(rows,)](x, y, columns, BLOCK=8192, num_warps=16)
    return y


def plain(x: Tensor) -> Tensor:
    """The formula. Deuteron derives the online form of it by itself, where rows are long."""
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def main() -> int:
    from deuteron.tools.side_by_side import side_by_side

    status = 0
    on_gpu = torch.cuda.is_available()
    for rows, columns in ((16384, 8192), (512, 1 << 18)) if on_gpu else ((5, 1003), (2, 40_000)):
        x = torch.randn(rows, columns, device="cuda" if on_gpu else "cpu")
        status |= side_by_side(plain, softmax, (x,), 2.0 * x.nbytes, "B")
    return status


if __name__ == "__main__":
    sys.exit(main())
