"""Kernels with products under many tilings, run by Triton's interpreter: one line of JSON for each.

    TRITON_INTERPRET=1 python tests/codegen/contraction_tilings.py SEED COUNT DTYPE [PROGRAM]

Each of `tests.schedule.contraction_programs` is scheduled for an H100 with its gradients; each
kernel's nest is then lowered with COUNT tilings drawn from all feasible ones with blocks of 16 to
64, and with the one that was chosen. `error` is the distance to the reference executor's results,
in shares of their norm; `repeats`: whether a second run of the chosen one gives the same bits (in
float32, in which the programs that could differ are among `WIDE`).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deuteron.base.device import named_gpu
from deuteron.codegen.triton.generate import generate
from deuteron.ir.reference import Execution, allocate
from deuteron.schedule.kernel import Kernel
from deuteron.schedule.reference import run_kernel
from deuteron.schedule.tile import feasible
from deuteron.schedule.tiling import Tiling
from dev.check import interpret
from tests.schedule.contraction_programs import PROGRAMS, RANDOM, inputs
from tests.schedule.planning import Call, trained

BLOCKS = (16, 32, 64)
WIDE = ("bias", "causal", "dropped", "gated")  # in float32, too


def drawn(kernel: Kernel, draw: random.Random, count: int) -> Iterator[Tiling]:
    """The chosen tiling, and others of the same dimensions."""
    assert kernel.contraction is not None
    nest, tiling = kernel.contraction
    yield tiling
    spec = named_gpu("H100")
    assert spec is not None
    while count:
        dims = tuple(
            d if d.block == 1 or d.mode == "whole" else replace(d, block=draw.choice(BLOCKS))
            for d in tiling.dims
        )
        other = replace(
            tiling,
            dims=dims,
            num_stages=draw.choice((1, 2, 3)),
            fetches=draw.choice((False, True)),
            puts=draw.choice((False, True)),
            persistent=draw.choice((0, 3)),
        )
        if feasible(nest, replace(other, fetches=False), {}, spec):
            count -= 1
            yield other


def results(kernel: Kernel, given: dict[str, Tensor], runs: bool) -> dict[str, Tensor]:
    """What the kernel writes: interpreted, or (not `runs`) by the reference executor."""
    tensors = dict(given)
    for name, layout in kernel.writes:
        tensors[name] = interpret.unset(allocate(layout, {}))
    if runs:
        code = generate(kernel, interpret.gpu())
        interpret.launch(code, interpret.loaded(code), tensors, {})
    else:
        run_kernel(kernel, tensors, {})
    return {name: tensors[name] for name, _ in kernel.writes}


def relative(got: Tensor, wanted: Tensor) -> float:
    """Of the numbers; infinite where others are not the same."""
    a, b = got.double(), wanted.double()
    finite = b.isfinite()
    if not same(a.where(~finite, 0), b.where(~finite, 0)):
        return float("inf")
    return float((a - b)[finite].norm() / b[finite].norm()) if finite.any() else 0.0


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def rows(
    name: str, call: Call, draw: random.Random, count: int, twice: bool
) -> Iterator[dict[str, Any]]:
    """A graph's kernels with products, after those before them. `twice`: the chosen tilings run
    once more."""
    execution = Execution(call.program, call.inputs)
    tensors = execution.tensors
    tensors.update(call.memory())
    for step in call.schedule.steps:
        if not isinstance(step, Kernel):
            execution.define(step)
            continue
        wanted = results(step, tensors, runs=False)
        if step.contraction is not None:
            nest, _ = step.contraction
            for k, tiling in enumerate(drawn(step, draw, count)):
                tiled = replace(step, contraction=(nest, tiling))
                got = results(tiled, tensors, runs=True)
                again = results(tiled, tensors, runs=True) if twice and not k else got
                error = max(relative(got[n], w) for n, w in wanted.items())
                yield {
                    "case": name,
                    "kernel": step.name,
                    "tiling": str(tiling),
                    "error": error,
                    "repeats": all(same(got[n], again[n]) for n in wanted),
                }
        tensors.update(wanted)


def main(seed: int, count: int, dtype: str, only: str = "") -> None:
    interpret.gpu()
    for name, program in sorted((PROGRAMS | RANDOM).items()):
        if only and name != only:
            continue
        if dtype == "float32" and name not in WIDE:
            continue
        plan = trained(program, *inputs(name, getattr(torch, dtype)))
        for number, call in enumerate(plan.calls_made):
            with torch.no_grad():
                draw = random.Random(f"{seed} {name} {number}")
                for row in rows(name, call, draw, count, twice=dtype == "float32"):
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
