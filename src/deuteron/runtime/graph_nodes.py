"""The nodes of a recorded CUDA graph and the addresses among their arguments.

In: graphs that the driver recorded, with tensors at known places. Out: `Node`s with copies of their
arguments as 8-byte words, and the `Use`s: which word is the address of which tensor.

An argument belongs to a tensor when it lies in the tensor's region in both of two recordings and
moved by exactly as much as the tensor did; so does half of an argument that moved as the lower half
of the tensor's address (libraries leave such in the gaps of their structs). What did not move is no
address. Where a region appears in any other way, the graph is refused (`Refused`). All of this is
the driver's C interface: nothing of torch's is assumed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deuteron.base.errors import DeuteronError
from deuteron.runtime.launch_cuda import _driver

# Between the tensors of a region: kernels keep pointers before and behind a tensor.
TENSOR_GAP = 4096
HALF_RANGE = 2**32  # what half a word counts to


class Refused(DeuteronError):
    """A recording that cannot be replayed with other addresses."""


class _KernelParams(ctypes.Structure):
    _fields_ = [
        ("func", ctypes.c_void_p),
        *((n, ctypes.c_uint) for n in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("params", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.POINTER(ctypes.c_void_p)),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    ]


def _end(side: str) -> list[tuple[str, Any]]:
    names = ("x", "y", "z", "lod")
    return [
        *((f"{side}_{n}", ctypes.c_size_t) for n in names),
        (f"{side}_type", ctypes.c_int),
        *((f"{side}_{n}", ctypes.c_void_p) for n in ("host", "device", "array", "reserved")),
        *((f"{side}_{n}", ctypes.c_size_t) for n in ("pitch", "height")),
    ]


class _CopyParams(ctypes.Structure):
    _fields_ = [
        *_end("src"),
        *_end("dst"),
        *((n, ctypes.c_size_t) for n in ("width", "height", "depth")),
    ]


class _FillParams(ctypes.Structure):
    _fields_ = [
        ("dst", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("size", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


def call(name: str, *args: Any) -> None:
    function = getattr(_driver(), name, None)
    if function is None:
        raise Refused(f"this driver has no {name}; CUDA 12.4 has")
    rc = function(*args)
    if rc:
        raise Refused(f"CUDA error {rc} of {name}")


@dataclass(frozen=True)
class Place:
    """A tensor's addresses in a region, from `base`."""

    base: int
    nbytes: int


class Span(Protocol):
    """Addresses from `low` to `high`, of which nothing else has any."""

    low: int
    high: int


@dataclass
class Node:
    """What is launched, and its arguments as 8-byte words; `keep` holds the memory they lie in."""

    kind: int
    what: Any
    words: list[int]  # their values
    at: list[int] = field(default_factory=list)  # and addresses
    handle: int = 0
    params: Any = None
    keep: Any = None

    def name(self) -> str:
        """What a reader knows it by."""
        if self.kind != KERNEL:
            return {COPY: "a copy", FILL: "a fill"}[self.kind]
        ask = getattr(_driver(), "cuFuncGetName", None)
        text = ctypes.c_char_p(None)
        if (
            ask is None
            or not self.params.func
            or ask(ctypes.byref(text), ctypes.c_void_p(self.params.func))
        ):
            return "a kernel"
        return (text.value or b"a kernel").decode(errors="replace")


KERNEL, COPY, FILL, EMPTY = 0, 1, 2, 5
BUFFER, BUFFER_SIZE = 1, 2  # names in a kernel's list of extra arguments
NODE_KIND_NAMES = {
    3: "a call on the host",
    4: "a graph",
    10: "an allocation",
    11: "a release of memory",
}


def nodes_of(graph: int) -> list[Node]:
    """The nodes of a recorded graph, in order of creation, with copies of their arguments."""
    count = ctypes.c_size_t(0)
    handle = ctypes.c_void_p(graph)
    call("cuGraphGetNodes", handle, None, ctypes.byref(count))
    handles = (ctypes.c_void_p * max(1, count.value))()
    call("cuGraphGetNodes", handle, handles, ctypes.byref(count))
    out = []
    for h in (n or 0 for n in handles[: count.value]):
        kind = ctypes.c_int(0)
        call("cuGraphNodeGetType", ctypes.c_void_p(h), ctypes.byref(kind))
        if kind.value == EMPTY:
            continue
        read = {KERNEL: _kernel, COPY: _copy, FILL: _fill}.get(kind.value)
        if read is None:
            name = NODE_KIND_NAMES.get(kind.value, f"node type {kind.value}")
            raise Refused(f"the recording holds {name}, which has no addresses to update")
        node = read(h)
        node.handle = h
        out.append(node)
    return out


