"""`python -m dev coverage`: every operator of PyTorch's own test samples, compiled and compared.

In: which operators, dtypes and parts. Out: a line per result in a state file, a summary on the
terminal, and the table of `docs/coverage.md`. Jobs run in worker processes: a crash or a hang is a
row of the result and not the end, and a run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from deuteron.base.device import demand
from dev.coverage.cases import DTYPES, PARTS, applies, entries, matching_names
from dev.coverage.table import by_op, share, summary, table
from dev.coverage.worker import EAGER_PREFIX, Job, work

JOB_SECONDS = 500.0  # seconds for a job; a multiple of what the slowest takes
LONGEST_FIRST: tuple[str, ...] = ("dynamic", "numbers", "backward", "layouts", "chains", "zeros")
LONGEST_FIRST += ("mixed", "forward", "lists", "inplace", "method")
JOBS_PER_PROCESS = 150  # torch and its caches grow
PROCESS_SPENT = "spent"  # in a row: its process cannot do another job
SECONDS_TO_END = 5  # for a worker that is asked to


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
        for name in matching_names(ops, list(table))
        for dtype in dtypes
        for part in parts
        if applies(table[name], getattr(torch, dtype), part, device)
    ]


# -- running ---------------------------------------------------------------------------------------
class Lost(Exception):
    """A worker died, hung or could not answer; says which. `doing`: what it said last."""

    def __init__(self, text: str, doing: str = "") -> None:
        super().__init__(text)
        self.doing = doing


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
        doing, end = "", time.monotonic() + limit
        try:
            self.connection.send(job)
            while self.connection.poll(max(0.0, end - time.monotonic())):
                said = self.connection.recv()
                if not isinstance(said, str):
                    if said.pop(PROCESS_SPENT, False):
                        self.stop()
                    return said
                doing = said
            failure = f"no result after {limit:.0f} s"
        except (EOFError, OSError):
            self.process.join(5)
            failure = f"the process died (exit status {self.process.exitcode})"
        except Exception as e:  # noqa: BLE001 - the worker's own exception, sent as its reply
            failure = f"{type(e).__name__}: {e}"
        self.stop(kill=True)
        raise Lost(failure, doing)

    def stop(self, kill: bool = False) -> None:
        if self.process is not None:
            self.connection.close()  # an idle worker ends by itself
            if kill and self.process.is_alive():  # what waits for a compiler ends that, too
                os.kill(self.process.pid, signal.SIGINT)
            self.process.join(SECONDS_TO_END)
            self.process.kill()
            self.process.join()
        self.process = None


def run_all(
    jobs: Sequence[Job],
    state: Path,
    processes: int,
    resume: bool,
    say: Callable[[str], None],
    limit: float = JOB_SECONDS,
    seconds: float | None = None,
) -> list[dict[str, Any]]:
    """Rows of all jobs. With `seconds`, no job starts after so long."""
    state.parent.mkdir(parents=True, exist_ok=True)
    known = read_rows(state) if resume and state.exists() else {}
    if not resume:
        state.write_text("")
    todo: Queue[Job] = Queue()
    for j in sorted(jobs, key=lambda j: LONGEST_FIRST.index(j.part)):
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
            row = row_of(worker, job, limit)
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


def row_of(worker: Worker, job: Job, limit: float) -> dict[str, Any]:
    """The job's row, without samples at which eager ends the process (a GPU's assertions do)."""
    while True:
        try:
            return worker.run(job, limit)
        except Lost as e:
            name = e.doing.removeprefix(EAGER_PREFIX)
            if name == e.doing or name in job.without:
                row = {"key": job.key, "op": job.op, "dtype": job.dtype, "part": job.part}
                return row | {"right": 0, "wrong": [], "errors": [str(e)]}
            job = replace(job, without=(*job.without, name))


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


def write_table(rows: Sequence[dict[str, Any]], write: Path, command: str) -> None:
    devices = {r["key"].rsplit("|", 1)[1] for r in rows}
    before = write.read_text(encoding="utf-8") if write.exists() else ""
    of = {d: len(jobs_for(device=d)) for d in devices}
    write.write_text(table(rows, command, of, before), encoding="utf-8")
    print(f"written to {write}")


def show(states: Sequence[Path], write: Path | None, command: str) -> int:
    """The command for results that are there, of this machine or of others. Where a job ran several
    times, its last result counts, in the order of `states`."""
    latest: dict[str, dict[str, Any]] = {}
    for s in states:
        latest |= read_rows(s)
    rows = list(latest.values())
    bad = False
    for device in sorted({r["key"].rsplit("|", 1)[1] for r in rows}):
        mine = [r for r in rows if r["key"].endswith(f"|{device}")]
        for row in mine:
            if row["wrong"] or row["errors"]:
                print(failure_text(row))
                bad = True
        print(f"{device}: {summary(by_op(mine), sum(r.get('seconds', 0.0) for r in mine))}")
    if write is not None:
        write_table(rows, write, command)
    return 1 if bad else 0


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
    from dev.coverage.peer import generated_by_peer

    demand(device)
    began = time.perf_counter()
    jobs = jobs_for(ops, dtypes, parts, device, most, backend)
    rows = run_all(
        jobs, state, processes, resume, lambda text: print(text, flush=True), seconds=seconds
    )
    operators = by_op(rows)
    print(summary(operators, time.perf_counter() - began))
    if ops == "":
        print(share(operators, generated_by_peer()))
    if write is not None:
        write_table(rows, write, command)
    return 1 if any(o.wrong or o.errors for o in operators) else 0
