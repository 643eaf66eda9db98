"""Rules by which dependent reductions share a pass: each row of the table in `schedule.online`, its
form, its identity on random rows cut into parts, exceptional rows, and what the rules refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deuteron.schedule import split
from deuteron.schedule.kernel import Nest, Reduce
from deuteron.schedule.online import Centered, Chain, Products, Rescaled, Rule
from tests.schedule import tools
from tests.schedule.tools import Scheduled, scheduled, spec_of

INF = float("inf")


def top(x: Tensor) -> Tensor:
    return x.amax(-1, keepdim=True)


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def masked_sum(x: Tensor, g: Tensor) -> Tensor:
    e = torch.exp(x - top(x))
    return torch.where(g > 0, e * g, 0.0).sum(-1) - (e / 3).sum(-1)


RULES: dict[str, tuple[type, Callable[..., Any], int]] = {
    "softmax": (Rescaled, lambda x: torch.softmax(x, -1), 1),
    "log-softmax": (Rescaled, lambda x: torch.log_softmax(x, -1), 1),
    "logsumexp": (Rescaled, lambda x: torch.logsumexp(x, -1), 1),
    "base 2": (Rescaled, lambda x: torch.exp2((x - top(x)) * 1.4426950408889634).sum(-1), 1),
    "scaled apart": (Rescaled, lambda x: torch.exp2(x * 1.25 - top(x) * 1.25).sum(-1), 1),
    "weights": (Rescaled, lambda x, g: (torch.exp(x - top(x)) * g).sum(-1), 2),
    "linear": (Rescaled, masked_sum, 2),
    "variance": (Products, lambda x: torch.var_mean(x, -1), 1),
    "written out": (Products, lambda x: ((mean(x) - x) ** 2).mean(-1), 1),
    "about the largest": (Products, lambda x: ((x - top(x)) * (x - top(x))).mean(-1), 1),
    "covariance": (Products, lambda x, g: ((x - mean(x)) * (g - mean(g))).sum(-1), 2),
}
NONE: dict[str, Callable[..., Any]] = {
    "not linear": lambda x: torch.exp(x - top(x)).square().sum(-1),
    "another maximum": lambda x: torch.exp(x - top(x * 2)).sum(-1),
    "a minimum": lambda x: torch.exp(x - x.amin(-1, keepdim=True)).sum(-1),
    "falling": lambda x: torch.exp((x - top(x)) * -0.5).sum(-1),
    "distance": lambda x: (x - mean(x)).abs().sum(-1),
    "largest deviation": lambda x: (x - mean(x)).square().amax(-1),
    "rounded between": lambda x: torch.exp((x - top(x)).bfloat16().float()).sum(-1),
}


def chain_of(nest: Nest) -> Chain:
    reduced = set(nest.reduced)
    chain = Chain(lambda e: not (e.axes() & reduced))
    for s in nest.stmts:
        if isinstance(s, Reduce):
            chain.add(s)
    return chain


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x - mean(x)).sum(-1),
        lambda x: (x - top(x)).sum(-1),
        lambda x: (x - (m := top(x)) - m.sin()).sum(-1),
    ],
)
def test_differences_from_a_row_value(f: Callable[..., Any]) -> None:
    """Only where a target asks for the rule."""
    (kernel,) = scheduled(f, torch.randn(5, 64), device="H200").kernels
    (nest,) = kernel.nests
    for centering in (False, True):
        chain = Chain(lambda e: not (e.axes() & set(nest.reduced)), centering=centering)
        passes = [chain.add(s) for s in nest.stmts if isinstance(s, Reduce)]
        assert passes == ([0, 0] if centering else [0, 1])
        assert [type(c) for c in chain.centers.values()] == [Centered] * centering


MOMENTS: dict[str, tuple[Callable[..., Any], int, set[int]]] = {
    "entropy": (lambda x: (torch.log_softmax(x, -1) * torch.softmax(x, -1)).sum(-1), 1, {1}),
    "divergence": (
        lambda x, y: (y.softmax(-1) * (y.log_softmax(-1) - x.log_softmax(-1))).sum(-1),
        2,
        {2},
    ),
    "slower": (
        lambda x: (e := ((x - top(x)) * 0.5)).exp().sum(-1) + (e.exp() * e).sum(-1),
        1,
        set(),
    ),
    "square": (lambda x: (torch.log_softmax(x, -1) ** 2 * torch.softmax(x, -1)).sum(-1), 1, set()),
    "elements": (lambda x: (torch.softmax(x, -1) * x.log_softmax(-1) * x).sum(-1), 1, set()),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_moments(name: str) -> None:
    """Exponentials times what is linear in exponents; only where a target asks for the rule."""
    f, count, slopes = MOMENTS[name]
    (kernel,) = scheduled(f, *inputs(count, 4, 300), device="H200").kernels
    (nest,) = kernel.nests
    for moments in (False, True):
        chain = Chain(lambda e: not (e.axes() & set(nest.reduced)), moments=moments)
        passes = [chain.add(s) for s in nest.stmts if isinstance(s, Reduce)]
        assert max(passes) == (0 if slopes and moments else 1)
        assert {len(m.slopes) for m in chain.weighted.values()} == (slopes if moments else set())


def rules_of(plan: Scheduled) -> list[Rule]:
    return [r for k in plan.kernels for n in k.nests for r in chain_of(n).rules.values()]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device on which reading a row twice costs more than a launch, however short the row."""
    spec = replace(spec_of("H200"), bandwidth_gbps=0.5)
    monkeypatch.setattr(tools, "spec_of", lambda device: spec)
    monkeypatch.setitem(split.MIN_PART, "cuda", 64)
    monkeypatch.setattr(split, "MIN_COLUMN_PART", 16)
    yield


