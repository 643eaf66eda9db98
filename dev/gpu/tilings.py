"""Tilings of nests with products: what they are estimated to take, and what they take on a GPU.

    python -m dev.gpu.tilings [--train] [--count 12] [NAME...]

For each kernel of the cases of `dev.gpu.contractions` (with --train: of a forward for a backward,
and of that backward) a line for the chosen tiling, others of the best estimates and some drawn from
the rest: estimated and measured microseconds, and how far its results are from the chosen one's
(root of summed squares, relative); then how the two rank (Spearman), and the chosen one's time over
the best measured. Tensors are drawn from (0.5, 1.5).
"""

from __future__ import annotations

import argparse
import ctypes
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from deuteron.base.device import device_spec
from deuteron.base.errors import DeuteronError
from deuteron.base.options import Options
from deuteron.codegen.triton.generate import TritonKernel, generate
from deuteron.ir.reference import allocate
from deuteron.runtime.build_triton import submit
from deuteron.runtime.launch_cuda import Launcher
from deuteron.schedule.kernel import Kernel
from deuteron.schedule.tile import candidates
from dev.gpu.contractions import CASES, timed
from tests.schedule.planning import planned


def kernels(name: str, train: bool) -> list[Kernel]:
    """A case's kernels with products, for the GPU that is here."""
    case = CASES[name]
    args = [torch.empty(*s, dtype=torch.bfloat16, device="cuda") for s in case.shapes]
    device = torch.cuda.get_device_name().split()[1]
    if not train:
        with torch.no_grad():
            return planned(case.f, *args, device=device, run=False).contractions
    plan = planned(case.f, *(a.requires_grad_() for a in args), device=device, run=False)
    plan.results.backward(torch.empty_like(plan.results))
    return plan.contractions


def tilings(kernel: Kernel, count: int) -> Iterator[tuple[Kernel, float]]:
    assert kernel.contraction is not None
    nest = kernel.contraction[0]
    layouts = dict(kernel.reads) | dict(kernel.writes)
    found = candidates(nest, layouts, device_spec("cuda"))
    best, rest = found[: count // 2], found[count // 2 :]
    random.Random(0).shuffle(rest)
    for tiling, estimate in [*best, *rest[: count - len(best)]]:
        yield replace(kernel, contraction=(nest, tiling)), estimate.us


def memory(kernel: Kernel) -> dict[str, Tensor]:
    out = {}
    for name, layout in (*kernel.reads, *kernel.writes):
        out[name] = allocate(replace(layout, device="cuda"), {})
        if out[name].is_floating_point():
            out[name].uniform_(0.5, 1.5)
    return out


def code_of(kernel: Kernel, number: int) -> TritonKernel:
    """Its code, which begins to be built."""
    code = generate(replace(kernel, name=f"{kernel.name}_{number}"), device_spec("cuda"))
    major, minor = torch.cuda.get_device_capability()
    submit(code, code.configs[0], 10 * major + minor, Options.make())
    return code


def run(kernel: Kernel, code: TritonKernel) -> tuple[float, list[Tensor]]:
    """Microseconds of a kernel; its results."""
    torch.manual_seed(0)
    tensors = memory(kernel)
    given = [tensors[str(what)].data_ptr() for kind, what in code.args if kind == "tensor"]
    launcher = Launcher([code], [range(len(given))], [], "cuda:0", Options.make())
    pointers = (ctypes.c_void_p * len(given))(*given)
    call = partial(launcher, torch.cuda.current_stream().cuda_stream, pointers)
    call()
    torch.cuda.synchronize()
    results = [tensors[name].clone() for name, _ in kernel.writes]
    return timed(call), results


def apart(got: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((g - w).double().norm() / w.double().norm()) for g, w in zip(got, wanted))


def rank(a: list[float], b: list[float]) -> float:
    x, y = (torch.tensor(v).argsort().argsort().double() for v in (a, b))
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--count", type=int, default=12)
    asked = parser.parse_args()
    print(torch.cuda.get_device_name())
    found = [(n, k) for n in asked.names or CASES for k in kernels(n, asked.train)]
    every = [list(tilings(k, asked.count)) for _, k in found]
    codes = [[code_of(k, n) for n, (k, _) in enumerate(ks)] for ks in every]
    for (name, kernel), ks, made in zip(found, every, codes, strict=True):
        print(f"{name}: {', '.join(n for n, _ in kernel.writes)}")
        rows, first = [], list[Tensor]()
        for (tiled, us), code in zip(ks, made, strict=True):
            assert tiled.contraction is not None
            took, off, why = float("nan"), float("nan"), ""
            try:
                took, got = run(tiled, code)
                first = first or got
                off = apart(got, first)
            except DeuteronError as e:  # out of resources: a tiling that should not be offered
                why = e.message[:60]
            rows.append((us, took))
            print(f"  {us:9.1f} {took:9.1f} {off:.0e} {tiled.contraction[1]} {why}", flush=True)
        good = [r for r in rows if r[1] == r[1]]
        if len(good) > 2:
            best = min(t for _, t in good)
            order = rank(*map(list, zip(*good)))
            print(f"  rank {order:.2f}; chosen {rows[0][1] / best:.2f} of the best")


if __name__ == "__main__":
    main()
