"""Where eager puts the results of pointwise operators in memory, and rules that trace it.

In: an operator of several tensors, and its rule or none. Out: a rule whose results lie as eager's
loop lays them out. Torch's rules and fake kernels compute in another dtype or in steps, forget
which operands were expanded, of which eager asks nothing about the order of the result, and give
dimensions that an operand does not have steps, where eager takes them for expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from deuteron.capture.strides import as_it_is, in_order, is_dense, is_fixed, traced_as_it_is

Rule = Callable[..., Any]


def less(a: Any, b: Any) -> bool:
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
            if less(s[a], s[b]):
                return -1
            if less(s[b], s[a]) or less(shape[b], shape[a]):
                return 1
        return 0

    out = list(range(len(shape)))[::-1]
    for i in range(1, len(out)):
        at = i
        for k in range(i - 1, -1, -1):
            found = order(out[k], out[at])
            if found > 0:
                out[k], out[at] = out[at], out[k]
                at = k
            elif found < 0:
                break
    return out


def dense_strides(t: Tensor) -> list[Any]:
    """Those of a copy of `t` that keeps its order."""
    step: Any = 1
    out: list[Any] = [0] * t.dim()
    for d in memory_order(t.shape, [t.stride()]):
        out[d] = step
        step = step * t.shape[d]
    return out


def over(shape: Sequence[Any], t: Tensor, strides: Sequence[Any]) -> list[Any]:
    """`strides` of `t` when it is broadcast to `shape`."""
    new = len(shape) - t.dim()
    return [0] * new + [
        0 if is_one(n) and not is_one(m) else s for n, m, s in zip(t.shape, shape[new:], strides)
    ]


def is_one(n: Any) -> bool:
    """As far as that is known of a size."""
    return n == 1 if type(n) is int else guard_or_false(n == 1)


def given_strides(t: Tensor, dtype: torch.dtype) -> Sequence[Any]:
    """What eager's loop sees: on the CPU a copy of what has not the dtype in which it is read."""
    if t.device.type != "cpu" or t.dtype == dtype or is_dense(t):
        return t.stride()
    return dense_strides(t)


def eager_order(
    shape: Sequence[Any], operands: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> list[int]:
    """The dimensions of a pointwise result, from the fastest on. `dtypes`: in which the loop reads
    the operands."""
    if all(is_fixed(t) and t.shape == operands[0].shape for t in operands):
        if all(t.is_contiguous() for t in operands):
            return list(range(len(shape)))[::-1]
        last = torch.channels_last
        if len(shape) == 4 and all(t.is_contiguous(memory_format=last) for t in operands):
            return [1, 3, 2, 0]
    given = [given_strides(t, dtype) for t, dtype in zip(operands, dtypes)]
    return memory_order(shape, [over(shape, t, s) for t, s in zip(operands, given)])


def common_dtype(operands: Sequence[Tensor], result: torch.dtype) -> torch.dtype:
    """In which eager computes: that of the result where it makes floating numbers of whole ones."""
    found = torch.result_type(operands[0], operands[-1])
    return result if result.is_floating_point and not found.is_floating_point else found


def read_in(
    target: Any, operands: Sequence[Tensor], given: Sequence[Tensor], result: torch.dtype
) -> list[torch.dtype]:
    """In which dtypes eager's loop reads what it is given."""
    if target is torch.ops.aten.where.self:  # the condition is not cast
        return [given[0].dtype, result, result]
    return [common_dtype(operands, result)] * len(given)


def lies_in(t: Tensor, order: Sequence[int]) -> bool:
    """Whether the dimensions of more than one element follow one another so in memory."""
    wide = [d for d in range(t.dim()) if not is_one(t.shape[d])]
    own = memory_order(t.shape, [t.stride()])
    return [d for d in own if d in wide] == [d for d in order if d in wide]


def laid_out(t: Tensor, order: Sequence[int]) -> Tensor:
    """A copy whose dimensions follow one another so in memory."""
    perm = list(order)[::-1]
    inner = t.permute(perm).clone(memory_format=torch.contiguous_format)
    return inner.permute([perm.index(d) for d in range(len(perm))])


def as_in_eager(target: Any, rule: Rule | None, loop: Sequence[int] | None = None) -> Rule:
    """`loop`: a row of `LOOPS`."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out = NotImplemented if rule is None else rule(*args, **kwargs)
        operands = [a for a in args if isinstance(a, Tensor)]
        clear = len(operands) < 2 or all(map(in_order, operands))
        if clear or traced_as_it_is(target):
            return out
        if out is NotImplemented:
            out = as_it_is(target, *args, **kwargs)
        shape = torch.broadcast_shapes(*(t.shape for t in operands))
        if out.dim() != len(shape):  # a loss that is reduced
            return out
        given = operands if loop is None else [operands[k] for k in loop]
        order = eager_order(shape, given, read_in(target, operands, given, out.dtype))
        return out if lies_in(out, order) else laid_out(out, order)

    return wrapped


_TENSOR = """
add sub mul div fmod remainder eq ne lt le gt ge copysign xlogy clamp_max clamp_min
bitwise_and bitwise_or bitwise_xor
"""
_DEFAULT = """
floor_divide logical_and logical_or logical_xor special_xlog1py heaviside logaddexp logaddexp2
atan2 fmax fmin hypot igamma igammac maximum minimum nextafter
gelu_backward sigmoid_backward silu_backward tanh_backward logit_backward elu_backward
leaky_relu_backward hardtanh_backward hardswish_backward hardsigmoid_backward softplus_backward
mish_backward threshold_backward
mse_loss smooth_l1_loss huber_loss binary_cross_entropy
"""
NAMES = (
    *(f"aten.{n}.Tensor" for n in _TENSOR.split()),
    *(f"aten.{n}.default" for n in _DEFAULT.split()),
    *("aten.div.Tensor_mode", "aten.pow.Tensor_Tensor", "aten.where.self"),
)
# Which operands eager's loop is given, and in which order, where not as they come.
LOOPS = {
    "aten.threshold_backward.default": (1, 0),
    "aten.leaky_relu_backward.default": (1, 0),
    # The result is made like the input.
    "aten.binary_cross_entropy.default": (0,),
    "aten.huber_loss.default": (0,),
}
