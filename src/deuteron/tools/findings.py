"""Where the time goes and why: what a report says first.

In: the parts of a report. Out: findings, those that lose most time first. A finding is a row of
equal steps (`tools.explain_text.rows_of`), the time that they take beyond the device's limit, and
sentences that follow from figures of the report.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deuteron.tools.advice import advice
from deuteron.tools.explain_text import Row, rows_of
from deuteron.tools.names import together
from deuteron.tools.words import amount, time_text

Data = Mapping[str, Any]
# Shares of the device's limit: from here on a step is at it; below, something else holds it up.
AT_LIMIT, FAR = 0.8, 0.4
# A step that takes this many times what was predicted is told.
OFF = 2.0
MOST = 10


def findings(parts: Sequence[Data], devices: Mapping[str, Data]) -> list[dict[str, Any]]:
    """At most `MOST`. What a step repeats counts as often as it runs; that step has its time."""
    rows = [(p, r) for p in parts for r in rows_of(p)]
    total = sum(r.us for p, r in rows if p["phase"] != "chunk") or 1.0
    rows.sort(key=lambda pr: -lost(*pr))
    return [
        {
            "title": title(p, r),
            "part": p["id"],
            "steps": [s["id"] for s in r.steps],
            "us": r.us * p["times"],
            "lost_us": lost(p, r),
            "of_total": r.us * p["times"] / total,
            "share": r.share,
            "why": list(reasons(p, r, devices)),
        }
        for p, r in rows[:MOST]
        if lost(p, r) > 0
    ]


def lost(part: Data, row: Row) -> float:
    return float(part["times"] * sum(s["lost_us"] for s in row.steps))


def title(part: Data, row: Row) -> str:
    where = together(dict.fromkeys(row.modules)) or ", ".join(row.lines)
    count = len(row.steps) * part["times"]
    times = f" ×{count}" if count > 1 else ""
    return f"{row.what}{times} — {where or 'the program'} ({part['phase']})"


def reasons(part: Data, row: Row, devices: Mapping[str, Data]) -> Iterator[str]:
    s = row.steps[0]
    device = devices[s["device"]]
    limit = sum(x["limit_us"] for x in row.steps) / len(row.steps)
    each = row.us / len(row.steps)
    start = device["launch_us"]
    if row.share >= AT_LIMIT:
        less = "bytes" if s["limit"] == "memory" else "operations"
        yield f"It is at {row.share:.0%} of the device's limit: only fewer {less} make it faster."
    elif limit < start:
        yield (
            f"It is too small for the device: {time_text(limit)} of work in a step of "
            f"{time_text(each)}, where starting one costs {time_text(start)}. Larger batches, or "
            "mode='reduce-overhead' on a GPU, help."
        )
    elif s["kind"] == "library":
        shape = f" on {s['product']['shape']}" if s["product"] else ""
        advised = ": a smaller dtype helps" if s["product"] and s["limit"] == "compute" else ""
        if advised and any(int(n) % 64 for n in re.findall(r"\d+", s["product"]["shape"])):
            advised = ": sizes that are multiples of 64, or a smaller dtype, help"
        yield f"The library reaches {row.share:.0%} of the {s['limit']} limit{shape}{advised}."
    elif row.share < FAR:
        yield (
            f"It reaches {row.share:.0%} of the {s['limit']} limit: {amount(s['bytes'], 'B')} and "
            f"{amount(s['flops'], 'FLOP')} would take {time_text(limit)}, it takes "
            f"{time_text(each)}."
        )
    else:
        yield f"It reaches {row.share:.0%} of the {s['limit']} limit."
    measured = [x for x in row.steps if x["measured_us"] is not None]
    if measured:
        predicted = sum(x["predicted_us"] for x in measured) / len(measured)
        if predicted and each / predicted > OFF:
            yield (
                f"The cost model expected {time_text(predicted)}: it takes "
                f"{each / predicted:.1f} times that."
            )
    again = sorted({o["op"] for x in row.steps for o in x["ops"] if o["again"]})
    if again:
        yield f"It computes again what the forward had: {', '.join(again[:6])}."
    yield from refused(part, row)


def refused(part: Data, row: Row) -> Iterator[str]:
    """The merge of these steps that was refused with most at stake."""
    nodes = {o["node"] for s in row.steps for o in s["ops"]}
    near = [r for r in part["refusals"] if r["first_node"] in nodes or r["second_node"] in nodes]
    for r in sorted(near, key=lambda r: -r["bytes"])[:1]:
        if r["bytes"]:
            yield (
                f"Not fused: {r['first_label']} with {r['second_label']} ({r['reason']}: "
                f"{advice(r['reason']).meaning}); {amount(r['bytes'], 'B')} at stake."
            )


__all__ = ["findings"]
