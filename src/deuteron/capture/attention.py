"""Attention as plain code: operators become what they mean.

``scaled_dot_product_attention`` with a mask that the graph computes (`plain_masked_attention`):
where products may share a kernel, the mask is then never in memory. With a mask of the caller's,
or none, the library is called.

FlexAttention. In: Dynamo's graph, in which ``flex_attention`` is one operator with two graphs of
the user's (`score_mod` of a score and its place, `mask_mod` of a place). Out: the same graph, in
which it is a function of torch's operators: AOTAutograd traces and differentiates that as it does
the code around it, so scores are changed, masked and normalised in generated kernels, and gradients
of what the user's functions captured are ordinary ones.

The meaning is eager's (`torch._higher_order_ops.flex_attention.math_attention`): scores in f32 at
least, a row without any unmasked element gives 0, and `mask_mod` decides alone; the blocks of a
`BlockMask` say which parts a kernel may leave out, and kernel options how.

Where that cannot be done the library is called, which also makes all scores; the Record has the
reason, and the bytes that they take.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from deuteron.base.passes import Context
from deuteron.base.products import MAX_WHOLE, share_kernels
from deuteron.base.record import Record
from deuteron.capture.hints import Hints
from deuteron.capture.pointwise import memory_order
from deuteron.graph import ops
from deuteron.ir.operations import HALF
from deuteron.ir.reference_ops import TO_TORCH

FLEX_ATTENTION = "flex_attention"
DTYPES = {v: k for k, v in TO_TORCH.items()}
# In-dims of the user's functions for (batch, head, query, key), innermost `vmap` first.
VMAP_IN_DIMS = tuple(tuple(0 if d == k else None for d in range(4)) for k in reversed(range(4)))


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """query[B, H, M, E], key[B | 1, K, N, E], value[B | 1, K, N, V], H a multiple of K. Returns the
    result[B, H, M, V], and of each row the logarithm of the sum of exponentials and the maximum of
    the scores, both divided by log(2), as the operator does."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (autocast(x, dtype) for x in (query, key, value))
    with torch.autocast(kind, enabled=False):
        key, value = for_heads(key, query), for_heads(value, query)
        score_buffers, mask_buffers = tuple(score_mod_other_buffers), tuple(mask_mod_other_buffers)
        mods = (score_mod, block_mask[-1])
        scores, result = attended(query, key, value, *mods, scale, score_buffers, mask_buffers)
        highest = scores.detach().amax(-1)
        empty = highest == -math.inf
        finite = torch.where(empty.unsqueeze(-1), 0.0, scores)
        total = torch.where(empty, -math.inf, torch.logsumexp(finite, -1))
        return (
            in_order_of(result, memory_order(query.shape, [query.stride()])),
            total / math.log(2),
            highest / math.log(2),
        )


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    mask_mod: Callable[..., Tensor],
    scale: float,
    score_buffers: tuple[Any, ...],
    mask_buffers: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """The masked scores[B, H, M, N], and what they weight."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = query.to(dtype) @ key.to(dtype).transpose(-2, -1) * scale
    places = [torch.arange(n, device=scores.device) for n in scores.shape]
    with indexing():
        changed = everywhere(score_mod, 1, len(score_buffers))(scores, *places, *score_buffers)
        allowed = everywhere(mask_mod, 0, len(mask_buffers))(*places, *mask_buffers)
    masked = torch.where(allowed, changed.to(dtype), -math.inf)
    weights = torch._safe_softmax(masked, -1)
    return masked, weights.to(query.dtype) @ value.to(query.dtype)


def everywhere(f: Callable[..., Tensor], before: int, after: int) -> Callable[..., Tensor]:
    """`f` of single elements and places, for all of them; `before` arguments have the dimensions of
    the places, `after` are the user's own."""
    for dims in VMAP_IN_DIMS:
        f = torch.vmap(f, in_dims=(*((0,) * before), *dims, *((None,) * after)))
    return f


def indexing() -> AbstractContextManager[Any]:
    """Under it ``buffer[place]`` reads at a tensor's place, instead of asking for a number."""
    from torch._dynamo import _trace_wrapped_higher_order_op as wrapped

    mode_type = getattr(wrapped, "TransformGetItemToIndex", None)
    return nullcontext() if mode_type is None else mode_type()


