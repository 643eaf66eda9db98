"""Device functions that merge values, and partial results of dependent reductions
(`schedule.online`), for `libm`, under whose name generated kernels call them.
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
def add_combine(a, b):
    return a + b


@triton.jit
def mul_combine(a, b):
    return a * b


@triton.jit
def max_combine(a, b):
    return maximum(a, b)


@triton.jit
def min_combine(a, b):
    return minimum(a, b)


@triton.jit
def from_zero(x):
    """A sum begins at zero in ATen: of negative zeros alone it is the positive one."""
    if x.dtype.is_floating():
        return x + 0.0
    else:
        return x


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
def difference(a, b):
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


@triton.jit
def argmax_combine(a, i, b, j):
    """The larger value; the first of equal ones; NaN is larger than all."""
    first = (a > b) | ((a != a) & (b == b)) | (((a == b) | ((a != a) & (b != b))) & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)


@triton.jit
def argmin_combine(a, i, b, j):
    first = (a < b) | ((a != a) & (b == b)) | (((a == b) | ((a != a) & (b != b))) & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)


@triton.jit
def argmax_last_nan_combine(a, i, b, j):
    """The larger value; the first of equal ones; NaN is larger than all, of several the last."""
    nan = (a != a) & ((b == b) | (i > j))
    first = nan | ((b == b) & ((a > b) | ((a == b) & (i < j))))
    return tl.where(first, a, b), tl.where(first, i, j)


@triton.jit
def argmax_step(a, i, b, j):
    """One more element `b`, which comes after those that `a` is the first largest of."""
    if a.dtype.is_floating():
        takes = ((b <= a) == 0) & (a == a)
    else:
        takes = b > a
    return tl.where(takes, b, a), tl.where(takes, j, i)


@triton.jit
def argmax_last_nan_step(a, i, b, j):
    takes = (b > a) | (b != b)
    return tl.where(takes, b, a), tl.where(takes, j, i)


@triton.jit
def argmin_step(a, i, b, j):
    if a.dtype.is_floating():
        takes = ((b >= a) == 0) & (a == a)
    else:
        takes = b < a
    return tl.where(takes, b, a), tl.where(takes, j, i)


@triton.jit
def reduce_argmax(x, i):
    value, index = tl.reduce((x, i), 1, argmax_combine)
    return index[:, None]


@triton.jit
def reduce_argmax_last_nan(x, i):
    value, index = tl.reduce((x, i), 1, argmax_last_nan_combine)
    return index[:, None]


@triton.jit
def reduce_argmin(x, i):
    value, index = tl.reduce((x, i), 1, argmin_combine)
    return index[:, None]
