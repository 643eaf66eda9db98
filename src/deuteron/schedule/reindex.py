"""Reductions over permuted points, as reductions of the same points in memory's order.

In: the fused `Dag`. Out: the same, where reductions that read everything, at places that are a
permutation of their loops (rolled, cut into windows, shuffled), walk what they read instead: the
order of its terms is nothing to a sum. Each place is met once, so that loops of the tensor's own
extents meet the same ones.

What shares a nest with the reductions and has a place in it, as a copy to the permuted places,
needs the loops as they are; so fusion comes first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product as combinations

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Index, Value, atom, const, evaluate, product, substitute
from deuteron.ir.program import Layout
from deuteron.schedule.dag import Node
from deuteron.schedule.fuse import Fusion
from deuteron.schedule.group import Group, Member, bound_axes
from deuteron.schedule.space import Map, Space, flat, steps

# Points of which the places are looked at one by one: those of loops that are computed with
# together, mostly of one loop (a side of an image).
MAX_POINTS = 4096

Walk = tuple[tuple[Index, Index], ...]  # indices of the dimensions that are walked, and extents


def reindex(fusion: Fusion) -> None:
    """Turns every group for which there is such an order, then lets them fuse."""
    changed: list[Node] = []
    for node in list(fusion.dag.nodes.values()):
        if not isinstance(node.content, Group):
            continue
        reordered = in_order(node.content, fusion.layouts)
        if reordered is None:
            continue
        fusion.record.add(
            "decision",
            subject="reindex",
            accepted=True,
            reason="terms are read in the order of memory",
            detail=f"{list(node.content.space.reduced)} -> {list(reordered.space.reduced)}",
            first=reordered.members[-1].name,
            second="",
            bytes=0,
            us=0.0,
        )
        changed += fusion.replace(node, reordered, ())
    fusion.resume(changed)


def in_order(group: Group, layouts: Mapping[str, Layout]) -> Group | None:
    """The group with reduced loops that are dimensions of what it reads; None where they are so
    already, or where the places are no permutation, or others than those of another read."""
    reductions = [m for m in group.members if m.kind == "reduction"]
    if not reductions or any(
        m.level != "row" or m.kind not in ("reduction", "point") for m in group.members
    ):
        return None
    if any(m.compute.body.attr[0].startswith("arg") for m in reductions):
        return None
    reduced = group.space.reduced
    walks = {
        w for m in reductions for r in m.reads if (w := walk(r.index, layouts[r.tensor], reduced))
    }
    if len(walks) != 1:
        return None
    (order,) = walks
    if all(steps(i, reduced) is not None for i, _ in order) or not permuted(order, reduced):
        return None
    loops = [Axis(f"walked{k}", n) for k, (_, n) in enumerate(order)]
    taken = {
        a for m in reductions for a in (*group.space.axes, *m.compute.axes, *bound_axes(m.compute))
    }
    if {a.name for a in loops} & {a.name for a in taken}:
        return None
    members: list[Member] = []
    for m in group.members:
        new = _walking(m, loops, reduced) if m.kind == "reduction" else m
        if new is None:
            return None
        members.append(new)
    kept = tuple(a for a in loops if a.extent.value != 1)
    return replace(group, space=Space(group.space.parallel, kept), members=tuple(members))


def walk(index: Sequence[Index], layout: Layout, reduced: Sequence[Axis]) -> Walk:
    """The dimensions of a tensor along which a read moves with the loops `reduced`."""
    loops = set(reduced)
    return tuple((i, n) for i, n in zip(index, layout.shape, strict=True) if i.axes() & loops)


def _walking(m: Member, loops: Sequence[Axis], reduced: Sequence[Axis]) -> Member | None:
    """A reduction whose terms are at the points of `loops`; None where a term depends on more than
    what is read there."""
    c, bound, old = m.compute, set(bound_axes(m.compute)), set(reduced)
    body = c.body.args[0].substitute({a: const(0) for a in bound if a.extent.value == 1})
    table: dict[Expr, Expr] = {}
    for n in body.loads():
        name, index, fill = n.attr
        if not any(i.axes() & bound for i in index):
            continue
        left = iter(loops)
        moved = (_at(next(left)) if substitute(i, m.at).axes() & old else i for i in index)
        table[n] = E.load(name, tuple(moved), n.dtype, n.args[0] if n.args else None, fill)
    body = body.substitute({}, table)
    if body.axes() & bound or any(n.op in ("reduce", "scan") for n in body.walk()):
        return None
    kept = tuple(a for a in loops if a.extent.value != 1)
    at: Map = {a: i for a, i in m.at.items() if a not in bound} | {a: a.index for a in kept}
    return replace(m, compute=replace(c, body=E.reduce(c.body.attr[0], kept, body)), at=at)


def _at(a: Axis) -> Index:
    return const(0) if a.extent.value == 1 else a.index


# -- permutations ----------------------------------------------------------------------------------
def permuted(walk: Walk, loops: Sequence[Axis]) -> bool:
    """Whether different points of `loops` are different places, and all of them."""
    number = flat([i for i, _ in walk], [n for _, n in walk])
    if any(isinstance(a, Value) for a in number.atoms()) or number.axes() - set(loops):
        return False
    if any(a.extent.value != 1 for a in set(loops) - number.axes()):
        return False
    digits: list[tuple[int, Index]] = []  # weights and how many there are of each
    first = 0
    for part, axes in _independent_terms(number):
        if not axes:
            if part.value is None:
                return False
            first += part.value
            continue
        known = _digits(part, axes)
        if known is None:
            return False
        first += known[0]
        digits += known[1]
    step: Index = const(1)
    for weight, count in sorted(digits, key=lambda d: d[0]):
        if count.value == 1:
            continue
        if step.value != weight:
            return False
        step = step * count
    return first == 0 and step is product(n for _, n in walk)


def _independent_terms(number: Index) -> list[tuple[Index, list[Axis]]]:
    """A number as a sum of parts that have no loop in common."""
    parts: list[tuple[Index, frozenset[Axis]]] = []
    for monomial, c in number.terms:
        term = const(c) * product(atom(a) for a in monomial)
        axes = term.axes()
        independent = []
        for other, theirs in parts:
            if theirs & axes or not (theirs or axes):
                term, axes = term + other, axes | theirs
            else:
                independent.append((other, theirs))
        parts = [*independent, (term, axes)]
    return [(p, sorted(axes)) for p, axes in parts]


def _digits(part: Index, axes: Sequence[Axis]) -> tuple[int, list[tuple[int, Index]]] | None:
    """The least value of a number, and the digits (weights, and how many there are of each) that
    count the rest; None where it takes a value twice, or others than digits count."""
    linear = steps(part, axes)
    if linear is not None and len(linear) == 1:
        ((a, step),) = linear
        if step.value is not None and step.value > 0 and part is step * a.index:
            return 0, [(step.value, a.extent)]
    extents = [a.extent.value for a in axes]
    if any(n is None for n in extents) or part.syms():
        return None
    sizes = [n for n in extents if n is not None]
    if not 0 < math.prod(sizes) <= MAX_POINTS:
        return None
    names = [a.name for a in axes]
    places = combinations(*map(range, sizes))
    values = sorted(evaluate(part, dict(zip(names, at, strict=True))) for at in places)
    first = values[0]
    out: list[tuple[int, Index]] = []
    left = [v - first for v in values]
    while len(left) > 1:
        weight, count = left[1], 1
        while count < len(left) and left[count] == count * weight:
            count += 1
        heads = left[::count]
        if weight == 0 or left != [h + k * weight for h in heads for k in range(count)]:
            return None
        out.append((weight, const(count)))
        left = heads
    return first, out


__all__ = ["in_order", "permuted", "reindex"]
