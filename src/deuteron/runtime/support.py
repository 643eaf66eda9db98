"""What emitted modules call: memory, views, addresses.

Everything here is on the path of every call, so each function does one thing and checks nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves as leaves

from deuteron.base.errors import DeuteronError
from deuteron.memory.plan import place

# Layouts of the workspace that are kept, by sizes; who sees more shapes than this computes again.
MOST_LAYOUTS = 4096


@cache
def pointers(n: int) -> Any:
    """The ctypes array type of n addresses."""
    return ctypes.c_void_p * n


@cache
def numbers(n: int) -> Any:
    """The ctypes array type of n sizes."""
    return ctypes.c_longlong * n


def empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def workspace(nbytes: int, device: str) -> Tensor:
    """Bytes that the call may use until it returns."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def view(t: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    """A strided view; `offset` in elements, from the tensor's own first one."""
    return torch.as_strided(t, shape, strides, t.storage_offset() + offset)


def as_traced(t: Tensor, strides: Sequence[int]) -> Tensor:
    """A library call's result with the strides that the rest of the program was compiled for."""
    if t.stride() == strides:
        return t
    if all(a == b or n <= 1 for a, b, n in zip(t.stride(), strides, t.shape)) or not t.numel():
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def remember(table: dict[Any, Any], sizes: Any, layout: Callable[..., Any]) -> Any:
    """The layout for new sizes."""
    if len(table) >= MOST_LAYOUTS:
        table.clear()
    found = table[sizes] = layout(*sizes)
    return found


def stream(device: str) -> int:
    """The current CUDA stream of a device."""
    return torch._C._cuda_getCurrentRawStream(torch.device(device).index or 0)


class IndexOutOfRange(DeuteronError, IndexError):
    """An index that the program loaded from a tensor is outside the tensor that it indexes."""


__all__ = [
    "IndexOutOfRange",
    "as_traced",
    "empty",
    "leaves",
    "numbers",
    "place",
    "pointers",
    "remember",
    "stream",
    "view",
    "workspace",
]
