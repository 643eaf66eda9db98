"""Additions at places that tensors hold: which way they are done, and what each way takes.

In: a scatter that adds. Out: a decision in the Record, by predicted time, between

    compared   every row of the result looks at all points (`lower.compared`)
    ordered    the points are sorted by place, and each row adds its own (`lower.ordered`)
    atomic     each point is added where it belongs, in any order

The first two repeat bit for bit. They are forms of an expression and not of a kernel, so that the
choice is made here and not by the schedule; only a GPU has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deuteron.base.device import additions_us
from deuteron.ir.index import Axis, Index, Value, hint, product
from deuteron.ir.operations import FLOATS, ITEMSIZE
from deuteron.lower.core import LowerContext
from deuteron.lower.core import Value as Tensor

# What memory is accumulated in: atomics of smaller types are slow or absent, and round each time.
ACCUMULATORS = {"f16": "f32", "bf16": "f32", "bool": "i32", "u8": "i32", "i8": "i32", "i16": "i32"}
WAYS = {"compared": "by comparison", "ordered": "in order", "atomic": "atomically"}
# Columns from which rows are worth ordering; what is narrower is added element by element.
MIN_ORDERED_WIDTH = 16
# Microseconds that results which repeat are worth: a sort of 32768 places, and what is around it.
REPEATING_WORTH_US = 35.0
# On an H200: bytes moved, atomic additions of f32 (in the L2, and, on an H100, elsewhere: those of
# 8192 x 128 to 100000 x 128 take 36 us) and programs done in a microsecond.
BYTES_PER_US, CACHED_ATOMICS_PER_US, ATOMICS_PER_US, PROGRAMS_PER_US = 4.5e6, 4.2e5, 3e4, 1640
CACHE_BYTES = 40e6  # bytes that are in the L2
# Sorting: up to 4096 places, more, and each of those; times as long by the bytes of a place.
SORT_US, SORT_FACTORS = (17.0, 28.0, 2.6e-5), {2: 1.0, 4: 1.5, 8: 2.5}
OVERHEAD_US = 6.0  # what else there is: places, first points, splits
SMALL_SORT = 4096
# Ranking: two kernels, and comparisons done in a microsecond, with all and in binary searches; with
# numbers of 64 bits they take so much longer. H200, us, 8192 places: with all 10, in blocks of 512
# 2.2 and their searches 3.1; 16384: 33, 2.3 and 6.0 (of 1024 3.2 and 9.2); 32768: 127, 5.4 and 8.2
# in blocks of 1024 (of 512 3.4 and 11.3), by the library 24.
RANK_US, COMPARISONS_PER_US, SEARCH_STEPS_PER_US, I64_FACTOR = 2.0, 5.5e6, 1.7e6, 2.0
# Terms that rows look at in a microsecond, all columns counted, and what is around them. H200, us:
# 32 rows of 8, 262144 points (T5's gradient of a bias by distances): 86, atomically 289; 2 rows of
# 768 (bf16), 4096 points (the kinds of tokens): 9, ordered 23.
COMPARED_PER_US, COMPARED_US = 8e5, 3.0
# Places that are put in order by themselves, before the others' are searched.
RANK_BLOCKS = (128, 256, 512, 1024)


def is_sparse(points: int, rows: int) -> bool:
    return 2 * points <= rows


def is_ranked(points: int, rows: int) -> bool:
    dtype = packed_dtype(points, rows)
    return dtype is not None and ranking_us(points, dtype) < sorting_us(points, rows)


def bits_of(count: int) -> int:
    """Bits of numbers below `count`."""
    return max(1, (count - 1).bit_length())


def packed_dtype(points: int, rows: int) -> str | None:
    """The dtype that holds a row and a point's number and is not negative."""
    bits = bits_of(points) + bits_of(rows)
    return "i32" if bits <= 31 else "i64" if bits <= 63 else None


def sorting_us(points: float, rows: float) -> float:
    sort = SORT_US[0] if points <= SMALL_SORT else SORT_US[1] + SORT_US[2] * points
    return sort * SORT_FACTORS[2 if rows <= 2**16 else 4]


