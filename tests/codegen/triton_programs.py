"""Whole small programs, scheduled for an H200, their Triton kernels run by Triton's interpreter.

``TRITON_INTERPRET=1 python triton_programs.py`` prints a JSON line per program: the largest error
of its outputs over their tolerance, or what went wrong.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deuteron.base.options import Options
from deuteron.base.passes import Context
from deuteron.codegen.triton import tiling, unroll_and_jam
from deuteron.codegen.triton.generate import Config, TritonKernel, generate
from deuteron.ir.index import Sym, evaluate
from deuteron.lower import nn
from deuteron.lower.core import TO_TORCH
from deuteron.runtime.build_triton import module
from deuteron.schedule import cooperative, split
from dev.check.concurrent import together
from dev.check.interpret import readable
from dev.check.quick import by_halves, quicken
from tests.schedule import tools
from tests.schedule.test_fusion import COUNTS, placed
from tests.schedule.test_phases import INTERLEAVED
from tests.schedule.tools import Scheduled, scheduled, spec_of

torch.manual_seed(0)  # the programs' inputs are the same in every run


def spread(*shape: int) -> torch.Tensor:
    """Large differences, and stretches of minus infinity as long as a part."""
    x = torch.randn(*shape) * 20
    x[0, : shape[1] // 2] = float("-inf")
    return x


def behind_sums(g: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
    """A chain of sums that are all stored, and gradients behind it. `given`: for each sum a tensor
    and the weights of its columns."""
    y, made = g * 0.5, []
    for x, w in zip(given[::2], given[1::2]):
        y = y * w + x
        made.append(y)
    return [*made, g - y * (g * y).mean(-1, keepdim=True), (g * y).sum(0)]


def chained_sums(*given: torch.Tensor) -> list[torch.Tensor]:
    made = [given[0]]
    for x in given[1:]:
        made.append(made[-1] * 0.5 + x)
    return made[1:]


def of_runs(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rows of which the first and the middle digit have values."""
    return (x * w[..., None, None] + v[:, None]).square().sum((1, 2, 3))


PROGRAMS: dict[str, tuple[Any, tuple[Any, ...]]] = {n: (f, a) for n, f, a, _ in COUNTS} | {
    "few long rows": (lambda x: x.sum(-1), (torch.randn(4, 30_000),)),
    "tall columns": (lambda x: (x * 2).sum(0), (torch.randn(1024, 40),)),
    "nothing, then something": (
        lambda x, y: [F.pad(x, (1, 2), mode="circular"), F.pad(y, (1, 2), mode="circular")],
        (torch.randn(0, 3, 3), torch.randn(1, 3, 3)),
    ),
    "one of two whole numbers, of 64 bits": (
        lambda x: (torch.where(x > 0, 3, 0) << 40, torch.where(x > 0, 3, 1).amin()),
        (torch.randn(50),),
    ),
    "bits that are moved": (
        lambda x, n: [
            f(y, k)
            for y in (x, x.to(torch.uint8), x.int(), x.long())
            for k in (-1, 0, 3, 7, 8, 40, n.to(y.dtype))
            for f in (torch.bitwise_left_shift, torch.bitwise_right_shift)
        ],
        (torch.arange(-128, 128, 3).to(torch.int8), torch.arange(86) % 12 - 2),
    ),
    "places of columns": (  # beside others, in rows of which each program has several
        lambda x, y, i: torch.cat([x, y[:, i[0], i[1]]], 1),
        (torch.randn(37, 12), torch.randn(37, 7, 7), torch.randint(-7, 7, (2, 51))),
    ),
    "one of a row": (
        lambda x, i: x.scatter(1, i, 1.0) * 2,
        (torch.randn(5, 40), torch.randint(0, 40, (5, 1))),
    ),
    "rounded between limits": (
        lambda x: (
            x.round().clamp(-7, 9).to(torch.int8),
            (x * 2).round().clamp(0, 255).to(torch.uint8),
            x.clamp_max(9.0).round().to(torch.int32),
        ),
        (torch.tensor([0.5, 1.5, -2.5, 8.5, 9.4, 1e9, math.inf, -math.inf, -0.3, 127.25]),),
    ),
    "minus zeros": (lambda x: torch.copysign(x * x + 1, -x), (torch.tensor([0.0, -0.0, 3.0]),)),
    "zeros over numbers of either sign": (
        lambda x, y: (
            torch.copysign(x * 0 + 1, x / 6.0),
            torch.copysign(x * 0 + 1, x / y[:, None]),
        ),
        (
            torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e38]).expand(8, 7).contiguous(),
            torch.tensor([6.0, -6.0, 0.0, -0.0, 1e30, -1e30, 1e-30, -1e-30]),
        ),
    ),
    "quotients by what may be huge": (
        lambda x: (x / x.abs().amax(-1, keepdim=True).clamp_min(1e-8) * 0.75).half(),
        (
            torch.tensor(
                [[0.0, 1.0, -3e38, 2e38], [1e-9, -2e-9, 1e-30, 0.0], [5.0, -1e38, 9e37, 4.0]]
            ),
        ),
    ),
    "a permuted copy and its sum": (
        lambda x: ((y := placed(x)), y.sum((0, 1, 2))),
        (torch.randn(16, 64, 40),),
    ),
    "sum of permuted rows": (
        lambda x: (placed(x).sum((0, 1, 2)), x.roll(5, 1).flip(1).amax(1)),
        (torch.randn(16, 64, 20),),
    ),
    "triangles": (
        lambda x, y: (
            x.masked_fill(torch.ones(37, 40, dtype=torch.bool).triu(4), -math.inf).softmax(-1),
            y.tril(-3) * 2,
            y.float().triu(5).sum(-1),
            torch.tril(x, 38),
        ),
        (torch.randn(3, 37, 40), torch.randn(2, 24, 64).bfloat16()),
    ),
    "a chain of sums that are stored": (chained_sums, tuple(torch.randn(5, 90) for _ in range(45))),
    "matrix-vector": (lambda a, b: torch.mv(a, b).relu(), (torch.randn(30, 70), torch.randn(70))),
}


