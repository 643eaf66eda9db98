"""Which configuration of a kernel is fastest, measured in the first call (option `autotune`).

In: kernels with candidate configurations. Out: a `TunedLauncher`, which at the first call for new
sizes launches its kernels one by one; before a kernel runs, its candidates are timed on the very
tensors of the call. What a kernel overwrites and also reads is replaced by a copy meanwhile, so
nothing of the call is changed or lost: without memory for a copy the first candidate is taken. What
was found is kept in the cache, and in the Record (decisions on "autotune").
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deuteron.base.errors import BuildError
from deuteron.base.options import Options
from deuteron.base.record import Record
from deuteron.codegen.assemble import EmittedModule
from deuteron.codegen.products import Product
from deuteron.codegen.triton.generate import TritonKernel
from deuteron.ir.index import evaluate
from deuteron.ir.operations import ITEMSIZE
from deuteron.runtime.cache import Cache, key_of
from deuteron.runtime.launch_blas import BlasError, Multiply, version
from deuteron.runtime.launch_cuda import (
    KernelVariants,
    Launcher,
    LaunchError,
    LaunchTable,
    _driver,
)
from deuteron.runtime.launch_function import Kernel as KernelRow
from deuteron.schedule.kernel import Kernel

# Rounds in which all candidates are timed; microseconds of launches in each; most launches.
ROUNDS, ROUND_US, MAX_LAUNCHES = 3, 200.0, 40
# Another candidate than the first is taken only if it saves this part of its time.
MIN_GAIN = 0.03
PRODUCT_CANDIDATES = 8  # of a matrix product


def timed(launch: Callable[[], None]) -> float:
    """Microseconds of one launch."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count = 2
    while True:
        start.record()
        for _ in range(count):
            launch()
        end.record()
        end.synchronize()
        us = float(start.elapsed_time(end)) * 1000
        if us > ROUND_US / 2 or count >= MAX_LAUNCHES:
            return us / count
        count = max(count * 2, min(MAX_LAUNCHES, int(count * ROUND_US / max(us, 1.0))))


