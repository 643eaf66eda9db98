"""Bounds checks of indices that come from tensors, as eager has them.

In: a nest. Out: the nest in which every dimension that a loaded value indexes goes through a node
``check(value[, mask])`` with the dimension's extent as its attribute; the node's value is its first
argument. The writer asserts ``0 <= value < extent`` there, before the access, wherever the mask
holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deuteron.ir.expr import Expr, cast, index_value, load, rebuild
from deuteron.ir.index import Index, Value, atom, in_range, substitute
from deuteron.ir.program import Layout
from deuteron.schedule.kernel import Nest, Stmt, Store


def with_checks(nest: Nest, layouts: Mapping[str, Layout], wanted: bool = True) -> Nest:
    """The nest with checked accesses; the same nest where no loaded value is an index. Where checks
    are not `wanted`, those that the program itself has are left out."""
    loaded = any(isinstance(a, Value) for i in _indices(nest) for a in i.atoms())
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
                index = _checked(index, layouts[name], mask) if wanted else index
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
            index = _checked(index, layouts[s.tensor], mask) if wanted else index
            stmts.append(replace(s, index=index, value=visit(s.value), mask=mask))
        else:
            stmts.append(replace(s, body=visit(s.body)))
    return replace(nest, stmts=tuple(stmts))


def _indices(nest: Nest) -> list[Index]:
    out = [i for e in nest.exprs() for i in e.indices()]
    return out + [i for s in nest.stmts if isinstance(s, Store) for i in s.index]


def _checked(index: tuple[Index, ...], layout: Layout, mask: Expr | None) -> tuple[Index, ...]:
    out = []
    for i, extent in zip(index, layout.shape, strict=True):
        if any(isinstance(a, Value) for a in i.atoms()) and not in_range(i, extent):
            only = next(iter(i.terms))[0] if len(i.terms) == 1 and i.terms[0][1] == 1 else ()
            plain = (
                only[0].expr if len(only) == 1 and isinstance(only[0], Value) else index_value(i)
            )
            args = (cast(plain, "i64"),) if mask is None else (cast(plain, "i64"), mask)
            i = atom(Value(Expr("check", "i64", args, extent)))
        out.append(i)
    return tuple(out)
