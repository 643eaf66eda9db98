"""Products of nn.Linear with what follows them, over a grid of sizes: times beside Inductor's and
eager's.

    python -m dev.gpu.epilogues [--always] [--dtype bfloat16] [--seconds 200]

60 products, of 1 to 16384 rows, odd ones among them, with five epilogues. A line for each: what the
schedule chose, its estimates, and microseconds of a call (medians of graphs' replays, in one
process); then the geometric mean of our time over the better of the others, and the worst.
--always: one kernel for each whatever is estimated, which shows what estimates are worth.
--seconds: no more cases are begun after that.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench

from deuteron.schedule import contract
from tests.schedule.planning import planned

# Rows, K, columns.
SIZES = (
    (1, 4096, 4096), (1, 2048, 16384), (16, 1024, 4096), (64, 768, 3072), (256, 4096, 4096),
    (512, 512, 512), (1024, 1024, 64), (2048, 1024, 4096), (4093, 333, 517), (8192, 1024, 1024),
    (8192, 4096, 4096), (16384, 768, 768),
)  # fmt: skip


def relu(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return torch.relu(F.linear(x, w, b))


def gelu(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.linear(x, w, b) + r


def silu_scaled(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.silu(F.linear(x, w) * 0.5) * b


def gate(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return torch.sigmoid(F.linear(x, w, b)) * r


EPILOGUES = (relu, gelu, residual, silu_scaled, gate)


def timed(f: Callable[[], Any]) -> float:
    """Microseconds of what a call gives the GPU to do, without the time that the host takes."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        f()
    return float(do_bench(graph.replay, warmup=5, rep=25, return_mode="median")) * 1e3


def inputs(m: int, k: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = ((m, k), (n, k), (n,), (m, n))
    x, w, b, r = (torch.randn(*s, device="cuda", dtype=dtype) for s in shapes)
    return [x, w * k**-0.5, b, r]


def chosen(f: Callable[..., Tensor], args: list[Tensor]) -> str:
    device = torch.cuda.get_device_name().split()[1]
    plan = planned(f, *args, device=device, run=False)
    return "; ".join(d["detail"] for d in plan.decisions(True)) or "the library"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--always", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=math.inf)
    asked = parser.parse_args()
    if asked.always:
        contract.MIN_GAIN = -math.inf
    cases = [(f, sizes) for sizes in SIZES for f in EPILOGUES]
    random.Random(0).shuffle(cases)
    print(torch.cuda.get_device_name(), asked, flush=True)
    ratios, begun = [], time.monotonic()
    for f, sizes in cases:
        if time.monotonic() - begun > asked.seconds:
            break
        args = inputs(*sizes, getattr(torch, asked.dtype))
        with torch.no_grad():
            text = chosen(f, args)
            torch._dynamo.reset()
            fs = {b: torch.compile(f, backend=b) for b in ("deuteron", "inductor")} | {"eager": f}
            wide = f(*(a.double() for a in args))
            error = float((fs["deuteron"](*args).double() - wide).norm() / wide.norm())
            us = {b: timed(partial(g, *args)) for b, g in fs.items()}
        ratios.append(us["deuteron"] / min(us["inductor"], us["eager"]))
        times = ", ".join(f"{b} {t:.1f}" for b, t in us.items())
        where = f"{f.__name__} {'x'.join(map(str, sizes))}"
        print(f"{where}: {ratios[-1]:.2f} ({times}); {error:.0e}; {text}", flush=True)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(
        f"{len(ratios)} products: {mean:.3f} of the better of the others, {max(ratios):.2f} at most"
    )


if __name__ == "__main__":
    main()
