"""Graphs as they are compiled, and the times of their steps.

In: what the compiler shows an observer (`base.observing`). Out: `Observations`: per graph of
Dynamo's the names of its inputs and why it ends, per part the artifacts of all stages and, where it
was asked to measure, the least time of every step. A part is timed by its own program, emitted once
more with a clock around each step; results are the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch

from deuteron.base.passes import Context, StepClock
from deuteron.base.record import Record
from deuteron.runtime.artifact import next_number
from deuteron.runtime.guard import Clock, recording
from deuteron.schedule.kernel import Kernel
from deuteron.stages import Loaded
from deuteron.tools.names import source_name

Call = Callable[[list[Any]], Sequence[Any]]


@dataclass
class Part:
    """A compiled forward, backward or inference graph. `id`: "forward0", in the order in which they
    were compiled. `us`: least microseconds of each step by its number, empty where nothing was
    measured."""

    id: str
    phase: str
    loaded: Loaded
    context: Context
    clock: Clock
    calls: int = 0
    first_call_s: float = 0.0
    clocked: Call | None = None
    labelled: Call | None = None

    @property
    def record(self) -> Record:
        return self.context.record

    @property
    def us(self) -> dict[int, float]:
        return self.clock.us

    def with_clock(self) -> Call:
        """The part with a clock around each step."""
        if self.clocked is None:
            self.clocked = self.around_steps(self.clock)
        return self.clocked

    def with_labels(self) -> Call:
        """The part whose steps have names in torch.profiler, Perfetto and (by `emit_nvtx`) Nsight:
        those of a report, "forward0.3 red_fused_softmax_3"."""
        if self.labelled is None:
            self.labelled = self.around_steps(Labels(self))
        return self.labelled

    def around_steps(self, clock: StepClock) -> Call:
        """The part's last two stages once more, with something called around each step."""
        from deuteron import pipeline

        quiet = replace(self.context.options, cudagraphs=False, debug_dir=None, verify=False)
        context = replace(
            self.context, options=quiet, record=Record(), number=next_number(), clock=clock,
            watchers=(), path=(), place="", log=None,
        )  # fmt: skip
        call: Call = pipeline.compiled("emit", "load", self.loaded, context).call
        return call


class Labels:
    """A clock that takes no times: a range of the profiler around each step."""

    def __init__(self, part: Part) -> None:
        steps = part.loaded.schedule.steps
        names = [s.name if isinstance(s, Kernel) else s.op for s in steps]
        self.names = [f"{part.id}.{k} {name}" for k, name in enumerate(names)]

    def start(self, step: int) -> Callable[[], None]:
        span = torch.profiler.record_function(self.names[step])
        span.__enter__()
        return lambda: span.__exit__(None, None, None)


@dataclass
class Captured:
    """A graph of Dynamo's: the user's names of its inputs, why Dynamo ended it (its
    ``GraphCompileReason``), and its parts. It is the watcher of its parts."""

    number: int
    inputs: list[str]
    ended: Any
    policy: Policy
    seen: Observations
    parts: list[Part] = field(default_factory=list)

    def compiled(self, loaded: Any, context: Any) -> Callable[[list[Any]], Sequence[Any]]:
        on_gpu = any(k.device != "cpu" for k in loaded.steps) or on_cuda(context, loaded)
        number = len(self.seen.parts)
        part = Part(f"{context.phase}{number}", context.phase, loaded, context, Clock(on_gpu))
        self.parts.append(part)
        policy = self.policy

        def call(args: list[Any]) -> Sequence[Any]:
            part.calls += 1
            if policy.measures(part.calls) and not recording():
                out = part.with_clock()(args)
                part.clock.settle()
                return out
            if torch.autograd._profiler_enabled():
                return part.with_labels()(args)
            start = perf_counter()
            out = loaded.call(args)
            if part.calls == 1:
                part.first_call_s = perf_counter() - start
            return out

        call._boxed_call = True  # type: ignore[attr-defined]
        call.part = part  # type: ignore[attr-defined]  # found there by a step that repeats it
        return call


def on_cuda(context: Context, loaded: Loaded) -> bool:
    """Whether a part without kernels has tensors on a GPU."""
    return any(lay.device != "cpu" for lay in loaded.program.layouts().values())


@dataclass
class Policy:
    """Which calls of a part are timed step by step: those while `on`, and those with the numbers
    `first` to `last`."""

    on: bool = False
    first: int = 0
    last: int = -1

    def measures(self, call: int) -> bool:
        return self.on or self.first <= call <= self.last


@dataclass
class Observations:
    """An observer (`base.observing.observed_by`) and what it has seen."""

    policy: Policy = field(default_factory=Policy)
    graphs: list[Captured] = field(default_factory=list)

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Captured:
        names = [
            source_name(getattr(getattr(n.meta.get("grapharg"), "source", None), "name", n.name))
            for n in gm.graph.nodes
            if n.op == "placeholder"
        ]
        ended = getattr(gm, "compile_subgraph_reason", None)
        graph = Captured(len(self.graphs), names, ended, self.policy, self)
        self.graphs.append(graph)
        return graph

    @property
    def parts(self) -> list[tuple[Captured, Part]]:
        """In the order in which they were compiled."""
        found = [(g, p) for g in self.graphs for p in g.parts]
        return sorted(found, key=lambda gp: gp[1].context.number)


def short_reason(text: str) -> tuple[str, str, str]:
    """What Dynamo says of a graph break: (what, its explanation, the first hint)."""
    what = " ".join(re.split(r"\n|\s(?=Hint:|Explanation:)", text.strip())[0].split())
    explained = re.search(r"Explanation:\s*((?:.|\n)*?)(?=\n\s*Hint:|\n\s*\n|\Z)", text)
    hint = re.search(r"Hint:\s*((?:.|\n)*?)(?=\n\s*Hint:|\n\s*\n|\Z)", text)
    said, advised = (" ".join(m[1].split()) if m else "" for m in (explained, hint))
    return what, said, advised


__all__ = ["Captured", "Observations", "Part", "Policy", "short_reason"]
