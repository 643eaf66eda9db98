"""The stages of one graph, from ATen operators to a callable: what `pipeline`'s table names.

In: a `Part` (`capture.stages`). Out: `Loaded`. Each stage is a function ``(artifact, Context) ->
artifact``; an artifact holds what the ones before it hold, and more. The graph itself is rewritten
in place; nothing else that a stage is given changes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import fx

from deuteron.base.passes import Context, Pass, Table, extended, run_pass
from deuteron.capture.donated import donated_inputs
from deuteron.capture.stages import Part
from deuteron.codegen.assemble import EmittedModule, KernelCode, Request
from deuteron.codegen.cpp import kernels as cpp
from deuteron.codegen.cpp.kernels import KERNEL_CXX_FLAGS, CppKernel
from deuteron.codegen.cpp.nontemporal import read_later
from deuteron.codegen.emission import Emission, emit
from deuteron.codegen.share import structure, tensors_of
from deuteron.codegen.triton import generate as triton
from deuteron.codegen.triton.generate import TritonKernel
from deuteron.graph.rewrite import rewrite
from deuteron.graph.verify import graph_text, verify_graph
from deuteron.ir.printer import print_program
from deuteron.ir.program import Extern, Program
from deuteron.ir.verify import Fault, error, verify_program
from deuteron.lower.passes import lower
from deuteron.memory.plan import MemoryPlan, plan_text
from deuteron.memory.planning import Needs, plan_memory
from deuteron.memory.verify import verify_plan
from deuteron.runtime import build_cpp, guard
from deuteron.runtime.artifact import Artifact
from deuteron.runtime.fx_interpreter import FxInterpreter
from deuteron.runtime.launch import Call
from deuteron.runtime.launch_blas import multiply
from deuteron.runtime.launch_cuda import KernelVariants
from deuteron.runtime.recordable import recordable
from deuteron.runtime.tune import tuned
from deuteron.runtime.verify import Watcher
from deuteron.schedule import schedule
from deuteron.schedule.accesses import summary
from deuteron.schedule.kernel import Kernel, Schedule
from deuteron.schedule.printer import print_schedule
from deuteron.schedule.unordered import unordered
from deuteron.schedule.verify import verify_schedule

# -- artifacts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rewritten:
    """An ATen graph. `donated`: positions of inputs that may be overwritten, where a call says so;
    `traced`: the graph as it was before, for the self-check (option `verify`)."""

    graph: fx.GraphModule
    donated: frozenset[int]
    traced: FxInterpreter | None


@dataclass(frozen=True)
class Lowered(Rewritten):
    """Its program in the loop IR. `unfused`: nodes of the graph that share no kernel; `key`: under
    which the guard keeps what it decides, where it is on."""

    program: Program
    unfused: frozenset[str]
    key: str


@dataclass(frozen=True)
class Scheduled(Lowered):
    """Kernels and library calls in the order in which they run."""

    schedule: Schedule

    @property
    def steps(self) -> list[Kernel]:
        """The kernels."""
        return [s for s in self.schedule.steps if isinstance(s, Kernel)]


@dataclass(frozen=True)
class Planned(Scheduled):
    """Where every tensor lives."""

    plan: MemoryPlan


@dataclass(frozen=True)
class Generated(Planned):
    """The text of every kernel, by the kernel's name. `variants`: builds of Triton kernels that
    have been started, by function and device."""

    kernels: dict[str, KernelCode]
    variants: dict[tuple[str, str], KernelVariants]


@dataclass(frozen=True)
class Emitted(Generated):
    """The Python program that runs the kernels. `library`: the build of its C++ unit, started."""

    module: EmittedModule
    library: build_cpp.Build | None


@dataclass(frozen=True)
class Loaded(Emitted):
    """What is called."""

    call: Call


# -- rewrite ---------------------------------------------------------------------------------------


def rewrite_graph(part: Part, context: Context) -> Rewritten:
    """Constants, common subexpressions, algebra on ATen's operators; which library calls become
    others."""
    donated = donated_inputs(part.gm)
    traced = FxInterpreter(part.gm) if context.options.verify else None
    return Rewritten(rewrite(part.gm, context), donated, traced)


def verify_rewritten(rewritten: Rewritten, guilty: str) -> None:
    verify_graph(rewritten.graph, guilty)


def rewritten_text(rewritten: Rewritten) -> str:
    return graph_text(rewritten.graph)


# -- lower -----------------------------------------------------------------------------------------


def lower_graph(before: Rewritten, context: Context) -> Lowered:
    """Every operator becomes loops, or a library call. What some process has measured to be faster
    unfused is lowered so."""
    mark, unfused, key = len(context.record.entries), context.unfused, ""
    program = lower(before.graph, context)
    if context.options.guard != "off":
        where = ", ".join(context.spec(d).name for d in devices_of(program))
        key = guard.key(print_program(program), program, where, context.options)
        unfused = guard.remembered(key, context.options) or frozenset()
        if unfused:
            del context.record.entries[mark:]
            program = lower(before.graph, replace(context, unfused=unfused))
    return extended(Lowered, before, program=program, unfused=unfused, key=key)


def devices_of(program: Program) -> list[str]:
    return sorted({lay.device for lay in program.layouts().values()})


def verify_lowered(lowered: Lowered, guilty: str) -> None:
    verify_program(lowered.program, guilty)


def lowered_text(lowered: Lowered) -> str:
    return print_program(lowered.program)


# -- schedule --------------------------------------------------------------------------------------


def schedule_program(before: Lowered, context: Context) -> Scheduled:
    """Which loops share a kernel, in which order everything runs."""
    scheduled = schedule(before.program, replace(context, unfused=before.unfused))
    for entry in unordered(scheduled):
        context.record.add("unordered", **entry)
    for step in scheduled.steps:
        if isinstance(step, Extern) and not step.is_view:
            origins = [{"node": o.node, "op": o.op, "line": o.line} for o in step.origins]
            context.record.add("library", op=step.op, reason=step.reason, origins=origins)
    if context.watched:
        context.record.add("accesses", **summary(scheduled))
    return extended(Scheduled, before, schedule=scheduled)


def verify_scheduled(scheduled: Scheduled, guilty: str) -> None:
    verify_schedule(scheduled.schedule, scheduled.program, guilty)


def scheduled_text(scheduled: Scheduled) -> str:
    return print_schedule(scheduled.schedule)


# -- memory ----------------------------------------------------------------------------------------


def place_tensors(before: Scheduled, context: Context) -> Planned:
    """Where every tensor lives."""
    needs = Needs(before.schedule, before.program, before.donated)
    return extended(Planned, before, plan=plan_memory(needs, context))


def verify_planned(planned: Planned, guilty: str) -> None:
    verify_plan(planned.plan, planned.schedule, planned.program, guilty)


def planned_text(planned: Planned) -> str:
    return plan_text(planned.plan)


# -- generate --------------------------------------------------------------------------------------


CPP_ROW = Pass("cpp", cpp.write_kernel, cpp.COMPILED, cpp.source_text, passes=cpp.CPP)
TRITON_ROW = Pass(
    "triton", triton.write_kernel, triton.verify_source, triton.source_text, passes=triton.TRITON
)
# Run for one kernel after the other: a kernel goes through one of them.
GENERATING: Table = (CPP_ROW, TRITON_ROW)


def generate_kernels(before: Planned, context: Context) -> Generated:
    """C++ and Triton text of every kernel; kernels that are alike share it. Triton's builds
    start."""
    kernels: dict[str, KernelCode] = {}
    variants: dict[tuple[str, str], KernelVariants] = {}
    first_of: dict[Hashable, tuple[Kernel, KernelCode]] = {}
    specs = {k.device: context.spec(k.device) for k in before.steps}
    again = read_later(before.schedule)
    for k in before.steps:
        cpu, soon = k.device == "cpu", again[k.name]
        key: Hashable = (structure(k), cpu and tuple(n in soon for n in tensors_of(k)))
        if context.options.check_accesses:
            key = k.name  # its text names its tensors
        if key not in first_of:
            code: Any
            spec = specs[k.device]
            if cpu:
                code = run_pass(CPP_ROW, cpp.task_of(k, spec, context.options, soon), context, 1)
            else:
                code = run_pass(TRITON_ROW, triton.Task(k, spec), context, 2)
                at, given = torch.device(k.device), (context.options, context.record)
                variants[code.name, k.device] = KernelVariants(code, at, *given)
            first_of[key] = k, code
        first, code = first_of[key]
        kernels[k.name] = relabelled(first, code, k)
        prefix = "cpp" if cpu else "triton"
        context.record.add(
            "kernel",
            name=f"{prefix}_{k.name}",
            target=k.device,
            ops=[o.op for o in k.origins],
            origins=[{"node": o.node, "op": o.op, "line": o.line} for o in k.origins],
            bytes=k.bytes,
            flops=k.flops,
            unit=k.unit,
            predicted_us=k.predicted_us,
            source=code.source,
            same_code_as="" if first is k else f"{prefix}_{first.name}",
        )
    return extended(Generated, before, kernels=kernels, variants=variants)


def relabelled(first: Kernel, code: KernelCode, kernel: Kernel) -> KernelCode:
    """The code generated for `first`, with the arguments of a kernel that is like it."""
    if first is kernel:
        return code
    names = dict(zip(tensors_of(first), tensors_of(kernel), strict=True))
    if isinstance(code, CppKernel):
        return replace(code, args=tuple((kind, names[n]) for kind, n in code.args))
    args = tuple((kind, names[str(w)] if kind == "tensor" else w) for kind, w in code.args)
    return replace(code, args=args)


def verify_generated(generated: Generated, guilty: str) -> None:
    """Every kernel has code, which takes the kernel's tensors and no others."""
    for k in generated.steps:
        code = generated.kernels.get(k.name)
        taken = [] if code is None else [w for kind, w in code.args if kind == "tensor"]
        if code is None or sorted(map(str, taken)) != sorted(tensors_of(k)):
            fault = Fault("arguments", f"its code takes {taken}, it has {list(tensors_of(k))}")
            raise error(fault, f"kernel {k.name}", k.origins, guilty)


