"""How compile time grows with the size of a graph.

    python -m dev.measure.scaling [--shapes chain,lstm] [--sizes 500,1000,2000,5000] [--build]

Compiles graphs of several shapes and sizes through Dynamo, AOTAutograd and Deuteron's stages, and
prints for each the CPU seconds of every stage, Deuteron's milliseconds per node, and that figure
over the one of the smallest size: 1.00 is proportional. Nothing is built unless `--build` is given;
then the seconds of the C++ compiler are added (wall time). Each graph is compiled in a process of
its own, forked from one that has compiled a small graph, so that imports do not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from deuteron.backend import deuteron_backend, run_as_traced
from deuteron.base.garbage import collector_paused
from deuteron.base.passes import Context, run_stages
from deuteron.capture.stages import Part
from deuteron.pipeline import GRAPH_STAGES, STAGES

Program = tuple[Callable[..., Any], tuple[Tensor, ...]]


# ---------------------------------------------------------------------------- shapes of graphs


def chain(nodes: int) -> Program:
    """Pointwise, one after the other."""

    def f(x: Tensor) -> Tensor:
        for _ in range(nodes // 2):
            x = torch.sin(x) + 0.5
        return x

    return f, (torch.randn(64, 256),)


def fan(nodes: int) -> Program:
    """Pointwise, all from one tensor, each with a result of its own."""

    def f(x: Tensor) -> list[Tensor]:
        return [torch.sin(x * (k + 2.0)) for k in range(nodes // 2)]

    return f, (torch.randn(64, 256),)


def gathered(nodes: int) -> Program:
    """Pointwise, all from one tensor, summed up in a chain."""

    def f(x: Tensor) -> Tensor:
        total = x
        for k in range(nodes // 2):
            total = total + x * (k + 2.0)
        return total

    return f, (torch.randn(64, 256),)


def norms(nodes: int) -> Program:
    """Norm after norm, each row kept whole."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(nodes // 9):
            x = F.layer_norm(x, (256,), w) + x
        return x

    return f, (torch.randn(64, 256), torch.randn(256))


def lstm(nodes: int) -> Program:
    """A recurrent cell, unrolled; its products are library calls."""

    def f(x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor) -> Tensor:
        for _ in range(nodes // 19):
            gates = x @ w + h @ u
            i, o, g, n = gates.chunk(4, dim=1)
            c = torch.sigmoid(i) * torch.tanh(g) + torch.sigmoid(n) * c
            h = torch.sigmoid(o) * torch.tanh(c)
        return h

    batch, width = 32, 64
    wide = torch.randn(width, 4 * width) / 8  # small enough for it not to be chaotic
    return f, (*(torch.randn(batch, width) for _ in range(3)), wide, wide.clone())


def mlp(nodes: int) -> Program:
    """A residual network of linear layers and norms, trained."""
    blocks = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        for _ in range(max(1, nodes // 66))
    )

    def f(x: Tensor) -> Tensor:
        for b in blocks:
            x = x + b(x)
        return x.square().mean()

    return f, (torch.randn(128, 64),)


SHAPES: dict[str, Callable[[int], Program]] = {
    f.__name__: f for f in (chain, fan, gathered, norms, lstm, mlp)
}


# ---------------------------------------------------------------------------------- measuring


BUILT = ("emit", "load", "guard")  # stages that start a compiler, and those behind them


class Stages:
    """Stands in for the pipeline: times each stage, and runs the graph as traced."""

    def __init__(self, build: bool) -> None:
        self.build = build
        self.seconds: dict[str, float] = {}
        self.nodes = self.kernels = 0

    def __call__(self, part: Part, context: Context) -> Any:
        artifact: Any = part
        for stage in GRAPH_STAGES:
            if stage.name in BUILT and not self.build:
                continue
            clock = time.perf_counter if stage.name == "load" else time.process_time
            start = clock()
            with collector_paused():
                artifact = run_stages([stage], artifact, context, STAGES.index(stage) + 1)
            self.seconds[stage.name] = self.seconds.get(stage.name, 0.0) + clock() - start
            if stage.name == "rewrite":
                self.nodes += len(part.gm.graph.nodes)
        self.kernels += len(artifact.steps)
        return run_as_traced(part.gm)


def measure(shape: str, nodes: int, build: bool) -> dict[str, Any]:
    """Compiles one graph in this process."""
    torch._dynamo.reset()
    f, args = SHAPES[shape](nodes)
    stages = Stages(build)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return deuteron_backend(
            gm,
            inputs,
            runner=stages,
            options={"cache": False},
        )

    gc.collect()
    start = time.process_time()
    out = torch.compile(f, backend=backend, fullgraph=True)(*args)
    if isinstance(out, Tensor) and out.requires_grad:
        out.backward()
    total = time.process_time() - start
    own = {k: v for k, v in stages.seconds.items() if k != "load"}
    row: dict[str, Any] = {"shape": shape, "nodes": stages.nodes, "kernels": stages.kernels}
    row |= {"torch": total - sum(own.values()), "own": sum(own.values()), **stages.seconds}
    return row


def forked(shape: str, nodes: int, build: bool) -> dict[str, Any]:
    """`measure` in a child process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            os.write(write, json.dumps(measure(shape, nodes, build)).encode())
        except BaseException as e:  # noqa: BLE001 - the parent says so and goes on
            os.write(write, json.dumps({"error": f"{type(e).__name__}: {e}"[:300]}).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the process died"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--sizes", default="500,1000,2000,5000")
    parser.add_argument("--build", action="store_true", help="also run the C++ compiler")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 1000
    for small in SHAPES:
        measure(small, 100, False)
    names = [s.name for s in GRAPH_STAGES if asked.build or s.name not in BUILT]
    columns = ["nodes", "kernels", "torch", "own", *names]
    print(f"{'shape':10}" + "".join(f"{c:>10}" for c in columns) + f"{'ms/node':>9}{'ratio':>7}")
    for shape in asked.shapes.split(","):
        first = 0.0
        for size in map(int, asked.sizes.split(",")):
            row = forked(shape, size, asked.build)
            if "error" in row:
                print(f"{shape:10}{size:10}  {row['error']}", flush=True)
                continue
            each = row["own"] / row["nodes"] * 1e3
            first = first or each
            text = "".join(
                f"{row[c]:10}" if c in ("nodes", "kernels") else f"{row.get(c, 0):10.2f}"
                for c in columns
            )
            print(f"{shape:10}{text}{each:9.2f}{each / first:7.2f}", flush=True)


if __name__ == "__main__":
    main()
