"""Launching Triton kernels with little host time.

In: the kernels between two library calls. Out: a `Sequence`, called with a stream, addresses and
sizes. One call of a small C function launches them all; it is compiled once for the machine and
needs no headers. Which variant of a kernel runs (16-byte alignment, 64-bit indices) and how many
programs it has is decided from addresses and sizes, and remembered per sizes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Ordered
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
from deuteron.codegen.triton.cooperative import FIRST
from deuteron.codegen.triton.generate import TritonKernel
from deuteron.codegen.triton.tiling import MOST_EXCHANGED
from deuteron.ir.index import Sym
from deuteron.runtime import build_cpp
from deuteron.runtime.build_triton import Binary, TooLarge, build, submit
from deuteron.runtime.workers import Task
from deuteron.schedule.cooperative import RESIDENT, resident

SOURCE = """
typedef int (*launch_t)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, void*, void**, void**);
// CUlaunchAttribute and CUlaunchConfig.
struct attribute { int id, none; unsigned value[16]; };
struct configuration {
  unsigned grid[3], block[3], shared; void* stream; attribute* attributes; unsigned count;
};
typedef int (*launch_ex_t)(const configuration*, void*, void**, void**);
// `together`: programs that run at the same time: 0 no matter, 1 all, more: so many, as a cluster.
struct kernel {
  void* function;
  unsigned grid, block, shared;
  int count, aligned, together;
  const int* args;
};

struct sequence {
  launch_t launch; launch_ex_t launch_ex; const kernel* kernels; long long* sizes;
};

// Launches kernels `from` to `to` (excluded). 0, or minus the number (from 1) of a kernel whose
// addresses are not aligned, before anything of it or after it ran, or 1000 * its number + CUDA's
// error.
extern "C" int deuteron_launch(const sequence* q, int from, int to, void** p, void* stream) {
  void* none = 0;
  for (int i = from; i < to; ++i) {
    const kernel* k = q->kernels + i;
    if (!k->grid) continue;
    void** params = (void**)__builtin_alloca(sizeof(void*) * (k->count + 2));
    unsigned long long low = 0;
    for (int j = 0; j < k->count; ++j) {
      int a = k->args[j];
      if (a >= 0) { params[j] = p + a; low |= (unsigned long long)p[a]; }
      else params[j] = q->sizes + (-a - 1);
    }
    if (k->aligned && (low & 15)) return -(i + 1);
    params[k->count] = params[k->count + 1] = &none;
    int rc;
    if (k->together) {
      attribute one = {k->together == 1 ? 2 : 4, 0, {1, 1, 1}};  // cooperative, cluster dimensions
      if (k->together > 1) one.value[0] = k->together;
      configuration c = {{k->grid, 1, 1}, {k->block, 1, 1}, k->shared, stream, &one, 1};
      rc = q->launch_ex(&c, k->function, params, 0);
    } else {
      rc = q->launch(k->function, k->grid, 1, 1, k->block, 1, 1, k->shared, stream, params, 0);
    }
    if (rc) return 1000 * (i + 1) + rc;
  }
  return 0;
}
"""


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint),
        ("block", ctypes.c_uint),
        ("shared", ctypes.c_uint),
        ("count", ctypes.c_int),
        ("aligned", ctypes.c_int),
        ("together", ctypes.c_int),
        ("args", ctypes.POINTER(ctypes.c_int)),
    ]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("none", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Configuration(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


class _Sequence(ctypes.Structure):
    _fields_ = [
        ("launch", ctypes.c_void_p),
        ("launch_ex", ctypes.c_void_p),
        ("kernels", ctypes.POINTER(_Kernel)),
        ("sizes", ctypes.POINTER(ctypes.c_longlong)),
    ]


NO_CONTEXT = 201
# Streams of a device for which there is memory at once: for counters; for words, of so many each,
# and for more words each of fewer streams.
COUNTERS, STREAMS, WORDS, LEAST_STREAMS = 4096, 128, 1 << 14, 4
OUT_OF_MEMORY = 2
PORTABLE_CLUSTER = 8


class LaunchError(DeuteronError):
    """CUDA refused a launch."""


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


FLAGS = ("-O2", "-fPIC", "-shared")


def prepare(options: Options) -> None:
    """Starts the build of the function that launches."""
    build_cpp.submit(SOURCE, FLAGS, options)


@cache
def _launcher(options: Options) -> tuple[Any, int, int]:
    """The C function, and the addresses of the driver's two."""
    lib = build_cpp.build(SOURCE, FLAGS, options)
    driver = _driver()
    address = ctypes.cast(driver.cuLaunchKernel, ctypes.c_void_p).value
    launch_ex = ctypes.cast(driver.cuLaunchKernelEx, ctypes.c_void_p).value
    assert address is not None and launch_ex is not None
    function = lib.deuteron_launch
    function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 2]
    return function, address, launch_ex


