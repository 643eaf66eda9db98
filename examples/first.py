"""The first thing to try: compile a function with Deuteron, and ask what became of it.

    python examples/first.py

Runs on a GPU where there is one, else on the CPU (which needs g++).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import deuteron


def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x[M, N] -> gelu(layer_norm(x)) + x: three operations, and one pass over memory is enough."""
    return F.gelu(F.layer_norm(x, (x.shape[-1],), weight, bias)) + x


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(512, 1024, device=device, requires_grad=True)
    weight = torch.ones(1024, device=device, requires_grad=True)
    bias = torch.zeros(1024, device=device, requires_grad=True)

    # In a program of yours this line is all there is. Nothing has to be imported for it.
    compiled = torch.compile(block, backend="deuteron")

    # The first call compiles the forward, the first backward the backward.
    y = compiled(x, weight, bias)
    y.square().mean().backward()
    print("largest difference from eager:", (y - block(x, weight, bias)).abs().max().item())

    # What was fused, what was not and why, with bytes and predicted times.
    print(deuteron.explain(block, x, weight, bias))


if __name__ == "__main__":
    main()
