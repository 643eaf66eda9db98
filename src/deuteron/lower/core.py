"""Lowering: an ATen FX graph becomes a `Program` of the loop IR.

In: a functional FX graph with fake tensors in ``meta["val"]``. Out: a `Program`. Every call becomes
either loop IR, by a function registered with `lowering`, or a library call (`Extern`) whose reason
goes to the Record. Views are index maps.

While a graph is lowered a tensor is a `Value`: an expression over one axis per dimension. A
pointwise or reduced result is defined as a `Compute` per FX node, so that the scheduler decides
what shares a kernel; a view of it is only another `Value`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from deuteron.base.device import DeviceSpec
from deuteron.base.package import FOLDER
from deuteron.base.record import Record
from deuteron.base.text import one_line
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import (
    Atom,
    Axis,
    Index,
    IndexLike,
    Sym,
    as_index,
    const,
    hint,
    is_nonneg,
    product,
)
from deuteron.ir.program import (
    Check,
    Compute,
    Constant,
    Def,
    Extern,
    Input,
    Layout,
    Origin,
    Output,
    Program,
    ViewArg,
    contiguous_strides,
)
from deuteron.lower import sizes as S

TORCH_DTYPES: dict[torch.dtype, str] = {
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
}
TO_TORCH = {short: t for t, short in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The IR's name; for what only library calls touch (complex, fp8), torch's own."""
    return TORCH_DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


Lowering = Callable[..., Any]
LOWERINGS: dict[str, Lowering] = {}


def lowering(*names: str) -> Callable[[Lowering], Lowering]:
    """Registers a function for ATen operators: "aten.add.Tensor", or "aten.add" for every
    overload."""

    def add_lowering(f: Lowering) -> Lowering:
        for n in names:
            assert n not in LOWERINGS, f"two lowerings for {n}"
            LOWERINGS[n] = f
        return f

    return add_lowering


class Declined(Exception):
    """A lowering says no: the call becomes a library call for this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class LibraryMultiplies(Declined):
    """A product of matrices is a library call; the schedule may still generate it, with what
    surrounds it."""


@dataclass(frozen=True)
class Value:
    """A tensor as an expression over one fresh axis per dimension."""

    axes: tuple[Axis, ...]
    expr: Expr

    @property
    def dtype(self) -> str:
        return self.expr.dtype

    @property
    def shape(self) -> tuple[Index, ...]:
        return tuple(a.extent for a in self.axes)

    @property
    def rank(self) -> int:
        return len(self.axes)

    def at(self, indices: Sequence[IndexLike]) -> Expr:
        """The element at `indices` (one per dimension)."""
        assert len(indices) == len(self.axes), f"{len(indices)} indices for rank {len(self.axes)}"
        table: dict[Atom, Index] = {a: as_index(i) for a, i in zip(self.axes, indices, strict=True)}
        return self.expr.substitute(table)


@dataclass(frozen=True)
class Opaque:
    """A Python object among a library call's arguments, kept in `Program.callables` under `key`."""

    key: str


