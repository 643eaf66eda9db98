"""The graph cache: graphs that another process compiled.

In: a graph as Dynamo captured it. Out: its callable, without AOTAutograd, lowering, scheduling or
code generation, where some process has compiled the same graph before. What it left is an entry of
the cache of kernels: JSON, under the graph's key (`capture.graph_key`), the options, versions
of torch, Python, Triton and this package (its files), and the devices' figures. Nothing is
unpickled.

An entry is written when a process has seen that calls of the graph bypass AOTAutograd
(`aot_bypass`): after the first call, for a graph with gradients after the second step. So it says
all that a call needs to know. A call that does not bypass it (hooks on saved tensors, a transform)
compiles the graph as ever.

The Record says of each graph whether it was found, or why it is not stored.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from deuteron.base.device import device_spec_for
from deuteron.base.errors import CacheError, DeuteronError
from deuteron.base.options import Options
from deuteron.base.record import Record
from deuteron.capture.graph_key import Unnameable, graph_key
from deuteron.runtime import build_triton
from deuteron.runtime.aot_bypass import (
    BypassFacts,
    CompiledGraphs,
    ForwardResults,
    autograd_function,
    bypass_inference,
    bypass_training,
    for_dynamo,
    mutated_inputs,
    torch_internals,
)
from deuteron.runtime.artifact import Artifact
from deuteron.runtime.cache import Cache, fingerprint, key_of

ENTRY_SUFFIX = ".graph"
# Options whose meaning is what happens while a graph is compiled, or in its first call.
WATCHING_OPTIONS = ("debug_dir", "verify", "autotune", "check_accesses", "guard")
# Options that decide nothing about what a graph becomes.
IRRELEVANT_OPTIONS = ("cache_dir", "cache", "workers", "build_timeout", "report")
# Of a Record: times, and what who loads a graph decides anew.
TRANSIENT_KINDS = ("stage", "pass")
REDECIDED_SUBJECTS = ("bypass", "cudagraph", "graph cache")


def record_decision(record: Record, accepted: bool, reason: str, detail: str = "") -> None:
    record.add(
        "decision",
        subject="graph cache",
        first="graph",
        accepted=accepted,
        reason=reason,
        detail=detail,
    )


# ------------------------------------------------------------------------------------------- naming


def entry_key(gm: fx.GraphModule, inputs: Sequence[Any], options: Options, record: Record) -> str:
    """The entry's key; empty, with a decision, for a graph that is not stored."""
    watching = [
        name for name in WATCHING_OPTIONS if getattr(options, name) not in (None, False, "off")
    ]
    reason = f"option {watching[0]} watches how it is compiled" if watching else ""
    if not options.cache or not options.keep_graphs:
        reason = "the options say so"
    if not torch_internals().complete:
        reason = "this torch lacks what that needs"
    if not reason:
        try:
            return key_of(graph_key(gm, inputs), *key_context(inputs, options))
        except Unnameable as e:
            reason = str(e)
    record_decision(record, False, "refused", reason)
    return ""


def key_context(inputs: Sequence[Any], options: Options) -> Iterator[str]:
    """What decides beside the graph."""
    yield from (torch.__version__, sys.version, fingerprint(), options.codegen_key())
    known = ((k, v) for k, v in vars(options).items() if k not in IRRELEVANT_OPTIONS)
    yield from (f"{k} = {v!r}" for k, v in known)
    devices = {str(x.device) for x in inputs} | {"cpu"}
    yield from (repr(device_spec_for(d, options)) for d in sorted(devices))
    if len(devices) > 1:
        with suppress(DeuteronError):
            yield build_triton.version()


# ------------------------------------------------------------------------------------------ writing


