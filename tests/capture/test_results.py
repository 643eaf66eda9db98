"""Rules for results that torch's rules describe otherwise than eager makes them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch._meta_registrations as rules
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dev.check.test_cases import How, check

fakes = sys.modules["torch._subclasses.fake_impls"]

attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def before_2_13(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    batch, heads, length, _ = query.shape
    made = torch.empty((batch, length, heads), dtype=torch.float, device=query.device)
    return torch.empty_like(query), made.transpose(1, 2)


def test_logarithms_of_attention_are_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    own = rules.meta__scaled_dot_product_flash_attention_for_cpu
    monkeypatch.setattr(own, "__code__", before_2_13.__code__)
    FakeTensorMode.cache_clear()
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    with FakeTensorMode() as fake:
        assert attention(*[fake.from_tensor(x)] * 3)[1].dtype == torch.float32

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        out, logarithms = attention(x, x, x)
        return out * 2, logarithms * 2

    def trained(x: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x) * 2

    try:
        assert check(both, both, [[x.detach()]], How()) is None
        assert check(trained, trained, [[x]], How(backward=True, options={"verify": True})) is None
    finally:
        FakeTensorMode.cache_clear()


def test_positions_among_unique_values_are_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's rule before 2.13 gave them the dtype of the values."""
    own = fakes._unique

    def unique_before_2_13(fake_mode: Any, func: Any, x: Tensor, *args: Any, **kw: Any) -> Any:
        values, *positions = own(fake_mode, func, x, *args, **kw)
        return values, *(torch.empty_like(p, dtype=x.dtype) for p in positions)

    monkeypatch.setattr(fakes, "_unique", unique_before_2_13)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        rows = x.reshape(-1, 2)
        calls = [
            torch.unique(x, return_inverse=True, return_counts=True),
            torch.unique_consecutive(x, return_inverse=True),
            torch.unique(rows, dim=0, return_inverse=True),
            torch.unique_consecutive(rows, dim=1, return_counts=True),
        ]
        return tuple(t + 1 for row in calls for t in row)

    numbers = torch.tensor([3.0, 1.0, 1.0, 2.0, 3.0, 3.0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert check(f, f, [[numbers]], How()) is None
        whole = check(lambda x: torch.unique_consecutive(x, True), f, [[torch.empty(0)]], How())
    assert whole is None
