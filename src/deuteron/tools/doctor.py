"""What Deuteron finds on this machine, what is missing, and what to do about it; calibration.

In: nothing but the machine (and the cache folder of the options). Out: a dictionary of checks and
devices (`doctor`), tables of it and an exit status (`examine`). With `calibrate`, each device's
copy bandwidth, matrix-product rates and launch cost are measured and written to the JSON file that
`base.device.device_spec_for` reads. Calibrate an idle machine: the figures are minima of times.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from deuteron.base.device import CALIBRATION_FILE, device_spec, device_spec_for, key
from deuteron.base.options import Options
from deuteron.codegen.cpp.prelude import CXX_FLAGS, prelude
from deuteron.runtime.cache import Cache

TESTED_TORCH = ((2, 11), (2, 13))  # oldest and newest that the tests run on
OLDEST_PYTHON = (3, 10)
GPU_UNITS = ("f32", "tf32", "bf16", "f16", "int8")
TORCH_DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}


@dataclass(frozen=True)
class Check:
    """A finding. `status` is ok, warning (works, but ...) or missing (what needs it cannot run)."""

    what: str
    status: str
    finding: str
    hint: str = ""


def doctor(calibrate: bool = False, options: Options | None = None) -> dict[str, Any]:
    """Plain values: `checks` (see `Check`), `devices` (`DeviceSpec.to_dict`), `calibration`.

    `calibration` is the path of the file that was written, None without `calibrate`.
    """
    options = options or Options.make()
    folder = options.cache_folder()
    checks = [_python(), _torch(), _triton(), _compiler(), _cache(folder), *_gpus()]
    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    written = _calibrate(names, folder / CALIBRATION_FILE) if calibrate else None
    return {
        "checks": [asdict(c) for c in checks],
        "devices": [{"device": n, **device_spec_for(n, options).to_dict()} for n in names],
        "calibration": str(written) if written else None,
    }


def examine(calibrate: bool = False) -> int:
    """Prints what `doctor` finds; 1 where something is missing, else 0."""
    report = doctor(calibrate)
    console = Console()
    console.print(_checks_table(report["checks"]))
    console.print(_devices_table(report["devices"]))
    if report["calibration"]:
        console.print(f"Measured figures are in {report['calibration']}")
    return int(any(c["status"] == "missing" for c in report["checks"]))


def cache_summary(folder: Path) -> str:
    """Where the cache is, how many files of it there are, and their size."""
    usage = Cache(folder).info()
    return f"{folder}: {usage['files']} files, {usage['bytes'] / 1e6:.1f} MB"


def clear_cache(folder: Path) -> str:
    """Deletes the cache's own files, and nothing else there."""
    deleted = Cache(folder).clear()
    return f"{folder}: deleted {deleted['files']} files, {deleted['bytes'] / 1e6:.1f} MB"


# ----------------------------------------------------------------------------------------- checks


def _python() -> Check:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    old = tuple(map(int, platform.python_version_tuple()[:2])) < OLDEST_PYTHON
    if old:
        return Check("Python", "missing", text, "Python 3.10 or newer is needed")
    if platform.system() != "Linux":
        return Check("Python", "warning", text, "only Linux is tested")
    return Check("Python", "ok", text)


def _torch() -> Check:
    major, minor = (int(p) for p in torch.__version__.split(".")[:2])
    oldest, newest = TESTED_TORCH
    if (major, minor) < oldest:
        return Check("PyTorch", "missing", torch.__version__, "PyTorch 2.11 or newer is needed")
    if (major, minor) > newest:
        return Check("PyTorch", "warning", torch.__version__, "newer than the versions tested")
    return Check("PyTorch", "ok", torch.__version__)


def _triton() -> Check:
    if importlib.util.find_spec("triton") is None:
        return Check("Triton", "warning", "not installed", "GPU kernels need it; CPU ones do not")
    return Check("Triton", "ok", importlib.metadata.version("triton"))


