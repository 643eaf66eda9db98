"""The compiler as a table: `STAGES`, from what Dynamo captured to a callable.

Every stage is a function ``(artifact, Context) -> artifact``, in one row with who verifies what it
gives (or why nobody does), who prints it, the file of the debug folder that shows it, and the table
of its own passes (`base.passes`). ``python -m dev.passes`` lists all of them with their times for
one program.

AOTAutograd stands between the first stages: it traces what "capture" gives, has the joint graph
divided by "partition", and asks for a callable of each part. `backend` runs those; `compile_graph`
runs the others for one part.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch._functorch.aot_autograd import make_boxed_func

from deuteron import stages
from deuteron.base.errors import DeuteronError
from deuteron.base.garbage import collector_paused
from deuteron.base.memo import MEMO
from deuteron.base.passes import Context, Pass, Table, internal_error, run_stages
from deuteron.base.record import Record
from deuteron.capture.stages import CAPTURE_STAGES, Part
from deuteron.codegen.emission import EMITTING
from deuteron.graph.repeat import repeats
from deuteron.graph.rewrite import REWRITES
from deuteron.guarding import guarded
from deuteron.lower.passes import LOWERING
from deuteron.memory.planning import PLANNING
from deuteron.runtime import build_cpp
from deuteron.runtime.artifact import next_number
from deuteron.runtime.launch import Call
from deuteron.schedule import SCHEDULING
from deuteron.stages import Loaded, Rewritten


def guard_first_call(loaded: Loaded, context: Context) -> Loaded:
    """Where the cost model is uncertain, the first call measures (option `guard`)."""
    return guarded(loaded, context, recompiled)


# Of one graph, in the order in which they run.
GRAPH_STAGES: Table = (
    Pass(
        "rewrite",
        stages.rewrite_graph,
        stages.verify_rewritten,
        stages.rewritten_text,
        "graph.txt",
        REWRITES,
    ),
    Pass(
        "lower",
        stages.lower_graph,
        stages.verify_lowered,
        stages.lowered_text,
        "program.txt",
        LOWERING,
    ),
    Pass(
        "schedule",
        stages.schedule_program,
        stages.verify_scheduled,
        stages.scheduled_text,
        "schedule.txt",
        SCHEDULING,
    ),
    Pass(
        "memory",
        stages.place_tensors,
        stages.verify_planned,
        stages.planned_text,
        "memory.txt",
        PLANNING,
    ),
    Pass(
        "generate",
        stages.generate_kernels,
        stages.verify_generated,
        stages.generated_text,
        "kernels.txt",
        stages.GENERATING,
    ),
    Pass(
        "emit",
        stages.emit_module,
        "Python compiles it in the next stage, and the C++ compiler its unit",
        stages.emitted_text,
        "module.py",
        EMITTING,
    ),
    Pass(
        "load",
        stages.load_module,
        "calls check it: the option `verify` compares every result",
        stages.loaded_text,
        "call.txt",
    ),
    Pass(
        "guard",
        guard_first_call,
        "it has the other forms of the graph compiled by these stages",
        stages.loaded_text,
        "guard.txt",
    ),
)
# The whole compiler.
STAGES: Table = (*CAPTURE_STAGES, *GRAPH_STAGES)


def compile_graph(part: Part, context: Context) -> Call:
    """Compiles one ATen graph. Raises `DeuteronError` where it cannot; without a C++ compiler the
    graph runs as traced."""
    for step in repeats(part.gm.graph):
        step.compile(lambda gm, inputs: compile_graph(Part(gm, inputs=inputs), inner(context)))
    try:
        loaded: Loaded = compiled("rewrite", "guard", part, context)
        for watcher in context.watchers:
            loaded = replace(loaded, call=watcher.compiled(loaded, context))
        return loaded.call
    except build_cpp.NoCompiler as e:
        warn_once(str(e))
        context.record.add("fallback", what=f"{context.phase} graph", reason=e.message)
        part.gm.recompile()
        return make_boxed_func(part.gm.forward)


def inner(context: Context) -> Context:
    """For a graph that another one repeats."""
    return replace(context, record=Record(), phase="chunk", number=next_number())


def recompiled(rewritten: Rewritten, context: Context) -> Loaded:
    """A graph that was rewritten before, compiled in another way."""
    return compiled("lower", "load", rewritten, context)


def compiled(first: str, last: str, artifact: Any, context: Context) -> Any:
    """What the stages from `first` to `last` make of an artifact."""
    names = [s.name for s in STAGES]
    a, b = names.index(first), names.index(last)
    try:
        with collector_paused(), MEMO.compiling():
            return run_stages(STAGES[a : b + 1], artifact, context, a + 1)
    except (DeuteronError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        raise internal_error(e) from e


@cache
def warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=2)


__all__ = ["GRAPH_STAGES", "STAGES", "compile_graph", "compiled"]
