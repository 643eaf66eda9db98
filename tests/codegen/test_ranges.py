"""Comparisons that cannot hold: which they are, and that results are those with the comparison."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deuteron.codegen.ranges import bounds, divisor_bounds, is_never_true
from deuteron.ir.expr import Expr, cast, literal, load, op
from deuteron.ir.index import Axis
from deuteron.lower import pointwise
from tests.schedule.tools import scheduled, spec_of
from tests.test_float8 import same
from tests.test_pipeline import compiled

POINT = Axis("i", 64).index
X = load("x", (POINT,), "f32")
H = load("h", (POINT,), "bf16")
REDUCTION = load("m", (), "f32")


def number(value: float) -> Expr:
    return literal(value, "f32")


def clamp(e: Expr, low: float, high: float) -> Expr:
    return op("minimum", op("maximum", e, number(low)), number(high))


def quotient(a: Expr, largest: Expr, limit: float = 1e-12, by: float = 448.0) -> Expr:
    return op("div", a, op("div", op("maximum", largest, number(limit)), number(by)))


def test_bounds() -> None:
    everything = (-math.inf, math.inf)
    assert bounds(X, {}) == bounds(op("add", X, number(1.0)), {}) == everything
    assert bounds(number(math.nan), {}) == everything
    assert bounds(number(-2.0), {}) == (-2.0, -2.0)
    assert bounds(clamp(X, -3.0, 4.0), {}) == (-3.0, 4.0)
    assert bounds(op("maximum", X, number(1.0)), {}) == (1.0, math.inf)
    assert bounds(op("abs", clamp(X, -3.0, 2.0)), {}) == (0.0, 3.0)
    deep = X
    for _ in range(2000):
        deep = op("minimum", op("maximum", deep, X), H32)
    assert bounds(deep, {}) == everything


H32 = cast(H, "f32")
ROWS = {"m": op("abs", X), "h": op("abs", H32)}


@pytest.mark.parametrize(
    ("e", "most"),
    [
        (quotient(X, REDUCTION), 448.0),
        (quotient(X, REDUCTION, by=100.0), 100.0),
        (quotient(H32, load("h", (), "f32")), 448.0),
        (quotient(H32, cast(cast(load("h", (), "f32"), "bf16"), "f32")), 448.0),
        (quotient(X, cast(cast(REDUCTION, "bf16"), "f32")), math.inf),  # rounded down, perhaps to 0
        (quotient(X, REDUCTION, limit=1e-30), math.inf),  # the product may have lost bits
        (quotient(X, REDUCTION, limit=-1.0), math.inf),
        (quotient(H32, REDUCTION), math.inf),  # the largest of others
        (quotient(X, load("m", (POINT,), "f32")), math.inf),  # a tensor of that name
        (quotient(X, load("other", (), "f32")), math.inf),
        (op("div", X, REDUCTION), math.inf),
    ],
)
def test_quotients_by_the_largest(e: Expr, most: float) -> None:
    low, high = bounds(e, ROWS)
    assert low == -high and (high == most or most <= high <= most * (1 + 1e-6))


def test_never() -> None:
    assert is_never_true(op("gt", op("abs", clamp(X, -448.0, 448.0)), number(464.0)), {})
    assert is_never_true(op("gt", op("abs", quotient(X, REDUCTION)), number(464.0)), ROWS)
    assert not is_never_true(
        op("gt", op("abs", quotient(X, REDUCTION, by=500.0)), number(464.0)), ROWS
    )
    assert not is_never_true(
        op("gt", op("abs", quotient(X, REDUCTION)), number(448.0)), ROWS
    )  # it may round


@pytest.mark.parametrize("kind", ["lt", "le", "gt", "ge"])
def test_never_is_what_no_value_fulfils(kind: str) -> None:
    """Between limits, at them and beyond, on both sides; numbers alone decide."""
    holds = {"lt": float.__lt__, "le": float.__le__, "gt": float.__gt__, "ge": float.__ge__}[kind]
    values = [-1.0, 0.0, 1.0]
    for limit in (-2.0, -1.0, 0.0, 1.0, 2.0):
        between = clamp(X, -1.0, 1.0)
        for args in ((between, number(limit)), (number(limit), between)):
            either = [(v, limit) if args[0] is between else (limit, v) for v in values]
            assert is_never_true(op(kind, *args), {}) == (not any(holds(*e) for e in either)), args


def test_never_of_integers() -> None:
    """The most that one can be is no float, and the magnitude of the least is none of its own."""
    x = load("x", (POINT,), "i64")
    most = op("minimum", x, literal(2**53 + 1, "i64"))
    assert not is_never_true(op("gt", most, literal(2**53, "i64")), {})
    least_one = op("abs", op("minimum", x, literal(0, "i64")))
    assert not is_never_true(op("lt", least_one, literal(0, "i64")), {})


def test_divisors() -> None:
    clamped = op("maximum", number(1e-3), X)
    assert divisor_bounds(clamped) == (number(1e-3).attr, 1.0, X)
    assert divisor_bounds(op("mul", clamped, number(0.5)))[1:] == (0.5, X)
    assert divisor_bounds(X) == (0.0, 1.0, None)


def by_rows(x: Tensor, by: float = 448.0) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / by
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def by_product(x: Tensor) -> Tensor:
    scale = 448.0 / x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def beyond(x: Tensor) -> Tensor:
    return by_rows(x, 500.0)[0]


def unclamped(x: Tensor) -> Tensor:
    return (x.float() / (x.float().abs().amax(-1, keepdim=True) / 448.0)).to(torch.float8_e4m3fn)


BOUNDED: dict[str, Callable[[Tensor], object]] = {"rows": by_rows, "product": by_product}
ASKED: dict[str, Callable[[Tensor], Tensor]] = {"beyond": beyond, "unclamped": unclamped}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*BOUNDED, *ASKED])
def test_old_torch(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions before 2.12 make NaN of what is too large. Where nothing is, a GPU's kernel is that
    of later ones, with a product for the quotient."""
    from deuteron.codegen.triton.generate import generate

    f, texts = (BOUNDED | ASKED)[name], []
    for saturates in (True, False):  # the latter from here on
        monkeypatch.setattr(pointwise, "saturates", lambda new=saturates: new)
        program = scheduled(f, torch.randn(64, 2048).to(dtype), device="H200", check=False)
        (kernel,) = (generate(k, spec_of("H200")).source for k in program.kernels)
        texts.append([line for line in kernel.split("\n") if not line.lstrip().startswith("#")])
    assert (texts[0] == texts[1]) == (name in BOUNDED)
    assert ("464" in kernel) == (name in ASKED)
    if name == "rows":
        assert "libm.reciprocal_fast" in kernel and kernel.count("libm.div_by(") == 1

    torch.manual_seed(0)
    x = torch.randn(12, 300).to(dtype) * 10.0 ** torch.arange(-6, 6)[:, None].to(dtype)
    x[0], x[1, 3], x[2, 5], x[3] = 0.0, math.inf, math.nan, 1e-38
    got, want = compiled(f)(x), f(x)
    if name == "rows":  # eager rounds twice: a quotient next to the middle of two may go either way
        torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=0.0, equal_nan=True)
        q = x.double() / want[1]
        mine, theirs = ((r[0].double() - q).abs() for r in (got, want))
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert bool(((mine <= theirs + 2.0**-21 * q.abs()) | mine.isnan()).all())
        return
    if name == "beyond":
        q = x.float() / by_rows(x, 500.0)[1]
        assert (q.abs() > 464.0).any()
        want = torch.where(q.abs() > 464.0, math.nan, want.float()).to(want.dtype)
    assert same(got, want)
