"""Scheduling: which computations share a kernel.

In: a `Program`. Out: a `Schedule`, and every decision in the Record. The passes are the rows of
`SCHEDULING`; those from "dependencies" to "recompute" work on one search (`fuse.Fusion`), which
each of them resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from deuteron.base.device import DeviceSpec
from deuteron.base.passes import Context, Pass, Table, extended, run_passes
from deuteron.base.record import Record
from deuteron.ir.printer import print_program
from deuteron.ir.program import Compute, Extern, Layout, Program, memory_of
from deuteron.ir.verify import verify_program
from deuteron.schedule.build import build, needed_outside
from deuteron.schedule.contract import Contracted, Contraction, OrderedStep, PlainStep
from deuteron.schedule.dag import Dag
from deuteron.schedule.fuse import Fusion
from deuteron.schedule.horizontal import Call, HorizontalFusion, Launch
from deuteron.schedule.kernel import Schedule
from deuteron.schedule.layouts import lie_alike, without_copies
from deuteron.schedule.narrow import narrow
from deuteron.schedule.normalize import canonical, is_unfused, normalize
from deuteron.schedule.phases import write_phases
from deuteron.schedule.printer import call_lines, contraction_lines, group_lines, print_schedule
from deuteron.schedule.recompute import recompute
from deuteron.schedule.split import split_groups
from deuteron.schedule.verify import verify_schedule
from deuteron.schedule.verify_groups import verify_groups


@dataclass(frozen=True)
class Normalized:
    """A program and its devices, and its computations as fusion starts from them."""

    program: Program
    layouts: dict[str, Layout]
    owner: dict[str, str]  # tensor -> the one in whose memory it lives
    specs: dict[str, DeviceSpec]
    computes: dict[str, Compute]


@dataclass(frozen=True)
class Grouped(Normalized):
    """The computations in groups, each of which will be a nest. `fusion` holds them: passes change
    it in place."""

    fusion: Fusion


@dataclass(frozen=True)
class Ordered(Grouped):
    """Groups with microseconds, and library calls, in the order in which they run."""

    steps: tuple[OrderedStep, ...]


@dataclass(frozen=True)
class HorizontallyFused(Ordered):
    """The same, with several groups in one launch."""

    launches: tuple[Launch | Call, ...]


@dataclass(frozen=True)
class Built(HorizontallyFused):
    schedule: Schedule


# -- the passes ------------------------------------------------------------------------------------


def narrowed(program: Program, context: Context) -> Program:
    """What is the same along a dimension, without it."""
    return narrow(program) if context.options.fusion else program


def normalized(program: Program, context: Context) -> Normalized:
    """Canonical axes; producers written into their readers."""
    layouts = program.layouts()
    devices = sorted({lay.device for lay in layouts.values()})
    specs = {d: context.spec(d) for d in devices}
    if context.options.fusion:
        computes = normalize(program, layouts, specs, context.record, context.unfused)
    else:
        computes = {d.name: canonical(d) for d in program.computes()}
    return Normalized(program, layouts, memory_of(program), specs, computes)


def lying_alike(before: Normalized, context: Context) -> Normalized:
    """Orders in memory for what only kernels read; what has a copy that lies alike is that copy."""
    if not context.options.fusion:
        return before
    program, computes = before.program, before.computes
    layouts = before.layouts | lie_alike(program, computes, before.layouts, context.record)
    program, computes = without_copies(program, computes, layouts)
    return replace(before, program=program, layouts=layouts, computes=computes)


def depending(before: Normalized, context: Context) -> Grouped:
    """A group for each computation, and what must run before what."""
    program, computes = before.program, before.computes
    dag = Dag.of(program, computes, before.owner)
    fusion = Fusion(
        dag, before.layouts, before.owner, needed_outside(program), before.specs, context.record
    )
    fusion.unfused = {n for n, c in computes.items() if is_unfused(c, context.unfused)}
    return extended(Grouped, before, fusion=fusion)


def fused(before: Grouped, context: Context) -> Grouped:
    """Best-first merges: `legality` says whether, `profit` says how much."""
    if context.options.fusion:
        before.fusion.run()
    return before


def split_few_rows(before: Grouped, context: Context) -> Grouped:
    """Reductions with few rows in two steps; many partial results are split again."""
    if context.options.fusion:
        inside = cache(lambda: multiplied(before, context))
        while split_groups(before.fusion, inside):
            pass
    return before


def multiplied(before: Grouped, context: Context) -> frozenset[str]:
    """What products would take into one kernel, if it stays as it is: that has parts of its own."""
    given = replace(context, record=Record()), dict(before.layouts)
    steps = contraction(before, steps_of(before.fusion), *given)
    taken = (step.computes for step in steps if isinstance(step, Contracted))
    return frozenset(c.name for computes in taken for c in computes)


def recomputed(before: Grouped, context: Context) -> Grouped:
    """What is cheaper to compute again than to read."""
    if context.options.fusion:
        recompute(before.fusion)
    return before


def phases_written(before: Grouped, context: Context) -> Grouped:
    """Reductions over what differs in a small period, with its places written out."""
    if context.options.fusion:
        write_phases(before.fusion, cache(lambda: multiplied(before, context)))
    return before


def ordered(before: Grouped, context: Context) -> Ordered:
    """An order of execution as near to the program's as can be."""
    if context.options.fusion:
        before.fusion.report()
    return extended(Ordered, before, steps=steps_of(before.fusion))


