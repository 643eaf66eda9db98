"""One query of each head that reads a cache of keys, in plain code, compiled, against float64.

As a script (in a process of Triton's interpreter) it prints what is wrong with each form at the
given lengths of the cache, heads sharing keys and not, in kernels whose loops are in parts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from deuteron.schedule import contract, cover
from tests.codegen.attention_values import wrong

INF = float("-inf")
FORMS: dict[str, Callable[..., Tensor]] = {}
MASKED = ("cache", "prefix", "static", "window")  # take numbers of valid keys


def form(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    FORMS[f.__name__] = f
    return f


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5


def valid(k: Tensor, n: Tensor) -> Tensor:
    return torch.arange(k.shape[2], device=k.device) < n[:, None, None, None]


def repeated(q: Tensor, k: Tensor) -> Tensor:
    """As ``repeat_kv`` of models does it."""
    b, g, s, d = k.shape
    each = k[:, :, None].expand(b, g, q.shape[1] // g, s, d)
    return each.reshape(b, q.shape[1], s, d)


@form
def interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return torch.softmax(scores(q, k).float(), -1).to(q.dtype) @ v


@form
def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = q.unflatten(1, (k.shape[1], -1)).squeeze(3)
    return (torch.softmax(scores(rows, k), -1) @ v).reshape(q.shape)


@form
def cache(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
    k, v = repeated(q, k), repeated(q, v)
    return torch.softmax(scores(q, k).masked_fill(~valid(k, n), INF), -1) @ v


@form
def prefix(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
    """As transformers' static cache has it: a mask of the dtype's least numbers, which is added."""
    k, v = repeated(q, k), repeated(q, v)
    least = torch.finfo(q.dtype if q.dtype != torch.float64 else torch.bfloat16).min
    mask = torch.where(valid(k, n), 0.0, least).to(q.dtype)
    return torch.softmax((scores(q, k) + mask).float(), -1).to(q.dtype) @ v


@form
def static(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=valid(k, n), enable_gqa=True)


@form
def window(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
    k, v = repeated(q, k), repeated(q, v)
    near = valid(k, n) & ~valid(k, n - 40)
    return torch.softmax(torch.where(near, 20 * torch.tanh(scores(q, k) / 20), INF), -1) @ v


@form
def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = repeated(q, k), repeated(q, v)
    return torch.sigmoid(scores(q, k) - 3) @ v


def inputs(name: str, length: int, dtype: torch.dtype, groups: int = 2) -> list[Tensor]:
    """Four heads on `groups` heads of keys; of a batch's two caches one has few keys or none."""
    torch.manual_seed(length)
    heads = [
        torch.randn(2, h, n, 32).to(dtype) for h, n in ((4, 1), (groups, length), (groups, length))
    ]
    return [*heads, *([torch.tensor([length * 5 // 8, 0])] if name in MASKED else [])]


@contextmanager
def in_parts() -> Iterator[None]:
    """Kernels with products and loops in parts, whether they pay or not."""

    def fewer(kernels: Sequence[cover.Tiled]) -> float:
        return sum(k.estimate.us for k in kernels) - 1e9 * len(kernels)

    with (
        mock.patch.object(contract, "MIN_GAIN", -1e9),
        mock.patch.object(cover, "predicted_us", fewer),
    ):
        yield


def problems(
    name: str, lengths: Sequence[int], groups: int, dtype: torch.dtype, backend: Any
) -> list[str]:
    """What is less exact than twice eager's error. Of several lengths one graph for all."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(FORMS[name], backend=backend, fullgraph=True)
    out = []
    for length in lengths:
        args = inputs(name, length, dtype, groups)
        for x in args[1:3] if len(lengths) > 1 else ():
            torch._dynamo.mark_dynamic(x, 2)
        with in_parts(), torch.no_grad():
            got = compiled(*args)
        wide = [a.double() if a.is_floating_point() else a for a in args]
        text = wrong(got, FORMS[name](*args), FORMS[name](*wide), dtype)
        out += [f"length {length}: {text}"] if text else []
    graphs = counters["stats"]["unique_graphs"]
    return out if graphs == 1 else [*out, f"{graphs} graphs"]


def main(*lengths: str) -> None:
    from dev.check import interpret

    for name in FORMS:
        for text in lengths:
            numbers = [int(n) for n in text.split(",")]
            for groups in (2, 4):
                found = problems(name, numbers, groups, torch.bfloat16, interpret.interpreted)
                row = {"form": name, "lengths": text, "groups": groups, "problems": found}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
