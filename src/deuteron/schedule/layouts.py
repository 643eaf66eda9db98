"""Tensors that only kernels read lie as what they are computed with.

In: normalized computations, and the layouts of all tensors. Out: layouts of their own for some. A
tensor was traced with the strides that eager gives it, which are those of its first operand: the
tokens of a patch embedding, a transposed image, lie transposed through all blocks of a model that
adds to them. What nobody outside of kernels reads may lie in any order of its dimensions: in that
of most of the bytes that are read and stored beside it, so that lanes have neighbours in all of
them. Where then a library's copy of it lies as it does itself, all read the copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deuteron.base.record import Record
from deuteron.ir.expr import Expr
from deuteron.ir.index import Index, const, hint
from deuteron.ir.program import (
    Compute,
    Extern,
    Layout,
    Program,
    contiguous_strides,
    memory_of,
    tensors_read,
)
from deuteron.schedule.group import reads_of
from deuteron.schedule.normalize import roots, written_into

Place = tuple[Index, ...]
Order = tuple[int, ...]  # the dimensions of more than one element, outermost first

# What a tensor lies beside may itself be free: how often all of them are asked.
SWEEPS = 3


def free_tensors(program: Program, computes: Mapping[str, Compute]) -> set[str]:
    """Those that only kernels read, and that have memory of their own."""
    fixed = {o.tensor for o in program.outputs} | written_again(program)
    for d in program.defs:
        if isinstance(d, Extern):
            fixed.update(tensors_read(d))
    return {n for n, c in computes.items() if n not in fixed and c.index is None}


def written_again(program: Program) -> set[str]:
    """Tensors whose memory others write, or are."""
    owner = memory_of(program)
    calls = (d for d in program.defs if isinstance(d, Extern))
    return {*owner, *owner.values(), *(n for d in calls for n in d.mutates)}


def lie_alike(
    program: Program,
    computes: Mapping[str, Compute],
    layouts: Mapping[str, Layout],
    record: Record,
) -> dict[str, Layout]:
    """The layouts of those that lie in another order than was traced."""
    free = free_tensors(program, computes)
    places: dict[str, list[Compute]] = {}
    for c in computes.values():
        for name in {c.name, *(r.tensor for r in reads_of(c))}:
            places.setdefault(name, []).append(c)
    traced = {
        n: order for n in computes if n in free and len(order := order_of(layouts[n]) or ()) > 1
    }
    now = dict(layouts)
    for _ in range(SWEEPS):
        for name, order in traced.items():
            votes = {order: 0}
            for c in places[name]:
                count(name, c, now, votes)
            best = max(votes, key=lambda o: (votes[o], o == order))
            now[name] = layouts[name] if best == order else in_order(layouts[name], best)
    moved = {n: now[n] for n in traced if now[n] is not layouts[n]}
    for n, layout in moved.items():
        record.add(
            "decision", subject="layout", accepted=True, reason="as what it is computed with",
            detail=f"strides {', '.join(map(str, layout.strides))}", first=n, second="",
            bytes=layout.nbytes_hint, us=0.0,
        )  # fmt: skip
    return moved


def without_copies(
    program: Program, computes: Mapping[str, Compute], layouts: Mapping[str, Layout]
) -> tuple[Program, dict[str, Compute]]:
    """Computations with these layouts, of which those that a library's copy lies like are that
    copy."""
    free, name, written = free_tensors(program, computes), dict[str, str](), written_again(program)
    for c in computes.values():
        e, plain = c.body, c.index is None and c.name not in free | written
        if plain and e.op == "load" and not e.args and e.attr[1] == c.store_index:
            if e.attr[0] in free and layouts[e.attr[0]] == layouts[c.name]:
                name.setdefault(e.attr[0], c.name)
    copies = set(name.values())

    def made(c: Compute) -> Compute:
        loads = [n for root in roots(c) for n in root.loads() if n.attr[0] in name]
        table = {n: Expr("load", n.dtype, n.args, (name[n.attr[0]], *n.attr[1:])) for n in loads}
        new = name.get(c.name, c.name)
        origins = tuple(dict.fromkeys((*c.origins, *computes[new].origins)))
        c = replace(written_into(c, table, ()), origins=origins)
        return replace(c, name=new, layout=layouts[new])

    kept = {name.get(n, n): made(c) for n, c in computes.items() if n not in copies}
    defs = tuple(
        replace(d, name=name[d.name]) if isinstance(d, Compute) and d.name in name else d
        for d in program.defs
        if not isinstance(d, Compute) or d.name not in copies
    )
    return replace(program, defs=defs), kept


def count(name: str, c: Compute, layouts: Mapping[str, Layout], votes: dict[Order, int]) -> None:
    """Adds the bytes that a computation reads and stores beside a tensor to the order in which they
    would have it lie."""
    at: list[tuple[str, Place]] = [(r.tensor, r.index) for r in reads_of(c)]
    if c.target is None and c.index is None:
        at.append((c.name, c.store_index))
    for own in {place for n, place in at if n == name}:
        for other, place in at:
            order = seen(own, layouts[name], layouts[other].address(place))
            if other != name and order is not None:
                votes[order] = votes.get(order, 0) + layouts[other].nbytes_hint


def seen(place: Place, layout: Layout, address: Index) -> Order | None:
    """The order of a tensor's dimensions by how far another's address goes with each of them."""
    steps: dict[int, int] = {}
    for d, (i, n) in enumerate(zip(place, layout.shape, strict=True)):
        if n.value == 1:
            continue
        axes = list(i.axes())
        if len(axes) != 1 or i.coefficient(axes[0]) is not const(1):
            return None
        step = address.coefficient(axes[0])
        if step is None or step.axes() or hint(step) == 0:
            return None
        steps[d] = hint(step)
    return tuple(sorted(steps, key=lambda d: (-steps[d], d)))


def order_of(layout: Layout) -> Order | None:
    """In which order the dimensions of a tensor without holes lie; None with holes."""
    order = tuple(
        sorted(
            (d for d, n in enumerate(layout.shape) if n.value != 1),
            key=lambda d: (-hint(layout.strides[d]), d),
        )
    )
    dense = zip(in_order(layout, order).strides, layout.strides, strict=True)
    return order if all(a is b for d, (a, b) in enumerate(dense) if d in order) else None


def in_order(layout: Layout, order: Order) -> Layout:
    """The same tensor with its dimensions in another order, without holes."""
    every = (*(d for d in range(len(layout.shape)) if d not in order), *order)
    dense = contiguous_strides(tuple(layout.shape[d] for d in every))
    return replace(layout, strides=tuple(dense[every.index(d)] for d in range(len(every))))


__all__ = ["lie_alike", "without_copies"]
