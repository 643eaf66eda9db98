"""The rewrites of single nodes: one row each. A row returns the node to read instead, or None.

A row may return an existing node or insert a new one (through the `Editor`, before the node). It
states an identity that holds bit by bit for every dtype that it lets through; whether sharing of
storage permits the replacement is decided by `Aliasing`, not here. Float addition of 0.0 is no
row: -0.0 + 0.0 is 0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from deuteron.graph import ops
from deuteron.graph.edit import Editor, outside_of_modes

aten = torch.ops.aten
Rewrite = Callable[[Editor, fx.Node], "fx.Node | None"]


@dataclass(frozen=True)
class Row:
    name: str
    rewrite: Rewrite


RULES_OF: dict[str, list[Row]] = {}


def row(name: str, *packets: str) -> Callable[[Rewrite], Rewrite]:
    """Registers a rewrite for operators, named like ``aten.view``."""

    def add_row(f: Rewrite) -> Rewrite:
        for p in packets:
            RULES_OF.setdefault(p, []).append(Row(name, f))
        return f

    return add_row


# -- facts -----------------------------------------------------------------------------------------
def same_number(a: Any, b: Any) -> bool:
    """Equal sizes, as far as that is known without a guard."""
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        return getattr(getattr(a, "node", None), "expr", a) == getattr(
            getattr(b, "node", None), "expr", b
        )
    return a == b


def same_numbers(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(same_number(x, y) for x, y in zip(a, b))


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same sizes, strides, dtype and device."""
    return (
        a.dtype == b.dtype
        and a.device == b.device
        and a.layout == b.layout == torch.strided
        and same_numbers(a.shape, b.shape)
        and same_numbers(a.stride(), b.stride())
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def val(x: Any) -> torch.Tensor | None:
    return ops.tensor_of(x) if isinstance(x, fx.Node) else None


def like_first(node: fx.Node) -> fx.Node | None:
    """The first argument, if the result has its layout."""
    x = node.args[0] if node.args else None
    a, b = val(x), val(node)
    return x if a is not None and b is not None and same_layout(a, b) else None  # type: ignore[return-value]


def literal(x: Any) -> Any:
    """A Python number, or None."""
    return x if isinstance(x, (int, float)) and not isinstance(x, bool) else None


# -- rows ------------------------------------------------------------------------------------------
@row(
    "view of the same layout",
    "aten.view",
    "aten._unsafe_view",
    "aten.expand",
    "aten.permute",
    "aten.slice",
    "aten.squeeze",
    "aten.alias",
    "aten.detach",
    "aten.t",
    "aten.transpose",
    "aten._reshape_alias",
    "aten.flip",
)
def same_view(editor: Editor, node: fx.Node) -> fx.Node | None:
    """x.view(x.shape) = x, x[:] = x, ..."""
    if ops.packet(node.target) == "aten.flip" and node.args[1]:
        return None
    source = like_first(node)
    if source is None or ops.packet(node.target) in ("aten.permute", "aten.t", "aten.transpose"):
        # Equal layouts do not make a transposition of a square (or expanded) tensor an identity.
        return source if source is not None and is_identity_order(node) else None
    if ops.packet(node.target) == "aten.slice" and not is_full_slice(node):
        return None
    return source


def is_identity_order(node: fx.Node) -> bool:
    rank = node.meta["val"].dim()
    name = ops.packet(node.target)
    if name == "aten.permute":
        return [d % max(rank, 1) for d in node.args[1]] == list(range(rank))  # type: ignore[union-attr]
    if name == "aten.transpose":
        return rank == 0 or node.args[1] % rank == node.args[2] % rank  # type: ignore[operator]
    return rank < 2


def is_full_slice(node: fx.Node) -> bool:
    """Equal sizes say so, unless a step of -0 ... sizes are equal only for start 0 and step 1, or
    at most one element."""
    start = node.args[2] if len(node.args) > 2 else node.kwargs.get("start")
    step = node.args[4] if len(node.args) > 4 else node.kwargs.get("step", 1)
    return start in (None, 0) and step == 1


@row(
    "copy of the same layout",
    "aten.clone",
    "aten._to_copy",
    "prims.convert_element_type",
    "aten.contiguous",
)
def same_copy(editor: Editor, node: fx.Node) -> fx.Node | None:
    """A copy has the value of what it copies."""
    if node.kwargs.get("non_blocking") or node.kwargs.get("pin_memory"):
        return None
    return like_first(node)


# dtype -> those that hold all of its values
WIDER_DTYPES: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
    torch.bool: (
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ),
    torch.uint8: (torch.int16, torch.int32, torch.int64, torch.float32, torch.float64),
    torch.int8: (torch.int16, torch.int32, torch.int64, torch.float32, torch.float64),
    torch.int16: (torch.int32, torch.int64, torch.float32, torch.float64),
    torch.int32: (torch.int64, torch.float64),
}
CASTS = ("aten._to_copy", "prims.convert_element_type")


