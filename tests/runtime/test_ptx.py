"""What is changed in PTX before it is assembled: what the assembler, or Triton, gets wrong."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from deuteron.codegen.triton.generate import generate
from deuteron.ir.expr import Expr
from deuteron.ir.nest import Nest
from deuteron.runtime import build_triton, ptx
from deuteron.schedule import contract, dimensions
from tests.runtime.test_build_triton import options
from tests.schedule.planning import planned
from tests.schedule.tools import scheduled, spec_of


def test_packed_additions_are_written_apart() -> None:
    """ptxas 12.8 loses their constants for sm_90."""
    line = "\tadd.s16x2 \t%r45, %r37, %r44;"
    text = ptx.without_packed_adds(f"\tmov.b32 %r44, 16711935;\n{line}\n\tret;")
    assert "16x2" not in text and text.count("add.s16") == 2
    assert "{%al, %ah}, %r37" in text and "{%bl, %bh}, %r44" in text
    assert "mov.b32 %r45, {%al, %ah}" in text
    assert ptx.without_packed_adds("\tadd.s16 \t%rs1, %rs2, 3;") == "\tadd.s16 \t%rs1, %rs2, 3;"


def test_small_indices_build_without_packed_additions(tmp_path: Path) -> None:
    """Rolled matrices, whose places below 256 LLVM computes in pairs of 16 bits."""

    def rolled(x: torch.Tensor) -> torch.Tensor:  # by positions that are computed
        rows, columns = (torch.arange(6) - 1) % 6, (torch.arange(5) - 2) % 5
        return x.index_select(0, rows).index_select(1, columns)

    program = scheduled(
        lambda *xs: [rolled(x) * 2 for x in xs],
        *(torch.ones(6, 5) for _ in range(4)),
        device="H200",
    )
    made = generate(program.kernels[0], spec_of("H200"))
    seen: list[str] = []
    before = ptx.without_packed_adds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ptx, "without_packed_adds", lambda t: (seen.append(t), before(t))[1])
        job = build_triton.job_of(made, made.configs[0], 90, aligned=False, wide=False)
        build_triton.built(job, options(tmp_path))
    assert any("add.s16x2" in t for t in seen)


LOOP = """$L__BB0_1:
\tldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r9];
\tcvt.rn.bf16x2.f32 \t%r5, %f1, %f2;
\twgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f8,%f9}, {%r1,%r2}, %rd1, %p1, 1, 1, 0;
\twgmma.commit_group.sync.aligned;
\twgmma.wait_group.sync.aligned 1;
\twgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f8,%f9}, {%r4,%r5}, %rd2, %p1, 1, 1, 0;
\twgmma.commit_group.sync.aligned;
\twgmma.wait_group.sync.aligned LEFT;
\t@%p2 bra \t$L__BB0_1;
"""


def overwritten(text: str) -> list[str]:
    """Registers that are written in a loop while a product reads them."""
    found: list[str] = []
    for label in dict.fromkeys(re.findall(r"^(\$L__BB\w+):", text, re.MULTILINE)):
        start = text.index(f"{label}:")
        end = text.rfind(f"bra \t{label};", start)
        pending: list[set[str]] = [set()]  # of each group, the open one last
        for line in text[start : max(start, end)].splitlines() * 2:  # and the next pass
            if product := ptx.PRODUCT.match(line):
                pending[-1] |= ptx.registers(product[1])
            elif "wgmma.commit_group" in line:
                pending.append(set())
            elif wait := ptx.WAIT.match(line):
                pending = pending[-1 - int(wait[1]) :]
            elif defined := ptx.DEFINED.match(line):
                found += ptx.registers(defined[1]) & {r for p in pending for r in p}
    return found


def test_registers_of_running_products_are_not_written() -> None:
    """Triton 3.6 has left factors of a loop's next pass written while products of the last one
    run."""
    text = LOOP.replace("LEFT", "1")
    assert overwritten(text) and not overwritten(ptx.with_waits(text))
    assert ptx.with_waits(text).count("wait_group") == 3
    done = LOOP.replace("LEFT", "0")
    assert not overwritten(done) and ptx.with_waits(done) == done


def test_products_of_norms_wait_for_their_registers(tmp_path: Path) -> None:
    """NaN in a Nest and gradients that were no one's in a BigBird, on an H200."""

    def f(x: torch.Tensor, g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (96,), g, g) @ w.T

    sizes = (8, 3136, 96), (96,), (288, 96)
    args = [torch.ones(s).bfloat16() for s in sizes]
    makers = dimensions.makers

    def left(nest: Nest, name: str) -> list[tuple[Expr, str]]:
        """What is computed is the left factor, as attention's is."""
        return [(side, of and "results") for side, of in makers(nest, name)]

    with (
        mock.patch.multiple(contract, MIN_GAIN=-1e9, TABLE_SHARE=1e9),
        mock.patch.object(dimensions, "makers", left),
    ):
        plan = planned(f, *args, device="H200", run=False)
    (kernel,) = plan.contractions
    made = generate(kernel, spec_of("H200"))
    seen: list[str] = []
    before = ptx.with_waits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ptx, "with_waits", lambda t: (seen.append(t), before(t))[1])
        job = build_triton.job_of(made, made.configs[0], 90, aligned=True, wide=False)
        build_triton.built(job, options(tmp_path))
    assert overwritten(seen[0]) and not overwritten(before(seen[0]))
