"""`deuteron bench FILE:FUNCTION`: what it measures, what it calls wrong, how it fails."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from typer.testing import CliRunner

from deuteron.tools import bench_command, bench_worker
from deuteron.tools.bench_command import verdict
from deuteron.tools.bench_errors import Judge, State
from deuteron.tools.bench_worker import MARK, Contender, Request, measured
from deuteron.tools.cli import app
from deuteron.tools.target import Target, UsageError, target_of

REQUEST = Request("f.py:f", (), "cpu", False, "default", ("deuteron",), 0.05)
FILE = """
import torch
from torch import nn

def double(x):
    return 2 * x

def square(x):
    return x @ x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(self.layer(x)).relu()

def inputs():
    return torch.randn(4, 8)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "f.py"
    path.write_text(FILE)
    return str(path)


# ------------------------------------------------------------------------------- command line
def test_usage_errors_have_exit_status_2(file: str) -> None:
    for words in (
        ["nothing"],
        ["absent.py:f"],
        [f"{file}:double", "--input", "float32(8)"],
        [f"{file}:double", "--vs", "eager,tvm"],
        [f"{file}:double", "--mode", "fast"],
        [f"{file}:double", "--device", "tpu"],
    ):
        assert CliRunner().invoke(app, ["bench", *words]).exit_code == 2, words


