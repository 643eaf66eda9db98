"""Pools of any kernel, stride, padding and dilation, to and from nothing, one number for all
dimensions or a list of one: values, positions and gradients are eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.ir.index import product
from tests.schedule.planning import planned

Pool = Callable[[Tensor], "Tensor | tuple[Tensor, ...]"]
LAST, LAST3D = torch.channels_last, torch.channels_last_3d


def results(pools: Sequence[Pool], inputs: Sequence[Tensor]) -> list[Tensor]:
    outputs: list[Tensor] = []
    for pool, x in zip(pools, inputs, strict=True):
        out = pool(x)
        outputs += out if isinstance(out, tuple) else [out]
    return outputs


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    floats = [y for y in outputs if y.requires_grad]
    weights = [torch.arange(y.numel(), dtype=y.dtype).view(y.shape) / 7 for y in floats]
    return torch.autograd.grad(floats, inputs, weights, allow_unused=True)


def check(cases: Sequence[tuple[Pool, Tensor]]) -> None:
    """All in one program."""
    pools = [pool for pool, _ in cases]
    given = [[x.clone().requires_grad_() for _, x in cases] for _ in range(2)]
    want = results(pools, given[0])
    program = torch.compile(lambda *xs: results(pools, xs), backend="deuteron", fullgraph=True)
    got = program(*given[1])
    both = zip((*want, *gradients(want, given[0])), (*got, *gradients(got, given[1])), strict=True)
    for a, b in both:
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.shape == b.shape and a.dtype == b.dtype
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5, equal_nan=True)


def image(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=g).to(dtype)


def test_to_nothing() -> None:
    """Eager refuses most gradients of it, not the forward of what requires them."""
    cases: list[tuple[Pool, Tensor]] = [
        (lambda x: F.adaptive_avg_pool1d(x, 0), image(2, 3, 5)),
        (lambda x: F.adaptive_avg_pool1d(x, 0), image(3, 2)),
        (lambda x: F.adaptive_avg_pool2d(x, (0, 3)), image(2, 3, 5, 6)),
        (lambda x: F.adaptive_avg_pool2d(x, (2, 0)), image(3, 5, 7)),
        (lambda x: F.adaptive_avg_pool3d(x, (2, 0, 1)), image(2, 3, 4, 5, 3)),
        (lambda x: F.adaptive_max_pool2d(x, (0, 1)), image(1, 2, 4, 4)),
        (lambda x: F.adaptive_max_pool3d(x, 0), image(1, 2, 4, 4, 3)),
    ]
    pools, inputs = zip(*cases, strict=True)
    program = torch.compile(lambda *xs: results(pools, xs), backend="deuteron", fullgraph=True)
    want = results(pools, inputs)
    for given in (inputs, [x.clone().requires_grad_() for x in inputs]):
        got = program(*given)
        assert [y.shape for y in got] == [y.shape for y in want]
        assert all(y.requires_grad == x.requires_grad for x, y in zip(given, got, strict=True))


def test_from_nothing() -> None:
    check(
        [
            (lambda x: F.adaptive_avg_pool2d(x, 2), image(0, 3, 5, 6)),
            (lambda x: F.adaptive_avg_pool1d(x, 3), image(0, 2, 5)),
            (lambda x: F.max_pool2d(x, 2), image(0, 3, 4, 4)),
            (lambda x: F.avg_pool2d(x, 2, ceil_mode=True), image(0, 3, 5, 5)),
            (lambda x: F.avg_pool3d(x, 2), image(0, 1, 4, 4, 4)),
            (lambda x: F.max_pool1d(x, 2), image(0, 3, 7)),
        ]
    )


def test_lists_of_one() -> None:
    check(
        [
            (lambda x: F.max_pool2d(x, [3], [2], [1], [1]), image(2, 3, 9, 8)),
            (lambda x: F.max_pool3d(x, [2], [2], [1], [2]), image(1, 2, 6, 5, 7)),
            (lambda x: F.avg_pool2d(x, [3], [2], [1]), image(2, 3, 9, 8)),
            (lambda x: F.avg_pool2d(x, [3]), image(2, 3, 9, 8).contiguous(memory_format=LAST)),
            (lambda x: F.avg_pool3d(x, [2], [1], [1]), image(2, 2, 4, 3, 5)),
            (lambda x: F.unfold(x, 2, 1, 1, 2), image(2, 3, 5, 6)),
            (lambda x: F.fold(x, 5, 2, 1, 0, 1), image(2, 8, 16)),
            (lambda x: F.fold(x, (9, 8), 3, 1, 1, 2), image(2, 18, 20)),
            (lambda x: F.fold(x, (11, 9), (3, 2), 2, 0, (2, 1)), image(2, 18, 28)),
        ]
    )


@pytest.mark.parametrize("ceil", [False, True])
def test_holes_and_steps(ceil: bool) -> None:
    check(
        [
            (lambda x: F.max_pool1d(x, 3, 4, 1, 2, ceil), image(2, 3, 17)),
            (lambda x: F.max_pool2d(x, (2, 3), (3, 1), (1, 0), (2, 3), ceil), image(2, 2, 9, 11)),
            (lambda x: F.max_pool2d(x, 4, 5, 2, 1, ceil), image(1, 3, 11, 13)),
            (lambda x: F.avg_pool1d(x, 4, 3, 2, ceil, False), image(2, 3, 10)),
            (lambda x: F.avg_pool2d(x, (3, 2), (1, 3), (1, 0), ceil, False, 5), image(2, 2, 8, 9)),
            (lambda x: F.max_pool3d(x, 2, 3, 1, 1, ceil), image(1, 2, 5, 6, 7)),
        ]
    )


@pytest.mark.parametrize("ceil", [False, True])
def test_positions_where_all_is_lowest(ceil: bool) -> None:
    """The first input that is none of padding, however far windows step."""

    def pool(x: Tensor) -> tuple[Tensor, ...]:
        return F.max_pool2d(x, 3, 2, 1, (2, 1), ceil, return_indices=True)  # type: ignore[return-value]

    def deep(x: Tensor) -> tuple[Tensor, ...]:
        return F.max_pool3d(x, 2, 2, 1, 2, ceil, return_indices=True)  # type: ignore[return-value]

    lowest = [torch.full(s, float("-inf")) for s in ((1, 2, 7, 8), (2, 1, 6, 5, 7))]
    lowest[0][..., 4, 5] = 1.0
    lowest[1][..., 3, 2, 2] = float("nan")
    check([(pool, lowest[0]), (deep, lowest[1])])


def test_memory_orders_and_types() -> None:
    half = torch.bfloat16
    check(
        [
            (lambda x: F.max_pool2d(x, 3, 2, 1), image(2, 4, 9, 9).contiguous(memory_format=LAST)),
            (lambda x: F.max_pool2d(x, 2), image(2, 3, 8, 6, dtype=half).transpose(2, 3)),
            (lambda x: F.adaptive_max_pool2d(x, 3), image(2, 3, 7, 8, dtype=torch.float64)),
            (lambda x: F.adaptive_max_pool3d(x, (2, 1, 3)), image(1, 2, 5, 4, 7)),
            (
                lambda x: F.avg_pool3d(x, 2, 1),
                image(1, 2, 4, 5, 3).contiguous(memory_format=LAST3D),
            ),
            (lambda x: F.adaptive_avg_pool2d(x, (3, 5)), image(2, 3, 8, 7)[:, :, ::2]),
        ]
    )


def test_back_from_positions() -> None:
    def there_and_back(x: Tensor) -> Tensor:
        y, at = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(y, at, 2)

    check([(there_and_back, image(2, 3, 8, 6)), (there_and_back, image(3, 4, 4))])


def test_windows_longer_than_the_input() -> None:
    """Of 2560 over 7 where all is to be averaged: the input is walked, not the window."""
    check(
        [
            (lambda x: F.avg_pool2d(x, 2560, ceil_mode=True), image(2, 3, 7, 7)),
            (lambda x: F.avg_pool2d(x, 12, 3, 6, True), image(2, 3, 7, 9)),
            (lambda x: F.avg_pool2d(x, 12, 3, 6, True, False), image(2, 3, 7, 9)),
            (lambda x: F.avg_pool2d(x, (9, 3), (2, 1), (4, 1), True, False), image(2, 3, 5, 5)),
            (lambda x: F.avg_pool1d(x, 9, 9, ceil_mode=True), image(2, 3, 4)),
        ]
    )
    kernel = planned(lambda x: F.avg_pool2d(x, 2560, ceil_mode=True), image(2, 3, 7, 7)).kernels[0]
    (reduced,) = {n.reduced for n in kernel.nests}
    assert product(a.extent for a in reduced).value == 49
