"""What `python -m dev bench` was asked, checked, and carried out."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

DEFAULT_CONTENDERS = "eager,inductor"
# Beside them, where the host's time counts; and where kernels were written by hand.
MODES, BY_HAND = ("inductor-reduce", "deuteron-reduce"), ("handwritten", "handwritten-cuda")
COLD_CALLS = 3  # of each compiler
SECONDS_PER_CASE = 0.5  # seconds of timing per case
COLD_CASES = r"^seeds (sin chain|softmax fp32|layer norm)|^models GPT-2 train"


@dataclass(frozen=True)
class Asked:
    """The options of the command line, as given."""

    suites: tuple[str, ...]
    vs: str
    device: str
    dtype: str
    only: str
    quick: bool
    jobs: int
    each: float
    seconds: float
    what: str  # a key of `run.RUNS`
    repeats: int  # of a cold call

    def command(self) -> str:
        """The command line that asks the same."""
        parts = ["python -m dev bench", *self.suites, f"--device {self.device}"]
        parts += [f"--vs {self.vs}"] if self.vs else []
        parts += [f"--dtype {self.dtype}"] if self.dtype else []
        parts += [f"--only '{self.only}'"] if self.only else []
        parts += ["--quick"] if self.quick else []
        parts += [f"--{self.what}"] if self.what != "time" else []
        parts += (
            [f"--each {self.each:g}"]
            if self.what == "time" and self.each != SECONDS_PER_CASE
            else []
        )
        parts += [f"--repeats {self.repeats}"] if self.what == "cold" else []
        return " ".join(parts)


def run_command(asked: Asked, target: Path | None, out: Path, only_list: bool, plot: bool) -> int:
    """Exit status 1 where a case of ours failed or was wrong."""
    import torch

    from dev.bench.report import means
    from dev.bench.run import Plan, run_bench
    from dev.bench.suites import SUITES, select_cases

    device = asked.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check("--device", (device,), ("cpu", "cuda"))
    suites = asked.suites or SUITES
    check("SUITE", suites, SUITES)
    dtypes = tuple(asked.dtype.split(",")) if asked.dtype else ()
    check("--dtype", dtypes, ("fp32", "bf16"))
    only = asked.only or (COLD_CASES if asked.what == "cold" else "")
    cases = select_cases(suites, device, dtypes, only, asked.quick)
    if only_list:
        for c in cases:
            print(f"{c.suite:12}{c.name}")
        print(f"{len(cases)} cases")
        return 0
    if not cases:
        raise typer.BadParameter("no case has such a name")
    jobs = asked.jobs if asked.jobs >= 0 else min(12, os.cpu_count() or 1)
    names = contenders(asked, suites)
    log, rows = out / "bench.log", target or out / "bench.json"
    many = (asked.each, asked.seconds, asked.repeats)
    plan = Plan(tuple(cases), names, device, jobs, *many, log, rows)
    document = run_bench(plan, asked.what, asked.command())
    if plot:
        write_plots([document], out)
    whole: dict[str, Any] = means(document["rows"])
    return int(bool(whole["failed"] or whole["wrong"]))


def contenders(asked: Asked, suites: tuple[str, ...]) -> tuple[str, ...]:
    """Those asked for, and `deuteron`; by default what the suites call for."""
    from dev.bench.contenders import CONTENDERS

    names = tuple((asked.vs or DEFAULT_CONTENDERS).split(","))
    check("--vs", names, tuple(CONTENDERS))
    if asked.what != "time" and not asked.vs:
        names = ("inductor",)
    elif not asked.vs:
        names += MODES[:1] if {"launch", "models"} & set(suites) else ()
        names += BY_HAND if "seeds" in suites else ()
    elif "handwritten" in names:
        names += tuple(set(BY_HAND) - set(names))
    if "deuteron" not in names:
        names += ("deuteron",)
    if "inductor-reduce" in names and "deuteron-reduce" not in names:
        names += ("deuteron-reduce",)
    return names


def check(what: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for g in given:
        if g not in known:
            raise typer.BadParameter(f"{what}: {g!r} is not one of {', '.join(known)}")


def write_plots(documents: list[dict[str, Any]], out: Path) -> None:
    from dev.bench.page import write_page
    from dev.bench.plots import draw

    for path in [*draw(documents, out), write_page(documents, out)]:
        print(path)


def write_report(files: list[Path], target: Path | None, out: Path, plot: bool) -> None:
    """The document from JSON files of earlier runs: to `target`, of which the parts on other
    machines stay, or printed."""
    from dev.bench.document import markdown

    documents = [json.loads(f.read_text()) for f in files]
    if target is None:
        print(markdown(documents))
    else:
        target.write_text(markdown(documents, target.read_text() if target.exists() else ""))
    if plot:
        write_plots(documents, out)
