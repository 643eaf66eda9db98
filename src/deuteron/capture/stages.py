"""The first stages, which run around AOTAutograd.

In: a graph as Dynamo captured it. Out: graphs of ATen operators, each a `Part`: what AOTAutograd
traced for a call without gradients, or the forward and the backward of one with them.

AOTAutograd calls: it traces what `capture` gives with the decompositions that are named there, has
a joint graph divided by `partition`, and asks for a callable of each part. `prepare` is the first
stage of those; the others are in `pipeline`. Each works in place on the graph that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from deuteron.base.passes import Context, Pass, Table, extended, run_passes
from deuteron.capture import decompositions
from deuteron.capture.aliased_outputs import views_of_inputs
from deuteron.capture.attention import inline_attention, inline_masked_attention
from deuteron.capture.joint import PARTITIONING, partition, parts_text, verify_parts
from deuteron.capture.refusals import check_functions, keep_asserted
from deuteron.graph.rewrite import RANDOM_NUMBERS, Rewriting, rewriting_text, verify_rewriting
from deuteron.graph.strides import as_saved
from deuteron.graph.verify import graph_text, verify_graph

# -- what Dynamo captured --------------------------------------------------------------------------


@dataclass(frozen=True)
class Captured:
    """A graph of Dynamo's, of torch's functions and methods."""

    gm: fx.GraphModule


@dataclass(frozen=True)
class Traceable(Captured):
    """The same, and by which rules AOTAutograd makes ATen's operators fewer."""

    decompositions: Mapping[Any, Callable[..., Any]]


def refuse_in_place(captured: Captured, context: Context) -> Captured:
    """What eager refuses of dtypes, where no operator is traced that shows them, is refused."""
    check_functions(captured.gm)
    return captured


def keep_asserted_sizes(captured: Captured, context: Context) -> Captured:
    """Tensors of which the program asserts a size stay, whoever reads them."""
    keep_asserted(captured.gm)
    return captured


def write_attention_out(captured: Captured, context: Context) -> Captured:
    """FlexAttention, and attention whose mask is computed, becomes torch's operators."""
    inline_attention(captured.gm, context.record)
    inline_masked_attention(captured.gm, context)
    return captured


def decompose(captured: Captured, context: Context) -> Traceable:
    """Names the rules by which AOTAutograd traces ATen's operators into fewer kinds."""
    rules = decompositions.table(context.options.eager_random)
    forgiving = decompositions.forgiving(rules, context.record)
    return extended(Traceable, captured, decompositions=forgiving)


def verify_order(captured: Captured, guilty: str) -> None:
    verify_graph(captured.gm, guilty, traced=False)


def captured_text(captured: Captured) -> str:
    return graph_text(captured.gm)


def rules_text(traceable: Traceable) -> str:
    return "".join(sorted(f"{target}\n" for target in traceable.decompositions))


CAPTURING: Table = (
    Pass(
        "products in place",
        refuse_in_place,
        "it changes nothing: it raises what eager would raise of their dtypes",
        captured_text,
    ),
    Pass("asserted sizes", keep_asserted_sizes, verify_order, captured_text),
    Pass("attention", write_attention_out, verify_order, captured_text),
    Pass(
        "decompositions",
        decompose,
        "AOTAutograd applies the rules; one that fails leaves its operator as it is",
        rules_text,
    ),
)


def capture(captured: Captured, context: Context) -> Traceable:
    """What Dynamo captured is made ready for AOTAutograd to trace."""
    traceable: Traceable = run_passes(CAPTURING, captured, context)
    return traceable


# -- what AOTAutograd traced -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Part(Rewriting):
    """A graph that AOTAutograd traced, with fake values for its inputs."""

    inputs: Sequence[Any]


def aot_metadata() -> Any:
    """What AOTAutograd says of the inputs and results of the graph being compiled."""
    context = torch._guards.TracingContext.try_get()
    return getattr(context, "fw_metadata", None)


def view_inputs(part: Part, context: Context) -> Part:
    """Results that are views of inputs are made of the inputs."""
    metadata = aot_metadata()
    if metadata is not None and context.phase != "backward":
        views_of_inputs(part.gm, metadata)
    return replace(part, snapshot=None)


def lie_as_saved(part: Part, context: Context) -> Part:
    """What a backward reads lies where the forward saved it."""
    if context.phase == "backward":
        as_saved(part.gm, part.inputs, context.record)
    return part


PREPARING: Table = (
    RANDOM_NUMBERS,
    Pass("views of inputs", view_inputs, verify_rewriting, rewriting_text),
    Pass("strides of saved tensors", lie_as_saved, verify_rewriting, rewriting_text),
)


def prepare(part: Part, context: Context) -> Part:
    """What a graph of AOTAutograd's needs before it is rewritten."""
    prepared: Part = run_passes(PREPARING, part, context)
    return prepared


CAPTURE = Pass("capture", capture, verify_order, captured_text, "captured.txt", CAPTURING)
PARTITION = Pass("partition", partition, verify_parts, parts_text, "parts.txt", PARTITIONING)
PREPARE = Pass("prepare", prepare, verify_rewriting, rewriting_text, "traced.txt", PREPARING)
CAPTURE_STAGES: Table = (CAPTURE, PARTITION, PREPARE)


__all__ = [
    "CAPTURE_STAGES",
    "Captured",
    "Part",
    "Traceable",
    "aot_metadata",
]
