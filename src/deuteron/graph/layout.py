"""Channels-last memory for graphs of convolutions.

In: an ATen graph with fake values. Out: the same, in place, with the inputs of two-dimensional
convolutions in channels-last order, and with the strides that follow from that downstream
(`strides.Relayout`). The libraries' convolutions work in that order and otherwise convert before
and after each (H200, a residual network in bf16: half of the step). What the graph returns keeps
the strides that it was traced with.

On a CPU the library packs a contiguous weight for contiguous images in one step, for others it
first copies the weight to channels-last order, and copies its gradient back. Where weights are
larger than images (`heavy`), that costs more than images gain: these stay, or become, contiguous.

On a GPU the order decides who runs a convolution of each channel by itself: torch's own kernels
contiguous ones, the library channels-last ones. Where the library is slow at these, images stay as
they were traced (`wanted_order`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from deuteron.base.record import Record
from deuteron.graph.edit import Editor, at
from deuteron.graph.strides import Relayout

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
# With fewer channels a convolution is as fast either way, and the conversion is not free.
MIN_CHANNELS = 16
# Bytes of a weight above which a CPU's copies of it go beyond its second cache (`heavy`).
HEAVY_WEIGHT_BYTES = 1 << 20
MOST_KEPT_BYTES = 1 << 17  # of a piece that is freed, which the C library keeps by default
# Input channels with which no weight gradient writes out of bounds (see `_corrupts`).
SAFE_CHANNELS = 16
# Windows of a channel by itself for which the library has fast kernels (`wanted_order`).
MAX_OWN_WINDOW = 7


def channels_last(gm: fx.GraphModule, record: Record) -> int:
    """Convolutions and what is around them lie channels last, where that pays. Returns the number
    of convolutions whose input changed."""
    convolutions = [n for n in gm.graph.nodes if n.target in CONVOLUTIONS and _plain(n)]
    orders = {n: wanted_order(n) for n in convolutions}
    light = [n for n, order in orders.items() if order is torch.channels_last]
    if not light or not _worth(light) or any(map(_corrupts, light)):
        return 0
    editor = Editor(gm)
    relayout = Relayout(editor)
    count = 0
    for node in list(gm.graph.nodes):
        with at(node):
            if node in orders:
                done = _convert(editor, relayout, node, orders[node])
                count += done and orders[node] is torch.channels_last
            relayout.follow(node)
    relayout.finish()
    if count:
        record.add(
            "decision", subject="layout", accepted=True, reason="channels last",
            detail=f"{count} convolutions", first=convolutions[0].name, second="", bytes=0, us=0.0,
        )  # fmt: skip
    return count


def _tensors(node: fx.Node) -> list[fx.Node]:
    """The activations that a convolution reads: its input, and the gradient of its result."""
    count = 2 if node.target is aten.convolution_backward.default else 1
    return [a for a in node.args[:count] if isinstance(a, fx.Node)]


def _plain(node: fx.Node) -> bool:
    """A two-dimensional convolution of known sizes that the library converts for."""
    fakes = [a.meta.get("val") for a in _tensors(node)]
    return all(
        isinstance(t, torch.Tensor)
        and t.dim() == 4
        and all(type(n) is int and n > 0 for n in t.shape)
        and (t.device.type == "cpu" or t.itemsize == 2)
        for t in fakes
    )


def _from_image(node: fx.Node) -> Any:
    """The arguments of a convolution, or of its backward, from the image on."""
    return node.args[int(node.target is aten.convolution_backward.default) :]


def wanted_order(node: fx.Node) -> torch.memory_format:
    """The order in which a convolution is to read its images. Each channel by itself: H200,
    bf16[32, 256, 56, 56], forward and backward in us: windows of 3, 5, 7, 9 contiguous 245 and 782,
    442 and 1405, 890 and 2913, 1513 and 4512; channels-last 51 and 152, 94 and 277, 178 and 605,
    8291 and 6043 (stride 2 and other sizes alike). Of other than square windows without holes
    nothing is known."""
    x, weight, _, _, _, dilation, transposed, _, groups = _from_image(node)[:9]
    tensors = x.meta["val"], weight.meta["val"]
    many, _, high, wide = tensors[1].shape
    if tensors[0].device.type == "cpu" or transposed or not groups == tensors[0].shape[1] > 1:
        last = not heavy(node)
    elif many == groups and high == wide <= MAX_OWN_WINDOW and set(dilation) == {1}:
        last = True
    else:
        last = torch.channels_last in map(torch._prims_common.suggest_memory_format, tensors)
    return torch.channels_last if last else torch.contiguous_format


def heavy(node: fx.Node) -> bool:
    """Whether the copies of a weight cost more than the images gain. One core with AVX-512, f32,
    images of 14 x 14, a 3 x 3 window: 256 channels to 512 contiguous 2.8 ms and 5.5 backward,
    channels-last 3.1 and 6.2; of 7 x 7, 512 channels 7.8 and 13.7, 10.4 and 23.6; eight images of
    those 12.9 and 28.8, 14.3 and 45.0. Of 28 x 28, 128 channels 1.21 and 2.34, 1.11 and 2.38; of
    56 x 56, 64 channels 1.47 and 2.55, 1.04 and 2.52. A 1 x 1 window's weight lies alike in both
    orders. Where each channel is by itself the weight's gradient takes f32 of its size again and
    again, of which the C library gives 128 KiB and more back to the system each time, unless the
    process has freed larger pieces: 5 x 5 windows, 1280 channels 1.7 ms, 1344 12.6 or 1.8,
    contiguous 1.9. Windows of 3 x 3 are five times as fast channels-last otherwise."""
    weight, images = _from_image(node)[1].meta["val"], [a.meta["val"] for a in _tensors(node)]
    alone = _from_image(node)[8] == weight.shape[0] > 1 and min(weight.shape[2:]) > 3
    if weight.device.type == "cpu" and alone and 4 * weight.numel() > MOST_KEPT_BYTES:
        return node.target is aten.convolution_backward.default
    if weight.device.type != "cpu" or not weight.is_contiguous():
        return False
    if weight.is_contiguous(memory_format=torch.channels_last):
        return False
    images += [node.meta["val"]] * (node.target is aten.convolution.default)
    return weight.nbytes >= HEAVY_WEIGHT_BYTES and weight.numel() > sum(t.numel() for t in images)


def _corrupts(node: fx.Node) -> bool:
    """The weight gradient of strided 1x1 convolutions of few channels writes out of bounds on a CPU
    in this order (torch 2.13, eager too: 4 and 8 channels crash, 16 and more do not)."""
    _, weight, _, stride, *_ = _from_image(node)
    _, channels, *kernel = weight.meta["val"].shape
    if weight.meta["val"].device.type != "cpu" or channels >= SAFE_CHANNELS:
        return False
    return all(k == 1 for k in kernel) and any(s != 1 for s in stride)


def _work(node: fx.Node) -> float:
    x, weight = (n.meta["val"] for n in _from_image(node)[:2])
    return math.prod(weight.shape) * x.shape[2] * x.shape[3]


def _worth(convolutions: list[fx.Node]) -> bool:
    """Whether most of the work is done on many channels."""
    wide = [n for n in convolutions if _tensors(n)[0].meta["val"].shape[1] >= MIN_CHANNELS]
    return sum(map(_work, wide)) > 0.5 * sum(map(_work, convolutions))


def _convert(editor: Editor, relayout: Relayout, node: fx.Node, order: torch.memory_format) -> bool:
    """Lets a convolution read its activations in an order; returns whether any lay otherwise."""
    done = False
    for k, a in enumerate(_tensors(node)):
        if a.meta["val"].is_contiguous(memory_format=order):
            continue
        with editor.before(node):
            new = editor.call(aten.clone.default, a, like=node, memory_format=order)
        relayout.beside(new, a)
        node.update_arg(k, new)
        done = True
    return done


__all__ = ["channels_last"]
