"""No rewrite ends a compile: each is made to fail after it changed something, is undone, and the
Record names it (`graph/transaction.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from deuteron.backend import collecting
from deuteron.base.passes import Context, Pass
from deuteron.base.record import Record
from deuteron.capture import decompositions, joint, stages
from deuteron.graph import rewrite as rewriting
from deuteron.graph import strides
from deuteron.graph.edit import Editor
from deuteron.graph.rewrite import (
    PLACES_OF_MAXIMA,
    PULL_OUT,
    RANDOM_NUMBERS,
    REWRITES,
    VANISHING,
    Tried,
    rewrite,
)
from deuteron.graph.rules import RULES_OF, Row
from deuteron.graph.transaction import Snapshot

pytestmark = pytest.mark.failing_rewrites
aten = torch.ops.aten


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.0),
        nn.Linear(16 * 9, 8),
    )


def spoiled(gm: fx.GraphModule) -> None:
    """Changes targets, arguments, fake values and nodes, as what fails midway may have."""
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    for n in reversed(calls):
        if not n.users and n.op == "call_function":
            gm.graph.erase_node(n)
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    first, last = calls[0], calls[-1]
    with Editor(gm).before(first):
        made = gm.graph.call_function(aten.ones.default, ([2],))
    output = gm.graph.output_node()
    output.args = ([made for _ in output.args[0]],)  # type: ignore[union-attr]
    last.target, last.args = aten.relu.default, (made,)
    for n in calls:
        n.meta.clear()


def failing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """What does its work, spoils the graph, and raises."""

    def apply(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        plain(gm, *args, **kwargs)
        spoiled(gm)
        raise ZeroDivisionError("planted")

    return apply


def named(records: list[Record]) -> set[str]:
    decisions = (e for r in records for e in r.of("decision") if e["subject"] == "rewrite")
    return {e["first"] for e in decisions if not e["accepted"] and "planted" in e["detail"]}


def trained(options: dict[str, Any] | None = None) -> list[Record]:
    """Compiles a step of training; its results and gradients are eager's."""
    nets, x = (network(), network()), torch.randn(4, 16, 6, 6)
    given = [x.clone().requires_grad_() for _ in nets]
    with collecting() as records:
        run = torch.compile(nets[1], backend="deuteron", fullgraph=True, options=options)
        got = run(given[1])
        want = nets[0](given[0])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert got.stride() == want.stride()
        for y in (want, got):
            y.square().mean().backward()
    for a, b in zip((*nets[0].parameters(), given[0]), (*nets[1].parameters(), given[1])):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5)
    return records


TRIED = [*REWRITES, RANDOM_NUMBERS, PLACES_OF_MAXIMA, VANISHING, PULL_OUT]


