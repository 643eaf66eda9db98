"""Short parallel axes written out: the phases of a pattern.

In: `loops.Loops` that only compute and store points. Out: the same, in which a short axis whose
points differ in what they read (even and odd columns of a pooling window's input, the copies of an
enlarged picture) is gone: one lane computes all its points, in which conditions are constants and
neighbours share what they read.

Where the points of the axis lie side by side in memory they are stored together: the values of a
`Write` with a `phase` are joined, so that a program still writes whole lines. Its address keeps the
axis, whose place is behind the axis `along` (the fastest of the nest: see `tiling`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deuteron.codegen.triton.loops import (
    Loops,
    Part,
    Rewriter,
    Write,
    stride,
)
from deuteron.ir.expr import Expr, own_indices
from deuteron.ir.index import Axis, Div, MinMax, Mod, const, divide_exact, hint

# Points that one lane computes at most, and nodes of the text (registers; compile time).
MOST_PHASES = 8
MOST_NODES = 600
# The work that remains, of which a phase pays: what is written out needs more registers.
WORTH = 0.8
# Instructions, about: a load and its address; a division by a constant.
LOAD, DIVISION = 3.0, 4.0


def phased(loops: Loops) -> Loops:
    """The nest with every axis written out that makes its work less."""
    if loops.chunk is not None or not all(isinstance(p, Write) for p in loops.parts):
        return loops
    phases = 1
    while True:
        now = work(loops)
        best, least = None, WORTH * now
        for a in loops.parallel:
            n = a.extent.value
            if n is None or not 1 < n * phases <= MOST_PHASES:
                continue
            new = _without(loops, a)
            if new is not None and work(new) / n < least:
                best, least = (new, n), work(new) / n
        if best is None:
            return loops
        loops, n = best
        phases *= n


def nodes(loops: Loops) -> set[Expr]:
    return {n for r in loops.roots() for n in r.walk()}


def work(loops: Loops) -> float:
    """Instructions of one lane, about."""
    total = float(len(loops.parts))
    divisions = set()
    for n in nodes(loops):
        total += LOAD if n.op == "load" else 0.0 if n.op == "literal" else 1.0
        for i in own_indices(n):
            divisions |= {a for a in i.atoms() if isinstance(a, (Div, Mod, MinMax))}
    return total + DIVISION * len(divisions)


def _without(loops: Loops, axis: Axis) -> Loops | None:
    """The nest with the axis written out; None where stores would be scattered."""
    count = hint(axis.extent)
    if len(nodes(loops)) * count > MOST_NODES:
        return None
    left = tuple(a for a in loops.parallel if a != axis)
    at = [Rewriter({axis: const(k)}, None, loops.results) for k in range(count)]
    parts: list[Part] = []
    for p in loops.parts:
        assert isinstance(p, Write)
        along = _along(p, axis, (*left, *loops.reduced))
        if along is not None and p.phase is None and p.mask is None and p.accumulate is None:
            values = [r.expr(p.value) for r in at]
            parts.append(
                replace(p, value=values[0], others=tuple(values[1:]), phase=axis, along=along)
            )
        elif _scattered(p, axis, (*left, *loops.reduced)):
            return None
        else:
            parts += [r.part(p) for r in at]
    found = {p.along for p in parts if isinstance(p, Write) and p.along is not None}
    if len(found) > 1:
        return None
    return replace(loops, parallel=left, parts=tuple(parts))


def _along(w: Write, axis: Axis, others: tuple[Axis, ...]) -> Axis | None:
    """The axis behind whose points the points of `axis` lie side by side, as a power of two."""
    count = hint(axis.extent)
    if stride(w.address, axis) != 1 or count & (count - 1):
        return None
    if divide_exact(w.address - axis.index, const(count)) is None:
        return None
    return next((a for a in others if stride(w.address, a) == count), None)


def _scattered(w: Write, axis: Axis, others: tuple[Axis, ...]) -> bool:
    """Whether a store at one point of the axis is not of neighbours in memory."""
    if w.phase is not None:
        return stride(w.address, axis) == 1
    steps = [stride(w.address, a) for a in others]
    return axis in w.address.axes() and 1 not in steps


def joined(loops: Loops) -> Iterator[Write]:
    """The stores of several points at once."""
    yield from (p for p in loops.parts if isinstance(p, Write) and p.phase is not None)


__all__ = ["joined", "phased"]
