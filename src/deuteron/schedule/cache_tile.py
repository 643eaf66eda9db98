"""Tilings of nests with contractions where tiles lie in caches: candidates, and what each is
estimated to take. Like `schedule.tile`, which asks here for machines without shared memory.

A thread takes one program after the other. The last dimension of a value is contiguous, in vector
registers: dimensions are ordered so that of each contraction m and k stand before n. Which side is
n: one that lies in memory along it, else one that is turned outside of loops (of ``q k``, q).

Dots take a tile of the result in registers, whatever the blocks: those decide how often what is in
a cache is read, and what fits there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from deuteron.base.device import DeviceSpec
from deuteron.base.products import PROGRAM_NS, Product, memory_us
from deuteron.base.products import library_us as product_us
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Index, hint, product
from deuteron.ir.nest import Nest, Reduce, Store, roots
from deuteron.ir.operations import ITEMSIZE
from deuteron.ir.program import Layout
from deuteron.schedule import tile
from deuteron.schedule.dimensions import dimensions
from deuteron.schedule.loop_passes import Shares
from deuteron.schedule.tiling import Dim, Tiling

Group = tuple[tuple[Axis, ...], str]  # axes with one role
# (m, n, k) blocks of products, and what of the f32 rate (`DeviceSpec`) they reach: EPYC with
# AVX-512, two threads, 28 products of 0.2 to 270 M multiplications, 0.6 to 1.1, median 0.9.
PRODUCT_BLOCKS = (((64, 64, 256), 0.9), ((128, 128, 128), 0.9), ((32, 64, 256), 0.9))
# (rows, keys) blocks where a second product reads the first's result.
CHAIN_BLOCKS = (((64, 64), 1.3), ((64, 128), 1.3), ((128, 64), 1.3), ((32, 64), 1.2))
# Of the f32 rate what exponentials and the like reach, which wait for one another: one core of an
# EPYC with AVX-512, 16 K of them 3.4 us (12 FLOPs each).
VECTOR_EFFICIENCY = 0.55
# Nanoseconds of an element that lies strided along vector registers: a line of its own is read or
# written. Xeon with AVX-512, 256 x 1024 stored along the wrong dimension: 1.2 ms.
STRIDED_NS = 4.0
# Nanoseconds of an element of a factor that is turned, where rows fill a register and where not
# (EPYC with AVX-512, 66 products: 32 x 32 by 32 x 68 0.06, 16 x 64 by 64 x 8 0.9).
TURNED_NS = (0.06, 0.55)
TILE_SHARE = 0.5  # of the second cache, that tiles may take


def candidates(
    nest: Nest, layouts: Mapping[str, Layout], spec: DeviceSpec
) -> list[tuple[Tiling, tile.Estimate]]:
    """Feasible tilings, the best estimate first."""
    ordered = in_order(nest, dimensions(nest), layouts)
    if ordered is None:
        return []
    tilings = dict.fromkeys(t for t in _tilings(nest, ordered) if feasible(nest, t, spec))
    shares = Shares(nest)
    scored = [(t, estimate(nest, t, layouts, spec, shares)) for t in tilings]
    return sorted(scored, key=lambda x: x[1].us)


def in_order(
    nest: Nest, groups: Sequence[Group], layouts: Mapping[str, Layout]
) -> list[Group] | None:
    """Batches first; then so that m and k stand before n. None where no order does."""
    of = {a: axes for axes, _ in groups for a in axes}
    loops = {a for axes, role in groups if role == "loop" for a in axes}
    before: set[tuple[tuple[Axis, ...], tuple[Axis, ...]]] = set()
    for c in nest.contractions.values():
        sides = [(c.n, c.b, c.m), (c.m, c.a, c.n)]
        sides.sort(key=lambda s: _turned(nest, s[1], s[0], loops, layouts))
        for last, _, other in sides:
            new = before | {(of[x], of[last[0]]) for x in (*other[:1], *c.over[:1])}
            if _sorted(groups, new) is not None:
                before = new
                break
        else:
            return None
    return _sorted(groups, before)


def _turned(
    nest: Nest, factor: Expr, last: Sequence[Axis], loops: set[Axis], layouts: Mapping[str, Layout]
) -> int:
    """How dear a factor is as the one that lies along `last`."""
    along = len(last) == 1 and _lies_along(nest, factor, last[0], layouts)
    return 0 if along else 1 + bool(loops & set(nest.axes_of(factor)))


def _lies_along(nest: Nest, e: Expr, axis: Axis, layouts: Mapping[str, Layout]) -> bool:
    """Whether it is in memory (not a result of the nest), contiguous along the axis."""
    if e.op != "load" or e.attr[0] in nest.reductions:
        return False
    step = layouts[e.attr[0]].address(e.attr[1]).coefficient(axis)
    return step is not None and step.value == 1


def _sorted(
    groups: Sequence[Group], before: set[tuple[tuple[Axis, ...], tuple[Axis, ...]]]
) -> list[Group] | None:
    order = [g for g in groups if g[1] == "batch"]
    left = [g for g in groups if g[1] != "batch"]
    while left:
        free = [g for g in left if not any((e[0], g[0]) in before for e in left)]
        if not free:
            return None
        order.append(free[0])
        left.remove(free[0])
    return order


def _tilings(nest: Nest, groups: Sequence[Group]) -> Iterator[Tiling]:
    roles = dict(groups)
    extent = {axes: tile.known(axes) for axes in roles}
    whole = [axes for axes, role in groups if role in ("whole", "inner")]
    if any(extent[axes] > tile.MAX_WHOLE for axes in whole):
        return
    products = nest.contractions
    if not products:
        return
    first = next(iter(products.values()))
    for blocks, efficiency in CHAIN_BLOCKS if whole else PRODUCT_BLOCKS:
        if len(products) == 1:  # what is multiplied comes from memory, not from registers
            efficiency = PRODUCT_BLOCKS[0][1]
        dims = []
        for k, (axes, role) in enumerate(groups):
            mode = {"batch": "grid", "inner": "whole", "turns": "loop"}.get(role, role)
            if role in ("grid", "loop"):
                inside = 1 if whole or set(axes) & set(first.n) else 2
                side = 0 if set(axes) & set(first.m) else inside
                block = int(min(blocks[side], extent[axes]))
            else:
                block = int(extent[axes]) if mode == "whole" else 1
            dims.append(Dim(tile.NAMES[k] if k < len(tile.NAMES) else f"d{k}", axes, mode, block))
        yield Tiling(tuple(dims), 0, 0, efficiency)


def feasible(nest: Nest, tiling: Tiling, spec: DeviceSpec) -> bool:
    """Whether tiles fit into the second cache (results, and factors that are turned), and products
    are dots."""
    if not tile.are_dots(nest, tiling):
        return False
    sides = [set(nest.axes_of(x)) for c in nest.contractions.values() for x in (c.a, c.b)]
    held = [set(nest.lives(s)) for s in nest.reductions.values()] + sides
    size = sum(4 * tile.tile_of(tiling, axes) for axes in held)
    return size <= TILE_SHARE * spec.l2 and not tile.crossed(nest, tiling)


def estimate(
    nest: Nest, tiling: Tiling, layouts: Mapping[str, Layout], spec: DeviceSpec, shares: Shares
) -> tile.Estimate:
    """FLOPs of dots and of the rest, one after the other, by as many threads as have programs; and
    what must be moved, each tensor once: the rest comes from caches."""
    products, cut = nest.contractions, shares.of(tiling)
    dots = vector = strided = turned = done = 0.0
    lanes = spec.vector_bits // 32
    for s in nest.statements:
        axes = set(nest.lives(s)) | (set(s.over) if isinstance(s, Reduce) else set())
        share = cut.get(s.name, 1.0) if isinstance(s, Reduce) else 1.0
        points = places(tiling, axes) * share
        if isinstance(s, Reduce) and s.name in products:
            c = products[s.name]
            last = _last(tiling, {*c.m, *c.n})
            dots += 2.0 * points * _padded(last, lanes)
            done += 2.0 * points
            for side in s.body.args:
                for work, where in nest.work(side):
                    vector += work * _lanes(tiling, where, lanes) * share
                if side.op != "load":
                    where = set(nest.axes_of(side))
                    found = _strided(nest, (side,), (), tiling, layouts)
                    strided += places(tiling, where) * share * found
            right, along = (c.b, c.n) if set(last.axes) & set(c.n) else (c.a, c.m)
            if not (len(along) == 1 and _lies_along(nest, right, along[0], layouts)):
                each = TURNED_NS[last.block < lanes]
                turned += each * places(tiling, set(nest.axes_of(right))) * share
        else:
            vector += len(roots(s)) * _lanes(tiling, axes, lanes) * share
            for work, where in (part for e in roots(s) for part in nest.work(e)):
                vector += work * _lanes(tiling, where, lanes) * share
            stored = [(s.tensor, s.index)] if isinstance(s, Store) else []
            strided += points * _strided(nest, roots(s), stored, tiling, layouts)
    reads, writes = nest.tensors()
    moved = sum(layouts[n].nbytes_hint for n in (*reads, *writes))
    programs = tiling.programs()
    compute = spec.compute_us(dots) / tiling.efficiency
    compute += spec.compute_us(vector) / VECTOR_EFFICIENCY
    compute += (strided * STRIDED_NS + turned + programs * PROGRAM_NS) / 1e3 / spec.cores
    compute *= math.ceil(programs / spec.cores) * spec.cores / programs
    us = spec.launch_us + memory_us(moved, spec) + compute
    return tile.Estimate(us, float(moved), done + vector)


def places(tiling: Tiling, axes: set[Axis]) -> float:
    """As `tile.points`; but loops end where a dimension does."""
    total = tile.points(tiling, axes)
    for d in tiling.dims:
        if all(d.varies(axes)):
            total *= d.extent / (d.count * d.block)
    return total


def _lanes(tiling: Tiling, axes: set[Axis], lanes: int) -> float:
    """The same with rows of whole registers."""
    inside = [d for d in tiling.dims if d.varies(axes)[0]]
    return places(tiling, axes) * (_padded(inside[-1], lanes) if inside else 1.0)


def _last(tiling: Tiling, axes: set[Axis]) -> Dim:
    """The dimension of these axes along which the rows of a tile lie."""
    return next(d for d in reversed(tiling.dims) if not axes.isdisjoint(d.axes))


def _padded(d: Dim, lanes: int) -> float:
    """Lanes of whole registers over places, where rows lie along a dimension."""
    whole, rest = divmod(d.extent, d.block)
    filled = whole * -(-d.block // lanes) + -(-rest // lanes)
    return filled * lanes / max(d.extent, 1)


def _strided(
    nest: Nest,
    values: Sequence[Expr],
    stored: Sequence[tuple[str, tuple[Index, ...]]],
    tiling: Tiling,
    layouts: Mapping[str, Layout],
) -> int:
    """How many tensors are read, or written, along another dimension than they lie."""
    results = nest.reductions
    places = [n.attr[:2] for e in values for n in e.loads() if n.attr[0] not in results]
    places += stored
    count = 0
    for name, index in dict.fromkeys(places):
        address = layouts[name].address(index)
        blocks = [d for d in tiling.dims if d.block > 1 and address.axes() & set(d.axes)]
        step = address.coefficient(blocks[-1].axes[-1]) if len(blocks) > 1 else None
        count += step is not None and step.value != 1
    return count


def sole_product(nest: Nest, layouts: Mapping[str, Layout]) -> Product | None:
    """The one product of a nest, as a call of the library; None where a factor is a vector."""
    products = nest.contractions
    if not products:
        return None
    ((name, c),) = products.items()
    batch, m, k, n = (hint(product(a.extent for a in x)) for x in (c.batch, c.m, c.over, c.n))
    left, right = (_lies_along(nest, factor, c.over[-1], layouts) for factor in (c.a, c.b))
    dtype = nest.reductions[name].body.dtype
    return Product(batch, m, k, n, dtype, ITEMSIZE[dtype], (left, right), around=False)


def library_us(nest: Nest, layouts: Mapping[str, Layout], spec: DeviceSpec) -> float | None:
    """A call of the library for the one product of a nest; None where a factor is a vector."""
    found = sole_product(nest, layouts)
    return product_us(found, spec) if found else None


__all__ = ["candidates", "feasible", "in_order", "library_us", "sole_product"]