# Rows that are cut into parts although they are short (`planned`).
def gated(g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of a GLU, and of the bias before it."""
    s = b.sigmoid()
    both = torch.cat([g * s, g * a * s * (1 - s)], -1)
    return both, both.sum(0)


def of_heads(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values side by side, and of their bias."""
    rows = given[0].shape[1]
    both = torch.cat([x.transpose(0, 1).reshape(rows, -1) for x in given], -1)
    return both, both.sum(0)


# Sums of the columns of joined tensors, of which each part is a nest.
JOINED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "gated": (gated, (*(torch.randn(3001, 128) for _ in range(3)),)),
    "of heads": (
        of_heads,
        (*(torch.randint(-4, 5, (4, 2050, 32)).bfloat16() for _ in range(3)),),
    ),
    "of odd widths": (of_heads, (*(torch.randn(1, 2050, n) for n in (65, 190, 71)),)),
}


PARTS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "sum of what rows' statistics make": (
        lambda x, y: (torch.log_softmax(x, -1) * y).sum() / x.shape[0],
        (torch.randn(140, 64), torch.rand(140, 64)),
    ),
    "softmax in parts": (lambda x: torch.softmax(x, -1), (spread(2, 512),)),
    "logsumexp in parts": (lambda x: torch.logsumexp(x, -1), (spread(3, 501),)),
    "variance in parts": (lambda x: torch.var_mean(x, -1), (torch.randn(2, 505) + 50,)),
    "covariance in parts": (
        lambda x, y: ((x - x.mean(-1, keepdim=True)) * (y - y.mean(-1, keepdim=True))).sum(-1),
        (torch.randn(2, 512), torch.randn(2, 512)),
    ),
    "positions in parts": (
        lambda x: (x.argmax(-1), x.amin(-1), x.argmin(-1)),
        (torch.randint(0, 30, (2, 512)).float(),),
    ),
    "batch norm, channels last": (
        lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
        (torch.randn(4, 8, 8, 9).to(memory_format=torch.channels_last) + 3,),
    ),
}


def top(x: torch.Tensor) -> torch.Tensor:
    return x.amax(-1, keepdim=True)


def mean(x: torch.Tensor) -> torch.Tensor:
    return x.mean(-1, keepdim=True)


def extremes(rows: int, n: int) -> torch.Tensor:
    """Ties, no number at two places, nothing but one infinity or the other."""
    x = torch.randn(rows, n).round()
    x[1, 77] = x[1, n - 5] = math.nan
    x[2], x[3] = -math.inf, math.inf
    x[4, 0] = x[5, n - 1] = math.nan
    return x


