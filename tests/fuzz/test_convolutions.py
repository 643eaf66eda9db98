"""Random convolution networks of fixed seeds: as they are compiled, and with every rewrite of
convolutions and products taken wherever it is possible, as on GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from deuteron.graph import convolutions, layout, padding
from dev.check.test_cases import How
from dev.fuzz.convolutions import network

# Each takes about two seconds.
PLAIN = range(40, 46)
EVERYWHERE = range(60, 72)


def wrong(seed: int) -> str:
    p = network(seed)
    failure = p.straight().check(How(backward=p.backward))
    return f"{failure}\n{p.straight().text()}" if failure and failure.kind != "torch" else ""


@pytest.mark.parametrize("seed", PLAIN)
def test_networks(seed: int) -> None:
    assert not wrong(seed)


@pytest.mark.parametrize("seed", EVERYWHERE)
def test_rewritten_wherever_possible(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(node: Any) -> bool:
        sizes = padding._sizes(node)
        return all(type(n) is int for n in sizes) and any(n % 8 for n in sizes)

    monkeypatch.setattr(layout, "MIN_CHANNELS", 1)
    monkeypatch.setattr(convolutions, "on_tensor_cores", lambda t: t.is_floating_point())
    monkeypatch.setattr(convolutions, "MIN_FLOPS", 0)
    monkeypatch.setattr(padding, "_worth", odd)
    assert not wrong(seed)


def test_what_networks_have() -> None:
    """Both memory orders, every kind of layer, training and inference."""
    made = [network(seed) for seed in range(60)]
    text = "\n".join(p.straight().text() for p in made)
    assert {s.form for p in made for s in p.inputs} == {"dense", "channels_last", "stepped"}
    assert {p.backward for p in made} == {True, False}
    wanted = """conv1d conv2d conv3d conv_transpose2d batch_norm instance_norm group_norm layer_norm
    max_pool2d avg_pool2d adaptive_avg_pool2d cat flatten view reshape linear unbind as_strided"""
    assert all(f".{word}(" in text for word in wanted.split())
