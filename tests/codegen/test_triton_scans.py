"""Scans of few long rows in blocks: which rows, values under Triton's interpreter, and what the
code needs on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from deuteron.base import scans
from deuteron.base.options import Options
from deuteron.codegen.triton.generate import TritonKernel, generate
from deuteron.lower import nn
from deuteron.runtime.build_triton import build
from tests.codegen.cubins import resources
from tests.codegen.scan_programs import PROGRAMS, SIZES, planned
from tests.interpreting import reported
from tests.schedule.tools import scheduled, spec_of

SCRIPT = Path(__file__).with_name("scan_programs.py")


@pytest.mark.xdist_group("scans")
@pytest.mark.parametrize("name", [*PROGRAMS, SIZES])
def test_values(name: str) -> None:
    (measured,) = [entry for entry in reported(SCRIPT) if entry["program"] == name]
    assert "failure" not in measured, measured["failure"]
    assert measured["error"] <= 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_are_read_once(name: str) -> None:
    plan, (kernel, *_) = planned(name)  # what needs the results of all is behind it
    assert kernel.flag_count({}) and kernel.programs_per_row == 1
    for tensor, _ in plan.kernels[0].reads:
        assert kernel.source.count(f"tl.load({tensor}_ptr") <= 1


def test_what_only_results_need_is_read_before_others_are_waited_for() -> None:
    _, (kernel,) = planned("beside others")
    lines = kernel.source.splitlines()
    (late,) = [k for k, line in enumerate(lines) if "tl.load(arg1_1_ptr" in line]
    (wait,) = [k for k, line in enumerate(lines) if "libm.decoupled_look_back(" in line]
    assert late < wait


def on_gpu(patch: pytest.MonkeyPatch, f: Any, *args: torch.Tensor, **kw: Any) -> list[TritonKernel]:
    patch.setattr(nn, "accumulated_in", lambda ctx, dtype: "f32")
    plan = scheduled(f, *args, device="H200", check=False, **kw)
    return [generate(k, spec_of("H200")) for k in plan.kernels]


LONG_SCANS = {
    "f32": (lambda x: x.cumsum(-1), torch.float32),
    "bf16": (lambda x: x.cumsum(-1), torch.bfloat16),
    "f32, before and after": (lambda x: (x * 2).cumsum(-1).exp() + x, torch.float32),
    "products": (lambda x: x.cumprod(-1), torch.float32),
    "two": (lambda x: (x.cumsum(-1), (x * x).cumsum(-1)), torch.float32),
    "of several": (lambda x: (x * x.flip(0)).cumsum(-1) + x.flip(1), torch.float32),
}


@pytest.mark.parametrize("odd", [0, 7])
@pytest.mark.parametrize("name", LONG_SCANS)
def test_blocks_stay_in_registers(
    name: str, odd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In so few that a multiprocessor has as many warps in flight as scan soonest."""
    f, dtype = LONG_SCANS[name]
    (kernel,) = on_gpu(monkeypatch, f, torch.empty(64, (1 << 20) + odd, dtype=dtype))
    options = Options.make(options={"cache_dir": str(tmp_path)})
    for config in kernel.configs:
        registers, spilled = resources(build(kernel, config, 90, options).code, tmp_path)
        assert spilled == 0
        assert (24 if name in ("f32", "products") else 20) * 32 * registers <= 1 << 16


def test_large_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose elements 32 bits do not count."""
    x = torch.empty(1).expand(64, 1 << 26)
    (kernel,) = on_gpu(monkeypatch, lambda x: x.cumsum(-1), x)
    assert kernel.flag_count({}) and "tl.int64" in kernel.source
    options = Options.make(options={"cache_dir": str(tmp_path)})
    assert build(kernel, kernel.configs[0], 90, options).code


def test_sizes_that_differ_from_call_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel,) = on_gpu(monkeypatch, lambda x: x.cumsum(-1), torch.empty(64, 1 << 20), dynamic=True)
    rows, length = (what.name for kind, what in kernel.args if kind == "size")
    block = dict(kernel.configs[0].constexprs)["RBLOCK"]
    assert kernel.grid(kernel.configs[0], {rows: 3, length: 5 * block - 1}) == 15
    assert kernel.flag_count({rows: 3, length: 5 * block - 1}) == 16 + 15
    blocks, lanes = 128 * 128 + 128, 128
    flags = blocks + blocks // lanes + 1
    assert kernel.flag_count({rows: 2, length: blocks * block}) == 16 + 2 * flags


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x.cumsum(-1), x.sum(-1)),
        lambda x: x.cumsum(-1).softmax(-1),
        lambda x: x.cumsum(-1).cumprod(-1),
    ],
)
def test_reductions_and_scans_of_them_are_kernels_of_their_own(
    f: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn, "accumulated_in", lambda ctx, dtype: "f32")
    plan = scheduled(f, torch.empty(64, 1 << 20), device="H200", check=False)
    scanned = [k for k in plan.kernels if any("Scan" in repr(n) for n in k.nests)]
    assert len(plan.kernels) > 1
    assert all(generate(k, spec_of("H200")).flag_count({}) for k in scanned)
    assert plan.refused("scanned in blocks")


def test_which_rows() -> None:
    h200 = spec_of("H200")
    assert scans.in_blocks(1, 1 << 26, h200) and scans.in_blocks(256, 1 << 16, h200)
    assert not scans.in_blocks(257, 1 << 20, h200) and not scans.in_blocks(8, 65535, h200)
    assert not scans.in_blocks(8, 1 << 20, spec_of("cpu"))


@pytest.mark.parametrize(
    ("rows", "measured"), [(1, 155), (2, 148), (4, 138), (16, 137), (64, 138), (256, 138)]
)
def test_the_cost_is_what_was_measured(rows: int, measured: float) -> None:
    """H200, 2^26 elements of f32, us."""
    took = spec_of("H200").memory_us(8 << 26) / scans.bandwidth(rows)
    assert took == pytest.approx(measured, 0.06)