@dataclass
class LowerContext:
    record: Record
    device: str = "cpu"
    defs: list[Def] = field(default_factory=list)
    layouts: dict[str, Layout] = field(default_factory=dict)
    env: dict[fx.Node, Any] = field(default_factory=dict)
    symbols: S.Symbols = field(default_factory=S.Symbols)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    callables: dict[str, Any] = field(default_factory=dict)
    node: fx.Node | None = None
    overwritten: set[str] = field(default_factory=set)  # tensors whose memory is another's now
    copies: dict[Any, str] = field(default_factory=dict)  # see `copied`
    places: dict[Any, Axis] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)  # overwritten tensor -> its newest name
    sized: dict[Sym, tuple[str, int]] = field(default_factory=dict)  # sizes that a result tells
    sourced: set[str] = field(default_factory=set)  # sizes whose value has a source by now
    guarded: set[str] = field(default_factory=set)  # those of inputs that Dynamo guards
    quantized: set[fx.Node] = field(default_factory=set)  # see `lower.quantized`
    hosted: dict[str, Sym] = field(default_factory=dict)  # element in memory -> the number it is
    number_text: dict[fx.Node, str] = field(
        default_factory=dict
    )  # numbers as text: see `lower.numbers`
    dims: dict[Any, str] = field(default_factory=dict)  # (tensor, dimension) -> the size it tells
    # See `lower.assertions`: (order, node, check), and those that torch takes for granted.
    checks: list[tuple[Any, fx.Node, Check]] = field(default_factory=list)
    settled: list[tuple[fx.Node, str]] = field(default_factory=list)
    storages: dict[str, Any] = field(default_factory=dict)  # tensor -> its fake's memory
    floats: dict[Any, Value] = field(default_factory=dict)  # symbol of a float -> the element it is
    choose_contraction: Callable[..., str | None] = lambda *a, **k: None
    like: str = ""  # the kind of device that stands for every one: see `on_gpu`
    specs: Callable[[str], DeviceSpec] | None = None  # the figures of a device
    _axis: int = 0
    _names: set[str] = field(default_factory=set)

    # -- building values
    # ------------------------------------------------------------------------------------------
    def axes(self, shape: Sequence[IndexLike]) -> tuple[Axis, ...]:
        out = []
        for extent in shape:
            out.append(Axis(f"i{self._axis}", extent))
            self._axis += 1
        return tuple(out)

    def size(self, x: Any) -> Index:
        """An int, SymInt, sympy expression, FX node or Index as an Index, without guards."""
        if isinstance(x, Index):
            return x
        if isinstance(x, fx.Node):
            return self.size(self.env.get(x, x.meta["val"]))
        return self.symbols.index(x)

    def shape_of(self, fake: torch.Tensor) -> tuple[Index, ...]:
        return tuple(self.size(s) for s in fake.shape)

    def strides_of(self, fake: torch.Tensor) -> tuple[Index, ...]:
        return tuple(self.symbols.stride(s) for s in fake.stride())

    def layout_of(self, fake: torch.Tensor) -> Layout:
        """The traced strides, from the tensor's own first element."""
        return Layout(
            self.shape_of(fake),
            self.strides_of(fake),
            dtype_name(fake.dtype),
            str(fake.device),
        )

    def dense_layout(self, fake: torch.Tensor) -> Layout:
        """The fake tensor's own strides where they fill memory without holes, else contiguous
        ones."""
        shape = self.shape_of(fake)
        strides = self.strides_of(fake)
        if not is_dense(shape, strides):
            strides = contiguous_strides(shape)
        return Layout(shape, strides, dtype_name(fake.dtype), str(fake.device))

    def default_layout(self, value: Value, device: str) -> Layout:
        return Layout(value.shape, contiguous_strides(value.shape), value.dtype, device)

    def decline(self, reason: str) -> Declined:
        """`raise ctx.decline(why)`: the current node becomes a library call."""
        return Declined(reason)

    def fake(self) -> torch.Tensor:
        """The (first) fake result of the node being lowered."""
        assert self.node is not None
        val = self.node.meta["val"]
        return val[0] if isinstance(val, (tuple, list)) else val

    def on_gpu(self) -> bool:
        """Whether the node's kernels will be a GPU's."""
        return (self.like or self.fake().device.type) != "cpu"

    def set_device_of(self, number: Value) -> str | None:
        """Makes the device of the tensors that `number` reads the device of the next
        definitions, and returns it; None if it reads none."""
        homes = {self.layouts[e.attr[0]].device for e in number.expr.loads()}
        if len(homes) > 1:
            raise Declined("a number made of elements on several devices")
        for home in homes:
            self.device = home
            return home
        return None

    # -- defining tensors
    # -----------------------------------------------------------------------------------------
    def fresh_name(self, wish: str) -> str:
        name, n = wish, 1
        while name in self._names:
            n += 1
            name = f"{wish}_{n}"
        self._names.add(name)
        return name

    def origins(self) -> tuple[Origin, ...]:
        if self.node is None:
            return ()
        return (Origin(self.node.name, str(self.node.target), source_line(self.node)),)

    def add(self, d: Def) -> None:
        self.defs.append(d)
        if isinstance(d, Extern):
            self.layouts.update(
                {n: lay for n, lay in zip(d.names, d.layouts, strict=True) if n and lay}
            )
        else:
            self.layouts[d.name] = d.layout

    def load(self, name: str) -> Value:
        """The value that reads tensor `name`."""
        layout = self.layouts[name]
        axes = self.axes(layout.shape)
        return Value(axes, E.load(name, tuple(a.index for a in axes), layout.dtype))

    def define(self, value: Value, layout: Layout | None = None, wish: str | None = None) -> Value:
        """Gives `value` a tensor of its own (reductions inside it get theirs first) and returns a
        read of it."""
        wish = wish or (self.node.name if self.node is not None else "t")
        body = self.own_reductions(value, wish, layout)
        name = self.fresh_name(wish)
        layout = layout or Layout(
            value.shape, contiguous_strides(value.shape), value.dtype, self.device
        )
        if layout.dtype != value.dtype:
            layout = replace(layout, dtype=value.dtype)
        self.add(Compute(name, value.axes, body, layout, origins=self.origins()))
        return self.load(name)

    def own_reductions(self, value: Value, wish: str, layout: Layout | None = None) -> Expr:
        """The body with every reduction that is not its root defined as a tensor over the axes that
        it depends on, in the order of memory in which the value is stored (pooling of what has its
        channels last)."""
        root = value.expr
        table: dict[Expr, Expr] = {}
        for n in root.walk():
            if n.op not in ("reduce", "scan") or n is root:
                continue
            inner = E.rewrite(
                n, lambda m, a: None, None, {k: v for k, v in table.items() if k is not n}
            )
            axes = tuple(a for a in value.axes if a in inner.axes())
            bound = n.attr[1] if isinstance(n.attr[1], tuple) else (n.attr[1],)
            if n.op == "scan":
                axes = axes + tuple(b for b in bound if b not in axes)
            name = self.fresh_name(f"{wish}_{n.attr[0]}")
            shape = tuple(a.extent for a in axes)
            strides = contiguous_strides(shape)
            if layout is not None and layout.strides != contiguous_strides(layout.shape):
                order = [
                    layout.strides[value.axes.index(a)] if a in value.axes else const(1)
                    for a in axes
                ]
                strides = strides_like(shape, order)
            self.add(
                Compute(
                    name,
                    axes,
                    inner,
                    Layout(shape, strides, inner.dtype, self.device),
                    origins=self.origins(),
                )
            )
            table[n] = E.load(name, tuple(a.index for a in axes), inner.dtype)
        return E.rewrite(root, lambda m, a: None, None, table) if table else root

    def scatter(
        self,
        base: Value,
        axes: tuple[Axis, ...],
        index: tuple[Index, ...],
        body: Expr,
        accumulate: str | None = None,
        mask: Expr | None = None,
        unique: bool = False,
    ) -> Value:
        """A copy of `base` into which ``copy[index] (accumulate)= body`` is done for every point of
        `axes`; `unique`: no two of them have one place."""
        layout = self.dense_layout(self.fake())
        if layout.shape != base.shape:
            layout = Layout(base.shape, contiguous_strides(base.shape), base.dtype, self.device)
        wish = self.node.name if self.node is not None else "t"
        copy = self.define(base, layout, f"{wish}_base").expr.attr[0]
        body = self.own_reductions(Value(axes, body), wish)
        name = self.fresh_name(wish)
        self.add(
            Compute(
                name,
                axes,
                body,
                self.layouts[copy],
                copy,
                index,
                accumulate,
                self.origins(),
                mask,
                unique,
            )
        )
        return self.load(name)

    def permuted(self, axes: tuple[Axis, ...], index: tuple[Index, ...], body: Expr) -> Value:
        """A tensor of one dimension with an element for every point of `axes`, at its own place:
        no two have one."""
        shape = (product(a.extent for a in axes),)
        layout = Layout(shape, contiguous_strides(shape), body.dtype, self.device)
        name = self.fresh_name(self.node.name if self.node is not None else "t")
        self.add(
            Compute(name, axes, body, layout, index=index, origins=self.origins(), unique=True)
        )
        return self.load(name)

    def copied(self, value: Value, layout: Layout) -> str:
        """The name of a tensor in which the elements of `value` lie as `layout` says; one for all
        calls that read the same elements in the same order of memory, transposed or not."""
        strides = [s.value for s in layout.strides]
        if None in strides:
            return self.define(value, layout).expr.attr[0]
        order = sorted(range(value.rank), key=lambda d: (-(strides[d] or 0), d))
        sizes = [value.axes[d].extent for d in order]
        for k, n in enumerate(sizes):
            self.places.setdefault((k, n), Axis(f"p{k}", n))
        at = {d: self.places[k, sizes[k]].index for k, d in enumerate(order)}
        body = value.at([at[d] for d in range(value.rank)])
        key = (body, *sizes, *(strides[d] for d in order), layout.device)
        name = self.copies.get(key)
        read = {e.attr[0] for e in body.loads()} | {name}
        if name is None or read & self.overwritten:
            name = self.copies[key] = self.define(value, layout).expr.attr[0]
        return name

    # -- arguments of library calls
    # ---------------------------------------------------------------------------------
    def view_arg(self, value: Value, layout: Layout | None = None) -> ViewArg:
        """`value` as a strided view of a tensor in memory; computed into one where it is not."""
        view = self.strided(value)
        if view is not None:
            return view
        name = self.define(value, layout).expr.attr[0]
        lay = self.layouts[name]
        return ViewArg(name, lay.shape, lay.strides, const(0))

    def strided(self, value: Value) -> ViewArg | None:
        """`value` as a strided view (offset relative to its tensor's first element), or None."""
        e = value.expr
        if e.op != "load" or e.args:
            return None
        lay = self.layouts[e.attr[0]]
        address = const(0)
        for i, s in zip(e.attr[1], lay.strides, strict=True):
            address = address + i * s
        strides: list[Index] = []
        for a in value.axes:
            step = address.coefficient(a)
            if step is None or step.axes():
                return None
            strides.append(step)
            address = address - step * a.index
        if (
            any(a.rank > 0 for m, _ in address.terms for a in m if not isinstance(a, Sym))
            and address.axes()
        ):
            return None
        # Torch has no strides that go back.
        forward = all(is_nonneg(s) or any(s is t for t in lay.strides) for s in strides)
        if address.axes() or not forward:
            return None
        return ViewArg(e.attr[0], value.shape, tuple(strides), address)


