"""The documentation is true: every snippet of the users' pages runs, the site builds.

A page's ```python blocks run one after the other in one process; one with a title is a file that is
written beside; lines of ```sh blocks run, too, those of `deuteron` in the blocks' process (how it
starts is `tests/tools/test_cli.py`'s). ```text is not run. A block that imports a package of the
extra `ecosystem` is left out where there is none.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from deuteron.base.options import Options
from dev import ROOT

DOCS = ROOT / "docs"
PAGES = [p for p in sorted(DOCS.glob("*.md")) if "```python" in p.read_text() and p.stem in (
    "index", "tutorial", "guides", "ecosystem", "attention"
)]  # fmt: skip
COMMANDS = {"torchrun": ["-m", "torch.distributed.run"], "python": []}
# Commands as `deuteron` runs them, then the page's blocks.
DRIVER = """
import json, runpy, sys
import torch
from deuteron.tools.cli import app
for words in json.loads(sys.argv[1]):
    torch._dynamo.reset()
    app(words, standalone_mode=False)
torch._dynamo.reset()
runpy.run_path("page.py", run_name="__main__")
"""
NEEDS = re.compile(r"^(?:from|import) (accelerate|peft|pytorch_lightning|torchao)", re.MULTILINE)
BLOCK = re.compile(r'^```(python|sh)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_snippet_runs(page: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    program: list[str] = []
    ours: list[list[str]] = []
    others: list[list[str]] = []
    for language, title, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if title:
            (tmp_path / title).write_text(text)
        elif language == "python":
            program += [text] if all(map(find_spec, NEEDS.findall(text))) else []
        else:
            lines = (shlex.split(line.partition("  #")[0]) for line in text.splitlines())
            for first, *rest in lines:
                if first == "deuteron":
                    ours.append(rest)
                else:
                    others.append([*COMMANDS[first], *rest])

    def run(*words: str) -> None:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"

    for words in others:
        run(*words)
    (tmp_path / "page.py").write_text("\n".join(program))
    run("-c", DRIVER, json.dumps(ours))


def test_the_derivation_of_attention_is_todays() -> None:
    pytest.importorskip("triton", reason="the page shows a kernel's text in Triton")
    command = [sys.executable, "-m", "dev.attention", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, "run `python -m dev.attention`\n" + done.stderr[-2000:]


def test_pages_that_are_made() -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (the extra `docs`)")
    from dev.site import pages

    made = pages()
    assert all(f"`{name}`" in made["options.md"] for name in Options.describe())
    for name in ("deuteron.explain", "deuteron.report", "deuteron.compile", "`why`", "`headline`"):
        assert name in made["reference.md"]
    for name in ("OptionError", "BuildError", "ReportError", "CalibrationError", "IndexOutOfRange"):
        assert f"`{name}`" in made["errors.md"]
    assert not re.search(r"\| `\w+` \|  \|", made["errors.md"])


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (the extra `docs`)")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-4000:]
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', text)
        assert not fetched, f"{page.name} fetches {fetched[0]}"
