"""Tensors saved for the backward alone are overwritten by it, and nothing else ever is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.backend import deuteron_backend
from deuteron.base.passes import Context
from deuteron.capture.stages import Part
from deuteron.memory import planning
from deuteron.pipeline import compiled as through
from deuteron.stages import Loaded

R = torch.randn


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MIN_DONATED_BYTES", 0)


def compiled(f: Callable[..., Any], **kw: Any) -> tuple[Callable[..., Any], list[Loaded]]:
    seen: list[Loaded] = []

    def runner(part: Part, context: Context) -> Any:
        seen.append(through("rewrite", "guard", part, context))
        return seen[-1].call

    backend = functools.partial(deuteron_backend, runner=runner)
    return torch.compile(f, backend=backend, fullgraph=True, **kw), seen


def given(seen: list[Loaded]) -> dict[str, str]:
    forward, backward = seen
    return backward.plan.given


def loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x @ w, t)


def logits() -> tuple[Tensor, Tensor, Tensor]:
    return R(40, 64).requires_grad_(), R(64, 100).requires_grad_(), torch.randint(100, (40,))


@pytest.mark.parametrize("dynamic", [False, True])
def test_logits_become_their_gradient(dynamic: bool) -> None:
    g, seen = compiled(loss, dynamic=dynamic)
    x, w, t = logits()
    for _ in range(3):
        got = torch.autograd.grad(g(x, w, t), (x, w))
        torch.testing.assert_close(got, torch.autograd.grad(loss(x, w, t), (x, w)))
    assert "mm" in given(seen).values()


def test_retained_graphs() -> None:
    """The first backward of two overwrites nothing, the last one may."""
    g, seen = compiled(loss)
    x, w, t = logits()
    want = torch.autograd.grad(loss(x, w, t), (x, w))
    for _ in range(2):
        out = g(x, w, t)
        for retain in (True, True, False):
            got = torch.autograd.grad(out, (x, w), retain_graph=retain)
            torch.testing.assert_close(got, want)
    assert given(seen)


def test_what_others_see_is_not_overwritten() -> None:
    """Arguments, parameters, results and views of them are saved too."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = (x @ w).sin()
        z = (y @ w).exp()
        return y.T, z, (z[1:] * w[1:]).tanh(), x.exp() * w

    g, seen = compiled(f)
    x, w = R(64, 64).requires_grad_(), (R(64, 64) / 64).requires_grad_()
    out = g(x, w)
    want = f(x, w)
    kept = [t.detach().clone() for t in (*out, x, w)]
    got = torch.autograd.grad([o.square().sum() for o in out], (x, w))
    torch.testing.assert_close([t.detach() for t in (*out, x, w)], kept)
    torch.testing.assert_close(
        got, torch.autograd.grad([o.square().sum() for o in want], (x, w)), rtol=1e-4, atol=1e-4
    )
    program = seen[-1].program
    assert program is not None
    names = set(given(seen).values())
    assert not {n for n in names if n.startswith(("primals", "tangents"))}


def test_hooks_on_saved_tensors() -> None:
    """What they give is theirs, and not overwritten."""
    g, _ = compiled(loss)
    x, w, t = logits()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        out = g(x, w, t)
    want = torch.autograd.grad(loss(x, w, t), (x, w))
    torch.testing.assert_close(torch.autograd.grad(out, (x, w), retain_graph=True), want)
    torch.testing.assert_close(torch.autograd.grad(out, (x, w)), want)


def test_a_column_sum_of_what_is_stored() -> None:
    """The bias gradient sums what the same pass stores over its operand."""
    f = lambda x, w, b, t: F.huber_loss(F.linear(x, w, b), t)  # noqa: E731
    g, seen = compiled(f)
    sizes = (128, 96), (256, 96), (256,), (128, 256)
    x, w, b, t = (R(*s).double() for s in sizes)  # of float64 there are calls only
    args = (x, w.requires_grad_(), b.requires_grad_(), t)
    for _ in range(3):
        got = torch.autograd.grad(g(*args), args[1:3])
        torch.testing.assert_close(got, torch.autograd.grad(f(*args), args[1:3]))
    assert given(seen)
