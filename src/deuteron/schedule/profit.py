"""What a kernel costs: a roofline of the device, at hinted sizes.

In: a `Group` and the tensors that it must leave in memory. Out: a `Cost`: bytes that must move,
FLOPs, how much of the device its loops can occupy, microseconds. Nothing here decides legality.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deuteron.base.device import DeviceSpec, additions_us
from deuteron.base.memo import MEMO
from deuteron.base.scans import EXCHANGED_DTYPES, MAX_SCANS, bandwidth, in_blocks
from deuteron.ir.elements import is_loaded
from deuteron.ir.index import Axis, Index, Mod, Value, const, hint, product
from deuteron.ir.operations import ITEMSIZE
from deuteron.ir.program import Layout
from deuteron.schedule.cooperative import (
    NORM_BACKWARD_VALUES,
    elements_per_program,
    programs_per_row,
    steady_block,
)
from deuteron.schedule.group import Group, Member
from deuteron.schedule.lanes import LINE_FLOPS
from deuteron.schedule.programs import Walk, picked_lines, together, walk
from deuteron.schedule.repeated import shared_of
from deuteron.schedule.split_reductions import one_pass
from deuteron.schedule.strides import strided_bytes

# What of a GPU's bandwidth one multiprocessor can use when the others idle, as a multiple of its
# share: H200, one program per multiprocessor, copies of 1 to 132 programs.
ONE_CORE_BANDWIDTH = 1.6
CPU_KERNEL_US = 0.3  # a kernel's own time besides moving and computing (its start, its tail)
COLUMN_WALK_SHARE = 0.5
SECTOR_BYTES = 32  # that move for an element that is read by itself
# Bytes that are contiguous along the other dimension, as a share of most, for which a tile has good
# parts of both. Tensors of fewer elements than a part of the largest do not count.
ACROSS_RATIO, MIN_PART_OF_LARGEST = 8, 8
# Kinds of reductions whose results programs can exchange.
EXCHANGED = ("sum", "max", "min")
# Elements of a run of memory that is worth walking along.
MIN_RUN = 16
# Below this share of the device a reduction is worth a second kernel; the latter where rows lie
# side by side. H200, bf16, gradient of GELU with its bias, 16384 rows of 2048, of 3072: 95, 153 us
# in one kernel, 69 and 97 in two; sums of 2048 columns alone 24 and 26.
MIN_OCCUPANCY, MIN_OCCUPANCY_ASIDE = 0.6, 0.8
# The same where programs wait so long, and so much of the time that their units are busy.
MIN_WAITS_US, MIN_WAIT_SHARE = 5.0, 0.1


@dataclass(frozen=True)
class Cost:
    """`occupancy`: the share of the device's bandwidth that the loops can use, 0 to 1. Of `us`, on
    a GPU, its units are `busy` and its programs wait."""

    bytes: int
    flops: float
    occupancy: float
    us: float
    busy: float = 0.0
    waits: float = 0.0


def bytes_of(layout: Layout) -> int:
    return hint(layout.numel) * ITEMSIZE[layout.dtype]


def bytes_read(group: Group, name: str, layout: Layout) -> int:
    """Bytes of one tensor that the group reads: all of it, or as much as its points touch."""
    each = ITEMSIZE[layout.dtype]
    touched = sum(
        elements(index) * (max(each, SECTOR_BYTES) if placed(index, layout) else each)
        for index in group.reads[name]
    )
    return min(hint(layout.numel) * each, touched)


_PLACED: dict[tuple[tuple[Index, ...], tuple[Index, ...]], bool] = MEMO.answers()


def placed(index: tuple[Index, ...], layout: Layout) -> bool:
    """Whether each element is read from a loaded place in a run of memory."""
    key = (index, layout.strides)
    known = _PLACED.get(key)
    if known is None:
        known = _PLACED[key] = any(
            s.value == 1 and any(isinstance(a, Value) for a in i.atoms())
            for i, s in zip(index, layout.strides, strict=True)
        )
    return known


_ELEMENTS: dict[tuple[Index, ...], int] = MEMO.answers()


def elements(index: tuple[Index, ...]) -> int:
    """Elements that one read touches: all combinations of the loops in its index."""
    known = _ELEMENTS.get(index)
    if known is None:
        used = {a for i in index for a in i.axes()}
        known = _ELEMENTS[index] = hint(product(a.extent for a in used))
    return known


def bytes_written(m: Member, layout: Layout, points: int) -> int:
    if m.kind == "write":
        each = ITEMSIZE[layout.dtype]
        return min(hint(layout.numel), points) * each * (2 if m.compute.accumulate else 1)
    return bytes_of(layout)


def added_us(group: Group, layouts: Mapping[str, Layout]) -> float:
    """What the largest of the group's additions at loaded places takes at least, on a GPU."""
    return max(
        (
            additions_us(group.space.size(), bytes_of(layouts[m.name]))
            for m in group.members
            if m.kind == "write" and m.compute.accumulate and any(map(is_loaded, m.index))
        ),
        default=0.0,
    )


