"""`deuteron bench FILE:FUNCTION`: the user's function under eager, Inductor and Deuteron.

In: the words of the command line. Out: a table and a verdict, or JSON; exit status 1 where Deuteron
fails or is wrong. Raises `UsageError` with what to write instead.

Each compiler's first call is timed in a process of its own with empty caches. One more process,
with the caches that these leave, compares the results and times all in turn (`bench_worker`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import IO, Any

from rich.console import Console
from rich.status import Status
from rich.table import Table

from deuteron.base.device import demand
from deuteron.base.options import MODES, environment
from deuteron.tools.bench_worker import MARK, Request
from deuteron.tools.measuring import BUSY, fresh_caches
from deuteron.tools.target import UsageError, chosen_device, parsed, tensor

Row = dict[str, Any]
OURS, OTHERS = "deuteron", ("eager", "inductor")
EVEN = 0.03  # times so close count as equal
LOG_LINES = 30  # of a process that failed, shown
WORKER = [sys.executable, "-m", "deuteron.tools.bench_worker"]


def request_of(
    target: str,
    shapes: list[str],
    device: str,
    backward: bool,
    others: str,
    mode: str,
    seconds: float,
) -> Request:
    """What was asked, checked as far as that is possible without running the file."""
    parsed(target)
    for s in shapes:
        tensor(s, "meta")
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {device!r} is not one of auto, cpu, cuda")
    device = chosen_device(device)
    demand(device)
    names = tuple(others.split(","))
    for n in names:
        if n not in OTHERS:
            raise UsageError(f"--vs {n!r} is not one of {', '.join(OTHERS)}")
    if mode not in MODES:
        raise UsageError(f"--mode {mode!r} is not one of {', '.join(MODES)}")
    compilers = (*(n for n in OTHERS if n in names and n != "eager"), OURS)
    return Request(target, tuple(shapes), device, backward, mode, compilers, seconds)


def run_bench(request: Request, as_json: bool) -> int:
    """Measures and prints. Returns the exit status."""
    console = Console()
    with Console(stderr=True).status("") as status, tempfile.TemporaryFile("w+") as log:
        rows, about = measured(request, status, log)
        if any("failure" in r for r in rows.values()):
            log.seek(0)
            sys.stderr.writelines(log.readlines()[-LOG_LINES:])
    right, sentence = verdict(rows, about)
    if as_json:
        asked = asdict(request)
        print(json.dumps({**asked, **about, "rows": rows, "right": right, "verdict": sentence}))
    else:
        show(console, request, rows, about, sentence)
    return int(not right)


# ----------------------------------------------------------------------------------- measuring
def measured(request: Request, status: Status, log: IO[str]) -> tuple[dict[str, Row], Row]:
    """Facts by compiler (see `bench_worker`), with ``cold_s``; and facts of the run."""
    cold: dict[str, Row] = {}
    with fresh_caches() as caches:
        for name in request.compilers:
            status.update(f"first call under {name}, with empty caches")
            one = replace(request, compilers=(name,), task="cold")
            cold[name] = answer(one, caches, status, log)
            if "died" in cold[name] and cold[name]["stage"] != name:
                raise UsageError(f"{request.target}: {cold[name]['died']}")
        left, dead = request.compilers, {}
        while True:
            message = answer(replace(request, compilers=left), caches, status, log)
            if "rows" in message:
                break
            stage = message["stage"]
            if stage not in left:
                raise UsageError(f"{request.target}: {message['died']}")
            left = tuple(n for n in left if n != stage)
            dead[stage] = {"failure": message["died"]}
    rows: dict[str, Row] = message["rows"]
    for name in request.compilers:
        row = rows.setdefault(name, dead.get(name, {}))
        if "cold_s" in cold[name]:
            row["cold_s"] = cold[name]["cold_s"]
    return {n: rows[n] for n in ("eager", *request.compilers)}, message["about"]


def answer(request: Request, caches: Mapping[str, str], status: Status, log: IO[str]) -> Row:
    """The last message of a worker; of one that died ``died`` (how) and ``stage`` (where)."""
    message: Row = {"stage": ""}
    with worker(request, caches, log) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                message.update(json.loads(line.removeprefix(MARK)))
                if request.task == "time":
                    stage = message["stage"]
                    status.update("timing" if stage == "timing" else f"comparing {stage}")
    if "usage" in message:
        raise UsageError(message["usage"])
    if process.returncode:
        message["died"] = f"the process ended with status {process.returncode}"
    return message


@contextmanager
def worker(
    request: Request, caches: Mapping[str, str], log: IO[str]
) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        WORKER,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment(**caches),
        text=True,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(request)))
        process.stdin.close()
        try:
            yield process
        except BaseException:  # stopped: nothing goes on
            process.kill()
            raise


# --------------------------------------------------------------------------------------- words
def verdict(rows: Mapping[str, Row], about: Row) -> tuple[bool, str]:
    """Whether Deuteron ran and is right, and a sentence or two."""
    mine = rows[OURS]
    if "failure" in mine:
        return False, f"Deuteron failed: {mine['failure']}."
    if mine["problems"]:
        first, *more = mine["problems"]
        others = f" (and {len(more)} others)" if more else ""
        return False, f"Deuteron is wrong: {first}{others}."
    timed = {n: r["ms"] for n, r in rows.items() if n != OURS and "ms" in r}
    parts = ["Deuteron " + " and ".join(pace(mine["ms"], ms, n) for n, ms in timed.items())]
    right = "its results are right" if about["compared_with"] else "results were not compared"
    parts.append(right)
    for name, row in rows.items():
        if name not in (OURS, "eager") and ("failure" in row or row.get("problems")):
            parts.append(f"{name} {'failed' if 'failure' in row else 'is wrong'}")
    return True, "; ".join(parts) + "."


def pace(mine: float, other: float, name: str) -> str:
    ratio = other / mine
    if abs(ratio - 1) <= EVEN:
        return f"is as fast as {name}"
    if ratio > 1:
        return f"is {ratio:.2f} times as fast as {name}"
    return f"takes {1 / ratio:.2f} times as long as {name}"


def show(
    console: Console, request: Request, rows: Mapping[str, Row], about: Row, sentence: str
) -> None:
    what = "forward and backward" if request.backward else "forward"
    mode = "" if request.mode == "default" else f", mode {request.mode}"
    console.print(
        f"[bold]{request.target}[/], {what}{mode}, {about['machine']}, torch {about['torch']}\n",
        highlight=False,
    )
    console.print(table(rows))
    notes = [
        "time: median per call, all in turn; speed: beside eager",
        "cold: the first call, with empty caches; peak: tensors, beyond those held before",
    ]
    if about["compared_with"]:
        exact = about["compared_with"]
        notes.append(f"error: the largest difference from {exact}, over the largest value there")
    console.print("\n".join(notes), style="dim", highlight=False)
    failures = [f"{n}: {r['failure']}" for n, r in rows.items() if "failure" in r]
    for line in (about["note"], busy(about), *failures):
        if line:
            console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(f"\n{sentence}", markup=False, highlight=False, soft_wrap=True)


def busy(about: Row) -> str:
    """That times say little, if other programs ran meanwhile."""
    others = about.get("others") or 0.0
    return (
        f"Other programs kept {others:.1f} cores busy meanwhile: measure again when the machine is "
        "idle, or with OMP_NUM_THREADS=1 (threads that wait for one another lose most)."
        if others > BUSY
        else ""
    )


def table(rows: Mapping[str, Row]) -> Table:
    out = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    out.add_column("", no_wrap=True)
    for column in ("time", "speed", "cold", "peak MB", "error", "graph\nbreaks"):
        out.add_column(column, justify="right", no_wrap=True)
    eager = rows["eager"]["ms"]
    for name, row in rows.items():
        title = f"[bold]{name}[/]" if name == OURS else name
        cold = number(row.get("cold_s"), ".2f", " s")
        if "failure" in row:
            out.add_row(title, "[red]failed[/]", "", cold)
            continue
        wrong = " [red]wrong[/]" if row.get("problems") else ""
        out.add_row(
            title,
            milliseconds(row["ms"]),
            f"{eager / row['ms']:.2f} x",
            cold,
            number(row["peak_mb"], ".1f"),
            number(row["error"], ".1e") + wrong,
            str(row["breaks"]) if name != "eager" else "",
        )
    return out


def number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def milliseconds(ms: float) -> str:
    return f"{ms * 1e3:.1f} us" if ms < 1 else f"{ms:.2f} ms"
