"""Where eager puts the results of pointwise operators in memory, and rules that trace it.

In: an operator of several tensors, and its rule or none. Out: a rule whose results lie as eager's
loop lays them out. Torch's rules and fake kernels compute in another dtype or in steps, forget
which operands were expanded, of which eager asks nothing about the order of the result, and give
dimensions that an operand does not have steps, where eager takes them for expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from deuteron.capture.strides import (
    as_it_is,
    follow,
    has_one,
    in_order,
    is_dense,
    is_one,
    same,
    steps_in,
    traced_as_it_is,
    with_steps,
)

Rule = Callable[..., Any]


def is_less(a: Any, b: Any) -> bool:
    """As far as that is known. Of sizes that depend on data a multiple counts as larger."""
    if type(a) is int and type(b) is int:
        return a < b
    if guard_or_false(a < b) or guard_or_false(a >= b):
        return guard_or_false(a < b)
    return not guard_or_false(a == 0) and guard_or_false(b % a == 0)


def memory_order(shape: Sequence[Any], strides: Sequence[Sequence[Any]]) -> list[int]:
    """The dimensions of a pointwise result, from the fastest on, for operands of these strides (0
    where they are broadcast). As eager sorts them: of two dimensions the first operand decides
    that has both and tells them apart."""

    def order(a: int, b: int) -> int:
        for s in strides:
            if type(s[a]) is int and s[a] == 0 or type(s[b]) is int and s[b] == 0:
                continue
            if is_less(s[a], s[b]):
                return -1
            if is_less(s[b], s[a]) or is_less(shape[b], shape[a]):
                return 1
        return 0

    out = list(range(len(shape)))[::-1]
    for i in range(1, len(out)):
        at = i
        for k in range(i - 1, -1, -1):
            comparison = order(out[k], out[at])
            if comparison > 0:
                out[k], out[at] = out[at], out[k]
                at = k
            elif comparison < 0:
                break
    return out


def dense_strides(t: Tensor) -> list[Any]:
    """Those of a copy of `t` that keeps its order."""
    return steps_in(t.shape, memory_order(t.shape, [t.stride()]))


def over(shape: Sequence[Any], t: Tensor, strides: Sequence[Any]) -> list[Any]:
    """`strides` of `t` when it is broadcast to `shape`."""
    new = len(shape) - t.dim()
    return [0] * new + [
        0 if counts_as_one(n) and not counts_as_one(m) else s
        for n, m, s in zip(t.shape, shape[new:], strides)
    ]


def counts_as_one(n: Any) -> bool:
    """As far as that is known of a size."""
    return n == 1 if type(n) is int else guard_or_false(n == 1)


def given_strides(t: Tensor, dtype: torch.dtype) -> Sequence[Any]:
    """What eager's loop sees: on the CPU a copy of what has not the dtype in which it is read."""
    if t.device.type != "cpu" or t.dtype == dtype or is_dense(t.shape, t.stride()):
        return t.stride()
    return dense_strides(t)


def eager_strides(
    shape: Sequence[Any],
    operands: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    number: bool,
) -> Sequence[Any]:
    """The strides that eager gives to a pointwise result of `shape`. `dtypes`: the dtype in
    which the loop reads each operand. `number`: one more operand is a number; its shape differs,
    so that eager sorts the dimensions even where all operands are contiguous or dense."""
    given = [given_strides(t, dtype) for t, dtype in zip(operands, dtypes)]
    alike = not number and all(t.dim() == len(shape) for t in operands)
    if alike and all(all(map(same, t.shape, shape)) for t in operands):
        usual = list(range(len(shape)))[::-1]
        for order in [usual, [1, 3, 2, 0]] if len(shape) == 4 else [usual]:
            if all(follow(shape, s, order) for s in given):
                return steps_in(shape, order)
        if all(all(map(same, s, given[0])) for s in given) and is_dense(shape, given[0]):
            return given[0]
    strides = [over(shape, t, s) for t, s in zip(operands, given)]
    return steps_in(shape, memory_order(shape, strides))


def common_dtype(operands: Sequence[Any], result: torch.dtype) -> torch.dtype:
    """The dtype in which eager computes: the operands' common one, or the result's where
    integers give floats."""
    promoted = torch.result_type(operands[0], operands[-1])
    return result if result.is_floating_point and not promoted.is_floating_point else promoted


def plain(x: Any) -> Any:
    """A tensor, or a number of the kind of this one, which may be symbolic."""
    kinds = {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}
    return kinds.get(type(x), x)


def read_in(
    target: Any, operands: Sequence[Any], given: Sequence[Tensor], result: torch.dtype
) -> list[torch.dtype]:
    """In which dtypes eager's loop reads what it is given."""
    if target is torch.ops.aten.where.self:  # the condition is not cast
        return [given[0].dtype, result, result]
    return [common_dtype(operands, result)] * len(given)


def wide_order(shape: Sequence[Any], strides: Sequence[Any]) -> list[int]:
    """The dimensions of more than one element, from the fastest on."""
    return [d for d in memory_order(shape, [strides]) if not counts_as_one(shape[d])]


