"""doctor: its checks hold on the machine of the tests, and it deletes nothing but the cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deuteron.base.device import device_spec_for
from deuteron.base.options import Options
from deuteron.tools import calibration
from deuteron.tools.calibration import CalibrationError
from deuteron.tools.doctor import cache_summary, clear_cache, doctor, examine


def test_calibration_is_read_back(tmp_path: Path) -> None:
    options = Options(cache_dir=str(tmp_path))
    (tmp_path / "devices.json").write_text(json.dumps({"cpu:another:1": {"launch_us": 1}}))
    report = doctor(True, options, force=True)
    assert {c["status"] for c in report["checks"]} <= {"ok", "warning"}
    written = json.loads(Path(report["calibration"]).read_text())
    assert "cpu:another:1" in written and len(written) == 1 + len(report["devices"])
    for device in report["devices"]:
        spec = device_spec_for(device["device"], options)
        assert spec.source == "measured" and spec.to_dict().items() <= device.items()
        assert spec.bandwidth_gbps > 1 and spec.peak("f32") > 1 and 0 < spec.launch_us < 1000
    (mine,) = (entry for name, entry in written.items() if name != "cpu:another:1")
    assert {"copy", "f32", "launch"} <= mine["spread"].keys()
    assert {p.name for p in tmp_path.iterdir()} == {"devices.json", "devices.before.json"}
    doctor(False, options, undo=True)
    before = json.loads((tmp_path / "devices.json").read_text())
    assert before == {"cpu:another:1": {"launch_us": 1}}
    with pytest.raises(CalibrationError, match="no calibration to undo"):
        doctor(False, options, undo=True)


def test_the_first_calibration_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"bandwidth_gbps": 10.0, "gflops": {"f32": 100.0}, "launch_us": 1.0}
    monkeypatch.setattr(calibration, "_measure_cpu", lambda device, meter: entry)
    file = calibration.calibrate(["cpu"], tmp_path / "devices.json", force=True)
    assert file.is_file()
    calibration.undo(file)
    assert not list(tmp_path.iterdir())


def test_a_busy_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 1.0, 1.0))
    with pytest.raises(CalibrationError, match="busy: 99.0 processes"):
        calibration.calibrate(["cpu"], tmp_path / "devices.json")
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(calibration, "gpu_use", lambda: [0, 80])
    with pytest.raises(CalibrationError, match="GPU 1 is busy: 80 %"):
        calibration.calibrate(["cpu"], tmp_path / "devices.json")

    def unsteady(device: object, meter: calibration.Meter) -> dict[str, float]:
        times = iter([9.0, 1.0, 2.0, 2.0])
        meter.best("copy", lambda: next(times), 3)
        return {}

    monkeypatch.setattr(calibration, "gpu_use", list)
    monkeypatch.setattr(calibration, "_measure_cpu", unsteady)
    with pytest.raises(CalibrationError, match="copy by 100%"):
        calibration.calibrate(["cpu"], tmp_path / "devices.json")
    assert not list(tmp_path.iterdir())


def test_json_has_all_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    named = {"deuteron", "torch", "python", "triton", "g++", "driver", "jinja2"}
    assert named <= found["versions"].keys()
    assert found["versions"]["torch"].startswith("2.") and found["checks"] and found["devices"]


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
