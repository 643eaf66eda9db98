"""Schedules small functions for a named device, checks the schedule, and runs it by reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deuteron.base.device import DeviceSpec, device_spec, named_gpu
from deuteron.base.options import Options
from deuteron.base.passes import Context
from deuteron.base.record import Record
from deuteron.ir.index import evaluate
from deuteron.ir.program import Constant, Input, Program
from deuteron.lower.core import TO_TORCH
from deuteron.lower.unrounded import unrounded
from deuteron.schedule import schedule
from deuteron.schedule.kernel import Kernel, Schedule
from deuteron.schedule.reference import run_kernel
from deuteron.schedule.verify import verify_schedule
from tests.lower.harness import lowered, tensors, trace


def spec_of(device: str) -> DeviceSpec:
    spec = device_spec("cpu") if device == "cpu" else named_gpu(device)
    assert spec is not None
    return spec


@dataclass
class Scheduled:
    program: Program
    schedule: Schedule
    record: Record

    @property
    def kernels(self) -> list[Kernel]:
        return [s for s in self.schedule.steps if isinstance(s, Kernel)]

    def refused(self, reason: str) -> list[dict[str, Any]]:
        return [
            d for d in self.record.of("decision") if not d["accepted"] and d["reason"] == reason
        ]

    def accepted(self, subject: str) -> list[dict[str, Any]]:
        return [d for d in self.record.of("decision") if d["accepted"] and d["subject"] == subject]

    def given(self, args: Sequence[Any]) -> dict[str, torch.Tensor]:
        """What is in memory before the first kernel: inputs and constants."""
        memory: dict[str, torch.Tensor] = {}
        for d in self.program.defs:
            if isinstance(d, Input):
                memory[d.name] = args[d.position]
            elif isinstance(d, Constant):
                memory[d.name] = self.program.constants[d.name]
        return memory

    def run(self, args: list[Any]) -> list[torch.Tensor]:
        """The outputs, by the reference executor."""
        sizes: dict[str, int] = {}
        for sym, (kind, position, dim) in self.program.sizes:
            x = args[position]
            sizes[sym.name] = (
                x if kind == "int" else (x.shape if kind == "shape" else x.stride())[dim]
            )
        memory = self.given(args)
        for k in self.kernels:
            for name, lay in k.writes:
                if name in self.schedule.aliases:
                    memory[name] = memory[self.schedule.aliases[name]]
                elif name not in memory:
                    shape = [evaluate(n, sizes) for n in lay.shape]
                    memory[name] = torch.empty(shape, dtype=TO_TORCH[lay.dtype])
            run_kernel(k, memory, sizes)
        return [memory[o.tensor] for o in self.program.outputs if o.tensor is not None]


def scheduled(
    f: Callable[..., Any],
    *args: Any,
    device: str = "cpu",
    dynamic: bool = False,
    check: bool = True,
    products: str | None = None,
    **options: Any,
) -> Scheduled:
    """The schedule of `f` for a device (its cost model; the tensors stay on the CPU). `products`:
    as of `lowered`."""

    def listed(*xs: Any) -> Any:
        out = f(*xs)
        return tensors(out) if isinstance(out, (list, tuple)) else [out]

    program = lowered(trace(listed, args, dynamic), products).program
    asked = Options.make(options=options)
    if asked.precision == "float32":
        program = unrounded(program)
    record = Record()
    plan = schedule(
        program,
        Context(replace(asked, verify=True), record, specs=lambda _: spec_of(device)),
    )
    verify_schedule(plan, program, "schedule", strict=False)
    out = Scheduled(program, plan, record)
    if check:
        got = out.run([x.clone() if isinstance(x, torch.Tensor) else x for x in args])
        for g, e in zip(got, listed(*args), strict=True):
            torch.testing.assert_close(g, e, rtol=2e-4, atol=2e-4)
    return out
