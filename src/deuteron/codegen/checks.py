"""Bounds checks of indices that come from tensors, as eager has them.

In: a nest. Out: the nest in which every dimension that a loaded value indexes goes through a node
``check(value[, mask])`` with the dimension's extent as its attribute; the node's value is its first
argument where ``0 <= value < extent``. The writers see to that before the access, wherever the mask
holds: Triton asserts it, C++ reports the position and goes on with 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from deuteron.ir.elements import is_loaded
from deuteron.ir.expr import Expr, cast, index_value, literal, load, op, rebuild
from deuteron.ir.index import (
    Atom,
    Div,
    Index,
    MinMax,
    Mod,
    Value,
    atom,
    in_range,
    substitute,
)
from deuteron.ir.program import Layout
from deuteron.schedule.kernel import Nest, Stmt, Store


def as_arithmetic(index: Index) -> Expr:
    """An index of loaded values as arithmetic of 64 bits: an index of 32 bits would cut a loaded
    value, and 2**32 + 1 would be in range."""
    total: Expr | None = None
    for m, c in index.terms:
        term = literal(c, "i64") if c != 1 or not m else None
        for a in m:
            factor = _atom_as_arithmetic(a)
            term = factor if term is None else op("mul", term, factor)
        assert term is not None
        total = term if total is None else op("add", total, term)
    return literal(0, "i64") if total is None else total


def _atom_as_arithmetic(a: Atom) -> Expr:
    if isinstance(a, Value):
        return cast(a.expr, "i64")
    if isinstance(a, (Div, Mod)) and (is_loaded(a.num) or is_loaded(a.den)):
        kind = "floordiv" if isinstance(a, Div) else "remainder"
        return op(kind, as_arithmetic(a.num), as_arithmetic(a.den))
    if isinstance(a, MinMax) and (is_loaded(a.a) or is_loaded(a.b)):
        return op(
            "minimum" if a.kind == "min" else "maximum", as_arithmetic(a.a), as_arithmetic(a.b)
        )
    return index_value(atom(a))


def with_checks(
    nest: Nest,
    layouts: Mapping[str, Layout],
    wanted: bool = True,
    value: Callable[[Index], Expr] = as_arithmetic,
) -> Nest:
    """The nest with checked accesses; the same nest where no loaded value is an index. Where checks
    are not `wanted`, those that the program itself has are left out. `value` makes an index an
    expression."""
    loaded = any(is_loaded(i) for i in _indices(nest))
    own = any(n.op == "check" for e in nest.exprs() for n in e.walk())
    if not (loaded and wanted or own and not wanted):
        return nest
    done: dict[Expr, Expr] = {}
    names = nest.locals()

    def visit(root: Expr) -> Expr:
        for node in root.walk():
            if node in done:
                continue
            args = tuple(done[a] for a in node.args)
            new = rebuild(node, args, {}, done)
            if node.op == "check" and not wanted:
                new = args[0]
            if node.op == "load" and node.attr[0] not in names:
                name, index, fill = new.attr
                mask = args[0] if args else None
                index = _checked(index, layouts[name], mask, value) if wanted else index
                new = load(name, index, node.dtype, mask, fill if fill is not None else 0)
            done[node] = new
        return done[root]

    def move(index: Index) -> Index:
        return substitute(
            index, {a: atom(Value(visit(a.expr))) for a in index.atoms() if isinstance(a, Value)}
        )

    stmts: list[Stmt] = []
    for s in nest.stmts:
        if isinstance(s, Store):
            mask = visit(s.mask) if s.mask is not None else None
            index = tuple(move(i) for i in s.index)
            index = _checked(index, layouts[s.tensor], mask, value) if wanted else index
            stmts.append(replace(s, index=index, value=visit(s.value), mask=mask))
        else:
            stmts.append(replace(s, body=visit(s.body)))
    return replace(nest, stmts=tuple(stmts))


def _indices(nest: Nest) -> list[Index]:
    out = [i for e in nest.exprs() for i in e.indices()]
    return out + [i for s in nest.stmts if isinstance(s, Store) for i in s.index]


def _checked(
    index: tuple[Index, ...],
    layout: Layout,
    mask: Expr | None,
    value: Callable[[Index], Expr],
) -> tuple[Index, ...]:
    out = []
    for i, extent in zip(index, layout.shape, strict=True):
        if is_loaded(i) and not in_range(i, extent):
            args = (value(i),) if mask is None else (value(i), mask)
            i = atom(Value(Expr("check", "i64", args, extent)))
        out.append(i)
    return tuple(out)
