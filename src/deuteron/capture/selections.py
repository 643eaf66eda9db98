"""What the results of selections (a maximum, ...) depend on, bit for bit.

In: the forward's nodes. Out: those that must not be computed again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from deuteron.graph import ops

# Of floats these choose, move or change signs; casts round, but every kernel alike.
KEEP_BITS = frozenset(
    f"aten.{n}"
    for n in (
        *("abs", "neg", "relu", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "where"),
        *("_to_copy", "clone", "copy", "sign", "floor", "ceil", "trunc", "round"),
    )
)


def keeps_bits(node: fx.Node) -> bool:
    """Whether every kernel that computes it from equal operands has the same bits."""
    name = ops.packet(node.target)
    return ops.is_view(node) or name in KEEP_BITS or name in ops.SELECTIONS


def rounded_before_selections(
    forward: Sequence[fx.Node], must_recompute: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """Reductions of floats on which the result of a selection (a maximum, ...) depends. They are
    saved, not recomputed: another kernel may round them otherwise, and then no element of the
    recomputed operand equals the forward's maximum. Its gradient, divided by the number of
    elements that equal it, would be NaN."""
    selected_from: set[fx.Node] = set()
    above: set[fx.Node] = set()
    for n in reversed(forward):
        if ops.packet(n.target) in ops.SELECTIONS and not must_recompute(n):
            above.update(n.all_input_nodes)
        if n not in above or not ops.is_generated(n):
            continue  # never computed again, nor is what it reads for its sake
        above.update(n.all_input_nodes)
        made = [v for v in tree_leaves(n.meta.get("val")) if isinstance(v, torch.Tensor)]
        rounded = any(v.is_floating_point() or v.is_complex() for v in made)
        if rounded and ops.is_reduction(n) and ops.packet(n.target) not in ops.SELECTIONS:
            selected_from.update((n, *(u for u in n.users if u.target is operator.getitem)))
    return selected_from


__all__ = ["keeps_bits", "rounded_before_selections"]