def ranking_us(points: int, dtype: str, block: int | None = None) -> float:
    """With blocks of so many places, 0: without, None: as is best."""
    if block is None:
        block = block_of(points, dtype)
    slower = I64_FACTOR if dtype == "i64" else 1.0
    if not block:
        return RANK_US + points**2 / COMPARISONS_PER_US * slower
    looks = -(-points // block) * block.bit_length()
    return (
        2 * RANK_US + points * (block / COMPARISONS_PER_US + looks / SEARCH_STEPS_PER_US) * slower
    )


def block_of(points: int, dtype: str) -> int:
    """Places of a block that is put in order by itself; 0: all are compared with all."""
    return min((0, *RANK_BLOCKS), key=lambda block: ranking_us(points, dtype, block))


@dataclass(frozen=True)
class Rows:
    """A tensor as rows that points are added to. `rows` and `columns` are its dimensions, `points`
    the axes of the points whose places are sorted; each other axis is a column."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    points: tuple[Axis, ...]
    along: tuple[Axis, ...]  # the axis of each column


def rows_of(axes: Sequence[Axis], place: Sequence[Index], x: Tensor) -> Rows | None:
    """Which dimensions of x are rows; None where no place is loaded."""
    columns = {
        d: a
        for d, (p, n) in enumerate(zip(place, x.shape, strict=True))
        for a in axes
        if p is a.index and a.extent is n and not any(a in q.axes() for q in place if q is not p)
    }
    rows = [d for d in range(x.rank) if d not in columns]
    if not any(isinstance(a, Value) for d in rows for a in place[d].atoms()):
        return None
    points = tuple(a for a in axes if a not in columns.values())
    if not points:
        return None
    return Rows(tuple(rows), tuple(columns), points, tuple(columns.values()))


def choose(ctx: LowerContext, x: Tensor, rows: Rows, repeat: bool) -> str:
    """How the additions are done; `repeat`: results are to. Otherwise that is worth some time where
    rows are wide: as many bytes are moved then as are added.

    H200, us, ordered and atomic: 50257 x 768 (bf16), 32768 points: 74 and 161; 65536 x 128 (f32),
    524288: 126 and 140. H100: 100000 x 128 (bf16), 8192 points: 35 and 73.
    """
    width, count = (hint(product(x.shape[d] for d in dims)) for dims in (rows.columns, rows.rows))
    points = hint(product(a.extent for a in rows.points))
    us = {"atomic": atomic_us(x, points, width)}
    if product(x.shape[d] for d in rows.rows).value is not None:
        us["compared"] = COMPARED_US + count * points * width / COMPARED_PER_US
    if x.dtype in FLOATS and (repeat or width >= MIN_ORDERED_WIDTH):
        us["ordered"] = ordered_us(x, points, count, width)
    worth = REPEATING_WORTH_US if "ordered" in us else 0.0
    ways = [w for w in us if w != "atomic" and (repeat or us[w] <= us["atomic"] + worth)]
    way = min(ways, key=lambda w: us[w], default="atomic")
    ctx.record.add(
        "decision",
        subject="order",
        accepted=way != "atomic",
        reason="atomic additions are faster" if way == "atomic" else "results repeat",
        detail=f"{points} rows of {width} added to {count}: "
        + ", ".join(f"{us[w]:.0f} us {text}" for w, text in WAYS.items() if w in us),
        first=ctx.node.name if ctx.node is not None else "",
        second="",
        bytes=0,
        us=round(us["atomic"] - us[way], 3),
    )
    return way


def ordered_us(x: Tensor, points: int, rows: int, width: int) -> float:
    sort = sorting_us(points, rows)
    if is_ranked(points, rows):
        sort = ranking_us(points, packed_dtype(points, rows) or "i64")
    filled = points if is_sparse(points, rows) else rows
    programs = filled if width >= 64 else filled * width / 256
    moved = (rows + points) * width * ITEMSIZE[x.dtype] / BYTES_PER_US
    return sort + OVERHEAD_US + max(moved, programs / PROGRAMS_PER_US)


def atomic_us(x: Tensor, points: int, width: int) -> float:
    """To numbers that are set before, and cast behind, where they are wider than the result."""
    own, wide = ITEMSIZE[x.dtype], ITEMSIZE[ACCUMULATORS.get(x.dtype, x.dtype)]
    size, added = hint(product(x.shape)), points * width
    each = CACHED_ATOMICS_PER_US if size * wide <= CACHE_BYTES else ATOMICS_PER_US
    around = size * (wide + (own + wide if own < wide else 0)) / BYTES_PER_US
    return around + max(added / each, additions_us(added, size * wide))


__all__ = ["ACCUMULATORS", "Rows", "choose", "rows_of"]
