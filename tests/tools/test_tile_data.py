"""What reports say of kernels with products: classes of tiles, and tilings that were weighed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import deuteron
from deuteron.base.device import named_gpu
from deuteron.schedule.tile import candidates
from deuteron.tools.report_file import load
from deuteron.tools.tile_data import tile_classes, tile_data
from tests.schedule.contraction_programs import PROGRAMS, causal, inputs
from tests.schedule.planning import planned

S = 70  # rows and columns of the scores
MASKS = {
    "plain": torch.ones(S, S, dtype=torch.bool),
    "causal": torch.ones(S, S).tril().bool(),
    "window": torch.ones(S, S).tril().triu(-15).bool(),
}


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (32, 16), (16, 64)])
@pytest.mark.parametrize("name", MASKS)
def test_classes_are_those_of_the_mask(name: str, rows: int, columns: int) -> None:
    with torch.no_grad():
        plan = planned(PROGRAMS[name], *inputs(name), run=False)
    kernel, spec = plan.contractions[0], named_gpu("H100")
    assert kernel.contraction is not None and spec is not None
    nest, _ = kernel.contraction
    found = candidates(nest, dict(kernel.reads) | dict(kernel.writes), spec)
    tiling = next(t for t, _ in found if any(d.mode == "loop" for d in t.dims))
    (loop,) = [d for d in tiling.dims if d.mode == "loop"]
    blocks = {"grid": rows, "loop": columns}
    dims = [
        replace(d, block=blocks.get(d.mode, d.block)) if d.block > 1 else d for d in tiling.dims
    ]
    tiling = replace(tiling, dims=tuple(dims))
    told = tile_classes(nest, tiling, tiling.dim_of(loop.axes[0]))
    tiles = [b for part in MASKS[name].split(rows) for b in part.split(columns, 1)]
    if name == "plain":
        assert told["rows"] is None and told["full"] == len(MASKS[name].split(columns))
        return
    assert told["rows"] == rows and told["block"] == columns
    assert told["full"] == sum(bool(t.all()) for t in tiles)
    assert told["skipped"] == sum(not t.any() for t in tiles)
    assert told["partial"] + told["full"] + told["skipped"] == len(tiles)


def test_the_best_of_all_tilings_was_taken() -> None:
    with torch.no_grad():
        plan = planned(PROGRAMS["linear_gelu"], *inputs("linear_gelu"), run=False)
    spec, (kernel,) = named_gpu("H100"), plan.contractions
    assert spec is not None
    data = tile_data(kernel, plan.schedules[0].layouts | plan.programs[0].layouts(), spec)
    assert data is not None and len(data["candidates"]) > 3
    times = [c["us"] for c in data["candidates"]]
    assert times == sorted(times) and [c["chosen"] for c in data["candidates"]].count(True) == 1
    assert data["candidates"][0]["chosen"] and data["candidates"][0]["tiling"] == data["tiling"]


def test_a_report_has_them(tmp_path: Path) -> None:
    torch._dynamo.reset()
    path = tmp_path / "r.html"
    heads = [torch.randn(1, 2, 256, 64) for _ in range(3)]
    with torch.no_grad():
        deuteron.report(causal, *heads, path=path)
    steps = [s for p in load(path)["parts"] for s in p["steps"]]
    (step,) = [s for s in steps if s["tiles"]]
    (loop,) = step["tiles"]["loops"]
    assert loop["skipped"] > 0 and loop["full"] > 0 and loop["partial"] > 0
    text = path.read_text()
    assert "Kernels with products" in text and f"{loop['skipped']} skipped" in text
