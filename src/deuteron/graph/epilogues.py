"""Activations that the library applies where it adds the bias of a matrix product, on GPUs; biases
that it does not add.

In: an ATen graph with fake values. Out: the same, in place, where a linear layer whose result only
an activation reads is one call. The library's product has the sum at hand in f32: ReLU gives the
same bits, GELU (by tanh) is that of the sum before it is rounded. H200, bf16, us: 8192x480 by
480x1024 and ReLU 23.7, at once 16.9; 128x768 by 768x3072 and GELU 6.3, at once 5.0. GELU where
rows begin between multiples of 16 bytes stays behind: 4093x333 by 333x517 38, at once 96.

Biases of f32 are added by what reads the sum, where that is generated: with a bias the library has
no choice of its faster products. H200, us: 392x3072 by 3072x768 98, without 56; 1568x3072 by
3072x768 251 and 178; 512x768 by 768x768 32 and 22; 15 products of models, geometric mean, 102, 92.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from deuteron.base.record import Record
from deuteron.graph import ops
from deuteron.graph.copies import read_by
from deuteron.graph.edit import Editor
from deuteron.graph.strides import as_was

aten = torch.ops.aten
PLAIN_VIEWS = (aten.view.default, aten._unsafe_view.default)
HALF_DTYPES = (torch.float16, torch.bfloat16)
ALIGNED = 16  # bytes that the library reads at once


def join_activations(gm: fx.GraphModule, record: Record) -> int:
    """Activations behind products become part of the library call. Returns the number of
    activations that went."""
    linears = [n for n in gm.graph.nodes if _linear(n) is not None]
    if not linears:
        return 0
    editor = Editor(gm)
    for node in linears:
        linear = _linear(node)
        assert linear is not None
        with editor.before(linear):
            gelu = {"use_gelu": True} if node.target is aten.gelu.default else {}
            new = editor.call(aten._addmm_activation.default, *linear.args, like=node, **gelu)
            new = as_was(editor, new, linear)
        editor.replace(linear, new)
        editor.replace(node, node.all_input_nodes[0])
        record.add(
            "decision",
            subject="epilogue",
            accepted=True,
            reason="the library applies it where it adds the bias",
            detail="GELU" if gelu else "ReLU",
            first=new.name,
            second="",
            bytes=0,
            us=0.0,
        )
    return len(linears)


def part_biases(gm: fx.GraphModule, record: Record) -> int:
    """Biases of f32 are added by readers. Returns their number."""
    linears = [n for n in gm.graph.nodes if _parted(n)]
    editor = Editor(gm)
    for node in linears:
        bias, a, b = node.args
        with editor.before(node):
            product = editor.call(aten.mm.default, a, b, like=node)
            new = editor.call(aten.add.Tensor, product, bias, like=node)
        editor.replace(node, new)
    return len(linears)


def _parted(node: fx.Node) -> bool:
    """Whether only generated code reads a linear layer of f32."""
    if node.target is not aten.addmm.default or node.kwargs:
        return False
    bias, out = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if not _of_gpu(out) or out.dtype != torch.float32 or bias.dim() != 1:
        return False
    return all(map(ops.is_generated, read_by(node)))


def _linear(node: fx.Node) -> fx.Node | None:
    """The linear layer whose result only this activation reads, if the library runs both in one
    call."""
    gelu = node.target is aten.gelu.default
    if not gelu and node.target is not aten.relu.default:
        return None
    if gelu and node.kwargs.get("approximate", "none") != "tanh":
        return None
    x = node.all_input_nodes[0]
    while x.target in PLAIN_VIEWS and len(x.users) == 1:
        x = x.all_input_nodes[0]
    if x.target is not aten.addmm.default or len(x.users) > 1:
        return None
    if any(x.kwargs.get(n, 1) != 1 for n in ("alpha", "beta")) or len(x.args) != 3:
        return None
    bias, a, b = (n.meta["val"] for n in x.args)  # type: ignore[union-attr]
    out = x.meta["val"]
    dtypes = HALF_DTYPES if gelu else (*HALF_DTYPES, torch.float32)
    if not _of_gpu(out) or out.dtype not in dtypes or out.dtype != node.meta["val"].dtype:
        return None
    sizes = (*bias.shape, *a.shape, *b.shape)
    # What ATen asks for, before it gives the library the bias.
    whole = all(type(n) is int and n > 1 for n in sizes) and bias.shape == b.shape[1:]
    if gelu and whole and any(n * out.element_size() % ALIGNED for n in b.shape):
        return None
    return x if whole and bias.is_contiguous() and out.is_contiguous() else None


def _of_gpu(x: Any) -> bool:
    return bool(x.device.type == "cuda" and not torch.version.hip)


__all__ = ["join_activations", "part_biases"]
