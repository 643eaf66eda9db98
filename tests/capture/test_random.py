"""Random numbers as functions of a seed: reference, distribution, agreement of forward and
backward, reproducibility."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from deuteron.capture import partition
from deuteron.graph.random_ops import RAND, RANDINT64, RANDN, philox
from tests.capture.helpers import Traced


def test_philox_known_answers():
    """From the authors' kat_vectors file of Random123: philox4x32, 10 rounds."""
    zero = [int(w) for w in philox(torch.tensor(0), 0, 1)]
    assert zero == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_elements_do_not_depend_on_the_size():
    seed = torch.tensor(1234)
    assert torch.equal(
        RAND(seed, 3, [1000], torch.float32)[:10], RAND(seed, 3, [10], torch.float32)
    )
    assert not torch.equal(RAND(seed, 3, [10], torch.float32), RAND(seed, 4, [10], torch.float32))
    assert not torch.equal(
        RAND(seed, 3, [10], torch.float32), RAND(seed + 1, 3, [10], torch.float32)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distributions(dtype):
    seed, n = torch.tensor(-7), 400_000
    u, z = RAND(seed, 0, [n], dtype), RANDN(seed, 1, [n], dtype)
    assert u.dtype == dtype and float(u.min()) >= 0 and float(u.max()) < 1
    # 5 standard errors of mean and variance; kurtosis of a normal distribution is 3
    assert abs(float(u.mean()) - 0.5) < 5 * (1 / 12 / n) ** 0.5
    assert abs(float(z.mean())) < 5 / n**0.5
    assert abs(float(z.var()) - 1) < 5 * (2 / n) ** 0.5
    assert abs(float((z**4).mean()) - 3) < 5 * (96 / n) ** 0.5
    counts = torch.bincount((u * 16).long(), minlength=16)
    assert (
        float(((counts - n / 16) ** 2 / (n / 16)).sum()) < 50
    )  # chi-squared, 15 degrees of freedom: p < 1e-5
    i = RANDINT64(seed, 2, -3, 5, [n])
    assert (int(i.min()), int(i.max())) == (-3, 4)
    counts = torch.bincount(i + 3)
    assert float(((counts - n / 8) ** 2 / (n / 8)).sum()) < 40


# Pairs of bounds whose difference is small, a power of two, odd and large, or beyond 2^63.
RANGES = [(-5, 2), (0, 2**63 - 1), (-(2**62), 2**62), (-(2**63), 2**63 - 1), (-7, 3 * 2**61)]
RANGES += [(2**62, 2**62 + 2**41 + 3), (-(2**63), 2**61 + 5)]


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_whole_numbers_of_any_range(low, high):
    """Of words that are known, numbers are what arithmetic without limits makes of them; compiled
    they are the same, inside the range, and spread over it."""
    seed, n = torch.tensor(77), 4096
    x0, x1, _, _ = (w.tolist() for w in philox(seed, 2, n))
    count = high - low
    kept = 2**63 if count <= 2**40 else 2**64
    exact = [low + (a + 2**32 * b) % kept % count for a, b in zip(x0, x1, strict=True)]
    assert RANDINT64(seed, 2, low, high, [n]).tolist() == exact
    torch._dynamo.reset()
    compiled = torch.compile(lambda s: RANDINT64(s, 2, low, high, [n]), backend="deuteron")
    assert compiled(seed).tolist() == exact
    torch._dynamo.reset()
    drawn = torch.compile(lambda: torch.randint(low, high, (n,)), backend="deuteron")().tolist()
    assert low <= min(drawn) and max(drawn) < high
    shares = [sum(x < low + k * count // 4 for x in drawn) / n for k in (1, 2, 3)]
    if count > 100 and 2**64 % count < count // 100:  # else some are likelier, as eager's are
        assert all(abs(s - k / 4) < 0.04 for k, s in enumerate(shares, start=1)), shares


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dropout_gradients_use_the_mask_of_the_forward(dtype, monkeypatch):
    monkeypatch.setitem(
        partition.FLOPS_PER_BYTE, "cpu", 1e9
    )  # arithmetic is free: only the seed should cross
    traced = Traced()
    f = traced.compile(lambda x: F.dropout(x * 2, 0.3))
    x = torch.ones(4000, dtype=dtype, requires_grad=True)
    y = f(x)
    y.sum().backward()
    assert torch.equal(y == 0, x.grad == 0)
    assert abs(float((y == 0).float().mean()) - 0.3) < 0.04
    names = traced.targets()
    assert "deuteron.rand.default" in names and not any(
        "native_dropout" in n or "aten.rand" in n for n in names
    )
    backward = dict(traced.graphs)["backward"]
    saved = [n.meta["val"] for n in backward.graph.find_nodes(op="placeholder")]
    assert [tuple(v.shape) for v in saved] == [(), (4000,)]


@pytest.mark.parametrize("p", [0.001, 0.0, 1.0])
def test_dropout_probability_in_half_types(p):
    y = Traced().compile(lambda x: F.dropout(x, p))(torch.ones(300_000, dtype=torch.bfloat16))
    share = float((y == 0).float().mean())
    assert abs(share - p) <= 5 * (p * (1 - p) / 300_000) ** 0.5


def test_same_seed_same_numbers():
    def f(x):
        a = torch.rand(3, 4) + torch.rand_like(x)
        b = torch.randn(3, 4) * torch.bernoulli(x) + torch.empty(3, 4).uniform_(-2, -1)
        return a, b, torch.randint(5, (3, 4)), torch.empty(3, 4).normal_(3, 0.1), F.dropout(x)

    traced = Traced()
    compiled = traced.compile(f)
    x = torch.full((3, 4), 0.5)
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(3)
    again = compiled(x)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not any(torch.equal(a, b) for a, b in zip(first[:2], second[:2]))
    assert traced.targets().count("deuteron.seed.default") == 1
    assert not any(
        n.startswith("aten.") and ("rand" in n or "bernoulli" in n or "uniform" in n)
        for n in traced.targets()
    )
    assert float(first[1].max()) < 4 and 2.5 < float(first[3].mean()) < 3.5


def test_strides_of_like():
    traced = Traced()
    x = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    y = traced.compile(lambda x: torch.rand_like(x))(x)
    assert y.stride() == x.stride() and y.unique().numel() > 100


def test_half_types_never_reach_one():
    traced = Traced()
    u = traced.compile(lambda: torch.rand(200_000, dtype=torch.bfloat16))()
    assert float(u.max()) < 1 and u.unique().numel() == 256


def test_own_generator_and_rowless_operators_stay():
    traced = Traced()
    torch.manual_seed(0)
    expected = torch.randperm(10)
    torch.manual_seed(0)
    assert torch.equal(traced.compile(lambda: torch.randperm(10))(), expected)
    (entry,) = [e for e in traced.records[0].of("decision") if e["subject"] == "random"]
    assert entry["accepted"] is False and entry["detail"]


def test_eager_random():
    traced = Traced(options={"eager_random": True})
    x = torch.randn(50, requires_grad=True)

    def f(x):
        return F.dropout(x.sin(), 0.5) + torch.rand(50)

    torch.manual_seed(1)
    expected = f(x)
    torch.manual_seed(1)
    assert torch.equal(traced.compile(f)(x), expected)


def test_a_draw_that_nobody_reads_counts():
    """Those after it differ without it (seed 64003770)."""
    traced = Traced(options={"eager_random": True})

    def f(x):
        shaped = torch.zeros_like(torch.rand(4))
        return torch.bernoulli(shaped + 0.5), torch.rand(4) + x

    torch.manual_seed(1)
    expected = f(torch.ones(4))
    torch.manual_seed(1)
    assert all(map(torch.equal, traced.compile(f)(torch.ones(4)), expected))


def test_a_draw_of_which_only_the_shape_is_read_counts():
    """Decompositions take the shape alone, and AOTAutograd drops what nobody reads then (seed
    68007967)."""
    f = lambda x: (torch.rand_like(x).new_zeros(x.shape), torch.rand(4) + x)  # noqa: E731
    torch.manual_seed(1)
    expected = f(torch.ones(4))
    torch.manual_seed(1)
    g = torch.compile(f, backend="deuteron", fullgraph=True, options={"eager_random": True})
    assert all(map(torch.equal, g(torch.ones(4)), expected))


def test_a_draw_that_nobody_reads_counts_in_training():
    """Neither forward nor backward needs it, and a recomputed one stays in its place."""

    def f(x, w):
        shaped = torch.zeros_like(torch.rand(5, 5)).sum()
        y = F.dropout(F.softplus(x) * w, 0.3)
        zeros = torch.rand_like(x).new_zeros(3)
        return F.dropout(y, 0.5) + shaped, torch.rand(3) + zeros

    ins = [torch.randn(7, requires_grad=True) for _ in range(2)]
    results = []
    for g in (f, torch.compile(f, backend="deuteron", options={"eager_random": True})):
        torch.manual_seed(1)
        y, r = g(*ins)
        results.append([y, r, *torch.autograd.grad(y.sum(), ins)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("eager_random", [False, True])
def test_checkpoint_repeats_the_numbers(eager_random):
    traced = Traced(options={"eager_random": eager_random})
    w = torch.randn(16, 16, requires_grad=True)

    def block(x):
        return F.dropout((x @ w).relu(), 0.5)

    def f(x):
        return checkpoint(block, x, use_reentrant=False)

    x = torch.randn(8, 16, requires_grad=True)
    y = traced.compile(f)(x)
    y.sum().backward()
    pre = (x @ w).detach()
    kept = y.detach() != 0
    torch.testing.assert_close(y.detach(), torch.where(kept, pre.relu() * 2, 0.0))
    torch.testing.assert_close(x.grad, (kept & (pre > 0)).float() * 2 @ w.detach().t())
    assert any("mm" in t for t in traced.targets("backward"))


@pytest.mark.parametrize("eager_random", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_views_share_memory_with_the_numbers(grad, eager_random):
    def f(x):
        drawn = torch.rand_like(x)
        return drawn, drawn.split(1)[1], drawn.as_strided((2, 3), (1, 2)), x * drawn

    x = torch.ones(2, 4, requires_grad=grad)
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="deuteron", options={"eager_random": eager_random})
    for got in (f(x), compiled(x)):
        drawn, part, windows, _ = got
        drawn.copy_(torch.arange(8.0).reshape(2, 4))
        assert part.tolist() == [[4, 5, 6, 7]] and windows.tolist() == [[0, 2, 4], [1, 3, 5]]
