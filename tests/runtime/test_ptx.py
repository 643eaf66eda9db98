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
from deuteron.runtime import buffers, build_triton, ptx
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


PAIR = """
\tand.b32 \t%r74, %r2, 3;
\tmul.wide.u32 \t%rd12, %r2, 268435456;
\tcvt.u64.u32 \t%rd13, %r74;
\tshl.b64 \t%rd14, %rd13, 33;
\tor.b64 \t%rd15, %rd12, %rd14;
\tmov.b64 \t{_, %r111}, %rd15;
"""


def test_lower_halves_stay_in_theirs() -> None:
    """LLVM shifts a lower half that nobody reads into the upper one, which a mask compares: wrong
    attention with 8 warps (GPU fuzz 805811). Other products of 64 bits stay."""
    text = ptx.with_narrow_shifts(PAIR)
    assert "shl.b32 %low, %r2, 28; cvt.u64.u32 %rd12, %low;" in text and "mul.wide" not in text
    for other in (
        PAIR.replace("268435456", "268435455"),  # no shift
        PAIR.replace("%rd13, 33", "%rd13, 3"),  # no upper half
        PAIR.replace("or.b64", "xor.b64"),
    ):
        assert ptx.with_narrow_shifts(other) == other


def test_numbers_below_the_least_normal_one_stay(tmp_path: Path) -> None:
    """Eager's functions keep them: the gradient of a square root of tiny squares is no NaN."""
    program = scheduled(lambda x: torch.hypot(x, x.sinh()).exp(), torch.ones(64, 64), device="H200")
    made = generate(program.kernels[0], spec_of("H200"))
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ptx, "without_packed_adds", lambda t: (seen.append(t), t)[1])
        job = build_triton.job_of(made, made.configs[0], 90, aligned=False, wide=False)
        build_triton.built(job, options(tmp_path))
    flushing = set(re.findall(r"\b(\w+)\.\S*ftz", seen[0]))
    assert "sqrt" in seen[0] and flushing <= {"ex2"}  # of a power that is split before


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


PASSES = """
    %t = ttg.local_alloc : () -> !ttg.memdesc<COUNTx64x128xbf16, #shared, #smem, mutable>
    %first = ttg.memdesc_index %t[%c0] : A -> B
    %token = ttg.async_copy_global_to_local %p, %first mask %m : C -> B
    %r = scf.for %k = %c0 to %n step %c1 iter_args(%acc = %zero) -> (D)  : i32 {
      %view = ttg.memdesc_index %t[%k] : A -> B
      %turned = ttg.memdesc_trans %view {order = array<i32: 1, 0>} : B -> E
      %dot = ttng.warp_group_dot %a, %turned, %acc {isAsync = true} : F * E -> D
      %next = ttg.memdesc_index %t[%k1] : A -> B
      %more = ttg.async_copy_global_to_local %q, %next mask %m : C -> B
      scf.yield %dot : D
    }
"""


def test_buffers_that_are_filled_while_products_read_them() -> None:
    """A loop that looks one ahead needs two buffers, or a wait."""
    alone, beside = PASSES.replace("COUNT", "1"), PASSES.replace("COUNT", "2")
    assert buffers.overwritten(alone)
    assert buffers.overwritten(beside), "the product of the pass before runs, too"
    begun = "%dot = "
    wait = "      %w = ttng.warp_group_dot_wait %dot {pendings = LEFT : i32} : D\n"
    lines = {n: [x + "\n" for x in PASSES.replace("COUNT", n).split("\n")] for n in "12"}
    waited = {
        (n, left): "".join(x + (wait.replace("LEFT", left) if begun in x else "") for x in lines[n])
        for n in "12"
        for left in "01"
    }
    assert not buffers.overwritten(waited["1", "0"]) and not buffers.overwritten(waited["2", "1"])
    assert buffers.overwritten(waited["1", "1"])


def late(text: str) -> int:
    """Copies of a block that begin while its products run, or run in another warp."""
    found, left = 0, 0  # 1: products may run; 2: one's own are done
    for line in text.split("\n"):
        if ptx.BLOCK_ENDS.match(line):
            left = 0
        elif "wgmma.commit_group" in line:
            left = 1
        elif (wait := ptx.WAIT.match(line)) and wait[1] == "0":
            left = 2 if left else 0
        elif line.lstrip().startswith("bar.sync"):
            left = 1 if left == 1 else 0
        elif ptx.COPY.match(line):
            found += left > 0
    return found


SUMMED = """import triton
import triton.language as tl


@triton.jit
def summed(q, k, out):
    rows, columns = tl.arange(0, 64)[:, None], tl.arange(0, 128)[None, :]
    left = tl.load(q + tl.program_id(0) * 8192 + rows * 128 + columns)
    acc = tl.full([64, 128], 0.0, tl.float32)
    for at in tl.range(0, 4096, 64, num_stages=2):
        t = tl.load(k + (at + rows) * 128 + columns)
        s = tl.dot(left, tl.trans(t)) * tl.sum(t.to(tl.float32), 1)[None, :]
        acc = tl.dot(s.to(tl.bfloat16), t, acc)
    tl.store(out + tl.program_id(0) * 8192 + rows * 128 + columns, acc)
"""


def test_copies_wait_for_products_of_their_buffers(tmp_path: Path) -> None:
    """Gradients of attention, whose sums over gradients times results were made in the loop of the
    products: other values in each call on an H200."""
    types = ("q", "*bf16"), ("k", "*bf16"), ("out", "*fp32")
    job = build_triton.Job(
        "summed", SUMMED, types, (), (0, 1, 2), 4, 2, 0, fp_fusion=True, debug=False, capability=90
    )
    seen: list[str] = []
    before = ptx.with_waits_before_copies
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ptx, "with_waits_before_copies", lambda t: (seen.append(t), before(t))[1])
        build_triton.built(job, options(tmp_path))
    assert late(seen[0]) and not late(before(seen[0]))
