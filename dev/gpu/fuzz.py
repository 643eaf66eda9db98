"""Random programs on a machine with a GPU, in many processes.

    python -m dev.gpu.fuzz DEVICE FIRST_SEED SECONDS PROCESSES LOG [KIND]

DEVICE is cuda, or cpu (where the machine only lends its cores), or interpret (Triton's interpreter
on the CPU); KIND one kind of programs (see `python -m dev fuzz --help`). Prints the failures and a
count; LOG receives a JSON line per program as it ends, so that a run which is stopped loses
nothing. To go on where a run ended, take the seed that it names as FIRST_SEED, which may also be
several seeds, by comma. A failure is made again by its seed:
``python -m dev fuzz --kind KIND --seed N --count 1``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

from deuteron.base.options import set_environment
from dev.fuzz.run import INTERPRETED_SECONDS, PROGRAM_SECONDS, Task, fuzz


def say(text: str) -> None:
    print(text, flush=True)


def main(
    device: str, first: str, seconds: str, processes: str, log: str, kind: str = "all"
) -> None:
    interpret = device == "interpret"
    with tempfile.TemporaryDirectory() as folder, open(log, "w") as rows:
        # One thread and one builder each: there are as many processes as cores.
        set_environment(OMP_NUM_THREADS="1", DEUTERON_WORKERS="1", DEUTERON_CACHE_DIR=folder)
        if interpret:
            set_environment(TRITON_INTERPRET="1")
        seeds = [int(s) for s in first.split(",")]
        task = Task(
            seeds[0],
            "cpu" if interpret else device,
            "interpreted" if interpret else "deuteron",
            cut=False,
            folder=f"{folder}/failures",
            kind=kind,
        )

        def keep(row: dict[str, Any]) -> None:
            rows.write(json.dumps(row) + "\n")
            rows.flush()

        start = seeds if len(seeds) > 1 else seeds[0]
        limit = INTERPRETED_SECONDS if interpret else PROGRAM_SECONDS
        tally = fuzz(start, float(seconds), None, int(processes), task, say, limit, keep)
    print(tally)
    if len(seeds) == 1:
        print(f"next seed: {seeds[0] + sum(tally.verdicts.values())}")


if __name__ == "__main__":
    main(*sys.argv[1:])
