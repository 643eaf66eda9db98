"""The models that the tests and the GPU script run: small by default, realistic with `large=True`.

Each `Case` builds a module (float32, CPU, seeded), makes its inputs (seeded; batch and length may
be given), and has a loss over the module's output. `Step` is module and loss as one module that
returns the loss alone, as a user's training step does. No model's result depends on ties, so that
float64 is a reference for all dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deuteron.tools.models import Gpt, ResidualNet

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """`inputs(large, batch, length)`: the first `split` go to the module, the rest to the loss."""

    name: str
    build: Callable[[bool], nn.Module]
    inputs: Callable[[bool, int | None, int | None], Inputs]
    loss: Callable[..., Tensor]
    split: int = 1
    random: bool = False  # dropout: not comparable with eager number by number
    tags: frozenset[str] = field(default_factory=frozenset)

    def module(self, large: bool = False) -> nn.Module:
        torch.manual_seed(1234)
        return self.build(large)

    def step(self, large: bool = False) -> Step:
        return Step(self.module(large), self.loss, self.split)

    def make_inputs(
        self, large: bool = False, batch: int | None = None, length: int | None = None
    ) -> Inputs:
        torch.manual_seed(4321)
        return self.inputs(large, batch, length)


class Step(nn.Module):
    """Loss of a model on inputs: what a training step differentiates."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], split: int) -> None:
        super().__init__()
        self.model, self.loss, self.split = model, loss, split

    def forward(self, *args: Tensor) -> Tensor:
        return self.loss(self.model(*args[: self.split]), *args[self.split :])


