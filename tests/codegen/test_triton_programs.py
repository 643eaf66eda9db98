"""What the scheduler makes of whole programs, as Triton kernels: values under the interpreter, and
ahead-of-time builds for two generations of GPUs, on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from deuteron.base.options import Options
from deuteron.runtime.build_triton import build
from tests.codegen.triton_programs import EVERY, GROUPS, kernels, planned

SCRIPT = Path(__file__).with_name("triton_programs.py")


@lru_cache(maxsize=1)
def interpreted() -> dict[str, dict[str, Any]]:
    """All programs, in one process."""
    root = str(SCRIPT.parents[2])
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([root, *sys.path]),
    }
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {entry["program"]: entry for entry in lines}


@pytest.mark.parametrize("name", EVERY)
def test_values(name: str) -> None:
    found = interpreted()[name]
    assert "failure" not in found, found["failure"]
    assert found["error"] <= 1


@pytest.mark.parametrize("name", [n for n in GROUPS if n.startswith("gradients")])
def test_groups_are_read_once(name: str) -> None:
    """Rows and the sums of their groups are one nest, of which no worker has two groups."""
    nests = [n for k in planned(name).kernels for n in k.nests]
    (nest,) = [n for n in nests if n.chunk is not None]
    axis, count = nest.chunk
    assert axis.extent.value == count
    assert any(getattr(s, "partial", False) for s in nest.stmts)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", EVERY)
def test_builds_ahead_of_time(name: str, capability: int, tmp_path: Path) -> None:
    options = Options.make(options={"cache_dir": str(tmp_path)})
    for kernel in kernels(planned(name), name, "A100" if capability < 90 else "H200"):
        binary = build(kernel, kernel.configs[0], capability, options)
        assert binary.code and binary.shared <= 163 << 10
