"""Rules for results that torch's rules describe otherwise than eager makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._meta_registrations as rules
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deuteron.tools.reproduce import How, check

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
