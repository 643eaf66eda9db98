"""Values and gradients of variants of attention, compiled, against float64.

A module for tests of the CPU target; as a script (in a process of Triton's interpreter) it prints
what is wrong with the variants that it is given, in bfloat16, or as "name:f32"."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.utils import counters

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


def problems(
    name: str, lengths: Sequence[int], dtype: torch.dtype, backend: Any, device: str = "cpu"
) -> list[str]:
    """What is less exact than twice eager's error; kernels with products pay or not. Of several
    lengths one graph for all."""
    v = VARIANTS[name]
    torch._dynamo.reset()
    counters.clear()
    options = {"eager_random": True} if v.random else {}
    compiled = torch.compile(v.f, backend=backend, fullgraph=True, options=options)
    out = []
    for length in lengths:
        sizes = (length, length + 1)
        args, longer = ([x.to(device) for x in v.inputs(n, dtype)] for n in sizes)

        def marked(*own: Tensor, longer: Sequence[Tensor] = longer) -> Any:
            for x, other in zip(own, longer, strict=True) if len(lengths) > 1 else ():
                for d in (d for d in range(x.dim()) if x.shape[d] != other.shape[d]):
                    torch._dynamo.maybe_mark_dynamic(x, d)
            return compiled(*own)

        with mock.patch.multiple(contract, MIN_GAIN=-1e9, TABLE_SHARE=1e9):
            got = everything(marked, args)
        eager = everything(v.f, args)
        wide = [a.double() if a.is_floating_point() else a for a in args]
        rows = zip(got, eager, everything(v.f, wide), strict=True)
        found = (wrong(*row, dtype) for row in rows)
        out += [f"length {length}, result {k}: {text}" for k, text in enumerate(found) if text]
    graphs = counters["stats"]["unique_graphs"]
    return out if graphs == 1 else [*out, f"{graphs} graphs"]


def wrong(got: Tensor, eager: Tensor, wide: Tensor, dtype: torch.dtype) -> str:
    if (got.shape, got.dtype, got.stride()) != (eager.shape, eager.dtype, eager.stride()):
        return f"{got.dtype} {got.shape} {got.stride()}, not {eager.shape} {eager.stride()}"
    # Where a CPU multiplies bf16 in tiles (AMX), eager has some in rows that see none, too.
    if not any(torch.equal(got.isnan(), x.isnan()) for x in (eager, wide)):
        return "no numbers elsewhere than eager's"
    got, eager, wide = (x.nan_to_num() for x in (got, eager, wide))
    off, allowed = relative(got, wide), max(RELATIVE * relative(eager, wide), FLOOR[dtype])
    return "" if off <= allowed else f"off by {off:.1e}, allowed {allowed:.1e}"


def main(lengths: str, *names: str) -> None:
    from dev.check import interpret

    numbers = [int(n) for n in lengths.split(",")]
    for name in names:
        plain, _, wide = name.partition(":")
        dtype = torch.float32 if wide else torch.bfloat16
        found = problems(plain, numbers, dtype, interpret.interpreted)
        print(json.dumps({"name": name, "problems": found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
