"""What a program makes on the CPU for another device is made there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from deuteron.base.passes import Context
from deuteron.base.record import Record
from deuteron.graph.rewrite import rewrite
from tests.capture.helpers import check_values


def traced(f: Callable[..., object], *shape: int) -> fx.GraphModule:
    """The graph of `f` for a tensor of a GPU, which need not exist."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return make_fx(torch.func.functionalize(f))(torch.empty(*shape, device="cuda"))


def on_the_cpu(gm: fx.GraphModule) -> list[str]:
    made = (n for n in gm.graph.nodes if n.op == "call_function")
    values = ((n, n.meta.get("val")) for n in made)
    return [str(n.target) for n, v in values if isinstance(v, Tensor) and v.device.type == "cpu"]


def windows(x: Tensor) -> Tensor:
    """The mask of shifted windows, as vision models build it."""
    mask = torch.zeros(1, 8, 8)
    for count, rows in enumerate((slice(0, -4), slice(-4, -2), slice(-2, None))):
        mask[:, rows, :4] = count
        mask[:, rows, 4:] = count + 3
    flat = mask.view(1, 2, 4, 2, 4).transpose(2, 3).reshape(-1, 16)
    differ = flat[:, None] - flat[:, :, None]
    return x + differ.masked_fill(differ != 0, -100.0).to(x.device)


def positions(x: Tensor) -> Tensor:
    at = torch.stack(torch.arange(2 * x.shape[-1]).float().split(x.shape[-1])).mean(0)
    return x * (at / 3).sin().cumsum(0).to(x.device, x.dtype)


@pytest.mark.parametrize(("f", "shape"), [(windows, (4, 16, 16)), (positions, (3, 9))])
def test_constructors_move(f: Callable[..., object], shape: tuple[int, ...]) -> None:
    gm = traced(f, *shape)
    assert on_the_cpu(gm)
    record = Record()
    rewrite(gm, Context(record=record))
    check_values(gm)
    assert not on_the_cpu(gm)
    assert any(d["subject"] == "device" for d in record.of("decision"))


def test_what_must_stay_stays() -> None:
    held = torch.randn(16)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        drawn, kept = torch.rand(16), torch.arange(16.0).sin()
        return x + drawn.to(x.device), x + held.to(x.device), x + kept.to(x.device), kept * 2

    gm = traced(f, 16)
    rewrite(gm, Context())
    check_values(gm)
    left = on_the_cpu(gm)
    assert any("rand" in n for n in left) and any("sin" in n for n in left)
    copies = [n for n in gm.graph.nodes if "_to_copy" in str(n.target)]
    assert len(copies) == 2
