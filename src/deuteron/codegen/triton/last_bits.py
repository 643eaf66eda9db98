"""Device functions of a float's bits, for `libm`, under whose name generated kernels call them."""

# mypy: disable-error-code="no-untyped-def"
# (signatures of device functions are Triton's)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def signbit(x):
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) < 0
    else:
        return x.to(tl.int64, bitcast=True) < 0


@triton.jit
def nextafter_half(x, y):
    """Of 16-bit floats, whose bits are stepped as an integer: up where the step leads away from
    zero."""
    u, v = x.to(tl.int16, bitcast=True), y.to(tl.int16, bitcast=True)
    a, b = x.to(tl.float32), y.to(tl.float32)
    step = tl.where((a < b) == (a > 0), u + 1, u - 1)
    r = tl.where(a == 0, (v & -32768) | 1, step)
    r = tl.where(a == b, v, r)
    r = tl.where((a != a) | (b != b), 32767, r)
    return r.to(tl.int16).to(x.dtype, bitcast=True)
