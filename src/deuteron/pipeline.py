"""The compiler's spine: the stages through which every graph goes, in one table.

    rewrite    fx.GraphModule -> fx.GraphModule     constants, common subexpressions, algebra
    lower      fx.GraphModule -> Program            loop IR and library calls
    schedule   Program -> Schedule                  kernels: what shares loops, in which order
    memory     Schedule -> MemoryPlan               where every tensor lives
    generate   Schedule -> sources                  C++ and Triton text of every kernel
    emit       sources -> module                    the Python program that runs the kernels
    load       module -> callable                   build, cache, bind

Each stage is a function from one artifact to the next. After the stages that make IR a verifier
checks the artifact; with a debug folder, each artifact is written there as text.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import fx

from deuteron.base.device import device_spec_for
from deuteron.base.errors import DeuteronError
from deuteron.base.options import Options
from deuteron.base.record import Record
from deuteron.codegen.cpp.kernels import FLAGS, CppKernel, translation_unit
from deuteron.codegen.cpp.kernels import generate as generate_cpp
from deuteron.codegen.module import Emitted, emit
from deuteron.codegen.triton.generate import TritonKernel
from deuteron.codegen.triton.generate import generate as generate_triton
from deuteron.graph.rewrite import rewrite
from deuteron.ir.printer import print_program
from deuteron.ir.program import Program
from deuteron.ir.verify import verify_program
from deuteron.lower.graph import lower
from deuteron.memory.plan import MemoryPlan, plan_memory
from deuteron.runtime import build_cpp
from deuteron.runtime.launch import Call
from deuteron.runtime.launch import load as load_module
from deuteron.runtime.launch_cuda import Sequence as Launcher
from deuteron.schedule import schedule
from deuteron.schedule.kernel import Kernel, Schedule
from deuteron.schedule.printer import print_schedule
from deuteron.schedule.verify import verify_schedule

STAGES = ("rewrite", "lower", "schedule", "memory", "generate", "emit", "load")
_NUMBERS = itertools.count()


@dataclass
class Compilation:
    """One graph on its way through the stages: each fills in the next artifact."""

    graph: fx.GraphModule
    phase: str
    options: Options
    record: Record
    static_inputs: frozenset[int] = frozenset()
    number: int = field(default_factory=lambda: next(_NUMBERS))
    program: Program | None = None
    schedule: Schedule | None = None
    plan: MemoryPlan | None = None
    kernels: dict[str, CppKernel | TritonKernel] = field(default_factory=dict)
    emitted: Emitted | None = None
    unit: str = ""
    library: Future[Path] | None = None
    call: Call | None = None

    # -- the stages -------------------------------------------------------------------------------
    def do_rewrite(self) -> str:
        rewrite(self.graph, self.record)
        return self.graph.print_readable(print_output=False) if self.debug else ""

    def do_lower(self) -> str:
        self.program = lower(self.graph, self.record)
        verify_program(self.program, "lower", strict=self.options.verify)
        return print_program(self.program) if self.debug else ""

    def do_schedule(self) -> str:
        assert self.program is not None
        self.schedule = schedule(self.program, self.options, self.record)
        verify_schedule(self.schedule, self.program, "schedule", strict=self.options.verify)
        return print_schedule(self.schedule) if self.debug else ""

    def do_memory(self) -> str:
        assert self.program is not None and self.schedule is not None
        self.plan = plan_memory(self.schedule, self.program, self.record)
        return "\n".join(map(str, self.record.of("buffer"))) if self.debug else ""

    def do_generate(self) -> str:
        assert self.schedule is not None
        specs = {k.device: device_spec_for(k.device, self.options) for k in self.steps()}
        for k in self.steps():
            generate = generate_cpp if k.device == "cpu" else generate_triton
            made = generate(k, specs[k.device], self.options)
            self.kernels[k.name] = made
            self.record.add(
                "kernel",
                name=made.name if isinstance(made, TritonKernel) else f"cpp_{made.name}",
                target=k.device,
                ops=[o.op for o in k.origins],
                origins=[{"node": o.node, "op": o.op, "line": o.line} for o in k.origins],
                bytes=k.bytes,
                flops=k.flops,
                predicted_us=k.predicted_us,
                source=made.source,
            )
        return "\n\n".join(k.source for k in self.kernels.values()) if self.debug else ""

    def do_emit(self) -> str:
        assert self.program is not None and self.schedule is not None and self.plan is not None
        title = f"{self.phase} graph {self.number}: {len(self.kernels)} kernels."
        self.emitted = emit(self.program, self.schedule, self.plan, self.kernels, title)
        cpu = [k for k in self.kernels.values() if isinstance(k, CppKernel)]
        if cpu:
            self.unit = translation_unit(cpu) + self.emitted.segments + "\n"
            self.library = build_cpp.submit(self.unit, FLAGS, self.options)
        return self.emitted.text

    def do_load(self) -> str:
        assert self.emitted is not None
        launchers = {
            q.name: Launcher(
                [self.triton(n) for n in q.kernels], q.places, q.sizes, q.device, self.options
            )
            for q in self.emitted.sequences
        }
        name = f"deuteron_{self.phase}_{self.number}.py"
        path = str(self.debug / "emit.py") if self.debug else f"<{name}>"
        self.call = load_module(self.emitted, self.library, launchers, {}, path)
        return ""

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
        for stage in STAGES:
            with self.stage(stage) as texts:
                texts.append(getattr(self, f"do_{stage}")())
        assert self.call is not None
        return self.call

    @contextmanager
    def stage(self, name: str) -> Iterator[list[str]]:
        start = perf_counter()
        texts: list[str] = []
        yield texts
        self.record.add("stage", name=name, seconds=perf_counter() - start)
        if self.debug and texts and texts[0]:
            self.debug.mkdir(parents=True, exist_ok=True)
            suffix = {"emit": ".py"}.get(name, ".txt")
            (self.debug / f"{name}{suffix}").write_text(texts[0])
            (self.debug / "record.json").write_text(self.record.to_json())


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    phase: str,
    options: Options,
    record: Record,
    static_inputs: frozenset[int] = frozenset(),
) -> Call:
    """Compiles one ATen graph. Raises `DeuteronError` where it cannot; without a C++ compiler the
    graph runs as traced."""
    try:
        call = Compilation(gm, phase, options, record, static_inputs).run()
    except build_cpp.NoCompiler as e:
        warn_once(str(e))
        record.add("fallback", what=f"{phase} graph", reason=e.message)
        from torch._functorch.aot_autograd import make_boxed_func

        gm.recompile()
        return make_boxed_func(gm.forward)
    except DeuteronError:
        raise
    return call


_WARNED: set[str] = set()


def warn_once(text: str) -> None:
    if text not in _WARNED:
        _WARNED.add(text)
        warnings.warn(text, stacklevel=2)


__all__ = ["STAGES", "Compilation", "compile_graph"]
