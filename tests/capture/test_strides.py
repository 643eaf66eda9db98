"""Rules for strides: what is traced of pointwise operators on expanded tensors is eager's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from deuteron.capture import strides
from deuteron.capture.decompositions import table
from deuteron.graph import ops

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.int32)


def operand(rng: random.Random, shape: list[int], dtype: torch.dtype, broadcast: bool) -> Tensor:
    """Any order of the axes in memory, some of them expanded, some of size 1."""
    sizes = [1 if broadcast and rng.random() < 0.4 else n for n in shape]
    stored = [1 if rng.random() < 0.25 else n for n in sizes]
    order = rng.sample(range(len(sizes)), len(sizes))
    back = [order.index(d) for d in range(len(order))]
    return torch.ones([stored[d] for d in order]).permute(back).to(dtype).expand(sizes)


def traced(op: Any, args: list[Tensor]) -> fx.GraphModule:
    return make_fx(lambda *a: op(*a), tracing_mode="fake", decomposition_table=table())(*args)


def significant(t: Tensor) -> list[int]:
    return [s for s, n in zip(t.stride(), t.shape) if n > 1]


@pytest.mark.parametrize(
    "name",
    ["aten.mul.Tensor", "aten.eq.Tensor", "aten.logit_backward.default", *strides.OF_REPEATED[-4:]],
)
def test_of_expanded_tensors(name: str) -> None:
    (op,) = ops.resolved([name])
    rng = random.Random(name)
    ran = 0
    for _ in range(40):
        shape = [rng.randint(2, 4) for _ in range(rng.randint(2, 4))]
        broadcast = rng.random() < 0.5
        first, second = rng.choice(DTYPES), rng.choice(DTYPES)
        if "backward" in name or rng.random() < 0.6:
            second = first
        args = [operand(rng, shape, d, broadcast) for d in (first, second)]
        try:
            want = op(*args)
        except RuntimeError:  # gradients of whole numbers
            continue
        got = traced(op, args).graph.output_node().args[0].meta["val"]
        where = [(a.dtype, a.shape, a.stride()) for a in args]
        assert significant(got) == significant(want), where
        ran += 1
    assert ran > 10


def test_nothing_is_added_where_the_order_is_clear() -> None:
    x, bias = torch.ones(3, 4, 5, dtype=torch.bfloat16), torch.ones(5, dtype=torch.bfloat16)
    for args in ([x, bias], [x, torch.ones((), dtype=torch.bfloat16).expand(3, 4, 5)]):
        graph = traced(torch.mul, args).graph
        assert not graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)])
def test_results_that_are_contiguous_in_any_case(order: tuple[int, ...]) -> None:
    back = [order.index(d) for d in range(4)]

    def laid_out(x: Tensor) -> Tensor:
        return x.permute(order).contiguous().permute(back)

    image, grid = laid_out(torch.randn(2, 3, 5, 4)), laid_out(torch.rand(2, 6, 7, 2))
    cases = [
        (lambda x, g: aten.grid_sampler_2d.default(x, g, 0, 0, False), [image, grid]),
        (aten.angle.default, [laid_out(torch.randn(2, 3, 5, 4, dtype=torch.complex64))]),
    ]
    for op, args in cases:
        got = traced(op, args).graph.output_node().args[0].meta["val"]
        assert got.stride() == op(*args).stride()
