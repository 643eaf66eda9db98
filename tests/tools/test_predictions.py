"""The report of predicted against measured times."""

from __future__ import annotations

from pathlib import Path

import pytest

from dev.bench import predictions
from dev.bench.predictions import Row, main, report, share_off


def row(predicted: float, measured: float) -> Row:
    return Row("program", "kernel", predicted, measured, 0, 0.0)


def test_the_share_is_of_time() -> None:
    rows = [row(10, 29), row(10, 3), row(10, 80)]
    assert [r.off for r in rows] == [False, True, True]
    assert share_off(rows) == pytest.approx(83 / 112)
    text = report(rows).splitlines()
    assert len(text) == 4 and "80.0" in text[1] and "2 of 3 kernels" in text[-1]
    assert share_off([]) == 0.0


def test_kernels_of_a_program_are_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, each kernel with its own clock."""
    monkeypatch.setattr(predictions, "CALLS", 2)
    monkeypatch.setattr(predictions, "LEAST_US", 0.0)
    file = tmp_path / "rows.json"
    assert main(["norms", "--device", "cpu", "--only", "^norms rms", "--json", str(file)]) == 0
    assert "kernels of 0 us and more" in capsys.readouterr().out
    assert file.read_text().count('"measured_us"') >= 2
