"""Programs on which the operator coverage found Deuteron wrong, compiled and compared with eager:
values, dtypes, strides and shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dev.check.differences import differences
from dev.check.oracle import Oracle, Seen, copies, see


@pytest.fixture(autouse=True)
def whole_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    ):
        yield


def agrees(
    f: Callable[..., Any], *inputs: Tensor, backward: bool = False, dynamic: bool = False
) -> None:
    def run(call: Callable[..., Any], tensors: list[Tensor]) -> Seen:
        return see(lambda xs: call(*xs), tensors, backward)

    compiled = torch.compile(f, backend="deuteron", fullgraph=True, dynamic=dynamic)
    oracle = Oracle(lambda xs, seed=0: run(f, xs), lambda xs: run(f, xs), inputs)
    assert not differences(run(compiled, [x.clone() for x in inputs]), oracle)


NUMBERS: dict[str, Callable[..., Any]] = {
    "returned": lambda x: (x.sum().item(), x.max().item() + 3, x * 2),
    "filled": lambda x: torch.full((3,), x.sum().item()),
    "scaled": lambda x: torch.add(x, x, alpha=x.sum().item()).clamp(x.min().item() / 2),
    "joined": lambda x: torch.cat([x[0], torch.tensor([x.sum().item()])]),
    "range": lambda x: torch.linspace(0, x.sum().item(), 5),
    "library": lambda x: torch.addmm(x, x @ x.mT, x, alpha=x.sum().item()),
    "truth": lambda x: torch.where(torch.tensor((x > 9).any().item()), x, -x) * x.any().item(),
    "whole": lambda x: x * x.long().sum().item() + torch.arange(4) * x.long().max().item(),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_elements_as_numbers(name: str) -> None:
    """A number that ``x.item()`` gives is read where it is used."""
    agrees(NUMBERS[name], torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
@pytest.mark.parametrize("index", [[0, 5, -1, 11], [[2, -12]], 3])
def test_take(dtype: torch.dtype, index: Any) -> None:
    agrees(torch.take, torch.arange(12).view(3, 4).to(dtype), torch.tensor(index))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_take_checks(dtype: torch.dtype) -> None:
    f = torch.compile(torch.take, backend="deuteron", fullgraph=True)
    with pytest.raises(IndexError):
        f(torch.zeros(3, 4, dtype=dtype), torch.tensor([12]))


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (3, None)])
def test_adaptive_max_pool(size: Any) -> None:
    agrees(lambda x: F.adaptive_max_pool2d(x, size, return_indices=True), torch.randn(2, 3, 4, 4))


@pytest.mark.parametrize("bad", [4, -1])
def test_scatter_of_one_per_row_checks(bad: int) -> None:
    """Compiled as a comparison at every element, it still sees what eager raises for."""
    place = torch.tensor([[1], [3], [0]])
    agrees(lambda z, i: z.scatter(1, i, 1.0) * 2, torch.zeros(3, 4), place)
    place[1] = bad
    f = torch.compile(lambda z, i: z.scatter(1, i, 1.0) * 2, backend="deuteron")
    with pytest.raises(IndexError):
        f(torch.zeros(3, 4), place)


STRIDES: dict[str, Callable[..., Any]] = {
    "copysign": lambda x: torch.copysign(x, torch.tensor(-1.0)),
    "floor_divide": lambda x: torch.floor_divide(x, x.contiguous() + 9),
    "logaddexp": lambda x: torch.logaddexp(torch.tensor(0.5), x),
    "unique": lambda x: torch.unique(x, dim=1),
    "unique_consecutive": lambda x: torch.unique_consecutive(x, dim=-1, return_counts=True),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(
        x[0, :, :1].expand(4, 3).to(torch.complex64), x[0, 0].to(torch.complex64)
    ),
    "select_scatter": lambda x: torch.select_scatter(x[:, ::2], x[0, ::2], 0, 1),
    "select_scatter of repeated rows": lambda x: torch.select_scatter(
        x[0, :2, :2].expand(3, 2, 2), x[:3, 0, :2], 2, 0
    ),
    "slice_scatter of repeated rows": lambda x: torch.slice_scatter(
        x[0, :2, :2].expand(3, 2, 2), x[:3, :1, :2], 1, 0, 1
    ),
    "as_strided_scatter of repeated rows": lambda x: torch.as_strided_scatter(
        x[0, :2, :2].expand(3, 2, 2), x[0, 0, :2], (2,), (3,), 1
    ),
    "view_copy": lambda x: torch.view_copy(x, (4, 15)),
    "empty_strided": lambda x: torch.empty_strided((2, 2, 3), (2, 0, 1)).zero_() + x.sum(),
    "unsafe_split": lambda x: torch.unsafe_split(x, 9),
    "resize_as": lambda x: x.clone().flatten(),
}


@pytest.mark.parametrize("name", STRIDES)
def test_strides_are_those_of_eager(name: str) -> None:
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).permute(2, 1, 0)
    agrees(STRIDES[name], x)


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_nothing_is_sampled(mode: str) -> None:
    agrees(
        lambda x, g: F.grid_sample(x, g, mode=mode, align_corners=False),
        torch.empty(0, 2, 4, 4),
        torch.empty(0, 3, 3, 2),
    )


def test_broadcast_that_was_decided_by_a_guard() -> None:
    """Half of a size broadcasts because it is 1."""
    agrees(
        lambda x, y: F.avg_pool1d(x[None], 2) * y, torch.randn(2), torch.randn(1, 2), dynamic=True
    )
    agrees(lambda x: x.flatten().unbind(0)[-1], torch.randn(5, 5), dynamic=True)


def test_results_that_are_sizes_of_arguments() -> None:
    """As those of attention kernels are; they are known before the call."""

    @torch.library.custom_op("deuteron_tests::counted", mutates_args=())
    def counted(x: Tensor) -> tuple[Tensor, int, int]:
        return x * 2, x.shape[0], x.shape[0] + 3 * x.shape[1]

    @counted.register_fake
    def _(x: Tensor) -> tuple[Tensor, Any, Any]:
        return torch.empty_like(x), x.shape[0], x.shape[0] + 3 * x.shape[1]

    def f(x: Tensor) -> Tensor:
        y, rows, more = counted(x + 1)
        return y.new_ones(rows, 2).sum() + y.sum() * more

    agrees(f, torch.randn(5, 7), dynamic=True)
    agrees(f, torch.randn(6, 4), dynamic=True)


def test_results_computed_from_an_input_that_is_then_overwritten() -> None:
    """The backward needs them, and is better given the input (a copy of it, since it changes)."""

    def f(x: Tensor, mean: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        wide = mean.float()
        y = (x * wide).sin()
        mean.copy_(other)
        return y, wide

    x = torch.randn(64, 8, requires_grad=True)
    mean, other = (torch.randn(8).bfloat16() for _ in range(2))
    agrees_on_copies(f, x, mean, other)


def agrees_on_copies(f: Callable[..., Any], *inputs: Tensor) -> None:
    def run(call: Callable[..., Any], tensors: list[Tensor]) -> Seen:
        return see(lambda xs: call(*xs), tensors, True)

    oracle = Oracle(lambda xs, seed=0: run(f, xs), lambda xs: run(f, xs), inputs)
    compiled = torch.compile(f, backend="deuteron", fullgraph=True)
    assert not differences(run(compiled, copies(inputs)), oracle)


def test_index_fill_with_a_number_that_requires_a_gradient() -> None:
    """Its gradient sums over unique positions, whose number no version of torch may make up."""
    index = torch.tensor([2, 1, 4, 2, 2])

    def f(x: Tensor, value: Tensor) -> Tensor:
        return x.index_fill(-1, index, value)

    x, value = torch.randn(5, 5, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    agrees_on_copies(f, x, value)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_what_grid_sample_reads_outside(mode: str, padding: str) -> None:
    """It is 0, whatever the first element is; places that are no numbers are those of eager."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 5, 4, generator=generator)
    x[0, 0, 0, 0], x[1, 1, 0, 0], x[1, 0, 4, 3] = float("inf"), -1.0, float("nan")
    grid = torch.randn(2, 6, 7, 2, generator=generator) * 1.5
    grid[0, 0, 0, 0], grid[1, 1, 1, 1], grid[0, 2, 2] = float("nan"), float("inf"), 1e9

    def f(x: Tensor, grid: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=a)
            for a in (False, True)
        )

    agrees(f, x, grid)


def test_negative_zeros_add_up_to_zero() -> None:
    """Eager's sums begin with 0, those of pooling windows as well."""
    x = torch.full((2, 3, 7, 7), -0.0)
    x[1, :, 3:] = torch.randn(3, 4, 7)
    agrees(lambda x: (F.adaptive_avg_pool2d(x, (3, 2)), F.adaptive_avg_pool2d(x, 7)), x)


def test_a_truth_value_is_not_subtracted() -> None:
    for f in (torch.sub, torch.rsub):
        with pytest.raises(RuntimeError, match="bool"):
            torch.compile(f, backend="deuteron")(torch.randn(3), torch.tensor([True, False, True]))


def test_sums_of_products_of_numbers() -> None:
    """Tensors without dimensions have one to sum over all the same."""
    a, b = torch.randn(()), torch.randn(())
    agrees(lambda a, b: ((a * b).sum(-1), (a * b).sum(0), F.cosine_similarity(a, b, dim=0)), a, b)
