"""Memory of CPU results and workspaces that is not given back and faulted in anew on every call.

In: a layout, or a number of bytes. Out: a tensor with undefined content, alone on its storage.

Fresh memory of some MB costs several times the arithmetic that fills it, because the system maps
and clears it page by page. The pool keeps a block that it handed out, and hands it out again once
nobody else holds its storage: no tensor, view, saved tensor, array, capsule or storage object. A
block whose memory was replaced meanwhile (``resize_``, ``share_memory_``) is let go. What the pool
holds is at most `IDLE_FACTOR` times what was in use at once, and a block that no call has used for
`IDLE_SECONDS` is given back to the system.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from deuteron.memory.plan import MIN_POOLED_BYTES

MIN_BYTES = MIN_POOLED_BYTES
# Bytes from which huge pages are asked for: two of them, so that one whole page lies in the block.
HUGE_BYTES = 4 << 20
HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14
# Idle blocks are let go where the pool would hold more than this times the bytes in use at once.
IDLE_FACTOR = 1.5
IDLE_SECONDS = 10.0
# Layouts whose block lists are remembered; a program with more shapes looks them up again.
MAX_LAYOUTS = 4096

Sizes = tuple[int, ...]

_uses = torch._C._storage_Use_Count
_references = sys.getrefcount
_guards: Any = getattr(torch._C._dynamo, "guards", None)


def _plain_alias(base: Tensor, shape: Any, strides: Any, offset: int) -> Tensor:
    return torch.empty(0, dtype=base.dtype, device="cpu").set_(
        base.untyped_storage(), offset, shape, strides
    )


def _plain_empty(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


# torch's own short ways, half the time: another tensor on the same storage (that is no view to
# autograd), and an empty tensor on the CPU whatever the default device.
_alias = getattr(_guards, "_reinterpret_tensor", _plain_alias)
_empty = getattr(_guards, "_empty_strided_cpu", _plain_empty)


class _Block:
    """A kept tensor over one storage, and what its counts are when nobody else holds it.

    Holders count in two ways: tensors in the storage's own count, Python objects of the storage
    (there is at most one, which all share) in that object's.
    """

    __slots__ = ("address", "base", "cdata", "nbytes", "refs", "stamp", "storage", "uses")

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.base: Tensor = _empty((size,), (1,), dtype)
        self.storage = self.base.untyped_storage()
        self.cdata = self.storage._cdata
        self.nbytes = self.storage.nbytes()
        self.address = self.base.data_ptr()
        self.stamp = 0
        self.uses = _uses(self.cdata)
        self.refs = _references(self.storage)
        _advise(self.address, self.nbytes)

    def free(self) -> bool:
        """Whether nobody else holds it. Nobody can begin to: who would hand it to them?"""
        return _uses(self.cdata) == self.uses and _references(self.storage) == self.refs

    def intact(self) -> bool:
        """Whether its memory is still its own (and private to this process)."""
        return self.base.data_ptr() == self.address and self.storage.nbytes() == self.nbytes


def _advise(address: int, nbytes: int) -> None:
    """Asks for huge pages where the system leaves that to programs."""
    low = -(-address // HUGE_PAGE) * HUGE_PAGE
    high = (address + nbytes) // HUGE_PAGE * HUGE_PAGE
    if nbytes >= HUGE_BYTES and low < high and _MADVISE is not None:
        _MADVISE(low, high - low, MADV_HUGEPAGE)  # advice: refusing it is no error


def _find_madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


_MADVISE = _find_madvise()


class _Bucket:
    """Blocks of one size and dtype. Only methods that the interpreter lock makes atomic touch the
    lists, so calls from several threads never hand out a block twice."""

    __slots__ = ("busy", "dtype", "idle", "size")

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size, self.dtype = size, dtype
        self.idle: list[_Block] = []
        self.busy: deque[_Block] = deque()

    def refresh(self) -> tuple[int, int]:
        """Moves what has become free to `idle`. Returns (bytes in use, bytes let go)."""
        used = lost = 0
        for _ in range(len(self.busy)):
            try:
                b = self.busy.popleft()
            except IndexError:  # another thread took it
                break
            if not b.free():
                used += b.nbytes
                self.busy.append(b)
            elif b.intact():
                self.idle.append(b)
            else:
                lost += b.nbytes
        return used, lost


class HostPool:
    """See the module. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._layouts: dict[Any, _Bucket | None] = {}
        self._stamps = itertools.count(1)
        self._reset()
        os.register_at_fork(after_in_child=self._reset_threads)

    def _reset(self) -> None:
        self._buckets: dict[tuple[int, torch.dtype], _Bucket] = {}
        self._total = 0  # bytes of all blocks
        self._peak = self._recent_peak = 0  # bytes in use at once
        self._mark = 0  # blocks with a lower stamp were not used in the last period
        self._reset_threads()

    def _reset_threads(self) -> None:
        self._lock = threading.RLock()
        self._janitor: threading.Thread | None = None

    def empty_strided(self, shape: Sizes, strides: Sizes, dtype: torch.dtype) -> Tensor:
        """Like ``torch.empty_strided`` on the CPU."""
        key = (shape, strides, dtype)
        try:
            bucket = self._layouts[key]
        except KeyError:
            bucket = self._remember(key)
        if bucket is None:
            return _empty(shape, strides, dtype)
        # Written out, because this is on the path of every call: an idle block, else the one handed
        # out last (often short-lived), else the slow way.
        busy = bucket.busy
        block = None
        try:
            if bucket.idle:
                block = bucket.idle.pop()
            elif busy:
                latest = busy.pop()
                if (
                    _uses(latest.cdata) == latest.uses
                    and _references(latest.storage) == latest.refs
                    and latest.base.data_ptr() == latest.address
                    and latest.storage.nbytes() == latest.nbytes
                ):
                    block = latest
                else:
                    busy.append(latest)
        except IndexError:  # another thread took it
            pass
        if block is None:
            block = self._obtain(bucket)
        block.stamp = next(self._stamps)
        out: Tensor = _alias(block.base, shape, strides, 0)
        busy.append(block)
        return out

    def workspace(self, nbytes: int) -> Tensor:
        """At least so many bytes. Sizes are rounded up to an eighth of a power of two, so that
        programs of changing sizes find blocks too."""
        if nbytes >= MIN_BYTES:
            step = 1 << (nbytes.bit_length() - 4)
            nbytes = -(-nbytes // step) * step
        return self.empty_strided((nbytes,), (1,), torch.uint8)

    def info(self) -> dict[str, int]:
        """Bytes that the pool holds, those of them in use, and blocks."""
        with self._lock:
            used = self._sweep()
            blocks = sum(len(b.idle) + len(b.busy) for b in self._buckets.values())
            return {"bytes": self._total, "used": used, "blocks": blocks}

    def trim(self) -> None:
        """Gives everything that is not in use back to the system."""
        with self._lock:
            self._peak = self._recent_peak = self._sweep()
            self._release(0)

    # -- the slow way: a bucket without a free block ----------------------------------------------

    def _remember(self, key: tuple[Sizes, Sizes, torch.dtype]) -> _Bucket | None:
        shape, strides, dtype = key
        size = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides))
        with self._lock:
            if len(self._layouts) >= MAX_LAYOUTS:
                self._forget()
            bucket = None
            if size * dtype.itemsize >= MIN_BYTES:
                bucket = self._buckets.setdefault((size, dtype), _Bucket(size, dtype))
            self._layouts[key] = bucket
            return bucket

    def _forget(self) -> None:
        """Forgets layouts, and sizes of which there are no blocks."""
        self._layouts.clear()
        for k, b in tuple(self._buckets.items()):
            if not b.idle and not b.busy:
                del self._buckets[k]

    def _obtain(self, bucket: _Bucket) -> _Block:
        """A block that has become free, or a new one."""
        with self._lock:
            self._total -= bucket.refresh()[1]
            try:
                return bucket.idle.pop()
            except IndexError:
                pass
            if self._buckets.setdefault((bucket.size, bucket.dtype), bucket) is not bucket:
                return _Block(bucket.size, bucket.dtype)  # forgotten meanwhile: not kept
            need = bucket.size * bucket.dtype.itemsize
            used = self._sweep()
            self._peak = max(self._peak, used + need)
            self._recent_peak = max(self._recent_peak, used + need)
            self._release(max(0, int(IDLE_FACTOR * self._peak) - need))
            try:
                block = _Block(bucket.size, bucket.dtype)
            except RuntimeError:  # out of memory: what lies idle is given back first
                self._release(0)
                block = _Block(bucket.size, bucket.dtype)
            self._total += block.nbytes
            if self._janitor is None:
                self._janitor = threading.Thread(
                    target=self._tidy, name="deuteron-memory", daemon=True
                )
                self._janitor.start()
            return block

    def _sweep(self) -> int:
        """Finds what has become free; returns the bytes in use."""
        used = 0
        for bucket in self._buckets.values():
            now, lost = bucket.refresh()
            used += now
            self._total -= lost
        return used

    def _release(self, most: int, before: float = float("inf")) -> None:
        """Lets idle blocks go, those first that were used longest ago, until the pool holds at most
        so many bytes; only blocks with a stamp below `before`."""
        if self._total <= most:
            return
        idle = [(b.stamp, k, b) for k in self._buckets.values() for b in tuple(k.idle)]
        for stamp, bucket, block in sorted(idle, key=lambda e: e[0]):
            if self._total <= most or stamp >= before:
                break
            try:
                bucket.idle.remove(block)
            except ValueError:  # another thread took it
                continue
            self._total -= block.nbytes

    def _tidy(self) -> None:
        """The janitor's life: it ends when the pool is empty."""
        while True:
            time.sleep(IDLE_SECONDS / 2)
            with self._lock:
                if self._janitor is not threading.current_thread():
                    return
                used = self._sweep()
                self._release(0, self._mark)
                self._mark = next(self._stamps)
                self._peak, self._recent_peak = max(self._recent_peak, used), used
                if not self._total:
                    self._janitor = None
                    self._forget()
                    return


POOL = HostPool()

__all__ = ["POOL", "HostPool"]
