"""Small programs and small models on a GPU, against eager and float64: which are right.

    python -m dev.gpu.check [NAME ...]

Prints a line for each that fails, with the last lines of its error, and a count.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F

from deuteron.backend import deuteron_backend
from tests.models.compare import Trial, failures
from tests.models.zoo import CASES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def x(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_(grad)


def ids(n: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, n, shape, device=DEVICE)


def rms(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (a.float() * (a.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(a.dtype) * w


BFLOAT16 = torch.bfloat16
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "sin chain": (lambda a: ((a + 1) * 2).sin(), lambda: (x(1000, 1000),)),
    "gelu bf16": (lambda a: F.gelu(a), lambda: (x(333, 1024, dtype=BFLOAT16, grad=True),)),
    "softmax 1000": (lambda a: a.softmax(-1), lambda: (x(64, 1000, grad=True),)),
    "softmax bf16 40001": (
        lambda a: a.softmax(-1),
        lambda: (x(20, 40001, dtype=BFLOAT16, grad=True),),
    ),
    "softmax few long": (lambda a: a.softmax(-1), lambda: (x(4, 500_003),)),
    "softmax dim 0": (lambda a: a.softmax(0), lambda: (x(300, 777),)),
    "layer norm": (
        lambda a, w, b: F.layer_norm(a, (768,), w, b),
        lambda: (x(512, 768, grad=True), x(768, grad=True), x(768, grad=True)),
    ),
    "layer norm bf16": (
        lambda a, w, b: F.layer_norm(a, (1024,), w, b),
        lambda: (
            x(512, 1024, dtype=BFLOAT16, grad=True),
            x(1024, dtype=BFLOAT16, grad=True),
            x(1024, dtype=BFLOAT16, grad=True),
        ),
    ),
    "rms norm": (
        rms,
        lambda: (x(2048, 4096, dtype=BFLOAT16, grad=True), x(4096, dtype=BFLOAT16, grad=True)),
    ),
    "cross entropy": (F.cross_entropy, lambda: (x(512, 5000, grad=True), ids(5000, 512))),
    "batch norm": (
        lambda a, w, b: F.batch_norm(a, None, None, w, b, training=True),
        lambda: (x(16, 32, 28, 28, grad=True), x(32, grad=True), x(32, grad=True)),
    ),
    "group norm silu": (
        lambda a, w, b: F.silu(F.group_norm(a, 8, w, b)),
        lambda: (x(4, 64, 32, 32, grad=True), x(64, grad=True), x(64, grad=True)),
    ),
    "sums": (
        lambda a: (a.sum(), a.sum(0), a.sum(1), a.amax(), a.argmax(1)),
        lambda: (x(999, 1001),),
    ),
    "sum all large": (lambda a: a.sum(), lambda: (x(4096, 4096),)),
    "cumsum": (lambda a: a.cumsum(-1), lambda: (x(64, 3000),)),
    "transpose": (lambda a, b: a.t().contiguous() * b, lambda: (x(700, 900), x(900, 700))),
    "cat pad": (
        lambda a, b: F.pad(torch.cat([a, b * 2], 1), (1, 2)).relu(),
        lambda: (x(50, 60), x(50, 70)),
    ),
    "embedding": (
        lambda i, w: F.embedding(i, w).sum(1),
        lambda: (ids(1000, 64, 20), x(1000, 128, grad=True)),
    ),
    "scatter add": (
        lambda a, i: torch.zeros(100, 64, device=DEVICE, dtype=a.dtype).index_add(0, i, a),
        lambda: (x(5000, 64), ids(100, 5000)),
    ),
    "matvec": (lambda a, b: torch.mv(a, b.exp()).relu(), lambda: (x(3000, 2000), x(2000))),
    "small bmm": (lambda a, b: torch.bmm(a, b).relu(), lambda: (x(100, 8, 8), x(100, 8, 8))),
    "dropout": (lambda a: F.dropout(a, 0.0).exp(), lambda: (x(100, 100, grad=True),)),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda: (
            x(2, 4, 64, 32, grad=True),
            x(2, 4, 64, 32, grad=True),
            x(2, 4, 64, 32, grad=True),
        ),
    ),
    "empty": (lambda a: (a * 2 + 1, a.sum(0)), lambda: (x(0, 5),)),
    "unaligned": (lambda a: a[1:].view(-1).sin(), lambda: (x(1001),)),
}


def grads(outs: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    outs = outs if isinstance(outs, (tuple, list)) else [outs]
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    if not leaves:
        return [o.detach() for o in outs]
    g = torch.autograd.grad([o.float().square().sum() for o in outs], leaves)
    return [*(o.detach() for o in outs), *g]


def program(name: str) -> str | None:
    f, make = PROGRAMS[name]
    torch.manual_seed(0)
    args = make()
    wide = tuple(
        a.detach().double().requires_grad_(a.requires_grad)
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in args
    )
    exact, eager = grads(f(*wide), wide), grads(f(*args), args)
    got = grads(torch.compile(f, backend=deuteron_backend, dynamic=False)(*args), args)
    for k, (e, w, g) in enumerate(zip(eager, exact, got, strict=True)):
        if (e.shape, e.dtype, e.stride()) != (g.shape, g.dtype, g.stride()):
            return f"result {k}: {g.dtype} {g.shape} {g.stride()}, eager {e.dtype} {e.stride()}"
        if not e.is_floating_point():
            if not torch.equal(e, g):
                return f"result {k}: {int((e != g).sum())} integers differ"
            continue
        if e.numel() == 0:
            continue
        scale = w.double().abs().max() * torch.finfo(e.dtype).eps
        mine, theirs = ((t.double() - w.double()).abs().max() for t in (g, e))
        if not mine <= 2 * theirs + 4 * scale:
            return f"result {k}: error {float(mine):.3g}, eager's {float(theirs):.3g}"
    return None


def model(name: str) -> str | None:
    case = next(c for c in CASES if c.name == name)
    trial = Trial.of(case, torch.float32, DEVICE)
    eager, got = trial.errors_over_starts(
        lambda step: torch.compile(step, backend=deuteron_backend, dynamic=False, fullgraph=True)
    )
    bad = failures(eager, got, torch.float32)
    return "; ".join(bad[:4]) if bad else None


def main() -> None:
    wanted = sys.argv[1:]
    tasks = [(n, program) for n in PROGRAMS] + [(c.name, model) for c in CASES if not c.random]
    tasks = [t for t in tasks if not wanted or t[0] in wanted]
    failed = 0
    for name, check in tasks:
        torch._dynamo.reset()
        start = time.perf_counter()
        try:
            wrong = check(name)
        except Exception as e:  # noqa: BLE001 - a row for each
            tail = "".join(traceback.format_exception_only(type(e), e)).strip().splitlines()
            wrong = f"{type(e).__name__}: " + " | ".join(s.strip()[:300] for s in tail[:12])
        failed += wrong is not None
        took = time.perf_counter() - start
        print(f"{'FAIL' if wrong else 'ok  '} {name} ({took:.1f} s) {wrong or ''}", flush=True)
    print(f"{len(tasks) - failed} of {len(tasks)} right on {DEVICE}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
