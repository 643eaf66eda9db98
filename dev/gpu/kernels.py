"""Generated Triton kernels on a GPU: right, and how close to the memory's speed, by configuration.

    python -m dev.gpu.kernels [--only layer_norm,softmax] [--sweep] [--seconds 120]

For each kernel (hand-built schedules at realistic sizes): its outputs against the same program in
torch, then the median of CUDA-event times of each candidate configuration, with the bytes that must
move over that time. `--sweep` also tries block sizes and warps beside the candidates. Prints a
table; writes JSON rows to $OUT/kernels.jsonl (./out without it). Exit status 1 when a kernel failed
or was wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deuteron.base.device import device_spec, named_gpu
from deuteron.codegen.triton import tiling
from deuteron.codegen.triton.generate import Config, TritonKernel, generate
from deuteron.ir.index import evaluate
from deuteron.ir.operations import ITEMSIZE
from deuteron.schedule.kernel import Kernel
from dev.gpu.kernel_programs import (
    CUDA,
    PROGRAMS,
    TORCH,
    Program,
    Tensors,
    batch_norm_sums,
    bias_relu,
    channels_last,
    column_parts,
    column_sum,
    cross_entropy,
    embedding,
    gelu,
    layer_norm,
    norm_backward,
    program,
    row_sum,
    softmax,
    transpose,
)

program(gelu, "gelu_f32_64M", 1 << 26, "f32")
program(gelu, "gelu_bf16_64M", 1 << 26, "bf16")
program(gelu, "gelu_bf16_1M", 1 << 20, "bf16")
program(bias_relu, "bias_relu_bf16_16384x4096", 16384, 4096, "bf16")
program(transpose, "transpose_f32_8192", 8192, "f32")
program(transpose, "transpose_bf16_8192", 8192, "bf16")
program(channels_last, "channels_last_64x256x3136", 64, 256, 3136)
program(softmax, "softmax_f32_16384x1024", 16384, 1024, "f32")
program(softmax, "softmax_bf16_65536x256", 65536, 256, "bf16")
program(softmax, "softmax_bf16_4096x32768", 4096, 32768, "bf16")
program(cross_entropy, "cross_entropy_bf16_8192x50257", 8192, 50257, "bf16")
program(layer_norm, "layer_norm_bf16_16384x4096", 16384, 4096, "bf16")
program(layer_norm, "layer_norm_f32_32768x768", 32768, 768, "f32")
program(layer_norm, "layer_norm_bf16_65536x768", 65536, 768, "bf16")
program(layer_norm, "layer_norm_bf16_8192x16384", 8192, 16384, "bf16")
program(norm_backward, "norm_backward_bf16_16384x4096", 16384, 4096, 264, "bf16")
program(norm_backward, "norm_backward_f32_32768x768", 32768, 768, 528, "f32")
program(row_sum, "row_sum_f32_16384x4096", 16384, 4096, "f32")
program(row_sum, "row_sum_f32_264x262144", 264, 262144, "f32")
program(row_sum, "row_sum_f32_4194304x16", 4194304, 16, "f32")
program(column_sum, "column_sum_f32_2048x32768", 2048, 32768, "f32")
program(column_parts, "column_parts_f32_65536x1024", 65536, 1024, 256, "f32")
program(batch_norm_sums, "batch_norm_sums_f32_64x256x3136", 64, 256, 3136, "f32")
program(embedding, "embedding_bf16_50257x4096", 50257, 4096, 32768, "bf16")


# ------------------------------------------------------------------------------------------- run


def kernel_of(name: str, p: Program) -> Kernel:
    ins = tuple((n, x) for n, x in p.layouts.items() if n not in p.outputs)
    return Kernel(
        name, p.nests, ins, tuple((n, p.layouts[n]) for n in p.outputs), (), "cuda", 0, 0.0, 0.0
    )


def function_of(kernel: TritonKernel, folder: Path) -> Any:
    path = folder / f"{kernel.name}.py"
    path.write_text(kernel.source)
    spec = importlib.util.spec_from_file_location(kernel.name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kernel.name)


def tensors(p: Program) -> Tensors:
    torch.manual_seed(0)
    out = {}
    for n, x in p.layouts.items():
        shape = [evaluate(e, {}) for e in x.shape]
        if x.dtype == "i64":
            out[n] = torch.randint(0, p.high, shape, device="cuda")
        else:
            out[n] = torch.randn(shape, device="cuda", dtype=TORCH[x.dtype])
    return out


def moved(p: Program) -> int:
    """Bytes of all tensors, each once (of a table that is gathered from: as much as is written)."""
    sizes = {n: evaluate(x.numel, {}) * ITEMSIZE[x.dtype] for n, x in p.layouts.items()}
    if "w" in sizes and "t" in sizes:
        sizes["w"] = min(sizes["w"], sizes["y"])
    return sum(sizes.values())


def timed(call: Callable[[], Any], flush: torch.Tensor, rounds: int = 15) -> float:
    """Median microseconds, caches emptied before each."""
    call()
    times = []
    for _ in range(rounds):
        flush.sum()  # reading leaves no lines that the kernel must write back
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def variants(kernel: TritonKernel, sweep: bool) -> Iterator[Config]:
    """The candidates, and beside them (for `sweep`) blocks and warps halved and doubled."""
    seen = dict.fromkeys(kernel.configs)
    yield from seen
    if not sweep:
        return
    first = kernel.configs[0]
    for factors in itertools.product((1, 2, 0.5), repeat=len(first.constexprs)):
        if sum(f != 1 for f in factors) > 2:
            continue
        values = tuple(
            (n, max(1, int(v * f))) for (n, v), f in zip(first.constexprs, factors, strict=True)
        )
        for warps in (first.num_warps, first.num_warps * 2, first.num_warps // 2):
            config = Config(values, warps, first.num_stages)
            if 1 <= warps <= 32 and config not in seen and fits(kernel, config):
                seen[config] = None
                yield config


def fits(kernel: TritonKernel, config: Config) -> bool:
    """Whether the text, whose masks follow from the candidates, is right for these blocks."""
    first = dict(kernel.configs[0].constexprs)
    return all(
        n == "STAGES" or v <= first[n] or f"{n[0].lower()}mask" in kernel.source
        for n, v in config.constexprs
    ) and not (
        "for roffset" not in kernel.source
        and dict(config.constexprs).get("RBLOCK", 0) != first.get("RBLOCK", 0)
    )


def measure(
    name: str, sweep: bool, flush: torch.Tensor, folder: Path, best: int
) -> list[dict[str, Any]]:
    p = PROGRAMS[name]()
    kernel = generate(kernel_of(name, p), device_spec("cuda"))
    function, memory = function_of(kernel, folder), tensors(p)
    want = {n: v.double() for n, v in p.reference(memory).items()}
    rows = []
    for config in variants(kernel, sweep):
        args = [memory[str(v)] for _, v in kernel.args]
        grid, constants = (kernel.grid(config, {}),), kernel.constants(config)
        options = {
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": kernel.fp_fusion,
            "debug": kernel.debug,
            "sanitize_overflow": False,
        }

        call = partial(function[grid], *args, **constants, **options)
        for n in p.outputs:
            memory[n].zero_()
        built = call()
        wrong = max(
            float(((memory[n].double() - want[n]).abs() / (1 + want[n].abs())).max())
            for n in p.outputs
        )
        us = timed(call, flush)
        rows.append(
            {
                "kernel": name,
                "config": dict(config.constexprs),
                "warps": config.num_warps,
                "us": round(us, 1),
                "gbps": round(moved(p) / us / 1e3),
                "error": wrong,
                "right": wrong <= p.tolerance,
                "registers": getattr(built, "n_regs", 0),
                "spills": getattr(built, "n_spills", 0),
            }
        )
        if not sweep and len(rows) >= 3:
            break
    if sweep:
        head = rows[:1]
        rows = head + sorted(rows[1:], key=lambda r: float(str(r["us"])))[:best]
    return rows


def report(rows: list[dict[str, Any]]) -> None:
    for k, r in enumerate(rows):
        label = r["kernel"] if k == 0 else ""
        blocks = " ".join(f"{n}={v}" for n, v in r["config"].items())
        flag = "" if r["right"] else f"  WRONG by {r['error']:.2g}"
        print(
            f"{label:36} {r['us']:9.1f} us {r['gbps']:6d} GB/s  w{r['warps']:<2} {blocks:32} "
            f"{r['registers']} regs {r['spills']} spills{flag}",
            flush=True,
        )


def fuzz(count: int, folder: Path) -> bool:
    """Random kernels against the reference executor; whether one was wrong."""
    from deuteron.schedule.reference import run_kernel
    from tests.codegen.test_cpp_fuzz import Maker

    failed = 0
    for seed in range(count):
        maker = Maker(seed)
        kernel = maker.kernel()
        sizes = {s.name: v for s, v in maker.sizes.items()}
        device = {n: _on_gpu(x) for n, x in maker.tensors.items()}
        run_kernel(kernel, maker.tensors, sizes)
        made = generate(kernel, device_spec("cuda"))
        config = made.configs[seed % len(made.configs)]
        args = [device[str(v)] if k == "tensor" else sizes[v.name] for k, v in made.args]  # type: ignore[union-attr]
        options = {"num_warps": config.num_warps, "enable_fp_fusion": made.fp_fusion}
        grid = made.grid(config, sizes)
        if grid:
            function_of(made, folder)[(grid,)](*args, **made.constants(config), **options)
        for n in maker.writes:
            want, got = maker.tensors[n].double(), device[n].cpu().double()
            allowed = 2e-2 if maker.tensors[n].dtype == torch.bfloat16 else 2e-4
            if not torch.allclose(got, want, rtol=allowed, atol=allowed, equal_nan=True):
                failed += 1
                print(f"seed {seed}: {n} off by {float((got - want).abs().max()):.3g}", flush=True)
    print(f"{count} random kernels, {failed} wrong outputs")
    return failed > 0


def _on_gpu(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    return out.copy_(x)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="parts of kernels' names, by commas")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--best", type=int, default=4, help="rows to print of a sweep")
    parser.add_argument(
        "--limit", type=int, default=tiling.ROW_LIMIT, help="longest row in registers"
    )
    parser.add_argument("--fuzz", type=int, default=0, help="only random kernels: how many")
    parser.add_argument("--seconds", type=float, default=300)
    options = parser.parse_args()
    tiling.ROW_LIMIT = options.limit
    wanted = [n for n in PROGRAMS if any(part in n for part in options.only.split(","))]
    if not CUDA:
        spec = named_gpu("H200")
        assert spec is not None
        for name in wanted:
            print(name, generate(kernel_of(name, PROGRAMS[name]()), spec).configs[0])
        return 0
    out = Path(os.environ.get("OUT", "out"))
    out.mkdir(parents=True, exist_ok=True)
    if options.fuzz:
        with tempfile.TemporaryDirectory() as folder:
            return int(fuzz(options.fuzz, Path(folder)))
    flush = torch.zeros(1 << 28, device="cuda")  # 250 us: the launch is queued by then
    end, failed = time.perf_counter() + options.seconds, False
    with tempfile.TemporaryDirectory() as folder, open(out / "kernels.jsonl", "w") as lines:
        for name in wanted:
            if time.perf_counter() > end:
                print(f"out of time before {name}")
                break
            try:
                rows = measure(name, options.sweep, flush, Path(folder), options.best)
            except Exception as e:
                print(f"{name}: {type(e).__name__}: {str(e)[:300]}", flush=True)
                failed = True
                continue
            report(rows)
            failed |= not all(r["right"] for r in rows)
            lines.writelines(json.dumps(r) + "\n" for r in rows)
            lines.flush()
            torch.cuda.empty_cache()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
