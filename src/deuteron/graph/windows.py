"""What the backward of a maximum over windows needs to know: a byte per window.

In: a joint graph. Out: the same, in place, where the positions that a max-pooling found are the
place within its window (rows first) instead of an index of the input, if only gradients read them:
one byte is saved, not eight, and the backward compares small numbers. Results are the same.

    deuteron::max_pool(x, kernel, stride, padding, ceil_mode) -> (values, i8 places)
    deuteron::max_pool_backward(grad, places, size, kernel, stride, padding, ceil_mode, format)
        -> gradient of x[size]
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._prims_common import suggest_memory_format

from deuteron.base.record import Record
from deuteron.graph.edit import Editor, at, remove_dead
from deuteron.graph.strides import as_was

aten = torch.ops.aten
MAX_WINDOW_PLACES = 127  # that an i8 distinguishes

_library = torch.library.Library("deuteron", "FRAGMENT")
_library.define(
    "max_pool(Tensor x, int[] kernel, int[] stride, int[] padding, bool ceil_mode)"
    " -> (Tensor, Tensor)"
)
_library.define(
    "max_pool_backward(Tensor grad, Tensor places, SymInt[] size, int[] kernel, int[] stride,"
    " int[] padding, bool ceil_mode, MemoryFormat format) -> Tensor"
)
FORWARD = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}
BACKWARD = {
    2: aten.max_pool2d_with_indices_backward.default,
    3: aten.max_pool3d_with_indices_backward.default,
}


def _starts(o: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> list[Tensor]:
    """The first input of every window along each dimension, shaped to broadcast."""
    r = len(o)
    return [
        (torch.arange(n) * s - p).view([-1] + [1] * (r - 1 - d))
        for d, (n, s, p) in enumerate(zip(o, stride, padding, strict=True))
    ]


def _max_pool(x: Tensor, kernel: Any, stride: Any, padding: Any, ceil: bool) -> Any:
    r = len(kernel)
    values, index = FORWARD[r](x, kernel, stride, padding, [1] * r, ceil)
    places, left = torch.zeros_like(index), index
    scale = 1
    starts = _starts(index.shape[-r:], stride, padding)
    for d in reversed(range(r)):
        n = x.shape[d - r]
        places += (left % n - starts[d].to(x.device)) * scale
        left, scale = left // n, scale * kernel[d]
    return values, places.to(torch.int8)


def _max_pool_backward(
    grad: Tensor,
    places: Tensor,
    size: Sequence[int],
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil: bool,
    format: torch.memory_format,
) -> Tensor:
    r = len(kernel)
    left = places.to(torch.int64)
    index, scale = torch.zeros_like(left), 1
    starts = _starts(places.shape[-r:], stride, padding)
    for d in reversed(range(r)):
        index += (left % kernel[d] + starts[d].to(grad.device)) * scale
        left, scale = left // kernel[d], scale * size[d - r]
    x = torch.empty(size, dtype=grad.dtype, device=grad.device, memory_format=format)
    return BACKWARD[r](grad, x, kernel, stride, padding, [1] * r, ceil, index)


def _max_pool_fake(x: Tensor, kernel: Any, stride: Any, padding: Any, ceil: bool) -> Any:
    values, index = FORWARD[len(kernel)](x, kernel, stride, padding, [1] * len(kernel), ceil)
    return values, torch.empty_like(index, dtype=torch.int8)


def _max_pool_backward_fake(grad: Tensor, places: Tensor, size: Any, *rest: Any) -> Tensor:
    return torch.empty(size, dtype=grad.dtype, device=grad.device, memory_format=rest[-1])


_library.impl("max_pool", _max_pool, "CompositeExplicitAutograd")
_library.impl("max_pool_backward", _max_pool_backward, "CompositeExplicitAutograd")
torch.library.register_fake("deuteron::max_pool", _max_pool_fake, lib=_library)
torch.library.register_fake("deuteron::max_pool_backward", _max_pool_backward_fake, lib=_library)

MAX_POOL = torch.ops.deuteron.max_pool.default
MAX_POOL_BACKWARD = torch.ops.deuteron.max_pool_backward.default


def keep_places(gm: fx.GraphModule, record: Record) -> int:
    """Poolings save small places of their maxima for the backward. Returns the number of poolings
    changed."""
    pools = [n for n in gm.graph.nodes if n.target in FORWARD.values()]
    editor = Editor(gm)
    count = 0
    for n in pools:
        with at(n):
            count += _keep_places_of(editor, n)
    if count:
        remove_dead(gm.graph)
    return count


def _arguments(n: fx.Node, rank: int) -> tuple[list[list[int]], bool] | None:
    """(kernel, stride, padding) with a number per dimension, and whether to round up; None where
    windows have holes, are too large or of sizes that are not known."""
    args = [*n.args[1:], *([], 0, 1, False)[len(n.args) - 2 :]]
    kernel, stride, padding, dilation, ceil = args
    lists = []
    for given in (kernel, kernel if stride in ([], ()) else stride, padding, dilation):
        many: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
        lists.append(many * rank if len(many) == 1 else many)
    if not all(isinstance(k, int) for many in lists for k in many):
        return None
    if math.prod(lists[0]) > MAX_WINDOW_PLACES or any(k != 1 for k in lists[3]):
        return None
    return lists[:3], bool(ceil)


def _keep_places_of(editor: Editor, node: fx.Node) -> bool:
    rank = next(r for r, target in FORWARD.items() if target is node.target)
    arguments = _arguments(node, rank)
    taken = {u.args[1]: u for u in node.users if u.target is operator.getitem}
    index = taken.get(1)
    if arguments is None or index is None or not index.users or len(taken) != len(node.users):
        return False
    if any(u.target is not BACKWARD[rank] or u.args[-1] is not index for u in index.users):
        return False
    lists, ceil = arguments
    with editor.before(node):
        new = editor.call(MAX_POOL, node.args[0], *lists, ceil, like=node)
    node.replace_all_uses_with(new)
    editor.graph.erase_node(node)
    for n in taken.values():
        n.meta["val"] = editor.evaluate(n)
    for user in list(index.users):
        x = user.args[1]
        with editor.before(user):
            size = [
                s if isinstance(s, int) else editor.call(aten.sym_size.int, x, d, like=user)
                for d, s in enumerate(x.meta["val"].shape)
            ]
            form = suggest_memory_format(x.meta["val"])
            given = (user.args[0], index, size, *lists, ceil, form)
            back = editor.call(MAX_POOL_BACKWARD, *given, like=user)
            back = as_was(editor, back, user)
        editor.replace(user, back)
    return True


__all__ = ["MAX_POOL", "MAX_POOL_BACKWARD", "keep_places"]
