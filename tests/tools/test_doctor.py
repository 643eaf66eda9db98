"""doctor: its checks hold on the machine of the tests, and it deletes nothing but the cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deuteron.base.device import device_spec_for
from deuteron.base.options import Options
from deuteron.tools.doctor import cache_summary, clear_cache, doctor


def test_calibration_is_read_back(tmp_path: Path) -> None:
    options = Options(cache_dir=str(tmp_path))
    (tmp_path / "devices.json").write_text(json.dumps({"cpu:another:1": {"launch_us": 1}}))
    report = doctor(True, options)
    assert {c["status"] for c in report["checks"]} <= {"ok", "warning"}
    written = json.loads(Path(report["calibration"]).read_text())
    assert "cpu:another:1" in written and len(written) == 1 + len(report["devices"])
    for device in report["devices"]:
        spec = device_spec_for(device["device"], options)
        assert spec.source == "measured" and spec.to_dict().items() <= device.items()
        assert spec.bandwidth_gbps > 1 and spec.peak("f32") > 1 and 0 < spec.launch_us < 1000
    assert [p.name for p in tmp_path.iterdir()] == ["devices.json"]


def test_problems_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    blocked = tmp_path / "file"
    blocked.write_text("")
    report = doctor(False, Options(cache_dir=str(blocked / "cache")))
    missing = {c["what"] for c in report["checks"] if c["status"] == "missing"}
    assert missing == {"C++ compiler", "Cache"}
    assert all(c["hint"] for c in report["checks"] if c["status"] == "missing")


def test_clearing_keeps_what_is_not_the_caches(tmp_path: Path) -> None:
    name = "0123456789abcdef0123"
    kept = [tmp_path / "devices.json", tmp_path / "thesis" / "chapter.txt"]
    gone = [tmp_path / "cpp" / f"{name}.so", tmp_path / name / "kernel.cubin"]
    for file in kept + gone:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1234")
    assert "2 files" in cache_summary(tmp_path)
    clear_cache(tmp_path)
    assert all(f.exists() for f in kept) and not any(f.exists() for f in gone)
    assert not (tmp_path / "cpp").exists()
    assert "0 files" in cache_summary(tmp_path / "absent")
