"""Scans of few long rows in blocks, their Triton kernels run by Triton's interpreter.

``TRITON_INTERPRET=1 python scan_programs.py`` prints a JSON line per program: the largest error of
its outputs over their tolerance, or what went wrong. Rows are short, and so are blocks, groups and
parts of them.
"""

from __future__ import annotations

import json
import math
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deuteron.base import scans
from deuteron.codegen.triton import scanning
from deuteron.codegen.triton.cooperative import FIRST_FLAG
from deuteron.codegen.triton.generate import TritonKernel, generate
from deuteron.ir.index import evaluate
from deuteron.lower import nn
from deuteron.lower.core import TO_TORCH
from deuteron.runtime.build_triton import module
from dev.check.quick import by_halves, quicken
from tests.schedule import tools
from tests.schedule.tools import Scheduled, scheduled, spec_of

torch.manual_seed(0)  # the programs' inputs are the same in every run
TABLE = torch.randn(9)
SIZES = "sizes of a call"


def infinite(rows: int, length: int) -> torch.Tensor:
    x = torch.randn(rows, length)
    x[0, length // 2] = math.inf
    x[-1, 70::300] = math.nan
    return x


def factors(rows: int, length: int) -> torch.Tensor:
    return 1 + torch.randn(rows, length) / 50


def ends_summed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The sum is so short that the program that finishes last adds it up, where there are rows or
    not."""
    return (x.cumsum(-1)[:, -1:] * y).sum(dim=(0, 1), keepdim=True)


PROGRAMS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    f"sums of {rows} rows of {length}": (lambda x: x.cumsum(-1), (torch.randn(rows, length),))
    for rows, length in [(1, 2048), (2, 1024), (3, 1000), (4, 257), (5, 513), (5, 64), (1, 4099)]
} | {
    "bfloat16": (lambda x: x.cumsum(-1), (torch.rand(3, 1024).bfloat16(),)),
    "float16 of odd rows": (lambda x: x.cumsum(-1), (torch.rand(3, 777).half(),)),
    "bfloat16 to f32": (
        lambda x: x.cumsum(-1, dtype=torch.float32) * 2,
        (torch.rand(2, 600).bfloat16(),),
    ),
    "products": (lambda x: x.cumprod(-1), (factors(3, 700),)),
    "maxima": (lambda x: x.cummax(-1)[0], (infinite(3, 700),)),
    "minima": (lambda x: x.cummin(-1)[0], (infinite(2, 1030),)),
    "maxima of whole numbers": (
        lambda x: x.cummax(-1)[0],
        (torch.randint(-(2**31), 2**31 - 1, (3, 500), dtype=torch.int32),),
    ),
    "sums with infinities": (lambda x: x.cumsum(-1), (infinite(3, 700),)),
    "what is computed before and after": (
        lambda x: (x * 2).sin().cumsum(-1).div(30).exp(),
        (torch.randn(3, 900),),
    ),
    "what is needed again": (lambda x: x.cumsum(-1) * x + x.abs(), (torch.randn(4, 513),)),
    "beside others": (
        lambda x, y, w, b: (x * w).cumsum(-1) * b[:, None] + y,
        (torch.randn(3, 640), torch.randn(3, 640), torch.randn(640), torch.randn(3)),
    ),
    "of a table": (
        lambda x, table: table[(x.cumsum(-1).long() % 9).abs()],
        (torch.ones(2, 500), TABLE),
    ),
    "three at once": (
        lambda x, y: (x.cumsum(-1), (y + 1).cumprod(-1) - x, (x * x).cumsum(-1)),
        (torch.randn(3, 700), torch.randn(3, 700) / 60),
    ),
    "backwards": (lambda x: x.flip(-1).cumsum(-1).flip(-1), (torch.randn(3, 700),)),
    "rows of two dimensions": (lambda x: x.cumsum(-1) + 1, (torch.randn(2, 2, 515),)),
    "a sum behind": (ends_summed, (torch.rand(3, 500), torch.rand(3, 20))),
    "no rows, and a sum behind": (ends_summed, (torch.rand(0, 500), torch.rand(0, 20))),
    "every other row": (lambda x: x[::2].cumsum(-1), (torch.randn(5, 515),)),
}


@contextmanager
def short() -> Iterator[None]:
    """Rows and blocks are short, a group is of 4 blocks and a part of 16, and sums are of f32 on
    the CPU as on a GPU."""
    few = replace(spec_of("H200"), cores=5, bandwidth_gbps=5.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scans, "MIN_SCAN_LENGTH", 64)
        patch.setattr(scanning, "WARP", 2)
        patch.setattr(tools, "spec_of", lambda device: few)
        patch.setattr(nn, "accumulated_in", lambda ctx, dtype: "i64" if dtype == "i64" else "f32")
        yield


def planned(name: str) -> tuple[Scheduled, list[TritonKernel]]:
    f, args = PROGRAMS[name]
    with short():
        plan = scheduled(f, *args, device="H200", check=False)
        return plan, [generate(k, tools.spec_of("H200")) for k in plan.kernels]


def run(name: str, folder: Path) -> list[torch.Tensor]:
    """The program's outputs."""
    quicken()
    by_halves()
    plan, kernels = planned(name)
    args = PROGRAMS[name][1]
    flags = torch.zeros(1 << 14, dtype=torch.int64)
    memory = plan.given(args)
    for k, t in zip(plan.kernels, kernels, strict=True):
        for written, lay in k.writes:
            shape = [evaluate(i, {}) for i in lay.shape]
            strides = [evaluate(i, {}) for i in lay.strides]
            made = torch.empty_strided(shape, strides, dtype=TO_TORCH[lay.dtype])
            memory.setdefault(written, made)
        path = folder / f"{t.name}.py"
        path.write_text(t.source)
        given = [memory[str(what)] if kind == "tensor" else flags for kind, what in t.args]
        constants = t.constants(t.configs[0], False, True)
        kernel, grid = getattr(module(path), t.name), t.grid(t.configs[0], {})
        for _ in range(2):  # the next launch finds the last one's flags
            kernel[(grid,)](*given, **constants)
        if t.flag_count({}):
            tag, end = int(flags[1]), t.flag_count({})
            written = flags[FIRST_FLAG:end]
            assert int(flags[0]) == 0 and (tag > 0) == bool(len(written))
            assert (written >> 32 == tag).all(), "a flag was not written, or not now"
            assert not flags[end:].any()
    return [memory[o.tensor] for o in plan.program.outputs if o.tensor is not None]


def check(name: str, folder: Path) -> float:
    f, args = PROGRAMS[name]
    wide = [x.double() if x.is_floating_point() else x for x in args]
    want = f(*wide)
    narrow = f(*args)
    want, narrow = (list(w) if isinstance(w, tuple) else [w] for w in (want, narrow))
    got = run(name, folder)
    again = run(name, folder)
    worst = 0.0
    for g, same, w, n in zip(got, again, want, narrow, strict=True):
        assert g.dtype == n.dtype and g.shape == n.shape
        assert torch.equal(g.view(torch.uint8), same.view(torch.uint8)), "results differ"
        if not g.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(g, n) else math.inf)
            continue
        alike = torch.equal(g.isnan(), w.isnan()) and torch.equal(g.isinf(), w.isinf())
        g, w = (x.double().nan_to_num(0.0, 0.0, 0.0) for x in (g, w))
        units = 16 if n.itemsize == 4 else 1  # of a result in halves, its rounding only
        bound = units * torch.finfo(n.dtype).eps * (1 + float(w.abs().max()))
        worst = max(worst, float((g - w).abs().max()) / bound if alike else math.inf)
    return worst