def for_heads(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values[B | 1, K, N, E] of every head and batch of the query[B, H, M, E]."""
    heads = query.shape[1] // x.shape[1]
    if heads != 1:
        x = torch.repeat_interleave(x, heads, dim=1)
    return x.expand(query.shape[0], *x.shape[1:])


def autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Under autocast the operator casts what it is given, and nothing inside."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def in_order_of(result: Tensor, fastest: Sequence[int]) -> Tensor:
    """The result with dimensions in memory in this order, from the fastest on, but elements of a
    row beside each other: what follows was traced so."""
    last = result.dim() - 1
    order = [*(d for d in reversed(fastest) if d != last), last]
    if order == sorted(order):
        return result.contiguous()
    return result.permute(order).contiguous().permute([order.index(d) for d in range(last + 1)])


def plain_masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    fastest: tuple[int, ...],
) -> Tensor:
    """query[..., H, M, E], key[..., K, N, E], value[..., K, N, V]; H = K, or a multiple where
    `enable_gqa`. The result[..., H, M, V] has dimensions in memory in an order, see
    `in_order_of`."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value, attn_mask = (autocast(x, dtype) for x in (query, key, value, attn_mask))
    with torch.autocast(kind, enabled=False):
        if enable_gqa:
            key, value = (
                x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value)
            )
        wide = torch.float32 if DTYPES[query.dtype] in HALF else query.dtype
        scores = (query @ key.transpose(-2, -1)).to(wide)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if attn_mask.dtype == torch.bool:
            scores = torch.where(attn_mask, scores, -math.inf)
        else:
            scores = scores + attn_mask
        weights = torch._safe_softmax(scores, -1)
        if dropout_p:
            weights = F.dropout(weights, dropout_p, True)
        return in_order_of(weights.to(query.dtype) @ value, fastest)


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Rows without anything above minus infinity give 0: sums beside a number of each row, as in
    the softmax of other rows."""
    x = x if dtype is None else x.to(dtype)
    if not x.dim() or x.shape[dim] == 0:
        return NotImplemented
    wide = x.float() if DTYPES.get(x.dtype) in HALF else x
    top = wide.amax(dim, keepdim=True)
    nothing = top == -math.inf
    powers = torch.exp(wide - torch.where(nothing, 0.0, top))
    return (powers / torch.where(nothing, 1.0, powers.sum(dim, keepdim=True))).to(x.dtype)


def added(shape: Sequence[Any], indices: Sequence[Tensor], values: Tensor) -> Tensor:
    """The gradient of a tensor that the user's functions read at places."""
    zeros = values.new_zeros(tuple(shape))
    return torch.ops.aten.index_put.default(zeros, list(indices), values, True)


RULES: dict[str, Callable[..., Any]] = {
    "flex_lib.zeros_and_scatter.default": added,
    "aten._safe_softmax.default": safe_softmax,
}

# ------------------------------------------------------------------------------------- the rewrite


def inline_attention(gm: fx.GraphModule, record: Record) -> None:
    """Replaces the operator in Dynamo's graph and in the graphs inside it; in place."""
    for inner in graphs(gm):
        calls = [n for n in inner.graph.nodes if is_flex(n)]
        for node in calls:
            reason = why_not(inner, node)
            record.add(
                "decision",
                subject="attention",
                accepted=not reason,
                first=node.name,
                second=FLEX_ATTENTION,
                reason="plain code" if not reason else "library",
                detail=reason,
                bytes=scores_bytes(node),
            )
            if not reason:
                node.target = plain_attention
        if calls:
            inner.recompile()


def inline_masked_attention(gm: fx.GraphModule, context: Context) -> None:
    """The same of ``scaled_dot_product_attention`` with a mask."""
    for inner in graphs(gm):
        for node in inner.graph.nodes:
            if node.target is not F.scaled_dot_product_attention:
                continue
            reason = why_library(inner, node, context)
            context.record.add(
                "decision",
                subject="attention",
                accepted=not reason,
                first=node.name,
                second="scaled_dot_product_attention",
                reason="plain code" if not reason else "library",
                detail=reason,
                bytes=scores_bytes(node),
            )
            if not reason:
                node.target = plain_masked_attention
                result = node.meta["example_value"]
                order = tuple(memory_order(result.shape, [result.stride()]))
                node.kwargs = {**node.kwargs, "fastest": order}
                inner.recompile()


