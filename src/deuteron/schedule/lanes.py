"""How many lines of memory a GPU's lanes ask for, where a program accesses a block of a tensor.

A multiprocessor answers one line at a time. Lanes beside one another that want neighbouring
elements share one; lanes that want elements far apart want one each, again and again, whatever the
cache still holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from deuteron.base.device import LINE_BYTES
from deuteron.base.memo import MEMO
from deuteron.ir.index import Axis, Index, Value, hint
from deuteron.ir.program import Layout
from deuteron.schedule.tiling import Dim, Tiling

# Lanes that a line may serve at once; what answering it takes, in FLOPs of the f32
# units (a clock). H200, bf16, products of patches whose weights lie 8, 32 and 512 bytes apart along
# the sum: 27, 123 and 114 us, of which this makes 46, 70 and 112; 7, 15 and 7 without it.
LANES, LINE_FLOPS = 32, 256

Steps = dict[Axis, int | None]  # elements of memory from one place of an axis to the next


def steps_of(layout: Layout, index: Sequence[Index], axes: Sequence[Axis]) -> Steps:
    """Of an access that lives on `axes`; None where memory says where it is."""
    address = layout.address(tuple(index))
    direct = address.axes()
    found = {a: address.coefficient(a) if a in direct else None for a in axes}
    return {a: None if by is None else abs(hint(by)) for a, by in found.items()}


def most_lines(layout: Layout) -> float:
    """Lines for each lane that a tensor has, at most one: tables have few."""
    return min(1.0, layout.nbytes_hint / (LINE_BYTES * LANES))


def scattered(tiling: Tiling, steps: Steps, size: int, most: float = 1.0) -> float:
    """Lines that an element of `size` bytes of a block takes beyond its share of whole ones;
    `most`: see `most_lines`."""
    blocks = [d for d in tiling.dims if d.block > 1 and not steps.keys().isdisjoint(d.axes)]
    together = max((_together(d, steps, size) for d in blocks), default=LANES)
    return max(0.0, min(1 / together, most) - size / LINE_BYTES)


def _together(d: Dim, steps: Steps, size: int) -> int:
    """Elements along a dimension that lie in one line, as far as lanes beside one another have
    them."""
    run = 1
    for a in reversed(d.axes):
        extent, step = hint(a.extent), steps.get(a, 0)
        if extent == 1:
            continue
        if run == 1 and step == 0:
            return min(extent, d.block, LANES)
        if step != run or run >= d.block:
            break
        run *= extent
    return min(run, d.block, LINE_BYTES // size)


_PICKED: dict[tuple[tuple[Index, ...], frozenset[Axis]], bool] = MEMO.answers()


def picking(index: tuple[Index, ...], layout: Layout, along: frozenset[Axis]) -> float:
    """Lines that an element takes where lanes along these axes access memory at places of their
    own that memory says; else none."""
    key = (index, along)
    if key not in _PICKED:
        values = [a for i in index for a in i.atoms() if isinstance(a, Value)]
        _PICKED[key] = any(along & v.expr.axes() for v in values)
    return most_lines(layout) if _PICKED[key] else 0.0


__all__ = ["LINE_FLOPS", "Steps", "most_lines", "picking", "scattered", "steps_of"]
