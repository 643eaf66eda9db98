"""Max-pooling saves a byte per window where only its gradient reads positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deuteron.backend import collecting
from deuteron.graph.windows import MAX_POOL, MAX_POOL_BACKWARD

NAN, LOWEST = float("nan"), float("-inf")
CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "padded": (lambda x: F.max_pool2d(x, 3, 2, 1), (2, 3, 12, 17)),
    "side by side": (lambda x: F.max_pool2d(x, 2), (2, 3, 12, 17)),
    "one step": (lambda x: F.max_pool2d(x, 3, 1, 1), (3, 12, 14)),
    "rounded up": (lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 0), ceil_mode=True), (2, 3, 9, 8)),
    "volume": (lambda x: F.max_pool3d(x, 3, 2, 1), (1, 2, 6, 7, 8)),
}


def tied(*shape: int) -> torch.Tensor:
    """Few different numbers, NaN, and a window with nothing but the lowest."""
    torch.manual_seed(0)
    x = torch.randn(*shape).round()
    x.flatten()[5::331] = NAN
    x[..., :4, :4] = LOWEST
    return x


def step(f: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = f(x)
    y.backward(torch.arange(y.numel(), dtype=y.dtype).view(y.shape))
    assert x.grad is not None
    return [y.detach(), x.grad]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dynamic: bool, layout: torch.memory_format) -> None:
    f, shape = CASES[name]
    x = tied(*shape)
    if layout == torch.channels_last:
        if len(shape) != 4:
            pytest.skip("four dimensions")
        x = x.to(memory_format=layout)
    torch._dynamo.reset()
    with collecting() as compiled:
        got = step(torch.compile(f, backend="deuteron", dynamic=dynamic), x)
    for g, e in zip(got, step(f, x), strict=True):
        assert g.stride() == e.stride()
        torch.testing.assert_close(g, e, equal_nan=True)
    saved = [e for r in compiled for e in r.of("decision") if e["subject"] == "save"]
    assert not any(e["bytes"] == 8 * got[0].numel() for e in saved), saved


def test_indices_that_somebody_reads_stay() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y, i = F.max_pool2d(x, 2, return_indices=True)
        return y * i

    torch._dynamo.reset()
    x = torch.randn(1, 2, 8, 8)
    for g, e in zip(step(torch.compile(f, backend="deuteron"), x), step(f, x), strict=True):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("ceil", [False, True])
def test_reference(ceil: bool) -> None:
    """What the operators do where they are called as they are."""
    window = ([3, 2], [2, 2], [1, 1], ceil)
    x = torch.randn(2, 3, 9, 8, requires_grad=True)
    y, i = F.max_pool2d(x, *window[:3], ceil_mode=ceil, return_indices=True)
    values, places = MAX_POOL(x.detach(), *window)
    assert places.dtype == torch.int8 and int(places.min()) >= 0 and int(places.max()) < 6
    assert torch.equal(values, y) and places.shape == i.shape
    g = torch.randn_like(y)
    y.backward(g)
    back = MAX_POOL_BACKWARD(g, places, x.shape, *window, torch.contiguous_format)
    assert x.grad is not None and torch.equal(back, x.grad)
