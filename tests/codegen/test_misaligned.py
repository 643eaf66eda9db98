"""Rows that begin between multiples of 16 bytes: values under Triton's interpreter, and whole
vectors in what is built ahead of time."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from deuteron.codegen.triton.generate import TritonKernel, generate
from deuteron.runtime.build_triton import module
from tests.codegen.misaligned_programs import LOOPED, PROGRAMS, WHOLE, kernels, planned
from tests.interpreting import reported
from tests.schedule.tools import scheduled, spec_of

SCRIPT = Path(__file__).with_name("misaligned_programs.py")


@pytest.mark.xdist_group("misaligned")
@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name: str) -> None:
    entries = [entry for entry in reported(SCRIPT) if entry["case"][0] == name]
    assert len(entries) >= 8
    check(entries)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_of_every_length(name: str) -> None:
    check(reported(SCRIPT, "--every", name))


def check(entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        assert "failure" not in entry, (entry["case"], entry["failure"])
        assert entry["error"] <= 1, entry


def accesses(t: TritonKernel, folder: Path, aligned: bool = True) -> Counter[str]:
    """Instructions that read or write memory outside of the block, for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    path = folder / f"{t.name}.py"
    path.write_text(t.source, encoding="utf-8")
    config = t.configs[0]
    attrs = {(t.params.index(p),): [["tt.divisibility", 16]] for p in t.aligned if aligned}
    source = ASTSource(
        fn=getattr(module(path), t.name),
        signature=t.signature(),
        constexprs=t.constants(config, aligned=aligned),
        attrs=attrs,
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder / "triton")
        done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    matches = re.findall(r"(ld|st)\.global\S*?((?:\.v\d)?\.b\d+)", done.asm["ptx"])
    return Counter(f"{what}{width}" for what, width in matches)


@pytest.mark.parametrize(
    ("name", "n", "how"),
    [
        ("softmax", 1001, LOOPED),
        ("softmax of columns", 1001, LOOPED),
        ("softmax to f32", 1001, LOOPED),
        ("layer norm", 1001, LOOPED),
        ("gradients of layer norm", 129, WHOLE),
        ("gradients of layer norm", 65535, WHOLE),
    ],
)
def test_whole_vectors(name: str, n: int, how: str, tmp_path: Path) -> None:
    """What is read of rows comes in vectors; what is written, but for the ends."""
    plan, _ = planned(name, n, how, dynamic=False)
    first = kernels(plan, how)[0]
    assert "rrotation" in first.source
    count = accesses(first, tmp_path)
    assert not count["ld.b16"] and not count["ld.b8"], count
    assert count["ld.v4.b32"] or "cp.async" in first.source or first.configs[0].num_stages > 1
    if name != "softmax of columns":  # whose results begin elsewhere
        assert count["st.v4.b32"] or count["st.v2.b32"], count


def test_rows_of_one_alignment_class_are_a_split() -> None:
    """Programs share them, and what all rows share is read once per split."""
    plan, _ = planned("gradients of layer norm", 65535, WHOLE, dynamic=False)
    first = kernels(plan, WHOLE)[0]
    before, loop = first.source.split("for xoffset in tl.range(xfirst, xnumel, ")
    assert first.programs_per_row > 1 and first.cluster and "rrotation = -(" in before
    count = int(loop.split(" ", 1)[0])
    assert "rotated_load" not in loop and "rotated_load" in before and count % 8 == 0


@pytest.mark.parametrize(
    ("n", "edge"),
    [
        (65535, "65535 % RBLOCK - 15"),
        (50257, "50263 % RBLOCK - 15"),
        (1001, "1007 % RBLOCK - 15"),
    ],
)
def test_only_the_last_lanes_ask_for_a_rows_ends(n: int, edge: str) -> None:
    """Two vectors before the end of the ring."""
    if n == 1001:
        plan, _ = planned("softmax", n, LOOPED, dynamic=False)
        first = kernels(plan, LOOPED)[0]
    else:
        x = torch.empty(4096, n, dtype=torch.bfloat16)
        (kernel,) = scheduled(lambda x: x.softmax(-1), x, device="H200", check=False).kernels
        first = generate(kernel, spec_of("H200"))
    assert f"EDGE: tl.constexpr = {edge}\n" in first.source
    ends = [line for line in first.source.split("\n") if "roffset - rring) + tl.arange" in line]
    assert len(ends) >= 2 and all("redge & (rlane >= rhead" in line for line in ends)


@pytest.mark.parametrize("name", ["layer norm of f32", "norm with weights of f32"])
def test_f32_beside_weights_of_columns(name: str) -> None:
    """A warp's f32 are whole lines from any place; weights would come from two vectors each."""
    plan, _ = planned(name, 1001, LOOPED, dynamic=False)
    assert not any("rrotation" in k.source for k in kernels(plan, LOOPED))


def test_other_addresses(tmp_path: Path) -> None:
    """Where tensors begin between multiples of 16 bytes nothing is read that is not theirs."""
    plan, _ = planned("softmax", 1001, LOOPED, dynamic=False)
    count = accesses(kernels(plan, LOOPED)[0], tmp_path, aligned=False)
    assert set(count) == {"ld.b16", "st.b16"}
