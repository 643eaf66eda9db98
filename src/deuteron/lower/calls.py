"""Library calls: an FX call that is not generated becomes an `Extern`.

In: an FX node, its arguments as lowered so far, and the reason. Out: an `Extern` in the program,
and the node's results as values. What the call overwrites, what its results share memory with and
which sizes it decides at run time are read off the operator's schema and the fake results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from deuteron.graph import ops
from deuteron.ir.index import Axis, Index, as_index, const
from deuteron.ir.program import Extern, Layout, ViewArg
from deuteron.lower.assertions import bind
from deuteron.lower.core import LowerContext, Opaque, Value
from deuteron.lower.quantized import QUANTIZED_LAYOUT, floating
from deuteron.lower.symfloats import number_value

Overload = torch._ops.OpOverload


def emit(ctx: LowerContext, node: fx.Node, args: Any, kwargs: Any, reason: str) -> Any:
    """Adds the call; returns its results in the structure that the operator has."""
    val = node.meta.get("val")
    exact = needs_exact_strides(node)
    given = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    storages = {storage(n.meta["val"]): n for n in reversed(given)}
    call_args = tuple(argument(ctx, a, n, exact) for a, n in zip(args, node.args, strict=True))
    call_kwargs = tuple((k, argument(ctx, v, node.kwargs[k], exact)) for k, v in kwargs.items())
    passed = {
        n: a.tensor
        for n, a in zip(
            (*node.args, *node.kwargs.values()), (*call_args, *dict(call_kwargs).values())
        )
        if isinstance(n, fx.Node) and isinstance(a, ViewArg)
    }
    numbers = tuple(k for k, n in enumerate(node.args) if is_number(n, args[k]))
    named = tuple(k for k, n in node.kwargs.items() if is_number(n, kwargs[k]))
    leaves, spec = tree_flatten(val)
    names: list[str | None] = []
    layouts: list[Layout | None] = []
    aliases: list[str | None] = []
    for k, fake in enumerate(leaves):
        name, layout, shared = None, None, None
        if isinstance(fake, torch.Tensor):
            name = ctx.fresh_name(node.name if len(leaves) == 1 else f"{node.name}_{k}")
            layout = ctx.layout_of(fake)
            if node in ctx.quantized and floating(fake):
                layout = replace(layout, dtype=QUANTIZED_LAYOUT)
            ctx.storages[name] = storage(fake)
            source = storages.get(storage(fake), ops.viewed(node))
            if source in ctx.quantized and layout.dtype != QUANTIZED_LAYOUT:
                source = None  # what is packed shares no memory with numbers
            if source is not None:
                # What was computed or copied for the call is in memory only as its argument.
                shared = passed.get(source) or memory_of(ctx, ctx.env.get(source))
        elif is_object(fake):
            raise ctx.decline("an object that is neither a tensor nor a number is returned")
        names.append(name)
        layouts.append(layout)
        aliases.append(shared)
    sizes = bind(ctx, node, leaves, spec, names)
    mutated = tuple(dict.fromkeys(overwritten(node, call_args, dict(call_kwargs))))
    ctx.add(
        Extern(
            tuple(names),
            operator_key(ctx, node, numbers, named),
            call_args,
            call_kwargs,
            tuple(layouts),
            mutated,
            tuple(aliases),
            tuple(sizes) if any(sizes) else (),
            ctx.origins(),
            reason,
            is_impure(node, leaves),
        )
    )
    for name in mutated:
        ctx.overwritten.add(name)
    results = [ctx.load(n) if n else number(ctx, f) for n, f in zip(names, leaves, strict=True)]
    return tree_unflatten(results, spec)


def argument(ctx: LowerContext, x: Any, node: Any, exact: bool) -> Any:
    """One argument as an `Extern` holds it."""
    if isinstance(x, Value):
        fake = node.meta["val"] if isinstance(node, fx.Node) else None
        fake = fake if isinstance(fake, torch.Tensor) else None
        return tensor_argument(ctx, x, fake, exact)
    if isinstance(x, (list, tuple)):
        parts = node if isinstance(node, (list, tuple)) else [None] * len(x)
        return tuple(argument(ctx, a, n, exact) for a, n in zip(x, parts, strict=True))
    if isinstance(x, dict):
        if any(isinstance(v, (Value, Index)) for v in tree_flatten(x)[0]):
            raise ctx.decline("a dictionary of tensors among a call's arguments")
        key = ctx.fresh_name("settings")
        ctx.callables[key] = x
        return Opaque(key)
    return x


def tensor_argument(ctx: LowerContext, x: Value, fake: Any, exact: bool) -> ViewArg:
    """A tensor argument, with the traced strides where the operator may depend on them."""
    view = ctx.strided(x)
    if fake is None:
        ctx.set_device_of(x)
        return view or ctx.view_arg(x)
    layout = ctx.dense_layout(fake)
    wanted = ctx.strides_of(fake)
    if view is not None:
        if not exact:
            return view
        pairs = zip(view.strides, wanted, x.shape, strict=True)
        if all(a is b or n.value == 1 for a, b, n in pairs):
            return replace(view, strides=wanted)  # attention looks at those of one element, too
    if exact and layout.strides != wanted:
        x, layout = with_strides(x, layout, wanted)
    reads = reads_only(ctx.node)
    name = ctx.copied(x, layout) if reads else ctx.define(x, layout).expr.attr[0]
    shape = ctx.shape_of(fake)
    return ViewArg(name, shape, layout.strides, as_index(0))


def reads_only(node: fx.Node | None) -> bool:
    """Whether the call is known not to write what it is given."""
    return node is not None and ops.is_overload(node) and not ops.is_mutating(node)


def with_strides(x: Value, layout: Layout, wanted: Sequence[Index]) -> tuple[Value, Layout]:
    """What to store, and how, so that a view of it has the `wanted` strides: memory with holes, as
    traced (padded for alignment), where broadcast dimensions are stored once. As before where
    elements differ along a dimension that was traced as a broadcast one: some of torch's fake
    kernels repeat the strides of expanded arguments."""
    used = x.expr.axes()
    if any(
        s.value == 0 and n.value != 1 and a in used
        for a, s, n in zip(x.axes, wanted, x.shape, strict=True)
    ):
        return x, layout
    once = [
        const(0) if s.value == 0 and n.value != 1 else a.index
        for a, s, n in zip(x.axes, wanted, x.shape, strict=True)
    ]
    axes = tuple(a if i is a.index else Axis(a.name, 1) for a, i in zip(x.axes, once, strict=True))
    x = Value(axes, x.at(once))
    return x, replace(layout, shape=x.shape, strides=tuple(wanted))


STRIDES_DECIDE = ("convolution", "attention", "view_as", "resize", "as_strided")


def needs_exact_strides(node: fx.Node) -> bool:
    """Operators outside ATen are given what was traced; ATen's own take any strides."""
    target = node.target
    if not isinstance(target, Overload):
        return True
    tags = target.tags
    if torch.Tag.needs_exact_strides in tags or torch.Tag.needs_fixed_stride_order in tags:
        return True
    # Strides decide the layout of a convolution's and of attention's results, what is where after
    # a resize or where strides are given, and which element gets which random number.
    return (
        torch.Tag.nondeterministic_seeded in tags
        or target.namespace not in ("aten", "prims")
        or "backward" in target._schema.name
        or any(w in target._schema.name for w in STRIDES_DECIDE)
    )


