"""The table of rewrites of ATen graphs, and the pass that applies them.

In: a functional FX graph (joint, forward, backward or inference) with fake values. Out: the same
graph, rewritten in place, with fewer nodes. Invariants: results are bit-identical, but for library
calls that become others (`einsum`, `padding`, `epilogues`), whose sums may have another order;
strides and dtypes of outputs stay; which outputs share storage with which inputs and outputs stays;
random draws, mutations, collectives and assertions keep their number and their order. What a later
node was traced for stays true (`strides.Relayout`).

One walk in graph order tries each node's rows; then common subexpressions merge (`cse`) and dead
code goes. All of it is linear in the size of the graph. No rewrite is needed: one that raises is
undone, and the Record says so (`transaction`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from deuteron.base.record import Record
from deuteron.graph import ops, random, transaction
from deuteron.graph.aliasing import Aliasing
from deuteron.graph.convolutions import rewrite_convolutions
from deuteron.graph.cse import merge_common
from deuteron.graph.devices import move_constructors
from deuteron.graph.edit import Editor, remove_dead
from deuteron.graph.einsum import multiply_matrices
from deuteron.graph.epilogues import join_activations
from deuteron.graph.layout import channels_last
from deuteron.graph.padding import pad_products
from deuteron.graph.rules import RULES_OF, Row, same_numbers
from deuteron.graph.transaction import Rewrite, Snapshot, attempt
from deuteron.graph.windows import keep_places

# Each changes a graph in place and returns how much: 0, then the graph is as it was.
REWRITES: dict[str, Callable[[fx.GraphModule, Record], Any]] = {
    "storage of views": lambda gm, record: Editor(gm).view_again(),
    "devices of constructors": move_constructors,
    "rows": lambda gm, record: apply_rows(gm, record),
    "common subexpressions": lambda gm, record: merge_common(gm),
    "dead code": lambda gm, record: remove_dead(gm.graph),
    "sums of products": multiply_matrices,
    "channels last": channels_last,
    "convolutions": rewrite_convolutions,  # in the order that memory has by now
    "padding": pad_products,
    "epilogues": join_activations,
    # Of joint graphs and those of inference (see `capture`):
    "random numbers": random.functionalize,
    "places of maxima": keep_places,
}
LIBRARY_REWRITES = ("sums of products", "channels last", "convolutions", "padding", "epilogues")


def rewrite(gm: fx.GraphModule, record: Record) -> fx.GraphModule:
    """Applies what every graph takes; in place. Idempotent. Who runs the module itself recompiles
    it first."""
    before, merged = len(gm.graph.nodes), 0
    applied: dict[str, int] = {}
    run = Attempts(gm, record)
    with record.timed("graph rewrites"):
        # What shares memory is read off the fake values by all that follow.
        if run("storage of views") is not None:
            run("devices of constructors")
            applied = run("rows") or {}
            merged = run("common subexpressions") or 0
            run("dead code")
            if sum(run(name) or 0 for name in LIBRARY_REWRITES):
                merged += run("common subexpressions") or 0
                run("dead code")
    record.add(
        "rewrite",
        rules=applied,
        merged=merged,
        nodes_before=before,
        nodes_after=len(gm.graph.nodes),
    )
    return gm


class Attempts:
    """Tries rewrites of one graph by name, one after the other; None of one that failed."""

    def __init__(self, gm: fx.GraphModule, record: Record) -> None:
        self.gm, self.record = gm, record
        self.now: Snapshot | None = None

    def __call__(self, name: str) -> Any:
        self.now = self.now or Snapshot(self.gm)
        changes = attempt(self.gm, self.record, Rewrite(name, REWRITES[name]), self.now)
        if changes:
            self.now = None
        return changes


def apply_rows(gm: fx.GraphModule, record: Record) -> dict[str, int]:
    """Each node once, in graph order, so that a row sees its arguments already rewritten. Where a
    row fails, all is done again without it."""
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
