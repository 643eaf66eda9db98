"""8-bit floats: conversions bit for bit as torch's, on both targets; what is not a conversion or a
copy goes to the library."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import deuteron
from deuteron.base.options import Options
from deuteron.ir.float8 import float8_bits, float8_value
from deuteron.lower import pointwise
from tests.interpreting import interpret
from tests.test_pipeline import compiled

DTYPES = {"f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}
ROOT = Path(__file__).resolve().parents[1]


def samples() -> Tensor:
    """All numbers of 16 bits, what lies half between them, and next to that."""
    high = torch.arange(0, 1 << 16, dtype=torch.int32) << 16
    return torch.cat([(high + low).view(torch.float32) for low in (0, 0x7FFF, 0x8000, 0x8001)])


def same(got: Tensor, want: Tensor) -> bool:
    assert got.dtype == want.dtype
    a, b = got.float(), want.float()
    return bool(((a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("name", DTYPES)
def test_numbers(name: str) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(DTYPES[name]).float()
    for bits, value in enumerate(every.tolist()):
        mine = float8_value(bits, name)
        assert mine == value or math.isnan(mine) and math.isnan(value)
    x = samples()[:: 4 * 251]
    x = x[x.abs() < 448]
    assert [float8_bits(v, name) for v in x.tolist()] == x.to(DTYPES[name]).view(
        torch.uint8
    ).tolist()


@pytest.mark.parametrize("name", DTYPES)
def test_conversions(name: str) -> None:
    to = DTYPES[name]

    def narrow(x: Tensor) -> Tensor:
        return x.to(to)

    def wide(y: Tensor) -> tuple[Tensor, ...]:
        return y.float(), y.to(torch.bfloat16), y.half() * 2, y.double(), y.to(torch.int32)

    x = samples()
    assert same(compiled(narrow)(x), x.to(to))
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool):
        x = (torch.randn(300) * 100).to(dtype)
        assert same(compiled(narrow)(x), x.to(to)), dtype
    y = torch.arange(256, dtype=torch.uint8).view(to)
    y = y[y.float().isfinite()]
    for got, want in zip(compiled(wide)(y), wide(y), strict=True):
        assert same(got, want), want.dtype
    assert not deuteron.explain(wide, y).library_calls


def test_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions before 2.12 make NaN of what is too large."""
    monkeypatch.setattr(pointwise, "saturates", lambda: False)
    x = torch.tensor([1.0, 464.0, 464.1, -1e9, math.inf, math.nan])
    got = compiled(lambda x: x.to(torch.float8_e4m3fn))(x).float()
    assert got.isnan().tolist() == [False, False, True, True, True, True]


def test_copies_and_the_rest() -> None:
    y = torch.randn(6, 8).to(torch.float8_e4m3fn)

    def moved(y: Tensor) -> tuple[Tensor, ...]:
        return torch.cat([y, y.flip(0)]), y.t().contiguous(), y[1:, ::2].clone()

    for got, want in zip(compiled(moved)(y), moved(y), strict=True):
        assert same(got, want) and got.stride() == want.stride()
    assert not deuteron.explain(moved, y).library_calls


def test_a_norm_and_its_scales_are_one_kernel() -> None:
    def quantized(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w
        scale = y.abs().amax(-1, keepdim=True) / 448
        return (y / scale).to(torch.float8_e4m3fn), scale

    report = deuteron.explain(quantized, torch.randn(9, 70), torch.randn(70))
    assert len(report.kernels) == 1 and not report.library_calls


INTERPRETED = """
import tempfile, torch
from pathlib import Path
from tests.codegen.triton_programs import run
from tests.schedule.tools import scheduled
from tests.test_float8 import DTYPES, same, samples
for to in DTYPES.values():
    every = torch.arange(256, dtype=torch.uint8).view(to)
    for f, x in ((lambda x: x.to(to), samples()), (lambda y: y.float(), every)):
        with tempfile.TemporaryDirectory() as folder:
            (got,) = run(scheduled(f, x, device="H200", check=False), [x], Path(folder), "")
        assert same(got, f(x))
print("done")
"""


def test_triton_interpreted() -> None:
    pytest.importorskip("triton")
    assert interpret("-c", INTERPRETED).endswith("done\n")


@pytest.mark.parametrize("device, capability", [("H200", 90), ("A100", 80)])
def test_triton_builds(device: str, capability: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from deuteron.codegen.triton.generate import generate
    from deuteron.runtime.build_triton import build
    from tests.schedule.tools import scheduled, spec_of

    def f(x: Tensor) -> tuple[Tensor, ...]:
        narrow = x.to(torch.float8_e4m3fn)
        return narrow, x.to(torch.float8_e5m2), narrow.float() * 2

    options = Options.make(options={"cache_dir": str(tmp_path)})
    for k in scheduled(f, torch.randn(64, 128), device=device, check=False).kernels:
        kernel = generate(k, spec_of(device))
        assert ("_native" in kernel.source) == (capability == 90)
        assert build(kernel, kernel.configs[0], capability, options).code
