"""Rules for operators whose results eager lays out, or shapes, otherwise than torch's rules say.

In: an operator's own rule, or none. Out: a rule (see `strides`, whose helpers are used here).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_false

from deuteron.capture import strides
from deuteron.capture.pointwise import memory_order, over
from deuteron.capture.strides import (
    as_it_is,
    has_one,
    in_order,
    is_contiguous,
    traced_as_it_is,
    unique_consecutive,
    unique_dim,
)

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
        return strides.contiguous(rule(*args, **kwargs))

    return wrapped


def of_nothing(rule: Rule) -> Rule:
    """Torch's rule for pooling takes no tensor without channels, nor to no elements; eager does."""

    @wraps(rule)
    def wrapped(x: Tensor, size: Sequence[int]) -> Any:
        if any(type(n) is int and n == 0 for n in (*x.shape[: -len(size)], *size)):
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
    masks = any(i.dtype in (torch.bool, torch.uint8) for i in given)
    if masks or traced_as_it_is(aten.index.Tensor):
        return NotImplemented
    shape = torch.broadcast_shapes(*(i.shape for i in given))
    whole = [i.expand(shape) for i in given]
    usual_places = max(i.dim() for i in given) < 2 or all(map(in_order, whole))
    fixed = all(type(n) is int for t in (x, *whole) for n in (*t.shape, *t.stride()))
    # Where others may change torch's rule gives steps of dimensions of one element a say.
    if usual_places and (in_order(x) or not (fixed or has_one(x))):
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
    if fixed and order == memory_order(sizes, [own]):
        return NotImplemented
    usual = torch.contiguous_format
    copied = [None if i is None else i.expand(shape).clone(memory_format=usual) for i in indices]
    perm = order[::-1]
    x = x if in_order(x) else x.clone(memory_format=usual)
    # Of sizes that may change it is not known that a copy is in order.
    out = as_it_is(aten.index.Tensor, x, copied).permute(perm).clone(memory_format=usual)
    return out.permute([perm.index(d) for d in range(len(perm))])


# -- calls under a name that has its own rule ------------------------------------------------------
LIBRARY = torch.library.Library("deuteron", "FRAGMENT")


def with_true_fake(name: str, target: Any, mend: Callable[..., Any]) -> Any:
    """An operator that calls `target`, for which torch's fake kernel describes another result
    than eager gives: ``mend(fake result, *arguments)`` is the right description."""
    schema = str(target._schema)

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    def fake(*args: Any, **kwargs: Any) -> Any:
        return mend(target(*args, **kwargs), *args)

    LIBRARY.define(name + schema[schema.index("(") :])
    LIBRARY.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"deuteron::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.deuteron, name).default


def as_doubles(results: Sequence[Tensor], query: Tensor, *args: Any) -> Any:
    out, logarithms = results
    return out, torch.empty_like(logarithms, dtype=query.dtype)


ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_OF_DOUBLES = with_true_fake("flash_attention_for_cpu", ATTENTION, as_doubles)


def flash_attention_for_cpu(query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Torch's rule before 2.13 says that the logarithms are f32, which are f64 for doubles."""
    if query.dtype != torch.float64:
        return NotImplemented
    return ATTENTION_OF_DOUBLES(query, *args, **kwargs)


def of_positions(results: Sequence[Tensor], *args: Any) -> Any:
    values, *positions = results
    return values, *(torch.empty_like(p, dtype=torch.int64) for p in positions)


def with_positions(name: str, rule: Rule | None = None) -> Rule:
    """Torch's rule before 2.13 says that positions and counts have the dtype of the values."""
    target = getattr(aten, name).default
    mended = with_true_fake(name.lstrip("_"), target, of_positions)

    def ours(*args: Any, **kwargs: Any) -> Any:
        out = NotImplemented if rule is None else rule(*args, **kwargs)
        return mended(*args, **kwargs) if out is NotImplemented else out

    return ours


def gradient_of_nothing(grad: Tensor, x: Tensor, *args: Any) -> Any:
    """Eager runs pooling to no elements and refuses its gradient; traced together with the forward,
    the refusal would be one of both."""
    nothing = any(type(n) is int and n == 0 for n in grad.shape)
    return torch.zeros_like(x) if nothing else NotImplemented


RULES: dict[str, Rule] = {
    "aten._adaptive_avg_pool2d_backward.default": gradient_of_nothing,
    "aten._adaptive_avg_pool3d_backward.default": gradient_of_nothing,
    "aten.adaptive_max_pool2d_backward.default": gradient_of_nothing,
    "aten.adaptive_max_pool3d_backward.default": gradient_of_nothing,
    "aten.index.Tensor": index,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": flash_attention_for_cpu,
    "aten._unique2.default": with_positions("_unique2"),
    "aten.unique_consecutive.default": with_positions("unique_consecutive", unique_consecutive),
    "aten.unique_dim.default": with_positions("unique_dim", unique_dim),
}


def of_any_length(rule: Rule) -> Rule:
    """A softmax over a size known at run time alone may be over nothing. Torch's rule (before 2.13)
    takes the maximum, which asserts that there is something: with an element more, minus infinity,
    there is; it changes no other and is dropped."""

    @wraps(rule)
    def wrapped(x: Tensor, dim: int, half_to_float: bool) -> Any:
        size = x.shape[dim] if x.dim() else 1
        if not free_unbacked_symbols(size) or guard_or_false(size > 0):
            return rule(x, dim, half_to_float)
        shape = [1 if k == dim % x.dim() else n for k, n in enumerate(x.shape)]
        last = x.new_full(shape, -math.inf)
        longer = rule(torch.cat((x, last), dim), dim, half_to_float)
        return strides.contiguous(longer.narrow(dim, 0, size))

    return wrapped


WRAPPERS: dict[str, Callable[[Rule], Rule]] = {
    "aten.grid_sampler_2d.default": contiguous,
    "aten.masked_fill.Scalar": contiguous,
    "aten.masked_fill.Tensor": contiguous,
    "aten.tril.default": contiguous,
    "aten.triu.default": contiguous,
    "aten._adaptive_avg_pool2d.default": of_nothing,
    "aten.log_sigmoid_forward.default": contiguous_on_cpu,
    "aten.linalg_vector_norm.default": counted_dims,
    "aten._softmax.default": of_any_length,
    "aten._log_softmax.default": of_any_length,
}
