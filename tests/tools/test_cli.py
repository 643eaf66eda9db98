"""The command line: usage errors name what to write; the demo judges results as it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import deuteron
from deuteron.base.device import demand
from deuteron.base.errors import DeuteronError, OptionError
from deuteron.tools.cli import app, main
from deuteron.tools.demo import verdict
from deuteron.tools.demo_programs import PROGRAMS, sentences
from deuteron.tools.target import Target, UsageError, load, target_of, tensor
from dev import __main__ as developers


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; sys.argv = ['deuteron', '--help']\n"
        "from deuteron.tools import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_usage_errors_have_exit_status_2(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def double(x):\n    return 2 * x\n")
    runner = CliRunner()
    for words in (
        ["demo", "--programs", "gtp"],
        ["demo", "--device", "tpu"],
        ["explain", "nothing"],
        ["explain", f"{tmp_path}/absent.py:f"],
        ["explain", f"{tmp_path}/f.py:absent"],
        ["explain", f"{tmp_path}/f.py:double"],  # no argument given
        ["explain", f"{tmp_path}/f.py:double", "--input", "float32(8)"],
    ):
        assert runner.invoke(app, words).exit_code == 2, words
    (tmp_path / "g.py").write_text("def boom(x):\n    raise ValueError('mine')\n")
    raising = runner.invoke(app, ["explain", f"{tmp_path}/g.py:boom", "--input", "float32[8]"])
    assert raising.exit_code == 2 and "fails without a compiler" in raising.output
    not_cold = ["bench", "seeds", "--repeats", "2"]
    assert runner.invoke(developers.app, not_cold).exit_code == 2


# A file's text, what is asked of it, what is said; no traceback, exit status 2.
MISTAKES = {
    "syntax": ("def f(x:\n", "f", "/m.py:1: SyntaxError: "),
    "import": ("import torch\nimport no_such_module\n", "f", "m.py:2: ModuleNotFoundError"),
    "runs": ("import sys\nsys.exit(3)\n", "f", "ends the program when it is imported"),
    "raises": ("def f(x):\n    raise ValueError('mine')\n", "f", "fails without a compiler"),
    "inputs": ("def f(x):\n    return x\ndef inputs():\n    return 1 / 0\n", "f",
               "m.py:4: inputs() fails: ZeroDivisionError"),
    "class": ("class F:\n    def __init__(self):\n        raise OSError('no weights')\n", "F",
              "m.py:3: F fails: OSError: no weights"),
    "absent": ("def f(x):\n    return x\n", "g", "has no function 'g'; it has f"),
    "arguments": ("def f(x, y):\n    return x\n", "f", "does not take 1 arguments"),
    "near": ("def model(x):\n    return x\n", "modle", "did you mean 'model'?"),
    "factory": ("from torch import nn\ndef f():\n    return nn.Linear(8, 8)\n", "f",
                "makes a Linear, and nothing says what that gets: give one --input each"),
    "module": ("from torch import nn\nclass F(nn.Module):\n    def forward(self, x):\n"
               "        return x\n", "F", "missing a required argument: 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("command", ["explain", "report"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_in_a_sentence(
    mistake: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is named by an absolute path, or (report) from its folder."""
    text, name, said = MISTAKES[mistake]
    (tmp_path / "m.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    words = [command, f"m.py:{name}" if command == "report" else f"{tmp_path}/m.py:{name}"]
    if mistake not in ("inputs", "class", "factory", "module"):
        words += ["--input", "float32[8]"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and said in done.output, done.output
    assert "Traceback" not in done.output and done.output.startswith("deuteron: ")


def test_a_builtin_function_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("from torch import relu\n")
    done = CliRunner().invoke(app, ["explain", f"{tmp_path}/m.py:relu", "--input", "float32[8]"])
    assert done.exit_code == 0 and "1 kernel" in done.output, done.output


def test_report_and_why(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "from torch import nn\n"
        "def Model():\n    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU())\n"
    )
    words = [f"{tmp_path}/m.py:Model", "--input", "float32[96,64]"]
    out = tmp_path / "out.html"
    given = ["report", *words, "--out", str(out), "--device", "cpu", "--option"]
    for wrong in ("fusion", "fusoin=0", "fusion=no way"):
        failed = CliRunner().invoke(app, [*given, wrong])
        assert isinstance(failed.exception, OptionError) and not out.exists()
    done = CliRunner().invoke(app, [*given, "fusion=0"])
    assert done.exit_code == 0 and "out.html" in done.output and "measured" in done.output
    assert out.is_file() and out.with_suffix(".json").is_file()
    assert all(p["merges"] == 0 for p in json.loads(out.with_suffix(".json").read_text())["parts"])
    why = CliRunner().invoke(app, ["explain", *words, "--why", "0", "1"])
    assert "share no kernel" in why.output and " us apart" in why.output
    wrong = CliRunner().invoke(app, ["explain", *words, "--why", "0", "7"])
    assert wrong.exit_code == 2 and "names no module" in wrong.output


def test_version_and_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deuteron", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"deuteron {deuteron.__version__}\n"


def test_what_is_missing_is_named_with_its_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs(name: str) -> Any:
        def command() -> None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        return command

    with pytest.raises(SystemExit) as ended:
        main(needs("transformers.models"))
    assert ended.value.code == 1
    assert "hint: pip install 'deuteron[demo]'" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError):
        main(needs("of_the_users"))


def test_errors_of_ours_are_found_in_what_dynamo_raises(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        try:
            raise DeuteronError("no device", hint="take another")
        except DeuteronError as inner:
            raise RuntimeError("backend='deuteron' raised") from inner

    with pytest.raises(SystemExit):
        main(command)
    assert capsys.readouterr().err == "deuteron: no device\n  hint: take another\n"


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    """Only the command gets the signal; its process goes too, and nothing is printed of it."""
    (tmp_path / "m.py").write_text(
        "import os, pathlib, time, torch\n"
        "def f(x):\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(300)\n    return x\n"
    )
    words = [sys.executable, "-m", "deuteron", "bench", f"{tmp_path}/m.py:f"]
    with subprocess.Popen(
        [*words, "--input", "float32[8]", "--device", "cpu"],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        file = tmp_path / "pid"
        until = time.monotonic() + 120
        while not (file.is_file() and file.read_text()) and time.monotonic() < until:
            time.sleep(0.1)
        worker = int(file.read_text())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in out + err, out + err
    time.sleep(0.5)
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_dtypes_beyond_the_usual(tmp_path: Path) -> None:
    runner, state = CliRunner(), tmp_path / "state.jsonl"
    words = ["coverage", "--ops", "^bitwise_not$", "--parts", "forward", "--state", str(state)]
    words += ["--jobs", "1"]
    assert runner.invoke(developers.app, [*words, "--dtypes", "int16,uint8"]).exit_code == 0
    rows = [json.loads(line) for line in state.read_text().splitlines()]
    assert {r["dtype"] for r in rows if r["right"]} == {"int16", "uint8"}
    assert runner.invoke(developers.app, [*words, "--dtypes", "int17"]).exit_code == 2


@pytest.mark.parametrize("built", [None, "12.8"], ids=["without CUDA", "no GPU"])
@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("dev", "fuzz"),
        ("dev", "coverage"),
        ("dev", "bench"),
        ("deuteron", "demo"),
        ("deuteron", "explain"),
        ("deuteron", "bench"),
    ],
)
def test_a_device_that_is_absent(
    program: str,
    command: str,
    built: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error at once, before any process is started: what, why, what to do."""
    (tmp_path / "f.py").write_text("def double(x):\n    return 2 * x\n")
    named = program == "deuteron" and command != "demo"
    words = [f"{tmp_path}/f.py:double", "--input", "float32[8]"] if named else []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.version, "hip", None)
    start = main if program == "deuteron" else developers.main
    monkeypatch.setattr(sys, "argv", [program, command, *words, "--device", "cuda"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == 1
    first, hint = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{program}: cuda")
    assert ("without CUDA" in first) == (built is None) and hint.startswith("  hint: ")


def test_devices_that_do_not_exist() -> None:
    for name in ("tpu", "cuda:x", "meta"):
        with pytest.raises(DeuteronError, match="no device that programs are compiled for"):
            demand(name)
    demand("cpu")


def test_load_and_inputs(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def double(x):\n    return 2 * x\n")
    function, _ = load(f"{tmp_path}/f.py:double")
    x = tensor("float32[2, 3]", "cpu")
    assert torch.equal(function(x), 2 * x)
    assert tensor("int64[5]", "cpu").dtype == torch.int64
    assert tensor("bfloat16[]", "cpu").shape == ()
    with pytest.raises(UsageError, match="it has double"):
        load(f"{tmp_path}/f.py:single")


NAMED = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, ids, mask=None, scale=1.0, *, labels=None, **more):
        return ids * scale + (0 if labels is None else labels) + (0 if mask is None else mask)


def one(batch):
    return batch["ids"] * 2


def inputs():
    return {RETURNED}

class Named(nn.Module):
    def forward(self, **batch):
        return batch["ids"]
"""


def test_inputs_by_name(tmp_path: Path) -> None:
    """As a model of transformers is called; a dictionary of other keys is one argument."""

    def target(name: str, returned: str) -> Target:
        (tmp_path / "n.py").write_text(NAMED.replace("RETURNED", returned))
        return target_of(f"{tmp_path}/n.py:{name}", [], "cpu", False)

    found = target("Model", "'ids': torch.ones(2), 'scale': 3.0")
    assert torch.equal(found.function(*found.args), torch.full((2,), 3.0))
    assert found.args[1:] == (None, 3.0)
    assert target("Model", "'ids': torch.ones(2)").args[0].shape == (2,)
    (batch,) = target("one", "'ids': torch.ones(2)").args
    assert torch.equal(batch["ids"], torch.ones(2))
    with pytest.raises(UsageError, match="labels, which can be given by keyword only"):
        target("Model", "'ids': torch.ones(2), 'labels': torch.ones(2)")
    with pytest.raises(UsageError, match="inputs\\(\\) returns scale: missing a required argument"):
        target("Model", "'scale': 3.0")
    with pytest.raises(UsageError, match="takes nothing by position \\(\\*\\*batch\\)"):
        target("Named", "'ids': torch.ones(2)")


def row(backend: str, **facts: Any) -> dict[str, Any]:
    return {"backend": backend, "error_f64": 1e-7, "losses": [2.0, 1.0], "ms": 1.0, **facts}


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({}, ""),
        ({"error_f64": 1e-2}, "error"),
        ({"error_f64": float("nan")}, "error"),
        ({"losses": [2.0, 1.5]}, "losses"),
        ({"cosine": 0.99}, "cosine"),
        ({"error": "DeuteronError: no"}, "failed"),
    ],
)
def test_demo_judges(facts: dict[str, Any], word: str) -> None:
    rows = [row("eager"), row("deuteron", **facts)]
    problems = verdict({"name": "gpt", "train": True, "rows": rows}, "deuteron")
    assert (word in problems[0]) if word else not problems


