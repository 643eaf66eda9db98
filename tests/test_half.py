"""Half precision inside kernels: float32 between operations, or (``precision="eager"``) as eager.

Values count: errors are against float64, at most twice eager's; what is decided by a comparison is
decided alike wherever the same tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable
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
from deuteron.tools.oracle import Oracle, copies, differences, see
from tests.lower.harness import lowered, trace
from tests.schedule.tools import scheduled

HALVES = (torch.bfloat16, torch.float16)


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(f, backend="deuteron", options={"verify": True, **options})


def make(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gated(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return w * y * F.silu(x)


def softmax(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


CHAINS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "gelu": (gelu, ((37, 50),)),
    "gated": (gated, ((19, 70), (70,))),
    "softmax": (softmax, ((23, 90),)),
}


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


# -- values ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CHAINS)
def test_more_exact_than_eager(name: str, dtype: torch.dtype) -> None:
    f, shapes = CHAINS[name]
    args = [make(*s, dtype=dtype, seed=k) for k, s in enumerate(shapes)]
    exact = f(*[a.double() for a in args])
    assert error(compiled(f)(*args), exact) < 0.8 * error(f(*args), exact)


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
def jumps(y: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    return (
        *(y > t, y <= 0.5, y != 0, y.floor(), y.to(torch.int32), y.ceil(), y.round(), y.sign()),
        *(y.to(torch.float8_e5m2).float(), torch.floor_divide(y, 0.25), y.isinf(), y.bool()),
        *(y.clamp(-1, 1).to(torch.int8), torch.where(y >= t, 1, 0).sum(-1), y.remainder(0.5)),
        *(y.frac(), y.abs().to(torch.uint8), (-y).trunc(), y.maximum(t).to(torch.int16)),
    )


def equalities(y: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    return y == t, y.argmax(-1), y.amax(-1) == t[:, 0], y == y.amin(0), y.float() != t


@pytest.mark.parametrize("decisions", [jumps, equalities])
@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_stored_decides(dtype: torch.dtype, decisions: Callable[..., Any]) -> None:
    """Whoever decides by a value beside its producer decides as who reads it from memory."""

    def f(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        y = (x * w + t) * 1.1 - w
        return y, *decisions(y, t)

    args = [make(30, 41, dtype=dtype, seed=k) for k in range(3)]
    y, *got = compiled(f)(*args)
    for g, e in zip(got, decisions(y, args[2]), strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=0)


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


EXTREMES: dict[str, Callable[[Tensor], Any]] = {
    "amax": lambda y: y.amax(-1),
    "amin": lambda y: y.amin(0),
    "max": lambda y: y.max(),
    "max of rows": lambda y: y.max(-1)[0],
    "min of columns": lambda y: y.min(0).values,
    "norm": lambda y: torch.linalg.vector_norm(y, float("inf"), -1),
    "maximum": lambda y: torch.maximum(y, y.flip(-1)),
    "clamp": lambda y: y.clamp(-0.5, 0.75),
    "relu": lambda y: F.relu(y) * y,
    "hardtanh": lambda y: F.hardtanh(y) + F.relu6(y * 4),
    "pool": lambda y: F.max_pool2d(y[None, None], 3, 2),
    "pool of rows": lambda y: F.max_pool1d(y[None], 2),
    "adaptive pool": lambda y: F.adaptive_max_pool2d(y[None, None], (3, 4)),
    "median": lambda y: y.median(-1).values,
    "sorted": lambda y: y.sort(-1).values[:, :5],
    "topk": lambda y: y.topk(3, -1).values,
    "cummax": lambda y: y.cummax(-1).values,
    "softmax": lambda y: (y - y.amax(-1, keepdim=True)).exp(),
    "equal": lambda y: torch.where(y == y.amax(-1, keepdim=True), y, 0),
    "logsumexp": lambda y: y.logsumexp(-1),
    "float amax": lambda y: y.float().amax(-1),
    "two": lambda y: y.amax(-1) * 2 - y.amin(-1).float(),
}


def chain(x: Tensor, w: Tensor) -> Tensor:
    """Every element has its slope; sums round on the way."""
    return (x * 1.3 + w) - w * 0.7 + (x * w.mean()) * 0.1


def judged(
    f: Callable[..., Any], args: list[Tensor], **options: Any
) -> tuple[list[str], Callable[..., Any]]:
    call = compiled(f, **options)

    def runner(g: Callable[..., Any]) -> Callable[[list[Tensor]], Any]:
        return lambda xs: see(lambda given: g(*given), xs, True)

    oracle = Oracle(runner(f), runner(f), args)
    return differences(runner(call)(copies(args)), oracle), call


@pytest.mark.parametrize("name", EXTREMES)
def test_gradients_of_extremes(name: str) -> None:
    """A gradient goes to the element that the forward chose, though the backward computes its
    operand anew; none is lost or doubled."""
    for seed, dtype in enumerate(HALVES):
        x, w = make(26, 35, dtype=dtype, seed=seed), make(35, dtype=dtype, seed=seed + 5)
        args = [x.requires_grad_(), w.requires_grad_()]
        wrong, _ = judged(lambda x, w: EXTREMES[name](chain(x, w)), args)
        assert not wrong, wrong


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
    found = compiled(f)(x, make(96, seed=1) * 3)
    (found[0] if stored else found).sum().backward()
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
