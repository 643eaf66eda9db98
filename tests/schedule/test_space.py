"""Maps between the loops of two nests, against every point of small ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from deuteron.ir.index import Axis, Index, const, evaluate, floordiv, mod
from deuteron.schedule.space import Equation, Map, Space, flat, one_to_one, solve


def points(axes: Sequence[Axis]) -> list[dict[str, int]]:
    extents = [range(a.extent.value or 0) for a in axes]
    names = [a.name for a in axes]
    return [dict(zip(names, at, strict=True)) for at in itertools.product(*extents)]


def is_one_to_one(ours: Sequence[Axis], theirs: Sequence[Axis], table: Map) -> bool:
    seen = {tuple(evaluate(table[a], at) for a in theirs) for at in points(ours)}
    return len(seen) == math.prod(a.extent.value or 0 for a in theirs) == len(points(ours))


def number(axes: Sequence[Axis]) -> Index:
    return flat([a.index for a in axes], [a.extent for a in axes])


@st.composite
def nests(draw: st.DrawFn) -> tuple[list[Axis], list[Axis], Map]:
    """Two nests of as many points, and the map that some tensors give which both read whole."""
    ours = [Axis(f"p{k}", n) for k, n in enumerate(draw(st.lists(st.sampled_from((2, 4))))[:4])]
    left, theirs = math.prod(a.extent.value or 0 for a in ours), []
    while left > 1:
        n = draw(st.sampled_from([n for n in (2, 4, 8) if left % n == 0]))
        theirs.append(Axis(f"q{len(theirs)}", n))
        left //= n
    equations = []
    for _ in range(draw(st.integers(1, 3))):
        a, b = (
            number(draw(st.permutations(axes))[: draw(st.integers(0, len(axes)))])
            for axes in (ours, theirs)
        )
        equations.append(Equation("x", a, b, False, const(0)))
    return ours, theirs, solve(equations, Space(tuple(ours)), theirs)


def test_one_to_one_maps_are() -> None:
    answers = {True: 0, False: 0}

    @settings(max_examples=1200, deadline=None)  # one in a hundred is not one to one
    @given(nests())
    def check(drawn: tuple[list[Axis], list[Axis], Map]) -> None:
        ours, theirs, table = drawn
        if any(a not in table for a in theirs):
            return
        answer = one_to_one(theirs, table)
        answers[answer] += 1
        assert answer == is_one_to_one(ours, theirs, table), table

    check()
    assert all(answers.values()), answers


def test_who_reads_a_whole_tensor_is_found_in_digits_of_our_loops() -> None:
    """Heads and batches in one loop here, in two there, as gradients of attention read them."""
    a, b, r = (Axis(f"p{k}", n) for k, n in enumerate((6, 5, 4)))
    theirs = [Axis(f"q{k}", n) for k, n in enumerate((2, 3, 5, 4))]
    head, width = const(3), const(12)
    ours_at = const(60) * floordiv(a.index, head) + width * b.index
    ours_at = ours_at + const(4) * mod(a.index, head) + r.index
    x, h, s, d = (q.index for q in theirs)
    theirs_at = const(60) * x + width * s + const(4) * h + d
    whole = Equation("x", ours_at, theirs_at, False, const(120))
    table = solve([whole], Space((a, b), (r,)), theirs)
    assert table.keys() == {*theirs}
    for at in points((a, b, r)):
        there = {q.name: evaluate(table[q], at) for q in theirs}
        assert evaluate(theirs_at, there) == evaluate(ours_at, at)
    assert one_to_one(theirs, table) and is_one_to_one((a, b, r), theirs, table)
    more = replace(whole, count=const(240))  # they read a half: ours may read what they do not
    assert not solve([more], Space((a, b), (r,)), theirs)


def test_the_same_but_for_names() -> None:
    """Loops in another order, at places that no loop is linear in."""

    def rolled(h: Axis, w: Axis, c: Axis) -> Index:
        return flat(
            [mod(h.index + 2, 6), mod(w.index + 3, 6), c.index], [h.extent, w.extent, c.extent]
        )

    ours = [Axis("c", 5), Axis("h", 6), Axis("w", 6)]
    theirs = [Axis("x", 6), Axis("y", 6), Axis("z", 5)]
    u, v = rolled(*ours[1:], ours[0]), rolled(*theirs)
    table = solve([Equation("x", u, v, False, const(180))], Space(tuple(ours)), theirs)
    assert [table[a] for a in theirs] == [a.index for a in (*ours[1:], ours[0])]
    other = rolled(ours[2], ours[1], ours[0]) + 1
    assert not solve([Equation("x", other, v, False, const(180))], Space(tuple(ours)), theirs)