def generated_text(generated: Generated) -> str:
    return "\n\n".join({code.name: code.source for code in generated.kernels.values()}.values())


# -- emit ------------------------------------------------------------------------------------------


def emit_module(before: Generated, context: Context) -> Emitted:
    """The Python program that runs the kernels. The C++ compiler starts."""
    options, kernels = context.options, before.kernels
    calls = len(before.schedule.steps) - len(kernels)
    about = [f"{len(kernels)} kernels, {calls} library calls."]
    asked = ((f.name, getattr(options, f.name), f.default) for f in fields(options))
    about += [f"{name} = {value!r}" for name, value, usual in asked if value != usual]
    request = Request(
        f"{context.phase} graph {context.number} of this process, compiled by Deuteron.",
        tuple(about),
        options.threads,
        options.verify,
        lambda product, device: multiply(product, device, options) is not None,
        context.phase,
        context.clock is not None,
    )
    emission = Emission(before.program, before.schedule, before.plan, kernels, request)
    module = emit(emission, context)
    if module.sequences:
        build_cpp.compiler(options.cxx)  # launching needs it
    library = build_cpp.submit(module.unit, KERNEL_CXX_FLAGS, options) if module.unit else None
    return extended(Emitted, before, module=module, library=library)


def emitted_text(emitted: Emitted) -> str:
    return emitted.module.text


