"""Loops that are cut where indices of loads go on otherwise."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.codegen.index_sets import (
    MIN_CUT_EXTENT,
    cut_positions,
    index_between_cuts,
    pieces,
)
from deuteron.ir.expr import Expr, load
from deuteron.ir.index import (
    Axis,
    Index,
    MinMax,
    Mod,
    const,
    evaluate,
    floordiv,
    maximum,
    minimum,
    mod,
    substitute,
)

N = 64
I, J = Axis("i", N), Axis("j", 2)


def up(k: int) -> Index:
    """What is read left of a position of twice as many, or right of it."""
    left = maximum(I.index + floordiv(J.index + 1, 2) - 1, const(0))
    return minimum(left + k, const(N - 1)) if k else left


INDICES: dict[str, tuple[Index, list[int]]] = {
    "from the first on": (up(0), [1]),
    "to the last": (up(1), [1, 63]),
    "padded": (minimum(maximum(I.index - 3, const(0)), const(50)), [3, 53]),
    "mirrored": (maximum(const(40) - I.index, const(0)), [40]),
    "every second": (minimum(I.index * 2, const(77)), [39]),
    "where another loop decides": (maximum(I.index - J.index * 5, const(0)), [1, 5]),
    "not linear": (maximum(I.index * I.index, const(9)), []),
    "of no such": (I.index + 5, []),
    "rolled": (mod(I.index + 61, const(N)), [3]),
    "rolled twice": (mod(mod(I.index + 61, const(N)) + 0, const(N)), [3]),
    "again and again": (mod(I.index + 5, const(7)), []),
    "never again": (mod(I.index, const(N)), []),
    "rolled by another loop": (mod(I.index + J.index, const(N)), []),
}


def read(at: Index) -> Expr:
    return load("x", (at,), "f32")


@pytest.mark.parametrize("name", INDICES)
def test_cuts(name: str) -> None:
    at, where = INDICES[name]
    marks = cut_positions([read(at)], I)
    assert [m.value for m in marks] == where
    for low, piece in pieces(I, marks) if marks else ():
        here = substitute(at, {I: low + piece.index})
        undecided = "another" in name and low.value == 1
        assert undecided or not any(isinstance(m, (MinMax, Mod)) for m in here.atoms())
        for i, j in product(range(int(piece.extent.value or 0)), range(2)):
            there = {"i": i + int(low.value or 0), "j": j}
            assert evaluate(here, {piece.name: i, "j": j}) == evaluate(at, there)


def test_between_the_cuts() -> None:
    assert index_between_cuts(up(1), I) is I.index + floordiv(J.index + 1, 2)
    short = Axis("k", MIN_CUT_EXTENT - 1)
    at = maximum(short.index - 1, const(0))
    assert index_between_cuts(at, short) is at and not cut_positions([read(at)], short)


def test_long_axes_are_not_counted_through() -> None:
    n = 1 << 40
    long = Axis("k", n)
    assert [m.value for m in cut_positions([read(mod(long.index + 5, const(n)))], long)] == [n - 5]


def same(f: Callable[..., Tensor], *args: Tensor) -> None:
    torch._dynamo.reset()
    got, want = torch.compile(f, backend="deuteron")(*args), f(*args)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


SIZES = (1, 31, 32, 33, 47, 64)
LONG = [pytest.param(n, "bicubic", marks=pytest.mark.slow) for n in (31, 47, 64)]


@pytest.mark.parametrize(
    ("size", "mode"),
    [*product(SIZES, ["nearest", "bilinear"]), *product((1, 32, 33), ["bicubic"]), *LONG],
)
def test_upsampling(size: int, mode: str) -> None:
    x = torch.randn(2, 3, 5, size, generator=torch.Generator().manual_seed(size))
    for scale in (2, 3):
        same(lambda x, s=scale: F.interpolate(x, scale_factor=s, mode=mode), x)
    if mode != "nearest":
        same(lambda x: F.interpolate(x, (9, 70), mode=mode, align_corners=True), x)


@pytest.mark.parametrize("size", [4, 32, 45])
def test_padding(size: int) -> None:
    x = torch.randn(3, 6, size, generator=torch.Generator().manual_seed(size))
    for mode in ("replicate", "reflect", "circular"):
        same(lambda x, m=mode: F.pad(x, (3, 2), mode=m) * 2, x)
    same(lambda x: F.pad(x, (2, 1, 3, 1), mode="replicate").exp(), x)
    same(lambda x: x[:, :, torch.arange(size).clamp(2, size - 2)] + 1, x)


@pytest.mark.parametrize("size", [1, 4, 32, 45])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool, torch.int64])
def test_rolling(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """One loop on each side of the place where it begins again, without a division."""
    x = (torch.randn(6, size, generator=torch.Generator().manual_seed(size)) * 9).to(dtype)
    for shifts, dims in (((3,), (1,)), ((-2, 50), (0, 1)), ((5,), ()), ((1, 1), (1, 1))):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, s=shifts, d=dims: x.roll(s, d), backend="deuteron")
        torch.testing.assert_close(compiled(x), x.roll(shifts, dims), rtol=0, atol=0)
    if size == 45:
        torch._dynamo.reset()
        options = {"debug_dir": str(tmp_path), "cache": False}
        torch.compile(lambda x: x.roll(7, 1), backend="deuteron", options=options)(x)
        (text,) = (f.read_text() for f in tmp_path.glob("**/kernels.txt"))
        assert " % " not in text and text.count("#pragma omp simd") == 2


@pytest.mark.parametrize("size", [5, 31, 56, 67])
@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (3, 3, 0), (5, 3, 2)])
def test_gradients_of_pools(size: int, window: tuple[int, int, int]) -> None:
    """Places between two windows are written in one body, and their masks are those of the row."""

    def grad(x: Tensor, g: Tensor, kind: Any) -> Tensor:
        leaf = x.detach().requires_grad_()
        (out,) = torch.autograd.grad(kind(leaf, *window), leaf, g)
        return out

    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(size))
    for kind in (F.max_pool2d, F.avg_pool2d):
        torch._dynamo.reset()
        compiled = torch.compile(kind, backend="deuteron")
        g = torch.randn_like(kind(x, *window))
        torch.testing.assert_close(grad(x, g, compiled), grad(x, g, kind))


def test_what_is_known_of_nodes_is_known_where_a_loop_is_cut(tmp_path: Path) -> None:
    """That of an error function only the sum with 1 is used, of an exponential more than one."""
    a, b = torch.randn(9, 70), torch.randn(9, 50)

    def sums(a: Tensor, b: Tensor) -> Tensor:
        x = torch.cat([a, b], 1)
        return F.gelu(x) * F.silu(x)

    options = {"debug_dir": str(tmp_path), "cache": False}
    got = torch.compile(sums, backend="deuteron", options=options)(a, b)
    text = "".join(f.read_text() for f in tmp_path.glob("**/kernels.txt"))
    assert "d_erf_for_one_plus(" in text and "d_erf(" not in text
    exact = sums(a.double(), b.double())
    assert (got - exact).abs().max() <= 2 * (sums(a, b) - exact).abs().max() + 1e-6


def test_places_between_windows_are_written_side_by_side(tmp_path: Path) -> None:
    leaf = torch.randn(1, 2, 64, 64).requires_grad_()
    options = {"debug_dir": str(tmp_path)}
    compiled = torch.compile(
        lambda x: F.max_pool2d(x, 3, 2, 1), backend="deuteron", options=options
    )
    compiled(leaf).sum().backward()
    [text] = [f.read_text() for f in tmp_path.glob("backward*/kernels.txt")]
    body = text[text.index("#pragma omp simd") :].split("}")[0]
    assert body.count("] = t") == 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_floats_made_whole(dtype: torch.dtype) -> None:
    ends = [2.0**63, 2.0**62, 2.0**31, 2.0**24 + 2, 2.0**23 - 0.5, 1.5, 0.7, 0.0]
    x = torch.tensor([*ends, *(-e for e in ends), torch.inf, -torch.inf, torch.nan, -0.2])
    if dtype == torch.int32:  # what does not fit is not defined
        x = x[x.abs() < 2.0**31]
    got = torch.compile(lambda x: x.to(dtype).float() + -0.0, backend="deuteron")(x)
    want = x.to(dtype).float()
    assert torch.equal(got, want) and torch.equal(got.signbit(), want.signbit())


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_clamped_floats_are_converted_without_a_test(dtype: torch.dtype, tmp_path: Path) -> None:
    """Where both limits are known the conversion is one instruction; what else is, is tested."""
    low, high = (0, 255) if dtype == torch.uint8 else (-128, 127)
    x = torch.cat([torch.randn(200) * 300, torch.tensor([torch.inf, -torch.inf, -0.5, 0.5, 1e20])])

    def before(x: Tensor) -> Tensor:
        return x.round().clamp(low, high).to(dtype)

    def after(x: Tensor) -> Tensor:
        return x.clamp(low, high).floor().to(dtype)

    def above(x: Tensor) -> Tensor:
        return x.abs().clamp(max=high).to(dtype)

    def between(x: Tensor) -> Tensor:
        return torch.minimum(x.clamp(low, high), x.abs()).to(dtype)

    cases = ((before, False), (after, False), (above, True), (between, True))
    for fn, tested in cases:
        folder = tmp_path / fn.__name__
        compiled = torch.compile(fn, backend="deuteron", options={"debug_dir": str(folder)})
        assert torch.equal(compiled(x), fn(x))
        [text] = [f.read_text() for f in folder.glob("*/kernels.txt")]
        assert ("= d_to_" in text) == tested


def test_positions_that_were_checked_are_compared_as_ints(tmp_path: Path) -> None:
    """A vector of ints has as many lanes as one of floats."""
    places = torch.randint(0, 50, (7,))

    def fn(x: Tensor, at: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter(1, at[:, None], 1.0) + x

    x = torch.randn(7, 50)
    compiled = torch.compile(fn, backend="deuteron", options={"debug_dir": str(tmp_path)})
    torch.testing.assert_close(compiled(x, places), fn(x, places), rtol=0, atol=0)
    [text] = [f.read_text() for f in tmp_path.glob("*/kernels.txt")]
    assert "== (int)t" in text


@pytest.mark.parametrize("shape", [(2, 3, 1, 3), (2, 3, 4, 3), (1, 3, 2, 20), (0, 3, 2, 3)])
def test_rows_side_by_side_keep_what_is_the_same_in_a_part(shape: tuple[int, ...]) -> None:
    """Of joined tensors each part reads one: what a row buffer has of it is read before the lanes
    (networks 73022533)."""
    torch._dynamo.reset()

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        joined = torch.stack(x.unbind(-1), -1).movedim(1, -1)
        return F.layer_norm(joined, (3,), w, b).movedim(-1, 1)

    args = [torch.randn(s) for s in (shape, (3,), (3,))]
    torch.testing.assert_close(torch.compile(f, backend="deuteron")(*args), f(*args))
