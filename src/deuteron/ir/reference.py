"""Reference executor: what a program means, computed by torch one whole tensor at a time.

In: a `Program` and its inputs. Out: its outputs, with the strides and aliases that the program
says. It is slow and checks what it does: a load or store outside its tensor raises `IndexError`.

Every axis has a dimension of its own; a value has size 1 in the dimensions that it does not depend
on. Sums and products of floats are accumulated in f64 and rounded once, so that they are at least
as exact as any kernel's. Large iteration spaces are computed in blocks of at most `BLOCK_POINTS`
points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product as cartesian
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deuteron.ir.dynamic_bounds import ends
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Div, Index, MinMax, Mod, Sym, Value, evaluate
from deuteron.ir.operations import FLOATS, INTS
from deuteron.ir.program import (
    Compute,
    Constant,
    Extern,
    Given,
    Input,
    Layout,
    Output,
    Program,
    ViewArg,
    names_in,
)
from deuteron.ir.reference_ops import TO_TORCH, divided, random_values, reduce, scalar_op, scan

BLOCK_POINTS = 1 << 20  # points per block: 4 MiB per f32 value of the expression
Range = tuple[int, int]


# -- scalar operations ---------------------------------------------------------------------------


# -- reductions
# ---------------------------------------------------------------------------------------


# -- random numbers ------------------------------------------------------------------------------


# -- expressions ---------------------------------------------------------------------------------


def bound_axes(roots: Iterable[Expr]) -> list[Axis]:
    """The axes of reductions and scans inside expressions."""
    bound: dict[Axis, None] = {}
    for root in roots:
        for n in root.walk():
            if n.op == "reduce":
                bound.update(dict.fromkeys(n.attr[1]))
            elif n.op == "scan":
                bound[n.attr[1]] = None
    return list(bound)


class Evaluator:
    """Values of expressions over a block of an iteration space.

    `axes` are all axes, each with its dimension; `ranges` restricts some to a block. `locals` are
    values that loads of these names give, with one dimension per axis (registers of a kernel).
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        sizes: Mapping[str, int],
        tensors: Mapping[str, Tensor],
        device: Any,
        ranges: Mapping[Axis, Range] | None = None,
    ) -> None:
        self.dims = {a: d for d, a in enumerate(dict.fromkeys(axes))}
        self.sizes, self.tensors, self.device = sizes, tensors, device
        self.ranges = {a: (0, evaluate(a.extent, sizes)) for a in self.dims} | dict(ranges or {})
        self.locals: dict[str, Tensor] = {}
        self.done: dict[Expr, Tensor] = {}
        self.numbers: dict[Index, Tensor] = {}

    def count(self, axis: Axis) -> int:
        low, high = self.ranges[axis]
        return max(0, high - low)

    def value(self, root: Expr) -> Tensor:
        for n in root.walk():
            if n not in self.done:
                self.done[n] = self._value(n)
        return self.done[root]

    def spread(self, x: Tensor, axes: Iterable[Axis]) -> Tensor:
        """`x` with its full extent along `axes`."""
        shape = list(x.shape)
        for a in axes:
            shape[self.dims[a]] = self.count(a)
        return x.expand(shape)

    def _value(self, n: Expr) -> Tensor:
        args = [self.done[a] for a in n.args]
        if n.op == "literal":
            return self.constant(n.attr, n.dtype)
        if n.op == "index":
            return self.index(n.attr)
        if n.op == "load":
            return self._load(n)
        if n.op == "cast":
            return args[0].to(TO_TORCH[n.dtype])
        if n.op == "reduce":
            kind, axes = n.attr
            return reduce(
                kind, self.spread(args[0], axes), [self.dims[a] for a in axes], n.args[0].dtype
            )
        if n.op == "scan":
            kind, axis = n.attr
            return scan(kind, self.spread(args[0], (axis,)), self.dims[axis])
        if n.op == "random":
            dist, stream, element = n.attr
            return random_values(dist, args[0], stream, self.index(element), n.dtype)
        if n.op == "check":
            outside = (args[0] < 0) | (args[0] >= self.index(n.attr))
            if bool((outside & args[1] if len(args) > 1 else outside).any()):
                raise IndexError("index out of range: a position that the program compares")
            return torch.where(outside, 0, args[0])
        return scalar_op(n.op, args).to(TO_TORCH[n.dtype])

    def constant(self, value: Any, dtype: str) -> Tensor:
        return torch.full([1] * len(self.dims), value, dtype=TO_TORCH[dtype], device=self.device)

    # -- indices -----------------------------------------------------------------------------------

    def index(self, index: Index) -> Tensor:
        """The integer value of an index, as i64."""
        known = self.numbers.get(index)
        if known is None:
            total = self.constant(0, "i64")
            for m, c in index.terms:
                part = self.constant(c, "i64")
                for a in m:
                    part = part * self._atom(a)
                total = total + part
            known = self.numbers[index] = total
        return known

    def _atom(self, a: Any) -> Tensor:
        if isinstance(a, Sym):
            return self.constant(self.sizes[a.name], "i64")
        if isinstance(a, Axis):
            low, high = self.ranges[a]
            shape = [1] * len(self.dims)
            shape[self.dims[a]] = max(0, high - low)
            return torch.arange(low, max(low, high), device=self.device).view(shape)
        if isinstance(a, (Div, Mod)):
            return divided(
                "floordiv" if isinstance(a, Div) else "remainder",
                self.index(a.num),
                self.index(a.den),
            )
        if isinstance(a, MinMax):
            pick = torch.minimum if a.kind == "min" else torch.maximum
            return pick(self.index(a.a), self.index(a.b))
        assert isinstance(a, Value)
        return self.value(a.expr)

    # -- memory ------------------------------------------------------------------------------------

    def _load(self, n: Expr) -> Tensor:
        name, indices, fill = n.attr
        if name in self.locals:
            return self.locals[name]
        t = self.tensors[name]
        assert t.dtype == TO_TORCH[n.dtype], f"{name} is {t.dtype}, its load {n.dtype}"
        assert t.dim() == len(indices), f"{name} has rank {t.dim()}, its load {len(indices)}"
        at = [self.index(i) for i in indices]
        mask = self.done[n.args[0]] if n.args else None
        at = in_bounds(name, at, t.shape, mask)
        if mask is None:
            return t[tuple(at)] if at else t.reshape([1] * len(self.dims))
        other = torch.full((), fill, dtype=t.dtype, device=t.device)
        if t.numel() == 0:
            return other.expand(torch.broadcast_shapes(mask.shape, *(i.shape for i in at)))
        return torch.where(mask, t[tuple(at)] if at else t, other)


