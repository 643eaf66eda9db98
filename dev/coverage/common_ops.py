"""torch's own tests of Inductor's common operators, run against Deuteron.

    python -m dev.coverage.common_ops PATH/test/inductor/test_torchinductor.py [--device cuda]
        [--only REGEX] [--jobs 2] [--rows rows.jsonl]

PATH is a checkout of torch of the installed version: its wheels do not ship tests. What Inductor
compiles (`compile_fx`) is replaced by Deuteron's backend before the file is imported; the tests'
own comparisons with eager decide. Tests that look into Inductor (generated code, its counters, its
settings) say nothing of another compiler and are left out, counted. Tests run in processes, some at
a time: one that dies is a failure of the test that it was at. Exit status 1 where any failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import traceback
import unittest
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TEST_CLASSES = {"cpu": "CpuTests", "cuda": "GPUTests"}
# What a test's text has in it if it looks into Inductor.
INTERNAL_NAMES = re.compile(
    r"run_and_get|FileCheck|metrics\.|\bcode\b.*=|config\.patch|config\.|compile_fx_inner|"
    r"V\.graph|GraphLowering|inductor_fallback|has_torchvision|counters\[|expecttest|fresh_.*cache"
)
CHUNK, LIMIT_S = 25, 900.0
MESSAGE_PREFIX = "@common-ops "


def swapped(gm: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """In Inductor's stead."""
    from deuteron.backend import deuteron_backend

    return deuteron_backend(gm, example_inputs)


def load(path: Path, device: str) -> type[unittest.TestCase]:
    """The class of tests, whose graphs go to Deuteron."""
    import torch._inductor.compile_fx as inductor

    inductor.compile_fx = swapped
    sys.path[:0] = [str(path.parent), str(path.parent.parent)]
    spec = importlib.util.spec_from_file_location("test_torchinductor", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["test_torchinductor"] = module
    spec.loader.exec_module(module)
    tests = getattr(module, TEST_CLASSES[device], None)
    if tests is None:
        raise SystemExit(f"{path} has no {TEST_CLASSES[device]} here (is there such a device?)")
    return tests


def names(kind: type[unittest.TestCase], only: str) -> tuple[list[str], int]:
    """Tests to run, and how many look into Inductor."""
    tests, inside = [], 0
    for name in unittest.TestLoader().getTestCaseNames(kind):
        if not re.search(only, name):
            continue
        try:
            text = inspect.getsource(inspect.unwrap(getattr(kind, name)))
        except (OSError, TypeError):
            text = ""
        if INTERNAL_NAMES.search(text):
            inside += 1
        else:
            tests.append(name)
    return tests, inside


class Told(unittest.TestResult):
    """Prints a line of JSON before and after each test."""

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        tell(start=test._testMethodName)

    def addSuccess(self, test: unittest.TestCase) -> None:
        tell(test=test._testMethodName, verdict="right")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        tell(test=test._testMethodName, verdict="skipped", text=reason)

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        tell(test=test._testMethodName, verdict="right")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        tell(test=test._testMethodName, verdict="wrong", text=last(err))

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        name = getattr(test, "_testMethodName", str(test))
        tell(test=name, verdict="error", text=last(err))


def last(err: Any) -> str:
    return " ".join("".join(traceback.format_exception(*err)).split())[-600:]


def tell(**fields: Any) -> None:
    print(MESSAGE_PREFIX + json.dumps(fields), flush=True)


def child(path: Path, device: str) -> None:
    """Runs the tests whose names come on standard input."""
    kind = load(path, device)
    suite = unittest.TestSuite(kind(n) for n in sys.stdin.read().split())
    suite.run(Told())


def run_chunk(path: Path, device: str, left: list[str]) -> list[dict[str, Any]]:
    """Rows of some tests; a process that dies is followed by another for the rest."""
    rows: list[dict[str, Any]] = []
    while left:
        command = [
            sys.executable,
            "-m",
            "dev.coverage.common_ops",
            str(path),
            "--device",
            device,
            "--child",
        ]
        try:
            done = subprocess.run(
                command, input="\n".join(left), capture_output=True, text=True, timeout=LIMIT_S
            )
            text, why = done.stdout, f"the process ended with {done.returncode}"
        except subprocess.TimeoutExpired as e:
            text = (e.stdout or b"").decode(errors="replace")
            why = f"not done after {LIMIT_S:.0f} s"
        lines = [
            json.loads(x[len(MESSAGE_PREFIX) :])
            for x in text.splitlines()
            if x.startswith(MESSAGE_PREFIX)
        ]
        ended = [x for x in lines if "verdict" in x]
        rows += ended
        seen = {x["test"] for x in ended}
        started = [x["start"] for x in lines if "start" in x and x["start"] not in seen]
        at = started[-1] if started else next((n for n in left if n not in seen), "")
        if at:
            rows.append({"test": at, "verdict": "died", "text": why})
        left = [n for n in left if n not in seen and n != at]
    return rows


def main() -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", choices=tuple(TEST_CLASSES), default="cpu")
    parser.add_argument("--only", default="", help="regular expression of tests' names")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rows", type=Path, help="write a line of JSON per test here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not asked.file.is_file():
        print(
            f"{asked.file} is not there. torch's wheels ship no tests: give the path of "
            "test/inductor/test_torchinductor.py in a checkout of the installed version. "
            "Without one, `python -m dev coverage` runs torch's operator samples instead."
        )
        return 2
    if asked.child:
        child(asked.file, asked.device)
        return 0
    tests, inside = names(load(asked.file, asked.device), asked.only)
    chunks = [tests[k : k + CHUNK] for k in range(0, len(tests), CHUNK)]
    verdicts: Counter[str] = Counter()
    with ThreadPoolExecutor(asked.jobs) as pool:
        for rows in pool.map(lambda c: run_chunk(asked.file, asked.device, c), chunks):
            for row in rows:
                verdicts[row["verdict"]] += 1
                if row["verdict"] not in ("right", "skipped"):
                    print(f"{row['verdict']}: {row['test']}: {row['text'][-300:]}", flush=True)
                if asked.rows:
                    with asked.rows.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    text = ", ".join(f"{n} {v}" for v, n in verdicts.most_common())
    print(f"{sum(verdicts.values())} tests: {text}; {inside} look into Inductor, left out")
    return int(bool(verdicts["wrong"] + verdicts["error"] + verdicts["died"]))


if __name__ == "__main__":
    sys.exit(main())
