"""Sums of products of broadcast tensors as matrix products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from deuteron.base.passes import Context
from deuteron.base.record import Record
from deuteron.graph.rewrite import rewrite
from tests.capture.helpers import check_values


def scores(c: Tensor, b: Tensor) -> Tensor:  # of a state-space model's chunks
    return (c[:, :, None, :, :] * b[:, None, :, :, :]).sum(-1)


def outputs(m: Tensor, x: Tensor) -> Tensor:
    return (m[..., None] * x[:, None]).sum(2)


def kept(a: Tensor, b: Tensor) -> Tensor:
    return (a.unsqueeze(-1) * b.unsqueeze(-3).expand(-1, 24, -1, -1)).sum(-2, keepdim=True)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "scores": (scores, ((2, 20, 3, 32), (2, 18, 3, 32))),
    "outputs": (outputs, ((2, 20, 40, 3), (2, 40, 3, 16))),
    "kept": (kept, ((3, 24, 17), (3, 17, 33))),
    "two summed": (lambda a, b: (a[:, None] * b[None]).sum((2, 3)), ((16, 4, 5), (19, 4, 5))),
}


def traced(f: Callable[..., Tensor], *args: Tensor) -> fx.GraphModule:
    return make_fx(f, tracing_mode="fake")(*args)


def count(gm: fx.GraphModule) -> int:
    return sum(str(n.target) == "aten.bmm.default" for n in gm.graph.nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_contractions_are_products(name: str, dtype: torch.dtype) -> None:
    f, shapes = CASES[name]
    args = [torch.randn(s).to(dtype) for s in shapes]
    gm, record = traced(f, *args), Record()
    rewrite(gm, Context(record=record))
    check_values(gm)
    assert count(gm) == 1 and any(d["subject"] == "einsum" for d in record.of("decision"))
    gm.recompile()
    got, exact = gm(*args), f(*(a.double() for a in args))
    assert got.stride() == f(*args).stride() and got.dtype == dtype
    eager = (f(*args).double() - exact).abs().max()
    assert (got.double() - exact).abs().max() <= 2 * eager + 1e-6


@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (lambda a, b: (a * b).sum(-1), ((40, 40), (40, 40))),  # no product of matrices
        (lambda a, b: (a[:, None] * b[None]).sum(-1), ((40, 8), (40, 8))),  # few terms
        (lambda a, b: (a[:, None] * b[None]).sum((0, 2)), ((40, 32), (40, 32))),
        (lambda a, b: (p := a[:, None] * b[None]).sum(-1) + p[..., 0], ((40, 32), (40, 32))),
        (lambda a, b: (a[:, None].long() * b[None].long()).sum(-1), ((40, 32), (40, 32))),
    ],
)
def test_others_are_left_alone(
    f: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...]
) -> None:
    gm = traced(f, *(torch.randn(s) for s in shapes))
    rewrite(gm, Context())
    assert count(gm) == 0


def test_values_and_gradients() -> None:
    def f(c: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return outputs(scores(c, b).tril().exp(), x)

    shapes = (2, 20, 3, 32), (2, 20, 3, 32), (2, 20, 3, 16)
    args = [(torch.randn(s, dtype=torch.float64) / 4).requires_grad_() for s in shapes]
    out = torch.compile(f, backend="deuteron")(*args)
    torch.testing.assert_close(out, f(*args))
    w = torch.randn_like(out)
    got = torch.autograd.grad((out * w).sum(), args)
    torch.testing.assert_close(got, torch.autograd.grad((f(*args) * w).sum(), args))
