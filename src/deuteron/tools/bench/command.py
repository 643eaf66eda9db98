"""What `deuteron bench` was asked, checked, and carried out."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer


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

    def command(self) -> str:
        """The command line that asks the same."""
        parts = ["deuteron bench", *self.suites, f"--vs {self.vs}", f"--device {self.device}"]
        parts += [f"--dtype {self.dtype}"] if self.dtype else []
        parts += [f"--only '{self.only}'"] if self.only else []
        parts += ["--quick"] if self.quick else []
        return " ".join(parts)


def run_command(asked: Asked, target: Path | None, out: Path, only_list: bool) -> int:
    """Exit status 1 where a case of ours failed or was wrong."""
    import torch

    from deuteron.tools.bench.contenders import CONTENDERS
    from deuteron.tools.bench.report import means
    from deuteron.tools.bench.run import run_bench
    from deuteron.tools.bench.suites import SUITES, chosen

    device = asked.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check("--device", (device,), ("cpu", "cuda"))
    suites = asked.suites or SUITES
    check("SUITE", suites, SUITES)
    dtypes = tuple(asked.dtype.split(",")) if asked.dtype else ()
    check("--dtype", dtypes, ("fp32", "bf16"))
    contenders = tuple(asked.vs.split(",")) if asked.vs else ()
    check("--vs", contenders, tuple(CONTENDERS))
    if "handwritten" in contenders and "handwritten-cuda" not in contenders:
        contenders += ("handwritten-cuda",)
    if "deuteron" not in contenders:
        contenders += ("deuteron",)
    found = chosen(suites, device, dtypes, asked.only, asked.quick)
    if only_list:
        for c in found:
            print(f"{c.suite:12}{c.name}")
        print(f"{len(found)} cases")
        return 0
    if not found:
        raise typer.BadParameter("no case has such a name")
    jobs = asked.jobs if asked.jobs >= 0 else min(12, os.cpu_count() or 1)
    document = run_bench(
        found, contenders, device, jobs, asked.each, asked.seconds, out, asked.command()
    )
    write(document, target or out / "bench.json")
    whole: dict[str, Any] = means(document["rows"])
    return int(bool(whole["failed"] or whole["wrong"]))


def check(what: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for g in given:
        if g not in known:
            raise typer.BadParameter(f"{what}: {g!r} is not one of {', '.join(known)}")


def write(document: dict[str, Any], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(document, indent=1))
    print(f"rows: {target}")
