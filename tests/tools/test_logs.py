"""In the tools that people have: names in torch.profiler, TORCH_LOGS, TORCH_TRACE."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from deuteron.base.observing import observed_by
from deuteron.tools.observe import Observations
from deuteron.tools.report_data import report_data

PROGRAM = """
import torch
model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), torch.nn.GELU())
f = torch.compile(model, backend="deuteron")
f(torch.randn(64, 16))
f(torch.randn(32, 16))
"""


def output(**variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **variables}, capture_output=True,
        text=True, timeout=300, check=True,
    )  # fmt: skip
    return done.stderr


def test_torch_logs() -> None:
    said = output(TORCH_LOGS="output_code,fusion,perf_hints,recompiles")
    assert "[__output_code]" in said and "def call(args):" in said
    assert "[__fusion]" in said and "fused: " in said
    assert "[__recompiles]" in said and "expected 64, actual 32" in said


def test_torch_trace_and_one_log_alone(tmp_path: Path) -> None:
    said = output(TORCH_TRACE=str(tmp_path), TORCH_LOGS="fusion")
    assert "[__fusion]" in said and "__output_code" not in said
    (file,) = tmp_path.glob("*.log")
    text = file.read_text()
    heads = [
        line[line.index("{") :]
        for line in text.splitlines()
        if line.startswith("V") and "{" in line
    ]
    found = [json.loads(h) for h in heads]
    codes = [e["inductor_output_code"] for e in found if "inductor_output_code" in e]
    assert codes and all(c["filename"].startswith("deuteron_") for c in codes)
    named = {e["artifact"]["name"] for e in found if "artifact" in e}
    assert any(n.endswith("_schedule") for n in named)
    assert any(n.endswith("_decisions") for n in named)
    assert "def call(args):" in text


def test_steps_have_the_reports_names_in_the_profiler() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(x.softmax(-1) @ w)

    x, w = torch.randn(128, 256, requires_grad=True), torch.randn(256, 256)
    seen = Observations()
    with observed_by(seen):
        compiled = torch.compile(f, backend="deuteron")
        compiled(x, w).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        y = compiled(x, w)
        y.sum().backward()
    torch.testing.assert_close(y, f(x, w))
    names = {e.key for e in trace.key_averages()}
    data = report_data(seen, [], "f", [], [])
    for part in data["parts"]:
        for s in part["steps"]:
            plain = s["name"].removeprefix("cpp_")
            assert f"{s['id']} {plain}" in names, (s["id"], names)
