"""Whole small programs, scheduled for an H200, their Triton kernels run by Triton's interpreter.

``TRITON_INTERPRET=1 python triton_programs.py`` prints a JSON line per program: the largest error
of its outputs over their tolerance, or what went wrong.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from deuteron.base.options import Options
from deuteron.codegen.triton.generate import TritonKernel, generate
from deuteron.ir.index import Sym, evaluate
from deuteron.ir.program import Constant, Input
from deuteron.lower.core import TO_TORCH
from deuteron.runtime.build_triton import module
from tests.schedule.test_fusion import COUNTS
from tests.schedule.tools import Scheduled, scheduled, spec_of

PROGRAMS: dict[str, tuple[Any, tuple[Any, ...]]] = {n: (f, a) for n, f, a, _ in COUNTS} | {
    "few long rows": (lambda x: x.sum(-1), (torch.randn(4, 30_000),)),
    "tall columns": (lambda x: (x * 2).sum(0), (torch.randn(1024, 40),)),
    "matrix-vector": (lambda a, b: torch.mv(a, b).relu(), (torch.randn(30, 70), torch.randn(70))),
}


def kernels(found: Scheduled) -> list[TritonKernel]:
    return [generate(k, spec_of("H200"), Options()) for k in found.kernels]


def sizes_of(found: Scheduled, args: list[Any]) -> dict[str, int]:
    out = {}
    for sym, (kind, position, dim) in found.program.sizes:
        x = args[position]
        out[sym.name] = x if kind == "int" else (x.shape if kind == "shape" else x.stride())[dim]
    return out


def run(found: Scheduled, args: list[Any], folder: Path) -> list[torch.Tensor]:
    """The program's outputs, its kernels interpreted."""
    sizes = sizes_of(found, args)
    memory: dict[str, torch.Tensor] = {}
    for d in found.program.defs:
        if isinstance(d, Input):
            memory[d.name] = args[d.position]
        elif isinstance(d, Constant):
            memory[d.name] = found.program.constants[d.name]
    for k, t in zip(found.kernels, kernels(found), strict=True):
        for name, lay in k.writes:
            if name not in memory:
                shape, strides = (
                    [evaluate(i, sizes) for i in part] for part in (lay.shape, lay.strides)
                )
                memory[name] = torch.empty_strided(shape, strides, dtype=TO_TORCH[lay.dtype])
        path = folder / f"{t.name}.py"
        path.write_text(t.source)
        counter = torch.zeros(1, dtype=torch.int32)
        given: list[Any] = []
        for kind, what in t.args:
            if kind == "tensor":
                given.append(memory[str(what)])
            elif kind == "size":
                assert isinstance(what, Sym)
                given.append(sizes[what.name])
            else:
                given.append(counter)
        config = t.configs[0]
        constants = t.constants(config, t.is_wide(sizes))
        getattr(module(path), t.name)[(t.grid(config, sizes),)](*given, **constants)
        assert int(counter) == 0
    return [memory[o.tensor] for o in found.program.outputs if o.tensor is not None]


def check(name: str, folder: Path) -> float:
    torch.manual_seed(0)
    f, args = PROGRAMS[name]
    found = scheduled(f, *args, device="H200", check=False)
    got = run(found, list(args), folder)
    expected = f(*args)
    expected = list(expected) if isinstance(expected, (tuple, list)) else [expected]
    worst = 0.0
    for g, e in zip(got, expected, strict=True):
        if not e.is_floating_point():
            worst = max(worst, float((g != e).sum()))
            continue
        bound = 2e-5 * (1 + float(e.abs().max()))
        worst = max(worst, float((g - e).abs().max()) / bound)
    return worst


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for k, name in enumerate(sys.argv[1:] or PROGRAMS):
            own = Path(folder) / str(k)
            own.mkdir()
            try:
                print(json.dumps({"program": name, "error": check(name, own)}))
            except Exception:  # noqa: BLE001 - each program reports for itself
                print(json.dumps({"program": name, "failure": traceback.format_exc()[-3000:]}))


if __name__ == "__main__":
    main()
