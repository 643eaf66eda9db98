"""What `pip install .` brings: the compiler and its users' tools, nothing of its developers; and an
import that costs little."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "deuteron"
NOT_INSTALLED = {"dev", "tests", "examples"}
SUFFIXES = {".py", ".h", ".typed", ".html", ".css", ".js", ".json"}
IMPORT_S = 0.1  # `import deuteron` after `import torch`
RUNS = 7


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names of the files in the wheel that is built of a copy of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    ours = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", *NOT_INSTALLED):
        shutil.copytree(ROOT / name, folder / "checkout" / name, ignore=ours)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "checkout")
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--no-index", "-w", str(folder)],
        cwd=folder / "checkout",
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built).namelist()


def test_only_the_package_is_installed(wheel: list[str]) -> None:
    tops = {n.split("/")[0] for n in wheel if ".dist-info/" not in n}
    assert tops == {"deuteron"}


def test_all_of_the_package_is_installed(wheel: list[str]) -> None:
    files = {p for p in SOURCE.rglob("*") if p.suffix in SUFFIXES}
    expected = {f"deuteron/{p.relative_to(SOURCE).as_posix()}" for p in files}
    assert "deuteron/py.typed" in expected and any(n.endswith(".h") for n in expected)
    assert {n for n in wheel if ".dist-info/" not in n} == expected


def test_what_an_installer_needs_to_know(wheel: list[str]) -> None:
    named = {n.split("/", 1)[1] for n in wheel if ".dist-info/" in n}
    assert {"METADATA", "entry_points.txt", "licenses/LICENSE"} <= named


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE))
)
def test_the_package_imports_nothing_that_is_not_installed(path: Path) -> None:
    """At its top or in a function, and no module by name (``python -m dev...``)."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            names = [a.value for a in node.args if isinstance(a, ast.Constant)]
        wrong = [n for n in names if n.split(".")[0] in NOT_INSTALLED]
        assert not wrong, f"line {node.lineno} imports {wrong[0]}"


def printed(program: str) -> str:
    """By a fresh process."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_importing_deuteron_is_cheap() -> None:
    """The least of several processes: others may slow each of them, and make none faster."""
    program = (
        "import time, torch; start = time.perf_counter(); import deuteron; "
        "print(time.perf_counter() - start)"
    )
    least = float("inf")
    for _ in range(RUNS):
        least = min(least, float(printed(program)))
        if least <= IMPORT_S:
            break
    assert least <= IMPORT_S


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("deuteron", {"torch", "rich", "typer", "triton", "deuteron.pipeline"}),
        ("deuteron.backend", {"rich", "typer", "deuteron.pipeline", "deuteron.tools"}),
    ],
)
def test_what_an_import_leaves_for_later(module: str, absent: set[str]) -> None:
    """The compiler comes with its first use, the command line's libraries with a command."""
    assert printed(f"import sys, {module}; print({absent} & set(sys.modules))") == "set()"
