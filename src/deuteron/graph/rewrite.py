"""The table of rewrites of ATen graphs, and the pass that applies it.

In: a functional FX graph (joint, forward, backward or inference) with fake values. Out: the same
graph, rewritten in place, with fewer nodes. Invariants: results are bit-identical, but for library
calls that become others (`padding`, `epilogues`), whose sums may have another order; strides and
dtypes of outputs stay; which outputs share storage with which inputs and outputs stays; random
draws, mutations, collectives and assertions keep their number and their order.

One walk in graph order tries each node's rows; then common subexpressions merge (`cse`) and dead
code goes. All of it is linear in the size of the graph.
"""

from __future__ import annotations

from torch import fx

from deuteron.base.record import Record
from deuteron.graph import ops
from deuteron.graph.aliasing import Aliasing
from deuteron.graph.convolutions import rewrite_convolutions
from deuteron.graph.cse import merge_common
from deuteron.graph.devices import move_constructors
from deuteron.graph.edit import Editor
from deuteron.graph.epilogues import join_activations
from deuteron.graph.layout import channels_last
from deuteron.graph.padding import pad_products
from deuteron.graph.random_ops import SEED
from deuteron.graph.rules import ROWS


def rewrite(gm: fx.GraphModule, record: Record) -> fx.GraphModule:
    """Applies every rewrite; in place. Idempotent. Who runs the module itself recompiles it
    first."""
    before = len(gm.graph.nodes)
    with record.timed("graph rewrites"):
        move_constructors(gm, record)
        applied = apply_rows(gm)
        merged = merge_common(gm)
        remove_dead(gm.graph)
        changed = channels_last(gm, record)
        changed += rewrite_convolutions(gm, record)  # in the order that memory has by now
        changed += pad_products(gm, record)
        if changed + join_activations(gm, record):
            merged += merge_common(gm)
            remove_dead(gm.graph)
    record.add(
        "rewrite",
        rules=applied,
        merged=merged,
        nodes_before=before,
        nodes_after=len(gm.graph.nodes),
    )
    return gm


def apply_rows(gm: fx.GraphModule) -> dict[str, int]:
    """Each node once, in graph order, so that a row sees its arguments already rewritten."""
    editor, aliasing = Editor(gm), Aliasing(gm.graph)
    applied: dict[str, int] = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not ops.is_overload(node):
            continue
        for row in ROWS.get(ops.packet(node.target), ()):
            with editor.before(node):
                new = row.rewrite(editor, node)
            if new is None or not aliasing.may_replace(node, new):
                continue
            aliasing.replaced(node, new)
            editor.replace(node, new)
            applied[row.name] = applied.get(row.name, 0) + 1
            break
    return applied


def remove_dead(graph: fx.Graph) -> None:
    """Drops what nobody reads and what has no effect. A draw from torch's generator has one on the
    draws after it; the seed of our own numbers has none that counts."""
    for node in reversed(graph.nodes):
        draws = ops.is_random(node) and node.target is not SEED
        if not (node.users or draws or ops.has_effect(node)):
            graph.erase_node(node)
