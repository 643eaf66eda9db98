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

from deuteron.base.passes import Context
from deuteron.base.record import Record
from deuteron.runtime.artifact import next_number
from deuteron.runtime.guard import Clock, recording
from deuteron.stages import Loaded
from deuteron.tools.names import source_name


@dataclass
class Part:
    """A compiled forward, backward or inference graph. `us`: least microseconds of each step by its
    number, empty where nothing was measured."""

    phase: str
    loaded: Loaded
    context: Context
    clock: Clock
    calls: int = 0
    first_call_s: float = 0.0
    clocked: Callable[[list[Any]], Sequence[Any]] | None = None

    @property
    def record(self) -> Record:
        return self.context.record

    @property
    def us(self) -> dict[int, float]:
        return self.clock.us

    def with_clock(self) -> Callable[[list[Any]], Sequence[Any]]:
        """The part with a clock around each step: its last two stages once more."""
        from deuteron import pipeline

        if self.clocked is None:
            quiet = replace(self.context.options, cudagraphs=False, debug_dir=None, verify=False)
            context = replace(
                self.context, options=quiet, record=Record(), number=next_number(),
                clock=self.clock, watchers=(), path=(), place="", log=None,
            )  # fmt: skip
            self.clocked = pipeline.compiled("emit", "load", self.loaded, context).call
        return self.clocked


@dataclass
class Captured:
    """A graph of Dynamo's: the user's names of its inputs, why Dynamo ended it (its
    ``GraphCompileReason``), and its parts. It is the watcher of its parts."""

    number: int
    inputs: list[str]
    ended: Any
    policy: Policy
    parts: list[Part] = field(default_factory=list)

    def compiled(self, loaded: Any, context: Any) -> Callable[[list[Any]], Sequence[Any]]:
        on_gpu = any(k.device != "cpu" for k in loaded.steps) or on_cuda(context, loaded)
        part = Part(context.phase, loaded, context, Clock(on_gpu))
        self.parts.append(part)
        policy = self.policy

        def call(args: list[Any]) -> Sequence[Any]:
            part.calls += 1
            if policy.measures(part.calls) and not recording():
                out = part.with_clock()(args)
                part.clock.settle()
                return out
            start = perf_counter()
            out = loaded.call(args)
            if part.calls == 1:
                part.first_call_s = perf_counter() - start
            return out

        call._boxed_call = True  # type: ignore[attr-defined]
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
        graph = Captured(len(self.graphs), names, ended, self.policy)
        self.graphs.append(graph)
        return graph

    @property
    def parts(self) -> list[tuple[Captured, Part]]:
        return [(g, p) for g in self.graphs for p in g.parts]


def short_reason(text: str) -> tuple[str, str, str]:
    """What Dynamo says of a graph break: (what, its explanation, the first hint)."""
    what = " ".join(re.split(r"\n|\s(?=Hint:|Explanation:)", text.strip())[0].split())
    explained = re.search(r"Explanation:\s*((?:.|\n)*?)(?=\n\s*Hint:|\n\s*\n|\Z)", text)
    hint = re.search(r"Hint:\s*((?:.|\n)*?)(?=\n\s*Hint:|\n\s*\n|\Z)", text)
    said, advised = (" ".join(m[1].split()) if m else "" for m in (explained, hint))
    return what, said, advised


__all__ = ["Captured", "Observations", "Part", "Policy", "short_reason"]
