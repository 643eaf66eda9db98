"""Whole models, forward and backward, against eager and float64; and with changing shapes.

`TEST_BACKEND` runs the same tests on another backend, to check the tests themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

from tests.models.compare import Errors, Trial, failures, train_step
from tests.models.zoo import BY_NAME, CASES, cast

BACKEND = os.environ.get("TEST_BACKEND", "deuteron")
EXACT = [case.name for case in CASES if not case.random]


class Counted:
    """The backend, counting the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs = 0
        self.backend = lookup_backend(BACKEND)

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any], **kw: Any) -> Any:
        self.graphs += 1
        return self.backend(gm, inputs, **kw)


@pytest.fixture
def counted() -> Iterator[Counted]:
    yield Counted()


def compiled(backend: Counted, dynamic: bool | None = None) -> Callable[[nn.Module], Any]:
    return lambda step: torch.compile(step, backend=backend, dynamic=dynamic, fullgraph=True)


@pytest.mark.parametrize("name", EXACT)
def test_train_step(name: str, counted: Counted) -> None:
    """Loss, all gradients and buffers: error at most twice eager's, in one graph. Over several
    starts: a loss is what is left of terms of either sign, and one run's rounding may be lucky."""
    trial = Trial.of(BY_NAME[name], torch.float32, "cpu")
    eager, got = trial.errors_over_starts(compiled(counted))
    assert not failures(eager, got, torch.float32)
    assert counted.graphs == 1


@pytest.mark.parametrize("name", EXACT)
def test_inference(name: str, counted: Counted) -> None:
    case = BY_NAME[name]
    module, inputs = case.module().eval(), case.make_inputs()[: case.split]
    with torch.no_grad():
        eager = {"out": module(*inputs)}
        got = {"out": compiled(counted)(module)(*inputs)}
        reference = {"out": module.double()(*cast(inputs, torch.float64))}
    bad = failures(Errors.against(reference, eager), Errors.against(reference, got), torch.float32)
    assert not bad
    assert got["out"].stride() == eager["out"].stride()
    assert counted.graphs == 1


@pytest.mark.parametrize("name", ["gpt", "llama", "unet", "kl"])
def test_bfloat16_on_cpu(name: str, counted: Counted) -> None:
    """Over several starts: eager's rounding of one loss may be lucky."""
    trial = Trial.of(BY_NAME[name], torch.bfloat16, "cpu")
    eager, got = trial.errors_over_starts(compiled(counted))
    assert not failures(eager, got, torch.bfloat16)


def test_autocast(counted: Counted) -> None:
    trial = Trial.of(BY_NAME["gpt"], torch.float32, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        eager, got = trial.errors(None), trial.errors(compiled(counted))
    assert not failures(eager, got, torch.bfloat16)


def test_train_loop(counted: Counted) -> None:
    """Twenty optimizer steps follow eager's loss."""
    case = BY_NAME["gpt"]
    curves = []
    for use in (None, compiled(counted)):
        step = case.step()
        call = step if use is None else use(step)
        optimizer = torch.optim.AdamW(step.parameters(), lr=1e-3)
        curve = []
        for i in range(20):
            torch.manual_seed(i)
            optimizer.zero_grad(set_to_none=True)
            loss = call(*case.inputs(False, None, None))
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(torch.tensor(curve))
    torch.testing.assert_close(curves[1], curves[0], rtol=2e-4, atol=0)
    assert curves[1][-1] < curves[1][0]


# ------------------------------------------------------------------------------------ dropout


def test_dropout_statistics_and_mask(counted: Counted) -> None:
    """A tenth is dropped, the rest is scaled, and backward drops the same elements."""

    def f(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.1, True)

    x = torch.ones(400, 500, requires_grad=True)
    out = torch.compile(f, backend=counted)(x)
    dropped = (out == 0).double().mean().item()
    assert abs(dropped - 0.1) < 5 * (0.09 / x.numel()) ** 0.5
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / 0.9))
    # Neither rows nor columns share a pattern.
    assert (out == 0).double().mean(0).std() < 0.03
    assert (out == 0).double().mean(1).std() < 0.03
    weight = torch.randn(400, 500)
    out.backward(weight)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight * out.detach())


def test_dropout_seed(counted: Counted) -> None:
    """The seed decides; another call draws other numbers."""
    step = torch.compile(BY_NAME["gpt_dropout"].step(), backend=counted, fullgraph=True)
    inputs = BY_NAME["gpt_dropout"].make_inputs()
    losses = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        losses.append((step(*inputs).item(), step(*inputs).item()))
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    assert losses[0][0] != losses[0][1]


def test_dropout_gradient(counted: Counted) -> None:
    """Gradients are those of the loss under the mask that forward drew (central differences)."""
    case = BY_NAME["gpt_dropout"]
    step = case.step().double()
    call = torch.compile(step, backend=counted, fullgraph=True)
    inputs = case.make_inputs()

    def loss() -> Tensor:
        torch.manual_seed(99)
        return call(*inputs)

    loss().backward()
    weights = [p for p in step.parameters() if p.grad is not None]
    way = [torch.randn_like(p) for p in weights]
    slope = sum(float((p.grad * d).sum()) for p, d in zip(weights, way) if p.grad is not None)
    h, ends = 1e-5, []
    for sign in (1, -2):
        with torch.no_grad():
            for p, d in zip(weights, way):
                p += sign * h * d
        ends.append(loss().item())
    assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(slope, rel=1e-4)


# ---------------------------------------------------------------------------- changing shapes

PRIMES = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31]


@pytest.mark.parametrize("name", ["gpt", "bert", pytest.param("llama", marks=pytest.mark.slow)])
def test_shapes_do_not_recompile(name: str, counted: Counted) -> None:
    """After the second distinct shape, twenty more (primes, both dimensions) compile nothing."""
    case = BY_NAME[name]
    step = case.step()
    call = torch.compile(step, backend=counted, fullgraph=True)

    def check(batch: int, length: int) -> None:
        inputs = case.make_inputs(batch=batch, length=length)
        wide = case.step().double()
        reference = train_step(wide, cast(inputs, torch.float64))
        eager = Errors.against(reference, train_step(step, inputs))
        got = Errors.against(reference, train_step(step, inputs, call))
        # Of twenty shapes some are ill-conditioned, and there eager is lucky as often as not.
        assert not failures(eager, got, torch.float32, floor=1e-5), (batch, length)

    check(3, 17)
    check(4, 20)
    before = counted.graphs
    assert before <= 2
    for i in range(20):
        check(2 + (i * 5) % 9, PRIMES[(i * 7) % len(PRIMES)])
    assert counted.graphs == before


def test_sizes_zero_and_one(counted: Counted) -> None:
    """Sizes that Dynamo itself treats apart: right, and one graph more for each at most."""
    norm, linear = nn.LayerNorm(12), nn.Linear(12, 12)

    def f(x: Tensor) -> Tensor:
        y = torch.softmax(linear(norm(x)), dim=-1)
        return (y * x).sum(1).amax(-1), y.sum(), x.mean((1, 2))

    call = torch.compile(f, backend=counted, fullgraph=True)
    sizes = [(3, 17), (4, 20), (13, 11), (1, 7), (7, 1), (0, 5), (1, 1), (2, 0), (31, 37)]
    for batch, length in sizes:
        x = torch.randn(batch, length, 12)
        for got, want in zip(call(x), f(x)):
            torch.testing.assert_close(got, want, equal_nan=True)
    before = counted.graphs
    for batch, length in sizes:
        call(torch.randn(batch, length, 12))
    assert counted.graphs == before
