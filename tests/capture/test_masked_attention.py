"""``scaled_dot_product_attention`` with masks that the graph computes: plain code in kernels, whose
mask is never in memory; with other masks, or none, the library's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.backend import collecting
from deuteron.schedule.kernel import Kernel
from tests.schedule.contraction_programs import DOCUMENTS, B, D, H, S, inputs
from tests.schedule.planning import Plan, gradients, planned, trained

RELATIVE, FLOOR = 2.0, 2e-3  # times eager's error, as everywhere
PLACES = torch.arange(S)


def causal(query: Tensor, key: Tensor) -> Tensor:
    rows, columns = (torch.arange(x.shape[-2]) for x in (query, key))
    return rows[:, None] >= columns


def documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = (DOCUMENTS[:, None] == DOCUMENTS) & causal(q, k)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def slopes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    slope = torch.exp2(-torch.arange(1.0, H + 1))[:, None, None]
    bias = (slope * (PLACES - PLACES[:, None])).masked_fill(~causal(q, k), -math.inf)
    return F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype), scale=0.3)


def nothing_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first queries have no key: eager gives 0."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=PLACES[:, None] >= PLACES + 4)


def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k[:, :1], v[:, :1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q, k), enable_gqa=True)


def longer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Fewer queries than keys, which are the last ones."""
    q = q[..., 7:, :]
    ends = torch.arange(q.shape[-2])[:, None] + 7 >= PLACES
    return F.scaled_dot_product_attention(q, k, v, attn_mask=ends)


def swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As models have heads; what follows wants to view them."""
    q, k, v = (x.view(B, S, H, D).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q, k))
    return out.transpose(1, 2).reshape(B, S, H * D)


def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Several have one mask."""
    mask = causal(q, k) & (torch.tensor([S, 29])[:, None, None, None] > PLACES)
    for _ in range(2):
        v = F.scaled_dot_product_attention(q + v, k, v, attn_mask=mask)
    return v


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q, k), dropout_p=0.5)


PROGRAMS = [documents, slopes, nothing_first, shared, longer, swapped, layers]


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


def reasons(plan: Plan) -> list[str]:
    found = [d for r in plan.records for d in r.of("decision") if d["subject"] == "attention"]
    return [d["detail"] for d in found]


def squares(plan: Plan) -> list[str]:
    """What is written of as many elements as one head's scores, for each query and key."""
    every = [(n, lay) for k in plan.kernels for n, lay in k.writes]
    return [n for n, lay in every if lay.shape[-1].value == S and lay.shape[-2].value in (S, S - 7)]


@pytest.mark.parametrize("f", PROGRAMS)
def test_masks_are_not_in_memory(f: Callable[..., Tensor]) -> None:
    args = inputs("plain")
    plan = trained(f, *args)
    count = 2 if f is layers else 1
    assert not any(reasons(plan)) and not plan.calls and not squares(plan)
    forward = [s for s in plan.schedules[0].steps if isinstance(s, Kernel) and s.contraction]
    # two layers: the first's maximum and sum are a kernel of their own
    assert count <= len(forward) <= 2 * count - 1 and len(plan.contractions) <= 4 * count
    wide = [a.detach().double().requires_grad_() for a in args]
    own = [a.detach().clone().requires_grad_() for a in args]
    wanted, eager = ([r, *gradients(r, x)] for x in (wide, own) for r in (f(*x),))
    assert plan.results[0].stride() == eager[0].stride()
    for got, e, w in zip(plan.results, eager, wanted, strict=True):
        assert relative(got, w) <= max(RELATIVE * relative(e, w), FLOOR)
        assert got.isfinite().all()


def test_dropout_is_drawn_in_the_kernel() -> None:
    args = [torch.zeros_like(x) for x in inputs("plain")]
    args[2] = torch.eye(S, dtype=args[0].dtype).expand(B, H, S, S)
    with torch.no_grad():
        plan = planned(dropped, *args)
    assert [c.op for c in plan.calls] == ["deuteron.seed.default"] and len(plan.contractions) == 1
    kept, count = plan.results != 0, int(causal(*args[:2]).sum()) * B * H
    assert not (kept & ~causal(*args[:2])).any()
    assert abs(kept.sum() / count - 0.5) < 4 * (0.25 / count) ** 0.5


MASK = PLACES[:, None] >= PLACES


def given(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=MASK[None])


def without(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("f", "options", "reason"),
    [
        (given, {}, "its mask is in memory"),
        (without, {}, "without a mask"),
        (documents, {"precision": "eager"}, "options say"),
        (documents, {"recompute": False}, "options say"),
    ],
)
def test_the_library_remains(f: Any, options: Any, reason: str) -> None:
    plan = trained(f, *inputs("plain"), run=False, **options)
    (detail,) = reasons(plan)
    assert reason in detail
    assert f is not without or any("attention" in c.op for c in plan.calls)


def test_sizes_that_are_known_at_run_time_are_the_librarys() -> None:
    compiled = torch.compile(documents, backend="deuteron", dynamic=True)
    args = [x.float() for x in inputs("plain")]
    with collecting() as records:
        got = compiled(*args)
    (d,) = [d for r in records for d in r.of("decision") if d["subject"] == "attention"]
    assert not d["accepted"]
    torch.testing.assert_close(got, documents(*args))


@pytest.mark.parametrize("shape", [(S, D), (H, S, D), (B, H, 0, D), (B, H, S, 0)])
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    f = lambda x: F.scaled_dot_product_attention(x, x, x, causal(x, x))  # noqa: E731
    torch.testing.assert_close(torch.compile(f, backend="deuteron")(x), f(x))


@pytest.mark.parametrize("f", [*PROGRAMS, given, without])
@pytest.mark.parametrize("autocast", [False, True])
def test_as_eager_on_a_cpu(f: Any, autocast: bool) -> None:
    args = [x.float() for x in inputs("plain")]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got, wanted = torch.compile(f, backend="deuteron")(*args), f(*args)
    assert got.dtype == wanted.dtype and got.stride() == wanted.stride()
    limit = 3e-2 if autocast else 1e-5
    torch.testing.assert_close(got, wanted, rtol=limit, atol=limit)
