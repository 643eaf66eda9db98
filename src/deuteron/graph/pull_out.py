"""Sums of products with a product of matrices, by what is already computed (*pull out*).

    sum over j of w[i, j] (a b)[i, j]  =  sum over e of a[i, e] (w b^T)[i, e]

where (a b)[i, j] = sum over e of a[i, e] b[e, j]: the order of the two sums is changed. Where the
graph has the product w b^T, which is narrower than a b, the sum needs neither w nor a b. So it is
with the gradient of a softmax whose weights are multiplied with values: the sum of a row's weights
times their gradients is that of the result times its gradient, and the backward of attention needs
no pass over the scores of its own.

Products are compared as sets of factors, through conversions, reshapes and numbers, so that what
stands between (dropout's mask and its scale) is on both sides. Sizes that may change are equal only
where that is known: no guard is added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from deuteron.base.products import MIN_TENSOR_CORE_SIDE, computed_again
from deuteron.base.record import Record
from deuteron.graph import ops
from deuteron.graph.edit import Editor

aten = torch.ops.aten
RESHAPES = ("aten.view", "aten.reshape", "aten._unsafe_view", "aten.expand", "aten.unsqueeze")
MOVES = (*RESHAPES, "aten._to_copy", "aten.clone", "aten.alias", "aten.squeeze")
MAX_FACTORS = 8


@dataclass
class Factors:
    """``number`` times the product of `nodes`, elements in the order of a matrix's rows."""

    nodes: Counter[fx.Node]
    number: float


def factors(root: fx.Node) -> Factors | None:
    """What is multiplied for each element of `root`; None where that is not known."""
    out = Factors(Counter(), 1.0)
    todo = [root]
    while todo:
        n = moved_from(todo.pop())
        name = ops.packet(n.target) if n.op == "call_function" else ""
        if name == "aten.mul" and all(same_sizes(shape(a), shape(n)) for a in n.all_input_nodes):
            tensors = [a for a in n.args if isinstance(a, fx.Node)]
            numbers = [a for a in n.args if isinstance(a, (int, float))]
            if len(tensors) + len(numbers) != len(n.args):
                return None
            todo += tensors
            for x in numbers:
                out.number *= x
        elif name == "aten.div" and len(n.args) == 2 and isinstance(n.args[1], (int, float)):
            (a,) = n.all_input_nodes
            todo.append(a)
            out.number /= n.args[1] or float("nan")
        else:
            out.nodes[n] += 1
        if len(todo) + out.nodes.total() > MAX_FACTORS:
            return None
    return out


def moved_from(n: fx.Node) -> fx.Node:
    """The node whose elements are those of `n` in the same order, with the same rows."""
    while n.op == "call_function" and ops.packet(n.target) in MOVES:
        (source, *_) = n.all_input_nodes
        if not same_rows(source, n):
            break
        n = source
    return n


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b))


def same_rows(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    floats = x.is_floating_point() and y.is_floating_point()
    whole = statically_known_true(x.numel() == y.numel())
    return floats and whole and same_sizes(x.shape[-2:], y.shape[-2:])


def shape(n: fx.Node) -> torch.Size:
    size: torch.Size = n.meta["val"].shape
    return size


def pull_out(gm: fx.GraphModule, record: Record) -> int:
    """Sums over rows of what is multiplied with a product of matrices; their number."""
    order = {n: k for k, n in enumerate(gm.graph.nodes)}
    editor, count = Editor(gm), 0
    for n in list(gm.graph.nodes):
        if n.op != "call_function" or ops.packet(n.target) != "aten.sum" or len(n.args) < 2:
            continue
        (source,) = n.all_input_nodes
        if not isinstance(source.meta.get("val"), torch.Tensor) or source.meta["val"].dim() < 2:
            continue
        if list(n.args[1] or ()) not in ([-1], [source.meta["val"].dim() - 1]):
            continue
        if not all(type(size) is int for size in shape(n)):
            continue
        found = pulled(source, order, order[n])
        if found is None or scores_stay(found[0].meta["val"]):
            continue
        rows, result, number = found
        wide = torch.promote_types(n.meta["val"].dtype, torch.float32)
        with editor.before(n):
            sides = [
                editor.call(aten._to_copy.default, x, like=n, dtype=wide) for x in (rows, result)
            ]
            total = editor.call(aten.mul.Tensor, *sides, like=n)
            total = editor.call(aten.sum.dim_IntList, total, [-1], like=n)
            if number != 1.0:
                total = editor.call(aten.mul.Tensor, total, number, like=n)
            total = editor.call(aten.view.default, total, list(shape(n)), like=n)
            if n.meta["val"].dtype != wide:
                dtype = n.meta["val"].dtype
                total = editor.call(aten._to_copy.default, total, like=n, dtype=dtype)
        n.replace_all_uses_with(total)
        gm.graph.erase_node(n)
        count += 1
    return count


def scores_stay(factor: torch.Tensor) -> bool:
    """Whether a factor's products are in memory anyway, so that a sum over their rows costs
    nothing: those that are not cheap, or of few rows. It is more exact: what cancels in the rows'
    gradients is rounded alike. H200, gradients of the queries' weights: VideoPrism in f32, 4096
    keys, 5e-6 off, pulled out 4e-5; CrossViT in bf16, one query and 1157 keys, pulled out 1.4e-1,
    eager's 5e-2."""
    few = statically_known_true(factor.shape[-2] < MIN_TENSOR_CORE_SIDE)
    return few or (factor.dtype == torch.float32 and not computed_again("f32", factor.device.type))


def pulled(
    source: fx.Node, order: dict[fx.Node, int], limit: int
) -> tuple[fx.Node, fx.Node, float] | None:
    """(a, w b^T, number) for the sum over the rows of `source`, of nodes before `limit`."""
    whole = factors(source)
    if whole is None:
        return None
    for x in whole.nodes:
        if not multiplies(x) or not statically_known_true(shape(x)[-1] > shape(x.args[0])[-1]):
            continue
        a, b = x.args
        rest = whole.nodes - Counter([x])
        for result in (u for c in turned(b) for u in c.users):
            if not multiplies(result) or result.args[1] not in turned(b) or order[result] > limit:
                continue
            weights = factors(result.args[0])
            if weights is not None and weights.nodes == rest and weights.number:
                return a, result, whole.number / weights.number
    return None


def multiplies(n: fx.Node) -> bool:
    return n.op == "call_function" and ops.packet(n.target) in ("aten.mm", "aten.bmm")


def turned(b: fx.Node) -> list[fx.Node]:
    """The nodes that are `b` with its last two dimensions exchanged."""
    last = list(range(b.meta["val"].dim()))
    last[-2:] = last[:-3:-1]
    swaps = ("aten.permute", "aten.t", "aten.transpose")

    def swapped(n: fx.Node) -> bool:
        if n.op != "call_function" or ops.packet(n.target) not in swaps:
            return False
        if ops.packet(n.target) == "aten.permute":
            return [d % len(last) for d in n.args[1]] == last
        return len(n.args) == 1 or {d % len(last) for d in n.args[1:]} == set(last[-2:])

    made = [u for u in b.users if swapped(u)]
    return [*made, b.args[0]] if swapped(b) else made


__all__ = ["pull_out"]
