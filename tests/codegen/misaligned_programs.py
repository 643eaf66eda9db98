"""Programs over rows that begin between multiples of 16 bytes, interpreted.

``TRITON_INTERPRET=1 python misaligned_programs.py [--every] [PROGRAM ...]`` prints a JSON line per
program and length: the largest error over what is allowed, or what went wrong. Without ``--every``
each program has one of the lengths that take long to interpret.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.codegen.triton import tiling
from deuteron.codegen.triton.generate import TritonKernel, generate
from deuteron.ir.program import Constant, Input
from deuteron.ir.reference import allocate
from deuteron.schedule import columns, cooperative
from dev.check import interpret
from tests.schedule import tools
from tests.schedule.tools import Scheduled, scheduled, spec_of

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROWS = 11


def rows(n: int, dtype: torch.dtype = BF16, count: int = ROWS) -> Tensor:
    return torch.randn(count, n).to(dtype)


def behind(n: int, skip: int, dtype: torch.dtype = BF16) -> Tensor:
    """Rows in the middle of a storage, up to its end."""
    return torch.randn(skip + ROWS * n).to(dtype)[skip:].view(ROWS, n)


def columns_of(n: int, dtype: torch.dtype = BF16) -> Tensor:
    """Rows that lie apart."""
    return rows(n + 5, dtype)[:, 2 : n + 2]


def norm_back(dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, rest: Tensor) -> tuple[Tensor, ...]:
    wide = torch.float64 if x.dtype == torch.float64 else F32
    g, h = dy.to(wide) * w, (x.to(wide) - mean) * rest
    along = g - g.mean(-1, keepdim=True) - h * (g * h).mean(-1, keepdim=True)
    columns = (dy.to(wide) * h).sum(0), dy.sum(0, dtype=wide)
    return (rest * along).to(x.dtype), *(c.to(x.dtype) for c in columns)


def gradients(n: int, dtype: torch.dtype, count: int = ROWS) -> tuple[Tensor, ...]:
    x = rows(n, dtype, count)
    m, r = x.float().mean(-1, keepdim=True), (x.float().var(-1, keepdim=True) + 1e-2).rsqrt()
    return rows(n, dtype, count), x, rows(n, dtype, 1)[0], m, r


def loss(x: Tensor, t: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(x.float(), -1), t, reduction="none")


def places(x: Tensor) -> tuple[Tensor, ...]:
    return x.argmax(-1), x.argmin(-1), x.amax(-1)


def ties(n: int) -> Tensor:
    x = rows(n, F32).round()
    x[1], x[2, n // 2], x[3, 0], x[4, n - 1] = -torch.inf, torch.nan, 9.0, 9.0
    return x


Made = Callable[[int], tuple[Any, ...]]
PROGRAMS: dict[str, tuple[Callable[..., Any], Made]] = {
    "softmax": (lambda x: torch.softmax(x, -1), lambda n: (rows(n),)),
    "softmax to f32": (lambda x: torch.softmax(x.float(), -1), lambda n: (rows(n, F16),)),
    "softmax behind others": (lambda x: torch.softmax(x, -1), lambda n: (behind(n, 3),)),
    "softmax of columns": (lambda x: torch.softmax(x, -1), lambda n: (columns_of(n),)),
    "softmax of f64": (lambda x: torch.softmax(x, -1), lambda n: (rows(n, torch.float64),)),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        lambda n: (rows(n), rows(n, BF16, 1)[0], rows(n, BF16, 1)[0]),
    ),
    "layer norm of f32": (
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        lambda n: (rows(n, F32), rows(n, F32, 1)[0], rows(n, F32, 1)[0]),
    ),
    "norm with weights of f32": (
        lambda x, w: F.rms_norm(x.float(), w.shape) * w,
        lambda n: (rows(n), rows(n, F32, 1)[0]),
    ),
    "layer norm of a sum": (
        lambda x, y: F.layer_norm(x + y, x.shape[-1:]),
        lambda n: (rows(n), rows(n, F32)),
    ),
    "variance": (lambda x: torch.var_mean(x, -1), lambda n: (rows(n, F32) + 9,)),
    "loss": (loss, lambda n: (rows(n), torch.randint(0, n, (ROWS,)))),
    "places": (places, lambda n: (ties(n),)),
    "products with whole numbers": (
        lambda x, i: ((x * i).sum(-1), x * i),
        lambda n: (rows(n), torch.randint(-4, 4, (ROWS, n))),
    ),
    "truth values": (
        lambda x, b: torch.where(b, x, 0).softmax(-1),
        lambda n: (rows(n, F32), torch.rand(ROWS, n) < 0.5),
    ),
    "norm beside sums of columns": (
        lambda x, y: (F.layer_norm(x, x.shape[-1:]), (x * y).sum(0)),
        lambda n: (rows(n, F32, 19), rows(n, F32, 19)),
    ),
    "gradients of layer norm": (norm_back, lambda n: gradients(n, BF16, 19)),
    "gradients of layer norm of f32": (norm_back, lambda n: gradients(n, F32, 19)),
}


# How a row is walked: whole, in blocks of a loop, by several programs, by those from whole lines.
WHOLE, LOOPED, SHARED = "whole", "looped", "shared"


@contextmanager
def walked(how: str) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "MIN_ROTATED_ROW", 8)
        if how != WHOLE:
            patch.setattr(tiling, "ROW_LIMIT", 8)
        if how == SHARED:
            patch.setattr(cooperative, "ELEMENTS_PER_PROGRAM", ((1, 32), (4, 32)))
            patch.setattr(cooperative, "MIN_COOPERATIVE_ROW", 32)
            patch.setattr(tiling, "MIN_COOPERATIVE_ROW", 32)
        yield patch


def planned(name: str, n: int, how: str, dynamic: bool) -> tuple[Scheduled, list[Any]]:
    torch.manual_seed(n)
    f, made = PROGRAMS[name]
    args = list(made(n))
    with walked(how) as patch:
        many = columns.choose_row_split
        count = 8  # of several rows each
        patch.setattr(columns, "choose_row_split", lambda *a: (many(*a)[0], count))
        # So few rows in so few splits are worth one kernel.
        slower = replace(spec_of("H200"), bandwidth_gbps=100.0)
        patch.setattr(tools, "spec_of", lambda device: slower)
        return scheduled(f, *args, device="H200", dynamic=dynamic, check=False), args


def kernels(plan: Scheduled, how: str) -> list[TritonKernel]:
    with walked(how):
        return [generate(k, spec_of("H200")) for k in plan.kernels]


def sizes_of(plan: Scheduled, args: list[Any]) -> dict[str, int]:
    out = {}
    for sym, (kind, position, dim) in plan.program.sizes:
        x = args[position]
        out[sym.name] = x if kind == "int" else (x.shape if kind == "shape" else x.stride())[dim]
    return out


def run(plan: Scheduled, args: list[Any], how: str) -> list[Tensor]:
    sizes, memory = sizes_of(plan, args), dict[str, Tensor]()
    for d in plan.program.defs:
        if isinstance(d, Input):
            memory[d.name] = args[d.position]
        elif isinstance(d, Constant):
            memory[d.name] = plan.program.constants[d.name]
    for k, t in zip(plan.kernels, kernels(plan, how), strict=True):
        for written, lay in k.writes:
            if written not in memory:
                memory[written] = interpret.unset(allocate(lay, sizes))
        if how == LOOPED and "for r" in t.source:
            t = smaller(t)
        interpret.launch(t, interpret.loaded(t), memory, sizes)
    return [memory[o.tensor] for o in plan.program.outputs if o.tensor is not None]


def smaller(t: TritonKernel) -> TritonKernel:
    """With smaller blocks of a row."""
    first = t.configs[0]
    values = tuple((n, min(v, 32) if n.startswith("R") else v) for n, v in first.constexprs)
    return replace(t, configs=(replace(first, constexprs=values),))


def check(name: str, n: int, how: str, dynamic: bool) -> float:
    plan, args = planned(name, n, how, dynamic)
    got = run(plan, args, how)
    f = PROGRAMS[name][0]
    expected = f(*args)
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    exact = f(*wide) if name != "loss" else expected
    worst = 0.0
    pairs = [v if isinstance(v, (tuple, list)) else (v,) for v in (expected, exact)]
    for g, e, x in zip(got, *pairs, strict=True):
        assert g.shape == e.shape and g.dtype == e.dtype, (g.dtype, e.dtype)
        if not e.is_floating_point():
            assert torch.equal(g, e), "whole numbers differ"
            continue
        top = x.double().nan_to_num(0, 0, 0).abs().amax().item()
        allowed = 2 * (e.double() - x.double()).nan_to_num(0, 0, 0).abs().amax().item()
        # Of f64 there is nothing more exact.
        few = 8 if e.dtype == torch.float64 else 1
        allowed += few * torch.finfo(e.dtype).eps * top + torch.finfo(e.dtype).tiny
        assert torch.equal(g.isnan(), e.isnan()), "NaN"
        off = (g.double() - x.double()).nan_to_num(0, 0, 0).abs().max().item()
        worst = max(worst, off / allowed)
    return worst


def cases(every: bool) -> Iterator[tuple[str, int, str, bool]]:
    for name in PROGRAMS:
        for n in range(1, 41) if name == "softmax" else (1, 9, 23, 39):
            yield name, n, WHOLE, False
        yield name, 127, WHOLE, False
        yield name, 71, LOOPED, False
        yield name, 41, LOOPED, True
        yield name, 73, SHARED, False
    yield "softmax", 1001, WHOLE, False
    for k, name in enumerate(("softmax", "layer norm", "loss", "truth values")):
        for n, dynamic in ((1101, False), (1103, True)):
            if every or dynamic == k % 2:
                yield name, n, LOOPED, dynamic


if __name__ == "__main__":
    # What eager is wrong by, which bounds errors, is then the same on every CPU: with AVX-512 a
    # softmax of 71 (f32) happens to be exact.
    os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
    only = [name for name in sys.argv[1:] if name != "--every"]
    for name, n, how, dynamic in cases("--every" in sys.argv):
        if only and name not in only:
            continue
        entry: dict[str, Any] = {"case": [name, n, how, dynamic]}
        try:
            entry["error"] = check(name, n, how, dynamic)
        except Exception:
            entry["failure"] = traceback.format_exc()[-3000:]
        print(json.dumps(entry), flush=True)
