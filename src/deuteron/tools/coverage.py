"""`deuteron coverage`: every operator of PyTorch's own test samples, compiled and compared.

In: which operators, dtypes and parts. Out: a line per result in a state file, a summary on the
terminal, and the table of `docs/coverage.md`. Jobs run in worker processes: a crash or a hang is a
row of the result and not the end, and a run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from deuteron.tools.coverage_cases import DTYPES, PARTS, applies, chosen, entries
from deuteron.tools.coverage_worker import Job, work

LIMIT = 180.0  # seconds for a job; a multiple of what the slowest takes
JOBS_PER_PROCESS = 150  # torch and its caches grow


def jobs_for(
    ops: str = "",
    dtypes: Sequence[str] = DTYPES,
    parts: Sequence[str] = PARTS,
    device: str = "cpu",
    most: int = 48,
    backend: str = "deuteron",
) -> list[Job]:
    import torch

    table = entries()
    return [
        Job(name, dtype, part, device, most, backend)
        for name in chosen(ops, list(table))
        for dtype in dtypes
        for part in parts
        if applies(table[name], getattr(torch, dtype), part, device)
    ]


# -- running ---------------------------------------------------------------------------------------
class Lost(Exception):
    """A worker died, hung or could not answer; says which."""


class Worker:
    """A process that runs jobs, started anew after a crash, a hang, or many jobs."""

    def __init__(self, target: Callable[[Any], None] = work) -> None:
        self.target, self.done = target, 0
        self.process: Any = None
        self.connection: Any = None

    def start(self) -> None:
        context = get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=self.target, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.done = 0

    def run(self, job: Any, limit: float) -> dict[str, Any]:
        """The job's row; raises `Lost`."""
        if self.process is None or self.done >= JOBS_PER_PROCESS:
            self.stop()
            self.start()
        self.done += 1
        try:
            self.connection.send(job)
            if self.connection.poll(limit):
                return self.connection.recv()
            failure = f"no result after {limit:.0f} s"
        except (EOFError, OSError):
            self.process.join(5)
            failure = f"the process died (exit status {self.process.exitcode})"
        except Exception as e:  # noqa: BLE001 - the worker's own exception, sent as its reply
            failure = f"{type(e).__name__}: {e}"
        self.stop(kill=True)
        raise Lost(failure)

    def stop(self, kill: bool = False) -> None:
        if self.process is not None:
            self.connection.close()  # an idle worker ends by itself
            self.process.join(0 if kill else 5)
            self.process.kill()
            self.process.join()
        self.process = None


