"""Fourier transforms with eager's strides.

In: a call of ``aten._fft_c2c``, ``_fft_r2c`` or ``_fft_c2r``, of any strides and dimensions. Out:
the same, as the calls that eager's kernels (MKL, cuFFT) make one after the other, each of the last
dimensions of a tensor with at least one more. Eager leaves the result of a transform in memory in
this order: the other dimensions by falling stride, then the transformed ones. Torch's fake kernels
know that in some versions and not in others; of these calls the result is contiguous for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

aten = torch.ops.aten
Call = Callable[[Tensor, list[int]], Tensor]
MAX_CUFFT_DIMS = 3  # that cuFFT transforms in one call


def falling(x: Tensor, dims: Sequence[int]) -> list[int]:
    """By stride, the largest first; in order where equal."""
    return sorted(dims, key=lambda d: -x.stride(d))


def others(x: Tensor, dims: Sequence[int]) -> list[int]:
    return [d for d in range(x.dim()) if d not in dims]


def of_last(x: Tensor, rest: list[int], dims: list[int], call: Call) -> Tensor:
    """`call` transforms `dims`, moved behind `rest`, and is given where they are then."""
    order = [*rest, *dims]
    places = list(range(1 + len(rest), 1 + len(order)))
    out = call(x.permute(order).unsqueeze(0), places).squeeze(0)
    return out.permute([order.index(d) for d in range(len(order))])


def is_of_last(x: Tensor, rest: list[int], dims: list[int], given: list[int]) -> bool:
    """Whether the call as given is what `of_last` would make."""
    return bool(rest) and dims == given and [*rest, *dims] == list(range(x.dim()))


def known(x: Tensor, dim: Sequence[int]) -> list[int] | None:
    """The dimensions, counted from the front; None where nothing is known of the result's
    strides, or they do not matter."""
    if not dim or x.dim() == 0 or free_unbacked_symbols(x) or x.numel() == 0:
        return None
    if x.device.type not in ("cpu", "cuda"):
        return None
    if x.device.type == "cpu" and not torch.backends.mkl.is_available():
        return None
    return [d % x.dim() for d in dim]


def in_one_call(x: Tensor, dims: list[int]) -> bool:
    """Whether eager gives cuFFT all dimensions of a real transform at once."""
    return len(dims) <= MAX_CUFFT_DIMS and dims[:2] != [0, 1]


def c2c(x: Tensor, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    given = known(x, dim)
    if given is None:
        return NotImplemented
    left = falling(x, given)
    most = MAX_CUFFT_DIMS if x.device.type == "cuda" else len(left)
    if len(left) <= most and is_of_last(x, falling(x, others(x, left)), left, given):
        return NotImplemented
    while left:
        left, now = left[:-most], left[-most:]
        rest = falling(x, others(x, now))
        x = of_last(
            x, rest, now, lambda t, at: aten._fft_c2c.default(t, at, normalization, forward)
        )
        left = falling(x, left)
    return x


def r2c(x: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Any:
    given = known(x, dim)
    if given is None:
        return NotImplemented

    def call(t: Tensor, at: list[int]) -> Tensor:
        return aten._fft_r2c.default(t, at, normalization, onesided)

    dims = given
    if x.device.type == "cpu":
        dims = [*falling(x, given[:-1]), given[-1]]
    elif not in_one_call(x, given):
        if not onesided:
            return NotImplemented
        half = of_last(x, falling(x, others(x, given[-1:])), given[-1:], call)
        return aten._fft_c2c.default(half, given[:-1], normalization, True)
    rest = falling(x, others(x, dims))
    return NotImplemented if is_of_last(x, rest, dims, given) else of_last(x, rest, dims, call)


def c2r(x: Tensor, dim: Sequence[int], normalization: int, last_size: int) -> Any:
    given = known(x, dim)
    if given is None:
        return NotImplemented

    def call(t: Tensor, at: list[int]) -> Tensor:
        return aten._fft_c2r.default(t, at, normalization, last_size)

    if x.device.type == "cuda" and in_one_call(x, given):  # of a contiguous copy
        rest = others(x, given)
        return (
            NotImplemented if is_of_last(x, rest, given, given) else of_last(x, rest, given, call)
        )
    dims = given[-1:]
    if len(given) > 1:
        x = aten._fft_c2c.default(x, given[:-1], normalization, False)
    rest = falling(x, others(x, dims))
    return NotImplemented if is_of_last(x, rest, dims, given) else of_last(x, rest, dims, call)


RULES: dict[str, Callable[..., Any]] = {
    "aten._fft_c2c.default": c2c,
    "aten._fft_r2c.default": r2c,
    "aten._fft_c2r.default": c2r,
}
__all__ = ["RULES"]
