"""Sections of rows: reductions over groups of neighbours beside reductions over whole rows.

In: a nest of rows, and a group of which each row is a part of one of those (a scale for every 128
values of what a norm makes of 4096). Out: the nest with its reduced loops cut in two, those that
count sections and those along one, and where the loops of the group are in it. What the group had
by row it then has by section.

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

LEVELS = {"row": "section", "point": "point"}
# Of shorter sections a lane would read less than 16 bytes at once. Instructions of sm_90 for an
# element of an RMS norm of bf16 and quotients in fp8, sections of 8, 4, 2: 23, 28, 40 (of 128: 21).
LEAST = 8


def cut(base: Group, guest: Group, table: Map) -> tuple[Group, Map] | None:
    """The base with sections over which the guest reductions, and the guest's loops as indices over
    its loops; None where these are no sections of the base's rows."""
    inner = image(table, guest.space.reduced)
    if guest.section or base.chunk is not None or not base.reductions or not guest.reductions:
        return None
    if not inner or not inner <= set(base.space.reduced):  # a reduction of one element has no loop
        return None
    if not base.section:
        shared = inner & image(table, guest.space.parallel)
        there: Map = {a: a.index for a in base.space.axes}
        loops: list[tuple[Axis, ...]] = [(a,) for a in base.space.reduced]
        for a in shared:
            rest = product(b.extent for b in inner - shared)
            length = divide_exact(product(b.extent for b in guest.space.reduced), rest)
            count = None if length is None else divide_exact(a.extent, length)
            if length is None or count is None or len(shared) > 1:
                return None
            number, within = Axis("section", count), Axis("within", length)
            there[a] = number.index * length + within.index
            loops[base.space.reduced.index(a)] = (number, within)
            inner = inner - {a} | {within}
        reduced = tuple(x for group in loops for x in group)
        base = replace(
            base,
            space=Space(base.space.parallel, reduced),
            members=tuple(m.moved(there) for m in base.members),
            section=tuple(x for x in reduced if x in inner),
        )
        table = {a: substitute(i, there) for a, i in table.items()}
    if not image(table, guest.space.parallel) <= counting(base):
        return None
    return (base, table) if image(table, guest.space.reduced) == set(base.section) else None


def counting(group: Group) -> set[Axis]:
    """The loops that count sections of all rows."""
    return set(group.space.axes) - set(group.section)


def unfit(group: Group, layouts: Mapping[str, Layout], spec: DeviceSpec) -> str | None:
    """Why a device has no good kernel for rows with sections; None where it has."""
    length = product(a.extent for a in group.section).value
    row = group.space.row.value
    if length is None or row is None:
        return "sections of rows of unknown length"
    if length & (length - 1) or length < LEAST:
        return f"sections of {length} elements, no power of two from {LEAST} on"
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
        return "rows with sections lie side by side in memory"
    return None


__all__ = ["LEVELS", "counting", "cut", "unfit"]
