"""The script that tries the rows of docs/ecosystem.md on a GPU, on the CPU."""

from __future__ import annotations

import sys

import pytest

from dev import ROOT
from dev.gpu import ecosystem


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ecosystem", *words, "--device", "cpu"])
    return ecosystem.main()


def test_a_row_is_right() -> None:
    assert ecosystem.tried("notebook", "cpu").startswith("right (")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ecosystem.ROWS))
def test_every_row(name: str) -> None:
    assert ecosystem.tried(name, "cpu").startswith(("right (", "not installed: "))


def test_what_fails_and_what_is_missing_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(device: str) -> None:
        raise AssertionError("Tensor-likes are not close!\nMismatched elements: 3")

    monkeypatch.setitem(ecosystem.ROWS, "regions", (wrong, ()))
    monkeypatch.setitem(ecosystem.ROWS, "PEFT", (wrong, ("peft", "no_such_package")))
    assert run(monkeypatch, "regions", "PEFT") == 1
    out = capsys.readouterr().out
    assert "FAILED: AssertionError: Tensor-likes are not close!" in out
    assert "not installed: " in out and "no_such_package" in out
    assert run(monkeypatch, "PEFT") == 0
    assert run(monkeypatch, "PEFT", "--seconds", "-1") == 0
    assert "not run: the seconds are over" in capsys.readouterr().out


def test_every_tool_of_the_page_has_a_row() -> None:
    """The table's first column, in the script's order."""
    text = (ROOT / "docs" / "ecosystem.md").read_text()
    table = text.partition("|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    rows = [line.split("|")[1].strip() for line in table]
    assert len(rows) == 15
    told = " ".join(ecosystem.ROWS).lower()
    for tools in rows:
        for tool in tools.replace("transformers' ", "").replace(", the REPL", "").split(", "):
            word = tool.strip("`").lower().rstrip("s")
            assert word in told, tool
