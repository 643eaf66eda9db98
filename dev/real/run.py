"""The suite `real`: starts a process per slot, some at a time, and gathers rows.

Some slots prepare (build, compile, check) at the same time. One that is ready is timed at once, and
the processes that still prepare are stopped (SIGSTOP) meanwhile, with all that they started; their
limits do not run then. A process that dies or hangs is a result: in eager, the candidate is passed
over; in Inductor, the slot begins again without it; in Deuteron, it is a failure. Rows and what was
passed over are lines of JSON in one file, written as they come; slots that the file has are not run
again.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from deuteron.base.options import environment
from dev import ROOT
from dev.real.worker import MESSAGE_PREFIX, Request

Row = dict[str, Any]
# Of a stage (eager's includes starting the process and the candidates passed over), seconds.
STAGE_S = {"cuda": 240.0, "cpu": 400.0}
TURN_S = 240.0  # of timing and profiling a model, at most
TIMES_EACH = 2  # what that takes, in seconds of timing: H200, 4.5 s where those are 3
POLL_S = 0.2
LATE = 4  # models that may be ready at the end and are still timed
WORKER_COMMAND = [sys.executable, "-m", "dev.real.worker"]
MAX_PROCESSES = 6  # processes for one slot


class Process:
    """A slot's process."""

    def __init__(self, request: Request, caches: dict[str, str], log: Path) -> None:
        self.request, self.log = request, log.open("ab")
        self.candidate, self.stage = "", "eager"
        self.passed: list[Row] = []
        path = os.pathsep.join(
            [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        self.process = subprocess.Popen(
            WORKER_COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment(PYTHONUNBUFFERED="1", PYTHONPATH=path, **caches),
        )
        self.lines: queue.Queue[Row | None] = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()
        self.say(json.dumps(asdict(request)))

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(text.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died: `message` tells

    def read(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            line = raw.decode(errors="replace")
            if line.startswith(MESSAGE_PREFIX):
                self.lines.put(json.loads(line[len(MESSAGE_PREFIX) :]))
            else:
                self.log.write(raw)
        self.lines.put(None)

    def message(self, until: float, limit: float, paused: Callable[[], float]) -> Row | None:
        """The next one that is neither a stage nor a candidate passed over; nothing where the
        process ends, or a stage takes longer than `limit` seconds without those `paused`."""
        begin = time.monotonic() - paused()
        while True:
            try:
                message = self.lines.get(timeout=POLL_S)
            except queue.Empty:
                now = time.monotonic()
                if now >= until or now - paused() - begin >= limit:
                    return None
                continue
            if message is None or "row" in message or "ready" in message:
                return message
            if "stage" in message:
                begin = time.monotonic() - paused()
                self.candidate, self.stage = message["stage"]
                at = time.strftime("%H:%M:%S")
                self.log.write(
                    f"{at} slot {self.request.slot}: {self.stage} {self.candidate}\n".encode()
                )
                self.log.flush()
            else:
                self.passed.append(message)

    def stop(self) -> int | None:
        """Ends the process; its status, nothing where it had to be killed."""
        try:
            self.process.wait(timeout=1 if self.lines.empty() else 3)
            return self.process.returncode
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None
        finally:
            self.log.close()


@dataclass(frozen=True)
class Plan:
    """`batch`: slots that prepare at the same time; `seconds`: the whole run's, about; `target`:
    the file of rows; `template`: of the requests."""

    template: Request
    slots: tuple[int, ...]
    batch: int
    seconds: float
    target: Path
    log: Path


class Run:
    def __init__(self, plan: Plan, scratch: Path) -> None:
        self.plan, self.scratch, self.lock = plan, scratch, threading.Lock()
        self.until = time.monotonic() + plan.seconds
        self.limit = STAGE_S[plan.template.device]
        self.late: list[int] = []
        self.alone = threading.Lock()  # held while a model is timed: no process starts then
        self.preparing: set[Process] = set()
        self.pauses, self.paused_at = 0.0, 0.0

    def write(self, row: Row) -> None:
        with self.lock, self.plan.target.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def paused(self) -> float:
        """Seconds in which the processes that prepare were stopped, so far."""
        return self.pauses + (time.monotonic() - self.paused_at if self.paused_at else 0.0)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """While this lasts, nothing prepares."""
        with self.alone:
            self.paused_at = time.monotonic()
            stopped = [pid for p in tuple(self.preparing) for pid in stop_tree(p.process.pid)]
            try:
                yield
            finally:
                for pid in reversed(stopped):
                    send(pid, signal.SIGCONT)
                self.pauses, self.paused_at = self.paused(), 0.0

    def start(self, request: Request) -> Process:
        with self.alone:
            folders = caches(self.scratch / str(request.slot), self.plan.batch)
            process = Process(request, folders, self.plan.log)
            self.preparing.add(process)
            return process

    # -- one slot ---------------------------------------------------------------------------------
    def prepare(self, slot: int) -> Process | None:
        """A process that is ready to time, or nothing: then its row is written, or it is `late`."""
        request = replace(self.plan.template, slot=slot)
        until = self.until - LATE * TIMES_EACH * self.plan.template.seconds
        for _ in range(MAX_PROCESSES):
            if time.monotonic() >= until:
                break
            process = self.start(request)
            message = process.message(until, self.limit, self.paused)
            self.preparing.discard(process)
            for p in process.passed:
                self.passed(slot, p["skip"], p["reason"])
            if message is not None and "ready" in message:
                return process
            if message is not None:
                process.stop()
                self.finish(slot, message["row"] or {"slot": slot, "model": "", "failures": []})
                return None
            if time.monotonic() >= until:
                process.stop()
                break
            why = died(process.stop(), self.limit)
            if process.stage == "deuteron":
                self.finish(slot, self.dead(process, why))
                return None
            if process.stage == "inductor":
                request = replace(request, without=(*request.without, "inductor"))
            else:
                self.passed(slot, process.candidate, f"{process.stage}: {why}")
                request = replace(request, without=())
            at = request.first + len(process.passed) + (process.stage == "eager")
            request = replace(request, first=at)
        self.late.append(slot)
        return None

    def passed(self, slot: int, name: str, reason: str) -> None:
        self.write({"skip": name, "slot": slot, "reason": reason, "date": self.plan.template.date})

    def dead(self, process: Process, why: str) -> Row:
        request = process.request
        kind = "died" if process.stage != "time" else "died when timed"
        failure = {"kind": kind, "cause": f"{process.stage}: {why}"}
        about = {"slot": request.slot, "model": process.candidate, "date": request.date}
        slot = request.requested_slot()
        settings = {"train": slot.train, "dtype": slot.dtype, "channels_last": slot.channels_last}
        return {**about, **settings, "device": request.device, "failures": [failure]}

    def finish(self, slot: int, row: Row) -> None:
        self.write({"date": self.plan.template.date, "device": self.plan.template.device, **row})
        if row.get("model"):
            print(line(row), flush=True)
        else:
            print(f"slot {slot}: no candidate fits", flush=True)

    # -- all of them ------------------------------------------------------------------------------
    def all(self, slots: list[int]) -> None:
        with ThreadPoolExecutor(self.plan.batch) as pool:
            for future in as_completed([pool.submit(self.prepare, s) for s in slots]):
                process = future.result()
                if process is not None:
                    self.time(process)
                    shutil.rmtree(self.scratch / str(process.request.slot), ignore_errors=True)

    def time(self, process: Process) -> None:
        try:
            with self.quiet():
                process.say("go")
                message = process.message(time.monotonic() + TURN_S, TURN_S, lambda: 0.0)
            if message is not None and message.get("row"):
                self.finish(process.request.slot, message["row"])
            else:
                why = died(process.stop(), TURN_S)
                self.finish(process.request.slot, self.dead(process, why))
        finally:
            process.stop()


def died(status: int | None, limit: float) -> str:
    return f"hung for {limit:.0f} s" if status is None else f"the process ended with {status}"


def stop_tree(root: int) -> list[int]:
    """Stops a process and all that it started; their ids, outermost first. Linux."""
    stopped = [root] if send(root, signal.SIGSTOP) else []
    for pid in stopped:  # grows; what is stopped starts nothing
        stopped += [p for p in children(pid) if p not in stopped and send(p, signal.SIGSTOP)]
    return stopped


def send(pid: int, what: signal.Signals) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, what)
        return True
    return False


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # pid (name) state ppid; a name may hold spaces
            if path.read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(int(path.parent.name))
    return found


def caches(folder: Path, batch: int) -> dict[str, str]:
    """Empty caches, and as many builders for each process as cores are left for it."""
    each = str(max(2, (os.cpu_count() or 1) // batch))
    return {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "DEUTERON_CACHE_DIR": f"{folder}/deuteron",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TORCHINDUCTOR_COMPILE_THREADS": each,
        "DEUTERON_WORKERS": each,
        "TOKENIZERS_PARALLELISM": "false",
    }


def run_all(plan: Plan) -> int:
    """Runs the slots that have no row yet; the number that is left."""
    plan.target.parent.mkdir(parents=True, exist_ok=True)
    plan.log.parent.mkdir(parents=True, exist_ok=True)
    done = {r["slot"] for r in read(plan.target) if same(r, plan.template) and "skip" not in r}
    with tempfile.TemporaryDirectory(
        prefix="deuteron-real-", ignore_cleanup_errors=True
    ) as scratch:
        run = Run(plan, Path(scratch))
        run.all([s for s in plan.slots if s not in done])
    if run.late:
        print(f"{len(run.late)} models are left; the same command goes on", flush=True)
    return len(run.late)


def same(row: Row, request: Request) -> bool:
    return row.get("date") == request.date and row.get("device", request.device) == request.device


def read(path: Path) -> list[Row]:
    """Rows of a file; a last line that was cut off does not count."""
    rows = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return rows


def line(row: Row) -> str:
    """One line of a row, for who watches."""
    words = ["train" if row.get("train") else "infer", row.get("dtype", "")]
    words += ["channels-last"] if row.get("channels_last") else []
    times = [f"{row[f'{n}_ms']:9.3f}" if f"{n}_ms" in row else "        -" for n in CONTENDER_NAMES]
    bad = "; ".join(f"{f['kind']}: {f['cause'][:160]}" for f in row["failures"])
    ratio = f"{row['ratio']:6.2f}" if "ratio" in row else "     -"
    return f"{row['model'][:52]:52} {' '.join(words):25}{''.join(times)}{ratio}  {bad or 'ok'}"


CONTENDER_NAMES = ("eager", "inductor", "deuteron")
