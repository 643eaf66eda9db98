"""Times the candidates of a bench case's Triton kernels, and block sizes beside them.

    python -m dev.measure.candidates "group_norm_silu bf16 train 16x512x64x64" [--sweep] [--least
    MB]

One line per kernel: its bytes at the speed of a copy, the predicted time, then microseconds of
every candidate, the heuristic choice first; with `--sweep` the best of many other block sizes,
warps and stages (what a heuristic could gain). Kernels that move less than `--least` are left out.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import deuteron.codegen.triton.generate as generating
from deuteron.codegen.triton import tiling
from deuteron.codegen.triton.access_statistics import size
from deuteron.codegen.triton.generate import Config, TritonKernel, generate
from deuteron.codegen.triton.tiling import TileConfig, Tiling


def kernels(case: str) -> list[Any]:
    """The scheduled kernels of a case, forward and backward."""
    from deuteron.backend import deuteron_backend
    from deuteron.pipeline import compiled
    from dev.bench.families import FAMILIES

    name, dtype, phase, text = case.split()
    scheduled: list[Any] = []

    def runner(part: Any, context: Any) -> Any:
        import copy

        original = copy.deepcopy(part.gm)
        scheduled.extend(compiled("rewrite", "schedule", part, context).steps)

        def call(args: list[Any]) -> Any:
            taken = list(args)
            args.clear()
            return original(*taken)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    program = FAMILIES[name](tuple(map(int, text.split("x"))), dtype)
    args = [s.make("cuda", torch.Generator("cuda").manual_seed(0)) for s in program.inputs]
    for a, s in zip(args, program.inputs, strict=True):
        a.requires_grad_(bool(phase == "train" and s.grad))
    backend = functools.partial(deuteron_backend, runner=runner)
    torch._dynamo.reset()
    out = torch.compile(program.fn, backend=backend, dynamic=False)(*args)
    if phase == "train":
        out = out if isinstance(out, torch.Tensor) else out[0]
        out.backward(torch.ones_like(out))
    return scheduled


def nearby_configs(choice: Tiling) -> tuple[TileConfig, ...]:
    """Blocks around the heuristic's, with no masks but those that it has."""
    first = choice.candidates[0]
    choices = []
    for d, axes in choice.dims:
        n, value = size(axes), first.of(d)
        wide = (1,) if d == "r" and choice.persistent else (1, 2, 4)
        values = sorted({v for w in wide for v in (value // min(w, 2), value * w) if v})
        if choice.kind == "row_split" or all(n % b.of(d) == 0 for b in choice.candidates):
            values = [v for v in values if n % v == 0 or v == value]
        choices.append([(d, v) for v in values])
    out = []
    for sizes in itertools.product(*choices):
        elements = prod(v for _, v in sizes)
        depths = (1, 3) if choice.has_loops else (1,)
        for warps, stages in itertools.product((1, 2, 4, 8, 16, 32), depths):
            if 8 <= elements // (32 * warps) <= 32 and elements * stages <= 65536:
                out.append(TileConfig(sizes, warps, stages))
    return tuple(out)


def choosing(sweep: bool) -> Any:
    """The choice of forms, with more candidates for kernels' first nests."""

    def choose(loops: Any, spec: Any) -> Tiling:
        choice = tiling.choose(loops, spec)
        if not sweep or spec.cores == 1:
            return choice
        return replace(
            choice, candidates=tuple(dict.fromkeys((*choice.candidates, *nearby_configs(choice))))
        )

    return choose


def build(k: TritonKernel, c: Config, path: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    spec = importlib.util.spec_from_file_location(k.name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    attrs = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(k.params) if p in k.aligned}
    source = ASTSource(getattr(module, k.name), k.signature(), k.constants(c), attrs)
    options = {
        "num_warps": c.num_warps,
        "num_stages": c.num_stages,
        "enable_fp_fusion": k.fp_fusion,
    }
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def warm(job: tuple[TritonKernel, Config, str]) -> None:
    try:
        build(*job)
    except Exception as e:  # a worker's report: the main process meets the same error again
        print(f"{job[0].name} {job[1]}: {type(e).__name__}", file=sys.stderr)


def memory(layout: Any) -> torch.Tensor:
    """A tensor of a layout: numbers for floats, 0 for what may be an index."""
    from deuteron.ir.index import hint
    from deuteron.lower.core import TO_TORCH

    n, dtype = hint(layout.extent() + layout.offset), TO_TORCH[layout.dtype]
    if layout.dtype in ("f16", "bf16", "f32", "f64"):
        return torch.randn(n, device="cuda", dtype=dtype)
    return torch.zeros(n, device="cuda", dtype=dtype)


def measure(k: TritonKernel, kernel: Any, configs: list[Config], path: str) -> dict[Config, float]:
    from triton.testing import do_bench

    tensors = {n: memory(lay) for n, lay in (*kernel.reads, *kernel.writes)}
    args: list[Any] = []
    for kind, what in k.args:
        if kind == "tensor":
            args.append(tensors[str(what)])
    out = {}
    for c in configs:
        try:
            built = build(k, c, path)
            values = k.constants(c)
            grid = (k.grid(c, {}), 1, 1)
            call = functools.partial(built[grid], *args, *(values[n] for n in k.constexprs))
            out[c] = 1000 * do_bench(call, warmup=2, rep=8, return_mode="median")
        except Exception as e:
            print(f"{k.name} {c}: {type(e).__name__} {e}"[:200], file=sys.stderr)
    return out


def text(c: Config) -> str:
    sizes = " ".join(f"{n[0]}{n[6:]}{v}" for n, v in c.constexprs)
    return f"{sizes} w{c.num_warps}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--least", type=float, default=4.0)
    options = parser.parse_args()
    from deuteron.base.device import device_spec_for
    from deuteron.base.options import Options

    spec = device_spec_for("cuda:0", Options.make())
    generating.choose = choosing(options.sweep)
    folder = Path(tempfile.mkdtemp())
    jobs: list[Any] = []
    rows: list[Any] = []
    for case in options.cases:
        for kernel in kernels(case):
            if kernel.bytes < options.least * 1e6:
                continue
            k = generate(kernel, spec)
            path = str(folder / f"{len(rows)}_{k.name[:40]}.py")
            Path(path).write_text(k.source)
            configs = list(k.configs)
            jobs += [(k, c, path) for c in configs]
            rows.append((case, kernel, k, configs, path))
    with ProcessPoolExecutor(14, get_context("spawn")) as pool:
        list(pool.map(warm, jobs, chunksize=2))
    x = torch.randn(1 << 28, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    from triton.testing import do_bench

    copied = do_bench(functools.partial(y.copy_, x), rep=20, return_mode="median")
    speed = 4 * x.numel() / copied / 1e6
    print(f"copy {speed:.0f} GB/s")
    del x, y
    for case, kernel, k, configs, path in rows:
        times = measure(k, kernel, configs, path)
        own = " ".join(f"{times.get(c, 0):.1f}" for c in k.configs[:3])
        best = sorted((t, text(c)) for c, t in times.items())[:4]
        least = kernel.bytes / speed / 1e3
        print(
            f"{case} | {kernel.name[:40]} | bytes {least:.1f} predicted {kernel.predicted_us:.1f}"
        )
        print(f"    [{text(k.configs[0])}] {own} | best", *(f"{t:.1f} ({c})" for t, c in best))


if __name__ == "__main__":
    main()
