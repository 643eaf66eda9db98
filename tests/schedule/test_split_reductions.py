"""Tensors that are joined or computed, then normalised by their own statistics: what is read, how
often, and by how much of the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from deuteron.schedule import profit
from tests.schedule.tools import scheduled, spec_of


def normalised(y: torch.Tensor) -> torch.Tensor:
    """Batch norm's arithmetic with batch statistics, and a ReLU."""
    v, m = torch.var_mean(y, (0, 2, 3), correction=0, keepdim=True)
    return F.relu((y - m) * (v + 1e-5).rsqrt())


def joined(*parts: torch.Tensor) -> torch.Tensor:
    return normalised(torch.cat(parts, 1))


def summed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return normalised(torch.sin(x) * y)


def images(*channels: int) -> tuple[torch.Tensor, ...]:
    """Channels lie side by side."""
    last = torch.channels_last
    return tuple(torch.randn(4, c, 40, 24).to(memory_format=last) for c in channels)


@pytest.mark.parametrize(
    "f,channels",
    [(joined, (8, 16)), (joined, (5, 3, 8, 7, 1)), (summed, (13, 13))],
    ids=["two", "five unequal", "computed"],
)
def test_statistics_of_what_has_several_readers_use_the_device(
    f: Callable[..., torch.Tensor], channels: tuple[int, ...]
) -> None:
    """A value at points with other loops than the partial reductions kept them from being split:
    few channels were walked by as few programs (a dense block, H200: 12 times as long)."""
    plan = scheduled(f, *images(*channels), device="H200")
    (taken,) = plan.accepted("split")
    assert taken["reason"] == "more of the device is busy"
    main = plan.kernels[0].nests[0]
    rows = 1
    for a in main.parallel:
        rows *= a.extent.value or 1
    assert rows >= 20 * sum(channels[:1] if f is summed else channels)


def test_what_waits_reads_again_through_values_at_points() -> None:
    """The second reading of what several members read by way of one."""
    plan = scheduled(joined, *images(8, 16), device="H200", check=False)
    # Once for the statistics, once and a store for the result.
    size = 4 * 24 * 40 * 24 * 4
    assert 3 * size <= sum(k.bytes for k in plan.kernels) <= 3.2 * size


def test_a_kernel_that_is_not_split_is_not_predicted_as_if(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deuteron.schedule.split.split_group", lambda *a: None)
    plan = scheduled(lambda x: x.sum((0, 1)), torch.randn(4096, 4, 40), device="H200", check=False)
    (kernel,) = plan.kernels
    assert kernel.predicted_us > 3 * profit.time_us(kernel.bytes, 0.0, 1.0, spec_of("H200"))


def branches(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Pools and what is beside them, joined."""
    pools = F.max_pool2d(a, 3, 2), F.avg_pool2d(F.relu(c * 2 - 1), 3, 1, 1)
    return torch.cat([pools[0], F.relu(b), pools[1]], 1)


@pytest.mark.parametrize("device", ["H200", "cpu"])
def test_reductions_lie_as_what_they_are_for(device: str) -> None:
    """Sums of windows of channels that lie side by side do so too: stored in the order of other
    dimensions, each was a sector of its own, and windows were not written out (H200: 11 times as
    long as need be)."""
    a, b, c = (
        torch.randn(2, n, s, s).to(memory_format=torch.channels_last)
        for n, s in ((24, 19), (16, 9), (8, 9))
    )
    plan = scheduled(branches, a, b, c, device=device)
    written = [lay for k in plan.kernels for _, lay in k.writes if len(lay.shape) == 4]
    assert len(written) >= 3
    assert all(lay.strides[1].value == 1 for lay in written)


def test_reductions_of_several_orders_are_right() -> None:
    x = torch.randn(3, 5, 7, 4).permute(2, 0, 3, 1)

    def pooled(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.softmax(1) * x.amax((0, 2), keepdim=True)
        return [y, F.avg_pool2d(x, 2) - 1, (x.cumsum(1) * 2).sum(3)]

    for device in ("H200", "cpu"):
        scheduled(pooled, x, device=device)


def test_a_result_of_columns_is_not_walked_for_a_launch() -> None:
    """A short vector beside points of which it is the fastest axis: its rows would be programs,
    each with all other loops. What is read most is at clamped places, which do not tell."""
    x, y = (torch.empty(3, 64, n, m).bfloat16() for n, m in ((100, 131), (200, 263)))

    def resampled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        up = F.interpolate(
            normalised(x.float()), scale_factor=2, mode="bilinear", align_corners=True
        )
        return torch.cat([y, F.pad(up, (0, 1)).to(y.dtype)], 1)

    plan = scheduled(resampled, x, y, device="H200", check=False)
    written = [n for k in plan.kernels for n in k.nests if not n.locals()]
    assert written and not any(n.reduced for n in written), "points have no rows"
