"""The Triton generator on hand-built kernels: values under Triton's interpreter, and ahead-of-time
builds without a GPU.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deuteron.base.options import Options
from deuteron.base.passes import Context
from deuteron.codegen.triton import tiling
from deuteron.codegen.triton.generate import generate
from tests.codegen.test_cpp_fuzz import Maker
from tests.interpreting import reported
from tests.schedule.tools import scheduled, spec_of

SCRIPT = Path(__file__).with_name("triton_cases.py")
spec = importlib.util.spec_from_file_location("triton_cases", SCRIPT)
assert spec is not None and spec.loader is not None
cases = importlib.util.module_from_spec(spec)
sys.modules["triton_cases"] = cases
spec.loader.exec_module(cases)


@pytest.mark.xdist_group("cases")
@pytest.mark.parametrize("name", cases.CASES)
def test_values(name: str) -> None:
    (measured,) = [entry for entry in reported(SCRIPT, *cases.CASES) if entry["case"] == name]
    assert "failure" not in measured, measured["failure"]
    wrong = {k: v for k, v in measured["errors"].items() if not v <= 1}
    assert not wrong, f"error over tolerance, by output: {wrong}"
    assert set(measured["errors"]) == set(cases.CASES[name]().expected)


def compiled(kernel: Any, config: Any, capability: int, folder: Path, wide: bool = False) -> str:
    """The PTX of a kernel."""
    function = cases.module(kernel, folder)
    signature = kernel.signature(wide)
    order = list(signature)
    constants = {(order.index(n),): v for n, v in kernel.constants(config, wide).items()}
    attrs = {(order.index(n),): [["tt.divisibility", 16]] for n in kernel.aligned}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attrs)
    options = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": kernel.fp_fusion,
        "debug": kernel.debug,
        "sanitize_overflow": False,
    }
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm[
        "ptx"
    ]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", cases.CASES)
def test_builds_without_gpu(name: str, tmp_path: Path) -> None:
    _, kernel = cases.build(name)
    assert ".entry" in compiled(kernel, kernel.configs[0], 90, tmp_path)


@pytest.mark.parametrize(
    "name", ["pointwise", "softmax_online", "split_persistent", "argmax_looped"]
)
def test_builds_for_ampere_and_wide(name: str, tmp_path: Path) -> None:
    _, kernel = cases.build(name)
    assert ".target sm_80" in compiled(kernel, kernel.configs[-1], 80, tmp_path)
    if kernel.wide_source is not None:
        assert "add.s64" in compiled(kernel, kernel.configs[0], 90, tmp_path, wide=True)


def test_loads_of_16_bytes(tmp_path: Path) -> None:
    i = cases.axis("i", 1 << 24)
    body = cases.cast(cases.op("exp", cases.cast(cases.at("x", i, dtype="bf16"), "f32")), "bf16")
    layout = cases.lay(1 << 24, dtype="bf16")
    nest = cases.Nest((i,), (), (cases.store("y", (i,), body),))
    kernel = cases.generate(
        cases.Kernel("poi", (nest,), (("x", layout),), (("y", layout),), (), "cuda", 0, 0, 0),
        cases.SPEC,
    )
    text = compiled(kernel, kernel.configs[0], 90, tmp_path)
    assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text


def test_same_kernel_same_text() -> None:
    assert (
        cases.build("layer_norm_welford")[1].source == cases.build("layer_norm_welford")[1].source
    )


def test_wide_indices() -> None:
    n = cases.Sym("s0", 0, 1000)
    i = cases.axis("i", cases.atom(n))
    nest = cases.Nest((i,), (), (cases.store("y", (i,), cases.at("x", i)),))
    layout = cases.lay(cases.atom(n))
    kernel = cases.generate(
        cases.Kernel("poi", (nest,), (("x", layout),), (("y", layout),), (), "cuda", 0, 0, 0),
        cases.SPEC,
    )
    assert not kernel.is_wide({"s0": 1000}) and kernel.is_wide({"s0": 2**31})
    assert kernel.signature()["s_s0"] == "i32" and kernel.signature(wide=True)["s_s0"] == "i64"
    assert kernel.grid(kernel.configs[0], {"s0": 0}) == 0
    big = cases.lay(2**32)
    i = cases.axis("i", 2**32)
    nest = cases.Nest((i,), (), (cases.store("y", (i,), cases.at("x", i)),))
    kernel = cases.generate(
        cases.Kernel("poi", (nest,), (("x", big),), (("y", big),), (), "cuda", 0, 0, 0), cases.SPEC
    )
    assert "to(tl.int64)" in kernel.source and kernel.wide_source is None


def test_one_pass_where_an_identity_allows_it() -> None:
    """The loops of a looped softmax and layer norm: one for the reductions, one for the stores."""
    for name in ("softmax_online", "layer_norm_welford"):
        text = cases.build(name)[1].source
        assert text.count("for roffset in") == 1 and text.count("for rback in") == 1


def test_compared_positions_are_checked() -> None:
    """A scatter of one element per row compares positions; they are checked as loads are."""
    one = torch.zeros(5, 1, dtype=torch.int64)
    made = scheduled(lambda x, i: x.scatter(1, i, 1.0), torch.ones(5, 40), one, device="H200")
    (kernel,) = made.kernels
    assert "device_assert" in cases.generate(kernel, cases.SPEC).source
    unchecked = cases.generate(kernel, cases.SPEC, Context(Options(bounds_check=False)))
    assert not unchecked.debug and "device_assert" not in unchecked.source


def test_loaded_indices_are_checked(tmp_path: Path) -> None:
    made, kernel = cases.build("gather")
    assert kernel.debug and "__assertfail" in compiled(kernel, kernel.configs[0], 90, tmp_path)
    unchecked = cases.generate(
        made.kernel("gather"), cases.SPEC, Context(Options(bounds_check=False))
    )
    assert not unchecked.debug and "device_assert" not in unchecked.source


def test_random_kernels() -> None:
    """Against the reference executor."""
    entries = reported(SCRIPT, "--fuzz", "0", "40")
    assert len(entries) > 8
    for entry in entries:
        assert "failure" not in entry, (entry["case"], entry["failure"])
        assert all(v <= 1 for v in entry["errors"].values()), entry


def test_random_kernels_build(tmp_path: Path) -> None:
    for seed in range(100, 110):
        kernel = cases.generate(Maker(seed).kernel(), cases.SPEC)
        config = kernel.configs[-1]
        assert compiled(kernel, config, 90, tmp_path, wide=kernel.wide_source is not None)


def test_windows_are_written_out() -> None:
    source = cases.build("pooling_window")[1].source
    assert "RBLOCK" not in source and "for " not in source


@pytest.mark.parametrize(("channels", "stages"), [(8, False), (16, False), (128, True)])
def test_short_runs_of_memory_are_not_pipelined(
    channels: int, stages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of channels-last images: each pixel's channels would be a copy to shared memory."""
    monkeypatch.setattr(tiling, "ROW_LIMIT", 1024)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.unflatten(1, (-1, channels))
        return y - y.mean((2, 3, 4), keepdim=True)

    x = torch.randn(2, 4 * channels, 24, 24).to(memory_format=torch.channels_last)
    (kernel,) = scheduled(f, x, device="H200", check=False).kernels
    made = generate(kernel, spec_of("H200"))
    assert any(c.num_stages > 1 for c in made.configs) == stages


def test_columns_that_lie_side_by_side_are_pipelined() -> None:
    """A tile spans many columns, so that each row of it is a long run of memory."""
    x = torch.empty(4096, 1 << 16, dtype=torch.bfloat16)
    (kernel,) = scheduled(lambda x: x.softmax(0), x, device="H200", check=False).kernels
    assert generate(kernel, spec_of("H200")).configs[0].num_stages > 1
