"""Strides of a graph's values, when those of some have changed.

A forward says here which strides its saved tensors have got (`report`), and a backward is given
them (`as_saved`): what is saved need not lie as it was traced, since nobody else sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from deuteron.graph import ops
from deuteron.graph.edit import Editor

aten = torch.ops.aten
Strides = tuple[Any, ...] | None


def strides_of(value: Any) -> Strides:
    val = value.meta.get("val") if isinstance(value, fx.Node) else None
    return tuple(val.stride()) if isinstance(val, Tensor) and val.layout == torch.strided else None


def refresh(editor: Editor, node: fx.Node, changed: set[fx.Node]) -> None:
    """The fake result for arguments with new strides; adds the node where it has others, too."""
    old = node.meta.get("val")
    try:
        new = editor.evaluate(node)
    except RuntimeError:
        if node.target not in (aten.view.default, aten._unsafe_view.default):
            raise
        node.target = aten.reshape.default  # no view any more
        new = editor.evaluate(node)
    if not isinstance(old, Tensor) or new.stride() != old.stride():
        changed.add(node)
    node.meta["val"] = new


def order_of(strides: Strides, t: Tensor) -> list[int] | None:
    """The dimensions in the order in which elements with these strides lie side by side; None where
    they do not."""
    if strides is None:
        return None
    orders = [[*range(t.dim())]]
    orders += [[0, 2, 3, 1]] if t.dim() == 4 else []
    if all(type(s) is int for s in strides):
        orders.append(sorted(orders[0], key=lambda d: (-strides[d], -t.shape[d])))
    for order in orders:
        dense = torch.empty([t.shape[d] for d in order], device="meta").stride()
        if all(strides[d] == s for d, s in zip(order, dense, strict=True)):
            return order
    return None


def restore(editor: Editor, output: fx.Node, promised: Iterable[tuple[fx.Node, Strides]]) -> None:
    """Copies what the graph returns with other strides than it promised."""
    for node, strides in promised:
        with editor.before(output):
            new = laid(editor, node, strides)
        if new is not node:
            output.replace_input_with(node, new)


def laid(editor: Editor, node: fx.Node, strides: Strides) -> fx.Node:
    """The node, or a copy of it that has these strides."""
    if strides_of(node) == strides:
        return node
    order = order_of(strides, node.meta["val"])
    assert order is not None, f"{node}: nothing lies {strides} apart side by side"
    moved = editor.call(aten.permute.default, node, order, like=node)
    kwargs = {"memory_format": torch.contiguous_format}
    moved = editor.call(aten.clone.default, moved, like=node, **kwargs)
    back = sorted(range(len(order)), key=order.__getitem__)
    return editor.call(aten.permute.default, moved, back, like=node)


def as_saved(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Gives a backward's inputs, and every value that follows from them, the strides of what the
    forward saved. What it returns keeps those that were traced."""
    changed: set[fx.Node] = set()
    for node, given in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        old = strides_of(node)
        if old is None or not isinstance(given, Tensor) or not all(type(s) is int for s in old):
            continue
        if tuple(given.stride()) != old:
            node.meta["val"] = given
            changed.add(node)
    if not changed:
        return
    output = gm.graph.output_node()
    promised = [(n, strides_of(n)) for n in output.all_input_nodes]
    editor = Editor(gm)
    for node in gm.graph.nodes:
        if node.op == "call_function" and any(a in changed for a in node.all_input_nodes):
            refresh(editor, node, changed)
    restore(editor, output, promised)


def saved_strides(gm: fx.GraphModule) -> list[Strides]:
    """Of what the forward returns; None for what is its caller's."""
    results, saved = ops.results_of(gm.graph.output_node())
    return [*(None for _ in results), *map(strides_of, saved)]


def report(gm: fx.GraphModule, traced: Sequence[Strides]) -> None:
    """Tells AOTAutograd which saved tensors of a compiled forward no longer have the strides that
    were traced (see `saved_strides`); it gives `as_saved` tensors like them."""
    context = torch._guards.TracingContext.try_get()
    found = getattr(context, "output_strides", None)
    if found is not None:
        now = saved_strides(gm)
        found.extend(b if a != b else None for a, b in zip(traced, now, strict=True))


__all__ = [
    "Strides",
    "as_saved",
    "laid",
    "order_of",
    "refresh",
    "report",
    "restore",
    "saved_strides",
    "strides_of",
]
