"""Kernels with products: values under the interpreter for many tilings, builds for a GPU that is
absent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from deuteron.base.device import named_gpu
from deuteron.base.options import Options
from deuteron.codegen.triton.generate import generate
from deuteron.runtime import build_triton, ptx
from deuteron.runtime.build_triton import build
from deuteron.schedule.dimensions import dimensions
from deuteron.schedule.tile import feasible, listed
from dev.measure.tilings import kernel_of, product_case
from tests.codegen.contraction_tilings import WIDE
from tests.codegen.cubins import instructions, never_written, resources
from tests.interpreting import reported
from tests.schedule.contraction_programs import CHAINS, PROGRAMS, RANDOM, causal
from tests.schedule.planning import planned

SCRIPT = Path(__file__).with_name("contraction_tilings.py")
# A block's maximum is another one than the row's: halves are rounded at another scale.
TOLERANCE = {"bfloat16": 4e-3, "float32": 2e-6}


@pytest.mark.xdist_group("contractions")
@pytest.mark.parametrize(
    "name,dtype",
    [*((n, "bfloat16") for n in sorted(PROGRAMS | RANDOM)), *((n, "float32") for n in WIDE)],
)
def test_every_tiling_computes_the_nest(name: str, dtype: str) -> None:
    every = reported(SCRIPT, "0", "1", dtype)
    rows = [r for r in every if r["case"] == name]
    ways = ("fetches", "puts", "persistent") if dtype == "bfloat16" else ()
    assert all(any(how in r["tiling"] for r in every) for how in ways)
    both = name in (*CHAINS, *RANDOM) and dtype == "bfloat16"
    assert len(rows) >= (4 if both else 2), "of the forward and the backward"
    for row in rows:
        assert row["error"] <= TOLERANCE[dtype] and row["repeats"], row


def test_attention_is_built_without_a_gpu(tmp_path: Path) -> None:
    heads = [torch.empty(1, 8, 1024, 64, dtype=torch.bfloat16) for _ in range(3)]
    with torch.no_grad():
        (kernel,) = planned(causal, *heads, run=False).kernels
    spec = named_gpu("H100")
    assert spec is not None
    code = generate(kernel, spec)
    options = Options.make(options={"cache_dir": str(tmp_path)})
    binary = build(code, code.configs[0], 90, options)
    _, local = resources(binary.code, tmp_path)
    assert local == 0, "nothing is spilled"
    assert any("HGMMA" in x for x in instructions(binary.code, tmp_path)), "tensor cores multiply"


def test_what_a_maximum_is_looked_for_in_is_rounded_alike() -> None:
    """Two layouts of a value are computed apart, with multiply-adds or without: then no element
    equals the maximum, and gradients are NaN (GPU fuzz 7510758). Attention keeps none of its
    scores."""

    def f(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = a @ b * 0.3 + a[..., :1]
        return scores.amax(-1), scores.tanh(), scores

    sizes = (4, 1024, 64), (4, 64, 1024)
    spec = named_gpu("H200")
    assert spec is not None
    args = [torch.empty(s, dtype=torch.bfloat16) for s in sizes]
    heads = [torch.empty(1, 8, 1024, 64, dtype=torch.bfloat16) for _ in range(3)]
    exact = [torch.empty(1, 3, 65, 33) for _ in range(3)]  # exponentials may be another kernel's
    for g, inputs, fused in ((f, args, False), (causal, heads, True), (causal, exact, False)):
        (kernel,) = planned(g, *inputs, device="H200", run=False).contractions
        assert generate(kernel, spec).fp_fusion == fused


def turned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    i = torch.arange(q.shape[-2])
    return torch.where(i.flip(0)[:, None] <= i, q @ k.mT, 0.0) @ v


def test_masks_of_places_counted_from_the_end_are_compared_everywhere(tmp_path: Path) -> None:
    """Triton takes ``16 - j`` of neighbours j for multiples of 16: of each 16 comparisons with
    positions one was left, 7 in all (fuzz 7510079)."""
    found = []
    for length in (17, 18):
        heads = [torch.empty(2, length, 16, dtype=torch.bfloat16) for _ in range(3)]
        with torch.no_grad():
            (kernel,) = planned(turned, *heads, device="H200", run=False).kernels
        spec = named_gpu("H200")
        assert spec is not None
        code = generate(kernel, spec)
        binary = build(code, code.configs[0], 90, Options(cache_dir=str(tmp_path)))
        names = instructions(binary.code, tmp_path)
        found.append(sum(n.startswith("ISETP") for n in names))
    assert abs(found[0] - found[1]) <= 3, found


def few_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax((q @ k.mT * 0.1768).float(), -1).to(v.dtype) @ v.transpose(1, 2)


@pytest.mark.parametrize("whole", [True, False])
def test_descriptors_of_one_address_are_made_of_registers_that_are_written(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of 65 places are one block each, in the same shared memory."""
    if whole:  # as Triton has them: this is how wrong results came about
        monkeypatch.setattr(ptx, "with_halves", lambda text: text)
    heads = [torch.empty(2, 4, 65, 32, dtype=torch.bfloat16) for _ in range(2)]
    values = torch.empty(2, 65, 4, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        (kernel,) = planned(few_keys, *heads, values, device="H200", run=False).kernels
    spec = named_gpu("H200")
    assert spec is not None
    code = generate(kernel, spec)
    job = build_triton.job_of(code, code.configs[0], 90, aligned=True, wide=False)
    options = Options.make(options={"cache_dir": str(tmp_path)})
    lost = never_written(build_triton.built(job, options).code, tmp_path)
    assert bool(lost) is whole, "if ptxas no longer loses registers, `with_halves` can go"


def test_boxes_are_copied_and_what_is_not_aligned_is_loaded(tmp_path: Path) -> None:
    case = product_case("half", turned=True)
    groups, spec = dimensions(case.nest), named_gpu("H100")
    assert spec is not None
    row = [[128, 256, 64], 8, 3, [1.0, 1.0], "fetches puts persistent"]
    (tiling,) = listed(case.nest, groups, case.layouts, spec, [row])
    assert feasible(case.nest, tiling, case.layouts, spec)
    code = kernel_of(case, tiling, "linear")
    options = Options.make(options={"cache_dir": str(tmp_path)})
    assert code.grid(code.configs[0], {}) == spec.cores and len(code.boxes) == 3
    for aligned in (True, False):
        binary = build(code, code.configs[0], 90, options, aligned)
        found = {x.partition(".")[0] for x in instructions(binary.code, tmp_path)}
        assert len(binary.boxes) == 3 * aligned
        assert ("UTMALDG" in found) is ("UTMASTG" in found) is aligned and "HGMMA" in found
        _, local = resources(binary.code, tmp_path)
        assert local == 0 or not aligned, "nothing is spilled"
