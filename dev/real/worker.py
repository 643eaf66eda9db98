"""The process of one slot: finds a candidate that fits, compiles it under all compilers, waits for
its turn, times it.

In: a request, one line of JSON on standard input (`Request`'s fields), and later any line: its turn
to time, alone. Out: lines of JSON after `MESSAGE_PREFIX` on standard output: ``{"stage":
[candidate, stage]}`` before each stage, ``{"skip": candidate, "reason": text}``, ``{"ready":
true}`` when only timing is left, and ``{"row": {...}}`` last.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

MESSAGE_PREFIX = "@deuteron-real "


@dataclass(frozen=True)
class Request:
    """`slot`: of the draw of `date` with `count` models of `packages`. `first`: the candidate to
    begin with; `without`: compilers that died of it before."""

    date: str
    count: int
    packages: tuple[str, ...]
    slot: int
    device: str
    first: int = 0
    without: tuple[str, ...] = ()
    names: tuple[str, ...] = ("eager", "inductor", "deuteron")
    seconds: float = 4.0
    only: str = ""  # a candidate by name, with the slot's settings
    settings: str = ""  # of that: as a slot prints them

    def requested_slot(self) -> Any:
        from dataclasses import replace

        from dev.real.draw import Candidate, Slot, slots

        if self.only:
            package, _, rest = self.only.partition("/")
            name, _, model_type = rest.partition(":")
            words = self.settings.split()
            candidate = Candidate(package, name, model_type or type_of(package, name))
            dtype = "bf16" if "bf16" in words else "fp32"
            options = "train" in words, dtype, "channels-last" in words
            return Slot(self.slot, *options, (candidate,))
        slot = slots(self.date, self.count, tuple(self.packages))[self.slot]
        return replace(slot, candidates=slot.candidates)


def type_of(package: str, name: str) -> str:
    """The `model_type` of a class of transformers."""
    if package != "transformers":
        return ""
    import transformers

    return str(getattr(transformers, name).config_class.model_type)


def emit(**message: Any) -> None:
    print(MESSAGE_PREFIX + json.dumps(message), flush=True)


def quiet() -> None:
    """What the packages say of missing weights and old options is not this run's."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.disable(logging.WARNING)


