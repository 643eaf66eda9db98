"""README's table of results is what docs/results.json says."""

from __future__ import annotations

import subprocess
import sys

from dev import ROOT
from dev.results import rows


def test_the_table_is_of_the_data() -> None:
    done = subprocess.run([sys.executable, "-m", "dev.results", "--check"], cwd=ROOT)
    assert done.returncode == 0, "run `python -m dev.results`"
    assert len(rows()) <= 5 and all(0 < r["time"] < 10 for r in rows())
