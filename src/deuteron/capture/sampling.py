"""Samples and means of images, where torch's rules lose zeros: `grid_sampler_2d` and pools.

In: an image [N, C, H, W], places [N, h, w, 2] from -1 to 1. Out: [N, C, h, w]. Torch's rule reads
the first element of the image where a place lies outside, and multiplies it by 0: NaN if that
element is infinite, and a zero of the wrong sign if it is negative. Here what lies outside is 0,
as in eager.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

BILINEAR, NEAREST, BICUBIC = 0, 1, 2
ZEROS, BORDER = 0, 1  # else: reflection
CUBIC_COEFFICIENT = -0.75  # torch's coefficient of bicubic interpolation
Axis = tuple[Tensor, Any]  # places along an axis, and its length


def grid_sampler_2d(
    x: Tensor,
    grid: Tensor,
    interpolation_mode: int = BILINEAR,
    padding_mode: int = ZEROS,
    align_corners: bool = False,
) -> Tensor:
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    n, c, height, width = x.shape
    shape = (n, c, *grid.shape[1:3])
    across, down = (
        unnormalized(grid[..., k].to(wide.dtype).unsqueeze(1).expand(shape), size, align_corners)
        for k, size in ((0, width), (1, height))
    )
    batch = torch.arange(n, device=x.device).view(n, 1, 1, 1)
    channel = torch.arange(c, device=x.device).view(1, c, 1, 1)

    def inside(xs: Tensor, ys: Tensor) -> Tensor:
        return (xs >= 0) & (xs < width) & (ys >= 0) & (ys < height)

    def value(xs: Tensor, ys: Tensor) -> Tensor:
        """The element at a whole place, or 0."""
        there = inside(xs, ys)
        i, j = (torch.where(there, v, 0).to(torch.int64) for v in (ys, xs))
        return torch.where(there, wide[batch, channel, i, j], 0)

    def moved(places: Tensor, size: Any) -> Tensor:
        return within(places, size, padding_mode, align_corners)

    if interpolation_mode == BICUBIC:
        out = bicubic((across, width), (down, height), lambda i, j: value(moved(*i), moved(*j)))
    else:
        xs, ys = moved(across, width), moved(down, height)
        if interpolation_mode == NEAREST:
            out = value(xs.round(), ys.round())
        else:
            out = bilinear(xs, ys, value, inside if x.is_cuda else None)
    return out.to(x.dtype)


def unnormalized(places: Tensor, size: Any, align_corners: bool) -> Tensor:
    """From [-1, 1] to [0, size - 1], or [-0.5, size - 0.5]."""
    scale = size * 0.5 - 0.5 if align_corners else size * 0.5
    return places * scale + (size * 0.5 - 0.5)


def within(places: Tensor, size: Any, padding_mode: int, align_corners: bool) -> Tensor:
    """Places after padding. Of those that are clamped NaN becomes 0, as in eager."""
    if padding_mode == ZEROS:
        return places
    if padding_mode != BORDER:
        twice_low, twice_high = (0, 2 * (size - 1)) if align_corners else (-1, 2 * size - 1)
        places = reflected(places, twice_low, twice_high)
    return torch.where(places.isnan(), 0.0, places.clamp(0, size - 1))


def reflected(places: Tensor, twice_low: Any, twice_high: Any) -> Tensor:
    """Reflected until they lie between low and high, which may be halves."""
    if twice_low == twice_high:
        return torch.zeros_like(places)
    low, span = twice_low / 2, (twice_high - twice_low) / 2
    off = (places - low).abs()
    extra = torch.fmod(off, span)
    even = torch.remainder(torch.floor(off / span), 2) == 0
    return torch.where(even, extra + low, span + low - extra)


def bilinear(
    xs: Tensor,
    ys: Tensor,
    value: Callable[[Tensor, Tensor], Tensor],
    inside: Callable[[Tensor, Tensor], Tensor] | None,
) -> Tensor:
    """Of four neighbours. With `inside` those outside are left out; else they are 0, and NaN where
    a place is no number, as on CPUs."""
    west, north = xs.floor(), ys.floor()
    east, south = west + 1, north + 1
    out: Tensor | None = None
    for i, j, weight in (
        (west, north, (east - xs) * (south - ys)),
        (east, north, (xs - west) * (south - ys)),
        (west, south, (east - xs) * (ys - north)),
        (east, south, (xs - west) * (ys - north)),
    ):
        term = value(i, j) * weight
        if inside is not None:
            term = torch.where(inside(i, j), term, 0.0)
        out = term if out is None else out + term
    assert out is not None, "four neighbours"
    return out


def bicubic(x: Axis, y: Axis, value: Callable[[Axis, Axis], Tensor]) -> Tensor:
    """Of four by four neighbours, each moved inside by itself."""
    (xs, width), (ys, height) = x, y
    west, north = xs.floor(), ys.floor()
    across, down = cubic_weights(xs - west), cubic_weights(ys - north)

    def row(k: int) -> Tensor:
        at = (north + (k - 1), height)
        return sum_of([value((west + (i - 1), width), at) * across[i] for i in range(4)])

    return sum_of([row(k) * down[k] for k in range(4)])


def sum_of(terms: list[Tensor]) -> Tensor:
    out = terms[0]
    for t in terms[1:]:
        out = out + t
    return out


def cubic_weights(t: Tensor) -> list[Tensor]:
    """Of the neighbours at -1, 0, 1 and 2, for a place t in [0, 1) beyond the second."""

    def near(u: Tensor) -> Tensor:
        return ((CUBIC_COEFFICIENT + 2) * u - (CUBIC_COEFFICIENT + 3)) * u * u + 1

    def far(u: Tensor) -> Tensor:
        return (
            (CUBIC_COEFFICIENT * u - 5 * CUBIC_COEFFICIENT) * u + 8 * CUBIC_COEFFICIENT
        ) * u - 4 * CUBIC_COEFFICIENT

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def from_zero(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Eager's sum begins with 0, so that negative zeros add up to 0; torch's rule begins with the
    first of them."""

    @wraps(rule)
    def wrapped(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = rule(x, *args, **kwargs)
        return out + 0.0 if isinstance(out, Tensor) else out

    return wrapped


RULES: dict[str, Callable[..., Tensor]] = {"aten.grid_sampler_2d.default": grid_sampler_2d}