def run_all(
    jobs: Sequence[Job],
    state: Path,
    processes: int,
    resume: bool,
    say: Callable[[str], None],
    limit: float = LIMIT,
    seconds: float | None = None,
) -> list[dict[str, Any]]:
    """Rows of all jobs. With `seconds`, no job starts after so long."""
    state.parent.mkdir(parents=True, exist_ok=True)
    known = read_rows(state) if resume and state.exists() else {}
    if not resume:
        state.write_text("")
    todo: Queue[Job] = Queue()
    for j in jobs:
        if j.key not in known:
            todo.put(j)
    total, began, lock = todo.qsize(), time.perf_counter(), threading.Lock()
    finished: list[dict[str, Any]] = []

    def loop() -> None:
        worker = Worker()
        while seconds is None or time.perf_counter() - began < seconds:
            try:
                job = todo.get_nowait()
            except Empty:
                break
            try:
                row = worker.run(job, limit)
            except Lost as e:
                row = {"key": job.key, "op": job.op, "dtype": job.dtype, "part": job.part}
                row |= {"right": 0, "wrong": [], "errors": [str(e)]}
            with lock, state.open("a") as f:
                f.write(json.dumps(row) + "\n")
                finished.append(row)
                if row["wrong"] or row["errors"]:
                    say(failure_text(row))
                if len(finished) % 50 == 0:
                    took = time.perf_counter() - began
                    say(f"{len(finished)} of {total} jobs, {took:.0f} s")
        worker.stop()

    threads = [threading.Thread(target=loop) for _ in range(max(1, processes))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    wanted = {j.key for j in jobs}
    return [r for k, r in known.items() if k in wanted] + finished


def read_rows(state: Path) -> dict[str, dict[str, Any]]:
    """Key -> row; a line cut off by a kill is run again."""
    out = {}
    for line in state.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        out[row["key"]] = row
    return out


def failure_text(row: dict[str, Any]) -> str:
    lines = [f"{row['op']} {row['dtype']} {row['part']}:"]
    lines += [f"    wrong: {t}" for t in row["wrong"]]
    lines += [f"    error: {t}" for t in row["errors"]]
    return "\n".join(lines)


# -- the table -------------------------------------------------------------------------------------
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


def table(ops: Sequence[Op], command: str, versions: str) -> str:
    """The text of docs/coverage.md."""
    from deuteron.tools.coverage_peer import generated_by_peer

    peer = generated_by_peer()
    lines = [
        "# Operators",
        "",
        f"Made by `{command}` ({versions}). Every operator of PyTorch's own `op_db`, with torch's",
        "own samples, compiled in one graph with `fullgraph=True` and compared with eager: values",
        "(float64 decides), dtypes, shapes, strides, shared memory, and inputs afterwards.",
        "",
        "*generated*: Deuteron's own kernels. *library*: calls of ATen. *partly*: both, over all",
        "samples of real numbers (complex ones are computed by the library). *views*: nothing is",
        "computed.",
        "",
        summary(ops, 0).rsplit(",", 1)[0] + ".",
        "",
        share(ops, peer),
        "The column *Inductor* marks them: `deuteron coverage --peer` asks its lowering what it",
        "makes of the same samples on CPU.",
        "",
        "| operator | result | forward | backward | Inductor | dtypes | parts | cases |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for o in ops:
        dtypes = " ".join(short(d) for d in DTYPES if d in o.dtypes)
        parts = " ".join(p for p in PARTS if p in o.parts)
        lines.append(
            f"| {o.name} | {o.verdict()} | {o.made('forward')} | {o.made('backward')} | "
            f"{'generated' if o.name in peer else ''} | {dtypes} | {parts} | {o.right} |"
        )
    lines += ["", "## Library calls", "", "| operator | calls | why |", "|---|---|---|"]
    for o in ops:
        for name, why in sorted({k: v for x in o.library.values() for k, v in x.items()}.items()):
            lines.append(f"| {o.name} | {cell(name)} | {cell(why)} |")
    lines += ["", "## What Dynamo does not capture", ""]
    lines += ["Traced with make_fx instead, or not at all.", "", "| operator | instead | why |"]
    lines += ["|---|---|---|"]
    lines += [f"| {o.name} | {o.captured} | {cell(o.why)} |" for o in ops if o.why]
    lines += [
        "| jiterator_* | none | no operators: tracing calls them with tensors without memory |"
    ]
    lines += [
        "",
        "## Samples that did not run",
        "",
        "| operator | samples | why |",
        "|---|---|---|",
    ]
    for o in ops:
        lines += [f"| {o.name} | {n} | {cell(why)} |" for why, n in sorted(o.skipped.items())]
    lines += ["", "## Differences from eager that torch's own capture has", ""]
    lines += ["| operator | cases | what |", "|---|---|---|"]
    for o in ops:
        lines += [f"| {o.name} | {n} | {cell(why)} |" for why, n in sorted(o.noted.items())]
    bad = [o for o in ops if o.wrong or o.errors]
    if bad:
        lines += ["", "## Failures", ""]
        lines += [f"- {o.name}: {cell(t)}" for o in bad for t in [*o.wrong, *o.errors]]
    return "\n".join(lines) + "\n"


def short(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float", "f").replace("complex", "c")


def cell(text: str) -> str:
    """Text in a cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 160 else text[:159] + "…"


def run_coverage(
    ops: str,
    dtypes: Sequence[str],
    parts: Sequence[str],
    device: str,
    processes: int,
    most: int,
    backend: str,
    state: Path,
    resume: bool,
    write: Path | None,
    command: str,
    seconds: float | None = None,
) -> int:
    """The command. Exit status 1 where anything is wrong or an error."""
    from deuteron.tools.coverage_peer import generated_by_peer

    began = time.perf_counter()
    jobs = jobs_for(ops, dtypes, parts, device, most, backend)
    rows = run_all(
        jobs, state, processes, resume, lambda text: print(text, flush=True), seconds=seconds
    )
    found = by_op(rows)
    print(summary(found, time.perf_counter() - began))
    if ops == "":
        print(share(found, generated_by_peer()))
    if write is not None:
        versions = sorted({r["torch"] for r in rows if "torch" in r})
        write.write_text(table(found, command, f"torch {' and '.join(versions)}, {device}"))
        print(f"written to {write}")
    return 1 if any(o.wrong or o.errors for o in found) else 0
