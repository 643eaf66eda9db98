"""Half precision inside kernels: float32 between operations, or (``precision="eager"``) as eager.

Values count: errors are against float64, at most twice eager's; what is decided by a comparison is
decided alike wherever the same tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.base.errors import OptionError
from deuteron.base.options import Options
from deuteron.ir.parser import parse_program
from deuteron.ir.printer import print_program
from deuteron.ir.verify import verify_program
from deuteron.lower.unrounded import unrounded
from tests.interpreting import reported
from tests.lower.harness import lowered, trace
from tests.numerics.halves import (
    CHAINS,
    EXTREMES,
    HALVES,
    INTERPRETED,
    coarse,
    compiled,
    decided,
    equalities,
    gelu,
    judged,
    jumps,
    make,
    of_chain,
    softmax,
)
from tests.schedule.tools import scheduled

SCRIPT = Path(__file__).with_name("halves.py")


# -- values ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CHAINS)
def test_more_exact_than_eager(name: str, dtype: torch.dtype) -> None:
    assert not coarse(name, dtype)


@pytest.mark.parametrize("options", [{"precision": "eager"}, {"fusion": False}])
@pytest.mark.parametrize("dtype", HALVES)
def test_as_eager(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Bit by bit, of what is the same function of f32 on both sides."""

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a = (x * 1.1 + y) * x - y
        b = (a.float() / 3).to(x.dtype) + x
        return b, a.sum(-1).to(torch.float32), torch.relu(b) * a, (b > a).sum(-1)

    args = make(40, 33, dtype=dtype), make(33, dtype=dtype, seed=1)
    for got, want in zip(compiled(f, **options)(*args), f(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_no_overflow_on_the_way() -> None:
    x = torch.tensor([300.0, 2.0, -400.0], dtype=torch.float16)

    def f(x: Tensor) -> Tensor:
        return (x * x).to(torch.float16) / x

    assert f(x).isinf().any() and compiled(f, precision="eager")(x).isinf().any()
    assert torch.equal(compiled(f)(x), x)


def test_casts_with_a_meaning_stay() -> None:
    """Rounding to 8 bits, to whole numbers, from float64; not of float32 to a half and back."""

    def f(x: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
        return (
            (x * 3).to(torch.float8_e4m3fn).float() * 2,
            (x * 30).to(torch.int8).to(torch.bfloat16) + 0,
            wide.float().double() - wide,
            (x * 100).round().to(torch.int32),
            wide.to(torch.bfloat16).double(),
            (wide * 1e3).to(torch.int32) * x[0, 0],
            (wide * 1e3).to(torch.int32).to(torch.bfloat16).float() - 0.5,
        )

    args = make(60, 7), torch.randn(50, dtype=torch.float64)
    for got, want in zip(compiled(f)(*args), f(*args), strict=True):
        assert torch.equal(got, want)
    x = torch.randn(70)
    assert torch.equal(compiled(lambda x: x.bfloat16().float() * 1.0)(x), x)


# -- decisions -------------------------------------------------------------------------------------
@pytest.mark.parametrize("decisions", [jumps, equalities])
@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_stored_decides(dtype: torch.dtype, decisions: Callable[..., Any]) -> None:
    """Whoever decides by a value beside its producer decides as who reads it from memory."""
    assert not decided(decisions, dtype)


def test_guards_see_what_they_guard() -> None:
    """No root of a negative number where what is compared is rounded, and what is not above 1."""
    x = torch.linspace(0.33, 0.34, 4000).bfloat16()

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = (x * w) * w
        return torch.where(y > 1, 0, (1 - y).sqrt()) + (y - y.trunc()).log().abs().clamp(max=9)

    call = compiled(f)
    for k in range(40):
        w = torch.tensor([1.7 + k / 1000]).bfloat16()
        assert not call(x, w).isnan().any() or f(x, w).isnan().any()


@pytest.mark.parametrize("name", EXTREMES)
def test_gradients_of_extremes(name: str) -> None:
    """A gradient goes to the element that the forward chose, though the backward computes its
    operand anew; none is lost or doubled."""
    for seed, dtype in enumerate(HALVES):
        x, w = make(26, 35, dtype=dtype, seed=seed), make(35, dtype=dtype, seed=seed + 5)
        args = [x.requires_grad_(), w.requires_grad_()]
        assert not judged(of_chain(name), args)


@pytest.mark.xdist_group("halves interpreted")
@pytest.mark.parametrize("name", [*INTERPRETED, "jumps", "equalities", *CHAINS])
def test_interpreted(name: str) -> None:
    """The same as Triton kernels."""
    (wrong,) = [r["wrong"] for r in reported(SCRIPT) if r["program"] == name]
    assert not wrong


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("rows", [True, False])
def test_no_gradient_is_lost(rows: bool, stored: bool) -> None:
    """The gradients of a row's largest element, or elements, sum up to the slope."""
    dims = -1 if rows else 0

    def f(x: Tensor, w: Tensor) -> Any:
        z = x * 1.0 + w
        y = z - w * 0.7
        m = y.amax(dims)
        return (m, z.exp()) if stored else m

    x = make(64, 96).requires_grad_()
    out = compiled(f)(x, make(96, seed=1) * 3)
    (out[0] if stored else out).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(
        x.grad.float().sum(dims), torch.ones(64 if rows else 96), rtol=0.01, atol=0
    )


def test_masks_of_the_backward_are_the_forwards() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.relu(((x + w) - w) * 1.1 - 0.01)

    x = make(120, 70).requires_grad_()
    out = compiled(f)(x, make(70, seed=1) * 8)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, out > 0)


@pytest.mark.parametrize("dtype", HALVES)
def test_sums_are_of_what_leaves_beside_them(dtype: torch.dtype) -> None:
    """The backward computes exponentials of what memory holds: a softmax must sum to 1."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 1.1 + 0.3
        wide = y.float()
        return y, torch.exp(wide - 40).sum(-1), (wide.square().mean(-1) + 1e-6).rsqrt()

    x = torch.linspace(-35, 35, 33 * 65).to(dtype).view(33, 65)
    y, sums, norms = torch.compile(f, backend="deuteron")(x)
    wide = y.double()
    assert (sums / torch.exp(wide - 40).sum(-1) - 1).abs().max() < 1e-5
    assert (norms * (wide.square().mean(-1) + 1e-6).sqrt() - 1).abs().max() < 1e-5


def test_dropped_are_the_same() -> None:
    """Random masks of half numbers: what the forward keeps has a gradient."""

    def f(x: Tensor) -> Tensor:
        return F.dropout(x * 1.5, 0.3) * (torch.rand_like(x) < 0.5)

    x = make(80, 90).abs().add(1).requires_grad_()
    out = compiled(f)(x)
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad != 0, out != 0)


# -- the IR says it --------------------------------------------------------------------------------
def program_of(f: Callable[..., Any], *args: Tensor) -> str:
    program = unrounded(lowered(trace(f, args)).program)
    verify_program(program, "lower")
    text = print_program(program)
    assert print_program(parse_program(text)) == text
    return text


def test_readers_ask_for_the_unrounded() -> None:
    x = make(8, 16)
    text = program_of(lambda x: [((x * 2) + 1).exp()], x)
    assert text.count("unrounded(") == 2
    assert "unrounded(" not in program_of(lambda x: [x.exp(), x.float() * 2], x)  # in memory
    f32 = torch.randn(8, 16)
    assert "bf16" not in program_of(lambda x: [x.bfloat16().float() * 2], f32).split("def", 1)[0]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: [(y := x * 2) > 1, y + 4],
        lambda x: [(x * 2).floor()],
        lambda x: [(x * 2).to(torch.int32)],
        lambda x: [((x * 2) + 1).argmax(-1)],
        lambda x: [((x * 2) + 1).amax(-1)],
        lambda x: [((x * 2) + 1) == (x * 3)],
        lambda x: [(x * 2).to(torch.float8_e5m2)],
    ],
)
def test_who_decides_reads_the_rounded(f: Callable[..., Any]) -> None:
    assert "unrounded(" not in program_of(f, make(8, 16))


def test_a_maximum_that_stays_inside() -> None:
    """That of a softmax is compared with nothing."""
    assert "unrounded(" in program_of(lambda x: [softmax(x * 2)], make(8, 16))


def test_kernels_have_no_question_left() -> None:
    """What producers and readers share is f32; what is stored is rounded once."""
    x = make(64, 64)
    (kernel,) = scheduled(lambda x: [gelu(x)], x, check=False).kernels
    (nest,) = kernel.nests
    nodes = [n for e in nest.exprs() for n in e.walk()]
    assert [n.dtype for n in nodes if n.op == "cast"] == ["f32", "bf16"]
    (kernel,) = scheduled(lambda x: [gelu(x)], x, check=False, precision="eager").kernels
    nodes = [n for e in kernel.nests[0].exprs() for n in e.walk()]
    assert sum(n.op == "cast" and n.dtype == "bf16" for n in nodes) == 9


def test_the_option() -> None:
    assert Options().precision == "float32"
    assert Options.make(options={"precision": "eager"}).codegen_key() != Options().codegen_key()
    with pytest.raises(OptionError):
        Options.make(options={"precision": "double"})


@pytest.mark.parametrize("f", [torch.isposinf, torch.isneginf, torch.isinf])
def test_infinite_is_what_a_half_cannot_hold(f: Callable[..., Any]) -> None:
    x = torch.tensor([65504.0, -65504, 1, 40000] * 9).half()
    torch._dynamo.reset()
    assert torch.equal(torch.compile(lambda x: f(x * 2), backend="deuteron")(x), f(x * 2))
    whole = torch.arange(5)
    assert torch.equal(torch.compile(f, backend="deuteron")(whole), f(whole))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("power", [4, 9, 16.0])
def test_whole_powers_are_products(power: float, dtype: torch.dtype) -> None:
    x = torch.linspace(-1.6, 1.6, 1000).to(dtype)
    x[:4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")])

    def f(x: Tensor) -> Tensor:
        return x**power

    assert "pow(" not in program_of(lambda x: [f(x)], x)
    torch.testing.assert_close(
        compiled(f)(x), (x.double() ** power).to(dtype), rtol=0.0, atol=0.0, equal_nan=True
    )
    for kept in (x.float(), x.double()):
        assert "pow(" in program_of(lambda x: [f(x)], kept)
