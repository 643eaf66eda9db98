"""Programs of half types, and how their compiled forms are judged. Run as a script, under Triton's
interpreter, it prints one line of JSON for each program."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dev.check.differences import differences
from dev.check.oracle import Oracle, copies, see

HALVES = (torch.bfloat16, torch.float16)


def compiled(
    f: Callable[..., Any], backend: Any = "deuteron", **options: Any
) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(f, backend=backend, options={"verify": True, **options})


def make(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gated(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return w * y * F.silu(x)


def softmax(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


CHAINS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "gelu": (gelu, ((37, 50),)),
    "gated": (gated, ((19, 70), (70,))),
    "softmax written out": (softmax, ((23, 90),)),
}


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def jumps(y: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    return (
        *(y > t, y <= 0.5, y != 0, y.floor(), y.to(torch.int32), y.ceil(), y.round(), y.sign()),
        *(y.to(torch.float8_e5m2).float(), torch.floor_divide(y, 0.25), y.isinf(), y.bool()),
        *(y.clamp(-1, 1).to(torch.int8), torch.where(y >= t, 1, 0).sum(-1), y.remainder(0.5)),
        *(y.frac(), y.abs().to(torch.uint8), (-y).trunc(), y.maximum(t).to(torch.int16)),
    )


def equalities(y: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    return y == t, y.argmax(-1), y.amax(-1) == t[:, 0], y == y.amin(0), y.float() != t


EXTREMES: dict[str, Callable[[Tensor], Any]] = {
    "amax": lambda y: y.amax(-1),
    "amin": lambda y: y.amin(0),
    "max": lambda y: y.max(),
    "max of rows": lambda y: y.max(-1)[0],
    "min of columns": lambda y: y.min(0).values,
    "norm": lambda y: torch.linalg.vector_norm(y, float("inf"), -1),
    "maximum": lambda y: torch.maximum(y, y.flip(-1)),
    "clamp": lambda y: y.clamp(-0.5, 0.75),
    "relu": lambda y: F.relu(y) * y,
    "hardtanh": lambda y: F.hardtanh(y) + F.relu6(y * 4),
    "pool": lambda y: F.max_pool2d(y[None, None], 3, 2),
    "pool of rows": lambda y: F.max_pool1d(y[None], 2),
    "adaptive pool": lambda y: F.adaptive_max_pool2d(y[None, None], (3, 4)),
    "median": lambda y: y.median(-1).values,
    "sorted": lambda y: y.sort(-1).values[:, :5],
    "topk": lambda y: y.topk(3, -1).values,
    "cummax": lambda y: y.cummax(-1).values,
    "softmax": lambda y: (y - y.amax(-1, keepdim=True)).exp(),
    "equal": lambda y: torch.where(y == y.amax(-1, keepdim=True), y, 0),
    "logsumexp": lambda y: y.logsumexp(-1),
    "float amax": lambda y: y.float().amax(-1),
    "two": lambda y: y.amax(-1) * 2 - y.amin(-1).float(),
}


def chain(x: Tensor, w: Tensor) -> Tensor:
    """Every element has its slope; sums round on the way."""
    return (x * 1.3 + w) - w * 0.7 + (x * w.mean()) * 0.1


def judged(f: Callable[..., Any], args: list[Tensor], **options: Any) -> list[str]:
    """How results and gradients are not as good as eager's."""
    call = compiled(f, **options)

    def runner(g: Callable[..., Any]) -> Callable[[list[Tensor]], Any]:
        return lambda xs: see(lambda given: g(*given), xs, True)

    oracle = Oracle(runner(f), runner(f), args)
    return differences(runner(call)(copies(args)), oracle)


# What one graph of a GPU's kernels is tried with: interpreting takes a second a program.
INTERPRETED = ("amax", "maximum", "pool of rows", "softmax", "equal", "two", "clamp")


def of_chain(name: str) -> Callable[[Tensor, Tensor], Any]:
    return lambda x, w: EXTREMES[name](chain(x, w))


def decided(decisions: Callable[..., Any], dtype: torch.dtype, **options: Any) -> list[str]:
    """Which decisions of a chain are not those of its stored value."""

    def f(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        y = (x * w + t) * 1.1 - w
        return y, *decisions(y, t)

    args = [make(30, 41, dtype=dtype, seed=k) for k in range(3)]
    y, *got = compiled(f, **options)(*args)
    want = decisions(y, args[2])
    return [f"result {k}" for k, (g, e) in enumerate(zip(got, want)) if not torch.equal(g, e)]


def coarse(name: str, dtype: torch.dtype, **options: Any) -> list[str]:
    """The error against float64, where it is not well below eager's."""
    f, shapes = CHAINS[name]
    args = [make(*s, dtype=dtype, seed=k) for k, s in enumerate(shapes)]
    exact = f(*[a.double() for a in args])
    got, usual = error(compiled(f, **options)(*args), exact), error(f(*args), exact)
    return [] if got < 0.8 * usual else [f"{got}, eager {usual}"]


def main() -> None:
    from dev.check.interpret import interpreted

    def report(name: str, run: Callable[[], list[str]]) -> None:
        try:
            wrong = run()
        except Exception as e:  # noqa: BLE001 - the test shows it
            wrong = [f"{type(e).__name__}: {e}"[-2000:]]
        print(json.dumps({"program": name, "wrong": wrong}), flush=True)

    for name in INTERPRETED:
        args = [make(12, 18).requires_grad_(), make(18, seed=5).requires_grad_()]
        report(name, partial(judged, of_chain(name), args, backend=interpreted))
    for decisions in (jumps, equalities):
        run = partial(decided, decisions, torch.bfloat16, backend=interpreted)
        report(decisions.__name__, run)
    for name in CHAINS:
        report(name, partial(coarse, name, torch.bfloat16, backend=interpreted))


if __name__ == "__main__":
    sys.exit(main())
