"""Kernels that are alike share their code.

In: a `Kernel`. Out: its structure: equal for kernels that differ only in the names of tensors,
registers and axes. A model of many equal blocks is then generated and built once.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Div, Index, MinMax, Mod, Sym, Value
from deuteron.ir.nest import Nest as ContractionNest
from deuteron.ir.program import Layout
from deuteron.schedule.alike import restored
from deuteron.schedule.kernel import Kernel, Nest, Reduce, Store
from deuteron.schedule.tiling import Tiling


def tensors_of(kernel: Kernel) -> tuple[str, ...]:
    """Tensors in the order in which code generators take them."""
    return tuple(dict(kernel.reads) | dict(kernel.writes))


def structure(kernel: Kernel) -> Hashable:
    """What decides the code of a kernel."""
    return _Structure(kernel).key


class _Structure:
    """Numbers names in the order in which they appear."""

    def __init__(self, kernel: Kernel) -> None:
        self.tensors = {n: k for k, n in enumerate(tensors_of(kernel))}
        self.locals: dict[str, int] = {}
        self.axes: dict[Axis, int] = {}
        self.exprs: dict[Expr, int] = {}
        self.nodes: list[Hashable] = []
        self.indices: dict[Index, Hashable] = {}
        self.layouts = dict(kernel.reads) | dict(kernel.writes)
        reads = tuple(self.tensors[n] for n, _ in kernel.reads)
        writes = tuple(self.tensors[n] for n, _ in kernel.writes)
        layouts = tuple(self.layout(lay) for lay in self.layouts.values())
        nests = tuple(self.nest(n) for n in kernel.nests)
        if kernel.contraction is not None:
            nests += (self.contraction(*kernel.contraction),)
        names = (kernel.overwrites, kernel.overwritten)
        over = tuple(frozenset(self.tensors[n] for n in x) for x in names)
        self.key: Hashable = (
            *(kernel.device, kernel.barriers, over, reads, writes, layouts, nests),
            *self.nodes,
        )

    def layout(self, lay: Layout) -> Hashable:
        parts = (*lay.shape, *lay.strides, lay.offset)
        return lay.dtype, tuple(self.index(i) for i in parts)

    def nest(self, nest: Nest) -> Hashable:
        self.locals = {n: k for k, n in enumerate(nest.locals())}
        self.exprs = {}  # registers of another nest may have the same names
        axes = (self.list(nest.parallel), self.list(nest.reduced), self.list(nest.group_axes))
        row_split = (
            None if nest.row_split is None else (self.axis(nest.row_split[0]), nest.row_split[1])
        )
        stmts: list[Hashable] = []
        for s in nest.stmts:
            if isinstance(s, Store):
                mask = None if s.mask is None else self.expr(s.mask)
                at = tuple(self.index(i) for i in s.index)
                how = (self.tensors[s.tensor], at, s.level, s.accumulate, mask)
                stmts.append(("store", how, self.expr(s.value)))
            else:
                name = self.tensors.get(s.name)
                what = (s.partial, s.grouped) if isinstance(s, Reduce) else None
                stmts.append((type(s).__name__, s.kind, what, name, self.expr(s.body)))
        return axes, row_split, tuple(stmts)

    def contraction(self, nest: ContractionNest, tiling: Tiling) -> Hashable:
        """A nest's axes are canonical: it is its own structure, but for names."""
        results = {n: f"%{k}" for k, n in enumerate(nest.reductions)}
        names = results | {n: f"%%{k}" for n, k in self.tensors.items()}
        return restored(nest, names.__getitem__), tiling

    def list(self, axes: tuple[Axis, ...]) -> Hashable:
        return tuple(self.axis(a) for a in axes)

    def axis(self, a: Axis) -> Hashable:
        number = self.axes.setdefault(a, len(self.axes))
        return number, self.index(a.extent)

    def expr(self, root: Expr) -> int:
        if root in self.exprs:
            return self.exprs[root]
        for n in root.walk():
            if n not in self.exprs:
                args = tuple(self.exprs[a] for a in n.args)
                node = (n.op, n.dtype, self.value(n.attr, n.op == "load"), args)
                self.exprs[n] = len(self.nodes)
                self.nodes.append(node)
        return self.exprs[root]

    def value(self, x: Any, load: bool = False) -> Hashable:
        if load:
            name, indices, fill = x
            if name in self.locals and name not in self.tensors:
                return "register", self.locals[name], repr(fill)
            return self.tensors[name], tuple(self.index(i) for i in indices), repr(fill)
        if isinstance(x, Index):
            return self.index(x)
        if isinstance(x, Axis):
            return self.axis(x)
        if isinstance(x, Expr):
            return self.expr(x)
        if isinstance(x, tuple):
            return tuple(self.value(y) for y in x)
        return type(x).__name__, repr(x)

    def index(self, i: Index) -> Hashable:
        if i.value is not None:
            return i.value
        if any(isinstance(a, Value) for a in i.atoms()):
            return self.terms(i)  # numbers of expressions are those of the nest
        terms = self.indices.get(i)
        if terms is None:
            terms = self.indices[i] = self.terms(i)
        return terms

    def terms(self, i: Index) -> Hashable:
        # Terms are ordered by names, which do not count here.
        return frozenset((frozenset(_counted([self.atom(a) for a in m])), c) for m, c in i.terms)

    def atom(self, a: Any) -> Hashable:
        if isinstance(a, Sym):
            return a
        if isinstance(a, Axis):
            return "axis", self.axis(a)
        if isinstance(a, (Div, Mod)):
            return type(a).__name__, self.index(a.num), self.index(a.den)
        if isinstance(a, MinMax):
            return a.kind, frozenset((self.index(a.a), self.index(a.b)))
        assert isinstance(a, Value)
        return "loaded", self.expr(a.expr)


def _counted(xs: list[Hashable]) -> list[Hashable]:
    """Equal factors of a product, numbered."""
    return [(x, xs[:k].count(x)) for k, x in enumerate(xs)]


__all__ = ["structure", "tensors_of"]
