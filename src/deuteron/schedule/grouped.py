"""Grouped reductions: over groups of neighbours in a row, beside reductions over whole rows.

In: a nest of rows, and a fusion group (the guest) of which each row is a part of one of those rows:
a scale for every 128 values of what a norm makes of 4096. Out: the nest with its reduced loops cut
in two, those that number the groups and those along one group, and where the guest's loops are in
it. What the guest had by row it then has by group.

Whether a device can run such a nest is asked here too: a program holds its rows whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deuteron.base.device import DeviceSpec
from deuteron.ir.index import Axis, divide_exact, product, substitute
from deuteron.ir.program import Layout
from deuteron.schedule import profit
from deuteron.schedule.group import Group
from deuteron.schedule.space import Map, Space, image

GROUP_LEVELS = {"row": "group", "point": "point"}
# Of shorter groups a lane would read less than 16 bytes at once. Instructions of sm_90 for an
# element of an RMS norm of bf16 and quotients in fp8, groups of 8, 4, 2: 23, 28, 40 (of 128: 21).
MIN_GROUP = 8


def cut(base: Group, guest: Group, table: Map) -> tuple[Group, Map] | None:
    """The base with its rows cut into the groups that the guest reduces, and the guest's loops as
    indices over its loops. None where these are no groups of the base's rows."""
    inner = image(table, guest.space.reduced)
    if (
        guest.group_axes
        or base.row_split is not None
        or not base.reductions
        or not guest.reductions
    ):
        return None
    if not inner or not inner <= set(base.space.reduced):  # a reduction of one element has no loop
        return None
    if not base.group_axes:
        shared = inner & image(table, guest.space.parallel)
        there: Map = {a: a.index for a in base.space.axes}
        loops: list[tuple[Axis, ...]] = [(a,) for a in base.space.reduced]
        for a in shared:
            rest = product(b.extent for b in inner - shared)
            length = divide_exact(product(b.extent for b in guest.space.reduced), rest)
            count = None if length is None else divide_exact(a.extent, length)
            if length is None or count is None or len(shared) > 1:
                return None
            number, within = Axis("segment", count), Axis("within_segment", length)
            there[a] = number.index * length + within.index
            loops[base.space.reduced.index(a)] = (number, within)
            inner = inner - {a} | {within}
        reduced = tuple(x for group in loops for x in group)
        base = replace(
            base,
            space=Space(base.space.parallel, reduced),
            members=tuple(m.moved(there) for m in base.members),
            group_axes=tuple(x for x in reduced if x in inner),
        )
        table = {a: substitute(i, there) for a, i in table.items()}
    if not image(table, guest.space.parallel) <= group_index_axes(base):
        return None
    return (base, table) if image(table, guest.space.reduced) == set(base.group_axes) else None


def group_index_axes(group: Group) -> set[Axis]:
    """The loops that number the groups of all rows."""
    return set(group.space.axes) - set(group.group_axes)


def unfit(group: Group, layouts: Mapping[str, Layout], spec: DeviceSpec) -> str | None:
    """Why a device has no good kernel for rows with groups; None where it has."""
    length = product(a.extent for a in group.group_axes).value
    row = group.space.row.value
    if length is None or row is None:
        return "groups in rows of unknown length"
    if length & (length - 1) or length < MIN_GROUP:
        return f"groups of {length} elements, no power of two from {MIN_GROUP} on"
    points = group.space.size()
    read = {
        (name, index)
        for name, indices in group.reads.items()
        for index in indices
        if 2 * profit.elements(index) >= points
    }
    held = 4 * max(1, len(read)) << (row - 1).bit_length()  # bytes of whole blocks
    if held > spec.registers // 2:
        return f"rows of {row} elements, {len(read)} values of each, do not stay on chip"
    if profit.side_by_side(group, layouts):
        return "rows with groups lie side by side in memory"
    return None


__all__ = ["GROUP_LEVELS", "group_index_axes", "cut", "unfit"]
