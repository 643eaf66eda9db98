"""C++ translation units become loaded libraries.

In: source text and compiler flags. Out: a library. All kernels of a graph are one unit and one run
of the compiler, which starts as soon as the text exists and runs beside the rest of the
compilation. Libraries are kept in the cache under everything that decides them: text, flags,
compiler, processor, and this package's version.

A compiler that hangs is killed after ``build_timeout`` seconds, and one that runs is killed when
the program is interrupted or ends; what it was writing is deleted with the folder it ran in.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import platform
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path

from deuteron.base import package
from deuteron.base.errors import BuildError, DeuteronError
from deuteron.base.options import Options, environment
from deuteron.runtime.cache import Cache, key_of
from deuteron.runtime.workers import awaited

COMPILERS = ("c++", "g++")
# What compilers say, in the language of LC_ALL=C, when a disk is full.
NO_SPACE = ("No space left on device", "Disk quota exceeded")
SHUTDOWN_SECONDS = 2.0  # for builds to tidy up when the program ends


class NoCompiler(DeuteronError):
    """There is no C++ compiler on this machine."""


@cache
def compiler(cxx: str | None = None) -> tuple[tuple[str, ...], str]:
    """The command of the C++ compiler (the option `cxx`, else the first that is found), and a text
    that identifies it."""
    for name in (cxx,) if cxx else COMPILERS:
        # A path may have spaces; what is no program as a whole is a command with arguments.
        parts = [name] if shutil.which(name) else shlex.split(name)
        path = shutil.which(parts[0]) if parts else None
        if path is not None:
            info = os.stat(os.path.realpath(path))
            identity = f"{os.path.realpath(path)} {info.st_size} {info.st_mtime_ns} {parts[1:]}"
            return (path, *parts[1:]), identity
    tried = f"the option cxx is {cxx!r}" if cxx else ", ".join(COMPILERS)
    raise NoCompiler(
        f"no C++ compiler was found ({tried}): CPU programs run through ATen",
        hint="install one (Debian: apt-get install g++) to have them compiled",
    )


@cache
def processor() -> str:
    """What ``-march=native`` means here."""
    wanted = ("flags", "Features", "model name", "CPU part")
    properties: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:  # one core's lines: the file is long and slow on large machines
                if not line.strip() and properties:
                    break
                if line.startswith(wanted):
                    name, _, value = line.partition(":")
                    properties[name.strip()] = value.strip()
    except OSError:
        return platform.processor() + platform.machine()
    return " ".join(v for _, v in sorted(properties.items()))


# --------------------------------------------------------------------------------------- building


class Build:
    """A build that was started; `result` waits for it."""

    def __init__(self, source: str, flags: Sequence[str], options: Options) -> None:
        self.source, self.flags, self.options = source, tuple(flags), options
        self.future: Future[ctypes.CDLL] = Future()
        self.process = os.getpid()
        self.thread = threading.Thread(target=self._run, name="deuteron-build", daemon=True)
        _BUILDS.builds.add(self)
        self.thread.start()

    def _run(self) -> None:
        try:
            with _BUILDS.slots(self.options.worker_count()):
                self.future.set_result(build(self.source, self.flags, self.options))
        except BaseException as e:  # noqa: BLE001 - raised again by `result`
            self.future.set_exception(e)
        finally:
            _BUILDS.builds.discard(self)

    def result(self) -> ctypes.CDLL:
        """The library. Raises `BuildError`. An interrupt while it waits ends the compiler."""
        if os.getpid() != self.process and not self.future.done():
            # Threads do not live on in a forked child.
            return build(self.source, self.flags, self.options)
        try:
            return awaited(self.future)
        except BaseException:
            if not self.future.done():
                _BUILDS.kill(self.thread)
            raise


class _Builds:
    """What runs in this process."""

    def __init__(self) -> None:
        self.reset()
        atexit.register(self.end)
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Also after a fork: builds belong to the parent."""
        self.builds: set[Build] = set()
        self.running: dict[threading.Thread, subprocess.Popen[str]] = {}
        self.limit: threading.BoundedSemaphore | None = None
        self.lock = threading.Lock()
        self.ending = False

    def slots(self, count: int) -> threading.BoundedSemaphore:
        with self.lock:
            if self.limit is None:
                self.limit = threading.BoundedSemaphore(count)
            return self.limit

    def kill(self, thread: threading.Thread) -> None:
        process = self.running.get(thread)
        if process is not None:
            _kill(process)

    def end(self) -> None:
        """The program ends: so do its compilers, and their folders."""
        self.ending = True
        for p in tuple(self.running.values()):
            _kill(p)
        for b in tuple(self.builds):
            b.thread.join(SHUTDOWN_SECONDS)


