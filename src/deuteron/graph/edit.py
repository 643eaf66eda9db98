"""Editing an FX graph without losing what later stages need of a node: its fake value, its origin,
its tags.

Everything that inserts nodes goes through `Editor.call`, which computes the fake result by running
the operator on fake arguments, so that ``meta["val"]`` is true of every node, always.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from deuteron.graph import ops
from deuteron.graph.random_ops import SEED
from deuteron.graph.transaction import FAILED_NODE_ATTRIBUTE

# What a replacement inherits from the node that it stands for.
INHERITED_META = (
    "stack_trace",
    "nn_module_stack",
    "source_fn_stack",
    "original_aten",
    "from_node",
    "seq_nr",
    "recompute",
    "ac_graph_id",
    "partitioner_tag",
    "has_backward_hook",
    "custom",
    "fwd_nn_module_stack",
    "fwd_source_fn_stack",
    "autograd_backward",
)


class Editor:
    """Inserts calls into one graph."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm, self.graph = gm, gm.graph
        self.mode = detect_fake_mode([n.meta.get("val") for n in gm.graph.nodes])

    def call(self, target: Callable[..., Any], *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
        """A new call at the current insertion point, with its fake result and the origin of
        `like`."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update({k: like.meta[k] for k in INHERITED_META if k in like.meta})
        node.meta["val"] = self.evaluate(node)
        return node

    def evaluate(self, node: fx.Node) -> Any:
        """The fake result of a call."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with torch.no_grad(), outside_of_modes(), self.mode or nullcontext():
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def complete(self) -> None:
        """Gives a fake value to calls that another pass inserted without one."""
        for node in self.graph.nodes:
            if node.op == "call_function" and "val" not in node.meta:
                node.meta["val"] = self.evaluate(node)

    def view_again(self) -> int:
        """Evaluates views again whose base was replaced, and returns their number. Fake values
        say which tensors share memory; those of such views still name the storage of the node
        that is gone."""
        count = 0
        for node in self.graph.nodes:
            base, val = ops.viewed(node), node.meta.get("val")
            if base is None or ops.tensor_of(base) is None:
                continue
            parts = val if isinstance(val, (tuple, list)) else [val]
            if any(ops.storage(v) != ops.storage_of(base) for v in parts):
                with at(node):
                    made = node.meta["val"] = self.evaluate(node)
                count += 1
                for u in node.users:
                    if u.target is operator.getitem:
                        u.meta["val"] = made[u.args[1]]
        return count

    @contextmanager
    def before(self, node: fx.Node) -> Iterator[None]:
        with at(node), self.graph.inserting_before(node):
            yield

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """`new` takes the place of `old`, which is erased."""
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)

    def first_call(self) -> fx.Node:
        """The first node after the placeholders."""
        return next(n for n in self.graph.nodes if n.op != "placeholder")


def remove_dead(graph: fx.Graph) -> int:
    """Drops what nobody reads and what has no effect; returns how many. A draw from torch's
    generator has one on the draws after it; the seed of our own numbers has none that counts."""
    before = len(graph.nodes)
    for node in reversed(graph.nodes):
        is_draw = ops.is_random(node) and node.target is not SEED
        if not (node.users or is_draw or ops.has_effect(node)):
            graph.erase_node(node)
    return before - len(graph.nodes)


@contextmanager
def at(node: fx.Node) -> Iterator[None]:
    """An exception in the block says at which node it was raised (the innermost)."""
    try:
        yield
    except Exception as e:
        if not hasattr(e, FAILED_NODE_ATTRIBUTE):
            setattr(e, FAILED_NODE_ATTRIBUTE, node.name)
        raise


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Running operators on fake tensors is not tracing: no dispatch mode of a caller may see it."""
    with torch.utils._python_dispatch._disable_current_modes():
        yield
