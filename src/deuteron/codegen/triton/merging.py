"""Device functions that merge partial results of dependent folds (`schedule.online`), for `libm`,
under whose name generated kernels call them. `*_combine` are associative up to rounding.
"""

# mypy: disable-error-code="no-untyped-def"
# (signatures of device functions are Triton's)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def welford_combine(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    """Means and sums of squared deviations of two sets (Chan, Golub, LeVeque 1979)."""
    n = n_a + n_b
    share = tl.where(n == 0, n, n_b / tl.where(n == 0, n + 1.0, n))
    delta = mean_b - mean_a
    return mean_a + delta * share, m2_a + m2_b + delta * delta * n_a * share, n


@triton.jit
def fold_welford(mean, m2, count):
    mean, m2, count = tl.reduce((mean, m2, count), 1, welford_combine)
    return mean[:, None], m2[:, None], count[:, None]


@triton.jit
def welford_step(mean, m2, x, share):
    """One more element `x` in every lane; `share` = 1 / number of elements then."""
    delta = x - mean
    mean = tl.fma(delta, share, mean)
    return mean, tl.fma(delta, x - mean, m2)


@triton.jit
def products_combine(x_a, y_a, c_a, n_a, x_b, y_b, c_b, n_b):
    """Means of two variables and sums of products of their deviations, of two sets."""
    n = n_a + n_b
    share = tl.where(n == 0, n, n_b / tl.where(n == 0, n + 1.0, n))
    dx = x_b - x_a
    dy = y_b - y_a
    return x_a + dx * share, y_a + dy * share, c_a + c_b + dx * dy * n_a * share, n


@triton.jit
def products_step(x, y, c, a, b, share):
    """One more pair (a, b) in every lane; `share` = 1 / number of pairs then."""
    dx = a - x
    y = tl.fma(b - y, share, y)
    return tl.fma(dx, share, x), y, tl.fma(dx, b - y, c)


@triton.jit
def fold_products(x, y, c, count):
    x, y, c, count = tl.reduce((x, y, c, count), 1, products_combine)
    return x[:, None], y[:, None], c[:, None], count[:, None]


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
