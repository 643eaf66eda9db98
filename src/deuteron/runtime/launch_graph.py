"""CUDA graphs whose tensors may move: captured once, launched with other addresses.

In: what ``call`` gives a stream, recorded twice with tensors at addresses that stand for those of
later calls (`Region`: reserved, no memory of their own). Out: a `Replay`, which takes the
addresses of a call, rewrites the arguments of those nodes whose tensors have moved since the last
call, and launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from deuteron.base.options import Options
from deuteron.runtime import build_cpp
from deuteron.runtime.graph_nodes import (
    COPY,
    FILL,
    TENSOR_GAP,
    Node,
    Place,
    Refused,
    Use,
    call,
    nodes_of,
)
from deuteron.runtime.launch_cuda import NO_CONTEXT, Launcher, _driver, make_current

# What replay returns when the graph cannot run this call: an address of other alignment than the
# recorded one (which may have decided the kernel), or a stream that is itself being recorded.
MISALIGNED, RECORDING = -1, -2
NODE_CODE = 65536  # other codes are CUDA's, plus this times the number (from 1) of a node
# Addresses are alike modulo this: the most that a library's choice of kernel depends on.
ALIGNMENT = 256
# Around the tensors of a region.
GUARD_BYTES = 16 << 20
PAGE_BYTES = 2 << 20  # the granularity of mapped memory

SOURCE = """
extern "C" int sched_yield(void);
struct use { char* at; long long offset; int tensor, node, half, pad; };
struct node { void* handle; void* params; int kind, dirty; };
struct plan {
  void* exec; void* context;
  node* nodes; use* uses; long long* current;
  const int* first;            // of tensor k's uses; first[tensors] is their number
  int tensors, count, busy, pending, moved;
  int (*capturing)(void*, int*);
  int (*launch)(void*, void*);
  int (*kernel)(void*, void*, void*);
  int (*copy)(void*, void*, void*, void*);
  int (*fill)(void*, void*, void*, void*);
};

static int update(plan* p, const long long* now) {
  for (int k = 0; k < p->tensors; ++k) {
    if (now[k] == p->current[k]) continue;
    p->current[k] = now[k];
    for (int u = p->first[k]; u < p->first[k + 1]; ++u) {
      use* w = p->uses + u;
      if (w->half) *(unsigned*)w->at = (unsigned)(now[k] + w->offset);
      else *(long long*)w->at = now[k] + w->offset;
      p->nodes[w->node].dirty = 1;
      p->pending = 1;
      ++p->moved;
    }
  }
  if (!p->pending) return 0;
  for (int i = 0; i < p->count; ++i) {
    node* n = p->nodes + i;
    if (!n->dirty) continue;
    int rc = n->kind == 0 ? p->kernel(p->exec, n->handle, n->params)
           : n->kind == 1 ? p->copy(p->exec, n->handle, n->params, p->context)
                          : p->fill(p->exec, n->handle, n->params, p->context);
    if (rc) return rc + 65536 * (i + 1);  // which node refused
    n->dirty = 0;
  }
  p->pending = 0;
  return 0;
}

