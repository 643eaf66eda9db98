"""Programs that wait for one another, interpreted at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.interpreting import interpret

FAILS = """
import torch, triton, triton.language as tl
from deuteron.codegen.triton import libm
from dev.check.concurrent import together

@triton.jit
def k(flags, out, bad, N: tl.constexpr):
    pid = tl.program_id(0)
    if pid == bad:
        tl.arange(0, 3)  # no power of two
    tag = pid * 0 + 1
    libm.publish(flags, 0, 1, N, (pid * 1.0).to(tl.float32), tag, 0)
    numbers = libm.collect(flags, 0, 1, N, tag, 0, 32)
    numbers = libm.collected(numbers, 0.0 * pid.to(tl.float32), 0.0, N)
    tl.store(out + pid, libm.combine_sum(numbers))

out = torch.zeros(4)
together(k, 4, torch.zeros(16, dtype=torch.int64), out, 9, N=4)
assert out.tolist() == [6.0] * 4, out
try:
    together(k, 4, torch.zeros(16, dtype=torch.int64), out, 1, N=4)
except ValueError:
    print("raised")
"""


def test_one_that_fails_ends_the_others(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text(FAILS)
    assert interpret(path) == "raised\n"
