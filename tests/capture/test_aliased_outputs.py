"""Results that are views of inputs which the program writes to: where they begin, and their
strides, whatever the input's own offset and strides are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


def filled(x: Tensor, w: Tensor) -> Any:
    v = x.chunk(2, 1)[-1]
    x.fill_(2)
    return v, x * w


def through_a_view(x: Tensor, w: Tensor) -> Any:
    v = x.narrow(-1, 0, (x.shape[-2] + 1) // 2).unflatten(-2, (-1, 1))
    v.relu_()
    return v, x * w


def scaled(x: Tensor, w: Tensor) -> Any:
    v = x[:, x.shape[0] // 2 :]
    x.mul_(2)
    return v, x.view_as(x), x[:1], v.sum() * w


def copied(x: Tensor, w: Tensor) -> Any:
    """`y` is what `x` is given, and no view of `x`."""
    y = w * 2
    x.copy_(y)
    return x[1:], y[1:], x.t()[1:], w * x


def numbers(n: int) -> Tensor:
    """Of sums that no order rounds."""
    return torch.arange(n).mul(7).remainder(17).sub(8).float()


def behind(requires_grad: bool) -> list[Tensor]:
    """A tensor of no leaf, dense and behind an offset."""
    x = numbers(400).requires_grad_(requires_grad)
    return [(x * 1)[5 : 5 + 256].view(16, 16), x[-256:].view(16, 16)]


def with_steps(requires_grad: bool) -> list[Tensor]:
    x = numbers(1600).requires_grad_(requires_grad)
    return [(x * 1).as_strided((16, 16), (66, 2), 3), x[-256:].view(16, 16)]


def placed(results: Any, x: Tensor) -> list[Any]:
    """Of each result: its elements, strides, and where in the input's memory it begins."""
    rows = []
    for r in results:
        mine = r.untyped_storage()._cdata == x.untyped_storage()._cdata
        strides = [s for s, n in zip(r.stride(), r.shape) if n > 1]
        rows.append((r.tolist(), strides, r.storage_offset() if mine else None, r.requires_grad))
    return rows


# Eager allows no write into what `chunk` gives parts of, where gradients are wanted.
CASES = [(f, False) for f in (filled, through_a_view, scaled, copied)]
CASES += [(f, True) for f in (through_a_view, scaled, copied)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("make", [behind, with_steps])
@pytest.mark.parametrize(("f", "grad"), CASES)
def test_where_views_of_written_inputs_begin(
    f: Callable[..., Any], grad: bool, make: Callable[[bool], list[Tensor]], dynamic: bool
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="deuteron", dynamic=dynamic, fullgraph=True)
    given, mine = make(grad), make(grad)
    assert placed(compiled(*mine), mine[0]) == placed(f(*given), given[0])
    assert torch.equal(mine[0], given[0])