def inputs(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [(torch.randn(*shape) * 3 + k).to(dtype) for k in range(count)]


@pytest.mark.parametrize("name", RULES)
def test_form(name: str) -> None:
    kind, f, count = RULES[name]
    rules = rules_of(scheduled(f, *inputs(count, 4, 300)))
    assert rules and all(isinstance(r, kind) for r in rules)


@pytest.mark.parametrize("name", NONE)
def test_refused(name: str) -> None:
    assert not rules_of(scheduled(NONE[name], *inputs(1, 4, 300), precision="eager"))


def errors(f: Callable[..., Any], args: list[Tensor], **more: Any) -> Iterator[tuple[float, float]]:
    """Ours and eager's error against f64, by output; what is not finite must be the same."""
    plan = scheduled(f, *args, device="H200", check=False, **more)
    assert plan.accepted("split")
    names = {n for k in plan.kernels for n, _ in k.reads if n.startswith("arg")}
    reducing = [k for k in plan.kernels if k.name.startswith("red")]
    assert all(sum(n in dict(k.reads) for k in reducing) == 1 for n in names), "one reading"
    ours = plan.run([a.clone() for a in args])
    listed = [torch.utils._pytree.tree_leaves(f(*xs)) for xs in (args, [a.double() for a in args])]
    for g, e, exact in zip(ours, *listed, strict=True):
        assert torch.equal(g.isnan(), e.isnan()) and torch.equal(g.isinf(), e.isinf())
        plain = exact.isfinite() & e.isfinite()
        far = [((t.double() - exact)[plain].abs().max().item() if plain.any() else 0.0)
               for t in (g, e)]  # fmt: skip
        yield far[0], far[1] + 1e-7 * (1 + exact[plain].abs().max().item() if plain.any() else 1.0)


@pytest.mark.parametrize("length", [512, 501])
@pytest.mark.parametrize("name", RULES)
def test_identity(name: str, length: int, slow: None) -> None:
    _, f, count = RULES[name]
    for ours, eager in errors(f, inputs(count, 2, length)):
        assert ours <= 2 * eager


@pytest.mark.parametrize("name", ["softmax", "logsumexp", "variance"])
def test_sizes_known_at_run_time(name: str, slow: None) -> None:
    _, f, count = RULES[name]
    for ours, eager in errors(f, inputs(count, 2, 501), dynamic=True):
        assert ours <= 2 * eager


@pytest.mark.parametrize("name", ["softmax", "logsumexp", "weights", "variance", "covariance"])
def test_other_sizes(name: str, slow: None) -> None:
    """The number of parts is that of the size seen; parts of others may be empty."""
    _, f, count = RULES[name]
    plan = scheduled(f, *inputs(count, 2, 501), device="H200", check=False, dynamic=True)
    assert plan.accepted("split")
    for length in (2, 3, 9, 64, 2000):
        args = inputs(count, 2, length)
        expected = torch.utils._pytree.tree_leaves(f(*args))
        for g, e in zip(plan.run([a.clone() for a in args]), expected, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["softmax", "logsumexp", "variance"])
def test_dtypes(name: str, dtype: torch.dtype, slow: None) -> None:
    _, f, count = RULES[name]
    for ours, eager in errors(f, inputs(count, 2, 512, dtype=dtype)):
        assert ours <= 2 * eager


@pytest.mark.parametrize("name", ["softmax", "log-softmax", "logsumexp", "base 2", "weights"])
def test_exceptional_rows(name: str, slow: None) -> None:
    """Parts and rows of minus infinity, infinity, NaN, as eager."""
    _, f, count = RULES[name]
    args = inputs(count, 5, 512)
    x = args[0]
    x[0, :] = -INF
    x[1, :300] = -INF
    x[2, 200] = INF
    x[3, 100] = float("nan")
    x[4] *= 100
    for ours, eager in errors(f, args):
        assert ours <= 2 * eager


def test_far_from_the_mean(slow: None) -> None:
    """What the difference of two large sums would lose."""
    x = torch.randn(2, 512) + 1e4
    for ours, eager in errors(lambda x: torch.var(x, -1), [x]):
        assert ours <= 2 * eager


def test_equal_numbers(slow: None) -> None:
    """What rounding leaves of the mean is a sum of parts as well."""
    x = torch.randn(3, 1).expand(3, 501).contiguous()
    for ours, _ in errors(lambda x: (torch.var(x, -1), torch.std(x, -1)), [x]):
        assert ours == 0


def test_columns(slow: None) -> None:
    x = torch.randn(4, 8, 8, 9).to(memory_format=torch.channels_last) + 3

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return torch.var_mean(x, (0, 2, 3))

    for ours, eager in errors(f, [x]):
        assert ours <= 2 * eager


def test_positions(slow: None) -> None:
    x = torch.randint(0, 30, (2, 512)).float()
    x[1, 77] = float("nan")
    plan = scheduled(lambda x: (x.argmax(-1), x.argmin(-1), x.amax(-1)), x, device="H200",
                      check=False)  # fmt: skip
    assert plan.accepted("split")
    for g, e in zip(plan.run([x]), (x.argmax(-1), x.argmin(-1), x.amax(-1)), strict=True):
        assert torch.equal(g.nan_to_num(), e.nan_to_num())
