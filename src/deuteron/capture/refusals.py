"""What eager refuses for the dtypes of its operands, and torch's fake kernels let pass.

In: the rule of an operator, or none. Out: a rule that raises what eager raises. Nothing here says
which dtypes an operator takes: where those of a call are unusual, eager itself is asked, with
tensors of one element.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from deuteron.graph.edit import outside_of_modes
from deuteron.graph.ops import resolved

Rule = Callable[..., Any]

# Operator -> which arguments must be of kindred dtypes. Products of integers are asked about, too:
# a GPU has none.
PRODUCT_OPERANDS: dict[str, tuple[int, ...]] = {
    "aten.mm.default": (0, 1),
    "aten.bmm.default": (0, 1),
    "aten.mv.default": (0, 1),
    "aten.dot.default": (0, 1),
    "aten.vdot.default": (0, 1),
    "aten.addmm.default": (0, 1, 2),
    "aten.addmv.default": (0, 1, 2),
    "aten.addbmm.default": (0, 1, 2),
    "aten.baddbmm.default": (0, 1, 2),
    "aten.convolution.default": (0, 1, 2),
    "aten._prelu_kernel.default": (0, 1),
    "aten.linalg_cross.default": (0, 1),
    "aten.binary_cross_entropy.default": (0, 1, 2),
    "aten.nll_loss_forward.default": (0, 2),
    "aten.lerp.Scalar": (0, 1),
    "aten.lerp.Tensor": (0, 1, 2),
}
# What eager computes of floating numbers only, some of it also of whole numbers but truth values.
FLOATING = """
relu elu celu selu hardswish hardsigmoid softplus hardshrink softshrink mish log_sigmoid_forward glu
leaky_relu threshold _softmax _log_softmax logaddexp logaddexp2 addcmul im2col col2im
avg_pool1d avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d
adaptive_max_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d
upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
upsample_trilinear3d upsample_bicubic2d grid_sampler_2d grid_sampler_3d
smooth_l1_loss huber_loss soft_margin_loss
"""
for _target in resolved(f"aten.{name}" for name in FLOATING.split()):
    PRODUCT_OPERANDS.setdefault(str(_target), (0,))
OTHER_OPERANDS: dict[str, tuple[int, ...]] = {
    "aten.native_layer_norm.default": (0, 2, 3),
    "aten.native_group_norm.default": (0, 1, 2),
    "aten.native_batch_norm.default": (0, 1, 2, 3, 4),
    "aten._native_batch_norm_legit.default": (0, 1, 2, 3, 4),
    "aten._native_batch_norm_legit_functional.default": (0, 1, 2, 3, 4),
    "aten._native_batch_norm_legit_no_training.default": (0, 1, 2, 3, 4),
    "aten._batch_norm_with_update.default": (0, 1, 2, 3, 4),
    "aten._batch_norm_with_update_functional.default": (0, 1, 2, 3, 4),
    "aten._batch_norm_no_update.default": (0, 1, 2, 3, 4),
    "aten.sub.Tensor": (0, 1),
    "aten.sub.Scalar": (0,),
    "aten.rsub.Tensor": (0, 1),
    "aten.rsub.Scalar": (0,),
    "aten.index_add.default": (0, 3),
    "aten.index_copy.default": (0, 3),
    "aten.index_put.default": (0, 2),
}
# Truth values are refused with any other operand, numbers too.
DIFFERENCES = ("aten.sub.Tensor", "aten.sub.Scalar", "aten.rsub.Tensor", "aten.rsub.Scalar")
SAME_DTYPE_OPERANDS = PRODUCT_OPERANDS | OTHER_OPERANDS
REQUIRED_LENGTHS = {  # of each dimension, where one element says nothing
    "aten.linalg_cross.default": 3,
    "aten.glu.default": 2,
    "aten.grid_sampler_2d.default": 2,
    "aten.grid_sampler_3d.default": 3,
}
# Methods whose results torch's own rules cast to what they are written to, whatever they are.
IN_PLACE_METHODS = ("mul_", "addcmul_", "addcdiv_", "__imul__")
# Functions of floating numbers that torch takes apart before its operators are traced.
FLOATING_FUNCTIONS = (functional.interpolate, functional.hardshrink)


class Refused(RuntimeError):
    """Eager's own message."""