_BUILDS = _Builds()


def submit(source: str, flags: Sequence[str], options: Options) -> Build:
    """Starts a build; raises `NoCompiler` at once where there is none."""
    compiler(options.cxx)
    return Build(source, flags, options)


def build(source: str, flags: Sequence[str], options: Options) -> ctypes.CDLL:
    """The library of a unit, from the cache or built. Raises `NoCompiler`, `BuildError`."""
    command, identity = compiler(options.cxx)
    cache = Cache.open(options)
    key = key_of(source, " ".join(flags), identity, processor(), package.VERSION)
    command = (*command, *flags)
    try:
        return _load(cache, _built(cache, key, source, command, options))
    except OSError:
        cache.drop(key, ".so")  # it was deleted meanwhile, or does not fit this machine after all
    path = _built(cache, key, source, command, options)
    try:
        return _load(cache, path)
    except OSError as e:
        raise BuildError(
            f"a library that was just built cannot be loaded: {e}",
            hint="where the cache's disk is mounted noexec, set DEUTERON_CACHE_DIR to another",
            source=str(path),
        ) from e


def _built(cache: Cache, key: str, source: str, command: Sequence[str], options: Options) -> Path:
    cached = cache.get(key, ".so")
    if cached is not None:
        return cached
    with cache.lock(key, options.build_timeout + 10.0):
        cached = cache.get(key, ".so")
        if cached is not None:
            return cached
        return cache.put(key, ".so", _compile(source, command, cache, key, options))


def _compile(
    source: str, command: Sequence[str], cache: Cache, key: str, options: Options
) -> bytes:
    """The bytes of the library."""
    output = "no folder to build in: the disks are full or cannot be written"
    with contextlib.closing(cache.workplaces()) as folders:
        for folder in folders:
            text, out = folder / "kernels.cpp", folder / "kernels.so"
            try:
                text.write_text(source, encoding="utf-8")
                output = _run([*command, str(text), "-o", str(out)], folder, options.build_timeout)
                if not output:
                    return out.read_bytes()
            except OSError as e:
                output = str(e)
            if not any(message in output for message in NO_SPACE):
                break
    stored = cache.put(key, ".cpp", source.encode())
    hint = 'please report it; options={"fallback": "aten"} runs the graph through ATen'
    if "clang" in output:
        hint = 'it is clang: the code uses g++\'s vector extensions; options={"cxx": "g++"}'
    raise BuildError(
        "the C++ compiler failed on generated source",
        hint=hint,
        source=str(stored),
        output=output,
        command=shlex.join([*command, str(stored), "-o", os.devnull]),
    )


def _run(command: Sequence[str], folder: Path, seconds: float) -> str:
    """Runs a compiler; returns what went wrong, or nothing. It has a process group of its own, so
    that it ends with all that it started, and its temporary files lie in `folder`."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment(LC_ALL="C", TMPDIR=str(folder)),
        start_new_session=True,
    )
    me = threading.current_thread()
    _BUILDS.running[me] = process
    try:
        if _BUILDS.ending:
            _kill(process)
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"no result after {seconds} s (option build_timeout); it was killed"
    finally:
        _kill(process)
        _BUILDS.running.pop(me, None)
        if process.stdout is not None:
            process.stdout.close()
    if process.returncode:
        return output.strip() or f"exit status {process.returncode}"
    return ""


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends a compiler and what it started; nothing where it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ---------------------------------------------------------------------------------------- loading


@cache
def _openmp() -> None:
    """Makes the OpenMP runtime that torch loaded the one that kernels use: two of them would fight
    for the cores, and torch.set_num_threads would reach only one."""
    # The threads of a team do not live on in a forked child, where the next parallel region would
    # wait for them for ever (in torch's own operators too).
    os.register_at_fork(after_in_child=_one_thread)
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return
    for line in maps.splitlines():
        if line.rpartition("/")[2].startswith("libgomp"):
            ctypes.CDLL(line[line.index("/") :], mode=ctypes.RTLD_GLOBAL)
            return


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _load(cache: Cache, path: Path) -> ctypes.CDLL:
    _openmp()
    return ctypes.CDLL(cache.pinned(path))


__all__ = ["Build", "NoCompiler", "build", "compiler", "submit"]
