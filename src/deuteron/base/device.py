"""What the cost model knows about a device.

In: a ``torch.device`` (or its text), and the file of measured figures where there is one. Out: a
frozen `DeviceSpec`. Three sources, each replacing the one before: a table of common GPUs from the
vendors' data sheets (or the figures that the driver and the kernel report, scaled by what such
devices reach), and what ``deuteron doctor --calibrate`` measured here. The field `source` says
which it was.

Units: GB/s (1e9 bytes), GFLOP/s (1e9; integer operations for int8), us, bytes. A copy of n bytes
moves 2n.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from deuteron.base.errors import DeuteronError
from deuteron.base.options import Options

# Units that compute: vector f32 and f64; tensor cores (or their like) by operand type, f32
# accumulators.
COMPUTE_UNITS = ("f32", "f64", "tf32", "bf16", "f16", "int8")
CALIBRATION_FILE = "devices.json"
KB, MB = 1 << 10, 1 << 20

# What programs reach of a data sheet's figure. H200, measured: a copy moves 4.28 of 4.8 TB/s; a
# large bf16 matrix product runs at 750 of 989 TFLOP/s.
BANDWIDTH_EFFICIENCY = 0.89
TENSOR_CORE_EFFICIENCY = 0.76
# What one more short kernel costs; H200, measured: launched one by one, and replayed in a graph.
GPU_LAUNCH_US, GPU_GRAPH_LAUNCH_US = 2.2, 0.96

# Additions at computed places to one line of memory, which come one after another. H200: 2 million
# to 8 lines 289 us; neighbours that go to neighbours are fewer: 3.1 million to 24 lines 42 us.
LINE_ADDITIONS_PER_US, LINE_BYTES = 1e3, 128


def additions_us(count: float, size: float) -> float:
    """What so many additions to `size` bytes take at least, if they are spread evenly."""
    return count / (LINE_ADDITIONS_PER_US * max(1.0, size / LINE_BYTES))


@dataclass(frozen=True)
class DeviceSpec:
    """A device's figures. `shared` and `registers` are bytes per multiprocessor (0 on CPUs).

    `launch_us` is what one more short kernel costs, `graph_launch_us` the same in a CUDA graph.
    """

    kind: str
    name: str
    source: str
    bandwidth_gbps: float
    gflops: tuple[tuple[str, float], ...]
    launch_us: float
    graph_launch_us: float
    cores: int
    vector_bits: int
    shared: int
    registers: int
    l1: int
    l2: int
    l3: int
    memory: int
    capability: tuple[int, int] | None = None

    def peak(self, unit: str) -> float:
        """GFLOP/s of a unit (`COMPUTE_UNITS`); what the device lacks runs on the f32 vector
        units."""
        assert unit in COMPUTE_UNITS, unit
        table = dict(self.gflops)
        return table.get(unit, 0.0) or table["f32"]

    def has(self, unit: str) -> bool:
        """Whether the device has the unit."""
        return dict(self.gflops).get(unit, 0.0) > 0.0

    @property
    def copies_boxes(self) -> bool:
        """Whether it has an engine that copies blocks of tensors (TMA)."""
        return self.capability is not None and self.capability >= (9, 0)

    def memory_us(self, size: float) -> float:
        """Time to move `size` bytes (reads and writes together) from or to memory."""
        return size / (self.bandwidth_gbps * 1e3)

    def keeps(self, size: int) -> bool:
        """Whether a CPU's last cache has `size` bytes still when they are read again: half of it,
        beside what is read and written meanwhile."""
        return size <= self.l3 // 2

    def compute_us(self, flops: float, unit: str = "f32") -> float:
        """Time of `flops` operations on a unit; a fused multiply-add counts two."""
        return flops / (self.peak(unit) * 1e3)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in the Record."""
        out = {f: getattr(self, f) for f in self.__dataclass_fields__}
        return {**out, "gflops": dict(self.gflops), "capability": list(self.capability or ())}


@dataclass(frozen=True)
class _Sheet:
    """A data sheet: GB/s, TFLOP/s (dense), multiprocessors, KB of shared memory each, MB of L2."""

    pattern: str
    capability: tuple[int, int]
    bandwidth: float
    f32: float
    f64: float
    tf32: float
    bf16: float
    f16: float
    int8: float
    cores: int
    shared: int
    l2: float


