"""A report as plain values: what `explain` prints, the HTML file shows and the JSON file holds.

In: `tools.observe.Observations`, what was measured of whole calls, Dynamo's notes. Out: `Report`
(below), a dictionary that ``json.dumps`` takes. Times are microseconds unless the key says seconds
(``_s``), sizes bytes. `SCHEMA_VERSION` counts changes that a reader of the JSON would notice.
"""

from __future__ import annotations

import os
import platform
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

import torch

from deuteron.base.device import device_spec
from deuteron.base.package import FOLDER, VERSION
from deuteron.base.record import Record
from deuteron.base.text import one_line
from deuteron.tools.chains import relate
from deuteron.tools.findings import findings
from deuteron.tools.observe import Observations, short_reason
from deuteron.tools.part_data import PartData
from deuteron.tools.words import amount, counted, time_text

SCHEMA, SCHEMA_VERSION = "deuteron.report", 2
NOTHING = (
    "nothing was compiled: torch.compile found no operations, or left them to Python "
    "(TORCH_LOGS=graph_breaks says why)"
)


class GraphBreak(TypedDict):
    """Where Dynamo ended a graph and why; `count`: how many times (once per compiled version)."""

    reason: str
    explanation: str
    hint: str
    file: str
    line: int
    code: str
    count: int


class Frame(TypedDict):
    """A function that Dynamo compiled: `recompiled` says which guard failed, with both values,
    where it had been compiled before."""

    function: str
    file: str
    line: int
    recompiled: str
    guards: int
    seconds: float
    backend_s: float


class Totals(TypedDict):
    """Sums over all parts. `call_us`, `eager_us`, `peak_bytes`: of whole calls, None where nothing
    was measured. `others`: cores that other programs kept busy while steps and calls were timed."""

    operations: int
    kernels: int
    library_calls: int
    bytes: int
    least_bytes: int
    flops: float
    limit_us: float
    predicted_us: float
    measured_us: float | None
    call_us: float | None
    eager_us: float | None
    peak_bytes: int | None
    others: float | None
    compile_s: float
    graph_breaks: int
    recompilations: int
    refusals: dict[str, int]


class Report(TypedDict):
    schema: str
    version: int
    title: str
    headline: str
    versions: dict[str, str]
    devices: dict[str, dict[str, Any]]
    totals: Totals
    parts: list[dict[str, Any]]
    sources: dict[str, str]
    breaks: list[GraphBreak]
    frames: list[Frame]
    fallbacks: list[dict[str, Any]]
    findings: list[dict[str, Any]]


def report_data(
    seen: Observations,
    records: Sequence[Record],
    title: str,
    breaks: list[GraphBreak],
    frames: list[Frame],
    call_us: float | None = None,
    eager_us: float | None = None,
    peak_bytes: int | None = None,
    others: float | None = None,
) -> Report:
    """All that is known of what was compiled."""
    sources: dict[str, str] = {}
    parts = [PartData(g, p, sources).data() for g, p in seen.parts]
    raised = raise_limits(parts)
    relate(parts)
    # what a part repeats is counted there
    once = [p for p in parts if p["phase"] != "chunk"]
    totals: Totals = {
        "operations": sum(p["operations"] for p in parts),
        "kernels": sum(p["kernels"] for p in parts),
        "library_calls": sum(p["library_calls"] for p in parts),
        "bytes": sum(p["bytes"] for p in once),
        "least_bytes": sum(p["least_bytes"] for p in once),
        "flops": sum(p["flops"] for p in once),
        "limit_us": sum(p["limit_us"] for p in once),
        "predicted_us": sum(p["predicted_us"] for p in once),
        "measured_us": summed(p["measured_us"] for p in once),
        "call_us": call_us,
        "eager_us": eager_us,
        "peak_bytes": peak_bytes,
        "others": others,
        "compile_s": sum(f["seconds"] for f in frames),
        "graph_breaks": len(breaks),
        "recompilations": sum(bool(f["recompiled"]) for f in frames),
        "refusals": dict(Counter(r["reason"] for p in parts for r in p["refusals"]).most_common()),
    }
    names = {s["device"] for p in parts for s in p["steps"]} or {"cpu"}
    spec = seen.parts[0][1].context.spec if seen.parts else device_spec
    devices = {n: spec(n).to_dict() | {"raised": raised.get(n, {})} for n in sorted(names)}
    return {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "title": title,
        "headline": headline(totals) if parts else NOTHING,
        "versions": versions(),
        "devices": devices,
        "totals": totals,
        "parts": parts,
        "sources": sources,
        "breaks": breaks,
        "frames": frames,
        "fallbacks": [dict(e) for r in records for e in r.of("fallback")],
        "findings": findings(parts, devices),
    }


