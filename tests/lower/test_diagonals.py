"""What a difference of positions decides is read once for each, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deuteron.base.device import device_spec
from deuteron.base.errors import DeuteronError
from deuteron.base.passes import Context
from deuteron.base.record import Record
from deuteron.ir.program import Compute, Program
from deuteron.ir.reference import run_program
from deuteron.lower.passes import lower
from tests.lower.harness import trace

TABLE = torch.arange(66.0).view(33, 2)
S, T = 40, 51


def places() -> tuple[Tensor, Tensor]:
    return torch.arange(S)[:, None], torch.arange(T)[None, :]


def bucketed(table: Tensor) -> Tensor:
    i, j = places()
    far = (torch.log((i - j).abs() / 4.0) * 2).to(torch.long) + 4
    return table[torch.where((i - j).abs() < 4, (i - j).abs(), far) + 16 * (i < j)]


def clipped_range(table: Tensor) -> Tensor:
    i, j = places()
    return table[(i - j).sign() + 5].permute(2, 0, 1) * 2


def masked(table: Tensor) -> Tensor:
    i, j = places()
    return torch.where((i >= j)[..., None], table[(i - j).sign() + 7], -1.0)


def of_the_sum(table: Tensor) -> Tensor:
    i, j = places()
    return table[(i + j) % 33]


def of_one_and_a_difference(table: Tensor) -> Tensor:
    i, j = places()
    return table[(i - j).sign() + i % 2 + 1]


def of_data(table: Tensor) -> Tensor:
    i, j = places()
    return table[(i - j).sign() + 1] + table[i % 33]


def small(table: Tensor) -> Tensor:
    i, j = torch.arange(7)[:, None], torch.arange(9)[None, :]
    return table[(i - j).sign() + 1]


def program(f: Callable[[Tensor], Tensor]) -> Program:
    spec = device_spec("cpu")
    return lower(trace(f, [TABLE]), Context(record=Record(), specs=lambda _: spec))


def lines(p: Program) -> list[Compute]:
    return [d for d in p.defs if isinstance(d, Compute) and d.name.endswith("_line")]


@pytest.mark.parametrize("f", [bucketed, clipped_range, masked])
def test_there_is_a_line(f: Callable[[Tensor], Tensor]) -> None:
    p = program(f)
    (line,) = lines(p)
    assert line.layout.numel.value == 2 * (S + T - 1)
    assert torch.equal(run_program(p, [TABLE])[0], f(TABLE))


@pytest.mark.parametrize("f", [of_the_sum, of_one_and_a_difference, small])
def test_there_is_none(f: Callable[[Tensor], Tensor]) -> None:
    p = program(f)
    assert not lines(p)
    assert torch.equal(run_program(p, [TABLE])[0], f(TABLE))


def test_each_part_on_its_own() -> None:
    p = program(of_data)
    assert len(lines(p)) == 1
    assert torch.equal(run_program(p, [TABLE])[0], of_data(TABLE))


@pytest.mark.parametrize("backend", ["eager", "deuteron"])
def test_places_outside_are_refused(backend: str) -> None:
    """As eager does: also where only the corner is outside."""

    def f(table: Tensor) -> Tensor:
        i, j = places()
        return table[(i - j).clamp(max=32) * 0 + torch.where(i - j > S - 2, 33, 0)]

    torch._dynamo.reset()
    errors: tuple[Any, ...] = (IndexError, DeuteronError, RuntimeError)
    with pytest.raises(errors, match="33"):
        torch.compile(f, backend=backend)(TABLE)


@pytest.mark.parametrize("f", [bucketed, clipped_range, masked])
def test_compiled_with_gradients(f: Callable[[Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    got, wanted = (TABLE.clone().requires_grad_() for _ in range(2))
    a, b = torch.compile(f, backend="deuteron")(got), f(wanted)
    assert torch.equal(a, b)
    for x in (a, b):
        x.square().sum().backward()
    torch.testing.assert_close(got.grad, wanted.grad)
