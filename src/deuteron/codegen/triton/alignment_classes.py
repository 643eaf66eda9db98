"""Misaligned rows (they begin anywhere between multiples of 16 bytes) that programs share.

In: the loops of a nest, and the device. Out: the same loops; or, where cooperating programs share
such rows and nothing says who has which, the loops with a row split. The rows of a split are so far
apart that all of them are of one alignment class: they begin alike between multiples of 16 bytes
(`misaligned`). So where a split's lanes lie is the same for all of its rows, and what all rows
share (weights) is brought to these places once per split. H200, 4096 rows of 65535, bf16, us, in
loops that read twice and so: layer norm 590, 358; softmax 387, 353.
"""

from __future__ import annotations

from dataclasses import replace

from deuteron.base.device import DeviceSpec
from deuteron.codegen.loops import Loops
from deuteron.codegen.triton.access_statistics import shared_along, widest
from deuteron.codegen.triton.misaligned import misaligned_rows
from deuteron.codegen.triton.tiling import Tiling, choose
from deuteron.schedule.cooperative import (
    ALIGNMENT_CLASSES,
    LINE_ALIGNMENT_CLASSES,
    aligned_split_count,
    cores_at_once,
    programs_at_once,
)

# Waves of splits, so that it matters little how many run at once. H200, softmax of 4096 rows of
# 65535, bf16, 64 splits 393 us, 128 356, 192 333, 256 335.
MIN_WAVES = 5
# What a split's begin costs, in rows, for each tensor that all rows share. Layer norm, 128 splits
# 334 us, 192 323, 256 350.
ROWS_PER_BEGIN = 1.5


def split_by_alignment(loops: Loops, spec: DeviceSpec) -> Loops:
    """The loops, with a row split where the rows of cooperating programs have to begin alike; else
    as they are."""
    if loops.row_split is not None or loops.group_axes or len(loops.parallel) != 1:
        return loops
    (axis,) = loops.parallel
    if widest(loops) >= 4:  # whole lines from anywhere: f32, cooperative 660, so 853
        return loops
    if axis.extent.value is None or misaligned_rows(loops, loops.reduced) is None:
        return loops
    tiling = choose(replace(loops, row_split=(axis, ALIGNMENT_CLASSES)), spec, cooperative=True)
    if tiling.programs_per_row == 1 or tiling.misaligned is None:
        return loops
    most = max(1, _row_groups_at_once(tiling, spec))
    begin = ROWS_PER_BEGIN * shared_along(loops)
    count = aligned_split_count(
        axis.extent.value, most, begin, waves=MIN_WAVES, classes=LINE_ALIGNMENT_CLASSES
    )
    return replace(loops, row_split=(axis, count))


def _row_groups_at_once(tiling: Tiling, spec: DeviceSpec) -> int:
    """Teams that run at once."""
    blocks = tiling.candidates[0]
    each = programs_at_once(blocks.num_warps, tiling.cluster)
    if blocks.registers:
        each = min(each, spec.registers // 4 // (blocks.registers * 32 * blocks.num_warps))
    # Small clusters find places on nearly all multiprocessors: softmax, 8 programs each, about 48.
    cores = (
        cores_at_once(tiling.programs_per_row, spec) if tiling.programs_per_row > 8 else spec.cores
    )
    return each * cores // tiling.programs_per_row


__all__ = ["split_by_alignment"]
