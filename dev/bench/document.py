"""docs/performance.md from the rows of runs: machine, command, tables, means.

In: documents, as `run.run_bench` makes them, perhaps of several machines. Out: Markdown. What was
measured twice on a machine counts as measured last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from dev.bench.report import (
    OURS,
    PEER,
    Row,
    geometric,
    limit_us,
    means,
    over_limit,
    prediction_error,
    remarks,
    us,
)

PAGE_HEAD = """# Performance

Written by `python -m dev bench --report`; nothing here is typed by hand. How it is measured:

- All contenders of a row run in one process, round by round in turn, so that a change in the
  machine's speed meets all of them.
- On a GPU a time is the device's: calls over several sets of inputs, three times as much memory as
  the last cache holds, captured into one CUDA graph whose replays are timed by events; the median
  of the rounds. Suites `launch` and `models` are timed by the wall clock, in which the host counts.
  On a CPU times are the wall clock's, the least of the rounds.
- *limit* is the time that the unavoidable bytes take at the speed of a copy, measured in the same
  rounds: a forward reads its inputs once and writes its outputs once; a backward reads the
  gradients of the outputs and the inputs that it needs, and writes the gradients of the inputs.
  Where products are part of a program and would take longer than that, it is their FLOPs at the
  speed of a large square product of the library.
- *error* is the largest difference from float64 over the largest magnitude, the worst result of the
  call (of networks: root of summed squares, over all results); a note says where it exceeds twice
  eager's. Four more calls are compared with the first bit by bit; a note says where they differ.
- *predicted* is the cost model's time over the measured, less one; programs with library calls have
  none.
"""


COLD_TITLE = "Compile time"  # the heading of first calls


def markdown(documents: Sequence[Row], before: str = "") -> str:
    """The whole document. `before` is what is replaced: what it says of machines that no document
    names, and of suites that none has of a machine, stays."""
    sections = {
        x.split("\n", 1)[0]: x.rstrip() for x in re.split(r"^(?=## )", before, flags=re.M)[1:]
    }
    made: dict[str, list[str]] = {}
    for key in dict.fromkeys(machine_key(d) for d in documents):
        lines = machine_part([d for d in documents if machine_key(d) == key])
        text = "\n".join(lines)
        made.setdefault(lines[0], []).append(text + others(text, sections.get(lines[0], "")))
    sections |= {title: "\n\n".join(texts) for title, texts in made.items()}
    return "\n\n".join((PAGE_HEAD, *sections.values())).rstrip() + "\n"


def others(text: str, before: str) -> str:
    """What a machine's part said of cases that its new one does not have, with the commands that
    measured them."""
    seen = {(name, cell(x)) for name, lines in tables(text) for x in lines}
    renewed = {name for name, _ in tables(text)}
    kept: dict[str, str] = {}
    for name, lines in tables(before):
        head = next((k for k, x in enumerate(lines) if x.startswith("|---")), 0) + 1
        rows = [x for x in lines[head:] if name not in renewed or x[:1] == "|"]
        rows = [x for x in rows if x[:1] != "|" or (name, cell(x)) not in seen]
        seen |= {(name, cell(x)) for x in rows}
        if any(x[:1] == "|" for x in rows):
            kept["\n".join((f"### {name}", *lines[:head], *rows))] = name
    if not kept:
        return ""
    asked = {"--cold" if name == COLD_TITLE else name for name in kept.values()}
    commands = [
        c
        for c in re.findall(r"^    python -m dev bench .*", before, flags=re.M)
        if asked & set(c.split()) and c not in text
    ]
    return "\n".join(["", "", "Measured before:", "", *commands]) + "".join(
        f"\n\n{t}" for t in kept
    )


def tables(text: str) -> list[tuple[str, list[str]]]:
    """Headings of a machine's part, and the lines below each."""
    sections = []
    for part in re.split(r"^### ", text, flags=re.M)[1:]:
        name, *lines = part.split("\n\nMeasured before:")[0].rstrip().split("\n")
        sections.append((name, lines))
    return sections


def cell(row: str) -> str:
    """The first one of a table's row."""
    return row.split(" | ")[0]


def machine_key(document: Row) -> tuple[str, str, str]:
    m = document["machine"]
    return m["device"], m["name"], m["torch"]


def latest(documents: Sequence[Row], field: str) -> list[Row]:
    newest = {(r["suite"], r["case"]): r for d in documents for r in d.get(field, [])}
    return list(newest.values())


def machine_part(documents: Sequence[Row]) -> list[str]:
    m = documents[0]["machine"]
    rows = latest(documents, "rows")
    versions = ", ".join(f"{n} {m[n]}" for n in ("torch", "triton", "python") if n in m)
    cores = f"{m['cores']} multiprocessors" if m["device"] == "cuda" else f"{m['threads']} threads"
    copies = [r["copy_gbps"] for r in rows if "copy_gbps" in r]
    lines = [f"## {m['name']} ({'GPU' if m['device'] == 'cuda' else 'CPU'})", ""]
    speed = f" Copy: {sorted(copies)[len(copies) // 2]:.0f} GB/s (median)." if copies else ""
    lines += [f"{cores}; {versions}.{speed} Commands:", ""]
    for d in documents:
        seconds = f", {d['seconds']:.0f} s" if "seconds" in d else ""
        lines.append(f"    {d['command']}  # {d['machine']['date']}{seconds}")
    if rows:
        lines += ["", *overview(rows)]
    for suite in dict.fromkeys(r["suite"] for r in rows):
        lines += ["", f"### {suite}", "", *table([r for r in rows if r["suite"] == suite])]
    cold = latest(documents, "cold")
    if cold:
        lines += ["", f"### {COLD_TITLE}", "", *cold_table(cold, m["device"])]
    return lines


