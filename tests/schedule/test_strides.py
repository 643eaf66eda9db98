"""Walks across memory are priced by the lines and sectors that they touch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deuteron.base.device import device_spec
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis
from deuteron.ir.program import Compute, contiguous
from deuteron.schedule.group import group_of_one
from deuteron.schedule.profit import cost
from deuteron.schedule.strides import LINE_BYTES, cached_lines, steps, strided_bytes
from tests.schedule.tools import scheduled

W = torch.randn


def mlp(x, a, b):
    return torch.relu(x @ a.t()) @ b.t()


def gated(x, a, b):
    return (torch.sigmoid(x @ a.t()) * (x @ a.t() + 1)) @ b.t()


def vectors(x, a, b):
    return b.mv(torch.tanh(a.mv(x[0])))


@pytest.mark.parametrize("device", ["cpu", "H200"])
@pytest.mark.parametrize("f", [mlp, gated, vectors])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_one_row_do_not_walk_down_columns(
    device: str, f: Callable[..., Any], dtype: torch.dtype
) -> None:
    """The second product's sums could be kept by the splits of the first, who would go through its
    weights column by column: 45 times slower than two kernels on a CPU."""
    args = [W(1, 640).to(dtype), W(1920, 640).to(dtype), W(640, 1920).to(dtype)]
    plan = scheduled(f, *args, device=device, products="generated", check=False)
    split_nests = [n for k in plan.kernels for n in k.nests if n.row_split is not None]
    assert not split_nests, split_nests


def test_columns_beside_rows_still_share_a_nest() -> None:
    """What is contiguous along the rows is read once: a norm's gradients."""

    def f(g, x, w):
        return (g * w * x).sum(-1, keepdim=True) * x + g, (g * x).sum(0)

    plan = scheduled(f, W(4096, 512), W(4096, 512), W(512))
    assert any(n.row_split is not None for k in plan.kernels for n in k.nests)


def columns(rows: int, columns: int, transposed: bool) -> tuple[Compute, dict[str, Any]]:
    """Sums of x[rows, columns] over the last axis, x beside y whose memory may be transposed."""
    i, j = Axis("d0", rows), Axis("r0", columns)
    lay = contiguous([rows, columns], "f32", "cpu")
    other = contiguous([columns, rows], "f32", "cpu")
    x = E.load("x", (i.index, j.index), "f32")
    y = E.load("y", (j.index, i.index) if transposed else (i.index, j.index), "f32")
    body = Expr("reduce", "f32", (E.op("mul", x, y),), ("sum", (j,)))
    layouts = {"x": lay, "y": other if transposed else lay, "s": contiguous([rows], "f32", "cpu")}
    return Compute("s", (i,), body, layouts["s"]), layouts


def test_a_walk_along_memory_costs_nothing_more() -> None:
    c, layouts = columns(300, 200, False)
    assert strided_bytes(group_of_one(c), layouts, device_spec("cpu")) == 0


def test_a_walk_across_touches_lines() -> None:
    """One of the two is read across, whatever the order. Lines that are a power of two apart do not
    stay in the cache."""
    spec = device_spec("cpu")
    c, layouts = columns(4096, 4096, True)
    lost = strided_bytes(group_of_one(c), layouts, spec)
    assert lost == 4096 * 4096 * (LINE_BYTES - 4)
    c, layouts = columns(300, 200, True)
    kept = strided_bytes(group_of_one(c), layouts, spec)
    assert 0 < kept < 300 * 200 * (LINE_BYTES - 4)
    assert cost(group_of_one(c), layouts, ["s"], spec).bytes == 2 * 300 * 200 * 4 + 300 * 4 + kept
    assert cached_lines(4096, spec) < 1000 < cached_lines(4096 + 64, spec)


def test_steps_of_what_is_no_number() -> None:
    """Quotients, remainders and loaded places have none."""
    i, lay = Axis("d0", 12), contiguous([12], "f32", "cpu")
    assert steps((i.index * 3 + 1,), lay) == {i: 3}
    assert steps((i.index // 5,), lay) is None