@pytest.mark.parametrize("row", TRIED, ids=[row.name for row in TRIED])
def test_each_is_undone(row: Pass[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(row.run, Tried)
    broken = replace(row, run=replace(row.run, apply=failing(row.run.apply)))
    for module, table in ((rewriting, "REWRITES"), (joint, "PARTITIONING"), (stages, "PREPARING")):
        rows = tuple(broken if r is row else r for r in getattr(module, table))
        monkeypatch.setattr(module, table, rows)
    records = trained()
    assert named(records) == {row.name}
    assert any("it failed and was undone" in str(r.entries) for r in records)


@pytest.mark.parametrize("name", ["recompute_beside_calls", "recompute_late"])
def test_those_of_capture_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = getattr(joint, name)

    def fails(graph: Any, *args: Any) -> Any:
        plain(graph, *args)
        spoiled(graph if isinstance(graph, fx.GraphModule) else graph.owning_module)
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(joint, name, fails)
    assert len(named(trained())) == 1


def a_program(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    """Something for every row."""
    a = x.double().float() * 1 + x.view(4, 6)
    b = aten.cat.default([a.neg().neg()]).clone()
    c = torch.ones(4, 6) * 2 + aten.slice_scatter.default(x, b, 0, 0, 4)
    return c.sin(), (n + 0).cos()


@pytest.mark.parametrize("row", sorted({r.name for rows in RULES_OF.values() for r in rows}))
def test_each_row_is_undone_alone(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rows are applied."""

    def fails(editor: Editor, node: fx.Node) -> fx.Node | None:
        spoiled(editor.gm)
        raise ZeroDivisionError("planted")

    for packet, rows in RULES_OF.items():
        changed = [Row(r.name, fails) if r.name == row else r for r in rows]
        monkeypatch.setitem(RULES_OF, packet, changed)
    given = torch.randn(4, 6), torch.arange(24).view(4, 6)
    gm, record = make_fx(a_program, tracing_mode="fake")(*given), Record()
    rewrite(gm, Context(record=record))
    gm.graph.lint()
    assert named([record]) == {f"row: {row}"}
    assert all(torch.equal(a, b) for a, b in zip(gm.forward(*given), a_program(*given)))
    assert len(record.of("rewrite")[0]["rules"]) >= 4


def test_strides_of_saved_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that cannot follow what was saved in another order reads copies."""
    plain = strides._follow_saved

    def fails(gm: fx.GraphModule, given: Any, copied: bool = False) -> int:
        count = plain(gm, given, copied)
        if not copied:
            spoiled(gm)
            raise ZeroDivisionError("planted")
        return count

    def step(x: Tensor) -> list[Tensor]:
        return [x.sin().view(2, 48), x.cos()]

    gm = make_fx(step, tracing_mode="fake")(torch.randn(2, 3, 4, 4))
    with next(iter(gm.graph.nodes)).meta["val"].fake_mode:
        given = torch.empty(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    monkeypatch.setattr(strides, "_follow_saved", fails)
    record = Record()
    strides.as_saved(gm, [given], record)
    assert named([record]) == {"strides of saved tensors"}
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    gm.recompile()
    got = gm.forward(x)
    assert torch.equal(got[0], x.sin().reshape(2, 48)) and torch.equal(got[1], x.cos())
    assert got[1].is_contiguous()


def test_a_decomposition_that_fails_leaves_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("planted")

    plain = decompositions.table()
    changed = {**plain, aten.softplus.default: fails, aten.softplus_backward.default: fails}
    monkeypatch.setattr(decompositions, "table", lambda eager_random=False: changed)
    x = torch.randn(7, 5, requires_grad=True)
    with collecting() as records:
        got = torch.compile(F.softplus, backend="deuteron", fullgraph=True)(x)
        torch.testing.assert_close(got, F.softplus(x))
        torch.testing.assert_close(
            torch.autograd.grad(got.sum(), x), torch.autograd.grad(F.softplus(x).sum(), x)
        )
    assert {n.split()[-1] for n in named(records)} == {
        "aten.softplus.default",
        "aten.softplus_backward.default",
    }


def test_what_eager_refuses_is_refused() -> None:
    def f(x: Tensor, target: Tensor) -> Tensor:
        return F.nll_loss(x, target)

    with pytest.raises(Exception, match=r"batch|size|shape"):
        torch.compile(f, backend="deuteron", fullgraph=True)(
            torch.randn(3, 5), torch.zeros(4, dtype=torch.int64)
        )


def test_a_snapshot_has_everything() -> None:
    gm = make_fx(a_program, tracing_mode="fake")(torch.randn(4, 6), torch.arange(24).view(4, 6))
    gm.graph.output_node().meta["kept"] = 3

    def text() -> list[Any]:
        return [(n.format_node(), dict(n.meta)) for n in gm.graph.nodes]

    before, snapshot = text(), Snapshot(gm)
    for _ in range(2):  # again from the same
        spoiled(gm)
        assert text() != before
        snapshot.restore()
        gm.graph.lint()
        assert text() == before
