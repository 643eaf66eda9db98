"""stub"""
from __future__ import annotations
from collections.abc import Callable
from functools import lru_cache
from typing import Any
import torch

@lru_cache(maxsize=1)
def table() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import core_aten_decompositions
    t = dict(core_aten_decompositions())
    t.pop(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, None)
    return t
