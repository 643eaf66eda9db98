"""Device functions that merge values, and partial results of dependent folds (`schedule.online`),
for `libm`, under whose name generated kernels call them.
"""

# mypy: disable-error-code="no-untyped-def"
# (signatures of device functions are Triton's)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def maximum(a, b):
    """NaN where either argument is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def welford_step(mean, m2, x, share):
    """One more element `x` in every lane; `share` = 1 / number of elements then."""
    delta = x - mean
    mean = tl.fma(delta, share, mean)
    return mean, tl.fma(delta, x - mean, m2)


@triton.jit
def products_step(x, y, c, a, b, share):
    """One more pair (a, b) in every lane; `share` = 1 / number of pairs then."""
    dx = a - x
    y = tl.fma(b - y, share, y)
    return tl.fma(dx, share, x), y, tl.fma(dx, b - y, c)


@triton.jit
def apart(a, b):
    """``a - b``, 0 where they are equal, infinite ones too."""
    return tl.where(a == b, 0.0, a - b)


@triton.jit
def online_finish(total, row):
    """A maximum that is infinite makes every term exp(inf - inf)."""
    return tl.where(tl.abs(row) == float("inf"), float("nan"), total)


@triton.jit
def online_shifted(total, row, e):
    """A sum of exp(x - maximum) as one of exp(x - shift), e = exp(maximum - shift): e itself where
    the maximum is infinite.
    """
    return tl.where(tl.abs(row) == float("inf"), e, total * e)


@triton.jit
def online_shifted_weighted(total, row, e):
    """The same for a sum of factor exp(x - maximum)."""
    return tl.where(row == float("-inf"), e, total * e)
