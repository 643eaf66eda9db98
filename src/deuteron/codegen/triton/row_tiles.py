"""Blocks of a GPU's programs for rows: whole ones, columns side by side, and tiles for tensors that
are contiguous along different dimensions.

In: how many rows of how many elements, and the device. Out: sizes that are worth having, the
heuristic choice first.
"""

from __future__ import annotations

from deuteron.base.device import DeviceSpec
from deuteron.codegen.triton.point_tiles import TileConfig, warps_for
from deuteron.schedule.programs import MIN_BUSY_SHARE, power

# Elements of a tile in registers: 16384 elements are 32 each for 512 threads, with two to four such
# values alive.
ROW_LIMIT = 16384
# Elements of short columns side by side, at least: a GPU starts one program in a cycle. H200, us,
# softmax of 2^23 windows of 8 (f32): 256 elements (262144 programs) 160, 512 81, 1024 75.
MIN_TILE = 1024
# Bytes of the blocks that are on their way to a program.
PIPELINE_BYTES = 96 << 10


def row_tiles(
    nx: int, nr: int, itemsize: int, spec: DeviceSpec, light: bool
) -> tuple[TileConfig, ...]:
    """Whole rows; several short ones at once, as long as every multiprocessor has two programs.
    H200, us: one tensor that is only reduced (`light`), bf16 rows of 512 at 1024 and 2048 elements
    85 and 74; rows of 32000 with 16 and 32 warps 691 and 614 (f32), 517 and 421 (bf16).
    """
    r = power(nr)

    def tile(elements: int, each: int) -> TileConfig:
        x = min(max(1, elements // r), power(nx), 128)
        while x > 1 and nx < x * 2 * spec.cores:
            x //= 2
        warps = 32 if r >= 2 * ROW_LIMIT else warps_for(x * nr, each)
        return TileConfig((("x", x), ("r", r)), warps)

    each = 16 if itemsize >= 4 else 32
    few = 2048 if light and itemsize < 4 else 1024
    tiles = dict.fromkeys((tile(few, each), tile(1024, each // 2), tile(3072 - few, each)))
    return tuple(tiles)


def column_tiles(
    nx: int, nr: int, itemsize: int, spec: DeviceSpec, limit: int
) -> tuple[TileConfig, ...]:
    """Contiguous along x: at least 32 bytes of a row at once, few enough columns that there are
    many programs; whole columns, at most `limit` elements, and few warps, which wait for one
    another. H200, us, rows x columns of a program and warps, f32: 256 x 64 and 16, 256 x 32 and 8:
    220 and 139 (cumulative sums); 1024 x 16 and 16, 1024 x 8 and 8: 19.0 and 14.4, 23.1 and 15.8
    (layer norm); bf16: 1024 x 32 and 16, 1024 x 8 and 8: 34 and 52; statistics, 16 and 8 warps: 128
    x 64 10.7 and 7.2, 256 x 64 11.9 and 8.3.
    """
    r = power(nr)

    def tile(x: int) -> TileConfig:
        x = min(max(x, MIN_TILE // r), power(nx))
        while x > 8 and nx < x * spec.cores:
            x //= 2
        x = min(x, max(1, limit // r), max(8, 8192 // r) if itemsize >= 4 else x)
        return TileConfig((("x", x), ("r", r)), min(8 if x * r <= 16384 else 16, warps_for(x * r)))

    return tuple(dict.fromkeys((tile(64), tile(32), tile(128))))


def looped_column_tiles(
    nx: int, nr: int, moved: int, spec: DeviceSpec, scans: bool
) -> tuple[TileConfig, ...]:
    """The same, block by block. H200, us: 64 x 64 elements and 64 x 128 in a pipeline of 3: 59 and
    41 (statistics of channels, bf16), 134 and 121 (their gradients); 16 x 512 and 32 x 256, of 4096
    columns: 322 and 207 (gradient of GELU with its bias). Sums of 65535 columns of f32, without a
    pipeline: 64 x 128 and 64 x 64 434 and 276. Sums of 8192 columns of bf16 in a pipeline of 3 and
    4: 155 and 133. A scan (f32), whose blocks wait for each other: 64 x 128 for 8 warps, 64 x 64
    for 4: 185 and 143.
    """

    def tile(x: int, elements: int, stages: int) -> TileConfig:
        x = min(x, power(nx))
        while x > 8 and nx < x * spec.cores * MIN_BUSY_SHARE:
            x //= 2
        r = min(power(nr), max(1, elements // x))
        each = 32 if x * r > 4096 or scans else 16
        return TileConfig((("x", x), ("r", r)), warps_for(x * r, each), stages)

    if scans:
        return tuple(dict.fromkeys((tile(64, 4096, 3), tile(32, 4096, 3), tile(64, 2048, 3))))
    most = 8192 if moved <= 4 else 4096
    deep = next((n for n in (4, 3) if n * most * moved <= PIPELINE_BYTES), 1)
    tiles = (tile(64, most, deep), tile(64, 4096, 1), tile(32, 4096, deep))
    return tuple(dict.fromkeys(tiles))


def across_tiles(nx: int, nr: int, spec: DeviceSpec) -> tuple[TileConfig, ...]:
    """Some tensors are contiguous along x, others along r: 64 bytes and more of each at once, less
    along x where there are few columns. H200, us: a transposition with sums, bf16: 32 x 128 203, 32
    x 256 in a pipeline of 3 569; 1024 columns of 2048, gradients of batch norm and GELU (bf16): 32
    x 256 38.1, 16 x 512 23.4, 8 x 512 20.0."""

    def tile(x: int, elements: int) -> TileConfig:
        x = min(x, power(nx))
        while x > 8 and nx < x * spec.cores * MIN_BUSY_SHARE:
            x //= 2
        r = min(elements // x, power(nr))
        return TileConfig((("x", x), ("r", r)), warps_for(x * r))

    return tuple(dict.fromkeys((tile(64, 8192), tile(32, 4096), tile(64, 4096))))


__all__ = ["ROW_LIMIT", "across_tiles", "looped_column_tiles", "column_tiles", "row_tiles"]
