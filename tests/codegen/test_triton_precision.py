"""Where generated Triton uses the device's fast exponential and division, and where not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from deuteron.base.options import Options
from deuteron.base.passes import Context
from deuteron.codegen.triton.generate import generate
from deuteron.runtime.build_triton import build
from tests.codegen.cubins import instructions
from tests.interpreting import interpret
from tests.schedule.tools import scheduled, spec_of


def source(f: Callable[..., Any], *args: Tensor, **asked: Any) -> str:
    plan = scheduled(f, *args, device="H200", check=False, **asked)
    options = Options.make(options=asked)
    return "".join(generate(k, spec_of("H200"), Context(options)).source for k in plan.kernels)


EAGER = {"precision": "eager"}


HALF = torch.randn(300, 600).bfloat16()
FLOAT = torch.randn(300, 600)


def test_rounded_to_half() -> None:
    text = source(lambda x: torch.softmax(x, -1), HALF)
    assert "libm.exp_fast" in text and "libm.exp(" not in text and "libm.reciprocal_fast(" in text
    text = source(lambda x: (x / x.float().abs().sum(-1, keepdim=True)).bfloat16(), HALF)
    assert "libm.div_by_fast" in text
    assert "libm.exp2_fast" in source(lambda x: F.silu(x), HALF)
    assert "libm.sigmoid_fast" in source(lambda x: torch.sigmoid(x), HALF)


def test_sums_and_differences() -> None:
    """What is left of a difference has an error of some units in the last place of the larger
    number, whose rounding is one."""
    for f in (
        lambda x: (x.float().exp() - 1).bfloat16(),
        lambda x: (x.float().exp() + x.float()).bfloat16(),
    ):
        assert "libm.exp_fast" in source(f, HALF)


def test_a_quotient_of_points() -> None:
    text = source(lambda x, y: (x.float() / (1 + y.float().abs())).bfloat16(), HALF, HALF)
    assert "libm.div" not in text


def test_quotients_by_one_or_more(tmp_path: Path) -> None:
    """Without the branch of an exact division, with its results, signs of zeros too."""
    text = source(lambda a, b: a / (1 + b.abs()), FLOAT, FLOAT)
    assert "libm.div_by_one_or_more(" in text and "libm.div(" not in text
    assert "libm.div(" in source(lambda a, b: a / (1 - b.abs()), FLOAT, FLOAT)
    path = tmp_path / "quotient.py"
    path.write_text(QUOTIENT)
    interpret(path)


QUOTIENT = """
import torch, triton, triton.language as tl
from deuteron.codegen.triton import libm
@triton.jit
def kernel(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, libm.div_by_one_or_more(tl.load(a + i), tl.load(b + i)))
inf = float("inf")
a = torch.tensor([0.0, -0.0, 1.0, -3.0, 1e38, -1e-38, inf, -inf])
b = torch.tensor([1.0, 1.5, 3e38, inf, inf, 7.0, 1e9, float("nan")])
a, b = (x.reshape(-1) for x in torch.meshgrid(a, b, indexing="ij"))
a, b = torch.cat((a, torch.randn(960))), torch.cat((b, 1 + torch.randn(960).exp()))
out = torch.empty_like(a)
kernel[(1,)](a, b, out, 1024)
torch.testing.assert_close(out, a / b, rtol=1.2e-7, atol=0, equal_nan=True)
number = ~out.isnan()
assert torch.equal(out.signbit()[number], (a / b).signbit()[number])
"""


def test_one_more_than_erf() -> None:
    """Near 0 erf itself has digits that one more than it has not."""
    text = source(lambda x: F.gelu(x), HALF)
    assert "libm.erf_half_fast" in text and "libm.erf(" not in text
    assert "libm.erf_above_fast" in source(lambda x: (torch.erf(x.float()) + 1).bfloat16(), HALF)
    assert "libm.erf(" in source(lambda x: torch.erf(x), HALF)
    text = source(lambda x: torch.erf(x.float()).bfloat16() + (torch.erf(x.float()) + 1), HALF)
    assert "libm.erf(" in text and "libm.erf_above_fast" not in text
    assert "libm.erf(" in source(lambda x: F.gelu(x), FLOAT)


def test_products_that_are_not_rounded() -> None:
    """One of a sum, where the result is rounded to a half; never one of a difference of which all
    may be an error: of two products, or under a root."""
    fused = "tl.fma("
    assert fused in source(lambda x, y: (x.float() * y.float() + 1).bfloat16(), HALF, HALF)
    assert fused in source(lambda x, y: (x.float() * y - y.float()).bfloat16(), HALF, FLOAT)
    assert fused in source(lambda x, y: (y - x.float() * y).bfloat16(), HALF, FLOAT)
    assert fused not in source(lambda x, y: x * y + 1, FLOAT, FLOAT)
    assert fused not in source(lambda x, y: (x * y - y * x.abs()).bfloat16(), FLOAT, FLOAT)
    assert fused not in source(lambda x, y: (x * y - y * y / 3).bfloat16(), FLOAT, FLOAT)
    assert fused not in source(lambda x, y: (x * y - 1).sqrt().bfloat16(), FLOAT, FLOAT)
    assert fused not in source(lambda x, y: (y / (x * y - 1)).bfloat16(), FLOAT, FLOAT)
    tall = torch.randn(4096, 64)
    assert fused in source(lambda x, y: (x * y).sum(0), tall, tall)  # a sum's own
    # What is compared with a maximum, or is one: the same bits in every kernel.
    assert fused not in source(lambda x, y: torch.where(x * y.float() + 1 > 0, x, y), HALF, HALF)
    assert fused not in source(lambda x, y: (x * y.float() + 1).bfloat16().amax(-1), HALF, HALF)


def test_divisors_of_at_least_one() -> None:
    """Sums of exp(b - max b) need no scale; others may be as small as there are numbers."""
    assert "libm.div_by_unit(" in source(lambda x: torch.softmax(x, -1), FLOAT)
    assert "libm.divisor(" in source(lambda x: x.exp() / x.exp().sum(-1, keepdim=True), FLOAT)
    text = source(lambda x: torch.softmax(x, -1) + (x / x.abs().amax(-1, True)), FLOAT)
    assert "libm.div_by_unit(" in text and "libm.divisor(" in text


def test_quotients_negate_nothing(tmp_path: Path) -> None:
    """Triton's own minus is a subtraction from 0: a seventh instruction of `libm.div_by`."""
    x, y = torch.empty(4096, 1024), torch.empty(4096, 1)
    (quotient,) = scheduled(lambda x, y: x / y, x, y, device="H200", check=False).kernels
    kernel = generate(quotient, spec_of("H200"))
    assert "libm.div_by(" in kernel.source
    built = build(kernel, kernel.configs[0], 90, Options(cache_dir=str(tmp_path)))
    assert "FADD" not in instructions(built.code, tmp_path)