def cast(tensors: Inputs, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Floating tensors to `dtype`; all to `device`."""
    return tuple(t.to(device, dtype if t.is_floating_point() else t.dtype) for t in tensors)


# -------------------------------------------------------------------------------------- BERT


class SentenceBert(nn.Module):
    """BERT through transformers and masked mean pooling, as sentence embeddings are made."""

    def __init__(self, large: bool) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        sizes = (
            dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12,
                 intermediate_size=1536, vocab_size=30522)
            if large
            else dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3,
                      intermediate_size=96, vocab_size=211)
        )  # fmt: skip
        config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return F.normalize(pooled, dim=1)


def bert_inputs(large: bool, batch: int | None, length: int | None) -> Inputs:
    b, t = batch or (64 if large else 4), length or (128 if large else 13)
    ids = torch.randint(0, 30522 if large else 211, (b, t))
    lengths = torch.randint(max(1, t // 2), t + 1, (b, 1))
    return ids, (torch.arange(t) < lengths).long()


def contrastive(embedding: Tensor) -> Tensor:
    """Pull neighbours in the batch together, push the rest apart."""
    return torch.logsumexp(embedding @ embedding.T * 20.0, dim=1).mean() - embedding.mean()


# --------------------------------------------------------------------------------------- GPT


def gpt(dropout: float) -> Callable[[bool], nn.Module]:
    def build(large: bool) -> nn.Module:
        if large:
            return Gpt(50257, 768, 12, 6, 1024, dropout)
        return Gpt(101, 48, 3, 2, 64, dropout, deviation=0.1)

    return build


def gpt_inputs(large: bool, batch: int | None, length: int | None) -> Inputs:
    b, t = batch or (8 if large else 3), length or (1024 if large else 17)
    ids = torch.randint(0, 50257 if large else 101, (b, t + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def next_token(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy in the logits' own precision, at least float32."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(wide), target.flatten())


# ------------------------------------------------------------------------------------- Llama


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (wide * scale).to(x.dtype) * self.weight


class LlamaBlock(nn.Module):
    """RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = nn.Linear(width, groups * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, c = x.shape
        y = self.norm1(x)
        q = rotate(self.q(y).view(b, t, self.heads, self.size).transpose(1, 2), cos, sin)
        k = rotate(self.k(y).view(b, t, self.groups, self.size).transpose(1, 2), cos, sin)
        v = self.v(y).view(b, t, self.groups, self.size).transpose(1, 2)
        k, v = (part.repeat_interleave(self.heads // self.groups, dim=1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(b, t, c))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    def __init__(self, large: bool) -> None:
        super().__init__()
        width, heads, groups, hidden, layers, context = (
            (2048, 16, 4, 5504, 4, 2048) if large else (48, 4, 2, 80, 2, 64)
        )
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, hidden) for _ in range(layers))
        self.norm = RmsNorm(width)
        half = width // heads // 2
        angle = torch.outer(
            torch.arange(context).float(), 10000.0 ** (-torch.arange(half).float() / half)
        )
        self.register_buffer("cos", angle.cos().repeat(1, 2))
        self.register_buffer("sin", angle.sin().repeat(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:t], self.sin[:t])
        return self.norm(x)


def llama_inputs(large: bool, batch: int | None, length: int | None) -> Inputs:
    b, t, c = batch or (4 if large else 2), length or (2048 if large else 19), 2048 if large else 48
    return (torch.randn(b, t, c),)


def energy(out: Tensor) -> Tensor:
    """A loss that weighs every element differently, so that a misplaced one shows."""
    wide = out.to(torch.promote_types(out.dtype, torch.float32)).flatten()
    weight = torch.cos(torch.arange(wide.shape[0], device=out.device, dtype=wide.dtype))
    return (wide * weight).sum() / math.sqrt(48.0) + wide.square().mean()


# --------------------------------------------------------------------------------------- ViT


class VitBlock(nn.Module):
    """Attention written out: the softmax is the compiler's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        weight = torch.softmax(q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5, dim=-1)
        x = x + self.out((weight @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    def __init__(self, large: bool) -> None:
        super().__init__()
        side, patch, width, heads, layers = (224, 16, 384, 6, 6) if large else (16, 4, 36, 3, 2)
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.place = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(VitBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1) + self.place
        return self.head(self.norm(self.blocks(x))[:, 0])


def image_inputs(large: bool, batch: int | None, length: int | None) -> Inputs:
    b, side = batch or (64 if large else 3), 224 if large else 16
    return torch.randn(b, 3, side, side), torch.randint(0, 10, (b,))


def classify(logits: Tensor, target: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), target)


# ------------------------------------------------------------------------------------- U-Net


class UnetBlock(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, before), nn.GroupNorm(4, after)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.conv2(F.silu(self.norm2(y))) + self.skip(x)


class Unet(nn.Module):
    def __init__(self, large: bool) -> None:
        super().__init__()
        w = 64 if large else 8
        self.first = nn.Conv2d(3, w, 3, padding=1)
        self.down = nn.ModuleList((UnetBlock(w, w), UnetBlock(w, 2 * w)))
        self.middle = UnetBlock(2 * w, 2 * w)
        self.up = nn.ModuleList((UnetBlock(4 * w, 2 * w), UnetBlock(3 * w, w)))
        self.last = nn.Conv2d(w, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat((x, kept.pop()), dim=1))
        return self.last(x)


def unet_inputs(large: bool, batch: int | None, length: int | None) -> Inputs:
    b, side = batch or (16 if large else 2), 64 if large else 16
    return torch.randn(b, 3, side, side), torch.randn(b, 3, side, side)


def squared(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out, target)


# ---------------------------------------------------------------------------------- recurrent


class LstmLoop(nn.Module):
    """An LSTM cell written out and unrolled over the steps of its input."""

    def __init__(self, large: bool) -> None:
        super().__init__()
        self.width = 512 if large else 24
        self.x = nn.Linear(self.width, 4 * self.width)
        self.h = nn.Linear(self.width, 4 * self.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], self.width)
        outs = []
        for step in x.unbind(1):
            i, f, g, o = (self.x(step) + self.h(h)).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outs.append(h)
        return torch.stack(outs, dim=1)


def lstm_inputs(large: bool, batch: int | None, length: int | None) -> Inputs:
    rows, steps, width = (256, 16, 512) if large else (5, 6, 24)
    return (torch.randn(batch or rows, steps, width),)


# -------------------------------------------------------------------------- mixture of experts


class Moe(nn.Module):
    """Top-2 routing with a capacity: tokens are scattered to experts' slots and gathered back."""

    def __init__(self, large: bool) -> None:
        super().__init__()
        self.experts, width, hidden = (16, 512, 1024) if large else (4, 24, 32)
        self.width = width
        self.router = nn.Linear(width, self.experts, bias=False)
        self.up = nn.Parameter(torch.randn(self.experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(self.experts, hidden, width) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        n, wide = tokens.shape[0], torch.promote_types(x.dtype, torch.float32)
        # Routed at full width: a choice that depends on rounding has no reference.
        score = torch.softmax(tokens.to(wide) @ self.router.weight.to(wide).T, dim=-1)
        gate, expert = score.topk(2, dim=-1)
        gate = gate / gate.sum(-1, keepdim=True)
        flat = expert.flatten()
        chosen = F.one_hot(flat, self.experts)
        rank = (chosen.cumsum(0) * chosen).sum(1) - 1
        capacity = (2 * n + self.experts - 1) // self.experts * 2
        kept = rank < capacity
        slot = torch.where(kept, flat * capacity + rank, self.experts * capacity)
        source = tokens.repeat_interleave(2, dim=0)
        room = tokens.new_zeros(self.experts * capacity + 1, self.width)
        room = room.scatter(0, slot.unsqueeze(1).expand(-1, self.width), source)
        room = room[:-1].view(self.experts, capacity, self.width)
        done = torch.bmm(F.silu(torch.bmm(room, self.up)), self.down).flatten(0, 1)
        back = done.gather(0, slot.clamp(max=self.experts * capacity - 1).unsqueeze(1).expand(
            -1, self.width))  # fmt: skip
        weight = (gate.flatten() * kept).to(x.dtype).unsqueeze(1)
        out = torch.zeros_like(tokens).index_add(
            0, torch.arange(n, device=x.device).repeat_interleave(2), back * weight
        )
        return (tokens + out).view_as(x)


def moe_inputs(large: bool, batch: int | None, length: int | None) -> Inputs:
    return (torch.randn(batch or (8 if large else 3), length or (512 if large else 11),
                        512 if large else 24),)  # fmt: skip


# -------------------------------------------------------------------------------------- DLRM


class Dlrm(nn.Module):
    """Dense features, embedding bags, pairwise interactions, and a small head."""

    def __init__(self, large: bool) -> None:
        super().__init__()
        rows, self.tables, width = (100_000, 16, 64) if large else (37, 3, 8)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum") for _ in range(self.tables)
        )
        self.bottom = nn.Sequential(
            nn.Linear(13, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU()
        )
        pairs = self.tables * (self.tables + 1) // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 4 * width), nn.ReLU(), nn.Linear(4 * width, 1)
        )
        row, col = torch.tril_indices(self.tables + 1, self.tables + 1, offset=-1)
        self.register_buffer("row", row)
        self.register_buffer("col", col)

    def forward(self, dense: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        features = [bottom] + [bag(i, offsets) for bag, i in zip(self.bags, ids.unbind(0))]
        stacked = torch.stack(features, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.row, self.col]
        return self.top(torch.cat((bottom, products), dim=1)).squeeze(1)


def dlrm_inputs(large: bool, batch: int | None, length: int | None) -> Inputs:
    b, tables, rows, bag = (batch or 4096, 16, 100_000, 8) if large else (batch or 7, 3, 37, 4)
    ids = torch.randint(0, rows, (tables, b * bag))
    return torch.randn(b, 13), ids, torch.arange(0, b * bag, bag), torch.rand(b).round()


def clicks(logit: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logit, target)


# ------------------------------------------------------------------------------------- losses


def linear(large: bool) -> nn.Module:
    return nn.Linear(512, 8192) if large else nn.Linear(12, 50)


def loss_inputs(kind: str) -> Callable[[bool, int | None, int | None], Inputs]:
    def make(large: bool, batch: int | None, length: int | None) -> Inputs:
        b, width, classes = (batch or 4096, 512, 8192) if large else (batch or 23, 12, 50)
        x = torch.randn(b, width)
        if kind == "classes":
            target = torch.randint(0, classes, (b,))
            return x, torch.where(torch.arange(b) % 3 == 1, -100, target)
        return x, torch.randn(b, classes)

    return make


def smooth_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), target, ignore_index=-100, label_smoothing=0.1)


def divergence(logits: Tensor, target: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.kl_div(
        F.log_softmax(logits.to(wide), dim=-1), F.softmax(target.to(wide), dim=-1),
        reduction="batchmean",
    )  # fmt: skip


def huber(out: Tensor, target: Tensor) -> Tensor:
    return F.huber_loss(out, target, delta=0.7)


# ------------------------------------------------------------------------------- residual conv


def residual(large: bool) -> nn.Module:
    return ResidualNet(64, stride=2) if large else ResidualNet(8)


CASES: tuple[Case, ...] = (
    Case("bert", SentenceBert, bert_inputs, contrastive, split=2),
    Case("gpt", gpt(0.0), gpt_inputs, next_token),
    Case("llama", Llama, llama_inputs, energy),
    Case("vit", Vit, image_inputs, classify),
    Case("unet", Unet, unet_inputs, squared),
    Case("lstm_loop", LstmLoop, lstm_inputs, energy),
    Case("moe", Moe, moe_inputs, energy),
    Case("dlrm", Dlrm, dlrm_inputs, clicks, split=3),
    Case("cross_entropy", linear, loss_inputs("classes"), smooth_cross_entropy),
    Case("kl", linear, loss_inputs("dense"), divergence),
    Case("huber", linear, loss_inputs("dense"), huber),
    Case("gpt_dropout", gpt(0.1), gpt_inputs, next_token, random=True),
    Case("residual_conv", residual, image_inputs, classify),
)
BY_NAME: dict[str, Case] = {case.name: case for case in CASES}
