"""The suite `real`: draws repeat, models become small and get inputs by rules, errors are found,
and a process that dies ends one model, not the run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dev.real import run as running
from dev.real.build import CAPS_OF_DEVICE, Built, build, with_statistics
from dev.real.draw import MODEL_HEADS, Candidate, absent, slots, transformers_order
from dev.real.measure import Checked, Step, as_expected, errors, settled, slower, wrong
from dev.real.report import summary
from dev.real.run import Plan, read, run_all
from dev.real.worker import MESSAGE_PREFIX, Request

transformers = pytest.importorskip("transformers")


def test_a_date_draws_the_same_models_and_another_date_others() -> None:
    one, again, other = (slots(d, 16, ("transformers",)) for d in ("2026-01-02", "2026-01-02", "2"))
    assert one == again and one != other
    assert len({(s.train, s.dtype, s.channels_last) for s in one}) == 8
    names = [c for s in one for c in s.candidates]
    assert len(set(names)) == len(names)
    assert len({c.model_type for c in names}) == len(names)


def test_every_registry_that_is_drawn_from_exists() -> None:
    modeling = sys.modules["transformers.models.auto.modeling_auto"]
    assert all(getattr(modeling, h, None) for h in MODEL_HEADS)
    assert len(transformers_order(random.Random(0))) > 300


@pytest.mark.parametrize(
    ("name", "kind"),
    [("LlamaForCausalLM", "llama"), ("ViTModel", "vit"), ("T5Model", "t5"), ("CLIPModel", "clip")],
)
def test_models_become_small_and_get_inputs(name: str, kind: str) -> None:
    built = build(Candidate("transformers", name, kind), "cpu", True)
    assert sum(p.numel() for p in built.module.parameters()) < CAPS_OF_DEVICE["cpu"].parameters
    step = Step("eager", settled(built, "bf16", True), True)
    values, _ = step.first()
    assert all(v.isfinite().all() for v in values.values())
    assert any(k.startswith("gradient") and v.any() for k, v in values.items())


def test_an_absent_package_is_empty_inside_and_absent_afterwards() -> None:
    with absent("no_such_package"):
        from no_such_package.some.module import Kind  # type: ignore[import-not-found]

        assert Kind.VALUE == "VALUE" and isinstance(Kind(), Kind)
    with pytest.raises(ImportError):
        __import__("no_such_package")


def test_errors_are_judged_by_eagers() -> None:
    torch.manual_seed(0)
    built = Built(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), {"input": torch.randn(4, 8)}, "")
    checked = Checked(built, True)
    assert checked.kind == "float64"
    good = Step("eager", built, True).first()[0]
    assert checked.judge(good)[1] == []
    bad = {k: v * (1.001 if k == "gradient 0.bias" else 1) for k, v in good.items()}
    assert [t.partition(":")[0] for t in checked.judge(bad)[1]] == ["gradient 0.bias"]
    # A gradient that cancels to nothing counts against the others, not against itself.
    exact = {"gradient a": torch.ones(4), "gradient b": torch.zeros(4)}
    got = {"gradient a": torch.ones(4), "gradient b": torch.full((4,), 1e-9)}
    assert not wrong(errors(exact, got), {"gradient a": 0.0, "gradient b": 0.0}, torch.float32)
    assert errors(exact, {"gradient a": torch.ones(4)})["gradient b"] == float("inf")


class Jump(nn.Module):
    """Where a sum lies at a jump, rounding decides between results far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((9, 32), 0.125))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ((input @ self.weight.t()).sign() + 1) * self.weight.sum(1)


def test_what_rounding_decides_is_no_measure() -> None:
    """Results far from eager's are right where a unit in the last place of the parameters brings
    eager there, and wrong elsewhere."""
    ones = torch.ones(4, 32)
    turns = ones.clone()
    turns[1:, ::2] = -1  # sums of 0
    for input, right in ((turns, True), (ones, False)):
        checked = Checked(Built(Jump(), {"input": input}, ""), False)
        values = Step("eager", checked.built, False).first()[0]
        assert checked.judge(values)[1] == []
        values["result 0"][1:] = 0  # below the jump
        assert (checked.judge(values)[1] == []) is right


def test_luck_is_no_measure() -> None:
    """Sums over everything have errors near 0 now and then; a gradient that cancels to nothing has
    none but rounding."""
    exact = {f"gradient {k}": torch.ones(1 if k < 8 else 99) for k in range(9)}
    exact["gradient nothing"] = torch.full((99,), 1e-12)
    eager = dict.fromkeys(exact, 1e-5) | {"gradient 0": 1e-9, "gradient 8": 1e-9}
    expected = as_expected(exact, eager)

    def judged(name: str, off: float) -> list[str]:
        return wrong(dict.fromkeys(exact, 0.0) | {name: off}, expected, torch.float32)

    assert not judged("gradient 0", 1e-5) and judged("gradient 0", 1e-4)
    assert judged("gradient 8", 1e-5)  # of many elements no luck
    assert not judged("gradient nothing", 0.9) and judged("gradient nothing", 1.1)


