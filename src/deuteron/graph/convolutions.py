"""Convolutions on GPUs that the libraries are slow at, as others.

In: an ATen graph with fake values. Out: the same, in place, where in half precision

* convolutions whose windows lie side by side (the patches of an image) are matrix products;
* strided ones of few channels, with their gradients of weights, run on an image of which every
  block of stride x stride pixels is one pixel of more channels.

What rearranges images and weights is ATen's operators, which fuse into one kernel; forward and
backward rearrange alike, so that common subexpressions merge. Sums have the same terms, beside
zeros. Results lie as they are made, channels last, and so does what follows from them; what the
graph returns keeps the strides that it was traced with. Idempotent: what it makes is not rewritten
again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from deuteron.base.record import Record
from deuteron.graph.edit import Editor, at
from deuteron.graph.strides import Relayout, order_of, strides_of

aten = torch.ops.aten
FORWARD, BACKWARD = aten.convolution.default, aten.convolution_backward.default
# FLOPs of a convolution below which launches decide, of which there are about as many either way.
MIN_FLOPS = 1 << 27
# Channels of half precision come to tensor cores in eights; the library pads to that as well.
CHANNEL_MULTIPLE = 8
# Channels of a regrouped image. H200, cuDNN, 7x7 of stride 2 on bf16[64, 3, 224, 224] to 64
# channels: 394 us, 230 for the weights' gradient; memory allows 30.
MAX_REGROUPED_CHANNELS = 16


@dataclass(frozen=True)
class Convolution:
    """What a node asks for; ``mask`` says which gradients, None that it is a forward."""

    node: fx.Node
    dy: fx.Node | None
    x: fx.Node
    w: fx.Node
    bias: fx.Node | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    mask: tuple[bool, ...] | None

    @property
    def kernel(self) -> tuple[int, ...]:
        return _shape(self.w)[2:]

    @property
    def out(self) -> tuple[int, ...]:
        """Sizes of the result in space."""
        sizes = zip(_shape(self.x)[2:], self.kernel, self.stride, self.padding, strict=True)
        return tuple((n + 2 * p - k) // s + 1 for n, k, s, p in sizes)

    @property
    def flops(self) -> int:
        return 2 * _shape(self.x)[0] * math.prod(self.out) * math.prod(_shape(self.w))

    @property
    def channels_last(self) -> bool:
        """Whether an image's channels lie side by side; so do they then in what is made of it."""
        strides: Any = strides_of(self.x)
        return _shape(self.x)[1] > 1 and bool(strides[1] < strides[-1])


def rewrite_convolutions(gm: fx.GraphModule, record: Record) -> int:
    """Convolutions become other library calls, where those are faster. Returns the number of
    convolutions changed."""
    if not any(n.target in (FORWARD, BACKWARD) for n in gm.graph.nodes):
        return 0
    editor = Editor(gm)
    relayout = Relayout(editor)
    count = 0
    for node in list(gm.graph.nodes):
        with at(node):
            c = convolution(node)
            if c is None or not (reason := rewritten(editor, c, relayout)):
                relayout.follow(node)
                continue
        count += 1
        sizes = " by ".join("x".join(map(str, _shape(t))) for t in (c.x, c.w))
        record.add(
            "decision", subject="convolution", accepted=True, reason=reason, detail=sizes,
            first=node.name, second="", bytes=0, us=0.0,
        )  # fmt: skip
    relayout.finish()
    if count:
        editor.view_again()  # also of what lies as before
    return count


def rewritten(editor: Editor, c: Convolution, relayout: Relayout) -> str:
    """Puts what pays into the place of a node. Returns why, or nothing."""
    with editor.before(c.node):
        if pays_as_product(c):
            made, reason = Writer(editor, c).product(), "windows side by side: a product"
        elif pays_regrouped(c):
            made, reason = Writer(editor, c).regrouped(), "few channels: blocks are pixels"
        else:
            return ""
    for old in _results(c.node):
        new = made[0 if old is c.node else int(old.args[1])]  # type: ignore[arg-type]
        assert new is not None
        relayout.replace(old, new)
    if c.mask is not None:
        editor.graph.erase_node(c.node)
    return reason