_INNER: dict[tuple[tuple[Index, ...], tuple[Index, ...]], frozenset[Axis]] = MEMO.answers()


def inner_axes(index: tuple[Index, ...], layout: Layout) -> frozenset[Axis]:
    """The loops along which a tensor is contiguous."""
    key = (index, layout.strides)
    known = _INNER.get(key)
    if known is None:
        known = _INNER[key] = frozenset(
            a
            for i, s in zip(index, layout.strides, strict=True)
            if s.value == 1
            for a in i.axes()
            if by_one(i, a)
        )
    return known


def by_one(i: Index, a: Axis) -> bool:
    """Whether a position goes on by one from point to point of a loop, or does so in runs: those of
    tensors that are joined, or of heads whose axis is one with another."""
    if i.coefficient(a) is const(1):
        return True
    runs = (m[0] for m, c in i.terms if c == 1 and len(m) == 1 and isinstance(m[0], Mod))
    return any(r.num.coefficient(a) is const(1) and hint(r.den) >= MIN_RUN for r in runs)


def work(
    group: Group, layouts: Mapping[str, Layout], spec: DeviceSpec, exact: bool = False
) -> float:
    """FLOPs of one execution; on a GPU with what lanes wait for lines of their own. `exact`: what
    takes as long there as all that is issued, lines apart (`programs`)."""
    space = group.space
    points, rows = space.size(), hint(space.rows)
    each = {"point": points, "row": rows}
    each["group"] = points // hint(product(a.extent for a in group.group_axes))
    total, once = 0.0, shared_of(group) if spec.kind == "cuda" else None
    for m in group.members:
        effort = m.issued if exact and spec.kind == "cuda" else m.effort
        if once is not None and m.level == "point":
            effort *= once.share
        if spec.kind == "cuda" and m.level == "point" and not exact:
            effort += LINE_FLOPS * picked_lines(m, layouts, space)
        total += effort * (points if m.kind != "point" else each[m.level])
    return total