def guarded(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    m = top(x)
    return (torch.exp(x - torch.where(m == float("-inf"), 0.0, m)) * g).sum(-1)


def entropy(x: torch.Tensor) -> torch.Tensor:
    p = torch.log_softmax(x, -1)
    return -(p.exp() * p).sum(-1)


# Rows in blocks of a loop, dependent reductions in one pass over them.
LOOPED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "softmax in a loop": (lambda x: torch.softmax(x, -1), (spread(3, 3000),)),
    "rows behind padding": (lambda x: F.pad(x, (1, 2), value=0.5).sum(-1), (torch.rand(3, 1000),)),
    "variance of a softmax": (
        lambda x: (torch.softmax(x, -1) * 1e4).var(-1),
        (torch.randn(2, 2 * 8192) * 3,),
    ),
    "logsumexp in a loop": (lambda x: torch.logsumexp(x, -1), (spread(3, 3000),)),
    "base 2 in a loop": (
        lambda x: torch.exp2(x * 1.25 - top(x) * 1.25).sum(-1),
        (torch.randn(2, 3000) * 9,),
    ),
    "weights in a loop": (
        lambda x, g: (torch.exp(x - top(x)) * g).sum(-1) + torch.exp(x - top(x)).sum(-1),
        (torch.randn(2, 3000) * 9, torch.randn(2, 3000)),
    ),
    "guarded weights in a loop": (guarded, (spread(2, 3000), torch.randn(2, 3000))),
    "layer norm in a loop": (
        lambda x: torch.nn.functional.layer_norm(x, (3000,)),
        (torch.randn(2, 3000) + 5,),
    ),
    "rows and columns in a loop": (
        lambda x: (torch.softmax(x, -1), torch.var(x, -1), x.sum(0)),
        (torch.randn(40, 128) * 9,),
    ),
    "rows and columns of places in a loop": (
        lambda x: (
            torch.softmax(x, -1),
            (x - top(x)).sum(0),
            x.sum((0, 1)),
        ),
        (torch.randn(4, 40, 128) * 9,),
    ),
    "differences in a loop": (
        lambda x: (
            (x - x[:, :1].abs() * mean(x)).sum(-1),
            (x - top(x)).sum(-1),
            (x - mean(x)).square().sum(-1),
        ),
        (torch.randn(3, 3000) + 20,),
    ),
    "differences of differences in a loop": (
        lambda x: (torch.log_softmax(x, -1).sum(-1), x.logsumexp(-1)),
        (torch.randn(3, 3000) * 9,),
    ),
    "no number, and none that is finite, in a loop": (
        lambda x: (torch.log_softmax(x, -1).sum(-1), x.amax(-1)),
        (torch.randn(3, 3000).index_fill(1, torch.tensor([7, 2999]), -math.inf),),
    ),
    "entropy in a loop": (entropy, (torch.randn(3, 3000) * 9 + 100,)),
    "entropy of rows with nothing, in a loop": (
        entropy,
        (torch.randn(3, 3000).index_fill(1, torch.tensor([7, 2999]), -math.inf),),
    ),
    "divergence in a loop": (
        lambda x, y: F.kl_div(
            x.log_softmax(-1), y.log_softmax(-1), reduction="batchmean", log_target=True
        ),
        (torch.randn(3, 3000) * 4 - 50, torch.randn(3, 3000) * 4 + 50),
    ),
    "divergence from what has nothing, in a loop": (
        lambda x, y: (y.softmax(-1) * (y.log_softmax(-1) - x.log_softmax(-1))).sum(-1),
        (spread(3, 3000), torch.randn(3, 3000)),
    ),
    "entropy of what is divided, in a loop": (
        lambda x: entropy(x / 0.7),
        (torch.randn(3, 3000) * 4,),
    ),
    "moments of a softmax in a loop": (
        lambda x: (
            (torch.softmax(x, -1) * (2 - 3 * torch.log_softmax(x, -1)) / 4).sum(-1),
            -((x - top(x)) * torch.softmax(x, -1)).sum(-1),
        ),
        (torch.randn(3, 4096) * 3,),
    ),
    "positions in a loop": (
        lambda x, y: (x.argmax(-1), x.argmin(-1), y.argmax(-1), y.argmin(-1)),
        (extremes(6, 3000), torch.randint(-4, 4, (6, 3000), dtype=torch.int32)),
    ),
    "covariance in a loop": (
        lambda x, y: ((x - mean(x)) * (y - mean(y))).sum(-1),
        (torch.randn(2, 3000), torch.randn(2, 3000)),
    ),
}


def planned(name: str) -> Scheduled:
    """A program's schedule; those of `PARTS` for a device on which bytes are dear."""
    f, args = EVERY[name]
    if name not in PARTS:
        with sharing(name), pytest.MonkeyPatch.context() as patch:
            if name in SHARED | GROUPS | ROW_SPLITS:
                slower = replace(spec_of("H200"), bandwidth_gbps=5.0)
                slower = replace(slower, cores=4 if name in ROW_SPLITS else slower.cores)
                patch.setattr(tools, "spec_of", lambda device: slower)
                patch.setattr(nn, "accumulated_in", lambda ctx, dtype: dtype)  # as on a GPU
            # Sums of what is stored, rounded, as the program says.
            precision = "eager" if "by place" in name else "float32"
            asked = {"products": "generated", "precision": precision}
            return scheduled(f, *args, device="H200", check=False, **asked)
    slow = replace(spec_of("H200"), bandwidth_gbps=0.5, l2=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tools, "spec_of", lambda device: slow)
        patch.setattr(split, "PARTS_PER_CORE", 1)
        patch.setitem(split.MIN_PART, "cuda", 64)
        patch.setattr(split, "MIN_COLUMN_PART", 16)
        plan = scheduled(f, *args, device="H200", check=False)
    assert plan.accepted("split"), name
    return plan


aten = torch.ops.aten
IMAGE = torch.randn(2, 3, 12, 72)


WINDOW = ([3, 3], [2, 2], [1, 1], False)