def as_eager_refuses(target: Any, rule: Rule | None) -> Rule:
    """`rule`, behind a check that raises what eager raises for these dtypes."""
    places, product = SAME_DTYPE_OPERANDS[str(target)], str(target) in PRODUCT_OPERANDS

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        operands = [args[k] for k in places if k < len(args) and isinstance(args[k], Tensor)]
        dtypes = {t.dtype for t in operands}
        whole = product and not all(d.is_floating_point or d.is_complex for d in dtypes)
        truths = torch.bool in dtypes and str(target) in DIFFERENCES
        if len(dtypes) > 1 or whole or truths:
            raise_as_eager(target, args, kwargs)
        return NotImplemented if rule is None else rule(*args, **kwargs)

    return wrapped if rule is None else wraps(rule)(wrapped)


def raise_as_eager(target: Any, args: Any, kwargs: Any) -> None:
    """Runs eager's operator on tensors of one element with these dtypes; raises what it raises of
    their dtypes. What it says of anything else says nothing of the real ones."""

    length = REQUIRED_LENGTHS.get(str(target), 1)

    def small(t: Tensor) -> Tensor:
        kind = t.device.type if t.device.type != "meta" else "cpu"
        return torch.zeros([length] * t.dim(), dtype=t.dtype, device=kind)

    def number(n: Any) -> Any:
        if isinstance(n, torch.SymFloat):
            return 1.0
        return 1 if isinstance(n, torch.SymInt) or type(n) is int and n > 1 else n

    with outside_of_modes():
        given = tree_map_only(Tensor, small, (args, kwargs))
        given = tree_map_only((int, torch.SymInt, torch.SymFloat), number, given)
        try:
            with torch.no_grad():
                target(*given[0], **given[1])
        except RuntimeError as e:  # NotImplementedError, too
            if of_dtypes(str(e)):
                raise Refused(str(e)) from None


def check_functions(gm: fx.GraphModule) -> None:
    """Raises what eager raises of the dtypes of products that are written in place, and of what is
    `FLOATING_FUNCTIONS`, in a graph of Dynamo's."""
    for n in gm.graph.nodes:
        floating = n.target in FLOATING_FUNCTIONS
        if n.op == "call_method" and n.target in IN_PLACE_METHODS:
            target = getattr(Tensor, n.target)
        elif n.target is operator.imul or floating:
            target = n.target
        else:
            continue
        args, kwargs = fx.map_arg((n.args, n.kwargs), lambda a: a.meta.get("example_value"))
        if floating:
            given = [x for x in (*args, kwargs.get("input")) if isinstance(x, Tensor)]
            if not any(x.is_floating_point() for x in given):
                raise_as_eager(target, args, kwargs)
            continue
        into = args[0]
        others = [x for x in args[1:] if isinstance(x, (Tensor, float, torch.SymFloat))]
        if isinstance(into, Tensor) and not into.dtype.is_complex and others:
            if any(getattr(x, "dtype", None) != into.dtype for x in others):
                raise_as_eager(target, args, kwargs)


def keep_asserted(gm: fx.GraphModule) -> None:
    """A tensor whose size data decides, and the program says, is needed though nothing reads it:
    AOTAutograd (torch 2.11) drops it with what is asserted of its size."""
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        told = node.meta.get("unbacked_bindings") and isinstance(value, Tensor)
        if told and not free_unbacked_symbols(value):
            with gm.graph.inserting_after(node):
                gm.graph.call_function(torch.ops.aten._assert_tensor_metadata.default, (node,))


def of_dtypes(message: str) -> bool:
    words = ["dtype", "scalar type", "not implemented for", "same type", "cast to the desired"]
    words += ["Subtraction", "Integer division", "but expected", "Boolean inputs"]
    return any(w in message for w in words)


__all__ = ["SAME_DTYPE_OPERANDS", "Refused", "as_eager_refuses", "check_functions", "keep_asserted"]
