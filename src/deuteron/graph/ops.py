"""What is known about ATen operators before lowering: by name, so that no torch version's absence
breaks an import.

In: an FX node or its target. Out: facts (is it random, a view, an effect; what does it compute).
The tables are the one place that the rewrites and the partitioner consult.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import fx

from deuteron.ir.operations import DEAR_OPS


@cache
def resolve(name: str) -> Any:
    """``"aten.add.Tensor"`` as an operator overload, or None where this torch does not have it."""
    namespace, packet, overload = name.split(".")
    overloads = getattr(getattr(torch.ops, namespace), packet, None)
    return getattr(overloads, overload, None)


def resolved(names: Iterable[str]) -> Iterator[Any]:
    """Those of `names` that exist. ``"aten.add"`` stands for every overload."""
    for name in names:
        if name.count(".") == 2:
            operators = [resolve(name)]
        else:
            namespace, packet = name.split(".")
            p = getattr(getattr(torch.ops, namespace), packet, None)
            operators = [getattr(p, o) for o in p.overloads()] if p is not None else []
        yield from (f for f in operators if f is not None)


@cache
def packet(target: Any) -> str:
    """``"aten.add"`` for every overload of it, the target's own name for what is no operator."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[-1]}"
    return str(getattr(target, "__name__", target))


def is_overload(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)


def is_random(node: fx.Node) -> bool:
    """Draws from a generator: two calls differ."""
    return is_overload(node) and torch.Tag.nondeterministic_seeded in node.target.tags