# -- which -----------------------------------------------------------------------------------------
def convolution(node: fx.Node) -> Convolution | None:
    """What a node computes, where that is a plain convolution (one group, windows without holes) of
    known sizes that are not 0."""
    bias: Any = None
    mask: Any = None
    if node.kwargs or node.target not in (FORWARD, BACKWARD):
        return None
    if node.target is FORWARD:
        x, w, bias, stride, padding, dilation, transposed, _, groups = node.args
        dy = None
    else:
        dy, x, w, _, stride, padding, dilation, transposed, _, groups, mask = node.args
        asked = [u.args[1] for u in node.users if u.target is operator.getitem]
        if not asked or len(asked) != len(node.users) or not all(mask[k] for k in asked):  # type: ignore[index]
            return None
        mask = tuple(k in asked for k in range(3))
    operands: Any = [n for n in (x, w, dy, bias) if n is not None]
    if not all(_plain(n) for n in operands):
        return None
    rank = len(_shape(operands[0])) - 2
    if any(order_of(strides_of(n), n.meta["val"]) is None for n in _results(node)):
        return None
    lists: Any = stride, padding, dilation
    if transposed or groups != 1 or any(len(n) != rank for n in lists):
        return None
    if not all(type(n) is int for ns in lists for n in ns) or any(d != 1 for d in lists[2]):
        return None
    return Convolution(node, dy, x, w, bias, tuple(lists[0]), tuple(lists[1]), mask)  # type: ignore[arg-type]


def _results(node: fx.Node) -> list[fx.Node]:
    return [node] if node.target is FORWARD else list(node.users)


def _plain(node: fx.Node) -> bool:
    t = node.meta.get("val")
    if not isinstance(t, Tensor) or t.layout != torch.strided or not on_tensor_cores(t):
        return False
    return all(type(n) is int and n > 0 for n in (*t.shape, t.numel()))


def on_tensor_cores(t: Tensor) -> bool:
    """Whether tensor cores multiply numbers of this kind."""
    return t.device.type == "cuda" and t.dtype in (torch.float16, torch.bfloat16)


def pays_as_product(c: Convolution) -> bool:
    """Windows side by side that cover the image. H200, 16x16 on bf16[64, 3, 224, 224] to 768
    channels: cuDNN 152 us and 96 for changes of layout, the gradient of the weights 394 and 77; the
    product 22 and its patches 10."""
    sizes = _shape(c.x)[2:]
    return (
        c.kernel == c.stride
        and math.prod(c.kernel) > 1
        and not any(c.padding)
        and not any(n % s for n, s in zip(sizes, c.stride, strict=True))
        and c.flops >= MIN_FLOPS
    )


