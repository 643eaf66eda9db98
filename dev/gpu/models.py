"""Every model of the tests at realistic size on a GPU: right, and how fast beside Inductor.

    python -m dev.gpu.models [--models gpt,llama] [--dtypes float32,bfloat16] [--seconds 540]

For each model and dtype: the training step's loss and gradients against float64 at the small size
(error at most twice eager's), then at the large size against eager (a float64 run would take most
of the time), then the medians of CUDA-event times of eager, Inductor in its default mode and
Deuteron, interleaved round by round in one process. Writes a JSON row per model to
$OUT/models.jsonl (./out without it) as it goes, and prints a table at the end. A model that fails
prints one line and the rest goes on. Exit status 1 when a model failed or was wrong.
`--small` tries the script itself on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from tests.models.compare import Errors, Trial, failures
from tests.models.zoo import CASES, Case, Step, cast

Row = dict[str, Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CUDA = DEVICE == "cuda"


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def backend(name: str) -> Any:
    """The backend by name; from the checkout where the package is not installed."""
    if name != "deuteron":
        return name
    from deuteron.backend import deuteron_backend

    return deuteron_backend


def compiler(name: str) -> Callable[[Step], Callable[..., Any]] | None:
    if name == "eager":
        return None
    return lambda step: torch.compile(step, backend=backend(name), dynamic=False)


class Runner:
    """One training step of one model under one compiler, for timing."""

    def __init__(self, name: str, step: Step, inputs: tuple[torch.Tensor, ...]) -> None:
        self.step = copy.deepcopy(step)
        make = compiler(name)
        self.call = self.step if make is None else make(self.step)
        self.inputs = inputs

    def __call__(self) -> None:
        self.step.zero_grad(set_to_none=True)
        self.call(*self.inputs).backward()

    def gradients(self) -> dict[str, torch.Tensor]:
        self()
        named = self.step.named_parameters()
        return {"grad " + n: p.grad.clone() for n, p in named if p.grad is not None}

    def timed(self) -> float:
        """Device time of one step, ms."""
        if not CUDA:
            begin = time.perf_counter()
            self()
            return (time.perf_counter() - begin) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def peak(self) -> float:
        """MB allocated at most during a step, over what was allocated before it."""
        if not CUDA:
            return math.nan
        self.step.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e6


def check_small(case: Case, dtype: torch.dtype, name: str) -> list[str]:
    if case.random:
        return []
    torch._dynamo.reset()
    trial = Trial.of(case, dtype, DEVICE)
    make = compiler(name)
    return [] if make is None else failures(*trial.errors_over_starts(make), dtype)


def distance(eager: Runner, got: Runner) -> float:
    """The largest relative distance of a gradient from eager's: a coarse check of large shapes."""
    return Errors.against(eager.gradients(), got.gradients()).worst()


def measure(
    case: Case, dtype: torch.dtype, names: list[str], rounds: int, large: bool = True
) -> Row:
    row: Row = {"model": case.name, "dtype": str(dtype).removeprefix("torch.")}
    try:
        row["wrong"] = check_small(case, dtype, names[-1])
    except Exception as error:
        row["wrong"] = [one_line(error)]
    torch._dynamo.reset()
    step = case.step(large).to(DEVICE, dtype)
    inputs = cast(case.make_inputs(large), dtype, DEVICE)
    runners: dict[str, Runner] = {}
    for name in names:
        try:
            runner = Runner(name, step, inputs)
            start = time.perf_counter()
            runner()
            synchronize()
            row[f"{name} first call s"] = round(time.perf_counter() - start, 2)
            for _ in range(3):
                runner()
            row[f"{name} peak MB"] = round(runner.peak(), 1)
            runners[name] = runner
        except Exception as error:
            row[f"{name} error"] = one_line(error)
    if not case.random and names[-1] in runners:
        row["distance"] = distance(runners["eager"], runners[names[-1]])
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, runner in runners.items():
            times[name].append(runner.timed())
    for name, values in times.items():
        row[f"{name} ms"] = round(statistics.median(values), 4)
    return row


def one_line(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]} ({Path(frame.filename).name}:{frame.lineno})"


def table(rows: list[Row], names: list[str]) -> str:
    head = f"{'model':16}{'dtype':10}" + "".join(f"{n[:9] + ' ms':>13}" for n in names)
    lines = [head + f"{'vs inductor':>12}{'peak':>7}{'compile':>9}  right"]
    ratios = []
    for row in rows:
        line = f"{row['model']:16}{row['dtype']:10}"
        line += "".join(f"{row.get(n + ' ms', math.nan):13.3f}" for n in names)

        def ratio(what: str, row: Row = row) -> float:
            return row.get(f"{names[-1]} {what}", math.nan) / (
                row.get(f"inductor {what}", math.nan) or math.nan
            )

        time_ratio = ratio("ms")
        if time_ratio == time_ratio:
            ratios.append(time_ratio)
        line += f"{time_ratio:12.2f}{ratio('peak MB'):7.2f}{ratio('first call s'):9.2f}"
        bad = row.get("error") or row.get(f"{names[-1]} error") or "; ".join(row["wrong"][:2])
        lines.append(
            line
            + "  "
            + (bad[:150] if bad else f"yes, {row.get('distance', math.nan):.1e} from eager")
        )
    if ratios:
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        lines.append(
            f"{names[-1]} / inductor: geometric mean {mean:.3f}, worst {max(ratios):.2f}, "
            f"{len(ratios)} of {len(rows)} rows"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default=",".join(c.name for c in CASES))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--seconds", type=float, default=540, help="start no model after this")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--backend", default="deuteron")
    parser.add_argument("--small", action="store_true", help="the tests' sizes")
    parser.add_argument("--skip-inductor", action="store_true")
    args = parser.parse_args()
    begin = time.perf_counter()
    out = Path(os.environ.get("OUT", "out"))
    out.mkdir(parents=True, exist_ok=True)
    names = ["eager"] + ([] if args.skip_inductor else ["inductor"]) + [args.backend]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if not CUDA and not args.small:
        parser.error("there is no GPU; --small tries the script on the CPU")
    print(torch.__version__, torch.cuda.get_device_name() if CUDA else "cpu", flush=True)
    wanted = args.models.split(",")
    rows: list[Row] = []
    # Dtype outside: when time runs out, every model has run in the first one.
    for dtype_name in args.dtypes.split(","):
        for case in (c for c in CASES if c.name in wanted):
            if time.perf_counter() - begin > args.seconds:
                print(f"out of time before {case.name} {dtype_name}", flush=True)
                continue
            start = time.perf_counter()
            try:
                row = measure(case, getattr(torch, dtype_name), names, args.rounds, not args.small)
            except Exception as error:
                row = {"model": case.name, "dtype": dtype_name, "wrong": [], "distance": math.nan}
                row["error"] = one_line(error)
            row["seconds"] = round(time.perf_counter() - start, 1)
            rows.append(row)
            with (out / "models.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            problem = row.get("error") or row.get(f"{args.backend} error") or row["wrong"][:1]
            print(f"{case.name} {dtype_name} {row['seconds']} s {problem or 'ok'}", flush=True)
            torch._dynamo.reset()
            if CUDA:
                torch.cuda.empty_cache()
    print(table(rows, names))
    return int(any(r.get("error") or r.get(f"{args.backend} error") or r["wrong"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
