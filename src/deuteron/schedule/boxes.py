"""Boxes: blocks of a tensor in memory that a GPU's copy engine moves (TMA;
`DeviceSpec.copies_boxes`).

In: where a nest reads or writes a tensor, and a tiling. Out: the `Box` that programs fetch or put,
or None where the engine cannot. It wants addresses of 16 bytes along all dimensions but the last,
which is contiguous; what lies outside of the tensor it reads as 0, and does not write.
"""

from __future__ import annotations

from dataclasses import dataclass

from deuteron.ir.index import Axis, Index, hint, product
from deuteron.ir.operations import ITEMSIZE
from deuteron.ir.program import Layout
from deuteron.schedule.tiling import Tiling

BOX_DTYPES = ("bf16", "f16", "f32")
UNIT = 16  # bytes of which addresses are multiples
MAX_RANK, MAX_BLOCK = 5, 256


@dataclass(frozen=True)
class Box:
    """`places`: for each dimension, the last one contiguous, the tiling's dimension along which it
    goes, and of one that programs have a single place of, the axis. `offset` and `strides` count
    elements."""

    offset: int
    places: tuple[tuple[str, Axis | None], ...]
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    @property
    def dims(self) -> tuple[str, ...]:
        """The dimensions of which it has a block."""
        return tuple(d for d, axis in self.places if axis is None)


def box_of(tiling: Tiling, layout: Layout, index: tuple[Index, ...]) -> Box | None:
    """The box at which programs access a tensor; None where it is none, or known in a call only."""
    steps = _steps(layout.address(index))
    size = ITEMSIZE[layout.dtype]
    if steps is None or layout.dtype not in BOX_DTYPES:
        return None
    if any(a.extent.value is None for d in tiling.dims for a in d.axes if a in steps):
        return None  # it is described before a call
    offset = steps.pop(None, 0)
    rows: list[tuple[tuple[str, Axis | None], int, int, int]] = []
    for d in tiling.dims:
        used = [a for a in d.axes if a in steps]
        if d.block == 1:
            rows += [((d.name, a), hint(a.extent), steps[a], 1) for a in used]
        elif used:
            stride = steps[used[-1]]
            for k, a in enumerate(d.axes):  # together they go like one
                step = (stride * product(x.extent for x in d.axes[k + 1 :])).value
                if a.extent.value != 1 and steps.get(a) != step:
                    return None
            rows.append(((d.name, None), d.extent, stride, d.block))
    last = [r for r in rows if r[2] == 1 and r[3] > 1]
    rest = [r for r in rows if r not in last]
    aligned = all(n * size % UNIT == 0 for n in (offset, *(r[2] for r in rest)))
    aligned &= all(r[2] > 0 for r in rest)
    blocks = sum(r[3] > 1 for r in rows)
    if len(last) != 1 or not aligned or blocks < 2 or len(rows) > MAX_RANK:
        return None
    if last[0][3] * size < UNIT or any(r[3] > MAX_BLOCK for r in rows):
        return None
    places, extents, strides, block = zip(*rest, *last, strict=True)
    return Box(offset, places, extents, strides, block)


def _steps(address: Index) -> dict[Axis | None, int] | None:
    """By how much each axis moves it, and what it is at 0 (None); None where it is not affine."""
    out: dict[Axis | None, int] = {}
    for atoms, k in address.terms:
        if len(atoms) > 1 or not all(isinstance(a, Axis) for a in atoms):
            return None
        out[atoms[0] if atoms else None] = k  # type: ignore[index]
    return out


__all__ = ["Box", "box_of"]