def check_sizes() -> float:
    """As `check`, with sizes that are known when a program is called that others were compiled
    for."""
    from dev.check import interpret

    made: list[TritonKernel] = []

    def generated(*args: Any) -> TritonKernel:
        made.append(generate(*args))
        return made[-1]

    worst = 0.0
    with short(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpret, "generate", generated)
        f = torch.compile(lambda x: x.cumsum(-1), backend=interpret.interpreted, dynamic=True)
        for rows, length in [(3, 700), (2, 1024), (5, 65), (4, 3), (2, 1500)]:
            x = torch.rand(rows, length)
            want = x.double().cumsum(-1)
            bound = 16 * torch.finfo(x.dtype).eps * (1 + float(want.max()))
            worst = max(worst, float((f(x) - want).abs().max()) / bound)
    (kernel,) = made
    assert kernel.flag_count_source is not None
    return worst


def main() -> None:
    try:
        print(json.dumps({"program": SIZES, "error": check_sizes()}), flush=True)
    except Exception:  # noqa: BLE001 - as below
        print(json.dumps({"program": SIZES, "failure": traceback.format_exc()[-3000:]}))
    with tempfile.TemporaryDirectory() as folder:
        for k, name in enumerate(PROGRAMS):
            own = Path(folder) / str(k)
            own.mkdir()
            try:
                print(json.dumps({"program": name, "error": check(name, own)}), flush=True)
            except Exception:  # noqa: BLE001 - each program reports for itself
                print(json.dumps({"program": name, "failure": traceback.format_exc()[-3000:]}))


if __name__ == "__main__":
    main()
