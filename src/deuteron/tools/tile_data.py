"""A kernel with products as plain values for reports: its tiling, those it was chosen from, and
what its masks leave out.

In: a kernel of the schedule. Out: a dictionary of numbers, strings, lists and dictionaries; times
are microseconds, predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deuteron.base.device import DeviceSpec
from deuteron.ir.index import Index, Value, const, evaluate, substitute
from deuteron.ir.nest import Nest, Reduce, roots
from deuteron.ir.program import Layout
from deuteron.schedule.cover import tilings
from deuteron.schedule.dimensions import is_nested
from deuteron.schedule.kernel import Kernel
from deuteron.schedule.loop_passes import cut_off, passes
from deuteron.schedule.masks import Bound
from deuteron.schedule.tiling import Dim, Tiling

Data = dict[str, Any]


def tile_data(kernel: Kernel, layouts: Mapping[str, Layout], spec: DeviceSpec) -> Data | None:
    """None for a kernel without products. `chained`: a product has another's result as a factor;
    `dims`: see `schedule.tiling`, with the tensors and dimensions that are read `along` them;
    `candidates`: the best first; `loops`: see `tile_classes`."""
    if kernel.contraction is None:
        return None
    nest, tiling = kernel.contraction
    found = tilings(spec).candidates(nest, layouts, spec)
    products = nest.contractions
    return {
        "tiling": str(tiling),
        "chained": any(is_nested(nest, nest.reductions[n]) for n in products),
        "dims": [
            {
                "name": d.name,
                "mode": d.mode,
                "block": d.block,
                "extent": d.extent,
                "along": along(nest, d),
            }
            for d in tiling.dims
        ],
        "candidates": [
            {"tiling": str(t), "us": e.us, "bytes": e.bytes, "chosen": t == tiling}
            for t, e in found
        ],
        "loops": [tile_classes(nest, tiling, d) for d in tiling.dims if d.mode == "loop"],
    }


def tile_classes(nest: Nest, tiling: Tiling, loop: Dim) -> Data:
    """The tiles of a loop's blocks and of the blocks of the rows that its masks depend on: `full`
    ones, in which no element is masked, `partial` ones, and those that are `skipped`. A loop that
    no mask cuts has full tiles only, of one block of rows; of several passes what all of them
    skip. Where numbers that are `loaded` (tensors) cut it, too, how many are full or partial is
    known at run time only (None), and at least `skipped` are."""
    chain, of = passes(nest, loop.axes)
    inside = [s for s in of if isinstance(s, Reduce) or set(nest.lives(s)) & set(loop.axes)]
    every, _ = cut_off(nest, loop.axes, inside, chain)
    cut = [b for b in every if not b.loaded]
    others = {a for b in cut for a in b.index.axes()}
    rows = tiling.dim_of(next(iter(others))) if len(others) == 1 else None
    counts = {"full": loop.count, "partial": 0, "skipped": 0}
    if rows is not None and rows.axes == tuple(others):
        counts = dict.fromkeys(counts, 0)
        for first in range(0, rows.extent, rows.block):
            last = min(first + rows.block, rows.extent) - 1
            for name, count in _classes(cut, loop, (first, last)).items():
                counts[name] += count
    masks = {c.end.attr[0]: {n.attr[0] for n in c.hidden.loads()} for c in nest.cuts}
    names = {n for b in every for n in loaded_by(b)}
    total = sum(counts.values())
    loaded = sorted(set[str]().union(*(masks.get(n, {n}) for n in names)))
    unknown = dict.fromkeys(("full", "partial")) if loaded else {}
    return {
        "dimension": loop.name,
        "extent": loop.extent,
        "block": loop.block,
        "rows": rows.block if rows is not None else None,
        "tiles": total,
        "loaded": loaded,
        **counts,
        **unknown,
    }


def along(nest: Nest, d: Dim) -> list[list[Any]]:
    """The tensors in memory that are read along a dimension, with the number of theirs."""
    found: dict[tuple[str, int], None] = {}
    results = nest.reductions
    for load in (n for s in nest.statements for e in roots(s) for n in e.loads()):
        name, index, _ = load.attr
        if name not in results:
            found.update(((name, k), None) for k, i in enumerate(index) if i.axes() & set(d.axes))
    return [list(pair) for pair in found]


def loaded_by(b: Bound) -> set[str]:
    """The tensors whose numbers say where a bound is."""
    values = (a.expr for a in b.index.atoms() if isinstance(a, Value))
    return {n.attr[0] for e in values for n in e.loads()}


def _classes(cut: Sequence[Bound], loop: Dim, rows: tuple[int, int]) -> dict[str, int]:
    """Blocks of the loop, beside the rows from the first to the last. Bounds are linear: a block's
    largest and least are those of these two."""
    low_any = low_all = 0
    high_any = high_all = loop.extent
    for b in cut:
        least, most = sorted(_value(b.index, x) for x in rows)
        if b.upper:
            high_any, high_all = min(high_any, most), min(high_all, least)
        else:
            low_any, low_all = max(low_any, least), max(low_all, most)
    walked = -(-max(high_any, 0) // loop.block) - low_any // loop.block
    end = loop.count if high_all >= loop.extent else max(high_all, 0) // loop.block
    walked, full = max(0, walked), max(0, end - -(-low_all // loop.block))
    return {"full": full, "partial": walked - full, "skipped": loop.count - walked}


def _value(index: Index, row: int) -> int:
    return evaluate(substitute(index, {a: const(row) for a in index.axes()}), {})


__all__ = ["tile_classes", "tile_data"]
