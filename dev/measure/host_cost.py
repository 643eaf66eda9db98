"""What a call costs the host: Deuteron's part beside that of Dynamo and AOTAutograd.

``python -m dev.measure.host_cost [--device cuda] [--mode reduce-overhead]`` prints for each program
the microseconds of a whole call (forward, and backward where it trains), of the same call with a
backend that computes nothing (Dynamo, AOTAutograd and autograd), and inside Deuteron's ``call``,
with the kernels and library calls that it starts. The whole may be less than the second, since
calls go around AOTAutograd (`runtime/aot_bypass.py`). Tensors are small; on a CPU the time in
``call`` holds the arithmetic too. Medians of repeated calls, in processor time of the thread on a
CPU, in wall time without waiting for the device on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deuteron.pipeline as pipeline
from deuteron.backend import collecting

Step = Callable[[], Any]


def floor(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    """A compiled graph that returns what it returned the first time."""
    known: list[Any] = []

    def call(args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        if not known:
            with torch.no_grad():
                known.append(tuple(torch.fx.Interpreter(gm).run(*given)))
        return known[0]

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def floor_backend() -> Any:
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=floor, bw_compiler=floor, inference_compiler=floor)


class Chain(nn.Module):
    """Kernels that cannot be one: between them are library calls."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        made = [(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(blocks)]
        self.body = nn.Sequential(*(m for block in made for m in block))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


def forward(f: Any, *args: Tensor) -> Step:
    def step() -> None:
        with torch.no_grad():
            f(*args)

    return step


def train(f: Any, *args: Tensor) -> Step:
    tangent: list[Tensor] = []
    leaves = [*args, *(f.parameters() if isinstance(f, nn.Module) else ())]

    def step() -> None:
        for t in leaves:
            t.grad = None
        out = f(*args)
        if not tangent:
            tangent.append(torch.ones_like(out))
        out.backward(tangent[0])

    return step


def programs(device: str) -> dict[str, tuple[Any, Callable[[Any], Step]]]:
    x = torch.randn(8, 64, device=device)
    xg = torch.randn(8, 64, device=device, requires_grad=True)
    y = torch.randn(8, 256, device=device)
    yg = torch.randn(8, 256, device=device, requires_grad=True)
    norm, chain = nn.LayerNorm(64).to(device), Chain(12, 256).to(device)
    return {
        "3 operations": (lambda a: ((a + 1) * 2).sin(), lambda f: forward(f, x)),
        "3 operations, train": (lambda a: ((a + 1) * 2).sin(), lambda f: train(f, xg)),
        "layer norm": (norm, lambda f: forward(f, x)),
        "layer norm, train": (norm, lambda f: train(f, xg)),
        "softmax, changing sizes": (lambda a: F.softmax(a, -1), lambda f: forward(f, x)),
        "12 blocks": (chain, lambda f: forward(f, y)),
        "12 blocks, train": (chain, lambda f: train(f, yg)),
    }


def timed(step: Step, device: str, calls: int) -> float:
    clock = time.thread_time if device == "cpu" else time.perf_counter
    for _ in range(10):
        step()
    seconds = []
    for _ in range(calls):
        if device != "cpu":
            torch.cuda.synchronize()
        start = clock()
        step()
        seconds.append(clock() - start)
    return statistics.median(seconds) * 1e6


class Inside:
    """Measures the time in ``call``, by wrapping what the pipeline loads."""

    def __init__(self, device: str) -> None:
        self.clock = time.thread_time if device == "cpu" else time.perf_counter
        self.spent: list[float] = []
        self.usual = pipeline.compile_graph

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.usual(*args, **kwargs)

        def measured(given: list[Any]) -> Any:
            start = self.clock()
            out = call(given)
            self.spent.append(self.clock() - start)
            return out

        measured._boxed_call = True  # type: ignore[attr-defined]
        return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mode", default="default")
    parser.add_argument("--calls", type=int, default=300)
    given = parser.parse_args()
    inside = Inside(given.device)
    pipeline.compile_graph = inside  # type: ignore[assignment]
    print(f"{'program':26} {'whole':>8} {'nothing':>8} {'in call':>8}  us; kernels + library calls")
    for name, (f, make) in programs(given.device).items():
        dynamic = "sizes" in name
        torch._dynamo.reset()
        base = timed(
            make(torch.compile(f, backend=floor_backend(), dynamic=dynamic)),
            given.device,
            given.calls,
        )
        torch._dynamo.reset()
        with collecting() as records:
            g = torch.compile(f, backend="deuteron", options={"mode": given.mode}, dynamic=dynamic)
            step = make(g)
            whole = timed(step, given.device, given.calls)
        kernels = sum(len(r.of("kernel")) for r in records)
        calls = sum(len(r.of("library")) for r in records)
        graphs = len(records)
        part = inside.spent[-given.calls * graphs :]
        per = statistics.median(
            sum(part[k : k + graphs]) for k in range(0, len(part) - graphs + 1, graphs)
        )
        inside.spent.clear()
        print(f"{name:26} {whole:8.1f} {base:8.1f} {per * 1e6:8.1f}  {kernels} + {calls}")


if __name__ == "__main__":
    main()