def pooled(g: torch.Tensor, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    window = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    return aten.max_pool2d_with_indices_backward(g, x, *window, i)


def tied(*shape: int) -> torch.Tensor:
    x = torch.randn(*shape).round()
    x.flatten()[5::97] = math.nan
    return x


# Short parallel axes that one lane walks, whose results are stored together.
UNROLLED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "gradient of a maximum's window": (
        pooled,
        (
            torch.randn(2, 3, 6, 36),
            IMAGE,
            F.max_pool2d(IMAGE, 3, 2, 1, return_indices=True)[1],
        ),
    ),
    "places of maxima": (
        lambda x: torch.ops.deuteron.max_pool(x, *WINDOW),
        (tied(2, 3, 12, 72),),
    ),
    "gradient by places": (
        lambda g, i: torch.ops.deuteron.max_pool_backward(
            g, i, [2, 3, 12, 72], *WINDOW, torch.contiguous_format
        ),
        (torch.randn(2, 3, 6, 36), torch.ops.deuteron.max_pool(IMAGE, *WINDOW)[1]),
    ),
    "gradient of a mean's window": (
        lambda g, x: aten.avg_pool2d_backward(g, x, [3, 3], [2, 2], [1, 1], False, True, None),
        (torch.randn(2, 3, 6, 36), IMAGE),
    ),
    "gradient of a ragged window": (
        lambda g, x: aten.avg_pool2d_backward(g, x, [3, 3], [2, 2], [1, 1], True, False, None),
        (torch.randn(2, 3, 7, 37), IMAGE),
    ),
    "enlarged": (lambda x: F.interpolate(x, scale_factor=2) + 1, (torch.randn(2, 3, 10, 66),)),
    "enlarged, bilinear": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        (torch.randn(2, 3, 10, 18),),
    ),
    "enlarged, added": (
        lambda x, y: F.interpolate(x, scale_factor=4) + y,
        (torch.randn(2, 4, 36), torch.randn(2, 4, 144)),
    ),
    "enlarged, channels last": (
        lambda x: F.interpolate(x, scale_factor=2) + 1,
        (torch.randn(2, 24, 5, 6).to(memory_format=torch.channels_last),),
    ),
}
# Where a lane has several windows of rows (`kernels`).
WINDOWS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "windows: maxima and their places": (
        lambda x: torch.ops.deuteron.max_pool(x, *WINDOW),
        (tied(2, 3, 16, 40),),
    ),
    "windows: means": (lambda x: F.avg_pool2d(x, 3, 2, 1), (torch.randn(2, 3, 8, 40),)),
    "windows: apart": (lambda x: F.avg_pool2d(x, 2) + 1, (torch.randn(3, 16, 40),)),
}
UNROLLED |= {
    "shuffled": (lambda x: F.pixel_shuffle(x, 2).relu(), (torch.randn(2, 8, 6, 40),)),
    "side by side": (
        lambda x, y: torch.cat([x * y, x.exp()], -1),
        (torch.randn(6, 128), torch.randn(6, 128)),
    ),
    "three side by side": (
        lambda x, y: torch.cat([x, y, x + 1], -1).sin(),
        (torch.randn(3, 128), torch.randn(3, 64)),
    ),
    "transposed, and its sums": (
        lambda x: ((x * 2).t().contiguous(), x.sum(0)),
        (torch.randn(2100, 70),),
    ),
    "transposed, and sums of few": (
        lambda x: ((x * 2).t().contiguous(), x.sum(0)),
        (torch.randn(90, 70),),
    ),
}


def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w


def rms_backward(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> Any:
    r = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
    y, gw = x * r, g * w
    return r * (gw - y * (gw * y).mean(-1, keepdim=True)), (g * y).sum(0)


def layer_norm_backward(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, *rows: Any) -> Any:
    return aten.native_layer_norm_backward(g, x, [200], *rows, w, w, [True, True, True])


def by_sample(g: torch.Tensor, x: torch.Tensor, s: torch.Tensor) -> Any:
    """Rows of samples, sums over each sample's rows."""
    r = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
    y, gw = x * r, g * (1 + s[..., None, :])
    return r * (gw - y * (gw * y).mean(-1, keepdim=True)), (g * y).sum(-2), g.sum(-2)


def by_place(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    """Rows of samples and places: sums over each place's rows of what is stored, rounded, beside
    sums over all rows. Products are exact, and so the same whether rounded or not."""
    y = g * w
    dx = torch.where(x > 0, y - top(y), 0.0).half()
    return dx, dx.float().sum(0), (g * x).sum((0, 1)), g.sum((0, 1))


def weights(n: int) -> torch.Tensor:
    return torch.randint(0, 3, (n,)).float().exp2()


# Column sums of groups of rows.
GROUPS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "gradients by sample": (
        by_sample,
        (torch.randn(3, 36, 70), torch.randn(3, 36, 70), torch.randn(3, 70)),
    ),
    "gradients by samples of samples": (
        by_sample,
        (torch.randn(2, 3, 11, 40), torch.randn(2, 3, 11, 40), torch.randn(2, 3, 40)),
    ),
    "one row to a group": (
        by_sample,
        (torch.randn(5, 1, 40), torch.randn(5, 1, 40), torch.randn(5, 40)),
    ),
    "gradients by place": (
        by_place,
        (torch.randn(3, 140, 70), torch.randn(3, 140, 70), weights(70)),
    ),
    "gradients by place, places first": (
        lambda g, x, w: by_place(g.transpose(0, 1), x.transpose(0, 1), w),
        (torch.randn(36, 3, 70), torch.randn(36, 3, 70), weights(70)),
    ),
}
# Splits with many rows each, on a device that has few.
ROW_SPLITS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "gradients behind a chain of sums": (
        behind_sums,
        (torch.randn(30, 600), *(torch.randn(n) for _ in range(12) for n in ((30, 600), (600,)))),
    ),
    "gradients, two rows at a time": (
        rms_backward,
        (torch.randn(60, 600), torch.randn(600), torch.randn(60, 600)),
    ),
    "sums beside rows of half a block": (
        lambda g, x: ((y := g.float() * x - top(g)).bfloat16(), (y + top(y)).sum(0)),
        tuple(torch.randint(-4, 5, (30, 1152)).bfloat16() for _ in "gx"),
    ),
}
# Blocks of a row that are not met in the order of their elements, and elements that are equal.
UNORDERED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "positions in rows of an odd length": (
        lambda x: (x.argmax(-1), (-x).argmin(-1)),
        ((torch.arange(2001) > 1000).int().repeat(2, 1),),
    ),
    "positions in rows read backwards": (
        lambda x: (x // x.amax(-1, True)).argmax(-1),
        ((torch.arange(2000) > 700).int().repeat(2, 1) + 1,),
    ),
}
ERF: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "sum of erf beside its derivative": (
        lambda x, y: ((torch.erf(x) * y).sum(-1), torch.exp(-x * x), (1 + torch.erf(x)).sum(-1)),
        (torch.randn(3, 40), torch.randn(3, 40)),
    ),
}
# Scans that read one another, and again in the passes that wait for reductions of them.
SCANS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "scans again after their reductions": (
        lambda x, y: (
            *(places := torch.cummax(x, 1)),
            (norm := F.layer_norm(places[0], x.shape[-1:])),
            (norm * y).sum(-1),
        ),
        (torch.randn(3, 200), torch.randn(3, 200)),
    ),
}
ROWS = torch.randn(7, 200)
MEAN, REST = ROWS.mean(-1, keepdim=True), ROWS.var(-1, keepdim=True).rsqrt()