def pays_regrouped(c: Convolution) -> bool:
    """A strided convolution of images with so few channels that the library pads them, where
    windows of blocks have fewer numbers than it multiplies then. The image's gradient would have to
    be taken apart again: its convolution stays as it is."""
    (_, channels, *kernel), s = _shape(c.w), c.stride[0]
    if len(kernel) != 2 or c.stride != (s, s) or s < 2 or (c.mask is not None and c.mask[0]):
        return False
    grouped = channels * s * s
    windows = math.prod(-(-k // s) for k in kernel) * _up(grouped)
    return (
        grouped <= MAX_REGROUPED_CHANNELS
        and windows < math.prod(kernel) * _up(channels)
        and c.flops >= MIN_FLOPS
    )


# -- what is written instead -----------------------------------------------------------------------
class Writer:
    """Inserts what takes a convolution's place."""

    def __init__(self, editor: Editor, c: Convolution) -> None:
        self.editor, self.c = editor, c

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.editor.call(target, *args, like=self.c.node, **kwargs)

    def product(self) -> Sequence[fx.Node | None]:
        """x[B, C, n*s] as patches[B*n, C*s] by weights[C*s, O], or the gradients of that."""
        c, (many, channels, *kernel) = self.c, _shape(self.c.w)
        depth = channels * math.prod(kernel)
        if c.dy is None:
            target = aten.mm.default if c.bias is None else aten.addmm.default
            w = self.permute(self.rows(c.w, depth), [1, 0])
            y = self.call(target, *([c.bias] if c.bias else []), self.rows(c.x, depth), w)
            return [self.first(self.view(y, [-1, *c.out, many]))]
        dx = dw = None
        assert c.mask is not None
        dy = self.view(self.dense(self.last(c.dy)), [-1, many])
        if c.mask[0]:
            dx = self.call(aten.mm.default, dy, self.rows(c.w, depth))
            dx = self.unblocked(self.view(dx, [-1, *c.out, depth]))
        if c.mask[1]:
            dw = self.call(aten.mm.default, self.permute(dy, [1, 0]), self.rows(c.x, depth))
            dw = self.unblocked(self.view(dw, [-1, *[1] * len(kernel), depth]))
        return [dx, dw, self.over_space() if c.mask[2] else None]

    def regrouped(self) -> Sequence[fx.Node | None]:
        """The convolution of stride 1 over blocks of s x s pixels; windows end with zeros where
        they are no multiples of s."""
        c, s, (channels, *kernel) = self.c, self.c.stride[0], _shape(self.c.w)[1:]
        ends = [-k % s for k in kernel]
        sizes = zip(_shape(c.x)[2:], c.padding, c.out, kernel, ends, strict=True)
        sides = [(p, (m - 1) * s + k + e - n - p) for n, p, m, k, e in sizes]
        settings = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        x, w = self.pixels(c.x, sides), self.pixels(c.w, [(0, e) for e in ends])
        if c.dy is None:
            return [self.call(FORWARD, x, w, c.bias, *settings)]
        dw = None
        assert c.mask is not None
        if c.mask[1]:
            dy = self.first(self.dense(self.last(c.dy)))
            both = self.call(BACKWARD, dy, x, w, None, *settings, [False, True, False])
            dw = self.last(self.call(operator.getitem, both, 1))
            dw = self.unblocked(self.call(aten.slice.Tensor, dw, 3, 0, channels * s * s))
            for d, k in enumerate(kernel):
                dw = self.call(aten.slice.Tensor, dw, 2 + d, 0, k)
        return [None, dw, self.over_space() if c.mask[2] else None]

    def over_space(self) -> fx.Node:
        """The gradient of the bias."""
        assert self.c.dy is not None
        dims = [0, *range(2, len(_shape(self.c.dy)))]
        return self.call(aten.sum.dim_IntList, self.c.dy, dims)

    def pixels(self, t: fx.Node, sides: Sequence[tuple[int, int]]) -> fx.Node:
        """Blocks as pixels of a multiple of eight channels, which lie side by side; zeros in front
        of and behind every dimension of space, or cut where that is less than none."""
        if any(map(any, sides)):
            pad = [n for side in reversed(sides) for n in side]
            t = self.call(aten.constant_pad_nd.default, t, pad, 0)
        t = self.blocks(t, last=False)
        channels, rank = _shape(t)[1], len(sides)
        if missing := _up(channels) - channels:
            pad = [0, 0] * rank + [0, missing]
            t = self.call(aten.constant_pad_nd.default, t, pad, 0)
        return self.call(aten.clone.default, t, memory_format=torch.channels_last)

    def rows(self, t: fx.Node, depth: int) -> fx.Node:
        return self.view(self.blocks(t), [-1, depth])

    def blocks(self, t: fx.Node, last: bool = True) -> fx.Node:
        """t[B, C, n*s] as a dense [B, n, C*s], or, not `last`, [B, C*s, n]; s*C for C*s where an
        image's channels lie side by side: so runs of memory stay."""
        s, (batch, channels, *sizes) = self.c.stride, _shape(t)
        counts = [n // k for n, k in zip(sizes, s, strict=True)]
        split = [batch, channels, *(n for pair in zip(counts, s, strict=True) for n in pair)]
        outer, inner = range(2, len(split), 2), range(3, len(split), 2)
        block = [*inner, 1] if self.c.channels_last else [1, *inner]
        t = self.permute(self.view(t, split), [0, *outer, *block] if last else [0, *block, *outer])
        depth = channels * math.prod(s)
        return self.view(
            self.dense(t), [batch, *counts, depth] if last else [batch, depth, *counts]
        )

    def unblocked(self, t: fx.Node) -> fx.Node:
        """The reverse."""
        s, (batch, *counts, depth) = self.c.stride, _shape(t)
        rank, channels, last = len(s), depth // math.prod(s), self.c.channels_last
        begin = 1 + rank if last else 2 + rank
        pairs = [d for k in range(rank) for d in (1 + k, begin + k)]
        order = [0, *pairs, 1 + 2 * rank] if last else [0, 1 + rank, *pairs]
        sizes = [n * k for n, k in zip(counts, s, strict=True)]
        t = self.view(t, [batch, *counts, *((*s, channels) if last else (channels, *s))])
        t = self.dense(self.permute(t, order))
        if last:
            return self.first(self.view(t, [batch, *sizes, channels]))
        return self.view(t, [batch, channels, *sizes])

    def first(self, t: fx.Node) -> fx.Node:
        """[B, n, C] as [B, C, n]; memory stays."""
        rank = len(_shape(t))
        return self.permute(t, [0, rank - 1, *range(1, rank - 1)])

    def last(self, t: fx.Node) -> fx.Node:
        """[B, C, n] as [B, n, C]; memory stays."""
        return self.permute(t, [0, *range(2, len(_shape(t))), 1])

    def dense(self, t: fx.Node) -> fx.Node:
        if t.meta["val"].is_contiguous():
            return t
        return self.call(aten.clone.default, t, memory_format=torch.contiguous_format)

    def view(self, t: fx.Node, shape: Sequence[int]) -> fx.Node:
        return self.call(aten.view.default, t, shape)

    def permute(self, t: fx.Node, order: Sequence[int]) -> fx.Node:
        return self.call(aten.permute.default, t, order)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _up(n: int) -> int:
    """The next multiple of eight."""
    return n + -n % CHANNEL_MULTIPLE


__all__ = ["rewrite_convolutions"]
