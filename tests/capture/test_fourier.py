"""Fourier transforms: values, and the strides of eager's results, traced and real."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from deuteron.capture import fourier

aten = torch.ops.aten
TABLE = {getattr(aten, n.split(".")[1]).default: f for n, f in fourier.RULES.items()}
SHAPES = ((7,), (10, 7), (5, 6, 7), (3, 4, 5, 6))


def drawn(name: str, count: int) -> list[tuple[Any, ...]]:
    """(shape, order of the axes in memory, transformed axes)."""
    rng = random.Random(name)
    out = []
    for _ in range(count):
        shape = rng.choice(SHAPES)
        order = rng.sample(range(len(shape)), len(shape))
        out.append((shape, order, rng.sample(range(len(shape)), rng.randint(1, len(shape)))))
    return out


def decomposed(op: Any, args: tuple[Any, ...], x: torch.Tensor) -> fx.GraphModule:
    return make_fx(lambda t: op(t, *args), tracing_mode="fake", decomposition_table=TABLE)(x)


def significant(t: torch.Tensor) -> list[int]:
    return [s for s, n in zip(t.stride(), t.shape) if n > 1]


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="strides are MKL's")
@pytest.mark.parametrize("name", ["_fft_c2c", "_fft_r2c", "_fft_c2r"])
def test_strides_of_eager(name: str) -> None:
    op = getattr(aten, name).default
    for shape, order, dims in drawn(name, 40):
        x = torch.randn([shape[d] for d in order]).permute(
            [order.index(d) for d in range(len(order))]
        )
        if name != "_fft_r2c":
            x = x.to(torch.complex64)
        more: Any = {"_fft_c2c": False, "_fft_r2c": True, "_fft_c2r": 2 * (shape[dims[-1]] - 1)}
        args = (dims, 1, more[name])
        want = op(x, *args)
        gm = decomposed(op, args, x)
        traced, got = gm.graph.output_node().args[0].meta["val"], gm(x)
        where = f"{shape} {x.stride()} {dims}"
        assert significant(traced) == significant(got) == significant(want), where
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_calls_are_of_last_dimensions(rank: int) -> None:
    """On GPUs, too (none is needed): each has a contiguous result in all versions of torch."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for dims in itertools.permutations(range(rank), 2):
        with FakeTensorMode():
            x = torch.empty(*range(3, 3 + rank), device="cuda", dtype=torch.complex64)
            gm = make_fx(aten._fft_c2c.default, decomposition_table=TABLE)(x, dims, 0, True)
        for node in gm.graph.find_nodes(op="call_function", target=aten._fft_c2c.default):
            t, at = node.args[0].meta["val"], node.args[1]
            assert list(at) == list(range(t.dim() - len(at), t.dim())) and len(at) < t.dim()
            assert node.meta["val"].is_contiguous()
