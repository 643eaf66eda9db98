"""Programs through all stages up to the schedule, for a GPU by name or the CPU; run by the
reference executor.

Unlike `tests.schedule.tools` it begins at Dynamo, so that products are library calls as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deuteron.backend import deuteron_backend
from deuteron.base.device import DeviceSpec, device_spec, named_gpu
from deuteron.base.passes import Context
from deuteron.base.record import Record
from deuteron.capture.stages import Part
from deuteron.ir.program import Constant, Extern, Input, Program
from deuteron.ir.reference import Execution, allocate
from deuteron.pipeline import compiled
from deuteron.schedule.kernel import Kernel, Schedule
from deuteron.schedule.reference import run_kernel


@dataclass
class Call:
    """A call of a graph: its inputs, in their order."""

    program: Program
    schedule: Schedule
    inputs: list[Any]

    def memory(self) -> dict[str, Any]:
        """Tensors that are there before anything runs."""
        found: dict[str, Any] = {}
        for d in self.program.defs:
            if isinstance(d, Input):
                found[d.name] = self.inputs[d.position]
            elif isinstance(d, Constant):
                found[d.name] = self.program.constants[d.name]
        return found


@dataclass
class Plan:
    programs: list[Program] = field(default_factory=list)
    schedules: list[Schedule] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    made: list[tuple[Any, Context]] = field(default_factory=list)  # artifacts of the last stage
    calls_made: list[Call] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)  # of the last call, by name
    results: Any = None

    @property
    def kernels(self) -> list[Kernel]:
        return [s for p in self.schedules for s in p.steps if isinstance(s, Kernel)]

    @property
    def contractions(self) -> list[Kernel]:
        return [k for k in self.kernels if k.contraction is not None]

    @property
    def calls(self) -> list[Extern]:
        return [s for p in self.schedules for s in p.steps if isinstance(s, Extern)]

    def decisions(self, accepted: bool) -> list[dict[str, Any]]:
        found = [d for r in self.records for d in r.of("decision") if d["subject"] == "contract"]
        return [d for d in found if d["accepted"] is accepted]


def planned(
    f: Callable[..., Any], *args: Any, device: str = "H100", run: bool = True, **options: Any
) -> Plan:
    """What becomes of `f`; `run`: also its results, by the reference executor."""
    plan = Plan()
    torch._dynamo.reset()
    # What is planned for a CPU does not depend on the one that plans.
    caches: dict[str, Any] = {"cores": 2, "l1": 32 << 10, "l2": 1 << 20, "l3": 32 << 20}
    caches["gflops"] = (("f32", 180.0), ("f64", 90.0))
    cpu = device == "cpu"
    spec = replace(device_spec("cpu"), **caches) if cpu else named_gpu(device)
    assert spec is not None
    runner = partial(_scheduled, plan, spec, run)
    backend = partial(deuteron_backend, runner=runner, specs=lambda _: spec)
    plan.results = torch.compile(f, backend=backend, options=options)(*args)
    return plan


def trained(f: Callable[..., Any], *args: Any, run: bool = True, **options: Any) -> Plan:
    """What becomes of `f` and its gradients; `results`: of the forward, then the gradients of the
    arguments, which are leaves from now on."""
    for a in args:
        a.requires_grad_()
    plan = planned(f, *args, run=run, **options)
    grads = gradients(plan.results, args)
    plan.results = [plan.results, *grads]
    return plan


def gradients(results: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Of all arguments, for the same random gradient of the result each time."""
    results = results if isinstance(results, (tuple, list)) else (results,)
    generator = torch.Generator().manual_seed(7)
    given = [torch.randn(r.shape, generator=generator).to(r) for r in results]
    return torch.autograd.grad(results, args, given)


def _scheduled(plan: Plan, spec: DeviceSpec, run: bool, part: Part, context: Context) -> Any:
    context = replace(context, like=spec.kind, specs=lambda _: spec)
    made = compiled("rewrite", "schedule", part, context)
    program, schedule = made.program, made.schedule
    plan.programs.append(program)
    plan.schedules.append(schedule)
    plan.records.append(context.record)
    plan.made.append((made, context))

    def call(args: list[Any]) -> Sequence[Any]:
        inputs = list(args)
        args.clear()
        plan.calls_made.append(Call(program, schedule, list(inputs)))
        with torch.no_grad():
            execution = executed(program, schedule, inputs, run)
            plan.tensors = execution.tensors
            return [execution.output(o) for o in program.outputs]

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def executed(program: Program, schedule: Schedule, inputs: Sequence[Any], run: bool) -> Execution:
    """One call: library calls by ATen, kernels by the reference executor."""
    execution = Execution(program, inputs)
    for d in program.defs:
        if isinstance(d, (Input, Constant)):
            execution.define(d)
    for step in schedule.steps:
        if isinstance(step, Kernel):
            for name, layout in step.writes:
                if name in schedule.aliases:
                    execution.tensors[name] = execution.tensors[schedule.aliases[name]]
                elif name not in execution.tensors:
                    execution.tensors[name] = allocate(layout, execution.sizes)
            if run:
                run_kernel(step, execution.tensors, execution.sizes)
        elif run:
            execution.define(step)
        else:
            for result, made in zip(step.names, step.layouts, strict=True):
                if result and made:
                    execution.tensors[result] = allocate(made, execution.sizes)
    return execution


__all__ = ["Call", "Plan", "gradients", "planned", "trained"]