class TunedLauncher(Launcher):
    """Like `launch_cuda.Launcher`. `steps` are the kernels as scheduled, in the same order."""

    def __init__(
        self,
        kernels: Sequence[TritonKernel],
        operands: Sequence[Sequence[int]],
        names: Sequence[str],
        device: str,
        options: Options,
        known: dict[tuple[str, str], KernelVariants],
        steps: Sequence[Kernel],
        record: Record,
    ) -> None:
        super().__init__(kernels, operands, names, device, options, known, record)
        self.operands, self.steps, self.log = operands, list(steps), record

    def config(self, k: int, env: Mapping[str, int]) -> int:
        return self.variants[k].tuned.get(_bucket(self.kernels[k], env), 0)

    def first_call(
        self, stream: int, pointers: bytes, sizes: tuple[int, ...]
    ) -> LaunchTable | None:
        env = dict(zip(self.names, sizes, strict=True))
        open_ = [k for k in range(self.n) if not self.known(k, env)]
        if not open_ or self.recording():
            return self.prepare(stream, sizes)
        table = (KernelRow * self.n)()
        flags = self.flags_address(stream, sizes)
        numbers = (ctypes.c_longlong * (len(sizes) + 1))(*sizes, flags)
        prepared = self.launch_table(table, numbers)
        for k in range(self.n):
            if k in open_ and not self.known(k, env):
                self.tune(k, prepared, pointers, stream, env)
            self.fill_row(table[k], k, env, self.sizes_aligned(k, env))
            rc = prepared.launch(prepared.address, k, k + 1, pointers, stream)
            if rc:
                self.relaunch(rc, prepared, pointers, stream, sizes, k + 1)
        return None

    def recording(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def known(self, k: int, env: Mapping[str, int]) -> bool:
        """Whether the best configuration is known; looks into the cache."""
        kernel, variants = self.kernels[k], self.variants[k]
        bucket = _bucket(kernel, env)
        if len(kernel.configs) == 1 or bucket in variants.tuned:
            return True
        path = self.cache().get(self.key(k, env), ".json")
        if path is None:
            return False
        config = json.loads(path.read_text()).get("config", -1)
        if not 0 <= config < len(kernel.configs):
            return False
        variants.tuned[bucket] = config
        return True

    def cache(self) -> Cache:
        return Cache.open(self.options)

    def key(self, k: int, env: Mapping[str, int]) -> str:
        kernel = self.kernels[k]
        about = repr((kernel.configs, _bucket(kernel, env), self.where()))
        return key_of("tuned", kernel.source, about)

    def where(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).name)

    # -- measuring ---------------------------------------------------------------------------------
    def tune(
        self, k: int, prepared: LaunchTable, pointers: bytes, stream: int, env: dict[str, int]
    ) -> None:
        """Measures the candidates of kernel k, all before which have run."""
        kernel = self.kernels[k]
        try:
            given, copies = self.with_copies(k, pointers, stream, env)
        except torch.OutOfMemoryError:
            self.note(k, 0, [], "no memory for a copy of what it overwrites")
            return
        aligned = self.sizes_aligned(k, env) and all(a % 16 == 0 for a in self.tensors(k, given))
        one = (KernelRow * self.n)()
        launcher = self.launch_table(one, prepared.numbers)
        ready: dict[int, Any] = {}
        for c in range(len(kernel.configs)):
            row = KernelRow()
            try:
                self.fill_row(row, k, env, aligned, c)
                one[k] = row
                self.launch_once(launcher, k, given, stream)
            except (BuildError, LaunchError):
                continue  # it needs more than the device has; the first one always is there
            ready[c] = row
        times = {c: float("inf") for c in ready}
        for _ in range(ROUNDS):
            for c, row in ready.items():
                one[k] = row
                us = self.timed(lambda: self.launch_once(launcher, k, given, stream))
                times[c] = min(times[c], us)
        best = min(times, key=lambda c: times[c], default=0)
        if best and times[best] > (1 - MIN_GAIN) * times.get(0, float("inf")):
            best = 0
        del copies
        self.variants[k].tuned[_bucket(kernel, env)] = best
        every = [times.get(c) for c in range(len(kernel.configs))]
        entry = json.dumps({"config": best, "us": every})
        self.cache().put(self.key(k, env), ".json", entry.encode())
        self.note(k, best, every, "")

    def launch_once(self, launcher: LaunchTable, k: int, pointers: bytes, stream: int) -> None:
        rc = launcher.launch(launcher.address, k, k + 1, pointers, stream)
        if rc:
            raise LaunchError(f"{self.kernels[k].name} does not run here: {rc}")

    def timed(self, launch: Callable[[], None]) -> float:
        return timed(launch)

    def tensors(self, k: int, pointers: bytes) -> list[int]:
        """The addresses of kernel k's tensors."""
        every = struct.unpack(f"{len(pointers) // 8}P", pointers)
        return [every[p] for p in self.operands[k]]

    def with_copies(
        self, k: int, pointers: bytes, stream: int, env: Mapping[str, int]
    ) -> tuple[bytes, list[Any]]:
        """The addresses with which kernel k can run again and again: what it reads and overwrites
        is a copy. And the copies."""
        step = self.steps[k]
        layouts = dict(step.reads) | dict(step.writes)
        names = [str(what) for kind, what in self.kernels[k].args if kind == "tensor"]
        at = dict(zip(names, self.tensors(k, pointers), strict=True))
        read, written = ({at[n] for n, _ in side} for side in (step.reads, step.writes))
        every = list(struct.unpack(f"{len(pointers) // 8}P", pointers))
        copies = []
        for address in sorted(a for a in read & written if a):
            nbytes = max(
                evaluate(lay.extent() + lay.offset, env) * ITEMSIZE[lay.dtype]
                for n, lay in layouts.items()
                if at[n] == address
            )
            copies.append(self.copy(address, nbytes, stream))
            moved = copies[-1].data_ptr()
            every = [moved if a == address else a for a in every]
        return struct.pack(f"{len(every)}P", *every), copies

    def copy(self, address: int, nbytes: int, stream: int) -> torch.Tensor:
        out = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device)
        to, where = ctypes.c_ulonglong(out.data_ptr()), ctypes.c_ulonglong(address)
        size, on = ctypes.c_size_t(nbytes), ctypes.c_void_p(stream)
        rc = _driver().cuMemcpyDtoDAsync_v2(to, where, size, on)
        if rc:
            raise LaunchError(f"CUDA error {rc} at a copy")
        return out

    def note(self, k: int, best: int, us: Sequence[float | None], reason: str) -> None:
        kernel = self.kernels[k]
        shown = [None if t is None else round(t, 2) for t in us]
        self.log.add(
            "decision",
            subject="autotune",
            accepted=best != 0,
            reason=reason or "measured",
            detail=f"{kernel.name}: {kernel.configs[best]}; us of the candidates: {shown}",
        )


