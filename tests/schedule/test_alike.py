"""What is the same along an axis, or within a block, is computed once."""

from __future__ import annotations

import itertools
import math
import random
import re

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from deuteron.codegen.triton.generate import generate
from deuteron.ir import expr as E
from deuteron.ir.expr import flops
from deuteron.ir.index import Axis, const
from deuteron.schedule.cooperative import programs_per_row
from deuteron.schedule.narrow import narrow
from deuteron.schedule.repeated import MIN_SAVED, MOST_POINTS, shared
from deuteron.schedule.tiling import Dim
from tests.lower.harness import lowered, trace
from tests.schedule.planning import planned
from tests.schedule.tools import spec_of


@pytest.mark.parametrize("seed", range(20))
def test_what_varies_is_what_enumeration_finds(seed: int) -> None:
    pick = random.Random(seed)
    extents = [pick.choice((1, 2, 3, 4, 8, 14, 16)) for _ in range(pick.randint(1, 3))]
    axes = tuple(Axis(f"a{k}", const(n)) for k, n in enumerate(extents))
    dim = Dim("i", axes, "loop", pick.choice((1, 2, 4, 8, 16, 32)))
    some = frozenset(a for a in axes if pick.random() < 0.6)
    places = list(itertools.product(*map(range, extents)))
    value = [tuple(i for a, i in zip(axes, p, strict=True) if a in some) for p in places]
    blocks = [value[k : k + dim.block] for k in range(0, len(value), dim.block)]
    inside, between = dim.varies(some)
    assert inside or all(len(set(b)) == 1 for b in blocks)
    assert between or all(b == blocks[0][: len(b)] for b in blocks)
    if len(axes) > 1 and not dim.ragged:  # nothing is missed
        assert inside is any(len(set(b)) > 1 for b in blocks)
        assert between is any(b != blocks[0] for b in blocks)


def sampled(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return F.grid_sample(x, at, align_corners=False)


def test_coordinates_are_computed_for_one_channel() -> None:
    program = lowered(trace(sampled, (torch.randn(2, 32, 5, 7), torch.randn(2, 9, 4, 2)))).program
    wide = [
        [c for c in p.computes() if math.prod(map(_known, c.axes)) >= 2 * 32 * 9 * 4]
        for p in (program, narrow(program))
    ]
    assert len(wide[1]) < len(wide[0]) / 2
    work = [sum(flops(c.body) for c in w) for w in wide]
    assert work[1] < work[0] / 2


def _known(a: Axis) -> int:
    return a.extent.value or 1


def test_what_memory_must_have_stays_as_it_is() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x[:, None].expand(4, 6, 10).exp()
        return y, y.sum(-1) * 2

    program = narrow(lowered(trace(f, (torch.randn(4, 10),))).program)
    outputs = {o.tensor for o in program.outputs}
    stored = [c for c in program.computes() if c.name in outputs]
    assert stored and all(6 in map(_known, c.axes) for c in stored)


def test_angles_are_taken_once_for_several_heads() -> None:
    b, h, s, d = axes = [Axis(n, const(k)) for n, k in zip("bhsd", (2, 48, 24, 8), strict=True)]
    angle = E.op("cos", E.op("cos", E.load("w", (s.index, d.index), "f32")))
    value = E.op("mul", E.load("x", tuple(a.index for a in axes), "f32"), angle)
    found = shared([(value, None)], axes)
    assert found is not None and found.axis is h and found.points == MOST_POINTS
    assert 1 / MOST_POINTS < found.share < 1 / 8
    assert shared([(E.op("mul", value, value.args[0]), None)], [b, s, d]) is None
    odd = [Axis(a.name, const(3)) if a is h else a for a in axes]
    assert shared([(value, None)], odd) is None or flops(value) < MIN_SAVED


def test_programs_have_several_heads_side_by_side() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(24)[:, None] * w
        return x * angles.cos() + x.flip(-1) * angles.sin()

    (kernel,) = planned(f, torch.empty(2, 48, 24, 8), torch.empty(8), run=False).kernels
    spec = spec_of("H200")
    code = generate(kernel, spec)
    assert dict(code.configs[0].constexprs)["YBLOCK"] == MOST_POINTS


def test_rows_of_keys_are_one_number_in_a_block() -> None:
    """And what is told of places in a block is read before the loop over blocks."""
    given = [torch.empty(4, 16, n, 64).bfloat16() for n in (4096, 4096, 4096)]
    bias = [torch.empty(4, 16, 4096, 64).bfloat16() for _ in range(2)]

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *of: torch.Tensor) -> torch.Tensor:
        both = (of[0][..., :, None] + of[1][..., None, :]).flatten(-2)
        return F.scaled_dot_product_attention(q, k, v, both)

    plan = planned(f, *given, *bias, device="H200", run=False)
    (kernel,) = [k for k in plan.kernels if k.contraction]
    source = generate(kernel, spec_of("H200")).source
    before, inside = source.split(" in tl.range(", 1)
    names = [t for t, _ in kernel.reads if t.startswith("arg")]
    columns = "arg1_1"  # of the two parts of the bias, the second one
    assert columns in names and columns in before.split("= pid")[-1] and columns not in inside
    assert re.search(r"tl.full\(\[\], \w+_at, tl.int32\) // 64", inside)


def test_rows_of_nothing_that_is_read_are_shared_by_programs() -> None:
    """Of random numbers."""
    assert programs_per_row(1 << 16, 0, spec_of("H200")) == programs_per_row(
        1 << 16, 1, spec_of("H200")
    )
