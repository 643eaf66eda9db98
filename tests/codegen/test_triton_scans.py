"""Scans of few long rows by teams: which rows, values under Triton's interpreter, and what the code
needs on a GPU."""

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
from tests.codegen.scan_programs import PROGRAMS, planned
from tests.interpreting import reported
from tests.schedule.tools import scheduled, spec_of

SCRIPT = Path(__file__).with_name("scan_programs.py")


@pytest.mark.xdist_group("scans")
@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name: str) -> None:
    (found,) = [entry for entry in reported(SCRIPT) if entry["program"] == name]
    assert "failure" not in found, found["failure"]
    assert found["error"] <= 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_are_read_once_by_a_team(name: str) -> None:
    """A block and the next one are read by the same text, once before the loop and once in it."""
    found, (kernel,) = planned(name)
    assert kernel.team > 1 and kernel.cluster
    assert "libm.collect(" in kernel.source
    for tensor, _ in found.kernels[0].reads:
        assert kernel.source.count(f"tl.load({tensor}_ptr") <= 2


def test_what_only_results_need_is_read_before_the_team_is_waited_for() -> None:
    _, (kernel,) = planned("beside others")
    lines = kernel.source.splitlines()
    (late,) = [k for k, line in enumerate(lines) if "tl.load(arg1_1_ptr" in line]
    (wait,) = [k for k, line in enumerate(lines) if "libm.collect(" in line]
    assert late < wait


def on_gpu(patch: pytest.MonkeyPatch, f: Any, *args: torch.Tensor) -> list[TritonKernel]:
    patch.setattr(nn, "accumulated_in", lambda ctx, dtype: "f32")
    found = scheduled(f, *args, device="H200", check=False)
    return [generate(k, spec_of("H200"), Options()) for k in found.kernels]


LONG = {
    "f32": (lambda x: x.cumsum(-1), torch.float32),
    "bf16": (lambda x: x.cumsum(-1), torch.bfloat16),
    "f32, before and after": (lambda x: (x * 2).cumsum(-1).exp() + x, torch.float32),
    "products": (lambda x: x.cumprod(-1), torch.float32),
    "two": (lambda x: (x.cumsum(-1), (x * x).cumsum(-1)), torch.float32),
    "of several": (lambda x: (x * x.flip(0)).cumsum(-1) + x.flip(1), torch.float32),
}


@pytest.mark.parametrize("odd", [0, 7])
@pytest.mark.parametrize("name", LONG)
def test_blocks_stay_in_registers(
    name: str, odd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many programs have to run at once as the cost counts on."""
    f, dtype = LONG[name]
    (kernel,) = on_gpu(monkeypatch, f, torch.empty(64, (1 << 20) + odd, dtype=dtype))
    light = name in ("f32", "products")
    assert kernel.team == (10 if light else 8) and kernel.cluster
    options = Options.make(options={"cache_dir": str(tmp_path)})
    for config in kernel.configs:
        binary = build(kernel, config, 90, options)
        registers, spilled = resources(binary.code, tmp_path)
        assert spilled == 0
        room = scans.LIGHT_ROOM if light else scans.ROOM
        assert room * 32 * binary.num_warps * registers <= 1 << 16


def test_large_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose elements 32 bits do not count."""
    x = torch.empty(1).expand(64, 1 << 26)
    (kernel,) = on_gpu(monkeypatch, lambda x: x.cumsum(-1), x)
    assert kernel.team == 10 and "tl.int64" in kernel.source
    options = Options.make(options={"cache_dir": str(tmp_path)})
    assert build(kernel, kernel.configs[0], 90, options).code


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x.cumsum(-1), x.sum(-1)),
        lambda x: x.cumsum(-1).softmax(-1),
        lambda x: x.cumsum(-1).cumprod(-1),
    ],
)
def test_folds_and_scans_of_them_are_kernels_of_their_own(
    f: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn, "accumulated_in", lambda ctx, dtype: "f32")
    found = scheduled(f, torch.empty(64, 1 << 20), device="H200", check=False)
    scanned = [k for k in found.kernels if any("Prefix" in repr(n) for n in k.nests)]
    assert len(found.kernels) > 1
    assert all(generate(k, spec_of("H200"), Options()).team in (8, 10) for k in scanned)
    assert found.refused("scanned by teams")


def test_how_many_programs_walk_along_a_row() -> None:
    h200, a100 = spec_of("H200"), spec_of("A100")
    for rows, team, light in ((1, 16, 16), (34, 15, 16), (64, 8, 10), (100, 5, 6), (300, 0, 0)):
        assert scans.scan_team(rows, 1 << 20, h200) == team
        assert scans.scan_team(rows, 1 << 20, h200, light=True) == light
        assert scans.scan_team(rows, 1 << 15, h200) == scans.scan_team(rows, 1 << 20, a100) == 0


@pytest.mark.parametrize(
    ("rows", "programs", "measured"),
    [(64, 512, 151.6), (32, 256, 194.0), (22, 176, 248.0), (16, 128, 310.0)],
)
def test_the_cost_is_what_was_measured(rows: int, programs: int, measured: float) -> None:
    """H200, 2^26 elements of f32; three kernels take 194 us."""
    spec = spec_of("H200")
    moved = 8 << 26
    assert spec.memory_us(moved) / scans.bandwidth(programs, spec) == pytest.approx(measured, 0.06)
    assert scans.in_parts_us(moved, spec) == pytest.approx(194, 0.04)
