"""How long a model's kernels take on a GPU, beside the limit of the bytes that they must move.

In: a `Step` that has run, its Records. Out: rows, one for each generated kernel of a step:

    name, calls (of a step), us (of a call), limit_us (bytes over the bandwidth of a copy),
    roofline_us (the same, or its arithmetic at the unit's peak where that takes longer),
    predicted_us, bytes, ops, share (of the device time of a step)

Kernels are matched by name. Where several graphs have kernels of one name, bytes and predictions
are their means.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch

from deuteron.base.device import device_spec
from deuteron.base.record import Record
from dev.bench.measure import COPY_BYTES, INPUT_COPIES, device_us

Row = dict[str, Any]
PROFILED_STEPS = 4  # that are profiled


def copy_gbps() -> float:
    """Bandwidth of a large copy on this GPU, read and written, GB/s."""
    n = COPY_BYTES["cuda"] // 4
    source = torch.ones(n, device="cuda")
    target = torch.zeros_like(source)

    def copies() -> None:
        for _ in range(INPUT_COPIES["cuda"]):
            target.copy_(source)

    best = min(device_us(copies) for _ in range(6)) / INPUT_COPIES["cuda"]
    return 2 * COPY_BYTES["cuda"] / best / 1e3


def profiled(step: Any) -> dict[str, tuple[float, float]]:
    """Device time by kernel: name -> (calls, us) of a step."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    calls: Counter[str] = Counter()
    us: dict[str, float] = defaultdict(float)
    for e in trace.events():
        # Regions that compilers name are no kernels.
        if e.device_type == DeviceType.CUDA and not e.name.startswith(("##", "Torch-Compiled")):
            calls[e.name] += 1
            us[e.name] += e.time_range.elapsed_us()
    return {n: (c / PROFILED_STEPS, us[n] / PROFILED_STEPS) for n, c in calls.items()}


def kernel_rows(
    compiled: list[Record], seen: dict[str, tuple[float, float]], gbps: float
) -> list[Row]:
    """Rows of the generated kernels, those that take longest first."""
    spec = device_spec("cuda")
    entries: dict[str, list[Row]] = defaultdict(list)
    for record in compiled:
        for e in record.of("kernel"):
            entries[e.get("same_code_as") or e["name"]].append(e)
    total = sum(us for _, us in seen.values())
    rows = []
    for name, these in entries.items():
        calls, us = seen.get(name, (0.0, 0.0))
        if not calls:
            continue
        moved = sum(e["bytes"] for e in these) / len(these)
        limit = moved / gbps / 1e3
        computed = sum(spec.compute_us(e["flops"], e["unit"]) for e in these) / len(these)
        rows.append(
            {
                "name": name,
                "calls": calls,
                "us": round(us / calls, 3),
                "limit_us": round(limit, 3),
                "roofline_us": round(max(limit, computed), 3),
                "predicted_us": round(sum(e["predicted_us"] for e in these) / len(these), 3),
                "bytes": moved,
                "ops": dict(Counter(o.split(".")[1] for o in these[0]["ops"])),
                "share": round(us / total, 5) if total else 0.0,
            }
        )
    return sorted(rows, key=lambda r: -r["us"] * r["calls"])


def longest(seen: dict[str, tuple[float, float]], count: int = 12) -> list[list[Any]]:
    """The kernels of any origin that take longest: name, calls, us of a step."""
    order = sorted(seen.items(), key=lambda s: -s[1][1])[:count]
    return [[n[:100], round(c, 2), round(us, 2)] for n, (c, us) in order]
