"""Whether a graph's calls can be recorded as CUDA graphs, and what recording must know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deuteron.base.options import Options
from deuteron.graph.random_ops import SEED
from deuteron.ir.program import Extern, Input, Program
from deuteron.schedule.kernel import Kernel, Schedule

# Launches from which a graph pays: launching one costs as much as two or three kernels.
MIN_LAUNCHES = 3


# Bytes, for each launch, of results that library calls allocate themselves: they are copied out of
# the graph's memory. More would cost more (4 us on an H200) than launching the calls one by one.
MAX_COPIED_BYTES = 8 << 20


def why_not(program: Program, schedule: Schedule, options: Options) -> str:
    """Why a program cannot be recorded; "" if it can."""
    devices = sorted({lay.device for lay in schedule.layouts.values()})
    if not any(d.startswith("cuda") for d in devices):
        return "nothing of it runs on a GPU"
    if len(devices) > 1:
        return f"it uses {', '.join(devices)}: a graph is of one device"
    if options.verify:
        return "the self-check looks at every kernel's results (option verify)"
    unknown = [s.name for s, (kind, _, _) in program.sizes if kind == "result"]
    if unknown:
        return f"sizes {', '.join(unknown)} are known only when the GPU has computed them"
    calls = [s for s in schedule.steps if isinstance(s, Extern)]
    for c in calls:
        reason = _why_unfit(c, program)
        if reason:
            return f"{c.op} {reason}"
    if launches(schedule) < MIN_LAUNCHES:
        return f"{launches(schedule)} launches cost no more than that of a graph"
    return ""


def launches(schedule: Schedule) -> int:
    """Kernels and library calls that are no views."""
    views = sum(1 for s in schedule.steps if isinstance(s, Extern) and s.aliases and any(s.aliases))
    return sum(1 for s in schedule.steps if isinstance(s, (Kernel, Extern))) - views


def _why_unfit(call: Extern, program: Program) -> str:
    if call.op in program.callables:
        return "is run by Python"
    operator: Any = torch.ops
    for part in call.op.split("."):
        operator = getattr(operator, part)
    if operator is SEED:
        return ""
    if operator.namespace.startswith("_c10d"):
        return "talks to other processes"
    reasons = {
        "nondeterministic_seeded": "draws random numbers of its own",
        "dynamic_output_shape": "makes results of unknown size",
        "data_dependent_output": "waits for a value from the GPU",
        "cudagraph_unsafe": "is marked as unfit",
    }
    if _without_dropout(call, operator):
        del reasons["nondeterministic_seeded"]
    for name, reason in reasons.items():
        tag = getattr(torch.Tag, name, None)
        if tag is not None and tag in operator.tags:
            return reason
    return ""


def _without_dropout(call: Extern, operator: Any) -> bool:
    """Whether an operator draws numbers only for a dropout of which there is none (attention)."""
    names = [a.name for a in operator._schema.arguments]
    given = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
    return "dropout_p" in names and given.get("dropout_p", 0.0) == 0.0


@dataclass(frozen=True)
class Recordable:
    """What recording a graph needs to know of it, or why that cannot be.

    reason    why it runs as ever; empty if it is recorded
    device    the number of its GPU
    launches  kernels and library calls in a call
    tensors   positions of the arguments that are tensors
    key       texts of what decides, beside the stream, which graph a call (of ``args``) takes
    given     whether the call asks if inputs may be overwritten
    """

    reason: str
    device: int = 0
    launches: int = 0
    tensors: tuple[int, ...] = ()
    key: tuple[str, ...] = ()
    given: bool = False


def recordable(program: Program, schedule: Schedule, given: bool, options: Options) -> Recordable:
    reason = why_not(program, schedule, options)
    if reason:
        return Recordable(reason)
    where = next(iter(lay.device for lay in schedule.layouts.values()))
    tensors = tuple(d.position for d in program.defs if isinstance(d, Input))
    key = [f"args[{i}]" for i in sorted(set(range(program.num_inputs)) - set(tensors))]
    for _, (kind, i, dim) in program.sizes:
        if kind in ("shape", "stride"):
            what = f"shape[{dim}]" if kind == "shape" else f"stride({dim})"
            key.append(f"args[{i}].{what}")
    number = torch.device(where).index or 0
    return Recordable("", number, launches(schedule), tensors, tuple(key), given)
