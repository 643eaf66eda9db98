"""How few long rows are scanned on a GPU: each by a team of programs that walks along it, or all in
parts.

In: how many rows of how many elements, and the device. Out: the size of a team, and what either way
takes. A team (a cluster of programs, see `codegen.triton.scanning`) reads a row once, but a program
has few bytes on their way and waits for its team in every turn; parts (`lower.nn`) fill any device,
and read what they scan twice.

Who lowers, plans and writes kernels asks here, so that they agree.
"""

from __future__ import annotations

from deuteron.base.cluster import MOST_CLUSTER
from deuteron.base.device import DeviceSpec

# Rows of at least so many elements are worth either.
LONG_SCAN = 1 << 16
# Programs (of 4 warps) of a multiprocessor that scan together, and that have room in it; the same
# of light ones, which hold one f32 of each element. H200, 64 rows of 1048576, f32, by 8, 10, 11, 12
# and 13 programs per row, us: 150, 149, 147.5, 148.5 and 188 (a copy 134). From 11 on they spill;
# of clusters of 13 some wait for a place, and take as long again. So do those of 11 that are not
# light, or they spill more (bf16, 64 rows of 524288: 43.0 by 8, 53.7 and 45.4).
PLACES, ROOM = 4.0, 5
LIGHT_PLACES, LIGHT_ROOM = 5.0, 6
# Scans of a row whose numbers a team exchanges, and of what: 32 bits.
MOST_SCANS, EXCHANGED = 6, ("f32", "i32")
# Bandwidth of teams, as a share of the device's: 1 / (LIMIT + WAIT / programs of a multiprocessor).
# H200, f32, 512, 256, 176 and 128 programs, TB/s: 3.5, 2.77, 2.16, 1.73; by this formula, of 4.27
# that a copy reaches: 3.55, 2.65, 2.15, 1.75.
LIMIT, WAIT = 0.79, 1.6
# Kernels of a scan in parts (sums, their scan, scans); what they move, as a multiple of reading and
# writing once; and their share of the device's bandwidth. H200, 64 rows of 1048576, f32: 194 us.
KERNELS, TWICE, BANDWIDTH = 3, 1.5, 0.96


def scan_team(rows: int, length: int, spec: DeviceSpec, light: bool = False) -> int:
    """Programs that walk along each of so many rows together, as many as have a place at once; 0
    where one program each has as much of the device. `light`: of kernels that hold one f32 of each
    element, which who writes them knows; the cost counts on the others' number."""
    if (spec.capability or (0, 0)) < (9, 0) or spec.kind != "cuda" or length < LONG_SCAN:
        return 0
    if 2 * rows > PLACES * spec.cores:
        return 0
    places = LIGHT_PLACES if light else PLACES
    return min(MOST_CLUSTER, int(places * spec.cores / max(1, rows)))


def bandwidth(programs: int, spec: DeviceSpec) -> float:
    """The share of the device's bandwidth that so many programs of teams reach."""
    return 1 / (LIMIT + WAIT * spec.cores / max(1, programs))


def in_parts_us(moved: float, spec: DeviceSpec) -> float:
    """Microseconds of a scan in parts; `moved`: bytes that it has to read and write."""
    return TWICE * spec.memory_us(moved) / BANDWIDTH + (KERNELS - 1) * spec.launch_us


def by_teams_us(rows: int, length: int, moved: float, spec: DeviceSpec) -> float | None:
    """The same by teams; None where there are none."""
    team = scan_team(rows, length, spec)
    return spec.memory_us(moved) / bandwidth(rows * team, spec) if team else None


__all__ = [
    "EXCHANGED",
    "LIGHT_ROOM",
    "LONG_SCAN",
    "MOST_SCANS",
    "PLACES",
    "ROOM",
    "bandwidth",
    "by_teams_us",
    "in_parts_us",
    "scan_team",
]