extern "C" int deuteron_replay(plan* p, const long long* now, void* stream) {
  int capturing = 0;
  int rc = p->capturing(stream, &capturing);
  if (rc) return rc;
  if (capturing) return -2;
  for (int k = 0; k < p->tensors; ++k)
    if ((now[k] ^ p->current[k]) & 255) return -1;
  while (__atomic_exchange_n(&p->busy, 1, __ATOMIC_ACQUIRE)) sched_yield();
  rc = update(p, now);
  if (!rc) rc = p->launch(p->exec, stream);
  __atomic_store_n(&p->busy, 0, __ATOMIC_RELEASE);
  return rc;
}
"""


class _Use(ctypes.Structure):
    _fields_ = [
        ("at", ctypes.c_void_p),
        ("offset", ctypes.c_longlong),
        *((n, ctypes.c_int) for n in ("tensor", "node", "half", "pad")),
    ]


class _Node(ctypes.Structure):
    _fields_ = [
        ("handle", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("kind", ctypes.c_int),
        ("dirty", ctypes.c_int),
    ]


class _Plan(ctypes.Structure):
    _fields_ = [
        ("exec", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("nodes", ctypes.POINTER(_Node)),
        ("uses", ctypes.POINTER(_Use)),
        ("current", ctypes.POINTER(ctypes.c_longlong)),
        ("first", ctypes.POINTER(ctypes.c_int)),
        *((n, ctypes.c_int) for n in ("tensors", "count", "busy", "pending", "moved")),
        *((n, ctypes.c_void_p) for n in ("capturing", "launch", "kernel", "copy", "fill")),
    ]


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _MemoryKind(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


# ----------------------------------------------------------------------------------------- regions


@dataclass
class Region:
    """Addresses that nothing else has, for tensors of one recording. They can be read and written
    while the recording lasts (all pages are one and the same), because some calls ask the driver
    about an address; afterwards a kernel that uses one fails."""

    low: int
    high: int
    device: int
    handle: int = 0
    at: int = 0

    @staticmethod
    def reserve(nbytes: int, device: int) -> Region:
        total = -(-(nbytes + 2 * GUARD_BYTES) // PAGE_BYTES) * PAGE_BYTES
        address = ctypes.c_ulonglong(0)
        args = (ctypes.c_size_t(total), ctypes.c_size_t(PAGE_BYTES), ctypes.c_ulonglong(0))
        call("cuMemAddressReserve", ctypes.byref(address), *args, ctypes.c_ulonglong(0))
        region = Region(address.value, address.value + total, device)
        region.at = region.low + GUARD_BYTES
        region.map(nbytes)
        return region

    def map(self, nbytes: int) -> None:
        handle, where = ctypes.c_ulonglong(0), _Location(1, self.device)
        kind = _MemoryKind(1, 0, where)
        page = ctypes.c_size_t(PAGE_BYTES)
        none = ctypes.c_ulonglong(0)
        call("cuMemCreate", ctypes.byref(handle), page, ctypes.byref(kind), none)
        self.handle = handle.value
        for k in range(-(-nbytes // PAGE_BYTES)):
            at = ctypes.c_ulonglong(self.at + k * PAGE_BYTES)
            call("cuMemMap", at, page, ctypes.c_size_t(0), handle, none)
        access = _Access(where, 3)
        size = ctypes.c_size_t(-(-nbytes // PAGE_BYTES) * PAGE_BYTES)
        start = ctypes.c_ulonglong(self.at)
        call("cuMemSetAccess", start, size, ctypes.byref(access), ctypes.c_size_t(1))
        self.mapped = size.value

    def allocate(self, nbytes: int, like: int = 0, more: int = 0) -> Place:
        """A place that is aligned as the address `like` is, `more` bytes further."""
        base = -(-self.at // TENSOR_GAP) * TENSOR_GAP + like % ALIGNMENT + more
        self.at = base + nbytes + TENSOR_GAP
        assert self.at <= self.high
        return Place(base, nbytes)

    def close(self) -> None:
        """Takes the memory away; the addresses stay reserved, so that nothing else gets them."""
        start = ctypes.c_ulonglong(self.low + GUARD_BYTES)
        call("cuMemUnmap", start, ctypes.c_size_t(self.mapped))
        call("cuMemRelease", ctypes.c_ulonglong(self.handle))


def region_bytes(sizes: Sequence[int]) -> int:
    """Bytes that a region needs for tensors of these sizes."""
    return sum(n + 6 * TENSOR_GAP for n in sizes) + PAGE_BYTES


# ------------------------------------------------------------------------------------------ replay


@cache
def _replay(options: Options) -> Any:
    lib = build_cpp.build(SOURCE, ("-O2", "-fPIC", "-shared"), options)
    lib.deuteron_replay.argtypes = [ctypes.c_void_p] * 3
    return lib.deuteron_replay


def _address(name: str) -> int:
    address = ctypes.cast(getattr(_driver(), name), ctypes.c_void_p).value
    assert address is not None
    return address


SET_PARAMS = {COPY: "cuGraphMemcpyNodeSetParams", FILL: "cuGraphMemsetNodeSetParams"}


class Replay:
    """An executable graph. `launch(plan, addresses, stream)` is the function that replays it."""

    def __init__(
        self,
        graph: int,
        nodes: Sequence[Node],
        uses: Sequence[Use],
        places: Sequence[Place],
        now: Mapping[int, int],
        device: int,
        options: Options,
    ) -> None:
        """`now`: addresses of the tensors that nodes fill or copy; those nodes may move only among
        such as have memory when the graph becomes executable."""
        self.launch = _replay(options)
        self.nodes, self.uses = list(nodes), list(uses)  # nodes hold the arguments
        for u in uses:
            n = nodes[u.node]
            if n.kind in SET_PARAMS:
                at = ctypes.c_longlong.from_address(n.at[u.word])
                at.value = now[u.tensor] + u.offset
        for n in nodes:
            if n.kind in SET_PARAMS:
                call(SET_PARAMS[n.kind], ctypes.c_void_p(n.handle), ctypes.byref(n.params))
        self.exec = ctypes.c_void_p(0)
        flags = ctypes.c_ulonglong(1 | 8)  # free on launch, priorities of nodes
        handle = ctypes.c_void_p(graph)
        call("cuGraphInstantiateWithFlags", ctypes.byref(self.exec), handle, flags)
        context = ctypes.c_void_p(0)
        call("cuCtxGetCurrent", ctypes.byref(context))
        ordered = sorted(uses, key=lambda u: (u.tensor, u.node, u.word))
        rows = [
            _Use(
                nodes[u.node].at[u.word] + 4 * max(u.half, 0),
                u.offset,
                u.tensor,
                u.node,
                u.half >= 0,
            )
            for u in ordered
        ]
        first = [0] * (len(places) + 1)
        for u in ordered:
            first[u.tensor + 1] += 1
        for k in range(len(places)):
            first[k + 1] += first[k]
        arrays = (
            (_Node * max(1, len(nodes)))(
                *(_Node(n.handle, ctypes.addressof(n.params), n.kind, 0) for n in nodes)
            ),
            (_Use * max(1, len(rows)))(*rows),
            (ctypes.c_longlong * max(1, len(places)))(*(p.base for p in places)),
            (ctypes.c_int * len(first))(*first),
        )
        self.arrays = arrays
        self.table = _Plan(
            self.exec, context, *arrays, len(places), len(nodes), 0, 0, 0,
            *map(_address, (
                "cuStreamIsCapturing", "cuGraphLaunch", "cuGraphExecKernelNodeSetParams_v2",
                "cuGraphExecMemcpyNodeSetParams", "cuGraphExecMemsetNodeSetParams",
            )),
        )  # fmt: skip
        self.plan = ctypes.addressof(self.table)
        self.device = device
        self.graph = handle

    @property
    def moved(self) -> int:
        """Arguments rewritten so far."""
        return int(self.table.moved)

    def close(self) -> None:
        """Gives the graph back. What was launched runs to its end."""
        driver = _driver()
        driver.cuGraphExecDestroy(self.exec)
        driver.cuGraphDestroy(self.graph)


# ---------------------------------------------------------------------------------------- recording


class Recorder:
    """Records what one stream is given, in a stream and a pool of memory of its own. Graphs that
    run on the same stream never run at once, so they share what they need for themselves."""

    def __init__(self, device: int) -> None:
        self.device = device
        stream = ctypes.c_void_p(0)
        call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))  # waits for no other
        assert stream.value is not None
        self.raw = stream.value
        self.stream = torch.cuda.ExternalStream(self.raw, torch.device("cuda", device))
        self.pool: Any = None
        self.graphs = 0

    @contextmanager
    def recording(self) -> Iterator[list[int]]:
        """The list holds the graph once the block has ended; `drop` gives back its memory."""
        out: list[int] = []
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        begin = getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None)
        if begin is None or clear is None:
            raise Refused("this torch does not let others record graphs")
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = ctypes.c_void_p(0)
        # The libraries' workspaces must be the graph's own: others may be freed at any time.
        clear()
        with torch.cuda.stream(self.stream):
            begin(self.device, self.pool)
            self.graphs += 1
            try:
                # Other threads may do as they please.
                call("cuStreamBeginCapture_v2", ctypes.c_void_p(self.raw), ctypes.c_int(1))
                done = False
                try:
                    yield out
                    done = True
                finally:
                    raw = ctypes.c_void_p(self.raw)
                    rc = _driver().cuStreamEndCapture(raw, ctypes.byref(graph))
                    if graph.value and (rc or not done):
                        _driver().cuGraphDestroy(graph)
                if rc or not graph.value:
                    raise Refused(f"CUDA error {rc} at the end of a recording")
                out.append(graph.value)
            finally:
                torch._C._cuda_endAllocateToPool(self.device, self.pool)
                clear()
                if not out:
                    self.drop()

    def drop(self) -> None:
        torch._C._cuda_releasePool(self.device, self.pool)
        self.graphs -= 1
        if not self.graphs:
            self.pool = None


class Cuda:
    """Recording and replaying on one device; tests have a stand-in."""

    recorders: dict[tuple[int, int], Recorder] = {}

    def __init__(self, device: int, options: Options) -> None:
        self.device, self.options = device, options
        self.at = torch.device("cuda", device)

    def region(self, nbytes: int) -> Region:
        return Region.reserve(nbytes, self.device)

    def tensor(
        self, place: Place, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        storage = torch._C._construct_storage_from_data_pointer(place.base, self.at, place.nbytes)
        out: torch.Tensor = torch.empty(0, dtype=dtype, device=self.at)
        return out.set_(storage, 0, shape, strides)  # type: ignore[call-overload]

    @contextmanager
    def recording(self, stream: int) -> Iterator[list[int]]:
        with self.recorder(stream).recording() as out:
            yield out

    def recorder(self, stream: int) -> Recorder:
        recorder = self.recorders.get((self.device, stream))
        if recorder is None:
            recorder = self.recorders[self.device, stream] = Recorder(self.device)
        return recorder

    def drop(self, stream: int, graph: int | Replay) -> None:
        """Gives a graph back, executable or not."""
        if isinstance(graph, Replay):
            graph.close()
        else:
            _driver().cuGraphDestroy(ctypes.c_void_p(graph))
        self.recorder(stream).drop()

    def nodes(self, graph: int) -> list[Node]:
        return nodes_of(graph)

    def launching(self, launcher: Launcher, stream: int) -> Any:
        """Launches kernels as on `stream`, whichever stream is recorded."""

        def launch(now: int, pointers: Any, sizes: tuple[int, ...] = ()) -> None:
            launcher.record(stream, now, pointers, sizes)

        return launch

    def replay(
        self,
        graph: int,
        nodes: Sequence[Node],
        uses: Sequence[Use],
        places: Sequence[Place],
        now: Mapping[int, int],
    ) -> Replay:
        return Replay(graph, nodes, uses, places, now, self.device, self.options)

    def is_recording(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def recovered(self, rc: int) -> bool:
        """Whether a launch that returned this code may be tried again."""
        if rc % NODE_CODE == NO_CONTEXT:
            make_current(torch.device("cuda", self.device))
        return rc % NODE_CODE == NO_CONTEXT


__all__ = [
    "ALIGNMENT",
    "MISALIGNED",
    "NODE_CODE",
    "RECORDING",
    "Cuda",
    "Region",
    "Replay",
    "region_bytes",
]