def _after_the_maximum(x: torch.Tensor) -> torch.Tensor:
    m = x.amax(-1, keepdim=True)
    return x * (x.abs() * m).amax(-1, keepdim=True) + (x - m).exp().sum(-1, keepdim=True)


def _after_the_mean(x: torch.Tensor) -> torch.Tensor:
    u = x.mean(-1, keepdim=True)
    return x + (x * u).amax(-1, keepdim=True) + ((x - u) * (x - u)).sum(-1, keepdim=True)


def _before_a_sum(x: torch.Tensor) -> torch.Tensor:
    kept = x * (x.cumsum(-1) - x < 12.51)
    return kept / kept.sum(-1, keepdim=True)


def masked_halves() -> torch.Tensor:
    x = spread(7, 200).half()
    x[1, :70] = x[2, 130:] = x[3] = -math.inf
    return x


# Rows that several programs share although they are short (`sharing`).
SHARED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "shared: softmax": (lambda x: torch.softmax(x, -1), (spread(7, 200),)),
    "shared: softmax of weighted": (
        lambda x, m: torch.softmax(x * 0.5, -1) * m,
        (torch.randn(5, 192), torch.randn(5, 192)),
    ),
    # Blocks of which nothing counts, and rows.
    "shared: softmax of halves": (lambda x: torch.softmax(x, -1), (masked_halves(),)),
    "shared: norm of groups, weights by channel": (
        lambda x, w, b: F.group_norm(x, 2, w, b),
        (torch.randn(3, 8, 16, 16), torch.randn(8), torch.randn(8)),
    ),
    "shared: log softmax": (lambda x: torch.log_softmax(x, -1), (torch.randn(7, 304),)),
    "shared: a sum after what waited for the maximum": (
        _after_the_maximum,
        (ROWS,),
    ),
    "shared: squares after what waited for the mean": (
        _after_the_mean,
        (ROWS,),
    ),
    "shared: standardised": (
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(),
        (torch.randn(7, 200) + 3,),
    ),
    "shared: by the largest": (
        lambda x: (x / x.abs().amax(-1, keepdim=True), x.amin(-1)),
        (ROWS,),
    ),
    "shared: rms norm": (rms, (ROWS, torch.randn(200))),
    "shared: rms norm of odd rows": (rms, (torch.randn(7, 801), torch.randn(801))),
    "shared: gradients of rms norm": (
        rms_backward,
        (ROWS, torch.randn(200), torch.randn(7, 200)),
    ),
    "shared: gradients of layer norm": (
        layer_norm_backward,
        (torch.randn(7, 200), ROWS, torch.randn(200), MEAN, REST),
    ),
    "shared: gradients by sample": (
        lambda *args: by_sample(*args)[:2],
        (torch.randn(3, 4, 200), torch.randn(3, 4, 200), torch.randn(3, 200)),
    ),
    "shared: gradients by place": (
        lambda *args: by_place(*args)[:3],
        (torch.randn(6, 8, 200), torch.randn(6, 8, 200), weights(200)),
    ),
    "shared: norm of images": (lambda x: F.instance_norm(x), (torch.randn(3, 5, 15, 16),)),
    "shared: those before a sum": (_before_a_sum, (torch.randint(0, 64, (7, 200)) / 64,)),
    "shared: scans of scans": (
        lambda x, y: (
            (low := ((x * y).cumsum(1) - x).cumsum(1)),
            low / low.abs().amax(1, keepdim=True) + x,
        ),
        (torch.randint(-9, 9, (5, 192)).float(), torch.randint(1, 3, (5, 192)).float()),
    ),
    "shared: whole numbers": (
        lambda x: x * (x.cumsum(1, dtype=torch.int32) % 3 == 0) - x.amax(1, keepdim=True),
        (torch.randint(-99, 99, (6, 256), dtype=torch.int32),),
    ),
}


