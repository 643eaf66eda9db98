"""Triton kernels become binaries.

In: `codegen.triton.generate.TritonKernel`, one of its configurations, and a GPU by compute
capability. Out: a `Binary`: machine code and what its launch needs. Building touches no GPU, so it
runs anywhere, for any GPU: in processes of its own (`submit`), where nothing of torch is imported
and which LLVM may end as it likes. Results are kept in the cache as the code itself and a JSON
file; nothing of Triton is imported where they are found there.

``python -m deuteron.runtime.build_triton FILE`` builds again what could not be built.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from deuteron.base import package
from deuteron.base.cluster import CLUSTER_BYTES
from deuteron.base.errors import BuildError, DeuteronError
from deuteron.base.options import Options
from deuteron.runtime import ptx, workers
from deuteron.runtime.cache import Cache, key_of
from deuteron.runtime.workers import Builder, Task

if TYPE_CHECKING:  # it imports torch, which the building process has no use for
    from deuteron.codegen.triton.generate import Config, TritonKernel

REPORT_HINT = 'please report it; options={"fallback": "aten"} runs the graph through ATen'
BLOCK_REGISTERS = 1 << 16  # that a block may have
# Bytes of shared memory that one program may ask for, by compute capability (CUDA C++ Programming
# Guide, technical specifications).
MAX_SHARED_BYTES = {
    70: 98_304,
    75: 65_536,
    80: 166_912,
    86: 101_376,
    87: 166_912,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    103: 232_448,
    120: 101_376,
    121: 101_376,
}


# Kinds of elements that Triton's compiler numbers otherwise than the driver (its launcher's table).
BOX_KINDS = {8: 10, 9: 8, 10: 9}


class NoTriton(DeuteronError):
    """Triton is not installed."""


class TooLarge(BuildError):
    """A configuration needs more shared memory than a program may have."""


@dataclass(frozen=True)
class Binary:
    """A kernel for one kind of GPU. `num_warps` may not be what was asked for (see `_compile`).
    `shared` is bytes of shared memory. `boxes`: for each of the kernel's how the copy engine lays
    out a block in shared memory: a swizzle, bytes of an element, its kind, elements at once."""

    name: str
    code: bytes
    num_warps: int
    shared: int
    boxes: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Job:
    """Everything that decides a binary, in plain values. `divisible`: parameters that are multiples
    of 16, by number."""

    name: str
    source: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int | None], ...]
    divisible: tuple[int, ...]
    num_warps: int
    num_stages: int
    registers: int
    fp_fusion: bool
    debug: bool
    capability: int

    def key(self) -> str:
        return key_of(repr(self), version(), library_text())


def job_of(kernel: TritonKernel, config: Config, capability: int, aligned: bool, wide: bool) -> Job:
    """A variant of a kernel: for `aligned` pointers and sizes (multiples of 16), for `wide` indices
    (of 64 bits). `capability` is 90 for an H200."""
    return Job(
        kernel.name,
        kernel.source,
        tuple(kernel.signature(wide, aligned).items()),
        tuple(kernel.constants(config, wide, aligned).items()),
        tuple(kernel.params.index(p) for p in kernel.aligned) if aligned else (),
        config.num_warps,
        config.num_stages,
        config.registers,
        kernel.fp_fusion,
        kernel.debug,
        capability,
    )


@cache
def version() -> str:
    """Triton's version without importing it."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("triton")
    except PackageNotFoundError:
        raise NoTriton(
            "Triton is not installed, so nothing can be generated for this GPU",
            hint='pip install triton, or options={"fallback": "aten"}',
        ) from None


@cache
def library_text() -> str:
    """The source of the functions that kernels import, and of what is done to their PTX."""
    folder = package.FOLDER
    names = (
        "libm",
        "atomics",
        "fast",
        "last_bits",
        "merging",
        "exchange",
        "rotated_loads",
        "philox",
    )
    files = [f"codegen/triton/{name}.py" for name in names]
    files += ["base/cluster.py", "runtime/ptx.py", "runtime/buffers.py"]
    return "".join((folder / name).read_text() for name in files)


@lru_cache(maxsize=256)
def module(path: Path) -> ModuleType:
    """The generated module; Triton reads its functions' text from the file."""
    loaded = ModuleType(f"deuteron_kernel_{path.stem}")
    loaded.__file__ = str(path)
    sys.modules[loaded.__name__] = loaded
    # Not by an import, which would leave a compiled file that nobody checks.
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), loaded.__dict__)
    return loaded


