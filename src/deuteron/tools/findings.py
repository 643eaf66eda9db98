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
# Share of the device's limit from which on a step is at it.
AT_LIMIT = 0.8
# A step that takes this many times what was predicted is told.
OFF = 2.0
# A refused merge is a reason where it would save this part of a step's bytes.
NOTICED = 0.05
MOST = 100


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
    times = f", {count} times" if count > 1 else ""
    return f"{row.what} — {where or 'the program'} ({part['phase']}{times})"


def reasons(part: Data, row: Row, devices: Mapping[str, Data]) -> Iterator[str]:
    s = row.steps[0]
    device = devices[s["device"]]
    us, limit = mean(row, "us"), mean(row, "limit_us")
    it, of = ("Each", f" (mean of {len(row.steps)})") if len(row.steps) > 1 else ("It", "")
    start, reached = device["launch_us"], f"{row.share:.0%} of the {s['limit']} limit"
    if row.share >= AT_LIMIT:
        less = "bytes" if s["limit"] == "memory" else "operations"
        yield f"{it} is at {reached}: only fewer {less} make it faster."
    elif limit < start and us - limit < 2 * start:
        larger = "Larger batches" + (
            ", or mode='reduce-overhead', help." if on_gpu(s) else " help."
        )
        yield (
            f"{it} is too small for the device: {time_text(limit)} of work in a step of "
            f"{time_text(us)}, where starting one costs {time_text(start)}. {larger}"
        )
    elif s["kind"] == "library":
        made = (part["tensors"][n]["layout"].partition("]")[0] for n in s["writes"][:1])
        what = (
            f" on {s['product']['shape']}" if s["product"] else "".join(f" for {n}]" for n in made)
        )
        yield f"The library reaches {reached}{what}{', '.join(smaller(s, device))}."
    else:
        yield (
            f"{it} reaches {reached}: {amount(s['bytes'], 'B')} and {amount(s['flops'], 'FLOP')} "
            f"would take {time_text(limit)}, it takes {time_text(us)}{of}."
        )
        if limit < start and on_gpu(s):
            yield "So little work cannot fill the device: larger batches help."
    yield from mispredicted(row)
    again = sorted({o["op"] for x in row.steps for o in x["ops"] if o["again"]})
    if again:
        yield f"It computes again what the forward had: {', '.join(again[:6])}."
    yield from refused(part, row)


def mean(row: Row, figure: str) -> float:
    return float(sum(s[figure] for s in row.steps)) / len(row.steps)


def on_gpu(s: Data) -> bool:
    return bool(s["device"] != "cpu")


def smaller(s: Data, device: Data) -> Iterator[str]:
    """What makes a library's product faster: units of smaller numbers where the device has faster
    ones (a CPU without them multiplies bfloat16 at a quarter of the speed of float32: Xeon at
    2.5 GHz, 27 and 115 GFLOP/s), whole tiles of tensor cores on a GPU (a CPU takes 512 x 256 by
    256 x 5000 as fast as by 256 x 5056: 113 and 119)."""
    if not s["product"] or s["limit"] != "compute":
        return
    sizes = re.findall(r"\d+", s["product"]["shape"].rpartition(" of ")[2])
    if on_gpu(s) and any(int(n) % 64 for n in sizes):
        yield "; sizes that are multiples of 64 help"
    speed = device["gflops"]
    if max(speed.values()) > speed.get(s["unit"], 0.0):
        yield "; a smaller dtype helps"


def mispredicted(row: Row) -> Iterator[str]:
    """Where measured steps take much longer than predicted: by how much, what of the kernel makes
    its prediction uncertain, and the option that measures."""
    s, us, predicted = row.steps[0], mean(row, "us"), mean(row, "predicted_us")
    if s["measured_us"] is None or not predicted or us <= OFF * predicted:
        return
    yield f"That is {us / predicted:.1f} times the {time_text(predicted)} that were predicted."
    if s["uncertain"]:
        yield (
            f"Its prediction was uncertain ({s['uncertain']}): options={{'guard': 'measure'}} "
            "times it beside its operations apart and keeps what is faster."
        )


def refused(part: Data, row: Row) -> Iterator[str]:
    """The merge of these steps that was refused with most at stake, where that is a part of what
    a step moves that somebody would notice."""
    nodes = {o["node"] for s in row.steps for o in s["ops"]}
    near = [r for r in part["refusals"] if r["first_node"] in nodes or r["second_node"] in nodes]
    most = max(near, key=lambda r: r["bytes"], default=None)
    if most and most["bytes"] > NOTICED * row.steps[0]["bytes"]:
        yield (
            f"Not fused: {most['first_label']} with {most['second_label']} ({most['reason']}: "
            f"{advice(most['reason']).meaning}); {amount(most['bytes'], 'B')} at stake."
        )


__all__ = ["findings"]
