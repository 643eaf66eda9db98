"""`deuteron doctor`: what Deuteron finds on this machine; and the kernel cache, seen and cleared.

Out: lines that begin with ok, note or wrong, each with what to do. Exit status 1 when something is
wrong, that is when programs would not be compiled here at all.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from deuteron.base.device import CALIBRATION, DeviceSpec, device_spec_for
from deuteron.base.options import Options

TORCH = ((2, 11), (2, 14))


@dataclass(frozen=True)
class Finding:
    level: str  # "ok" | "note" | "wrong"
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level:6}{self.text}" + (f"\n      -> {self.advice}" if self.advice else "")


def examine(calibrate: bool) -> int:
    """Prints the findings; measures this machine first when asked to. Returns the exit status."""
    options = Options.make()
    if calibrate:
        from deuteron.tools.calibrate import calibrate as measure

        print("measuring this machine (a minute at most)", flush=True)
        measure(options.cache_folder() / CALIBRATION)
    wrong = False
    for check in CHECKS:
        for finding in check(options):
            print(finding, flush=True)
            wrong |= finding.level == "wrong"
    return int(wrong)


# ------------------------------------------------------------------------------------- checks


def check_versions(options: Options) -> Iterator[Finding]:
    yield Finding("ok", f"Python {platform.python_version()} on {platform.system()}")
    found = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    low, high = (".".join(map(str, v)) for v in TORCH)
    if TORCH[0] <= found < TORCH[1]:
        yield Finding("ok", f"torch {torch.__version__}")
    else:
        yield Finding(
            "wrong", f"torch {torch.__version__}", f"install torch at least {low} and below {high}"
        )
    from torch._dynamo import list_backends

    if "deuteron" in list_backends():
        yield Finding("ok", 'torch.compile knows backend="deuteron"')
    else:
        yield Finding(
            "wrong", "torch.compile does not know the backend", "install the package with pip"
        )


def check_compiler(options: Options) -> Iterator[Finding]:
    """A C++ compiler that makes OpenMP programs."""
    names = ("g++", "clang++", "c++")
    path = next((p for p in map(shutil.which, names) if p), None)
    if path is None:
        yield Finding(
            "note",
            "no C++ compiler: CPU programs run through ATen",
            f"install one of {', '.join(names)}",
        )
        return
    with tempfile.TemporaryDirectory(prefix="deuteron-doctor-") as folder:
        source, program = Path(folder) / "try.cpp", Path(folder) / "try.so"
        source.write_text("#include <omp.h>\nextern int f() { return omp_get_max_threads(); }\n")
        command = [path, "-O2", "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(program)]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    seconds = time.perf_counter() - start
    first = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    name = first.stdout.splitlines()[0] if first.stdout else path
    if done.returncode:
        yield Finding("wrong", f"{name} fails: {done.stderr.strip()[:300]}", "install OpenMP")
    else:
        yield Finding("ok", f"{name}, with OpenMP ({seconds:.2f} s for an empty library)")


def check_triton(options: Options) -> Iterator[Finding]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    try:
        triton = version("triton") if importlib.util.find_spec("triton") else None
    except PackageNotFoundError:
        triton = "of unknown version"
    for i, name in enumerate(gpus):
        yield Finding("ok", f"cuda:{i} {name}")
    if not gpus:
        yield Finding("note", "no GPU that torch can use: programs on the CPU only")
    if triton:
        yield Finding("ok", f"triton {triton}")
    elif gpus:
        yield Finding("wrong", "no triton: nothing can be generated for the GPU", "install triton")
    else:
        yield Finding("note", "no triton (needed for GPUs only)")


def describe(spec: DeviceSpec) -> str:
    rates = ", ".join(f"{unit} {gflops / 1e3:.3g}" for unit, gflops in spec.gflops)
    return (
        f"{spec.kind} {spec.name}: {spec.bandwidth_gbps:.0f} GB/s, TFLOP/s {rates}, "
        f"launch {spec.launch_us:.1f} us"
    )


def check_devices(options: Options) -> Iterator[Finding]:
    kinds = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    for kind in kinds:
        spec = device_spec_for(kind, options)
        advice = "deuteron doctor --calibrate measures them" if spec.source != "measured" else ""
        yield Finding(
            "note" if advice else "ok", f"{describe(spec)} (figures: {spec.source})", advice
        )


def check_cache(options: Options) -> Iterator[Finding]:
    folder = options.cache_folder()
    near = folder
    while not near.exists():
        near = near.parent
    if os.access(near, os.W_OK):
        yield Finding("ok", cache_summary(folder))
    else:
        yield Finding(
            "note",
            f"the kernel cache {folder} is not writable: every process builds its kernels anew",
            "set DEUTERON_CACHE_DIR",
        )


def check_program(options: Options) -> Iterator[Finding]:
    """One small program, forward and backward, against eager."""
    for device in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        start = time.perf_counter()
        try:
            same = small_program_is_right(device)
        except Exception as error:  # what a doctor is asked for: it becomes a finding
            message = str(error).split("Set TORCHDYNAMO_VERBOSE")[0].strip()
            yield Finding("wrong", f"a small program does not compile on {device}: {message}")
            continue
        seconds = time.perf_counter() - start
        if same:
            yield Finding(
                "ok", f"a small program compiles and is right on {device}, {seconds:.1f} s"
            )
        else:
            yield Finding("wrong", f"a small program gives wrong numbers on {device}", "report it")


def small_program_is_right(device: str) -> bool:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.nn.functional.layer_norm(x @ w, (32,)), -1).square().sum()

    torch.manual_seed(0)
    args = [torch.randn(64, 32, device=device), torch.randn(32, 32, device=device)]
    results = []
    for call in (f, torch.compile(f, backend="deuteron")):
        leaves = [t.clone().requires_grad_() for t in args]
        loss = call(*leaves)
        loss.backward()
        results.append([loss.detach(), *(t.grad for t in leaves)])
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*results))


CHECKS: tuple[Callable[[Options], Iterator[Finding]], ...] = (
    check_versions,
    check_compiler,
    check_triton,
    check_devices,
    check_cache,
    check_program,
)


# -------------------------------------------------------------------------------------- cache


def files_of(folder: Path) -> list[Path]:
    """Everything in the cache but the calibration."""
    return [p for p in folder.rglob("*") if p.is_file() and p.name != CALIBRATION]


def cache_summary(folder: Path) -> str:
    if not folder.is_dir():
        return f"kernel cache {folder}: empty"
    files = files_of(folder)
    size = sum(p.stat().st_size for p in files)
    built = sum(p.suffix in (".so", ".cubin") for p in files)
    return (
        f"kernel cache {folder}: {built} built libraries, {len(files)} files, {size / 1e6:.1f} MB"
    )


def clear_cache(folder: Path) -> str:
    """Deletes what the cache holds; the calibration stays."""
    if not folder.is_dir():
        return f"kernel cache {folder}: empty already"
    files = files_of(folder)
    size = sum(p.stat().st_size for p in files)
    for path in files:
        path.unlink(missing_ok=True)
    for path in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        if not any(path.iterdir()):
            path.rmdir()
    return f"kernel cache {folder}: deleted {len(files)} files, {size / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(examine(calibrate=False))