def why_library(gm: fx.GraphModule, node: fx.Node, context: Context) -> str:
    """Why attention is the library's. Empty if it need not be."""
    call = inspect.signature(plain_masked_attention).bind_partial(*node.args, **node.kwargs)
    mask = call.arguments.get("attn_mask")
    if not isinstance(mask, fx.Node):
        return "without a mask it has all that a kernel could leave out; not estimated"
    held = [n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")]
    memory = {ops.storage(_tensor(n)) for n in held} - {None}
    if ops.storage(_tensor(mask)) in memory:
        return "its mask is in memory"
    values = [n.meta["example_value"] for n in (*node.all_input_nodes, node)]
    if any(type(n) is int and not n for v in values for n in v.shape):
        return "it has no elements"
    query, *_, result = values
    kept = torch.is_grad_enabled() and result.requires_grad
    options, spec = context.options, context.spec(str(query.device))
    if options.precision == "eager" or kept and not options.recompute:
        return "options say that scores are kept"
    if kept and spec.kind == "cpu":
        return "gradients on CPUs are not estimated beside the library's"
    if not share_kernels(DTYPES.get(query.dtype, ""), spec):
        return f"products of {query.dtype} share no kernels on this device"
    widths = (query.shape[-1], result.shape[-1])
    if any(type(n) is not int or n > MAX_WHOLE for n in widths):
        return f"heads are wider than {MAX_WHOLE}, or how wide is known at run time only"
    return ""


def _tensor(n: fx.Node) -> Tensor | None:
    value = n.meta.get("example_value")
    return value if isinstance(value, Tensor) else None


def graphs(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    yield from (m for m in gm.modules() if isinstance(m, fx.GraphModule))


def is_flex(node: fx.Node) -> bool:
    higher = isinstance(node.target, torch._ops.HigherOrderOperator)
    return higher and ops.packet(node.target) == FLEX_ATTENTION


def why_not(gm: fx.GraphModule, node: fx.Node) -> str:
    """Why a call stays a library call: tried on the traced values. Empty if it need not."""
    target: Any = node.target
    if torch._C.DispatchKey.AutocastCPU not in target.py_kernels:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                return "this torch does not say what autocast means for it"
    try:
        args, kwargs = traced((node.args, node.kwargs), gm)
        inspect.signature(plain_attention).bind(*args, **kwargs)
        # Dynamo's own mode: AOTAutograd's will be another.
        mode = getattr(args[0], "fake_mode", None)
        with mode or nullcontext(), torch.no_grad():
            made = plain_attention(*args, **kwargs)
    except Exception as e:  # noqa: BLE001 - whatever the user's functions do; it is in the Record
        text = f"{type(e).__name__}: {e}".splitlines()[0]
        return f"its functions cannot be applied to all places at once ({text})"
    expected = node.meta.get("example_value")
    if isinstance(expected, (tuple, list)) and isinstance(expected[0], Tensor):
        if expected[0].dtype != made[0].dtype or expected[0].dim() != made[0].dim():
            return f"its result was traced as {expected[0].dtype}"
    return ""


def traced(x: Any, gm: fx.GraphModule) -> Any:
    """Arguments as they were traced."""

    def value(n: fx.Node) -> Any:
        if n.op == "get_attr":
            held: Any = gm
            for part in str(n.target).split("."):
                held = getattr(held, part)
            return n.meta.get("example_value", held) if isinstance(held, Tensor) else held
        return n.meta["example_value"]

    return fx.map_arg(x, value)


def scores_bytes(node: fx.Node) -> int:
    """Bytes of all scores, in f32."""
    shapes: list[Sequence[Any]] = []
    for n in node.args[:2]:
        val = n.meta.get("example_value") if isinstance(n, fx.Node) else None
        if isinstance(val, Tensor):
            shapes.append(val.shape)
    if len(shapes) != 2:
        return 0
    hints, total = Hints(), 4
    for n in (*shapes[0][:-1], shapes[1][-2]):
        total *= hints.size(n)
    return total


__all__ = ["RULES", "inline_attention", "inline_masked_attention", "plain_attention"]
