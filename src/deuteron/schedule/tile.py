"""Tilings of nests with contractions: candidates, and what each is estimated to take.

In: an `ir.nest.Nest`, the layouts of its tensors, a device. Out: `Tiling`s with their time, the
best first. A printer chooses nothing: it gets a nest and one of these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from deuteron.base.device import DeviceSpec
from deuteron.base.products import MAX_WHOLE, MIN_TENSOR_CORE_SIDE
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Index, const, hint, product
from deuteron.ir.nest import Nest, Reduce, Statement, Store, roots
from deuteron.ir.operations import HALF, ITEMSIZE
from deuteron.ir.program import Layout
from deuteron.schedule.boxes import box_of
from deuteron.schedule.dimensions import Group, apart, dimensions, is_nested
from deuteron.schedule.lanes import LINE_FLOPS, Steps, most_lines, scattered, steps_of
from deuteron.schedule.loop_passes import Shares
from deuteron.schedule.picked import picks, places_of, tables
from deuteron.schedule.programs import places, power
from deuteron.schedule.tiling import Dim, Tiling

NAMES = "bijklmnopqrstuvw"  # of dimensions
MIN_SIDE = MIN_TENSOR_CORE_SIDE
# Measured figures (``python -m dev.measure.tilings``): by unit the blocks of products (m, n, k) and
# of products of which a second one reads the first's result (rows, keys), with warps, pipeline
# stages, what of the unit's rate (`DeviceSpec`) products reach in each of two `orders`, so that the
# estimate is what was measured, and how blocks are moved; what of the rate the library reaches.
FIGURES = json.loads(Path(__file__).with_name("tilings.json").read_text(encoding="utf-8"))
# Bytes that are copied to shared memory at once, at least. H100, 4093 x 333 by 333 x 517 of bf16, a
# residual added: 243 us in one kernel, whose factors go through registers; apart 40.
COPIED = 4
# What of the bandwidth a multiprocessor can use when others idle, as a multiple of its share.
ONE_CORE_BANDWIDTH = 1.6
# A block of a loop takes at least so long, us, where a multiprocessor has one program: H100, 8192 x
# 4096 by 4096 x 4096 in blocks of 64 x 64 x 128: 0.45, of 128 x 128 x 64: 0.41. For each product in
# it, where one waits for another's result, of which a warp has so many (0.3 of it however many),
# and what is computed between them: H200, 110 tilings of attention and its gradients, 4096 x 128,
# the chosen ones' times over the best's 1.03 (1.10 with 0.6 and without what is computed).
LOOP_US, CHAINED_LOOP_US, WARP_RESULTS = 0.4, 0.4, 1024
# What a program takes besides: its first blocks are on their way, its results are stored. H100, two
# models' products of K = 512 to 1024 with GELU, 128 x 256 columns: 1.5 of the time without it.
PROGRAM_US = 2.5
# What bringing an element of memory into registers takes, in FLOPs: an assumption, which decides
# only between summing rows in a loop and before it; not measured by itself. The figures of chains
# with several inner products were measured with it.
LOAD_FLOPS = 16
# What becomes of what tensor cores pick for an element (`schedule.picked`), in FLOPs.
PICK_FLOPS = 8
# What of the peak the arithmetic of products' factors and results reaches: an instruction is two
# FLOPs there, and few warps wait for one another's. In chains' figures it is contained. H200, 18
# programs with GELU, SiLU and norms before and behind products.
ARITHMETIC_SHARE = 0.35
# Of arithmetic and products, what the shorter one adds where several programs share a
# multiprocessor. Registers of a thread beside those that hold tiles.
OVERLAP_SHARE, OTHER_REGISTERS = 0.3, 40
RESERVED_SHARED = 1 << 10  # bytes that CUDA keeps of each program
# Rows that a warp group's tensor cores multiply at once, which take turned factors from shared
# memory; for fewer, turned ones go through registers. H200, one query of 32 heads: see `parts`.
WARP_GROUP = 64
ROW_BLOCK = 1024  # elements that four warps have of a row, 16 bytes of f32 a thread at once
# Columns of rows that such programs have, 512 bytes of f32; elements of those that they have whole.
COLUMNS, MAX_ROWS = 128, 8192
# What chains reach of narrower heads than the figures were measured with, as a power of the width's
# share: H200, f32, windows of 49 by 32 (figures: 64) take 1.3 to 2.1 times as long for each FLOP.
WIDTH_POWER = 0.7
REGISTER_SHARE = 0.78  # of a program's registers that accumulators may take
# Multiplications of a thread in a product on the f32 units, in sums of up to 32 places and longer
# ones, above which it spills, as Triton 3.6 unrolls it and has all factors at hand; twice as many
# where a factor comes through registers. sm_90, 16 to 128 rows and columns, 16 to 128 places:
# beyond that 0.2 to 5.8 KB of a thread's stack, within it none.
SHORT_SUM, MAX_SHORT, MAX_LONG = 32, 4096, 2048


@dataclass(frozen=True)
class Estimate:
    us: float
    bytes: float
    flops: float


def figures(table: str, kind: str) -> Any:
    """The rows of a table for a unit; what is not measured is as chains are."""
    unit = "half" if kind in HALF else kind
    return FIGURES[table].get(unit) or FIGURES["chains"][unit]


# -- candidates ------------------------------------------------------------------------------------


def candidates(
    nest: Nest, layouts: Mapping[str, Layout], spec: DeviceSpec
) -> list[tuple[Tiling, Estimate]]:
    """Feasible tilings, the best estimate first."""
    if narrow(nest, layouts):
        return []
    groups = dimensions(nest)
    if nest.contractions:
        ways = dict.fromkeys((tuple(groups), tuple(apart(nest, groups))))
        every = dict.fromkeys(t for way in ways for t in listed(nest, way, layouts, spec))
    else:
        every = dict.fromkeys((of_rows(nest, groups, layouts),))
    tilings = [t for t in every if feasible(nest, t, layouts, spec)]
    estimator = Estimator(nest, layouts, spec)
    scored = [(t, estimator.of(t)) for t in tilings]
    return sorted(scored, key=lambda x: (x[1].us, -x[0].efficiency))


def listed(
    nest: Nest,
    groups: Sequence[Group],
    layouts: Mapping[str, Layout],
    spec: DeviceSpec,
    table: Sequence[Any] | None = None,
) -> Iterator[Tiling]:
    """Tilings by the rows of a table: `FIGURES` has the usual one."""
    products = nest.contractions
    roles = dict(groups)
    extent = {axes: known(axes) for axes in roles}
    whole = (axes for axes, role in groups if role in ("whole", "inner"))
    if any(extent[axes] > MAX_WHOLE for axes in whole):
        return
    chained = any(role in ("whole", "inner") for role in roles.values())
    first = next(iter(products.values()))
    of = kind_of(nest, chained)
    table = table or figures(of, nest.unit)
    at = orders(nest, layouts)
    dim = cache(Dim)
    rows = max((extent[axes] for axes, role in groups if role == "grid" and chained), default=0)
    for blocks, warps, stages, reached, how in table:
        # H200, bf16, 64 rows, us: as blocks of 128 with 8 warps 2327, as blocks of 64 1228.
        if WARP_GROUP <= rows <= blocks[0] / 2:
            continue
        dims, left, width = [], 1.0, 1.0  # of the blocks that were measured, and their widths
        for k, (axes, role) in enumerate(groups):
            if role == "batch":
                block, mode = 1, "grid"
            elif role == "turns":  # a sum over a batch: one after the other
                block, mode = 1, "loop"
            elif role in ("whole", "inner"):
                block, mode = max(MIN_SIDE, power(int(extent[axes]))), "whole"
                width = min(width, block / figures("widths", nest.unit))
            else:
                sides = (set(axes) & set(first.m), set(axes) & set(first.n), True)
                side = int(role == "loop") if chained else list(map(bool, sides)).index(True)
                block = blocks[side]
                if extent[axes] < block:
                    block = max(MIN_SIDE, power(int(extent[axes])))
                    left *= 1.0 if role == "loop" or chained else block / blocks[side]
                mode = "whole" if role == "loop" and chained and extent[axes] <= block else role
            dims.append(dim(NAMES[k] if k < len(NAMES) else f"d{k}", axes, mode, block))
        if of == "chains" and all(d.block < WARP_GROUP for d in dims if d.mode == "grid"):
            dims.sort(key=lambda d: roles[d.axes] == "whole")  # as it is in memory
        programs = spec.cores if "persistent" in how else 0
        ways = ("fetches" in how, "puts" in how, programs)
        share = min(reached[k] for k in at) * math.sqrt(left) * width**WIDTH_POWER
        yield Tiling(tuple(dims), warps, stages, share, *ways)


def of_rows(nest: Nest, groups: Sequence[Group], layouts: Mapping[str, Layout]) -> Tiling:
    """Of what is made of rows, or of parts, that a kernel with products stored: a program has a
    row, or some of the columns along which these lie in memory."""
    results = nest.reductions
    every = (n.attr[:2] for s in nest.statements for e in roots(s) for n in e.loads())
    read = [layouts[n].address(at) for n, at in every if n not in results]
    most = max(read, key=lambda i: hint(product(a.extent for a in i.axes())), default=const(0))
    along = {a for a in most.axes() if (most.coefficient(a) or most).value == 1}
    grid: list[tuple[tuple[Axis, ...], str, int]] = []
    held, columns = list(grid), list(grid)
    for axes, role in groups:
        own = tuple(a for a in axes if role == "batch" and a in along)
        columns += [(own, "grid", min(COLUMNS, power(hint(own[0].extent))))] if own else []
        left = tuple(a for a in axes if a not in own)
        (grid if role == "batch" else held).append((left, "grid", 1))
    wide = columns[0][2] if columns else 1
    for k, (axes, _, _) in enumerate(held):
        places = known(axes) * wide
        whole = bool(columns) and places <= MAX_ROWS
        block = power(int(places)) if whole else ROW_BLOCK
        held[k] = axes, "whole" if whole else "loop", block // wide
    sizes = [x for x in (*grid, *held, *columns) if x[0]]
    named = zip(NAMES, sizes)
    return Tiling(tuple(Dim(n, axes, mode, block) for n, (axes, mode, block) in named), 4, 1)


def known(axes: Sequence[Axis]) -> float:
    """Places of a group of axes; without end where they are known at run time only."""
    places = product(a.extent for a in axes).value
    return math.inf if places is None else places


def kind_of(nest: Nest, chained: bool) -> str:
    """The table of a nest: of products; of a product that reads another one's result, or those of
    several; of several products that do, each of which has its sums in registers."""
    if not chained:
        return "products"
    products = [nest.reductions[n] for n in nest.contractions]
    inner = sum(is_nested(nest, s) for s in products)
    if len(products) - inner > 1:
        return "gradients"
    return "chains" if inner < 2 else "wide chains"


def orders(nest: Nest, layouts: Mapping[str, Layout]) -> set[int]:
    """Of the orders of memory with which tilings were measured, those that its products have, or
    are between: 0 where the second factors are contiguous along n, 1 where they are along k."""

    def along(side: Expr, axes: Sequence[Axis]) -> bool:
        loads = [n.attr for n in side.loads() if n.attr[0] not in results]
        steps = (layouts[name].address(at).coefficient(a) for name, at, _ in loads for a in axes)
        return any(s is not None and s.value == 1 for s in steps)

    every, results = nest.contractions.values(), nest.reductions
    found = {int(along(c.b, c.over)) for c in every}
    return {0, 1} if any(along(c.a, c.m) for c in every) else found


def narrow(nest: Nest, layouts: Mapping[str, Layout]) -> bool:
    """Whether rows of some factor begin between multiples of `COPIED` bytes."""
    results = nest.reductions
    sides = [e for c in nest.contractions.values() for e in (c.a, c.b)]
    loads = [list(e.loads()) for e in sides]  # what is made of a result is in registers
    for name, at, _ in {
        n.attr for x in loads for n in x if not {m.attr[0] for m in x} & results.keys()
    }:
        layout = layouts[name]
        address = layout.address(at)
        steps = [layout.offset, *(address.coefficient(a) for a in address.axes())]
        size = ITEMSIZE[layout.dtype]
        if any(s is not None and s.value != 1 and (s * size % COPIED).value != 0 for s in steps):
            return True
    return False


def tile_of(tiling: Tiling, axes: Iterable[Axis]) -> int:
    """Elements of a value that lives on `axes`, of one program at a time."""
    return math.prod(d.block for d in tiling.dims if not set(axes).isdisjoint(d.axes))


def feasible(nest: Nest, tiling: Tiling, layouts: Mapping[str, Layout], spec: DeviceSpec) -> bool:
    """Whether accumulators fit into registers, and operands on their way into shared memory; and
    the copy engine can bring them, if it is to."""
    fetched = not tiling.fetches or (spec.copies_boxes and all_boxes(nest, tiling, layouts))
    # H100, 8192 x 4096 by 4096 x 4096 with a residual: 1050 us where programs walk the grid, whose
    # registers hold the residual beside the next block's sums; 370 where each has one block.
    results = nest.reductions
    read = [n.attr for s in nest.stores for n in s.value.loads() if n.attr[0] not in results]
    crowded = tiling.persistent and any(is_block(tiling, at) for _, at, _ in read)
    if crossed(nest, tiling) or not (fetched and are_dots(nest, tiling)) or crowded:
        return False
    held = 0
    for s in nest.reductions.values():
        held += 4 * tile_of(tiling, nest.lives(s))
    limit = REGISTER_SHARE * 32 * tiling.num_warps * 255 * 4
    if held > limit or any(spills(nest, tiling, n, limit - held) for n in nest.contractions):
        return False
    return shared_bytes(nest, tiling) + RESERVED_SHARED <= spec.shared


def spills(nest: Nest, tiling: Tiling, name: str, left: float) -> bool:
    """Whether a product on the f32 units takes more registers than there are: it is unrolled, and
    all factors come through registers but those that a loop brings on the way. `left`: bytes of
    them that hold no results."""
    s, c = nest.reductions[name], nest.contractions[name]
    if s.operands != "f32":
        return False
    passing, through = 0, False
    for side in (c.a, c.b):
        axes = nest.axes_of(side)
        if _plain(side) and any(tiling.dim_of(a).mode == "loop" for a in axes):
            continue
        through = True
        if not any(n.attr[0] in nest.reductions for n in side.loads()):  # else it is a result
            passing += ITEMSIZE["f32"] * tile_of(tiling, axes)
    threads, places = 32 * tiling.num_warps, tile_of(tiling, c.over)
    work = tile_of(tiling, nest.lives(s)) * places * (1 + through) / threads
    return passing > left or work > (MAX_SHORT if places <= SHORT_SUM else MAX_LONG)


def are_dots(nest: Nest, tiling: Tiling) -> bool:
    """Whether programs multiply tiles of two dimensions, one of which is summed. Others would be
    arithmetic on all places at once: H200, a product of 16 batches that the next one has as rows,
    311 us."""
    for c in nest.contractions.values():
        every = [frozenset(x) for x in (c.m, c.n, c.over, c.batch)]
        *spans, batch = (sum(d.varies(x)[0] for d in tiling.dims) for x in every)
        if max(spans) > 1 or batch:
            return False
    return True


def crossed(nest: Nest, tiling: Tiling) -> bool:
    """Whether of two loops one reduction wants this inside, another that; or one wants both."""
    pairs = set()
    for s in nest.reductions.values():
        lives, over = ({tiling.dim_of(a) for a in axes} for axes in (nest.lives(s), s.over))
        if sum(d.mode == "loop" for d in over) > 1:  # loops are opened one by one
            return True
        pairs |= {(a.name, b.name) for a in lives for b in over if a.mode == b.mode == "loop"}
    return any((b, a) in pairs for a, b in pairs)


def all_boxes(nest: Nest, tiling: Tiling, layouts: Mapping[str, Layout]) -> bool:
    """Whether all blocks of factors come from memory as boxes."""
    sides = [e for c in nest.contractions.values() for e in (c.a, c.b)]
    results = nest.reductions
    loads = {n.attr[:2] for e in sides for n in e.loads() if n.attr[0] not in results}

    return all(
        box_of(tiling, layouts[n], at) is not None for n, at in loads if is_block(tiling, at)
    )


def is_block(tiling: Tiling, index: Sequence[Index]) -> bool:
    """Whether programs have a block along several dimensions of what is there."""
    axes = {a for i in index for a in i.axes()}
    return sum(d.block > 1 for d in tiling.dims if axes & set(d.axes)) > 1


def shared_bytes(nest: Nest, tiling: Tiling) -> int:
    """Of the operands of contractions that come from memory: those in a loop in each stage; of
    results on their way there, while a next block's operands come."""
    total = 0
    if tiling.puts and tiling.persistent:
        total = sum(4 * tile_of(tiling, nest.lives(s)) for s in nest.stores) // 2
    seen: set[Expr] = set()
    for name, c in nest.contractions.items():
        operands = nest.reductions[name].factors
        for load in (n for side in (c.a, c.b) for n in side.loads()):
            if load.attr[0] in nest.reductions or load in seen:
                continue
            seen.add(load)
            axes = nest.axes_of(load)
            loops = any(tiling.dim_of(a).mode == "loop" for a in axes)
            size = tile_of(tiling, axes) * ITEMSIZE[operands]
            total += size * (tiling.num_stages if loops else 1)
    return total