def only_casts(node: fx.Node) -> bool:
    """Changes the dtype and nothing else."""
    if node.op != "call_function" or ops.packet(node.target) not in CASTS:
        return False
    a, b = val(node.args[0]), val(node)
    return (
        a is not None
        and b is not None
        and a.device == b.device
        and same_numbers(a.shape, b.shape)
        and same_numbers(a.stride(), b.stride())
        and set(node.kwargs) <= {"dtype"}
    )


@row("cast there and back", *CASTS)
def cast_back(editor: Editor, node: fx.Node) -> fx.Node | None:
    """x.to(wider).to(x.dtype) = x."""
    inner = node.args[0]
    if not isinstance(inner, fx.Node) or not only_casts(node) or not only_casts(inner):
        return None
    source = inner.args[0]
    a, b = val(source), val(inner)
    assert isinstance(source, fx.Node) and a is not None and b is not None
    if b.dtype in WIDER_DTYPES.get(a.dtype, ()) and node.meta["val"].dtype == a.dtype:
        return source
    return None


@row("times one", "aten.mul", "aten.div", "aten.pow")
def times_one(editor: Editor, node: fx.Node) -> fx.Node | None:
    """x * 1 = x / 1 = x ** 1 = x, but for complex x: that 1 has an imaginary part of zero, and
    infinity times zero is NaN."""
    other = node.args[1] if len(node.args) > 1 else None
    if literal(other) != 1 or node.kwargs.get("rounding_mode") is not None:
        return None
    out = val(node)
    if out is None or out.is_complex():
        return None
    return like_first(node)


@row("plus nothing", "aten.add", "aten.sub")
def plus_zero(editor: Editor, node: fx.Node) -> fx.Node | None:
    """n + 0 = n for integers; x - 0 = x for all numbers."""
    other = node.args[1] if len(node.args) > 1 else None
    if literal(other) != 0 or str(other).startswith("-"):
        return None
    out = val(node)
    if (
        out is None
        or (out.dtype.is_floating_point or out.is_complex())
        and ops.packet(node.target) == "aten.add"
    ):
        return None
    return like_first(node)


@row("negated twice", "aten.neg", "aten.logical_not", "aten.bitwise_not")
def twice(editor: Editor, node: fx.Node) -> fx.Node | None:
    """-(-x) = x; not not b = b."""
    inner = node.args[0]
    if not isinstance(inner, fx.Node) or inner.target is not node.target:
        return None
    a, b = val(inner.args[0]), val(node)
    if a is None or b is None or not same_layout(a, b):
        return None
    return inner.args[0]  # type: ignore[return-value]


@row("concatenation of one", "aten.cat")
def one_part(editor: Editor, node: fx.Node) -> fx.Node | None:
    """cat([x]) = x."""
    parts = node.args[0]
    if not isinstance(parts, (list, tuple)) or len(parts) != 1:
        return None
    a, b = val(parts[0]), val(node)
    return parts[0] if a is not None and b is not None and same_layout(a, b) else None  # type: ignore[return-value]