def _kernel(h: int) -> Node:
    params = _KernelParams()
    call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(h), ctypes.byref(params))
    if not params.params:
        return _buffer_kernel(params)
    sizes = _argument_sizes(params)
    pads = [-(-n // 16) * 16 for n in sizes]
    memory = (ctypes.c_longlong * (sum(pads) // 8 + 1))()
    start = ctypes.addressof(memory)
    own = (ctypes.c_void_p * max(1, len(sizes)))()
    at: list[int] = []
    for k, (size, pad) in enumerate(zip(sizes, pads, strict=True)):
        ctypes.memmove(start, params.params[k], size)
        own[k] = start
        at += range(start, start + size - 7, 8)
        start += pad
    params.params = ctypes.cast(own, ctypes.POINTER(ctypes.c_void_p))
    return Node(KERNEL, _identity(params), _words(at), at, params=params, keep=(memory, own))


def _buffer_kernel(params: _KernelParams) -> Node:
    """A kernel whose arguments are one buffer, given by a list of names and values."""
    arguments: dict[int, int] = {}
    k = 0
    while params.extra and params.extra[k]:
        arguments[params.extra[k] or 0] = params.extra[k + 1] or 0
        k += 2
    if not arguments:
        return Node(KERNEL, _identity(params), [], params=params)
    if set(arguments) != {BUFFER, BUFFER_SIZE}:
        raise Refused(
            f"a kernel whose arguments are given in a way of its own: {sorted(arguments)}"
        )
    size = ctypes.c_size_t.from_address(arguments[BUFFER_SIZE])
    memory = (ctypes.c_longlong * (size.value // 8 + 1))()
    start = ctypes.addressof(memory)
    ctypes.memmove(start, arguments[BUFFER], size.value)
    own_size = ctypes.c_size_t(size.value)
    own = (ctypes.c_void_p * 5)(BUFFER, start, BUFFER_SIZE, ctypes.addressof(own_size), None)
    params.extra = ctypes.cast(own, ctypes.POINTER(ctypes.c_void_p))
    at = list(range(start, start + size.value - 7, 8))
    keep = (memory, own, own_size)
    return Node(KERNEL, _identity(params), _words(at), at, params=params, keep=keep)


def _identity(p: _KernelParams) -> tuple[Any, ...]:
    return (p.func or p.kern, p.gx, p.gy, p.gz, p.bx, p.by, p.bz, p.shared)


_ARGUMENT_SIZES: dict[int, list[int]] = {}


def _argument_sizes(params: _KernelParams) -> list[int]:
    """Bytes of each argument of a kernel."""
    function, name = int(params.func or 0), "cuFuncGetParamInfo"
    if not function:
        function, name = int(params.kern or 0), "cuKernelGetParamInfo"
    sizes = _ARGUMENT_SIZES.get(function)
    if sizes is None:
        ask = getattr(_driver(), name, None)
        if ask is None:
            raise Refused(f"this driver has no {name}; CUDA 12.4 has")
        sizes = []
        offset, size = ctypes.c_size_t(0), ctypes.c_size_t(0)
        refs = ctypes.byref(offset), ctypes.byref(size)
        while not ask(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), *refs):
            sizes.append(size.value)
        _ARGUMENT_SIZES[function] = sizes
    return sizes


def _words(at: Sequence[int]) -> list[int]:
    return [ctypes.c_longlong.from_address(a).value for a in at]


def _copy(h: int) -> Node:
    params = _CopyParams()
    call("cuGraphMemcpyNodeGetParams", ctypes.c_void_p(h), ctypes.byref(params))
    if params.src_type == 1 or params.dst_type == 1:
        raise Refused("a copy from or to the host's memory")
    base = ctypes.addressof(params)
    at = [base + _CopyParams.src_device.offset, base + _CopyParams.dst_device.offset]
    what = (params.width, params.height, params.depth)
    return Node(COPY, what, _words(at), at, params=params)


def _fill(h: int) -> Node:
    params = _FillParams()
    call("cuGraphMemsetNodeGetParams", ctypes.c_void_p(h), ctypes.byref(params))
    at = [ctypes.addressof(params) + _FillParams.dst.offset]
    what = (params.value, params.size, params.width, params.height, params.pitch)
    return Node(FILL, what, _words(at), at, params=params)


@dataclass(frozen=True)
class Use:
    """Word `word` of node `node` is the address of tensor `tensor`, plus `offset` bytes; or its
    lower (0) or upper (1) `half` is the lower half of that."""

    node: int
    word: int
    tensor: int
    offset: int
    half: int = -1


def match(
    first: Sequence[Node],
    second: Sequence[Node],
    places: Mapping[int, tuple[Place, Place]],
    passing: Sequence[Place],
    regions: Sequence[Span],
) -> list[Use]:
    """The words of `second` that are addresses of tensors. `places`: each tensor's place in both
    recordings; `passing`: places in the first one of what the second has in memory of its own.
    Raises `Refused`."""
    if len(first) != len(second) or any(a.what != b.what for a, b in zip(first, second)):
        raise Refused("two recordings of the same call are not the same kernels")
    moved: dict[int, int] = {}
    for k, (was, is_) in places.items():
        if is_.base - was.base in moved:
            raise Refused("two tensors moved by the same distance")
        moved[is_.base - was.base] = k
    out = []
    before, after = regions
    disguises = Disguises(moved)
    for i, (one, two) in enumerate(zip(first, second, strict=True)):
        for j, (a, b) in enumerate(zip(one.words, two.words, strict=True)):
            if a == b:
                continue
            if after.low <= b < after.high:
                tensor = moved.get(b - a)
                if tensor is None:
                    raise Refused(f"argument {j} of node {i} moved unlike any tensor")
                out.append(Use(i, j, tensor, b - places[tensor][1].base))
            elif before.low <= a < before.high:
                if not any(
                    p.base - TENSOR_GAP < a < p.base + p.nbytes + TENSOR_GAP for p in passing
                ):
                    raise Refused(f"argument {j} of node {i} lost its tensor")
            elif (half := disguises.half(a, b, places)) is not None:
                out.append(Use(i, j, *half))
            elif disguises.shows(a, b):
                raise Refused(f"argument {j} of node {i} may be an address in disguise")
    return out


class Disguises:
    """Ways in which a word that is no address may hold one. `moved`: distance -> tensor."""

    def __init__(self, moved: Mapping[int, int]) -> None:
        self.lower = {d % HALF_RANGE: k for d, k in moved.items()}
        self.parts = {(d >> s) % HALF_RANGE for d in moved for s in range(13)} - {0}
        self.upper = {(d >> 32) % HALF_RANGE for d in moved} - {0}

    def half(
        self, a: int, b: int, places: Mapping[int, tuple[Place, Place]]
    ) -> tuple[int, int, int] | None:
        """(tensor, offset, half) where one half is the lower half of an address, and the other one
        did not move."""
        moves = _halves(a, b)
        for half, other in ((0, 1), (1, 0)):
            k = self.lower.get(moves[half])
            if k is not None and not moves[other]:
                at = places[k][1]
                offset = (
                    (b >> 32 * half) - at.base + HALF_RANGE // 2
                ) % HALF_RANGE - HALF_RANGE // 2
                if -TENSOR_GAP < offset < at.nbytes + TENSOR_GAP:
                    return k, offset, half
        return None

    def shows(self, a: int, b: int) -> bool:
        """Whether a half moved as an address does, shifted or not, or as the upper half of one
        beside what did not move. (Where both halves moved it is a pointer to other memory.)"""
        low, high = _halves(a, b)
        return low in self.parts or high in self.parts or (not low and high in self.upper)


def _halves(a: int, b: int) -> tuple[int, int]:
    """By how much the lower and the upper half moved."""
    return (b - a) % HALF_RANGE, ((b >> 32) - (a >> 32)) % HALF_RANGE


__all__ = [
    "COPY",
    "FILL",
    "TENSOR_GAP",
    "Node",
    "Place",
    "Refused",
    "Span",
    "Use",
    "match",
    "nodes_of",
]
