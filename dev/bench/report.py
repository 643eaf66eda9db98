"""Tables and means of measured rows.

A row: ``suite, case, dtype, backward, clock`` ("device" or "wall"), ``bytes`` (unavoidable),
``flops``, ``copy_gbps`` (measured in the same rounds), ``matmul_tflops`` where contractions count,
and ``results``: by contender ``us`` (median of the rounds; least on a CPU), ``wall_us``,
``host_us``, ``peak_mb``, ``first_call_s``, ``error`` (largest difference from float64 over the
largest magnitude), ``right``, ``layout`` (shapes and strides are eager's), ``kernels``,
``library``, ``predicted_us``; or ``failure`` or ``absent`` with the reason.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
OURS, PEER, BEST = "deuteron", "inductor", "inductor-max"


def limit_us(row: Row) -> float:
    """The time that the bytes take at the speed of a copy, or the FLOPs at that of a product.
    Programs whose cost is that of the call have no such limit."""
    if "copy_gbps" not in row or row["suite"] == "launch":
        return math.nan
    memory = row["bytes"] / row["copy_gbps"] / 1e3
    if row.get("matmul_tflops"):
        return max(memory, row["flops"] / row["matmul_tflops"] / 1e6)
    return float(memory)


def us(row: Row, contender: str) -> float:
    return float(row["results"].get(contender, {}).get("us", math.nan))


def over_limit(row: Row, contender: str = OURS) -> float:
    return us(row, contender) / limit_us(row)


def over_peer(row: Row, contender: str = OURS) -> float:
    return us(row, contender) / us(row, PEER)


def prediction_error(row: Row) -> float:
    """Of the cost model: predicted over measured, less one. Library calls are not predicted."""
    facts = row["results"].get(OURS, {})
    if facts.get("library") or not facts.get("predicted_us") or "us" not in facts:
        return math.nan
    return float(facts["predicted_us"] / facts["us"] - 1)


def geometric(values: Iterable[float]) -> float:
    known = [v for v in values if v == v]
    return math.exp(statistics.fmean(map(math.log, known))) if known else math.nan


def median(values: Iterable[float]) -> float:
    known = [v for v in values if v == v]
    return statistics.median(known) if known else math.nan


def remarks(row: Row) -> str:
    """What is wrong with a row, if anything."""
    if "failure" in row:
        return "FAILED " + row["failure"][:200]
    notes = []
    for name, facts in row["results"].items():
        if "failure" in facts:
            notes.append(f"{name} FAILED {facts['failure'][:160]}")
        if facts.get("right") is False:
            notes.append(f"{name} WRONG {facts['error']:.1e}")
        if facts.get("layout") is False and name == OURS:
            notes.append("strides differ")
        if facts.get("repeats") is False and name == OURS:
            said = "" if facts.get("unordered") else ", and the Record does not say so"
            notes.append("differs from run to run" + said)
        if "not_captured" in facts:
            notes.append(f"{name} not captured: {facts['not_captured'][:80]}")
        if facts.get("fallbacks"):
            notes.append(f"fallback: {facts['fallbacks'][0][:80]}")
    return "; ".join(notes)


def headline(contenders: Sequence[str]) -> str:
    times = "".join(f"{c[:10]:>11}" for c in contenders)
    return f"{'case':46}{'limit us':>10}{times}{'/limit':>8}{'/induc':>8}{'kern':>6}{'pred':>7}"


def table_row(row: Row, contenders: Sequence[str]) -> str:
    """One line of the live table: times in us, ours over the limit and over Inductor, kernels and
    library calls, error of the prediction."""
    facts = row["results"].get(OURS, {})
    times = "".join(f"{us(row, c):11.1f}" for c in contenders)
    kernels = f"{facts.get('kernels', 0)}+{facts.get('library', 0)}"
    line = f"{row['case'][:45]:46}{limit_us(row):10.1f}{times}{over_limit(row):8.2f}"
    line += f"{over_peer(row):8.2f}{kernels:>6}{prediction_error(row):+7.0%}"
    return f"{line} {remarks(row)}".rstrip()


def cold_headline() -> str:
    names = "".join(f"{n:>10}{OURS:>10}{'ratio':>8}" for n in (PEER, PEER))
    return f"{'seconds; cold, then warm':40}{names}"


def cold_row(row: Row) -> str:
    """Inductor, Deuteron and their ratio: with empty caches, and in a second process."""
    line = f"{row['case'][:39]:40}"
    for what in ("cold_s", "warm_s"):
        theirs, ours = (row["results"].get(c, {}).get(what, math.nan) for c in (PEER, OURS))
        line += f"{theirs:10.2f}{ours:10.2f}{ours / theirs if theirs else math.nan:8.3f}"
    failures = [f"{n} {f['failure'][:100]}" for n, f in row["results"].items() if "failure" in f]
    return f"{line} {'; '.join(failures)}".rstrip()


def means(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of a set of rows, as in the summary."""
    limits = {r["case"]: over_limit(r) for r in rows}
    peers = {r["case"]: over_peer(r) for r in rows}
    best = {
        r["case"]: us(r, OURS) / min(us(r, PEER), us(r, BEST) if BEST in r["results"] else math.inf)
        for r in rows
    }

    def worst(values: dict[str, float]) -> tuple[str, float]:
        known = {k: v for k, v in values.items() if v == v}
        name = max(known, key=known.__getitem__, default="")
        return name, known.get(name, math.nan)

    return {
        "cases": len(rows),
        "limit": geometric(limits.values()),
        "worst_limit": worst(limits),
        "peer": geometric(peers.values()),
        "worst_peer": worst(peers),
        "worst_best": worst(best),
        "slower": sorted(k for k, v in best.items() if v > 1.05),
        "prediction": median(abs(prediction_error(r)) for r in rows),
        "eager": geometric(us(r, OURS) / us(r, "eager") for r in rows),
        "failed": sum(OURS in r["results"] and "us" not in r["results"][OURS] for r in rows)
        + sum("failure" in r for r in rows),
        "wrong": sum(r["results"].get(OURS, {}).get("right") is False for r in rows),
    }


def summary(documents: Sequence[Row]) -> str:
    """Per suite and over all: geometric means, worst cases, the prediction's median error."""
    rows = [r for d in documents for r in d["rows"]]
    lines = [
        f"{'suite':12}{'cases':>6}{'/limit':>8}{'worst':>7}{'/induc':>8}{'worst':>7}{'/eager':>8}"
        f"{'pred err':>9}{'failed':>7}{'wrong':>6}  worst case over the limit"
    ]
    for suite in [*dict.fromkeys(r["suite"] for r in rows), "all"]:
        m = means([r for r in rows if suite in (r["suite"], "all")])
        lines.append(
            f"{suite:12}{m['cases']:6}{m['limit']:8.2f}{m['worst_limit'][1]:7.2f}{m['peer']:8.2f}"
            f"{m['worst_peer'][1]:7.2f}{m['eager']:8.2f}{m['prediction']:9.0%}{m['failed']:7}"
            f"{m['wrong']:6}  {m['worst_limit'][0]}"
        )
    slower = [f"{k} {v:.2f}" for k, v in sorted(_slower(rows).items(), key=lambda kv: -kv[1])]
    if slower:
        lines.append(f"more than 5 % slower than Inductor in {len(slower)}: {', '.join(slower)}")
    return "\n".join(lines)


def _slower(rows: Sequence[Row]) -> dict[str, float]:
    return {r["case"]: over_peer(r) for r in rows if over_peer(r) > 1.05}
