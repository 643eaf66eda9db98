"""The process that compiles and times cases; the command starts it and reads what it prints.

In: a request, as JSON on standard input (`Request`'s fields). Out: lines of JSON after `MARK` on
standard output: ``{"start": case}`` before a case and ``{"row": {...}}`` after it. A device that an
earlier case has broken ends the process with status 3; the command starts another for the rest.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any

MARK = "@deuteron-bench "


@dataclass(frozen=True)
class Request:
    """`cases`: names, as suite and name. `build`: only compile, so that the caches are warm."""

    device: str
    contenders: tuple[str, ...]
    suites: tuple[str, ...]
    cases: tuple[str, ...]
    seconds: float = 1.0
    build: bool = False
    caches: dict[str, str] = field(default_factory=dict)


def emit(**message: Any) -> None:
    print(MARK + json.dumps(message), flush=True)


def cache_size(device: str) -> int:
    """Bytes of the device's last cache. On a CPU inputs are not rotated: users' are not."""
    import torch

    if device != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20))


def run(request: Request) -> int:
    import torch

    from deuteron.tools.bench.contenders import CONTENDERS, settings
    from deuteron.tools.bench.measure import fatal, measure, one_line
    from deuteron.tools.bench.suites import cases

    settings()
    known = {f"{c.suite} {c.name}": c for s in request.suites for c in cases(s, request.device)}
    contenders = [CONTENDERS[n] for n in request.contenders]
    for name in request.cases:
        emit(start=name)
        case = known[name]
        # Modes that capture graphs of their own are compared where the host's time counts.
        these = [c for c in contenders if case.clock == "wall" or not c.captures]
        try:
            if request.build:
                build(case, request.device, these)
                row: dict[str, Any] = {"case": name}
            else:
                row = measure(
                    case, request.device, these, request.seconds, cache_size(request.device)
                )
            problems = [r["failure"] for r in row.get("results", {}).values() if "failure" in r]
        except Exception as error:  # noqa: BLE001 - a row for each
            traceback.print_exc()
            problems = [one_line(error)]
            row = {"suite": case.suite, "case": case.name, "failure": problems[0], "results": {}}
        emit(row=row)
        if any(fatal(RuntimeError(p)) for p in problems):
            return 3
        if request.device == "cuda":
            torch.cuda.empty_cache()
    return 0


def build(case: Any, device: str, contenders: Any) -> None:
    """Compiles a case; a contender's failure shows when it is timed."""
    import torch

    from deuteron.tools.bench.cases import Absent, Work
    from deuteron.tools.bench.measure import Runner, one_line

    torch._dynamo.reset()
    work = Work(case, device, 0)
    for c in contenders:
        if not c.backend:
            continue
        try:
            Runner(c, work).first()
        except Absent:
            continue
        except Exception as error:  # noqa: BLE001
            print(f"{case.name} under {c.name}: {one_line(error)}", file=sys.stderr, flush=True)


def main() -> None:
    sys.exit(run(Request(**json.loads(sys.stdin.read()))))


if __name__ == "__main__":
    main()
