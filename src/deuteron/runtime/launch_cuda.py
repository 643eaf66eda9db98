"""Launching Triton kernels with little host time.

In: the kernels between two library calls. Out: a `Sequence`, called with a stream, addresses and
sizes. One call of a small C function launches them all; it is compiled once for the machine and
needs no headers. Which variant of a kernel runs (16-byte alignment, 64-bit indices) and how many
programs it has is decided from addresses and sizes, and remembered per sizes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from deuteron.base.cluster import CLUSTER_BYTES, EXCHANGE_ROUNDS
from deuteron.base.errors import DeuteronError
from deuteron.base.options import Options
from deuteron.base.record import Record
from deuteron.codegen.triton.cooperative import FIRST_FLAG
from deuteron.codegen.triton.generate import TritonKernel
from deuteron.codegen.triton.tiling import MAX_EXCHANGED
from deuteron.ir.index import Sym
from deuteron.runtime import build_cpp
from deuteron.runtime.build_triton import Binary, TooLarge, build, submit
from deuteron.runtime.launch_function import SOURCE, Attribute, Configuration, Table, box_rows
from deuteron.runtime.launch_function import Kernel as KernelRow
from deuteron.runtime.workers import Task
from deuteron.schedule.cooperative import PROGRAMS_AT_ONCE, programs_at_once

NO_CONTEXT = 201
# Streams of a device for which there is memory for flags at once, of so many each, and for more
# flags each of fewer streams.
FLAG_STREAMS, FLAGS_PER_STREAM, MIN_FLAG_STREAMS = 128, 1 << 14, 4
OUT_OF_MEMORY = 2
PORTABLE_CLUSTER = 8


class LaunchError(DeuteronError):
    """CUDA refused a launch."""


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


COMPILER_FLAGS = ("-O2", "-fPIC", "-shared")


def prepare(options: Options) -> None:
    """Starts the build of the function that launches."""
    build_cpp.submit(SOURCE, COMPILER_FLAGS, options)


@cache
def _launcher(options: Options) -> tuple[Any, list[int | None]]:
    """The C function, and the addresses of the driver's that it calls."""
    lib = build_cpp.build(SOURCE, COMPILER_FLAGS, options)
    driver = _driver()
    called = (driver.cuLaunchKernel, driver.cuLaunchKernelEx, driver.cuTensorMapEncodeTiled)
    addresses = [ctypes.cast(f, ctypes.c_void_p).value for f in called]
    function = lib.deuteron_launch
    function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 2]
    return function, addresses


@cache
def _loaders() -> ThreadPoolExecutor:
    """Threads that load code: the driver takes 6 ms for a kernel, without Python's lock. A stream
    that another thread records at that time is none of theirs (2: relaxed)."""

    def relax_capture() -> None:
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(2)))

    return ThreadPoolExecutor(2, "deuteron-load", relax_capture)


@dataclass
class LoadedKernel:
    function: int
    block: int
    shared: int
    resident: int = 0  # programs that a device runs at once; 0 where nobody asked
    boxes: Any = None


@dataclass
class LaunchTable:
    """What one call of the C function launches: its address, and what lies behind it."""

    launch: Any
    address: int
    whole: Any
    table: Any
    numbers: Any


