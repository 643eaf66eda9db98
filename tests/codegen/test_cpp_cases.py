"""Conditions of a row: a loop for each case, one after the other in one chain."""

from __future__ import annotations

import torch
from torch import Tensor


def test_pieces_of_several_tensors() -> None:
    """What the second case computes its places from stands before the chain."""

    def f(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a, b]) * 2

    compiled = torch.compile(f, backend="deuteron", fullgraph=True)
    for rows in (1, 3):
        a, b = torch.randn(3, 25).bfloat16(), torch.randn(rows, 25).bfloat16()
        torch._dynamo.reset()
        assert torch.equal(compiled(a, b), f(a, b))


def test_gradients_of_chunks() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return torch.unsafe_chunk(x, 2)

    x = torch.randn(5, 5, 5).bfloat16().requires_grad_()
    given = [torch.randn(3, 5, 5).bfloat16(), torch.randn(2, 5, 5).bfloat16()]
    want = torch.autograd.grad(f(x), x, given)
    compiled = torch.compile(f, backend="deuteron", fullgraph=True)
    assert torch.equal(torch.autograd.grad(compiled(x), x, given)[0], want[0])
