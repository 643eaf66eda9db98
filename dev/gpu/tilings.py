"""Tilings of nests with products: what they are estimated to take, and what they take on a GPU.

    python -m dev.gpu.tilings [--train] [--count 12] [NAME...]

For each kernel of the cases of `dev.gpu.contractions` (with --train: of a forward for a backward,
and of that backward) a line for the chosen tiling, others of the best estimates and some drawn from
the rest: estimated and measured microseconds; then how the two rank (Spearman), and the chosen
one's time over the best measured. Tensors are drawn from (0.5, 1.5).
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deuteron.base.device import device_spec
from deuteron.codegen.triton.generate import generate
from deuteron.ir.reference import allocate
from deuteron.schedule.kernel import Kernel
from deuteron.schedule.tile import candidates
from dev.gpu.contractions import CASES, timed
from tests.schedule.planning import planned


def kernels(name: str, train: bool) -> list[Kernel]:
    """A case's kernels with products, for the GPU that is here."""
    case = CASES[name]
    args = [torch.empty(*s, dtype=torch.bfloat16, device="cuda") for s in case.shapes]
    device = torch.cuda.get_device_name().split()[1]
    if not train:
        with torch.no_grad():
            return planned(case.f, *args, device=device, run=False).contractions
    plan = planned(case.f, *(a.requires_grad_() for a in args), device=device, run=False)
    plan.results.backward(torch.empty_like(plan.results))
    return plan.contractions


def tilings(kernel: Kernel, count: int) -> Iterator[tuple[Kernel, float]]:
    assert kernel.contraction is not None
    nest = kernel.contraction[0]
    layouts = dict(kernel.reads) | dict(kernel.writes)
    found = candidates(nest, layouts, device_spec("cuda"))
    best, rest = found[: count // 2], found[count // 2 :]
    random.Random(0).shuffle(rest)
    for tiling, estimate in [*best, *rest[: count - len(best)]]:
        yield replace(kernel, contraction=(nest, tiling)), estimate.us


def memory(kernel: Kernel) -> dict[str, Tensor]:
    out = {}
    for name, layout in (*kernel.reads, *kernel.writes):
        out[name] = allocate(replace(layout, device="cuda"), {})
        if out[name].is_floating_point():
            out[name].uniform_(0.5, 1.5)
    return out


def compiled(kernel: Kernel) -> str:
    """Builds a kernel into Triton's cache; why not, where it cannot."""
    try:
        return run(kernel, False)
    except Exception as e:  # noqa: BLE001 - out of resources: a tiling that should not be offered
        return f"{type(e).__name__}: {e}"[:60]


def run(kernel: Kernel, time: bool = True) -> Any:
    """Microseconds of a kernel, or (not `time`) "" once it is built."""
    tensors = memory(kernel)
    code = generate(kernel, device_spec("cuda"))
    config = code.configs[0]
    given = [tensors[str(what)] for _, what in code.args]
    constants: dict[str, Any] = dict(config.constexprs)
    constants |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{code.name}.py"
        path.write_text(code.source)
        spec = importlib.util.spec_from_file_location(code.name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function, grid = getattr(module, code.name), (code.grid(config, {}),)
        if not time:
            function.warmup(*given, grid=grid, **constants)
            return ""
        return timed(lambda: function[grid](*given, **constants))


def rank(a: list[float], b: list[float]) -> float:
    x, y = (torch.tensor(v).argsort().argsort().double() for v in (a, b))
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--count", type=int, default=12)
    asked = parser.parse_args()
    print(torch.cuda.get_device_name())
    found = [(n, k) for n in asked.names or CASES for k in kernels(n, asked.train)]
    every = [list(tilings(k, asked.count)) for _, k in found]
    with ProcessPoolExecutor(14, get_context("spawn")) as pool:
        built = list(pool.map(compiled, (k for ks in every for k, _ in ks)))
    messages = iter(built)
    for (name, kernel), ks in zip(found, every, strict=True):
        print(f"{name}: {', '.join(n for n, _ in kernel.writes)}")
        rows = []
        for tiled, us in ks:
            why = next(messages)
            assert tiled.contraction is not None
            took = float("nan") if why else run(tiled)
            rows.append((us, took))
            print(f"  {us:9.1f} {took:9.1f}  {tiled.contraction[1]} {why}", flush=True)
        good = [r for r in rows if r[1] == r[1]]
        if len(good) > 2:
            best = min(t for _, t in good)
            order = rank(*map(list, zip(*good)))
            print(f"  rank {order:.2f}; chosen {rows[0][1] / best:.2f} of the best")


if __name__ == "__main__":
    main()
