"""The programs of the memory-bound suites: one function per family, from shape and dtype.

They are written as their users write them, in plain torch; nothing is arranged for a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dev.bench.cases import Program, Spec
from dev.bench.family import Shape, family, ids, weight, x

# ------------------------------------------------------------------------------------------ norms


def rms(a: Tensor, w: Tensor) -> Tensor:
    wide = a.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(a.dtype) * w


@family
def rms_norm(s: Shape, d: str) -> Program:
    return Program(rms_like(s), (x(s, d), weight(s[-1], d)))


def rms_like(s: Shape) -> Callable[..., Any]:
    return lambda a, w: F.rms_norm(a, (s[-1],), w, 1e-6)


@family
def rms_norm_written(s: Shape, d: str) -> Program:
    return Program(rms, (x(s, d), weight(s[-1], d)))


@family
def layer_norm(s: Shape, d: str) -> Program:
    n = s[-1]
    return Program(lambda a, w, b: F.layer_norm(a, (n,), w, b), (x(s, d), weight(n, d), x((n,), d)))


@family
def layer_norm_plain(s: Shape, d: str) -> Program:
    return Program(lambda a: F.layer_norm(a, (s[-1],)), (x(s, d),))


@family
def add_rms_norm(s: Shape, d: str) -> Program:
    """Residual stream: the sum is an output too."""

    def fn(a: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = a + r
        return rms(h, w), h

    # Of the inputs, the backward needs only their sum, which is an output: as many bytes as one.
    # Both gradients are one tensor.
    one = prod(s) * (4 if d == "fp32" else 2)
    return Program(fn, (x(s, d), x(s, d), weight(s[-1], d)), again=(0, 2), extra=-one)


@family
def layer_norm_gelu(s: Shape, d: str) -> Program:
    n = s[-1]
    return Program(
        lambda a, w, b: F.gelu(F.layer_norm(a, (n,), w, b)),
        (x(s, d), weight(n, d), x((n,), d)),
    )


@family
def modulate(s: Shape, d: str) -> Program:
    """Layer norm, scaled and shifted per sample, as diffusion transformers do."""
    n, _, c = s

    def fn(a: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm(a, (c,)) * (1 + scale[:, None]) + shift[:, None]

    return Program(fn, (x(s, d), x((n, c), d), x((n, c), d)))


@family
def normalize(s: Shape, d: str) -> Program:
    return Program(lambda a: F.normalize(a, dim=-1), (x(s, d),))


def stats(c: int) -> tuple[Spec, Spec]:
    return Spec((c,), "fp32"), Spec((c,), "fp32", scale=0.1, shift=1.0)


@family
def batch_norm(s: Shape, d: str) -> Program:
    """Training mode: running statistics are updated."""
    c = s[1]

    def fn(a: Tensor, m: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.batch_norm(a, m, v, w, b, training=True)

    return Program(fn, (x(s, d), *stats(c), weight(c, "fp32"), x((c,), "fp32")))


@family
def batch_norm_relu_add(s: Shape, d: str) -> Program:
    """The end of a residual block, channels last."""
    c = s[1]

    def fn(a: Tensor, r: Tensor, m: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.relu(F.batch_norm(a, m, v, w, b, training=True) + r)

    image = x(s, d, channels_last=True)
    # Backward: the sign of the output, and x; the skipped input is not needed but for that sign.
    return Program(fn, (image, image, *stats(c), weight(c, "fp32"), x((c,), "fp32")), again=(0, 1))


@family
def batch_norm_eval(s: Shape, d: str) -> Program:
    c = s[1]

    def fn(a: Tensor, m: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.relu(F.batch_norm(a, m, v, w, b, training=False))

    return Program(fn, (x(s, d), *stats(c), weight(c, "fp32"), x((c,), "fp32")))


@family
def group_norm_silu(s: Shape, d: str) -> Program:
    c = s[1]
    return Program(
        lambda a, w, b: F.silu(F.group_norm(a, 32, w, b)), (x(s, d), weight(c, d), x((c,), d))
    )


@family
def instance_norm(s: Shape, d: str) -> Program:
    c = s[1]
    return Program(
        lambda a, w, b: F.instance_norm(a, weight=w, bias=b), (x(s, d), weight(c, d), x((c,), d))
    )


@family
def rms_norm_fp8_rows(s: Shape, d: str) -> Program:
    """RMS norm, then one scale per row and fp8."""

    def fn(a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = rms(a, w).float()
        scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
        return (y / scale).to(torch.float8_e4m3fn), scale

    return Program(fn, (Spec(s, d), Spec((s[-1],), d, scale=0.2, shift=1.0)))


@family
def rms_norm_fp8_blocks(s: Shape, d: str) -> Program:
    """RMS norm, then one scale per 128 values and fp8."""

    def fn(a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = rms(a, w).float().unflatten(-1, (-1, 128))
        scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
        return (y / scale).flatten(-2).to(torch.float8_e4m3fn), scale.squeeze(-1)

    return Program(fn, (Spec(s, d), Spec((s[-1],), d, scale=0.2, shift=1.0)))


# ----------------------------------------------------------------------------------------- losses


@family
def cross_entropy(s: Shape, d: str) -> Program:
    return Program(lambda a, t: F.cross_entropy(a.float(), t), (x(s, d), ids(s[1], s[0])))


@family
def cross_entropy_smooth(s: Shape, d: str) -> Program:
    return Program(
        lambda a, t: F.cross_entropy(a.float(), t, label_smoothing=0.1),
        (x(s, d), ids(s[1], s[0])),
    )


@family
def cross_entropy_rows(s: Shape, d: str) -> Program:
    """A loss per row, some rows ignored."""
    return Program(
        lambda a, t: F.cross_entropy(a, t, ignore_index=3, reduction="none"),
        (x(s, d), ids(s[1], s[0])),
    )


@family
def cross_entropy_z(s: Shape, d: str) -> Program:
    """With the square of the log-sum-exp as a second term."""

    def fn(a: Tensor, t: Tensor) -> Tensor:
        wide = a.float()
        z = wide.logsumexp(-1)
        return (z - wide.gather(1, t[:, None])[:, 0]).mean() + 1e-4 * z.square().mean()

    return Program(fn, (x(s, d), ids(s[1], s[0])))


@family
def cross_entropy_soft(s: Shape, d: str) -> Program:
    """Targets are probabilities."""
    return Program(
        lambda a, p: -(p * a.float().log_softmax(-1)).sum(-1).mean(),
        (x(s, d), Spec(s, d, softmax=True)),
    )


@family
def kl_divergence(s: Shape, d: str) -> Program:
    """Distillation: a student's and a teacher's logits."""

    def fn(a: Tensor, b: Tensor) -> Tensor:
        p, q = a.float().log_softmax(-1), b.float().log_softmax(-1)
        return F.kl_div(p, q, log_target=True, reduction="batchmean")

    return Program(fn, (x(s, d), Spec(s, d)))


@family
def log_softmax(s: Shape, d: str) -> Program:
    return Program(lambda a: a.log_softmax(-1), (x(s, d),))


@family
def entropy(s: Shape, d: str) -> Program:
    def fn(a: Tensor) -> Tensor:
        logp = a.float().log_softmax(-1)
        return -(logp.exp() * logp).sum(-1)

    return Program(fn, (x(s, d),))


@family
def binary_cross_entropy(s: Shape, d: str) -> Program:
    def fn(a: Tensor, t: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(a.float(), t.float())

    return Program(fn, (x(s, d), Spec(s, d, scale=0.1, shift=0.5)))


@family
def focal(s: Shape, d: str) -> Program:
    def fn(a: Tensor, t: Tensor) -> Tensor:
        p = a.float().sigmoid()
        loss = F.binary_cross_entropy_with_logits(a.float(), t.float(), reduction="none")
        close = p * t + (1 - p) * (1 - t)
        return ((1 - close) ** 2 * loss).mean()

    return Program(fn, (x(s, d), Spec(s, d, scale=0.1, shift=0.5)))


@family
def mean_square(s: Shape, d: str) -> Program:
    return Program(lambda a, b: F.mse_loss(a.float(), b.float()), (x(s, d), Spec(s, d)))


@family
def smooth_l1(s: Shape, d: str) -> Program:
    return Program(lambda a, b: F.smooth_l1_loss(a, b), (x(s, d), Spec(s, d)))


@family
def cosine(s: Shape, d: str) -> Program:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        return (1 - F.cosine_similarity(a.float(), b.float(), dim=-1)).mean()

    return Program(fn, (x(s, d), x(s, d)))


# ------------------------------------------------------------------------------------- reductions


@family
def softmax(s: Shape, d: str) -> Program:
    return Program(lambda a: a.softmax(-1), (x(s, d),))


@family
def softmax_outer(s: Shape, d: str) -> Program:
    return Program(lambda a: a.softmax(0), (x(s, d),))


@family
def softmax_middle(s: Shape, d: str) -> Program:
    return Program(lambda a: a.softmax(1), (x(s, d),))


@family
def softmax_masked(s: Shape, d: str) -> Program:
    """Attention weights: scores, a padding mask, softmax, dropout."""

    def fn(a: Tensor, mask: Tensor) -> Tensor:
        scores = (a * 0.125).masked_fill(~mask[:, None, None], float("-inf"))
        return F.dropout(scores.softmax(-1), 0.1)

    return Program(fn, (x(s, d), Spec((s[0], s[-1]), "bool")), random=True)


@family
def softmax_causal(s: Shape, d: str) -> Program:
    def fn(a: Tensor) -> Tensor:
        n = a.shape[-1]
        keep = torch.ones(n, n, dtype=torch.bool, device=a.device).tril()
        return a.masked_fill(~keep, float("-inf")).softmax(-1)

    half = prod(s) // 2 + prod(s[:-1]) // 2
    # Above the diagonal nothing has to be read: forward the scores; backward results, gradients.
    item = 4 if d == "fp32" else 2
    return Program(fn, (x(s, d),), touched=((0, half),), extra=-2 * (prod(s) - half) * item)


@family
def sum_rows(s: Shape, d: str) -> Program:
    return Program(lambda a: a.sum(-1), (x(s, d),), again=())


@family
def sum_columns(s: Shape, d: str) -> Program:
    return Program(lambda a: a.sum(0), (x(s, d),), again=())


@family
def sum_all(s: Shape, d: str) -> Program:
    return Program(lambda a: a.float().square().sum(), (x(s, d),))


@family
def sum_rows_and_columns(s: Shape, d: str) -> Program:
    return Program(lambda a: (a.sum(0), a.sum(1)), (x(s, d),), again=())


@family
def bias_grad(s: Shape, d: str) -> Program:
    """Gradient of GELU, and of the bias before it."""

    def fn(a: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        h = (a + b).float()
        phi = 0.5 * (1 + torch.erf(h * 0.7071067811865476))
        dh = g.float() * (phi + h * torch.exp(-0.5 * h * h) * 0.3989422804014327)
        return dh.to(a.dtype), dh.sum(0)

    return Program(fn, (Spec(s, d), Spec((s[-1],), d), Spec(s, d)))


@family
def channel_sums(s: Shape, d: str) -> Program:
    return Program(lambda a: a.float().sum((0, 2, 3)), (x(s, d),), again=())


@family
def variance(s: Shape, d: str) -> Program:
    return Program(lambda a: torch.var_mean(a.float(), -1), (x(s, d),))


@family
def standardize(s: Shape, d: str) -> Program:
    """Rows to mean 0 and deviation 1, written out."""
    return Program(
        lambda a: (a - a.mean(-1, keepdim=True)) / (a.std(-1, keepdim=True) + 1e-5), (x(s, d),)
    )


@family
def logsumexp(s: Shape, d: str) -> Program:
    return Program(lambda a: a.float().logsumexp(-1), (x(s, d),))


@family
def maximum(s: Shape, d: str) -> Program:
    return Program(lambda a: a.amax(-1), (x(s, d),))


@family
def argmax(s: Shape, d: str) -> Program:
    return Program(lambda a: a.argmax(-1), (x(s, d),))


@family
def quantize_rows(s: Shape, d: str) -> Program:
    """Rows to int8 with a scale each."""

    def fn(a: Tensor) -> tuple[Tensor, Tensor]:
        scale = a.abs().amax(-1, keepdim=True).clamp(min=1e-12).float() / 127.0
        return torch.clamp(torch.round(a.float() / scale), -127, 127).to(torch.int8), scale

    return Program(fn, (Spec(s, d),))


@family
def cumsum(s: Shape, d: str) -> Program:
    return Program(lambda a: a.cumsum(-1), (x(s, d),), again=())


@family
def cumsum_outer(s: Shape, d: str) -> Program:
    return Program(lambda a: a.cumsum(0), (x(s, d),), again=())


@family
def top_p(s: Shape, d: str) -> Program:
    """Of sorted probabilities, those before the sum reaches 0.9, summing to one again."""

    def fn(a: Tensor) -> Tensor:
        p = a.float()
        nucleus = p * ((p.cumsum(-1) - p) < 0.9)
        return nucleus / nucleus.sum(-1, keepdim=True)

    return Program(fn, (Spec(s, d, softmax=True),))


# ----------------------------------------------------------------------------------------- layout
