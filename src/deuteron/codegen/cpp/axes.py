"""Which axis of a nest the lanes of vectors walk along, by what memory then costs.

In: `codegen.loops.Loops`. Out: an axis, and costs in bytes of contiguous access and in FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deuteron.codegen.loops import (
    Access,
    Loops,
    Write,
    points_visited,
    read_of,
    roots_of,
    stride,
    unique_nodes,
    written_by,
)
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, hint, product
from deuteron.ir.operations import SCALAR_OPS
from deuteron.schedule.kernel import Reduce, Scan


def flops_of(nodes: Iterable[Expr]) -> float:
    """Approximate vector FLOPs of computing these nodes once."""
    return sum(
        SCALAR_OPS[n.op][1] if n.op in SCALAR_OPS else 30.0 * (n.op == "random") for n in nodes
    )


def _strided_cost(step: int | None, store: bool) -> float:
    """Cost per byte of a vector access with this stride, a contiguous one being 1 (measured, f32,
    AVX-512).
    """
    if step == 1:
        return 1.0
    if step is not None and abs(step) <= 4:
        return 2.0  # neighbours that shuffles sort out
    return 5.0 if store else 6.0  # one element at a time, a cache line each


def lane_cost(loops: Loops, axis: Axis, accesses: Sequence[tuple[Access, int]]) -> float:
    """Bytes moved with vector lanes along `axis`, and those that are not contiguous as often as
    they are read, weighted (a product reads its factors again and again); short axes waste lanes.

    `accesses` come with the number of passes that do them.
    """
    axes = (*loops.parallel, *loops.reduced)
    points = size_of(axes)
    total = 4.0 * points
    for a, times in accesses:
        if axis in a.address.axes():
            cost = _strided_cost(stride(a.address, axis), a.store)
            moved = points_visited(a.address, axes)
            again = moved if a.store else max(moved, points)
            total += times * a.itemsize * (moved + (cost - 1.0) * again)
    return total / min(1.0, max(1, hint(axis.extent)) / 16)


def size_of(axes: Iterable[Axis]) -> int:
    return max(1, hint(product(a.extent for a in axes)))


def vector_axis(loops: Loops, candidates: Sequence[Axis]) -> Axis | None:
    """The axis for vector lanes: the one along which memory is read and written most cheaply."""
    if not candidates:
        return None
    accesses = [(a, 1 if a.store else max(1, times)) for a, times in _times_read(loops).items()]
    return min(
        candidates,
        key=lambda a: (
            lane_cost(loops, a, accesses),
            a not in loops.reduced,
            -hint(a.extent),
            a.name,
        ),
    )


def _times_read(loops: Loops) -> dict[Access, int]:
    """Accesses and the number of passes over the reduced axes that do them (one per depth of
    dependent reductions).
    """
    depth: dict[str, int] = {}
    seen: dict[Access, set[int]] = {}
    for p in loops.statements:
        nodes = unique_nodes(roots_of(p))
        need = max((depth.get(n.attr[0], 0) for n in nodes if n.op == "load"), default=0)
        if isinstance(p, Reduce):
            depth[p.name] = need + 1
        elif isinstance(p, Scan):
            depth[p.name] = need
        for n in nodes:
            if n.op == "load" and n.attr[1]:
                seen.setdefault(read_of(n), set()).add(need)
        if isinstance(p, Write):
            seen.setdefault(written_by(p), set()).add(need)
    return {a: len(ks) for a, ks in seen.items()}
