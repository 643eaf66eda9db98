"""Where every tensor of a call lives.

In: a `Schedule`. Out: a `MemoryPlan`. A tensor is one of

    input, constant   as given
    result            allocated by the library call that makes it
    buffer            allocated by itself: outputs, and what library calls read or write
    workspace         bytes of the call's one workspace, shared by tensors that do not live at once

Two tensors also share memory where a kernel overwrites an operand that dies there. Sizes may be
symbolic: `Arena.offsets` places the workspace's tensors for actual sizes, deterministically.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deuteron.base.record import Record
from deuteron.ir.expr import ITEMSIZE
from deuteron.ir.index import Index, evaluate, hint
from deuteron.ir.program import Extern, Layout, Program
from deuteron.memory.lifetimes import Lifetimes, overwritable
from deuteron.schedule.kernel import Kernel, Schedule

ALIGNMENT = 256
# Calls that write their result into memory of ours, with the strides that we choose.
OUT_VARIANTS = {f"aten.{n}.default": f"aten.{n}.out" for n in ("mm", "bmm", "addmm", "baddbmm")}


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

    def offsets(self, sizes: Mapping[str, int]) -> tuple[list[int], int]:
        """Byte offset of each slot for these sizes, and the total."""
        return place([evaluate(s.nbytes, sizes) for s in self.slots], self.lives)


def place(need: Sequence[int], lives: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
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
    """`home[name]` is the tensor in whose memory `name` lives (itself, mostly)."""

    home: dict[str, str]
    buffers: dict[str, int]  # own allocation -> the step before which it is made
    arenas: dict[str, Arena]  # by device
    slot: dict[str, tuple[str, int]]  # workspace tensor -> (device, number of its slot)
    dies: dict[int, list[str]] = field(default_factory=dict)  # step -> tensors to let go after it


def span(layout: Layout) -> Index:
    """Elements of memory from a tensor's first to its last."""
    if any(n.value == 0 for n in layout.shape):
        return layout.numel
    return layout.extent()


def plan_memory(schedule: Schedule, program: Program, record: Record) -> MemoryPlan:
    """The plan of one call."""
    life = Lifetimes.of(schedule, program)
    calls = (s for s in schedule.steps if isinstance(s, Extern) and s.op not in OUT_VARIANTS)
    made = {n for s in calls for n in s.names if n}
    ours = [n for n in life.first if n not in life.external and n not in made]
    kept = {n for n in ours if n in life.returned or n in life.called}
    home = _reuse(schedule, life, set(ours))
    for name, target in schedule.aliases.items():
        home[name] = home.get(target, target)
    groups: dict[str, list[str]] = {}
    for name in ours:
        groups.setdefault(home.get(name, name), []).append(name)
    buffers: dict[str, int] = {}
    slots: dict[str, list[Slot]] = {}
    slot: dict[str, tuple[str, int]] = {}
    last = dict(life.last)
    for root, names in groups.items():
        lay = schedule.layouts[root]
        first = min(life.first[n] for n in names)
        end = max(life.last[n] for n in names)
        for n in names:
            last[n] = end
        if kept & set(names):
            buffers[root] = first
        else:
            listed = slots.setdefault(lay.device, [])
            slot[root] = (lay.device, len(listed))
            nbytes = span(lay) * ITEMSIZE[lay.dtype]
            listed.append(Slot(root, nbytes, first, end))
        record.add(
            "buffer",
            name=root,
            bytes=hint(span(lay)) * ITEMSIZE[lay.dtype],
            first=first,
            last=end,
            reuse=[n for n in names if n != root],
        )
    dies: dict[int, list[str]] = {}
    for name, k in last.items():
        if k < life.end and name not in slot and home.get(name, name) == name:
            dies.setdefault(k, []).append(name)
    arenas = {d: Arena(d, tuple(s)) for d, s in slots.items()}
    return MemoryPlan(home, buffers, arenas, slot, dies)


def _reuse(schedule: Schedule, life: Lifetimes, ours: set[str]) -> dict[str, str]:
    """Tensors written over an operand that dies in the same kernel."""
    home: dict[str, str] = {}
    taken: set[str] = set()
    aliased = {*schedule.aliases, *schedule.aliases.values()}
    for k, step in enumerate(schedule.steps):
        if not isinstance(step, Kernel):
            continue
        dying = [
            n
            for n, _ in step.reads
            if n in ours and life.last[n] == k and life.first[n] < k and n not in aliased
        ]
        for written, _ in step.writes:
            if written not in ours or life.first[written] != k or written in aliased:
                continue
            for n in dying:
                if n not in taken and overwritable(step, written, n, schedule.layouts):
                    home[written] = home.get(n, n)
                    taken.add(n)
                    break
    return home


__all__ = ["Arena", "MemoryPlan", "place", "plan_memory", "span"]