@row("writes everything", "aten.slice_scatter", "aten.copy")
def whole_write(editor: Editor, node: fx.Node) -> fx.Node | None:
    """slice_scatter(x, y) over all of x, and copy(x, y), are y."""
    if ops.packet(node.target) == "aten.slice_scatter":
        start = node.args[3] if len(node.args) > 3 else node.kwargs.get("start")
        step = node.args[5] if len(node.args) > 5 else node.kwargs.get("step", 1)
        if start not in (None, 0) or step != 1:
            return None
    y = node.args[1]
    a, b = val(y), val(node)
    if a is None or b is None or not isinstance(y, fx.Node):
        return None
    if same_layout(a, b):
        return y
    if (
        a.device == b.device
        and same_numbers(a.shape, b.shape)
        and same_numbers(a.stride(), b.stride())
    ):
        return editor.call(aten._to_copy.default, y, like=node, dtype=b.dtype)
    return None


# -- constants -------------------------------------------------------------------------------------
# Operators whose result on any device is the correctly rounded one: folding them changes no bit.
EXACT_OPERATORS = (
    tuple(
        "aten." + n
        for n in [
            "add",
            "sub",
            "mul",
            "div",
            "neg",
            "abs",
            "maximum",
            "minimum",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "logical_and",
            "logical_or",
            "logical_not",
            "bitwise_not",
            "bitwise_and",
            "bitwise_or",
            "where",
            "clamp_min",
            "clamp_max",
            "sqrt",
            "reciprocal",
            "rsub",
        ]
    )
    + CASTS
)


def constant(x: fx.Node) -> bool | int | float | None:
    """The number that all elements of a tensor are known to be, before it is rounded to its
    dtype."""
    out = val(x)
    if out is None or x.op != "call_function" or out.dtype.is_complex:
        return None
    name = ops.packet(x.target)
    fill: Any = None
    if name in ("aten.full", "aten.full_like", "aten.new_full"):
        fill = x.args[-1]
    elif name == "aten.scalar_tensor":
        fill = x.args[0]
    elif name in ("aten.zeros", "aten.zeros_like", "aten.new_zeros"):
        fill = 0
    elif name in ("aten.ones", "aten.ones_like", "aten.new_ones"):
        fill = 1
    elif name in ("aten.expand", "aten.view", "aten.permute", "aten.unsqueeze", "aten.squeeze"):
        whole = x.args[0]
        if not isinstance(whole, fx.Node) or getattr(val(whole), "dtype", None) != out.dtype:
            return None  # bits that are read as another type are other numbers
        return constant(whole)
    return fill if isinstance(fill, (bool, int, float)) else None


@row("constant", *EXACT_OPERATORS)
def fold(editor: Editor, node: fx.Node) -> fx.Node | None:
    """An exact operator on constants is a constant."""
    out = val(node)
    # Sizes first: whether a tensor of unknown sizes is contiguous may not be asked.
    if out is None or not all(isinstance(s, int) for s in out.shape) or not out.is_contiguous():
        return None
    if node.kwargs.get("device") is not None or not any(isinstance(a, fx.Node) for a in node.args):
        return None
    # (number, dtype, rank) of tensors: a 0-d argument promotes more weakly than others.
    values: list[Any] = []
    for a in node.args:
        if isinstance(a, fx.Node):
            fill, fake = constant(a), val(a)
            if fill is None or fake is None:
                return None
            values.append((fill, fake.dtype, fake.dim()))
        elif isinstance(a, (bool, int, float)):
            values.append(a)
        else:
            return None
    with torch.no_grad(), outside_of_modes():  # real tensors, not fake ones of the trace
        real = [
            torch.full([1] * v[2], v[0], dtype=v[1]) if isinstance(v, tuple) else v for v in values
        ]
        result = node.target(*real, **node.kwargs)  # type: ignore[operator]
        number = result.reshape(()).item()
    if result.dtype != out.dtype:
        return None
    return editor.call(
        aten.full.default,
        list(out.shape),
        number,
        like=node,
        dtype=out.dtype,
        device=out.device,
        pin_memory=False,
    )
