"""Processes in which Triton's interpreter runs kernels: it is chosen before Triton is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[1])


def interpret(*command: str | Path, timeout: float = 800) -> str:
    """What Python prints that is given these arguments."""
    path = os.pathsep.join([ROOT, *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, command)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def reported(script: Path, *arguments: str) -> list[dict[str, Any]]:
    """The lines of JSON that a script prints. The tests of one report are of one ``xdist_group``,
    so that only one worker runs the script, and it does so once, also where the script fails."""
    printed = _printed(script, *arguments)
    if isinstance(printed, Exception):
        raise printed
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@lru_cache(maxsize=4)
def _printed(script: Path, *arguments: str) -> str | Exception:
    try:
        return interpret(script, *arguments)
    except (AssertionError, subprocess.TimeoutExpired) as e:
        return e