def is_dense(shape: tuple[Index, ...], strides: tuple[Index, ...]) -> bool:
    """Whether the strides are those of some order of the dimensions, without holes or overlap."""
    left = [(s, n) for s, n in zip(strides, shape, strict=True) if n.value != 1]
    step = const(1)
    while left:
        for pair in left:
            if pair[0] is step:
                break
        else:
            return False
        left.remove(pair)
        step = step * pair[1]
    return True


def strides_like(shape: tuple[Index, ...], like: Sequence[Index]) -> tuple[Index, ...]:
    """Strides without holes for dimensions in the order of others' strides, largest first."""
    order = sorted(range(len(shape)), key=lambda k: -hint(like[k]))
    dense = contiguous_strides(tuple(shape[k] for k in order))
    return tuple(dense[order.index(k)] for k in range(len(shape)))


def whole_tensor(value: Value) -> str | None:
    """The tensor of which `value` is a plain read, if it is."""
    e = value.expr
    if e.op == "load" and not e.args and e.attr[1] == tuple(a.index for a in value.axes):
        return e.attr[0]
    return None


def make(
    ctx: LowerContext, shape: Sequence[IndexLike], f: Callable[[tuple[Index, ...]], Expr]
) -> Value:
    """The tensor of the given shape whose element at `idx` is ``f(idx)``."""
    axes = ctx.axes(shape)
    return Value(axes, f(tuple(a.index for a in axes)))


