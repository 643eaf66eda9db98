"""Products in one kernel with what surrounds them: which nests come out, what they compute, and why
others do not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deuteron.base.device import named_gpu
from deuteron.ir import nest
from deuteron.ir.index import Axis, Index, const
from deuteron.ir.nest import Nest, Reduce
from deuteron.ir.program import Compute
from deuteron.schedule import contract, cover
from deuteron.schedule.closure import closure
from deuteron.schedule.legality import Refusal
from deuteron.schedule.masks import Bound, bounds, neutral
from deuteron.schedule.reference import run_kernel
from deuteron.schedule.tile import are_dots, candidates
from tests.schedule.contraction_programs import CHAINS, PROGRAMS, inputs
from tests.schedule.planning import planned, trained

RELATIVE = 2.0  # times eager's error, as everywhere
FLOOR = 2e-3


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_one_kernel_is_right(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    f, args = PROGRAMS[name], inputs(name, dtype)
    with torch.no_grad():
        plan = planned(f, *args)
    assert len(plan.contractions) == len(plan.kernels) == 1 and not plan.calls, plan.schedules
    wide = [a.double() if a.is_floating_point() else a for a in args]
    wanted, eager = f(*wide), f(*args)
    floor = FLOOR if dtype == torch.bfloat16 else 1e-7
    assert relative(plan.results, wanted) <= max(RELATIVE * relative(eager, wanted), floor)


def test_a_batch_whose_results_are_rows_is_walked_one_by_one() -> None:
    """Products of heads, which another has as rows: tiles of several batches would not be dots."""
    torch.manual_seed(0)
    weights, values = (
        torch.rand(1568, 4, 16, 16).bfloat16(),
        torch.randn(1568, 4, 16, 10).bfloat16(),
    )
    w, b = torch.randn(40, 40).bfloat16(), torch.randn(40).bfloat16()

    def f(weights: Tensor, values: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear((weights @ values).transpose(1, 2).reshape(1568, 16, 40), w, b)

    with torch.no_grad():
        plan = planned(f, weights, values, w, b, device="H200", run=False)
    chained = [k.contraction for k in plan.contractions if len(k.contraction[0].contractions) == 2]
    assert chained
    for n, _ in chained:
        for k in plan.contractions:
            for tiling, _ in candidates(n, {**dict(k.reads), **dict(k.writes)}, named_gpu("H200")):
                assert are_dots(n, tiling)


@pytest.mark.parametrize("name", sorted(CHAINS))
def test_scores_are_not_stored(name: str) -> None:
    with torch.no_grad():
        plan = planned(PROGRAMS[name], *inputs(name), run=False)
    (kernel,) = plan.kernels
    assert all(layout.numel.value <= 2 * 3 * 70 * 70 for _, layout in kernel.writes)
    (taken,) = plan.decisions(True)
    assert "us in one kernel" in taken["detail"] and "us apart" in taken["detail"]


def gelu_of_large(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x @ w)


def normed(x: Tensor, w: Tensor) -> Tensor:
    return torch.cumsum(x @ w, 1)


def twice(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return torch.relu(y) + torch.relu(y.flip(0))


def routed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    p = (x @ w).softmax(-1)
    return p, p.argmax(-1)


REFUSED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], str]] = {
    "the library is faster": (gelu_of_large, [(4096, 8192), (8192, 512)], "no gain"),
    "positions": (routed, [(70, 64), (64, 64)], "no nest"),
    "a scan": (normed, [(70, 64), (64, 48)], "no nest"),
    "rows at odd places": (gelu_of_large, [(512, 333), (333, 512)], "no tiling"),
    "two places": (twice, [(70, 64), (64, 48)], "no nest"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refusals_say_why(name: str) -> None:
    f, shapes, reason = REFUSED[name]
    args = [torch.randn(*s, dtype=torch.bfloat16) for s in shapes]
    with torch.no_grad():
        plan = planned(f, *args, run=False)
    reasons = {d["reason"]: d["detail"] for d in plan.decisions(False)}
    assert reason in reasons and reasons[reason], plan.decisions(False)
    if reason == "no gain":
        assert "us in one kernel" in reasons[reason] and "us apart" in reasons[reason]


BEATEN = re.compile(
    r"([\d.]+) us saved less ([\d.]+) for memory that only it reads; (\w+) to (\w+): "
    r"([\d.]+) less ([\d.]+); .* us apart.*"
)


def test_what_is_beaten_names_the_kernel_that_is_there_and_both_figures() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = (q @ k.mT).masked_fill(torch.ones(512, 512, dtype=torch.bool).triu(1), -torch.inf)
        return s.softmax(-1) @ v

    plan = trained(
        attention, *(torch.randn(2, 4, 512, 64, dtype=torch.bfloat16) for _ in "qkv"), run=False
    )
    seen = set()
    for record in plan.records:
        decisions = [d for d in record.of("decision") if d["subject"] == "contract"]
        taken = {(d["first"], d["second"]): d["us"] for d in decisions if d["accepted"]}
        for d in decisions:
            if d["reason"] not in ("another saves more", "leaves more in memory"):
                continue
            seen.add(d["reason"])
            match = BEATEN.fullmatch(d["detail"])
            assert match, d["detail"]
            saved, left, other, other_left = map(float, match.group(1, 2, 5, 6))
            assert abs(saved - d["us"]) < 0.1 and abs(taken[match.group(3, 4)] - other) < 0.1
            assert saved - left <= other - other_left + 0.2  # as rounded
            assert (d["reason"] == "another saves more") is (d["us"] <= taken[match.group(3, 4)])
    assert "another saves more" in seen


def test_factors_of_f32_are_rounded_where_the_user_allows_it() -> None:
    x, w = torch.randn(70, 64), torch.randn(64, 48)
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed, operands in ((False, "f32"), (True, "tf32")):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            with torch.no_grad():
                plan = planned(lambda x, w: torch.relu(x @ w), x, w, run=False)
            assert plan.contractions[0].contraction is not None
            (product,) = plan.contractions[0].contraction[0].reductions.values()
            assert product.operands == operands and product.factors == "f32"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_wide_sizes_and_old_devices_are_the_librarys() -> None:
    x, w = torch.randn(70, 64), torch.randn(64, 48)
    with torch.no_grad():
        doubles = [a.double() for a in (x, w)]
        assert not planned(lambda x, w: torch.relu(x @ w), *doubles, run=False).contractions
        halves = [a.to(torch.bfloat16) for a in (x, w)]
        assert planned(lambda x, w: torch.relu(x @ w), *halves, run=False).contractions
        old = planned(lambda x, w: torch.relu(x @ w), *halves, run=False, device="V100")
        assert not old.contractions  # its tensor cores have no bf16


def closures_of_layers(count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How often regions of so many alike layers were made one nest, and how many kernels became."""
    made = 0

    def counted(*given: Any) -> Nest | Refusal:
        nonlocal made
        made += 1
        return closure(*given)

    def layers(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        for _ in range(count):
            x = x + F.gelu(F.rms_norm(x, x.shape[-1:]) @ w) @ u
        return x

    args = [torch.randn(*s, dtype=torch.bfloat16) for s in [(70, 64), (64, 160), (160, 64)]]
    with torch.no_grad(), monkeypatch.context() as patch:
        for module in (contract, cover):
            patch.setattr(module, "closure", counted)
        plan = planned(layers, *args)
    wide = [a.double() for a in args]
    assert relative(plan.results, layers(*wide)) <= max(
        RELATIVE * relative(layers(*args), layers(*wide)), FLOOR
    )
    assert not plan.calls, "a kernel has each product"
    return made, len(plan.contractions)


def test_alike_layers_are_reckoned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few, kernels_of_few = closures_of_layers(3, monkeypatch)
    many, kernels_of_many = closures_of_layers(8, monkeypatch)
    assert kernels_of_many - kernels_of_few >= 3
    assert 0 < many <= few + 2


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not out._is_view():
            self.elements = max(self.elements, out.numel())
        return out


def fanned_out(x: Tensor, w: Tensor, many: int) -> list[Tensor]:
    """A product, and as many readers of its scores, each of which is multiplied again."""
    scores = x @ w
    return [(scores * k).relu() @ w for k in range(1, many + 1)]


@pytest.mark.parametrize(("many", "refused"), [(4, False), (12, True)])
def test_the_search_for_kernels_is_bounded(
    many: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No nest is made twice, for whatever region (names are numbers here: what computes the same
    is equal), and regions of very many results are not looked at: only products alone are."""
    made: list[tuple[tuple[str, ...], tuple[Compute, ...]]] = []

    def counted(computes: Any, sinks: Any, *rest: Any) -> Any:
        made.append((tuple(sinks), tuple(computes.values())))
        return closure(computes, sinks, *rest)

    def searched(computes: Any, sinks: Any, *rest: Any) -> Any:
        assert len(sinks) <= contract.MAX_SINKS
        return cover.cover(computes, sinks, *rest)

    monkeypatch.setattr(cover, "closure", counted)
    monkeypatch.setattr(contract, "cover", searched)
    x, w = torch.randn(2, 48, 64), torch.randn(2, 64, 64)
    plan = planned(lambda x, w: fanned_out(x, w, many), x, w, device="cpu", run=False)
    assert len(made) == len(set(made)) and all(len(inside) == 1 for _, inside in made) is refused
    reasons = {d["reason"] for d in plan.decisions(False)}
    assert ("many results" in reasons) is refused


@pytest.mark.parametrize(("rows", "generated"), [(64, True), (1024, False)])
def test_a_product_alone_is_a_kernel_where_the_call_takes_longer(
    rows: int, generated: bool
) -> None:
    """On a CPU, in whatever order in memory; the figures of both are in the Record."""
    x, w = torch.randn(rows, 512), torch.randn(rows, 512).t()
    plan = planned(lambda x, w: x @ w, x, w, device="cpu", run=generated)
    assert len(plan.contractions) == generated and len(plan.calls) == (not generated)
    (d,) = [d for d in plan.records[0].of("decision") if d["subject"] == "product"]
    assert d["accepted"] is generated and (d["generated_us"] <= d["library_us"]) is generated
    assert d["along"] == [True, True]
    if generated:
        assert relative(plan.results, x.double() @ w.double()) < 1e-6
    else:
        assert f"{rows}x512 by 512x{rows}: generated" in plan.calls[0].reason


def test_what_products_take_in_stands_between_no_longer() -> None:
    """A norm and what is added to it behind two products would be a cycle, through the products; in
    the end these are in one kernel with the sum."""

    def f(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        y = x + 1
        return y + torch.relu(y * torch.rsqrt(y.square().mean(-1, keepdim=True)) @ u) @ v

    plan = planned(f, torch.randn(64, 64), torch.randn(64, 128), torch.randn(128, 64), device="cpu")
    assert len(plan.contractions) == 1
    fused = [d for d in plan.records[0].of("decision") if d["subject"] == "fuse"]
    cycle, now = ([d for d in fused if d["reason"] == r] for r in ("cycle", "in another kernel"))
    assert {(d["first"], d["second"]) for d in now} == {(cycle[0]["first"], cycle[0]["second"])}


@pytest.mark.parametrize(("dtype", "device"), [(torch.float32, "cpu"), (torch.bfloat16, "H200")])
def test_a_factor_of_ones_is_none(dtype: torch.dtype, device: str) -> None:
    """What is multiplied with it is summed."""

    def f(x: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        a = x @ w
        sums = torch.ones_like(a) @ a
        return torch.relu(sums) @ u, (a * 2) @ u

    args = [torch.randint(-2, 3, (64, 64)).to(dtype) for _ in range(3)]
    plan = planned(f, *args, device=device, run=device == "cpu")
    assert plan.contractions
    if device == "cpu":
        for got, want in zip(plan.results, f(*args), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["causal", "transposed", "mlp", "rms_linear"])
def test_values_are_made_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference executor needs no memory for all scores, and gives the same results."""
    with torch.no_grad():
        plan = planned(PROGRAMS[name], *inputs(name))
    (kernel,) = plan.contractions
    tensors = plan.tensors
    whole = {n: tensors[n].clone() for n, _ in kernel.writes}
    monkeypatch.setattr(nest, "BLOCK_POINTS", 1 << 10)
    for n, _ in kernel.writes:
        tensors[n].fill_(torch.nan)
    with Largest() as largest:
        run_kernel(kernel, tensors, {})
    stored = max(t.numel() for t in whole.values())
    assert largest.elements <= max(stored, 8 << 10)
    for n, wanted in whole.items():
        assert relative(tensors[n], wanted.double()) <= FLOOR


# -- masks -----------------------------------------------------------------------------------------


def bounds_of(name: str) -> tuple[tuple[Bound, ...], Nest]:
    with torch.no_grad():
        plan = planned(PROGRAMS[name], *inputs(name), run=False)
    kernel = plan.contractions[0]
    spec = named_gpu("H100")
    assert kernel.contraction is not None and spec is not None
    nest, _ = kernel.contraction
    tilings = candidates(nest, dict(kernel.reads) | dict(kernel.writes), spec)
    loop = next(d for t, _ in tilings for d in t.dims if d.mode == "loop")
    over = [s for s in nest.reductions.values() if loop.axes[0] in s.over]
    return bounds(neutral(over, set(), set()), loop.axes[0]), nest


def value_at(index: Index, place: int) -> int | None:
    from deuteron.ir.index import substitute

    return substitute(index, {a: const(place) for a in index.axes()}).value


def test_a_causal_mask_is_a_bound() -> None:
    (bound,), _ = bounds_of("causal")
    assert bound.upper and value_at(bound.index, 10) == 11


def test_whether_a_row_sees_anything_is_cut_as_the_row_is() -> None:
    (bound,), nest = bounds_of("nobody_sees")
    assert bound.upper and value_at(bound.index, 10) == 11
    assert {s.kind for s in nest.reductions.values()} == {"max", "sum", "any"}


def test_a_window_is_two_bounds() -> None:
    found, _ = bounds_of("window")
    assert {b.upper for b in found} == {True, False}
    (low,) = [b for b in found if not b.upper]
    assert value_at(low.index, 30) == 30 - 16 + 1


def test_a_length_that_is_loaded_is_a_bound() -> None:
    (bound,), _ = bounds_of("lengths")
    assert bound.upper and bound.loaded
    found, _ = bounds_of("starts")
    assert [(b.upper, b.loaded) for b in sorted(found, key=lambda b: b.upper)] == [
        (False, True),
        (True, False),
    ]


def test_a_bias_is_no_bound() -> None:
    assert bounds_of("bias")[0] == ()


def test_reductions_without_the_mask_are_not_cut() -> None:
    (bound,), nest = bounds_of("causal")
    body = next(s for s in nest.reductions.values() if s.kind == "max").body
    free = Reduce("free", "max", (bound.axis,), body.args[2] if body.op == "where" else body)
    assert bounds(neutral([free], set(), set()), bound.axis) == () and isinstance(bound.axis, Axis)
    assert math.isfinite(float(bound.axis.extent.value or 0))
