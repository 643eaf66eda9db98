"""Rules for operators whose results eager lays out, or shapes, otherwise than torch's rules say.

In: an operator's own rule, or none. Out: a rule (see `strides`, whose helpers are used here).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from deuteron.capture.pointwise import memory_order, over
from deuteron.capture.strides import in_order, is_contiguous

aten = torch.ops.aten
Rule = Callable[..., Any]


def contiguous_on_cpu(rule: Rule) -> Rule:
    """Eager's kernel works on a contiguous copy, and returns the like of it."""

    @wraps(rule)
    def wrapped(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        moved = x if x.device.type != "cpu" or is_contiguous(x) else x.contiguous()
        return rule(moved, *args, **kwargs)

    return wrapped


def contiguous(rule: Rule) -> Rule:
    """Eager's kernel fills a contiguous tensor, whatever the strides of its inputs."""

    @wraps(rule)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return rule(*args, **kwargs).contiguous()

    return wrapped


def of_nothing(rule: Rule) -> Rule:
    """Torch's rule for pooling takes no tensor without channels; eager does."""

    @wraps(rule)
    def wrapped(x: Tensor, size: Sequence[int]) -> Any:
        if any(type(n) is int and n == 0 for n in x.shape[: -len(size)]):
            return x.new_empty((*x.shape[: -len(size)], *size))
        return rule(x, size)

    return wrapped


def counted_dims(rule: Rule) -> Rule:
    """Torch's rule of 2.11 keeps dimensions of one element that are counted from the end."""

    @wraps(rule)
    def wrapped(x: Tensor, order: Any = 2, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dim is not None and x.dim():
            dim = [d % x.dim() for d in (dim if isinstance(dim, (tuple, list)) else [dim])]
        return rule(x, order, dim, *args, **kwargs)

    return wrapped


def index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """Where the tensors of positions lie in another order than their dimensions', so does eager's
    result; torch's fake kernel looks at `x` alone."""
    given = [i for i in indices if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in given):
        return NotImplemented
    shape = torch.broadcast_shapes(*(i.shape for i in given))
    whole = [i.expand(shape) for i in given]
    usual_places = max(i.dim() for i in given) < 2 or all(map(in_order, whole))
    fixed = all(type(n) is int for t in (x, *whole) for n in (*t.shape, *t.stride()))
    if usual_places and (in_order(x) or not fixed):
        return NotImplemented
    if x.device.type != "cpu" and any(i.stride() != whole[0].stride() for i in whole):
        return NotImplemented  # eager copies them
    places = [d for d, i in enumerate(indices) if i is not None]
    rest = [d for d in range(x.dim()) if d not in places]
    together = places[-1] - places[0] + 1 == len(places)
    before = [d for d in rest if together and d < places[0]]
    after = [d for d in rest if d not in before]
    sizes = [*(x.shape[d] for d in before), *shape, *(x.shape[d] for d in after)]
    own = [
        *(x.stride(d) for d in before),
        *(0 for _ in shape),
        *(x.stride(d) for d in after),
    ]
    positions = []
    for (
        i
    ) in whole:  # with a dimension of one element for each of x, of whose stride eager makes use
        i = i.reshape((*(1 for _ in before), *shape, *(1 for _ in after)))
        positions.append(over(sizes, i, i.stride()))
    order = memory_order(sizes, [own, *positions])
    if order == memory_order(sizes, [own]):
        return NotImplemented
    usual = torch.contiguous_format
    copied = [None if i is None else i.expand(shape).clone(memory_format=usual) for i in indices]
    perm = order[::-1]
    x = x if in_order(x) else x.clone(memory_format=usual)
    out = aten.index.Tensor(x, copied).permute(perm).clone(memory_format=usual)
    return out.permute([perm.index(d) for d in range(len(perm))])


_library = torch.library.Library("deuteron", "FRAGMENT")
_library.define(
    "flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, float dropout, bool causal,"
    " Tensor? mask, float? scale) -> (Tensor, Tensor)"
)


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: Any, causal: Any, mask: Any, scale: Any
) -> tuple[Tensor, Tensor]:
    call = aten._scaled_dot_product_flash_attention_for_cpu.default
    return call(query, key, value, dropout, causal, attn_mask=mask, scale=scale)


def _flash_attention_fake(query: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    out, logsumexp = _flash_attention(query, *args)
    return out, torch.empty_like(logsumexp, dtype=query.dtype)


_library.impl("flash_attention_for_cpu", _flash_attention, "CompositeExplicitAutograd")
torch.library.register_fake(
    "deuteron::flash_attention_for_cpu", _flash_attention_fake, lib=_library
)


def flash_attention_for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Torch's rule before 2.13 says that the logarithms are f32, which are f64 for doubles: the
    same call under a name that has its own rule."""
    if query.dtype != torch.float64:
        return NotImplemented
    call = torch.ops.deuteron.flash_attention_for_cpu.default
    return call(query, key, value, dropout_p, is_causal, attn_mask, scale)


RULES: dict[str, Rule] = {
    "aten.index.Tensor": index,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": flash_attention_for_cpu,
}
WRAPPED: dict[str, Callable[[Rule], Rule]] = {
    "aten.grid_sampler_2d.default": contiguous,
    "aten._adaptive_avg_pool2d.default": of_nothing,
    "aten.log_sigmoid_forward.default": contiguous_on_cpu,
    "aten.linalg_vector_norm.default": counted_dims,
}
