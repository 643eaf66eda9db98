"""Scans of few long rows on a GPU: every block of a row is a program of its own.

In: `Loops` that scan, and the device; then the nest's emitter. Out: a `Tiling` of kind "scan"; its
text. A program writes what its block reduces to, scans it meanwhile, and looks back at what the
blocks before it have written (a decoupled look-back, `codegen.triton.exchange`). It adds that up in
a fixed order, so that results repeat bit for bit:

    values = block
    write_flag(reduce(values))
    scanned = scan(values)
    store(decoupled_look_back() + scanned)

Programs begin in the order of their numbers, and blocks of all rows that begin at the same element
follow one another: who looks back waits for programs that have begun. There are many programs of
few elements: whoever waits leaves the memory to others.

H200, 64 rows of 1048576, f32, us: a copy 128, so 136 to 139, cooperating programs that walk along
the rows in turns 145 to 149, in parts (`lower.nn`) 194, Inductor's 136 to 141 (a look-back whose
order of additions differs from run to run).

Rows are scanned so only beside what is computed point by point
(`schedule.profit.scanned_in_blocks`).
"""

from __future__ import annotations

from deuteron.base.device import DeviceSpec
from deuteron.base.scans import EXCHANGED_DTYPES, MAX_SCANS, in_blocks
from deuteron.codegen.loops import Loops, Write, roots_of, unique_nodes
from deuteron.codegen.triton.access_statistics import row_loads, size, unit_bytes, widest
from deuteron.codegen.triton.cooperative import FIRST_FLAG, FLAGS_PARAM, WARP
from deuteron.codegen.triton.emit import Emitter
from deuteron.codegen.triton.reductions import clean, identity, masked_value, scan_result, uses
from deuteron.codegen.triton.scalars import reduction_step
from deuteron.codegen.triton.scope import R
from deuteron.codegen.triton.tiling import TileConfig, Tiling
from deuteron.schedule.kernel import Scan

# Bytes of a thread's elements, of what most is read of; half where more is held of each or a lane's
# are no neighbours. H200, 64 rows of 1048576, us: f32, 2048 elements of 8 warps 143, of 4 141, 1024
# of 4 143, of 2 140; bf16, 4096 elements of 8 warps 80, of 4 71, 2048 of 4 77.
BYTES_PER_THREAD, MIN_ELEMENTS_PER_THREAD = 64, 4
# Warps of a block. The fewer rows, the more of a row's blocks run at once and look at the same
# flags, of which a larger block looks at fewer. H200, 2^26 elements, f32, by 2, 4 and 8 warps, us:
# 64 rows 138, 138, 140; 16 rows 155, 137, 140; 4 rows 519, 138, 143; 1 row 2261, 429, 155; 64 rows
# of bf16 72, 71, 80. Where all blocks run at once, by few.
BLOCK_WARPS, FEW_ROWS_WARPS, AT_ONCE_WARPS = 4, 8, 2
MAX_FEW_ROWS, WARPS_PER_CORE = 3, 32  # rows; warps of a multiprocessor


