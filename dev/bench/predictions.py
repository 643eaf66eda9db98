"""Predicted against measured time of every kernel: a prediction off by more than 3 x is a bug.

    python -m dev.bench.predictions models seeds --device cpu --only REGEX --json FILE

In: suites of the bench. Out: kernels, worst first, and how much of all kernels' time has a
prediction that is off. Each program runs whole, with a clock around each step (`runtime.guard`), so
that caches hold what they would; the least of several calls counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from deuteron.base.observing import observed_by
from deuteron.schedule.kernel import Kernel
from deuteron.tools.observe import Observations, Part
from dev.bench.cases import Case, Work
from dev.bench.suites import SUITES, select_cases

# Calls of a program that are counted, after those that compile.
CALLS, WARM = 8, 3
# A prediction that is off by more is a bug of the model; shorter kernels are mostly their call.
OFF, LEAST_US = 3.0, 5.0


@dataclass(frozen=True)
class Row:
    """A kernel of a program."""

    program: str
    kernel: str
    predicted_us: float
    measured_us: float
    bytes: int
    flops: float

    @property
    def factor(self) -> float:
        """How many times too short (above 1) or too long (below 1) the prediction is."""
        return self.measured_us / max(self.predicted_us, 1e-3)

    @property
    def off(self) -> bool:
        return not 1 / OFF <= self.factor <= OFF


def rows_of(program: str, parts: Sequence[Part]) -> list[Row]:
    """The kernels that ran for at least `LEAST_US`."""
    return [
        Row(program, s.name, round(s.predicted_us, 2), round(us, 2), s.bytes, s.flops)
        for p in parts
        for k, s in enumerate(p.loaded.schedule.steps)
        if isinstance(s, Kernel) and (us := p.us.get(k, 0.0)) >= LEAST_US
    ]


def measure(case: Case, device: str) -> list[Row]:
    """Compiles and runs a case."""
    torch._dynamo.reset()
    work = Work(case, device, 0)
    seen = Observations()
    with observed_by(seen):
        call = torch.compile(work.function, backend="deuteron")
        for k in range(1 + WARM + CALLS):
            seen.policy.on = k > 0
            if k == 1 + WARM:
                for _, part in seen.parts:
                    part.us.clear()
            work.step(call, 0)
    return rows_of(f"{case.suite} {case.name}", [part for _, part in seen.parts])


def share_off(rows: Sequence[Row]) -> float:
    """The share of the kernels' time whose prediction is off by more than `OFF`."""
    whole = sum(r.measured_us for r in rows)
    return sum(r.measured_us for r in rows if r.off) / whole if whole else 0.0


def report(rows: Sequence[Row], most: int = 40) -> str:
    """Worst first: by the microseconds that the prediction is away."""
    lines = [f"{'measured':>10} {'predicted':>10} {'factor':>7}  kernel, program (us)"]
    worst = sorted((r for r in rows if r.off), key=lambda r: -abs(r.measured_us - r.predicted_us))
    for r in worst[:most]:
        lines.append(
            f"{r.measured_us:10.1f} {r.predicted_us:10.1f} {r.factor:7.2f}  {r.kernel}, {r.program}"
        )
    whole = sum(r.measured_us for r in rows)
    lines.append(
        f"{len(worst)} of {len(rows)} kernels of {LEAST_US:g} us and more are off by more than "
        f"{OFF:g} x: {share_off(rows):.1%} of {whole / 1e3:.1f} ms"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dev.bench.predictions")
    parser.add_argument("suites", nargs="*", default=["models", "seeds"], help=", ".join(SUITES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="regular expression for cases")
    parser.add_argument("--json", type=Path, help="file that receives all rows")
    parser.add_argument("--threads", type=int, default=0, help="of a CPU; 0: as torch has them")
    asked = parser.parse_args(argv)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    rows: list[Row] = []
    for case in select_cases(tuple(asked.suites), asked.device, (), asked.only, False):
        try:
            measured = measure(case, asked.device)
        except Exception:  # noqa: BLE001 - the others are still of interest
            traceback.print_exc()
            continue
        rows += measured
        print(
            f"{case.suite} {case.name}: {share_off(measured):.1%} off", file=sys.stderr, flush=True
        )
    print(report(rows))
    if asked.json:
        asked.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
