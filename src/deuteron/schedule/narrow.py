"""Tensors that are the same along a dimension are computed without it.

In: a `Program`. Out: the same, where what is computed for all places of an axis on which it does
not depend (on an expanded tensor, as the coordinates of a sampled image are on its channels) is
computed for one, which its readers take.

Tensors that are needed in memory (outputs, library calls, targets) keep their definitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, const
from deuteron.ir.program import Compute, Extern, Program, contiguous, tensors_read
from deuteron.schedule.group import bound_axes


def narrow(program: Program) -> Program:
    kept = {o.tensor for o in program.outputs}
    for d in program.defs:
        if isinstance(d, Extern):
            kept.update((*tensors_read(d), *d.mutates))
        elif isinstance(d, Compute) and d.target is not None:
            kept.update((d.name, d.target))
    alike: dict[str, frozenset[int]] = {}  # tensor -> dimensions of which it has one place now
    defs = []
    for d in program.defs:
        if isinstance(d, Compute):
            d = _reading(d, alike)
            if d.name not in kept and d.index is None and d.body.op != "literal":
                free = d.body.axes().union(bound_axes(d))  # a scan of equal elements is none
                same = frozenset(
                    k for k, a in enumerate(d.axes) if a not in free and a.extent.value != 1
                )
                if same and (free or d.body.loads()):
                    alike[d.name], d = same, _without(d, same)
        defs.append(d)
    if not alike:
        return program
    nodes = {t: n for t, n in program.nodes.items() if t not in alike}
    return replace(program, defs=tuple(defs), nodes=nodes)


def _without(c: Compute, same: frozenset[int]) -> Compute:
    axes = tuple(Axis(a.name, const(1)) if k in same else a for k, a in enumerate(c.axes))
    shape = tuple(a.extent for a in axes)
    return replace(c, axes=axes, layout=contiguous(shape, c.layout.dtype, c.layout.device))


def _reading(c: Compute, alike: Mapping[str, frozenset[int]]) -> Compute:
    """The computation with reads at the one place of what has one."""
    index = c.index
    if index is not None:
        index = tuple(E.as_position(_read(E.index_value(i), alike)) for i in index)
    mask = _read(c.mask, alike) if c.mask is not None else None
    return replace(c, body=_read(c.body, alike), index=index, mask=mask)


def _read(root: Expr, alike: Mapping[str, frozenset[int]]) -> Expr:
    while True:
        reads = (n for n in root.loads() if n.attr[0] in alike)
        left = {n for n in reads if any(n.attr[1][k].value != 0 for k in alike[n.attr[0]])}
        table = {n: _at_one(n, alike[n.attr[0]]) for n in left if not left & {*n.loads()} - {n}}
        if not table:
            return root
        root = root.substitute({}, table)


def _at_one(n: Expr, same: frozenset[int]) -> Expr:
    name, index, fill = n.attr
    place = tuple(const(0) if k in same else i for k, i in enumerate(index))
    return E.load(name, place, n.dtype, *n.args, *([fill] if n.args else []))


__all__ = ["narrow"]
