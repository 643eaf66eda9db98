"""Says which operators the rotating part of the operator tests takes today."""

from __future__ import annotations

from tests.opinfo.choice import SEED, VARIABLE


def pytest_report_header() -> str:
    return f"operators: rotating part of seed {SEED}; {VARIABLE}={SEED} repeats it"
