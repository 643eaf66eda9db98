"""Attention in models of transformers: what of all queries times all keys an H200 has in memory in
training, and values and gradients of the same models, small, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dev.check.squares import CASES, MODELS, loss_of, plan_of, squares

pytestmark = pytest.mark.slow
# Without a mask the library is called, and torch's library for the CPU has all scores.
ON_A_GPU = [case for case in CASES if case != ("bert", "sdpa")]
# The gradient of a bias that all of a batch share, of each layer, without the batch; and of sinks
# beside heads that share keys, scores and weights for the gradient of the values.
KEPT = {"t5": 4, "t5-padded": 4, "gpt_oss": 4}


@pytest.mark.parametrize(("name", "attention"), ON_A_GPU)
def test_training_has_no_square_in_memory(name: str, attention: str) -> None:
    found = squares(plan_of(name, attention, torch.bfloat16, train=True))
    assert len(found) == KEPT.get(name, 0), found


def gradients(model: nn.Module, compiled: bool, inputs: dict[str, Tensor]) -> list[Tensor]:
    torch._dynamo.reset()
    loss = loss_of(model)
    result = (torch.compile(loss, backend="deuteron") if compiled else loss)(**inputs)
    return [result, *torch.autograd.grad(result, list(model.parameters()), allow_unused=True)]


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_on_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name].build("eager").eval()
    if name == "gpt_oss":
        model.set_experts_implementation("batched_mm")  # grouped products know no f64
    inputs = MODELS[name].inputs(37, 29)
    got = gradients(model, True, inputs)
    eager = gradients(model, False, inputs)
    exact = gradients(model.double(), False, inputs)
    for g, e, w in zip(got, eager, exact, strict=True):
        if w is None:
            assert g is None
            continue
        off, allowed = ((x.double() - w).norm() / w.norm().clamp(min=1e-30) for x in (g, e))
        assert off <= max(2 * allowed, 3e-6), (off, allowed)
