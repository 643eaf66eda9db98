"""Calls as CUDA graphs: one launch for all kernels and library calls of a compiled graph.

In: the ``call`` of an emitted module. Out: a ``call`` that does the same. The second time that it
sees some sizes it records (`launch_graph`) and from then on replays. No input is copied: inputs may
be anywhere, results are new tensors in every call and belong to the caller, because a replay takes
the addresses of both; results that a library call allocates itself are copied. Only what is used
inside a call lives in memory that graphs keep.

A recording runs ``call`` twice with tensors that have addresses and no memory. What cannot be
recorded runs as in default mode, and the Record has the reason (decisions on "cudagraph").
"""

from __future__ import annotations

import gc
import math
import struct
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from deuteron.base.options import Options
from deuteron.base.record import Record
from deuteron.codegen.assemble import EmittedModule
from deuteron.graph.random_ops import SEED
from deuteron.runtime.graph_nodes import COPY, FILL, TENSOR_GAP, Place, Refused, match
from deuteron.runtime.launch_graph import (
    ALIGNMENT,
    MISALIGNED,
    NODE_CODE,
    RECORDING,
    Cuda,
    region_bytes,
)
from deuteron.runtime.recordable import MAX_COPIED_BYTES, Recordable

Call = Callable[[list[Any]], Sequence[Any]]

# CUDA graphs per compiled graph, and recorded in its life; other calls run as ever.
MAX_GRAPHS = 16
MAX_RECORDINGS = 64
# Whole numbers of the same size, as which any tensor is copied bit by bit.
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Bytes by which everything moves besides, and `ALIGNMENT`: no part of the distances is a round
# number, as are those between other tensors.
ADDRESS_SKEW = 0x135 << 12
_LOCK = threading.RLock()  # one recording at a time


def with_cuda_graphs(
    call: Call,
    what: Recordable,
    emitted: EmittedModule,
    phase: str,
    options: Options,
    record: Record,
    device: Callable[[int, Options], Any] = Cuda,
) -> Call:
    """`call`, or one that replays it."""
    record.add(
        "decision",
        subject="cudagraph",
        accepted=not what.reason,
        reason="refused" if what.reason else "recorded at the second call",
        detail=what.reason,
    )
    if what.reason:
        return call
    return CudaGraphs(call, what, emitted, device(what.device, options), record).entry_function(
        phase
    )


@dataclass
class Allocation:
    """A tensor that ``call`` asks for."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return extent(self.shape, self.strides) * self.dtype.itemsize


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements of memory from the first to the last of a tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def layout_of(t: Tensor) -> Allocation:
    return Allocation(tuple(t.shape), tuple(t.stride()), t.dtype)


@dataclass
class CallHistory:
    """What is known of the calls with one key: how many, and what they allocate."""

    calls: int = 0
    allocations: list[Allocation] = field(default_factory=list)
    failures: int = 0


class CudaGraphs:
    """All graphs of one ``call``. A key is a stream, sizes, and whether inputs may be overwritten;
    for a key there may be graphs for several alignments of the inputs."""

    def __init__(
        self, call: Call, what: Recordable, emitted: EmittedModule, cuda: Any, record: Record
    ) -> None:
        self.call, self.cuda, self.record, self.what = call, cuda, record, what
        self.device, self.tensors = what.device, what.tensors
        self.launches, self.most_copied = what.launches, what.launches * MAX_COPIED_BYTES
        self.names: dict[str, Any] = call.__globals__  # type: ignore[attr-defined]
        launched = (*(q.name for q in emitted.sequences), *emitted.products)
        self.launchers = {name: self.names[name] for name in launched}
        self.constants = [t for t in emitted.objects.values() if isinstance(t, Tensor)]
        self.table: dict[Any, Call] = {}
        self.seen: dict[Any, CallHistory] = {}
        self.recordings: OrderedDict[Any, Recorded] = OrderedDict()
        self.recorded = 0
        self.off = False

    def entry_function(self, phase: str) -> Call:
        """The function that is called, as text of its own: it runs every time. What came through
        hooks on saved tensors may have other strides than what was recorded."""
        asked = ["keeps_graph()"] if self.what.given else []
        parts = [f"stream({self.device})", *self.what.key, *asked]
        hooks = {
            "forward": "look_for_hooks()",
            "backward": "if HOOKS_SEEN: return through_hooks(args)",
        }
        text = f"""
