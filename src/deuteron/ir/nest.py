"""Nests: statements over axes. What contractions, and reductions inside one another, are made of.

    Nest(axes, statements, cuts)
      Reduce(name, kind, over, body)   `over`: a set of axes. The value lives on axes(body) - over
      Store(tensor, index, value)      once per point of axes(index) and axes(value)
      Cut(axis, hidden, end, upper)    means nothing: what need not be walked

    axes(load from memory) = the axes in its index;  axes(load of a result) = where that lives

No statement has a level: where a value lives follows from what it reads. A load of a result names
the axes on which it lives, in the order of the nest, so that a nest reads like a program:

    s[i, j] = sum[d](q[i, d] * k[j, d])
    m[i] = max[j](s[i, j])
    l[i] = sum[j](exp(s[i, j] - m[i]))
    o[i, e] = sum[j](exp(s[i, j] - m[i]) * v[j, e])
    out[i, e] = o[i, e] / l[i]

A contraction is a predicate (`contraction`): a sum of a product of two factors, each with an axis
that the other lacks. `operands` is the dtype to which its factors are rounded before they are
multiplied, where the traced program says so: tensor cores take them in it. Factors of f32 are
"tf32" where the user allows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from deuteron.ir.expr import Expr, own_flops
from deuteron.ir.index import Axis, Index, Sym, evaluate
from deuteron.ir.reference import BLOCK_POINTS, Evaluator, blocks, bound_axes, points
from deuteron.ir.reference_ops import TO_TORCH, reduce


@dataclass(frozen=True)
class Reduce:
    name: str
    kind: str  # a key of ir.operations.REDUCTIONS
    over: tuple[Axis, ...]
    body: Expr
    operands: str | None = None  # of a contraction: the dtype of its factors, or "tf32"

    @property
    def factors(self) -> str:
        """The dtype of the factors as they are kept."""
        return "f32" if self.operands in (None, "tf32") else str(self.operands)


@dataclass(frozen=True)
class Store:
    tensor: str
    index: tuple[Index, ...]
    value: Expr


Statement = Reduce | Store


@dataclass(frozen=True)
class Contraction:
    """``sum over `over` of a * b``: axes that only a has (m), only b (n), both (`batch`)."""

    a: Expr
    b: Expr
    m: tuple[Axis, ...]
    n: tuple[Axis, ...]
    batch: tuple[Axis, ...]
    over: tuple[Axis, ...]


@dataclass(frozen=True)
class Cut:
    """Reductions that get nothing where `hidden` holds get nothing along `axis` from `end` on
    (`upper`), or before it: a load from memory (i64)."""

    axis: Axis
    hidden: Expr
    end: Expr
    upper: bool


@dataclass(frozen=True)
class Nest:
    axes: tuple[Axis, ...]
    statements: tuple[Statement, ...]
    cuts: tuple[Cut, ...] = ()

    @cached_property
    def reductions(self) -> Mapping[str, Reduce]:
        return {s.name: s for s in self.statements if isinstance(s, Reduce)}

    @cached_property
    def stores(self) -> tuple[Store, ...]:
        return tuple(s for s in self.statements if isinstance(s, Store))

    @cached_property
    def contractions(self) -> Mapping[str, Contraction]:
        """Those of its reductions that are, by name."""
        found = {n: self.contraction(s) for n, s in self.reductions.items() if s.operands}
        return {n: c for n, c in found.items() if c is not None}

    @cached_property
    def unit(self) -> str:
        """What multiplies: the slowest of the units that its products need (`DeviceSpec.peak`)."""
        kinds = {self.reductions[n].operands for n in self.contractions}
        return next((k for k in ("f32", "tf32", "f16", "bf16") if k in kinds), "f32")

    def axes_of(self, e: Expr) -> tuple[Axis, ...]:
        """Where a value lives, in the order of the nest."""
        used = e.axes()
        return tuple(a for a in self.axes if a in used)

    def work(self, e: Expr) -> list[tuple[float, set[Axis]]]:
        """FLOPs of a value's parts, and where these live: what lacks a loop is computed before."""
        if e not in self._work:
            found: dict[tuple[Axis, ...], float] = {}
            for n in e.walk():
                if each := own_flops(n):
                    axes = self.axes_of(n)
                    found[axes] = found.get(axes, 0.0) + each
            self._work[e] = [(each, set(axes)) for axes, each in found.items()]
        return self._work[e]

    @cached_property
    def _work(self) -> dict[Expr, list[tuple[float, set[Axis]]]]:
        return {}

    def lives(self, s: Statement) -> tuple[Axis, ...]:
        if isinstance(s, Reduce):
            return tuple(a for a in self.axes_of(s.body) if a not in s.over)
        used = s.value.axes().union(*(i.axes() for i in s.index))
        return tuple(a for a in self.axes if a in used)

    def contraction(self, s: Reduce) -> Contraction | None:
        """A reduction as a contraction; None where it is none."""
        if s.kind != "sum" or s.body.op != "mul":
            return None
        a, b = s.body.args
        left, right = set(self.axes_of(a)), set(self.axes_of(b))
        if not set(s.over) <= left & right:
            return None
        m = tuple(x for x in self.axes if x in left - right)
        n = tuple(x for x in self.axes if x in right - left)
        both = tuple(x for x in self.axes if x in (left & right) - set(s.over))
        return Contraction(a, b, m, n, both, s.over) if m and n else None

    def syms(self) -> set[Sym]:
        """The sizes that are known at run time only."""
        found = [a.extent for a in self.axes]
        for s in self.statements:
            found += [i for e in roots(s) for i in e.indices()]
            found += s.index if isinstance(s, Store) else ()
        return {s for i in found for s in i.syms()}

    def tensors(self) -> tuple[dict[str, None], dict[str, None]]:
        """Tensors in memory that the nest reads and writes."""
        results = self.reductions
        reads: dict[str, None] = {}
        for s in self.statements:
            for n in roots(s):
                reads.update((x.attr[0], None) for x in n.loads() if x.attr[0] not in results)
        reads.update((c.end.attr[0], None) for c in self.cuts)
        return reads, {s.tensor: None for s in self.stores}