def in_bounds(
    name: str, at: Sequence[Tensor], shape: Sequence[int], mask: Tensor | None
) -> list[Tensor]:
    """The positions, those where `mask` is false moved to 0; `IndexError` where one is outside."""
    out = []
    for d, i in enumerate(at):
        if mask is not None:
            i = torch.where(mask, i, torch.zeros_like(i))
        if i.numel() and (mask is None or bool(mask.any())):
            low, high = int(i.min()), int(i.max())
            if low < 0 or high >= shape[d]:
                raise IndexError(
                    f"{name}: index {low if low < 0 else high} in dimension {d} of size {shape[d]}"
                )
        out.append(i)
    return out


def longest(
    roots: Sequence[Expr],
    sizes: Mapping[str, int],
    tensors: Mapping[str, Tensor],
    device: Any,
    ranges: Mapping[Axis, Range] | None = None,
) -> dict[Axis, Range]:
    """The values that axes of reductions with data-dependent bounds have in any row, of those in
    `ranges`."""
    out: dict[Axis, Range] = {}
    for axis, end in ((a, e) for root in roots for a, e in ends(root).items()):
        if any(n.attr[0] not in tensors for n in end.loads()):
            continue  # the nest computes it
        value = Evaluator(sorted(end.axes()), sizes, tensors, device, ranges).value(end)
        last = int(value.max()) if value.numel() else 0
        most = min(last, evaluate(axis.extent, sizes))
        out[axis] = (0, max(most, out.get(axis, (0, 0))[1]))
    return out


