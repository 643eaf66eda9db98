"""Scheduling: which computations share a kernel.

In: a `Program`. Out: a `Schedule`.
"""

from __future__ import annotations

from deuteron.base.device import DeviceSpec, device_spec_for
from deuteron.base.options import Options
from deuteron.base.record import Record
from deuteron.ir.program import Compute, Extern, Program
from deuteron.schedule.build import build
from deuteron.schedule.group import Group, alone
from deuteron.schedule.kernel import Schedule


def schedule(program: Program, options: Options, record: Record) -> Schedule:
    """One kernel per computation."""
    layouts = program.layouts()
    specs: dict[str, DeviceSpec] = {
        d: device_spec_for(d, options) for d in sorted({lay.device for lay in layouts.values()})
    }
    steps: list[list[Group] | Extern] = []
    for d in program.defs:
        if isinstance(d, Extern):
            steps.append(d)
        elif isinstance(d, Compute):
            steps.append([alone(d)])
    return build(steps, program, layouts, specs)


__all__ = ["schedule"]
