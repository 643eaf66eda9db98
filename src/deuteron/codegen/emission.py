"""The passes that make a Python module of a schedule.

In: the schedule, its memory plan, the generated kernels (`Emission`). Out: an `EmittedModule`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from deuteron.base.passes import Context, Pass, Table, extended, run_passes
from deuteron.codegen.assemble import (
    Body,
    EmittedModule,
    KernelCode,
    Request,
    assemble,
    translation,
)
from deuteron.codegen.module import Writer
from deuteron.ir.program import Program
from deuteron.ir.verify import error
from deuteron.ir.verify_expr import Fault
from deuteron.memory.plan import MemoryPlan
from deuteron.schedule.kernel import Schedule


@dataclass(frozen=True)
class Emission:
    """What a module is made of; `kernels` by `Kernel.name`, each with the arguments of that
    launch."""

    program: Program
    schedule: Schedule
    plan: MemoryPlan
    kernels: dict[str, KernelCode]
    request: Request


@dataclass(frozen=True)
class Called(Emission):
    """The lines of ``call``."""

    body: Body


@dataclass(frozen=True)
class Translated(Called):
    """The C++ of all CPU kernels, "" without any."""

    unit: str


def write_call(emission: Emission, context: Context) -> Called:
    """The steps, as lines of the function that is called."""
    e = emission
    body = Writer(e.program, e.schedule, e.plan, e.kernels, e.request).write()
    return extended(Called, emission, body=body)


def write_unit(emission: Called, context: Context) -> Translated:
    """One C++ translation unit of all CPU kernels, and of what launches them."""
    unit = translation(emission.body, emission.kernels, emission.request.threads)
    return extended(Translated, emission, unit=unit)


def write_module(emission: Translated, context: Context) -> EmittedModule:
    """The module's text, a program of its own."""
    e = emission
    return assemble(e.body, e.unit, e.program, e.kernels, e.request)


def verify_called(emission: Called, guilty: str) -> None:
    """Every kernel of the schedule is launched once."""
    body = emission.body
    launches = sum(len(g.kernels) for g in body.launch_groups)
    launches += sum(len(q.kernels) for q in body.sequences)
    if launches != len(emission.kernels):
        fault = Fault("launches", f"{launches} launches of {len(emission.kernels)} kernels")
        raise error(fault, "call", (), guilty)


def verify_module(module: EmittedModule, guilty: str) -> None:
    """The text is a program of Python's."""
    try:
        ast.parse(module.text)
    except SyntaxError as e:
        raise error(Fault("syntax", str(e)), "the module", (), guilty) from None


def called_text(emission: Called) -> str:
    return "\n".join(emission.body.lines)


def unit_text(emission: Translated) -> str:
    return emission.unit


def module_text(module: EmittedModule) -> str:
    return module.text


EMITTING: Table = (
    Pass("call", write_call, verify_called, called_text),
    Pass("translation unit", write_unit, "the C++ compiler reads the text", unit_text),
    Pass("module", write_module, verify_module, module_text),
)


def emit(emission: Emission, context: Context) -> EmittedModule:
    """The module of a graph."""
    module: EmittedModule = run_passes(EMITTING, emission, context)
    return module


__all__ = ["EMITTING", "Emission", "emit"]
