"""Where every tensor of a call lives.

In: a `Schedule`. Out: a `MemoryPlan`. A tensor is one of

    input, constant   as given
    result            allocated by the library call that makes it
    buffer            allocated by itself: outputs, and what others may hold on to
    workspace         bytes of the call's one workspace per device, shared by tensors that do not
                      live at once

Two tensors also share memory where a kernel overwrites an operand that dies there; such operands
are inputs too that the caller gives away, as autograd does in most calls (`given`). Where one
workspace for the whole call would raise the peak (large tensors that are not needed while library
calls allocate theirs), large tensors are buffers instead. Sizes may be symbolic: `Arena.offsets`
places the workspace's tensors for actual sizes, deterministically.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deuteron.base.record import Record
from deuteron.ir.index import Index, evaluate, hint
from deuteron.ir.operations import ITEMSIZE
from deuteron.ir.program import Compute, Extern, Input, Layout, Program
from deuteron.memory.lifetimes import Lifetimes, overwritable
from deuteron.memory.out_variants import out_variant
from deuteron.schedule.dag import results_that_tell
from deuteron.schedule.kernel import Kernel, Schedule

ALIGNMENT = 256
# Bytes from which memory of the CPU comes from a pool (`runtime.host_memory`). Below, malloc keeps
# the memory itself and is as fast.
MIN_POOLED_BYTES = 64 << 10
# Workspaces of the CPU of up to so many bytes are kept from call to call, with the views of them.
MAX_CACHED_WORKSPACE = 1 << 20
# Tensors of at least so many bytes may leave the workspace, where that lowers the peak by this
# much: each then costs an allocation per call, about 0.5 us.
MIN_BUFFER_BYTES = 1 << 20
MAX_PEAK_FRACTION = 0.97
# Inputs that are given away are overwritten from so many bytes on; smaller ones are not worth the
# question, which each call asks.
MIN_DONATED_BYTES = 64 << 10


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


@dataclass(frozen=True)
class Piece:
    """Memory that one or more tensors share, one after the other or as views."""

    root: str
    layout: Layout
    first: int
    last: int
    names: tuple[str, ...]

    @property
    def nbytes(self) -> Index:
        return _nbytes(self.layout)


def _nbytes(layout: Layout) -> Index:
    return span(layout) * ITEMSIZE.get(layout.dtype, 0)


def plan_memory(
    schedule: Schedule, program: Program, record: Record, donated: frozenset[int] = frozenset()
) -> MemoryPlan:
    """The plan of one call. `donated`: positions of inputs that may be overwritten where the caller
    says so at the call."""
    life = Lifetimes.of(schedule, program)
    calls = (s for s in schedule.steps if isinstance(s, Extern) and out_variant(s) is None)
    made = {n for s in calls for n in s.names if n}
    ours = [n for n in life.first if n not in life.external and n not in made]
    home = _overwriting(program)
    donated_inputs = {
        d.name
        for d in program.defs
        if isinstance(d, Input)
        and d.position in donated
        and hint(_nbytes(d.layout)) >= MIN_DONATED_BYTES
    }
    reused = _reuse(schedule, life, set(ours), donated_inputs)
    given = {name: at for name, at in reused.items() if at in donated_inputs}
    for name in given:
        del reused[name]
    home |= reused | {name: reused[at] for name, at in home.items() if at in reused}
    pieces = _pieces(schedule, life, ours, reused)
    late_sizes = {name for name, deciding in results_that_tell(program).items() if deciding}
    own_buffer = {
        p.root
        for p in pieces
        if set(p.names) & (life.returned | life.pinned | given.keys())
        or late_sizes & {s.name for s in p.nbytes.syms()}
    }
    others = [n for n in life.first if n in made]
    counted = [p for p in pieces if p.root not in given]
    own_buffer |= _lower_peak(
        counted, own_buffer, [_piece(schedule, life, n) for n in others], schedule
    )
    buffers: dict[str, int] = {}
    slots: dict[str, list[Slot]] = {}
    slot: dict[str, tuple[str, int]] = {}
    for p in pieces:
        if p.root in own_buffer:
            buffers[p.root] = p.first
        else:
            listed = slots.setdefault(p.layout.device, [])
            slot[p.root] = (p.layout.device, len(listed))
            listed.append(Slot(p.root, p.nbytes, p.first, p.last))
        record.add(
            "buffer",
            name=p.root,
            bytes=hint(p.nbytes),
            first=p.first,
            last=p.last,
            reuse=[n for n in p.names if n != p.root],
            place=given.get(p.root, "own") if p.root in own_buffer else "workspace",
        )
    arenas = {d: Arena(d, tuple(s)) for d, s in slots.items()}
    dies = _deaths(schedule, program, life, pieces, home)
    spaces: dict[int, list[str]] = {}
    for d, a in arenas.items():
        spaces.setdefault(a.last, []).append(d)
    return MemoryPlan(home, buffers, arenas, slot, dies, spaces, given)


def _overwriting(program: Program) -> dict[str, str]:
    """Tensors that are written into the memory of an earlier one, at its address."""
    home: dict[str, str] = {}
    for d in program.defs:
        if isinstance(d, Compute) and d.target is not None:
            home[d.name] = home.get(d.target, d.target)
    return home


def _piece(schedule: Schedule, life: Lifetimes, name: str) -> Piece:
    return Piece(name, schedule.layouts[name], life.first[name], life.last[name], (name,))


def _pieces(
    schedule: Schedule, life: Lifetimes, ours: Sequence[str], reused: Mapping[str, str]
) -> list[Piece]:
    groups: dict[str, list[str]] = {}
    for name in ours:
        groups.setdefault(reused.get(name, name), []).append(name)
    return [
        Piece(
            root,
            schedule.layouts[root],
            min(life.first[n] for n in names),
            max(life.last[n] for n in names),
            tuple(names),
        )
        for root, names in groups.items()
    ]


def _deaths(
    schedule: Schedule,
    program: Program,
    life: Lifetimes,
    pieces: Sequence[Piece],
    home: Mapping[str, str],
) -> dict[int, list[str]]:
    """Tensors to let go after each step: when nobody needs their memory any more. Constants stay,
    and so do inputs' other names."""
    last = dict(life.last)
    for p in pieces:
        last.update(dict.fromkeys(p.names, p.last))
    constants = set(program.constants)
    for name, owner in schedule.aliases.items():
        if owner in last:
            last[name] = last[owner]
    dies: dict[int, list[str]] = {}
    for name, k in last.items():
        if k < life.end and name not in constants and home.get(name, name) == name:
            dies.setdefault(k, []).append(name)
    return dies