class Work:
    """A slot on its way to a row."""

    def __init__(self, request: Request) -> None:
        self.request, self.slot = request, request.requested_slot()
        self.steps: list[Any] = []
        self.row: dict[str, Any] = {}

    def stage(self, candidate: Any, name: str) -> None:
        emit(stage=[str(candidate), name])

    def prepare(self) -> bool:
        """Whether a candidate has been found; then all but timing is done."""
        from dev.real.build import Unfit

        for k, candidate in enumerate(self.slot.candidates):
            if k < self.request.first:
                continue
            try:
                self.take(candidate)
                return True
            except Unfit as reason:
                emit(skip=str(candidate), reason=str(reason))
        return False

    def take(self, candidate: Any) -> None:
        from dev.real.build import build
        from dev.real.measure import Checked, settled

        slot, device = self.slot, self.request.device
        self.stage(candidate, "eager")
        images = slot.channels_last
        built = settled(build(candidate, device, slot.train), slot.dtype, images)
        images = images and any(t.dim() == 4 for t in built.inputs.values())
        checked = self.checked(Checked, built)
        parameters = sum(p.numel() for p in built.module.parameters())
        self.row = {
            "slot": slot.number,
            "model": str(candidate),
            "date": self.request.date,
            "device": device,
            "train": slot.train,
            "dtype": slot.dtype,
            "channels_last": images,
            "rung": built.rung,
            "inputs": {n: list(t.shape) for n, t in built.inputs.items()},
            "parameters": parameters,
            "reference": checked.kind,
            "eager_error": max(checked.errors.values(), default=0.0),
            "failures": [],
        }
        self.steps = [checked.eager]
        for name in self.request.names[1:]:
            self.stage(candidate, name)
            if name in self.request.without:
                self.row[f"{name}_error"] = "its process died"
                continue
            self.compile(name, built, checked)

    def checked(self, kind: Any, built: Any) -> Any:
        from deuteron.tools.measuring import error_line
        from dev.real.build import Unfit, broken

        try:
            return kind(built, self.slot.train)
        except Unfit:
            raise
        except Exception as error:  # noqa: BLE001 - in this dtype or memory order
            if broken(error):
                raise
            traceback.print_exc()
            raise Unfit(f"eager: {error_line(error)}") from error

    def compile(self, name: str, built: Any, checked: Any) -> None:
        from deuteron.tools.measuring import error_line
        from dev.bench.measure import root
        from dev.real.build import broken
        from dev.real.measure import Step

        row = self.row
        try:
            step = Step(name, built, self.slot.train)
            values, row[f"{name}_first_s"] = step.first()
            row[f"{name}_error_size"], bad = checked.judge(values)
            step.settle()
        except Exception as error:  # noqa: BLE001 - what a compiler raises is a result
            traceback.print_exc()
            row[f"{name}_error"] = f"{error_line(error)} [{error_line(root(error))}]"
            if name == "deuteron":
                row["failures"].append({"kind": "crash", "cause": row["deuteron_error"]})
            if broken(error):
                emit(row=row)
                sys.exit(3)
            return
        row[f"{name}_wrong"] = bad[:5]
        if name == "deuteron":
            row["graphs"] = sum(len(r.of("graph")) for r in step.collected)
            row["kernels"] = sum(len(r.of("kernel")) for r in step.collected)
            row["fallbacks"] = [e["reason"] for r in step.collected for e in r.of("fallback")][:5]
            if bad:
                row["failures"].append({"kind": "wrong", "cause": "; ".join(bad[:3])})
        self.steps.append(step)

    def time(self) -> None:
        from dev.real import kernels
        from dev.real.measure import SLOWDOWN_LIMIT, slower, time_all

        row, device = self.row, self.request.device
        self.stage(row["model"], "time")
        row.update(time_all(self.steps, self.request.seconds))
        if device == "cuda":
            self.stage(row["model"], "profile")
            row["copy_gbps"] = round(kernels.copy_gbps(), 1)
            for step in self.steps:
                seen = kernels.profiled(step)
                row[f"{step.name}_device_us"] = round(sum(us for _, us in seen.values()), 2)
                row[f"{step.name}_longest"] = kernels.longest(seen)
                if step.name == "deuteron":
                    row["kernel_rows"] = kernels.kernel_rows(step.collected, seen, row["copy_gbps"])
        row["ratio"] = round(slower(row, device), 4)
        if row["ratio"] > SLOWDOWN_LIMIT[device]:
            row["failures"].append({"kind": "slow", "cause": cause(row)})


def cause(row: dict[str, Any]) -> str:
    """What the figures say of a slow model; a person may say more."""
    mine = row.get("deuteron_device_us")
    if mine is None:
        return f"{row['ratio']} x the better of eager and Inductor"
    others = [row[f"{n}_device_us"] for n in ("eager", "inductor") if f"{n}_device_us" in row]
    if mine <= min(others):
        return f"the host: the device is busy for {mine:.0f} us, others' for {min(others):.0f} us"
    rows = row.get("kernel_rows", [])
    worst = max(rows, key=lambda r: (r["us"] - r["limit_us"]) * r["calls"], default=None)
    text = f"the device is busy for {mine:.0f} us, others' for {min(others):.0f} us"
    if worst is None:
        return text
    lost = (worst["us"] - worst["limit_us"]) * worst["calls"]
    return f"{text}; most above its limit: {worst['name'][:60]}, {lost:.0f} us"


def main() -> int:
    quiet()
    request = Request(**json.loads(sys.stdin.readline()))
    import torch
    import torch._dynamo

    from dev.bench.contenders import settings

    settings()
    torch._dynamo.config.recompile_limit = 64  # code of a module serves all compilers
    work = Work(request)
    if not work.prepare():
        emit(row=None)
        return 0
    if request.device == "cuda":
        torch.cuda.empty_cache()  # others of the batch prepare still
    emit(ready=True)
    sys.stdin.readline()
    if not any(f["kind"] == "crash" for f in work.row["failures"]):
        work.time()
    emit(row=work.row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
