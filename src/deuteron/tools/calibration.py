"""Calibration: this machine's devices measured for the cost model.

In: names of devices, the file that `base.device.device_spec_for` reads. Out: the file, with each
device's copy bandwidth, matrix-product rates and launch cost, and the spread of each figure. What
was there before is kept beside it until the next calibration (`undo`). Figures are minima of times;
a machine that others use is refused.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from deuteron.base.device import device_spec, key
from deuteron.base.errors import DeuteronError
from deuteron.codegen.cpp.prelude import CXX_FLAGS

GPU_UNITS = ("f32", "tf32", "bf16", "f16", "int8")
TORCH_DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}
# Busy: processes that run or wait per core in the last minute; a GPU's use in percent.
MAX_LOAD, MAX_GPU_USE = 0.5, 10
# Most that the median of a figure's times may be above the least, as a share.
MAX_SPREAD = 0.3


class CalibrationError(DeuteronError):
    """The machine cannot be measured now, or there is nothing to undo."""


class Meter:
    """Takes times, and keeps how far they are apart."""

    def __init__(self) -> None:
        self.spread: dict[str, float] = {}

    def best(self, name: str, run: Callable[[], float], repeat: int = 5) -> float:
        """The smallest of several times (us), after one that warms up."""
        run()
        times = [run() for _ in range(repeat)]
        self.spread[name] = round(statistics.median(times) / min(times) - 1, 3)
        return min(times)


def calibrate(names: list[str], path: Path, force: bool = False) -> Path:
    """Measures the devices and replaces their entries in the file; other devices' entries stay."""
    if not force:
        refuse_busy()
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    content: dict[str, Any] = json.loads(before) if before else {}
    for name in names:
        meter = Meter()
        measure = _measure_cpu if name == "cpu" else _measure_gpu
        content[key(device_spec(name))] = measure(torch.device(name), meter)
        wide = {n: s for n, s in meter.spread.items() if s > MAX_SPREAD}
        if wide and not force:
            told = ", ".join(f"{n} by {s:.0%}" for n, s in wide.items())
            raise CalibrationError(
                f"times of {name} differ too much to be figures: {told}",
                hint="stop other programs and try again, or take them with --force",
            )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write(kept(path), before)
    write(path, json.dumps(content, indent=1))
    return path


def kept(path: Path) -> Path:
    """Where what was there before the last calibration is; empty: nothing was."""
    return path.with_suffix(".before.json")


def undo(path: Path) -> None:
    """Puts back what was there before the last calibration."""
    before = kept(path)
    if not before.is_file():
        raise CalibrationError(f"there is no calibration to undo in {path.parent}")
    if before.stat().st_size:
        os.replace(before, path)
    else:
        before.unlink()
        path.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """All of the file or nothing."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
    os.replace(file.name, path)


def refuse_busy() -> None:
    """Raises `CalibrationError` where other programs use the processor or a GPU."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > MAX_LOAD * cores:
        raise CalibrationError(
            f"the machine is busy: {load:.1f} processes ran on {cores} cores in the last minute",
            hint="stop other programs and wait a minute, or measure with --force",
        )
    for number, use in enumerate(gpu_use()):
        if use > MAX_GPU_USE:
            raise CalibrationError(
                f"GPU {number} is busy: {use} % in use",
                hint="stop what runs there, or measure with --force",
            )


