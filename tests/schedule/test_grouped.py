"""Reductions over groups of elements of rows: which share a nest with reductions over whole rows,
and which do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.codegen.share import structure
from deuteron.schedule.kernel import Nest, Reduce, Store
from deuteron.schedule.printer import kernel_lines
from tests.schedule.tools import scheduled


def in_blocks(y: Tensor, n: int = 128) -> tuple[Tensor, Tensor]:
    """Quotients by a scale for every n neighbours, and the scales."""
    y = y.unflatten(-1, (-1, n))
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
    return (y / scale).flatten(-2), scale.squeeze(-1)


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def quantised(x: Tensor) -> Any:
    return in_blocks(norm(x))


def only_nest(f: Any, *args: Tensor) -> Nest:
    (kernel,) = scheduled(f, *args, device="H200").kernels
    (nest,) = kernel.nests
    return nest


def test_a_norm_and_scales_of_blocks_are_one_kernel() -> None:
    """It reads what it reads once, and its cost says so."""
    x = torch.randn(4096, 512)
    (kernel,) = scheduled(quantised, x, device="H200").kernels
    (nest,) = kernel.nests
    assert [a.extent.value for a in nest.reduced] == [4, 128]
    assert nest.group_axes == nest.reduced[1:]
    reductions = [s for s in nest.stmts if isinstance(s, Reduce)]
    assert [(f.kind, f.grouped) for f in reductions] == [("sum", False), ("max", True)]
    levels = {s.level for s in nest.stmts if isinstance(s, Store)}
    assert levels == {"point", "group"}
    assert kernel.bytes == 4 * (2 * x.numel() + x.numel() // 128)
    text = "\n".join(kernel_lines(kernel))
    assert "max[within_segment](" in text and "sum[segment, within_segment](" in text
    plain = replace(nest, stmts=tuple(replace(s, grouped=False) for s in reductions))
    assert structure(replace(kernel, nests=(plain,))) != structure(kernel)


MORE: dict[str, Any] = {
    "layer norm": lambda x: in_blocks(F.layer_norm(x, x.shape[-1:])),
    "softmax": lambda x: in_blocks(torch.softmax(x, -1)),
    "blocks of 32": lambda x: in_blocks(norm(x), 32),
    "what is quantised is stored": lambda x: ((y := norm(x)), *in_blocks(y)),
    "of rows of rows": lambda x: quantised(x.unflatten(0, (-1, 8))),
    "a reduction of the row after those of blocks": lambda x: (
        (q := in_blocks(norm(x))[0]).amax(-1),
        q.abs().sum(-1),
    ),
    "two kinds, one after the other": lambda x: (
        (y := norm(x).unflatten(-1, (-1, 64))).amin(-1),
        (y - y.amax(-1, keepdim=True)).exp().sum(-1),
    ),
}


@pytest.mark.parametrize("name", MORE)
def test_more_that_is_one_kernel(name: str) -> None:
    nest = only_nest(MORE[name], torch.randn(1024, 384))
    assert nest.group_axes


@pytest.mark.parametrize(
    ("f", "shape", "reason"),
    [
        (quantised, (264, 65536), "rows of 65536 elements"),
        (lambda x: in_blocks(norm(x), 96), (1024, 384), "no power of two"),
        (lambda x: in_blocks(norm(x), 4), (1024, 384), "no power of two from 8 on"),
        (lambda x: quantised(x.t()), (384, 1024), "side by side"),
    ],
    ids=["long rows", "blocks of 96", "blocks of 4", "columns"],
)
def test_what_a_program_does_not_hold_stays_apart(
    f: Any, shape: tuple[int, ...], reason: str
) -> None:
    plan = scheduled(f, torch.randn(*shape), device="H200")
    assert not any(n.group_axes for k in plan.kernels for n in k.nests)
    assert any(reason in d["detail"] for d in plan.refused("grouped reductions"))


def test_positions_have_no_groups() -> None:
    def f(x: Tensor) -> Any:
        y = norm(x).unflatten(-1, (-1, 128))
        return y.amax(-1), y.argmax(-1)

    plan = scheduled(f, torch.randn(1024, 384), device="H200")
    reductions = [
        s for k in plan.kernels for n in k.nests for s in n.stmts if isinstance(s, Reduce)
    ]
    assert {s.kind: s.grouped for s in reductions}["argmax"] is False


def test_rows_of_unknown_length_have_none() -> None:
    plan = scheduled(quantised, torch.randn(1024, 384), device="H200", dynamic=True)
    assert not any(n.group_axes for k in plan.kernels for n in k.nests)


def test_a_cpu_has_two_kernels() -> None:
    plan = scheduled(quantised, torch.randn(1024, 384), device="cpu")
    assert not any(n.group_axes for k in plan.kernels for n in k.nests)


def test_blocks_without_a_reduction_of_the_row_are_rows() -> None:
    nest = only_nest(lambda x: in_blocks(x * 2), torch.randn(1024, 384))
    assert not nest.group_axes
    assert [a.extent.value for a in nest.reduced] == [128]


def test_cross_row_reductions_stay_apart() -> None:
    """Splits that walk rows keep no groups."""

    def f(x: Tensor) -> Any:
        y = norm(x)
        return (*in_blocks(y), y.sum(0), x.sum(0))

    plan = scheduled(f, torch.randn(2048, 384), device="H200")
    nests = [n for k in plan.kernels for n in k.nests]
    assert not any(n.group_axes and n.row_split for n in nests)
