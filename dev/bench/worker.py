"""The process that compiles and times cases; the command starts it and reads what it prints.

In: a request, as JSON on standard input (`Request`'s fields). Out: lines of JSON after
`MESSAGE_PREFIX` on standard output: ``{"start": case}`` before a case and ``{"row": {...}}`` after
it. A device that an earlier case has broken ends the process with status 3; the command starts
another for the rest.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo

from deuteron.tools.measuring import error_line, synchronize, warm_up
from dev.bench.cases import Absent, Case, Work
from dev.bench.contenders import CONTENDERS, Contender, settings
from dev.bench.measure import Runner, fatal, measure
from dev.bench.suites import cases

Row = dict[str, Any]
MESSAGE_PREFIX = "@deuteron-bench "


@dataclass(frozen=True)
class Request:
    """`cases`: names, as suite and name. `task`: "time"; "build": only compile, so that the caches
    are warm; "cold": only the first call, timed; "profile": where the time of a call goes."""

    device: str
    contenders: tuple[str, ...]
    suites: tuple[str, ...]
    cases: tuple[str, ...]
    seconds: float = 1.0
    task: str = "time"
    caches: dict[str, str] = field(default_factory=dict)


def emit(**message: Any) -> None:
    print(MESSAGE_PREFIX + json.dumps(message), flush=True)


def cache_size(device: str) -> int:
    """Bytes of the device's last cache. On a CPU inputs are not rotated: users' are not."""
    if device != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20))


def run(request: Request) -> int:
    settings()
    known = {f"{c.suite} {c.name}": c for s in request.suites for c in cases(s, request.device)}
    contenders = [CONTENDERS[n] for n in request.contenders]
    for name in request.cases:
        emit(start=name)
        case = known[name]
        # Modes that capture graphs of their own are compared where the host's time counts.
        these = [c for c in contenders if case.clock == "wall" or not c.captures]
        try:
            row = TASKS[request.task](case, these, request)
            problems = [r["failure"] for r in row.get("results", {}).values() if "failure" in r]
        except Exception as error:  # noqa: BLE001 - a row for each
            traceback.print_exc()
            problems = [error_line(error)]
            row = {"suite": case.suite, "case": case.name, "failure": problems[0], "results": {}}
        emit(row=row)
        if any(fatal(RuntimeError(p)) for p in problems):
            return 3
        if request.device == "cuda":
            torch.cuda.empty_cache()
    return 0


def time_case(case: Case, contenders: list[Contender], request: Request) -> Row:
    return measure(case, request.device, contenders, request.seconds, cache_size(request.device))


def build(case: Case, contenders: list[Contender], request: Request) -> Row:
    """Compiles a case; a contender's failure shows when it is timed."""
    torch._dynamo.reset()
    work = Work(case, request.device, 0)
    for c in contenders:
        if not c.backend:
            continue
        try:
            Runner(c, work).first()
        except Absent:
            continue
        except Exception as error:  # noqa: BLE001
            print(f"{case.name} under {c.name}: {error_line(error)}", file=sys.stderr, flush=True)
    return {"suite": case.suite, "case": case.name}


def cold(case: Case, contenders: list[Contender], request: Request) -> Row:
    """Seconds of the first call. What any compiler needs once is loaded before: Dynamo,
    AOTAutograd, the compiler's own modules, the libraries that the case calls. On a GPU, Deuteron's
    first building process has started with its backend's import; Inductor's start in the call."""
    device = request.device
    warm_up(device)
    work = Work(case, device, 0)
    work.step(work.function)
    results = {}
    for c in contenders:
        runner = Runner(c, work)
        runner.first()
        runner.step()  # untimed: a graph with gradients is kept for others after its second step
        results[c.name] = {"seconds": runner.facts["first_call_s"]}
    return {"suite": case.suite, "case": case.name, "results": results}


def profiled(case: Case, contenders: list[Contender], request: Request) -> Row:
    """The longest kernels of a step under each contender: name, calls, us."""
    from torch.profiler import ProfilerActivity, profile

    cuda = request.device == "cuda"
    work = Work(case, request.device, 0)
    results: Row = {}
    for c in contenders:
        runner = Runner(c, work)
        for _ in range(3):
            runner.step()
        synchronize(request.device)
        kind = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
        with profile(activities=[kind]) as trace:
            for _ in range(3):
                runner.step()
            synchronize(request.device)
        kernels = [
            (e.key, e.count / 3, (e.device_time_total if cuda else e.self_cpu_time_total) / 3)
            for e in trace.key_averages()
        ]
        kernels.sort(key=lambda e: -e[2])
        results[c.name] = {"kernels": kernels[:16], "us": sum(e[2] for e in kernels)}
        torch._dynamo.reset()
    return {"suite": case.suite, "case": case.name, "results": results}


TASKS: dict[str, Callable[[Case, list[Contender], Request], Row]] = {
    "time": time_case,
    "build": build,
    "cold": cold,
    "profile": profiled,
}


def main() -> None:
    sys.exit(run(Request(**json.loads(sys.stdin.read()))))


if __name__ == "__main__":
    main()