# -- estimate --------------------------------------------------------------------------------------


class Estimator:
    """What tilings of one nest take: for each access the bytes of its tile times the trips of every
    grid and loop dimension, what the cache keeps taken off; FLOPs by unit; partial waves. What does
    not depend on the tiling is reckoned once."""

    def __init__(self, nest: Nest, layouts: Mapping[str, Layout], spec: DeviceSpec) -> None:
        self.nest, self.spec = nest, spec
        self.shares, self.kind = Shares(nest), nest.unit
        self.nested = [s for s in nest.reductions.values() if is_nested(nest, s)]
        self.reads, self.vectors, self.brought = _reads(nest, layouts), [], []
        self.accesses: list[tuple[str, Expr | None, Steps, set[Axis], int, float]] = []
        self.tables = tables(nest)
        for s in nest.statements:
            product = isinstance(s, Reduce) and s.name in nest.contractions
            sides = (*s.body.args,) if isinstance(s, Reduce) and product else roots(s)
            self.vectors.append([nest.work(e) for e in sides])
            loads = [n for e in sides if not (product and _plain(e)) for n in e.loads()]
            read = (n for n in loads if n.attr[0] not in nest.reductions)
            self.brought.append([(n, set(nest.axes_of(n))) for n in read])
            self.accesses += _accesses(nest, layouts, s)
        self.stored = sum(layouts[x.tensor].nbytes_hint for x in nest.stores)

    def of(self, tiling: Tiling) -> Estimate:
        nest, spec, cut = self.nest, self.spec, self.shares.of(tiling)
        programs = tiling.programs()
        products = {n: found for n in self.tables if (found := picks(tiling, n)) is not None}
        tensor, vector, brought = 0.0, 0.0, 0.0
        for n, axis in products.items():
            places = points(tiling, set(nest.axes_of(n)))
            tensor, vector = tensor + 4.0 * places * places_of(axis), vector + PICK_FLOPS * places
        for s, sides, loads in zip(nest.statements, self.vectors, self.brought, strict=True):
            axes = set(nest.lives(s)) | (set(s.over) if isinstance(s, Reduce) else set())
            share = cut.get(s.name, 1.0) if isinstance(s, Reduce) else 1.0
            places = points(tiling, axes) * share
            if isinstance(s, Reduce) and s.name in nest.contractions:
                tensor += 2.0 * places
                # All warps are along the rows where one product reads another's result.
                warps = (1.0, 1.0) if self.nested else repeated(nest, tiling, s, spec)
                for parts, times in zip(sides, warps, strict=True):
                    for work, where in parts:
                        vector += work * points(tiling, where) * share * times
            else:
                for work, where in (part for parts in sides for part in parts):
                    vector += work * points(tiling, where) * share
            brought += sum(
                LOAD_FLOPS * points(tiling, where) * share
                for n, where in loads
                if n not in products
            )
        unique = moved = float(self.stored)
        for used, once in self.reads:
            unique += once
            again = (d for d in tiling.dims if d.mode == "grid" and used.isdisjoint(d.axes))
            moved += once * math.prod(d.count for d in again)
        # Programs that run together share what they read by the L2: a wave is about square.
        wave = max(1.0, math.sqrt(min(programs, spec.cores)))
        traffic = max(unique, moved / wave)
        vector = vector / (1.0 if self.nested else ARITHMETIC_SHARE) + brought
        multiplied = spec.compute_us(tensor, self.kind) / tiling.efficiency
        held = multiplied, spec.compute_us(vector, "f32")
        together = programs_together(nest, tiling, spec)
        compute = sum(held) if together < 2 else max(held) + OVERLAP_SHARE * min(held)
        lines = sum(
            points(tiling, axes) * cut.get(name, 1.0) * scattered(tiling, steps, size, most)
            for name, load, steps, axes, size, most in self.accesses
            if load not in products
        )
        slots = spec.cores * together
        waves = math.ceil(programs / slots) * slots / programs if programs > slots else 1.0
        if programs < spec.cores:
            waves = spec.cores / programs
        few = max(1.0, spec.cores / (programs * ONE_CORE_BANDWIDTH))
        trips, turns = self.trips(tiling, cut), math.ceil(programs / slots)
        compute = max(compute, spec.compute_us(LINE_FLOPS * lines)) * waves
        compute += PROGRAM_US * turns * (tiling.num_stages > 1 or trips > 0)
        looping = LOOP_US * trips * turns
        if self.nested:
            made = max(tile_of(tiling, nest.lives(s)) for s in self.nested)
            block = 0.3 + 0.7 * made / (WARP_RESULTS * tiling.num_warps)
            block *= CHAINED_LOOP_US * len(nest.contractions)
            looping = (block * trips + PROGRAM_US) * turns + held[1] * waves
        us = spec.launch_us + max(spec.memory_us(traffic) * few, compute, looping)
        return Estimate(us, traffic, tensor + vector)

    def trips(self, tiling: Tiling, cut: Mapping[str, float]) -> float:
        """Of a program through loops."""
        trips, loops = 0.0, [d for d in tiling.dims if d.mode == "loop"]
        for d in loops:
            inside = [s for s in self.nest.reductions.values() if set(s.over) & set(d.axes)]
            lives = {a for s in inside for a in self.nest.lives(s)}
            outer = (x.count for x in loops if lives & set(x.axes))
            share = max((cut.get(s.name, 1.0) for s in inside), default=1.0)
            trips += d.count * share * math.prod(outer)
        return trips


