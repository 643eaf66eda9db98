"""How a nest becomes a tile: which axes form its dimensions, which block sizes are worth having.

In: `Loops` with linear addresses, and the device. Out: a `Tiling`.

    points     no reductions: one dimension x where all accesses agree on the contiguous axis, else
               y and x (a transposition)
    rows       x = parallel axes, r = reduced ones. Persistent: a block holds whole rows. Looped:
               blocks of r, pass by pass. With grouped reductions: x, p = which group, r = the axes
               along one; a block holds whole rows
    row_split  rows x in a fixed number of splits; results of r are kept over the rows of a split
               (see `schedule.kernel`)

Every choice here is one of speed: any tiling with any configuration computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deuteron.base.device import DeviceSpec
from deuteron.base.scans import EXCHANGED_DTYPES
from deuteron.codegen.loops import (
    CrossRowReduce,
    Loops,
    Write,
    outermost_first,
    points_visited,
    roots_of,
)
from deuteron.codegen.triton.access_statistics import (
    bytes_along,
    loads_along,
    read_along,
    row_loads,
    shared_along,
    size,
    streamed,
    tile_bytes,
    uneven,
    unit_bytes,
    widest,
)
from deuteron.codegen.triton.misaligned import misaligned_rows, rows_of_one_alignment
from deuteron.codegen.triton.point_tiles import SINGLE_ELEMENT_TILES, TileConfig, Tiling, warps_for
from deuteron.codegen.triton.point_tiling import (
    accesses_of_points,
    in_order,
    point_order,
    tile_points,
)
from deuteron.codegen.triton.row_tiles import (
    ROW_LIMIT,
    across_tiles,
    column_tiles,
    looped_column_tiles,
    row_tiles,
)
from deuteron.ir.index import Axis, Index, product
from deuteron.schedule.columns import TILE_COLUMNS
from deuteron.schedule.cooperative import (
    MIN_COOPERATIVE_ROW,
    can_be_cluster,
    cooperative_registers,
    elements_per_program,
    programs_per_row,
    steady_block,
)
from deuteron.schedule.kernel import Reduce, Scan
from deuteron.schedule.profit import ACROSS_RATIO, EXCHANGED
from deuteron.schedule.programs import power

# Twice as many where the row is needed a second time, for a store. H200, 32768 columns, time over a
# copy's, looped and whole: layer norm 1.58 and 1.06 (f32), 1.29 and 1.23 (bf16), softmax 1.48 and
# 1.31 (f32); logsumexp, which reads once in any case, 1.20 and 1.22. At 65536 columns registers
# spill.
STORED_ROW_FACTOR = 2
# Rows of a split are rotated if they have so many elements. H200, gradients of layer norm, bf16,
# rows of
# 1001 and 8191, us: 381, 374 and 872, 605. Rows that one program holds and only reduces by
# themselves are not rotated: softmax of 257, 1001, 8191: 164, 340 and 139, 192 and 314, 418.
MIN_ROTATED_ROW = 1000
# Blocks of a row that is walked part by part, how long those of the longest rows are at least, and
# what those of a part are of it at most.
PART_BLOCKS, MIN_LONG_ROW_BLOCK, MAX_MASKED_PART = (4096, 2048, 1024, 512, 256), 1024, 1.35
MAX_HELD_OF_PARTS = 96  # values of parts that a thread holds, one for each of its elements
MAX_ROW_IN_PARTS = 1 << 30  # whose blocks are counted in 32 bits
# Elements of a thread in blocks that follow one another in one program.
SERIAL_ELEMENTS_PER_THREAD = 32
# Where rows are at most so much of their block (1152 of 2048), a thread has its elements in four
# parts, of which the compiler sees that the last one is behind every row; in blocks of at most so
# many elements. H200, bf16, backward of modulated layer norm of 1152, us: 154, so 135 to 139, of
# layer norm of 1152 137 and 132, 2560 124 and 114, 3072 112 and 105, 5120 (which spills) 135 and
# 230.
SPARE_BLOCK_SHARE, MAX_SPARE_BLOCK = 0.75, 4096
# Of such rows in blocks of at most so many elements, and of rows of so many at most, a split is a
# warp, which waits for no other and skips a part that no row has, if a thread has room for its part
# of all that is held of a row (so many values), and a pipeline of so many bytes for three rows.
# H200, bf16, backward of layer norm, 2^26 elements, with more warps and so, us: rows of 128 151 and
# 108, 256 117 and 107, 640 136 and 111, 768 117 and 105, 1152 132 and 110; of 1024 51 and 52.
# Behind an embedding of 768, with pipelines of 3, 4, 6 and 8 rows 50, 44, 40, 41 (four warps 52).
# 25088 rows of 64 (bf16), of which 7 values are held: 8 rows for a warp 7.2 us, 16 for two 40; of
# 64 (f32) 12 and 51, 12 and 46, 16 and 48 (which spill), of 128 (f32) 7.8 and 12.8, 7.1 and 11.0.
MAX_ONE_WARP_BLOCK, MAX_ONE_WARP_ROW, MAX_ONE_WARP_VALUES = 2048, 256, 192
ONE_WARP_PIPELINE_BYTES = 36 << 10
# Values that a thread of a split holds at most, of rows, of sums of columns and of what all rows
# share; with more the latter is read with each row again. H200, bf16, backward of layer norm, 4096
# rows of 768: with 9 values of a row and 2 rows for 128 threads (144) 15.5 us; behind a chain of
# eight norms, 12 values and 17 shared, one row for 128 threads, limit 40: 51 us.
MAX_HELD_VALUES = 160
# Values that are held over a split's rows, as multiples of that: H200, bf16 rows of 16384, backward
# of RMS norm (two tensors read, one column sum) 1.1 times a copy's time, of layer norm (two and
# two) 2.0.
HELD_LIMIT_FACTOR = 3
# Reductions of a row whose results cooperating programs exchange.
MAX_EXCHANGED = 6
# Columns that a program reads at once at least: 32 bytes of half numbers.
MIN_COLUMNS = 16

Axes = tuple[Axis, ...]


def choose(loops: Loops, spec: DeviceSpec, cooperative: bool = False) -> Tiling:
    """The tiling of a nest; `cooperative`: whether programs may wait for one another."""
    tiling = _choose(loops, spec, cooperative)
    first = tiling.candidates[0]  # the rows of a split lie side by side, as do those of a tile
    wide = [a for n, axes in tiling.dims for a in axes if n == "r" or first.of(n) > 1]
    spanned = wide if loops.row_split is None else (*loops.parallel, *loops.reduced)
    if tiling.misaligned is None and tiling.has_loops and uneven(loops, spanned):
        # Elements that come one by one are better read than copied to shared memory.
        best = sorted(tiling.candidates, key=lambda b: b.stages > 1)
        plain = dict.fromkeys(replace(b, stages=1) for b in best)
        tiling = replace(tiling, candidates=tuple(plain))
    return tiling


def _choose(loops: Loops, spec: DeviceSpec, cooperative: bool) -> Tiling:
    if loops.row_split is not None:
        return _row_split(loops, spec, cooperative)
    if loops.group_axes:
        return _grouped(loops, spec)
    reductions = any(isinstance(p, (Reduce, Scan)) for p in loops.statements)
    if not reductions and not any(
        isinstance(p, Write) and p.level == "row" and loops.reduced for p in loops.statements
    ):
        return _sharing_registers(tile_points(loops, spec), len(accesses_of_points(loops)))
    return _rows(loops, spec, cooperative)


def single_elements(loops: Loops, spec: DeviceSpec) -> bool:
    """Whether neighbouring threads have neighbouring points, one each."""
    return set(_choose(loops, spec, False).candidates) == set(SINGLE_ELEMENT_TILES)


# -- rows ------------------------------------------------------------------------------------------


def _rows(loops: Loops, spec: DeviceSpec, cooperative: bool) -> Tiling:
    x, r = in_order(loops, loops.parallel), in_order(loops, loops.reduced)
    scans = any(isinstance(p, Scan) for p in loops.statements)
    if scans or any(isinstance(p, Reduce) and p.kind.startswith("arg") for p in loops.statements):
        r = loops.reduced
    nx, nr = size(x), size(r)
    # Beside a tensor with an element for each point, what rows have one of does not matter.
    dense = any(2 * points_visited(a.address, (*x, *r)) > nx * nr for a in loops.accesses)
    along_x = unit_bytes(loops, x[-1], r if dense else ()) if x else 0
    along_r = unit_bytes(loops, r[-1]) if r else 0
    across = bool(x) and min(along_x, along_r) * ACROSS_RATIO >= max(along_x, along_r) > 0
    columns = bool(x) and along_x > along_r
    known = product(a.extent for a in r).value is not None
    loads = row_loads(loops)
    again = any(isinstance(p, Write) and p.level == "point" for p in loops.statements)
    held = loads * widest(loops) if columns or across else 4 * loads
    limit = ROW_LIMIT * (STORED_ROW_FACTOR if again and held <= 4 and not scans else 1)
    limit //= 1 if loads <= 2 else 2 if loads <= 4 else 4
    # Columns that are read once are read as well in a loop, more of them side by side.
    least = MIN_COLUMNS * (1 if again else 4)
    persistent = known and power(nr) <= (limit // least if columns or across else limit)
    whole = persistent or columns or across
    cluster = can_be_cluster(1, spec)
    # What is the same for all rows each program reads for every row.
    few = cluster or 2 * bytes_along(loops, x) >= bytes_along(loops) or nx < spec.cores
    # Values of parts of a row that are not the same in a block are held element by element.
    same = steady_block([a.address.axes() for a in loops.accesses if not a.store], r)
    in_parts = not same and any(
        a.address.axes() & set(x)
        and a.address.axes() & set(r)
        and 2 * points_visited(a.address, (*x, *r)) <= nx * nr
        for a in loops.accesses
        if not a.store
    )
    few &= not in_parts
    long = nr > ROW_LIMIT or nr * loads_along(loops) > 2 * ROW_LIMIT
    shared = not whole or (cluster and long and not columns and not across)
    wide = widest(loops) >= 4
    if cooperative and again and shared and (wide or misaligned_rows(loops, r) is None):
        values = loads + sum(isinstance(p, Scan) for p in loops.statements)
        each = min(elements_per_program(values, nr), same or nr)
        programs = _cooperating_programs(loops, nr, values, each, wide, spec) if few else 0
        if programs:
            return _cooperative("rows", x, r, values, each, programs, spec, values == 1 or scans)
    if known and not (columns or across or same) and nr < MAX_ROW_IN_PARTS:
        whole_row = row_tiles(nx, nr, widest(loops), spec, light=False)[0]
        if cut := _parts(loops, r, whole_row.per_thread if persistent else None):
            parts, tile = cut
            return Tiling("rows", (("x", x), ("r", r)), (tile,), parts=parts)
    if across and not persistent:
        candidates = across_tiles(nx, nr, spec)
    elif persistent and (columns or across):
        candidates = column_tiles(nx, nr, widest(loops), spec, limit)
    elif persistent:
        candidates = row_tiles(nx, nr, widest(loops), spec, loads == 1 and not again)
    elif columns:
        candidates = looped_column_tiles(nx, nr, tile_bytes(loops, x, r), spec, scans)
    else:
        candidates = _long_rows(loops, nx, nr, in_parts, spec)
    misaligned = None
    columns |= across
    lane_elements, least = 1, min(b.of("r") for b in candidates)
    if not persistent and not columns and all(b.of("x") == 1 for b in candidates):
        misaligned = _rotated_rows(loops, r)
        if misaligned is not None and least < misaligned[1]:
            misaligned = None  # a block has whole vectors
    if not persistent and not columns:  # 16 bytes of memory come to one thread
        lane_elements = min(16 // widest(loops), least)
    return Tiling("rows", (("x", x), ("r", r)), candidates, persistent, misaligned, lane_elements)


def _parts(loops: Loops, r: Axes, held: int | None) -> tuple[Axes, TileConfig] | None:
    """The outer axes of rows on which values of their parts depend, and blocks of one part each;
    `held`: elements of a thread where a program could hold a row. None where parts would be short
    or a good part masked, reductions depend on one another or count elements of lanes, or a thread
    can hold them. H200, f32, us: gradients of a norm of groups by their deviation, 144 rows
    of 8 x 3136: 59, 22 so; of batch statistics, 8 x 784: 56, 33. Rows that could be held, two
    tensors and three values of a part: 288 of 8 x 784 35, 14 and 30, 13, 576 of 8 x 196 22, 12 and
    19, 11 (with more warps 15, 11); two and one: 6.3, 12.3; 4.7, 10.
    """
    reductions = {p.name: p for p in loops.statements if isinstance(p, Reduce)}
    plain = all(p.kind in ("sum", "max", "min") for p in reductions.values())
    chained = any(n.attr[0] in reductions for p in reductions.values() for n in p.body.loads())
    if not plain or chained or any(isinstance(p, Scan) for p in loops.statements):
        return None
    along = {(a.tensor, a.address): a.address.axes() for a in loops.accesses if not a.store}
    of_parts = [axes & {*r} for axes in along.values() if axes & {*r} and r[-1] not in axes]
    if held is not None and len(of_parts) * held < MAX_HELD_OF_PARTS:
        return None
    outer = set[Axis]().union(*of_parts)
    cut = max((k + 1 for k, a in enumerate(r) if a in outer), default=0)
    length = size(r[cut:])
    least = MIN_LONG_ROW_BLOCK if held is None else 1
    for block in PART_BLOCKS:
        if cut and block >= least and -(-length // block) * block <= MAX_MASKED_PART * length:
            return r[:cut], TileConfig((("x", 1), ("r", block)), max(1, block // 256))
    return None


def _rotated_rows(loops: Loops, r: Sequence[Axis]) -> tuple[Index, int] | None:
    """`misaligned_rows` that are better read from their first whole vector, in loops. Not those of
    f32 beside weights of columns, of which a lane would read parts of two vectors, while a warp's
    f32 from any place are whole lines: H200, layer norm, 4096 rows of 65535, us: from their begin
    1065, rotated in blocks of 4096 1238 (in blocks of 16384, with spills, 2051)."""
    shared = loads_along(loops) > row_loads(loops)
    return None if shared and widest(loops) >= 4 else misaligned_rows(loops, r)


def _grouped(loops: Loops, spec: DeviceSpec) -> Tiling:
    """A whole row in three dimensions: a few neighbouring threads, which have 16 bytes each, then
    reduce a group. One row at a time: Triton 3.6 gives several and what they share (weights)
    two layouts. RMS norm of 512, bf16, groups of 128, instructions an element: 24, two rows
    26."""
    x, p, r = (
        in_order(loops, axes) for axes in (loops.parallel, loops.group_index_axes, loops.group_axes)
    )
    configs = []
    for tile in row_tiles(1, power(size(p)) * size(r), widest(loops), spec, light=False):
        blocks = (("x", 1), ("p", power(size(p))), ("r", size(r)))
        configs.append(replace(tile, sizes=blocks))
    return Tiling(
        "rows", (("x", x), ("p", p), ("r", r)), tuple(dict.fromkeys(configs)), persistent=True
    )


def _long_rows(
    loops: Loops, nx: int, nr: int, in_parts: bool, spec: DeviceSpec
) -> tuple[TileConfig, ...]:
    """Blocks of a row, pass by pass. H200, us with heuristics' choice before and after:

    read again  batch norm, 401 KB of bf16: 4096 elements without and with a pipeline of 3 116, 87,
                its backward 148, 125; group norm, 128 KB: 106, 74. Rows of 256 KB of f32, of which
                the L2 holds one for every multiprocessor: 4096 and 16384 elements 208, 152
                (instance norm), 335, 284 (its backward)
    read once   2048 and 4096 elements: 142, 137 (32000 of bf16), 201, 187 (two reductions); a
                pipeline of 3 for f32: 258, 245
    rotated     65535 of bf16, pipelines of 3, softmax: 8192 and 4096 elements 483, 433, the latter
                with at most 80 registers 389; layer norm, whose weights are rotated too: any number
                of registers, 128 and 80 762, 599 and 656
    few rows    64 of 3 MB of f32: 2048 and 8192 elements, pipeline of 3: 198, 72; 421, 245
    scans       32000 of f32: 2048 elements for 4 warps 397, 4096 for 8 420, whole rows 466
    in parts    what has one value for a part of a row comes element by element, which a pipeline
                would copy so: gradients of batch norm behind squeeze and excitation, f32, rows of
                100352 and 25088: 299, 156 with pipelines, 130, 57 without
    """
    itemsize, moved = widest(loops), streamed(loops)
    read = [a.address.axes() for a in loops.accesses if not a.store]
    same = steady_block(read, in_order(loops, loops.reduced))

    def tile(r: int, warps: int, stages: int = 1) -> TileConfig:
        block = min(r, power(nr), same or r)
        x = max(1, min(1024 // block, power(nx)))
        return TileConfig((("x", x), ("r", block)), min(warps, warps_for(block * x, 4)), stages)

    if in_parts:
        return tuple(dict.fromkeys((tile(4096, 16), tile(4096, 8))))
    if not any(isinstance(p, Write) and p.level == "point" for p in loops.statements):
        if nx < 2 * spec.cores:
            return tuple(dict.fromkeys((tile(8192, 16, 3), tile(4096, 8, 3), tile(2048, 8))))
        stages = 3 if itemsize >= 4 else 1
        return tuple(dict.fromkeys((tile(4096, 8, stages), tile(2048, 8), tile(8192, 16, stages))))
    pipeline = tile(4096, 8, 3 if moved <= 4 else 2)
    if any(isinstance(p, Scan) for p in loops.statements):
        return tuple(dict.fromkeys((tile(2048, 4, 3), tile(4096, 8, 3), tile(4096, 8))))
    whole = tile(16384, 16)
    held = itemsize >= 4 and nr >= 2 * 16384 and nr * itemsize * spec.cores <= spec.l2
    if _rotated_rows(loops, in_order(loops, loops.reduced)) is not None:
        most = 128 if loads_along(loops) > row_loads(loops) else 80
        held, pipeline = False, replace(tile(4096, 8, 3 if moved <= 4 else 2), registers=most)
    first = (whole, pipeline) if held else (pipeline, tile(2048, 8, 3))
    if nx < spec.cores:
        first = (tile(8192, 8, 3), pipeline)
    return tuple(dict.fromkeys((*first, tile(4096, 8))))


def most_stages(loops: Loops, blocks: TileConfig, spec: DeviceSpec) -> int:
    """The deepest pipeline for which there is shared memory: all stages but one have a place for a
    block of each tensor that is read. An eighth is for what reductions exchange. All splits of rows
    run at once: H200, 512 splits of 768 whose rows are read from 27 tensors, with room for four
    of them on a multiprocessor (2 stages) 51 us, for two (3 stages) 56, without a pipeline 77."""
    block = blocks.elements * bytes_along(loops)
    splits = loops.row_split[1] if loops.row_split is not None else 1
    most = 1 + spec.shared * 7 // 8 // block
    return min(most, max(2, 1 + spec.shared * 7 // 8 // (block * -(-splits // spec.cores))))


# -- cooperative rows
# -----------------------------------------------------------------------------------------


def _cooperating_programs(
    loops: Loops, nr: int, held: int, each: int, same_alignment: bool, spec: DeviceSpec
) -> int:
    """Programs that share a row, at least two; 0 where rows are short or cannot be shared: what a
    program tells the others is a few numbers of 32 bits."""
    reductions = [p for p in loops.statements if isinstance(p, (Reduce, Scan))]
    if not reductions or product(a.extent for a in loops.reduced).value is None:
        return 0
    if any(isinstance(p, Write) and p.accumulate is not None for p in loops.statements):
        return 0
    if len(reductions) > MAX_EXCHANGED or not all(
        f.kind in EXCHANGED and f.body.dtype in EXCHANGED_DTYPES for f in reductions
    ):
        return 0
    if not read_along(loops, (Reduce, Scan)) & read_along(loops, (Write, CrossRowReduce)):
        return 0  # nothing of a row is needed again
    programs = programs_per_row(nr, held, spec, each, same_alignment)
    return programs if programs > 1 else 0


def _cooperative(
    kind: str,
    x: Axes,
    r: Axes,
    held: int,
    each: int,
    programs: int,
    spec: DeviceSpec,
    light: bool = False,
) -> Tiling:
    """Rows in blocks of `each` elements, one for a program; the next one is on its way. `light`: 32
    elements for a thread. H200, 32000 of f32, scanned and summed up, by 8 warps of 4096 elements
    310 us, of 8192 326, by 4 of 4096 279 (in loops 394)."""
    cluster = can_be_cluster(programs, spec)
    warps = max(4 if light and cluster else 8, each // (1024 if light else 512))
    most = cooperative_registers(held * each // (32 * warps), warps, cluster, spec)
    blocks = (("x", 1), ("r", each))
    candidates = tuple(TileConfig(blocks, warps, stages, most) for stages in (3, 2))
    dims = (("x", x), ("r", r))
    return Tiling(
        kind, dims, candidates, persistent=True, programs_per_row=programs, cluster=cluster
    )


# -- row splits ----------------------------------------------------------------------------------


def _row_split(loops: Loops, spec: DeviceSpec, cooperative: bool) -> Tiling:
    """H200, layer norm's backward: rows of 4096 (bf16) with a pipeline of one, two, three rows take
    157, 134, 103 us. Forward and backward, bf16, pipelines of three: rows of 1024 at 1024 and 2048
    elements at once 99 and 91 us, of 256 184 and more than 202 us.
    """
    assert loops.row_split is not None
    axis, count = loops.row_split
    x = (axis, *outermost_first(loops, [a for a in loops.parallel if a != axis]))
    r = in_order(loops, loops.reduced)
    rows = max(1, size(x) // count)
    nr = size(r)
    # Where a split has one place of the split axis, it is the split's number.
    one = len(x) > 1 and axis.extent.value == count
    dims = (("x", x[1:] if one else x), ("r", r))
    if not any(
        isinstance(p, (Reduce, Scan)) or (isinstance(p, Write) and p.level == "row")
        for p in loops.statements
    ):
        configs = []
        for elements, columns, stages in ((2048, 1, 2), (2048, 2, 2), (1024, 1, 1)):
            wide = min(columns * TILE_COLUMNS, power(nr))
            deep, most = (min(power(rows), max(1, n // wide)) for n in (elements, 2048))
            warps = warps_for(wide * most, 32)
            configs.append(TileConfig((("x", deep), ("r", wide)), warps, stages))
        at_once = -(-count * -(-nr // configs[0].of("r")) // spec.cores)
        if not _pipelined(loops, configs[0], rows, at_once, spec):
            configs.insert(0, configs.pop())
        tiling = Tiling("row_split", dims, tuple(dict.fromkeys(configs)), tiled=True)
        return _sharing_registers(tiling, shared_along(loops))
    known = product(a.extent for a in r).value is not None
    wide = power(nr)
    held = row_loads(loops) + len(cross_row_reductions(loops))
    cluster = can_be_cluster(1, spec) and nr >= MIN_COOPERATIVE_ROW
    misaligned = rows_of_one_alignment(loops, r) if nr >= MIN_ROTATED_ROW and not one else None
    if not known or wide * held > HELD_LIMIT_FACTOR * ROW_LIMIT or cluster:
        each = elements_per_program(held, nr)
        if not cooperative or misaligned is None and misaligned_rows(loops, r) is not None:
            programs = 0
        else:
            programs = _cooperating_programs(loops, nr, held, each, True, spec)
        if programs:
            tiling = _cooperative("row_split", x, r, held, each, programs, spec, held == 1)
            return replace(tiling, misaligned=misaligned)
    if not known or wide * held > HELD_LIMIT_FACTOR * ROW_LIMIT:
        block = min(4096, wide)
        lane_elements = min(16 // widest(loops), block)
        only = TileConfig((("x", 1), ("r", block)), warps_for(block, 8))
        return Tiling(
            "row_split", dims, (only,), lane_elements=lane_elements, misaligned=misaligned
        )
    configs = []
    few = 2048 if wide >= 1024 else 1024
    spare = widest(loops) < 4 and nr <= SPARE_BLOCK_SHARE * wide and wide <= MAX_SPARE_BLOCK
    if wide <= MAX_ONE_WARP_ROW or spare and wide <= MAX_ONE_WARP_BLOCK:
        deep = min(power(rows), max(1, 1024 // wide))
        while deep > 1 and deep * nr * held > 32 * MAX_ONE_WARP_VALUES:
            deep //= 2
        stages = ONE_WARP_PIPELINE_BYTES // (bytes_along(loops, loops.parallel) * deep * wide)
        if stages >= 2 and deep * nr * held <= 32 * MAX_ONE_WARP_VALUES:
            deepest = (max(4, min(6, stages)), 3) if stages >= 3 else (2,)
            configs += [TileConfig((("x", deep), ("r", wide)), 1, n) for n in deepest]
    for elements, stages in ((few, 3), (few, 2), (2 * few, 3), (few, 1))[: 4 - len(configs)]:
        deep = min(power(rows), max(1, elements // wide))
        blocks = (("x", deep), ("r", wide))
        stages = stages if one or rows > deep else 1  # nothing follows the first block
        each = SERIAL_ELEMENTS_PER_THREAD if spare and deep == 1 else 16
        configs.append(TileConfig(blocks, warps_for(max(elements, wide), each), stages))
    tiling = Tiling("row_split", dims, tuple(dict.fromkeys(configs)), True, misaligned)
    return _sharing_registers(tiling, held + shared_along(loops))


def _pipelined(loops: Loops, blocks: TileConfig, rows: int, at_once: int, spec: DeviceSpec) -> bool:
    """Whether blocks are better on their way to shared memory while others are summed: there are
    several, room for those of so many programs, and no joined tensors. H200, 30 kernels of 8
    models, us: 964 with pipelines of 2, 735 so; three joined gradients of norms (36 bytes a point)
    382 and 174. Then tiles of 2048 elements, else of 1024: 19 kernels of 5 models 1785 and 1385,
    gradients of GELU of 96 and 384 columns 16.1 and 18.3, 45 and 50, of attention's joined heads
    40 and 12."""
    joined = any(n.args for p in loops.statements for root in roots_of(p) for n in root.loads())
    held = at_once * blocks.elements * bytes_along(loops)
    return held <= spec.shared and rows > blocks.of("x") and not joined


def _sharing_registers(tiling: Tiling, each: int) -> Tiling:
    """With a note where a thread has no registers for so many values of each element."""
    return replace(tiling, crowded=tiling.candidates[0].per_thread * each > MAX_HELD_VALUES)


def cross_row_reductions(loops: Loops) -> list[CrossRowReduce]:
    return [p for p in loops.statements if isinstance(p, CrossRowReduce)]


__all__ = [
    "TileConfig",
    "Tiling",
    "choose",
    "cross_row_reductions",
    "most_stages",
    "single_elements",
    "point_order",
]