# NVIDIA's data sheets and architecture white papers; tensor figures without sparsity, with f32
# accumulators. The first pattern that matches the driver's name wins, so narrower ones stand first.
_SHEETS = (
    _Sheet(r"\bB200\b", (10, 0), 8000, 75, 37, 1100, 2250, 2250, 4500, 148, 228, 126),
    _Sheet(r"\bH200\b", (9, 0), 4800, 67, 34, 494, 989, 989, 1979, 132, 228, 50),
    _Sheet(r"\bH100 PCIe\b", (9, 0), 2000, 51, 26, 378, 756, 756, 1513, 114, 228, 50),
    _Sheet(r"\bH100\b", (9, 0), 3350, 67, 34, 494, 989, 989, 1979, 132, 228, 50),
    _Sheet(r"\bA100.*80GB\b", (8, 0), 2039, 19.5, 9.7, 156, 312, 312, 624, 108, 164, 40),
    _Sheet(r"\bA100\b", (8, 0), 1555, 19.5, 9.7, 156, 312, 312, 624, 108, 164, 40),
    _Sheet(r"\bL40S\b", (8, 9), 864, 91.6, 1.4, 183, 362, 362, 733, 142, 100, 96),
    _Sheet(r"\bL4\b", (8, 9), 300, 30.3, 0.47, 60, 121, 121, 242, 58, 100, 48),
    _Sheet(r"\bRTX 4090\b", (8, 9), 1008, 82.6, 1.3, 82.6, 165, 165, 661, 128, 100, 72),
    _Sheet(r"\bRTX 3090\b", (8, 6), 936, 35.6, 0.56, 35.6, 71, 71, 284, 82, 100, 6),
    _Sheet(r"\bT4\b", (7, 5), 320, 8.1, 0.25, 0, 0, 65, 130, 40, 64, 4),
    _Sheet(r"\bV100\b", (7, 0), 900, 15.7, 7.8, 0, 0, 125, 63, 80, 96, 6),
)

# Generic GPUs, per multiprocessor and clock, by compute capability: f32 lanes, f16 tensor FLOPs, KB
# of shared memory.
_GENERIC = {
    (7, 0): (64, 1024, 96),
    (7, 5): (64, 1024, 64),
    (8, 0): (64, 2048, 164),
    (8, 6): (128, 512, 100),
    (8, 9): (128, 1024, 100),
    (9, 0): (128, 4096, 228),
    (10, 0): (128, 8192, 228),
    (12, 0): (128, 1024, 100),
}


def named_gpu(name: str) -> DeviceSpec | None:
    """A GPU of the table by (a part of) the driver's name; None where the table lacks it. Needs no
    GPU.
    """
    for sheet in _SHEETS:
        if re.search(sheet.pattern, name, re.IGNORECASE):
            tensor = {"tf32": sheet.tf32, "bf16": sheet.bf16, "f16": sheet.f16, "int8": sheet.int8}
            return _gpu(
                name,
                "data sheet",
                sheet.capability,
                sheet.bandwidth,
                {"f32": sheet.f32, "f64": sheet.f64},
                tensor,
                sheet.cores,
                sheet.shared,
                sheet.l2,
            )
    return None


def _gpu(
    name: str,
    source: str,
    capability: tuple[int, int],
    bandwidth: float,
    vector: Mapping[str, float],
    tensor: Mapping[str, float],
    cores: int,
    shared: int,
    l2: float,
) -> DeviceSpec:
    """From peak figures in GB/s and TFLOP/s, reduced to what programs reach."""
    gflops = {u: v * 1e3 for u, v in vector.items()} | {
        u: v * 1e3 * TENSOR_CORE_EFFICIENCY for u, v in tensor.items()
    }
    return DeviceSpec(
        kind="cuda",
        name=name,
        source=source,
        bandwidth_gbps=round(bandwidth * BANDWIDTH_EFFICIENCY, 1),
        gflops=_units(gflops),
        launch_us=GPU_LAUNCH_US,
        graph_launch_us=GPU_GRAPH_LAUNCH_US,
        cores=cores,
        vector_bits=128,
        shared=shared * KB,
        registers=256 * KB,
        l1=max(shared, 128) * KB,
        l2=int(l2 * MB),
        l3=0,
        memory=0,
        capability=capability,
    )


