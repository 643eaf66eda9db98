"""Networks of the suites `models` and `launch`, as their papers describe them, in plain torch.nn.

Each returns a loss where it is trained, so that a step is one forward and one backward; optimizers
are left out. `Small` sizes are for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deuteron.tools.models import Gpt


class WithLoss(nn.Module):
    """A network and its loss: the first `split` inputs go to the network, the rest to the loss."""

    def __init__(self, net: nn.Module, loss: Callable[..., Tensor], split: int = 1) -> None:
        super().__init__()
        self.net, self.loss, self.split = net, loss, split

    def forward(self, *args: Tensor) -> Tensor:
        return self.loss(self.net(*args[: self.split]), *args[self.split :])


def classes(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, -2), target.flatten())


def squares(out: Tensor) -> Tensor:
    return out.float().square().mean()


def gpt2(large: bool, train: bool) -> nn.Module:
    net = Gpt(50257, 768, 12, 12, 1024) if large else Gpt(2000, 384, 6, 6, 256)
    return WithLoss(net, classes) if train else net


# ------------------------------------------------------------------------------------------ Llama


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return (wide * scale).to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class LlamaBlock(nn.Module):
    """RMS norm, rotary grouped attention, SwiGLU: x[B, T, width]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, heads: int, groups: int, hidden: int, context: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        kv = groups * self.size
        self.q, self.k, self.v = (nn.Linear(width, n, bias=False) for n in (width, kv, kv))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        rate = 10000.0 ** (-torch.arange(0, self.size, 2) / self.size)
        angle = torch.outer(torch.arange(context), rate).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        h = self.norm1(x)
        q = self.q(h).view(b, t, self.heads, self.size).transpose(1, 2)
        k, v = (p(h).view(b, t, self.groups, self.size).transpose(1, 2) for p in (self.k, self.v))
        cos, sin = self.cos[:t], self.sin[:t]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (a.repeat_interleave(self.heads // self.groups, 1) for a in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def llama(large: bool) -> nn.Module:
    block = LlamaBlock(4096, 32, 8, 14336, 2048) if large else LlamaBlock(256, 8, 4, 704, 256)
    return WithLoss(block, squares)


# ------------------------------------------------------------------------------------ convolutions


def conv_norm(before: int, after: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after)
    )


class Residual(nn.Module):
    """A basic block (two 3x3), or with `narrow` a bottleneck of that many channels."""

    def __init__(self, before: int, after: int, stride: int, narrow: int = 0) -> None:
        super().__init__()
        if narrow:
            self.convs = nn.ModuleList(
                (
                    conv_norm(before, narrow, 1),
                    conv_norm(narrow, narrow, 3, stride),
                    conv_norm(narrow, after, 1),
                )
            )
        else:
            self.convs = nn.ModuleList(
                (conv_norm(before, after, 3, stride), conv_norm(after, after, 3))
            )
        same = stride == 1 and before == after
        self.skip = nn.Identity() if same else conv_norm(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for conv in self.convs[:-1]:
            y = F.relu(conv(y))
        return F.relu(self.convs[-1](y) + self.skip(x))


class ResNet(nn.Module):
    """ResNet of He et al.: image[B, 3, H, W] -> logits[B, 1000]."""

    def __init__(self, depths: Sequence[int], bottleneck: bool, width: int = 64) -> None:
        super().__init__()
        self.first = conv_norm(3, width, 7, 2)
        blocks, before = [], width
        for stage, depth in enumerate(depths):
            inner = width << stage
            after = 4 * inner if bottleneck else inner
            for k in range(depth):
                stride = 2 if stage and not k else 1
                blocks.append(Residual(before, after, stride, inner if bottleneck else 0))
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(image)), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


def resnet(depths: Sequence[int], bottleneck: bool, width: int) -> nn.Module:
    net = WithLoss(ResNet(depths, bottleneck, width), classes)
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class DoubleConv(nn.Module):
    """Two 3x3 convolutions with group norm and SiLU."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(n, after, 3, padding=1, bias=False) for n in (before, after)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(8, after) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms):
            x = F.silu(norm(conv(x)))
        return x


class UNet(nn.Module):
    """image[B, 3, H, W] -> [B, 3, H, W], four levels of skips."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width << k for k in range(4)]
        self.down = nn.ModuleList(
            DoubleConv(before, after) for before, after in zip([3, *sizes], sizes)
        )
        self.up = nn.ModuleList(
            DoubleConv(sizes[k] + sizes[k - 1], sizes[k - 1]) for k in (3, 2, 1)
        )
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for k, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if k else x)
            skips.append(x)
        for block, skip in zip(self.up, reversed(skips[:-1])):
            x = block(torch.cat([F.interpolate(x, scale_factor=2, mode="nearest"), skip], 1))
        return self.out(x)


# ------------------------------------------------------------------------------------------- others


class ViT(nn.Module):
    """Vision transformer: image[B, 3, S, S] -> logits[B, 1000]."""

    def __init__(self, size: int, patch: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.place = nn.Parameter(0.02 * torch.randn((size // patch) ** 2 + 1, width))
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def vit(large: bool) -> nn.Module:
    net = ViT(224, 16, 768, 12, 12) if large else ViT(64, 16, 192, 3, 4)
    return WithLoss(net, classes)


class Dlrm(nn.Module):
    """Recommendation: dense features through an MLP, sparse ones through tables, all pairwise
    products, another MLP. dense[B, 13], sparse[B, tables] -> [B]."""

    def __init__(self, tables: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = mlp(13, hidden, hidden // 2, width)
        pairs = (tables + 1) * tables // 2
        self.top = mlp(pairs + width, 2 * hidden, hidden, 1)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = F.relu(self.bottom(dense))
        features = [x, *(t(sparse[:, k]) for k, t in enumerate(self.tables))]
        stacked = torch.stack(features, 1)
        products = stacked @ stacked.transpose(1, 2)
        pairs: Tensor = self.pairs
        return self.top(torch.cat([x, products[:, pairs[0], pairs[1]]], 1))[:, 0]


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def clicks(logits: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits.float(), target.float())


def dlrm(large: bool) -> nn.Module:
    net = Dlrm(26, 100_000, 128, 512) if large else Dlrm(8, 2000, 32, 64)
    return WithLoss(net, clicks, 2)


def small_blocks(width: int = 256, count: int = 12) -> nn.Module:
    """Blocks of layer norm, linear, GELU: at a small batch all cost is that of the calls."""
    layers: list[nn.Module] = []
    for _ in range(count):
        layers += [nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers)
