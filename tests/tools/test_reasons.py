"""The script that tries the reasons of explanations finds them true, and a false one false."""

from __future__ import annotations

import torch

from deuteron.tools.explain import explain
from deuteron.tools.models import Gpt
from dev.check.reasons import Choice, dependencies, holds, product_holds


def test_reasons_of_a_small_model() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    told = explain(Gpt(97, 32, 2, 2, 32), torch.randint(2, 97, (2, 16)))
    tried = []
    for part in told.data["parts"]:
        graph = dependencies(part)
        assert {step for step, _ in graph} == set(range(len(part["steps"])))
        tried += [holds(part, graph, r) for r in part["refusals"]]
    assert tried.count(True) >= 4 and False not in tried


def test_a_false_reason_is_found() -> None:
    """Two independent kernels: nothing makes a cycle."""
    step = {"kind": "library", "reads": ["x"], "nest": "", "device": "cpu"}
    steps = [step | {"writes": [n], "ops": [{"node": n}]} for n in "ab"]
    part = {"steps": steps, "tensors": {}}
    graph = dependencies(part)
    claim = {"first": "a", "second": "b", "first_node": "a", "second_node": "b", "detail": ""}
    assert holds(part, graph, {**claim, "reason": "cycle"}) is False
    assert holds(part, graph, {**claim, "reason": "device"}) is False
    assert holds(part, graph, {**claim, "reason": "scatter"}) is False
    spaces = {**claim, "reason": "iteration spaces differ"}
    assert holds(part, graph, {**spaces, "detail": "[32x2 | 64] and [64 | 2]: nothing"}) is True
    assert holds(part, graph, {**spaces, "detail": "[4x8 | 64] and [32 | 64]: nothing"}) is None


def test_loops_of_one_kernel_depend_on_one_another() -> None:
    """As do those of kernels before it; what is added to is not read from before."""
    nest = """    for i < 8; over r < 4:
        a_part[i] = sum[r](x[r, i])
    barrier
    once:
        b[0] = a_part[0] + y[()]
"""
    kernel = {"kind": "kernel", "reads": ["x", "y"], "writes": ["a.part", "b"], "nest": nest}
    call = {"kind": "library", "reads": ["x"], "writes": ["y"], "nest": ""}
    graph = dependencies({"steps": [call, kernel], "tensors": {}})
    assert set(graph.edges) == {((0, 0), (1, 1)), ((1, 0), (1, 1))}


def test_a_large_product_is_the_librarys() -> None:
    """In float64, of which there are no tiles."""
    shape = "256x256 by 256x256"
    assert product_holds(Choice(shape, (True, False), False), torch.float64)
    assert not product_holds(Choice(shape, (True, False), True), torch.float64)
