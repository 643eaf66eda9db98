"""A kernel written by hand beside eager and what Deuteron generates from plain code: the examples.

In: the same function twice, as plain PyTorch and as a kernel, and its arguments. Out: a table on
standard output, and an exit status. All are timed in turn. But on the CPU the kernel is run by
Triton's interpreter, whose time says nothing: then only the results are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

import deuteron
from deuteron.base.device import device_spec
from deuteron.tools.bench_errors import error, magnitude, slack
from deuteron.tools.measuring import interleaved

Function = Callable[..., Tensor]
SECONDS = 2.0  # of timing


def side_by_side(
    plain: Function, by_hand: Function | None, args: tuple[Tensor, ...], work: float, unit: str
) -> int:
    """Compares `plain`, `by_hand` (None: it cannot run here) and Deuteron's `plain`; 1 where one of
    them is wrong.

    `work` is what a call has to do at least, in `unit`: "B" (bytes that move) or "FLOP".
    """
    console = Console()
    device = args[0].device.type
    runs: dict[str, Function] = {"eager": plain, "deuteron": deuteron.compile(plain)}
    if by_hand is not None:
        runs["by hand"] = by_hand
    exact = plain(*(t.double() for t in args))
    eager = plain(*args)
    errors = {n: error(exact, f(*args), eager, magnitude(exact)) for n, f in runs.items()}
    allowed = 2 * errors["eager"] + slack(eager.dtype)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("")
    timed = device == "cuda" or by_hand is None
    for column in ("time", "speed", f"T{unit}/s") if timed else ():
        table.add_column(column, justify="right")
    table.add_column("error", justify="right")
    calls = [bound(f, args) for f in runs.values()]
    times = interleaved(calls, SECONDS, device) if timed else [[] for _ in runs]
    medians = [statistics.median(t) for t in times if t]
    for k, name in enumerate(runs):
        cells = [f"{errors[name]:.1e}" + ("" if errors[name] <= allowed else "  wrong")]
        if timed:
            s = medians[k]
            speed, rate = f"{medians[0] / s:.2f} x", f"{work / s / 1e12:.3g}"
            cells = [f"{s * 1e6:.1f} us", speed, rate, *cells]
        table.add_row(name, *cells)
    shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in args)
    console.print(f"{shapes} on {device_spec(device).name}\n", markup=False, soft_wrap=True)
    console.print(table)
    if not timed:
        console.print(
            "No GPU here: Triton's interpreter ran the kernel by value, on small sizes;\n"
            "its time would say nothing.\n",
            highlight=False,
        )
    return int(any(not e <= allowed for e in errors.values()))


def bound(function: Function, args: tuple[Tensor, ...]) -> Callable[[], Any]:
    return lambda: function(*args)


def generated(plain: Function, args: tuple[Tensor, ...]) -> str:
    """The text of the kernels that Deuteron generates for a call on the arguments' device."""
    kernels = deuteron.explain(plain, *args).kernels
    return "\n".join(str(k["source"]) for k in kernels)
