"""Common subexpressions: two calls of the same operator on the same arguments become one.

In: a functional graph. Out: the number of merged nodes. Never merged: random draws, calls with
effects, uninitialized memory, higher-order operators, anything across a write or another effect,
and results whose merging the caller could observe (`Aliasing`). Each node is hashed once: linear.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from deuteron.graph import ops
from deuteron.graph.aliasing import Aliasing

UNINITIALIZED = frozenset(
    (
        "aten.empty",
        "aten.empty_like",
        "aten.empty_strided",
        "aten.empty_permuted",
        "aten.new_empty",
        "aten.new_empty_strided",
    )
)
# Tags that tell two nodes apart: what a checkpoint recomputes is not the same as what is kept.
CHECKPOINT_TAGS = ("recompute", "ac_graph_id")


def merge_common(gm: fx.GraphModule) -> int:
    """Nodes that compute the same become one. Returns how many went."""
    aliasing = Aliasing(gm.graph)
    known: dict[Any, fx.Node] = {}
    merged = 0
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if ops.has_effect(node):
            known.clear()
            continue
        if not mergeable(node):
            continue
        key = key_of(node)
        if key is None:
            continue
        first = known.setdefault(key, node)
        if first is node:
            continue
        if not aliasing.may_replace(node, first):
            continue
        aliasing.replaced(node, first)
        node.replace_all_uses_with(first)
        gm.graph.erase_node(node)
        merged += 1
    return merged


# Operators of others may hide a state.
KNOWN_NAMESPACES = ("aten", "prims", "deuteron")


def mergeable(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    if ops.is_overload(node) and node.target.namespace not in KNOWN_NAMESPACES:
        return False
    return not ops.is_random(node) and ops.packet(node.target) not in UNINITIALIZED


def key_of(node: fx.Node) -> Any:
    """A hashable key that is equal for equal calls; None where an argument cannot be hashed."""
    parts = (
        node.target,
        freeze(node.args),
        freeze(node.kwargs),
        tuple(str(node.meta.get(t)) for t in CHECKPOINT_TAGS),
    )
    try:
        hash(parts)
    except TypeError:
        return None
    return parts


def freeze(x: Any) -> Any:
    """Types count: 1, 1.0 and True differ, and so do 0.0 and -0.0. Symbolic numbers count by their
    expression."""
    if isinstance(x, fx.Node):
        return x
    if isinstance(x, (tuple, list)):
        return tuple(freeze(v) for v in x)
    if isinstance(x, dict):
        return tuple((k, freeze(v)) for k, v in sorted(x.items(), key=lambda item: str(item[0])))
    if isinstance(x, slice):
        return ("slice", freeze(x.start), freeze(x.stop), freeze(x.step))
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(x), x.node.expr)
    if isinstance(x, float):
        return (float, x.hex())
    return (type(x), x)
