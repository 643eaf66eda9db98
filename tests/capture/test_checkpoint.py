"""Checkpointed regions that draw random numbers by library calls: the recomputation draws what the
forward drew, from a state that is saved."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from deuteron.backend import collecting


def dropped(y):
    return F.dropout(y, 0.4) * y.cos()


def permuted(y):
    return y[..., torch.randperm(y.shape[-1])].sin() * y


def chosen(y):
    places = torch.multinomial(y.abs().flatten() + 0.1, 5)
    return y.flatten()[places].cos().sum() * y.exp()


def counted(y):
    return torch.poisson(y.abs() * 4).mul(y).sin()


def attended(y):
    return F.scaled_dot_product_attention(y, y, y, dropout_p=0.3, is_causal=True)


def nested(y):
    y = checkpoint(permuted, y.cos(), use_reentrant=False)
    return checkpoint(dropped, y.exp(), use_reentrant=False)


def layered(y):
    mixed = F.dropout(torch.relu(y @ y.transpose(-1, -2)), 0.2)
    return mixed[..., torch.randperm(y.shape[-2])] @ y


BODIES = (dropped, permuted, chosen, counted, attended, nested, layered)


def saving_products(ctx, op, *args, **kwargs):
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def saving_nothing(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE


def step(f, x):
    """Result, gradient, and what is drawn after forward and backward."""
    torch.manual_seed(5)
    x.grad = None
    y = f(x)
    between = torch.rand(3)
    y.sum().backward()
    return y.detach().clone(), x.grad.clone(), between, torch.rand(3)


def as_eager(f, dynamic=False, **options):
    x = torch.randn(2, 3, 10, 6, requires_grad=True)
    compiled = torch.compile(f, backend="deuteron", dynamic=dynamic, options=options)
    for got in (step(compiled, x), step(compiled, x)):
        for e, g in zip(step(f, x), got, strict=True):
            torch.testing.assert_close(g, e)


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_numbers_of_eager(body):
    as_eager(lambda x: checkpoint(body, x.sin(), use_reentrant=False), eager_random=True)


@pytest.mark.parametrize("body", [dropped, layered], ids=lambda f: f.__name__)
def test_changing_sizes(body):
    as_eager(lambda x: checkpoint(body, x.sin(), use_reentrant=False), True, eager_random=True)


def test_reentrant():
    as_eager(lambda x: checkpoint(permuted, x.sin(), use_reentrant=True), eager_random=True)


@pytest.mark.parametrize("policy", [saving_products, saving_nothing], ids=lambda f: f.__name__)
@pytest.mark.parametrize("body", [dropped, layered], ids=lambda f: f.__name__)
def test_policies(body, policy):
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    f = lambda x: checkpoint(body, x.sin(), use_reentrant=False, context_fn=contexts)  # noqa: E731
    as_eager(f, eager_random=True)


@pytest.mark.parametrize("body", [permuted, nested], ids=lambda f: f.__name__)
def test_gradient_of_what_was_drawn(body):
    """Numbers of our own beside those of library calls: x * (what was drawn) is linear in x, and so
    gradient and result agree only if both saw the same draw."""

    def drawn(y):
        return body(torch.ones_like(y)) * y + F.dropout(y, 0.5)

    f = torch.compile(lambda x: checkpoint(drawn, x * 1.5, use_reentrant=False), backend="deuteron")
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    y = f(x)
    y.sum().backward()
    torch.testing.assert_close((x.grad * x).detach(), y.detach())


def test_attention_without_dropout_saves_no_state():
    f = lambda x: checkpoint(  # noqa: E731
        lambda y: F.scaled_dot_product_attention(y, y, y), x.sin(), use_reentrant=False
    )
    with collecting() as records:
        as_eager(f)
    calls = [e["op"] for r in records for e in r.of("library")]
    assert calls and not any("rng_state" in op for op in calls)


def test_draws_around_a_checkpoint_keep_their_order():
    def f(x):
        a = torch.randperm(x.shape[-1])
        y = checkpoint(permuted, x.sin(), use_reentrant=False)
        return y[..., a] * torch.randperm(x.shape[-1])

    as_eager(f)
