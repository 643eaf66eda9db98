"""What Deuteron finds on this machine, what is missing, and what to do about it; calibration.

In: nothing but the machine (and the cache folder of the options). Out: a dictionary of checks and
devices (`doctor`), tables of it and an exit status (`examine`). With `calibrate`, devices are
measured (`tools.calibration`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from deuteron.base.device import CALIBRATION_FILE, device_spec, device_spec_for
from deuteron.base.options import Options
from deuteron.base.package import VERSION
from deuteron.codegen.cpp.prelude import prelude
from deuteron.runtime.cache import Cache
from deuteron.tools import calibration
from deuteron.tools.calibration import build

TESTED_TORCH = ((2, 11), (2, 13))  # oldest and newest that the tests run on
OLDEST_PYTHON = (3, 10)


@dataclass(frozen=True)
class Check:
    """A finding. `status` is ok, warning (works, but ...) or missing (what needs it cannot run)."""

    what: str
    status: str
    finding: str
    hint: str = ""


def doctor(
    calibrate: bool = False, options: Options | None = None, force: bool = False, undo: bool = False
) -> dict[str, Any]:
    """Plain values: `checks` (see `Check`), `devices` (`DeviceSpec.to_dict`), `versions`,
    `calibration`.

    `calibration` is the path of the file that was written, None without `calibrate`. `undo` puts
    back what was there before the last calibration. Raises `CalibrationError` on a busy machine,
    without `force`.
    """
    options = options or Options.make()
    folder = options.cache_folder()
    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    file = folder / CALIBRATION_FILE
    if undo:
        calibration.undo(file)
    written = calibration.calibrate(names, file, force) if calibrate else None
    checks = [_python(), _torch(), _triton(), _compiler(), _cache(folder), *_gpus()]
    return {
        "checks": [asdict(c) for c in checks],
        "devices": [{"device": n, **device_spec_for(n, options).to_dict()} for n in names],
        "versions": versions(),
        "calibration": str(written) if written else None,
    }


def examine(
    calibrate: bool = False, force: bool = False, undo: bool = False, as_json: bool = False
) -> int:
    """Prints what `doctor` finds; 1 where something is missing, else 0."""
    with Console(stderr=True).status("measuring" if calibrate else "looking"):
        report = doctor(calibrate, None, force, undo)
    missing = int(any(c["status"] == "missing" for c in report["checks"]))
    if as_json:
        print(json.dumps(report, indent=1))
        return missing
    console = Console()
    console.print(_checks_table(report["checks"]))
    console.print(_devices_table(report["devices"]))
    if report["calibration"]:
        console.print(
            f"Measured figures, with their spread, are in {report['calibration']}; "
            "`deuteron doctor --undo` goes back.",
            soft_wrap=True,
        )
    return missing


PACKAGES = ("torch", "triton", "filelock", "jinja2", "rich", "typer", "numpy", "sympy", "networkx",
            "transformers")  # fmt: skip


def versions() -> dict[str, str]:
    """Of all that takes part; "" for what is not installed."""
    found = {"deuteron": VERSION, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    found |= {"cuda": torch.version.cuda or "", "driver": _driver(), "g++": _gcc_version()}
    return found | {"system": platform.platform()}


def _driver() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or [""])[0].strip()


def _gcc_version() -> str:
    path = shutil.which("g++")
    if path is None:
        return ""
    asked = [path, "-dumpfullversion"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


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
    start = perf_counter()
    _, error = build(path, prelude(["d_exp"]) + 'extern "C" f32 f(f32 x) { return d_exp(x); }\n')
    if error:
        return Check(
            "C++ compiler", "missing", error[:200], "g++ 11 or newer with OpenMP is needed"
        )
    text = f"g++ {_gcc_version()}, a small unit in {perf_counter() - start:.2f} s"
    return Check("C++ compiler", "ok", text)


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