def scan_tiling(loops: Loops, spec: DeviceSpec) -> Tiling | None:
    """The tiling of scans in blocks; None where rows have none (`base.scans`), or are not only
    scanned and written point by point."""
    scans = [p for p in loops.statements if isinstance(p, Scan)]
    x, r = loops.parallel, loops.reduced
    if not 0 < len(scans) <= MAX_SCANS or len(scans) + len(point_writes(loops)) < len(
        loops.statements
    ):
        return None
    if loops.row_split is not None or loops.group_axes:
        return None
    names = {p.name for p in scans}
    if any(p.body.dtype not in EXCHANGED_DTYPES or uses(p.body, names) for p in scans):
        return None
    if any(unit_bytes(loops, a) > unit_bytes(loops, r[-1]) for a in x):
        return None  # rows lie side by side
    if not in_blocks(size(x), size(r), spec):
        return None
    wide, held = widest(loops), max(len(scans), row_loads(loops))
    each = BYTES_PER_THREAD // max(2, min(4, wide)) // (1 if held == 1 else 2 if held <= 3 else 4)
    each = max(MIN_ELEMENTS_PER_THREAD, each // (1 if size(r) * wide % 16 == 0 else 2))
    once = size(x) * size(r) <= each * WARP * WARPS_PER_CORE * spec.cores
    warps = AT_ONCE_WARPS if once else FEW_ROWS_WARPS if size(x) <= MAX_FEW_ROWS else BLOCK_WARPS
    tiles = tuple(TileConfig((("x", 1), ("r", each * WARP * w)), w) for w in (warps, 2 * warps))
    return Tiling("scan", (("x", x), ("r", r)), tiles)


def point_writes(loops: Loops) -> list[Write]:
    """What is stored, an element at every point."""
    writes = [p for p in loops.statements if isinstance(p, Write)]
    return [w for w in writes if w.level == "point" and w.accumulate is None and not w.scattered]


def scan_block(loops: Loops, tiling: Tiling, em: Emitter, number: str) -> None:
    """Enters the block of the program of this number and scans it: the scope has what its stores
    need of scans."""
    r, add = em.dims["r"], em.scope.add
    scans = [p for p in loops.statements if isinstance(p, Scan)]
    lanes = f"{r.block} // {_elements_per_thread(tiling)}"
    add(
        f"block = {number} // xnumel",
        f"xoffset = {number} % xnumel",
        f"roffset = block * {r.block}",
        f"blocks = tl.cdiv(rnumel, {r.block})",
        f"tag = libm.begin_exchange({FLAGS_PARAM}, 0, 0) + 1",
        f"flags_per_row = libm.look_back_flags(blocks, {lanes})",
        f"flags = {FLAGS_PARAM} + {FIRST_FLAG} + xoffset * {len(scans)} * flags_per_row",
    )
    em.enter(em.dims["x"], "xoffset")
    em.enter(r, "roffset")
    reads = [n for n in loops.nodes if n.op == "load" and n.attr[1] and em.deps(n) >= R]
    em.policies = {n: "evict_last" for n in reads if em.shared(n)}
    own = []
    for k, p in enumerate(scans):
        value, reduction, scanned = (em.fresh(stem) for stem in ("value", "reduction", "own"))
        add(
            f"{value} = {masked_value(em, p.kind, p.body, em.mask(R))}",
            f"{reduction} = libm.reduce_{p.kind}({value})",
            f"libm.write_flag(flags + {k} * flags_per_row + block, {reduction}, tag)",
            f"{scanned} = libm.scan_{p.kind}({value})",
        )
        own.append((reduction, scanned))
    names = {p.name for p in scans}
    later = set(unique_nodes(root for w in point_writes(loops) for root in roots_of(w)))
    for n in reads:  # on their way, too, while others are waited for
        if n in later and not uses(n, names):
            em.value(n)
    for k, (p, (reduction, scanned)) in enumerate(zip(scans, own, strict=True)):
        before, name = em.fresh("before"), em.fresh(f"{clean(p.name)}_")
        neutral = identity(p.kind, p.body.dtype)
        where = f"flags + {k} * flags_per_row, block, blocks, {reduction}, tag"
        add(
            f'{before} = libm.decoupled_look_back({where}, {neutral}, "{p.kind}", {lanes})',
            f"{name} = {reduction_step(p.kind, p.body.dtype, before, scanned)}",
        )
        em.scope.texts[scan_result(p)] = name
    add(f"libm.end_look_back({FLAGS_PARAM}, block, blocks, xnumel, tag)")


def flag_count_text(loops: Loops, tiling: Tiling, rows: str, length: str, block: str) -> str:
    """Python text of the number of flags that a launch needs; of the rows, their length and the
    elements of a block there are texts."""
    lanes, scans = (
        f"({block} // {_elements_per_thread(tiling)})",
        sum(isinstance(p, Scan) for p in loops.statements),
    )
    count = f"-(-{length} // {block})"
    each = f"({count} + {count} // {lanes} + {count} // {lanes} ** 2)"
    return f"{FIRST_FLAG} + {rows} * {scans} * {each}"


def _elements_per_thread(tiling: Tiling) -> int:
    """Elements of a thread."""
    (each,) = {b.of("r") // (WARP * b.num_warps) for b in tiling.candidates}
    return each


__all__ = ["scan_block", "scan_tiling", "flag_count_text"]
