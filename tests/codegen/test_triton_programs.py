"""What the scheduler makes of whole programs, as Triton kernels: values under the interpreter, and
ahead-of-time builds for two generations of GPUs, on a machine without one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from deuteron.base.options import Options
from deuteron.codegen.triton.generate import TritonKernel, generate
from deuteron.runtime.build_triton import build
from tests.codegen.cubins import instructions, resources
from tests.codegen.triton_programs import (
    EVERY,
    GROUPED,
    GROUPS,
    JOINED,
    RUNS,
    behind_sums,
    chained_sums,
    in_blocks,
    kernels,
    planned,
    sharing,
)
from tests.interpreting import reported
from tests.schedule.tools import scheduled, spec_of

SCRIPT = Path(__file__).with_name("triton_programs.py")


@pytest.mark.xdist_group("programs")
@pytest.mark.parametrize("name", EVERY)
def test_values(name: str) -> None:
    (measured,) = [entry for entry in reported(SCRIPT) if entry["program"] == name]
    assert "failure" not in measured, measured["failure"]
    assert measured["error"] <= 1


@pytest.mark.parametrize("name", [n for n in GROUPS if n.startswith("gradients")])
def test_groups_are_read_once(name: str) -> None:
    """Rows and the sums of their groups are one nest, of which no split has two groups."""
    nests = [n for k in planned(name).kernels for n in k.nests]
    (nest,) = [n for n in nests if n.row_split is not None]
    axis, count = nest.row_split
    assert axis.extent.value == count
    assert any(getattr(s, "partial", False) for s in nest.stmts)


@pytest.mark.parametrize("name", GROUPED)
def test_groups_are_reduced_beside_rows(name: str) -> None:
    (kernel,) = planned(name).kernels
    (nest,) = kernel.nests
    assert nest.group_axes
    (made,) = kernels(planned(name), name)
    assert made.source.count("tl.load(") == len(kernel.reads), "everything is read once"


@pytest.mark.parametrize("name", RUNS)
def test_what_runs_of_a_row_share_is_read_once_for_each(name: str) -> None:
    (made,) = kernels(planned(name), name)
    assert made.source.count("libm.in_runs(tl.load(") == 2


def test_even_and_odd_elements_of_rows_are_read_together() -> None:
    name = "interleaved: rows of 1020"
    (made,) = kernels(planned(name), name)
    assert made.source.count("libm.in_pairs(tl.load(") == 1
    assert made.source.count("tl.load(") == 3, "bytes, scales, the row"


@pytest.mark.parametrize("name", JOINED)
def test_joined_columns_are_summed_part_by_part(name: str) -> None:
    made, *_ = kernels(planned(name), name)
    parts = re.findall(r"^def (_triton_\w+)\(", made.source, re.M)
    assert len(parts) == (2 if name == "gated" else 3)
    assert made.source.count("libm.sigmoid(") == (2 if name == "gated" else 0)


def test_what_waits_for_nothing_leaves_registers(tmp_path: Path) -> None:
    """Each sum of a chain is stored before the next one is read, and what all rows share is read
    again; values that are kept would not fit."""
    shapes = ((4096, 768), *((4096, 768), (768,)) * 12)
    given = (torch.empty(s).bfloat16() for s in shapes)
    (kernel, *_) = scheduled(behind_sums, *given, device="H200", check=False).kernels
    made = generate(kernel, spec_of("H200"))
    text = made.source
    assert 0 < text.index("tl.store(") < text.rindex("tl.load(")
    assert text.index("for xoffset") < text.index("tl.load(")
    options = Options.make(options={"cache_dir": str(tmp_path)})
    _, spilled = resources(build(made, made.configs[0], 90, options).code, tmp_path)
    assert spilled == 0


def test_points_of_many_tensors_are_stored_one_by_one(tmp_path: Path) -> None:
    given = tuple(torch.empty(4096, 768) for _ in range(24))
    (kernel,) = scheduled(chained_sums, *given, device="H200", check=False).kernels
    made = generate(kernel, spec_of("H200"))
    assert made.source.index("tl.store(") < made.source.rindex("tl.load(")


def test_splits_keep_their_warps_beside_others() -> None:
    """A sum of columns that wants 8 warps has smaller blocks beside rows that want fewer."""

    def f(g: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dx = g - x * (g * x).mean(-1, keepdim=True)
        return dx, (g * x).sum(0), y.sum(0)

    for n in (128, 768):
        rows = [torch.empty(6272, n).bfloat16() for _ in "gx"]
        plan = scheduled(f, *rows, torch.empty(264, 1024), device="H200", check=False)
        alone, *others = plan.kernels
        (split,) = alone.nests
        (beside,) = (n for k in others for n in k.nests if n.parallel[0].extent.value == 1024)
        reads, writes = (
            tuple(t for k in plan.kernels for t in getattr(k, w)) for w in ("reads", "writes")
        )
        both = replace(alone, nests=(beside, split), reads=reads, writes=writes)
        a, b = (generate(k, spec_of("H200")).configs[0].num_warps for k in (alone, both))
        assert a == b


@pytest.mark.parametrize("length", [4096, 8192])
def test_a_row_with_groups_stays_in_registers(length: int, tmp_path: Path) -> None:
    """What a few lanes of a warp have of a group they reduce by themselves: 16 bytes each."""

    def quantised(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, scale = in_blocks(F.rms_norm(x, w.shape, w).float(), 128)
        return y.to(torch.float8_e4m3fn), scale

    args = (torch.empty(4096, length).bfloat16(), torch.empty(length).bfloat16())
    (kernel,) = scheduled(quantised, *args, device="H200", check=False).kernels
    made = generate(kernel, spec_of("H200"))
    options = Options.make(options={"cache_dir": str(tmp_path)})
    for config in made.configs:
        binary = build(made, config, 90, options)
        registers, spilled = resources(binary.code, tmp_path)
        assert spilled == 0 and registers <= 64
        assert binary.shared <= 1024, "no more than a row's reductions and scales"


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize("name", EVERY)
def test_builds_ahead_of_time(name: str, capability: int, tmp_path: Path) -> None:
    options = Options.make(options={"cache_dir": str(tmp_path)})
    for kernel in kernels(planned(name), name, "A100" if capability < 90 else "H200"):
        built(kernel, capability, options)


def test_builds_for_an_older_gpu(tmp_path: Path) -> None:
    """What has another text there, and for each device function a kernel that calls it."""
    options = Options.make(options={"cache_dir": str(tmp_path)})
    called: set[str] = set()
    for name in EVERY:
        plan = planned(name)
        newer = [k.source for k in kernels(plan, name)]
        for kernel in kernels(plan, name, "A100"):
            own = set(re.findall(r"libm\.\w+", kernel.source))
            if kernel.source not in newer or not own <= called:
                built(kernel, 80, options)
                called |= own


def built(kernel: TritonKernel, capability: int, options: Options) -> None:
    binary = build(kernel, kernel.configs[0], capability, options)
    assert binary.code and binary.shared <= 163 << 10


def test_exponentials_of_a_shared_row_are_computed_once() -> None:
    (kernel,) = kernels(planned("shared: softmax of halves"), "shared: softmax of halves")
    # Two of numbers of which there is one for each program, one of the elements.
    assert kernel.source.count("exp_fast(") == 3
    exact = "shared: softmax"  # what is stored in f32 is not the block's by a product
    (kernel,) = kernels(planned(exact), exact)
    assert "libm.exp(" in kernel.source


def test_what_is_the_same_in_a_block_is_read_once() -> None:
    name = "shared: norm of groups, weights by channel"
    (kernel,) = kernels(planned(name), name)
    assert kernel.source.count("tl.broadcast_to(tl.load(") == 2
    assert kernel.programs_per_row == 16


def test_clusters_load_before_they_meet(tmp_path: Path) -> None:
    """What comes first, and last, does not wait until what was written before is seen by others."""
    f = lambda x, w, b: F.layer_norm(x, (131072,), w, b)  # noqa: E731
    args = [torch.zeros(*shape).bfloat16() for shape in ((64, 131072), (131072,), (131072,))]
    (kernel,) = scheduled(f, *args, device="H200", check=False).kernels
    made, options = generate(kernel, spec_of("H200")), Options(cache_dir=str(tmp_path))
    assert made.cluster and made.programs_per_row == 16
    opcodes = instructions(build(made, made.configs[0], 90, options).code, tmp_path)
    (begun,) = [k for k, name in enumerate(opcodes) if name == "UCGABAR_ARV"]
    (met,) = [k for k, name in enumerate(opcodes) if name == "UCGABAR_WAIT"]
    loads = [k for k, name in enumerate(opcodes) if name.startswith(("LDG.", "LDGSTS."))]
    assert begun < loads[0] and sum(k < met for k in loads) >= 8
    assert not [name for name in opcodes if name.startswith("MEMBAR")]


def programs_of(f: Any, *args: torch.Tensor) -> set[int]:
    with sharing("shared: softmax"):
        plan = scheduled(f, *args, device="H200")
        return {generate(k, spec_of("H200")).programs_per_row for k in plan.kernels}


def test_rows_of_which_nothing_is_needed_again_are_not_shared() -> None:
    """What the reductions read must be what the rest of the row reads."""
    x, y = torch.randn(9, 200), torch.randn(9, 200)
    assert programs_of(lambda x: x * 2 + (x * x).sum(-1, keepdim=True), x) == {4}
    assert programs_of(lambda x, y: x * 2 + (y * y).sum(-1, keepdim=True), x, y) == {1}
