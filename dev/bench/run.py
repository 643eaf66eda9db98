"""`python -m dev bench`: starts workers, gathers their rows, writes JSON, prints tables.

First `jobs` processes compile every case under every compiler, each its share, so that the caches
on disk are warm; then one process times all cases alone. A case that kills its worker, or hangs, is
a failed row, and another worker goes on with the rest.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from deuteron.base.options import environment
from deuteron.tools.measuring import fresh_caches
from dev.bench.cases import Case
from dev.bench.contenders import CONTENDERS
from dev.bench.report import cold_headline, cold_row, headline, summary, table_row
from dev.bench.worker import MESSAGE_PREFIX, Request

Row = dict[str, Any]
HANG_S = 240.0  # a case that says nothing for so long is given up (Inductor's max-autotune is slow)


class Worker:
    """A worker process and its messages."""

    def __init__(self, request: Request, log: Path) -> None:
        self.log = log.open("ab")
        variables = {"PYTHONUNBUFFERED": "1", **request.caches}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dev.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment(**variables),
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(request)).encode())
        self.process.stdin.close()
        self.lines: queue.Queue[Row | None] = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            line = raw.decode(errors="replace")
            if line.startswith(MESSAGE_PREFIX):
                self.lines.put(json.loads(line[len(MESSAGE_PREFIX) :]))
            else:
                self.log.write(raw)
        self.lines.put(None)

    def messages(self, until: float) -> Iterator[Row]:
        """Ends with the process, after `HANG_S` of silence, or at the time `until`."""
        while True:
            wait = min(HANG_S, until - time.monotonic())
            try:
                message = self.lines.get(timeout=max(0.0, wait))
            except queue.Empty:
                return
            if message is None:
                return
            yield message

    def stop(self) -> int:
        """Ends the process if it still runs; its status."""
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
        status = self.process.wait()
        self.log.close()
        return status


def build_all(request: Request, jobs: int, until: float, log: Path) -> int:
    """Fills the caches of the compilers with `jobs` processes; the number of cases done."""
    shares = [request.cases[k::jobs] for k in range(jobs)]
    workers = [Worker(replace(request, cases=s, task="build"), log) for s in shares if s]
    done = 0
    for w in workers:
        done += sum("row" in m for m in w.messages(until))
        w.stop()
    return done


def time_all(request: Request, until: float, log: Path, report: Callable[[Row], None]) -> list[str]:
    """Times the cases one after another; those that there was no time for."""
    left = list(request.cases)
    while left and time.monotonic() < until:
        worker = Worker(replace(request, cases=tuple(left)), log)
        current = ""
        for message in worker.messages(until):
            if "start" in message:
                current = message["start"]
            else:
                left.remove(current)
                report(message["row"])
                current = ""
        late = time.monotonic() >= until
        status = worker.stop()
        if current and not late:
            left.remove(current)
            suite, _, name = current.partition(" ")
            why = f"the process ended with status {status}, or was silent for {HANG_S:.0f} s"
            report({"suite": suite, "case": name, "failure": why, "results": {}})
        elif not current and status not in (0, 3) and not late:
            raise RuntimeError(f"the worker ended with status {status}; see {log}")
    return left


def machine(device: str) -> Row:
    """What the figures were measured on."""
    import torch

    from deuteron.base.device import device_spec

    spec = device_spec(device)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        pass
    name = spec.name
    if device == "cpu":  # a maker's machines may have one name
        name += f", {torch.backends.cpu.get_cpu_capability()}"
    return {
        "device": device,
        "name": name,
        "cores": spec.cores,
        "threads": torch.get_num_threads(),
        **versions,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


@dataclass(frozen=True)
class Plan:
    """What to run: cases under contenders on a device. `each`: seconds of timing per case, about;
    `seconds`: nothing starts after so long; `repeats`: cold calls of each; `jobs`: processes that
    compile beforehand. `target` has all rows that there are, whenever the run is stopped."""

    cases: tuple[Case, ...]
    contenders: tuple[str, ...]
    device: str
    jobs: int
    each: float
    seconds: float
    repeats: int
    log: Path
    target: Path

    def save(self, document: Row) -> None:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        part = self.target.with_name(f"{self.target.name}.part")
        part.write_text(json.dumps(document, indent=1))
        part.replace(self.target)

    def request(self, caches: dict[str, str]) -> Request:
        suites = tuple(dict.fromkeys(c.suite for c in self.cases))
        names = tuple(f"{c.suite} {c.name}" for c in self.cases)
        return Request(self.device, self.contenders, suites, names, self.each, caches=caches)


def run_times(plan: Plan, document: Row) -> None:
    """Fills ``rows``, ``left`` and ``seconds`` of the document, and prints each row."""
    start = time.monotonic()
    until = start + plan.seconds
    with fresh_caches() as caches:
        request = plan.request(caches)
        if plan.jobs:
            single = {**caches, "TORCHINDUCTOR_COMPILE_THREADS": "1", "DEUTERON_WORKERS": "1"}
            quarter = until - plan.seconds / 4
            done = build_all(replace(request, caches=single), plan.jobs, quarter, plan.log)
            took = time.monotonic() - start
            print(f"compiled {done} of {len(plan.cases)} cases in {took:.0f} s", flush=True)
        print(headline(plan.contenders), flush=True)

        def report(row: Row) -> None:
            document["rows"].append(row)
            plan.save(document)
            print(table_row(row, plan.contenders), flush=True)

        document["left"] = time_all(request, until, plan.log, report)
    document["seconds"] = round(time.monotonic() - start, 1)
    print(summary([document]), flush=True)
    if document["left"]:
        print(f"no time for {len(document['left'])} cases, from {document['left'][0]!r} on")


def run_cold(plan: Plan, document: Row) -> None:
    """Fills ``cold``: seconds of the first call in a fresh process, with empty caches and then with
    those that it left. The compilers take turns, and another begins each time; the medians count,
    since machines that are shared are slower at times by half. ``all_s``: cold and warm, each."""
    until = time.monotonic() + plan.seconds
    print(cold_headline(), flush=True)
    compilers = [n for n in plan.contenders if CONTENDERS[n].backend not in ("", "handwritten")]
    for case in plan.cases:
        results: dict[str, Row] = {name: {"all_s": []} for name in compilers}
        for k in range(plan.repeats):
            for name in compilers[k % len(compilers) :] + compilers[: k % len(compilers)]:
                with fresh_caches() as caches:
                    one = replace(plan, cases=(case,), contenders=(name,)).request(caches)
                    pair = []
                    for _ in ("cold", "warm"):
                        outcome = run_alone(replace(one, task="cold"), until, plan.log)
                        pair.append(outcome["results"].get(name, {}).get("seconds", math.nan))
                        if "failure" in outcome:
                            results[name]["failure"] = outcome["failure"]
                    results[name]["all_s"].append(pair)
        for facts in results.values():
            for at, what in enumerate(("cold_s", "warm_s")):
                done = [pair[at] for pair in facts["all_s"] if not math.isnan(pair[at])]
                facts[what] = median(done) if done else math.nan
        row: Row = {"suite": case.suite, "case": case.name, "results": results}
        document["cold"].append(row)
        plan.save(document)
        print(cold_row(row), flush=True)


def run_profile(plan: Plan, document: Row) -> None:
    """Prints where the time of each case's step goes, by kernel."""
    until = time.monotonic() + plan.seconds
    with fresh_caches() as caches:
        for case in plan.cases:
            one = replace(plan, cases=(case,)).request(caches)
            row = run_alone(replace(one, task="profile"), until, plan.log)
            document["profiles"].append(row)
            plan.save(document)
            if "failure" in row:
                print(f"{case.name}: {row['failure']}", flush=True)
            for name, facts in row["results"].items():
                count = sum(k[1] for k in facts["kernels"])
                print(f"== {case.name}, {name}: {facts['us']:.0f} us, {count:.0f} kernels or more")
                for key, calls, us in facts["kernels"]:
                    print(f"{us:10.1f} us {calls:5.0f}  {key[:120]}", flush=True)


def run_alone(request: Request, until: float, log: Path) -> Row:
    """The row of a request of one case, in a process of its own."""
    worker = Worker(request, log)
    rows = [m["row"] for m in worker.messages(until) if "row" in m]
    status = worker.stop()
    why = f"the process ended with status {status}"
    return rows[0] if rows else {"failure": why, "results": {}}


RUNS: dict[str, Callable[[Plan, Row], None]] = {
    "time": run_times,
    "cold": run_cold,
    "profile": run_profile,
}


def run_bench(plan: Plan, what: str, command: str) -> Row:
    """Runs a plan; the document that goes to JSON: ``machine``, ``command``, and ``rows``, ``cold``
    or ``profiles``, as `report` describes them."""
    plan.log.parent.mkdir(parents=True, exist_ok=True)
    plan.log.write_bytes(b"")
    document: Row = {"machine": machine(plan.device), "command": command}
    document.update({"rows": [], "cold": [], "profiles": [], "left": []})
    about = document["machine"]
    print(f"{about['name']}, torch {about['torch']}, {about['date']}", flush=True)
    plan.save(document)
    RUNS[what](plan, document)
    plan.save(document)
    print(f"rows: {plan.target}")
    return document
