"""Boxes: which accesses the copy engine can serve, and what it is told of them."""

from __future__ import annotations

import pytest

from deuteron.ir.index import Axis, Index, atom, const
from deuteron.ir.program import Layout
from deuteron.schedule.boxes import Box, box_of
from deuteron.schedule.tiling import Dim, Tiling

H, I, K = Axis("h", const(6)), Axis("i", const(200)), Axis("k", const(96))
TILING = Tiling(
    (Dim("b", (H,), "grid", 1), Dim("i", (I,), "grid", 64), Dim("k", (K,), "loop", 32)), 4, 3
)


def layout(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: str = "bf16", offset: int = 0
) -> Layout:
    sizes, steps = tuple(map(const, shape)), tuple(map(const, strides))
    return Layout(sizes, steps, dtype, "cuda:0", const(offset))


def place(*axes: Axis) -> tuple[Index, ...]:
    return tuple(atom(a) for a in axes)


def test_the_contiguous_dimension_is_the_last() -> None:
    found = box_of(TILING, layout((6, 200, 96), (96, 576, 1), offset=8), place(H, I, K))
    assert found == Box(
        8, (("b", H), ("i", None), ("k", None)), (6, 200, 96), (96, 576, 1), (1, 64, 32)
    )
    turned = box_of(TILING, layout((200, 96), (1, 200)), place(I, K))
    assert turned is not None and turned.dims == ("k", "i") and turned.block == (32, 64)


def test_axes_of_one_dimension_go_like_one() -> None:
    a, b = Axis("a", const(10)), Axis("c", const(20))
    tiling = Tiling((Dim("i", (a, b), "grid", 64), Dim("k", (K,), "loop", 32)), 4, 3)
    together = box_of(tiling, layout((10, 20, 96), (1920, 96, 1)), place(a, b, K))
    assert together is not None and together.extents == (200, 96) and together.strides == (96, 1)
    assert box_of(tiling, layout((10, 20, 96), (96, 960, 1)), place(a, b, K)) is None


@pytest.mark.parametrize(
    ("given", "at"),
    [
        (layout((200, 97), (97, 1)), place(I, K)),  # rows begin between multiples of 16 bytes
        (layout((200, 96), (96, 1), offset=4), place(I, K)),  # and the first one does
        (layout((200, 96), (192, 2)), place(I, K)),  # nothing is contiguous
        (layout((96,), (1,)), place(K)),  # one dimension
        (layout((200, 96), (96, 1), "f64"), place(I, K)),
        (layout((200, 96), (96, 1)), (atom(I), atom(K) // const(2))),
    ],
)
def test_what_is_no_box(given: Layout, at: tuple[Index, ...]) -> None:
    assert box_of(TILING, given, at) is None
