"""The compiler's spine: the stages through which every graph goes, in one table (`STAGES`).

In: an ATen graph as AOTAutograd leaves it. Out: a callable. Each stage is a function from one
artifact to the next. After the stages that make IR a verifier checks the artifact; each stage's
time is in the Record, and with a debug folder each artifact is written there as text.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import make_boxed_func

from deuteron.base.device import device_spec_for
from deuteron.base.errors import DeuteronError
from deuteron.base.garbage import collector_paused
from deuteron.base.memo import MEMO
from deuteron.base.options import Options
from deuteron.base.record import Record
from deuteron.capture.donated import donated_inputs
from deuteron.codegen.assemble import Generated
from deuteron.codegen.cpp.kernels import KERNEL_CXX_FLAGS, CppKernel
from deuteron.codegen.cpp.kernels import generate as generate_cpp
from deuteron.codegen.cpp.nontemporal import read_later
from deuteron.codegen.module import Emitted, Request, emit
from deuteron.codegen.share import structure, tensors_of
from deuteron.codegen.triton.generate import TritonKernel
from deuteron.codegen.triton.generate import generate as generate_triton
from deuteron.graph.rewrite import rewrite
from deuteron.ir.printer import print_program
from deuteron.ir.program import Program
from deuteron.ir.verify import verify_program
from deuteron.lower.contractions import choose_contraction
from deuteron.lower.graph import lower
from deuteron.memory.plan import MemoryPlan, plan_memory
from deuteron.runtime import build_cpp, guard
from deuteron.runtime.artifact import Artifact, next_number
from deuteron.runtime.fx_interpreter import FxInterpreter
from deuteron.runtime.guard import Clock
from deuteron.runtime.launch import Call
from deuteron.runtime.launch_blas import multiply
from deuteron.runtime.launch_cuda import KernelVariants
from deuteron.runtime.recordable import Recordable, recordable
from deuteron.runtime.tune import TunedLauncher, TunedProduct
from deuteron.runtime.verify import Watcher
from deuteron.schedule import schedule
from deuteron.schedule.accesses import summary
from deuteron.schedule.kernel import Kernel, Schedule
from deuteron.schedule.printer import print_schedule
from deuteron.schedule.uncertain import uncertain
from deuteron.schedule.unordered import unordered
from deuteron.schedule.verify import verify_schedule


@dataclass(frozen=True)
class Stage:
    """A method ``do_<name>`` of `Compilation`: from what, to what, and the file that shows it."""

    name: str
    takes: str
    gives: str
    file: str


STAGES = (
    # constants, common subexpressions, algebra on ATen's operators
    Stage("rewrite", "fx.GraphModule", "fx.GraphModule", "graph.txt"),
    # every operator becomes loops, or a library call
    Stage("lower", "fx.GraphModule", "ir.program.Program", "program.txt"),
    # which loops share a kernel, in which order everything runs
    Stage("schedule", "ir.program.Program", "schedule.kernel.Schedule", "schedule.txt"),
    # where every tensor lives
    Stage("memory", "schedule.kernel.Schedule", "memory.plan.MemoryPlan", "memory.txt"),
    # C++ and Triton text of every kernel; Triton's builds start
    Stage("generate", "schedule.kernel.Schedule", "CppKernel | TritonKernel", "kernels.txt"),
    # the Python program that runs the kernels; the C++ compiler starts
    Stage("emit", "all of these", "codegen.assemble.Emitted", "module.py"),
    # kernels built or taken from the cache, and bound to the program
    Stage("load", "codegen.assemble.Emitted", "a callable", ""),
)


@dataclass
class Compilation:
    """One graph on its way through the stages: each fills in the next artifact."""

    graph: fx.GraphModule
    phase: str
    options: Options
    record: Record
    donated: frozenset[int] = frozenset()  # inputs that may be overwritten, where a call says so
    number: int = field(default_factory=next_number)
    traced: FxInterpreter | None = None  # for the self-check
    program: Program | None = None
    schedule: Schedule | None = None
    plan: MemoryPlan | None = None
    kernels: dict[str, Generated] = field(default_factory=dict)
    variants: dict[tuple[str, str], KernelVariants] = field(default_factory=dict)
    emitted: Emitted | None = None
    library: build_cpp.Build | None = None
    apart: frozenset[str] = frozenset()  # nodes of the graph that share no kernel
    clock: Clock | None = None  # called around each step
    key: str = ""  # of what the guard decides
    call: Call | None = None

    # -- the stages -------------------------------------------------------------------------------
    def do_rewrite(self) -> str:
        self.donated = donated_inputs(self.graph)
        if self.options.verify:
            self.traced = FxInterpreter(self.graph)
        rewrite(self.graph, self.record)
        return self.graph.print_readable(print_output=False) if self.debug else ""

    def do_lower(self) -> str:
        mark = len(self.record.entries)
        self.program = self.lowered()
        if self.options.guard != "off":
            self.key = guard.key(
                print_program(self.program), self.program, self.where(), self.options
            )
            self.apart = guard.remembered(self.key, self.options) or frozenset()
            if self.apart:
                del self.record.entries[mark:]
                self.program = self.lowered()
        verify_program(self.program, "lower")
        return print_program(self.program) if self.debug else ""

    def do_schedule(self) -> str:
        assert self.program is not None
        self.schedule = schedule(self.program, self.options, self.record, apart=self.apart)
        verify_schedule(self.schedule, self.program, "schedule")
        for entry in unordered(self.schedule):
            self.record.add("unordered", **entry)
        if self.debug or self.options.verify:
            self.record.add("accesses", **summary(self.schedule))
        return print_schedule(self.schedule) if self.debug else ""

    def do_memory(self) -> str:
        assert self.program is not None and self.schedule is not None
        self.plan = plan_memory(self.schedule, self.program, self.record, self.donated)
        return "\n".join(map(str, self.record.of("buffer"))) if self.debug else ""

    def do_generate(self) -> str:
        specs = {k.device: device_spec_for(k.device, self.options) for k in self.steps()}
        alike: dict[Hashable, tuple[Kernel, Generated]] = {}
        assert self.schedule is not None
        again = read_later(self.schedule)
        for k in self.steps():
            cpu, spec, soon = k.device == "cpu", specs[k.device], again[k.name]
            key: Hashable = (structure(k), cpu and tuple(n in soon for n in tensors_of(k)))
            if self.options.check_accesses:
                key = k.name  # its text names its tensors
            found = alike.get(key)
            if found is None:
                made: Generated = (
                    generate_cpp(k, spec, self.options, soon)
                    if cpu
                    else generate_triton(k, spec, self.options)
                )
                found = alike[key] = (k, made)
                self.start(found[1], k.device)
            made = self.kernels[k.name] = relabelled(*found, k)
            prefix = "cpp" if k.device == "cpu" else "triton"
            self.record.add(
                "kernel",
                name=f"{prefix}_{k.name}",
                target=k.device,
                ops=[o.op for o in k.origins],
                origins=[{"node": o.node, "op": o.op, "line": o.line} for o in k.origins],
                bytes=k.bytes,
                flops=k.flops,
                predicted_us=k.predicted_us,
                source=made.source,
                same_code_as="" if found[0] is k else f"{prefix}_{found[0].name}",
            )
        return "\n\n".join(made.source for _, made in alike.values())

    def do_emit(self) -> str:
        assert self.program is not None and self.schedule is not None and self.plan is not None
        calls = len(self.schedule.steps) - len(self.kernels)
        about = [f"{len(self.kernels)} kernels, {calls} library calls."]
        asked = ((f.name, getattr(self.options, f.name), f.default) for f in fields(Options))
        about += [f"{name} = {value!r}" for name, value, usual in asked if value != usual]
        self.emitted = emit(
            self.program,
            self.schedule,
            self.plan,
            self.kernels,
            Request(
                f"{self.phase} graph {self.number} of this process, compiled by Deuteron.",
                tuple(about),
                self.options.threads,
                self.options.verify,
                lambda product, device: multiply(product, device, self.options) is not None,
                self.phase,
                self.clock is not None,
            ),
        )
        if self.emitted.sequences:
            build_cpp.compiler(self.options.cxx)  # launching needs it
        if self.emitted.unit:
            self.library = build_cpp.submit(self.emitted.unit, KERNEL_CXX_FLAGS, self.options)
        return self.emitted.text

    def do_load(self) -> str:
        assert self.emitted is not None
        extra: dict[str, Any] = {}
        if self.options.autotune:
            extra = dict(self.tuned())
        watcher: Watcher | None = None
        if self.options.verify:
            assert self.program is not None
            found = self.steps()
            watcher = Watcher(found, self.kernels, self.options, self.program, self.traced)
            extra["watch"] = watcher.watch
        if self.clock is not None:
            extra["clock"] = self.clock.start
        name = f"<deuteron {self.phase} graph {self.number}>"
        path = str(self.debug / "module.py") if self.debug else name
        triton = {n: k for n, k in self.kernels.items() if isinstance(k, TritonKernel)}
        named = {n: triton[n] for q in self.emitted.sequences for n in q.kernels}
        artifact = Artifact(self.phase, self.emitted, named, self.recordable())
        around = watcher.around if watcher is not None else None
        self.call = artifact.load(
            self.options, self.record, path, self.library, self.variants, extra, around
        )
        self.call.artifact = artifact  # type: ignore[attr-defined]
        if self.options.guard != "off":
            self.call = self.guarded(self.call)
        return ""

    # -- the guard --------------------------------------------------------------------------------
    def lowered(self) -> Program:
        """The program; products among the nodes that are kept apart are library calls."""

        def contraction(ctx: Any, a: Any, b: Any) -> str:
            if ctx.node.name in self.apart:
                return "measured: see the decisions of the guard"
            return choose_contraction(ctx, a, b)

        specs = partial(device_spec_for, options=self.options)
        chosen = contraction if self.apart else choose_contraction
        precision = self.options.precision
        return lower(self.graph, self.record, chosen, specs=specs, precision=precision)

    def where(self) -> str:
        """The devices of the program, in words."""
        assert self.program is not None
        devices = sorted({lay.device for lay in self.program.layouts().values()})
        return ", ".join(device_spec_for(d, self.options).name for d in devices)

    def guarded(self, call: Call) -> Call:
        """`call`, in whose first call uncertain kernels are measured, where nobody has yet."""
        assert self.program is not None and self.schedule is not None
        specs = {k.device: device_spec_for(k.device, self.options) for k in self.steps()}
        reasons = {k.name: uncertain(k, specs[k.device]) for k in self.steps()}
        reasons = {n: r for n, r in reasons.items() if r}
        effect = guard.effects(self.program)
        found = guard.remembered(self.key, self.options)
        why = "no kernel is uncertain" if not reasons else f"{effect} has effects" if effect else ""
        if found is not None:
            why = f"remembered, unfused: {', '.join(sorted(found)) or 'nothing'}"
        if why:
            self.record.add(
                "decision", subject="guard", accepted=bool(found), reason=why, detail=""
            )
            return call
        it = guard.Guard(
            self.program, self.schedule, reasons, self.timed_form, self.other_form, self.key,
            self.options, self.record,
        )  # fmt: skip
        return it.around(call)

    def timed_form(self, apart: frozenset[str]) -> guard.TimedForm:
        """The graph with these nodes kept apart, and a clock around each step."""
        clock = Clock(any(k.device != "cpu" for k in self.steps()))
        quiet = replace(self.options, guard="off", autotune=False, cudagraphs=False, debug_dir=None)
        other = Compilation(self.graph, self.phase, quiet, Record(), apart=apart, clock=clock)
        call = other.again()
        assert other.schedule is not None
        return guard.TimedForm(call, other.schedule.steps, clock)

    def other_form(self, apart: frozenset[str]) -> Call:
        """The graph with these nodes kept apart, as it will run from now on."""
        options = replace(self.options, guard="off", debug_dir=None)
        made = Compilation(self.graph, self.phase, options, self.record, self.donated, apart=apart)
        return made.again()

    def again(self) -> Call:
        """Runs the stages on a graph that was rewritten before."""
        with collector_paused(), MEMO.compiling():
            return self.staged(STAGES[1:])

    def tuned(self) -> Iterator[tuple[str, Any]]:
        """What launches kernels and products, and tries their candidates in the first call."""
        assert self.emitted is not None
        steps = {k.name: k for k in self.steps()}
        for q in self.emitted.sequences:
            kernels = [self.triton(n) for n in q.kernels]
            common = (kernels, q.operands, q.sizes, q.device, self.options, self.variants)
            yield q.name, TunedLauncher(*common, [steps[n] for n in q.kernels], self.record)
        for name, (product, device) in self.emitted.products.items():
            number = torch.device(device).index or 0
            yield name, TunedProduct(product, number, self.options, self.record)
        if not self.emitted.sequences:
            self.record.add(
                "decision",
                subject="autotune",
                accepted=False,
                reason="refused",
                detail="kernels of the CPU have one configuration",
            )

    def recordable(self) -> Recordable | None:
        """What a CUDA graph needs to know, where one was asked for."""
        if not self.options.cudagraphs:
            return None
        assert self.program is not None and self.schedule is not None and self.plan is not None
        return recordable(self.program, self.schedule, bool(self.plan.given), self.options)

    def start(self, made: Generated, device: str) -> None:
        """A kernel's build starts while others are generated."""
        if isinstance(made, TritonKernel):
            at = torch.device(device)
            self.variants[made.name, device] = KernelVariants(made, at, self.options, self.record)

    def triton(self, name: str) -> TritonKernel:
        found = self.kernels[name]
        assert isinstance(found, TritonKernel)
        return found

    # -- around them ------------------------------------------------------------------------------
    def steps(self) -> list[Kernel]:
        assert self.schedule is not None
        return [s for s in self.schedule.steps if isinstance(s, Kernel)]

    @property
    def debug(self) -> Path | None:
        """The folder that receives this graph's artifacts."""
        if self.options.debug_dir is None:
            return None
        return Path(self.options.debug_dir) / f"{self.phase}_{self.number}"

    def run(self) -> Call:
        with collector_paused(), MEMO.compiling():
            return self.staged()

    def staged(self, stages: Sequence[Stage] = STAGES) -> Call:
        for stage in stages:
            start = perf_counter()
            try:
                text = getattr(self, f"do_{stage.name}")()
            except (DeuteronError, torch.OutOfMemoryError):
                raise
            except Exception as e:
                raise internal_error(stage.name, e) from e
            self.record.add("stage", name=stage.name, seconds=perf_counter() - start)
            if self.debug is not None:
                self.write(stage.file, text)
        assert self.call is not None
        return self.call

    def write(self, file: str, text: str) -> None:
        """One artifact in the debug folder, and the Record so far."""
        assert self.debug is not None
        self.debug.mkdir(parents=True, exist_ok=True)
        if file:
            (self.debug / file).write_text(text, encoding="utf-8", errors="backslashreplace")
        (self.debug / "record.json").write_text(self.record.to_json(), encoding="utf-8")