def steps_of(fusion: Fusion) -> tuple[PlainStep, ...]:
    return tuple(
        n.content if isinstance(n.content, Extern) else (n.content, fusion.cost(n).us)
        for n in fusion.dag.order()
    )


def contraction(
    before: Grouped, steps: Sequence[PlainStep], context: Context, layouts: dict[str, Layout]
) -> tuple[OrderedStep, ...]:
    if not context.options.fusion or context.options.precision == "eager":
        return tuple(steps)  # in blocks halves are rounded at another scale
    outside = needed_outside(before.program)
    unfused = before.fusion.unfused | context.unfused
    given = (layouts, before.owner, outside, before.specs, context.record, unfused)
    return Contraction(steps, *given).run()


def contracted(before: Ordered, context: Context) -> Ordered:
    """Products in one kernel with what surrounds them, where that is faster than the library."""
    left = [s for s in before.steps if not isinstance(s, Contracted)]
    steps = contraction(before, left, context, before.layouts)
    for step in steps:
        if isinstance(step, Contracted):
            before.layouts.update((c.name, c.layout) for c in step.computes)
    return replace(before, steps=steps)


def fused_horizontally(before: Ordered, context: Context) -> HorizontallyFused:
    """Short kernels in one launch."""
    layouts = before.layouts
    if context.options.fusion:
        fusion = HorizontalFusion(layouts, before.owner, before.specs, context.record)
        launches = fusion.run(before.steps)
    else:
        launches = [s if isinstance(s, Call) else Launch.of(*s, layouts) for s in before.steps]
    return extended(HorizontallyFused, before, launches=tuple(launches))


def built(before: HorizontallyFused, context: Context) -> Built:
    """Kernels with names, nests and costs."""
    schedule = build(before.launches, before.program, before.layouts, before.specs)
    return extended(Built, before, schedule=schedule)


# -- what checks and prints their artifacts --------------------------------------------------------


def as_program(normalized: Normalized) -> Program:
    """The program with its normalized computations."""
    defs = (
        normalized.computes.get(d.name) if isinstance(d, Compute) else d
        for d in normalized.program.defs
    )
    return replace(normalized.program, defs=tuple(d for d in defs if d is not None))


def verify_normalized(normalized: Normalized, guilty: str) -> None:
    verify_program(as_program(normalized), guilty)


def normalized_text(normalized: Normalized) -> str:
    return print_program(as_program(normalized))


def verify_grouped(grouped: Grouped, guilty: str) -> None:
    verify_groups(grouped.fusion.dag, grouped.layouts, guilty)


def grouped_text(grouped: Grouped) -> str:
    fusion = grouped.fusion
    lines: list[str] = []
    for node in fusion.dag.order():
        if isinstance(node.content, Extern):
            lines += call_lines(node.content)
        else:
            stored = fusion.stored(node.content, {node.id})
            lines += group_lines(node.content, stored, grouped.layouts)
    return "\n".join(lines)


def step_lines(step: Call) -> list[str]:
    if isinstance(step, Extern):
        return call_lines(step)
    return [f"one kernel, {step.estimate.us:.2f} us:", *contraction_lines(step.nest, step.tiling)]


def ordered_text(ordered: Ordered) -> str:
    lines: list[str] = []
    for step in ordered.steps:
        if isinstance(step, Call):
            lines += step_lines(step)
        else:
            lines.append(f"{', '.join(m.name for m in step[0].members)}: {step[1]:.2f} us")
    return "\n".join(lines)


def launches_text(fused: HorizontallyFused) -> str:
    lines: list[str] = []
    for step in fused.launches:
        if isinstance(step, Call):
            lines += step_lines(step)
            continue
        lines.append(f"launch on {step.device}, {step.us:.2f} us:")
        for k, group in enumerate(step.groups):
            lines += ["    barrier"] * (k in step.barriers)
            lines.append(f"    {', '.join(m.name for m in group.members)}")
    return "\n".join(lines)


def verify_built(built: Built, guilty: str) -> None:
    verify_schedule(built.schedule, built.program, guilty)


def built_text(built: Built) -> str:
    return print_schedule(built.schedule)


KERNELS_TELL = 'its order is checked in the kernels that "build" makes'
SCHEDULING: Table = (
    Pass("narrow", narrowed, verify_program, print_program),
    Pass("normalize", normalized, verify_normalized, normalized_text),
    Pass("layouts", lying_alike, verify_normalized, normalized_text),
    Pass("dependencies", depending, verify_grouped, grouped_text),
    Pass("fuse", fused, verify_grouped, grouped_text),
    Pass("split", split_few_rows, verify_grouped, grouped_text),
    Pass("recompute", recomputed, verify_grouped, grouped_text),
    Pass("phases", phases_written, verify_grouped, grouped_text),
    Pass("order", ordered, KERNELS_TELL, ordered_text),
    Pass("contract", contracted, KERNELS_TELL, ordered_text),
    Pass("horizontal", fused_horizontally, KERNELS_TELL, launches_text),
    Pass("build", built, verify_built, built_text),
)


def schedule(program: Program, context: Context) -> Schedule:
    """Kernels and library calls in execution order."""
    built: Built = run_passes(SCHEDULING, program, context)
    return built.schedule


__all__ = ["SCHEDULING", "schedule"]
