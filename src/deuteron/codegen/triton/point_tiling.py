"""The tiling of nests that only compute and store points: one dimension, or two.

In: `Loops` without reductions of rows, and the device. Out: a `Tiling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deuteron.base.device import DeviceSpec
from deuteron.codegen.loops import (
    Access,
    Loops,
    Write,
    outermost_first,
    points_visited,
    roots_of,
    stride,
)
from deuteron.codegen.triton.access_statistics import below, size, unit_bytes, widest
from deuteron.codegen.triton.dynamic_bounds import (
    ELEMENTS_PER_THREAD,
    MAX_REGISTERS,
    dynamic_bounds_tile,
    in_flight,
)
from deuteron.codegen.triton.point_tiles import (
    PLANE_TILES,
    SINGLE_ELEMENT_TILES,
    TileConfig,
    Tiling,
    line_tiles,
    plane_tiles,
    transposed_tiles,
    warps_for,
)
from deuteron.ir.index import Axis, hint
from deuteron.ir.operations import ITEMSIZE
from deuteron.schedule.programs import power
from deuteron.schedule.repeated import shared

# Points of rows in blocks of a row: so much more of them at most, with what is masked.
MAX_PADDED_SHARE = 1.1
# With so many axes, finding a point's place costs more than its arithmetic.
MANY_AXES = 4
# Elements of such a row in a tile at most, where much is the same along it.
MAX_SHARED_ROW = 128
# With more at every point, a thread takes few points.
MANY_ACCESSES = 6


def in_order(loops: Loops, axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Axes from outermost to innermost, the one with most contiguous bytes innermost."""
    order = outermost_first(loops, axes)
    if len(order) > 1:
        last = max(order, key=lambda a: (unit_bytes(loops, a), order.index(a)))
        if unit_bytes(loops, last):
            order = [a for a in order if a != last] + [last]
    return tuple(order)


