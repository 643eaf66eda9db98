"""Copies that only products read lie as what they copy does.

In: an ATen graph with fake values. Out: the same, in place. `matmul` of more than two dimensions
copies a transposed factor so that its first dimensions can be walked as one; the traced copy also
makes its last one contiguous. Libraries take either of the last two dimensions contiguous, so that
the copy need not turn them, which is what it costs: lanes that read neighbours write elements far
apart, or the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from deuteron.base.record import Record
from deuteron.graph import ops
from deuteron.graph.edit import Editor, at
from deuteron.graph.strides import LOGICAL_VIEWS, Relayout

aten = torch.ops.aten
PRODUCTS = (aten.bmm.default, aten.baddbmm.default)


def keep_order(gm: fx.GraphModule, record: Record) -> int:
    """Copies of transposed factors stay transposed. Returns how many."""
    editor = Editor(gm)
    relayout = Relayout(editor)
    count = 0
    for node in list(gm.graph.nodes):
        with at(node):
            relayout.follow(node)
            if turns(node) and all(u.target in PRODUCTS for u in read_by(node)):
                with editor.before(node):
                    new = editor.call(aten.transpose.int, node.args[0], -2, -1, like=node)
                    new = editor.call(aten.clone.default, new, like=node, **node.kwargs)
                    new = editor.call(aten.transpose.int, new, -2, -1, like=node)
                relayout.replace(node, new)
                count += 1
    relayout.finish()
    return count


def turns(node: fx.Node) -> bool:
    """Whether a node copies what is contiguous along its last dimension but one to where the last
    one is."""
    if node.target is not aten.clone.default:
        return False
    if node.kwargs.get("memory_format") is not torch.contiguous_format:
        return False
    t = node.args[0].meta["val"]  # type: ignore[union-attr]
    if not isinstance(t, Tensor) or t.layout != torch.strided or t.dim() < 3:
        return False
    sides = (*t.shape[-2:], *t.stride()[-2:])
    return all(type(n) is int for n in sides) and min(sides[:2]) > 1 and sides[2] == 1 < sides[3]


def read_by(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a node, through views."""
    for u in node.users:
        if u.op == "call_function" and ops.is_overload(u) and ops.packet(u.target) in LOGICAL_VIEWS:
            yield from read_by(u)
        else:
            yield u


__all__ = ["keep_order"]