def lies_as(t: Tensor, steps: Sequence[Any]) -> bool:
    """Whether the dimensions of more than one element follow one another in memory as these."""
    if all(is_one(n) or same(s, step) for n, s, step in zip(t.shape, t.stride(), steps)):
        return True
    return wide_order(t.shape, t.stride()) == wide_order(t.shape, steps)


def copied_in_order(t: Tensor, order: Sequence[int]) -> Tensor:
    """A copy of `t` whose dimensions have the given order in memory, innermost first."""
    perm = list(order)[::-1]
    inner = t.permute(perm).clone(memory_format=torch.contiguous_format)
    return inner.permute([perm.index(d) for d in range(len(perm))])


def as_in_eager(
    target: Any, rule: Rule | None, loop: Sequence[int] | None = None, unary: bool = False
) -> Rule:
    """`loop`: a row of `LOOP_OPERANDS`. `unary`: numbers are no operands."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out = NotImplemented if rule is None else rule(*args, **kwargs)
        operands = [a for a in args if isinstance(a, Tensor)]
        # Of one tensor torch's rules are wrong only about the steps of one element.
        unclear = len(operands) > 1 or any(map(has_one, operands))
        if not unclear or all(map(in_order, operands)) or traced_as_it_is(target):
            return out
        if out is NotImplemented:
            out = as_it_is(target, *args, **kwargs)
        shape = torch.broadcast_shapes(*(t.shape for t in operands))
        if out.dim() != len(shape):  # a loss that is reduced
            return out
        number = len(operands) == 1 and not unary
        read = [plain(a) for a in args[:2]] if number else operands
        given = operands if loop is None else [operands[k] for k in loop]
        steps = eager_strides(shape, given, read_in(target, read, given, out.dtype), number)
        if len(operands) > 1 and not lies_as(out, steps):
            out = copied_in_order(out, memory_order(shape, [steps]))
        return with_steps(out, steps) if has_one(out) else out

    return wrapped


_TENSOR = """
add sub mul div fmod remainder eq ne lt le gt ge copysign xlogy clamp_max clamp_min
bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift __lshift__ __rshift__
"""
_DEFAULT = """
floor_divide logical_and logical_or logical_xor special_xlog1py heaviside logaddexp logaddexp2
atan2 fmax fmin hypot igamma igammac maximum minimum nextafter
gcd lcm complex polar addcmul addcdiv
gelu_backward sigmoid_backward silu_backward tanh_backward logit_backward elu_backward
leaky_relu_backward hardtanh_backward hardswish_backward hardsigmoid_backward softplus_backward
mish_backward threshold_backward
mse_loss smooth_l1_loss huber_loss binary_cross_entropy
"""
# Of a tensor and a number: eager makes a tensor without dimensions of the number.
_SCALAR = """
add sub mul div fmod remainder rsub eq ne lt le gt ge copysign floor_divide
bitwise_and bitwise_or bitwise_xor __lshift__ __rshift__
"""
_NUMBER = """
bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor
bitwise_left_shift.Scalar_Tensor bitwise_left_shift.Tensor_Scalar
bitwise_right_shift.Scalar_Tensor bitwise_right_shift.Tensor_Scalar
remainder.Scalar_Tensor xlogy.Scalar_Other xlogy.Scalar_Self div.Scalar_mode
"""
# Of one tensor, or of one with numbers that are no operands of the loop.
_UNARY = """
abs acos acosh asin asinh atan atanh bitwise_not ceil celu clamp clamp_max clamp_min cos cosh
digamma elu erf erfc erfinv exp exp2 expm1 floor frac gelu hardsigmoid hardswish i0 isnan
isneginf isposinf leaky_relu lgamma log log10 log1p log2 logical_not logit mish neg polygamma
reciprocal relu round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus
sqrt square tan tanh threshold trunc
"""
UNARY_LOOPS = (*(f"aten.{n}.default" for n in _UNARY.split()), "aten.pow.Tensor_Scalar")
LOOP_OPERATORS = (
    *(f"aten.{n}.Tensor" for n in _TENSOR.split()),
    *(f"aten.{n}.default" for n in _DEFAULT.split()),
    *("aten.div.Tensor_mode", "aten.pow.Tensor_Tensor", "aten.where.self", "aten.lerp.Tensor"),
    "aten.lerp.Scalar",
    *(f"aten.{n}.Scalar" for n in _SCALAR.split()),
    *(f"aten.{n}" for n in _NUMBER.split()),
    *UNARY_LOOPS,
)
# Which operands eager's loop is given, and in which order, where not as they come.
LOOP_OPERANDS = {
    "aten.threshold_backward.default": (1, 0),
    "aten.leaky_relu_backward.default": (1, 0),
    # The result is made like the input.
    "aten.binary_cross_entropy.default": (0,),
    "aten.huber_loss.default": (0,),
}


def nan_stays(rule: Rule) -> Rule:
    """The gradient of a loss of differences is NaN where those are, as eager's: torch's rule takes
    their sign, which is 0 there."""

    @wraps(rule)
    def wrapped(grad: Tensor, x: Tensor, target: Tensor, *args: Any) -> Any:
        difference = x - target
        gradient = rule(grad, x, target, *args)
        return torch.where(difference != difference, difference, gradient)

    return wrapped
