"""Reductions over interleaved values, with the places within a period written out.

In: the fused `Dag`. Out: the same, where a group reduces over ``r`` what depends on ``r % c`` for a
small c that divides the extent (halves of bytes, pairs of a rotation or of complex numbers): it
reduces over ``r // c`` the c terms of each place, in which ``r % c`` is a number. So conditions on
it are gone, and what ``r // c`` is the place of is read once. The estimate decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial, reduce

from deuteron.ir import dynamic_bounds
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Mod, divide_exact, split_points
from deuteron.ir.operations import REDUCTIONS
from deuteron.ir.program import Compute
from deuteron.schedule import profit
from deuteron.schedule.dag import Node
from deuteron.schedule.fuse import Fusion
from deuteron.schedule.group import Group, Member, bound_axes, reads_of
from deuteron.schedule.normalize import inlined

MAX_PERIOD = 8  # terms are written out: code grows with it
MIN_GAIN = 0.02  # of the time: estimates that are closer say nothing


def write_phases(fusion: Fusion, inside: Callable[[], AbstractSet[str]]) -> None:
    """Of every group for which it pays; what is `inside` of a kernel with products stays."""
    todo = list(fusion.dag.nodes.values())
    while todo:
        node = todo.pop()
        if isinstance(node.content, Group) and node.content.reductions:
            new = attempt(fusion, node, node.content, inside)
            todo += [new] if new is not None else []  # digits of digits


def attempt(
    fusion: Fusion, node: Node, group: Group, inside: Callable[[], AbstractSet[str]]
) -> Node | None:
    """The node in which the best period is written out; None where none pays."""
    spec, keep = fusion.spec(group), fusion.stored(group, {node.id})
    offers, whole = [], without_points(group, fusion, keep)
    for axis, count in periods(whole):
        made = written_out(whole, axis, count)
        if made is not None:
            cost = profit.cost(made, fusion.layouts, keep, spec, whole=True)
            offers.append((cost.us, count, made))
    if not offers:
        return None
    now = profit.cost(group, fusion.layouts, keep, spec, whole=True).us
    then, count, made = min(offers, key=lambda offer: offer[:2])
    accepted = then < (1 - MIN_GAIN) * now and not inside() & group.names.keys()
    fusion.record.add(
        "decision",
        subject="phases",
        accepted=accepted,
        reason="values are read once" if accepted else "no gain",
        detail=f"{count} terms written out: {then:.1f} us, as one {now:.1f} us",
        first=group.members[-1].name,
        second="",
        bytes=0,
        us=round(now - then, 3),
    )
    return fusion.replace(node, made, ())[0] if accepted else None


def without_points(group: Group, fusion: Fusion, keep: Collection[str]) -> Group:
    """The group whose values at points, if only it needs them, are written into their readers."""
    members: list[Member] = []
    gone: dict[str, Compute] = {}
    for m in group.members:
        c = m.compute
        while inner := [r.tensor for r in reads_of(c) if r.tensor in gone]:
            c = inlined(c, gone[inner[0]], fusion.layouts)
        if m.kind == m.level == "point" and m.name not in keep:
            gone[m.name] = c
        else:
            members.append(m if c is m.compute else replace(m, compute=c))
    return replace(group, members=tuple(members))


def periods(group: Group) -> Iterator[tuple[Axis, int]]:
    """Reduced axes of the nest and the small periods in which something along them differs."""
    found: dict[tuple[Axis, int], None] = {}
    for m in group.members:
        for a in (a for i in m.compute.body.indices() for a in i.atoms() if isinstance(a, Mod)):
            for own, size, _ in split_points(a):
                place = m.at.get(own)
                for axis in group.space.reduced:
                    if place is axis.index and size.value and size.value <= MAX_PERIOD:
                        found[axis, size.value] = None
    yield from found


def written_out(group: Group, axis: Axis, count: int) -> Group | None:
    """The group that reduces over the quotient of `axis` by `count`; None where a member needs
    every point, or order, or where the terms are no simpler than as many points."""
    if group.row_split is not None or group.group_axes:
        return None
    extent = divide_exact(axis.extent, count)
    assert extent is not None, "it is a period of the axis"
    outer = Axis(axis.name, extent)
    members: list[Member] = []
    saved = 0
    for m in group.members:
        uses = [a for a, i in m.at.items() if axis in i.axes()]
        if uses:
            own = next((a for a in bound_axes(m.compute) if m.at[a] is axis.index), None)
            if m.kind != "reduction" or uses != [own] or dynamic_bounds.ends(m.compute.body):
                return None
            (kind, axes), (body,) = m.compute.body.attr, m.compute.body.args
            scalar = REDUCTIONS[kind].scalar_op
            if own is None or scalar is None:
                return None
            inner = Axis(own.name, extent)
            terms = [body.substitute({own: inner.index * count + k}) for k in range(count)]
            total = reduce(partial(E.op, scalar), terms)
            saved += count * _along(body, own) + count - 1 - _along(total, inner)
            over = tuple(inner if a == own else a for a in axes)
            value = E.reduce(kind, over, total)
            at = {a: i for a, i in m.at.items() if a != own} | {inner: outer.index}
            m = replace(m, compute=replace(m.compute, body=value), at=at)
        members.append(m)
    if saved <= 0:
        return None
    reduced = tuple(outer if a == axis else a for a in group.space.reduced)
    return replace(group, space=replace(group.space, reduced=reduced), members=tuple(members))


def _along(root: Expr, axis: Axis) -> int:
    """Operations, loads included, that differ along an axis."""
    return sum(axis in n.axes() for n in root.walk())


__all__ = ["write_phases"]
