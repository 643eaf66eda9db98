"""Where every tensor of a call lives.

A tensor is one of

    input, constant   as given
    result            allocated by the library call that makes it
    buffer            allocated by itself: outputs, and what others may hold on to
    workspace         bytes of the call's one workspace per device, shared by tensors that do not
                      live at once

Sizes may be symbolic: `Arena.offsets` places the workspace's tensors for actual sizes,
deterministically.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deuteron.ir.index import Index, evaluate
from deuteron.ir.program import Layout

ALIGNMENT = 256
# Bytes from which memory of the CPU comes from a pool (`runtime.host_memory`). Below, malloc keeps
# the memory itself and is as fast.
MIN_POOLED_BYTES = 64 << 10
# Workspaces of the CPU of up to so many bytes are kept from call to call, with the views of them.
MAX_CACHED_WORKSPACE = 1 << 20


@dataclass(frozen=True)
class Slot:
    """A piece of workspace: bytes, and the steps from `first` to `last` in which it is in use."""

    name: str
    nbytes: Index
    first: int
    last: int


@dataclass(frozen=True)
class Arena:
    """The workspace of one device."""

    device: str
    slots: tuple[Slot, ...]

    @property
    def lives(self) -> tuple[tuple[int, int], ...]:
        return tuple((s.first, s.last) for s in self.slots)

    @property
    def first(self) -> int:
        return min(s.first for s in self.slots)

    @property
    def last(self) -> int:
        return max(s.last for s in self.slots)

    def offsets(self, sizes: Mapping[str, int]) -> tuple[list[int], int]:
        """Byte offset of each slot for these sizes, and the total."""
        return assign_offsets([evaluate(s.nbytes, sizes) for s in self.slots], self.lives)


def assign_offsets(need: Sequence[int], lives: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Byte offsets of pieces that live in these (closed) ranges of steps, and the bytes in all.
    Largest first, each at the lowest place that is free over its whole life."""
    need = [-(-n // ALIGNMENT) * ALIGNMENT for n in need]
    out = [0] * len(need)
    placed: list[int] = []
    for k in sorted(range(len(need)), key=lambda k: (-need[k], lives[k][0], k)):
        first, last = lives[k]
        taken = sorted(
            (out[j], out[j] + need[j])
            for j in placed
            if lives[j][0] <= last and first <= lives[j][1]
        )
        at = 0
        for low, high in taken:
            if low - at >= need[k]:
                break
            at = max(at, high)
        out[k] = at
        if need[k]:
            placed.append(k)
    return out, max((out[k] + need[k] for k in placed), default=0)


@dataclass(frozen=True)
class MemoryPlan:
    """`home[name]` is the tensor at whose address `name` lives (itself, where it is not listed).
    Buffers and arenas are made before the step of their number; `dies` lists what to let go after a
    step."""

    home: dict[str, str]
    buffers: dict[str, int]
    arenas: dict[str, Arena]  # by device
    slot: dict[str, tuple[str, int]]  # workspace tensor -> (device, number of its slot)
    dies: dict[int, list[str]]
    spaces: dict[int, list[str]]  # step -> devices whose workspace is not used after it
    given: dict[str, str]  # buffer -> the input whose memory it takes, where the caller gives it


def span(layout: Layout) -> Index:
    """Elements of memory from a tensor's first to its last."""
    if any(n.value == 0 for n in layout.shape):
        return layout.numel
    return layout.extent()


def plan_text(plan: MemoryPlan) -> str:
    """The plan, a tensor per line."""
    lines = [f"{n}: a buffer, made before step {k}" for n, k in plan.buffers.items()]
    for device, arena in plan.arenas.items():
        lines += [
            f"{s.name}: in the workspace of {device}, steps {s.first} to {s.last}, {s.nbytes} bytes"
            for s in arena.slots
        ]
    lines += [f"{n} lives in {root}" for n, root in plan.home.items() if n != root]
    lines += [f"{n} takes {at}, where that is given away" for n, at in plan.given.items()]
    for k, names in sorted(plan.dies.items()):
        lines.append(f"after step {k}: let {', '.join(names)} go")
    return "\n".join(lines)


__all__ = [
    "MAX_CACHED_WORKSPACE",
    "MIN_POOLED_BYTES",
    "Arena",
    "MemoryPlan",
    "Slot",
    "assign_offsets",
    "plan_text",
    "span",
]
