"""Reductions that keep too little of the device busy, as partial reductions and a combination.

In: the fused `Dag`. Out: the same, where groups of reductions with few rows have become two
kernels: partial results over parts of the reduced loops, and a reduction of those in a fixed order,
so that results repeat. A reduction whose rows lie side by side in memory (a sum over the first
dimension) is split of its reduced loops, with the rows as columns; one with long
contiguous rows gets a new parallel loop over parts of each row. A reduction over rows is cut into
them where it then runs beside the reductions that it waits for, which read them too (one sum of
everything behind a norm of each row); on a CPU, whose threads share rows as they are, that is the
only reason. Many partial results are split again.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from deuteron.base.device import DeviceSpec
from deuteron.ir.index import hint, product
from deuteron.ir.program import Compute, Layout
from deuteron.schedule import profit
from deuteron.schedule.columns import columns, rows_of
from deuteron.schedule.dag import Node
from deuteron.schedule.fuse import Fusion
from deuteron.schedule.group import Group, group_of_one
from deuteron.schedule.legality import Refusal, fits
from deuteron.schedule.split_reductions import outermost_first, split_into_parts

# Parts of rows that a device works on at a time, per multiprocessor.
PARTS_PER_CORE = 4
# Results of so many parts one program combines in about the time of a launch.
MAX_PARTS = 1 << 14
# A part has at least this many elements.
MIN_PART = {"cuda": 2048, "cpu": 256}
# A row that is read once, as a part of a reduction over several, has at least this many elements,
# beside which the partial result that it leaves (4 bytes, written and read) is little.
MIN_INNER_ROW = {"cuda": 64, "cpu": 256}
# A part of at most this many elements is on chip.
MAX_ON_CHIP_PART = 8192
# The same where rows lie side by side; that many of them are walked together.
MIN_COLUMN_PART = 64
COLUMNS_TOGETHER = 32


@dataclass(frozen=True)
class Split:
    main: Group
    tail: tuple[tuple[Compute, int], ...]
    layouts: dict[str, Layout]


def split_groups(fusion: Fusion, inside: Callable[[], AbstractSet[str]] = frozenset) -> bool:
    """Splits every group for which it pays, then lets the new computations fuse; whether there was
    one. What is `inside` of a kernel with products stays."""
    changed: list[Node] = []
    for node in list(fusion.dag.nodes.values()):
        group = node.content
        if not isinstance(group, Group) or not group.reductions or group.row_split is not None:
            continue
        spec = fusion.spec(group)
        length = hint(group.space.row)
        if fusion.partial & group.reads.keys() and length <= MAX_PARTS:
            continue  # it combines partial results already
        beside = bool(rows_inside(group, fusion.layouts, spec))
        # Threads of a CPU share rows as they are: only what else reads the rows inside counts.
        if spec.kind == "cpu" and not beside:
            continue
        keep = fusion.stored(group, {node.id})
        now = profit.cost(group, fusion.layouts, keep, spec, whole=True)
        if not beside and (
            now.occupancy >= profit.least_occupancy(group, fusion.layouts)
            and now.waits <= max(profit.MIN_WAITS_US, profit.MIN_WAIT_SHARE * now.busy)
            or not profit.splittable(group, fusion.layouts, spec)
        ):
            continue
        parted = split_group(group, fusion, spec)
        if parted is None:
            continue
        layouts = ChainMap(parted.layouts, fusion.layouts)
        keep = fusion.stored(parted.main, {node.id})
        keep += [n for n in parted.layouts if n in parted.main.names]
        first = profit.cost(parted.main, layouts, keep, spec, whole=True)
        late = profit.combination_cost(parted.layouts.values(), spec)
        again = spec.memory_us(profit.read_again(group, fusion.layouts))
        then = first.us + late.us + again + profit.launch_us(spec)
        if beside:
            then -= saved_by_reading_once(parted, first, group, fusion, spec)
        if then >= now.us or inside() & set(group.names):
            continue
        fusion.record.add(
            "decision",
            subject="split",
            accepted=True,
            reason="rows are read once" if beside else "more of the device is busy",
            detail="" if beside else f"{now.occupancy:.0%} -> {first.occupancy:.0%}",
            first=group.members[-1].name,
            second="",
            bytes=first.bytes + late.bytes - now.bytes,
            us=round(now.us - then, 3),
        )
        fusion.keep(parted.layouts)
        changed += fusion.replace(node, parted.main, parted.tail)
    fusion.resume(changed)
    return bool(changed)


def saved_by_reading_once(
    split_group: Split, cost: profit.Cost, group: Group, fusion: Fusion, spec: DeviceSpec
) -> float:
    """Microseconds that the main part of a split group saves in one nest with the groups whose
    results it reads, where that is legal."""
    main, layouts = split_group.main, ChainMap(split_group.layouts, fusion.layouts)
    whole, separate_us = main, cost.us
    inside: set[int] = set()
    for home in dict.fromkeys(fusion.dag.home.get(name) for name in group.reads):
        maker = None if home is None else fusion.dag.nodes[home]
        if maker is None or not isinstance(maker.content, Group):
            continue
        both = fits(maker.content, whole, layouts, fusion.owner)
        if isinstance(both, Group):
            whole, separate_us = both, separate_us + fusion.cost(maker).us + profit.launch_us(spec)
            inside.add(maker.id)
    keep = [*fusion.stored(whole, inside), *main.names]
    return separate_us - profit.cost(whole, layouts, keep, spec, whole=True).us


def split_group(group: Group, fusion: Fusion, spec: DeviceSpec) -> Split | None:
    """The group's reductions in parts; None where there is no way, as for sums of nothing."""
    if any(m.compute.target is not None for m in group.members):
        return None
    if any(a.extent.value == 0 for a in group.space.reduced):
        return None
    if profit.side_by_side(group, fusion.layouts) and not profit.chained(group):
        base, table = rows_of(group)
        row_split = columns(base, group, table, fusion.layouts, fusion.owner, spec)
        if not isinstance(row_split, Refusal):
            return Split(row_split.main, row_split.tail, row_split.layouts)
    return _split_rows(group, fusion, spec)


