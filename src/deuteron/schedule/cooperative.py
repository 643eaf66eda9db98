"""How many programs of a GPU share a row that is too long for the registers of one.

In: the length of a row and how many values of each of its elements are held at once. Out: the size
of a team. Its programs run at the same time, hold a share of the row each, and exchange what they
reduction (`codegen.triton.exchange`), so that a row is read once however long it is.

Both who plans kernels and who writes them ask here, so that they agree on what is read again.
"""

from __future__ import annotations

from deuteron.base.cluster import MAX_CLUSTER
from deuteron.base.device import DeviceSpec

# Elements of a row per program, by how many values of each are held: (at most so many, elements).
# H200, bf16, time over a copy's. Softmax of rows of 131072: 1.59, with 4096 elements each 2.46.
# Backward of RMS norm, rows of 32768: 1.41; in loops over the row that read it twice 2.28.
SHARES = ((1, 8192), (4, 4096))
LEAST, MOST = 2048, 8192
# Programs of a team, of more than which twice as many elements each are better. H200, forward and
# backward of layer norm and RMS norm, us: rows of 131072 in 32 and 16 programs 1271, 996 and 1098,
# 936, of 65536 in 16 and 8 966, 1163 and 856, 1052; batch norm of 200704 (25) 1.3 times loops.
MOST_TEAM = 16
# Rows of so many elements are shared at all.
LONG = 16384
# Values of each element that a norm's backward holds: what it reads and what it sums up.
HELD = 4
# Programs of a multiprocessor that run at once: some load while others wait for their teams. Small
# ones of clusters (the others need words in memory, see `codegen.triton.exchange`) are as many as
# have so many warps. H200, group norm with SiLU, bf16, 4096 elements each, us: 3 programs of 8
# warps 57, of 4 warps 54, 6 of 4 warps 44.
RESIDENT, WARPS = 3, 24
# Programs of a team, times the values held: larger teams wait for their slowest. H200, backward of
# layer norm (4), rows of 32768 and 131072 (teams of 8 and 32): 0.83 and 1.2 times the time of loops
# that read twice; of RMS norm (3) 0.62 and 0.89. Where one is held, programs alone: instance norm
# of 65536 (8) 0.81 times, batch norm of 200704 (25) 1.07.
MOST_HELD, MOST_ALONE = 96, 24

# Rows that are so many apart, of at least 2 bytes an element, begin alike between multiples of 16
# bytes: of that many splits or a multiple each has rows of one kind (see
# `codegen.triton.misaligned`).
ALIKE = 8
# The same for lines of the cache, of 128 bytes. H200, softmax of 4096 rows of 65535, bf16, us: rows
# from multiples of 16 bytes 348, of 128 bytes 323.
ALIKE_LINES = 64
# What a split's partial results of columns cost, in rows: two sums of 4 bytes that are written and
# read, beside three times 2 bytes of a row.
PARTIAL = 2.7

# Eighths of the multiprocessors that run clusters at once. H200, backward of layer norm, bf16,
# 4 x 2^26 elements, splits for all and for seven eighths of them, us: rows of 16384 (4
# programs) 650 and 485, of 131072 (16) 682 and 516.
CLUSTERED = 7
# With so many values in a thread it needs not more than so many registers. H200, rows of 131072 in
# 16 programs, bf16, us, any number and 80: layer norm 395 and 353, RMS norm 318 and 278.
MOST_VALUES, LEAST_REGISTERS = 32, 80
# Values of a row and of what all rows share (weights) that a thread holds from row to row, and its
# registers then: what a multiprocessor reads from the L2 takes longer than what comes from memory.
# H200, layer norm, rows of 131072, bf16, us: with weights read for each row 355, with weights in
# registers of 2 programs of 8 warps 276, of 16 warps, which spill, 366.
MOST_KEPT, KEPT_REGISTERS = 96, 128


def share(held: int, row: int) -> int:
    """Elements of a row of so many per program, a power of two."""
    found = next((n for most, n in SHARES if held <= most), LEAST)
    return MOST if MOST_TEAM * found < row <= MOST_TEAM * MOST else found


def team_of(row: int, held: int, spec: DeviceSpec, each: int = 0, alike: bool = False) -> int:
    """Programs that share a row of so many elements, each a `share` (or so many as `each`); 0 where
    that does not pay. Rows that do not start at multiples of 16 bytes are shared where a team's
    rows are `alike` in that (a split's: see `codegen.triton.misaligned`), or where it is `alike`
    for them (f32, which comes in whole lines from anywhere; H200, layer norm, 4096 rows of 65535,
    us: in loops 1068, shared 837)."""
    count = -(-row // (each or share(held, row)))
    fits = count <= spec.cores and count <= (MOST_ALONE if held == 1 else MOST_HELD // held)
    pays = spec.kind == "cuda" and row >= LONG and (alike or row % 8 == 0)
    return count if pays and fits else 0


def workers_alike(
    rows: int, most: int, partial: float = 0.0, turns: int = 1, kinds: int = ALIKE
) -> int:
    """How many splits, of which about so many run at once, walk so many rows soonest, where each
    has rows of one of so many kinds. `partial`: what one leaves behind, in rows; `turns`: of
    splits, at least.
    H200, backward of layer norm, 4096 rows of 65535, bf16, of which 14 run at once, us: 8 splits
    1010, 16 822, 40 620, 56 592, 112 606."""

    def cost(count: int) -> float:
        return -(-count // most) * -(-rows // count) + partial * count / most

    first = -(-max(1, min(rows, (turns - 1) * most)) // kinds) * kinds
    return min(range(first, 8 * most + 1, kinds), key=cost, default=first)


def clustered(team: int, spec: DeviceSpec) -> bool:
    """Whether a team of so many programs can be a cluster."""
    return (spec.capability or (0, 0)) >= (9, 0) and team <= MAX_CLUSTER


def at_once(team: int, spec: DeviceSpec) -> int:
    """Multiprocessors of which a kernel's teams fill the places at once."""
    return spec.cores * CLUSTERED // 8 if team > 1 and clustered(team, spec) else spec.cores


def resident(warps: int, cluster: bool) -> int:
    """Programs of so many warps of a multiprocessor that run at once."""
    return max(RESIDENT, WARPS // warps) if cluster else RESIDENT


def registers(values: int, warps: int, cluster: bool, spec: DeviceSpec) -> int:
    """The most registers (of 4 bytes) of a thread that holds so many values, so that as many
    programs of so many warps run at once as may; 0: no matter how many."""
    most = spec.registers // 4 // (resident(warps, cluster) * 32 * warps) // 8 * 8
    return most if values <= MOST_VALUES and most >= LEAST_REGISTERS else 0
