"""Where Triton's interpreter computes otherwise than a GPU, and ours does not."""

from __future__ import annotations

import numpy
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from dev.check.interpret import converted, fused


def test_the_interpreter_rounds_to_bfloat16() -> None:
    """Triton's own cuts: 0.3 and sums that are about as far from two numbers became another one."""
    x = torch.tensor([[0.2, 0.3, -46.875], [float("inf"), 1e-40, -0.0]])
    bits = converted(lambda *rest: rest, x.numpy(), tl.float32, tl.bfloat16, None)
    assert bits.dtype == numpy.uint16
    assert torch.equal(torch.from_numpy(bits.view(numpy.int16)).view(torch.bfloat16), x.bfloat16())
    assert converted(lambda *rest: rest, 1, tl.float16, tl.float32, 2)[0] == 1


def test_the_interpreter_reads_subnormal_bfloat16() -> None:
    """Triton's own takes bits from them: 4 * 2**-133 became 0 (seed 26000662)."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    given = bits.numpy().view(numpy.uint16)
    got = converted(lambda *rest: rest, given, tl.bfloat16, tl.float32, None).view(numpy.float32)
    want = bits.view(torch.bfloat16).float()
    assert torch.equal(torch.from_numpy(got).view(torch.int32), want.view(torch.int32))


def test_the_interpreter_rounds_a_fused_multiply_add_once() -> None:
    """Triton's own rounds the product, too: what is divided by a reciprocal and corrected was not
    what a division gives, and a maximum less than itself (seed 78000176)."""
    generator = numpy.random.default_rng(0)
    a, b, c = (generator.standard_normal(10_000).astype(numpy.float32) for _ in range(3))
    inverse = numpy.float32(1) / b
    handle = [TensorHandle(x, tl.float32) for x in (a * inverse, b, -a)]
    off = fused(None, *handle).data  # exact
    got = fused(None, *(TensorHandle(x, tl.float32) for x in (off, -inverse, a * inverse))).data
    assert got.dtype == numpy.float32
    assert (got == a / b).all() and (a * inverse != a / b).any()
    wide = TensorHandle(c.astype(numpy.float64), tl.float64)
    assert (fused(None, wide, wide, wide).data == wide.data * wide.data + wide.data).all()
