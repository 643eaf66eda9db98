"""Measures what `base/products.py` knows: how fast the library and generated loops multiply.

    python -m dev.measure.products              # this CPU, one thread; prints a row per case

The last rows: the same of products whose operands stay in the second cache, medians of ten of them,
and microseconds of the library's call for squares (half precision: where oneDNN begins).

Each row: dtype, rows, how the larger matrix lies along the sum ("along" or "across"),
multiplications per ns of the library and of generated code, and the library's time for a product
of 8 x 8 matrices (what a call costs).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

import deuteron  # noqa: F401
from deuteron.lower import graph

K, N = 512, 1536  # 3 MB of f32: beyond the second cache, inside the third
ROUNDS, TIMES = 15, 3
# Rows, sum, columns.
SMALL = (
    (24, 128, 48), (128, 40, 40), (96, 68, 32), (128, 24, 48), (128, 128, 40), (64, 64, 64),
    (128, 64, 128), (128, 128, 128), (128, 256, 256), (512, 64, 64),
)  # fmt: skip
SQUARES = (8, 16, 20, 32, 64)


def best(f: Callable[..., Any], *args: Any) -> float:
    """Least seconds of a call."""
    f(*args)
    times = []
    for _ in range(ROUNDS * TIMES):
        start = perf_counter()
        f(*args)
        times.append(perf_counter() - start)
    return min(times)


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(f, backend="deuteron", options={"keep_graphs": False})


def case(
    dtype: torch.dtype, rows: int, along: bool, empty: float, k: int = K, n: int = N
) -> tuple[float, float]:
    """Multiplications per ns of the library and of generated loops."""
    x = torch.randn(rows, k).to(dtype)
    w = torch.randn(n, k).to(dtype) if along else torch.randn(k, n).to(dtype)

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ (w.t() if along else w)

    work = rows * k * n
    library = best(f, x, w)
    with patch.object(graph, "choose_contraction", lambda *_: "generated"):
        ours = best(compiled(f), x, w) - empty
    return work / library / 1e9, work / max(ours, 1e-6) / 1e9


def small(dtype: torch.dtype, along: bool, empty: float) -> str:
    """The medians of small products, as text."""
    cases = (case(dtype, m, along, empty, k, n) for m, k, n in SMALL)
    return "".join(f"{median(rates):8.1f}" for rates in zip(*cases, strict=True))


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(8, 8)
    with torch.no_grad():
        empty = best(compiled(lambda x: x + 1), x)  # Dynamo's part of a call
        print(f"call: {best(torch.mm, x, x) * 1e6:.1f} us f32, ", end="")
        print(f"{best(torch.mm, x.bfloat16(), x.bfloat16()) * 1e6:.1f} us bf16")
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            for rows in map(int, sys.argv[1:] or (1, 2, 4, 8, 32)):
                for along in (True, False):
                    library, ours = case(dtype, rows, along, empty)
                    name = str(dtype).removeprefix("torch.")
                    how = "along" if along else "across"
                    print(f"{name:10}{rows:4} {how:7}{library:8.1f}{ours:8.1f}", flush=True)
            squares = [torch.randn(n, n).to(dtype) for n in SQUARES]
            calls = (f"{len(x)} {best(torch.mm, x, x) * 1e6:.1f}" for x in squares)
            print(f"{dtype}, us of squares: {', '.join(calls)}", flush=True)
            for how in ("along", "across"):
                print(f"{dtype}, small, {how:7}{small(dtype, how == 'along', empty)}", flush=True)


if __name__ == "__main__":
    main()