# A frame of a traceback. File names may hold quotes and line ends.
TRACEBACK_FRAME = re.compile(
    r'^[ \t]*File "((?:.|\n)*?)", line (\d+), in [^\n]*(?:\n(.*))?$', re.MULTILINE
)


def source_line(node: fx.Node) -> str:
    """ "file:line: code" of the innermost user frame that made the node, or ""."""
    return _source_line(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=1024)  # a line of the user's makes many nodes
def _source_line(trace: str) -> str:
    for m in reversed(list(TRACEBACK_FRAME.finditer(trace))):
        file, number, code = m.groups()
        if not file.startswith(f"{FOLDER}/"):  # where `explain` calls the model
            return one_line(f"{file}:{number}: {(code or '').strip()}")
    return ""


def supported(fake: Any) -> bool:
    """Whether the loop IR can hold the tensor: a plain strided tensor of a known dtype."""
    return (
        isinstance(fake, torch.Tensor)
        and fake.dtype in TORCH_DTYPES
        and fake.layout == torch.strided
        and not fake.is_conj()
        and not fake.is_neg()
    )


def flat_values(x: Any) -> Iterable[Value]:
    if isinstance(x, Value):
        yield x
    elif isinstance(x, (tuple, list)):
        for y in x:
            yield from flat_values(y)


__all__ = [
    "LOWERINGS",
    "TORCH_DTYPES",
    "TO_TORCH",
    "Declined",
    "LowerContext",
    "Opaque",
    "Output",
    "Program",
    "Value",
    "make",
    "lowering",
    "operator",
    "Input",
    "Constant",
]
