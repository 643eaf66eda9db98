"""The passes that make a forward and a backward graph of a joint one.

In: AOTAutograd's joint graph. Out: the forward graph (outputs, then saved values) and the backward
graph. The joint graph is rewritten first, so that what is decided is decided of what will run; then
it is cut where that costs least (`partition`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx
from torch._functorch import partitioners as P

from deuteron.base.passes import Context, Pass, Table, extended, run_passes
from deuteron.capture.donated import mark_donated
from deuteron.capture.partition import (
    Costs,
    before_writes,
    choose_saved,
    costs_of,
    extract,
    random_calls,
    recompute_beside_calls,
    recompute_late,
    record_saved,
    replay_random,
)
from deuteron.capture.replay import replayed
from deuteron.graph import ops
from deuteron.graph.rewrite import (
    PLACES_OF_MAXIMA,
    PULL_OUT,
    RANDOM_NUMBERS,
    REWRITES,
    VANISHING,
    Rewriting,
    rewrite,
    rewriting_text,
    verify_rewriting,
)
from deuteron.graph.transaction import Rewrite, attempt
from deuteron.graph.verify import graph_text, verify_graph


@dataclass(frozen=True, kw_only=True)
class Joint(Rewriting):
    """AOTAutograd's joint graph of forward and backward. `inputs`: fake values of its inputs;
    `num_fwd_outputs`: its results that are the forward's; `static`: positions of inputs that stay
    where they are from call to call."""

    inputs: Sequence[Any]
    num_fwd_outputs: int
    static: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Classified(Joint):
    """A joint graph; `info`: which of its nodes are the backward's (torch's class); `costs`: those
    of saving and recomputing, None where the backward needs nothing; `again`: whether it has
    regions that are recomputed because the user says so."""

    info: Any
    costs: Costs | None
    again: bool


@dataclass(frozen=True, kw_only=True)
class Cut(Classified):
    """The same, and where it is cut: the nodes that are `saved`; None where none need to be."""

    saved: Sequence[fx.Node] | None


@dataclass(frozen=True)
class Parts:
    """Forward and backward. `num_fwd_outputs`: results of the forward behind which it gives what
    is saved; None where torch has divided the graph."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_fwd_outputs: int | None


def rewrite_joint(joint: Joint, context: Context) -> Joint:
    """The rewrites of every graph, so that what is decided is decided of what will run."""
    rewrite(joint.gm, context)
    return replace(joint, snapshot=None)


def classify(joint: Joint, context: Context) -> Classified:
    """Says which nodes the backward needs, and what they cost."""
    gm = joint.gm
    again = P.has_recomputable_ops(gm)
    if again:
        gm = P.cleanup_recompute_tags(gm, is_default_partition=False)
    for what in ("collectives", "effectful_ops", "bw_mutation_src"):
        if (mark := getattr(P, f"force_save_{what}", None)) is not None:
            mark(gm)
    info = P.classify_nodes(gm, list(joint.static), joint.num_fwd_outputs)
    costs = costs_of(gm, info, context) if info.required_bw_nodes else None
    return extended(Classified, joint, gm=gm, info=info, costs=costs, again=again)


def recompute_beside(joint: Classified, context: Context) -> Classified:
    """Who reads what a library call also reads may compute it once more."""
    gm, costs = joint.gm, joint.costs
    if costs is None:
        return joint
    rewritten = attempt(
        gm,
        context.record,
        Rewrite("recomputation beside calls", lambda gm, _: recompute_beside_calls(gm, costs)),
    )
    if rewritten is None or rewritten:
        info = P.classify_nodes(gm, list(joint.static), joint.num_fwd_outputs)
        return replace(joint, info=info, costs=costs_of(gm, info, context))
    return joint


def cut(joint: Classified, context: Context) -> Cut:
    """Decides what is saved."""
    gm, info, saved = joint.gm, joint.info, None
    if joint.costs is not None:
        saved = before_writes(gm, choose_saved(gm.graph, info, joint.costs), info)
        record_saved(context.record, saved, joint.costs, info, gm.graph)
    return extended(Cut, joint, saved=saved)


def divide(joint: Cut, context: Context) -> Parts:
    """Makes two graphs of one."""
    gm, count = joint.gm, joint.num_fwd_outputs
    if joint.saved is None:
        forward, backward = P.default_partition(
            gm,
            joint.inputs,
            num_fwd_outputs=count,
            static_lifetime_input_indices=list(joint.static),
        )
        return Parts(forward, backward, None)
    draws = random_calls(gm.graph) if context.options.eager_random else []
    order = {n.name: k for k, n in enumerate(gm.graph.nodes)}
    if joint.costs is not None:
        for n in joint.saved:
            own = n in joint.costs.outputs  # the caller may compare it
            n.meta[ops.UNCOMPARED_META] = not own and not joint.costs.compared(n)
    forward, backward = extract(gm, joint.saved, count, joint.info)
    replay_random(forward.graph, backward.graph, draws, order)
    if joint.again:
        forward, backward = replayed(gm, forward, backward, count)
    return Parts(forward, backward, count)


def recompute_where_needed(parts: Parts, context: Context) -> Parts:
    """Orders the backward so that what it recomputes lives briefly."""
    if parts.num_fwd_outputs is not None:
        late = Rewrite("recomputation late", lambda gm, _: recompute_late(gm.graph))
        attempt(parts.backward, context.record, late)
    return parts


def donate(parts: Parts, context: Context) -> Parts:
    """Marks what the backward may overwrite, and the results of the forward that are the user's."""
    forward, backward, count = parts.forward, parts.backward, parts.num_fwd_outputs
    if count is None:
        return parts
    if (thread := getattr(P, "thread_graphsafe_rng_from_hops", None)) is not None:
        forward, backward = thread(forward, is_backward=False), thread(backward, is_backward=True)
    mark_donated(forward, backward, count)
    forward.graph.output_node().meta[ops.CALLER_RESULTS_META] = count
    return Parts(forward, backward, count)


def verify_parts(parts: Parts, guilty: str) -> None:
    for gm in (parts.forward, parts.backward):
        verify_graph(gm, guilty)


def cut_text(joint: Cut) -> str:
    return "".join(f"save {node.format_node()}\n" for node in joint.saved or ())


def parts_text(parts: Parts) -> str:
    return graph_text(parts.forward) + "\n\n" + graph_text(parts.backward)


PARTITIONING: Table = (
    RANDOM_NUMBERS,
    Pass("rewrite", rewrite_joint, verify_rewriting, rewriting_text, passes=REWRITES),
    VANISHING,
    PULL_OUT,
    PLACES_OF_MAXIMA,
    Pass("classification", classify, verify_rewriting, rewriting_text),
    Pass("recomputation beside calls", recompute_beside, verify_rewriting, rewriting_text),
    Pass(
        "cut", cut, "torch's partitioner, which takes it, asserts that nothing is missing", cut_text
    ),
    Pass("divide", divide, verify_parts, parts_text),
    Pass("recomputation late", recompute_where_needed, verify_parts, parts_text),
    Pass("donated inputs", donate, verify_parts, parts_text),
)


def partition(joint: Joint, context: Context) -> Parts:
    """Divides a joint graph into forward and backward, and decides what is saved."""
    parts: Parts = run_passes(PARTITIONING, joint, context)
    return parts


__all__ = ["PARTITIONING", "Cut", "Joint", "Parts", "partition"]
