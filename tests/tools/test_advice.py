"""The table of refusals has every class that the scheduler refuses with, and no others."""

from __future__ import annotations

import ast
from pathlib import Path

import deuteron.schedule
from deuteron.tools.advice import REFUSALS, advice


def refused() -> set[str]:
    found = set()
    for path in Path(deuteron.schedule.__file__).parent.glob("*.py"):
        for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("Refusal") and n.args:
                assert isinstance(n.args[0], ast.Constant), f"{path.name}:{n.lineno}"
                found.add(n.args[0].value)
    return found


def test_every_class_has_its_row() -> None:
    assert refused() == REFUSALS.keys()
    assert all(a.meaning and a.change for a in REFUSALS.values())
    assert advice("of a later version").meaning
