"""Reports: one HTML file that opens from disk, and beside it the same data as JSON.

    deuteron.report(fn, *args, path="report.html")     of one call, measured
    torch.compile(..., options={"report": path})       of a program, written when it ends
    DEUTERON_REPORT=path python train.py               the same for all that is compiled
    deuteron report FILE:FUNCTION                      from the command line

In: what `tools.explain` or an observer has seen. Out: files.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import utils as dynamo

from deuteron.base.observing import Observer
from deuteron.tools.explain import Explanation, explain
from deuteron.tools.observe import Observations, Policy
from deuteron.tools.report_data import breaks_of, frames_of, report_data
from deuteron.tools.report_file import ReportError, html_path, load, write

# Of a program that runs by itself: the calls of each graph whose steps are timed.
TIMED_CALLS = Policy(first=4, last=9)


def report(
    fn: Callable[..., Any],
    *args: Any,
    path: str | os.PathLike[str] = "deuteron-report.html",
    backward: bool | None = None,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    measure: bool = True,
    against: str | os.PathLike[str] | None = None,
    name: str = "",
    **kwargs: Any,
) -> Explanation:
    """Compiles ``fn(*args, **kwargs)`` anew, measures it, and writes the report to `path`.

    The rest is as for `deuteron.explain`. `against`: the JSON file of another report, with which
    this one is compared.
    """
    html_path(path)  # before anything takes long
    other = load(against) if against is not None else None
    told = explain(
        fn, *args, backward=backward, dynamic=dynamic, options=options, measure=measure, name=name,
        **kwargs,
    )  # fmt: skip
    write(told.data, path, other)
    return told


# ----------------------------------------------------------------------------- of whole programs
_REPORTERS: dict[str, Observations] = {}


def reporter(path: str) -> Observer:
    """The observer of the option `report`: it writes the file when the program ends."""
    if path not in _REPORTERS:
        html_path(path)
        _REPORTERS[path] = Observations(TIMED_CALLS)
        atexit.register(finish, path)
    return _REPORTERS[path]


def finish(path: str) -> None:
    """Writes what was compiled under the option `report` so far; of each rank its own file."""
    seen = _REPORTERS.pop(path, None)
    if seen is None or not seen.parts:
        return
    title = Path(sys.argv[0]).name or "program"
    breaks = breaks_of(dynamo.graph_break_reasons)
    frames = frames_of(dynamo.get_compilation_metrics(), title)
    data = report_data(seen, [p.record for _, p in seen.parts], title, breaks, frames)
    file = Path(path)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        file = file.with_stem(f"{file.stem}.rank{torch.distributed.get_rank()}")
    try:
        html, _ = write(data, file)
    except ReportError as e:
        print(f"deuteron: {e}", file=sys.stderr)
        return
    print(f"deuteron: the report is {html}", file=sys.stderr)


__all__ = ["Explanation", "explain", "finish", "report", "reporter"]
