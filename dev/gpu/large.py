"""Tensors of more than 2**31 elements on a GPU: values, and that `check_accesses` finds nothing.

    python -m dev.gpu.large

Prints a line per program: right or wrong, and the seconds it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deuteron.backend import deuteron_backend

LARGE_NUMEL = 2**31 + 4096


def points(x: Tensor) -> Tensor:
    return x * 2 + 1


def flipped(x: Tensor) -> Tensor:
    return x.flip(0) + x


def rows(x: Tensor) -> Tensor:
    return x.view(-1, 4096).sum(1, dtype=torch.int64)


def columns(x: Tensor) -> Tensor:
    return x.view(-1, 4096).amax(0)


def position(x: Tensor) -> Tensor:
    return x.argmax()


def gathered(x: Tensor) -> Tensor:
    i = torch.tensor([0, LARGE_NUMEL - 1, LARGE_NUMEL // 2, 2**31, 2**31 - 1], device=x.device)
    return x[i]


def turned(x: Tensor) -> Tensor:
    return x.view(4096, -1).t().contiguous()


def written(x: Tensor) -> Tensor:
    y = x.clone()
    y[2**31 - 5 : 2**31 + 7] = 3
    return y


def strided(x: Tensor) -> Tensor:
    return x.as_strided((5, 1000), (2**29 + 7, 1)).float().softmax(1)


PROGRAMS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(points, flipped, rows, columns, position, gathered, turned, written, strided),
)


def compare(f: Callable[[Tensor], Tensor], x: Tensor, **how: Any) -> str:
    torch._dynamo.reset()
    began = time.perf_counter()
    got = torch.compile(f, backend=deuteron_backend, fullgraph=True, **how)(x)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    want = f(x)
    if want.is_floating_point() and want.dtype == torch.float32:
        right = torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    else:
        right = torch.equal(got, want)
    return f"{'right' if right else 'WRONG'} {seconds:5.1f} s"


def main() -> None:
    made = torch.Generator("cuda").manual_seed(0)
    x = torch.randint(-9, 9, (LARGE_NUMEL,), dtype=torch.int8, device="cuda", generator=made)
    x[2**31 + 77] = 100
    for f in PROGRAMS:
        line = [compare(f, x), compare(f, x, dynamic=True)]
        if f is not turned:
            line.append(compare(f, x, options={"check_accesses": True}))
        print(f"{f.__name__:10} fixed {line[0]}  dynamic {line[1]}  checked {line[2:]}", flush=True)
    half = torch.randn(LARGE_NUMEL, dtype=torch.bfloat16, device="cuda")
    for g in (points, flipped, columns):
        print(f"{g.__name__:10} bf16 {compare(g, half)}", flush=True)


if __name__ == "__main__":
    main()
