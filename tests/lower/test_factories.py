"""Constants, ranges and random streams."""

from __future__ import annotations

import pytest
import torch

import deuteron.graph.random_ops as R
from tests.lower.harness import check


def test_constants() -> None:
    x = torch.randn(3, 4)
    check(
        lambda x: (
            torch.full((2, 3), 1.5),
            torch.full_like(x, 3),
            torch.zeros(3, dtype=torch.bool),
            torch.ones(2, dtype=torch.int8),
            x.new_full((2,), 7),
            x.new_ones(2),
            torch.scalar_tensor(3),
            torch.full((), float("nan")),
            torch.zeros(0, 3),
        ),
        x,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32])
def test_ranges(dtype: torch.dtype) -> None:
    check(
        lambda x: (
            torch.arange(3, 100, 7, dtype=dtype),
            torch.arange(10, -3, -2, dtype=dtype),
            torch.arange(5, dtype=dtype) + x,
            torch.arange(0, 0, dtype=dtype),
            torch.linspace(0, 10, 7, dtype=dtype),
            torch.eye(3, 4, dtype=dtype),
        ),
        torch.ones(5, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_steps_of_whole_numbers(dtype: torch.dtype) -> None:
    """Eager cuts the ends before it counts the steps; from half way on it counts from the end."""
    ends = [(4.3, 90), (2.5, 3), (99, 4.9), (3, 50), (0.999, 7.2)]
    check(
        lambda x: tuple(
            torch.linspace(a, b, n, dtype=dtype) for a, b in ends for n in (0, 1, 2, 5, 50)
        ),
        torch.ones(1),
    )
    check(lambda a, b: torch.linspace(a, b, 50, dtype=dtype), torch.tensor(4.3), torch.tensor(90.7))


def test_float_steps_do_not_drift() -> None:
    x = torch.randn(1)
    check(lambda x: torch.arange(0.5, 300.2, 0.3) * x, x, rtol=3e-7, atol=0.0)


def test_random_streams() -> None:
    check(
        lambda s: (
            R.RAND(s, 3, [4, 5], torch.float32),
            R.RAND(s, 0, [3], torch.float64),
            R.RANDN(s, 1, [7], torch.float64),
            R.RANDN(s, 1, [7], torch.float32),
            R.RANDINT64(s, 2, -3, 9, [3, 4]),
        ),
        torch.tensor(-1234567890123),
    )