def _split_rows(group: Group, fusion: Fusion, spec: DeviceSpec) -> Split | None:
    """Every reduction of the group over parts of its rows."""
    reductions = split_into_parts(group, fusion.layouts, part_count(group, fusion.layouts, spec))
    if reductions is None:
        return None
    made = {n: c.layout for n, (c, _) in reductions.made.items()}
    made.update({n: c.layout for n, c in reductions.late.items()})
    layouts = ChainMap(made, fusion.layouts)
    tail = list(reductions.combined)
    early = [group_of_one(c, p) for c, p in reductions.made.values()]
    main = early[0]
    for g in early[1:]:
        both = fits(main, g, layouts, fusion.owner)
        if not isinstance(both, Group):
            return None
        main = both
    waits = {m.name for m in group.members if m.kind == "reduction"}
    for m in group.members:
        if m.kind == "reduction":
            continue
        if m.level == "point" and not any(r.tensor in waits for r in m.reads):
            both = fits(main, group_of_one(m.compute, m.position), layouts, fusion.owner)
            if isinstance(both, Group):
                main = both
                continue
        # What the partial reductions need of a value at points is in their bodies. Where its own
        # loops are not those of the parts, it is computed beside what waits for the reductions.
        tail.append((m.compute, m.position))
        waits.add(m.name)
    return Split(main, tuple(tail), made)


def part_count(group: Group, layouts: Mapping[str, Layout], spec: DeviceSpec) -> int:
    """How many parts of a row keep the device busy, each with enough to do."""
    rows = hint(group.space.rows)
    length = hint(group.space.row)
    if profit.side_by_side(group, layouts):
        programs = max(1, rows // COLUMNS_TOGETHER)
        return min(PARTS_PER_CORE * spec.cores // programs, length // MIN_COLUMN_PART)
    inside = rows_inside(group, layouts, spec)
    if inside:
        return inside
    wish = max(2, PARTS_PER_CORE * spec.cores // max(1, rows))
    if profit.chained(group):  # parts that fit on chip need no rule to be read once
        wish = max(wish, -(-length // MAX_ON_CHIP_PART))
    return min(wish, length // MIN_PART[spec.kind])


def rows_inside(group: Group, layouts: Mapping[str, Layout], spec: DeviceSpec) -> int:
    """How many long rows a row of the group consists of, where something that it reads has one
    value for each of them (the statistics of a softmax whose loss is summed): as parts they read
    that once, and run beside what computes it. 0 where there are none."""
    nest = group.nest(dict(layouts), ())
    order = outermost_first(nest, layouts)
    if len(order) < 2:
        return 0
    outer, inner = order[:-1], order[-1]
    shared = any(
        i.axes() & set(outer) and not any(inner in j.axes() for j in index)
        for e in nest.exprs()
        for name, index, _ in (n.attr for n in e.loads())
        for i in index
    )
    count = hint(product(a.extent for a in outer))
    long = hint(inner.extent) >= MIN_INNER_ROW[spec.kind]
    return count if shared and long else 0


__all__ = ["split_groups"]
