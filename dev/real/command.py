"""The command line of the suite `real`.

    python -m dev real [--date 2026-11-27] [--models 60] [--part 1/2] [--device cuda]
    python -m dev real --summary out/real/*.jsonl
    python -m dev real --only timm/resnet18 --settings "train bf16 channels-last"

Draws models by date from timm's and transformers' registries, with random weights, and runs each
under eager, Inductor and Deuteron in one process: are the results right, how long does a step take,
how much memory, and on a GPU each generated kernel's time beside the limit of its bytes. The same
command goes on where a run ended; `--summary` reads any number of files. Exit status 1 where a
model crashed, was wrong, or its process died; slow ones are listed.
"""

from __future__ import annotations

import argparse
import datetime
import os
from pathlib import Path

from dev.real.draw import PACKAGES, slots
from dev.real.report import summary
from dev.real.run import Plan, read, run_all, same
from dev.real.worker import Request


def parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    p.add_argument("--date", default=today, help="seed of the draw, YYYY-MM-DD; default: today")
    p.add_argument("--models", type=int, default=60, help="how many in all parts (60)")
    p.add_argument(
        "--part",
        default="1/1",
        help="K/N: of N parts the K-th; slots in a row, so that settings mix",
    )
    p.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU when there is one")
    p.add_argument("--package", choices=PACKAGES, help="only of this one")
    p.add_argument("--prepare-workers", type=int, help="at a time; default: 12, on a CPU 1")
    p.add_argument("--seconds", type=float, default=540.0, help="of the whole run, about (540)")
    p.add_argument("--each", type=float, help="seconds of timing per model; default: 3, CPU 10")
    p.add_argument("--vs", default="eager,inductor", help="beside deuteron; or only eager")
    p.add_argument("--out", type=Path, help="rows; default: $OUT or out/real, DEVICE-DATE.jsonl")
    p.add_argument("--only", help="PACKAGE/NAME, or transformers/CLASS:TYPE")
    p.add_argument(
        "--settings", default="", help='with --only: words of "train bf16 channels-last"'
    )
    p.add_argument("--list", action="store_true", help="print the draw")
    p.add_argument("--summary", type=Path, nargs="+", help="only print the report of these files")
    return p


def main(argv: list[str] | None = None) -> int:
    asked = parser().parse_args(argv)
    datetime.date.fromisoformat(asked.date)
    if asked.summary:
        print(summary([row for path in asked.summary for row in read(path)]))
        return 0
    packages = (asked.package,) if asked.package else available()
    if asked.list:
        for slot in slots(asked.date, asked.models, packages):
            print(f"{slot.number:3} {slot.settings():26}{', '.join(map(str, slot.candidates[:3]))}")
        return 0
    import torch

    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    each = asked.each or (3.0 if device == "cuda" else 10.0)
    request = Request(
        asked.date,
        asked.models,
        packages,
        0,
        device,
        names=(*dict.fromkeys(["eager", *asked.vs.split(",")]), "deuteron"),
        seconds=each,
        only=asked.only or "",
        settings=asked.settings,
    )
    k, n = map(int, asked.part.split("/"))
    folder = Path(os.environ.get("OUT", "out/real"))
    name = "only" if asked.only else f"{device}-{asked.date}"
    target = asked.out or folder / f"{name}{f'-{k}of{n}' if n > 1 else ''}.jsonl"
    first, last = ((j * asked.models // n) for j in (k - 1, k))
    numbers = (0,) if asked.only else tuple(range(first, last))
    if asked.only:
        target.unlink(missing_ok=True)
    batch = asked.prepare_workers or (12 if device == "cuda" else 1)
    plan = Plan(request, numbers, batch, asked.seconds, target, target.with_suffix(".log"))
    left = run_all(plan)
    rows = [r for r in read(target) if same(r, request)]
    print(summary(rows))
    print(f"rows: {target}")
    bad = {f["kind"] for r in rows for f in r.get("failures", ())} - {"slow"}
    return int(bool(bad)) if not left else 3


def available() -> tuple[str, ...]:
    """The packages that can be imported here."""
    import importlib.util

    installed = tuple(p for p in PACKAGES if importlib.util.find_spec(p) is not None)
    if not installed:
        raise SystemExit("neither timm nor transformers is installed")
    return installed
