"""Computed positions become index maps: nothing is gathered where nothing needs to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deuteron.ir.index import Value as Loaded
from deuteron.ir.program import Compute
from tests.lower.harness import Lowered, check

X = torch.randn(2, 3, 8, 6)

CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "every second": lambda x: x[:, :, torch.arange(0, 8, 2)],
    "repeated": lambda x: x[..., torch.arange(12) // 2],
    "wrapped": lambda x: x[..., torch.arange(12) % 6],
    "reversed": lambda x: x[..., 5 - torch.arange(6)],
    "from the end": lambda x: x[..., torch.arange(6) - 6],
    "clamped": lambda x: x[..., (torch.arange(9) - 2).clamp(0, 5)],
    "diagonal": lambda x: x[:, :, torch.arange(6), torch.arange(6)],
    "two dimensions": lambda x: x[:, :, torch.arange(8)[:, None], torch.arange(6)[None]],
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest, down": lambda x: F.interpolate(x, scale_factor=0.5),
    "halved": lambda x: x[..., (torch.arange(12).float() * 0.5 + 0.0).to(torch.int64)],
    "kept inside": lambda x: x[..., centred(12)],
    "kept inside, next": lambda x: x[..., (centred(12) + 1).clamp(max=5)],
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear, corners": lambda x: F.interpolate(x, (15, 11), mode="bilinear", align_corners=True),
    "nearest, exact": lambda x: F.interpolate(x, (24, 12), mode="nearest-exact"),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_gathered(name: str) -> None:
    low = check(CASES[name], X)
    assert not gathers(low)


def test_odd_factors_are_still_right() -> None:
    check(lambda x: F.interpolate(x, (11, 17)), X)
    check(lambda x: F.interpolate(x, (11, 17), mode="nearest-exact"), X)


def test_writes() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, :, torch.arange(6), torch.arange(6)] = 1.0
        return y

    low = check(f, X)
    assert not gathers(low)


def centred(n: int) -> torch.Tensor:
    return ((torch.arange(n) + 0.5) * 0.5 - 0.5).clamp(min=0.0).to(torch.int64)


def places(n: int, scale: float, shift: float = 0.0, most: int = 1 << 20) -> torch.Tensor:
    at = ((torch.arange(n) + shift) * scale - shift).clamp(min=0.0).to(torch.int64)
    return at.clamp(max=most)


SUMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nearest": lambda g: put((8, 6), g, places(16, 0.5), places(12, 0.5)),
    "bilinear": lambda g: put((8, 6), g, places(16, 0.5, 0.5), places(12, 0.5, 0.5)),
    "bilinear, next": lambda g: put(
        (8, 6), g, (places(16, 0.5, 0.5) + 1).clamp(max=7), (places(12, 0.5, 0.5) + 1).clamp(max=5)
    ),
    "smaller": lambda g: put((32, 24), g, places(16, 2.0), places(12, 2.0)),
    "odd": lambda g: put((5, 7), g, places(16, 5 / 16), places(12, 7 / 12)),
    "backwards": lambda g: put((16, 12), g, 15 - torch.arange(16), torch.arange(12)),
}


def put(shape: tuple[int, int], g: torch.Tensor, h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    zero = torch.full((2, 3, *shape), 0.5)
    return torch.ops.aten.index_put(zero, [None, None, h[:, None], w], g, True)


@pytest.mark.parametrize("name", SUMS)
def test_sums_at_computed_places_are_reductions(name: str) -> None:
    low = check(SUMS[name], torch.randn(2, 3, 16, 12))
    scattered = [d for d in low.program.defs if isinstance(d, Compute) and d.target is not None]
    assert bool(scattered) == (name in ("backwards", "odd"))


def test_sums_of_whole_numbers() -> None:
    check(SUMS["odd"], torch.randint(-9, 9, (2, 3, 16, 12)).float())
    low = check(
        lambda g: torch.zeros(2, 3, 8, 6, dtype=torch.int8).index_put(
            [torch.arange(2)[:, None], torch.arange(3)], g.to(torch.int8), accumulate=True
        ),
        torch.randint(-9, 9, (2, 3, 8, 6)),
    )
    assert not gathers(low)


def gathers(low: Lowered) -> list[Any]:
    indices = [
        i
        for d in low.program.defs
        if isinstance(d, Compute)
        for i in (*d.body.indices(), *(d.index or ()))
    ]
    return [a for i in indices for a in i.atoms() if isinstance(a, Loaded)]
