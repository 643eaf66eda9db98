"""`dev/coverage/common_ops.py` on a file of the form of torch's: right, wrong, skipped, a dead
process, tests that look into Inductor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "dev" / "coverage" / "common_ops.py"
STAND_IN = """
import os, unittest
import torch
from torch._inductor.compile_fx import compile_fx

class CommonTemplate:
    def test_swapped(self):
        assert compile_fx.__name__ == "swapped" and torch.__version__
    def test_right(self):
        f = lambda x: x.sin() + 1
        x = torch.randn(5)
        torch.testing.assert_close(torch._dynamo.optimize(compile_fx)(f)(x), f(x))
        torch.testing.assert_close(torch.compile(f)(x), f(x))
    def test_wrong(self):
        self.assertEqual(1, 2)
    def test_dies(self):
        os.abort()
    def test_skipped(self):
        self.skipTest("not here")
    def test_inside(self):
        run_and_get_code(None)

class CpuTests(unittest.TestCase):
    pass

for name, value in CommonTemplate.__dict__.items():
    if name.startswith("test_"):
        setattr(CpuTests, name + "_cpu", value)
"""


def test_tests_of_another_compiler_run_against_ours(tmp_path: Path) -> None:
    file, rows = tmp_path / "test_torchinductor.py", tmp_path / "rows.jsonl"
    file.write_text(STAND_IN)
    command = [sys.executable, str(SCRIPT), str(file), "--jobs", "1", "--rows", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stdout + done.stderr
    verdicts = {r["test"]: r["verdict"] for r in map(json.loads, rows.read_text().splitlines())}
    assert verdicts == {
        "test_dies_cpu": "died",
        "test_right_cpu": "right",
        "test_skipped_cpu": "skipped",
        "test_swapped_cpu": "right",
        "test_wrong_cpu": "wrong",
    }
    assert "1 look into Inductor" in done.stdout


def test_without_the_file_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "none.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "ship no tests" in done.stdout