def test_demo_programs_run_in_eager() -> None:
    """Each program's first batch: a finite loss near that of guessing, or unit embeddings."""
    chance = {"gpt": 256, "residual": 10}
    for name, make in PROGRAMS.items():
        program = make("cpu")
        with torch.no_grad():
            out = program.module(*program.batches[0])
        if program.train:
            assert abs(out.item() - torch.tensor(chance[name]).log().item()) < 0.5
        else:
            torch.testing.assert_close(out.norm(dim=1), torch.ones(len(out)))
            assert len({tuple(b[0].shape) for b in program.batches}) > 3
    assert len(set(sentences(64))) == 64


def test_a_report_keeps_what_it_says_of_other_machines() -> None:
    from dev.bench.document import markdown

    def run(device: str, name: str, torch: str = "2.13") -> dict[str, Any]:
        machine = {"device": device, "name": name, "torch": torch, "cores": 2, "threads": 2}
        return {"machine": machine | {"date": "today"}, "command": f"bench {name} {torch}"}

    both = markdown([run("cuda", "A"), run("cpu", "B")])
    assert markdown([], both) == markdown([run("cuda", "A"), run("cpu", "B")], both) == both
    again = markdown([run("cpu", "B", "2.14")], both)
    assert "bench A 2.13" in again and "bench B 2.14" in again and "bench B 2.13" not in again
    assert again.index("## A (GPU)") < again.index("## B (CPU)")
    twice = markdown([run("cpu", "B"), run("cpu", "B", "2.14")])
    assert "bench B 2.13" in twice and "bench B 2.14" in twice


