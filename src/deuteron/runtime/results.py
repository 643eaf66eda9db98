"""What a library call has returned and the program was not compiled for.

In: a result that differs from what its operator's fake kernel said. Out: the like of it that the
program can read, or an error. Called by emitted modules, only where something differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deuteron.base.errors import UntrueFakeKernel

Claim = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, str]
FAKE_KERNEL_HINT = (
    "mend the operator's fake kernel (torch.library.register_fake); torch.library.opcheck compares "
    "it with the operator"
)


def checked_result(
    t: Any, claim: Claim, op: str, where: str, number: int, used: bool, own: bool
) -> Tensor | None:
    """The result with the strides that the program was compiled for: a copy, where they are others.
    `used`: whether the program relies on it; what it hands on whole to library calls may be
    anything. `own`: whether it may be copied; it shares memory with an argument otherwise."""
    shape, strides, dtype, device = claim
    if not isinstance(t, Tensor):
        if t is None and not used:
            return None
        raise _untrue(op, where, number, claim, f"a {type(t).__name__}")
    same = t.layout == torch.strided and t.shape == shape and t.dtype == dtype
    if not same or not _on(t.device, device):
        if used:
            raise _untrue(op, where, number, claim, described(t))
        return t
    if t.is_neg():
        t = t.resolve_neg()
    if not t.numel() or all(a == b or n <= 1 for a, b, n in zip(t.stride(), strides, t.shape)):
        return t
    if not own:
        raise _untrue(op, where, number, claim, described(t))
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def exact_count(results: Sequence[Any], count: int, op: str, where: str) -> Sequence[Any]:
    """The results of an operator whose fake kernel gave `count`."""
    if len(results) != count:
        raise UntrueFakeKernel(
            f"{op} returned {len(results)} results; its fake kernel said {count}",
            hint=FAKE_KERNEL_HINT,
            where=where,
            op=op,
        )
    return results


def _on(device: torch.device, traced: str) -> bool:
    wanted = torch.device(traced)
    return device.type == wanted.type and (wanted.index is None or device.index == wanted.index)


def described(t: Tensor) -> str:
    strides = f", strides {tuple(t.stride())}" if t.layout == torch.strided else f", {t.layout}"
    return f"sizes {tuple(t.shape)}{strides}, {t.dtype} on {t.device}"


def _untrue(op: str, where: str, number: int, claim: Claim, seen: str) -> UntrueFakeKernel:
    shape, strides, dtype, device = claim
    said = f"sizes {shape}, strides {strides}, {dtype} on {device}"
    return UntrueFakeKernel(
        f"result {number} of {op} is not what its fake kernel said: {seen}; traced as {said}",
        hint=FAKE_KERNEL_HINT,
        where=where,
        op=op,
    )


__all__ = ["exact_count", "checked_result"]