class KernelVariants:
    """The binaries of one kernel on one device, built when they are first needed."""

    def __init__(
        self, kernel: TritonKernel, device: torch.device, options: Options, record: Record
    ) -> None:
        self.kernel, self.device, self.options, self.record = kernel, device, options, record
        major, minor = torch.cuda.get_device_capability(device)
        self.capability = major * 10 + minor
        self.loaded: dict[tuple[int, bool, bool], LoadedKernel] = {}
        self.tuned: dict[Any, int] = {}  # what `runtime.tune` has found, by sizes
        # Most calls have aligned addresses and small tensors: that variant is built ahead.
        wide = kernel.wide_source is None and "i64" in kernel.types[len(kernel.types) :]
        count = len(kernel.configs) if options.autotune else 1
        self.prebuilt: dict[tuple[int, bool, bool], Task | Binary] = {
            (c, True, wide): submit(kernel, kernel.configs[c], self.capability, options, True, wide)
            for c in range(count)
        }
        # What has been built is loaded while Python does other things.
        self.loading: dict[tuple[int, bool, bool], Future[LoadedKernel]] = {
            key: _loaders().submit(self.load, task)
            for key, task in self.prebuilt.items()
            if isinstance(task, Binary)
        }

    def get(self, aligned: bool, wide: bool, config: int = 0) -> LoadedKernel:
        key = (config, aligned, wide)
        loaded = self.loaded.get(key)
        if loaded is None:
            built = self.prebuilt.get(key)
            if built is None:
                chosen = self.kernel.configs[config]
                binary = build(self.kernel, chosen, self.capability, self.options, aligned, wide)
            else:
                binary = built if isinstance(built, Binary) else built.result()
            self.note(binary, self.kernel.configs[config].num_warps)
            begun = self.loading.pop(key, None)
            loaded = self.loaded[key] = self.load(binary) if begun is None else begun.result()
        return loaded

    def note(self, binary: Binary, asked: int) -> None:
        if binary.num_warps != asked:
            self.record.add(
                "decision",
                subject="warps",
                accepted=False,
                reason="Triton failed",
                detail=f"{self.kernel.name}: {asked} warps; built with {binary.num_warps}",
            )

    def load(self, binary: Binary) -> LoadedKernel:
        """Loads the code into the device's context."""
        driver = _driver()
        make_current(self.device)
        code, module, function = ctypes.create_string_buffer(binary.code), _out(), _out()
        _ok(driver.cuModuleLoadData(ctypes.byref(module), code), "loading", binary.name)
        name = binary.name.encode()
        _ok(
            driver.cuModuleGetFunction(ctypes.byref(function), module, name), "finding", binary.name
        )
        shared = binary.shared
        if self.kernel.cluster:
            shared = -(-shared // 16) * 16 + CLUSTER_BYTES
        if shared > 48 << 10:  # 8: the most dynamic shared memory that it may ask for
            _ok(driver.cuFuncSetAttribute(function, 8, shared), "setting up", binary.name)
        assert function.value is not None
        loaded = LoadedKernel(function.value, 32 * binary.num_warps, shared)
        loaded.boxes = box_rows(self.kernel, binary) if binary.boxes else None
        if self.kernel.programs_per_row > 1:
            loaded.resident = self.resident(function, loaded, binary.name)
        return loaded

    def resident(self, function: Any, loaded: LoadedKernel, name: str) -> int:
        """Cooperating programs, in whole groups, that the device runs at once."""
        driver, count, programs = _driver(), ctypes.c_int(0), self.kernel.programs_per_row
        cores = torch.cuda.get_device_properties(self.device).multi_processor_count
        if not self.kernel.cluster:
            size = ctypes.c_size_t(loaded.shared)
            rc = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(count), function, loaded.block, size
            )
            _ok(rc, "asking about", name)
            return min(PROGRAMS_AT_ONCE, count.value) * cores
        if programs > PORTABLE_CLUSTER:  # 14: more programs of a cluster than every device has
            _ok(driver.cuFuncSetAttribute(function, 14, 1), "setting up", name)
        dims = Attribute(4, 0, (programs, 1, 1))
        one = (ctypes.c_uint * 3)(loaded.block, 1, 1)
        grid = (ctypes.c_uint * 3)(programs * cores, 1, 1)
        asked = Configuration(grid, one, loaded.shared, None, ctypes.pointer(dims), 1)
        rc = driver.cuOccupancyMaxActiveClusters(ctypes.byref(count), function, ctypes.byref(asked))
        _ok(rc, "asking about", name)
        most = programs_at_once(loaded.block // 32, True) * cores
        return min(most // programs, count.value) * programs


def first_fitting(
    variants: KernelVariants, aligned: bool, wide: bool, config: int
) -> tuple[int, LoadedKernel]:
    """The configuration, or the first of the others that fits the device's shared memory."""
    try:
        return config, variants.get(aligned, wide, config)
    except TooLarge as e:
        refused = e
    kernel = variants.kernel
    for c in range(len(kernel.configs)):
        variants.record.add(
            "decision",
            subject="configuration",
            accepted=False,
            reason="too much shared memory",
            detail=f"{kernel.name}: {kernel.configs[config]}: {refused.message}",
        )
        try:
            if c != config:
                return c, variants.get(aligned, wide, c)
        except TooLarge:
            continue
    raise refused


def make_current(device: torch.device) -> None:
    """Makes the device's context current in this thread: one that never ran anything (autograd's,
    at a backward's first call) has none."""
    driver, context = _driver(), _out()
    rc = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device.index or 0)
    _ok(rc, "the context of", str(device))
    _ok(driver.cuCtxSetCurrent(context), "the context of", str(device))
    driver.cuDevicePrimaryCtxRelease_v2(device.index or 0)


def _out() -> ctypes.c_void_p:
    return ctypes.c_void_p(0)


def _ok(rc: int, what: str, name: str) -> None:
    if rc:
        raise LaunchError(f"CUDA error {rc} at {what} {name}")


class StreamMemory:
    """Memory of a device for each stream that asks for it: `each` elements, 0 at first. Made before
    any kernel runs: a stream that is being recorded could not wait for it."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, elements: int, streams: int
    ) -> None:
        self.device, self.dtype, self.shape = device, dtype, (streams, elements)
        self.pools: list[torch.Tensor] = []
        self.taken: dict[int, int] = {}
        self.lock = Lock()
        self.grow()

    def grow(self) -> None:
        """Memory for more streams. While AOTAutograd compiles, tensors would be fake."""
        if torch.cuda.is_current_stream_capturing():
            raise LaunchError(
                "kernels whose programs wait for one another need memory of their stream, "
                "which cannot be had while it is recorded",
                hint="call the program on the stream once before it is recorded",
            )
        with _disable_current_modes(), torch.cuda.device(self.device):
            self.pools.append(torch.zeros(self.shape, dtype=self.dtype, device=self.device))
            torch.cuda.current_stream().synchronize()

    def address(self, stream: int) -> int:
        """The address of a stream's part."""
        with self.lock:
            number = self.taken.get(stream, len(self.taken))
            pool, slot = divmod(number, self.shape[0])
            if pool == len(self.pools):
                self.grow()
            self.taken[stream] = number
            return self.pools[pool].data_ptr() + slot * self.shape[1] * self.dtype.itemsize


@cache
def _flags(device: torch.device, elements: int) -> StreamMemory:
    """Flags by which programs exchange partial results (`codegen.triton.exchange`); a cooperative
    reduction takes `EXCHANGE_ROUNDS` flags of a program."""
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    if FIRST_FLAG + cores * PROGRAMS_AT_ONCE * EXCHANGE_ROUNDS * MAX_EXCHANGED > FLAGS_PER_STREAM:
        raise LaunchError(f"{cores} multiprocessors have more programs than flags")
    return StreamMemory(
        device,
        torch.int64,
        elements,
        max(MIN_FLAG_STREAMS, FLAG_STREAMS * FLAGS_PER_STREAM // elements),
    )


class Launcher:
    """Kernels that run one after the other. `operands[k]` are the numbers of kernel k's tensors in
    the addresses of a call; `names` are the sizes of a call, in order."""

    def __init__(
        self,
        kernels: Sequence[TritonKernel],
        operands: Sequence[Sequence[int]],
        names: Sequence[str],
        device: str,
        options: Options,
        known: dict[tuple[str, str], KernelVariants] | None = None,
        record: Record | None = None,
    ) -> None:
        """`known`: variants by kernel and device, of all sequences of a program: kernels that are
        alike are built and loaded once."""
        self.kernels, self.names = list(kernels), list(names)
        at = torch.device(device)
        known = {} if known is None else known
        for k in kernels:
            if (k.name, device) not in known:
                known[k.name, device] = KernelVariants(k, at, options, record or Record())
        self.variants = [known[k.name, device] for k in kernels]
        self.options = options
        self.device = at
        self.prepared: dict[Any, LaunchTable] = {}
        self.exchanges = any(kind == "flags" for k in kernels for kind, _ in k.args)
        if self.exchanges:
            _flags(at, FLAGS_PER_STREAM) if self.names else self.flags({})
        self.arrays: list[Any] = []
        for k, numbers in zip(kernels, operands, strict=True):
            left = iter(numbers)
            codes = []
            for kind, what in k.args:
                if kind == "tensor":
                    codes.append(next(left))
                elif kind == "box":
                    codes.append(numbers[k.boxes[len(codes) - len(k.args)].tensor])
                elif kind == "size":
                    codes.append(-self.names.index(_name(what)) - 1)
                else:  # the address of the flags follows the sizes
                    codes.append(-len(self.names) - 1)
            self.arrays.append((ctypes.c_int * max(1, len(codes)))(*codes))
        self.n = len(self.kernels)

    def __call__(self, stream: int, pointers: Any, sizes: tuple[int, ...] = ()) -> None:
        prepared = self.prepared.get((stream, sizes))
        if prepared is None:
            prepared = self.first_call(stream, pointers, sizes)
            if prepared is None:
                return
        rc = prepared.launch(prepared.address, 0, self.n, pointers, stream)
        if rc:
            self.relaunch(rc, prepared, pointers, stream, sizes)

    def first_call(self, stream: int, pointers: Any, sizes: tuple[int, ...]) -> LaunchTable | None:
        """What to launch for new sizes; None where it has been launched already."""
        return self.prepare(stream, sizes)

    def record(self, stream: int, now: int, pointers: Any, sizes: tuple[int, ...]) -> None:
        """Launches on the stream `now`, which is being recorded, what will run on `stream`."""
        prepared = self.prepared.get((stream, sizes)) or self.prepare(stream, sizes)
        rc = prepared.launch(prepared.address, 0, self.n, pointers, now)
        if rc:
            self.relaunch(rc, prepared, pointers, now, sizes)

    def flags(self, env: dict[str, int]) -> StreamMemory:
        """The flags of its kernels' programs, for these sizes."""
        most = max(FLAGS_PER_STREAM, *(k.flag_count(env) for k in self.kernels))
        return _flags(self.device, 1 << (most - 1).bit_length())

    def flags_address(self, stream: int, sizes: tuple[int, ...]) -> int:
        """The address of the flags of its kernels' programs on a stream."""
        env = dict(zip(self.names, sizes, strict=True))
        return self.flags(env).address(stream) if self.exchanges else 0

    def prepare(self, stream: int, sizes: tuple[int, ...]) -> LaunchTable:
        """The launch table for sizes."""
        env = dict(zip(self.names, sizes, strict=True))
        table = (KernelRow * self.n)()
        for k in range(self.n):
            self.fill_row(table[k], k, env, self.sizes_aligned(k, env))
        flags = self.flags_address(stream, sizes)
        numbers = (ctypes.c_longlong * (len(sizes) + 1))(*sizes, flags)
        prepared = self.prepared[stream, sizes] = self.launch_table(table, numbers)
        return prepared

    def launch_table(self, table: Any, numbers: Any) -> LaunchTable:
        launch, called = _launcher(self.options)
        whole = Table(*called, table, numbers)
        return LaunchTable(launch, ctypes.addressof(whole), whole, table, numbers)

    def sizes_aligned(self, k: int, env: dict[str, int]) -> bool:
        kernel = self.kernels[k]
        by_param = {
            p: what.name
            for p, (kind, what) in zip(kernel.params, kernel.args, strict=True)
            if kind == "size" and isinstance(what, Sym)
        }
        return all(env[by_param[p]] % 16 == 0 for p in kernel.aligned if p in by_param)

    def fill_row(
        self, row: Any, k: int, env: dict[str, int], aligned: bool, config: int | None = None
    ) -> None:
        kernel = self.kernels[k]
        first = self.config(k, env) if config is None else config
        chosen, loaded = first_fitting(self.variants[k], aligned, kernel.is_wide(env), first)
        row.function, row.block, row.shared = loaded.function, loaded.block, loaded.shared
        row.grid = kernel.grid(kernel.configs[chosen], env)
        row.cooperative = (
            0 if kernel.programs_per_row == 1 else kernel.programs_per_row if kernel.cluster else 1
        )
        if row.cooperative:
            row.grid = min(
                row.grid, loaded.resident // kernel.programs_per_row * kernel.programs_per_row
            )
            if not row.grid and kernel.grid(kernel.configs[chosen], env):
                raise LaunchError(
                    f"{kernel.name} needs {kernel.programs_per_row} programs at once; the device "
                    f"runs {loaded.resident}"
                )
        row.aligned, row.boxed = int(aligned), len(kernel.boxes) * aligned
        row.count = len(kernel.args) - len(kernel.boxes) + row.boxed
        row.boxes = ctypes.cast(loaded.boxes, ctypes.c_void_p)
        row.args = ctypes.cast(self.arrays[k], ctypes.POINTER(ctypes.c_int))

    def config(self, k: int, env: dict[str, int]) -> int:
        """The number of the configuration that kernel k runs in."""
        return 0

    def relaunch(
        self,
        rc: int,
        prepared: LaunchTable,
        pointers: Any,
        stream: int,
        sizes: tuple[int, ...],
        end: int | None = None,
    ) -> None:
        """Goes on, up to kernel `end`, with the variant for addresses that are not aligned."""
        own = (KernelRow * self.n)()
        ctypes.memmove(own, prepared.table, ctypes.sizeof(own))
        env = dict(zip(self.names, sizes, strict=True))
        other = self.launch_table(own, prepared.numbers)
        while rc < 0 or rc % 1000 == NO_CONTEXT:
            k = -rc - 1 if rc < 0 else rc // 1000 - 1
            if rc < 0:
                self.fill_row(own[k], k, env, False)
            else:
                make_current(self.device)
            rc = other.launch(other.address, k, self.n if end is None else end, pointers, stream)
        if rc:
            number, error = divmod(rc, 1000)
            raise launch_error(error, self.kernels[number - 1].name)


def launch_error(error: int, name: str) -> Exception:
    """What the caller sees of CUDA's error at a launch."""
    if error == OUT_OF_MEMORY:
        return torch.OutOfMemoryError(f"CUDA is out of memory for the launch of {name}")
    return LaunchError(
        f"CUDA error {error} at the launch of {name}",
        hint="errors of earlier kernels appear here too; CUDA_LAUNCH_BLOCKING=1 finds them",
    )


def _name(what: Any) -> str:
    assert isinstance(what, Sym)
    return what.name


__all__ = ["LaunchError", "LaunchTable", "Launcher", "KernelVariants"]
