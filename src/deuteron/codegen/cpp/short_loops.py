"""Short vector loops of static length: rows of images, windows over them.

In: an index set of the vector axis. Out: C++ lines, for a loop whose last lanes would be scalar
code (half of the time of a row of 28) or whose operands are every second, third or fourth element.

* The last block overlaps the one before it: it computes some elements again, to the same values,
  which is sound where nothing that is read may have been overwritten.
* What is read with a small step is first copied, to one array for each remainder of the
  position by the step; loads that differ by multiples of the step share it (`d_copy_strided` of
  `support.h`). Pooling windows read the same few arrays at neighbouring places then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deuteron.codegen.cpp import scalars
from deuteron.codegen.cpp.bodies import IndexSet, PassBody
from deuteron.codegen.cpp.reductions import Accumulator
from deuteron.codegen.loops import Statement, Write, roots_of, unique_nodes
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Index, const
from deuteron.ir.operations import ITEMSIZE

BLOCK_LANES = 16
MAX_SHORT_LOOP = 512  # elements; of longer loops the end costs nothing
COPIED_STRIDES = (2, 3, 4)


def short_loop(
    writer: PassBody, index_set: IndexSet, low: str, high: str, accs: dict[str, Accumulator]
) -> bool:
    """Writes the loop, if it is one for this module."""
    n = index_set.count.value
    if n is None or not BLOCK_LANES <= n <= MAX_SHORT_LOOP or (low, high) != ("0", str(n)) or accs:
        return False
    if (
        not all(isinstance(p, Write) for p in index_set.statements)
        or index_set.to_buffer
        or index_set.buffered
    ):
        return False
    strided = strided_loads(index_set.statements, index_set.axis)
    if (n % BLOCK_LANES == 0 and not strided) or not repeatable(index_set.statements):
        return False
    em = writer.env.em
    base, start = em.fresh("b"), em.fresh("s")
    where = copy_strided(writer, strided, index_set.axis, n)
    em.name_axis(index_set.axis, f"({base} + l)")
    writer.staged |= {node: text.format(f"{base} + l") for node, text in where.items()}
    with em.inside(index_set.axis, writer.v) as scope:
        writer.body(index_set, {}, "l", "0")
    for node in where:
        del writer.staged[node]
    last = n - BLOCK_LANES
    with em.inside() as block:
        block.add(f"const long long {base} = {start} < {last} ? {start} : {last};", em.simd(scope))
        block.loop(f"for (int l = 0; l < {BLOCK_LANES}; ++l)", scope.lines)
    em.scope.loop(f"for (int {start} = 0; {start} < {n}; {start} += {BLOCK_LANES})", block.lines)
    return True


def repeatable(statements: Sequence[Statement]) -> bool:
    """Whether elements may be computed twice: nothing reads what a store may overwrite. (Two
    tensors share memory only where they are read and written at the same address.)"""
    loads = [n for n in unique_nodes(r for p in statements for r in roots_of(p)) if n.op == "load"]
    for w in statements:
        assert isinstance(w, Write)
        if w.accumulate is not None:
            return False
        for n in loads:
            if not n.attr[1] or n.attr[0] == w.tensor:
                return False
            if n.attr[1][0] is w.address and ITEMSIZE[n.dtype] == ITEMSIZE[w.dtype]:
                return False
    return True


def strided_loads(statements: Sequence[Statement], axis: Axis) -> list[Expr]:
    """Loads of every second, third or fourth element, without conditions."""
    out = []
    for n in unique_nodes(r for p in statements for r in roots_of(p)):
        if n.op == "load" and n.attr[1] and not n.args:
            c = n.attr[1][0].coefficient(axis)
            if c is not None and c.value in COPIED_STRIDES:
                out.append(n)
    return out


Key = tuple[str, str, Index, int]
Members = list[tuple[int, Expr]]


def nearby_groups(groups: dict[Key, Members], n: int) -> Iterator[tuple[Key, Members]]:
    """The groups, divided where more lies between two members than a row."""
    for key, members in groups.items():
        members.sort(key=lambda m: m[0])
        first = 0
        for k in range(1, len(members) + 1):
            if k == len(members) or members[k][0] - members[k - 1][0] > n:
                yield key, members[first:k]
                first = k


def copy_strided(writer: PassBody, loads: Sequence[Expr], axis: Axis, n: int) -> dict[Expr, str]:
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
    for (tensor, dtype, address, _), members in nearby_groups(groups, n):
        first, last = (f(k for k, _ in members) for f in (min, max))
        count = n + last - first
        node = next(x for k, x in members if k == first)
        step = address.coefficient(axis)
        name = em.fresh("strided")
        em.name_axis(axis, "0")
        with em.inside(axis, writer.v) as scope:
            first_address = em.index(node.attr[1][0])
        em.used.add("d_copy_strided")
        em.scope.add(
            *scope.lines,
            f"alignas(64) {scalars.MEMORY_TYPES[dtype]} {name}[{count}];",
            f"d_copy_strided<{step}>({name}, {env.em.tensors[tensor]} + {first_address}, {count});",
        )
        for k, x in members:
            text = f"{name}[{{}} + {k - first}]"
            out[x] = scalars.from_memory(text, dtype, em.used)
    return out


__all__ = ["short_loop"]
