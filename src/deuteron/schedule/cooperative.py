"""Cooperative rows: how many programs of a GPU share a row that is too long for one's registers.

In: the length of a row and how many values of each of its elements are held at once. Out: the
number of programs that cooperate. They run at the same time, hold a share of the row each, and
exchange what they reduce (`codegen.triton.exchange`), so that a row is read once however long it
is.

Both who plans kernels and who writes them ask here, so that they agree on what is read again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from deuteron.base.cluster import MAX_CLUSTER
from deuteron.base.device import DeviceSpec
from deuteron.ir.index import Axis, product

# Elements of a row per program, by how many values of each are held: (at most so many, elements).
# H200, bf16, time over a copy's. Softmax of rows of 131072: 1.59, with 4096 elements each 2.46.
# Backward of RMS norm, rows of 32768: 1.41; in loops over the row that read it twice 2.28.
ELEMENTS_PER_PROGRAM = ((1, 8192), (4, 4096))
MIN_ELEMENTS_PER_PROGRAM, MAX_ELEMENTS_PER_PROGRAM = 2048, 8192
# With more programs per row than this, twice as many elements each are better. H200, forward and
# backward of layer norm and RMS norm, us: rows of 131072 in 32 and 16 programs 1271, 996 and 1098,
# 936, of 65536 in 16 and 8 966, 1163 and 856, 1052; batch norm of 200704 (25) 1.3 times loops.
MAX_PROGRAMS_PER_ROW = 16
# Rows of so many elements are shared at all.
MIN_COOPERATIVE_ROW = 16384
# Values of each element that a norm's backward holds: what it reads and what it sums up.
NORM_BACKWARD_VALUES = 4
# Programs of a multiprocessor that run at once: some load while others wait for the programs of
# their row. Small ones of clusters (the others need flags in memory, see `codegen.triton.exchange`)
# are as many as have so many warps. H200, group norm with SiLU, bf16, 4096 elements each, us: 3
# programs of 8 warps 57, of 4 warps 54, 6 of 4 warps 44.
PROGRAMS_AT_ONCE, CLUSTER_WARPS_AT_ONCE = 3, 24
# Programs per row, times the values held: where there are more, they wait for the slowest. H200,
# backward of layer norm (4 values), rows of 32768 and 131072 (8 and 32 programs): 0.83 and 1.2
# times the time of loops that read twice; of RMS norm (3) 0.62 and 0.89. Where one value is held,
# programs alone: instance norm of 65536 (8) 0.81 times, batch norm of 200704 (25) 1.07.
MAX_HELD_VALUES, MAX_PROGRAMS_OF_ONE_VALUE = 96, 24

# Rows that are so many apart, of at least 2 bytes an element, begin alike between multiples of 16
# bytes: of that many splits or a multiple each has rows of one kind (see
# `codegen.triton.misaligned`).
ALIGNMENT_CLASSES = 8
# What a split's partial results of columns cost, in rows: two sums of 4 bytes that are written and
# read, beside three times 2 bytes of a row.
PARTIAL_RESULT_ROWS = 2.7

# Blocks for what is the same in them have at least so many elements.
MIN_STEADY_BLOCK = 1024

# Eighths of the multiprocessors that run clusters at once. H200, backward of layer norm, bf16,
# 4 x 2^26 elements, splits for all and for seven eighths of them, us: rows of 16384 (4
# programs) 650 and 485, of 131072 (16) 682 and 516.
CLUSTER_CORE_EIGHTHS = 7
# With so many values in a thread it needs not more than so many registers. H200, rows of 131072 in
# 16 programs, bf16, us, any number and 80: layer norm 395 and 353, RMS norm 318 and 278.
MAX_LIMITED_VALUES, MIN_LIMITED_REGISTERS = 32, 80


def elements_per_program(held: int, row: int) -> int:
    """Elements of a row of so many per program, a power of two."""
    elements = next(
        (n for most, n in ELEMENTS_PER_PROGRAM if held <= most), MIN_ELEMENTS_PER_PROGRAM
    )
    return (
        MAX_ELEMENTS_PER_PROGRAM
        if MAX_PROGRAMS_PER_ROW * elements < row <= MAX_PROGRAMS_PER_ROW * MAX_ELEMENTS_PER_PROGRAM
        else elements
    )


def programs_per_row(
    row: int, held: int, spec: DeviceSpec, each: int = 0, same_alignment: bool = False
) -> int:
    """Programs that share a row of so many elements, each `elements_per_program` of it (or `each`);
    0 where that does not pay. Rows that do not start at multiples of 16 bytes are shared where the
    rows of a row group have the `same_alignment` (those of a split: see
    `codegen.triton.misaligned`), or where alignment is the same to them (f32, which comes in whole
    lines from anywhere; H200, layer norm, 4096 rows of 65535, us: in loops 1068, shared 837)."""
    count = -(-row // (each or elements_per_program(held, row)))
    fits = count <= spec.cores and count <= (
        MAX_PROGRAMS_OF_ONE_VALUE if held <= 1 else MAX_HELD_VALUES // held
    )
    pays = spec.kind == "cuda" and row >= MIN_COOPERATIVE_ROW and (same_alignment or row % 8 == 0)
    return count if pays and fits else 0


def steady_block(read: Iterable[Collection[Axis]], r: Sequence[Axis]) -> int:
    """Elements of the blocks of a row in which all that is read for parts of rows is the same; 0
    where nothing is, or these are short. `read`: axes of each thing read; `r`: of a row."""
    lengths = 0
    for axes in read:
        used = [k for k, axis in enumerate(r) if axis in axes]
        if len(used) == 1 and used[0] < len(r) - 1:
            lengths = math.gcd(lengths, product(a.extent for a in r[used[0] + 1 :]).value or 1)
    most = lengths & -lengths
    return most if most >= MIN_STEADY_BLOCK else 0


def aligned_split_count(rows: int, most: int, partial: float = 0.0) -> int:
    """How many splits, of which about so many run at once, walk so many rows soonest, where each
    has rows that begin alike. `partial`: what one leaves behind, in rows. H200, backward of layer
    norm, 4096 rows of 65535, bf16, of which 14 run at once, us: 8 splits 1010, 16 822, 40 620, 56
    592, 112 606."""

    def cost(count: int) -> float:
        return -(-count // most) * -(-rows // count) + partial * count / most

    every = range(ALIGNMENT_CLASSES, 8 * most + 1, ALIGNMENT_CLASSES)
    return min(every, key=cost, default=ALIGNMENT_CLASSES)


def can_be_cluster(programs: int, spec: DeviceSpec) -> bool:
    """Whether so many programs can be a cluster."""
    return (spec.capability or (0, 0)) >= (9, 0) and programs <= MAX_CLUSTER


def cores_at_once(programs: int, spec: DeviceSpec) -> int:
    """Multiprocessors that a kernel's cooperating programs fill at once."""
    return (
        spec.cores * CLUSTER_CORE_EIGHTHS // 8
        if programs > 1 and can_be_cluster(programs, spec)
        else spec.cores
    )


def programs_at_once(warps: int, cluster: bool) -> int:
    """Programs of so many warps of a multiprocessor that run at once."""
    return max(PROGRAMS_AT_ONCE, CLUSTER_WARPS_AT_ONCE // warps) if cluster else PROGRAMS_AT_ONCE


def cooperative_registers(values: int, warps: int, cluster: bool, spec: DeviceSpec) -> int:
    """The most registers (of 4 bytes) of a thread that holds so many values, so that as many
    programs of so many warps run at once as may; 0: no matter how many."""
    most = spec.registers // 4 // (programs_at_once(warps, cluster) * 32 * warps) // 8 * 8
    return most if values <= MAX_LIMITED_VALUES and most >= MIN_LIMITED_REGISTERS else 0