def roots(s: Statement) -> tuple[Expr, ...]:
    return (s.body,) if isinstance(s, Reduce) else (s.value,)


# -- what it means ---------------------------------------------------------------------------------


def run_nest(
    nest: Nest, tensors: Mapping[str, Tensor], sizes: Mapping[str, int], device: str
) -> Iterator[tuple[str, list[Tensor], Tensor]]:
    """The reference executor: tensor, positions and values of every store, in blocks of the axes
    that nothing reduces, so that no value has much more than `BLOCK_POINTS` elements. What does not
    live on these axes is computed, and stored, by each block anew."""
    axes = (*nest.axes, *bound_axes(e for s in nest.statements for e in roots(s)))
    reduced = [a for s in nest.reductions.values() for a in s.over]
    count = {a: evaluate(a.extent, sizes) for a in axes}
    widest = max(math.prod(count[a] for a in space) for space in _spaces(nest))
    limit = BLOCK_POINTS * max(1, math.prod(count.values())) // max(1, widest)
    free = [a for a in nest.axes if a not in reduced]
    for ranges in blocks(free, axes[len(nest.axes) :] + tuple(reduced), sizes, {}, limit):
        evaluator = Evaluator(axes, sizes, tensors, device, ranges)
        for s in nest.statements:
            if isinstance(s, Store):
                value, at, _ = points(evaluator, nest.lives(s), s.value, s.index, None)
                yield s.tensor, at, value
            else:
                evaluator.locals[s.name] = _reduced(s, evaluator)


def _spaces(nest: Nest) -> Iterator[tuple[Axis, ...]]:
    """Axes of the tensors that the executor makes."""
    for s in nest.statements:
        (root,) = roots(s)
        product = isinstance(s, Reduce) and s.operands is not None
        yield nest.lives(s)
        yield from map(nest.axes_of, root.args if product else (root,))


def _reduced(s: Reduce, evaluator: Evaluator) -> Tensor:
    """A result; of a contraction, of factors in the dtype that the statement says."""
    dims = [evaluator.dims[a] for a in s.over]
    if s.operands is None:
        full = evaluator.spread(evaluator.value(s.body), s.over)
        return reduce(s.kind, full, dims, s.body.dtype)
    kind = TO_TORCH[s.factors]
    a, b = (evaluator.value(x).to(kind).to(torch.float64) for x in s.body.args)
    every = list(range(a.dim()))
    total = torch.einsum(a, every, b, every, [d for d in every if d not in dims])
    for d in sorted(dims):
        total = total.unsqueeze(d)
    return total.to(TO_TORCH[s.body.dtype])


__all__ = ["Contraction", "Cut", "Nest", "Reduce", "Statement", "Store", "roots", "run_nest"]
