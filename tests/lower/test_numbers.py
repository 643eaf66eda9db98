"""Numbers that are traced symbolically are what Python makes of them, whatever their sign.

Each row: a program of a tensor and a whole number, which changes from call to call. Where Python
raises (a division by zero), so does the compiled program.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import deuteron  # noqa: F401

ROWS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "round to places": lambda x, i: x + round(i / 4 * 9.8765, 3),
    "round to tens": lambda x, i: x * round(i * 76.54, -1),
    "round": lambda x, i: x + round(i / 2) + round(i * 1.7),
    "size rounded": lambda x, i: x + round(x.shape[0] / 7, 2),
    "floor and ceil": lambda x, i: x + math.floor(i / 2.5) * 10 + math.ceil(i / 2.5),
    "trunc and int": lambda x, i: x + math.trunc(i / 1.3) * 10 + int(i / 2.6),
    "roots and powers": lambda x, i: x + math.sqrt(i * i) + (i * i) ** 0.3 + i**3,
    "logarithm": lambda x, i: x + math.log(abs(i)) + math.log2(abs(i)) + math.exp(i / 10),
    "sines": lambda x, i: x + math.sin(i) + math.atan(i),
    "fmod": lambda x, i: x + math.fmod(i, 2.5),
    "least and most": lambda x, i: x + min(i / 3, 1.5) + max(i, 2) + abs(i) - (-i),
    "whole quotients": lambda x, i: (x + i // 4, x + i // -4, x + i % 4, x + i % -4),
    "quotients of floats": lambda x, i: (x + (i / 3) // 0.7, x + (i / 3) % 0.7, x + (i / 3) % -0.7),
    "bits": lambda x, i: x + (i >> 1) + (i & 3) + (i | 3) + (i ^ 5) + (abs(i) << 2),
    "truth": lambda x, i: (x + (i > 3), i == 5, (i / 2) < 1.5, x + (i / 2).is_integer()),
    "returned": lambda x, i: (x * 2, round(i / 3, 1), i // 2, i / 3),
    "filled": lambda x, i: (torch.full((abs(i) + 1,), i / 3), torch.full((2,), i > 3), x),
    "counted": lambda x, i: (torch.arange(i / 2, i + 7.5, 0.7), torch.arange(abs(i) + 2) * 2, x),
    "as sizes": lambda x, i: (x[: math.floor(x.shape[0] / 2.5)], x[: abs(i) // 2].sum(0)),
    "float quotient by zero": lambda x, i: x + 1 / (i - 9),
    "whole quotient by zero": lambda x, i: x + 7 // (i - 9),
    "remainder by zero": lambda x, i: x + 7 % (i - 9),
}


def outcome(f: Callable[..., Any], *args: Any) -> Any:
    try:
        return f(*args)
    except ZeroDivisionError as e:
        return type(e)


@pytest.mark.parametrize("name", ROWS)
def test_as_in_python(name: str) -> None:
    torch._dynamo.reset()
    f = ROWS[name]
    compiled = torch.compile(f, backend="deuteron", dynamic=True)
    for i in (3, 8, -5, 9, 4):
        x = torch.randn(6 + abs(i))
        for a, b in zip(tree_leaves(outcome(f, x, i)), tree_leaves(outcome(compiled, x, i))):
            assert type(a) is type(b), (i, a, b)
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(b, a)
            else:
                assert a == b, (i, a, b)


def test_numbers_made_of_numbers() -> None:
    """A chain of floats that Python computes, all known before the first kernel (attention's scale
    with changing sizes, seed 800007)."""

    def f(x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 / (2 * x.shape[-1]) ** 0.5
        return x.sin() * torch.scalar_tensor(scale**0.5, dtype=torch.float64)

    compiled = torch.compile(f, backend="deuteron", dynamic=True)
    for n in (11, 33, 7):
        x = torch.randn(5, n)
        torch.testing.assert_close(compiled(x), f(x))