def _bucket(kernel: TritonKernel, env: Mapping[str, int]) -> tuple[int, ...]:
    """Sizes for which one measurement counts: those between two powers of two."""
    return tuple(env[n].bit_length() for n in _names(kernel))


def _names(kernel: TritonKernel) -> list[str]:
    return [what.name for kind, what in kernel.args if kind == "size" and not isinstance(what, str)]


class TunedProduct(Multiply):
    """A small matrix product whose candidates are timed in its first call."""

    def __init__(self, product: Product, device: int, options: Options, record: Record) -> None:
        super().__init__(product, device, options)
        self.options, self.log, self.open = options, record, True

    def __call__(self, stream: int, pointers: Any) -> None:
        if self.open and not torch.cuda.is_current_stream_capturing():
            self.open = False
            self.choose(stream, pointers)
        super().__call__(stream, pointers)

    def choose(self, stream: int, pointers: bytes) -> None:
        """Takes the fastest candidate for these tensors; the result is written in each trial."""
        addresses = struct.unpack(f"{len(pointers) // 8}P", pointers)
        if any(a % 256 for a in addresses):
            return
        cache, key = Cache.open(self.options), self.key()
        every = self.candidates(PRODUCT_CANDIDATES)
        path = cache.get(key, ".json")
        if path is not None:
            best = json.loads(path.read_text()).get("candidate", 0)
            self.use(every[best if 0 <= best < len(every) else 0])
            return
        times = []
        for c in every:
            try:
                self.use(c)
                times.append(min(self.timed(stream, pointers) for _ in range(ROUNDS)))
            except (BlasError, torch.OutOfMemoryError):
                times.append(float("inf"))
        best = min(range(len(every)), key=lambda k: times[k])
        if times[best] > (1 - MIN_GAIN) * times[0]:
            best = 0
        self.use(every[best])
        cache.put(key, ".json", json.dumps({"candidate": best}).encode())
        self.log.add(
            "decision",
            subject="autotune",
            accepted=best != 0,
            reason="measured",
            detail=f"{self.product}: us of the candidates: {[round(t, 2) for t in times]}",
        )

    def timed(self, stream: int, pointers: bytes) -> float:
        return timed(lambda: super(TunedProduct, self).__call__(stream, pointers))

    def key(self) -> str:
        return key_of("product", repr(self.product), version(), self.where())

    def where(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).name)


def tuned(
    module: EmittedModule,
    kernels: Mapping[str, TritonKernel],
    steps: Sequence[Kernel],
    variants: dict[tuple[str, str], KernelVariants],
    options: Options,
    record: Record,
) -> dict[str, TunedLauncher | TunedProduct]:
    """What launches a module's kernels and products, by the names under which it finds them: each
    tries its candidates in the first call."""
    scheduled = {k.name: k for k in steps}
    launchers: dict[str, TunedLauncher | TunedProduct] = {}
    for q in module.sequences:
        launched = [kernels[n] for n in q.kernels]
        common = (launched, q.operands, q.sizes, q.device, options, variants)
        launchers[q.name] = TunedLauncher(*common, [scheduled[n] for n in q.kernels], record)
    for name, (product, device) in module.products.items():
        number = torch.device(device).index or 0
        launchers[name] = TunedProduct(product, number, options, record)
    if not module.sequences:
        record.add(
            "decision",
            subject="autotune",
            accepted=False,
            reason="refused",
            detail="kernels of the CPU have one configuration",
        )
    return launchers


__all__ = ["TunedLauncher", "TunedProduct", "tuned"]
