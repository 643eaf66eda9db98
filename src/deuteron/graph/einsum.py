"""Sums of products of broadcast tensors as matrix products.

In: a functional ATen graph with fake values. Out: the same, in place, where ``(a * b).sum(dims)``
is a contraction (each factor has a dimension that the other lacks, and both have the summed ones)
and a batched matrix product of the factors' transposed views instead. State-space models write
their products so; as loops each factor is read again for every element of the other (H200, Bamba's
chunks, f32: 20 ms for one, whose tensors are read in 0.2). Invariants: sizes are known, both
factors and the result have one dtype of floats, and results are sums of the same numbers in another
order, as a library adds them; nothing changes where torch's setting lets products round float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from deuteron.base.record import Record
from deuteron.graph import ops
from deuteron.graph.edit import Editor

aten = torch.ops.aten
SUM, MUL = aten.sum.dim_IntList, aten.mul.Tensor
PRODUCT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Elements of each of the three extents of a matrix product that is worth a call of the library.
MIN_PRODUCT_EXTENT = 16


@dataclass(frozen=True)
class Contraction:
    """Dimensions of the product by what they are: both factors have `batch` and `summed` ones,
    only the first `rows`, only the second `columns`."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    summed: tuple[int, ...]


def multiply_matrices(gm: fx.GraphModule, record: Record) -> int:
    """Sums over products of broadcast tensors become matrix products. Returns how many."""
    editor, count = Editor(gm), 0
    for node in list(gm.graph.nodes):
        contracted = contraction(node)
        if contracted is None:
            continue
        b, m, n, k = extents(node, contracted)
        with editor.before(node):
            new = product(editor, node, contracted)
        editor.replace(node, new)
        count += 1
        record.add(
            "decision",
            subject="einsum",
            accepted=True,
            reason="a matrix product",
            detail=f"{b} times {m}x{k} by {k}x{n}",
            first=new.name,
            second="",
            bytes=0,
            us=0.0,
        )
    return count


def contraction(node: fx.Node) -> Contraction | None:
    """What a sum multiplies, where that is a matrix product."""
    if node.target is not SUM or len(node.args) < 2 or not node.args[1]:
        return None
    made = node.args[0]
    if not isinstance(made, fx.Node) or made.target is not MUL or len(made.users) != 1:
        return None
    factors = made.args[:2]
    if not all(isinstance(f, fx.Node) for f in factors):
        return None
    out, whole = ops.tensor_of(node), ops.tensor_of(made)
    a, b = (ops.tensor_of(f) for f in factors)  # type: ignore[arg-type]
    if out is None or whole is None or a is None or b is None or not is_exact(out):
        return None
    if len({t.dtype for t in (out, whole, a, b)}) > 1 or len({t.device for t in (out, a, b)}) > 1:
        return None
    if not all(isinstance(n, int) for t in (whole, a, b) for n in (*t.shape, *t.stride())):
        return None
    summed = {d % max(1, whole.dim()) for d in node.args[1]}  # type: ignore[union-attr]
    kinds: dict[str, list[int]] = {k: [] for k in ("batch", "rows", "columns", "summed")}
    for d, n in enumerate(whole.shape):
        if n == 1:
            continue
        has = varies(a, whole, d), varies(b, whole, d)
        if d in summed and has != (True, True) or has == (False, False):
            return None
        both = "summed" if d in summed else "batch"
        kinds[both if all(has) else "rows" if has[0] else "columns"].append(d)
    contracted = Contraction(**{k: tuple(v) for k, v in kinds.items()})
    return contracted if min(extents(node, contracted)[1:]) >= MIN_PRODUCT_EXTENT else None


def is_exact(t: Tensor) -> bool:
    """Whether a matrix product of tensors like `t` is as exact as a product and a sum."""
    if t.dtype not in PRODUCT_DTYPES or t.numel() == 0:
        return False
    return t.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"


def varies(t: Tensor, whole: Tensor, d: int) -> bool:
    """Whether a factor has a dimension of the product: it is not broadcast along it."""
    own = d - (whole.dim() - t.dim())
    return own >= 0 and t.shape[own] != 1 and t.stride(own) != 0


def extents(node: fx.Node, contracted: Contraction) -> tuple[int, int, int, int]:
    """Matrices of the product, their rows, columns and terms."""
    whole = node.args[0].meta["val"]  # type: ignore[union-attr]
    b, m, n, k = (
        math.prod(whole.shape[d] for d in dims)
        for dims in (contracted.batch, contracted.rows, contracted.columns, contracted.summed)
    )
    return b, m, n, k


def product(editor: Editor, node: fx.Node, contracted: Contraction) -> fx.Node:
    """The batched product of the factors, in the order and with the strides of the sum."""
    made = node.args[0]
    assert isinstance(made, fx.Node)
    whole, out = made.meta["val"], node.meta["val"]
    b, m, n, k = extents(node, contracted)
    first, second = made.args[:2]
    left = matrices(
        editor, node, first, whole, (*contracted.batch, *contracted.rows, *contracted.summed)
    )
    right = matrices(
        editor, node, second, whole, (*contracted.batch, *contracted.summed, *contracted.columns)
    )
    left = viewed(editor, node, left, [b, m, k])
    right = viewed(editor, node, right, [b, k, n])
    result = editor.call(aten.bmm.default, left, right, like=node)
    order = (*contracted.batch, *contracted.rows, *contracted.columns)
    result = viewed(editor, node, result, [whole.shape[d] for d in order])
    back = [order.index(d) for d in sorted(order)]
    result = editor.call(aten.permute.default, result, back, like=node)
    result = viewed(editor, node, result, list(out.shape))
    if result.meta["val"].stride() != out.stride():
        result = editor.call(
            aten.clone.default, result, like=node, memory_format=torch.contiguous_format
        )
    return result


def matrices(
    editor: Editor, node: fx.Node, factor: object, whole: Tensor, dims: tuple[int, ...]
) -> fx.Node:
    """A factor with just these dimensions of the product, in this order."""
    assert isinstance(factor, fx.Node)
    val = factor.meta["val"]
    lead = whole.dim() - val.dim()
    for d in range(val.dim()):  # one place of what is broadcast
        if val.shape[d] != 1 and d + lead not in dims:
            factor = editor.call(aten.slice.Tensor, factor, d, 0, 1, like=node)
    own = [d - lead for d in dims]
    rest = [d for d in range(val.dim()) if d not in own]
    factor = editor.call(aten.permute.default, factor, [*own, *rest], like=node)
    return viewed(editor, node, factor, [whole.shape[d] for d in dims])


def viewed(editor: Editor, node: fx.Node, x: fx.Node, sizes: list[int]) -> fx.Node:
    """A view of `x` with these sizes, or of a contiguous copy where there is none."""
    val = x.meta["val"]
    if list(val.shape) == sizes:
        return x
    try:
        torch.empty_strided(val.shape, val.stride(), device="meta").view(sizes)
    except (RuntimeError, ValueError):  # torch's rule for views raises either
        x = editor.call(aten.clone.default, x, like=node, memory_format=torch.contiguous_format)
    return editor.call(aten.view.default, x, sizes, like=node)


__all__ = ["multiply_matrices"]
