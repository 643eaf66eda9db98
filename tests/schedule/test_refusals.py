"""Ten pairs that do not share a nest, and the reason that the Record gives for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deuteron.schedule.group import alone
from deuteron.schedule.legality import Refusal, fits
from tests.schedule.tools import Scheduled, scheduled


def one(found: Scheduled, reason: str) -> dict[str, Any]:
    refused = found.refused(reason)
    assert refused, [(d["reason"], d["detail"]) for d in found.record.of("decision")]
    return refused[0]


def test_other_index_of_a_fold() -> None:
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
    """Positions cannot be partial results, so the one fold must wait for the other."""

    def f(x):
        return (x / x.sum(0)).argmax(-1)

    d = one(scheduled(f, torch.randn(40, 30)), "rows against columns")
    assert "folds over the other's rows" in d["detail"]


def test_cycle() -> None:
    """a -> fold of everything -> c and a -> c: the fold stands between them."""

    def f(x: Tensor) -> Tensor:
        a = x.exp()
        return a + a.reshape(8, 150).sum(0).amax()

    d = one(scheduled(f, torch.randn(40, 30)), "cycle")
    assert "needs" in d["detail"]


def test_parallelism_lost() -> None:
    def f(x):
        return torch.softmax(x, -1)

    found = scheduled(f, torch.randn(2, 262_144), device="H200", check=False)
    reasons = {d["reason"] for d in found.record.of("decision") if not d["accepted"]}
    assert reasons & {"parallelism lost", "no gain", "iteration spaces differ"}


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
    found = scheduled(lambda a, b: (a.exp(), a.cos()), torch.randn(4), torch.randn(4))
    a, b = (alone(c) for c in found.program.computes()[:2])
    layouts = dict(found.program.layouts())
    layouts[b.members[0].name] = replace(layouts[b.members[0].name], device="cuda:0")
    refusal = fits(a, b, layouts, {})
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.detail) == ("device", "cpu and cuda:0")


def test_nothing_shared() -> None:
    found = scheduled(lambda a, b: (a.exp(), b.cos()), torch.randn(4, 3), torch.randn(7))
    a, b = (alone(c) for c in found.program.computes()[:2])
    refusal = fits(a, b, found.program.layouts(), {})
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "iteration spaces differ"
    assert "[4x3] and [7]" in refusal.detail or "[7] and [4x3]" in refusal.detail
