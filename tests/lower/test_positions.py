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


def gathers(low: Lowered) -> list[Any]:
    indices = [
        i
        for d in low.program.defs
        if isinstance(d, Compute)
        for i in (*d.body.indices(), *(d.index or ()))
    ]
    return [a for i in indices for a in i.atoms() if isinstance(a, Loaded)]