def _reads(nest: Nest, layouts: Mapping[str, Layout]) -> list[tuple[set[Axis], float]]:
    """Of each place in memory that is read the axes, and the bytes over all of these."""
    every = {n.attr[:2]: None for s in nest.statements for e in roots(s) for n in e.loads()}
    read = (p for p in every if p[0] not in nest.reductions)
    used = ((name, {a for i in index for a in i.axes()}) for name, index in read)
    return [(axes, places(axes) * float(ITEMSIZE[layouts[name].dtype])) for name, axes in used]


def _accesses(
    nest: Nest, layouts: Mapping[str, Layout], s: Statement
) -> Iterator[tuple[str, Expr | None, Steps, set[Axis], int, float]]:
    """Where a statement reads and writes memory, and how large an element is."""
    name = s.name if isinstance(s, Reduce) else ""
    read = [(n, n.attr[:2], nest.axes_of(n)) for e in roots(s) for n in e.loads()]
    written = [(None, (s.tensor, s.index), nest.lives(s))] if isinstance(s, Store) else []
    for load, (tensor, at), axes in (*read, *written):
        if tensor not in nest.reductions:
            layout = layouts[tensor]
            size = ITEMSIZE[layout.dtype]
            steps = steps_of(layout, at, axes)
            yield name, load, steps, set(axes), size, most_lines(layout)


