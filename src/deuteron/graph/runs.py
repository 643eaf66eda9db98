"""Variances over short runs of memory, long dimensions first.

In: a functional ATen graph with fake values. Out: the same, in place, where a ``var_mean`` on a CPU
reads its operand in runs of a few elements, with others between them that it does not reduce with
these, and takes the variance of each element of a run first, then that of the run. So are groups of
a group norm whose image lies channels last: as rows they are read element by element, as columns
side by side (float32, 2 images of 16 channels in 8 groups, 64x64, 2 cores with AVX-512: 178 us, 39
so; 128 in 32: 733 and 172; runs of 10: 484 and 666, so they stay). Invariants: sizes are known;
results are sums of the same numbers in another order.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from deuteron.base.record import Record
from deuteron.graph import ops
from deuteron.graph.edit import Editor

aten = torch.ops.aten
VAR_MEAN = aten.var_mean.correction
MAX_RUN_BYTES = 32
# Of fewer elements between two of a run nothing is to be gained by walking along them.
MIN_BETWEEN = 64


def long_dimensions_first(gm: fx.GraphModule, record: Record) -> int:
    """Variances over short runs become two. Returns how many."""
    editor, count = Editor(gm), 0
    for node in list(gm.graph.find_nodes(op="call_function", target=VAR_MEAN)):
        x = ops.tensor_of(node.args[0])
        dim = None if x is None else run(x, reduced(node, x.dim()))
        if x is None or dim is None:
            continue
        with editor.before(node):
            parts = in_two(editor, node, x, dim)
        for user in list(node.users):
            editor.replace(user, parts[user.args[1]])
        count += 1
        record.add(
            "decision",
            subject="runs",
            accepted=True,
            reason="its memory is walked along what it does not reduce",
            detail=f"runs of {x.shape[dim]} elements",
            first=parts[0].name,
            second="",
            bytes=0,
            us=0.0,
        )
    return count


def reduced(node: fx.Node, dims: int) -> set[int]:
    """The dimensions of a variance."""
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return {d % dims for d in given} if given else set(range(dims))


def run(x: torch.Tensor, dims: set[int]) -> int | None:
    """The dimension along a short run of memory, if another, not reduced, goes on where it ends."""
    sizes, strides = x.shape, x.stride()
    known = all(type(n) is int for n in (*sizes, *strides))
    if x.device.type != "cpu" or not known or not x.dtype.is_floating_point:
        return None
    for d in dims:
        short = 1 < sizes[d] <= MAX_RUN_BYTES // x.element_size() and strides[d] == 1
        after = any(strides[k] == sizes[d] for k in set(range(x.dim())) - dims)
        if short and after and math.prod(sizes[k] for k in dims - {d}) >= MIN_BETWEEN:
            return d
    return None


def in_two(editor: Editor, node: fx.Node, x: torch.Tensor, dim: int) -> tuple[fx.Node, fx.Node]:
    """Variance and mean of a run's elements, then of the run."""

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return editor.call(target, *args, like=node, **kwargs)

    dims = reduced(node, x.dim())
    others, count = sorted(dims - {dim}), math.prod(x.shape[d] for d in dims)
    both = call(VAR_MEAN, node.args[0], others, correction=0, keepdim=True)
    parts = [call(operator.getitem, both, k) for k in (0, 1)]
    mean = call(aten.mean.dim, parts[1], [dim], True)
    away = call(aten.sub.Tensor, parts[1], mean)
    spread = call(aten.mean.dim, call(aten.mul.Tensor, away, away), [dim], True)
    variance = call(aten.add.Tensor, call(aten.mean.dim, parts[0], [dim], True), spread)
    correction = node.kwargs.get("correction", 1)
    if correction is None or correction:
        left = count - (1 if correction is None else correction)
        variance = call(aten.mul.Tensor, variance, count / left if left > 0 else math.nan)
    if node.kwargs.get("keepdim"):
        return variance, mean
    variance, mean = (call(aten.squeeze.dims, v, sorted(dims)) for v in (variance, mean))
    return variance, mean


__all__ = ["long_dimensions_first"]
