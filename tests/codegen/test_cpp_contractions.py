"""Kernels with products as C++: values of programs as users write them, under many tilings, at odd
sizes, of strided and shared inputs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.base.device import device_spec
from deuteron.capture.cut import INFINITE
from deuteron.capture.partition import Costs
from deuteron.ir.reference import Execution, allocate
from deuteron.schedule import contract
from deuteron.schedule.cache_tile import feasible
from deuteron.schedule.kernel import Kernel
from deuteron.schedule.reference import run_kernel
from tests.codegen.cpp_tools import Runner
from tests.schedule import contraction_programs, planning
from tests.schedule.contraction_programs import (
    CHAINS,
    PROGRAMS,
    RANDOM,
    B,
    H,
    S,
    ahead,
    causal,
    inputs,
    nobody_sees,
    plain,
    scores,
)
from tests.schedule.planning import gradients, planned, trained

RELATIVE, FLOOR = 2.0, 1e-6  # times eager's error; of the norm
BLOCKS = (3, 8, 16, 24, 48, 64)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest kernels with products whether they pay or not."""

    def larger(*given: Any, **how: Any) -> Any:
        offers = how and isinstance(given[0], list) and isinstance(given[0][0], contract.Offer)
        return max(*given, **({"key": lambda o: len(o.region)} if offers else how))

    monkeypatch.setattr(contract, "MIN_GAIN", -1e9)
    monkeypatch.setattr(contract, "TABLE_SHARE", -1.0)
    monkeypatch.setattr(contract, "max", larger, raising=False)