def test_a_report_keeps_what_it_says_of_other_suites() -> None:
    from dev.bench.document import markdown

    def run(suite: str, *times: float) -> dict[str, Any]:
        machine = {"device": "cpu", "name": "A", "torch": "2", "cores": 2, "threads": 2}
        rows = [
            {"suite": suite, "case": f"{suite} case {k}", "bytes": 1, "copy_gbps": 1.0, "flops": 0}
            | {"results": {"deuteron": {"us": us, "median_us": us}}}
            for k, us in enumerate(times)
        ]
        command = f"python -m dev bench {suite} --device cpu --seconds {len(times)}"
        return {"machine": machine | {"date": "today"}, "command": command, "rows": rows}

    first = markdown([run("norms", 300.0), run("losses", 400.0)])
    again = markdown([run("norms", 500.0)], first)
    for text in ("bench norms", "bench losses", "| 500 |", "| 400 |", "### norms", "### losses"):
        assert again.count(text) == 1, text
    assert "| 300 |" not in again
    assert markdown([run("norms", 500.0)], again) == again
    # Of a suite that was measured in part, the other cases stay.
    first = markdown([run("norms", 300.0, 400.0)])
    again = markdown([run("norms", 500.0)], first)
    for text in ("--seconds 1 ", "--seconds 2 ", "| 500 |", "| 400 |", "Measured before"):
        assert again.count(text) == 1, text
    assert "| 300 |" not in again and again.count("### norms") == 2
    assert markdown([run("norms", 500.0)], again) == again
    assert "Measured before" not in markdown([run("norms", 500.0, 600.0)], again)


