"""The architecture as its document says it: imports go one way, files stay readable, the walked
program is what the compiler makes of it today."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "deuteron"
# A module imports from its own layer and from those before it.
LAYERS = [
    {"base"},
    {"ir"},
    {"graph"},
    {"capture"},
    {"lower"},
    {"schedule"},
    {"memory"},
    {"codegen"},
    {"runtime"},
    {"stages"},
    {"guarding"},
    {"pipeline"},
    {"backend"},
    {"tools", "__init__"},
]
LEVEL = {name: k for k, names in enumerate(LAYERS) for name in names}
MOST_LINES = 700


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def layer(path: Path) -> int:
    return LEVEL[path.relative_to(SOURCE).parts[0].removesuffix(".py")]


def imported(path: Path) -> set[str]:
    """Names of our packages that a module imports when it is loaded."""
    out = set()
    for node in ast.parse(path.read_text()).body:
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        out |= {n.split(".")[1] for n in names if n.startswith("deuteron.")}
    return out


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    wrong = {n for n in imported(path) if LEVEL[n] > layer(path)}
    assert not wrong, f"{path.name} imports later layers: {wrong}"


def test_files_stay_readable() -> None:
    long = {p.name: n for p in modules() if (n := len(p.read_text().splitlines())) > MOST_LINES}
    assert not long


def test_the_walked_program_is_todays() -> None:
    command = [sys.executable, "-m", "dev.architecture", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, "run `python -m dev.architecture`\n" + done.stderr[-2000:]


@pytest.mark.xdist_group("told")
def test_groups_of_tests_are_of_one_worker(request: pytest.FixtureRequest) -> None:
    """They are where pytest and its xdist fit one another (see `interpreting.reported`)."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@told")
