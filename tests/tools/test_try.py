"""`deuteron try`: one table, and the verdict that follows from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deuteron.tools.bench_worker import Request
from deuteron.tools.cli import app
from deuteron.tools.try_command import advice, best

REQUEST = Request("m.py:Model", (), "cpu", False, "default", ("inductor", "deuteron"), 1.0)


def rows(**ms: float) -> dict[str, Any]:
    return {n: {"ms": t, "cold_s": 3.0, "peak_mb": 10.0, "problems": []} for n, t in ms.items()}


def said(table: dict[str, Any]) -> str:
    return " ".join(advice(table, REQUEST))


def test_the_fastest_that_is_right_is_taken() -> None:
    table = rows(eager=3.0, inductor=1.5, deuteron=1.0)
    assert best(table) == "deuteron"
    assert "Take deuteron: 3.00 times as fast as eager, 1.50 times as inductor" in said(table)
    assert "won back after 1,500 calls" in said(table)
    table["deuteron"]["problems"] = ["result 0 is off by 1"]
    assert best(table) == "inductor" and "deuteron is wrong: result 0" in said(table)
    assert "deuteron report m.py:Model" in said(table)
    assert best(rows(eager=1.0, inductor=1.01, deuteron=0.99)) == "eager"
    assert "Stay with eager" in said(rows(eager=1.0, inductor=2.0, deuteron=2.0))


def test_failures_memory_and_breaks_are_told() -> None:
    table = rows(eager=2.0, deuteron=1.0)
    table["inductor"] = {"failure": "InductorError: no"}
    table["deuteron"] |= {"peak_mb": 5.0, "breaks": 2}
    text = said(table)
    assert "inductor failed: InductorError: no." in text and "holds 5.0 MB less" in text
    assert "at 2 places" in text


@pytest.mark.slow
def test_a_model_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def Model():\n    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))\n"
        "def inputs():\n    return torch.randn(128, 64)\n"
    )
    words = ["try", f"{tmp_path}/m.py:Model", "--device", "cpu", "--seconds", "0.5"]
    table = CliRunner().invoke(app, words)
    assert table.exit_code == 0, table.output
    for word in ("eager", "inductor", "deuteron", "cold", "peak MB", "Take ", "Stay with"):
        assert word in table.output or word in ("Take ", "Stay with")
    facts = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout.splitlines()[-1])
    assert facts["right"] and facts["take"] in ("eager", "inductor", "deuteron")
