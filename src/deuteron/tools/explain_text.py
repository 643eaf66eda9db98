"""A report as text: short (sorted by time, equal steps of several layers in one row) and full.

In: a report (`tools.report_data`). Out: text of lines.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deuteron.tools.advice import advice
from deuteron.tools.names import together
from deuteron.tools.words import amount, counted, time_text

ROWS, LINES = 12, 3  # of a part, and of a row, in the short text
Data = Mapping[str, Any]


@dataclass
class Row:
    """Steps that do the same in several layers."""

    what: str
    kind: str
    lines: tuple[str, ...]
    modules: list[str] = field(default_factory=list)
    steps: list[Data] = field(default_factory=list)

    @property
    def us(self) -> float:
        return sum(s["us"] for s in self.steps)

    @property
    def share(self) -> float:
        return min(1.0, sum(s["limit_us"] for s in self.steps) / self.us) if self.us else 1.0


def short(report: Data) -> str:
    """A few lines: the headline, breaks, the rows that take longest, what was not fused."""
    return "\n".join([report["headline"], body(report)])


def body(report: Data) -> str:
    """The same without the headline."""
    lines: list[str] = [*break_lines(report)]
    for p in report["parts"]:
        lines += ["", *part_lines(p)]
    for f in report["fallbacks"]:
        lines.append(f"fallback: {f.get('what', '')}: {f.get('reason', '')}")
    refused = report["totals"]["refusals"]
    if refused:
        classes = ", ".join(f"{reason} {n}" for reason, n in refused.items())
        lines += ["", f"not fused: {counted(sum(refused.values()), 'pair')} ({classes})"]
        example = next(r for p in report["parts"] for r in p["refusals"])
        a, b = (example[k].rpartition(": ")[0] for k in ("first_label", "second_label"))
        lines.append(f'  explanation.why("{a}", "{b}") tells of one; explanation.full() has all')
    return "\n".join(lines)


def break_lines(report: Data) -> Iterator[str]:
    for b in report["breaks"]:
        times = f" ({b['count']} times)" if b["count"] > 1 else ""
        where = f"{b['file']}:{b['line']}: {b['code']}: " if b["file"] else ""
        yield f"graph break{times}: {where}{b['reason']}"
        yield from (f"  {b[k]}" for k in ("explanation", "hint") if b[k])
    for f in report["frames"]:
        if f["recompiled"]:
            at = f" ({f['file']}:{f['line']})" if f["file"] else ""
            yield f"recompiled: {f['function']}{at}: {f['recompiled']}"


def part_lines(part: Data) -> Iterator[str]:
    yield (
        f"{part['phase']}: {counted(part['operations'], 'operation')} → "
        f"{counted(part['kernels'], 'kernel')} + {counted(part['library_calls'], 'library call')}, "
        f"{amount(part['bytes'], 'B')}, {time_of(part)}"
        + (f"; {part['times']} times a call" if part["times"] > 1 else "")
    )
    rows = rows_of(part)
    for row in rows[:ROWS]:
        times = f"×{len(row.steps)}" if len(row.steps) > 1 else ""
        where = together(dict.fromkeys(row.modules))
        more = ", ..." if len(row.lines) > LINES else ""
        beside = "  ".join(w for w in (where, ", ".join(row.lines[:LINES]) + more) if w)
        yield (
            f"  {time_text(row.us):>8} {row.share:>4.0%} of limit {times:>4}  {row.kind} {row.what}"
            + (f"  [{beside}]" if beside else "")
        )
        yield from (f"{'':29}{note}" for note in row.steps[0]["notes"] if note[0] != " ")
    if len(rows) > ROWS:
        rest = sum(r.us for r in rows[ROWS:])
        yield f"  {time_text(rest):>8} in {len(rows) - ROWS} more rows: explanation.full()"
    for entry in part["unordered"]:
        yield f"  may differ from run to run: {entry['what']}: {entry['reason']}"


def time_of(part: Data) -> str:
    if part["measured_us"] is not None:
        predicted = time_text(part["predicted_us"])
        return f"{time_text(part['measured_us'])} measured, {predicted} predicted"
    return f"{time_text(part['predicted_us'])} predicted"


def rows_of(part: Data) -> list[Row]:
    """The longest first."""
    rows: dict[Any, Row] = {}
    for s in part["steps"]:
        if s["kind"] == "view":
            continue
        places = [part["places"][k] for k in s["places"]]
        lines = tuple(dict.fromkeys(where(p) for p in places if p["file"]))
        modules = list(dict.fromkeys(p["module"] for p in places if p["module"]))
        what = op_text(s)
        shape = together(modules) if len(modules) < 2 else ""
        key = (s["kind"], what, lines, "" if lines else shape, s["bytes"])
        row = rows.setdefault(key, Row(what, s["kind"], lines))
        row.steps.append(s)
        row.modules += modules
    return sorted(rows.values(), key=lambda r: -r.us)


def op_text(s: Data, most: int = 5) -> str:
    """The operations of a step: "add, gelu ×2"."""
    if s["kind"] != "kernel":
        return str(s["name"]).removeprefix("aten.").removesuffix(".default")
    counts = Counter(o["op"] for o in s["ops"] if o["op"] != "getitem")
    words = [f"{op} ×{n}" if n > 1 else op for op, n in counts.items()]
    return ", ".join(words[:most]) + (", ..." if len(words) > most else "")


def where(place: Data) -> str:
    """``model.py:12``."""
    return f"{str(place['file']).rpartition('/')[2]}:{place['line']}" if place["file"] else ""


# ------------------------------------------------------------------------------------------ full
def full(report: Data) -> str:
    """Everything, in order of execution."""
    lines: list[str] = [report["headline"], *break_lines(report)]
    for p in report["parts"]:
        lines += ["", *full_part(p)]
    return "\n".join(lines)


def full_part(part: Data) -> Iterator[str]:
    yield next(iter(part_lines(part)))
    for s in part["steps"]:
        if s["kind"] != "view":
            yield from step_lines(part, s)
    for title, key in (("saved for the backward", "saved"), ("computed again", "again")):
        if part[key]:
            yield f"  {title}: {len(part[key])}"
            for d in part[key]:
                yield f"    {d['label'] or d['first']}: {d['reason']}{stake(d)}"
    if part["refusals"]:
        yield f"  not fused: {counted(len(part['refusals']), 'pair')}, {part['merges']} merged"
        for r in sorted(part["refusals"], key=lambda r: -r["bytes"]):
            yield f"    {r['first_label']} + {r['second_label']}: {r['reason']} ({r['detail']})" + (
                stake(r)
            )
            yield f"      {advice(r['reason']).meaning}"
    yield from decision_lines(part["decisions"])
    for entry in part["unordered"]:
        yield f"  may differ from run to run: {entry['what']}: {entry['reason']}"
    for f in part["fallbacks"]:
        yield f"  fallback: {f.get('what', '')}: {f.get('reason', '')}"


def step_lines(part: Data, s: Data) -> Iterator[str]:
    measured = f"{time_text(s['measured_us'])} measured, " if s["measured_us"] is not None else ""
    yield (
        f"  {s['kind']} {s['name']}: {amount(s['bytes'], 'B')}, {amount(s['flops'], 'FLOP')}, "
        f"{measured}{time_text(s['predicted_us'])} predicted, {s['share']:.0%} of {s['limit']}"
    )
    if s["kind"] == "kernel":
        yield f"    {op_text(s, 99)}"
    if s["reason"]:
        yield f"    {s['reason']}"
    yield from (f"    {note}" for note in s["notes"])
    for k in s["places"]:
        p = part["places"][k]
        module = f"{p['module']} ({p['class']}) " if p["module"] else ""
        line = f"{p['file']}:{p['line']}: {p['code']}" if p["file"] else ""
        yield f"    from {module}{line}".rstrip()


def decision_lines(decisions: Iterable[Data]) -> Iterator[str]:
    """By subject; what was accepted, then what was refused and why."""
    by: dict[tuple[str, bool], list[Data]] = defaultdict(list)
    for d in decisions:
        by[str(d.get("subject", "")), not d.get("accepted")].append(d)
    for (subject, refused), found in sorted(by.items(), key=lambda item: item[0]):
        yield f"  {subject}: {len(found)} {'refused' if refused else 'accepted'}"
        for d in found:
            detail = f" ({d['detail']})" if d.get("detail") else ""
            what = d["label"] or d.get("first", "")
            yield f"    {what + ': ' if what else ''}{d.get('reason', '')}{detail}{stake(d)}"


def stake(d: Data) -> str:
    at = [amount(d["bytes"], "B")] if d.get("bytes") else []
    at += [time_text(d["us"])] if d.get("us") else []
    return f" [{', '.join(at)}]" if at else ""


__all__ = ["body", "full", "op_text", "rows_of", "short", "where"]