# ---------------------------------------------------------------------------------------- building


@cache
def _builder(count: int, seconds: int) -> Builder:
    return Builder(count, seconds)


def prepare(capability: int, count: int, options: Options) -> None:
    """Starts up to `count` processes and has each import and set up what building needs (0.4 s).
    Raises `NoTriton`."""
    version()
    builder = _builder(options.worker_count(), options.build_timeout)
    builder.prepare(count, warm_up, capability, options)


def warm_up(capability: int, options: Options) -> None:
    """Builds nothing of use: Triton is set up afterwards."""
    if workers.serving:
        head = "import triton\nfrom deuteron.codegen.triton import libm\n"
        text = f"{head}\n\n@triton.jit\ndef nothing(p):\n    pass\n"
        job = Job("nothing", text, (("p", "*fp32"),), (), (), 1, 1, 0, True, False, capability)
        _compile(job, Cache.open(options), options)


def submit(
    kernel: TritonKernel,
    config: Config,
    capability: int,
    options: Options,
    aligned: bool = True,
    wide: bool = False,
) -> Task | Binary:
    """Starts a build, unless the cache has it. Raises `NoTriton`."""
    job = job_of(kernel, config, capability, aligned, wide)
    cached = _read(Cache.open(options), job.key())
    if cached is not None:
        return cached
    return _builder(options.worker_count(), options.build_timeout).submit(
        built,
        job,
        options,
        explain=lambda e: _explained(e, job, options),
        # LLVM ends its process over some kernels, with some numbers of warps (seed 65101685).
        others=[(job, options, n) for n in range(len(_warps(job)))],
        size=len(job.source),
    )


def build(
    kernel: TritonKernel,
    config: Config,
    capability: int,
    options: Options,
    aligned: bool = True,
    wide: bool = False,
) -> Binary:
    """The binary of a variant, from the cache or built. Raises `NoTriton`, `BuildError`."""
    started = submit(kernel, config, capability, options, aligned, wide)
    return started if isinstance(started, Binary) else started.result()


def built(job: Job, options: Options, first: int = 0) -> Binary:
    """The binary, from the cache or built in this process. `first`: of the numbers of warps, the
    one to begin with."""
    cache, key = Cache.open(options), job.key()
    with cache.lock(key, options.build_timeout + 10.0):
        cached = _read(cache, key)
        if cached is not None:
            return cached
        code, about = _compile(job, cache, options, first)
        cache.put(key, ".cubin", code)
        cache.put(key, ".json", json.dumps(about).encode())
        return Binary(code=code, **about)


def _read(cache: Cache, key: str) -> Binary | None:
    code, about = cache.get(key, ".cubin"), cache.get(key, ".json")
    if code is None or about is None:
        return None
    try:
        return Binary(code=code.read_bytes(), **json.loads(about.read_text()))
    except FileNotFoundError:  # deleted meanwhile
        return None


def _compile(
    job: Job, cache: Cache, options: Options, first: int = 0
) -> tuple[bytes, dict[str, Any]]:
    """Machine code and what is known of it. What needs more shared memory than a program may have
    gets a shorter pipeline. Raises `TooLarge` where that is not enough."""
    path = cache.put(key_of(job.source), ".py", job.source.encode())
    source = _source(job, path, job.num_stages)
    most = MAX_SHARED_BYTES.get(job.capability, max(MAX_SHARED_BYTES.values())) - CLUSTER_BYTES
    for stages in range(max(1, job.num_stages), 0, -1):
        done = _with_warps(job, source, stages, cache, options, first)
        if done.metadata.shared <= most:
            break
        source = _source(job, path, stages - 1)
    else:
        raise TooLarge(
            f"{job.name} needs {done.metadata.shared} bytes of shared memory; a program may have "
            f"{most}",
            hint=REPORT_HINT,
        )
    about = {
        "name": done.metadata.name,
        "num_warps": done.metadata.num_warps,
        "shared": done.metadata.shared,
        "boxes": [
            [b["swizzle"], b["elem_size"], BOX_KINDS.get(b["elem_type"], b["elem_type"])]
            + list(b["block_size"])
            for b in getattr(done.metadata, "tensordesc_meta", None) or ()
        ],
    }
    return done.asm["cubin"], about


