"""Dropout in kernels with products: no mask in memory, the numbers of the same program without such
kernels, the same ones in forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deuteron.graph.random_ops import RAND
from deuteron.schedule import tile
from tests.schedule.contraction_programs import RANDOM, B, H, S, ahead, inputs, scores
from tests.schedule.planning import Plan, planned, trained
from tests.schedule.test_contract_gradients import check

KEPT = {"dropped": 0.5, "dropped_causal": 0.9}


def shape(name: str) -> tuple[int, ...]:
    q = inputs(name)[0]
    return (*q.shape[:-1], q.shape[-2])


def written(plan: Plan) -> list[int]:
    sizes = [lay.numel.value for k in plan.kernels for _, lay in k.writes]
    sizes += [lay.numel.value for c in plan.calls for lay in c.layouts if lay is not None]
    return [n for n in sizes if n is not None]


def drawn(name: str, plan: Plan) -> Tensor:
    """What dropout keeps, by the reference of random numbers."""
    seed = plan.tensors["seed_default"]
    return RAND(seed, 0, shape(name), torch.float32) < KEPT[name]


def explicit(name: str, mask: Tensor) -> object:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k)
        if "causal" in name:
            s = s.masked_fill(ahead(s), float("-inf"))
        return torch.softmax(s, -1) * (mask * (1 / KEPT[name])).to(s.dtype) @ v

    return f


@pytest.mark.parametrize("name", sorted(RANDOM))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_those_of_the_mask(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of so few rows the library is faster.
    for figure, value in {"CHAINED_LOOP_US": 0.0, "WIDTH_POWER": 0.0}.items():
        monkeypatch.setattr(tile, figure, value)
    args = inputs(name, dtype)
    plan = trained(RANDOM[name], *args)
    assert [c.op for c in plan.calls] == ["deuteron.seed.default"]
    assert len(plan.contractions) <= 3 and len(plan.kernels) <= 4  # one may be for sums of rows
    # In f32 they are kept.
    few = all(n < B * H * S * S for n in written(plan))
    assert few is (dtype is torch.bfloat16), written(plan)
    check(plan, explicit(name, drawn(name, plan)), args)


@pytest.mark.parametrize("name", sorted(RANDOM))
def test_numbers_are_those_of_the_program_without_such_kernels(name: str) -> None:
    """Weights are equal, values the unit matrix: the result is the mask."""
    q, k, _ = (torch.zeros_like(x) for x in inputs(name))
    v = torch.eye(q.shape[-2], dtype=q.dtype).expand(*q.shape[:-1], -1)
    kept = []
    for options in ({}, {"precision": "eager"}):
        torch.manual_seed(1)
        with torch.no_grad():
            plan = planned(RANDOM[name], q, k, v, **options)
        assert len(plan.contractions) == (not options)
        kept.append(plan.results != 0)
        seen = ~ahead(kept[0]) if "causal" in name else torch.ones_like(kept[0])
        assert torch.equal(kept[-1], drawn(name, plan) & seen)
    assert torch.equal(*kept)
    share, count = kept[0].sum() / seen.expand_as(kept[0]).sum(), int(seen.sum())
    assert abs(share - KEPT[name]) < 4 * (KEPT[name] * (1 - KEPT[name]) / count) ** 0.5


def test_forward_and_backward_draw_the_same() -> None:
    """The gradient of equally weighted values, given the unit matrix, is the mask, too."""
    q, k, _ = (torch.zeros_like(x).requires_grad_() for x in inputs("dropped"))
    unit = torch.eye(S, dtype=q.dtype).expand(B, H, S, S)
    v = unit.clone().requires_grad_()
    plan = planned(RANDOM["dropped"], q, k, v)
    (grad,) = torch.autograd.grad(plan.results, v, unit)
    assert not any(c.op.startswith("aten") for c in plan.calls)
    mask = drawn("dropped", plan)
    assert torch.equal(plan.results != 0, mask)
    assert torch.allclose(grad.mT.float(), mask / (0.5 * S), rtol=1e-2)
