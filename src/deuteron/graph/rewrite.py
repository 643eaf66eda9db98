"""The table of rewrites of ATen graphs, and the pass that applies them.

In: a functional FX graph (joint, forward, backward or inference) with fake values. Out: the same
graph, rewritten in place, with fewer nodes. Invariants: results are bit-identical, but for library
calls that become others (`einsum`, `padding`, `epilogues`) and variances (`runs`), whose sums may
have another order; strides and dtypes of outputs stay; which outputs share storage with which
inputs and outputs stays; random draws, mutations, collectives and assertions keep their number and
their order. What a later node was traced for stays true (`strides.Relayout`).

One walk in graph order tries each node's rows; then common subexpressions merge (`cse`) and dead
code goes. All of it is linear in the size of the graph. No rewrite is needed: one that raises is
undone, and the Record says so (`transaction`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from deuteron.base.passes import Context, Pass, Table, run_passes
from deuteron.base.record import Record
from deuteron.graph import ops, random, transaction
from deuteron.graph.aliasing import Aliasing
from deuteron.graph.chunks import in_chunks
from deuteron.graph.convolutions import rewrite_convolutions
from deuteron.graph.copies import keep_order
from deuteron.graph.cse import merge_common
from deuteron.graph.devices import move_constructors
from deuteron.graph.edit import Editor, remove_dead
from deuteron.graph.einsum import multiply_matrices
from deuteron.graph.epilogues import join_activations, part_biases
from deuteron.graph.layout import channels_last
from deuteron.graph.padding import pad_products
from deuteron.graph.pull_out import pull_out
from deuteron.graph.rules import RULES_OF, Row, same_numbers
from deuteron.graph.runs import long_dimensions_first
from deuteron.graph.transaction import Rewrite, Snapshot, attempt
from deuteron.graph.vanishing import drop_vanishing
from deuteron.graph.verify import graph_text, verify_graph
from deuteron.graph.windows import keep_places


@dataclass(frozen=True)
class Rewriting:
    """A graph, and by the names of rewrites how much each changed of it: 0 for nothing, None where
    it failed and was undone. `snapshot`: the graph as it is now, where that is at hand."""

    gm: fx.GraphModule
    changed: Mapping[str, Any] = field(default_factory=dict)
    snapshot: Snapshot | None = None


@dataclass(frozen=True)
class Tried:
    """A rewrite as the function of a pass: `apply` changes a graph in place and returns how much; 0
    leaves it as it was. It runs where `wanted`, and is undone where it fails. `asks`: whether
    `apply` is given the options, too."""

    name: str
    apply: Callable[..., Any]
    wanted: Callable[[Rewriting, Context], bool]
    asks: bool = False

    def __call__(self, graph: Rewriting, context: Context) -> Rewriting:
        if not self.wanted(graph, context):
            return graph
        before = graph.snapshot or Snapshot(graph.gm)
        apply = partial(self.apply, options=context.options) if self.asks else self.apply
        amount = attempt(graph.gm, context.record, Rewrite(self.name, apply), before)
        changed = {**graph.changed, self.name: amount}
        return replace(graph, changed=changed, snapshot=None if amount else before)


def verify_rewriting(graph: Rewriting, guilty: str) -> None:
    verify_graph(graph.gm, guilty)


def rewriting_text(graph: Rewriting) -> str:
    return graph_text(graph.gm)


def view_again(gm: fx.GraphModule, record: Record) -> int:
    """Fake values of views name the storage of what they view."""
    return Editor(gm).view_again()


def merge(gm: fx.GraphModule, record: Record) -> int:
    """Nodes that compute the same become one."""
    return merge_common(gm)


def drop_dead(gm: fx.GraphModule, record: Record) -> int:
    """What nobody reads and what has no effect goes."""
    return remove_dead(gm.graph)


def tried(
    name: str,
    apply: Callable[..., Any],
    wanted: Callable[[Rewriting, Context], bool],
    asks: bool = False,
) -> Pass[Rewriting, Rewriting]:
    return Pass(name, Tried(name, apply, wanted, asks), verify_rewriting, rewriting_text)


def memory_is_known(graph: Rewriting, context: Context) -> bool:
    """What shares memory is read off the fake values by all rewrites behind the first."""
    return graph.changed.get("storage of views") is not None


EARLIER = {"storage of views", "devices of constructors", "rows", "common subexpressions"}


def calls_changed(graph: Rewriting, context: Context) -> bool:
    return any(graph.changed[name] for name in graph.changed.keys() - EARLIER - {"dead code"})


def apply_rows(gm: fx.GraphModule, record: Record) -> dict[str, int]:
    """Operators become simpler ones, by the rows of `rules`. Each node once, in graph order, so
    that a row sees its arguments already rewritten. Where a row fails, all is done again without
    it."""
    before, without = Snapshot(gm), set[Row]()
    while True:
        try:
            return walk_rows(gm, without)
        except RowFailed as e:
            before.restore()
            without.add(e.row)
            transaction.failed(record, f"row: {e.row.name}", e.cause)


class RowFailed(Exception):
    """`row` raised `cause`."""

    def __init__(self, row: Row, cause: Exception) -> None:
        super().__init__(row.name)
        self.row, self.cause = row, cause


def walk_rows(gm: fx.GraphModule, without: set[Row]) -> dict[str, int]:
    editor, aliasing = Editor(gm), Aliasing(gm.graph)
    applied: dict[str, int] = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not ops.is_overload(node):
            continue
        for row in RULES_OF.get(ops.packet(node.target), ()):
            if row in without:
                continue
            try:
                with editor.before(node):
                    new = row.rewrite(editor, node)
            except Exception as e:
                raise RowFailed(row, e) from e
            if new is None or not alike(node, new) or not aliasing.may_replace(node, new):
                continue
            aliasing.replaced(node, new)
            editor.replace(node, new)
            applied[row.name] = applied.get(row.name, 0) + 1
            break
    return applied


def alike(old: fx.Node, new: fx.Node) -> bool:
    """Whether later nodes find in `new` what they were traced for: sizes, strides and dtype."""
    a, b = ops.tensor_of(old), ops.tensor_of(new)
    if a is None or b is None or a.layout != torch.strided or b.layout != torch.strided:
        return a is b or (a is not None and b is not None and a.layout == b.layout)
    return (
        a.dtype == b.dtype
        and same_numbers(a.shape, b.shape)
        and same_numbers(a.stride(), b.stride())
    )


def chunks_wanted(graph: Rewriting, context: Context) -> bool:
    """Of a joint graph, or where there is none."""
    return context.options.chunk_mib > 0 and context.phase in ("captured", "inference")


# -- the table -------------------------------------------------------------------------------------
# What every graph takes.
REWRITES: Table = (
    tried("storage of views", view_again, lambda *_: True),
    tried("devices of constructors", move_constructors, memory_is_known),
    tried("rows", apply_rows, memory_is_known),
    tried("common subexpressions", merge, memory_is_known),
    tried("dead code", drop_dead, memory_is_known),
    tried("sums of products", multiply_matrices, memory_is_known),
    tried("channels last", channels_last, memory_is_known),
    tried("variances of runs", long_dimensions_first, memory_is_known),
    # in the order that memory has by now
    tried("convolutions", rewrite_convolutions, memory_is_known),
    tried("order of copies", keep_order, memory_is_known),
    tried("padding", pad_products, memory_is_known),
    tried("epilogues", join_activations, memory_is_known),
    tried("biases", part_biases, memory_is_known),
    tried("common subexpressions of calls", merge, calls_changed),
    tried("dead code of calls", drop_dead, calls_changed),
    tried("chunks", in_chunks, chunks_wanted, asks=True),
)
# What joint graphs and those of inference take beside it (`capture.stages`).
RANDOM_NUMBERS = tried(
    "random numbers",
    random.functionalize,
    lambda graph, context: (
        context.phase in ("captured", "inference") and not context.options.eager_random
    ),
)


def not_as_eager(graph: Rewriting, context: Context) -> bool:
    return context.options.precision == "float32"


VANISHING = tried("gradients that vanish", drop_vanishing, not_as_eager)
PULL_OUT = tried("pull out", pull_out, not_as_eager)
PLACES_OF_MAXIMA = tried("places of maxima", keep_places, lambda *_: True)


def rewrite(gm: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Applies what every graph takes; in place. Idempotent. Who runs the module itself recompiles
    it first."""
    before = len(gm.graph.nodes)
    changed = run_passes(REWRITES, Rewriting(gm), context).changed
    merged = ("common subexpressions", "common subexpressions of calls")
    context.record.add(
        "rewrite",
        rules=changed.get("rows") or {},
        merged=sum(changed.get(name) or 0 for name in merged),
        nodes_before=before,
        nodes_after=len(gm.graph.nodes),
    )
    return gm
