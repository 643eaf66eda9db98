"""Folds that keep too little of the device busy, as partial folds and a combination.

In: the fused `Dag`. Out: the same, where groups of folds with few rows have become two kernels:
partial results over parts of the reduced loops, and a fold of those in a fixed order, so that
results repeat. A fold whose rows lie side by side in memory (a sum over the first dimension) is cut
into chunks of its reduced loops, with the rows as columns; one with long contiguous rows gets a new
parallel loop over parts of each row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deuteron.base.device import DeviceSpec
from deuteron.ir import expr as E
from deuteron.ir.expr import REDUCTIONS, Expr
from deuteron.ir.index import Axis, Index, const, floordiv, hint, product
from deuteron.ir.program import Compute, Layout, contiguous
from deuteron.schedule import profit
from deuteron.schedule.columns import columns, rows_of
from deuteron.schedule.dag import Node
from deuteron.schedule.fuse import Fusion
from deuteron.schedule.group import Group, alone
from deuteron.schedule.legality import Refusal, fits

# Parts of rows that a device works on at a time, per multiprocessor.
PARTS = 4
# A part has at least this many elements.
SHORTEST = 2048


@dataclass(frozen=True)
class Split:
    main: Group
    tail: tuple[tuple[Compute, int], ...]
    layouts: dict[str, Layout]


def relieve(fusion: Fusion) -> None:
    """Splits every group for which it pays, then lets the new computations fuse."""
    changed: list[Node] = []
    for node in list(fusion.dag.nodes.values()):
        group = node.content
        if not isinstance(group, Group) or not group.folds or group.chunk is not None:
            continue
        spec = fusion.spec(group)
        if not profit.splittable(group, spec):
            continue
        keep = fusion.stored(group, {node.id})
        now = profit.cost(group, fusion.layouts, keep, spec, whole=True)
        if now.occupancy >= profit.LOW:
            continue
        found = split(group, fusion, spec)
        if found is None:
            continue
        fusion.layouts.update(found.layouts)
        keep = fusion.stored(found.main, {node.id})
        keep += [n for n in found.layouts if n in found.main.names]
        first = profit.cost(found.main, fusion.layouts, keep, spec, whole=True)
        late = profit.tail(found.layouts.values(), spec)
        then = first.us + late.us + profit.launch_us(spec)
        if then >= now.us:
            continue
        fusion.record.add(
            "decision",
            subject="split",
            accepted=True,
            reason="more of the device is busy",
            detail=f"{now.occupancy:.0%} -> {first.occupancy:.0%}",
            first=group.members[-1].name,
            second="",
            bytes=first.bytes + late.bytes - now.bytes,
            us=round(now.us - then, 3),
        )
        changed += fusion.replace(node, found.main, found.tail)
    fusion.resume(changed)


def split(group: Group, fusion: Fusion, spec: DeviceSpec) -> Split | None:
    if profit.side_by_side(group, fusion.layouts):
        base, table = rows_of(group)
        found = columns(base, group, table, fusion.layouts, fusion.owner, spec)
        if isinstance(found, Refusal):
            return None
        return Split(found.main, found.tail, found.layouts)
    return _parts(group, fusion, spec)


def _parts(group: Group, fusion: Fusion, spec: DeviceSpec) -> Split | None:
    """Every fold of the group over parts of its rows."""
    if profit.chained(group) or any(m.compute.target is not None for m in group.members):
        return None
    tail: list[tuple[Compute, int]] = []
    made: dict[str, Layout] = {}
    main: Group | None = None
    rows = hint(group.space.rows)
    count = max(2, PARTS * spec.cores // max(1, rows))
    early: list[Group] = []
    late: set[str] = set()
    for m in group.members:
        c = m.compute
        if m.kind == "fold":
            pieces = in_parts(c, count)
            if pieces is None:
                return None
            part, combine = pieces
            made[part.name] = part.layout
            fusion.layouts[part.name] = part.layout
            tail.append((combine, m.position))
            early.append(alone(part, m.position))
        elif any(r.tensor in late or r.tensor in _folds(group) for r in m.reads):
            tail.append((c, m.position))
            late.add(m.name)
        elif m.level == "point" and m.kind == "point":
            early.append(alone(c, m.position))
        else:
            return None
    for g in early:
        if main is None:
            main = g
            continue
        both = fits(main, g, fusion.layouts, fusion.owner)
        if not isinstance(both, Group):
            return None
        main = both
    return Split(main, tuple(tail), made) if main is not None else None


def _folds(group: Group) -> set[str]:
    return {m.name for m in group.members if m.kind == "fold"}


def in_parts(c: Compute, count: int) -> tuple[Compute, Compute] | None:
    """A fold as partial folds ``part[..., k]`` and their fold."""
    kind, bound = c.body.attr
    if kind.startswith("arg"):
        return None
    axis = max(bound, key=lambda a: (hint(a.extent), -bound.index(a)))
    total = hint(product(a.extent for a in bound))
    count = max(1, min(count, total // SHORTEST, max(1, hint(axis.extent))))
    n = axis.extent
    if n.value is not None:
        count = _divisor(n.value, count)
    if count < 2:
        return None
    length = floordiv(n + (count - 1), count)
    k = Axis(f"d{len(c.axes)}", count)
    inner = Axis(axis.name, length)
    place: Index = k.index * length + inner.index
    body: Expr = c.body.args[0].substitute({axis: place})
    if n.value is None or n.value % count:
        mask = E.op("lt", E.index_value(place), E.index_value(n))
        nothing = E.literal(REDUCTIONS[kind].identity(body.dtype), body.dtype)
        body = E.op("where", mask, E.with_mask(body, mask), nothing)
    axes = (*c.axes, k)
    shape = tuple(a.extent for a in axes)
    layout = contiguous(shape, c.body.dtype, c.layout.device)
    left = tuple(inner if a is axis else a for a in bound)
    part = Compute(f"{c.name}.part", axes, E.reduce(kind, left, body), layout, origins=c.origins)
    worker = Axis("r0", const(count))
    index = (*(a.index for a in c.axes), worker.index)
    load = E.load(part.name, index, c.body.dtype)
    return part, replace(c, body=E.reduce(kind, (worker,), load))


def _divisor(n: int, wish: int) -> int:
    """A divisor of `n` near `wish` (not much smaller), else `wish`."""
    for d in range(wish, max(1, wish // 2), -1):
        if n % d == 0:
            return d
    return wish


__all__ = ["in_parts", "relieve"]
