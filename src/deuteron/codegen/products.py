"""Small matrix products that are given to cuBLAS directly.

In: a library call of a matrix product. Out: a `Product`, which says what cuBLAS needs to know, or
None. ATen asks cuBLAS which algorithm to take in every call, which takes longer than a small
product: 10 us of the host on the machine of an H200, where the product takes 3. Large ones stay
ATen's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deuteron.ir.index import Index
from deuteron.ir.program import Extern, Layout, ViewArg

# FLOPs up to which ATen's call takes longer than the product (H200, about 10 us). For larger ones
# of f32 ATen asks cuBLAS otherwise: 512x768 by 768x768 22 us, 32 so.
MAX_FLOPS = {"f32": 4e8, "f16": 4e9, "bf16": 4e9}


@dataclass(frozen=True)
class Side:
    """An operand in columns (the first index is contiguous), as cuBLAS has it, or its transpose.
    Steps are in elements: between columns, and between the matrices of a batch."""

    transposed: bool
    column: int
    batch: int


@dataclass(frozen=True)
class Product:
    """``out[m, n] = a[m, k] @ b[k, n] (+ bias[n])``, `batch` times; with a bias there may be an
    activation of that ("relu", or "gelu": by tanh). The rows of `out` are contiguous. In columns
    that is ``out.T = b.T @ a.T``, and the sides are those of the factors there: `b` first."""

    m: int
    n: int
    k: int
    batch: int
    dtype: str
    b: Side
    a: Side
    out: Side
    bias: bool
    activation: str = ""


ADDMM_ACTIVATION = "aten._addmm_activation.default"
BIAS_OPERANDS = {
    "aten.mm.default": 0,
    "aten.bmm.default": 0,
    "aten.addmm.default": 1,
    ADDMM_ACTIVATION: 1,
}


def product_of(call: Extern, layouts: Mapping[str, Layout]) -> tuple[Product, list[ViewArg]] | None:
    """The product of a library call, and its operands: a, b, and the bias if there is one."""
    first = BIAS_OPERANDS.get(call.op)
    if first is None or call.names[0] is None:
        return None
    settings = dict(call.kwargs)
    if any(settings.get(n, 1) != 1 for n in ("alpha", "beta")) or len(call.args) > first + 2:
        return None
    operands = list(call.args)
    if not all(isinstance(x, ViewArg) for x in operands):
        return None
    lay = layouts[call.names[0]]
    views = [*operands, ViewArg(call.names[0], lay.shape, lay.strides, lay.offset)]
    if len({layouts[v.tensor].dtype for v in views}) > 1 or lay.dtype not in MAX_FLOPS:
        return None
    if any(n.value is None for v in views for n in (*v.shape, *v.strides, v.offset)):
        return None
    a, b, out = operands[first], operands[first + 1], views[-1]
    sizes = [_value(n) for n in (*out.shape[-2:], a.shape[-1])]
    batch = _value(out.shape[0]) if len(out.shape) == 3 else 1
    m, n, k = sizes
    if not all((*sizes, batch)) or 2.0 * m * n * k * batch > MAX_FLOPS[lay.dtype]:
        return None
    right, left, result = (_side(v) for v in (b, a, out))
    if right is None or left is None or result is None or result.transposed:
        return None
    bias = operands[:first]
    if bias and not (len(bias[0].shape) == 1 and _value(bias[0].strides[0]) == 1 and n > 1):
        return None
    if bias and _value(bias[0].shape[0]) != n:
        return None
    activation = (
        "gelu" if settings.get("use_gelu") else "relu" if call.op == ADDMM_ACTIVATION else ""
    )
    product = Product(m, n, k, batch, lay.dtype, right, left, result, bool(bias), activation)
    return product, [a, b, *bias]


def _value(n: Index) -> int:
    assert n.value is not None
    return n.value


def _side(v: ViewArg) -> Side | None:
    """How a matrix of rows lies in memory, seen as columns. None where neither of its two last
    dimensions is contiguous."""
    rows, columns = (_value(n) for n in v.shape[-2:])
    down, along = (_value(s) for s in v.strides[-2:])
    batch = _value(v.strides[0]) if len(v.shape) == 3 else 0
    if (along == 1 or columns == 1) and (down >= columns or rows == 1):
        return Side(False, max(down, columns) if rows > 1 else columns, batch)
    if (down == 1 or rows == 1) and (along >= rows or columns == 1):
        return Side(True, max(along, rows) if columns > 1 else rows, batch)
    return None


__all__ = ["Product", "Side", "product_of"]
