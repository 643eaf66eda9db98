"""Maps between the loops of two nests, against every point of small ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from deuteron.ir.index import Axis, Index, const, evaluate
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