def test_scales_of_known_size() -> None:
    """What is at least a constant, and a fraction of an f32, needs no scale itself."""

    def quotients(least: float | None, most: float) -> str:
        def f(x: torch.Tensor) -> torch.Tensor:
            y = x.float()
            return (y / (y.abs().amax(-1, True).clamp(min=least) / most)).to(torch.float8_e4m3fn)

        return source(f, HALF)

    assert "libm.reciprocal_fast(" in quotients(1e-12, 448.0)
    for least, most in ((1e-30, 448.0), (1e-12, 0.5), (-1.0, 448.0)):
        text = quotients(least, most)
        assert "libm.div_by_fast(" in text and "libm.reciprocal_fast(" not in text


def test_powers_of_multiples() -> None:
    text = source(lambda x: torch.exp(x.float() * -0.5).bfloat16(), HALF)
    assert "libm.exp2_fast(" in text and "* -0.72134752" in text
    assert "libm.exp2_fast(" not in source(lambda x: torch.exp(x * -0.5), FLOAT)


def test_tanh() -> None:
    text = source(lambda x: F.gelu(x, approximate="tanh"), HALF)
    assert "libm.tanh_fast(" in text and "libm.tanh(" not in text
    assert "libm.tanh_fast(" in source(lambda x: torch.tanh(x), HALF)
    assert "libm.tanh(" in source(lambda x: torch.tanh(x), FLOAT)


def test_erf_of_a_number() -> None:
    assert "libm.erf(" in source(lambda x: torch.erf(torch.ones_like(x)) + x, FLOAT)


VALUES = """
import torch, triton, triton.language as tl
from deuteron.codegen.triton import libm

@triton.jit
def k(p, o, N: tl.constexpr):
    tl.store(o + tl.arange(0, N), libm.FUNCTION(tl.load(p + tl.arange(0, N))))

def values(x):
    o = torch.zeros(16384)
    k[(1,)](x, o, 16384)
    return o
"""
ERF = """
x = torch.linspace(-6, 6, 16384)
x[:3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
o = values(x)
e = torch.special.erfc(-x.double())
assert o[0] == 2 and o[1] == 0 and o[2].isnan()
assert (o - e)[3:].abs().max() < 4 * 2**-23 and ((o - e) / e)[3:].abs().max() < 2**-8
"""
HALF_ERF = (
    ERF.replace("o = values(x)", "o = values(x / 2)")
    .replace("o[0] == 2", "o[0] == 1")
    .replace("erfc(-x.double())", "erfc(-x.double()) / 2")
)
TANH = """
small = torch.logspace(-42, 1, 4096)
x = torch.cat([torch.linspace(-10, 10, 8192), small, -small])
o = values(x)
e = x.double().tanh()
ulp = torch.nextafter(e.float().abs(), torch.tensor(9.0)) - e.float().abs()
assert ((o - e).abs() / ulp)[:-1].max() < 4
x = torch.zeros(16384)
x[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e38])
o = values(x)
assert o[:4].tolist() == [0, 0, 1, -1] and o[:2].signbit().tolist() == [False, True]
assert o[4].isnan() and o[5] == 1
"""


