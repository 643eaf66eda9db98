"""Products with what surrounds them on a GPU: times beside eager and Inductor, errors, memory.

    python -m dev.gpu.contractions [--train] [NAME...]

Prints a line for each case: microseconds of a call (median by CUDA events, the three in one
process), errors against float64 of a part of the batch (root of summed squares, relative), MiB that
a call allocates. With --train calls are a forward and the backward of a random gradient, and the
error is the largest of the result's and the gradients'.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    causal: bool = True, cap: float = 0.0, window: int = 0
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Heads of queries share those of keys where there are more of them."""

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[1] > k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        s = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]))
        if cap:
            s = cap * torch.tanh(s / cap)
        i = torch.arange(s.shape[-1], device=q.device)
        if causal:
            s = s.masked_fill(i[:, None] < i[None, :], float("-inf"))
        if window:
            s = s.masked_fill(i[:, None] - i[None, :] >= window, float("-inf"))
        return torch.softmax(s, -1) @ v

    return f


def hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All keys of every seventh query are hidden, by a number that is not minus infinity."""
    s = q @ k.transpose(-1, -2) * 0.125
    i = torch.arange(s.shape[-1], device=q.device)
    s = s.masked_fill((i[:, None] < i[None, :]) | (i[:, None] % 7 == 3), -1e20)
    return torch.softmax(s, -1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.17 + b, -1) @ v


def gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def added(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.linear(x, w, b) + r


def gated(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return F.silu(x @ w) * (x @ u)


def normed(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * g @ w


@dataclass(frozen=True)
class Case:
    f: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    batched: int = 1  # of how many inputs, the first ones, the first dimension is a batch


def heads(*shape: int) -> tuple[tuple[int, ...], ...]:
    return (shape, shape, shape)


LONG = (4, 16, 4096, 128)
CASES = {
    "plain": Case(attention(causal=False), heads(*LONG), 3),
    "causal": Case(attention(), heads(*LONG), 3),
    "soft cap": Case(attention(cap=20.0), heads(*LONG), 3),
    "window": Case(attention(window=512), heads(*LONG), 3),
    "shared heads": Case(attention(), (LONG, (4, 4, 4096, 128), (4, 4, 4096, 128)), 3),
    "short": Case(attention(causal=False), heads(8, 12, 1024, 64), 3),
    "hidden rows": Case(hidden, heads(8, 12, 1024, 64), 3),
    "windows of images": Case(biased, (*heads(1024, 4, 49, 32), (4, 49, 49)), 3),
    "gelu": Case(gelu, ((8192, 1024), (4096, 1024), (4096,))),
    "small gelu": Case(gelu, ((64, 256), (256, 256), (256,))),
    "residual": Case(added, ((8192, 1024), (1024, 1024), (1024,), (8192, 1024))),
    "gated": Case(gated, ((8192, 4096), (4096, 14336), (4096, 14336))),
    "small gated": Case(gated, ((2048, 1024), (1024, 2816), (1024, 2816))),
    "decode gated": Case(gated, ((1, 4096), (4096, 14336), (4096, 14336))),
    "norm": Case(normed, ((8192, 4096), (4096,), (4096, 4096))),
}


def made(case: Case) -> list[Tensor]:
    """Inputs: rows of weights are scaled so that results are about 1."""
    torch.manual_seed(0)
    out = []
    for k, shape in enumerate(case.shapes):
        scale = 1.0 if k < case.batched or len(shape) != 2 else shape[0] ** -0.5
        out.append(torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale)
    return out


def timed(f: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(f, warmup=15, rep=60, return_mode="median")) * 1e3


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.detach().double() - wanted).norm() / wanted.norm())


def trained(f: Callable[..., Tensor], grad: Tensor, args: list[Tensor]) -> list[Tensor]:
    """The result, and the gradients of all arguments."""
    out = f(*args)
    return [out, *torch.autograd.grad(out, args, grad.to(out.dtype)[: len(out)])]


def measured(name: str, case: Case, train: bool) -> str:
    args = made(case)
    torch._dynamo.reset()
    fs = [torch.compile(case.f, backend=b) for b in ("deuteron", "inductor")]
    ours, theirs, eager = *fs, case.f
    own = case.batched if case.batched > 1 else 0  # of one sample, where samples are independent
    few = [(a[:1] if k < own else a).double() for k, a in enumerate(args)]
    if train:
        args, few = ([a.requires_grad_() for a in x] for x in (args, few))
        grad = torch.randn_like(case.f(*args))
        ours, theirs, eager = (partial(trained, f, grad) for f in (*fs, case.f))
        results = [ours(args), eager(args), trained(case.f, grad, few)]
    else:
        ours, theirs, eager = (lambda x, f=f: [f(*x)] for f in (*fs, case.f))
        results = [ours(args), eager(args), [case.f(*few)]]
    compared = 1 + case.batched if own else 1 + len(args)
    errors = [
        max(error(r[: len(w)], w) for r, w in list(zip(got, results[2], strict=True))[:compared])
        for got in results[:2]
    ]
    del results, few
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours(args)
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    theirs(args)
    us = [timed(partial(f, args)) for f in (ours, eager, theirs)]
    return (
        f"{name:18s} deuteron {us[0]:9.1f} us, eager {us[1]:9.1f}, inductor {us[2]:9.1f}; "
        f"error {errors[0]:.1e}, eager's {errors[1]:.1e}; {peak:.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(CASES))
    parser.add_argument("--train", action="store_true")
    asked = parser.parse_args()
    print(torch.cuda.get_device_name())
    with nullcontext() if asked.train else torch.no_grad():
        for name in asked.names or CASES:
            print(measured(name, CASES[name], asked.train), flush=True)


if __name__ == "__main__":
    main()