def repeated(nest: Nest, tiling: Tiling, s: Reduce, spec: DeviceSpec) -> tuple[float, float]:
    """How many warps of a program compute an element of each factor of a product: those beside one
    another want the same rows of the first, or columns of the second, in registers. Tensor cores of
    Hopper take the second one from shared memory. As Triton 3.6 shares a block among warps
    where no product reads another's result."""
    c = nest.contractions[s.name]
    m, n = (tile_of(tiling, axes) for axes in (c.m, c.n))
    at = {a: k for k, d in enumerate(tiling.dims) for a in d.axes}
    turned = at[c.n[0]] < at[c.m[0]]  # the second factor's are the rows then
    m, n = (n, m) if turned else (m, n)
    wide = spec.copies_boxes and m >= 4 * MIN_SIDE and tiling.num_warps % 4 == 0
    rows, columns = (4, 1) if wide else (1, 1)
    while rows * columns < tiling.num_warps:
        along = m > MIN_SIDE * rows if wide else m // (MIN_SIDE * rows) >= n // (MIN_SIDE * columns)
        if along and m > MIN_SIDE * rows:
            rows *= 2
        else:
            columns *= 2
    both = (float(columns), 1.0 if wide else float(rows))
    return both[::-1] if turned else both


def programs_together(nest: Nest, tiling: Tiling, spec: DeviceSpec) -> int:
    """Programs that a multiprocessor runs at once."""
    tiles = sum(tile_of(tiling, nest.lives(s)) for s in nest.reductions.values())
    threads = 32 * tiling.num_warps
    registers = 4 * threads * (tiles // threads + OTHER_REGISTERS)
    shared = shared_bytes(nest, tiling) + RESERVED_SHARED
    return max(1, min(spec.registers // registers, spec.shared // shared, 16 // tiling.num_warps))


def library_us(nest: Nest, layouts: Mapping[str, Layout], spec: DeviceSpec) -> float:
    """A call of the library for the one product of a nest: what it must compute or move."""
    work, kind = 0.0, nest.unit
    for name in nest.contractions:
        s = nest.reductions[name]
        work += 2.0 * places(nest.axes_of(s.body))
    reads, writes = nest.tensors()
    moved = sum(layouts[n].nbytes_hint for n in (*reads, *writes))
    compute = spec.compute_us(work, kind) / figures("library", kind)
    return spec.launch_us + max(compute + PROGRAM_US, spec.memory_us(moved))


def _plain(e: Expr) -> bool:
    """Whether it is an element of memory, perhaps in another dtype: tensor cores read it there."""
    while e.op == "cast":
        e = e.args[0]
    return e.op == "load"


def points(tiling: Tiling, axes: set[Axis]) -> float:
    """Points at which programs compute what lives on `axes`: padded, and once more for each block
    of the grid's dimensions that it lacks."""
    total = 1.0
    for d in tiling.dims:
        inside, between = d.varies(axes)
        total *= (d.count if between or d.mode == "grid" else 1) * (d.block if inside else 1)
    return total


__all__ = ["Estimate", "candidates", "crossed", "known", "library_us", "points", "tile_of"]
