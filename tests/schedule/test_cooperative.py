"""How many splits rows are cut into that begin alike (one alignment class each)."""

from __future__ import annotations

import pytest

from deuteron.schedule.cooperative import (
    ALIGNMENT_CLASSES,
    PARTIAL_RESULT_ROWS,
    aligned_split_count,
)


def waves(rows: int, most: int, count: int) -> int:
    """Rows that pass one after the other, where so many splits run at once."""
    return -(-count // most) * -(-rows // count)


@pytest.mark.parametrize("rows", [1, 8, 64, 500, 4096, 100_000])
@pytest.mark.parametrize("most", [1, 7, 14, 28, 43, 264])
def test_splits_leave_few_idle(rows: int, most: int) -> None:
    count = aligned_split_count(rows, most)
    assert count % ALIGNMENT_CLASSES == 0
    ideal = -(-rows // min(most, rows))
    least = min(
        waves(rows, most, n)
        for n in range(ALIGNMENT_CLASSES, 8 * most + 1, ALIGNMENT_CLASSES) or [ALIGNMENT_CLASSES]
    )
    assert waves(rows, most, count) == least
    if rows >= 64 * most >= 64 * ALIGNMENT_CLASSES:
        assert least <= 1.06 * ideal


def test_partial_results_bound_them() -> None:
    assert aligned_split_count(4096, 14, PARTIAL_RESULT_ROWS) == 56
    assert aligned_split_count(64, 14, PARTIAL_RESULT_ROWS) == 8
    assert aligned_split_count(4096, 14, 100.0) < 56
