"""One lowering serves all sizes: traced with symbols, run on other sizes, no guard asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import deuteron
from deuteron.base.record import Record
from deuteron.ir.program import Compute
from deuteron.ir.reference import Evaluator
from deuteron.lower.core import LowerContext
from deuteron.lower.symfloats import number_value
from tests.lower.harness import check, lowered, trace

aten = torch.ops.aten
torch.manual_seed(0)
CUBES = [[torch.randn(s)] for s in ((6, 8, 4), (5, 12, 3), (10, 9, 7))]
EVEN = [[torch.randn(s)] for s in ((6, 8, 4), (5, 12, 3), (1, 2, 2))]
IMAGES = [[torch.randn(s)] for s in ((2, 3, 12, 10), (1, 4, 9, 7))]
INDEX = torch.tensor([0, -1, 3])


def writes(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 1:-1] = 0
    y[2] = 5.0
    y[..., ::2] += 1
    y.diagonal()[:] = 3
    return y


CASES: dict[str, tuple[Callable[..., Any], Sequence[Sequence[Any]]]] = {
    "merge": (lambda x: x.view(x.shape[0] * x.shape[1], -1) + 1, CUBES),
    "mix": (lambda x: x.view(-1).view(x.shape[1], x.shape[0], x.shape[2]) * 2, CUBES),
    "split and merge": (
        lambda x: x.view(x.shape[0], 2, -1, x.shape[2]).transpose(1, 2).reshape(x.shape[0], -1),
        EVEN,
    ),
    "heads": (
        lambda x: (
            x.view(x.shape[0], x.shape[1], 4, -1)
            .transpose(1, 2)
            .contiguous()
            .view(x.shape[0] * 4, x.shape[1], -1)
        ),
        [[torch.randn(3, 5, 32)], [torch.randn(7, 2, 32)]],
    ),
    "unflatten": (
        lambda x: x.reshape(-1, x.shape[2]).unflatten(0, (x.shape[0], x.shape[1])),
        CUBES,
    ),
    "slices": (
        lambda x: (
            x[:, 1:],
            x[:, :-1] * 1,
            x[-3:],
            x[:, ::2],
            x[2:5],
            x[:, x.shape[1] // 2 :],
            x[0],
        ),
        CUBES,
    ),
    "joins": (
        lambda x: (
            torch.cat([x, x + 1], 1),
            torch.cat([x[:, :1], x[:, 1:]], 1),
            torch.stack([x, x], 1),
        ),
        CUBES,
    ),
    "moves": (
        lambda x: (
            x.flip(1),
            x.roll(1, 1),
            x.repeat(2, 1, 3),
            x.diagonal(0, 0, 1),
            x.unfold(1, 2, 1),
        ),
        CUBES,
    ),
    "padding": (
        lambda x: (
            F.pad(x, (1, 2)),
            F.pad(x, (1, 2), mode="reflect"),
            F.pad(x, (2, 1), mode="replicate"),
            F.pad(x, (0, 0, 2, -1)),
        ),
        CUBES,
    ),
    "writes": (writes, CUBES),
    "chunks": (lambda x: x.chunk(2, 1), EVEN[:2]),
    "indexing": (
        lambda x, i: (
            x[i],
            x.index_put((i,), x[i] * 2, accumulate=True),
            x.gather(1, x.long().abs() % 2),
            torch.arange(x.shape[1]) + x[0, :, 0],
            torch.tril(x[0]),
        ),
        [[*a, INDEX] for a in CUBES],
    ),
    "reductions": (
        lambda x: (x.cumsum(1), x.sum(1), torch.full((x.shape[0],), x.shape[1])),
        CUBES,
    ),
    "pools": (
        lambda x: (
            F.max_pool2d(x, 2),
            F.avg_pool2d(x, 3, 2, 1),
            F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
            F.adaptive_avg_pool2d(x, (1, 1)),
            aten._adaptive_avg_pool2d(x, (3, 3)),
        ),
        IMAGES,
    ),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), IMAGES),
    "pixel shuffle": (
        lambda x: F.pixel_shuffle(x, 2),
        [[torch.randn(2, 8, 3, 4)], [torch.randn(1, 4, 5, 6)]],
    ),
    "loss": (
        lambda x, t: F.cross_entropy(x, t),
        [
            [torch.randn(6, 9), torch.randint(0, 9, (6,))],
            [torch.randn(4, 7), torch.tensor([0, 1, 6, -100])],
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_other_sizes(name: str) -> None:
    f, inputs = CASES[name]
    check(f, *inputs[0], dynamic=True, others=inputs[1:], rtol=1e-5)


def test_symbolic_addresses_stay_affine() -> None:
    f, inputs = CASES["heads"]
    low = lowered(trace(f, inputs[0], dynamic=True))
    layouts = low.program.layouts()
    for d in low.program.defs:
        if isinstance(d, Compute):
            for n in d.body.loads():
                address = layouts[n.attr[0]].address(n.attr[1])
                assert all(address.coefficient(a) is not None for a in address.axes()), address


def test_scale_from_sizes() -> None:
    check(lambda x: F.interpolate(x, scale_factor=2), *IMAGES[0], dynamic=True, others=IMAGES[1:])


def test_symbolic_floats() -> None:
    """The conversion itself, evaluated at other sizes than the traced ones."""
    gm = trace(lambda x: x * (x.shape[0] / (2.0 * x.shape[1]) + 1), [torch.randn(6, 8)], True)
    (number,) = [
        n.meta["val"]
        for n in gm.graph.nodes
        if isinstance(n.meta.get("val"), torch.SymFloat)
        and n.next.op == "call_function"
        and any(str(u.target) == "aten.mul.Tensor" for u in n.users)
    ]
    sizes = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"][-1].shape
    ctx = LowerContext(Record())
    e = number_value(ctx, number).expr
    for a, b in ((6, 8), (5, 3), (1, 1)):
        env = {str(s): v for s, v in zip(sizes, (a, b), strict=True)}
        got = Evaluator([], env, {}, "cpu").value(e)
        assert e.dtype == "f64" and float(got) == a / (2.0 * b) + 1


def test_sizes_of_too_many_terms() -> None:
    """Their index arithmetic would be megabytes of text: the library, and the Record says why."""

    def outer(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c = (torch.cat(xs[k : k + 4]) for k in range(3))
        return a[:, None, None] * b[:, None] * c + 1, a[:, None] * b + 1

    compiled = torch.compile(outer, backend="deuteron", dynamic=True, fullgraph=True)
    for more in (2, 5):
        xs = [torch.randn(k + more) for k in range(6)]
        for got, want in zip(compiled(*xs), outer(*xs), strict=True):
            assert torch.equal(got, want)
    reasons = {d["reason"] for d in deuteron.explain(outer, *xs, dynamic=True).library_calls}
    assert reasons == {"the number of elements is a sum of 64 products of sizes"}