@dataclass
class EntryWriter:
    """Collects a graph's parts while it is compiled, and writes its entry."""

    cache: Cache
    entry_key: str
    parts: dict[str, tuple[Artifact, list[dict[str, Any]]]] = field(default_factory=dict)
    reason: str = ""  # why nothing is stored

    def add(self, phase: str, call: Any, record: Record) -> None:
        """A part that has been compiled: ``forward``, ``backward`` or ``inference``."""
        artifact = getattr(call, "artifact", None)
        if artifact is None:
            self.reason = "a part of it runs through ATen"
        elif phase in self.parts:
            self.reason = f"it has several parts of kind {phase}"
        else:
            self.reason = self.reason or artifact.why_not_stored()
            self.parts[phase] = (artifact, list(record.entries))
        if self.reason:
            record_decision(record, False, "refused", self.reason)

    def write(self, facts: BypassFacts) -> None:
        if self.reason or not self.parts:
            return
        parts = {
            phase: {
                "artifact": artifact.to_json(f"<deuteron {phase} graph {self.entry_key[:16]}>"),
                "record": [e for e in entries if is_lasting(e)],
            }
            for phase, (artifact, entries) in self.parts.items()
        }
        entry = {
            "parts": parts,
            "metadata": asdict(metadata_to_store(facts.metadata)),
            "saved": None,
        }
        if facts.saved is not None:
            entry["saved"] = asdict(facts.saved)
        with suppress(CacheError):  # who puts kernels there says so
            self.cache.put(self.entry_key, ENTRY_SUFFIX, json.dumps(entry).encode())
        self.parts = {}


def is_lasting(entry: dict[str, Any]) -> bool:
    """Whether an entry of a Record is true in other processes, too."""
    return entry["kind"] not in TRANSIENT_KINDS and entry.get("subject") not in REDECIDED_SUBJECTS


# -------------------------------------------- what AOTAutograd says of a graph that bypasses it


@dataclass(frozen=True)
class TangentLayout:
    """Of a tangent: a memory format, or size and strides."""

    memory_format: str | None
    size: tuple[int, ...] | None
    stride: tuple[int, ...] | None


@dataclass(frozen=True)
class Tangent:
    memory_format: TangentLayout


@dataclass(frozen=True)
class BypassMetadata:
    """What there is to know of a graph whose calls bypass AOTAutograd, under AOTAutograd's
    names."""

    mutated_graph_handled_indices_seen_by_autograd: tuple[int, ...]
    subclass_tangent_meta: tuple[Tangent, ...]
    deterministic: bool


def metadata_to_store(metadata: Any) -> BypassMetadata:
    tangents = []
    for known in getattr(metadata, "subclass_tangent_meta", None) or ():
        m = known.memory_format
        size, stride = (x and tuple(x) for x in (m.size, m.stride))
        name = str(m.memory_format).removeprefix("torch.") if m.memory_format else None
        tangents.append(Tangent(TangentLayout(name, size, stride)))
    deterministic = torch.are_deterministic_algorithms_enabled()
    return BypassMetadata(mutated_inputs(metadata), tuple(tangents), deterministic)


def stored_metadata(known: dict[str, Any]) -> Any:
    tangents = []
    for entry in known["subclass_tangent_meta"]:
        m = entry["memory_format"]
        name = m["memory_format"]
        size, stride = (x and tuple(x) for x in (m["size"], m["stride"]))
        layout: Any = TangentLayout(name and getattr(torch, name), size, stride)
        tangents.append(Tangent(layout))
    written = tuple(known["mutated_graph_handled_indices_seen_by_autograd"])
    return BypassMetadata(written, tuple(tangents), known["deterministic"])


# ----------------------------------------------------------------------------------------- loading

Late = Callable[..., Sequence[Any]]