@cache
def _loaders() -> ThreadPoolExecutor:
    """Threads that load code: the driver takes 6 ms for a kernel, without Python's lock. A stream
    that another thread records at that time is none of theirs (2: relaxed)."""

    def apart() -> None:
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(2)))

    return ThreadPoolExecutor(2, "deuteron-load", apart)


@dataclass
class Loaded:
    function: int
    block: int
    shared: int
    resident: int = 0  # programs that a device runs at once; 0 where nobody asked


@dataclass
class Prepared:
    """What one call of the C function launches: its address, and what lies behind it."""

    launch: Any
    address: int
    whole: Any
    table: Any
    numbers: Any


class Variants:
    """The binaries of one kernel on one device, built when they are first needed."""

    def __init__(
        self, kernel: TritonKernel, device: torch.device, options: Options, record: Record
    ) -> None:
        self.kernel, self.device, self.options, self.record = kernel, device, options, record
        major, minor = torch.cuda.get_device_capability(device)
        self.capability = major * 10 + minor
        self.loaded: dict[tuple[int, bool, bool], Loaded] = {}
        self.tuned: dict[Any, int] = {}  # what `runtime.tune` has found, by sizes
        # Most calls have aligned addresses and small tensors: that variant is built ahead.
        wide = kernel.wide_source is None and "i64" in kernel.types[len(kernel.types) :]
        count = len(kernel.configs) if options.autotune else 1
        self.ahead: dict[tuple[int, bool, bool], Task | Binary] = {
            (c, True, wide): submit(kernel, kernel.configs[c], self.capability, options, True, wide)
            for c in range(count)
        }
        # What has been built is loaded while Python does other things.
        self.loading: dict[tuple[int, bool, bool], Future[Loaded]] = {
            key: _loaders().submit(self.load, found)
            for key, found in self.ahead.items()
            if isinstance(found, Binary)
        }

    def get(self, aligned: bool, wide: bool, config: int = 0) -> Loaded:
        key = (config, aligned, wide)
        found = self.loaded.get(key)
        if found is None:
            ahead = self.ahead.get(key)
            if ahead is None:
                chosen = self.kernel.configs[config]
                binary = build(self.kernel, chosen, self.capability, self.options, aligned, wide)
            else:
                binary = ahead if isinstance(ahead, Binary) else ahead.result()
            self.note(binary, self.kernel.configs[config].num_warps)
            begun = self.loading.pop(key, None)
            found = self.loaded[key] = self.load(binary) if begun is None else begun.result()
        return found

    def note(self, binary: Binary, asked: int) -> None:
        if binary.num_warps != asked:
            self.record.add(
                "decision",
                subject="warps",
                accepted=False,
                reason="Triton failed",
                detail=f"{self.kernel.name}: {asked} warps; built with {binary.num_warps}",
            )

    def load(self, binary: Binary) -> Loaded:
        """Loads the code into the device's context."""
        driver = _driver()
        enter(self.device)
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
        found = Loaded(function.value, 32 * binary.num_warps, shared)
        if self.kernel.team > 1:
            found.resident = self.resident(function, found, binary.name)
        return found

    def resident(self, function: Any, found: Loaded, name: str) -> int:
        """Programs of whole teams that the device runs at once."""
        driver, count, team = _driver(), ctypes.c_int(0), self.kernel.team
        cores = torch.cuda.get_device_properties(self.device).multi_processor_count
        if not self.kernel.cluster:
            size = ctypes.c_size_t(found.shared)
            rc = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(count), function, found.block, size
            )
            _ok(rc, "asking about", name)
            return min(RESIDENT, count.value) * cores
        if team > PORTABLE_CLUSTER:  # 14: more programs of a cluster than every device has
            _ok(driver.cuFuncSetAttribute(function, 14, 1), "setting up", name)
        dims = _Attribute(4, 0, (team, 1, 1))
        one = (ctypes.c_uint * 3)(found.block, 1, 1)
        grid = (ctypes.c_uint * 3)(team * cores, 1, 1)
        asked = _Configuration(grid, one, found.shared, None, ctypes.pointer(dims), 1)
        rc = driver.cuOccupancyMaxActiveClusters(ctypes.byref(count), function, ctypes.byref(asked))
        _ok(rc, "asking about", name)
        most = resident(found.block // 32, True) * cores
        return min(most // team, count.value) * team


def fitting(variants: Variants, aligned: bool, wide: bool, config: int) -> tuple[int, Loaded]:
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


def enter(device: torch.device) -> None:
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


class Zeros:
    """Memory of a device for each stream that asks for it: `each` elements, 0 at first. Made before
    any kernel runs: a stream that is being recorded could not wait for it."""

    def __init__(self, device: torch.device, dtype: torch.dtype, each: int, streams: int) -> None:
        self.device, self.dtype, self.shape = device, dtype, (streams, each)
        self.pools: list[torch.Tensor] = []
        self.taken: dict[int, int] = {}
        self.lock = Lock()
        self.more()

    def more(self) -> None:
        """Memory for more streams. While AOTAutograd compiles, tensors would be fake."""
        if torch.cuda.is_current_stream_capturing():
            raise LaunchError(
                "kernels whose programs count or wait for one another need memory of their stream, "
                "which cannot be had while it is recorded",
                hint="call the program on the stream once before it is recorded",
            )
        with _disable_current_modes(), torch.cuda.device(self.device):
            self.pools.append(torch.zeros(self.shape, dtype=self.dtype, device=self.device))
            torch.cuda.current_stream().synchronize()

    def of(self, stream: int) -> int:
        """The address of a stream's part."""
        with self.lock:
            number = self.taken.get(stream, len(self.taken))
            pool, place = divmod(number, self.shape[0])
            if pool == len(self.pools):
                self.more()
            self.taken[stream] = number
            return self.pools[pool].data_ptr() + place * self.shape[1] * self.dtype.itemsize


@cache
def _counters(device: torch.device) -> Zeros:
    return Zeros(device, torch.int32, 1, COUNTERS)


@cache
def _words(device: torch.device, each: int) -> Zeros:
    """What programs tell one another in (`codegen.triton.exchange`); of a team, a reduction takes
    `EXCHANGE_ROUNDS` words of a program."""
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    if FIRST + cores * RESIDENT * EXCHANGE_ROUNDS * MOST_EXCHANGED > WORDS:
        raise LaunchError(f"{cores} multiprocessors have more programs than words to exchange")
    return Zeros(device, torch.int64, each, max(LEAST_STREAMS, STREAMS * WORDS // each))


class Sequence:
    """Kernels that run one after the other. `operands[k]` are the numbers of kernel k's tensors in
    the addresses of a call; `names` are the sizes of a call, in order."""

    def __init__(
        self,
        kernels: Ordered[TritonKernel],
        operands: Ordered[Ordered[int]],
        names: Ordered[str],
        device: str,
        options: Options,
        known: dict[tuple[str, str], Variants] | None = None,
        record: Record | None = None,
    ) -> None:
        """`known`: variants by kernel and device, of all sequences of a program: kernels that are
        alike are built and loaded once."""
        self.kernels, self.names = list(kernels), list(names)
        at = torch.device(device)
        known = {} if known is None else known
        for k in kernels:
            if (k.name, device) not in known:
                known[k.name, device] = Variants(k, at, options, record or Record())
        self.variants = [known[k.name, device] for k in kernels]
        self.options = options
        self.device = at
        self.prepared: dict[Any, Prepared] = {}
        self.counts = any(kind == "counter" for k in kernels for kind, _ in k.args)
        self.exchanges = any(kind == "team" for k in kernels for kind, _ in k.args)
        if self.counts:
            _counters(at)
        if self.exchanges:
            _words(at, WORDS) if self.names else self.words({})
        self.arrays: list[Any] = []
        for k, place in zip(kernels, operands, strict=True):
            left = iter(place)
            codes = []
            for kind, what in k.args:
                if kind == "tensor":
                    codes.append(next(left))
                elif kind == "size":
                    codes.append(-self.names.index(_name(what)) - 1)
                else:  # the addresses of the counter and of the words follow the sizes
                    codes.append(-len(self.names) - (1 if kind == "counter" else 2))
            self.arrays.append((ctypes.c_int * max(1, len(codes)))(*codes))
        self.n = len(self.kernels)

    def __call__(self, stream: int, pointers: Any, sizes: tuple[int, ...] = ()) -> None:
        found = self.prepared.get((stream, sizes))
        if found is None:
            found = self.first_call(stream, pointers, sizes)
            if found is None:
                return
        rc = found.launch(found.address, 0, self.n, pointers, stream)
        if rc:
            self.slow(rc, found, pointers, stream, sizes)

    def first_call(self, stream: int, pointers: Any, sizes: tuple[int, ...]) -> Prepared | None:
        """What to launch for new sizes; None where it has been launched already."""
        return self.prepare(stream, sizes)

    def record(self, stream: int, now: int, pointers: Any, sizes: tuple[int, ...]) -> None:
        """Launches on the stream `now`, which is being recorded, what will run on `stream`."""
        found = self.prepared.get((stream, sizes)) or self.prepare(stream, sizes)
        rc = found.launch(found.address, 0, self.n, pointers, now)
        if rc:
            self.slow(rc, found, pointers, now, sizes)

    def words(self, env: dict[str, int]) -> Zeros:
        """What the programs of its kernels tell one another in, for these sizes."""
        most = max(WORDS, *(k.words(env) for k in self.kernels))
        return _words(self.device, 1 << (most - 1).bit_length())

    def own(self, stream: int, sizes: tuple[int, ...]) -> tuple[int, int]:
        """Addresses that belong to a stream: of a zero that its kernels count their programs with,
        and of the words that their programs tell one another in."""
        env = dict(zip(self.names, sizes, strict=True))
        counter = _counters(self.device).of(stream) if self.counts else 0
        return counter, self.words(env).of(stream) if self.exchanges else 0

    def prepare(self, stream: int, sizes: tuple[int, ...]) -> Prepared:
        """The launch table for sizes."""
        env = dict(zip(self.names, sizes, strict=True))
        table = (_Kernel * self.n)()
        for k in range(self.n):
            self.fill(table[k], k, env, self.sizes_aligned(k, env))
        numbers = (ctypes.c_longlong * (len(sizes) + 2))(*sizes, *self.own(stream, sizes))
        found = self.prepared[stream, sizes] = self.bound(table, numbers)
        return found

    def bound(self, table: Any, numbers: Any) -> Prepared:
        launch, driver, launch_ex = _launcher(self.options)
        whole = _Sequence(driver, launch_ex, table, numbers)
        return Prepared(launch, ctypes.addressof(whole), whole, table, numbers)

    def sizes_aligned(self, k: int, env: dict[str, int]) -> bool:
        kernel = self.kernels[k]
        by_param = {
            p: what.name
            for p, (kind, what) in zip(kernel.params, kernel.args, strict=True)
            if kind == "size" and isinstance(what, Sym)
        }
        return all(env[by_param[p]] % 16 == 0 for p in kernel.aligned if p in by_param)

    def fill(
        self, row: Any, k: int, env: dict[str, int], aligned: bool, config: int | None = None
    ) -> None:
        kernel = self.kernels[k]
        first = self.config(k, env) if config is None else config
        chosen, loaded = fitting(self.variants[k], aligned, kernel.is_wide(env), first)
        row.function, row.block, row.shared = loaded.function, loaded.block, loaded.shared
        row.grid = kernel.grid(kernel.configs[chosen], env)
        row.together = 0 if kernel.team == 1 else kernel.team if kernel.cluster else 1
        if row.together:
            row.grid = min(row.grid, loaded.resident // kernel.team * kernel.team)
            if not row.grid and kernel.grid(kernel.configs[chosen], env):
                raise LaunchError(
                    f"{kernel.name} needs {kernel.team} programs at once; the device runs "
                    f"{loaded.resident}"
                )
        row.count, row.aligned = len(kernel.args), int(aligned)
        row.args = ctypes.cast(self.arrays[k], ctypes.POINTER(ctypes.c_int))

    def config(self, k: int, env: dict[str, int]) -> int:
        """The number of the configuration that kernel k runs in."""
        return 0

    def slow(
        self,
        rc: int,
        found: Prepared,
        pointers: Any,
        stream: int,
        sizes: tuple[int, ...],
        end: int | None = None,
    ) -> None:
        """Goes on, up to kernel `end`, with the variant for addresses that are not aligned."""
        own = (_Kernel * self.n)()
        ctypes.memmove(own, found.table, ctypes.sizeof(own))
        env = dict(zip(self.names, sizes, strict=True))
        other = self.bound(own, found.numbers)
        while rc < 0 or rc % 1000 == NO_CONTEXT:
            k = -rc - 1 if rc < 0 else rc // 1000 - 1
            if rc < 0:
                self.fill(own[k], k, env, False)
            else:
                enter(self.device)
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


__all__ = ["LaunchError", "Prepared", "Sequence", "Variants"]
