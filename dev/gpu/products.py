"""Small matrix products on a GPU: device time of what ATen takes, and of cuBLAS's own candidates.

``python -m dev.gpu.products [--count 8]`` prints microseconds of one product, from a CUDA graph
of twenty, and for each candidate the bytes of workspace and the part of a wave that it fills.
"""

from __future__ import annotations

import argparse
import ctypes
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from deuteron.base.options import Options
from deuteron.codegen.products import Product, Side
from deuteron.runtime import launch_blas

SHAPES = ((8, 256, 256), (8, 1024, 1024), (1, 768, 768), (128, 768, 768), (128, 768, 2304))
LAUNCHES = 20


def timed(launch: Callable[[], Any]) -> float:
    """Microseconds of one launch."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launch()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, float(start.elapsed_time(end)) * 1e3 / LAUNCHES)
    return best


def candidates(p: Product, tensors: list[torch.Tensor], count: int, alignment: int) -> list[str]:
    multiply = launch_blas.Multiply(p, 0, Options.make())
    out = []
    for n, result in enumerate(multiply.candidates(count, alignment)):
        multiply.table.best = result.algorithm
        multiply.space = result.space
        multiply.spaces.clear()
        addresses = struct.pack(f"{len(tensors)}P", *(t.data_ptr() for t in tensors))

        def launch(addresses: bytes = addresses) -> None:
            multiply(torch.cuda.current_stream().cuda_stream, addresses)

        try:
            us = f"{timed(launch):.1f}"
        except launch_blas.BlasError as e:
            us = str(e)[:20]
        out.append(f"{n}: {us} ({result.space >> 10}K, {result.waves:.2f})")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=8)
    count = parser.parse_args().count
    assert ctypes.sizeof(launch_blas._Result) == 96
    for dtype, name in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
        for m, k, n in SHAPES:
            x = torch.randn(m, k, device="cuda", dtype=dtype)
            w = torch.randn(n, k, device="cuda", dtype=dtype)
            b = torch.randn(n, device="cuda", dtype=dtype)
            y = torch.empty(m, n, device="cuda", dtype=dtype)
            aten = {
                "linear": partial(F.linear, x, w, b),
                "addmm out": partial(torch.addmm, b, x, w.t(), out=y),
                "linear without bias": partial(F.linear, x, w),
                "mm out": partial(torch.mm, x, w.t(), out=y),
            }
            times = ", ".join(f"{what} {timed(f):.1f}" for what, f in aten.items())
            print(f"{name} {m}x{k}x{n}: {times}")
            for bias in (True, False):
                side = (Side(True, k, 0), Side(False, k, 0), Side(False, n, 0))
                p = Product(m, n, k, 1, name, *side, bias)
                tensors = [x, w, y, *([b] if bias else [])]
                for alignment, most in ((256, count), (16, 1)):
                    texts = candidates(p, tensors, most, alignment)
                    print(f"    {'bias' if bias else 'none'} {alignment}: " + "; ".join(texts))


if __name__ == "__main__":
    main()
