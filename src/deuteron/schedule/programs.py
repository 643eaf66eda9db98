"""What a GPU's programs do with a group: how many there are, what each waits for, how many lines of
memory its lanes ask for.

In: a `Group` (its reads are index maps over its loops), layouts, the device. Out: a `Walk`. Blocks
are about those that `codegen.triton.tiling` gives such a nest, which is not written yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from deuteron.base.device import LINE_BYTES, DeviceSpec
from deuteron.base.memo import MEMO
from deuteron.ir.evaluate import assumed, evaluate
from deuteron.ir.index import Axis, Index, hint, product
from deuteron.ir.operations import ITEMSIZE
from deuteron.ir.program import Layout
from deuteron.schedule.group import Group, Member
from deuteron.schedule.lanes import LANES, LINE_FLOPS, picking
from deuteron.schedule.space import Space

# Elements of a program's block: of short rows together, of a long row in a loop, of columns in one,
# of what it has whole.
BLOCK, LOOPED_BLOCK, COLUMN_BLOCK, MAX_BLOCK = 1024, 4096, 8192, 16384
# Columns side by side that a program has, at most and at least.
MAX_COLUMNS, MIN_COLUMNS = 64, 8
THREAD_ELEMENTS, MAX_WARPS = 16, 16
# Points of rows side by side that are written out: `codegen.triton.unroll`.
MAX_UNROLLED = 32
# The share of the cores that programs keep busy at least, to have more columns.
MIN_BUSY_SHARE = 0.9
# Warps of a multiprocessor that run at once, as registers allow.
WARPS_AT_ONCE = 64
# What a program waits, us: for its first elements and its end, for each reduction with each of its
# warps, in each turn of its loop. What exact arithmetic takes of the time of its FLOPs, clocks that
# a line takes. H200, 629 kernels of 24 timm and
# transformers models drawn by date: median error of those of 10 us and more 0.11 (0.23 without).
START_US, WARP_US, TRIP_US = 0.7, 0.14, 0.6
ISSUE_SHARE, LINE_CLOCKS = 0.55, 1.4
PERIODS = (2, 3, 4)


Runs = dict[Axis, tuple[int, int]]
_RUNS: dict[tuple[tuple[Index, ...], tuple[Index, ...]], tuple[Runs, frozenset[Axis]]] = (
    MEMO.answers()
)


@dataclass(frozen=True)
class Walk:
    """`trips`: of a program through its loop; `depth`: reductions of which each waits for the one
    before; `lines`: that all programs ask for."""

    programs: int
    warps: int
    trips: int
    depth: int
    lines: float

    def busy(self, memory: float, work: float, spec: DeviceSpec) -> float:
        """Microseconds that the units take, of what moves so long and computes so much, the latter
        on cores that have programs."""
        lines = spec.compute_us(LINE_FLOPS * LINE_CLOCKS * self.lines)
        issued = max(ISSUE_SHARE * spec.compute_us(work), lines)
        return max(memory, issued * max(1.0, spec.cores / max(1, self.programs)))

    def waits(self) -> float:
        """Microseconds that one program waits: for memory, in each turn, and for its warps."""
        return START_US + WARP_US * self.warps * self.depth + TRIP_US * (self.trips - 1)

    def waves(self, spec: DeviceSpec) -> float:
        """Programs that run one after the other where one would."""
        return max(1.0, self.programs / (spec.cores * max(1, WARPS_AT_ONCE // self.warps)))


def together(busy: float, waits: float, waves: float = 1.0) -> float:
    """Microseconds of a kernel whose units are busy so long, and of which each program waits."""
    return max(busy, waits * waves) + min(busy, waits)


def walk(
    group: Group,
    layouts: Mapping[str, Layout],
    stored: Iterable[str],
    spec: DeviceSpec,
    aside: bool,
    again: bool,
    sharing: int,
) -> Walk:
    """`aside`: rows lie side by side; `again`: rows that do not stay on chip are read twice;
    `sharing`: programs that share a row."""
    rows, row = hint(group.space.rows), hint(group.space.row)
    split, wide, trips, depth = group.row_split, power(row), 1, _depth(group)
    inside = any(m.kind in ("reduction", "scan") or m.level == "row" for m in group.members)
    accesses = list(_accesses(group, layouts, stored))
    size, reads = group.space.size(), sum(map(len, group.reads.values()))
    loads = sum(2 * places(live) > size for _, live, _ in accesses[:reads])
    most = MAX_BLOCK // (1 if loads <= 2 else 2 if loads <= 4 else 4)
    x, r = max(1, BLOCK // wide), max(1, wide // sharing)
    if split is not None:
        r = r if inside else min(MAX_COLUMNS, wide)
        x = max(1, 2 * BLOCK // r)
        trips = -(-rows // (split[1] * x))
    elif aside and row <= MAX_UNROLLED:
        x, r, depth = max(LANES, min(BLOCK, rows // (2 * spec.cores))), wide, 0
    elif aside and inside:
        x = MAX_COLUMNS
        while x > MIN_COLUMNS and rows < x * spec.cores * MIN_BUSY_SHARE:
            x //= 2
        x = min(x, power(rows))
        r = wide if wide * MIN_COLUMNS * (1 if again else 4) <= most else COLUMN_BLOCK // x
    elif sharing == 1 and wide > most:
        x, r = 1, LOOPED_BLOCK * (1 + (rows < 2 * spec.cores))
    while split is None and not aside and x > 1 and rows < x * 2 * spec.cores:
        x //= 2
    blocks = -(-row // r)  # of a row
    if split is None and sharing == 1:
        trips, blocks = blocks, 1
    programs = blocks * (split[1] if split is not None else -(-rows // x))
    warps = min(MAX_WARPS, max(1, x * min(r, MAX_BLOCK) // (32 * THREAD_ELEMENTS)))
    along = _neighbours(group, accesses)
    lines = sum(_lines(*access, group, x, along) for access in accesses)
    passes = 1 + (again and trips > 1)
    lines += sum(
        size * picked_lines(m, layouts, group.space) for m in group.members if m.level == "point"
    )
    return Walk(programs, warps, passes * trips, depth, passes * lines)


def picked_lines(m: Member, layouts: Mapping[str, Layout], space: Space) -> float:
    """Lines that a point of a member takes where memory says what it reads."""
    at = {(r.tensor, r.index) for r in m.reads}
    at |= {(m.name, m.index)} if m.compute.target is not None else set()
    return sum(picking(i, layouts[n], frozenset(space.axes[-1:])) for n, i in at)


def _accesses(
    group: Group, layouts: Mapping[str, Layout], stored: Iterable[str]
) -> Iterator[tuple[Runs, frozenset[Axis], int]]:
    """Of everything that is read and stored where it is, the axes on which it is, bytes of an
    element."""
    for name, indices in group.reads.items():
        for index in indices:
            yield (*runs(index, layouts[name]), ITEMSIZE[layouts[name].dtype])
    for m in (group.names[n] for n in stored if n in group.names):
        yield (*runs(m.index, layouts[m.name]), ITEMSIZE[layouts[m.name].dtype])


def runs(index: tuple[Index, ...], layout: Layout) -> tuple[Runs, frozenset[Axis]]:
    """How many elements the address goes on with each loop, and for how many of its points; in
    quotients and remainders, which most begin at 0, as at the first ones. Where neighbours are far
    apart, as every `PERIODS`-th are near: points of windows that overlap."""
    key = (index, layout.strides)
    if key not in _RUNS:
        address = layout.address(index)
        direct, found = address.axes(), dict[Axis, tuple[int, int]]()
        live = frozenset(a for i in index for a in i.axes())
        first = assumed(address) | {a.name: 0 for a in live}
        origin = evaluate(address, first, lambda e: 0)

        def gone(a: Axis, k: int) -> int:
            return evaluate(address, first | {a.name: k}, lambda e: 0) - origin

        def steps(a: Axis, p: int) -> tuple[int, int]:
            """What the address goes on with p points, and for how many."""
            by, n = gone(a, p), 2
            while n * p < hint(a.extent) and gone(a, n * p) == n * by:
                n *= 2
            return abs(by), n * p

        for a in live:
            linear = address.coefficient(a) if a in direct else None
            if linear is not None and not linear.axes():
                by, n = hint(linear), hint(a.extent)
            else:
                by, n = steps(a, 1)
                more = (steps(a, p) for p in PERIODS if by >= LINE_BYTES and p < hint(a.extent))
                by, n = min([(by, n), *(s for s in more if s[1] >= LANES)])
            found[a] = abs(by), n
        _RUNS[key] = found, live
    return _RUNS[key]


def _neighbours(group: Group, accesses: Iterable[tuple[Runs, frozenset[Axis], int]]) -> Axis | None:
    """The parallel axis with most contiguous bytes, else the last one."""
    size = dict.fromkeys(group.space.parallel, 0)
    for found, live, each in accesses:
        for a in size.keys() & live:
            size[a] += places(live) * each * (found[a][0] == 1)
    return max(group.space.parallel, key=lambda a: (size[a], hint(a.extent) > 1), default=None)


def _lines(
    found: Runs, live: frozenset[Axis], each: int, group: Group, x: int, along: Axis | None
) -> float:
    """Lines that all programs ask for in one access, which have `x` rows side by side `along` an
    axis."""
    rows = hint(group.space.rows)
    count = places(live & set(group.space.reduced))
    count *= rows if along in live else -(-rows // x)
    held = {along: x} | dict.fromkeys(group.space.reduced if group.reductions else live, 1 << 62)
    together = 1.0
    for by, n in sorted((by, min(n, held[a])) for a, (by, n) in found.items() if a in held):
        if by * each >= LINE_BYTES:
            break
        together *= max(1.0, min(n, LINE_BYTES / (max(by, 1) * each)))
    return count / min(together, LINE_BYTES / each)


def _depth(group: Group) -> int:
    """How many reductions wait for one another."""
    depth: dict[str, int] = {}
    for m in group.members:
        below = max((depth.get(r.tensor, 0) for r in m.reads), default=0)
        depth[m.name] = below + (m.kind in ("reduction", "scan", "column"))
    return max(depth.values(), default=0)


def places(axes: Iterable[Axis]) -> int:
    """Points of loops together, at hinted sizes."""
    return hint(product(a.extent for a in axes))


def power(n: int) -> int:
    """The power of two that is not below `n`."""
    return 1 << max(0, n - 1).bit_length()


__all__ = ["Walk", "places", "power", "walk"]