def call(args):
    {hooks.get(phase, "")}
    before = enter_device({self.device})
    try:
        key = ({", ".join(parts)},)
        replay = table.get(key)
        return miss(key, args) if replay is None else replay(args)
    finally:
        leave_device(before)
"""
        wanted = ("stream", "keeps_graph", "enter_device", "leave_device")
        names = {n: self.names[n] for n in (*wanted, "HOOKS_SEEN", "look_for_hooks")}
        names |= {"table": self.table, "miss": self.miss, "through_hooks": self.through_hooks}
        exec(compile(text, "<deuteron graphs>", "exec"), names)
        out: Call = names["call"]
        out._boxed_call = True  # type: ignore[attr-defined]
        return out

    def __del__(self) -> None:
        # Nobody can call it any more; at the end of the program the driver tidies up itself.
        if not sys.is_finalizing():
            for recorded in self.recordings.values():
                self.cuda.drop(recorded.stream, recorded.replay)

    # -- calls that are not replayed ---------------------------------------------------------------
    def through_hooks(self, args: list[Any]) -> Sequence[Any]:
        if not self.off:
            self.off = True
            self.refuse("a forward ran under hooks on saved tensors")
        return self.call(args)

    def miss(self, key: Any, args: list[Any]) -> Sequence[Any]:
        """A call for which there is no graph."""
        if self.off or self.cuda.is_recording():
            return self.call(args)
        residues = self.residues(args)
        if len(self.seen) > 16 * MAX_RECORDINGS:
            self.seen.clear()
        seen = self.seen.setdefault((key, residues), CallHistory())
        seen.calls += 1
        if seen.calls == 1:
            return self.watched(args, seen)
        with _LOCK:
            recorded = self.recordings.get((key, residues))
            if recorded is None:
                recorded = self.try_to_make(key, residues, args, seen)
            else:
                self.recordings.move_to_end((key, residues))
                self.table[key] = recorded.function
        return self.call(args) if recorded is None else recorded.function(args)

    def try_to_make(
        self, key: Any, residues: tuple[int, ...], args: list[Any], seen: CallHistory
    ) -> Recorded | None:
        if self.off:
            return None
        try:
            recorded = self.make(key, args, seen)
        except Refused as e:
            seen.failures = 2
            self.refuse(e.message)
        except torch.OutOfMemoryError:
            seen.failures += 1
            self.refuse("out of memory while recording")
        except Exception as e:  # noqa: BLE001 - a library call may refuse in any way; it is recorded
            seen.failures += 1
            self.refuse(f"{type(e).__name__}: {e}".splitlines()[0])
        else:
            self.add_recording(key, residues, recorded)
            return recorded
        self.off = seen.failures > 1
        return None

    def stop(self, reason: str) -> None:
        """No graphs any more."""
        self.off = True
        self.table.clear()
        self.refuse(reason)

    def refuse(self, reason: str) -> None:
        self.record.add(
            "decision", subject="cudagraph", accepted=False, reason="refused", detail=reason
        )

    def add_recording(self, key: Any, residues: tuple[int, ...], recorded: Recorded) -> None:
        self.table[key] = recorded.function
        self.recordings[key, residues] = recorded
        self.recorded += 1
        if len(self.recordings) > MAX_GRAPHS:
            (old, _), gone = self.recordings.popitem(last=False)
            if self.table.get(old) is gone.function:
                del self.table[old]
            self.cuda.drop(gone.stream, gone.replay)
        if self.recorded >= MAX_RECORDINGS:
            self.off = True
            self.refuse(f"{self.recorded} recordings: sizes change too often for more")

    def residues(self, args: Sequence[Any]) -> tuple[int, ...]:
        return tuple(args[i].data_ptr() % ALIGNMENT for i in self.tensors)

    def after_failed_replay(self, key: Any, args: list[Any], rc: int) -> Sequence[Any]:
        """A replay did not run: for another alignment there may be another graph."""
        if rc == RECORDING:
            return self.call(args)
        if rc == MISALIGNED:
            recorded = self.recordings.get((key, self.residues(args)))
            if recorded is None or self.table.get(key) is not recorded.function:
                return self.miss(key, args)
            self.stop(f"new tensors are not aligned to {ALIGNMENT} bytes")
            return self.call(args)
        if not self.cuda.recovered(rc):
            number, code = divmod(rc, NODE_CODE)
            recorded = next((r for (k, _), r in self.recordings.items() if k == key), None)
            where = ""
            if number and recorded is not None:
                where = f": it refused new addresses for {recorded.replay.nodes[number - 1].name()}"
            self.stop(f"CUDA error {code} at the launch of a graph{where}")
            return self.call(args)  # which fails too where something is broken
        return self.table[key](args)

    def watched(self, args: list[Any], seen: CallHistory) -> Sequence[Any]:
        """A call as ever, which remembers what it allocates."""
        seen.allocations = []
        usual = self.names["empty_cuda"]

        def empty(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
            seen.allocations.append(Allocation(tuple(shape), tuple(strides), dtype))
            out: Tensor = usual(shape, strides, dtype)
            return out

        return self.with_names({"empty_cuda": empty})(args)

    def with_names(self, changes: Mapping[str, Any]) -> Call:
        """``call`` with other meanings of some names."""
        names = {**self.names, **changes}
        for n, f in self.names.items():
            if isinstance(f, FunctionType) and f.__globals__ is self.names:
                names[n] = FunctionType(f.__code__, names, n)
        out: Call = names["call"]
        return out

    # -- recording ---------------------------------------------------------------------------------
    def make(self, key: Any, args: Sequence[Any], seen: CallHistory) -> Recorded:
        start, stream = perf_counter(), key[0]
        sizes = [n for n, _ in self.spans(args)] + [a.nbytes for a in seen.allocations]
        small = [8] * (len(self.tensors) + 8 * self.launches)
        nbytes = region_bytes([*sizes, *small, self.most_copied])
        regions: list[Any] = []
        try:
            for _ in range(2):
                regions.append(self.cuda.region(nbytes))
            one = Recording(self, args, regions[0], stream, None)
            two = None
            try:
                one.run()
                two = Recording(self, args, regions[1], stream, one)
                two.run()
                replay, order = two.executable(one, regions, args)
            except BaseException:
                if two is not None and two.graph:
                    self.cuda.drop(stream, two.graph)
                raise
            finally:
                if one.graph:
                    self.cuda.drop(stream, one.graph)
        finally:
            for r in regions:
                r.close()
        function = ReplayWriter(self, two, replay, order).function(key)
        moving = len(replay.uses)
        self.record.add(
            "decision",
            subject="cudagraph",
            accepted=True,
            reason="recorded",
            detail=f"{len(replay.nodes)} nodes, {moving} addresses of {len(order)} tensors",
            seconds=perf_counter() - start,
        )
        return Recorded(function, replay, stream)

    def spans(self, args: Sequence[Any]) -> list[tuple[int, int]]:
        """(bytes, address) of each tensor among the arguments."""
        tensors = (args[i] for i in self.tensors)
        return [(layout_of(t).nbytes, t.data_ptr()) for t in tensors]


@dataclass
class Recorded:
    """A graph and the function that replays it."""

    function: Call
    replay: Any
    stream: int


class Recording:
    """One run of ``call`` while its stream is recorded.

    In the first one everything that it allocates has addresses only; from its results follows what
    outlives the call. In the second one the rest has memory, which the graph keeps."""

    def __init__(
        self,
        graphs: CudaGraphs,
        args: Sequence[Any],
        region: Any,
        stream: int,
        first: Recording | None,
    ) -> None:
        self.graphs, self.region, self.stream, self.first = graphs, region, stream, first
        self.graph: Any = 0
        self.args = list(args)
        # Tensors that move from call to call: (what, number) -> its place, and the tensor itself.
        self.places: dict[tuple[str, int], Place] = {}
        self.stand_ins: dict[tuple[str, int], Tensor] = {}
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []  # made before each replay
        self.allocated = 0
        for i in graphs.tensors:
            self.args[i] = self.stand_in("input", i, layout_of(args[i]), args[i].data_ptr())
        self.results: list[Any] = []

    def stand_in(self, what: str, k: int, a: Allocation, address: int = 0) -> Tensor:
        """A tensor with an address and no memory."""
        if not a.nbytes:
            at = self.graphs.cuda.at
            out = torch.empty_strided(a.shape, a.strides, dtype=a.dtype, device=at)
        else:
            more = 0
            if self.first is not None and (what, k) in self.first.places:
                # Each tensor moves by a distance of its own.
                offset = self.first.places[what, k].base - self.first.region.low
                self.region.at = (
                    self.region.low + offset + ADDRESS_SKEW + 2 * TENSOR_GAP * len(self.places)
                )
                more = ALIGNMENT
            place = self.places[what, k] = self.region.allocate(a.nbytes, address, more)
            out = self.graphs.cuda.tensor(place, a.shape, a.strides, a.dtype)
        self.stand_ins[what, k] = out
        return out

    def empty(self, shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        """What ``call`` allocates with."""
        k, self.allocated = self.allocated, self.allocated + 1
        a = Allocation(tuple(shape), tuple(strides), dtype)
        if self.first is not None and k not in self.first.outliving():
            out: Tensor = self.graphs.names["empty_cuda"](shape, strides, dtype)
            return out
        return self.stand_in("result", k, a)

    def before(self, function: Any) -> Callable[..., Tensor]:
        """What stands for a call that each replay makes itself."""

        def seed(*args: Any) -> Tensor:
            k = len(self.calls)
            self.calls.append((function, args))
            return self.stand_in("before", k, Allocation((), (), torch.int64))

        return seed

    def run(self) -> None:
        graphs = self.graphs
        changes: dict[str, Any] = {"empty_cuda": self.empty}
        for name, launcher in graphs.launchers.items():
            changes[name] = graphs.cuda.launching(launcher, self.stream)
        for name, value in graphs.names.items():
            if value is SEED:
                changes[name] = self.before(value)
        call = graphs.with_names(changes)
        collecting = gc.isenabled()
        gc.disable()  # what it frees might be of another stream
        try:
            with graphs.cuda.recording(self.stream) as made:
                self.results = [self.copied_out(r) for r in call(list(self.args))]
            (self.graph,) = made
        finally:
            if collecting:
                gc.enable()

    def copied_out(self, r: Any) -> Any:
        """A result of the call: what a library call has allocated is copied out of the graph."""
        if not isinstance(r, Tensor) or not r.numel():
            return r
        if type(r) is not Tensor or r.layout != torch.strided:
            raise Refused(f"a result is of type {type(r).__name__}, {r.layout}")
        if self.source(r) is not None or self.constant(r):
            return r
        a = layout_of(r)
        copies = [t for (what, _), t in self.stand_ins.items() if what == "copy"]
        nbytes = a.nbytes + sum(layout_of(t).nbytes for t in copies)
        if nbytes > self.graphs.most_copied:
            raise Refused(f"library calls allocate {nbytes >> 20} MB of its results")
        out = self.stand_in("copy", len(copies), a)
        # By a kernel: a copy of memory is a node that can be moved less freely.
        integer = INTEGER_OF_SIZE.get(r.dtype.itemsize)
        if integer is None:
            return out.copy_(r)
        torch.bitwise_or(r.view(integer), 0, out=out.view(integer))
        return out

    def source(self, t: Tensor) -> tuple[str, int] | None:
        """The moving tensor whose memory this one is in."""
        at = t.untyped_storage().data_ptr()
        return next((k for k, p in self.places.items() if p.base == at), None)

    def constant(self, t: Tensor) -> bool:
        at = t.untyped_storage().data_ptr()
        return any(c.untyped_storage().data_ptr() == at for c in self.graphs.constants)

    def outliving(self) -> set[int]:
        """Numbers of the allocations that results lie in."""
        sources = (self.source(r) for r in self.results if isinstance(r, Tensor))
        return {s[1] for s in sources if s is not None and s[0] == "result"}

    def executable(
        self, first: Recording, regions: Sequence[Any], args: Sequence[Any]
    ) -> tuple[Any, list[tuple[str, int]]]:
        """The graph that can be replayed, and the order in which it takes addresses."""
        cuda = self.graphs.cuda
        order = list(self.places)
        if set(order) - set(first.places):
            raise Refused("two recordings of the same call have other results")
        pairs = {k: (first.places[n], self.places[n]) for k, n in enumerate(order)}
        passing = [p for n, p in first.places.items() if n not in self.places]
        nodes = cuda.nodes(self.graph)
        uses = match(cuda.nodes(first.graph), nodes, pairs, passing, (regions[0], regions[1]))
        # What is filled or copied must have memory already when the graph becomes executable.
        needed = {u.tensor for u in uses if nodes[u.node].kind in (COPY, FILL)}
        tensors: dict[int, Tensor] = {}
        for k in needed:
            what, number = order[k]
            t = self.stand_ins[what, number]
            new = self.graphs.names["empty_cuda"]
            tensors[k] = args[number] if what == "input" else new(t.shape, t.stride(), t.dtype)
        now = {k: t.data_ptr() for k, t in tensors.items()}
        return cuda.replay(self.graph, nodes, uses, [self.places[n] for n in order], now), order


class ReplayWriter:
    """Writes the function that replays a graph."""

    def __init__(
        self, graphs: CudaGraphs, recording: Recording, replay: Any, order: list[tuple[str, int]]
    ) -> None:
        self.graphs, self.recording, self.order = graphs, recording, order
        self.names: dict[str, Any] = {
            **{n: graphs.names[n] for n in ("empty_cuda", "view", "as_dtype")},
            "launch": replay.launch,
            "plan": replay.plan,
            "array": struct.Struct(f"{len(order)}q").pack,
            "again": graphs.after_failed_replay,
        }
        self.known: dict[int, str] = {}

    def bind(self, value: Any) -> str:
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name

    def function(self, key: Any) -> Call:
        recording = self.recording
        used = {i for what, i in recording.stand_ins if what == "input"}
        heads = [f"input_{i}" if i in used else "_" for i in range(len(recording.args))]
        lines = [f"({', '.join(heads)},) = args"] if heads else []
        for k, (f, given) in enumerate(recording.calls):
            lines.append(f"before_{k} = {self.bind(f)}(*{self.bind(given)})")
        for (what, k), t in recording.stand_ins.items():
            if what in ("result", "copy"):
                a = layout_of(t)
                size = f"{a.shape}, {a.strides}, {a.dtype}"
                lines.append(f"{what}_{k} = empty_cuda({size})")
        addresses = ", ".join(f"{what}_{k}.data_ptr()" for what, k in self.order)
        lines.append(f"rc = launch(plan, array({addresses}), {key[0]})")
        lines += ["if rc:", f"    return again({self.bind(key)}, args, rc)", "args.clear()"]
        results = "".join(self.result(r) + ", " for r in recording.results)
        lines.append(f"return ({results.rstrip()})")
        text = "\n".join(["def replay(args):", *(f"    {x}" for x in lines), ""])
        self.names["torch"] = torch
        exec(compile(text, "<deuteron replay>", "exec"), self.names)
        out: Call = self.names["replay"]
        return out

    def result(self, r: Any) -> str:
        if not isinstance(r, Tensor):
            exact = (
                r is None
                or isinstance(r, (bool, int))
                or (isinstance(r, float) and math.isfinite(r))
            )
            return repr(r) if exact else self.bind(r)
        recording = self.recording
        for (what, k), t in recording.stand_ins.items():
            if t is r:
                return f"{what}_{k}"
        source = recording.source(r)
        if source is None:
            if not r.numel():
                a = layout_of(r)
                return f"empty_cuda({a.shape}, {a.strides}, {a.dtype})"
            return self.bind(r)
        t = recording.stand_ins[source]
        name = f"{source[0]}_{source[1]}"
        if layout_of(t) == layout_of(r) and t.data_ptr() == r.data_ptr():
            return name
        base = name if t.dtype == r.dtype else f"as_dtype({name}, {r.dtype})"
        offset = (r.data_ptr() - t.data_ptr()) // r.dtype.itemsize
        return f"view({base}, {tuple(r.shape)}, {tuple(r.stride())}, {offset})"


def graphs_of(calls: Iterable[Call]) -> list[CudaGraphs]:
    """The graphs behind functions that `with_cuda_graphs` made."""
    functions = (getattr(c, "__globals__", {}).get("miss") for c in calls)
    return [m.__self__ for m in functions if m is not None]


__all__ = [
    "CudaGraphs",
    "with_cuda_graphs",
    "graphs_of",
]