def _units(gflops: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple((u, float(gflops[u])) for u in COMPUTE_UNITS if gflops.get(u))


def _generic_gpu(properties: Any) -> DeviceSpec:
    """From what the driver reports. Missing clocks count as 1.5 GHz, a missing bus as 300 GB/s."""
    major, minor = properties.major, properties.minor
    known = [c for c in _GENERIC if c <= (major, minor)]
    lanes, tensor, shared = _GENERIC[max(known) if known else (7, 0)]
    cores, clock = (
        properties.multi_processor_count,
        getattr(properties, "clock_rate", 0) or 1_500_000,
    )
    bus, memory_clock = (
        getattr(properties, "memory_bus_width", 0),
        getattr(properties, "memory_clock_rate", 0),
    )
    bandwidth = 2 * memory_clock * 1e3 * bus / 8 / 1e9 if bus and memory_clock else 300.0
    per_clock = cores * clock * 1e3 / 1e12
    f32, f16 = 2 * lanes * per_clock, tensor * per_clock
    newer = (major, minor) >= (8, 0)
    units = {
        "f16": f16,
        "int8": 2 * f16,
        "bf16": f16 if newer else 0.0,
        "tf32": f16 / 2 if newer else 0.0,
    }
    halves = (major, minor) in ((7, 0), (8, 0), (9, 0), (10, 0))
    return _gpu(
        properties.name,
        "driver",
        (major, minor),
        bandwidth,
        {"f32": f32, "f64": f32 / (2 if halves else 64)},
        units,
        cores,
        shared,
        getattr(properties, "L2_cache_size", 4 * MB) / MB,
    )


# --------------------------------------------------------------------------------------------- CPUs


@dataclass(frozen=True)
class _Cpu:
    name: str
    cores: int
    mhz: float
    vector_bits: int
    l1: int
    l2: int
    l3: int


def _read(path: str) -> str:
    """A file of /proc or /sys; empty where the system has none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cache_sizes() -> dict[int, int]:
    """Bytes of the caches that core 0 sees, by level (data or unified)."""
    sizes = {}
    for i in range(6):
        folder = f"/sys/devices/system/cpu/cpu0/cache/index{i}"
        level, size = _read(f"{folder}/level").strip(), _read(f"{folder}/size").strip()
        if level and size and _read(f"{folder}/type").strip() != "Instruction":
            unit = {"K": KB, "M": MB, "G": MB * KB}.get(size[-1], 1)
            sizes[int(level)] = int(size.rstrip("KMG")) * unit
    return sizes


def _cpu() -> _Cpu:
    info = _read("/proc/cpuinfo")

    def entry(key: str) -> str:
        match = re.search(rf"^{key}\s*:\s*(.*)$", info, re.MULTILINE)
        return match[1] if match else ""

    flags = set(entry("flags").split())
    bits = 512 if "avx512f" in flags else 256 if "avx2" in flags else 128
    caches = _cache_sizes()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return _Cpu(
        entry("model name") or platform.processor() or platform.machine(),
        cores,
        float(entry("cpu MHz") or 2500.0),
        bits,
        caches.get(1, 32 * KB),
        caches.get(2, MB),
        caches.get(3, 0),
    )


def _generic_cpu() -> DeviceSpec:
    """Two fused multiply-add units per core, of which programs reach 0.55.

    Bandwidth and the cost of a parallel region follow two measurements: 37.5 GB/s and 0.7 us on
    two cores (AMD EPYC, family 26), 77 GB/s and 4.1 us on sixteen (Intel Xeon with AMX). Without a
    region the call of a kernel costs 0.2 us.
    """
    cpu = _cpu()
    f32 = 0.55 * cpu.cores * cpu.mhz / 1e3 * 2 * 2 * cpu.vector_bits / 32
    launch = 0.36 * cpu.cores**0.88 if cpu.cores > 1 else 0.2
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return DeviceSpec(
        kind="cpu",
        name=cpu.name,
        source="system",
        bandwidth_gbps=27.0 * cpu.cores**0.4,
        gflops=_units({"f32": f32, "f64": f32 / 2}),
        launch_us=launch,
        graph_launch_us=launch,
        cores=cpu.cores,
        vector_bits=cpu.vector_bits,
        shared=0,
        registers=0,
        l1=cpu.l1,
        l2=cpu.l2,
        l3=cpu.l3,
        memory=pages * page,
    )


def device_spec(device: torch.device | str, calibration: Path | str | None = None) -> DeviceSpec:
    """The figures of a device that is present, with those measured in the JSON file `calibration`.

    Raises `DeuteronError` for a device that is absent (`named_gpu` serves those) or a file that is
    no calibration.
    """
    device = torch.device(device)
    index = device.index or 0
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        index = torch.cuda.current_device()
    spec = _detect(device.type, index)
    path = Path(calibration) if calibration is not None else None
    if path is None or not path.is_file():
        return spec
    stat = path.stat()
    return calibrated(spec, _load(path, stat.st_mtime_ns, stat.st_size))


def device_spec_for(device: torch.device | str, options: Options) -> DeviceSpec:
    """`device_spec` with the file that the options name, or else what doctor --calibrate left in
    the cache folder.
    """
    if options.device_spec is not None and not Path(options.device_spec).is_file():
        raise DeuteronError(
            f"no device file {options.device_spec!r}",
            hint="`deuteron doctor --calibrate` writes one",
        )
    return device_spec(device, options.device_spec or options.cache_folder() / CALIBRATION_FILE)


def demand(device: torch.device | str) -> None:
    """Raises `DeuteronError` for a device on which nothing can run here: why, and what to do."""
    kind, _, number = str(device).partition(":")
    if kind not in ("cpu", "cuda") or not (number.isdigit() or number == ""):
        raise DeuteronError(
            f"{str(device)!r} is no device that programs are compiled for",
            hint="cpu and cuda (or cuda:1, ...) are",
        )
    if kind == "cpu":
        return
    if torch.version.cuda is None and torch.version.hip is None:
        raise DeuteronError(
            f"{device} cannot be used: this PyTorch ({torch.__version__}) is built without CUDA",
            hint="install a build with CUDA (https://pytorch.org/get-started/locally), or use cpu",
        )
    if not torch.cuda.is_available():
        raise DeuteronError(
            f"{device} cannot be used: PyTorch finds no GPU",
            hint="check that `nvidia-smi` lists one and that CUDA_VISIBLE_DEVICES does not hide it",
        )
    if int(number or 0) >= torch.cuda.device_count():
        raise DeuteronError(
            f"{device} cannot be used: PyTorch finds {torch.cuda.device_count()} GPUs, from cuda:0",
            hint="name one of these, or check CUDA_VISIBLE_DEVICES",
        )


@lru_cache(maxsize=32)
def _detect(kind: str, index: int) -> DeviceSpec:
    if kind == "cpu":
        return _generic_cpu()
    demand(torch.device(kind, index))
    properties = torch.cuda.get_device_properties(index)
    spec = named_gpu(properties.name) or _generic_gpu(properties)
    return replace(  # the driver knows partitions and variants better than a table
        spec,
        cores=properties.multi_processor_count,
        memory=properties.total_memory,
        shared=getattr(properties, "shared_memory_per_multiprocessor", spec.shared),
        l2=getattr(properties, "L2_cache_size", spec.l2),
        capability=(properties.major, properties.minor),
    )


def key(spec: DeviceSpec) -> str:
    """Under which a calibration file lists a device: figures of a part of a machine are not those
    of the whole.
    """
    return f"{spec.kind}:{spec.name}:{spec.cores}"


@lru_cache(maxsize=8)
def _load(path: Path, mtime: int, size: int) -> dict[str, Any]:
    """The file's content; the other arguments tell versions apart."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DeuteronError(
            f"{path} is not a calibration: {error}", hint="delete it, or calibrate again"
        ) from None
    if not isinstance(content, dict):
        raise DeuteronError(
            f"{path} is not a calibration: no object", hint="delete it, or calibrate again"
        )
    return content


def calibrated(spec: DeviceSpec, content: Mapping[str, Any]) -> DeviceSpec:
    """`spec` with the measured figures that `content` holds under its `key`; units without a
    measurement keep theirs.
    """
    entry = content.get(key(spec))
    if entry is None:
        return spec
    positive = all(isinstance(v, (int, float)) and v > 0 for v in _figures(entry))
    if not positive or not set(entry.get("gflops", {})) <= set(COMPUTE_UNITS):
        raise DeuteronError(
            f"figures of {key(spec)!r} are no positive numbers of known units",
            hint="calibrate again",
        )
    return replace(
        spec,
        source="measured",
        bandwidth_gbps=float(entry.get("bandwidth_gbps", spec.bandwidth_gbps)),
        launch_us=float(entry.get("launch_us", spec.launch_us)),
        graph_launch_us=float(entry.get("graph_launch_us", spec.graph_launch_us)),
        gflops=_units({**dict(spec.gflops), **entry.get("gflops", {})}),
    )


def _figures(entry: Mapping[str, Any]) -> list[Any]:
    names = ("bandwidth_gbps", "launch_us", "graph_launch_us")
    plain = [entry[f] for f in names if f in entry]
    return plain + list(entry.get("gflops", {}).values())