def _reuse(
    schedule: Schedule, life: Lifetimes, ours: set[str], donated_inputs: set[str]
) -> dict[str, str]:
    """Tensors written over an operand that dies in the same kernel: an input that is given away, or
    else a tensor of ours."""
    home: dict[str, str] = {}
    taken: set[str] = set()
    untouchable = {*schedule.aliases, *schedule.aliases.values(), *life.pinned}

    def owner(n: str) -> str:
        return n if home.get(n, n) in donated_inputs else home.get(n, n)

    for k, step in enumerate(schedule.steps):
        if not isinstance(step, Kernel):
            continue
        dying = [
            n
            for n, _ in step.reads
            if n in ours and life.last[n] == k and life.first[n] < k and n not in untouchable
        ]
        dead = [n for n, _ in step.reads if n in donated_inputs and life.last[n] == k]
        dying = [n for n in dead if n not in untouchable] + dying
        for written, _ in step.writes:
            if written not in ours or life.first[written] != k or written in untouchable:
                continue
            for n in dying:
                same = (
                    n not in donated_inputs
                    or schedule.layouts[n].dtype == schedule.layouts[written].dtype
                )
                if n not in taken and same and overwritable(step, written, n, schedule.layouts):
                    home[written] = n if n in donated_inputs else owner(n)
                    taken.add(n)
                    break
    return home


# -- the peak -----------------------------------------------------------------------------------


def _lower_peak(
    pieces: Sequence[Piece], own_buffer: set[str], others: Sequence[Piece], schedule: Schedule
) -> set[str]:
    """The pieces with memory of their own: `own_buffer`, and large ones too where that lowers the
    peak."""
    large = {
        p.root for p in pieces if p.root not in own_buffer and hint(p.nbytes) >= MIN_BUFFER_BYTES
    }
    if not large:
        return own_buffer
    before = _peak(pieces, own_buffer, others, schedule)
    after = _peak(pieces, own_buffer | large, others, schedule)
    return own_buffer | large if after < MAX_PEAK_FRACTION * before else own_buffer


def _peak(
    pieces: Sequence[Piece], own_buffer: set[str], others: Sequence[Piece], schedule: Schedule
) -> int:
    """Most bytes in use at once, at hinted sizes. Kernels between two library calls are launched
    together: what they need is allocated before the first, and freed after the last."""
    starts, ends = _runs(schedule)
    change = [0] * (len(starts) + 2)

    def add(first: int, last: int, nbytes: int) -> None:
        change[starts[min(first, len(starts) - 1)]] += nbytes
        change[(ends[last] if last < len(ends) else len(ends)) + 1] -= nbytes

    for p in (*(p for p in pieces if p.root in own_buffer), *others):
        if p.layout.dtype in ITEMSIZE:
            add(p.first, p.last, hint(p.nbytes))
    inside = [p for p in pieces if p.root not in own_buffer]
    if inside:
        _, total = assign_offsets(
            [hint(p.nbytes) for p in inside], [(p.first, p.last) for p in inside]
        )
        add(min(p.first for p in inside), max(p.last for p in inside), total)
    now = most = 0
    for c in change:
        now += c
        most = max(most, now)
    return most


def _runs(schedule: Schedule) -> tuple[list[int], list[int]]:
    """For each step the first and the last of the steps that run in one go with it."""
    n = len(schedule.steps)
    starts, ends = list(range(n)), list(range(n))
    for k in range(1, n):
        a, b = schedule.steps[k - 1], schedule.steps[k]
        if isinstance(a, Kernel) and isinstance(b, Kernel) and a.device == b.device:
            starts[k] = starts[k - 1]
    for k in reversed(range(n - 1)):
        if starts[k + 1] == starts[k]:
            ends[k] = ends[k + 1]
    return starts, ends


__all__ = [
    "MAX_CACHED_WORKSPACE",
    "MIN_POOLED_BYTES",
    "Arena",
    "MemoryPlan",
    "assign_offsets",
    "plan_memory",
    "span",
]