# -- load ------------------------------------------------------------------------------------------


def load_module(before: Emitted, context: Context) -> Loaded:
    """Kernels are built or taken from the cache, and bound to the program."""
    options, record, module = context.options, context.record, before.module
    extra: dict[str, Any] = {}
    triton = {n: k for n, k in before.kernels.items() if isinstance(k, TritonKernel)}
    if options.autotune:
        extra |= tuned(module, triton, before.steps, before.variants, options, record)
    watcher: Watcher | None = None
    if options.verify:
        watcher = Watcher(before.steps, before.kernels, options, before.program, before.traced)
        extra["watch"] = watcher.watch
    if context.clock is not None:
        extra["clock"] = context.clock.start
    graph = None
    if options.cudagraphs:
        graph = recordable(before.program, before.schedule, bool(before.plan.given), options)
    launched = {n: triton[n] for q in module.sequences for n in q.kernels}
    artifact = Artifact(context.phase, module, launched, graph)
    name = f"<deuteron {context.phase} graph {context.number}>"
    path = name if context.folder is None else str(context.folder / "module.py")
    around = watcher.around if watcher is not None else None
    call = artifact.load(options, record, path, before.library, before.variants, extra, around)
    call.artifact = artifact  # type: ignore[attr-defined]
    return extended(Loaded, before, call=call)


def loaded_text(loaded: Loaded) -> str:
    kernels = len(loaded.steps)
    return f"{kernels} kernels, {len(loaded.schedule.steps) - kernels} library calls, bound\n"
