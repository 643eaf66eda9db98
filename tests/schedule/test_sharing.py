"""Who plans kernels and who writes them count the programs that share a row alike."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from deuteron.codegen.triton.generate import generate
from deuteron.schedule import profit
from deuteron.schedule.group import Group
from deuteron.schedule.kernel import Kernel
from tests.schedule.planning import planned
from tests.schedule.tools import spec_of


def normalized(x: Tensor) -> Tensor:
    return F.silu(F.batch_norm(x, None, None, training=True))


def gradient(g: Tensor, x: Tensor) -> Tensor:
    """Two tensors at the same places are two values."""
    sums = (g * x).mean((0, 2, 3), keepdim=True), g.mean((0, 2, 3), keepdim=True)
    return g - x * sums[0] - sums[1]


def excited(g: Tensor, x: Tensor, s: Tensor) -> Tensor:
    """One value for each image and channel is one for a part of a row."""
    return gradient(g * s.sigmoid(), x)


def images(side: int, count: int, *more: Tensor) -> tuple[Tensor, ...]:
    return (*(torch.empty(8, 32, side, side) for _ in range(count)), *more)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "forward": (normalized, images(112, 1)),
    "backward": (gradient, images(112, 2)),
    "backward, short rows that are shared": (gradient, images(64, 2)),
    "backward, long rows": (gradient, images(176, 2)),
    "parts of rows": (excited, images(112, 2, torch.empty(8, 32, 1, 1))),
    "parts of whole blocks": (excited, images(128, 2, torch.empty(8, 32, 1, 1))),
    "softmax": (lambda x: x.softmax(-1), (torch.empty(300, 50_000),)),
    "short rows": (gradient, images(14, 2)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_estimate_and_tiling_share_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = importlib.import_module("deuteron.schedule.build")
    spec, made, counts = spec_of("H200"), build.kernel, list[tuple[Kernel, int]]()

    def kept(groups: list[Group], stored: Any, layouts: Any, *rest: Any) -> Kernel:
        kernel = made(groups, stored, layouts, *rest)
        if len(groups) == 1 and groups[0].reductions:
            counts.append((kernel, profit.sharing_programs(groups[0], layouts, spec)))
        return kernel

    monkeypatch.setattr(build, "kernel", kept)
    f, args = PROGRAMS[name]
    planned(f, *args, device="H200", run=False)
    assert counts
    for kernel, count in counts:
        assert generate(kernel, spec).programs_per_row == max(1, count), kernel.name
