"""A stand-in for the CUDA driver, for graphs recorded and replayed on a machine without one.

While it records, nothing runs: kernels and library calls become nodes with the addresses that they
were given, some of which have no memory. A replay runs the nodes on the addresses of its call, on
tensors in the host's memory, so results and overwritten memory are those of a GPU.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from deuteron.base.options import Options
from deuteron.runtime.graph_nodes import TENSOR_GAP, Node, Place, Use
from deuteron.runtime.launch_graph import ALIGNMENT

aten = torch.ops.aten
VIEWS = {
    aten.as_strided.default,
    aten.view.dtype,
    aten.view.default,
    aten.detach.default,
    aten.alias.default,
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.set_.source_Storage_storage_offset,
}
_numbers = itertools.count(1)


@dataclass
class Region:
    low: int
    high: int
    at: int
    closed: bool = False

    def allocate(self, nbytes: int, like: int = 0, more: int = 0) -> Place:
        base = -(-self.at // TENSOR_GAP) * TENSOR_GAP + like % ALIGNMENT + more
        self.at = base + nbytes + TENSOR_GAP
        assert self.at <= self.high
        return Place(base, nbytes)

    def close(self) -> None:
        self.closed = True


@dataclass
class Graph:
    nodes: list[Node] = field(default_factory=list)
    keep: list[Tensor] = field(default_factory=list)  # what the pool would hold
    dropped: bool = False


def tensor_at(address: int, like: Tensor) -> Tensor:
    storage = torch._C._construct_storage_from_data_pointer(
        address, torch.device("cpu"), like.untyped_storage().nbytes()
    )
    out: Tensor = torch.empty(0, dtype=like.dtype)
    return out.set_(storage, 0, tuple(like.shape), like.stride())  # type: ignore[call-overload]


class Library(TorchDispatchMode):
    """Calls of ATen become nodes."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in VIEWS:
            return func(*args, **kwargs)
        flat, spec = tree_flatten((args, kwargs))
        given = [k for k, x in enumerate(flat) if isinstance(x, Tensor)]
        writes = func._schema.is_mutable
        results: list[Tensor] = []
        out = kwargs.get("out", args[0] if args else None)
        if not writes:
            meta = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, kwargs))
            shapes, back = tree_flatten(
                func(*meta[0], **{**meta[1], "device": "meta"})
                if "device" in kwargs
                else func(*meta[0], **meta[1])
            )
            results = [
                torch.empty_strided(tuple(m.shape), m.stride(), dtype=m.dtype) for m in shapes
            ]
            self.graph.keep += results
            out = tree_unflatten(results, back)
        tensors = [flat[k] for k in given] + results
        likes = [
            torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device="meta")
            for t in tensors
        ]

        def run(words: Sequence[int]) -> None:
            now = [tensor_at(w, like) for w, like in zip(words, likes, strict=True)]
            again = list(flat)
            for k, t in zip(given, now, strict=False):
                again[k] = t
            a, kw = tree_unflatten(again, spec)
            made = tree_flatten(func(*a, **kw))[0]
            for r, m in zip(now[len(given) :], made, strict=False):
                r.copy_(m)

        what = (str(func), tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors))
        words = [t.data_ptr() for t in tensors]
        self.graph.nodes.append(Node(0, what, words, keep=run))
        return out


class FakeCuda:
    """Stands for `launch_graph.Cuda`. `made` holds all of one test; `fail` makes a recording or a
    replay fail."""

    made: list[FakeCuda] = []

    def __init__(self, device: int, options: Options) -> None:
        self.device, self.at = device, torch.device("cpu")
        self.graphs: list[Graph] = []
        self.regions: list[Region] = []
        self.now: Graph | None = None
        self.patched: list[int] = []  # nodes updated by each replay
        self.fail: BaseException | None = None
        self.codes: list[int] = []  # what the next replays return
        self.made.append(self)

    def region(self, nbytes: int) -> Region:
        low = 0x7000_0000_0000 + next(_numbers) * (1 << 36)
        self.regions.append(Region(low, low + nbytes + (1 << 25), low + (1 << 24)))
        return self.regions[-1]

    def tensor(
        self, place: Place, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        like = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return tensor_at(place.base, like)

    @contextmanager
    def recording(self, stream: int) -> Iterator[list[Graph]]:
        out: list[Graph] = []
        self.now = Graph()
        try:
            with Library(self.now):
                yield out
            if self.fail is not None:
                raise self.fail
            out.append(self.now)
            self.graphs.append(self.now)
        finally:
            self.now = None

    def drop(self, stream: int, graph: Graph | FakeReplay) -> None:
        graph = graph.graph if isinstance(graph, FakeReplay) else graph
        assert not graph.dropped
        graph.dropped = True

    def nodes(self, graph: Graph) -> list[Node]:
        return graph.nodes

    def launching(self, launcher: Any, stream: int) -> Any:
        def launch(now: int, pointers: Any, sizes: tuple[int, ...] = ()) -> None:
            assert self.now is not None
            words = list(struct.unpack(f"{len(pointers) // 8}P", pointers))

            def run(words: Sequence[int]) -> None:
                launcher(stream, struct.pack(f"{len(words)}P", *words), sizes)

            self.now.nodes.append(Node(0, (id(launcher), sizes), words, keep=run))

        return launch

    def replay(
        self,
        graph: Graph,
        nodes: Sequence[Node],
        uses: Sequence[Use],
        places: Sequence[Place],
        now: Mapping[int, int],
    ) -> FakeReplay:
        assert set(now) == {u.tensor for u in uses if nodes[u.node].kind in (1, 2)}
        return FakeReplay(self, graph, nodes, uses, places)

    def is_recording(self) -> bool:
        return False

    def recovered(self, rc: int) -> bool:
        return rc == 201


class FakeReplay:
    """Has what `launch_graph.Replay` has."""

    def __init__(
        self,
        cuda: FakeCuda,
        graph: Graph,
        nodes: Sequence[Node],
        uses: Sequence[Use],
        places: Sequence[Place],
    ) -> None:
        self.cuda, self.graph, self.nodes, self.uses = cuda, graph, list(nodes), list(uses)
        self.current = [p.base for p in places]
        self.plan = self

    def launch(self, plan: Any, array: Any, stream: int) -> int:
        assert not self.graph.dropped and all(r.closed for r in self.cuda.regions)
        if self.cuda.codes:
            return self.cuda.codes.pop(0)
        now = list(struct.unpack(f"{len(self.current)}q", array))
        if any((a ^ b) % ALIGNMENT for a, b in zip(now, self.current, strict=True)):
            return -1
        dirty = set()
        for u in self.uses:
            if now[u.tensor] != self.current[u.tensor]:
                self.nodes[u.node].words[u.word] = now[u.tensor] + u.offset
                dirty.add(u.node)
        self.current = now
        self.cuda.patched.append(len(dirty))
        for n in self.nodes:
            n.keep(n.words)
        return 0
