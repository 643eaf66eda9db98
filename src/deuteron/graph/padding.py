"""Matrix products with odd sizes on GPUs, as products of padded matrices.

In: an ATen graph with fake values. Out: the same, in place, where the operands of large products in
half precision are padded with zeros to multiples of eight and the result is sliced. Tensor cores
read 16 bytes at a time; with a vocabulary of 50257 the library falls back to kernels for unaligned
data (H200, 16384x512 by 512x50257 in bf16: 6.7 ms, padded 0.8). Padding fuses into whatever makes
an operand; slices are views. Results are the same numbers: what is added is zero. Sizes count:
rows of 16 bytes with an odd number of columns are as slow (H100, 8192x768 by 768x50257, us: 6597,
of such rows 6785, padded 921). So do those of many small matrices (H200, 8192 times 27x128 by
128x27: 93 us, padded 37; 27x27 by 27x128: 110, padded 70; with rows of 16 bytes alone 114).

A product with odd rows that is read transposed is computed transposed: its rows are then its
columns, and whoever reads it reads neighbours (DLRM's gradients, 8192 times 128x27).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from deuteron.base.record import Record
from deuteron.graph import ops
from deuteron.graph.edit import Editor, at
from deuteron.graph.strides import Relayout

aten = torch.ops.aten
SIZE_MULTIPLE = 8
# FLOPs of a product below which padding gains nothing, and how many a byte of padding must save:
# H200, unaligned products run at a quarter of 750 TFLOP/s, copies at 4 TB/s.
MIN_FLOPS, FLOPS_PER_BYTE = 1 << 31, 64
# The same of many small products, of which the library does 15 and 30 TFLOP/s (see above).
MIN_BATCHED_FLOPS, BATCHED_FLOPS_PER_BYTE = 1 << 28, 10
PRODUCT_OPERATORS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
PLAIN_VIEWS = (aten.view.default, aten._unsafe_view.default)
VIEWS = (aten.view, aten._unsafe_view, aten.reshape, aten.permute, aten.t, aten.transpose)


def pad_products(gm: fx.GraphModule, record: Record) -> int:
    """Operands of products are padded to sizes that the library is fast at. Returns the number of
    products changed."""
    products = {n for n in gm.graph.nodes if n.target in PRODUCT_OPERATORS and _worth(n)}
    if not products:
        return 0
    editor = Editor(gm)
    relayout = Relayout(editor)
    for node in list(gm.graph.nodes):
        with at(node):
            relayout.follow(node)
            if node in products:
                _pad_product(editor, relayout, node, record)
    relayout.finish()
    return len(products)


def _pad_product(editor: Editor, relayout: Relayout, node: fx.Node, record: Record) -> None:
    node = _read_transposed(editor, relayout, node) or node
    detail = "x".join(map(str, _sizes(node)))
    has_tail = _has_tail(node)
    with editor.before(node):
        new = _product_and_tail(editor, node) if has_tail else _padded(editor, node)
    relayout.replace(node, new)
    record.add(
        "decision",
        subject="pad",
        accepted=True,
        reason="the last columns are a product of their own" if has_tail else "rows of 16 bytes",
        detail=detail,
        first=new.name,
        second="",
        bytes=0,
        us=0.0,
    )


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    a, b = node.args[-2:]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return a, b


def _sizes(node: fx.Node) -> tuple[Any, ...]:
    """Of the products that a node is (none: one), then rows, depth, columns."""
    a, b = (n.meta["val"] for n in _operands(node))
    return (*a.shape, b.shape[-1])


def _worth(node: fx.Node) -> bool:
    out = node.meta.get("val")
    if not isinstance(out, torch.Tensor) or out.device.type != "cuda" or out.itemsize != 2:
        return False
    sizes = _sizes(node)
    if not all(type(x) is int for x in sizes):
        return False
    *many, m, k, n = sizes
    count = math.prod(many)
    flops = 2 * count * m * k * n
    odd = [x % SIZE_MULTIPLE != 0 for x in (m, k, n)]
    least, most = (
        (MIN_BATCHED_FLOPS, BATCHED_FLOPS_PER_BYTE) if many else (MIN_FLOPS, FLOPS_PER_BYTE)
    )
    if not any(odd) or flops < least or 1 in (m, n):  # of one row: no tensor cores' work
        return False
    copied = (m * k) * (odd[0] or odd[1]) + (k * n) * (odd[1] or odd[2])
    return flops > most * 2 * count * copied


def _transposed_weight(node: fx.Node) -> fx.Node | None:
    """Of what a node is the transpose (of its last two dimensions)."""
    if node.target is aten.permute.default:
        *many, a, b = node.args[1]  # type: ignore[misc]
        rank = len(many) + 2
        if many != list(range(rank - 2)) or [x % rank for x in (a, b)] != [rank - 1, rank - 2]:
            return None
    elif node.target is not aten.t.default:
        return None
    (x,) = node.all_input_nodes
    return x


def _turn(editor: Editor, x: fx.Node, like: fx.Node) -> fx.Node:
    rank = x.meta["val"].dim()
    order = [*range(rank - 2), rank - 1, rank - 2]
    return _transposed_weight(x) or editor.call(aten.permute.default, x, order, like=like)


def _read_transposed(editor: Editor, relayout: Relayout, node: fx.Node) -> fx.Node | None:
    """The product transposed, in the place of the one that reads it so; None where that does not
    spare odd rows."""
    *_, m, _k, n = _sizes(node)
    target, users = node.target, list(node.users)
    if target is aten.addmm.default or len(users) != 1 or _transposed_weight(users[0]) is not node:
        return None
    if m % SIZE_MULTIPLE or not n % SIZE_MULTIPLE or _promised(users[0]):
        return None
    a, b = _operands(node)
    with editor.before(node):
        swapped = (_turn(editor, x, node) for x in (b, a))
        new = editor.call(target, *swapped, like=node)  # type: ignore[arg-type]
    relayout.replace(users[0], new)
    editor.graph.erase_node(node)
    return new


def _has_tail(node: fx.Node) -> bool:
    """Whether the columns beyond a multiple of eight are better a product of their own: nothing
    else is odd, they can be cut off without a copy, and the result is copied in any case. H100,
    128x768 by 768x50257: 130 us; padded 41, and 47 for a copy of the weights."""
    a, b = (n.meta["val"] for n in _operands(node))
    if (
        b.dim() != 2
        or b.stride(0) != 1
        or b.stride(1) % SIZE_MULTIPLE
        or a.shape[1] % SIZE_MULTIPLE
    ):
        return False
    bias = node.args[0].meta["val"] if node.target is aten.addmm.default else None  # type: ignore[union-attr]
    plain = bias is None or (bias.dim() == 1 and bias.shape[0] == b.shape[1])
    return plain and bool(_up(b.shape[1])) and b.shape[1] > SIZE_MULTIPLE and _promised(node)


def _product_and_tail(editor: Editor, node: fx.Node) -> fx.Node:
    *bias, a, b = node.args
    n = _sizes(node)[-1]
    whole, parts = n - n % SIZE_MULTIPLE, []
    for low, high in ((0, whole), (whole, n)):
        columns = editor.call(aten.slice.Tensor, b, 1, low, high, like=node)
        some = [editor.call(aten.slice.Tensor, x, 0, low, high, like=node) for x in bias]
        parts.append(editor.call(node.target, *some, a, columns, like=node, **node.kwargs))
    return editor.call(aten.cat.default, parts, 1, like=node)


def _up(n: int) -> int:
    return -n % SIZE_MULTIPLE


def _padded(editor: Editor, node: fx.Node) -> fx.Node:
    *many, m, k, n = _sizes(node)
    a, b = _operands(node)
    wide_a = _pad(editor, node, a, _up(m), _up(k))
    wide_b = _pad(editor, node, b, _up(k), _up(n))
    if node.target is not aten.addmm.default:
        out = editor.call(node.target, wide_a, wide_b, like=node)
    else:
        bias = node.args[0]
        assert isinstance(bias, fx.Node)
        if _up(n) and bias.meta["val"].shape[-1] != 1:
            bias = editor.call(aten.constant_pad_nd.default, bias, [0, _up(n)], 0, like=node)
        if _up(m) and bias.meta["val"].dim() == 2 and bias.meta["val"].shape[0] != 1:
            bias = editor.call(aten.constant_pad_nd.default, bias, [0, 0, 0, _up(m)], 0, like=node)
        out = editor.call(aten.addmm.default, bias, wide_a, wide_b, like=node, **node.kwargs)
    if _up(m):
        out = editor.call(aten.slice.Tensor, out, len(many), 0, m, like=node)
    if _up(n):
        out = editor.call(aten.slice.Tensor, out, len(many) + 1, 0, n, like=node)
    if (_up(n) or many) and _promised(node):
        kwargs = {"memory_format": torch.contiguous_format}
        out = editor.call(aten.clone.default, out, like=node, **kwargs)
    return out


def _pad(editor: Editor, like: fx.Node, x: fx.Node, rows: int, cols: int) -> fx.Node:
    """``x`` with zeros below and to the right. A transposed operand is padded before it is
    transposed, so that all products that read it share the copy; what is joined from rows is
    joined with more of them."""
    if not rows and not cols:
        return x
    inner = _transposed_weight(x)
    if inner is not None:
        return _turn(editor, _pad(editor, like, inner, cols, rows), like)
    joined = _joined(x)
    if joined is not None and not cols:
        count, n, width = x.meta["val"].shape
        val = joined.meta["val"]
        kind = {"dtype": val.dtype, "device": val.device}
        more = editor.call(aten.full.default, [count, width], 0, like=like, **kind)
        parts = [*joined.args[0], *[more] * rows]  # type: ignore[misc]
        wide = editor.call(aten.cat.default, parts, 1, like=joined)
        return editor.call(aten.view.default, wide, [count, n + rows, width], like=x)
    return editor.call(aten.constant_pad_nd.default, x, [0, cols, 0, rows], 0, like=like)


def _joined(x: fx.Node) -> fx.Node | None:
    """The ``torch.cat`` along columns of which `x` is a view with one more dimension, as
    ``torch.stack`` makes it; else None."""
    if x.target not in PLAIN_VIEWS or not isinstance(x.args[0], fx.Node):
        return None
    cat, val = x.args[0], x.meta["val"]
    if cat.target is not aten.cat.default or cat.args[1:] != (1,) or val.dim() != 3:
        return None
    whole = [val.shape[0], val.shape[1] * val.shape[2]]
    return cat if list(cat.meta["val"].shape) == whole else None


def _views(node: fx.Node) -> list[fx.Node]:
    return [
        u
        for u in node.users
        if isinstance(u.target, torch._ops.OpOverload) and u.target.overloadpacket in VIEWS
    ]


def _promised(node: fx.Node) -> bool:
    """Whether the graph returns the node or a view of it to its caller, or gives strides for one:
    its own are then promised."""
    todo, results = [node], ops.results_of(node.graph.output_node())[0]
    while todo:
        n = todo.pop()
        if n in results or any(ops.packet(u.target) in ops.STRIDED_OPERATORS for u in n.users):
            return True
        todo += _views(n)
    return False


__all__ = ["pad_products"]
