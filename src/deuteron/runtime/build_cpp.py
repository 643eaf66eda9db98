"""C++ translation units become shared libraries.

In: source text and compiler flags. Out: a loaded library. All kernels of a graph are one unit and
one run of the compiler, which starts as soon as the text exists and runs beside the rest of the
compilation. Results are kept in the cache under everything that decides them: text, flags, compiler
and processor.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

from deuteron.base.errors import BuildError, DeuteronError
from deuteron.base.options import Options
from deuteron.runtime.cache import Cache, key_of


class NoCompiler(DeuteronError):
    """There is no C++ compiler on this machine."""


@cache
def compiler() -> tuple[str, str]:
    """Path of the C++ compiler, and a text that identifies it."""
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            info = os.stat(os.path.realpath(path))
            return path, f"{os.path.realpath(path)} {info.st_size} {info.st_mtime_ns}"
    raise NoCompiler(
        "no C++ compiler was found (c++, g++, clang++): CPU programs run through ATen",
        hint="install one (Debian: apt-get install g++) to have them compiled",
    )


@cache
def processor() -> str:
    """What ``-march=native`` means here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    wanted = ("flags", "Features", "model name", "CPU part")
    found = {x.split(":")[0].strip(): x.split(":", 1)[1] for x in lines if x.startswith(wanted)}
    return " ".join(v for _, v in sorted(found.items()))


_POOL = ThreadPoolExecutor(max_workers=4, thread_name_prefix="deuteron-build")


def submit(source: str, flags: Sequence[str], options: Options) -> Future[Path]:
    """Starts a build; raises `NoCompiler` at once where there is none."""
    compiler()
    return _POOL.submit(build, source, tuple(flags), options)


def build(source: str, flags: Sequence[str], options: Options) -> Path:
    """The shared library of a unit, from the cache or built."""
    path, identity = compiler()
    cache = Cache.open(options)
    key = key_of(source, " ".join(flags), identity, processor())
    found = cache.get(key, ".so")
    if found is not None:
        return found
    with cache.lock(key):
        found = cache.get(key, ".so")
        return found if found is not None else _compile(source, flags, path, cache, key, options)


def _compile(
    source: str, flags: Sequence[str], path: str, cache: Cache, key: str, options: Options
) -> Path:
    with tempfile.TemporaryDirectory(prefix="deuteron-build-") as folder:
        text, out = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
        text.write_text(source)
        command = [path, *flags, str(text), "-o", str(out)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=options.build_timeout,
                stdin=subprocess.DEVNULL,
            )
            output, failed = done.stderr + done.stdout, done.returncode != 0
        except subprocess.TimeoutExpired:
            output, failed = f"no result after {options.build_timeout} s", True
        if failed or not out.exists():
            kept = cache.put(key, ".cpp", source.encode())
            command[-3:] = [str(kept), "-o", os.devnull]
            raise BuildError(
                "the C++ compiler refused generated source",
                hint='please report it; options={"fallback": "aten"} runs the graph through ATen',
                source=str(kept),
                output=output,
                command=" ".join(command),
            )
        return cache.put(key, ".so", out.read_bytes())


@cache
def openmp() -> None:
    """Makes the OpenMP runtime that torch loaded the one that kernels use: two of them would fight
    for the cores, and torch.set_num_threads would reach only one."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return
    for line in maps.splitlines():
        name = line.rpartition("/")[2]
        if name.startswith("libgomp"):
            ctypes.CDLL(line[line.index("/") :], mode=ctypes.RTLD_GLOBAL)
            return


def load(path: Path) -> ctypes.CDLL:
    openmp()
    return ctypes.CDLL(str(path))


__all__ = ["NoCompiler", "build", "load", "submit"]
