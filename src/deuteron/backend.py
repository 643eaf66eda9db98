"""The backend that Dynamo calls: ``torch.compile(model, backend="deuteron")``.

In: Dynamo's FX graph. Out: a callable. AOTAutograd traces forward and backward into one joint
graph, which is divided; each part goes to `pipeline.compile_graph`. The stages up to there are
those of `capture.stages`; the table of all is in `pipeline`.

``torch.compile`` imports this module; where there is a GPU, a process that builds kernels starts
then (`runtime.prewarm.start_process`), beside whatever the program does before its first call.

What was asked of a forward (options, who collects Records) is kept in a `Session`, because its
backward compiles at the first ``.backward()``, perhaps in another thread.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from deuteron.base.device import DeviceSpec
from deuteron.base.garbage import collector_paused
from deuteron.base.memo import MEMO
from deuteron.base.observing import Watcher, observers
from deuteron.base.options import Options
from deuteron.base.passes import Context, run_stages
from deuteron.base.record import Record
from deuteron.capture.joint import Joint
from deuteron.capture.stages import CAPTURE_STAGES, Captured, Part, aot_metadata
from deuteron.graph.strides import report, saved_strides
from deuteron.runtime import graph_cache, prewarm
from deuteron.runtime.aot_bypass import CompiledGraphs, bypass
from deuteron.runtime.artifact import next_number
from deuteron.runtime.cache import Cache
from deuteron.runtime.graph_cache import EntryWriter

Boxed = Callable[[list[Any]], Sequence[Any]]


class Runner(Protocol):
    """Compiles one graph: `pipeline.compile_graph`, or a stand-in in tests."""

    def __call__(self, part: Part, context: Context) -> Boxed: ...


_COLLECTORS: ContextVar[tuple[list[Record], ...]] = ContextVar("deuteron_collectors", default=())


@contextmanager
def collecting() -> Iterator[list[Record]]:
    """Collects the Records of the graphs whose forward compiles inside the block, and of their
    backwards."""
    records: list[Record] = []
    token = _COLLECTORS.set((*_COLLECTORS.get(), records))
    try:
        yield records
    finally:
        _COLLECTORS.reset(token)


@dataclass
class Session:
    """One Dynamo graph: what its forward, backward or inference compilation has in common."""

    options: Options
    runner: Runner
    specs: Callable[[str], DeviceSpec] | None
    collectors: tuple[list[Record], ...]
    watchers: tuple[Watcher, ...] = ()
    joint: Record = field(default_factory=Record)
    number: int = field(default_factory=itertools.count().__next__)  # in this process
    graphs: CompiledGraphs = field(default_factory=CompiledGraphs)
    entry_writer: EntryWriter | None = None

    def staged(self, name: str, artifact: Any, context: Context | None = None) -> Any:
        """What one of the first stages gives; without a context, of the whole graph."""
        given = (self.options, self.joint, "captured", self.number, self.specs)
        context = context or Context(*given)
        number = next(k for k, s in enumerate(CAPTURE_STAGES, 1) if s.name == name)
        return run_stages(CAPTURE_STAGES[number - 1 : number], artifact, context, number)

    def partition(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """AOTAutograd's ``partition_fn``."""
        static = static_lifetime_input_indices or ()
        joint = Joint(gm, inputs=inputs, num_fwd_outputs=num_fwd_outputs, static=static)
        # What a partition drops from one graph is in the other.
        with unread_draws(False) if self.options.eager_random else nullcontext():
            parts = self.staged("partition", joint)
        return parts.forward, parts.backward

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any], *, phase: str) -> Boxed:
        record = Record(list(self.joint.entries) if phase != "backward" else [])
        record.add("graph", phase=phase, nodes=len(gm.graph.nodes))
        for collector in self.collectors:
            collector.append(record)
        context = Context(self.options, record, phase, next_number(), watchers=self.watchers)
        part = self.staged("prepare", Part(gm, inputs=inputs), context)
        metadata = aot_metadata()
        if metadata is not None and phase == "forward":
            nothing_donated(metadata)
        made = self.compile_or_fall_back if self.options.fallback == "aten" else self.run
        call = made(part, context)
        if self.entry_writer is not None:
            self.entry_writer.add(phase, call, record)
        return self.graphs.add(boxed(call), phase, metadata, record)

    def run(self, part: Part, context: Context) -> Any:
        traced = saved_strides(part.gm)
        call = self.runner(part, context)
        if context.phase == "forward":
            report(part.gm, traced)
        return call

    def compile_or_fall_back(self, part: Part, context: Context) -> Any:
        """As the user asked with ``fallback="aten"``: a graph that cannot be compiled runs as
        traced."""
        original = fx.GraphModule(part.gm, copy.deepcopy(part.gm.graph))
        try:
            return self.run(part, context)
        except Exception as e:  # noqa: BLE001 - any failure of the compiler; it is in the Record
            context.record.add(
                "fallback",
                what=f"{context.phase} graph of {len(original.graph.nodes)} nodes",
                reason=f"{type(e).__name__}: {e}",
            )
            return run_as_traced(original)


