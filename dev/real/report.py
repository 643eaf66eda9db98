"""The suite `real` as a short table: ratios, failures, kernels above their limits.

In: rows as `run` writes them. A row has: slot, model, date, device, train, dtype, channels_last,
inputs, parameters, reference ("float64", "float32", or "eager" where the model runs in no wider
dtype); for each compiler NAME_first_s (compiling beside others), NAME_error_size, NAME_wrong,
NAME_ms, on a GPU NAME_peak_mb, NAME_device_us and NAME_longest; ratio (Deuteron's time over the
better of the others'); kernel_rows (see `kernels`); failures: ``{"kind", "cause"}``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import Any

Row = dict[str, Any]
LARGE_US = 10.0  # kernels that count against their limits
FAR, OFF = 4.0, 3.0  # above the limit; predicted and measured apart
WORST_SHOWN = 10


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values if v > 0]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def summary(rows: list[Row]) -> str:
    """The whole report."""
    models = [r for r in rows if r.get("model") and "skip" not in r]
    if not models:
        return "no rows"
    lines = [heading(models), *ratios(models), *failures(models), *passed(rows)]
    return "\n".join([*lines, *kernels(models)])


def heading(models: list[Row]) -> str:
    dates = ", ".join(sorted({r["date"] for r in models}))
    devices = ", ".join(sorted({r["device"] for r in models}))
    training = sum(bool(r.get("train")) for r in models)
    return f"{len(models)} models ({training} in training) drawn for {dates}, on {devices}"


def ratios(models: list[Row]) -> list[str]:
    lines = [f"{'':24}{'models':>8}{'/ eager':>9}{'/ inductor':>12}{'/ better':>10}{'worst':>8}"]
    groups = [
        ("all", models),
        ("inference", [r for r in models if not r.get("train")]),
        ("training", [r for r in models if r.get("train")]),
        ("bf16", [r for r in models if r.get("dtype") == "bf16"]),
        ("fp32", [r for r in models if r.get("dtype") == "fp32"]),
        ("channels-last", [r for r in models if r.get("channels_last")]),
    ]
    for name, these in groups:
        timed = [r for r in these if "ratio" in r and r["ratio"]]
        if not timed:
            continue
        line = f"{name:24}{len(timed):8}"
        for other, width in (("eager", 9), ("inductor", 12)):
            both = [r for r in timed if f"{other}_ms" in r]
            value = geomean(r["deuteron_ms"] / r[f"{other}_ms"] for r in both)
            line += f"{value:{width}.3f}"
        worst = max(r["ratio"] for r in timed)
        lines.append(f"{line}{geomean(r['ratio'] for r in timed):10.3f}{worst:8.2f}")
    for what, unit in (("first_s", "compile time"), ("peak_mb", "peak memory")):
        both = [r for r in models if f"deuteron_{what}" in r and f"inductor_{what}" in r]
        if both:
            value = geomean(r[f"deuteron_{what}"] / r[f"inductor_{what}"] for r in both)
            lines.append(f"{unit} over Inductor's, geometric mean of {len(both)}: {value:.3f}")
    return lines


def failures(models: list[Row]) -> list[str]:
    kinds = Counter(f["kind"] for r in models for f in r["failures"])
    text = ", ".join(f"{n} {k}" for k, n in kinds.most_common()) or "none"
    lines = [f"failures: {text}"]
    for r in sorted(models, key=lambda r: -r.get("ratio", 99.0)):
        settings = f"{'train' if r.get('train') else 'infer'} {r.get('dtype', '')}"
        settings += " channels-last" if r.get("channels_last") else ""
        for f in r["failures"]:
            ratio = f"{r['ratio']:.2f} " if f["kind"] == "slow" else ""
            lines.append(f"  {f['kind']}: {r['model']} {settings}: {ratio}{f['cause'][:240]}")
    peers = [r for r in models if r.get("inductor_error") or r.get("inductor_wrong")]
    if peers:
        crashed = sum(bool(r.get("inductor_error")) for r in peers)
        lines.append(f"Inductor: {crashed} crashed, {len(peers) - crashed} wrong by the same rule")
    return lines


def passed(rows: list[Row]) -> list[str]:
    reasons = Counter(reason(r["reason"]) for r in rows if "skip" in r)
    text = ", ".join(f"{n} {k}" for k, n in reasons.most_common())
    return [f"passed over: {text}"] if reasons else []


def reason(text: str) -> str:
    """A reason in few words."""
    if "million parameters" in text:
        return "too large"
    for word in ("no rule makes", "random", "not finite", "rounding only", "no float results"):
        if word in text:
            return word
    return "does not run in eager"


# ----------------------------------------------------------------------------------------- kernels
def kernels(models: list[Row]) -> list[str]:
    """Generated kernels of at least `LARGE_US` over all models' steps."""
    rows = [{**k, "model": r["model"]} for r in models for k in r.get("kernel_rows", [])]
    if not rows:
        return []
    large = [k for k in rows if k["us"] >= LARGE_US]
    all_us = total(rows, "us")
    lines = [f"generated kernels: {len(rows)}, {all_us / 1e3:.2f} ms of all steps"]
    if not large:
        return [*lines, f"none takes {LARGE_US:.0f} us"]
    us, limit = total(large, "us"), total(large, "limit_us")
    lines.append(
        f"of {LARGE_US:.0f} us and more: {len(large)}, {us / 1e3:.2f} ms, "
        f"{us / limit:.3f} x the sum of their limits, "
        f"{us / total(large, 'roofline_us'):.3f} x with arithmetic"
    )
    errors = [abs(k["predicted_us"] / k["us"] - 1) for k in large]
    lines.append(f"median error of predictions: {100 * median(errors):.1f} %")
    far = [k for k in large if k["us"] > FAR * k["limit_us"]]
    lines.append(
        f"above {FAR:g} x their limit: {len(far)}, {100 * total(far, 'us') / us:.1f} % of the time"
    )
    off = [k for k in large if misprediction(k) > OFF]
    lines.append(
        f"predicted and measured more than {OFF:g} x apart: {len(off)}, "
        f"{100 * total(off, 'us') / us:.1f} % of the time"
    )
    lines += ["", "losing most against their limits:", *table(large, lost)]
    if far:
        lines += [
            "",
            "furthest above their limits:",
            *table(far, lambda k: k["us"] / k["limit_us"]),
        ]
    if off:
        lines += ["", "worst predicted (by time):", *table(off, lambda k: k["us"] * k["calls"])]
    return lines


def total(rows: list[Row], what: str) -> float:
    return sum(k[what] * k["calls"] for k in rows)


def lost(k: Row) -> float:
    """Microseconds of a step above the limit."""
    return float((k["us"] - k["limit_us"]) * k["calls"])


def misprediction(k: Row) -> float:
    p, us = max(k["predicted_us"], 1e-3), max(k["us"], 1e-3)
    return max(p / us, us / p)


def table(rows: list[Row], key: Any) -> list[str]:
    lines = [f"{'lost us':>9}{'calls':>7}{'us':>9}{'limit':>9}{'predicted':>10}  kernel, model"]
    for k in sorted(rows, key=key, reverse=True)[:WORST_SHOWN]:
        lines.append(
            f"{lost(k):9.1f}{k['calls']:7.1f}{k['us']:9.1f}{k['limit_us']:9.1f}"
            f"{k['predicted_us']:10.1f}  {k['name'][:70]}, {k['model']}"
        )
    return lines