def _source(job: Job, path: Path, stages: int) -> Any:
    """The kernel's text for Triton, with a pipeline of so many stages."""
    from triton.compiler import ASTSource

    constants: dict[str, Any] = dict(job.constants)
    if "STAGES" in constants:
        constants["STAGES"] = min(constants["STAGES"], max(1, stages))
    return ASTSource(
        fn=getattr(module(path), job.name),
        signature=dict(job.signature),
        constexprs=constants,
        attrs={(p,): [["tt.divisibility", 16]] for p in job.divisible},
    )


def _with_warps(
    job: Job, source: Any, stages: int, cache: Cache, options: Options, first: int
) -> Any:
    """What Triton makes of it. Where one of its own passes fails, other numbers of warps are
    tried."""
    import triton
    from triton.backends.compiler import GPUTarget

    # As in eager's kernels, libdevice keeps numbers below the least normal one: the quotient of two
    # is a number, of the zeros that they would become NaN.
    asked = {"num_stages": stages, "enable_fp_fusion": job.fp_fusion, "enable_reflect_ftz": False}
    if job.registers:
        asked["maxnreg"] = job.registers
    if job.debug:
        asked |= {"debug": True, "sanitize_overflow": False}
    target, numbers = GPUTarget("cuda", job.capability, 32), _warps(job)[first:]
    for warps in numbers:
        try:
            with _own_folder(cache):
                return triton.compile(source, target=target, options={**asked, "num_warps": warps})
        except Exception as e:
            # A pass of Triton's that fails on its own layouts does not with others (seeds 41101150,
            # 58000815).
            failed = isinstance(e, RuntimeError) and "PassManager" in str(e)
            if failed and warps != numbers[-1]:
                continue
            raise _explained(
                BuildError(
                    f"Triton refused the generated kernel {job.name}",
                    hint=REPORT_HINT,
                    output=f"{type(e).__name__}: {e}",
                ),
                job,
                options,
            ) from e
    raise AssertionError(f"no number of warps for {job.name}")


def _warps(job: Job) -> list[int]:
    """Those asked for, then fewer, then more, as far as a block's registers allow."""
    sizes = [2**k for k in range(6)]
    more = [n for n in sizes if n > job.num_warps and 32 * n * job.registers <= BLOCK_REGISTERS]
    return [n for n in reversed(sizes) if n <= job.num_warps] + more


_ONE_AT_A_TIME = threading.Lock()


@contextlib.contextmanager
def _own_folder(cache: Cache) -> Iterator[None]:
    """Triton keeps its intermediate files in a folder that is deleted afterwards, not in the user's
    home: the cache has what counts, and there may be no home."""
    from triton import knobs

    with (
        _ONE_AT_A_TIME,
        contextlib.closing(cache.workplaces()) as places,
        knobs.cache.scope(),
        knobs.runtime.scope(),
    ):
        folder = next(places, None)
        if folder is None:
            raise OSError("no folder to build in: the disks are full or cannot be written")
        knobs.cache.dir = str(folder)
        knobs.runtime.add_stages_inspection_hook = ptx.fix_ptx_stage
        if workers.serving:  # elsewhere other threads make temporary files, and use Triton
            tempfile.tempdir = str(folder)
            _skip_key()
        yield


@cache
def _skip_key() -> None:
    """Triton's own cache, which is not used, would read and hash all of Triton first: 0.5 of the
    0.8 s that the first kernel of a process takes."""
    from triton.runtime import cache as triton_cache

    if hasattr(triton_cache, "triton_key"):
        triton_cache.triton_key = version


# ------------------------------------------------------------------------------------------ errors


def _explained(error: BuildError, job: Job, options: Options) -> BuildError:
    """The error with the kernel's source and a command that builds it again."""
    cache = Cache.open(options)
    path = cache.put(key_of(job.source), ".py", job.source.encode())
    file = cache.put(job.key(), ".job.json", json.dumps(asdict(job)).encode())
    command = shlex.join([sys.executable, "-m", "deuteron.runtime.build_triton", str(file)])
    fields = {**error.fields(), "source": str(path), "command": command}
    return type(error)(**fields)


def main(file: Path) -> None:
    """Builds what the file says, whatever the cache has."""
    fields = json.loads(file.read_text())
    for name in ("signature", "constants"):
        fields[name] = tuple((k, v) for k, v in fields[name])
    job = Job(**{**fields, "divisible": tuple(fields["divisible"])})
    binary = built(job, replace(Options.make(), cache=False))
    print(f"{binary.name}: {len(binary.code)} bytes, {binary.num_warps} warps")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

__all__ = ["Binary", "Job", "NoTriton", "TooLarge", "build", "submit"]
