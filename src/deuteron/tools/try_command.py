"""`deuteron try FILE:MODEL`: a model under eager, Inductor and Deuteron, a table and a verdict.

In: a `bench_worker.Request`. Out: the table of `deuteron bench` with sentences that say which to
take and why, or JSON. Exit status 1 where Deuteron failed or is wrong.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from rich.console import Console

from deuteron.tools.bench_command import EVEN, LOG_LINES, OURS, Row, measured, show, verdict
from deuteron.tools.bench_worker import Request

# Memory that is worth a word: a share, and megabytes.
MEMORY_SHARE, MEMORY_MB = 0.1, 1.0


def run_try(request: Request, as_json: bool) -> int:
    """Measures and prints. Returns the exit status."""
    with Console(stderr=True).status("") as status, tempfile.TemporaryFile("w+") as log:
        rows, about = measured(request, status, log)
        if any("failure" in r for r in rows.values()):
            log.seek(0)
            sys.stderr.writelines(log.readlines()[-LOG_LINES:])
    right, _ = verdict(rows, about)
    sentences = list(advice(rows, request))
    if as_json:
        facts = {**asdict(request), **about, "rows": rows, "right": right, "take": best(rows)}
        print(json.dumps({**facts, "verdict": " ".join(sentences)}))
    else:
        show(Console(), request, rows, about, " ".join(sentences))
    return int(not right)


def usable(row: Row) -> bool:
    """Whether it ran, and right."""
    return "failure" not in row and not row.get("problems") and "ms" in row


def best(rows: Mapping[str, Row]) -> str:
    """The fastest of those that are right; of equal ones the first, which compile less."""
    fastest = min(r["ms"] for r in rows.values() if usable(r))
    return next(n for n, r in rows.items() if usable(r) and r["ms"] <= fastest * (1 + EVEN))


def advice(rows: Mapping[str, Row], request: Request) -> Iterator[str]:
    """Which to take, what it costs, what to look at."""
    take, eager = best(rows), rows["eager"]
    row = rows[take]
    if take == "eager":
        yield "Stay with eager: no compiler makes this faster."
    else:
        yield f"Take {take}: {eager['ms'] / row['ms']:.2f} times as fast as eager" + beside(
            rows, take
        )
        yield from memory(row, eager)
        yield from earned(row, eager)
    for name, r in rows.items():
        if "failure" in r:
            yield f"{name} failed: {r['failure']}."
        elif r.get("problems"):
            yield f"{name} is wrong: {r['problems'][0]}."
    breaks = rows[OURS].get("breaks", 0)
    if breaks:
        places = "a place" if breaks == 1 else f"{breaks} places"
        yield f"Dynamo breaks the graph at {places}: `deuteron explain` says where."
    if take != OURS and "failure" not in rows[OURS]:
        yield f"Why Deuteron is not faster: `deuteron report {request.target}`."


def beside(rows: Mapping[str, Row], take: str) -> str:
    others = [n for n in rows if n not in ("eager", take) and usable(rows[n])]
    words = [f"{rows[n]['ms'] / rows[take]['ms']:.2f} times as {n}" for n in others]
    return (", " + ", ".join(words) if words else "") + "."


def memory(row: Row, eager: Row) -> Iterator[str]:
    now, before = row.get("peak_mb"), eager.get("peak_mb")
    if now is None or before is None or abs(now - before) < max(MEMORY_MB, MEMORY_SHARE * before):
        return
    less = "less" if now < before else "more"
    yield f"It holds {abs(now - before):.1f} MB {less} ({now:.1f} against {before:.1f} MB)."


def earned(row: Row, eager: Row) -> Iterator[str]:
    """After how many calls the first call's time is won back."""
    saved = (eager["ms"] - row["ms"]) / 1e3
    if "cold_s" in row and saved > 0:
        calls = row["cold_s"] / saved
        yield f"Its first call takes {row['cold_s']:.1f} s, won back after {calls:,.0f} calls."


__all__ = ["advice", "best", "run_try"]
