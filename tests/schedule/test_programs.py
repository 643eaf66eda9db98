"""What GPU kernels without products are estimated to wait for, and what follows from it."""

from __future__ import annotations

import torch
from torch import Tensor

from deuteron.ir import expr as E
from deuteron.schedule.programs import WARPS_AT_ONCE, Walk, together
from tests.schedule.tools import scheduled, spec_of


def test_few_columns_are_not_left_to_one_program() -> None:
    """Its turns take longer than its bytes: H200, 75 turns 163 us, where 4 were predicted."""

    def f(g: Tensor, b: Tensor, s: Tensor, w: Tensor) -> Tensor:
        x = torch.cat([g * b, g * s[..., 1:] * w], -1) * (s * (1 - s))
        return x[..., None].expand(*x.shape, 4).reshape(-1, 8).sum(0)

    parts = [torch.empty(8, 12, 799, n) for n in (1, 1, 2)]
    plan = scheduled(f, *parts, torch.empty(12, 1, 1), device="H200", check=False)
    assert plan.accepted("split")
    assert [n for n, _ in plan.kernels[0].writes] != [n for n, _ in plan.kernels[-1].writes]


def test_lines_that_lanes_ask_for_count() -> None:
    """Sums of three that are stored along one axis and read along another one: each element is in a
    line of its own. H200, 32 x 196 x 196: 24 us, where 3 were predicted."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x * w[:, None, None, :]).sum(-1)

    x, w = torch.empty(196, 3, 196), torch.empty(32, 3)
    predicted = []
    for turned in (x.permute(0, 2, 1), x.permute(2, 0, 1)):
        (kernel,) = scheduled(f, turned, w, device="H200", check=False).kernels
        predicted.append(kernel.predicted_us)
    assert predicted[1] > 3 * predicted[0]


def test_what_rows_store_keeps_them_apart() -> None:
    """Numbers of channels beside all points of images are no reason for a program per few channels:
    6272 points of 128 channels in 16 programs took 16 us."""

    def f(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        s = scale.rsqrt()
        return (x - 1) * s[:, None, None], s.to(torch.bfloat16)

    x = torch.empty(8, 128, 28, 28).to(memory_format=torch.channels_last)
    plan = scheduled(f, x, torch.rand(128), device="H200", check=False)
    assert not any(n.reduced for k in plan.kernels for n in k.nests)


def test_waves_of_programs() -> None:
    spec = spec_of("H200")
    one = Walk(spec.cores, 1, 1, 0, 0.0)
    assert one.waves(spec) == 1.0
    assert Walk(2 * WARPS_AT_ONCE * spec.cores, 1, 1, 0, 0.0).waves(spec) == 2.0
    waits = [Walk(1, 8, turns, depth, 0.0).waits() for turns, depth in ((1, 0), (1, 2), (9, 2))]
    assert waits == sorted(waits) and len({*waits}) == 3
    assert together(10.0, 1.0) == 11.0 and together(1.0, 2.0, waves=3.0) == 7.0


def test_what_is_not_used_is_made_of_one() -> None:
    """Where nothing is read divisions have 1 by 1; what only a load gives stays 0 there."""
    x = E.load("x", (), "f32")
    mask = E.op("lt", E.load("i", (), "i64"), E.literal(3, "i64"))
    made = E.with_mask(E.op("div", x, x), mask, unused=True)
    assert [n.attr[2] for n in made.loads() if n.attr[0] == "x"] == [1.0]
    for plain in (x, E.cast(x, "f64")):
        (kept,) = [n for n in E.with_mask(plain, mask, unused=True).loads() if n.attr[0] == "x"]
        assert kept.attr[2] == 0
