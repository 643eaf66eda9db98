"""Pairs that do not share a nest, and the reason that the Record gives for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis
from deuteron.ir.program import Compute, Layout, contiguous
from deuteron.schedule.group import Group, group_of_one
from deuteron.schedule.legality import Refusal, consistent, fits
from tests.schedule.tools import Scheduled, scheduled


def one(plan: Scheduled, reason: str) -> dict[str, Any]:
    refused = plan.refused(reason)
    assert refused, [(d["reason"], d["detail"]) for d in plan.record.of("decision")]
    return refused[0]


def test_other_index_of_a_reduction() -> None:
    """A row needs the sum of another row: known only when that row is done."""

    def f(x):
        return x.sum(-1).flip(0) + x.sum(-1)

    d = one(scheduled(f, torch.randn(40, 30)), "index maps differ")
    assert "39 - " in d["detail"] or "-d0 + 39" in d["detail"], d["detail"]
    assert d["bytes"] > 0


def test_reduced_and_other_extents() -> None:
    d = one(
        scheduled(lambda x: x.sum(-1).exp().reshape(8, 5).sum(-1), torch.randn(40, 30)),
        "iteration spaces differ",
    )
    assert "40" in d["detail"]


def test_rows_against_columns_of_a_chain() -> None:
    """Positions cannot be partial results, so the one reduction must wait for the other."""

    def f(x):
        return (x / x.sum(0)).argmax(-1)

    d = one(scheduled(f, torch.randn(40, 30)), "rows against columns")
    assert "reduces over the other's rows" in d["detail"]


def test_cycle() -> None:
    """a -> reduction of everything -> c and a -> c: the reduction stands between them."""

    def f(x: Tensor) -> Tensor:
        a = x.exp()
        return a + a.reshape(8, 150).sum(0).amax()

    d = one(scheduled(f, torch.randn(40, 30)), "cycle")
    assert "needs" in d["detail"]


def test_parallelism_lost() -> None:
    def f(x):
        """No rule takes the deviations into the pass of the mean."""
        return (x - x.mean(-1, keepdim=True)).abs().mean(-1)

    d = one(scheduled(f, torch.randn(2, 262_144), device="H200", check=False), "parallelism lost")
    assert "% of the device is busy" in d["detail"]


def test_too_large() -> None:
    def f(x: Tensor) -> Tensor:
        for _k in range(200):
            x = (x * x.sum(-1, keepdim=True)).sin()
        return x

    d = one(scheduled(f, torch.randn(8, 5), check=False), "too large")
    assert "operations in one kernel" in d["detail"]


def test_scatter() -> None:
    def f(x: Tensor, i: Tensor) -> Tensor:
        return torch.zeros(10, 5).index_add(0, i, x) * 2

    d = one(scheduled(f, torch.randn(40, 5), torch.randint(0, 10, (40,))), "scatter")
    assert "stores at computed places" in d["detail"]


def test_devices() -> None:
    plan = scheduled(lambda a, b: (a.exp(), a.cos()), torch.randn(4), torch.randn(4))
    a, b = (group_of_one(c) for c in plan.program.computes()[:2])
    layouts = dict(plan.program.layouts())
    layouts[b.members[0].name] = replace(layouts[b.members[0].name], device="cuda:0")
    refusal = fits(a, b, layouts, {})
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.detail) == ("device", "cpu and cuda:0")


def test_nothing_shared() -> None:
    plan = scheduled(lambda a, b: (a.exp(), b.cos()), torch.randn(4, 3), torch.randn(7))
    a, b = (group_of_one(c) for c in plan.program.computes()[:2])
    refusal = fits(a, b, plan.program.layouts(), {})
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "iteration spaces differ"
    assert "[4x3] and [7]" in refusal.detail or "[7] and [4x3]" in refusal.detail


def computed(name: str, axes: tuple[Axis, ...], body: Expr, target: str | None = None) -> Compute:
    layout = contiguous(tuple(a.extent for a in axes), body.dtype)
    return Compute(name, axes, body, layout, target)


def test_overwritten() -> None:
    """A reversed read of memory that the other overwrites point by point."""
    i = Axis("d0", 8)
    back = computed("back", (i,), E.load("x", (7 - i.index,), "f32"))
    new = computed("new", (i,), E.load("y", (i.index,), "f32"), target="x")
    layouts = dict.fromkeys(("x", "y", "back", "new"), back.layout)
    refusal = fits(group_of_one(back, 0), group_of_one(new, 1), layouts, {"new": "x"})
    assert isinstance(refusal, Refusal)
    assert refusal.reason in ("overwritten", "iteration spaces differ")
    both = Group(
        group_of_one(back).space, (*group_of_one(back, 0).members, *group_of_one(new, 1).members)
    )
    refused = consistent(both, layouts, {"new": "x"})
    assert refused is not None
    assert refused.reason == "overwritten"
    assert "reads x at" in refused.detail


def chain(*levels: str) -> tuple[Group, dict[str, Layout]]:
    """A reduction's row and two computations after each other, on the levels given."""
    i, j = Axis("d0", 4), Axis("r0", 6)
    at = (i.index, j.index)
    first = computed("first", (i, j), E.op("exp", E.load("x", at, "f32")))
    then = computed("then", (i, j), E.op("cos", E.load("first", at, "f32")))
    most = computed("most", (i,), E.reduce("max", (j,), E.load("then", at, "f32")))
    members = [replace(group_of_one(c).members[0], level=n) for c, n in zip((first, then), levels)]
    row = group_of_one(most)
    layouts = {"x": contiguous((i.extent, j.extent), "f32")}
    layouts |= {c.name: c.layout for c in (first, then, most)}
    return Group(row.space, (*members, *row.members)), layouts