def blocked(y: torch.Tensor, n: int) -> torch.Tensor:
    return y.unflatten(-1, (-1, n))


def in_blocks(y: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quotients by a scale for every n neighbours, and the scales."""
    y = blocked(y, n)
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
    return (y / scale).flatten(-2), scale.squeeze(-1)


def between_extremes(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = blocked(F.layer_norm(x.float(), x.shape[-1:], w), 32)
    low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
    return ((y - low) / (high - low)).flatten(-2), low, high


def shares(x: torch.Tensor) -> Any:
    """Sums of groups after their maxima, and a sum of the row after those."""
    y = blocked(torch.softmax(x, -1), 16)
    part = y / top(y)
    total = part.sum(-1, keepdim=True)
    return part / total, total, (part / total).square().sum((-1, -2))


def two_softmaxes(x: torch.Tensor) -> Any:
    """Exponentials of which one group may have none that is not tiny."""
    row, e = torch.softmax(x, -1), blocked(torch.exp(x - top(x)), 16)
    return row, torch.softmax(blocked(x, 16), -1), e / e.sum(-1, keepdim=True).clamp(min=1e-30)


def flags(x: torch.Tensor, g: torch.Tensor) -> Any:
    y = blocked(x - mean(x), 8) * g[..., None]
    return (y > 2).any(-1), (y > -2).all(-1), y.clamp(-1.1, 1.1).prod(-1), y.amax((-1, -2))


def of_planes(x: torch.Tensor) -> Any:
    """Rows of two dimensions, groups along either."""
    y = x * torch.rsqrt(x.square().mean((-1, -2), keepdim=True) + 1e-5)
    return y / y.abs().amax(-1, keepdim=True), y.amax(-1)


def of_columns(x: torch.Tensor) -> Any:
    y = x * torch.rsqrt(x.square().mean((-1, -2), keepdim=True) + 1e-5)
    return y / y.abs().amax(-2, keepdim=True), y.amax(-2)


# Reductions over groups of elements of rows beside reductions over whole rows; those of 96 are no
# power of two.
GROUPED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "grouped: after a norm": (
        lambda x, w: in_blocks(rms(x, w), 16),
        (torch.randn(5, 96), torch.rand(96)),
    ),
    "grouped: after a norm of a sum, which is stored": (
        lambda x, r, w: ((h := x + r), *in_blocks(rms(h, w), 128)),
        (torch.randn(2, 3, 384), torch.randn(2, 3, 384), torch.rand(384)),
    ),
    "grouped: between extremes": (
        between_extremes,
        (torch.randn(4, 256).bfloat16(), torch.rand(256)),
    ),
    "grouped: shares of shares": (shares, (torch.randn(3, 96),)),
    "grouped: two softmaxes": (two_softmaxes, (torch.randn(5, 96) * 20,)),
    "grouped: flags": (flags, (torch.randn(3, 96), torch.randn(3, 12))),
    "grouped: of planes": (of_planes, (torch.randn(4, 6, 16),)),
    "grouped: of columns of planes": (of_columns, (torch.randn(4, 16, 6),)),
}


def sampled(value: torch.Tensor, at: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Channels of images at places of their queries, as deformable attention takes them."""
    found = F.grid_sample(value, at * 2 - 1, padding_mode="zeros", align_corners=False)
    return (found * weights[:, None]).sum(-1)


def turned(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """All heads by the same angles."""
    angles = torch.arange(x.shape[2])[:, None] * frequencies
    return x * angles.cos() + x.flip(-1) * angles.sin()


def attention_on_a_plane(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """A bias of a key's row and one of its column."""
    bias = (rows[..., :, None] + columns[..., None, :]).flatten(-2)
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25 + bias, -1) @ v


def tables(high: int, wide: int, special: bool) -> tuple[torch.Tensor, ...]:
    """Of 16 bits; some biases are not finite."""
    q, k, v, rows, columns = (x.half() for x in plane(high, wide))
    if special:
        rows[0, 0, 3, 1] = columns[0, 1, 5, 2] = -math.inf
        rows[0, 1, 7, 0], columns[0, 0, 9, 1], rows[0, 0, 2] = math.inf, math.nan, -math.inf
    return q, k, v, rows, columns


def plane(high: int, wide: int, queries: int = 40) -> tuple[torch.Tensor, ...]:
    some = (torch.randn(1, 2, n, 16) for n in (queries, high * wide, high * wide))
    return (*some, *(torch.randn(1, 2, queries, n) for n in (high, wide)))


# What is the same along an axis, or in a block: `schedule.narrow`, `schedule.repeated`,
# `Dim.varies`.
ALIKE: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "alike: sampled images": (
        sampled,
        (torch.randn(3, 32, 5, 7), torch.rand(3, 9, 4, 2) * 1.2 - 0.1, torch.rand(3, 9, 4)),
    ),
    "alike: angles of heads": (turned, (torch.randn(2, 16, 24, 8), torch.rand(8))),
    "alike: angles of odd heads": (turned, (torch.randn(2, 12, 5, 6), torch.rand(6))),
    "alike: reduced, then read at places of its own": (
        lambda x, i: (x[:, None].expand(4, 6, 10).exp() * 2).sum(-1)[:, i] + x.sum(),
        (torch.randn(4, 10), torch.randint(6, (5,))),
    ),
    "alike: counted along": (
        lambda x: x[:, None].expand(4, 6, 10).exp().cumsum(1) * 2,
        (torch.randn(4, 10),),
    ),
    "alike: stored as well": (
        lambda x: ((y := x[:, None].expand(4, 6, 10).sigmoid()), y.flip(1).cumsum(1)),
        (torch.randn(4, 10),),
    ),
    "alike: rows and columns of keys, in blocks": (attention_on_a_plane, plane(2, 64)),
    "alike: rows and columns of keys, not in blocks": (attention_on_a_plane, plane(5, 14)),
    "alike: rows of keys, several in a block": (attention_on_a_plane, plane(16, 8)),
    "alike: picked": (attention_on_a_plane, tables(5, 14, False)),
    "alike: picked, not finite": (attention_on_a_plane, tables(3, 7, True)),
}


def by_deviations(x: torch.Tensor, g: torch.Tensor, deviations: torch.Tensor) -> Any:
    """Sums over images and places of what is divided by a number of an image's group."""
    y = x.view(*deviations.shape, -1, x.shape[-1]) / deviations[..., None, None]
    s = x.sigmoid()
    h = g * y.view(x.shape)
    return h.sum((0, 2)), (h * s * (1 - s)).amax((0, 2)), (g - s).amin((0, 2))


def about_means(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A channel's elements, scaled by image, less their mean."""
    y = x.exp() / scales[:, None, None]
    return y - y.mean((0, 2), keepdim=True)


# Rows that are walked part by part: `Dim.parts`.
WALKED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "walked: blocks": (
        by_deviations,
        (torch.randn(3, 4, 512), torch.randn(3, 4, 512), torch.rand(3, 2) + 0.5),
    ),
    "walked: masked blocks": (
        by_deviations,
        (torch.randn(3, 4, 230), torch.randn(3, 4, 230), torch.rand(3, 2) + 0.5),
    ),
    "walked: bf16": (
        lambda x, g, d: by_deviations(x.float(), g.float(), d),
        (
            torch.randn(5, 6, 500).bfloat16(),
            torch.randn(5, 6, 500).bfloat16(),
            torch.rand(5, 3) + 0.5,
        ),
    ),
    "walked: stored behind": (about_means, (torch.randn(4, 3, 400), torch.rand(4) + 0.5)),
    "walked: parts of two axes": (
        lambda x, a, b: ((x + 2).log2().nan_to_num() / (a[:, None] * b)[..., None, None]).sum(
            (0, 1, 3)
        ),
        (torch.randn(2, 3, 5, 200), torch.rand(2) + 0.5, torch.rand(3) + 0.5),
    ),
    "walked: parts of an outer axis": (
        lambda x, a: ((x + 2).abs() / a[:, None, None, None]).sum((0, 1, 3)),
        (torch.randn(2, 3, 5, 200).transpose(1, 2), torch.rand(2) + 0.5),
    ),
    "walked: rows that could be held": (
        lambda x, a: (((x + a[0]).abs() / a[1]).log1p() * a[2]).sum((0, 2)),
        (torch.randn(8, 4, 196), torch.rand(3, 8, 1, 1) + 0.5),
    ),
}
RUNS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    f"values of runs of {n}": (
        of_runs,
        (torch.randn(70, 4, 6, n), torch.randn(70, 4), torch.randn(6)),
    )
    for n in (16, 48)
} | {
    "group norm of runs": (
        lambda x, w, b: F.relu(F.group_norm(x, 4, w, b)),
        (torch.randn(9, 24, 32), torch.randn(24), torch.randn(24)),
    )
}
EVERY = (
    PROGRAMS
    | JOINED
    | PARTS
    | LOOPED
    | UNROLLED
    | WINDOWS
    | UNORDERED
    | ERF
    | SCANS
    | GROUPS
    | SHARED
)
EVERY |= GROUPED | ROW_SPLITS | ALIKE | WALKED | INTERLEAVED | RUNS