def is_object(val: Any) -> bool:
    """Neither a tensor nor a number, but what only library calls know to use: torch traces device
    meshes and process groups as `FakeScriptObject`, generators as themselves."""
    return isinstance(val, torch.Generator) or type(val).__name__ == "FakeScriptObject"


def number(ctx: LowerContext, fake: Any) -> Any:
    """A result that is no tensor."""
    if isinstance(fake, torch.SymBool):
        return number_value(ctx, fake)
    return ctx.size(fake) if isinstance(fake, torch.SymInt) else fake


@dataclass(frozen=True)
class WithNumbers:
    """An operator that is given tensors of one element where it takes numbers."""

    target: Any
    numbers: tuple[int, ...]
    named: tuple[str, ...]

    @property
    def __name__(self) -> str:
        return f"{self.target}".replace(".", "_")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [a.item() if k in self.numbers else a for k, a in enumerate(args)]
        return self.target(
            *given, **{k: v.item() if k in self.named else v for k, v in kwargs.items()}
        )


def is_number(node: Any, given: Any) -> bool:
    """Whether an argument was traced as a number and lowered to an element of a tensor."""
    plain = isinstance(node, fx.Node) and not isinstance(node.meta.get("val"), torch.Tensor)
    return plain and isinstance(given, Value)


def operator_key(
    ctx: LowerContext, node: fx.Node, numbers: tuple[int, ...] = (), named: tuple[str, ...] = ()
) -> str:
    """The operator's name under torch.ops, or a key of `Program.callables`."""
    target: Any = node.target
    if numbers or named:
        target = WithNumbers(target, numbers, named)
    if isinstance(target, Overload):
        return str(target)
    key = getattr(target, "__name__", type(target).__name__)
    while key in ctx.callables and ctx.callables[key] is not target:
        key += "_"
    ctx.callables[key] = target
    return key


def overwritten(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    """Tensors that the call writes in place."""
    target = node.target
    if isinstance(target, Overload):
        for k, a in enumerate(target._schema.arguments):
            if a.alias_info is not None and a.alias_info.is_write:
                given = args[k] if k < len(args) and not a.kwarg_only else kwargs.get(a.name)
                yield from tensors(given)
    elif "mutation" in getattr(target, "__name__", ""):
        yield from tensors((args, tuple(kwargs.values())))


def tensors(x: Any) -> Iterator[str]:
    if isinstance(x, ViewArg):
        yield x.tensor
    elif isinstance(x, (tuple, list)):
        for y in x:
            yield from tensors(y)


def is_impure(node: fx.Node, results: list[Any]) -> bool:
    """Whether the call must keep its place: it has effects besides its results."""
    target = node.target
    if not isinstance(target, Overload):
        return ops.has_effect(node) or not any(isinstance(r, torch.Tensor) for r in results)
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        return True
    return target.namespace.startswith("_c10d") or not results or all(r is None for r in results)


def storage(t: Any) -> Any:
    """What identifies the memory of a fake tensor; a new object where it has none."""
    try:
        return torch.multiprocessing.reductions.StorageWeakRef(t.untyped_storage())
    except (RuntimeError, NotImplementedError):  # sparse and the like
        return object()


def memory_of(ctx: LowerContext, x: Any) -> str | None:
    """The tensor in memory that a value is a view of."""
    if not isinstance(x, Value) or x.expr.op != "load":
        return None
    view = ctx.strided(x)
    return view.tensor if view is not None else None


__all__ = ["emit", "memory_of", "storage", "with_strides"]
