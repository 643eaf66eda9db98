"""Tensors that are cheaper to compute again than to write and read.

In: the fused `Dag`. Out: the same, where a pointwise result that only kernels read is computed by
each of them from what it was computed from, if that moves fewer bytes: a cast, a mask, a sum of
two tensors that the reader has anyway. Nobody stores the tensor any more.
"""

from __future__ import annotations

from dataclasses import replace

from deuteron.ir.expr import flops
from deuteron.ir.program import Compute
from deuteron.schedule import profit
from deuteron.schedule.dag import Node
from deuteron.schedule.fuse import Fusion
from deuteron.schedule.group import Group, Member, reads_of
from deuteron.schedule.legality import consistent
from deuteron.schedule.normalize import gathers_again, inlined

# At most this much arithmetic per element, producers included.
MAX_FLOPS = 64.0
MAX_PRODUCERS = 24


def recompute(fusion: Fusion) -> None:
    """Tries every tensor that is written for other kernels only, in program order; then lets the
    changed groups fuse."""
    known = set(fusion.dag.nodes)
    for node in sorted(fusion.dag.nodes.values(), key=lambda n: (n.first, n.id)):
        if not isinstance(node.content, Group) or node.id not in fusion.dag.nodes:
            continue
        for m in node.content.members:
            if m.kind == "point" and m.compute.target is None:
                node = attempt(fusion, node, m)
    fusion.prune()
    fusion.resume([n for k, n in fusion.dag.nodes.items() if k not in known])


def attempt(fusion: Fusion, node: Node, m: Member) -> Node:
    """Lets all readers compute `m` if that pays. Returns the node that `m` is in now."""
    dag = fusion.dag
    readers = [dag.nodes[k] for k in sorted(dag.readers.get(m.name, ())) if k != node.id]
    if not readers or m.name in fusion.outside or m.name in fusion.owner.values():
        return node
    if not all(isinstance(r.content, Group) for r in readers):
        return node
    group = node.content
    assert isinstance(group, Group)
    producer = written_out(fusion, group, m)
    if producer is None:
        return node
    before = fusion.cost(node).us
    after = 0.0
    moved = fusion.cost(node).bytes
    placed: list[tuple[Node, Group]] = []
    for r in readers:
        assert isinstance(r.content, Group)
        new = computing(fusion, r.content, producer)
        if new is None:
            return node
        spec = fusion.spec(new)
        there = profit.cost(new, fusion.layouts, fusion.stored(new, {r.id}), spec)
        old = fusion.cost(r)
        before, after, moved = before + old.us, after + there.us, moved + old.bytes - there.bytes
        placed.append((r, new))
    keep = set(fusion.stored(group, {node.id})) - {m.name}
    # What the readers now take from the group must be in memory.
    keep |= {n for _, g in placed for n in g.reads if n in group.names}
    left = profit.cost(group, fusion.layouts, keep, fusion.spec(group))
    after, moved = after + left.us, moved - left.bytes
    if after >= before:
        return node
    fusion.record.add(
        "decision",
        subject="recompute",
        accepted=True,
        reason="moves fewer bytes",
        detail=f"in {len(placed)} kernels that read it",
        first=m.name,
        second="",
        bytes=moved,
        us=round(before - after, 3),
    )
    for r, new in placed:
        fusion.replace(r, new, ())
    fusion.costs.pop(node.id, None)
    for name in keep & set(group.names):
        fusion.costs.pop(dag.home[name], None)
    return dag.nodes[node.id]


def written_out(fusion: Fusion, group: Group, m: Member) -> Compute | None:
    """`m` computed from memory and from reductions alone: its pointwise producers in the group are
    written into it. None where that is dear, or where what it reads is overwritten some time."""
    c = m.compute
    if c.body.axes() - set(c.axes):  # it has reductions of its own
        return None
    for _ in range(MAX_PRODUCERS):
        inner = [r.tensor for r in reads_of(c) if _is_point(group, r.tensor)]
        if not inner:
            break
        c = inlined(c, group.names[inner[-1]].compute, fusion.layouts)
    else:
        return None
    memory = {fusion.owner.get(r.tensor, r.tensor) for r in reads_of(c)}
    if flops(c.body) > MAX_FLOPS or memory & set(fusion.owner.values()):
        return None
    return c


def _is_point(group: Group, name: str) -> bool:
    m = group.names.get(name)
    return m is not None and m.kind == "point" and m.compute.target is None


def computing(fusion: Fusion, reader: Group, producer: Compute) -> Group | None:
    """`reader` with its members computing what they read of `producer`."""
    loads = [n for m in reader.members for n in m.compute.body.loads()]
    if any(n.attr[0] == producer.name and gathers_again(n, producer) for n in loads):
        return None
    members = tuple(
        replace(m, compute=inlined(m.compute, producer, fusion.layouts))
        if any(r.tensor == producer.name for r in m.reads)
        else m
        for m in reader.members
    )
    group = replace(reader, members=members)
    return group if consistent(group, fusion.layouts, fusion.owner) is None else None


__all__ = ["recompute"]
