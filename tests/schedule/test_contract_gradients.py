"""Gradients of products in kernels with what surrounds them: attention's scores are computed again,
and are never in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deuteron.base import products
from tests.schedule.contraction_programs import CHAINS, PROGRAMS, B, H, S, inputs
from tests.schedule.planning import Plan, gradients, planned, trained

RELATIVE, FLOOR = 2.0, 2e-3  # times eager's error, as everywhere
SCORES = B * H * S * S


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.detach().double() - wanted).norm() / wanted.norm())


def check(plan: Plan, f: object, args: list[Tensor]) -> None:
    """Results and gradients are as exact as eager's."""
    assert callable(f)
    wide = [a.detach().double().requires_grad_() for a in args]
    own = [a.detach().clone().requires_grad_() for a in args]
    wanted, eager = ([r, *gradients(r, x)] for x in (wide, own) for r in (f(*x),))
    for got, e, w in zip(plan.results, eager, wanted, strict=True):
        assert relative(got, w) <= max(RELATIVE * relative(e, w), FLOOR)


def written(plan: Plan) -> list[int]:
    """The elements of what kernels and calls write."""
    sizes = [lay.numel.value for k in plan.kernels for _, lay in k.writes]
    sizes += [lay.numel.value for c in plan.calls for lay in c.layouts if lay is not None]
    return [n for n in sizes if n is not None]


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_gradients_are_right(name: str) -> None:
    args = inputs(name)
    plan = trained(PROGRAMS[name], *args)
    check(plan, PROGRAMS[name], args)
    if name in CHAINS:
        assert not plan.calls and len(plan.kernels) <= 4  # one may be for sums of rows
        assert len(plan.kernels) - len(plan.contractions) <= 1
        assert all(n < SCORES for n in written(plan)), written(plan)


def steps_of_one_square_weight(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    def first(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(F.gelu(x + b) @ w).clamp(-1, 1).exp()

    def second(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    def third(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return (x @ w).softmax(-1) * x

    for step in (first, second, third):
        x = checkpoint(step, x, w, b, use_reentrant=False)
    return x


def test_rows_and_columns_of_a_square_are_two_axes() -> None:
    """All products of the weight's gradient read what the others have at one axis."""
    torch.manual_seed(0)
    args = [torch.randn(5, 4), torch.randn(4, 4), torch.randn(1, 4)]
    for a in args:
        a.requires_grad_()
    plan = trained(steps_of_one_square_weight, *args)
    check(plan, steps_of_one_square_weight, args)


def weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.softmax(q @ k.transpose(-1, -2), -1)
    return p @ v, p


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The gradient passes through the maximum, which the backward looks for."""
    s = q @ k.transpose(-1, -2)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True) @ v


def test_weights_that_are_wanted_are_stored_by_the_kernel() -> None:
    args = inputs("plain")
    with torch.no_grad():
        plan = planned(weights, *args)
    assert len(plan.schedules[0].steps) == 1 and SCORES in written(plan)
    wide = [a.double() for a in args]
    for got, eager, wanted in zip(plan.results, weights(*args), weights(*wide), strict=True):
        assert relative(got, wanted) <= max(RELATIVE * relative(eager, wanted), FLOOR)


@pytest.mark.parametrize("f", [weights, by_hand])
def test_scores_that_must_be_kept(f: object) -> None:
    assert callable(f)
    args = inputs("plain")
    plan = trained(f, *args)
    own = [a.detach().clone().requires_grad_() for a in args]
    wide = [a.detach().double().requires_grad_() for a in args]
    got = plan.results[1:]
    for g, e, w in zip(got, gradients(f(*own), own), gradients(f(*wide), wide), strict=True):
        assert relative(g, w) <= max(RELATIVE * relative(e, w), FLOOR)
    if f is by_hand:
        saved = [d for r in plan.records for d in r.of("decision") if d["subject"] == "save"]
        assert any(d["bytes"] >= 2 * SCORES for d in saved), saved


def test_without_recomputation_weights_are_saved() -> None:
    args = inputs("plain")
    plan = trained(PROGRAMS["plain"], *args, recompute=False)
    check(plan, PROGRAMS["plain"], args)
    assert SCORES in written(plan)


def test_scores_of_f32_are_kept_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its f32 units take longer to multiply again than its memory to keep them; tensor cores that
    round to tf32 do not."""
    for rounded in (False, True):
        monkeypatch.setattr(products, "tf32", lambda rounded=rounded: rounded)
        args = [a.detach().float() for a in inputs("plain")]
        plan = trained(PROGRAMS["plain"], *args)
        check(plan, PROGRAMS["plain"], args)
        saved = [d for r in plan.records for d in r.of("decision") if d["subject"] == "save"]
        assert any(d["bytes"] >= 4 * SCORES for d in saved) is not rounded


def with_maximum(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The caller has the maximum, too, and may look for it among the scores."""
    s = (q @ k.transpose(-1, -2)).to(torch.float32)
    top = s.detach().amax(-1, keepdim=True)
    e = torch.exp(s - top)
    return (e / e.sum(-1, keepdim=True)).to(q.dtype) @ v, top


def test_what_the_caller_may_compare_is_rounded_as_in_eager() -> None:
    for f, free in ((PROGRAMS["plain"], True), (with_maximum, False)):
        args = [a.requires_grad_() for a in inputs("plain")]
        plan = planned(f, *args, run=False)
        assert any(n.startswith("amax") for n in plan.programs[0].uncompared) is free
