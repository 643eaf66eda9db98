"""Block sizes of a nest's dimensions, and the warps for them: what a `Tiling` offers.

In: sizes, and what a nest reads and writes at each point. Out: `TileConfig`, the heuristic choice
first. Rows and row splits, whose blocks depend on more, are in `tiling`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deuteron.base.device import DeviceSpec
from deuteron.codegen.triton.access_statistics import below, size
from deuteron.ir.index import Axis, Index
from deuteron.schedule.programs import power


@dataclass(frozen=True)
class TileConfig:
    """Block sizes by dimension, and the launch's warps and stages."""

    sizes: tuple[tuple[str, int], ...]  # ("x", 1024)
    num_warps: int
    stages: int = 1  # of the software pipeline of its loops
    registers: int = 0  # the most of a thread; 0: no matter how many

    def of(self, dim: str) -> int:
        return dict(self.sizes)[dim]

    @property
    def elements(self) -> int:
        return math.prod(n for _, n in self.sizes)

    @property
    def per_thread(self) -> int:
        return self.elements // (32 * self.num_warps)


@dataclass(frozen=True)
class Tiling:
    """`kind`: points, rows, blocks of rows (`scanning`) or a row split; `dims`: name and axes of
    each dimension, outermost first; `candidates`: the heuristic choice first.
    """

    kind: str
    dims: tuple[tuple[str, tuple[Axis, ...]], ...]
    candidates: tuple[TileConfig, ...]
    persistent: bool = False
    misaligned: tuple[Index, int] | None = None  # address, vector: see `misaligned`
    lane_elements: int = 1  # of a row, which dependent reductions take together
    tiled: bool = False  # a row split without row reductions: blocks of r are programs of their own
    parts: tuple[Axis, ...] = ()  # the outer axes of r, of which a block has one place
    programs_per_row: int = 1  # cooperating: each holds a block of the row
    cluster: bool = False  # whether the programs of a row reach one another's shared memory
    program_axes: tuple[Axis, ...] = ()  # axes of which a program has one value at a time
    serial_blocks: int = 1  # such values, or blocks of them, that a program takes one after another
    terms: int = 1  # of reductions with dynamic bounds, read at once beside a row's columns
    # Registers are few: a split does not keep what all rows share, points are stored one tensor
    # after the other.
    crowded: bool = False

    @property
    def exchanges(self) -> bool:
        """Whether its programs wait for one another."""
        return self.programs_per_row > 1 or self.kind == "scan"

    @property
    def has_loops(self) -> bool:
        """Whether its text has loops over blocks."""
        return self.kind == "row_split" or (
            self.kind == "rows" and (not self.persistent or self.programs_per_row > 1)
        )


# Where elements are read one by one, neighbours in memory are for neighbouring threads: one
# instruction of a warp then touches few lines. H200, windows of 3x3 (bf16): 4 and 8 elements of a
# thread take 84 and 140 us. Two f32 results of a thread are stored at once: bilinear, 60 and 51 us.
SINGLE_ELEMENT_TILES = tuple(TileConfig((("x", n),), w) for n, w in ((256, 8), (128, 4), (256, 4)))


# Elements and warps of a tile of points.
PLANE_TILES = ((2048, 4), (1024, 4), (4096, 8))


def warps_for(elements: int, each: int = 16) -> int:
    """Warps so that a thread has about `each` elements."""
    return min(16, max(1, below(elements // (32 * each))))


def line_tiles(count: int, spec: DeviceSpec, itemsize: int, most: int) -> tuple[TileConfig, ...]:
    """16 bytes per thread and access or more, but enough programs for every multiprocessor."""
    best = min(most, 1024 if itemsize >= 4 else 2048)
    while best > 128 and count < best * 2 * spec.cores:
        best //= 2
    warps = {128: 2, 256: 4}.get(best, 4)
    out = [TileConfig((("x", best),), warps)]
    for block, w in ((512, 4), (1024, 4), (2048, 8)):
        if block != best and count >= block * spec.cores:
            out.append(TileConfig((("x", block),), w))
    return tuple(out)


def plane_tiles(ny: int, nx: int, spec: DeviceSpec, most: int) -> tuple[TileConfig, ...]:
    x = min(power(nx), most)
    count = ny * nx

    def plane(elements: int, warps: int) -> TileConfig:
        while elements > 256 and count < elements * 2 * spec.cores:
            elements //= 2
        y = min(max(1, elements // x), power(ny))
        return TileConfig((("y", y), ("x", min(x, elements))), warps)

    return tuple(dict.fromkeys(plane(*tile) for tile in PLANE_TILES))


def transposed_tiles(y: Sequence[Axis], x: Sequence[Axis]) -> tuple[TileConfig, ...]:
    """Of about as many places along each of `y` and `x`."""
    ny, nx = size(y), size(x)

    def tile(edge: int, warps: int) -> TileConfig:
        x = min(edge, power(nx))
        y = min(edge * edge // x, power(ny))
        x = min(edge * edge // y, power(nx))
        return TileConfig((("y", y), ("x", x)), warps)

    return tile(64, 8), tile(32, 4)
