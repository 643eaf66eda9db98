"""The suite `seeds`: the programs that every description of operator fusion starts with.

Beside them stand kernels written by hand: `examples/`.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dev.bench.cases import Absent, Case, Program, Spec


def by_hand(file: str, name: str) -> dict[str, Callable[[], Callable[..., Any]]]:
    """A function of a file in `examples`, in Triton."""

    def triton() -> Callable[..., Any]:
        if not torch.cuda.is_available():
            raise Absent("Triton needs a GPU")
        return getattr(importlib.import_module(f"examples.{file}"), name)

    return {"handwritten": triton}


def gelu_by_hand() -> dict[str, Callable[[], Callable[..., Any]]]:
    """In Triton, and in CUDA C++."""

    def native() -> Callable[..., Any]:
        from examples import gelu_cuda

        if reason := gelu_cuda.missing():
            raise Absent(reason)
        return gelu_cuda.built()

    return by_hand("gelu_triton", "gelu") | {"handwritten-cuda": native}


def sin_chain(n: int) -> Program:
    return Program(lambda a: torch.sin((a + 1) * 2), (Spec((n,), "fp32"),))


def pointwise_model(rows: int, width: int, dtype: str) -> Program:
    """Nothing but arithmetic, element by element: scale, shift, gates, activations."""

    def fn(a: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> Tensor:
        h = F.silu(a * scale + shift)
        h = h * torch.sigmoid(gate) + torch.tanh(a) * (1 - torch.sigmoid(gate))
        return F.relu(h - 0.1).square() + a

    row = Spec((width,), dtype)
    return Program(fn, (Spec((rows, width), dtype), row, row, Spec((rows, width), dtype)))


def mixed_model(rows: int, width: int, dtype: str) -> Program:
    """Products, norms and arithmetic: one block of a network without attention."""

    def fn(a: Tensor, g: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        h = F.layer_norm(a, (width,), g)
        return a + F.gelu(h @ up + bias) @ down

    s = width**-0.5
    return Program(
        fn,
        (
            Spec((rows, width), dtype),
            Spec((width,), dtype, scale=0.1, shift=1.0),
            Spec((width, 4 * width), dtype, scale=s),
            Spec((4 * width,), dtype),
            Spec((4 * width, width), dtype, scale=s / 2),
        ),
        flops=16.0 * rows * width * width,
    )


def gelu(n: int, dtype: str) -> Program:
    """The tanh form of GELU, written out."""

    def fn(a: Tensor) -> Tensor:
        inner = math.sqrt(2 / math.pi) * (a + 0.044715 * a * a * a)
        return 0.5 * a * (1 + torch.tanh(inner))

    return Program(fn, (Spec((n, n), dtype),), handwritten=gelu_by_hand())


def softmax(rows: int, columns: int, dtype: str) -> Program:
    spec = Spec((rows, columns), dtype)
    return Program(lambda a: a.softmax(-1), (spec,), handwritten=by_hand("softmax", "softmax"))


def layer_norm(rows: int, columns: int, dtype: str) -> Program:
    row = Spec((columns,), dtype, scale=0.1, shift=1.0)
    return Program(
        lambda a, w, b: F.layer_norm(a, (columns,), w, b),
        (Spec((rows, columns), dtype), row, row),
        handwritten=by_hand("layer_norm", "layer_norm"),
    )


def linear_relu(m: int, n: int, k: int, dtype: str) -> Program:
    return Program(
        lambda a, w, b: F.relu(a @ w + b),
        (Spec((m, k), dtype), Spec((k, n), dtype, scale=k**-0.5), Spec((n,), dtype)),
        flops=2.0 * m * n * k,
        handwritten=by_hand("linear_relu", "linear_relu"),
    )


def attention(b: int, h: int, t: int, d: int, dtype: str) -> Program:
    """Causal attention as the formula says it."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = torch.ones(t, t, dtype=torch.bool, device=q.device).tril()
        scores = (q @ k.transpose(-2, -1)) * d**-0.5
        return scores.masked_fill(~keep, float("-inf")).softmax(-1) @ v

    one = Spec((b, h, t, d), dtype)
    half = 2.0 * b * h * t * t * d  # the other half is masked
    return Program(fn, (one, one, one), flops=half, handwritten=by_hand("attention", "attention"))


GPU_SEEDS: tuple[tuple[str, str, bool, Callable[[], Program]], ...] = (
    ("sin chain fp32 10M", "fp32", True, functools.partial(sin_chain, 10_000_000)),
    (
        "pointwise model bf16 32768x4096",
        "bf16",
        True,
        functools.partial(pointwise_model, 32768, 4096, "bf16"),
    ),
    (
        "mixed model bf16 8192x1024",
        "bf16",
        True,
        functools.partial(mixed_model, 8192, 1024, "bf16"),
    ),
    ("gelu fp32 16384x16384", "fp32", True, functools.partial(gelu, 16384, "fp32")),
    ("gelu bf16 16384x16384", "bf16", False, functools.partial(gelu, 16384, "bf16")),
    ("softmax fp32 16384x8192", "fp32", True, functools.partial(softmax, 16384, 8192, "fp32")),
    ("softmax bf16 32768x8192", "bf16", False, functools.partial(softmax, 32768, 8192, "bf16")),
    (
        "layer norm bf16 32768x8192",
        "bf16",
        True,
        functools.partial(layer_norm, 32768, 8192, "bf16"),
    ),
    (
        "linear relu bf16 8192x4096x4096",
        "bf16",
        True,
        functools.partial(linear_relu, 8192, 4096, 4096, "bf16"),
    ),
    (
        "attention bf16 4x16x4096x128",
        "bf16",
        True,
        functools.partial(attention, 4, 16, 4096, 128, "bf16"),
    ),
)

CPU_SEEDS: tuple[tuple[str, str, bool, Callable[[], Program]], ...] = (
    ("sin chain fp32 10M", "fp32", True, functools.partial(sin_chain, 10_000_000)),
    (
        "pointwise model fp32 4096x1024",
        "fp32",
        True,
        functools.partial(pointwise_model, 4096, 1024, "fp32"),
    ),
    ("mixed model fp32 512x256", "fp32", True, functools.partial(mixed_model, 512, 256, "fp32")),
    ("gelu fp32 4096x4096", "fp32", True, functools.partial(gelu, 4096, "fp32")),
    ("softmax fp32 4096x2048", "fp32", True, functools.partial(softmax, 4096, 2048, "fp32")),
    ("layer norm fp32 4096x2048", "fp32", True, functools.partial(layer_norm, 4096, 2048, "fp32")),
    (
        "linear relu fp32 512x512x512",
        "fp32",
        True,
        functools.partial(linear_relu, 512, 512, 512, "fp32"),
    ),
    (
        "attention fp32 1x8x512x64",
        "fp32",
        True,
        functools.partial(attention, 1, 8, 512, 64, "fp32"),
    ),
)


def seeds(device: str) -> list[Case]:
    return [
        Case("seeds", name, dtype, False, make, quick)
        for name, dtype, quick, make in (GPU_SEEDS if device == "cuda" else CPU_SEEDS)
    ]