def test_batch_norms_have_seen_something() -> None:
    module = with_statistics(nn.Sequential(nn.BatchNorm2d(64), nn.LayerNorm(4)))
    norm = module[0]
    assert norm.running_mean.abs().min() > 0 and norm.running_var.min() >= 0.5
    assert norm.running_var.max() <= 1.5 and norm.running_var.std() > 0.1


def test_the_better_of_the_others_counts() -> None:
    row = {"eager_ms": 2.0, "inductor_ms": 1.0, "deuteron_ms": 1.2}
    assert slower(row, "cuda") == pytest.approx(1.2)
    least = {"eager_least_ms": 1.0, "inductor_least_ms": 1.0, "deuteron_least_ms": 1.0}
    assert slower({**row, **least}, "cpu") == pytest.approx(1.0)


# Plays the worker: slot 0 is right; 1 dies in eager, then the next candidate is right; 2 dies in
# Inductor, then goes on without; 3 dies in Deuteron; 4 dies when timed; 5 hangs in Deuteron.
ACTOR = f"""
import json, os, sys, time
asked = json.loads(sys.stdin.readline())
def emit(**m): print({MESSAGE_PREFIX!r} + json.dumps(m), flush=True)
def die(): os.kill(os.getpid(), 9)
k, first = asked["slot"], asked["first"]
emit(stage=[f"m{{first}}", "eager"])
if k == 1 and first == 0: die()
emit(stage=[f"m{{first}}", "inductor"])
if k == 2 and "inductor" not in asked["without"]: die()
emit(stage=[f"m{{first}}", "deuteron"])
if k == 3: die()
if k == 5: time.sleep(60)
emit(ready=True)
sys.stdin.readline()
emit(stage=[f"m{{first}}", "time"])
if k == 4: die()
row = {{"slot": k, "model": f"m{{first}}", "failures": [], "without": asked["without"]}}
emit(row=row)
"""


def test_a_process_that_dies_ends_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "WORKER_COMMAND", [sys.executable, "-c", ACTOR])
    monkeypatch.setattr(running, "STAGE_S", {"cpu": 3.0})
    request = Request("2026-01-02", 6, ("transformers",), 0, "cpu")
    plan = Plan(request, tuple(range(6)), 3, 60.0, tmp_path / "rows", tmp_path / "log")
    assert run_all(plan) == 0
    rows: list[dict[str, Any]] = read(plan.target)
    of = {r["slot"]: r for r in rows if "skip" not in r}
    assert sorted(of) == list(range(6))
    assert of[0]["failures"] == [] and of[1]["model"] == "m1"
    assert [r["skip"] for r in rows if "skip" in r] == ["m0"]
    assert of[2]["without"] == ["inductor"] and of[2]["model"] == "m0"
    assert of[3]["failures"] == [{"kind": "died", "cause": "deuteron: the process ended with -9"}]
    assert of[4]["failures"][0]["kind"] == "died when timed"
    assert "hung" in of[5]["failures"][0]["cause"]
    text = summary(rows)
    assert "6 models" in text and "2 died, 1 died when timed" in text
    # What is in the file is not run again; a line that was cut off is.
    lines = plan.target.read_text().splitlines()
    kept = [x for x in lines if json.loads(x).get("slot") != 0]
    plan.target.write_text("\n".join(kept) + '\n{"slot": 0, "mod')
    capsys.readouterr()
    plan.target.write_text("\n".join(kept) + "\n")
    assert run_all(plan) == 0
    assert capsys.readouterr().out.count(" ok") == 1


def test_a_tree_of_processes_stops_and_goes_on() -> None:
    count = "import sys, time\nfor k in range(10**6): print(k, flush=True); time.sleep(0.01)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {count!r}])"
    outer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert outer.stdout is not None
    outer.stdout.readline()  # the inner one runs
    stopped = running.stop_tree(outer.pid)
    try:
        assert len(stopped) == 2 and stopped[0] == outer.pid
        states = [
            Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()[0] for p in stopped
        ]
        assert states == ["T", "T"]
        os.set_blocking(outer.stdout.fileno(), False)
        while outer.stdout.read():
            pass
        time.sleep(0.1)
        assert not outer.stdout.read()
        for pid in reversed(stopped):
            running.send(pid, signal.SIGCONT)
        os.set_blocking(outer.stdout.fileno(), True)
        assert outer.stdout.readline()
    finally:
        for pid in stopped:
            running.send(pid, signal.SIGKILL)
        outer.wait()


def test_who_is_not_ready_in_time_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "WORKER_COMMAND", [sys.executable, "-c", ACTOR])
    request = Request("2026-01-02", 6, ("transformers",), 0, "cpu", seconds=0.5)
    plan = Plan(request, (0, 5), 2, 8.0, tmp_path / "rows", tmp_path / "log")
    assert run_all(plan) == 1
    assert [r["slot"] for r in read(plan.target)] == [0]
