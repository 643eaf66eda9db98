"""Reductions over permuted points: which places are a permutation, against every point; what they
are read by instead, or together with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deuteron.ir.index import Axis, Index, Sym, atom, const, evaluate, floordiv, mod
from deuteron.schedule.kernel import Store
from deuteron.schedule.reindex import Walk, permuted
from deuteron.schedule.space import Equation, Space, flat, solve
from tests.schedule.tools import Scheduled, scheduled

DEVICES = ["cpu", "H200"]


def is_permutation(walk: Walk, loops: list[Axis]) -> bool:
    ranges = [range(a.extent.value or 0) for a in loops]
    seen = [
        tuple(evaluate(i, dict(zip([a.name for a in loops], at, strict=True))) for i, _ in walk)
        for at in itertools.product(*ranges)
    ]
    inside = all(0 <= v < (n.value or 0) for at in seen for v, (_, n) in zip(at, walk))
    everything = math.prod(n.value or 0 for _, n in walk)
    return inside and len(seen) == len(set(seen)) == everything


@st.composite
def walks(draw: st.DrawFn) -> tuple[Walk, list[Axis]]:
    """Places that may be a permutation of a few loops: rolled, turned, in windows, scaled."""
    loops = [Axis(f"a{k}", draw(st.sampled_from((1, 2, 4, 6, 8)))) for k in range(3)]
    indices: list[tuple[Index, Index]] = []
    for a in draw(st.permutations(loops)):
        n = a.extent.value or 1
        kind = draw(st.sampled_from(("as it is", "rolled", "turned", "halves", "scaled")))
        i: Index = a.index
        if draw(st.booleans()):
            i = mod(i + draw(st.integers(0, n)), n)
        if kind == "turned":
            i = const(n - 1) - i
        elif kind == "rolled":
            i = mod(i * draw(st.sampled_from((1, 1, 3))) + draw(st.integers(0, 9)), n)
        elif kind == "scaled":
            i = floordiv(i, draw(st.sampled_from((1, 2))))
        if kind == "halves" and n % 2 == 0:
            indices += [(mod(i, n // 2), const(n // 2)), (floordiv(i, n // 2), const(2))]
        else:
            indices.append((i, a.extent))
    if draw(st.booleans()):  # several as one dimension
        taken = indices[-2:]
        number = flat([i for i, _ in taken], [n for _, n in taken])
        indices[-2:] = [(number, taken[0][1] * taken[1][1])]
    return tuple(indices), loops


def test_permutations_are() -> None:
    answers = {True: 0, False: 0}

    @settings(max_examples=400, deadline=None)
    @given(walks())
    def check(drawn: tuple[Walk, list[Axis]]) -> None:
        walk, loops = drawn
        answer = permuted(walk, loops)
        answers[answer] += 1
        assert answer == is_permutation(walk, loops), (walk, loops)

    check()
    assert all(answers.values()), answers


def test_sizes_that_are_not_known() -> None:
    """Of the outermost loop alone: places beside it are looked at one by one."""
    s = Sym("s0", 2)
    n, i = Axis("n", atom(s)), Axis("i", 8)
    rolled = (mod(i.index + 3, 8), const(8))
    assert permuted(((n.index, n.extent), rolled), [n, i])
    assert not permuted((rolled, (n.index, n.extent)), [n, i])
    assert not permuted(((mod(n.index + 1, n.extent), n.extent), rolled), [n, i])


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


def placed(d: Tensor) -> Tensor:
    """Windows of 8 x 8 [B * windows, 64, C] back in an image of 32 x 32, rolled."""
    a = d.view(-1, 4, 4, 8, 8, d.shape[-1]).permute(0, 1, 3, 2, 4, 5)
    return a.reshape(-1, 32, 32, d.shape[-1]).roll((4, 4), (1, 2))


def one(f: Callable[..., Tensor], device: str, *shape: int) -> Scheduled:
    return scheduled(f, torch.randn(*shape), device=device)


REINDEXED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "windows": (lambda d: placed(d).sum((0, 1, 2)), (32, 64, 40)),
    "windows, their maximum": (lambda d: placed(d).amax((0, 1, 2)), (32, 64, 40)),
    "windows, everything": (lambda d: placed(d).sum(), (32, 64, 40)),
    "turned": (lambda d: d.roll(3, 0).flip(0).sum(0), (64, 48)),
    "two alike": (lambda d: ((d * 2).roll(3, 0) * d.roll(3, 0)).sum(0), (64, 48)),
    "behind rows": (lambda d: d.roll((1, 2), (1, 2)).sum((1, 2)), (40, 6, 64)),
}
AS_THEY_ARE: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "positions": (lambda d: placed(d).flatten(0, 2).argmax(0), (32, 64, 40)),
    "weights by place": (
        lambda d: (placed(d) * torch.arange(32)[:, None]).sum((0, 1, 2)),
        (32, 64, 40),
    ),
    "two apart": (lambda d: (d.roll(3, 0) * d).sum(0), (64, 48)),
    "some of them": (lambda d: d.roll(3, 0)[:40].sum(0), (64, 48)),
    "beside padding": (lambda d: F.pad(d, (0, 0, 1, 0)).roll(3, 0).sum(0), (63, 48)),
    "in order": (lambda d: d.view(4, 16, 48).sum((0, 1)), (64, 48)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", REINDEXED)
def test_read_in_order(name: str, device: str) -> None:
    f, shape = REINDEXED[name]
    plan = one(f, device, *shape)
    assert len(plan.accepted("reindex")) == 1
    reads = [n for k in plan.kernels for nest in k.nests for e in nest.exprs() for n in e.loads()]
    given = [i for n in reads if n.attr[0] == "arg0_1" for i in n.attr[1]]
    assert given and not any("+" in repr(i) for i in given)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_read_as_they_are(name: str, device: str) -> None:
    f, shape = AS_THEY_ARE[name]
    assert not one(f, device, *shape).accepted("reindex")


@pytest.mark.parametrize("device", DEVICES)
def test_a_permuted_copy_and_its_sum_are_one_nest(device: str) -> None:
    def f(d: Tensor) -> tuple[Tensor, Tensor]:
        a = placed(d)
        return a, a.sum((0, 1, 2))

    plan = scheduled(f, torch.randn(32, 64, 40), device=device)
    readers = [
        nest
        for k in plan.kernels
        for nest in k.nests
        if any(n.attr[0] == "arg0_1" for e in nest.exprs() for n in e.loads())
    ]
    assert len(readers) == 1 and not plan.accepted("reindex")
    assert any(isinstance(s, Store) and s.level == "point" for s in readers[0].stmts)