def test_cold_calls_take_turns_and_the_median_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dev.bench import run
    from dev.bench.suites import select_cases

    asked: list[str] = []

    def alone(request: Any, until: float, log: Path) -> dict[str, Any]:
        (name,) = request.contenders
        asked.append(name)
        if len(asked) == 1:
            return {"results": {}, "failure": "no time"}
        return {"results": {name: {"seconds": float(len(asked))}}}

    monkeypatch.setattr(run, "run_alone", alone)
    (case,) = select_cases(("seeds",), "cpu", (), "sin chain", False)
    files = (tmp_path / "bench.log", tmp_path / "rows.json")
    plan = run.Plan((case,), ("inductor", "deuteron"), "cpu", 0, 0.1, 60.0, 3, *files)
    document = run.run_bench(plan, "cold", "python -m dev bench --cold")
    inductor, deuteron = ["inductor"] * 2, ["deuteron"] * 2
    assert asked == [*inductor, *deuteron, *deuteron, *inductor, *inductor, *deuteron]
    ((theirs, ours),) = [tuple(row["results"].values()) for row in document["cold"]]
    assert (theirs["cold_s"], theirs["warm_s"]) == (8.0, 8.0) and theirs["failure"] == "no time"
    assert ours == {"all_s": [[3.0, 4.0], [5.0, 6.0], [11.0, 12.0]], "cold_s": 5.0, "warm_s": 6.0}


def test_a_bench_that_is_stopped_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dev.bench import run

    def stopped(request: Any, until: float, log: Path, report: Any) -> list[str]:
        report({"suite": "norms", "case": "one", "failure": "none", "results": {}})
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "time_all", stopped)
    target = tmp_path / "folder" / "rows.json"
    plan = run.Plan((), ("eager",), "cpu", 0, 0.1, 60.0, 1, tmp_path / "bench.log", target)
    with pytest.raises(KeyboardInterrupt):
        run.run_bench(plan, "time", "python -m dev bench norms")
    document = json.loads(target.read_text())
    assert document["command"] == "python -m dev bench norms"
    assert [row["case"] for row in document["rows"]] == ["one"]
