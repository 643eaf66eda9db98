"""`python -m dev coverage --from`: one table from the results of several machines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from dev.coverage.run import Lost, Worker, row_of, show
from dev.coverage.table import by_op, provenance
from dev.coverage.worker import EAGER_PREFIX, Job, source_digest


def row(op: str, device: str, **more: Any) -> dict[str, Any]:
    job = Job(op, "float32", "forward", device)
    plain = {"key": job.key, "op": op, "dtype": job.dtype, "part": job.part, "right": 3}
    plain |= {"wrong": [], "errors": [], "torch": "2.x", "machine": f"a {device}", "source": "s"}
    return plain | more


def test_table_of_two_machines(tmp_path: Path) -> None:
    cpu, gpu, out = tmp_path / "cpu.jsonl", tmp_path / "gpu.jsonl", tmp_path / "table.md"
    cpu.write_text("\n".join(map(json.dumps, [row("add", "cpu"), row("sum", "cpu", kernels=2)])))
    gpu.write_text(
        json.dumps(row("add", "cuda", wrong=["sample 1: out0: 2 | 3"])) + '\n{"key": "cu'
    )
    assert show([cpu, gpu], out, "the command") == 1
    text = out.read_text()
    assert "## CPU\n\nMade by `the command`.\na cpu, torch 2.x; 2 of " in text
    assert "## GPU\n\nMade by `the command`.\na cuda, torch 2.x; 1 of " in text
    assert "| sum | right | generated |" in text and "| add | wrong |" in text
    assert "- add: float32 forward: sample 1: out0: 2 \\| 3" in text
    assert show([cpu], None, "") == 0
    again = tmp_path / "again.jsonl"
    again.write_text(json.dumps(row("add", "cuda")))
    assert show([gpu, again], None, "") == 0, "a job's last result counts"
    assert show([again, gpu], None, "") == 1
    assert show([again], out, "another") == 0
    both = out.read_text()
    assert both[: both.index("## GPU")] == text[: text.index("## GPU")], "of the CPU nothing is new"
    assert "- add:" not in both and both.count("## GPU\n\nMade by `another`.\n") == 1


def test_states_of_the_source_are_counted() -> None:
    rows = [row("add", "cpu"), row("sum", "cpu", source="t")]
    assert "2 states of the source" in provenance(rows, 2)
    assert "one state of the source" in provenance(rows[:1], 2)
    assert [o.verdict() for o in by_op(rows)] == ["right", "right"]
    assert len(source_digest()) == 12


class Dying(Worker):
    """Ends at two samples while eager runs them, and always at what is compiled of `mul`."""

    def run(self, job: Job, limit: float) -> dict[str, Any]:
        for name in ("b", "c"):
            if name not in job.without:
                raise Lost("the process died", EAGER_PREFIX + name)
        if job.op == "mul":
            raise Lost("the process died", "compiled")
        return {"without": list(job.without)}


def test_samples_that_end_the_process() -> None:
    """Those at which eager does are left out; when what is compiled does, it is an error."""
    assert row_of(Dying(), Job("add", "float32", "forward"), 1.0) == {"without": ["b", "c"]}
    row = row_of(Dying(), Job("mul", "float32", "forward"), 1.0)
    assert row["errors"] == ["the process died"] and row["right"] == 0


def test_tests_of_another_compiler_that_are_not_there(tmp_path: Path) -> None:
    """The script says what it needs and where that is from."""
    script = Path(__file__).parents[2] / "dev" / "coverage" / "common_ops.py"
    command = [sys.executable, str(script), str(tmp_path / "absent.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not done.stderr
    assert "absent.py is not there" in done.stdout and "test_torchinductor.py" in done.stdout