@pytest.mark.parametrize(
    ("name", "test"),
    [
        ("erf_above_fast", ERF),
        ("erf_half_fast", HALF_ERF),
        ("tanh_fast", TANH),
    ],
)
def test_values_of_device_functions(name: str, test: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.py"
    text = VALUES.replace("FUNCTION", name)
    if name == "erf_half_fast":
        text = text.replace("tl.arange(0, N))))", "tl.arange(0, N)), 2.0))")
    path.write_text(text + test)
    interpret(path)


def test_log1p_of_what_decays() -> None:
    """Softplus and the losses made of it: the exponential's error is log1p's own, at most, and
    nothing shows that of what is rounded."""
    assert "libm.exp2_fast" in source(lambda x: F.logsigmoid(x), HALF)
    assert "libm.exp2_fast" not in source(lambda x: F.logsigmoid(x), FLOAT)


def test_a_sign_is_rounded_to_nothing() -> None:
    text = source(lambda x: (-(x * 0.3)).float() + 1, HALF, **EAGER)
    assert text.count("round_bf16") == 1 and "to(tl.bfloat16)" not in text


def test_roots_and_reciprocals() -> None:
    def scaled(x: Tensor, v: Tensor) -> Tensor:
        return (x.float() / torch.sqrt(v + 1e-5)).bfloat16()

    text = source(scaled, HALF, FLOAT.abs())
    assert "libm.sqrt_fast" in text and "libm.div" not in text
    # What is left of a difference is all that the quotient has.
    text = source(lambda x: (x.float() / (x.float().exp() - 1)).bfloat16(), HALF)
    assert "libm.exp(" in text


def test_roundings_in_between() -> None:
    """A rounding to bf16 that is f32 again is one instruction."""
    text = source(lambda x: x * 0.3 * 1.7, HALF, **EAGER)
    assert text.count("libm.round_bf16") == 1
    # What a row has once stays what Triton knows: it refused seed 31000469, where loops share such
    # values in two layouts ("operand does not dominate this use").

    def rows(x: Tensor) -> Tensor:
        return x * (x.float().sum(-1, keepdim=True).bfloat16() * 3.1 + 0.3)

    text = source(rows, HALF, **EAGER)
    assert "round_bf16" not in text and ".to(tl.bfloat16)" in text


def test_means_of_what_becomes_half() -> None:
    """A sum whose uses all end in roundings to a half needs no exact terms; one that is a result,
    or of which a difference remains, does, and so does every sum under ``precision="eager"``."""

    def normed(x: Tensor) -> Tensor:
        y = F.silu(x).float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()

    assert "libm.exp(" not in source(normed, HALF)
    assert "libm.exp(" in source(lambda x: F.silu(x).float().square().mean(-1), HALF)
    assert "libm.exp(" in source(
        lambda x: 1 / (F.silu(x).float().mean(-1, keepdim=True) - 1) * x, HALF
    )
    assert "libm.exp2_fast(" in source(lambda x: F.silu(x).float().mean(-1).bfloat16(), HALF)


def test_results_of_full_precision() -> None:
    text = source(lambda x: torch.softmax(x, -1), FLOAT)
    assert "libm.exp(" in text and "libm.div_by_unit(" in text and "_fast" not in text
    assert "libm.exp_fast" not in source(lambda x: x.float().exp(), HALF)


def test_terms_of_a_sum() -> None:
    """Of the sum below its maximum; of another sum the argument's error is not small."""
    assert "libm.exp_fast" in source(lambda x: torch.logsumexp(x, -1), FLOAT)
    assert "libm.exp_fast" not in source(lambda x: x.exp().sum(-1), FLOAT)


def test_summed() -> None:
    text = source(lambda x, y: (x / y).sum(-1), FLOAT, FLOAT)
    assert "libm.div" not in text
    assert "libm.exp_fast" in source(lambda x, y: (x - y).exp().sum(-1), FLOAT, FLOAT)
    text = source(lambda x, y: (lambda e: (e, e.sum(-1)))((x - y).exp()), FLOAT, FLOAT)
    assert "libm.exp_fast" not in text  # stored as well
    assert "_fast" not in source(
        lambda x, y: (x / y.abs().sum(-1, keepdim=True)).amax(-1), FLOAT, FLOAT
    )


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x.float().exp() > 2).bfloat16(),
        lambda x: (x.float() / 3).floor().bfloat16(),
        lambda x: (lambda e: (e.bfloat16(), e))(x.float().exp()),  # stored in full as well
    ],
)
def test_not_where_errors_grow(f: Callable[[Tensor], Any]) -> None:
    text = source(f, HALF)
    assert "libm.exp_fast" not in text
    assert "libm.exp(" in text or "libm.div_by(" in text or "libm.div(" in text