def tile_points(loops: Loops, spec: DeviceSpec) -> Tiling:
    order = point_order(loops)
    if (bounded := dynamic_bounds_tile(loops, order, spec.cores)) is not None:
        dims, sizes, program_axes = bounded
        most = MAX_REGISTERS if program_axes and widest(loops) <= 4 else 0
        tile = TileConfig(sizes, 1, registers=most)
        tile = replace(tile, num_warps=warps_for(tile.elements, ELEMENTS_PER_THREAD))
        rows = size(program_axes) if program_axes else 0
        terms, serial_blocks = in_flight(loops, tile.per_thread, rows, spec.cores)
        tiling = Tiling("points", dims, (tile,), program_axes=program_axes, terms=terms)
        return replace(tiling, serial_blocks=serial_blocks)
    if (sharing := _shared_work(loops, order)) is not None:
        return sharing
    other = _second_contiguous(loops, order)
    if other is not None:
        x: tuple[Axis, ...] = (order[-1],)
        y = tuple(a for a in order[:-1] if a != other) + (other,)
        return Tiling("points", (("y", y), ("x", x)), transposed_tiles(y, x))
    cut = _plane_cut(order) if len(order) >= MANY_AXES else _row_value_cut(loops, order)
    if cut is not None:
        y, x = order[:cut], order[cut:]
        blocks = plane_tiles(size(y), size(x), spec, 512 if len(order) >= MANY_AXES else 2048)
        return Tiling("points", (("y", y), ("x", x)), blocks)
    full = accesses_of_points(loops)
    most = 512 if len(full) > MANY_ACCESSES else below(2048 // stored_points(loops))
    blocks = line_tiles(size(order), spec, widest(loops), most)
    if order and _single_elements(loops, order[-1]):
        wide = any(isinstance(p, Write) and ITEMSIZE[p.dtype] >= 4 for p in loops.statements)
        blocks = SINGLE_ELEMENT_TILES[::-1] if wide else SINGLE_ELEMENT_TILES
    return Tiling("points", (("x", order),), blocks)


def _shared_work(loops: Loops, order: tuple[Axis, ...]) -> Tiling | None:
    """Of points along one axis of which much is the same: it is the last one of y, or x."""
    found = shared(((e, None) for s in loops.statements for e in roots_of(s)), order)
    if found is None or len(order) < 2:
        return None
    cut = min(order.index(found.axis) + 1, len(order) - 1)
    y, x = order[:cut], order[cut:]
    sizes: dict[tuple[int, int, int], None] = {}
    for elements, warps in PLANE_TILES:
        if found.axis in y:
            sizes[found.points, min(power(size(x)), elements // found.points), warps] = None
        else:
            wide = min(power(size(x)), MAX_SHARED_ROW)
            sizes[min(power(size(y)), elements // wide), wide, warps] = None
    tiles = tuple(TileConfig((("y", a), ("x", b)), w) for a, b, w in sizes)
    return Tiling("points", (("y", y), ("x", x)), tiles)


def accesses_of_points(loops: Loops) -> list[Access]:
    """What is read or stored at most points."""
    axes = (*loops.parallel, *loops.reduced)
    return [a for a in loops.accesses if 2 * points_visited(a.address, axes) > size(axes)]


def _single_elements(loops: Loops, inner: Axis) -> bool:
    """Whether most of what is read comes element by element: neighbours lie apart, or begin between
    two multiples of 16 bytes."""
    read = [a for a in loops.accesses if not a.store]
    single = 0.0
    for a in read:
        if stride(a.address, inner) not in (0, 1):
            single += 1.0
        elif dict(a.address.terms).get((), 0) * a.itemsize % 16:
            single += 0.5
    return len(read) > 1 and 2 * single > len(read)


def stored_points(loops: Loops) -> int:
    """Neighbouring elements of one tensor that a lane stores at most."""
    count: dict[str, int] = {}
    for p in loops.statements:
        if isinstance(p, Write):
            count[p.tensor] = count.get(p.tensor, 0) + 1 + len(p.others)
    return max(count.values(), default=1)


def point_order(loops: Loops) -> tuple[Axis, ...]:
    """The axes of a nest of points from outermost to innermost."""
    order = in_order(loops, (*loops.parallel, *loops.reduced))
    for w in loops.statements:
        if isinstance(w, Write) and w.along is not None:
            order = (*(a for a in order if a != w.along), w.along)
    return order


def _plane_cut(order: Sequence[Axis]) -> int | None:
    """Where to part many axes into two dimensions, whose places are then computed apart (a row of
    points shares what depends on the first): the second long enough, with little to mask."""
    for k in range(len(order) - 1, 0, -1):
        inner = size(order[k:])
        if inner >= 32:
            return (
                k
                if min(power(inner), 512) * -(-inner // min(power(inner), 512)) <= 1.3 * inner
                else None
            )
    return None


def _row_value_cut(loops: Loops, order: Sequence[Axis]) -> int | None:
    """Where to part the axes of points of which rows have values of their own, read once per row
    then; rows are nearly whole blocks of whole vectors."""
    if len(order) < 2 or (order[-1].extent.value or 1) % 8:
        return None
    inner, row_values = order[-1], 0
    for a in loops.accesses:
        if inner not in a.address.axes():
            row_values += bool(a.address.axes()) and not a.store
        elif stride(a.address, inner) != 1:
            return None
    n = size((inner,))
    block = min(power(n), 2048)
    return (
        len(order) - 1
        if row_values and n >= 64 and -(-n // block) * block <= MAX_PADDED_SHARE * n
        else None
    )


def _second_contiguous(loops: Loops, order: Sequence[Axis]) -> Axis | None:
    """An axis along which a good part of the bytes is contiguous that is not along the innermost
    one.
    """
    if len(order) < 2:
        return None
    inner = order[-1]
    axes = (*loops.parallel, *loops.reduced)
    total, gain = 0, dict.fromkeys(order[:-1], 0)
    for access in loops.accesses:
        moved = access.itemsize * points_visited(access.address, axes)
        total += moved
        if stride(access.address, inner) in (0, 1):
            continue
        for a in gain:
            if stride(access.address, a) == 1:
                gain[a] += moved
    best = max(gain, key=lambda a: gain[a])
    worth = gain[best] * 8 > total and hint(best.extent) >= 4 and hint(inner.extent) >= 8
    return best if worth else None


__all__ = ["accesses_of_points", "in_order", "point_order", "tile_points"]
