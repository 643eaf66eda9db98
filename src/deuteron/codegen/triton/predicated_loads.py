"""Elements of rows that are read for nothing: what comparisons of positions do not choose.

In: `Loops`. Out: the same, in which a load all of whose uses are values that a comparison of
positions chooses (a causal mask, a triangle) is masked by that. All elements of 16 bytes are read
or none, so that they still come at once: the mask is the comparison's for the one that is nearest.
H200, softmax of 8 x 16 x 2048 x 2048 scores of bf16, of which each row has those up to its own
place, us: 504 and 396.

Only where the places in a row are a dimension of their own: of a position that is computed Triton
3.6 does not find that it is the same for 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from deuteron.codegen.loops import Loops, Statement, Write, roots_of, stride, unique_nodes
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, as_position, children
from deuteron.ir.index import Axis, Index, const
from deuteron.ir.operations import ITEMSIZE
from deuteron.schedule.kernel import Reduce

VECTOR_BYTES = 16
NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}
POSITION_OPS = ("index", "literal")


def predicate_loads(loops: Loops) -> Loops:
    """The nest in which what a comparison does not choose is not read."""
    if len(loops.reduced) != 1 or not any(isinstance(p, Reduce) for p in loops.statements):
        return loops
    nodes = unique_nodes(root for p in loops.statements for root in roots_of(p))
    users: dict[Expr, list[Expr]] = {}
    for n in nodes:
        for c in children(n):
            users.setdefault(c, []).append(n)
    roots = {root for p in loops.statements for root in roots_of(p)}
    table: dict[Expr, Expr] = {}
    for n in nodes:
        if n.op != "where":
            continue
        for value, other, keep in ((n.args[1], n.args[2], True), (n.args[2], n.args[1], False)):
            if other.op != "literal":
                continue
            for load in value.loads():
                if load.args or not load.attr[1] or load in table:
                    continue
                mask = _mask(n.args[0], keep, load, loops)
                if mask is not None and _used_only_by(load, n, value, users, roots):
                    name, index, _ = load.attr
                    table[load] = E.load(name, index, load.dtype, mask, 0)
    return (
        replace(loops, statements=tuple(_with(p, table) for p in loops.statements))
        if table
        else loops
    )


def _with(p: Statement, table: dict[Expr, Expr]) -> Statement:
    if isinstance(p, Write):
        others = tuple(v.substitute({}, table) for v in p.others)
        mask = None if p.mask is None else p.mask.substitute({}, table)
        return replace(p, value=p.value.substitute({}, table), others=others, mask=mask)
    return replace(p, body=p.body.substitute({}, table))


def _used_only_by(
    load: Expr, where: Expr, value: Expr, users: dict[Expr, list[Expr]], roots: Iterable[Expr]
) -> bool:
    """Whether a load is used for nothing but the value that a choice may not take."""
    inside, todo = set(value.walk()), [load]
    while todo:
        n = todo.pop()
        if n in roots:
            return False
        for u in users.get(n, []):
            if u is where:
                if n is not value or where.args.count(n) > 1:
                    return False
            elif u not in inside:
                return False
            else:
                todo.append(u)
    return True


def _mask(condition: Expr, keep: bool, load: Expr, loops: Loops) -> Expr | None:
    """Where an element may be chosen together with one of its 16 bytes; None where that is not
    known from positions."""
    while condition.op == "logical_not":
        (condition,), keep = condition.args, not keep
    if condition.op not in NEGATED or any(a.op not in POSITION_OPS for a in condition.args):
        return None
    op = condition.op if keep else NEGATED[condition.op]
    address, count = load.attr[1][0], VECTOR_BYTES // ITEMSIZE[load.dtype]
    (inner,) = loops.reduced
    if stride(address, inner) != 1 or ((address - inner.index) % count).value != 0:
        return None
    left, right = (as_position(a) for a in condition.args)
    nearest = _nearest(left - right, inner, count, op in ("lt", "le"))
    return None if nearest is None else E.op(op, E.index_value(nearest), E.literal(0, "i64"))


def _nearest(difference: Index, axis: Axis, count: int, least: bool) -> Index | None:
    """The difference at the one of `count` elements where it is least, or largest."""
    step = difference.coefficient(axis)
    if step is None or step.value not in (1, -1):
        return None
    rest = difference - axis.index * step
    if axis in rest.axes():
        return None
    first = axis.index // count * count
    return rest + (first if (step.value == 1) is least else first + const(count - 1)) * step


__all__ = ["predicate_loads"]
