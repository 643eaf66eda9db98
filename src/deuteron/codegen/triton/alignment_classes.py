"""Rows that begin anywhere between multiples of 16 bytes, shared by teams.

In: the loops of a nest, and the device. Out: the same, or, where teams share such rows and nothing
says which team has which, the same with splits: each walks rows that are so far apart that all of
them begin alike (`turn`). So where its lanes lie is the same for all of a split's rows, and what
all rows share (weights) is brought to these places once per split. H200, 4096 rows of 65535, bf16,
us, in loops that read twice and so: layer norm 590, 358; softmax 387, 353.
"""

from __future__ import annotations

from dataclasses import replace

from deuteron.base.device import DeviceSpec
from deuteron.codegen.loops import Loops
from deuteron.codegen.triton.access_statistics import shared_along, widest
from deuteron.codegen.triton.misaligned import ragged
from deuteron.codegen.triton.tiling import Form, choose
from deuteron.schedule.cooperative import ALIKE, ALIKE_LINES, at_once, resident, workers_alike

# Turns of splits, so that it matters little how many run at once. H200, softmax of 4096 rows of
# 65535, bf16, 64 splits 393 us, 128 356, 192 333, 256 335.
TURNS = 5
# What a split's begin costs, in rows, for each tensor that all rows share. Layer norm, 128 splits
# 334 us, 192 323, 256 350.
BEGIN = 1.5


def alike(loops: Loops, spec: DeviceSpec) -> Loops:
    """The loops, with splits where a team's rows have to begin alike; else as they are."""
    if loops.row_split is not None or loops.group_axes or len(loops.parallel) != 1:
        return loops
    (axis,) = loops.parallel
    if widest(loops) >= 4:  # whole lines from anywhere: f32, in teams 660, so 853
        return loops
    if axis.extent.value is None or ragged(loops, loops.reduced) is None:
        return loops
    form = choose(replace(loops, row_split=(axis, ALIKE)), spec, teams=True)
    if form.team == 1 or form.start is None:
        return loops
    most = max(1, _at_once(form, spec))
    begin = BEGIN * shared_along(loops)
    count = workers_alike(axis.extent.value, most, begin, turns=TURNS, kinds=ALIKE_LINES)
    return replace(loops, row_split=(axis, count))


def _at_once(form: Form, spec: DeviceSpec) -> int:
    """Teams that run at once."""
    blocks = form.candidates[0]
    each = resident(blocks.num_warps, form.cluster)
    if blocks.registers:
        each = min(each, spec.registers // 4 // (blocks.registers * 32 * blocks.num_warps))
    # Small clusters find places on nearly all multiprocessors: softmax, teams of 8, about 48.
    cores = at_once(form.team, spec) if form.team > 8 else spec.cores
    return each * cores // form.team


__all__ = ["alike"]