def without_dropout(node: fx.Node) -> bool:
    """Whether an operator draws numbers only for a dropout of which there is none (attention)."""
    if not is_overload(node):
        return False
    names = [a.name for a in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return "dropout_p" in names and given.get("dropout_p", 0.0) == 0.0


def is_mutating(node: fx.Node) -> bool:
    return is_overload(node) and node.target._schema.is_mutable


COLLECTIVES = ("_c10d_functional", "c10d_functional", "c10d")


# Calls that are kept although nothing reads them, beyond those whose schema says so.
EFFECTS = frozenset(
    (
        "aten._assert_scalar",
        "aten._assert_async",
        "aten._functional_assert_async",
        "aten.sym_constrain_range",
        "aten.sym_constrain_range_for_size",
        "aten._print",
    )
)


def has_effect(node: fx.Node) -> bool:
    """Does more than return a value, or cannot be known not to. Random calls are no effects by
    this definition."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output", "call_module", "call_method")
    if is_symbolic(node) or node.target is operator.getitem:
        return False
    return target_has_effect(node.target)


@cache
def target_has_effect(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return not is_pure_callable(target)
    schema = target._schema
    if schema.is_mutable or packet(target) in EFFECTS or target.namespace in COLLECTIVES:
        return True
    return not schema.returns or any("ScriptObject" in str(a.type) for a in schema.arguments)


# Higher-order operators without effects beyond their results (their bodies are functional graphs).
PURE_HIGHER_ORDER = frozenset(
    (
        "flex_attention",
        "flex_attention_backward",
        "cond",
        "while_loop",
        "scan",
        "associative_scan",
        "map_impl",
        "invoke_subgraph",
        "triton_kernel_wrapper_functional",
        "auto_functionalized",
        "auto_functionalized_v2",
        "run_with_rng_state",
        "out_dtype",
    )
)


def is_pure_callable(target: Any) -> bool:
    if isinstance(target, torch._ops.HigherOrderOperator):
        return str(target.name() if callable(target.name) else target.name) in PURE_HIGHER_ORDER
    module = getattr(target, "__module__", "") or ""
    pure = ("_operator", "operator", "math", "builtins", "torch", "deuteron.graph.repeat")
    return module in pure or module.startswith("torch.fx.")


def is_symbolic(node: fx.Node) -> bool:
    """Computes a size, not a tensor."""
    val = node.meta.get("val")
    return isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)) or (
        isinstance(val, (bool, int, float)) and node.op == "call_function"
    )


@cache
def is_view_target(target: Any) -> bool:
    """Returns a view of an argument, by its schema. Unlike `reshape`, always."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    returns = target._schema.returns
    if packet(target) in ("aten._unsafe_view", "aten._reshape_alias"):
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def is_view(node: fx.Node) -> bool:
    return is_view_target(node.target)


def viewed(node: fx.Node) -> fx.Node | None:
    """The argument of which the node's results are views, by the operator's schema. (Fake values
    may be out of date: a rewrite may have put an argument with another storage in place.)"""
    schema = getattr(node.target, "_schema", None)
    if schema is None or all(r.alias_info is None for r in schema.returns):
        return None
    for k, a in enumerate(schema.arguments[: len(node.args)]):
        if a.alias_info is not None and not a.alias_info.is_write:
            base = node.args[k]
            return base if isinstance(base, fx.Node) else None
    return None


# Operators that say where in memory an element lies, not which one of their argument it is.
STRIDED_OPERATORS = frozenset(
    ("aten.as_strided", "aten.as_strided_copy", "aten.as_strided_scatter")
)


def placed(node: fx.Node) -> list[fx.Node]:
    """Of one of `STRIDED_OPERATORS`, its argument and what that is a view of, the owner of the
    memory last; of others none."""
    if packet(node.target) not in STRIDED_OPERATORS:
        return []
    bases: list[fx.Node] = []
    base = node.args[0]
    while isinstance(base, fx.Node):
        bases.append(base)
        base = base.args[0] if base.target is operator.getitem else viewed(base)
    return bases


# Of the output node of a forward: how many of its results are the caller's. What follows is saved
# for the backward, which is compiled for the strides that it finds.
CALLER_RESULTS_META = "deuteron_results"


# Of a result that is saved for a backward which looks for no equal elements in it.
UNCOMPARED_META = "deuteron_uncompared"


def results_of(output: fx.Node) -> tuple[list[Any], list[Any]]:
    """What a graph returns: with the strides that were traced, and with any."""
    results: Any = output.args[0]
    if not isinstance(results, (tuple, list)):
        return [results], []
    count = output.meta.get(CALLER_RESULTS_META, len(results))
    return list(results[:count]), list(results[count:])


def tensor_of(node: fx.Node) -> torch.Tensor | None:
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else None


def storage_of(node: fx.Node) -> Any:
    """A hashable identity of the node's storage in the trace, or None where it has none."""
    return storage(tensor_of(node))


def storage(val: torch.Tensor | None) -> Any:
    """The same of a fake value."""
    if val is None:
        return None
    try:
        return val.untyped_storage()._cdata
    except (
        NotImplementedError,
        RuntimeError,
    ):  # sparse, nested and wrapper tensors have no storage
        return None


# -- what an operator costs, per element of its result, in vector FLOPs ----------------------------
TRANSCENDENTAL = frozenset(
    "aten." + n
    for n in (*DEAR_OPS, *["gelu", "silu", "mish", "softplus", "logaddexp", "elu", "selu", "celu"])
)
REDUCTIONS = frozenset(
    "aten." + n
    for n in [
        "sum",
        "mean",
        "prod",
        "amax",
        "amin",
        "max",
        "min",
        "any",
        "all",
        "argmax",
        "argmin",
        "var",
        "var_mean",
        "std",
        "std_mean",
        "cumsum",
        "cumprod",
        "logcumsumexp",
        "linalg_vector_norm",
        "norm",
        "_softmax",
        "_log_softmax",
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "aminmax",
        "count_nonzero",
        "nansum",
        "logsumexp",
        "cummax",
        "cummin",
    ]
)
# Their results are elements of what they read, bit for bit, or places of them.
SELECTIONS = frozenset(
    "aten." + n
    for n in [
        "amax",
        "amin",
        "max",
        "min",
        "aminmax",
        "argmax",
        "argmin",
        "cummax",
        "cummin",
        "sort",
        "topk",
        "kthvalue",
        "median",
        "nanmedian",
        "mode",
    ]
)
# Memory is written at loaded places, or read twice: can be recomputed, but not in a consumer's
# loop.
SCATTERS = frozenset(
    "aten." + n
    for n in [
        "index_put",
        "_unsafe_index_put",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "index_add",
        "index_copy",
        "index_fill",
        "masked_scatter",
        "slice_scatter",
        "select_scatter",
        "diagonal_scatter",
        "as_strided_scatter",
    ]
)
GENERATED = frozenset(("deuteron.rand", "deuteron.randn", "deuteron.randint64"))
POINTWISE = (
    TRANSCENDENTAL
    | frozenset(
        "aten." + n
        for n in [
            "add",
            "sub",
            "mul",
            "div",
            "neg",
            "abs",
            "sign",
            "sgn",
            "floor",
            "ceil",
            "trunc",
            "round",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "relu",
            "clamp",
            "clamp_min",
            "clamp_max",
            "maximum",
            "minimum",
            "fmax",
            "fmin",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "logical_and",
            "logical_or",
            "logical_xor",
            "logical_not",
            "bitwise_and",
            "bitwise_or",
            "bitwise_xor",
            "bitwise_not",
            "bitwise_left_shift",
            "bitwise_right_shift",
            "__lshift__",
            "__rshift__",
            "__and__",
            "__or__",
            "__xor__",
            "where",
            "masked_fill",
            "fmod",
            "remainder",
            "floor_divide",
            "rsub",
            "square",
            "addcmul",
            "addcdiv",
            "lerp",
            "isnan",
            "isinf",
            "isfinite",
            "signbit",
            "copysign",
            "hypot",
            "nextafter",
            "_to_copy",
            "clone",
            "copy",
            "full",
            "full_like",
            "zeros",
            "zeros_like",
            "ones",
            "ones_like",
            "arange",
            "iota",
            "scalar_tensor",
            "constant_pad_nd",
            "cat",
            "gather",
            "index",
            "_unsafe_index",
            "index_select",
            "embedding",
            "flip",
            "roll",
            "tril",
            "triu",
            "hardtanh",
            "hardsigmoid",
            "hardswish",
            "leaky_relu",
            "threshold",
            "lift_fresh_copy",
            "new_zeros",
            "new_ones",
            "new_full",
            "ldexp",
            "xlogy",
            "frac",
            "nan_to_num",
            "eye",
            "repeat",
            "expand_copy",
            "permute_copy",
            "view_copy",
        ]
    )
    | frozenset(("prims.convert_element_type", "prims.iota", "prims.device_put"))
    | GENERATED
)


def is_pointwise(node: fx.Node) -> bool:
    """One result element from few loaded elements (gathers and pads count; so do random numbers
    from a seed)."""
    if node.op != "call_function":
        return False
    if is_overload(node) and torch.Tag.pointwise in node.target.tags and not is_mutating(node):
        return True
    return packet(node.target) in POINTWISE


def is_reduction(node: fx.Node) -> bool:
    return node.op == "call_function" and packet(node.target) in REDUCTIONS


def is_generated(node: fx.Node) -> bool:
    """Can be computed inside a generated kernel together with others: no library call, no
    effect."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_generated(source)
    name = packet(node.target)
    return is_pointwise(node) or is_view(node) or name in REDUCTIONS or name in SCATTERS
