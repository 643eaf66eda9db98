"""The kinds of random programs: seeds repeat, eager runs what is drawn, and what a program asserts
is judged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dev.check.oracle import copies
from dev.check.test_cases import How, Line
from dev.fuzz.assertions import INPUT_SETS, assertions, judge, outcomes
from dev.fuzz.attention import attention, losses
from dev.fuzz.checkpoints import checkpoints
from dev.fuzz.draft import Drawn
from dev.fuzz.kinds import KINDS, kind_of
from dev.fuzz.vectors import vectors

ONE_KIND = {"vectors": vectors, "assertions": assertions, "checkpoints": checkpoints}
ONE_KIND |= {"attention": attention, "losses": losses}


@pytest.mark.parametrize("name", ONE_KIND)
def test_seeds_repeat_and_eager_runs_them(name: str) -> None:
    texts = set()
    for seed in range(12):
        p, again = ONE_KIND[name](seed), ONE_KIND[name](seed)
        assert (p.lines, p.outputs) == (again.lines, again.outputs)
        torch.manual_seed(0)
        out = p.straight().function()(*copies(p.straight().sets()[0]))
        assert all(isinstance(t, torch.Tensor) for t in out)
        texts.add(p.straight().text())
    assert len(texts) >= 10


def test_every_kind_comes_from_some_seed() -> None:
    assert {kind_of(s, "all") for s in range(60)} == set(KINDS)
    assert kind_of(3, "vectors") == "vectors"


def test_some_sets_break_what_is_asserted_and_the_first_never() -> None:
    raised = 0
    for seed in range(20):
        p = assertions(seed).straight()
        results = outcomes(p, None, How())
        assert len(results) == INPUT_SETS and not isinstance(results[0], str)
        raised += any(isinstance(x, str) for x in results)
    assert raised >= 8


def counted() -> Drawn:
    values = (torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]), torch.tensor([1, 1, 1]))
    lines = (
        Line("x0.nonzero()[:, 0]", "v0"),
        Line("torch._check(v0.size(0) == 2)", None),
        Line("v0 + 3", "v1"),
    )
    return Drawn(0, {"x0": values}, lines, ("v1",))


def careless(gm: Any, inputs: Any) -> Any:
    """A backend that checks nothing."""
    for node in reversed(gm.graph.nodes):
        if not node.users and node.op == "call_function":
            gm.graph.erase_node(node)
    gm.recompile()
    return gm.forward


def test_a_backend_that_does_not_check_is_wrong() -> None:
    failure = judge(counted().straight(), How(backend=careless))
    assert failure is not None and failure.kind == "wrong"
    assert "inputs 2: returns; eager raises" in failure.text
    assert judge(counted().straight(), How(backend="eager")) is None


@pytest.mark.parametrize(
    "name,seeds", [("vectors", (0, 3)), ("attention", (1, 5)), ("losses", (1,))]
)
def test_products_are_right(name: str, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        p = ONE_KIND[name](seed)
        assert KINDS[name].judge(p.straight(), How(p.backward)) is None