def number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if value == value and value != math.inf else "–"


def time(value: float) -> str:
    """us, with three figures at least."""
    if value != value:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def rule(count: int) -> str:
    return "|---" + "|---:" * (count - 1) + "|"


def overview(rows: Sequence[Row]) -> list[str]:
    """Means and worst cases by suite, and over all with a limit."""
    head = ["suite", "cases", "/ limit", "worst", f"/ {PEER}", "worst", "/ best Inductor, worst"]
    head += ["/ eager", "prediction off by (median)", "failed", "wrong"]
    lines = [line(head), rule(len(head))]
    bound = [r for r in rows if r["suite"] in ("norms", "losses", "reductions", "layout")]
    groups = [
        (s, [r for r in rows if r["suite"] == s]) for s in dict.fromkeys(r["suite"] for r in rows)
    ]
    if len({r["suite"] for r in bound}) > 1:
        groups.append(("norms … layout", bound))
    for name, group_rows in groups:
        m = means(group_rows)
        prediction = f"{m['prediction']:.0%}" if m["prediction"] == m["prediction"] else "–"
        cells = [name, str(m["cases"]), number(m["limit"]), number(m["worst_limit"][1])]
        cells += [number(m["peer"]), number(m["worst_peer"][1]), number(m["worst_best"][1])]
        cells += [number(m["eager"]), prediction, str(m["failed"]), str(m["wrong"])]
        lines.append(line(cells))
    return [*lines, "", "Geometric means; times of Deuteron over the other."]


def table(rows: Sequence[Row]) -> list[str]:
    """A suite's rows: times in us, ratios, host time and memory beside Inductor's."""
    timed = {n for r in rows for n, f in r["results"].items() if "us" in f}
    order = ["eager", PEER, "inductor-max", "inductor-reduce", "handwritten", "handwritten-cuda"]
    names = [n for n in order if n in timed]
    names += [n for n in (OURS, "deuteron-reduce") if n in timed]
    head = ["case", "limit us", *names, "/ limit", f"/ {PEER}", "host us", f"{PEER}'s"]
    head += ["peak MB", f"{PEER}'s", "error", "kernels", "predicted", ""]
    lines = [line(head), rule(len(head) - 1) + "---|"]
    for r in rows:
        ours, theirs = r["results"].get(OURS, {}), r["results"].get(PEER, {})
        off = prediction_error(r)
        calls = f" + {ours['library']}" if ours.get("library") else ""
        cells = [r["case"], time(limit_us(r)), *(time(us(r, n)) for n in names)]
        cells += [number(over_limit(r)), number(us(r, OURS) / us(r, PEER))]
        cells += [time(f.get("host_us") or math.nan) for f in (ours, theirs)]
        cells += [time(f.get("peak_mb", math.nan)) for f in (ours, theirs)]
        cells += [f"{ours['error']:.1e}" if "error" in ours else "–"]
        cells += [f"{ours['kernels']}{calls}" if "kernels" in ours else "–"]
        cells += [f"{off:+.0%}" if off == off else "–", remarks(r).replace("|", "\\|")]
        lines.append(line(cells))
    return lines


def cold_table(rows: Sequence[Row], device: str) -> list[str]:
    """Seconds of the first call, cold and warm."""
    head = ["first call in a new process, s", f"{PEER}, cold", f"{OURS}, cold", "ratio"]
    head += [f"{PEER}, warm", f"{OURS}, warm", "ratio"]
    lines = [line(head), rule(len(head))]
    for r in rows:
        cells = [r["case"]]
        for what in ("cold_s", "warm_s"):
            theirs, ours = (r["results"].get(c, {}).get(what, math.nan) for c in (PEER, OURS))
            cells += [number(theirs), number(ours), number(ours / theirs)]
        lines.append(line(cells))
    ratio = geometric(
        r["results"].get(OURS, {}).get("cold_s", math.nan)
        / r["results"].get(PEER, {}).get("cold_s", math.nan)
        for r in rows
    )
    remark = (
        "Cold: empty caches; warm: those that the cold process left. Dynamo and AOTAutograd are"
    )
    remark += " in all figures."
    counts = {len(f["all_s"]) for r in rows for f in r["results"].values() if "all_s" in f}
    if max(counts, default=1) > 1:
        remark += f" Medians of {' or '.join(map(str, sorted(counts)))} calls of each, in turn."
    if device == "cuda":
        remark += (
            " A process that builds kernels for Deuteron has started before, as the backend was"
        )
        remark += " imported; Inductor's start in the call."
    return [*lines, "", f"{remark} Geometric mean of the cold ratios {number(ratio)}."]