def nothing_donated(metadata: Any) -> None:
    """Says of the graph being compiled that its backward overwrites nothing. Left unsaid, a
    ``backward(retain_graph=True)`` after one without would be refused."""
    if getattr(metadata, "bw_donated_idxs", None) is None:
        metadata.bw_donated_idxs = []


def run_as_traced(gm: fx.GraphModule) -> Boxed:
    """Runs an FX graph through ATen."""
    from torch._functorch.aot_autograd import make_boxed_func

    gm.recompile()
    return make_boxed_func(gm.forward)


def boxed(compiled: Callable[..., Any]) -> Boxed:
    """`compiled` takes one list, which it clears, and says so to AOTAutograd."""
    if getattr(compiled, "_boxed_call", False):
        return compiled

    @functools.wraps(compiled, updated=())
    def call(args: list[Any]) -> Sequence[Any]:
        return compiled(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def unread_draws(kept: bool) -> AbstractContextManager[Any]:
    """Whether torch's graphs keep draws whose numbers nobody reads. As in eager they count for
    those after them; AOTAutograd drops them unless Inductor's option for that is set, whoever
    compiles."""
    return cast(AbstractContextManager[Any], torch._inductor.config.patch(fallback_random=kept))


def compile_graph(*args: Any, **kwargs: Any) -> Boxed:
    return pipeline().compile_graph(*args, **kwargs)


@functools.cache
def pipeline() -> Any:
    """The whole compiler, imported when first used. Without the garbage collector: the hundred
    modules would make it walk all of torch's objects, which takes twice as long as they do."""
    with collector_paused():
        return importlib.import_module("deuteron.pipeline")


def deuteron_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    runner: Runner = compile_graph,
    specs: Callable[[str], DeviceSpec] | None = None,
) -> Callable[..., Any]:
    """Dynamo's entry point; raises `OptionError` for a mode or option that does not exist. `specs`:
    a device's figures; None: those of this machine's."""
    asked = Options.make(mode, options)
    watchers = tuple(o(gm, example_inputs) for o in observers(asked.report))
    session = Session(asked, runner, specs, _COLLECTORS.get(), watchers)
    key = not watchers and graph_cache.entry_key(gm, example_inputs, asked, session.joint)
    if not key or runner is not compile_graph:
        return compiled(gm, example_inputs, session)
    cache = Cache.open(session.options)
    late = Late(gm, session.options)
    with collector_paused():
        call = graph_cache.load_graph(cache, key, session.options, session.collectors, late, gm)
    if call is not None:
        return call
    session.entry_writer = EntryWriter(cache, key)
    session.graphs.on_bypass = session.entry_writer.write
    return compiled(gm, example_inputs, session)


deuteron_backend.reset = MEMO.clear  # type: ignore[attr-defined] # torch._dynamo.reset() calls it


@dataclass
class Late:
    """A graph that is compiled when it is first called: with tensors, not with what Dynamo said of
    them."""

    gm: fx.GraphModule
    options: Options
    made: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self.made is None:
            mode = FakeTensorMode(shape_env=ShapeEnv())
            with torch._guards.tracing(torch._guards.TracingContext(mode)):
                fakes = [mode.from_tensor(x, static_shapes=True) for x in args]
                self.made = compiled(self.gm, fakes, Session(self.options, compile_graph, None, ()))
        return self.made(*args)


def compiled(
    gm: fx.GraphModule, example_inputs: Sequence[Any], session: Session
) -> Callable[..., Any]:
    """The callable of what Dynamo captured, compiled by AOTAutograd and Deuteron."""
    from torch._dynamo.backends.common import aot_autograd

    traceable = session.staged("capture", Captured(gm))
    aot = aot_autograd(
        fw_compiler=functools.partial(session.compile, phase="forward"),
        bw_compiler=functools.partial(session.compile, phase="backward"),
        inference_compiler=functools.partial(session.compile, phase="inference"),
        decompositions=traceable.decompositions,
        partition_fn=session.partition,
        keep_inference_input_mutations=True,
    )
    prepared = prewarm.prepare(gm, example_inputs, session.options)
    # Saved tensors are not written to by our backward; declared donated, they would make
    # retain_graph=True fail.
    undonated = torch._functorch.config.patch(donated_buffer=False)
    draws = unread_draws(True) if session.options.eager_random else nullcontext()
    with collector_paused(), undonated, draws:
        call = aot(gm, example_inputs)
    prepared()
    return bypass(call, session.graphs)


prewarm.start_process()