def load_graph(
    cache: Cache,
    entry_key: str,
    options: Options,
    collectors: Sequence[list[Record]],
    late: Late,
    like: Any,
) -> Callable[..., Any] | None:
    """The callable of a graph that the cache has; None if there is none. `late`: a callable that
    compiles the graph as ever when it is called; `like`: what Dynamo looks at besides."""
    path = cache.get(entry_key, ENTRY_SUFFIX)
    if path is None:
        return None
    entry = json.loads(path.read_bytes())
    calls, records = {}, {}
    try:
        for phase, part in entry["parts"].items():
            record = records[phase] = Record(part["record"])
            calls[phase] = Artifact.from_json(part["artifact"]).load(options, record)
    except DeuteronError:  # whoever compiles the graph says what is missing
        return None
    for record in records.values():
        record_decision(record, True, "found", f"compiled before: {entry_key}{ENTRY_SUFFIX}")
        for collected in collectors:
            collected.append(record)
    phase = next(p for p in calls if p != "backward")
    graphs = CompiledGraphs(
        [calls[phase]], phase, stored_metadata(entry["metadata"]), records[phase]
    )
    graphs.backward = calls.get("backward")
    graphs.record_decision("")
    if entry["saved"] is None:
        return for_dynamo(bypass_inference(late, graphs, True), like)
    known: dict[str, Any] = entry["saved"]
    fields: dict[str, Any] = {n: tuple(x) if type(x) is list else x for n, x in known.items()}
    saved = ForwardResults(**fields)
    apply = autograd_function(graphs, function_class(graphs, saved), saved)
    return for_dynamo(bypass_training(late, graphs, apply), like)


def function_class(graphs: CompiledGraphs, saved: ForwardResults) -> Any:
    """A subclass of `autograd.Function` whose backward does what that of AOTAutograd's does when
    something is unusual: errors, other layouts of tangents, ``create_graph``."""
    facts, amp = graphs.metadata, torch_internals().autocast
    assert graphs.backward is not None and amp is not None
    # Compiled autograd would have Dynamo trace it.
    run = torch._dynamo.disable(graphs.backward, reason="do not trace compiled graphs")
    without: Any = torch_internals().no_autocast if amp() else nullcontext

    transformed: Any = torch_internals().transformed

    class Once(torch.autograd.Function):
        """Gradients that say so when they are differentiated."""

        @staticmethod
        def forward(ctx: Any, args: list[Any], *_: Any) -> Any:  # type: ignore[override]
            with without():
                return tuple(run(args))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise RuntimeError(
                "torch.compile with aot_autograd does not currently support double backward"
            )

    class CompiledFunction(torch.autograd.Function):
        metadata = facts

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            if transformed():
                raise RuntimeError(
                    "It looks like you're trying to call a compiled backward function within "
                    "vmap/grad/vjp, which isn't supported. Try wrapping vmap inside "
                    "torch.compile, or skip compiling the backward function."
                )
            if torch.are_deterministic_algorithms_enabled() and not facts.deterministic:
                raise RuntimeError(
                    "This compiled backward function is being run with "
                    "torch.use_deterministic_algorithms(True), but it was previously generated "
                    "during the forward function while torch.use_deterministic_algorithms(False) "
                    "was set."
                )
            tangents = [
                with_layout(given[k], t.memory_format)
                for k, t in zip(saved.differentiable, facts.subclass_tangent_meta, strict=True)
            ]
            args = [*ctx.symints, *ctx.saved_tensors, *tangents]
            ctx.maybe_clear_saved_tensors()
            if torch.is_grad_enabled():
                # One that requires a gradient, so that the results have a node.
                return Once.apply(args, torch.empty(0, requires_grad=True), *tangents)
            with without():
                return tuple(run(args))

    skip: Any = torch_internals().skip
    skip(CompiledFunction.backward.__code__)
    return CompiledFunction


def with_layout(t: Any, layout: TangentLayout) -> Tensor:
    """A tangent with the layout that the backward was compiled for."""
    if type(t) is not Tensor:
        raise RuntimeError(
            "During the backward, we encountered a tensor subclass where we guessed its metadata "
            f"incorrectly. Expected a torch.Tensor, got a {type(t).__name__}."
        )
    if layout.memory_format is not None:
        memory_format: Any = layout.memory_format
        return t.contiguous(memory_format=memory_format)
    if t.shape == layout.size and t.stride() == layout.stride:
        return t
    assert layout.size is not None and layout.stride is not None
    return torch.empty_strided(layout.size, layout.stride, dtype=t.dtype, device=t.device).copy_(t)


__all__ = ["EntryWriter", "entry_key", "load_graph"]
