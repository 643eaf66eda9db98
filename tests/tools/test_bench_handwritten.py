"""The hand-written Triton kernels against eager, in Triton's interpreter (a process of their own:
the interpreter is chosen when Triton is imported)."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.interpreting import interpret

PROGRAM = """
import torch, torch.nn.functional as F
from dev.bench import handwritten_triton as hand

def same(got, want, tolerance=2e-5):
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)

torch.manual_seed(0)
x = torch.randn(5, 1003)
same(hand.gelu(x * 4), F.gelu(x * 4, approximate="tanh"))
same(hand.gelu(torch.tensor([-1e4, -90.0, 0.0, 90.0])), torch.tensor([0.0, 0.0, 0.0, 90.0]))
same(hand.softmax(x), x.softmax(-1))
hand.ROW_LIMIT = 512  # the online form
long = torch.randn(2, 20_001) * 9
long[0, :9000] = float("-inf")
same(hand.softmax(long), long.softmax(-1))
hand.ROW_LIMIT = 1 << 15
w, b = torch.randn(1003), torch.randn(1003)
same(hand.layer_norm(x + 7, w, b), F.layer_norm(x + 7, (1003,), w, b), 2e-4)
a, w, b = torch.randn(70, 45), torch.randn(45, 50), torch.randn(50)
same(hand.linear_relu(a, w, b, (32, 32, 16)), F.relu(a @ w + b), 1e-4)
q, k, v = (torch.randn(1, 2, 75, 16) for _ in range(3))
want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
same(hand.attention(q, k, v, (32, 16)), want, 1e-4)
print("right")
"""


def test_kernels_written_by_hand() -> None:
    assert interpret("-c", PROGRAM).endswith("right\n")
