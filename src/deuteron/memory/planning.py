"""The passes that decide where every tensor of a call lives.

In: a `Schedule` (`Needs`). Out: a `MemoryPlan`. Two tensors also share memory where a kernel
overwrites an operand that dies there; such operands are inputs too that the caller gives away, as
autograd does in most calls (`given`). Where one workspace for the whole call would raise the peak
(large tensors that are not needed while library calls allocate theirs), large tensors are buffers
instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deuteron.base.passes import Context, Pass, Table, extended, run_passes
from deuteron.ir.expr import ITEMSIZE
from deuteron.ir.index import Index, hint
from deuteron.ir.program import Compute, Extern, Input, Layout, Program
from deuteron.memory.lifetimes import Lifetimes, overwritable
from deuteron.memory.out_variants import out_variant
from deuteron.memory.plan import Arena, MemoryPlan, Slot, assign_offsets, plan_text, span
from deuteron.memory.verify import verify_plan
from deuteron.schedule.dag import results_that_tell
from deuteron.schedule.kernel import Kernel, Schedule

# Tensors of at least so many bytes may leave the workspace, where that lowers the peak by this
# much: each then costs an allocation per call, about 0.5 us.
MIN_BUFFER_BYTES = 1 << 20
MAX_PEAK_FRACTION = 0.97
# Inputs that are given away are overwritten from so many bytes on; smaller ones are not worth the
# question, which each call asks.
MIN_DONATED_BYTES = 64 << 10


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


# -- the passes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """What is to be placed. `donated`: positions of inputs that may be overwritten where the caller
    says so at the call."""

    schedule: Schedule
    program: Program
    donated: frozenset[int]


@dataclass(frozen=True)
class Living(Needs):
    """When tensors live. `ours` are those that are to be placed, `called` those that library calls
    allocate."""

    life: Lifetimes
    ours: tuple[str, ...]
    called: frozenset[str]


@dataclass(frozen=True)
class Shared(Living):
    """Who shares memory with whom: tensors in pieces, and `home` and `given` as in a
    `MemoryPlan`."""

    home: dict[str, str]
    given: dict[str, str]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Separated(Shared):
    """Which pieces are buffers of their own: the others are in a workspace."""

    own_buffer: frozenset[str]


@dataclass(frozen=True)
class Placed(Separated):
    plan: MemoryPlan


def lifetimes(before: Needs, context: Context) -> Living:
    """When each tensor is born and dies."""
    life = Lifetimes.of(before.schedule, before.program)
    calls = (s for s in before.schedule.steps if isinstance(s, Extern) and out_variant(s) is None)
    called = frozenset(n for s in calls for n in s.names if n)
    ours = tuple(n for n in life.first if n not in life.external and n not in called)
    return extended(Living, before, life=life, ours=ours, called=called)


def sharing(before: Living, context: Context) -> Shared:
    """Tensors that are written over an operand which dies there."""
    schedule, life = before.schedule, before.life
    home = _overwriting(before.program)
    donated_inputs = {
        d.name
        for d in before.program.defs
        if isinstance(d, Input)
        and d.position in before.donated
        and hint(_nbytes(d.layout)) >= MIN_DONATED_BYTES
    }
    reused = _reuse(schedule, life, set(before.ours), donated_inputs)
    given = {name: at for name, at in reused.items() if at in donated_inputs}
    for name in given:
        del reused[name]
    home |= reused | {name: reused[at] for name, at in home.items() if at in reused}
    pieces = tuple(_pieces(schedule, life, before.ours, reused))
    return extended(Shared, before, home=home, given=given, pieces=pieces)


def separation(before: Shared, context: Context) -> Separated:
    """What others may hold on to is allocated by itself, and what would raise the peak."""
    schedule, life, given = before.schedule, before.life, before.given
    late = {name for name, deciding in results_that_tell(before.program).items() if deciding}
    own_buffer = {
        p.root
        for p in before.pieces
        if set(p.names) & (life.returned | life.pinned | given.keys())
        or late & {s.name for s in p.nbytes.syms()}
    }
    others = [_piece(schedule, life, n) for n in life.first if n in before.called]
    counted = [p for p in before.pieces if p.root not in given]
    own_buffer |= _lower_peak(counted, own_buffer, others, schedule)
    return extended(Separated, before, own_buffer=frozenset(own_buffer))


def placement(before: Separated, context: Context) -> Placed:
    """Buffers, slots of workspaces, and when each is let go."""
    buffers: dict[str, int] = {}
    slots: dict[str, list[Slot]] = {}
    slot: dict[str, tuple[str, int]] = {}
    for p in before.pieces:
        if p.root in before.own_buffer:
            buffers[p.root] = p.first
        else:
            listed = slots.setdefault(p.layout.device, [])
            slot[p.root] = (p.layout.device, len(listed))
            listed.append(Slot(p.root, p.nbytes, p.first, p.last))
        context.record.add(
            "buffer",
            name=p.root,
            bytes=hint(p.nbytes),
            first=p.first,
            last=p.last,
            reuse=[n for n in p.names if n != p.root],
            place=before.given.get(p.root, "own") if p.root in before.own_buffer else "workspace",
        )
    arenas = {d: Arena(d, tuple(s)) for d, s in slots.items()}
    dies = _deaths(before.schedule, before.program, before.life, before.pieces, before.home)
    spaces: dict[int, list[str]] = {}
    for d, a in arenas.items():
        spaces.setdefault(a.last, []).append(d)
    plan = MemoryPlan(before.home, buffers, arenas, slot, dies, spaces, before.given)
    return extended(Placed, before, plan=plan)


def living_text(living: Living) -> str:
    life = living.life
    return "\n".join(f"{n}: steps {life.first[n]} to {life.last[n]}" for n in life.first)


def pieces_text(shared: Shared) -> str:
    lines = [
        f"{', '.join(p.names)}: steps {p.first} to {p.last}, {p.nbytes} bytes"
        for p in shared.pieces
    ]
    return "\n".join([*lines, *(f"{n} takes {at} where it may" for n, at in shared.given.items())])


def separated_text(separated: Separated) -> str:
    return "\n".join(
        f"{p.root}: {'a buffer' if p.root in separated.own_buffer else 'in the workspace'}"
        for p in separated.pieces
    )


def placed_text(placed: Placed) -> str:
    return plan_text(placed.plan)


def verify_placed(placed: Placed, guilty: str) -> None:
    verify_plan(placed.plan, placed.schedule, placed.program, guilty)


PLAN_TELLS = 'it is checked in the plan that "placement" makes'
PLANNING: Table = (
    Pass("lifetimes", lifetimes, PLAN_TELLS, living_text),
    Pass("sharing", sharing, PLAN_TELLS, pieces_text),
    Pass(
        "separation",
        separation,
        "either choice is right: it is one of time and of the peak",
        separated_text,
    ),
    Pass("placement", placement, verify_placed, placed_text),
)


def plan_memory(needs: Needs, context: Context) -> MemoryPlan:
    """The plan of one call."""
    placed: Placed = run_passes(PLANNING, needs, context)
    return placed.plan


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


__all__ = ["PLANNING", "Needs", "plan_memory"]