def test_a_function_is_timed_and_compared(file: str) -> None:
    words = ["bench", f"{file}:Net", "--device", "cpu", "--backward", "--vs", "eager"]
    done = CliRunner().invoke(app, [*words, "--seconds", "0.1", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert list(report["rows"]) == ["eager", "deuteron"] and report["right"]
    assert report["compared_with"] == "float64" and report["device"] == "cpu"
    for row in report["rows"].values():
        assert row["ms"] > 0 and row["rounds"] >= 5 and row["peak_mb"] > 0
        assert row["error"] < 1e-3  # the gradient of a bias before a norm cancels
    mine = report["rows"]["deuteron"]
    assert mine["cold_s"] > 0 and mine["breaks"] == 0 and mine["problems"] == []


def test_what_fails_without_a_compiler_is_a_usage_error(file: str) -> None:
    done = CliRunner().invoke(app, ["bench", f"{file}:square", "--device", "cpu"])
    text = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2 and "fails without a compiler" in text


# Plays the worker: its process dies when it times Deuteron (or eager).
ACTOR = f"""
import json, os, sys
asked = json.loads(sys.stdin.read())
def emit(**m): print({MARK!r} + json.dumps(m), flush=True)
if asked["task"] == "cold":
    emit(cold_s=1.0)
    sys.exit()
emit(stage="eager")
if asked["target"] == "eager dies": os.kill(os.getpid(), 9)
if "deuteron" in asked["compilers"]:
    emit(stage="deuteron")
    os.kill(os.getpid(), 9)
row = {{"ms": 1.0, "peak_mb": 0.0, "error": 0.0, "breaks": 0, "problems": []}}
about = {{"machine": "one", "torch": "2", "compared_with": "float64", "note": ""}}
emit(about=about, rows=dict.fromkeys(["eager", *asked["compilers"]], row))
"""


def test_a_process_that_dies_is_a_failure_of_its_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_command, "WORKER", [sys.executable, "-c", ACTOR])
    request = replace(REQUEST, compilers=("inductor", "deuteron"))
    assert bench_command.run_bench(request, True) == 1
    report = json.loads(capsys.readouterr().out)
    rows = report["rows"]
    assert rows["inductor"]["ms"] == 1.0 and "-9" in rows["deuteron"]["failure"]
    assert report["verdict"].startswith("Deuteron failed")
    assert bench_command.run_bench(request, False) == 1
    assert "failed" in capsys.readouterr().out
    with pytest.raises(UsageError, match="-9"):
        bench_command.run_bench(replace(request, target="eager dies"), True)


# ------------------------------------------------------------------------------------ verdict
@pytest.mark.parametrize(
    ("facts", "right", "words"),
    [
        ({}, True, "is 2.00 times as fast as eager and is as fast as inductor"),
        ({"ms": 4.0}, True, "takes 2.00 times as long as eager"),
        ({"failure": "BuildError: no"}, False, "Deuteron failed: BuildError: no."),
        ({"problems": ["result 0 is off by 1", "b"]}, False, "is wrong: result 0 is off by 1 (and"),
    ],
)
def test_the_verdict(facts: dict[str, Any], right: bool, words: str) -> None:
    row = {"ms": 1.0, "problems": []}
    rows = {"eager": {"ms": 2.0}, "inductor": {**row, "ms": 1.01}, "deuteron": {**row, **facts}}
    verdicts = verdict(rows, {"compared_with": "float64"})
    assert verdicts[0] is right and words in verdicts[1]
    rows["inductor"] = {"failure": "none"}
    assert not right or "inductor failed" in verdict(rows, {"compared_with": "float64"})[1]
    assert not right or "not compared" in verdict(rows, {"compared_with": ""})[1]


# ------------------------------------------------------------------------------------- errors
def judged(function: Any, *args: Any, backward: bool = False) -> tuple[Judge, State]:
    target = Target("f", function, args)
    state = State(target)
    eager = Contender("eager", target, replace(REQUEST, backward=backward))
    return Judge(eager.first(state), eager.values, state), state


def test_errors_are_of_float64_and_judged_by_eagers() -> None:
    x = torch.randn(64, 64)
    judge, _ = judged(lambda x: (x.float() @ x.to(torch.float32), x > 0), x)
    assert judge.reference == "float64" and judge.eager_error is not None
    assert 0 < judge.eager_error < 1e-6
    assert judge.of(judge.eager)[1] == []
    product, sign = judge.eager["result 0"], judge.eager["result 1"]
    bad = product.clone()
    bad[3, 5] += 1e-3
    error, problems = judge.of({"result 0": bad, "result 1": sign})
    assert error is not None and 1e-5 < error < 1e-3 and problems[0].startswith("result 0 is off")
    bad[3, 5] = float("nan")
    assert judge.of({"result 0": bad, "result 1": sign})[0] == float("inf")
    assert "float64[64, 64]" in judge.of({"result 0": product.double(), "result 1": sign})[1][0]
    assert judge.of({"result 0": product, "result 1": ~sign})[1][0].startswith("result 1 is off")
    assert judge.of({"result 0": product})[1] == ["result 1 is missing"]


def test_places_without_a_number_are_eagers() -> None:
    judge, _ = judged(torch.log, torch.tensor([-1.0, 0.0, 2.0]))
    assert judge.of(judge.eager)[1] == []
    assert judge.of({"result 0": torch.tensor([0.0, -torch.inf, 0.6931472])})[1]


def test_gradients_that_cancel_are_rounding() -> None:
    """That of a bias before a norm: nothing, but for rounding."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    judge, state = judged(model, torch.randn(32, 8), backward=True)
    assert {"gradient of 0.bias", "1.running_mean after the call"} <= set(judge.eager)
    near = {k: v.clone() for k, v in judge.eager.items()}
    near["gradient of 0.bias"] += 1e-6
    assert judge.of(near)[1] == []
    near["gradient of 1.weight"] *= 1.001
    assert len(judge.of(near)[1]) == 1
    # What eager's calls changed is put back.
    state.restore()
    buffers = {k: v for k, v in state.before.items() if "running" in k}
    assert buffers and all(torch.equal(v, state.tensors[k]) for k, v in buffers.items())


def test_what_is_written_is_compared() -> None:
    x = torch.zeros(4)
    judge, _ = judged(lambda x: x.add_(1).sum(), x)
    assert torch.equal(judge.eager["argument 0 after the call"], torch.ones(4))
    unwritten = {"result 0": torch.tensor(4.0), "argument 0 after the call": torch.zeros(4)}
    assert judge.of(unwritten)[1][0].startswith("argument 0 after the call is off")
    judge, _ = judged(torch.sum, torch.zeros(4))
    assert judge.of(unwritten)[1][0].startswith("argument 0 after the call: eager")


def test_random_numbers_are_not_compared() -> None:
    judge, _ = judged(lambda x: F.dropout(x, 0.5), torch.ones(64))
    assert judge.reference == "" and "random" in judge.note
    assert judge.of({})[0] is None


def test_eager_is_the_measure_where_float64_is_none() -> None:
    hidden = [torch.randn(8, 8)]  # not found, so it stays float32
    for function in (lambda x: x.view(torch.int32) >> 23, lambda x: x @ hidden[0]):
        judge, _ = judged(function, torch.rand(8, 8) + 1)
        assert judge.reference == "eager" and "float64" in judge.note
        assert judge.of(judge.eager)[1] == []
        assert judge.of({"result 0": judge.eager["result 0"] * 2})[1]


# ------------------------------------------------------------------------------------- worker
def test_a_wrong_compiler_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(gm: fx.GraphModule, inputs: Any) -> Any:
        return lambda *args: tuple(t * 1.01 for t in gm(*args))

    monkeypatch.setattr(bench_worker, "backend", lambda name: off)
    rows = measured(Target("f", torch.sin, (torch.ones(8),)), REQUEST)["rows"]
    assert rows["eager"]["error"] < 1e-6 and rows["deuteron"]["error"] == pytest.approx(0.01, 1e-3)
    assert "result 0" in rows["deuteron"]["problems"][0]


def test_a_compiler_that_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(gm: fx.GraphModule, inputs: Any) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(bench_worker, "backend", lambda name: none)
    rows = measured(Target("f", torch.sin, (torch.ones(8),)), REQUEST)["rows"]
    assert rows["eager"]["ms"] > 0 and "no kernel" in rows["deuteron"]["failure"]


# ------------------------------------------------------------------------------------ targets
def test_arguments_and_gradients(file: str) -> None:
    target = target_of(f"{file}:Net", (), "cpu", True)
    assert set(target.leaves) == {"layer.weight", "layer.bias", "norm.weight", "norm.bias"}
    assert len(target.args) == 1 and target.args[0].shape == (4, 8)
    target = target_of(f"{file}:double", ("float32[3]",), "cpu", True)
    assert list(target.leaves) == ["argument 0"]
    assert target_of(f"{file}:double", ("float32[3]",), "cpu", False).leaves == {}


def test_a_functions_own_modules_are_found() -> None:
    model, scale = nn.Linear(4, 4), torch.ones(4, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return model(x) * scale

    named = Target("f", f, (torch.randn(4),)).named_tensors()
    assert list(named) == ["argument 0", "model.weight", "model.bias", "scale"]


def test_no_backward_is_a_usage_error() -> None:
    target = Target("f", torch.sin, (torch.ones(8),))
    with pytest.raises(UsageError, match="no backward"):
        measured(target, replace(REQUEST, backward=True))
