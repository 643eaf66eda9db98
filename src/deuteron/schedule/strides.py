"""Bytes of a CPU's cache lines that a loop order touches beyond those that it uses.

In: a `Group` (its reads are index maps over its loops) and the device. Out: bytes. `profit.cost`
counts each element that is read once; a walk along another axis than the contiguous one moves a
line for each, unless the cache keeps it until the neighbour's turn.
Loops over points alone are tiled by the generators and cost nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from deuteron.base.device import DeviceSpec
from deuteron.base.memo import MEMO
from deuteron.ir.index import Axis, Index, Value, hint, product
from deuteron.ir.operations import ITEMSIZE
from deuteron.ir.program import Layout
from deuteron.schedule.group import Group

LINE_BYTES = 64  # of a CPU's caches
# Bytes that an element costs that lies in a line which the cache still holds: nothing is moved, but
# lanes take elements one by one. EPYC with AVX-512, x @ W.T of one row, 3000 x 900 f32, W walked
# down its columns: 2.4 ms instead of 0.9.
CACHED_LINE_COST = 16
# Lanes that a CPU's loop over columns takes together: `codegen.cpp.columns.block_lanes`.
COLUMN_LANES = 512

Access = tuple[tuple[Index, ...], tuple[Index, ...]]
_STEPS: dict[Access, dict[Axis, int] | None] = MEMO.answers()


def steps(index: tuple[Index, ...], layout: Layout) -> dict[Axis, int] | None:
    """How many elements the address goes on with each loop that it depends on (hinted), or None
    where that is no number: at loaded places, in quotients and remainders."""
    key = (index, layout.strides)
    if key not in _STEPS:
        strides: dict[Axis, int] | None = {}
        for i, stride in zip(index, layout.strides, strict=True):
            for a in i.atoms():
                by = i.coefficient(a) if isinstance(a, Axis) else None
                if isinstance(a, Value) or by is None or strides is None:
                    strides = None
                    break
                assert isinstance(a, Axis)
                strides[a] = strides.get(a, 0) + hint(by) * hint(stride)
        _STEPS[key] = strides
    return _STEPS[key]


def strided_bytes(
    group: Group,
    layouts: Mapping[str, Layout],
    spec: DeviceSpec,
    stored: Iterable[str] = (),
) -> int:
    """Bytes that the group touches on a CPU beyond the elements that it reads and stores, of the
    members `stored`; on a GPU lines count (`programs`)."""
    if not group.reductions or spec.kind == "cuda":
        return 0
    accesses = [
        (strides, ITEMSIZE[layouts[name].dtype])
        for name, indices in group.reads.items()
        for index in indices
        if (strides := steps(index, layouts[name])) is not None and len(strides) > 1
    ]
    accesses += [  # a line is read and written
        (strides, ITEMSIZE[layouts[n].dtype])
        for n in dict.fromkeys(stored)
        if group.names[n].level == "point" and group.names[n].kind == "point"
        if (strides := steps(group.names[n].index, layouts[n])) is not None and len(strides) > 1
    ]
    axes = group.space.reduced if group.row_split is not None else group.space.axes
    inner = {a for s, _ in accesses for a, by in s.items() if abs(by) == 1}
    walks = [a for a in axes if a in inner] or list(axes[-1:])
    return min(
        (sum(_beyond(s, (a,), item, group, spec) for s, item in accesses) for a in walks),
        default=0,
    )


def _beyond(
    s: dict[Axis, int], walk: Sequence[Axis], item: int, group: Group, spec: DeviceSpec
) -> int:
    """Bytes of one access beyond its elements, if the loops `walk` are the innermost."""
    by = min((abs(s[a]) for a in walk if s.get(a)), default=0) * item
    if by <= max(item, 8):  # the same element, the next one, the next but one of 4 bytes
        return 0
    touched = min(LINE_BYTES, by)
    if any(0 < abs(step) * item < LINE_BYTES for a, step in s.items() if a not in walk):
        lines = hint(group.space.row)
        if walk[0] in group.space.parallel:
            lines = min(COLUMN_LANES, hint(walk[0].extent))
        if lines <= cached_lines(by, spec):
            touched = min(touched, CACHED_LINE_COST)
    return hint(product(a.extent for a in s)) * max(0, touched - item)


def cached_lines(by: int, spec: DeviceSpec) -> int:
    """Lines that stay in a core's cache, of which each is `by` bytes from the one before: a set of
    the cache takes few of those that are a power of two apart."""
    return spec.l2 // 2 // max(LINE_BYTES, by & -by)


__all__ = ["cached_lines", "steps", "strided_bytes"]
