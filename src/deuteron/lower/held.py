"""Questions about nodes and the tensors that they hold: constants, their names, their elements."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch

import deuteron.lower.factories
import deuteron.lower.indexing
import deuteron.lower.nn
import deuteron.lower.pointwise
import deuteron.lower.pooling
import deuteron.lower.reductions
import deuteron.lower.views  # noqa: F401
from deuteron.ir.index import Index, Sym, hint
from deuteron.lower.core import (
    LowerContext,
)


def elements_are_distinct(shape: Sequence[Index], strides: Sequence[Index]) -> bool:
    """Whether no two elements share memory, but for broadcast dimensions."""
    reach = 1
    for stride, n in sorted((hint(s), hint(n)) for s, n in zip(strides, shape, strict=True)):
        if stride == 0 or n == 1:
            continue
        if stride < reach:
            return False
        reach += stride * (n - 1)
    return True


def makes_tensors(target: Any) -> bool:
    """Whether results are tensors of their own, and not views of arguments."""
    return all(r.alias_info is None for r in target._schema.returns)


def as_index_of(sym: Sym) -> Index:
    from deuteron.ir.index import atom

    return atom(sym)


def leaves(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        x = list(x.values())
    return [t for y in x for t in leaves(y)] if isinstance(x, (list, tuple)) else []


def terms(ctx: LowerContext, t: torch.Tensor) -> int:
    """Of the number of elements, multiplied out."""
    symbolic = [n for n in t.shape if not isinstance(n, int)]
    return math.prod(max(1, len(ctx.size(n).terms)) for n in symbolic)


def kind_text(t: torch.Tensor) -> str:
    if t.layout != torch.strided:
        return f"{t.layout} tensors are not generated"
    if t.is_conj() or t.is_neg():
        return "lazily conjugated or negated tensors are not generated"
    return f"{t.dtype} is not generated"


def digest(t: torch.Tensor) -> str:
    """Identifies a constant by its content."""
    h = hashlib.sha256(f"{t.dtype} {tuple(t.shape)} {t.device}".encode())
    flat = t.detach().cpu().contiguous().reshape(-1)
    h.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return h.hexdigest()[:32]
