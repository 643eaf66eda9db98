"""What the Record says of results that may differ from run to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deuteron.ir.index import const
from deuteron.ir.program import Extern, Layout
from deuteron.schedule.kernel import Kernel, Schedule
from deuteron.schedule.unordered import (
    NONDETERMINISTIC_CALL,
    NONDETERMINISTIC_OPS,
    UNORDERED_SUM,
    UNORDERED_WRITE,
    unordered,
)
from deuteron.tools.explain import explain
from tests.schedule.tools import scheduled

embedding_backward = torch.ops.aten.embedding_dense_backward
X, I, V = torch.randn(50, 8), torch.arange(30) % 7, torch.randn(30, 8)
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], list[str]]] = {
    "gradients of an embedding": (
        lambda v, i: embedding_backward(v, i, 50, -1, False),
        (V, I),
        [UNORDERED_SUM],
    ),
    "numbers added": (lambda x, i, v: x.index_add(0, i, v), (X, I, V), [UNORDERED_SUM]),
    "whole numbers added": (lambda x, i, v: x.index_add(0, i, v), (X.long(), I, V.long()), []),
    "numbers multiplied": (
        lambda x, i, v: x.scatter_reduce(0, i[:, None].expand(30, 8), v, "prod"),
        (X, I, V),
        [UNORDERED_SUM],
    ),
    "the largest": (
        lambda x, i, v: x.scatter_reduce(0, i[:, None].expand(30, 8), v, "amax"),
        (X, I, V),
        [],
    ),
    "numbers written": (lambda x, i, v: x.index_put((i,), v), (X, I, V), [UNORDERED_WRITE]),
    "written at places of their own": (
        lambda x, v: torch.as_strided_scatter(x, v, (30, 8), (8, 1), 3),
        (X, V),
        [],
    ),
    "one number written": (lambda x, i: x.index_fill(0, i, 2.0), (X, I), []),
    "both": (
        lambda x, i, v: (x.index_put((i,), v), x.index_add(0, i, v)),
        (X, I, V),
        [UNORDERED_SUM, UNORDERED_WRITE],
    ),
    "sums in order": (lambda x: (x.softmax(-1), x.sum(0), x.cumsum(0)), (X,), []),
}


def on_gpu(schedule: Schedule) -> Schedule:
    moved = [replace(s, device="cuda:0") if isinstance(s, Kernel) else s for s in schedule.steps]
    return replace(schedule, steps=tuple(moved))


@pytest.mark.parametrize("name", CASES)
def test_kernels(name: str) -> None:
    f, args, want = CASES[name]
    plan = scheduled(f, *args, device="H200", check=False).schedule
    assert not list(unordered(plan)), "a CPU does all in order"
    entries = list(unordered(on_gpu(plan)))
    assert sorted({e["reason"] for e in entries}) == want
    assert all(e["origins"] and e["what"] for e in entries)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_library_calls(device: str) -> None:
    layout = Layout("f32", (const(3),), (const(1),), device)
    calls = [
        Extern((f"t{k}",), op, (), (), (layout,))
        for k, op in enumerate(("aten.convolution_backward.default", "aten.mm.default"))
    ]
    entries = list(unordered(Schedule(tuple(calls), {}, {})))
    want = [("aten.convolution_backward.default", NONDETERMINISTIC_CALL)] if device != "cpu" else []
    assert [(e["what"], e["reason"]) for e in entries] == want


def test_the_library_has_such_operators() -> None:
    assert not [
        n for n in NONDETERMINISTIC_OPS if not hasattr(torch.ops.aten, n.removeprefix("aten."))
    ]


def test_backwards_of_attention_are_named() -> None:
    every = (n.replace("::", ".") for n in torch._C._dispatch_get_all_op_names())
    backwards = {n for n in every if n.startswith("aten.") and "attention_backward" in n}
    others = ("for_cpu", "overrideable")  # of other devices
    assert {n for n in backwards if not any(o in n for o in others)} <= NONDETERMINISTIC_OPS


def test_explanations_say_it() -> None:
    explanation = explain(torch.sin, torch.ones(4))
    (part,) = explanation.data["parts"]
    part["unordered"].append({"what": "poi_0", "reason": UNORDERED_SUM})
    for text in (str(explanation), explanation.full()):
        assert f"may differ from run to run: poi_0: {UNORDERED_SUM}" in text
