"""What short axes, windows and concatenations look like in Triton: one address for a window, points
stored together, nothing computed for the other half."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from deuteron.base.options import Options
from deuteron.base.passes import Context
from deuteron.codegen.triton.emit import Emitter
from deuteron.codegen.triton.generate import TritonKernel, generate
from deuteron.codegen.triton.scope import Dim
from deuteron.ir.index import Axis
from tests.schedule.tools import scheduled, spec_of

aten = torch.ops.aten
X = torch.randn(8, 32, 56, 64, dtype=torch.bfloat16)


def kernels(f: Callable[..., Any], *args: Tensor) -> list[TritonKernel]:
    plan = scheduled(f, *args, device="H200", check=False)
    return [generate(k, spec_of("H200")) for k in plan.kernels]


def loads(k: TritonKernel) -> list[str]:
    return [line for line in k.source.splitlines() if "tl.load(" in line]


def test_a_window_has_one_address() -> None:
    (k,) = kernels(lambda x: F.avg_pool2d(x, 3, 2, 1), X)
    places = {line.split("tl.load(")[1].split(")")[0] for line in loads(k)}
    assert len(places) == 1, places


def test_a_lane_has_several_windows() -> None:
    """Where elements come one by one: those that windows share are read once, and more are on their
    way."""
    x = X.expand(64, 8, 32, 56, 64).reshape(512, 32, 56, 64)
    (k,) = kernels(lambda x: F.avg_pool2d(x, 3, 2, 1), x)  # four of 28 rows
    assert k.source.count("tl.store(") == 4 and len(loads(k)) == 3 * (2 * 4 + 1)
    (k,) = kernels(lambda x: F.avg_pool2d(x, 2, 2), x[:, :, :32])  # nothing is shared
    assert k.source.count("tl.store(") == 8 and len(loads(k)) == 4 * 8
    (k,) = kernels(lambda x: F.avg_pool2d(x, 3, 2, 1), X)  # too few
    assert k.source.count("tl.store(") == 1
    (k,) = kernels(lambda x: F.avg_pool2d(x, (3, 1), 1), x)  # whole vectors
    assert k.source.count("tl.store(") == 1


def test_elements_apart_are_for_neighbouring_threads() -> None:
    (k,) = kernels(lambda x: F.avg_pool2d(x, 3, 2, 1), X)
    for c in k.configs[:2]:
        assert dict(c.constexprs)["XBLOCK"] == 32 * c.num_warps


def test_unrolled_points_are_stored_together() -> None:
    g = torch.randn(8, 32, 28, 32, dtype=torch.bfloat16)
    window = ([3, 3], [2, 2], [1, 1], False, True, None)
    (k,) = kernels(lambda g, x: aten.avg_pool2d_backward(g, x, *window), g, X)
    assert k.source.count("tl.store(") == k.source.count("tl.interleave(") == 2
    assert k.source.count("tl.load(") == 4  # windows over four neighbours


def test_unrolling_of_several_axes() -> None:
    """Each has a tile of its own, under names of its own (fuzz seed 12002536)."""
    along, two, three = Axis("a", 32), Axis("p", 2), Axis("q", 3)
    em = Emitter([Dim("x", (along,), "XBLOCK", 0, True)], {}, itertools.count(), "tl.int32")
    em.enter(em.dims["x"], "xoffset")
    first, second = em.widened(two, along), em.widened(three, along)
    assert em.widened(two, along) is first
    for made, axis in ((first, two), (second, three)):
        assert made.index(axis.index + along.index * axis.extent)
    names = [line.split(" = ")[0] for line in em.scope.lines]
    assert len(names) == len(set(names)), names


def test_each_part_of_a_concatenation_computes_its_own() -> None:
    x = torch.randn(2048, 256)
    (k,) = kernels(lambda x, y: torch.cat([x.exp(), y.sin()], -1), x, x)
    assert k.source.count("tl.store(") == 2 and "tl.where" not in k.source
    assert "mask" not in k.source.split("def ")[1]


def test_few_points_stay_apart() -> None:
    """H200: 31360 lanes of 8 points each took 16.6 us, of which memory took 3."""
    x = torch.randn(256, 256)
    (k,) = kernels(lambda x, y: torch.cat([x.exp(), y.sin()], -1), x, x)
    assert k.source.count("tl.store(") == 1


def test_plain_axes_stay() -> None:
    x = torch.randn(64, 4, 512)
    (k,) = kernels(lambda x, y: x * y + 1, x, x)
    assert k.source.count("tl.store(") == 1


def test_what_is_added_to_stays_in_the_cache() -> None:
    x, i = torch.randn(4096, 64), torch.randint(0, 512, (4096,))
    made = kernels(lambda x, i: torch.zeros(512, 64).index_add(0, i, x), x, i)
    loads = [line for k in made if "atomic" in k.source for line in k.source.splitlines()
             if "tl.load(" in line]  # fmt: skip
    assert [("evict_first" in line) for line in loads] == [True, False]


def test_stores_together_are_checked() -> None:
    g = torch.randn(8, 32, 28, 32, dtype=torch.bfloat16)
    window = ([3, 3], [2, 2], [1, 1], False, True, None)
    plan = scheduled(lambda g, x: aten.avg_pool2d_backward(g, x, *window), g, X, device="H200",
                      check=False)  # fmt: skip
    options = Options.make(options={"check_accesses": True})
    (k,) = [generate(k, spec_of("H200"), Context(options)) for k in plan.kernels]
    assert k.debug and k.source.count("store outside") == 2


def test_a_single_point() -> None:
    (k,) = kernels(lambda x: x[0] + x[1], torch.randn(2))
    assert k.source.count("tl.load(") == 2


def test_long_functions_are_not_written_out_for_short_numbers() -> None:
    """A model's snake activation, 8 sines of each lane for one reciprocal: H200, 52 us, of which
    memory takes 16."""
    x, alpha = torch.randn(8, 32, 32000), torch.rand(1, 32, 1)
    (k,) = kernels(lambda x, a: x + (a + 1e-9).reciprocal() * torch.sin(a * x).pow(2), x, alpha)
    assert k.source.count("libm.sin(") == 1
