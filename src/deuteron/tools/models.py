"""Two small models that the demo trains and the tests compile: a GPT and a residual network.

Written as their users write them: plain `torch.nn`, nothing arranged for a compiler.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(c, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.out(mixed.transpose(1, 2).reshape(b, t, c))
        x = x + F.dropout(mixed, self.dropout, self.training)
        hidden = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(hidden, self.dropout, self.training)


class Gpt(nn.Module):
    """ids[B, T] -> logits[B, T, vocab]; T at most `context`."""

    def __init__(
        self,
        vocab: int,
        width: int,
        heads: int,
        layers: int,
        context: int,
        dropout: float = 0.0,
        deviation: float = 0.02,
    ) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=deviation)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ResidualBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.skip = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.skip(x))


class ResidualNet(nn.Module):
    """image[B, 3, H, W] -> logits[B, 10]."""

    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        w = width
        self.first = nn.Conv2d(3, w, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(w)
        self.blocks = nn.Sequential(
            ResidualBlock(w, w, 1), ResidualBlock(w, 2 * w, 2), ResidualBlock(2 * w, 4 * w, 2)
        )
        self.head = nn.Linear(4 * w, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.first(image))))
        return self.head(x.mean((2, 3)))
