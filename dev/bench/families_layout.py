"""Program families that move data: layouts, windows, pooling, gathers and scatters."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from dev.bench.cases import Program, Spec
from dev.bench.family import Shape, family, ids, weight, x


@family
def cast_transpose(s: Shape, d: str) -> Program:
    to = torch.bfloat16 if d == "fp32" else torch.float32
    return Program(lambda a: a.t().to(to).contiguous(), (x(s, d),), again=())


@family
def transpose(s: Shape, d: str) -> Program:
    return Program(lambda a: a.t().contiguous(), (x(s, d),), again=())


@family
def cast_and_transpose_fp8(s: Shape, d: str) -> Program:
    """One tensor in fp8, and transposed, and the largest magnitude (delayed scaling)."""

    def fn(a: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = (a.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return y, y.t().contiguous(), a.abs().amax()

    return Program(fn, (Spec(s, d), Spec((), "fp32")))


@family
def transpose_and_sum(s: Shape, d: str) -> Program:
    return Program(lambda a: (a.t().contiguous() * 2, a.float().sum(0)), (Spec(s, d),))


@family
def channels_last_relu(s: Shape, d: str) -> Program:
    return Program(lambda a: F.relu(a).contiguous(memory_format=torch.channels_last), (x(s, d),))


@family
def heads(s: Shape, d: str) -> Program:
    """[B, T, H, D] -> [B, H, T, D], scaled."""
    return Program(lambda a: (a.transpose(1, 2) * 0.125).contiguous(), (x(s, d),), again=())


@family
def pad_silu(s: Shape, d: str) -> Program:
    return Program(lambda a: F.silu(F.pad(a, (1, 1, 1, 1))), (x(s, d),))


@family
def slice_multiply(s: Shape, d: str) -> Program:
    """Gated halves of one tensor."""

    def fn(a: Tensor) -> Tensor:
        gate, up = a.chunk(2, -1)
        return F.silu(gate) * up

    return Program(fn, (x(s, d),))


@family
def cat_gelu(s: Shape, d: str) -> Program:
    return Program(lambda a, b, c: F.gelu(torch.cat([a, b, c], -1)), (x(s, d), x(s, d), x(s, d)))


@family
def rope(s: Shape, d: str) -> Program:
    """Rotary position: halves rotated by tables of cosines and sines."""
    t, n = s[-2], s[-1]

    def fn(a: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = a.chunk(2, -1)
        return a * cos + torch.cat((-second, first), -1) * sin

    return Program(fn, (x(s, d), Spec((t, n), d), Spec((t, n), d)), again=(1, 2))


@family
def windows(s: Shape, d: str) -> Program:
    """Shifted windows of 8 x 8: [B, H, W, C] -> [B * windows, 64, C], with a bias."""
    b, h, w, c = s

    def fn(a: Tensor, bias: Tensor) -> Tensor:
        a = torch.roll(a + bias, (-4, -4), (1, 2))
        a = a.view(b, h // 8, 8, w // 8, 8, c).permute(0, 1, 3, 2, 4, 5)
        return a.reshape(-1, 64, c)

    return Program(fn, (x(s, d), x((c,), d)), again=())


@family
def pixel_shuffle(s: Shape, d: str) -> Program:
    return Program(lambda a: F.relu(F.pixel_shuffle(a, 2)), (x(s, d),))


@family
def upsample(s: Shape, d: str) -> Program:
    return Program(lambda a: F.interpolate(a, scale_factor=2, mode="nearest"), (x(s, d),), again=())


@family
def upsample_bilinear(s: Shape, d: str) -> Program:
    return Program(
        lambda a: F.interpolate(a, scale_factor=2, mode="bilinear", align_corners=False),
        (x(s, d),),
        again=(),
    )


@family
def max_pool(s: Shape, d: str) -> Program:
    """Backward needs to know which of nine was the largest: a byte, written and read."""
    n = prod(s) // 4
    return Program(lambda a: F.max_pool2d(a, 3, 2, 1), (x(s, d),), again=(), extra=2 * n)


@family
def max_pool_forward(s: Shape, d: str) -> Program:
    return Program(lambda a: F.max_pool2d(a, 3, 2, 1), (x(s, d),), again=())


@family
def avg_pool(s: Shape, d: str) -> Program:
    return Program(lambda a: F.avg_pool2d(a, 3, 2, 1), (x(s, d),), again=())


@family
def adaptive_pool(s: Shape, d: str) -> Program:
    return Program(lambda a: F.adaptive_avg_pool2d(a, 7), (x(s, d),), again=())


@family
def embedding(s: Shape, d: str) -> Program:
    """[vocabulary, width, tokens]; the gradient of the table is dense."""
    v, c, n = s
    return Program(
        lambda w, t: F.embedding(t, w),
        (x((v, c), d), ids(v, n)),
        again=(1,),
        touched=((0, min(v, n) * c),),
    )


@family
def embedding_layer_norm(s: Shape, d: str) -> Program:
    """Token and position embeddings, and layer norm."""
    v, c, n = s

    def fn(w: Tensor, place: Tensor, t: Tensor, g: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(F.embedding(t, w) + place, (c,), g, b)

    return Program(
        fn,
        (x((v, c), d), x((512, c), d), ids(v, n // 512, 512), weight(c, d), x((c,), d)),
        again=(1, 2, 3),
        touched=((0, min(v, n) * c),),
        extra=n * c * (4 if d == "fp32" else 2),  # backward reads those rows again
    )


@family
def scatter_add(s: Shape, d: str) -> Program:
    """Messages [edges, width] summed into nodes, as graph networks do: [nodes, width, edges]."""
    nodes, c, edges = s

    def fn(m: Tensor, to: Tensor) -> Tensor:
        return torch.zeros(nodes, c, dtype=m.dtype, device=m.device).index_add(0, to, m)

    return Program(fn, (Spec((edges, c), d), ids(nodes, edges)))


@family
def gather_rows(s: Shape, d: str) -> Program:
    """[rows, width, picked]: picked rows, scaled each."""
    v, c, n = s
    return Program(
        lambda w, t, g: w[t] * g[:, None],
        (Spec((v, c), d), ids(v, n), Spec((n,), d)),
        touched=((0, min(v, n) * c),),
    )


@family
def sliding_windows(s: Shape, d: str) -> Program:
    """Each position's softmax over the eight before it: pad, unfold, softmax."""

    def fn(a: Tensor) -> Tensor:
        return F.pad(a, (7, 0)).unfold(-1, 8, 1).softmax(-1)

    return Program(fn, (Spec(s, d),))


@family
def repeat_heads(s: Shape, d: str) -> Program:
    """Keys of grouped heads repeated four times, backward a sum over the four."""
    return Program(lambda a: a.repeat_interleave(4, dim=1) * 2, (x(s, d),), again=())
