"""Which ATen operators AOTAutograd decomposes, and which reach the lowering whole.

In: nothing. Out: `table()`, operator overload -> function. The base is torch's core ATen set
(composite operators, backward formulas of pointwise operators, losses, padding, upsampling,
embedding and norm backwards, ...). This file states what differs from it, family by family:

    NOT_DECOMPOSED   in torch's set, but not decomposed here
    ALSO_DECOMPOSED  torch knows how, but its core set keeps them whole; here they are decomposed
    OWN_RULES        rules of this file

All names are looked up; one that this torch does not have is left out.

Numerics: torch's decompositions of half types compute in f32 and round once per operator, as eager
does. Those that round more often than eager are in `NOT_DECOMPOSED` or have a rule in `OWN_RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch._decomp import _core_aten_decompositions_post_autograd, get_decompositions
from torch._guards import detect_fake_mode

from deuteron.base.record import Record
from deuteron.capture import (
    attention,
    fourier,
    numbers,
    pointwise,
    refusals,
    results,
    sampling,
    strides,
)
from deuteron.graph import ops, transaction
from deuteron.graph.edit import outside_of_modes

aten = torch.ops.aten
Rule = Callable[..., Any]

NOT_DECOMPOSED: tuple[str, ...] = (
    # Torch's rule returns the attention matrix where the backward expects log-sum-exp: wrong
    # gradients.
    "aten._scaled_dot_product_flash_attention_for_cpu",
    # Products are loops or library calls, by the figures of both; with an addend they are one call.
    "aten.baddbmm",
    *("aten.mv", "aten.dot"),
    # One scalar function each in the lowering: decomposed they would round more often than eager
    # in half types.
    "aten.addcmul",
    "aten.addcdiv",
    "aten.lerp",
    "aten.silu",
    "aten.square",
    "aten.rsub",
    "aten.clamp_min",
    "aten.clamp_max",
    "aten.clip",
    "aten.floor_divide",
    *("aten.sgn", "aten.isposinf", "aten.isneginf"),
    "aten.std",
    # Sums of half types accumulate in f32 in the lowering; a decomposed `sum.default` says nothing
    # more.
    "aten.sum",
    # The graph's own rewrite makes it a function of a seed, or leaves eager's call.
    "aten.bernoulli",
    # Torch's rule takes the index for a mask or a number where it is a bool or has no dimensions.
    "aten.take",
    # Torch's rule takes only what can be viewed.
    "aten.view_copy",
    # Torch's rule loses strides with holes.
    "aten.select_scatter",
    # Torch's rule reads at positions that it computes as a tensor.
    "aten.roll",
    # Data movement by a loaded index, or an order: nothing to gain from loops.
    "aten.argsort",
    "aten.msort",
    "aten.isin",
    "aten.unique_dim",
)

ALSO_DECOMPOSED: tuple[str, ...] = (
    # Softmax and norms are reductions with prologue and epilogue: decomposed they fuse with their
    # neighbours.
    "aten._softmax",
    "aten._log_softmax",
    "aten.native_layer_norm",
    "aten.native_group_norm",
    "aten.native_batch_norm",
    "aten._native_batch_norm_legit",
    "aten._native_batch_norm_legit_functional",
    "aten._native_batch_norm_legit_no_training",
    "aten._batch_norm_with_update",
    "aten._batch_norm_with_update_functional",
    "aten._batch_norm_no_update",
    "aten.batch_norm_backward",
    "aten.linalg_vector_norm",
    "aten.dist",
    "aten.rrelu_with_noise_backward",
    # Pointwise formulas.
    "aten.elu",
    "aten.hardtanh",
    "aten.leaky_relu",
    "aten.round.decimals",
    "aten.lcm",
    "aten.conj_physical",
    # Index arithmetic and gathers.
    "aten.upsample_bicubic2d",
    "aten.upsample_bilinear2d",
    "aten.upsample_trilinear3d",
    "aten.upsample_nearest2d.vec",
    "aten.tril_indices",
    "aten.triu_indices",
    "aten.narrow_copy",
    "aten.permute_copy",
    "aten.unbind_copy",
    "aten.lift",
    "aten._adaptive_avg_pool2d",
    "aten.new_empty_strided",
)

# Formulas over rand and randn, which the graph's own rewrite makes functions of a seed.
RANDOM_DECOMPOSED: tuple[str, ...] = (
    "aten.exponential",
    "aten.cauchy",
    "aten.log_normal",
    "aten.normal.Tensor_Tensor",
    "aten.normal.Tensor_float",
    "aten.normal.float_Tensor",
)

OWN_RULES: dict[str, Rule] = {}


def decomposition(*names: str) -> Callable[[Rule], Rule]:
    def add_rule(f: Rule) -> Rule:
        for n in names:
            assert n not in OWN_RULES, f"two rules for {n}"
            OWN_RULES[n] = f
        return f

    return add_rule


@lru_cache(maxsize=2)
def table(eager_random: bool = False) -> dict[Any, Rule]:
    """The decomposition table, the same object in every call; do not change it. With
    `eager_random`, operators stay whole where decomposing them would draw other numbers than
    eager does."""
    decompositions: dict[Any, Rule] = {}
    # Without operators that autograd's dispatcher takes apart: collecting those takes 80 ms.
    decompositions.update(_core_aten_decompositions_post_autograd())
    further = ALSO_DECOMPOSED if eager_random else ALSO_DECOMPOSED + RANDOM_DECOMPOSED
    decompositions.update(get_decompositions(list(ops.resolved(further))))
    for target in ops.resolved(NOT_DECOMPOSED):
        decompositions.pop(target, None)
    rules: list[tuple[str, Rule]] = [
        *OWN_RULES.items(),
        *sampling.RULES.items(),
        *([] if eager_random else [("aten.geometric.default", geometric)]),
        *foreach_rules(),
        ("aten.native_dropout.default", partial(native_dropout, eager_random)),
    ]
    for name, rule in rules:
        for target in ops.resolved((name,)):
            decompositions[target] = rule
    for name, wraps_of in WRAPPERS.items():
        for target in ops.resolved((name,)):
            for wrap in wraps_of if target in decompositions else ():
                decompositions[target] = wrap(decompositions[target])
    for name in pointwise.LOOP_OPERATORS:
        for target in ops.resolved((name,)):
            loop = pointwise.LOOP_OPERANDS.get(name)
            unary = name in pointwise.UNARY_LOOPS
            decompositions[target] = pointwise.as_in_eager(
                target, decompositions.get(target), loop, unary
            )
    for target in ops.resolved(strides.LIKE_FIRST):
        decompositions[target] = strides.made_like(target, decompositions.get(target))
    for name, wrapper in results.WRAPPERS.items():
        for target in ops.resolved((name,)):
            if target in decompositions:
                decompositions[target] = wrapper(decompositions[target])
    last = (strides.RULES, numbers.RULES, fourier.RULES, results.RULES, attention.RULES)
    for name, rule in (row for table in last for row in table.items()):
        for target in ops.resolved((name,)):
            decompositions[target] = rule
    for name in refusals.SAME_DTYPE_OPERANDS:
        for target in ops.resolved((name,)):
            decompositions[target] = refusals.as_eager_refuses(target, decompositions.get(target))
    for name in numbers.CONVERTED:
        for target in ops.resolved((name,)):
            decompositions[target] = numbers.as_eager_converts(target, decompositions.get(target))
    return decompositions


def forgiving(rules: Mapping[Any, Rule], record: Record) -> dict[Any, Rule]:
    """The rules; where one fails and its operator does not, the operator stays whole."""
    return {target: partial(_tried, record, target, rule) for target, rule in rules.items()}


def _tried(record: Record, target: Any, rule: Rule, *args: Any, **kwargs: Any) -> Any:
    try:
        return rule(*args, **kwargs)
    except refusals.Refused:
        raise
    except Exception as e:  # noqa: BLE001 - whatever it is; it is in the Record
        with outside_of_modes(), detect_fake_mode((args, kwargs)) or nullcontext():
            target(*args, **kwargs)  # what eager refuses is an error of the program's
        transaction.failed(record, f"decomposition of {target}", e)
        return NotImplemented


# -- torch's rules, with eager's precision ---------------------------------------------------------
HALF_DTYPES = (torch.float16, torch.bfloat16)


def in_f32(rule: Rule) -> Rule:
    """Eager makes one pass over half types with an f32 accumulator; torch's rule would round after
    each step."""

    @wraps(rule)
    def wrapped(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype not in HALF_DTYPES:
            return rule(x, *args, **kwargs)
        wide = [a.float() if isinstance(a, Tensor) and a.dtype in HALF_DTYPES else a for a in args]
        results = rule(x.float(), *wide, **kwargs)
        if isinstance(results, Tensor):
            return results.to(x.dtype)
        return tuple(r.to(x.dtype) if r.dtype == torch.float32 else r for r in results)

    return wrapped


def f32_statistics(rule: Rule) -> Rule:
    """Half input with f32 parameters or buffers: eager saves f32 statistics; torch's rule rounds
    them on CPU."""

    @wraps(rule)
    def wrapped(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        others = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if x.dtype not in HALF_DTYPES or not any(a.dtype == torch.float32 for a in others):
            return rule(x, *args, **kwargs)
        out, *statistics = rule(x.float(), *args, **kwargs)
        return (out.to(x.dtype), *statistics)

    return wrapped


def permuted(rule: Rule) -> Rule:
    """Torch's rules go through two or three operators to trace one, and products have several of
    these."""

    @wraps(rule)
    def wrapped(x: Tensor, *dims: int) -> Any:
        i, j = dims or (0, 1)
        order = list(range(x.dim()))
        if len(order) < 2 or i == j:
            return rule(x, *dims)
        order[i], order[j] = order[j], order[i]
        return torch.ops.aten.permute.default(x, order)

    return wrapped


CPU_MEMORY = strides.on_cpu(strides.in_memory_format)
IN_ROWS = partial(strides.in_memory_format, format_of=lambda _: torch.contiguous_format)
NORMED = strides.on_cpu(partial(strides.in_memory_format, format_of=strides.filled_format))


def of_reals(rule: Rule) -> Rule:
    """Torch's rule refuses complex numbers, which eager takes."""

    @wraps(rule)
    def wrapped(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if x.is_complex() else rule(x, *args, **kwargs)

    return wrapped


WRAPPERS: dict[str, tuple[Callable[[Rule], Rule], ...]] = {
    "aten.nan_to_num.default": (of_reals,),
    "aten.nll_loss_forward.default": (in_f32,),
    "aten.nll_loss2d_forward.default": (in_f32,),
    "aten.native_layer_norm.default": (IN_ROWS,),
    "aten.native_group_norm.default": (CPU_MEMORY,),
    "aten.native_batch_norm.default": (NORMED,),
    "aten._native_batch_norm_legit.default": (NORMED,),
    "aten._native_batch_norm_legit_functional.default": (f32_statistics, NORMED),
    "aten._native_batch_norm_legit_no_training.default": (NORMED,),
    "aten._batch_norm_with_update.default": (NORMED,),
    "aten._batch_norm_with_update_functional.default": (f32_statistics, NORMED),
    "aten._batch_norm_no_update.default": (NORMED,),
    "aten._native_batch_norm_legit.no_stats": (f32_statistics, NORMED),
    "aten.smooth_l1_loss_backward.default": (pointwise.nan_stays,),
    "aten.t.default": (permuted,),
    "aten.transpose.int": (permuted,),
    "aten.linspace": (numbers.linspace,),
    "aten.max_unpool2d.default": (CPU_MEMORY,),
    "aten._adaptive_avg_pool2d.default": (sampling.from_zero, strides.in_memory_format),
}


# -- random ----------------------------------------------------------------------------------------
def native_dropout(eager_random: bool, x: Tensor, p: float, train: bool | None) -> Any:
    """(x * mask / (1 - p), mask). Eager draws like `bernoulli` on CPU, but not on GPUs."""
    if eager_random and x.device.type != "cpu":
        return NotImplemented
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if eager_random:  # eager draws in the order in which x lies in memory
        order = torch._prims_common.compute_elementwise_output_logical_to_physical_perm(x)[0]
        drawn = aten.bernoulli.p(x.permute(order), 1.0 - p)
        mask = drawn.permute([order.index(d) for d in range(x.dim())]).to(torch.bool)
    else:
        mask = aten.bernoulli.p(x, 1.0 - p).to(torch.bool)
    return x * mask * (0.0 if p == 1 else 1.0 / (1.0 - p)), mask


def geometric(x: Tensor, p: float, *, generator: Any = None) -> Any:
    """The number of trials. Torch's rule draws in the dtype of `x`, which may be whole numbers."""
    if generator is not None or not 0 < p < 1:  # eager raises for such a p
        return NotImplemented
    drawn = torch.rand_like(x if x.dtype.is_floating_point else x.to(torch.get_default_dtype()))
    return (torch.floor(torch.log1p(-drawn) / math.log1p(-p)) + 1).to(x.dtype)


@decomposition("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """Torch's rule of 2.11 writes in place, which a functional graph may not."""
    if x.dim() == 0:
        return index_fill(x.unsqueeze(0), 0, index, value).squeeze(0)
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    places = [None] * (dim % x.dim()) + [index.reshape(-1).long()]
    return aten.index_put.default(x, places, value.to(x))


@decomposition("aten._unique.default")
def unique(x: Tensor, sorted: bool = True, return_inverse: bool = False) -> tuple[Tensor, ...]:
    """Torch 2.11 traces this one (of `index_fill`'s gradient) with the size of no tensor."""
    return aten._unique2.default(x, sorted, return_inverse, False)[:2]


@decomposition("aten.native_dropout_backward.default")
def native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """In eager's order, which decides rounding and strides."""
    out = grad * mask * scale
    return strides.in_format_of(out, grad) if grad.device.type == "cuda" else out


# -- pointwise -------------------------------------------------------------------------------------
@decomposition("aten.frac.default")
def frac(x: Tensor) -> Tensor:
    """Eager's: 0.0 of -0.0, where the rule of torch 2.11 has -0.0."""
    return x - torch.trunc(x) if x.dtype.is_floating_point else NotImplemented


@decomposition("aten.round.decimals")
def round_decimals(x: Tensor, *, decimals: int = 0) -> Tensor:
    """Scaled, rounded and scaled back in the compute dtype, as eager does; torch's rule emits
    private operators."""
    if not x.dtype.is_floating_point:
        return NotImplemented
    wide = x.float() if x.dtype in HALF_DTYPES else x
    scale = 10.0 ** abs(decimals)
    if decimals == 0:
        out = aten.round.default(wide)
    elif decimals > 0:
        out = aten.round.default(wide * scale) / scale
    else:
        out = aten.round.default(wide / scale) * scale
    return out.to(x.dtype)


@decomposition("aten.angle.default")
def angle(x: Tensor) -> Tensor:
    if x.is_complex():  # eager fills a contiguous tensor
        return NotImplemented if strides.is_contiguous(x) else aten.angle.default(x.contiguous())
    floating = x.dtype.is_floating_point
    turned = (x < 0).to(x.dtype if floating else torch.get_default_dtype()) * math.pi
    return torch.where(torch.isnan(x), x, turned) if floating else turned


ONE_SIXTH = 0.1666666716337204  # of an f32


@decomposition("aten.hardsigmoid_backward.default")
def hardsigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Eager's factor is an f32 number for float64, too."""
    return torch.where((x > -3) & (x < 3), grad * ONE_SIXTH, 0.0)


@decomposition("aten.soft_margin_loss_backward.default")
def soft_margin_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    """Torch's rule subtracts 1 from a sigmoid, which leaves nothing where that is near 1."""
    out = -target * torch.sigmoid(-target * x) * grad
    return out / x.numel() if reduction == 1 else out


@decomposition("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def nll_loss_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Eager writes zeros beside the targets; torch's rule multiplies by zero there, which gives NaN
    for a gradient that is not finite."""
    dim = 0 if x.dim() < 2 else 1
    if reduction == 1:
        grad = grad / total_weight
    if x.dim() == 1 and target.dim() > 0:
        target = target[0]
    target = target.unsqueeze(dim)
    if x.dim() > grad.dim() > 0:
        grad = grad.unsqueeze(dim)
    if weight is not None:
        shape = [1] * x.dim()
        shape[dim] = weight.shape[0]
        grad = grad * weight.reshape(shape)
    counted = target != ignore_index
    at = torch.where(counted, target, 0)
    hit = torch.scatter(torch.zeros_like(x, dtype=torch.bool), dim, at, True)
    return torch.where(hit & counted, -grad, 0.0).to(x.dtype)


@decomposition("aten._efficientzerotensor.default")
def efficient_zeros(size: Sequence[int], **kwargs: Any) -> Tensor:
    return aten.full.default(size, 0, **{k: v for k, v in kwargs.items() if v is not None})


# -- convolution -----------------------------------------------------------------------------------
@decomposition("aten.convolution_backward.default")
def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """On GPUs the bias gradient is a reduction that fuses with what made `grad`; oneDNN makes it
    along the way."""
    if not output_mask[2] or grad.device.type != "cuda":
        return NotImplemented
    bias = aten.sum.dim_IntList(grad, [0, *range(2, grad.dim())])
    dx, dw, _ = aten.convolution_backward.default(
        grad,
        x,
        weight,
        bias_sizes,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        [output_mask[0], output_mask[1], False],
    )
    return dx, dw, bias


# -- embeddings ------------------------------------------------------------------------------------
@decomposition("aten.embedding_dense_backward.default")
def embedding_dense_backward(
    grad: Tensor, indices: Tensor, rows: int, padding: int, scale_by_frequency: bool
) -> Any:
    """One sum of rows, rounded once. Torch's rule makes it of f32 and casts the whole table, and
    looks again whether the indices are legal, which the forward has done."""
    if scale_by_frequency:
        return NotImplemented
    indices = indices.long()
    if padding >= 0:
        there = (indices != padding).reshape(*indices.shape, *[1] * (grad.dim() - indices.dim()))
        grad = torch.where(there, grad, 0)
    table = grad.new_zeros((rows, *grad.shape[indices.dim() :]))
    return aten.index_put.default(table, [indices], grad, True)


# -- lists of tensors: optimizers ------------------------------------------------------------------
# _foreach operator -> operator per tensor, where names or overloads differ. "List" overloads pair
# up two lists.
FOREACH_UNARY = [
    "abs",
    "acos",
    "asin",
    "atan",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "floor",
    "frac",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "neg",
    "reciprocal",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
]
FOREACH_BINARY = ["add", "sub", "mul", "div", "maximum", "minimum", "clamp_max", "clamp_min", "pow"]


def foreach_rules() -> list[tuple[str, Rule]]:
    """Each list operator as its operator on every tensor."""
    rules: list[tuple[str, Rule]] = []
    for n in FOREACH_UNARY:
        rules.append((f"aten._foreach_{n}.default", _each(getattr(torch, n))))
    for n in FOREACH_BINARY:
        f = _scalar_form(n)
        for overload in ("Scalar", "ScalarList", "List", "Tensor"):
            rules.append((f"aten._foreach_{n}.{overload}", _each(f)))
    rules.append(
        ("aten._foreach_pow.ScalarAndTensor", lambda base, exps: [torch.pow(base, e) for e in exps])
    )
    for n in ("addcmul", "addcdiv"):
        f = getattr(torch, n)
        rules.append((f"aten._foreach_{n}.Scalar", _each_with_value(f)))
        rules.append((f"aten._foreach_{n}.ScalarList", _each_with_value(f)))
    for overload in ("Scalar", "List", "ScalarList"):
        rules.append((f"aten._foreach_lerp.{overload}", _each(torch.lerp)))
    rules.append(("aten._foreach_zero.default", _each(torch.zeros_like)))
    rules.append(
        (
            "aten._foreach_copy.default",
            lambda xs, ys, non_blocking=False: [aten.copy.default(x, y) for x, y in zip(xs, ys)],
        )
    )
    rules.append(("aten._foreach_norm.Scalar", _foreach_norm))
    return rules


def _scalar_form(name: str) -> Rule:
    """The binary operator for a tensor and a tensor or number."""
    if name in ("maximum", "minimum"):
        clamp = torch.clamp_min if name == "maximum" else torch.clamp_max
        both = getattr(torch, name)
        return lambda x, y, **kw: both(x, y) if isinstance(y, Tensor) else clamp(x, y)
    return getattr(torch, name)


def _each(f: Rule) -> Rule:
    def rule(xs: Sequence[Tensor], *others: Any, **kwargs: Any) -> list[Tensor]:
        """Lists pair up with `xs`; anything else is shared by all."""
        columns = [o if isinstance(o, (list, tuple)) else [o] * len(xs) for o in others]
        return [f(x, *row, **kwargs) for x, *row in zip(xs, *columns)]

    return rule


def _each_with_value(f: Rule) -> Rule:
    def rule(
        xs: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor], value: Any = 1
    ) -> list[Tensor]:
        values = value if isinstance(value, (list, tuple)) else [value] * len(xs)
        return [f(x, p, q, value=v) for x, p, q, v in zip(xs, a, b, values)]

    return rule


def _foreach_norm(
    xs: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    return [torch.linalg.vector_norm(x, ord, dtype=dtype) for x in xs]
