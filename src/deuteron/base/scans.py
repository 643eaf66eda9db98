"""How few long rows are scanned on a GPU: block by block, by programs that look back at what those
before them have written (a decoupled look-back), or all in parts.

In: how many rows of how many elements, and the device. Out: whether they are scanned in blocks, and
the bandwidth of that. Blocks (see `codegen.triton.scanning`) read a row once; parts (`lower.nn`)
scan anything, and read it twice.

Who lowers, plans and writes kernels asks here, so that they agree.
"""

from __future__ import annotations

from deuteron.base.device import DeviceSpec

# Rows of at least so many elements, and at most so many rows, are worth either.
MIN_SCAN_LENGTH, MAX_SCAN_ROWS = 1 << 16, 256
# Scans of a row whose totals programs exchange, at most, and their dtypes: 32 bits.
MAX_SCANS, EXCHANGED_DTYPES = 6, ("f32", "i32")
# Time of blocks over a copy's: so much, and so much more for one row, whose blocks all look at the
# same flags. H200, 2^26 elements, f32, of 1, 2, 4, 8, 16, 32 and 64 rows: 1.19, 1.15, 1.07, 1.05,
# 1.06, 1.10, 1.08 (in parts 1.48); bf16, 16 and 64 rows 1.13, 1.08.
BLOCK_SCAN_TIME, LONE_ROW_SCAN_TIME = 1.07, 0.13


def few_and_long(rows: int, length: int) -> bool:
    """Whether there are too few rows for a GPU to scan each by one program."""
    return length >= MIN_SCAN_LENGTH and rows <= MAX_SCAN_ROWS


def in_blocks(rows: int, length: int, spec: DeviceSpec) -> bool:
    """Whether so many rows of so many elements are scanned in blocks."""
    return spec.kind == "cuda" and few_and_long(rows, length)


def bandwidth(rows: int) -> float:
    """The share of the device's bandwidth that blocks of so many rows reach."""
    return 1 / (BLOCK_SCAN_TIME + LONE_ROW_SCAN_TIME / max(1, rows))


__all__ = ["EXCHANGED_DTYPES", "MAX_SCANS", "bandwidth", "few_and_long", "in_blocks"]