def raise_limits(parts: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """A step that computes faster than the figures of its device allow shows that they are too low:
    all limits of that unit are then those of the fastest step. By how much, for each device and
    unit. (Of memory nothing is concluded: what lies in a cache is faster.)"""
    raised: dict[str, dict[str, float]] = {}
    steps = [(p, s) for p in parts for s in p["steps"] if s["limit"] == "compute"]
    for _, s in steps:
        if s["measured_us"] and s["limit_us"] > s["measured_us"]:
            units = raised.setdefault(s["device"], {})
            units[s["unit"]] = max(units.get(s["unit"], 1.0), s["limit_us"] / s["measured_us"])
    for p, s in steps:
        by = raised.get(s["device"], {}).get(s["unit"], 1.0)
        limit = max(s["memory_us"], s["limit_us"] / by)
        p["limit_us"] -= s["limit_us"] - limit
        s["limit"] = "compute" if limit > s["memory_us"] else "memory"
        s["limit_us"], s["lost_us"] = limit, max(0.0, s["us"] - limit)
        s["share"] = min(1.0, limit / s["us"]) if s["us"] > 0 else 1.0
    return raised


def summed(times: Iterable[float | None]) -> float | None:
    """None where nothing was measured."""
    known = [t for t in times if t is not None]
    return sum(known) if known else None


def versions() -> dict[str, str]:
    found = {"deuteron": VERSION, "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


# ---------------------------------------------------------------------------------------- words
def headline(t: Totals) -> str:
    """``36 operations → 4 kernels + 3 library calls; 1 MB moved, least 0.9 MB; ...``."""
    text = (
        f"{counted(t['operations'], 'operation')} → {counted(t['kernels'], 'kernel')}"
        f" + {counted(t['library_calls'], 'library call')}; "
        f"{amount(t['bytes'], 'B')} moved, least {amount(t['least_bytes'], 'B')}; "
    )
    times = [f"{time_text(t['predicted_us'])} predicted"]
    if t["measured_us"] is not None:
        times.insert(0, f"{time_text(t['measured_us'])} measured")
    if t["call_us"] is not None:
        times.append(f"{time_text(t['call_us'])} a call")
    if t["eager_us"] is not None:
        times.append(f"eager {time_text(t['eager_us'])}")
    return text + ", ".join(times)


# --------------------------------------------------------------------------------- Dynamo's notes
def breaks_of(reasons: Sequence[Any]) -> list[GraphBreak]:
    """Dynamo's ``GraphCompileReason`` objects: each place and reason once."""
    found: dict[tuple[str, str, int], GraphBreak] = {}
    for r in reasons:
        stack = [f for f in r.user_stack if not f.filename.startswith(f"{FOLDER}/")]
        frame: traceback.FrameSummary | None = (stack or r.user_stack or [None])[-1]
        what, explanation, hint = short_reason(str(r.reason))
        file, line = (frame.filename, frame.lineno or 0) if frame is not None else ("", 0)
        known = found.setdefault(
            (what, file, line),
            {"reason": what, "explanation": explanation, "hint": hint, "file": file, "line": line,
             "code": one_line((frame.line or "") if frame is not None else ""), "count": 0},
        )  # fmt: skip
        known["count"] += 1
    return list(found.values())


def frames_of(metrics: Sequence[Any], title: str) -> list[Frame]:
    """Dynamo's ``CompilationMetrics``: a row per compiled frame. The frame that calls what is
    explained has its `title`."""

    def own(m: Any) -> bool:
        return str(m.co_filename or "").startswith(f"{FOLDER}{os.sep}")

    return [
        {
            "function": title if own(m) else str(m.co_name or ""),
            "file": "" if own(m) else str(m.co_filename or ""),
            "line": 0 if own(m) else int(m.co_firstlineno or 0),
            "recompiled": str(m.recompile_reason or ""),
            "guards": int(m.guard_count or 0),
            "seconds": float(m.entire_frame_compile_time_s or 0.0),
            "backend_s": float(m.backend_compile_time_s or 0.0),
        }
        for m in metrics
        if m.fail_type is None and m.co_name is not None
    ]


__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "Frame",
    "GraphBreak",
    "Report",
    "Totals",
    "breaks_of",
    "frames_of",
    "headline",
    "report_data",
    "versions",
]