def test_read_before_it_is_there() -> None:
    group, layouts = chain("point", "point")
    assert consistent(group, layouts, {}) is None
    first, then, most = group.members
    refusal = consistent(replace(group, members=(then, first, most)), layouts, {})
    assert refusal is not None
    assert (refusal.reason, refusal.detail) == ("order", "then reads first before it is there")


def test_rows_that_read_points() -> None:
    """What is evaluated once per row cannot read what each of its points makes anew."""
    refusal = consistent(*chain("point", "row"), {})
    assert refusal is not None
    assert (refusal.reason, refusal.detail) == ("levels", "then is per row, first per point")


def test_columns_before_all_rows() -> None:
    """A row that needs a column's sum, in the nest that computes the columns row by row."""
    i, j = Axis("d0", 4), Axis("r0", 6)
    at = (i.index, j.index)
    total = group_of_one(computed("total", (j,), E.reduce("sum", (i,), E.load("x", at, "f32"))), 0)
    scaled = E.op("div", E.load("x", at, "f32"), E.load("total", (j.index,), "f32"))
    rows = group_of_one(computed("rows", (i,), E.reduce("max", (j,), scaled)), 1)
    column = replace(total.members[0], kind="column", level="point")
    both = Group(rows.space, (column, *rows.members), (i, 2), {"total": "total.part"})
    layouts = {"x": contiguous((i.extent, j.extent), "f32")}
    layouts |= {m.name: m.compute.layout for m in both.members}
    refusal = consistent(both, layouts, {})
    assert refusal is not None
    assert refusal.reason == "columns"
    assert "complete after all rows" in refusal.detail


def test_positions_along_one_loop() -> None:
    """A position in a flattened window is no position along two loops."""
    i, j, k = Axis("r0", 4), Axis("r1", 6), Axis("r2", 24)
    x = E.load("x", (i.index, j.index), "f32")
    largest = group_of_one(computed("largest", (), E.reduce("max", (i, j), x)), 0)
    row = E.load("x", (k.index // 6, k.index % 6), "f32")
    where = group_of_one(computed("where", (), E.reduce("argmax", (k,), row)), 1)
    layouts = {"x": contiguous((i.extent, j.extent), "f32")}
    layouts |= {m.name: m.compute.layout for g in (largest, where) for m in g.members}
    moved = where.members[0].moved({k: i.index * 6 + j.index})
    refusal = consistent(Group(largest.space, (*largest.members, moved)), layouts, {})
    assert refusal is not None
    assert "counts along one loop" in refusal.detail
    both = fits(largest, where, layouts, {})
    assert isinstance(both, Group)
    assert both.space.reduced == (k,)