def relabelled(first: Kernel, made: Generated, kernel: Kernel) -> Generated:
    """The code generated for `first`, with the arguments of a kernel that is like it."""
    if first is kernel:
        return made
    names = dict(zip(tensors_of(first), tensors_of(kernel), strict=True))
    if isinstance(made, CppKernel):
        return replace(made, args=tuple((kind, names[n]) for kind, n in made.args))
    args = tuple((kind, names[str(w)] if kind == "tensor" else w) for kind, w in made.args)
    return replace(made, args=args)


def internal_error(stage: str, e: Exception) -> DeuteronError:
    """What the user sees of a failure that nobody foresaw."""
    return DeuteronError(
        f"the compiler failed at stage {stage!r}: {type(e).__name__}: {e}",
        hint='please report it; options={"fallback": "aten"} runs such a graph through ATen',
    )


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    phase: str,
    options: Options,
    record: Record,
) -> Call:
    """Compiles one ATen graph. Raises `DeuteronError` where it cannot; without a C++ compiler the
    graph runs as traced."""
    forms = guard.listener()
    clock = None if forms is None else Clock(on_gpu(gm))
    compilation = Compilation(gm, phase, options, record, clock=clock)
    try:
        call = compilation.run()
        if forms is not None and clock is not None and compilation.schedule is not None:
            forms.append(guard.TimedForm(call, compilation.schedule.steps, clock))
        return call
    except build_cpp.NoCompiler as e:
        warn_once(str(e))
        record.add("fallback", what=f"{phase} graph", reason=e.message)
        gm.recompile()
        return make_boxed_func(gm.forward)


def on_gpu(gm: fx.GraphModule) -> bool:
    """Whether it has tensors on one."""
    found = (n.meta.get("val") for n in gm.graph.nodes)
    return any(isinstance(t, torch.Tensor) and t.device.type == "cuda" for t in found)


_WARNED: set[str] = set()


def warn_once(text: str) -> None:
    if text not in _WARNED:
        _WARNED.add(text)
        warnings.warn(text, stacklevel=2)


__all__ = ["STAGES", "Compilation", "Stage", "compile_graph"]
