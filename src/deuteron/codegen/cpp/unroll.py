"""Small reductions written out: a nest that reduces a few elements becomes a pointwise nest.

In: `loops.Loops` whose reduced axes are short and static. Out: the same without reduced axes:
each reduction is the chain of its terms, each point store is one store per element. What the vector
axis then sees are constant offsets instead of a loop: pooling windows, sums over a handful of
heads or channels.
"""

from __future__ import annotations

from dataclasses import replace

from deuteron.codegen.index_sets import index_between_cuts
from deuteron.codegen.loops import (
    CrossRowReduce,
    Loops,
    Rewriter,
    Write,
    stride,
)
from deuteron.codegen.unrolled import pairwise, position_of, unrolled
from deuteron.ir.expr import Expr, cast, op
from deuteron.ir.index import Axis, const, hint, product
from deuteron.ir.operations import REDUCTIONS, extreme
from deuteron.schedule.kernel import Scan

MAX_ROW_ELEMENTS = 32  # elements of a row; more are better off in a loop
# Of rows whose elements are stored: g++ 12 makes a group of the stores, with as many vectors as the
# least common multiple of lanes and elements fills. Beyond 8 elements a loop over each row takes as
# long or less (softmax of 8192 rows of 15 bf16 2.3 ms written out, 0.4 ms in loops; f32 0.6 and
# 0.13 ms) and is built in 0.2 s, not in 11 s; rows of 31 bf16 take g++ minutes and gigabytes.
MAX_STORED_ELEMENTS = 8
MAX_INTERLEAVED = 8  # elements of a short axis between lanes
MAX_UNROLLED_NODES = 600  # operations after writing out; compile time


def worth_unrolling(loops: Loops) -> bool:
    """Whether the reduction is short and its rows are many and side by side in memory."""
    sizes = [a.extent.value for a in loops.reduced]
    if not sizes or any(n is None for n in sizes) or loops.row_split is not None:
        return False
    points = hint(product(a.extent for a in loops.reduced))
    stored = any(isinstance(p, Write) and p.level == "point" for p in loops.statements)
    if not 1 < points <= (MAX_STORED_ELEMENTS if stored else MAX_ROW_ELEMENTS) or any(
        isinstance(p, (Scan, CrossRowReduce)) for p in loops.statements
    ):
        return False
    nodes = len(loops.nodes)
    if nodes * points > MAX_UNROLLED_NODES:
        return False
    best = max((hint(a.extent) for a in loops.parallel if _has_small_strides(loops, a)), default=0)
    return best >= 16


def _has_small_strides(loops: Loops, axis: Axis) -> bool:
    """Whether lanes along the axis touch neighbouring cache lines in every access."""
    steps = [stride(index_between_cuts(a.address, axis), axis) for a in loops.accesses]
    return all(s is not None and abs(s) <= MAX_ROW_ELEMENTS for s in steps) and any(steps)


def unroll(loops: Loops) -> Loops:
    """Writes out all reduced axes."""
    return unrolled(loops, _reduce)


def _reduce(kind: str, terms: list[Expr], at: list[Expr]) -> Expr:
    if not kind.startswith("arg"):
        name = REDUCTIONS[kind].scalar_op
        assert name is not None
        return pairwise(name, terms) if kind == "sum" else _chain(name, terms)
    name = REDUCTIONS[extreme(kind)].scalar_op
    assert name is not None
    at = [cast(i, "i32") for i in at]
    return cast(position_of(kind, _chain(name, terms), terms, at), "i64")


def _chain(name: str, terms: list[Expr]) -> Expr:
    out = terms[0]
    for t in terms[1:]:
        out = op(name, out, t)
    return out


def interleaved_axis(loops: Loops) -> Axis | None:
    """A short axis whose elements lie next to each other between lanes of a longer one.

    Colours of a pixel, real and imaginary parts, rotary pairs: lanes along the long axis read
    every second or third element, and the compiler sorts them out when all are in one body.
    """
    for a in loops.parallel:
        n = a.extent.value
        if n is None or not 2 <= n <= MAX_INTERLEAVED or len(loops.nodes) * n > MAX_UNROLLED_NODES:
            continue
        for v in loops.parallel:
            if v == a or hint(v.extent) < 16 or not _has_small_strides(loops, v):
                continue
            if any(stride(x.address, a) == 1 and stride(x.address, v) == n for x in loops.accesses):
                return a
    return None


def unroll_parallel(loops: Loops, axis: Axis) -> Loops:
    """One copy of every store per element of a parallel axis of a pointwise nest."""
    movers = [Rewriter({axis: const(i)}) for i in range(hint(axis.extent))]
    statements = tuple(m.statement(p) for m in movers for p in loops.statements)
    rest = tuple(a for a in loops.parallel if a != axis)
    return replace(loops, parallel=rest, statements=statements)
