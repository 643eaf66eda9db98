"""Loops of nests with products in parts: one query of each head that reads a cache of keys."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from deuteron.base.device import named_gpu
from deuteron.base.options import Options
from deuteron.codegen.triton.generate import generate
from deuteron.ir.nest import Nest, run_nest
from deuteron.ir.program import Layout
from deuteron.runtime.build_triton import build
from deuteron.schedule import contract
from deuteron.schedule.parts import parted
from tests.codegen.attention_values import wrong
from tests.codegen.cubins import resources
from tests.codegen.decoding_values import FORMS, MASKED, in_parts, inputs
from tests.interpreting import reported
from tests.schedule.attention_variants import VARIANTS
from tests.schedule.planning import Plan, planned

SCRIPT = Path(__file__).parents[1] / "codegen" / "decoding_values.py"
LENGTHS = ("1", "300", "200,300,641")  # of caches; several: one graph, sizes of the call
SPLIT = (
    *("plain", "causal_mask", "least_numbers", "soft_cap", "sinks", "off_by_one"),
    *("dropped", "sigmoid", "squared_relu", "with_logarithm", "lengths", "padded"),
)
BATCH, HEADS, SHARED, KEYS, WIDTH = 8, 32, 4, 8192, 128


def decoding(name: str, device: str = "H200") -> Plan:
    """What becomes of a form at the sizes of a model that answers."""
    heads = [
        torch.empty(BATCH, h, n, WIDTH, dtype=torch.bfloat16)
        for h, n in ((HEADS, 1), (HEADS // SHARED, KEYS), (HEADS // SHARED, KEYS))
    ]
    valid = [torch.zeros(BATCH, dtype=torch.int64)] if name in MASKED else []
    with torch.no_grad():
        return planned(FORMS[name], *heads, *valid, device=device, run=False)


@pytest.mark.parametrize("name", sorted(FORMS.keys() - {"sigmoid"}))
def test_keys_are_read_once_by_many_programs(name: str) -> None:
    plan = decoding(name)
    partial, merger = plan.contractions
    assert [partial, merger] == plan.kernels and not plan.calls
    (taken,) = (d for d in plan.decisions(True) if "2 kernels" in d["detail"])
    assert taken["us"] > 0 and "us apart" in taken["detail"]
    assert partial.contraction and merger.contraction
    spec = named_gpu("H200")
    assert spec is not None and partial.contraction[1].programs() > 0.9 * spec.cores
    moved = 2 * BATCH * HEADS // SHARED * KEYS * WIDTH * 2
    assert moved <= partial.bytes <= 1.02 * moved and merger.bytes < 0.02 * moved
    stored = [x for _, x in partial.writes]
    assert {x.dtype for x in stored} == {"f32"} and len(stored) == 3


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("length", [1, 127, 2047])
@pytest.mark.parametrize("name", sorted(FORMS))
def test_values(name: str, length: int, groups: int) -> None:
    """By the reference executor; heads share keys, or do not; a cache may be empty."""
    args = inputs(name, length, torch.bfloat16, groups)
    with in_parts(), torch.no_grad():
        plan = planned(FORMS[name], *args, device="H200")
    rows = length < 256 or name == "sigmoid"  # whose products are rows of one kernel
    assert len(plan.contractions) == 2 or rows
    wide = [a.double() if a.is_floating_point() else a for a in args]
    text = wrong(plan.results, FORMS[name](*args), FORMS[name](*wide), torch.bfloat16)
    assert not text, text


@pytest.mark.xdist_group("decoding")
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", sorted(FORMS))
def test_values_of_kernels(name: str, lengths: str, groups: int) -> None:
    rows = reported(SCRIPT, *LENGTHS)
    wanted = {"form": name, "lengths": lengths, "groups": groups, "problems": []}
    assert wanted in rows, [r for r in rows if r["form"] == name]


def test_kernels_are_built_without_a_gpu(tmp_path: Path) -> None:
    options = Options.make(options={"cache_dir": str(tmp_path)})
    spec = named_gpu("H200")
    assert spec is not None
    for kernel in decoding("cache").kernels:
        code = generate(kernel, spec)
        binary = build(code, code.configs[0], 90, options)
        assert resources(binary.code, tmp_path)[1] == 0, "nothing is spilled"


def results(nest: Nest, known: dict[str, Tensor], layouts: dict[str, Layout]) -> dict[str, Tensor]:
    """What a nest stores."""
    out = {n: torch.full(shape_of(layouts[n]), float("nan")) for n in nest.tensors()[1]}
    for name, at, value in run_nest(nest, known, {}, "cpu"):
        out[name][tuple(at)] = value.to(out[name].dtype)
    return out


def shape_of(layout: Layout) -> list[int]:
    return [int(n.value or 0) for n in layout.shape]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", SPLIT)
def test_parts_give_what_the_whole_does(name: str, count: int) -> None:
    """Of attention with more queries, too: splitting keys and merging changes nothing."""
    v = VARIANTS[name]
    args = v.inputs(150, torch.float32)
    with mock.patch.object(contract, "MIN_GAIN", -1e9), torch.no_grad():
        plan = planned(v.f, *args, device="cpu")
    (kernel,) = plan.contractions
    assert kernel.contraction is not None
    nest, _ = kernel.contraction
    layouts = dict(kernel.reads) | dict(kernel.writes)
    axis = next(a for a in nest.axes if parted(nest, a, count, "cpu") is not None)
    whole = results(nest, plan.tensors, layouts)
    both = parted(nest, axis, count, "cpu")
    assert both is not None
    layouts |= both.layouts
    partial = results(both.partial, plan.tensors, layouts)
    merged = results(both.merger, plan.tensors | partial, layouts)
    assert merged.keys() == whole.keys()
    for n, x in whole.items():
        assert torch.allclose(merged[n], x, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", ["hidden_rows", "shifted_sinks"])
def test_what_needs_the_whole_row_again_has_no_parts(name: str) -> None:
    """What is chosen of weights by their quotients; a second maximum."""
    v = VARIANTS[name]
    with mock.patch.object(contract, "MIN_GAIN", -1e9), torch.no_grad():
        plan = planned(v.f, *v.inputs(150, torch.float32), device="cpu", run=False)
    for nest in (k.contraction[0] for k in plan.contractions if k.contraction):
        assert all(parted(nest, a, 2, "cpu") is None for a in nest.axes)


def test_a_number_has_no_place_for_a_row() -> None:
    """A gradient behind products of one row and one column: a result without axes."""

    def f(x: Tensor, w: Tensor, b: Tensor, scale: Tensor, v: Tensor, c: Tensor) -> Tensor:
        y = torch.addmm(b, x.reshape(1, -1), w.t()).reshape(-1)
        return F.linear(F.layer_norm(y, y.shape[-1:], scale, scale), v, c)

    shapes: list[tuple[int, ...]] = [(2,), (2, 2), (2,), (2,), (1, 2), (1,)]
    args = [torch.randn(s, dtype=torch.bfloat16) for s in shapes]
    args[3].requires_grad_()
    plan = planned(f, *args, run=False)
    plan.results.sum().backward()
    assert len(plan.schedules) == 2
