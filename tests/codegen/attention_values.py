"""Values and gradients of variants of attention, compiled, against float64.

A module for tests of the CPU target; as a script (in a process of Triton's interpreter) it prints
what is wrong with the variants that it is given."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from deuteron.schedule import contract
from tests.schedule.attention_variants import VARIANTS
from tests.schedule.planning import gradients

RELATIVE = 2.0  # times eager's error, as everywhere
FLOOR = {torch.float32: 1e-6, torch.bfloat16: 3e-3}


def everything(f: Callable[..., Any], args: Sequence[Tensor]) -> list[Tensor]:
    """Results and gradients of a function of leaves."""
    own = [a.detach().clone() for a in args]
    leaves = [a.requires_grad_() for a in own if a.is_floating_point()]
    torch.manual_seed(0)
    out = f(*own)
    out = out if isinstance(out, tuple) else (out,)
    return [t.detach() for t in (*out, *gradients(out, leaves))]


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def problems(name: str, length: int, dtype: torch.dtype, backend: Any) -> list[str]:
    """What is less exact than twice eager's error; kernels with products pay or not."""
    v = VARIANTS[name]
    args = v.inputs(length, dtype)
    torch._dynamo.reset()
    options = {"eager_random": True} if v.random else {}
    compiled = torch.compile(v.f, backend=backend, fullgraph=True, options=options)
    with mock.patch.object(contract, "MIN_GAIN", -1e9):
        got = everything(compiled, args)
    eager = everything(v.f, args)
    wide = [a.double() if a.is_floating_point() else a for a in args]
    out = []
    for k, (g, e, w) in enumerate(zip(got, eager, everything(v.f, wide), strict=True)):
        if (g.shape, g.dtype, g.stride()) != (e.shape, e.dtype, e.stride()):
            out.append(f"result {k}: {g.dtype} {g.shape} {g.stride()}, not {e.shape} {e.stride()}")
            continue
        if not torch.equal(g.isnan(), e.isnan()):
            out.append(f"result {k}: no numbers elsewhere than eager's")
        g, e, w = (x.nan_to_num() for x in (g, e, w))
        off, allowed = relative(g, w), max(RELATIVE * relative(e, w), FLOOR[dtype])
        if not off <= allowed:
            out.append(f"result {k}: off by {off:.1e}, allowed {allowed:.1e}")
    return out


def main(names: Sequence[str]) -> None:
    from dev.check import interpret

    for name in names:
        found = problems(name, 19, torch.bfloat16, interpret.interpreted)
        print(json.dumps({"name": name, "problems": found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
