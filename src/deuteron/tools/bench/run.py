"""`deuteron bench`: starts workers, gathers their rows, writes JSON, prints tables.

First `jobs` processes compile every case under every compiler, each its share, so that the caches
on disk are warm; then one process times all cases alone. A case that kills its worker, or hangs, is
a failed row, and another worker goes on with the rest.
"""

from __future__ import annotations

import datetime
import json
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from deuteron.base.options import environment
from deuteron.tools.bench.cases import Case
from deuteron.tools.bench.report import headline, summary, table_row
from deuteron.tools.bench.worker import MARK, Request

Row = dict[str, Any]
HANG_S = 240.0  # a case that says nothing for so long is given up (Inductor's max-autotune is slow)


class Worker:
    """A worker process and its messages."""

    def __init__(self, request: Request, log: Path) -> None:
        self.log = log.open("ab")
        variables = {"PYTHONUNBUFFERED": "1", **request.caches}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deuteron.tools.bench.worker"],
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
            if line.startswith(MARK):
                self.lines.put(json.loads(line[len(MARK) :]))
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
    workers = [Worker(replace(request, cases=s, build=True), log) for s in shares if s]
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

    found = device_spec(device)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        pass
    return {
        "device": device,
        "name": found.name,
        "cores": found.cores,
        "threads": torch.get_num_threads(),
        **versions,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def run_bench(
    found: list[Case],
    contenders: tuple[str, ...],
    device: str,
    jobs: int,
    each: float,
    seconds: float,
    out: Path,
    command: str,
) -> Row:
    """Runs the cases; the document that goes to JSON: ``machine``, ``command``, ``rows``."""
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    until = start + seconds
    log = out / "bench.log"
    log.write_bytes(b"")
    document: Row = {"machine": machine(device), "command": command, "rows": [], "left": []}
    about = document["machine"]
    print(f"{about['name']}, torch {about['torch']}, {about['date']}", flush=True)
    suites = tuple(dict.fromkeys(c.suite for c in found))
    names = tuple(f"{c.suite} {c.name}" for c in found)
    with tempfile.TemporaryDirectory(prefix="deuteron-bench-") as scratch:
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor",
            "DEUTERON_CACHE_DIR": f"{scratch}/deuteron",
            "TRITON_CACHE_DIR": f"{scratch}/triton",
        }
        request = Request(device, contenders, suites, names, each, False, caches)
        if jobs:
            single = {**caches, "TORCHINDUCTOR_COMPILE_THREADS": "1", "DEUTERON_WORKERS": "1"}
            done = build_all(replace(request, caches=single), jobs, until - seconds / 4, log)
            took = time.monotonic() - start
            print(f"compiled {done} of {len(found)} cases in {took:.0f} s", flush=True)
        print(headline(contenders), flush=True)

        def report(row: Row) -> None:
            document["rows"].append(row)
            print(table_row(row, contenders), flush=True)

        document["left"] = time_all(request, until, log, report)
    document["seconds"] = round(time.monotonic() - start, 1)
    print(summary([document]), flush=True)
    if document["left"]:
        print(f"no time for {len(document['left'])} cases, from {document['left'][0]!r} on")
    return document