def _compiler() -> Check:
    """Builds a unit as the CPU target does, and loads it."""
    path = shutil.which("g++")
    if path is None:
        return Check("C++ compiler", "missing", "no g++", "install g++ (Debian: apt install g++)")
    version = subprocess.run(
        [path, "-dumpfullversion"], capture_output=True, text=True, check=False
    )
    start = perf_counter()
    _, error = _build(path, prelude(["d_exp"]) + 'extern "C" f32 f(f32 x) { return d_exp(x); }\n')
    if error:
        return Check(
            "C++ compiler", "missing", error[:200], "g++ 11 or newer with OpenMP is needed"
        )
    text = f"g++ {version.stdout.strip()}, a small unit in {perf_counter() - start:.2f} s"
    return Check("C++ compiler", "ok", text)


def _build(compiler: str, text: str) -> tuple[ctypes.CDLL | None, str]:
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


def _cache(folder: Path) -> Check:
    place = folder
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
        return Check("Cache", "missing", f"{place} is not writable", "set DEUTERON_CACHE_DIR")
    if folder.exists() and folder.stat().st_uid != os.getuid():
        return Check(
            "Cache", "missing", f"{folder} belongs to another user", "set DEUTERON_CACHE_DIR"
        )
    free = shutil.disk_usage(place).free
    text = f"{cache_summary(folder)}; {free / 1e9:.0f} GB free"
    return Check(
        "Cache", "ok" if free > 1e9 else "warning", text, "" if free > 1e9 else "nearly full"
    )


def _gpus() -> list[Check]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or "without CUDA"
        return [Check("GPU", "ok", f"none (PyTorch built {built}): kernels run on the CPU")]
    out = []
    for i in range(torch.cuda.device_count()):
        spec = device_spec(f"cuda:{i}")
        major, minor = spec.capability or (0, 0)
        text = f"{spec.name}, capability {major}.{minor}, {spec.memory / 2**30:.0f} GiB"
        old = (major, minor) < (7, 0)
        out.append(
            Check(
                f"GPU {i}",
                "missing" if old else "ok",
                text,
                "Triton needs capability 7.0 or newer" if old else "",
            )
        )
    return out


# ------------------------------------------------------------------------------------ calibration


def _calibrate(names: list[str], path: Path) -> Path:
    """Measures the devices and replaces their entries in the file; other devices' entries stay."""
    content: dict[str, Any] = {}
    if path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
    for name in names:
        measure = _measure_cpu if name == "cpu" else _measure_gpu
        content[key(device_spec(name))] = measure(torch.device(name))
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
    ) as file:
        json.dump(content, file, indent=1)
    os.replace(file.name, path)
    return path


def _best(run: Callable[[], float], repeat: int = 5) -> float:
    """The smallest of several times (us), after one that warms up."""
    run()
    return min(run() for _ in range(repeat))


def _figures(
    copy_bytes: int, copy_us: float, rates: dict[str, float], **launches: float
) -> dict[str, Any]:
    """An entry of the file."""
    return {
        "bandwidth_gbps": round(2 * copy_bytes / copy_us / 1e3, 1),
        "gflops": {unit: round(rate, 1) for unit, rate in rates.items()},
        **{name: round(us, 2) for name, us in launches.items()},
        "torch": torch.__version__,
    }


