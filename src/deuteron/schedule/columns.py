"""Reductions over a nest's rows, beside what the nest does along its rows: row splits.

In: a nest of rows (or the loops for one) and a group whose reductions run over those rows. Out: one
nest whose rows are split, and the computations that combine the partial results. A persistent
program walks the rows of each split and keeps partial results of the cross-row reductions; they are
combined afterwards, in a fixed order. A tensor that both read is read once (a norm's backward: dx
beside the gradients of weight and bias).

Groups of rows may have cross-row reductions of their own (gradients of what a sample's rows are
scaled by, or of what is added at a position). Then no split has rows of two groups; where a split
has all rows of its group, its result needs no further reduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from deuteron.base.device import DeviceSpec
from deuteron.ir import expr as E
from deuteron.ir.index import (
    Axis,
    Index,
    const,
    divide_exact,
    floordiv,
    hint,
    mod,
    product,
    substitute,
)
from deuteron.ir.program import Compute, Layout, contiguous
from deuteron.schedule.cooperative import (
    ALIGNMENT_CLASSES,
    MAX_ELEMENTS_PER_PROGRAM,
    NORM_BACKWARD_VALUES,
    PARTIAL_RESULT_ROWS,
    aligned_split_count,
    cores_at_once,
    elements_per_program,
    programs_per_row,
)
from deuteron.schedule.group import Group, Member
from deuteron.schedule.legality import Refusal, consistent
from deuteron.schedule.profit import inner_axes
from deuteron.schedule.programs import MIN_BUSY_SHARE
from deuteron.schedule.space import Map, Space, dense, flat, image, one_to_one

# Persistent programs per multiprocessor of a GPU: few, since each leaves partial results, but more
# for short rows, where a program waits for memory. H200, layer norm forward and backward, 2, 4, 8
# programs: rows of 1024 (bf16) 102, 91, 94 us, of 256 191, 200, 184 us, of 768 (f32) 256, 250,
# 255 us; of 4096 no difference.
PROGRAMS_PER_CORE = 2
# Rows of a split: partial results are written and read, an eighth of what the rows are.
MIN_SPLIT_ROWS = 8
MAX_PROGRAMS_PER_CORE = 8
# With 5 to 7 programs of 128 threads per multiprocessor, a thread gets fewer than `MIN_REGISTERS`.
# H100, backward of layer norm, rows of 768 (f32), whose two sums are reduced at once: 5 programs,
# of which 4 run at a time, 233 us.
MID_PROGRAMS_PER_CORE = 4
# As many for rows that leave much of a block of 2048 free, where a program is one warp if they are
# of 2 bytes an element (`codegen.triton.tiling.MAX_ONE_WARP_ROW`). H200, layer norm forward and
# backward, rows of 1536 (bf16), 2 and 4 programs: 195 and 178 us.
MAX_MID_ROW = 1536
# Registers that a thread of a program has at least. H200, layer norm and GELU, forward and
# backward, rows of 4096 (bf16), with 166 and 128 registers: 659 and 547 us.
MIN_REGISTERS = 128


# Columns that one program of a nest without row reductions takes at most, and programs per
# multiprocessor that hide memory's latency: each is two warps. Where there are fewer columns than
# one program takes, no programs lie side by side, so that there are more splits. H200, gradient of
# SiLU with its channel sums, 1.2 million rows of 24 (bf16), 2 splits: 121 us; memory allows 41.
TILE_COLUMNS = 64
MAX_TILE_PROGRAMS_PER_CORE = 16
# Elements of a tile of such a program; a split has several tiles.
TILE_ELEMENTS = 2048


@dataclass(frozen=True)
class RowSplit:
    """`main` leaves partial results in new tensors (`layouts`); `tail` finishes them, then does
    what depended on the reductions."""

    main: Group
    tail: tuple[tuple[Compute, int], ...]  # with their positions in the program
    layouts: dict[str, Layout]


def choose_row_split(space: Space, reductions: bool, spec: DeviceSpec) -> tuple[Axis, int]:
    """The axis that is split, and into how many. `reductions`: along the rows there are
    some, so that a split walks whole rows."""
    rows = space.parallel
    axis = max(rows, key=lambda a: (hint(a.extent), -rows.index(a)))
    row = hint(space.row)
    each = (
        min(MAX_PROGRAMS_PER_CORE, max(PROGRAMS_PER_CORE, 4096 // max(1, row)))
        if reductions
        else PROGRAMS_PER_CORE
    )
    if not reductions:
        tiles = hint(space.rows) * min(row, TILE_COLUMNS) // (4 * TILE_ELEMENTS * spec.cores)
        each = max(
            PROGRAMS_PER_CORE,
            min(tiles, MAX_TILE_PROGRAMS_PER_CORE // -(-max(1, row) // TILE_COLUMNS)),
        )
    elif MID_PROGRAMS_PER_CORE < each < MAX_PROGRAMS_PER_CORE or 1024 < row <= MAX_MID_ROW:
        each = MID_PROGRAMS_PER_CORE
    programs = (
        max(1, programs_per_row(row, NORM_BACKWARD_VALUES, spec, same_alignment=True))
        if reductions
        else 1
    )  # cooperating programs share a split
    if programs > 1 and elements_per_program(NORM_BACKWARD_VALUES, row) == MAX_ELEMENTS_PER_PROGRAM:
        each = 1  # a multiprocessor has registers for one of its programs
    most = spec.cores if spec.kind == "cpu" else each * cores_at_once(programs, spec) // programs
    if spec.kind == "cuda" and row % ALIGNMENT_CLASSES and most > ALIGNMENT_CLASSES:
        most = aligned_split_count(hint(axis.extent), most, PARTIAL_RESULT_ROWS)
    return axis, most if axis.extent.value is None else max(1, min(most, axis.extent.value))


def split_registers(count: int, warps: int, spec: DeviceSpec) -> int:
    """The most registers (of 4 bytes) of a thread of one of so many splits, each of so many warps,
    so that a multiprocessor has room for all its splits; 0: no matter how many."""
    each = max(PROGRAMS_PER_CORE, -(-count // spec.cores))
    most = spec.registers // 4 // (each * 32 * warps)
    return most if MIN_REGISTERS <= most < 256 else 0


def columns(
    base: Group,
    guest: Group,
    table: Map,
    layouts: Mapping[str, Layout],
    owner: Mapping[str, str],
    spec: DeviceSpec,
) -> RowSplit | Refusal:
    """`guest`, whose reductions run over the base's rows, as cross-row reductions of the base's
    nest."""
    if base.group_axes or guest.group_axes:
        return Refusal("row split", "rows with grouped reductions are not split")
    rows, cols = image(table, guest.space.reduced), image(table, guest.space.parallel)
    space = base.space
    if not base.fixed:
        space = Space(
            tuple(a for a in space.parallel if a in rows),
            tuple(a for a in space.parallel if a in cols),
        )
    groups = _groups(guest.space, space, base.row_split, rows, cols)
    if groups is None or groups.value != 1 and spec.kind == "cpu":
        return Refusal(
            "iteration spaces differ", "the columns of one are not the rows of the other"
        )
    if (
        guest.space.points is not space.points
        or guest.space.rows is not groups * space.row
        or not one_to_one(guest.space.axes, table)
    ):
        return Refusal("iteration spaces differ", "rows and columns of different extents")
    stages = _by_stage(guest)
    if isinstance(stages, Refusal):
        return stages
    row_split = base.row_split or choose_row_split(space, bool(base.reductions), spec)
    if base.row_split is None:
        beside = _beside(base, False, layouts) or _beside(guest, True, layouts)
        cut = (
            _one_axis(space, row_split, bool(base.reductions), beside, spec)
            if groups.value == 1
            else _split_by_group(base, [a for a in space.parallel if a not in rows], spec)
        )
        if isinstance(cut, Refusal):
            return cut
        space, row_split, there = cut
        base = Group(space, tuple(m.moved(there) for m in base.members), row_split)
        table = {a: substitute(i, there) for a, i in table.items()}
    points, reductions, after = stages
    moved = [m.moved(table, level="point") for m in points]
    partials = dict(base.partials)
    made: dict[str, Layout] = {}
    tail: list[tuple[Compute, int]] = []
    for m in reductions:
        moved.append(m.moved(table, level="point", kind="column"))
        name = f"{m.name}.part"
        partials[m.name] = name
        shape = (const(row_split[1]), *(a.extent for a in space.reduced))
        made[name] = contiguous(shape, m.compute.body.dtype, m.compute.layout.device)
        combine = _combine(moved[-1], name, space, row_split, groups)
        if combine is None:
            return Refusal("iteration spaces differ", f"{m.name} has no place among the columns")
        tail.append((combine, m.position))
    tail += [(m.compute, m.position) for m in after]
    both = sorted((*base.members, *moved), key=lambda m: m.position)
    main = Group(space, tuple(both), row_split, partials)
    names = {m.name for m in after}
    for m in both:
        if any(r.tensor in names for r in m.reads):
            return Refusal("columns", f"{m.name} needs what is computed per column")
    bad = consistent(main, layouts, owner)
    return bad if bad is not None else RowSplit(main, tuple(tail), made)


def _by_stage(guest: Group) -> tuple[list[Member], list[Member], list[Member]] | Refusal:
    """The guest's members: at points, reductions, and those that wait for the reductions."""
    points: list[Member] = []
    reductions: list[Member] = []
    after: list[Member] = []
    late: set[str] = set()
    for m in guest.members:
        waits = any(r.tensor in late for r in m.reads)
        if m.compute.target is not None or m.kind in ("scan", "column", "write"):
            return Refusal("row split", f"{m.name} cannot be part of a row split")
        if m.kind == "reduction" and not waits:
            if m.compute.body.attr[0].startswith("arg"):
                return Refusal("row split", f"{m.name} keeps positions, which partial results lose")
            reductions.append(m)
            late.add(m.name)
        elif m.level == "point" and m.kind == "point" and not waits:
            points.append(m)
        elif m.kind == "point" and m.level == "row":
            after.append(m)
            late.add(m.name)
        else:
            return Refusal("row split", f"{m.name} needs all rows before it can start")
    return points, reductions, after


