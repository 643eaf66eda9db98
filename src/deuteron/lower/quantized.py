"""Which tensors are quantized, of which torch's fake kernels say that they are plain f32.

In: a graph, node by node. Out: whether a node's result holds packed numbers with a scale of their
own: nothing but the library may read such a tensor. That of a call which is told a quantized dtype,
or is of torch's quantized operators, is one; so is what ATen computes of one, as far as it is a
tensor of floats, but for `dequantize`. Where this is wrong, the comparison of what the call
returned with what it was traced as (`codegen.results`) ends the program.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

QUANTIZED_NAMES = ("quint8", "qint8", "qint32", "quint4x2", "quint2x4")
QUANTIZED_DTYPES = tuple(getattr(torch, n) for n in QUANTIZED_NAMES if hasattr(torch, n))
# The layout of such a tensor in the IR says so.
QUANTIZED_LAYOUT = "quantized"


def quantized(node: fx.Node, known: set[fx.Node]) -> bool:
    """Whether some result of the node is quantized; `known`: those of earlier nodes that are."""
    target = node.target
    if node.op != "call_function":
        return False
    given = any(n in known for n in node.all_input_nodes)
    if target is operator.getitem:
        return given and floating(node.meta.get("val"))
    if not isinstance(target, torch._ops.OpOverload):
        return given
    schema = target._schema.name
    if schema in ("aten::dequantize", "aten::fake_quantize_per_tensor_affine"):
        return False
    names_dtype = any(
        x in QUANTIZED_DTYPES
        for x in tree_leaves((node.args, node.kwargs))
        if type(x) is torch.dtype
    )
    makes = names_dtype or given or "_quantized_tensor" in schema
    return makes and any(floating(v) for v in tree_leaves(node.meta.get("val")))


def floating(x: Any) -> bool:
    return any(isinstance(t, torch.Tensor) and t.is_floating_point() for t in tree_leaves(x))


__all__ = ["QUANTIZED_LAYOUT", "floating", "quantized"]