def blocks(
    axes: Sequence[Axis],
    others: Sequence[Axis],
    sizes: Mapping[str, int],
    known: Mapping[Axis, Range],
    limit: int = BLOCK_POINTS,
) -> Iterator[dict[Axis, Range]]:
    """Ranges of `axes` that together cover them, with at most `limit` points each counting all of
    `others`, of which the ranges of some may be `known`.

    The first axes are cut first, down to one value each where it must be.
    """
    extents = {a: evaluate(a.extent, sizes) for a in dict.fromkeys((*axes, *others))}
    extents |= {a: max(1, high) for a, (_, high) in known.items() if a in others}
    points = math.prod(extents.values())
    cuts: list[list[tuple[Axis, Range]]] = []
    for a in axes:
        if points <= limit or a in others:
            continue
        n = extents[a]
        pieces = min(n, -(-points // limit))
        step = -(-n // pieces)
        points = points // n * step
        cuts.append([(a, (k, min(n, k + step))) for k in range(0, n, step)])
    for ranges in cartesian(*cuts):
        yield dict(ranges)


# -- stores --------------------------------------------------------------------------------------


def write(
    name: str,
    target: Tensor,
    at: Sequence[Tensor],
    value: Tensor,
    accumulate: str | None,
    mask: Tensor | None,
) -> None:
    """``target[at] (accumulate)= value`` at every point where `mask` holds; all arguments of one
    shape.
    """
    value, at = value.reshape(-1), [i.reshape(-1) for i in at]
    if mask is not None:
        keep = mask.reshape(-1)
        value, at = value[keep], [i[keep] for i in at]
    in_bounds(name, at, target.shape, None)
    if value.numel() == 0:
        return
    if accumulate is None:
        if at:
            target.index_put_(tuple(at), value)
        else:
            target.copy_(value[-1])
        return
    flat = torch.zeros_like(value, dtype=torch.int64)
    for i, n in zip(at, target.shape, strict=True):
        flat = flat * n + i
    kind = {"sum": "sum", "prod": "prod", "max": "amax", "min": "amin"}[accumulate]
    whole = target.reshape(-1).clone()
    if whole.dtype == torch.bool:
        whole = whole.to(torch.uint8)
        kind = {"sum": "amax", "prod": "amin"}.get(kind, kind)
    whole.scatter_reduce_(0, flat, value.to(whole.dtype), kind, include_self=True)
    target.copy_(whole.to(target.dtype).view(target.shape))


def allocate(layout: Layout, sizes: Mapping[str, int]) -> Tensor:
    """A zeroed tensor of the layout."""
    shape, strides, offset = (
        [evaluate(i, sizes) for i in part]
        for part in (layout.shape, layout.strides, (layout.offset,))
    )
    span = (
        1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
    )
    flat = torch.zeros(offset[0] + span, dtype=TO_TORCH[layout.dtype], device=layout.device)
    return flat.as_strided(shape, strides, offset[0])


# -- programs ------------------------------------------------------------------------------------


def run_program(p: Program, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of `p`. Inputs that the program mutates are mutated."""
    run = Execution(p, inputs)
    for d in p.defs:
        run.define(d)
    return [run.output(o) for o in p.outputs]


def input_sizes(p: Program, inputs: Sequence[Any]) -> dict[str, int]:
    """Sizes that the inputs tell; those that library calls decide come later."""
    out: dict[str, int] = {}
    for sym, (kind, where, dim) in p.sizes:
        if kind == "int":
            out[sym.name] = int(inputs[where])
        elif kind == "shape":
            out[sym.name] = int(inputs[where].shape[dim])
        elif kind == "stride":
            out[sym.name] = int(inputs[where].stride(dim))
    computed_sizes(p, out)
    return out


def computed_sizes(p: Program, known: dict[str, Any]) -> None:
    """Adds the sizes, and other numbers, that are computed from known ones. Raises what the program
    asserts of them and does not hold."""
    modules = {"math": math, "torch": torch}
    for sym, (kind, where, _) in p.sizes:
        if kind == "expr" and names_in(str(where)) <= known.keys():
            number = eval(str(where), modules, known)
            known[sym.name] = number if isinstance(number, float) else int(number)
    for c in p.checks:
        if names_in(c.condition) <= known.keys() and not eval(c.condition, modules, known):
            raise RuntimeError(c.message)


class Execution:
    """One execution: tensors by name and sizes by name, growing with each definition."""

    def __init__(self, p: Program, inputs: Sequence[Any]) -> None:
        self.program, self.inputs = p, inputs
        self.sizes = input_sizes(p, inputs)
        self.tensors: dict[str, Tensor] = {}

    def define(self, d: Any) -> None:
        if isinstance(d, Input):
            self.tensors[d.name] = self._checked(d.name, d.layout, self.inputs[d.position])
        elif isinstance(d, Constant):
            stored = self.program.constants
            self.tensors[d.name] = self._checked(
                d.name, d.layout, stored.get(d.name, stored.get(d.digest))
            )
        elif isinstance(d, Extern):
            self._call(d)
        else:
            assert isinstance(d, Compute)
            compute(d, self.tensors, self.sizes)

    def _checked(self, name: str, layout: Layout, t: Tensor) -> Tensor:
        shape = tuple(evaluate(i, self.sizes) for i in layout.shape)
        if t.shape != shape and [n for n in t.shape if n != 1] == [n for n in shape if n != 1]:
            # Torch 2.11 traces gradients of norms with a dimension of one element more.
            t = t.reshape(shape)
        assert tuple(t.shape) == shape, f"{name} has shape {tuple(t.shape)}, its layout {shape}"
        assert t.dtype == TO_TORCH[layout.dtype], f"{name} is {t.dtype}, its layout {layout.dtype}"
        return t.detach()

    def _view(self, v: ViewArg | Output, t: Tensor) -> Tensor:
        shape, strides = ([evaluate(i, self.sizes) for i in part] for part in (v.shape, v.strides))
        return t.as_strided(shape, strides, t.storage_offset() + evaluate(v.offset, self.sizes))

    def argument(self, x: Any) -> Any:
        if isinstance(x, ViewArg):
            return self._view(x, self.tensors[x.tensor])
        if isinstance(x, Index):
            return evaluate(x, self.sizes)
        if isinstance(x, Given):
            return self.inputs[x.position]
        if isinstance(x, (tuple, list)):
            return [self.argument(y) for y in x]
        # An object that lowering keeps in `callables` (graphs, kernels) is referred to by its key.
        key = getattr(x, "key", None)
        return self.program.callables[key] if isinstance(key, str) else x

    def _call(self, d: Extern) -> None:
        f = self.program.callables.get(d.op) or resolve(d.op)
        out = f(*(self.argument(a) for a in d.args), **{k: self.argument(v) for k, v in d.kwargs})
        results = tree_leaves(out)
        for k, sym in enumerate(d.sizes):
            if sym is not None:
                number: Any = results[k]
                if not isinstance(number, float):  # a number that is returned may be one
                    number = int(number)
                self.sizes[sym.name] = number
        computed_sizes(self.program, self.sizes)
        for k, name in enumerate(d.names):
            if name is None:
                continue
            for sym, (kind, tensor, dim) in self.program.sizes:
                if kind == "result" and tensor == name:
                    self.sizes[sym.name] = int(results[k].shape[dim])
            computed_sizes(self.program, self.sizes)
            layout, t = d.layouts[k], results[k]
            assert layout is not None
            t = self._checked(name, layout, t)
            strides = tuple(evaluate(s, self.sizes) for s in layout.strides)
            shared = d.aliases[k] if d.aliases else None
            if shared is None and any(
                a != b and n > 1 for a, b, n in zip(t.stride(), strides, t.shape, strict=True)
            ):
                t = allocate(layout, self.sizes).copy_(t)
            self.tensors[name] = t

    def output(self, o: Output) -> Any:
        if o.tensor is None:
            return self.argument(o.value)
        t = self.tensors[o.tensor]
        if o.dtype is not None and TO_TORCH.get(o.dtype, getattr(torch, o.dtype, None)) != t.dtype:
            t = t.view(TO_TORCH.get(o.dtype) or getattr(torch, o.dtype))
        return self._view(o, t)


def resolve(op: str) -> Callable[..., Any]:
    """The operator under torch.ops: "aten.mm.default"."""
    operator: Any = torch.ops
    for part in op.split("."):
        operator = getattr(operator, part)
    return operator


def compute(d: Compute, tensors: dict[str, Tensor], sizes: Mapping[str, int]) -> None:
    """Adds the tensor that a `Compute` defines."""
    roots = [d.body] + ([d.mask] if d.mask is not None else [])
    if d.target is None:
        tensors[d.name] = allocate(d.layout, sizes)
    else:
        tensors[d.name] = tensors[d.target]
    target = tensors[d.name]
    results = []
    inner = bound_axes(roots)
    known = longest(roots, sizes, tensors, d.layout.device)
    for ranges in blocks(d.axes, inner, sizes, known):
        if known:
            ranges |= longest(roots, sizes, tensors, d.layout.device, ranges)
        ev = Evaluator((*d.axes, *inner), sizes, tensors, d.layout.device, ranges)
        results.append(points(ev, d.axes, d.body, d.store_index, d.mask))
    if d.unique:
        once(d.name, [(at, mask) for _, at, mask in results])
    for (
        value,
        at,
        mask,
    ) in results:  # after all reads: what is overwritten may be read by other points
        write(d.name, target, at, value, d.accumulate, mask)


def once(name: str, stores: Sequence[tuple[Sequence[Tensor], Tensor | None]]) -> None:
    """Raises where two points that store have one place although the definition says that none
    have."""
    all_of = [torch.stack([i.reshape(-1) for i in at], -1) for at, _ in stores]
    masks = [mask for _, mask in stores]
    stored_points = [
        p if m is None else p[m.reshape(-1)] for p, m in zip(all_of, masks, strict=True)
    ]
    places = torch.cat(stored_points)
    if len(torch.unique(places, dim=0)) < len(places):
        raise ValueError(f"two points of {name} are stored at one place, which is said not to be")


def points(
    ev: Evaluator, axes: Sequence[Axis], body: Expr, index: Sequence[Index], mask: Expr | None
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Value, position and mask of every point of `axes` in the evaluator's block, each of the
    same shape.
    """
    shape = [1] * len(ev.dims)
    for a in axes:
        shape[ev.dims[a]] = ev.count(a)
    value = ev.value(body).expand(shape)
    at = [ev.index(i).expand(shape) for i in index]
    return value, at, None if mask is None else ev.value(mask).expand(shape)


__all__ = [
    "BLOCK_POINTS",
    "FLOATS",
    "INTS",
    "Evaluator",
    "run_program",
]
