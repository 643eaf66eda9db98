"""Short reductions written out.

In: `loops.Loops`. Out: the same in which

* a nest that reduces a few static elements, with neighbouring rows side by side in memory (a
  pooling window), has no reduced axes: a reduction is the tree of its terms, a point store is one
  store per element;
* a reduction inside an expression over a few static elements is the tree of its terms. Longer ones,
and
  those that end where each row says, stay nodes, which the writer makes loops of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deuteron.codegen.loops import Loops, Rewriter, Write, stride
from deuteron.codegen.unrolled import pairwise, points_of, position_of, unrolled
from deuteron.ir.dynamic_bounds import end_of
from deuteron.ir.expr import Expr, index_value, literal
from deuteron.ir.index import Axis, hint
from deuteron.ir.operations import REDUCTIONS, extreme
from deuteron.schedule.kernel import Reduce

MAX_UNROLLED = 32
MAX_NODES = 600  # of the text; compile time


def count_of(axes: Sequence[Axis]) -> int | None:
    """The number of points of static axes."""
    total = 1
    for a in axes:
        if a.extent.value is None:
            return None
        total *= a.extent.value
    return total


def unroll_short_reductions(loops: Loops) -> Loops:
    """The nest without short reductions."""
    loops = _inner(loops)
    return unrolled(loops, tree) if _worth(loops) else loops


def _worth(loops: Loops) -> bool:
    if not loops.reduced or loops.group_axes or loops.row_split is not None:
        return False
    if not all(isinstance(p, (Reduce, Write)) for p in loops.statements):
        return False
    points = count_of(loops.reduced)
    if points is None or not 1 < points <= MAX_UNROLLED:
        return False
    nodes = len({n for r in loops.roots() for n in r.walk()})
    close = [a for a in loops.parallel if hint(a.extent) >= 16 and _close_together(loops, a)]
    return nodes * points <= MAX_NODES and bool(close)


def _close_together(loops: Loops, axis: Axis) -> bool:
    """Whether neighbours along the axis are a few elements apart, and not whole contiguous rows."""
    steps = [(stride(a.address, axis), a) for a in loops.accesses]
    if not all(s is not None and abs(s) <= 4 for s, _ in steps) or not any(s for s, _ in steps):
        return False
    if len(loops.reduced) > 1:
        return True
    (r,) = loops.reduced
    rows = [a for s, a in steps if stride(a.address, r) == 1 and s == hint(r.extent)]
    return not rows


class _Inner(Rewriter):
    def _node(self, node: Expr) -> Expr:
        # One that ends where each row says mostly ends at once: written out, all its terms are
        # read. H200, gradient of an embedding of 4096 x 2048 (bf16), 4096 points in up to 32
        # chunks, us: 378 written out (1768 bytes of registers spilled), 7.5 as a loop.
        if node.op == "reduce" and end_of(node) is None:
            kind, axes = node.attr
            points = count_of(axes)
            body = self.done[node.args[0]]
            if points is not None and 0 < points <= MAX_UNROLLED:
                tables = points_of(axes)
                at = [index_value(t[axes[0]]) for t in tables]
                return tree(kind, [Rewriter(t).expr(body) for t in tables], at)
        return super()._node(node)


def _inner(loops: Loops) -> Loops:
    if not any(n.op == "reduce" for r in loops.roots() for n in r.walk()):
        return loops
    move = _Inner({}, None, loops.results)
    return replace(loops, statements=tuple(move.statement(p) for p in loops.statements))


def tree(kind: str, terms: list[Expr], at: list[Expr]) -> Expr:
    """The reduction of `terms`, whose positions are `at`."""
    if kind.startswith("arg"):
        return position_of(kind, tree(extreme(kind), terms, at), terms, at)
    name = REDUCTIONS[kind].scalar_op
    assert name is not None
    neutral = literal(REDUCTIONS[kind].identity(terms[0].dtype), terms[0].dtype)
    terms = [t for t in terms if t is not neutral] or [neutral]  # elements that do not exist
    return pairwise(name, terms)
