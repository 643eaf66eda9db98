"""Short vector loops of static length: rows of images, windows over them.

In: a segment of the vector axis. Out: C++ lines, for a loop whose last lanes would be scalar code
(half of the time of a row of 28) or whose operands are every second, third or fourth element.

* The last block overlaps the one before it: it computes some elements again, to the same values,
  which is sound where nothing that is read may have been overwritten.
* What is read with a small step is first copied apart, one array for each remainder of the
  position by the step; loads that differ by multiples of the step share it (`d_every` of
  `support.h`). Pooling windows read the same few arrays at neighbouring places then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from deuteron.codegen.cpp import scalars
from deuteron.codegen.loops import Part, Write, roots_of, unique_nodes
from deuteron.ir.expr import ITEMSIZE, Expr
from deuteron.ir.index import Axis, Index, const

if TYPE_CHECKING:
    from deuteron.codegen.cpp.nests import PassWriter, Segment
    from deuteron.codegen.cpp.reductions import Accumulator

LANES = 16
MOST = 512  # elements; of longer loops the end costs nothing
STEPS = (2, 3, 4)


def short_loop(
    writer: PassWriter, seg: Segment, low: str, high: str, accs: dict[str, Accumulator]
) -> bool:
    """Writes the loop, if it is one for this module."""
    n = seg.count.value
    if n is None or not LANES <= n <= MOST or (low, high) != ("0", str(n)) or accs:
        return False
    if not all(isinstance(p, Write) for p in seg.parts) or seg.keep or seg.buffered:
        return False
    apart = stepped(seg.parts, seg.axis)
    if (n % LANES == 0 and not apart) or not repeatable(seg.parts):
        return False
    em = writer.env.em
    base, start = em.fresh("b"), em.fresh("s")
    where = stage(writer, apart, seg.axis, n)
    em.name_axis(seg.axis, f"({base} + l)")
    writer.tiled |= {node: text.format(f"{base} + l") for node, text in where.items()}
    with em.inside(seg.axis, writer.v) as scope:
        writer.body(seg, {}, "l", "0")
    for node in where:
        del writer.tiled[node]
    last = n - LANES
    with em.inside() as block:
        block.add(f"const long long {base} = {start} < {last} ? {start} : {last};", em.simd(scope))
        block.loop(f"for (int l = 0; l < {LANES}; ++l)", scope.lines)
    em.scope.loop(f"for (int {start} = 0; {start} < {n}; {start} += {LANES})", block.lines)
    return True


def repeatable(parts: Sequence[Part]) -> bool:
    """Whether elements may be computed twice: nothing reads what a store may overwrite. (Two
    tensors share memory only where they are read and written at the same address.)"""
    loads = [n for n in unique_nodes(r for p in parts for r in roots_of(p)) if n.op == "load"]
    for w in parts:
        assert isinstance(w, Write)
        if w.accumulate is not None:
            return False
        for n in loads:
            if not n.attr[1] or n.attr[0] == w.tensor:
                return False
            if n.attr[1][0] is w.address and ITEMSIZE[n.dtype] == ITEMSIZE[w.dtype]:
                return False
    return True


def stepped(parts: Sequence[Part], axis: Axis) -> list[Expr]:
    """Loads of every second, third or fourth element, without conditions."""
    out = []
    for n in unique_nodes(r for p in parts for r in roots_of(p)):
        if n.op == "load" and n.attr[1] and not n.args:
            c = n.attr[1][0].coefficient(axis)
            if c is not None and c.value in STEPS:
                out.append(n)
    return out


Key = tuple[str, str, Index, int]
Members = list[tuple[int, Expr]]


def near(groups: dict[Key, Members], n: int) -> Iterator[tuple[Key, Members]]:
    """The groups, divided where more lies between two members than a row."""
    for key, members in groups.items():
        members.sort(key=lambda m: m[0])
        first = 0
        for k in range(1, len(members) + 1):
            if k == len(members) or members[k][0] - members[k - 1][0] > n:
                yield key, members[first:k]
                first = k


def stage(writer: PassWriter, loads: Sequence[Expr], axis: Axis, n: int) -> dict[Expr, str]:
    """Copies what the loads read; returns the text of each with ``{}`` for the place."""
    env, em = writer.env, writer.env.em
    groups: dict[Key, Members] = {}
    for node in loads:
        address: Index = node.attr[1][0]
        offset = next((c for m, c in address.terms if not m), 0)
        c = address.coefficient(axis)
        assert c is not None and c.value is not None
        whole, rest = divmod(offset, c.value)
        key = (node.attr[0], node.dtype, address - const(offset), rest)
        groups.setdefault(key, []).append((whole, node))
    out: dict[Expr, str] = {}
    for (tensor, dtype, address, _), members in near(groups, n):
        first, last = (f(k for k, _ in members) for f in (min, max))
        count = n + last - first
        node = next(x for k, x in members if k == first)
        step = address.coefficient(axis)
        name = em.fresh("apart")
        em.name_axis(axis, "0")
        with em.inside(axis, writer.v) as scope:
            place = em.index(node.attr[1][0])
        em.used.add("d_every")
        em.scope.add(
            *scope.lines,
            f"alignas(64) {scalars.MEMORY[dtype]} {name}[{count}];",
            f"d_every<{step}>({name}, {env.em.tensors[tensor]} + {place}, {count});",
        )
        for k, x in members:
            text = f"{name}[{{}} + {k - first}]"
            out[x] = scalars.from_memory(text, dtype, em.used)
    return out


__all__ = ["short_loop"]
