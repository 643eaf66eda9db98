"""Views and data movement: index maps with eager's values, and no tensors in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deuteron.ir.program import Compute
from tests.lower.harness import Lowered, check, declines

aten = torch.ops.aten
X = torch.arange(4 * 6 * 5, dtype=torch.float32).view(4, 6, 5)

VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "merge": lambda x: x.view(24, 5),
    "mix": lambda x: x.reshape(2, 2, 3, 10),
    "flat": lambda x: x.view(-1),
    "with ones": lambda x: x.view(1, 4, 1, 2, 3, 5, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "negative dims": lambda x: x.permute(-1, 0, -2).transpose(-1, 0),
    "t": lambda x: x[0].t(),
    "t of a vector": lambda x: x[0, 0].t(),
    "flip": lambda x: x.flip(0, -1),
    "expand": lambda x: x.unsqueeze(1).expand(4, 3, 6, 5),
    "expand new": lambda x: x[0, 0].expand(2, 3, 5),
    "squeeze": lambda x: (
        x[:1].squeeze(),
        x[:1].squeeze(0),
        x.squeeze(0),
        x[:1, :1].squeeze((0, 1)),
    ),
    "slices": lambda x: (x[:, -3:], x[:, 1:100:2, 2], x[-1], x[10:], x[-100:2], x[3:1]),
    "split": lambda x: (x.split(4, 1), x.chunk(3, 2), x.unbind(0), x.split([1, 0, 5], 1)),
    "diagonal": lambda x: (x.diagonal(1, 0, 2), x.diagonal(-2), x.diagonal(5)),
    "unfold": lambda x: (x.unfold(1, 3, 2), x.unfold(2, 5, 1)),
    "as_strided": lambda x: (x.as_strided((2, 3), (1, 7), 3), x[1:].as_strided((2, 2), (30, 1))),
    "overlapping": lambda x: x.as_strided((9, 3), (2, 1)),
    "transposed storage": lambda x: x.transpose(0, 2).as_strided((3, 3), (5, 1), 1),
    "alias": lambda x: (x.detach(), torch.ops.aten.alias(x)),
}
MOVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "roll": lambda x: (x.roll((1, -2), (0, 2)), x.roll(7), x.roll(-1, 1)),
    "repeat": lambda x: (x.repeat(2, 1, 1, 3), x[:, :1].repeat(1, 3, 2), x.repeat(1, 1, 0)),
    "pad": lambda x: (F.pad(x, (1, 2, 0, 3), value=2.0), F.pad(x, (-1, 2)), F.pad(x, (0, 0))),
    "reflect": lambda x: (F.pad(x, (2, 1), mode="reflect"), F.pad(x, (0, 4), mode="reflect")),
    "reflect 2d": lambda x: (
        aten.reflection_pad2d(x, [2, 3, 1, 5]),
        aten.reflection_pad2d(x, [0, 1, 2, 0]),
    ),
    "replicate": lambda x: (
        F.pad(x, (2, 3), mode="replicate"),
        aten.replication_pad2d(x, [0, 3, 1, 7]),
    ),
    "cat": lambda x: (torch.cat([x, x * 2, x[:, :0]], 1), torch.stack([x, x + 1], -1)),
    "cat of types": lambda x: torch.cat([x, torch.arange(30).view(1, 6, 5)]),
    "cat with nothing": lambda x: torch.cat([torch.empty(0), x, x]),
    "tril": lambda x: (x.tril(), x.triu(1), x.tril(-1)),
    "pixel shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 4, 6, 5), 2),
    "unshuffle": lambda x: F.pixel_unshuffle(x.reshape(1, 5, 4, 6), 2),
    "movedim": lambda x: torch.movedim(x, 0, -1).contiguous(),
    "rot90": lambda x: torch.rot90(x, 1, (0, 2)),
    "im2col": lambda x: F.unfold(x[None], (2, 3), padding=1, stride=2),
    "col2im": lambda x: F.fold(x.reshape(1, 12, 10), (3, 6), (2, 2)),
    "copies": lambda x: (x.clone(), x.contiguous(), torch.empty_like(x).copy_(x[0])),
}


@pytest.mark.parametrize("name", [*VIEWS, *MOVES])
def test_values(name: str) -> None:
    check({**VIEWS, **MOVES}[name], X)


@pytest.mark.parametrize("name", [*VIEWS, "repeat", "pad"])
def test_views_are_not_tensors(name: str) -> None:
    """All that is defined are the outputs."""
    low = check({**VIEWS, **MOVES}[name], X)
    assert len(computes(low)) <= len({o.tensor for o in low.program.outputs})


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64]
)
def test_dtypes(dtype: torch.dtype) -> None:
    x = (X % 3).to(dtype)
    check(lambda x: (F.pad(x, (1, 1)), torch.cat([x, x]), x.flip(0), x.roll(1, 1)), x)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (7, 1), (1, 7)])
def test_odd_sizes(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    check(
        lambda x: (
            x.t(),
            x.reshape(-1, 1) if x.numel() else x.reshape(0),
            x.flip(0, 1),
            F.pad(x, (1, 0, 2, 1)),
            torch.cat([x, x], 1),
            x.unsqueeze(-1).expand(-1, -1, 2),
            x[1:],
            x.repeat(2, 2),
            x.roll(1, 0),
        ),
        x,
    )


def test_strided_inputs() -> None:
    x = torch.randn(5, 6, 4).permute(2, 0, 1)[:, ::2]
    check(lambda x: (x.reshape(-1), x.flip(1), F.pad(x, (1, 1)), x.flatten(1)), x)


def test_writes_through_views() -> None:
    def f(x: torch.Tensor) -> Any:
        y = x.clone()
        y[:, 1:4] = 0
        y[2] = 5.0
        y[..., ::2] += 1
        y.diagonal()[:] = 3
        y.as_strided((3,), (7,)).fill_(9)
        y[-2:, 1:100:3] *= 2
        return y

    check(f, X)


def test_writes_at_the_edges() -> None:
    src = torch.randn(4, 2, 5)
    check(
        lambda x, s: (
            aten.slice_scatter(x, s, 1, -2),
            aten.slice_scatter(x, s, 1, 0, -4),
            aten.slice_scatter(x, s, 1, 1, 4, 2),
            aten.slice_scatter(x, x, 1),
            aten.slice_scatter(x, x[:, :0], 1, 4, 2),
            aten.select_scatter(x, s[:, 0], 1, -1),
            aten.diagonal_scatter(x[:, :, 0], x[:, :1, 1].squeeze(1)[:2], -2),
            aten.diagonal_scatter(x[:, :, 0], x[:, :1, 1].squeeze(1), 2),
        ),
        X,
        src,
    )


def test_strides_that_are_not_known_to_fit() -> None:
    x = torch.randn(4, 6)[:, ::2]
    reason = declines(lambda x: aten.as_strided_scatter(x, x[0, :2], [2], [1], 0), x)
    assert "holes" in reason


def test_bits_are_not_reinterpreted() -> None:
    assert "bits" in declines(lambda x: x.view(torch.int32), X)


def test_many_inputs_are_joined_by_the_library() -> None:
    assert "20 tensors" in declines(lambda x: torch.cat([x] * 20), X)


def test_addresses_stay_affine() -> None:
    """Splitting and merging heads leaves no division."""
    x = torch.randn(2, 10, 48)
    low = check(lambda x: x.view(2, 10, 4, 12).transpose(1, 2).contiguous().view(8, 10, 12) + 1, x)
    layouts = low.program.layouts()
    for d in computes(low):
        for n in d.body.loads():
            address = layouts[n.attr[0]].address(n.attr[1])
            assert all(address.coefficient(a) is not None for a in address.axes()), address


def test_padding_keeps_its_middle_affine() -> None:
    low = check(lambda x: F.pad(x, (2, 1), mode="reflect"), X)
    (d,) = computes(low)
    assert len(d.body.loads()) == 3
    for n in d.body.loads():
        assert n.attr[1][-1].coefficient(d.axes[-1]) is not None


def computes(low: Lowered) -> list[Compute]:
    return [d for d in low.program.defs if isinstance(d, Compute)]