def _measure_cpu(device: torch.device) -> dict[str, Any]:
    """Copies between warm buffers of eight times the last cache (64 MB at least, 1 GB at most)."""
    spec = device_spec(device)
    size = min(max(8 * max(spec.l2, spec.l3), 64 << 20), 1 << 30)
    source = torch.ones(size // 4)
    target = torch.empty_like(source)

    def timed(call: Callable[[], Any]) -> float:
        start = perf_counter()
        call()
        return (perf_counter() - start) * 1e6

    copy = _best(lambda: timed(lambda: target.copy_(source)))
    rates = {}
    for unit in ("f32", "f64", "bf16"):
        n = 1024 if unit == "f64" else 1536
        a = torch.ones(n, n, dtype=TORCH_DTYPES[unit])
        product = partial(torch.matmul, a, a)
        rates[unit] = 2 * n**3 / _best(partial(timed, product), 3) / 1e3
    region = _region_us()
    return _figures(size, copy, rates, launch_us=region, graph_launch_us=region)


def _region_us() -> float:
    """The cost of a call that begins and ends a parallel region, in us."""
    compiler = shutil.which("g++")
    assert compiler is not None, "calibration needs g++"
    text = """extern "C" void region(double *out, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int i = 0; i < threads; ++i) out[i * 16] += 1;
}
"""
    library, error = _build(compiler, text)
    assert library is not None, error
    threads = torch.get_num_threads()
    out = (ctypes.c_double * (16 * threads))()

    def run() -> float:
        start = perf_counter()
        for _ in range(1000):
            library.region(out, threads)
        return (perf_counter() - start) * 1e3

    return _best(run)


def _measure_gpu(device: torch.device) -> dict[str, Any]:
    """Copies 1 GiB (an eighth of the memory on small devices), products of 4096 or 8192.

    Not f64: its products run on tensor cores where there are some, its vector code does not.
    """
    spec = device_spec(device)
    with torch.cuda.device(device):
        size = min(1 << 30, spec.memory // 8)
        source = torch.ones(size // 4, device=device)
        target = torch.empty_like(source)
        copy = _best(lambda: _gpu_us(lambda: target.copy_(source)))
        rates = {unit: _gpu_rate(unit, device) for unit in GPU_UNITS if spec.has(unit)}
        return _figures(size, copy, rates, graph_launch_us=_graph_launch_us(device))


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


def _gpu_rate(unit: str, device: torch.device) -> float:
    """GFLOP/s of a square matrix product."""
    n = 8192 if unit in ("bf16", "f16", "int8") else 4096
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if unit == "tf32" else "highest")
    try:
        if unit == "int8":
            a = torch.randint(-8, 8, (n, n), device=device, dtype=torch.int8)
            b = a.t().contiguous().t()
            return 2 * n**3 / _best(lambda: _gpu_us(lambda: torch._int_mm(a, b))) / 1e3
        x = torch.randn(n, n, device=device).to(TORCH_DTYPES["f32" if unit == "tf32" else unit])
        return 2 * n**3 / _best(lambda: _gpu_us(lambda: x @ x)) / 1e3
    finally:
        torch.set_float32_matmul_precision(before)


def _graph_launch_us(device: torch.device, kernels: int = 500) -> float:
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
    return _best(lambda: _gpu_us(graph.replay)) / kernels


# ----------------------------------------------------------------------------------------- tables

STATUS_COLORS = {"ok": "green", "warning": "yellow", "missing": "red"}


def _checks_table(checks: list[dict[str, Any]]) -> Table:
    table = Table("", "status", "finding", "what to do", title="Deuteron on this machine")
    for c in checks:
        status = f"[{STATUS_COLORS[c['status']]}]{c['status']}[/]"
        table.add_row(c["what"], status, c["finding"], c["hint"])
    return table


def _devices_table(devices: list[dict[str, Any]]) -> Table:
    table = Table("device", "figures from", title="What the cost model assumes")
    for column in ("GB/s", "f32 TFLOP/s", "bf16 TFLOP/s", "launch us", "cores", "L2 MB"):
        table.add_column(column, justify="right")
    for d in devices:
        rates = d["gflops"]
        table.add_row(
            f"{d['device']} ({d['name']})", d["source"], f"{d['bandwidth_gbps']:.0f}",
            f"{rates['f32'] / 1e3:.2f}", f"{rates['bf16'] / 1e3:.2f}" if "bf16" in rates else "-",
            f"{d['launch_us']:.1f}", str(d["cores"]), f"{d['l2'] / 2**20:.0f}",
        )  # fmt: skip
    return table