def gpu_use() -> list[int]:
    """Percent of the last moments in which each GPU was busy, as the driver says."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return [int(line) for line in done.stdout.split() if line.strip().isdigit()]


def build(compiler: str, text: str) -> tuple[ctypes.CDLL | None, str]:
    """(the loaded library, "") or (None, the compiler's message)."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "unit.cpp"), Path(folder, "unit.so")
        source.write_text(text, encoding="utf-8")
        command = [compiler, *CXX_FLAGS, "-march=native", "-shared", "-fPIC", str(source)]
        done = subprocess.run(
            [*command, "-o", str(library)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            return None, done.stderr.strip() or f"exit status {done.returncode}"
        return ctypes.CDLL(str(library)), ""


def _figures(
    meter: Meter, copy_bytes: int, copy_us: float, rates: dict[str, float], **launches: float
) -> dict[str, Any]:
    """An entry of the file."""
    return {
        "bandwidth_gbps": round(2 * copy_bytes / copy_us / 1e3, 1),
        "gflops": {unit: round(rate, 1) for unit, rate in rates.items()},
        **{name: round(us, 2) for name, us in launches.items()},
        "spread": meter.spread,
        "torch": torch.__version__,
    }


def _measure_cpu(device: torch.device, meter: Meter) -> dict[str, Any]:
    """Copies between warm buffers of eight times the last cache (64 MB at least, 1 GB at most)."""
    spec = device_spec(device)
    size = min(max(8 * max(spec.l2, spec.l3), 64 << 20), 1 << 30)
    source = torch.ones(size // 4)
    target = torch.empty_like(source)

    def timed(call: Callable[[], Any]) -> float:
        start = perf_counter()
        call()
        return (perf_counter() - start) * 1e6

    copy = meter.best("copy", lambda: timed(lambda: target.copy_(source)))
    rates = {}
    for unit in ("f32", "f64", "bf16"):
        n = 1024 if unit == "f64" else 1536
        a = torch.ones(n, n, dtype=TORCH_DTYPES[unit])
        product = partial(torch.matmul, a, a)
        rates[unit] = 2 * n**3 / meter.best(unit, partial(timed, product), 3) / 1e3
    region = _region_us(meter)
    return _figures(meter, size, copy, rates, launch_us=region, graph_launch_us=region)


def _region_us(meter: Meter) -> float:
    """The cost of a call that begins and ends a parallel region, in us."""
    compiler = shutil.which("g++")
    assert compiler is not None, "calibration needs g++"
    text = """extern "C" void region(double *out, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int i = 0; i < threads; ++i) out[i * 16] += 1;
}
"""
    library, error = build(compiler, text)
    assert library is not None, error
    threads = torch.get_num_threads()
    out = (ctypes.c_double * (16 * threads))()

    def run() -> float:
        start = perf_counter()
        for _ in range(1000):
            library.region(out, threads)
        return (perf_counter() - start) * 1e3

    return meter.best("launch", run)


def _measure_gpu(device: torch.device, meter: Meter) -> dict[str, Any]:
    """Copies 1 GiB (an eighth of the memory on small devices), products of 4096 or 8192.

    Not f64: its products run on tensor cores where there are some, its vector code does not.
    """
    spec = device_spec(device)
    with torch.cuda.device(device):
        size = min(1 << 30, spec.memory // 8)
        source = torch.ones(size // 4, device=device)
        target = torch.empty_like(source)
        copy = meter.best("copy", lambda: _gpu_us(lambda: target.copy_(source)))
        rates = {unit: _gpu_rate(unit, device, meter) for unit in GPU_UNITS if spec.has(unit)}
        graph = _graph_launch_us(device, meter)
        return _figures(meter, size, copy, rates, graph_launch_us=graph)


def _gpu_us(call: Callable[[], Any], times: int = 5) -> float:
    """Mean device time of a call, of several in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / times


def _gpu_rate(unit: str, device: torch.device, meter: Meter) -> float:
    """GFLOP/s of a square matrix product."""
    n = 8192 if unit in ("bf16", "f16", "int8") else 4096
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if unit == "tf32" else "highest")
    try:
        if unit == "int8":
            a = torch.randint(-8, 8, (n, n), device=device, dtype=torch.int8)
            b = a.t().contiguous().t()
            product = partial(torch._int_mm, a, b)
            return 2 * n**3 / meter.best(unit, lambda: _gpu_us(product)) / 1e3
        x = torch.randn(n, n, device=device).to(TORCH_DTYPES["f32" if unit == "tf32" else unit])
        return 2 * n**3 / meter.best(unit, lambda: _gpu_us(lambda: x @ x)) / 1e3
    finally:
        torch.set_float32_matmul_precision(before)


def _graph_launch_us(device: torch.device, meter: Meter, kernels: int = 500) -> float:
    """Time per kernel of many in a graph that do next to nothing, each after the other.

    One by one, eager's own work per operation would hide what a launch costs: not measured here.
    """
    x = torch.zeros(32, device=device)
    graph = torch.cuda.CUDAGraph()
    x.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(kernels):
            x.add_(1)
    return meter.best("graph launch", lambda: _gpu_us(graph.replay)) / kernels


__all__ = ["CalibrationError", "build", "calibrate", "undo"]