def _groups(
    guest: Space,
    space: Space,
    row_split: tuple[Axis, int] | None,
    rows: AbstractSet[Axis],
    cols: AbstractSet[Axis],
) -> Index | None:
    """How many groups of rows have cross-row reductions of their own, where the loops `rows` of a
    nest are the rows of its cross-row reductions and `cols` their columns; None where they are not.
    All rows of a split must be of one group."""
    parallel, reduced = set(space.parallel), set(space.reduced)
    if not rows or not reduced or not reduced <= cols or not rows <= parallel:
        return None
    outer = cols - reduced
    if row_split is None:
        return product(a.extent for a in outer) if outer == parallel - rows else None
    axis, count = row_split
    if outer == parallel - rows == {axis} and axis.extent.value == count:
        return axis.extent  # a split has all rows of a place of that axis
    if rows != parallel or outer and (outer != {axis} or axis.extent.value != count):
        return None
    groups = divide_exact(guest.rows, product(a.extent for a in reduced))
    whole_groups = groups is not None and groups.value is not None and count % groups.value == 0
    return (
        groups if whole_groups or not outer and groups is not None and groups.value == 1 else None
    )


def _split_by_group(
    base: Group, outer: Sequence[Axis], spec: DeviceSpec
) -> tuple[Space, tuple[Axis, int], Map] | Refusal:
    """Loops for a base of whose rows those of each group (a place in the loops `outer`) have column
    reductions of their own: a split has a part of the rows of one group. The loops of before as
    indices over the new ones."""
    rows = [a for a in base.space.parallel if a not in outer]
    groups, row = product(a.extent for a in outer).value, rows[0].extent.value
    one_axis = len(rows) == 1 and base.fixed
    if not one_axis or groups is None or row is None:
        return Refusal("iteration spaces differ", "rows of groups, which no split can have")
    every = Axis("rows", groups * row)
    most = choose_row_split(Space((every,), base.space.reduced), bool(base.reductions), spec)[1]
    # As near as can be: more parts than splits are as bad as fewer.
    divisors = [n for n in range(1, min(row, 2 * most) + 1) if row % n == 0]
    parts = min(divisors, key=lambda n: max(n * groups / most, most / (n * groups)))
    split, within = Axis("splits", groups * parts), Axis("row_in_split", row // parts)
    there: Map = {a: a.index for a in base.space.reduced}
    there |= places(outer, floordiv(split.index, parts))
    there[rows[0]] = mod(split.index, parts) * within.extent + within.index
    return Space((split, within), base.space.reduced), (split, groups * parts), there


def _one_axis(
    space: Space, row_split: tuple[Axis, int], reductions: bool, beside: bool, spec: DeviceSpec
) -> tuple[Space, tuple[Axis, int], Map]:
    """The same loops, or all rows in one where the longest axis has fewer places than the device
    cores, or where rows lie `beside` one another, so that a split has neighbours; the loops of
    before as indices over the new ones. What is summed up by place cannot be beside them then.
    H200, backward of layer norm, us: 8 x 56 x 56 rows of 128 (f32), in 56 splits 87, 128 splits of
    all rows 29, 264 and more 20; bf16, 8 x 14 x 14 rows of 320 42 and 4.0, 32 x 56 x 56 rows of 96
    507 and 38. Images of 8 x 3136 x 64 (f32), a norm of their channels: 94 split by place, 47 so.
    """
    whole, (axis, count) = Axis("rows", space.rows), row_split
    same: Map = {a: a.index for a in space.axes}
    joined = Space((whole,), space.reduced)
    most = choose_row_split(joined, reductions, spec)[1]
    enough = count >= min(most, spec.cores) * MIN_BUSY_SHARE
    if space.rows.value is None or enough and not (beside and axis is not space.parallel[0]):
        return space, row_split, same
    most = min(most, max(spec.cores, hint(space.rows) // MIN_SPLIT_ROWS))
    return joined, (whole, most), same | places(space.parallel, whole.index)


def _beside(group: Group, turned: bool, layouts: Mapping[str, Layout]) -> bool:
    """Whether rows lie beside one another in a tensor that has all of them; `turned`: the rows are
    what the group reduces."""
    at = [(n, i) for n, indices in group.reads.items() for i in indices]
    at += [(m.name, m.index) for m in group.members if m.level == "point"]
    both = set(group.space.parallel), set(group.space.reduced)
    rows, row = both[::-1] if turned else both
    return any(
        inner_axes(i, layouts[n]) & rows and row & {a for d in i for a in d.axes()} for n, i in at
    )


def _combine(
    m: Member, partial: str, space: Space, row_split: tuple[Axis, int], groups: Index
) -> Compute | None:
    """The reduction of the partial results, under the name of the cross-row reduction; where a
    group has one split, that split's result."""
    c, (axis, count) = m.compute, row_split
    each = count // (groups.value or 1)
    group = Axis("group", groups)
    loops = (*([group] if groups.value != 1 else []), *space.reduced)
    number = flat(m.index, [a.extent for a in c.axes])
    if groups.value != 1:
        (((of_split,), _),) = floordiv(axis.index, each).terms
        number = substitute(number, {of_split: group.index})
    digits = dense(number, loops)
    whole = {a for a in loops if a.extent.value != 1}
    if digits is None or {a for a, _ in digits} != whole:
        return None
    here = flat([a.index for a in c.axes], [a.extent for a in c.axes])
    at: Map = {a: const(0) for a in (group, *space.reduced)}
    for k, (a, w) in enumerate(digits):
        at[a] = floordiv(here, w) if k == len(digits) - 1 else mod(floordiv(here, w), a.extent)
    split = Axis("r0", each)
    index = (at[group] * each + split.index, *(at[a] for a in space.reduced))
    if each == 1:
        index = (at[group], *index[1:])
        return replace(c, body=E.load(partial, index, c.body.dtype))
    body = E.reduce(c.body.attr[0], (split,), E.load(partial, index, c.body.dtype))
    return replace(c, body=body)


def rows_of(guest: Group) -> tuple[Group, Map]:
    """An empty nest of the guest's rows, in one loop, for a group of cross-row reductions by
    itself."""
    table: Map = {a: a.index for a in guest.space.axes}
    rows = guest.space.reduced
    if len(rows) > 1:
        whole = Axis("rows", product(a.extent for a in rows))
        table |= places(rows, whole.index)
        rows = (whole,)
    return Group(Space(rows, guest.space.parallel), ()), table


def places(axes: Sequence[Axis], number: Index) -> Map:
    """The axes as indices, from the number of a place of all of them."""
    there: Map = {}
    for a in reversed(axes[1:]):
        there[a] = mod(number, a.extent)
        number = floordiv(number, a.extent)
    return {**there, axes[0]: number}


__all__ = ["RowSplit", "columns", "rows_of"]