@contextmanager
def sharing(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if name in SHARED:
            # Without a pipeline a program needs shared memory (a cluster's exchange is in it) where
            # it has elements for more than a warp.
            odd = name.endswith("odd rows")
            patch.setattr(cooperative, "ELEMENTS_PER_PROGRAM", ((1, 256 if odd else 64), (4, 32)))
            patch.setattr(cooperative, "MIN_COOPERATIVE_ROW", 128)
            patch.setattr(tiling, "MIN_COOPERATIVE_ROW", 128)
            patch.setattr(cooperative, "MIN_STEADY_BLOCK", 64)
            patch.setattr(tiling, "ROW_LIMIT", 64)
        yield


def kernels(plan: Scheduled, name: str, gpu: str = "H200") -> list[TritonKernel]:
    looped = name in LOOPED
    with pytest.MonkeyPatch.context() as patch, sharing(name):
        if looped or name in UNORDERED | SCANS | WALKED:
            patch.setattr(tiling, "ROW_LIMIT", tiling.ROW_LIMIT if name.endswith("held") else 64)
        if name in WALKED:
            patch.setattr(tiling, "PART_BLOCKS", (256,))
            patch.setattr(tiling, "MIN_LONG_ROW_BLOCK", 256)
        if name in WINDOWS:
            patch.setattr(unroll_and_jam, "LANES_PER_CORE", 0)
        made = [generate(k, spec_of(gpu), Context(Options(verify=True))) for k in plan.kernels]
    assert name not in WINDOWS or made[0].source.count("tl.store(") > 1
    assert name not in WALKED or any("rpart" in k.source for k in made), "not in parts"
    picked = any("e2 whole" in k.source for k in made)
    assert picked == name.startswith("alike: picked"), "tables are products with ones and zeros"
    assert name not in SHARED or any(k.programs_per_row > 1 for k in made), "no cooperative kernel"
    nests = [n for k in made for n in k.source.split("@triton.jit") if "triton_red" in n]
    heads = ("for roffset", "for rback", "if rwhole")
    loops = [sum(n.count(h) for h in heads) for n in nests]
    assert not looped or loops and max(loops) <= 3, (
        "one pass for the reductions, one for the stores"
    )
    return made


def sizes_of(plan: Scheduled, args: list[Any]) -> dict[str, int]:
    out = {}
    for sym, (kind, position, dim) in plan.program.sizes:
        x = args[position]
        out[sym.name] = x if kind == "int" else (x.shape if kind == "shape" else x.stride())[dim]
    return out


def short_blocks(config: Config) -> Config:
    """Blocks of which rows of a few thousand elements have many."""
    sizes = [(k, min(v, 256) if k.startswith("RBLOCK") else v) for k, v in config.constexprs]
    return replace(config, constexprs=tuple(sizes))


def run(plan: Scheduled, args: list[Any], folder: Path, name: str) -> list[torch.Tensor]:
    """The program's outputs, its kernels interpreted."""
    quicken()
    by_halves()
    flags = torch.zeros(4096, dtype=torch.int64)
    sizes = sizes_of(plan, args)
    memory = plan.given(args)
    for k, t in zip(plan.kernels, kernels(plan, name), strict=True):
        for written, lay in k.writes:
            if written not in memory:
                shape, strides = (
                    [evaluate(i, sizes) for i in part] for part in (lay.shape, lay.strides)
                )
                memory[written] = torch.empty_strided(shape, strides, dtype=TO_TORCH[lay.dtype])
        path = folder / f"{t.name}.py"
        path.write_text(t.source)
        given: list[Any] = []
        for kind, what in t.args:
            if kind == "tensor":
                given.append(readable(memory[str(what)]))
            elif kind == "size":
                assert isinstance(what, Sym)
                given.append(sizes[what.name])
            else:
                given.append(flags)
        config = short_blocks(t.configs[0]) if name in LOOPED | UNORDERED | SCANS else t.configs[0]
        aligned = all(x.data_ptr() % 16 == 0 for x in given if isinstance(x, torch.Tensor))
        constants = t.constants(config, t.is_wide(sizes), aligned)
        kernel, grid = getattr(module(path), t.name), t.grid(config, sizes)
        if t.programs_per_row == 1:
            kernel[(grid,)](*given, **constants)
            continue
        # Few row groups, so that each walks over several rows; the next launch finds the last one's
        # flags.
        grid, inputs = min(grid, 3 * t.programs_per_row), [x.clone() for x in given[:-1]]
        together(kernel, grid, *inputs, flags, **constants)
        together(kernel, grid, *given, **constants)
        assert int(flags[0]) == 0 and int(flags[1]) > 0
    return [memory[o.tensor] for o in plan.program.outputs if o.tensor is not None]


def check(name: str, folder: Path) -> float:
    torch.manual_seed(0)
    f, args = EVERY[name]
    plan = planned(name)
    got = run(plan, list(args), folder, name)
    expected = f(*args)
    expected = list(expected) if isinstance(expected, (tuple, list)) else [expected]
    worst = 0.0
    for g, e in zip(got, expected, strict=True):
        if e.numel() == 0:
            continue
        if not e.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(g, e) else math.inf)
            continue
        bound = (2e-3 if e.dtype is torch.float16 else 2e-5) * (
            1 + float(e.nan_to_num().abs().max())
        )
        same = bool((g.isnan() == e.isnan()).all())
        worst = max(worst, float((g - e).nan_to_num().abs().max()) / bound if same else math.inf)
    return worst


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for k, name in enumerate(sys.argv[1:] or EVERY):
            own = Path(folder) / str(k)
            own.mkdir()
            try:
                print(json.dumps({"program": name, "error": check(name, own)}))
            except Exception:  # noqa: BLE001 - each program reports for itself
                print(json.dumps({"program": name, "failure": traceback.format_exc()[-3000:]}))


if __name__ == "__main__":
    main()
