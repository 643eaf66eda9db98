"""Device figures: the table, detection, and calibration files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deuteron.base import device as D
from deuteron.base.errors import DeuteronError
from deuteron.base.options import Options


@pytest.mark.parametrize(
    ("name", "capability", "cores"),
    [
        ("NVIDIA H200", (9, 0), 132),
        ("NVIDIA H100 80GB HBM3", (9, 0), 132),
        ("NVIDIA H100 PCIe", (9, 0), 114),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 108),
        ("Tesla V100-SXM2-16GB", (7, 0), 80),
        ("Tesla T4", (7, 5), 40),
        ("NVIDIA L4", (8, 9), 58),
        ("NVIDIA L40S", (8, 9), 142),
        ("NVIDIA GeForce RTX 4090", (8, 9), 128),
        ("NVIDIA B200", (10, 0), 148),
    ],
)
def test_table(name: str, capability: tuple[int, int], cores: int) -> None:
    spec = D.named_gpu(name)
    assert spec is not None and (spec.capability, spec.cores) == (capability, cores)
    assert spec.peak("bf16") >= spec.peak("f32") and spec.has("bf16") == (capability >= (8, 0))
    assert hash(spec) == hash(D.named_gpu(name))


def test_measured_figures_of_the_h200_hold() -> None:
    """A copy at 4.28 TB/s and a bf16 product at 750 TFLOP/s, from the data sheet and factors."""
    spec = D.named_gpu("NVIDIA H200")
    assert spec is not None
    assert spec.bandwidth_gbps == pytest.approx(4280, rel=0.01)
    assert spec.peak("bf16") == pytest.approx(750e3, rel=0.01)
    assert spec.memory_us(4.28e9) == pytest.approx(1000, rel=0.01)
    assert spec.compute_us(750e9, "bf16") == pytest.approx(1000, rel=0.01)


def test_a_gpu_that_is_not_in_the_table_follows_the_driver() -> None:
    properties = SimpleNamespace(
        name="NVIDIA X",
        major=8,
        minor=6,
        multi_processor_count=84,
        clock_rate=1_695_000,
        memory_bus_width=384,
        memory_clock_rate=9_751_000,
        L2_cache_size=6 << 20,
    )
    spec = D._generic_gpu(properties)
    table = D.named_gpu("RTX 3090")
    assert table is not None and D.named_gpu("NVIDIA X") is None
    assert spec.bandwidth_gbps == pytest.approx(table.bandwidth_gbps, rel=0.05)
    assert spec.peak("f32") == pytest.approx(table.peak("f32"), rel=0.1)
    assert spec.peak("bf16") == pytest.approx(table.peak("bf16"), rel=0.1)


def test_cpu() -> None:
    spec = D.device_spec("cpu")
    assert spec.kind == "cpu" and spec.source == "system" and spec.cores >= 1
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in ("AVX2", "AVX512"):
        assert spec.vector_bits == {"AVX2": 256, "AVX512": 512}[capability]
    assert spec.l1 >= 1 << 14 and spec.l2 >= spec.l1 and spec.memory > 1 << 28
    json.dumps(spec.to_dict())


def test_absent_devices_are_refused() -> None:
    with pytest.raises(DeuteronError, match="meta"):
        D.device_spec("meta")
    if not torch.cuda.is_available():
        with pytest.raises(DeuteronError, match="cannot be used"):
            D.device_spec("cuda")
    with pytest.raises(DeuteronError, match="no device file"):
        D.device_spec_for("cpu", Options(device_spec="/nowhere.json"))


def test_calibration(tmp_path: Path) -> None:
    plain = D.device_spec("cpu", tmp_path / "none.json")
    path = tmp_path / D.CALIBRATION_FILE
    path.write_text(
        json.dumps(
            {D.key(plain): {"bandwidth_gbps": 77, "gflops": {"bf16": 5e3}}, "cuda:other:1": {}}
        )
    )
    spec = D.device_spec_for("cpu", Options(cache_dir=str(tmp_path)))
    assert spec.source == "measured" and spec.bandwidth_gbps == 77 and spec.peak("bf16") == 5e3
    assert spec.peak("f32") == plain.peak("f32") and spec.launch_us == plain.launch_us
    for wrong in (
        '{"x"',
        "[]",
        json.dumps({D.key(plain): {"bandwidth_gbps": 0}}),
        json.dumps({D.key(plain): {"gflops": {"f8": 1}}}),
    ):
        path.write_text(wrong)
        with pytest.raises(DeuteronError):
            D.device_spec("cpu", path)