@pytest.fixture
def again(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And scores are computed again in the backward, however small they are."""
    cost = Costs.multiply_again
    monkeypatch.setattr(
        Costs, "multiply_again", lambda self, n: 1 if cost(self, n) < INFINITE else INFINITE
    )


def relative(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm())


def results(kernel: Kernel, given: dict[str, Tensor], runs: bool) -> dict[str, Tensor]:
    """What the kernel writes: as C++, or by the reference executor."""
    tensors = {**given, **{n: allocate(layout, {}) for n, layout in kernel.writes}}
    if runs:
        Runner(kernel)(tensors)
    else:
        run_kernel(kernel, tensors, {})
    return {n: tensors[n] for n, _ in kernel.writes}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", sorted(PROGRAMS | RANDOM))
def test_every_tiling_computes_the_nest(name: str) -> None:
    with torch.no_grad():
        plan = planned((PROGRAMS | RANDOM)[name], *inputs(name, torch.float32), device="cpu")
    (kernel,) = plan.contractions
    assert kernel.contraction is not None and len(plan.kernels) == 1
    nest, tiling = kernel.contraction
    given, draw = plan.tensors, random.Random(name)
    wanted = results(kernel, given, runs=False)
    for k in range(4):
        dims = [
            d
            if d.block == 1 or d.mode == "whole" or not k
            else replace(d, block=draw.choice(BLOCKS))
            for d in tiling.dims
        ]
        if k == 3:  # vectors along other dimensions
            draw.shuffle(dims)
        tiled = replace(kernel, contraction=(nest, replace(tiling, dims=tuple(dims))))
        got, again = (results(tiled, given, runs=True) for _ in range(2))
        for n, w in wanted.items():
            assert relative(got[n], w) < 1e-5, dims
            assert torch.equal(got[n], again[n])


@pytest.mark.usefixtures("again")
@pytest.mark.parametrize("name", sorted(CHAINS))
def test_every_tiling_computes_the_gradients(name: str) -> None:
    args = inputs(name, torch.float32)
    plan, draw = trained(PROGRAMS[name], *args, device="cpu"), random.Random(name)
    assert not plan.calls and len(plan.contractions) >= 3
    sizes = [lay.numel.value for k in plan.kernels for _, lay in k.writes]
    assert all(n is not None and n < S * S * B * H for n in sizes), "scores are not stored"
    for call in plan.calls_made:
        memory = Execution(call.program, call.inputs).tensors | call.memory()
        for step in call.schedule.steps:
            assert isinstance(step, Kernel)
            with torch.no_grad():
                wanted = results(step, memory, runs=False)
                for tiled in (step, drawn(step, draw)) if step.contraction else ():
                    got, again = (results(tiled, memory, runs=True) for _ in range(2))
                    for n, w in wanted.items():
                        there = w.isfinite()  # not where nobody is seen
                        assert torch.equal(got[n].isfinite(), there)
                        g, w = got[n][there].double(), w[there].double()
                        off, norm = (g - w).norm(), w.norm()
                        # Sums of gradients behind a softmax are 0 but for rounding.
                        assert off < 1e-5 * norm + 1e-6 * w.numel() ** 0.5, (n, tiled)
                        assert torch.allclose(got[n], again[n], 0, 0, equal_nan=True)
            memory.update(wanted)


def drawn(kernel: Kernel, draw: random.Random) -> Kernel:
    """The same in other blocks."""
    assert kernel.contraction is not None
    nest, tiling = kernel.contraction
    dims = tuple(
        d if d.block == 1 or d.mode == "whole" else replace(d, block=draw.choice(BLOCKS))
        for d in tiling.dims
    )
    return replace(kernel, contraction=(nest, replace(tiling, dims=dims)))


@pytest.mark.usefixtures("always")
def test_batches_may_be_in_tiles() -> None:
    with torch.no_grad():
        plan = planned(plain, *inputs("plain", torch.float32), device="cpu", run=False)
    (kernel,) = plan.contractions
    assert kernel.contraction is not None
    nest, tiling = kernel.contraction
    first, *others = tiling.dims
    whole = replace(tiling, dims=(replace(first, mode="whole", block=first.extent), *others))
    given = plan.calls_made[0].memory()
    wanted = results(kernel, given, runs=False)
    got = results(replace(kernel, contraction=(nest, whole)), given, runs=True)
    assert first.extent > 1 and all(relative(got[n], w) < 1e-5 for n, w in wanted.items())
    assert not feasible(nest, whole, device_spec("cpu")), "they are no dots"


@pytest.mark.usefixtures("always")
def test_of_two_loaded_numbers_the_difference_counts() -> None:
    """Both are far, and near to one another."""
    q, k, v = inputs("plain", torch.float32)
    first, last = torch.tensor([2**40, 0]), torch.tensor([2**40 + 5, 9])

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k)
        rows = torch.arange(s.shape[-2])[:, None] + first[:, None, None, None]
        return (
            torch.softmax(torch.where(rows <= last[:, None, None, None], s, float("-inf")), -1) @ v
        )

    with torch.no_grad():
        got, wanted = torch.compile(f, backend="deuteron")(q, k, v), f(q, k, v)
    assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("length", [29, 1, 70, 2**62, 0, -(2**62)])
def test_loops_end_where_loaded_lengths_say(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies behind is not read; without a key, rows are eager's."""
    q, k, v = inputs("lengths", torch.float32)
    lengths = torch.tensor([length, 70])
    monkeypatch.setattr(contraction_programs, "LENGTHS", lengths)
    with torch.no_grad():
        plan = planned(PROGRAMS["lengths"], q, k, v, device="cpu", run=False)
        (kernel,) = plan.contractions
        wanted = PROGRAMS["lengths"](q, k, v)
    if length > 0:
        k[0, :, length:], v[0, :, length:] = math.nan, math.nan
    (got,) = results(kernel, plan.calls_made[0].memory(), runs=True).values()
    assert torch.allclose(got.view_as(wanted), wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


# -- as users call it ------------------------------------------------------------------------------


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return causal(q, k, v)


def hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last keys are hidden, and all of them from the first queries."""
    s = scores(q, k)
    rows, columns = (torch.arange(n) for n in s.shape[-2:])
    hide = (columns[None, :] > s.shape[-1] - 5) | (rows[:, None] < 3)
    return torch.softmax(s.masked_fill(hide, float("-inf")), -1) @ v


def transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    rows, columns = (torch.arange(n) for n in s.shape[-2:])
    slopes = torch.exp2(-torch.arange(1, q.shape[1] + 1).float())
    s = s + slopes[:, None, None] * (columns[None, :] - rows[:, None])
    return torch.softmax(s.masked_fill(ahead(s), float("-inf")), -1) @ v


def logarithm_too(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def unweighted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A product reads the other's result itself."""
    return q @ k.transpose(-1, -2) @ v


def balanced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Loops over queries and, behind them, over what rows are normalised by: a store in both."""
    weights = torch.softmax(scores(q, k), -1)
    weights = weights / (weights.sum(-2, keepdim=True) + 1e-2)
    return F.rms_norm(weights @ v, v.shape[-1:])


def heads(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator) for s in shapes]


CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "odd": (causal, heads(*[(1, 2, 131, 40)] * 3)),
    "one block": (causal, heads(*[(1, 2, 64, 64)] * 3)),
    "other lengths": (plain, heads((2, 3, 77, 32), (2, 3, 150, 32), (2, 3, 150, 48))),
    "grouped heads": (grouped, heads((1, 4, 130, 32), (1, 2, 130, 32), (1, 2, 130, 32))),
    "hidden rows": (hidden, heads(*[(1, 2, 100, 32)] * 3)),
    "transposed": (transposed, heads(*[(2, 130, 3, 32)] * 3)),
    "alibi": (alibi, heads(*[(1, 3, 100, 32)] * 3)),
    "logarithm of sums": (logarithm_too, heads(*[(1, 3, 100, 32)] * 3)),
    "no softmax": (unweighted, heads(*[(2, 3, 70, 32)] * 3)),
    "one query": (plain, heads((1, 3, 1, 32), (1, 3, 90, 32), (1, 3, 90, 32))),
    "one key": (causal, heads(*[(1, 3, 1, 32)] * 3)),
    "nothing": (causal, heads(*[(0, 3, 70, 32)] * 3)),
    "strided": (causal, [x[:, :, ::2, :32] for x in heads(*[(1, 2, 260, 48)] * 3)]),
    "two loops": (balanced, heads(*[(1, 2, 40, 33)] * 3)),
    "wide rows": (plain, heads(*[(1, 2, 200, 200)] * 3)),
}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", sorted(CASES))
def test_attention_is_right(name: str) -> None:
    f, args = CASES[name]
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(f, backend="deuteron", fullgraph=True)(*args)
        wanted, eager = f(*(a.double() for a in args)), f(*args)
    for g, w, e in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, wanted, eager))):
        assert g.shape == w.shape and g.stride() == e.stride()
        assert torch.equal(g.isnan(), w.isnan())
        g, w, e = (x.nan_to_num() for x in (g, w, e))
        if w.numel():
            assert relative(g, w) <= max(RELATIVE * relative(e, w), FLOOR)


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = 5 * torch.tanh(scores(q, k) / 5)
    return torch.softmax(s.masked_fill(ahead(s), float("-inf")), -1) @ v


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    i = torch.arange(s.shape[-1])
    behind = i[:, None] - i[None, :] >= 24
    return torch.softmax(s.masked_fill(ahead(s) | behind, float("-inf")), -1) @ v


def with_bias(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return torch.softmax(scores(q, k) + b, -1) @ v


TRAINED: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    **{n: CASES[n] for n in CASES if n not in ("hidden rows", "logarithm of sums")},
    "soft cap": (capped, heads(*[(1, 2, 130, 32)] * 3)),
    "window": (windowed, heads(*[(1, 2, 150, 32)] * 3)),
    "bias": (with_bias, heads((2, 3, 77, 32), (2, 3, 90, 32), (2, 3, 90, 32), (3, 77, 90))),
    "nobody sees": (nobody_sees, heads(*[(1, 3, 100, 32)] * 3)),
    "16 heads on 4": (grouped, heads((1, 16, 100, 32), (1, 4, 100, 32), (1, 4, 100, 32))),
}


@pytest.mark.usefixtures("again")
@pytest.mark.parametrize("name", sorted(TRAINED))
def test_gradients_are_right(name: str) -> None:
    f, args = TRAINED[name]
    torch._dynamo.reset()
    made = torch.compile(f, backend="deuteron", fullgraph=True)
    found = []
    for how, dtype in ((made, torch.float32), (f, torch.float32), (f, torch.float64)):
        own = [a.detach().to(dtype).requires_grad_() for a in args]
        result = how(*own)
        found.append([result, *gradients(result, own)])
    for got, eager, wanted in zip(*found, strict=True):
        assert got.shape == wanted.shape
        if wanted.numel() and float(wanted.detach().norm()):
            assert relative(got, wanted) <= max(RELATIVE * relative(eager, wanted), FLOOR)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of one machine (Cascade Lake, AVX-512) wherever the test runs."""
    spec = replace(
        device_spec("cpu"),
        bandwidth_gbps=35.6,
        gflops=(("f32", 176.0), ("f64", 88.0)),
        launch_us=0.66,
        cores=2,
        l2=1 << 20,
        l3=36 << 20,
    )
    monkeypatch.setattr(planning, "device_spec", lambda _: spec)


@pytest.mark.usefixtures("two_cores")
def test_training_holds_no_scores() -> None:
    args, every = heads(*[(1, 8, 1024, 64)] * 3), 8 << 20
    plan = trained(causal, *args, device="cpu", run=False)
    assert not plan.calls and len(plan.contractions) == 3
    assert all(lay.numel.value < every for k in plan.kernels for _, lay in k.writes)
    saved = [d for r in plan.records for d in r.of("decision") if d["subject"] == "save"]
    assert all(d["bytes"] < every for d in saved)


@pytest.mark.usefixtures("two_cores")
def test_scores_that_stay_in_the_cache_are_kept() -> None:
    plan = trained(causal, *heads(*[(8, 12, 128, 64)] * 3), device="cpu", run=False)
    assert not plan.contractions and len(plan.calls) == 6
    refused = [d["detail"] for d in plan.decisions(False) if d["reason"] == "no gain"]
    assert all("us apart" in text and "kernel" in text for text in refused)


def test_the_estimate_decides() -> None:
    with torch.no_grad():
        taken = planned(causal, *heads(*[(1, 8, 1024, 64)] * 3), device="cpu", run=False)
        w, b = torch.randn(4096, 1024), torch.randn(4096)
        other = planned(
            lambda x: F.gelu(F.linear(x, w, b)), torch.randn(2048, 1024), device="cpu", run=False
        )
    (kernel,) = taken.kernels
    assert not taken.calls and all(lay.numel.value == 8 << 16 for _, lay in kernel.writes)
    assert not other.contractions and len(other.calls) == 1
    assert any(
        d["reason"] == "no gain" and "us apart" in d["detail"] for d in other.decisions(False)
    )


def test_accesses_are_checked() -> None:
    args = heads(*[(1, 8, 256, 64)] * 3)
    torch._dynamo.reset()
    with torch.no_grad():
        f = torch.compile(causal, backend="deuteron", options={"check_accesses": True})
        assert relative(f(*args), causal(*(a.double() for a in args))) < 1e-5


def test_masks_behind_a_product_are_read_where_they_are_used() -> None:
    """Not before it, in an array of bytes; and what is stored in place is read before."""
    from deuteron.codegen.cpp.tile_text import late
    from deuteron.codegen.tile_code import Let, Value, Write

    plan = planned(
        lambda x, u, w, r: torch.where(r <= 0, 0.0, x @ u) @ w,
        torch.randn(256, 64),
        torch.randn(64, 128),
        torch.randn(128, 96),
        torch.randn(256, 128),
        device="cpu",
    )
    (kernel,) = plan.contractions
    runner = Runner(kernel)
    assert "bool tile_" not in runner.cpp.source and "float tile_" in runner.cpp.source

    a, x, y, z = (Value(n, ("i",), "f32") for n in "axyz")
    read = Let(x, "load", (a,), ("t", None))
    twice = Let(y, "op", (x, x), "add")
    dot = Let(z, "dot", (a, a, a), ("i", "i", "i", "f32"))
    assert late([read, twice, dot, Write("o", a, y, None)]) == [
        dot, read, twice, Write("o", a, y, None)
    ]  # fmt: skip
    stored = Write("t", a, z, None)
    assert late([read, dot, stored, twice, Write("o", a, y, None)])[:3] == [dot, read, stored]
