"""One element of a tensor, where positions that other tensors hold must stay checked.

In: a body over axes, and the position at which it is read. Out: the body there. Generated code
checks a position that is loaded where memory is read at it. Where no read of the body is at that
very position of a dimension of that extent (a slice, an expanded dimension, numbers of a pattern),
a node ``check`` holds the position, and where the body folds to what has no use for it, a choice
that is always the same one keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deuteron.base.memo import MEMO
from deuteron.ir.expr import Expr, as_position, children, index_value, literal, op, own_indices
from deuteron.ir.index import Atom, Axis, Index, Value, in_range
from deuteron.ir.program import Layout

# What an expression holds, at any depth: nothing of the kind, reads at loaded positions, checks.
NOTHING, LOADED, CHECKS = range(3)
_HOLDS: dict[Expr, int] = MEMO.answers()


def element(
    axes: Sequence[Axis], body: Expr, index: Sequence[Index], layouts: Mapping[str, Layout]
) -> Expr:
    """`body` at `index`, one position for each of `axes`; `layouts` are those of what it reads."""
    table: dict[Atom, Index] = {a: i for a, i in zip(axes, index, strict=True) if i is not a.index}
    value = body.substitute(table) if table else body
    doubtful = {a: i for a, i in table.items() if isinstance(a, Axis) and _may_be_outside(a, i)}
    if not doubtful:
        return value
    held = {
        at
        for n in value.loads()
        if not n.args
        for at in zip(n.attr[1], layouts[n.attr[0]].shape, strict=True)
    }
    doubtful = {a: i for a, i in doubtful.items() if (i, a.extent) not in held}
    if not doubtful:
        return value
    kept = _kept(value)
    checks = {
        a: Expr("check", "i64", (_number(i),), a.extent)
        for a, i in doubtful.items()
        if not (in_range(i, a.extent) and kept.issuperset(_values(i)))
    }
    if not checks:
        return value
    value = body.substitute({**table, **{a: as_position(c) for a, c in checks.items()}})
    kept = _kept(value)
    zero, one = literal(0, value.dtype), literal(1, value.dtype)
    for c in checks.values():
        if c not in kept:  # what it gives is at least 0
            inside = op("ge", c, literal(0, "i64"))
            value = op("where", inside, value, one if value is zero else zero)
    return value


def _kept(value: Expr) -> set[Expr]:
    """What no folding of positions (a difference of two that are the same) removes."""
    kept: set[Expr] = set()
    stack = [value]
    while stack:
        node = stack.pop()
        if node not in kept and node.op != "index":
            kept.add(node)
            stack += children(node)
    return kept


def _may_be_outside(axis: Axis, i: Index) -> bool:
    """Whether a position that is loaded is not proven inside, or reads at such positions itself."""
    values = _values(i)
    return bool(values) and (not in_range(i, axis.extent) or any(map(holds, values)))


def _values(i: Index) -> list[Expr]:
    return [a.expr for a in i.atoms() if isinstance(a, Value)]


def holds(root: Expr) -> int:
    """`CHECKS`, `LOADED` or `NOTHING`; each node is looked at once."""
    if root not in _HOLDS:
        for node in root.walk(lambda n: n in _HOLDS):
            if node not in _HOLDS:
                own = LOADED if any(map(is_loaded, own_indices(node))) else NOTHING
                own = CHECKS if node.op == "check" else own
                _HOLDS[node] = max([own, *(_HOLDS[n] for n in children(node))])
    return _HOLDS[root]


def _number(i: Index) -> Expr:
    """A position as a number; one that is a value, as that."""
    if len(i.terms) == 1:
        (factors, c), *_ = i.terms
        if c == 1 and len(factors) == 1 and isinstance(factors[0], Value):
            return factors[0].expr
    return index_value(i)


def is_loaded(index: Index) -> bool:
    """Whether the index is made of loaded values."""
    return any(isinstance(a, Value) for a in index.atoms())


__all__ = ["CHECKS", "LOADED", "NOTHING", "element", "holds", "is_loaded"]
