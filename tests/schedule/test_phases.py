"""Reductions over interleaved values: halves and quarters of bytes, pairs of a rotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import deuteron  # noqa: F401 - the backend
from deuteron.schedule.kernel import Reduce
from tests.schedule.planning import Plan, planned

GROUP = 128


def halves(q: Tensor) -> Tensor:
    return torch.stack((q & 15, q >> 4), -1).flatten(-2)


def quarters(q: Tensor) -> Tensor:
    return torch.stack([q >> 2 * k & 3 for k in range(4)], -1).flatten(-2)


def scaled(w: Tensor, s: Tensor) -> Tensor:
    """Weights with a scale for each group of a row."""
    return (w.to(s.dtype).unflatten(-1, (s.shape[-1], -1)) - 8) * s[..., None]


def linear(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, scaled(halves(q), s).flatten(1))


def rows(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    return (scaled(halves(q), s).flatten(1) * x).sum(-1)


def of_quarters(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    return (scaled(quarters(q), s).flatten(1) * x).amax(-1)


def by_shifts(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    shifts = torch.arange(0, 8, 4, device=q.device, dtype=torch.uint8)
    return (scaled((q[..., None] >> shifts & 15).flatten(-2), s).flatten(1) * x).sum(-1)


def odd(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    """Without the last half of a byte, so that pairs do not divide the rows."""
    return (halves(q)[:, :-1] * x[:, :-1]).sum(-1) * s[:, 0]


def rotated(x: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs beside one another, which two reductions need."""
    a, b = x[..., 0::2], x[..., 1::2]
    y = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    return (y * torch.exp(-y.abs())).sum(-1), y.amin(-1)


def interleaved_inputs(
    f: Callable[..., Any], rows: int, k: int, groups: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows + k)
    made = torch.randn(1 if f is not rotated else rows, k, generator=generator).to(dtype)
    if f is rotated:
        return [made, *(torch.randn(rows, k // 2, generator=generator).to(dtype) for _ in "cs")]
    size = k // 4 if f is of_quarters else k // 2
    q = torch.randint(0, 256, (rows, size), dtype=torch.uint8, generator=generator)
    return [made, q, torch.rand(rows, groups, generator=generator).to(dtype)]


FORMS = (linear, rows, of_quarters, by_shifts, odd, rotated)
INTERLEAVED: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    f"interleaved: {f.__name__} of {n}": (f, tuple(interleaved_inputs(f, 300, n, n // 12)))
    for f in FORMS
    if f is not linear
    for n in (24, 1020)
}


def decisions(plan: Plan) -> list[dict[str, Any]]:
    return [d for r in plan.records for d in r.of("decision") if d["subject"] == "phases"]


def float64(f: Callable[..., Any], args: list[Tensor]) -> list[Tensor]:
    return listed(f(*(a.double() if a.is_floating_point() else a for a in args)))


def listed(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def worse_than_eager(f: Callable[..., Any], args: list[Tensor], got: Any) -> str:
    """Where an error is more than twice that of eager, and more than rounding."""
    for k, (mine, eager, true) in enumerate(
        zip(listed(got), listed(f(*args)), float64(f, args), strict=True)
    ):
        assert mine.dtype == eager.dtype and mine.shape == eager.shape
        error, usual = ((x.double() - true).abs().max().item() for x in (mine, eager))
        if error > 2 * usual + 2 * torch.finfo(mine.dtype).eps * true.abs().max().item():
            return f"result {k}: {error}, eager {usual}"
    return ""


def test_each_byte_of_halves_is_read_once() -> None:
    """H200, 14336 x 4096: 51 us with a choice for each element, of which the bytes take 7."""
    args = [torch.empty(1, 4096, dtype=torch.bfloat16)]
    args.append(torch.empty(14336, 2048, dtype=torch.uint8))
    args.append(torch.empty(14336, 4096 // GROUP, dtype=torch.bfloat16))
    with torch.no_grad():
        plan = planned(linear, *args, device="H200", run=False)
    (kernel,) = plan.kernels
    (nest,) = kernel.nests
    (total,) = (s for s in nest.stmts if isinstance(s, Reduce))
    nodes = list(total.body.walk())
    assert [a.extent.value for a in nest.reduced] == [2048]
    loads = [n for n in nodes if n.op == "load" and n.dtype == "u8"]
    assert len(loads) == 1 and not loads[0].args, "one byte, wherever"
    assert not [n for n in nodes if n.op == "where"]
    assert not [n for n in nodes if n.op == "cast" and n.dtype == "bf16"], "no rounding in between"
    (taken,) = decisions(plan)
    assert taken["accepted"] and taken["us"] > 0 and "2 terms written out" in taken["detail"]
    assert kernel.predicted_us < 20 and not plan.calls


@pytest.mark.parametrize("device", ["H200", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("f", FORMS)
def test_values(f: Callable[..., Any], dtype: torch.dtype, device: str) -> None:
    for count, k, groups in ((5, 24, 3), (257, 1020, 17)):
        args = interleaved_inputs(f, count, k, groups, dtype)
        with torch.no_grad():
            plan = planned(f, *args, device=device)
            assert not worse_than_eager(f, args, plan.results)
        assert all(not d["accepted"] for d in decisions(plan)) or f is not odd


def test_a_choice_that_no_period_decides_stays() -> None:
    def f(x: Tensor) -> Tensor:
        places = torch.arange(x.shape[-1])
        return torch.where(places % 2 * places < 100, x, x * x).sum(-1)

    args = [torch.randn(64, 1000)]
    plan = planned(f, *args, device="H200")
    assert not worse_than_eager(f, args, plan.results)


def test_what_becomes_no_simpler_stays() -> None:
    """Pairs in memory are as good as one axis."""
    f = lambda x: x.flatten(1).exp().sum(1)  # noqa: E731
    x = torch.randn(4096, 2, 1024).transpose(1, 2)
    plan = planned(f, x, device="H200")
    assert not worse_than_eager(f, [x], plan.results) and not decisions(plan)


@pytest.mark.parametrize("k", [48, 1020])
@pytest.mark.parametrize("precision", ["float32", "eager"])
@pytest.mark.parametrize("f", FORMS)
def test_values_and_gradients_on_the_cpu(f: Callable[..., Any], precision: str, k: int) -> None:
    torch._dynamo.reset()
    args = interleaved_inputs(f, 37, k, k // 12)
    for a in args:
        a.requires_grad_(a.is_floating_point())
    compiled = torch.compile(
        f, backend="deuteron", options={"precision": precision, "verify": True}
    )
    got = compiled(*args)
    assert not worse_than_eager(f, args, [x.detach() for x in listed(got)])
    wanted = [a for a in args if a.requires_grad]
    given = [torch.ones_like(x) for x in listed(got)]
    usual = torch.autograd.grad(listed(f(*args)), wanted, given, allow_unused=True)
    mine = torch.autograd.grad(listed(got), wanted, given, allow_unused=True)
    for a, b in zip(mine, usual, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_sizes_that_are_known_late() -> None:
    """A row of twice as many elements as bytes is of pairs, whatever its length."""
    torch._dynamo.reset()
    compiled = torch.compile(rows, backend="deuteron", dynamic=True)
    for k in (48, 1020, 34):
        args = interleaved_inputs(rows, 37, k, 1)
        assert not worse_than_eager(rows, args, compiled(*args))
