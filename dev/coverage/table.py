"""The table of `python -m dev coverage`: what its rows say of each operator, as Markdown.

In: rows (one per operator, dtype and part), of one device or of several. Out: verdicts per
operator, a line of summary, the text of `docs/coverage.md`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dev.coverage.cases import DTYPES, MORE_DTYPES, PARTS


@dataclass
class Op:
    """All rows of one operator."""

    name: str
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    dtypes: dict[str, None] = field(default_factory=dict)
    parts: dict[str, None] = field(default_factory=dict)
    kernels: Counter[str] = field(default_factory=Counter)
    library: dict[str, dict[str, str]] = field(default_factory=dict)
    why: str = ""
    captured: str = "dynamo"
    skipped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)

    def add(self, row: dict[str, Any]) -> None:
        self.right += row["right"]
        where = f"{row['dtype']} {row['part']}"
        self.wrong += [f"{where}: {t}" for t in row["wrong"]]
        self.errors += [f"{where}: {t}" for t in row["errors"]]
        if row["right"]:
            self.dtypes[row["dtype"]] = None
            self.parts[row["part"]] = None
        phase = "backward" if row["part"] == "backward" else "forward"
        if row["dtype"].startswith("complex"):  # library calls by design
            phase = f"complex {phase}"
        self.kernels[phase] += row.get("kernels", 0)
        self.library.setdefault(phase, {}).update(row.get("library", {}))
        self.skipped.update(row.get("skipped", {}))
        self.noted.update(row.get("noted", {}))
        if row.get("why"):
            self.why = row["why"]
            self.captured = row["captured"]

    def verdict(self) -> str:
        if self.wrong:
            return "wrong"
        if self.errors:
            return "error"
        return "right" if self.right else "not run"

    def made(self, phase: str) -> str:
        """Who computes it; of complex numbers only where there are no others."""
        if phase not in self.library and f"complex {phase}" in self.library:
            phase = f"complex {phase}"
        library = {n for n in self.library.get(phase, {}) if not n.startswith("deuteron.seed")}
        if self.kernels[phase]:
            return "partly" if library else "generated"
        if library:
            return "library"
        return "views" if phase in self.library and self.right else ""


def by_op(rows: Iterable[dict[str, Any]]) -> list[Op]:
    out: dict[str, Op] = {}
    for row in rows:
        out.setdefault(row["op"], Op(row["op"])).add(row)
    return [out[n] for n in sorted(out, key=lambda n: (n.lower(), n))]


def summary(ops: Sequence[Op], seconds: float) -> str:
    verdicts = Counter(o.verdict() for o in ops)
    made = Counter(o.made("forward") for o in ops if o.right)
    cases = sum(o.right for o in ops)
    text = ", ".join(f"{n} {v}" for v, n in verdicts.most_common())
    who = ", ".join(f"{n} {m}" for m, n in made.most_common() if m)
    return f"{len(ops)} operators: {text}. Forward: {who}. {cases} cases right, {seconds:.0f} s."


def share(ops: Sequence[Op], peer: frozenset[str]) -> str:
    """How much of what Inductor generates code for is generated here, too."""
    mine = Counter(o.made("forward") for o in ops if o.name in peer and o.right)
    total = sum(mine.values())
    if not total:
        return ""
    own = mine["generated"] + mine["partly"]
    text = ", ".join(f"{n} {m}" for m, n in mine.most_common() if m)
    return (
        f"Inductor generates code for {total} of these operators; Deuteron for {own} of those "
        f"({100 * own / total:.0f} %): {text}."
    )


def table(rows: Iterable[dict[str, Any]], command: str, of: dict[str, int], before: str) -> str:
    """The text of docs/coverage.md. `of`: how many jobs a device's complete run has. `before`: the
    text that is replaced; what it says of devices that the rows do not name stays."""
    from dev.coverage.peer import generated_by_peer

    peer = generated_by_peer()
    devices: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        devices.setdefault(r["key"].rsplit("|", 1)[1], []).append(r)
    lines = [
        "# Operators",
        "",
        "Every operator of PyTorch's own `op_db`, with torch's own samples, compiled in one graph",
        "with `fullgraph=True` and compared with eager: values (float64 decides), dtypes, shapes,",
        "strides, shared memory, and inputs afterwards.",
        "",
        "*generated*: Deuteron's own kernels. *library*: calls of ATen. *partly*: both, over all",
        "samples of real numbers (complex ones are computed by the library). *views*: nothing is",
        "computed. The column *Inductor* marks the operators that it generates code for:",
        "`python -m dev coverage --peer` asks its lowering what it makes of the samples on CPU.",
    ]
    sections = {
        title.removeprefix("## "): [title, *rest]
        for title, *rest in (
            x.rstrip().splitlines() for x in re.split(r"^(?=## )", before, flags=re.M)[1:]
        )
    }
    for device, mine in devices.items():
        whole = section(device, mine, by_op(mine), of.get(device, len(mine)), peer, command)
        sections[title_of(device)] = whole
    for title in sorted(sections):
        lines += ["", *sections[title]]
    return "\n".join(lines) + "\n"


def title_of(device: str) -> str:
    return {"cpu": "CPU", "cuda": "GPU"}.get(device, device)


def section(
    device: str,
    rows: list[dict[str, Any]],
    ops: Sequence[Op],
    of: int,
    peer: frozenset[str],
    command: str,
) -> list[str]:
    """What one device shows."""
    title = title_of(device)
    lines = [f"## {title}", "", f"Made by `{command}`.", provenance(rows, of), ""]
    lines += [summary(ops, 0).rsplit(",", 1)[0] + ".", "", share(ops, peer), ""]
    lines += ["| operator | result | forward | backward | Inductor | dtypes | parts | cases |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for o in ops:
        dtypes = " ".join(short(d) for d in (*DTYPES, *MORE_DTYPES) if d in o.dtypes)
        parts = " ".join(p for p in PARTS if p in o.parts)
        lines.append(
            f"| {o.name} | {o.verdict()} | {o.made('forward')} | {o.made('backward')} | "
            f"{'generated' if o.name in peer else ''} | {dtypes} | {parts} | {o.right} |"
        )
    bad = [o for o in ops if o.wrong or o.errors]
    if bad:
        lines += ["", f"### {title}: failures", ""]
        lines += [f"- {o.name}: {cell(t)}" for o in bad for t in [*o.wrong, *o.errors]]
    lines += ["", f"### {title}: library calls of real numbers", "", "| operator | calls | why |"]
    lines += ["|---|---|---|"]
    for o in ops:
        reasons = {k: v for p in ("forward", "backward") for k, v in o.library.get(p, {}).items()}
        for name, why in sorted(reasons.items()):
            lines.append(f"| {o.name} | {cell(name)} | {cell(why)} |")
    lines += ["", f"### {title}: what Dynamo does not capture", ""]
    lines += ["Traced with make_fx instead, or not at all.", "", "| operator | instead | why |"]
    lines += ["|---|---|---|"]
    lines += [f"| {o.name} | {o.captured} | {cell(o.why)} |" for o in ops if o.why]
    lines += [
        "| jiterator_* | none | no operators: tracing calls them with tensors without memory |"
    ]
    lines += ["", f"### {title}: samples that did not run", "", "| operator | samples | why |"]
    lines += ["|---|---|---|"]
    for o in ops:
        lines += [f"| {o.name} | {n} | {cell(why)} |" for why, n in sorted(o.skipped.items())]
    lines += ["", f"### {title}: differences from eager that torch's own capture has", ""]
    lines += ["| operator | cases | what |", "|---|---|---|"]
    for o in ops:
        for why, n in sorted(alike(o.noted).items()):
            lines.append(f"| {o.name} | {n} | {cell(why)} |")
    return lines


def provenance(rows: Sequence[dict[str, Any]], of: int) -> str:
    """Where and of what the rows are."""
    torches = sorted({r["torch"] for r in rows if r.get("torch")})
    machines = sorted({r["machine"] for r in rows if r.get("machine")})
    states = len({r.get("source") for r in rows})  # rows of before it was noted count as one
    source = "one state of the source" if states == 1 else f"{states} states of the source"
    return (
        f"{' and '.join(machines) or 'unknown machine'}, torch {' and '.join(torches)}; "
        f"{len(rows)} of {max(of, len(rows))} jobs (operator, dtype, part), {source}."
    )


def alike(noted: Counter[str]) -> Counter[str]:
    """Without the numbers, which differ from case to case."""
    out: Counter[str] = Counter()
    for text, n in noted.items():
        out[re.sub(r"(\d+ of \d+ elements), first at .*", "some elements", text)] += n
    return out


def short(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float", "f").replace("complex", "c")


def cell(text: str) -> str:
    """Text in a cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 160 else text[:159] + "…"