def occupancy(group: Group, layouts: Mapping[str, Layout], spec: DeviceSpec) -> float:
    """The share of the device that the parallel loops can keep busy."""
    row_values = group.fixed and any(m.level == "row" for m in group.members)
    split = group.row_split is not None
    if not group.reductions and not split and (spec.kind == "cpu" or not row_values):
        return 1.0
    rows = hint(group.space.rows)
    if spec.kind == "cpu":
        # Threads share long rows where one reduction stands alone; dependent ones wait for one
        # another. Of rows side by side one thread takes as many as a vector has lanes.
        lanes = spec.vector_bits // 32 if side_by_side(group, layouts) else 1
        blocks = -(-rows // lanes)
        return 1.0 if blocks >= spec.cores or not chained(group) else blocks / spec.cores
    if not split and scanned_in_blocks(group, layouts, spec):
        return bandwidth(rows)
    programs = walked(group, layouts, (), spec).programs
    share = min(1.0, programs * ONE_CORE_BANDWIDTH / spec.cores)
    if not side_by_side(group, layouts):
        return share
    # Splits that walk down columns read a few bytes of each line of memory at a time. Programs that
    # are more than the cores take turns. H200, bf16, 16384 rows and a store at every point: 6144
    # columns in 192 programs 233 us, 4096 in 128 117 us.
    turns = -(-programs // spec.cores)
    even = programs / (spec.cores * turns) if turns > 1 else 1.0
    return share * (COLUMN_WALK_SHARE if split else even)


def scanned_in_blocks(group: Group, layouts: Mapping[str, Layout], spec: DeviceSpec) -> bool:
    """Whether programs scan blocks of the group's rows, as they do not beside reductions and scans
    of scans: `codegen.triton.scanning`."""
    if not 0 < len(group.scans) <= MAX_SCANS:
        return False
    late: set[str] = set()  # what comes after a scan
    for m in group.members:
        below = any(r.tensor in late for r in m.reads)
        if m.kind == "scan":
            if below or m.compute.body.dtype not in EXCHANGED_DTYPES:
                return False
        elif m.kind != "point" or m.level != "point":
            return False
        if below or m.kind == "scan":
            late.add(m.name)
    if side_by_side(group, layouts):
        return False
    return in_blocks(hint(group.space.rows), hint(group.space.row), spec)


def least_occupancy(group: Group, layouts: Mapping[str, Layout]) -> float:
    """The share of the device below which the group's reductions are worth a second kernel."""
    return MIN_OCCUPANCY_ASIDE if side_by_side(group, layouts) else MIN_OCCUPANCY


def known_rows(group: Group) -> bool:
    """Whether the length of a row is known when kernels are written."""
    return group.space.row.value is not None


def shareable(group: Group, layouts: Mapping[str, Layout]) -> bool:
    """Whether programs may share rows that begin anywhere: elements are so wide that what a warp
    reads is whole lines."""
    return min((ITEMSIZE[layouts[n].dtype] for n in group.reads), default=4) >= 4


def side_by_side(group: Group, layouts: Mapping[str, Layout]) -> bool:
    """Rows lie side by side in memory: most of what is read and made at points is contiguous along
    a parallel axis, or so much of it that a program's tile has several rows."""
    beside = inside = 0
    for contiguous, size in contiguous_bytes(group, layouts):
        if contiguous & set(group.space.parallel):
            beside += size
        else:
            inside += size
    return beside * ACROSS_RATIO > inside if inside else beside > 0


def contiguous_bytes(
    group: Group, layouts: Mapping[str, Layout]
) -> Iterator[tuple[frozenset[Axis], int]]:
    """For each tensor with an element for many of the group's points, the axes along which it is
    contiguous, and bytes; what is made and not read inside counts twice, as in code generation."""
    points = group.space.size()
    read = {r.tensor for m in group.members for r in m.reads}
    uses = [(n, next(iter(indices)), 1) for n, indices in group.reads.items() if indices]
    uses += [
        (m.name, m.index, 2)
        for m in group.members
        if m.kind == "point" and m.level == "point" and m.name not in read
    ]
    largest = max((elements(i) for _, i, _ in uses), default=0)
    for name, index, times in uses:
        size = elements(index)
        if size * MIN_PART_OF_LARGEST < min(points, largest):
            continue
        inner = inner_axes(index, layouts[name])
        if inner:
            yield inner, size * ITEMSIZE[layouts[name].dtype] * times


def chained(group: Group) -> bool:
    """Whether a reduction, or a store at points, depends on another reduction of the same rows."""
    made: set[str] = set()
    for m in group.members:
        below = any(r.tensor in made for r in m.reads)
        if below and (m.kind in ("reduction", "scan") or m.level == "point"):
            return True
        if m.kind in ("reduction", "scan") or below:
            made.add(m.name)
    return False


def cost(
    group: Group,
    layouts: Mapping[str, Layout],
    stored: Iterable[str],
    spec: DeviceSpec,
    whole: bool = False,
) -> Cost:
    """The predicted cost of a group: as one kernel, or (unless `whole`) in two steps where `split`
    will do it so."""
    moved = sum(bytes_read(group, n, layouts[n]) for n in group.reads)
    stored = list(dict.fromkeys(stored))
    moved += strided_bytes(group, layouts, spec, stored)
    points = group.space.size()
    for n in stored:
        moved += bytes_written(group.names[n], layouts[n], points)
    spilled = (
        group.row_split is not None
        and chained(group)
        and not row_stays_on_chip(group, layouts, spec)
    )
    for m in group.members:
        if m.kind == "column":
            part = layouts[group.partials[m.name]]
            # Beside rows in several passes, partial sums are kept in memory from row to row.
            moved += 2 * points * ITEMSIZE[part.dtype] if spilled else bytes_of(part)
    again = 0
    if spilled or (
        group.reductions and group.row_split is None and not row_stays_on_chip(group, layouts, spec)
    ):
        again = read_again(group, layouts)
    moved += again
    done, issued = (work(group, layouts, spec, exact) for exact in (False, True))
    issued *= 2 if again else 1
    share = occupancy(group, layouts, spec)
    found = Cost(moved, done, share, time_us(moved, issued, share, spec))
    if spec.kind == "cuda":
        how = walked(group, layouts, stored, spec)
        busy = how.busy(spec.memory_us(moved) / max(share, 1e-3), issued, spec)
        busy = max(busy, added_us(group, layouts))
        waits = how.waits()
        us = together(busy, waits, how.waves(spec))
        found = Cost(moved, done, share, us, busy, waits)
    if not whole and group.reductions and share < least_occupancy(group, layouts):
        more = 0 if not row_stays_on_chip(group, layouts, spec) else read_again(group, layouts)
        halves = (
            time_us(moved + more, issued, 1.0, spec) + spec.launch_us + time_us(0, 0, 1.0, spec)
        )
        if halves < found.us and splittable(group, layouts, spec):  # the dearer question last
            return Cost(moved, done, 1.0, halves)
    return found


def kernel_us(costs: Sequence[Cost], spec: DeviceSpec) -> float:
    """Microseconds of a kernel of several groups: on a GPU they run side by side."""
    if spec.kind == "cpu":
        return sum(c.us for c in costs)
    beside = together(sum(c.busy for c in costs), max(c.waits for c in costs))
    return max(beside, *(c.us for c in costs))


def walked(
    group: Group, layouts: Mapping[str, Layout], stored: Iterable[str], spec: DeviceSpec
) -> Walk:
    """What a GPU's programs do with a group."""
    aside, again = side_by_side(group, layouts), group.row_split is None
    again = again and bool(read_again(group, layouts))
    sharing = max(1, sharing_programs(group, layouts, spec))
    return walk(group, layouts, stored, spec, aside, again, sharing)


def sharing_programs(
    group: Group, layouts: Mapping[str, Layout], spec: DeviceSpec, held: int | None = None
) -> int:
    """Programs that share a row, as `codegen.triton.tiling` has them do; 0: none. `held`: values of
    each element that they hold; by default what the group reads of a row that it needs again."""
    row = hint(group.space.row)
    if not known_rows(group):
        return 0
    if group.row_split is not None:
        return programs_per_row(row, held or NORM_BACKWARD_VALUES, spec, same_alignment=True)
    reduced = [m.compute.body for m in group.members if m.kind in ("reduction", "scan")]
    if side_by_side(group, layouts) or not read_again(group, layouts):
        return 0
    if any(e.attr[0] not in EXCHANGED or e.dtype not in EXCHANGED_DTYPES for e in reduced):
        return 0
    points, beside = group.space.size(), set(group.space.parallel)
    where = [i for indices in group.reads.values() for i in indices]
    axes = [frozenset(a for x in i for a in x.axes()) for i in where]
    whole = [2 * elements(i) > points for i in where]
    steady = steady_block(axes, group.space.reduced)
    parts = (x for x, all_of_it in zip(axes, whole) if not all_of_it)
    if not steady and any(x & beside and not x <= beside for x in parts):
        return 0  # they would be held element by element
    values = sum(whole) + len(group.scans)
    each = min(elements_per_program(values, row), steady or row)
    programs = programs_per_row(row, values, spec, each, shareable(group, layouts))
    return programs if programs > 1 else 0


def splittable(group: Group, layouts: Mapping[str, Layout], spec: DeviceSpec) -> bool:
    """Whether its reductions may be partial reductions and a combination."""
    if (
        spec.kind == "cpu"
        or group.row_split is not None
        or group.group_axes
        or not group.reductions
    ):
        return False
    if any(m.kind == "scan" or m.compute.target is not None for m in group.members):
        return False
    return not chained(group) or one_pass(group, layouts) is not None


def read_again(group: Group, layouts: Mapping[str, Layout]) -> int:
    """Bytes that reductions read and that members at points, which wait for them, read once
    more."""
    late: set[str] = set()
    first: set[str] = set()
    again: set[str] = set()
    below: dict[str, set[str]] = {}  # what a value at points that waits for nothing is made of
    for m in group.members:
        waits = any(r.tensor in late for r in m.reads)
        read = {r.tensor for r in m.reads if r.tensor in group.reads}
        read = read.union(*(below.get(r.tensor, ()) for r in m.reads))
        if waits and m.kind != "reduction" and m.level == "point":
            again |= read
        else:
            first |= read
        if waits or m.kind in ("reduction", "scan"):
            late.add(m.name)
        elif m.level == "point":
            below[m.name] = read
    return sum(bytes_read(group, n, layouts[n]) for n in sorted(first & again))


def row_stays_on_chip(group: Group, layouts: Mapping[str, Layout], spec: DeviceSpec) -> bool:
    """Whether what a row reads is still at hand when it is needed again: in registers (half of
    them, as f32; of several programs, where they can share the row), or in the core's cache."""
    row = hint(group.space.row)
    if spec.kind == "cpu":
        return 4 * row <= spec.l2 // 2
    if group.row_split is None:
        return bool(sharing_programs(group, layouts, spec)) or 4 * row <= spec.registers // 2
    points = group.space.size()
    read = sum(any(elements(i) >= points for i in where) for where in group.reads.values())
    held = read + len(group.partials)
    shared = sharing_programs(group, layouts, spec, held)
    return bool(shared) or 4 * row * held <= spec.registers * 3 // 4


def combination_cost(partials: Iterable[Layout], spec: DeviceSpec) -> Cost:
    """Combining partial results in a kernel of its own."""
    moved = sum(bytes_of(lay) for lay in partials)
    return Cost(moved, 0.0, 1.0, time_us(moved, 0.0, 1.0, spec))


def time_us(moved: float, done: float, share: float, spec: DeviceSpec) -> float:
    """Microseconds of a kernel that moves and computes this much on a share of the device."""
    if spec.kind == "cpu":
        # The peak is one of multiply-adds, which chains are not: they round as eager does.
        busy = max(spec.memory_us(moved), spec.compute_us(2 * done))
        return CPU_KERNEL_US + busy / max(share, 1e-3)
    one = Walk(spec.cores, 1, 1, 0, 0.0)
    return together(one.busy(spec.memory_us(moved), done, spec) / max(share, 1e-3), one.waits())


def launch_us(spec: DeviceSpec) -> float:
    """What one more kernel costs beyond what it does."""
    return CPU_KERNEL_US if spec.kind == "cpu" else spec.launch_us


__all__ = [
    "EXCHANGED",
    "Cost",
    "bytes_of",
    "bytes_read",
    "chained",
    "cost",
    "launch_us",
    "occupancy",
    "combination_cost",
    "time_us",
]
