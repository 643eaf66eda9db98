"""GELU (tanh form) in Triton: the smallest kernel there is, one read and one write per element.

    python examples/gelu_triton.py

What bounds it is memory. An element costs some 20 instructions and 8 bytes of traffic in float32;
a GPU has time for far more arithmetic than that while the bytes arrive. So nothing but wide,
coalesced loads and stores matters, and whoever computes GELU as five operations reads and writes
five times.
"""

from __future__ import annotations

import math
import os
import sys

import torch
from torch import Tensor

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import triton
import triton.language as tl

BLOCK = 2048  # elements per program: 8 per thread with 8 warps, two loads of 16 bytes in float32


@triton.jit
def _gelu(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # A program owns BLOCK elements in a row. Its number is made 64 bits wide before it is
    # multiplied: tensors of more than 2^31 elements exist.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # The last program sticks out; the mask keeps it inside.
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    # 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)), with u = sqrt(2 / pi) (x + 0.044715 x^3): one
    # exponential and one division instead of a tanh. For large negative x the exponential is
    # infinite and the quotient -0, which is right.
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    tl.store(y_ptr + at, x / (1.0 + tl.exp(-2.0 * u)), mask=at < n)


def gelu(x: Tensor) -> Tensor:
    """Of a contiguous tensor; the arithmetic is in float32."""
    y = torch.empty_like(x)
    _gelu[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK, num_warps=8)
    return y


def plain(x: Tensor) -> Tensor:
    """The same as one writes it in PyTorch; Deuteron makes one kernel of it."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + torch.tanh(inner))


def main() -> int:
    from deuteron.tools.side_by_side import side_by_side

    if torch.cuda.is_available():
        x = torch.randn(16384, 16384, device="cuda")
    else:
        x = torch.randn(5, 1003)
    return side_by_side(plain, gelu, (x,), 2.0 * x.nbytes, "B")


if __name__ == "__main__":
    sys.exit(main())
