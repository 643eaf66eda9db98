"""Joined tensors and flags on a CPU: loops without a condition at every element."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.codegen.index_sets import MAX_CUTS, cut_positions, repeats_code
from deuteron.ir.expr import Expr, index_value, literal, load, op
from deuteron.ir.index import Axis

I = Axis("i", 90)


def texts(folder: Path) -> str:
    return "".join(f.read_text() for f in folder.glob("**/kernels.txt"))


def same(f: Callable[..., Tensor], *args: Tensor, tmp_path: Path) -> str:
    """The kernels' text, when their results are as exact as eager's."""
    torch._dynamo.reset()
    options = {"debug_dir": str(tmp_path), "cache": False}
    got = torch.compile(f, backend="deuteron", options=options)(*args)
    want = f(*(x.double() if x.is_floating_point() else x for x in args))
    torch.testing.assert_close(got.to(want.dtype), want, rtol=2e-5, atol=2e-5)
    return texts(tmp_path)


def loops(text: str) -> list[str]:
    """The lines in which each vector loop reads and stores."""
    bodies = re.split(r"#pragma omp simd.*\n", text)[1:]
    return [x.split("}")[0] for x in bodies]


def wavelet(x: Tensor) -> Tensor:
    out = []
    for _ in range(5):
        a, b = x[..., ::2], x[..., 1::2]
        out.append((a - b) / 2)
        x = (a + b) / 2
    return torch.cat([x, *out[::-1]], -1)


def test_all_parts_of_a_row_are_loops_of_their_own(tmp_path: Path) -> None:
    text = same(wavelet, torch.randn(7, 640), tmp_path=tmp_path)
    assert not any(" < (int)" in x or " >= (int)" in x for x in loops(text))


def test_parts_of_many_lengths(tmp_path: Path) -> None:
    parts = [torch.randn(5, n) for n in (40, 1, 33, 7, 64, 15, 90, 2, 31, 50)]

    def joined(*xs: Tensor) -> Tensor:
        return torch.cat([(x * (k + 1)).sigmoid() for k, x in enumerate(xs)], 1)

    text = same(joined, *parts, tmp_path=tmp_path)
    assert not any("? " in x and " < (int)" in x for x in loops(text))


def test_cuts_that_would_repeat_a_long_body_are_not_made() -> None:
    """A join has one part in each piece; a sum of masked terms nearly all of them."""

    def term(k: int, shared: int) -> Expr:
        inside = op("lt", index_value(I.index), index_value(I.index * 0 + 9 * (k + 1)))
        value = load("x", (I.index,), "f32")
        for n in range(shared):
            value = op("sin", op("add", value, literal(float(n + k), "f32")))
        return op("where", inside, value, literal(0.0, "f32"))

    terms = [term(k, 6) for k in range(9)]
    total = terms[0]
    for t in terms[1:]:
        total = op("add", total, t)
    marks = cut_positions([total], I, 64)
    assert len(marks) == 9 > MAX_CUTS
    assert not cut_positions([total], I)
    assert repeats_code([total], [[total]] * 9) and not repeats_code([total], [[terms[0]]] * 10)


CHANNELS = [(3, 9, 5, 7), (16, 8), (40, 500, 260), (1, 1, 30, 2, 2, 64, 5)]


@pytest.mark.parametrize("channels", CHANNELS, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_statistics_of_joined_channels(
    channels: tuple[int, ...], threads: int, tmp_path: Path
) -> None:
    """Lanes of channels that lie side by side are cut at joins, in blocks of lanes too; a masked
    load at each took 20 times as long."""

    def joined(*xs: Tensor) -> Tensor:
        return F.batch_norm(torch.cat(xs, 1), None, None, training=True).relu()

    last = torch.channels_last
    xs = [torch.randn(2, c, 11, 13).to(memory_format=last) for c in channels]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        text = same(joined, *xs, tmp_path=tmp_path)
    finally:
        torch.set_num_threads(before)
    assert not any(" ? p" in x for x in loops(text))


REDUCED: dict[str, Callable[..., Any]] = {
    "maxima": lambda *xs: torch.cat(xs, 1).amax(0),
    "places": lambda *xs: torch.cat(xs, 1).argmax(0),
    "sums": lambda *xs: (torch.cat(xs, 1) * 2).sum(0),
    "scans": lambda *xs: torch.cat(xs, 1).cumsum(0),
    "softmax": lambda *xs: torch.cat(xs, 1).softmax(0),
    "transposed": lambda *xs: torch.cat(xs, 1).softmax(0).t().contiguous(),
}


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize("widths", [(5, 30, 1, 12), (300, 7, 290, 130)], ids=str)
def test_columns_of_joined_tensors(name: str, widths: tuple[int, ...], tmp_path: Path) -> None:
    same(REDUCED[name], *(torch.randn(70, n) for n in widths), tmp_path=tmp_path)


FLAGS: dict[str, Callable[..., Any]] = {
    "chosen": lambda a, b, c: torch.where(a, b, c),
    "of comparisons": lambda a, b, c: torch.where(a & ~b, b ^ c, c == a),
    "any of columns": lambda a, b, c: (a & b).any(0) | c.all(0),
    "any of comparisons": lambda a, b, c: (a.float() > b.float()).any(0) & c.any(0),
    "of rows": lambda a, b, c: torch.where(a, b, c).all(-1) | (b | c).any(-1),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name: str, tmp_path: Path) -> None:
    gen = torch.Generator().manual_seed(len(name))
    flags = [torch.rand(130, 67, generator=gen) > p for p in (0.5, 0.1, 0.9)]
    text = same(FLAGS[name], *flags, tmp_path=tmp_path)
    # A choice of flags has no vectors (20 ms of a million flags; as bits 0.06).
    assert not re.search(r"const bool t\d+ = \(t\d+ \? t", text)
    if name == "any of columns":
        assert "alignas(64) unsigned char" in text, "bytes are combined as bytes"


OUTSIDE: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "channels": (lambda *xs: torch.cat(xs, 1).relu(), [(3, c, 9, 31) for c in (5, 1, 8, 3, 7)]),
    "rows": (lambda *xs: torch.cat([x * 2 for x in xs]), [(n, 70) for n in (90, 3, 40, 1, 66)]),
    "beside a sum": (lambda *xs: torch.cat(xs).sum(-1), [(n, 90) for n in (90, 3, 40, 1, 66)]),
    "softmax": (lambda *xs: torch.cat(xs).softmax(-1), [(n, 90) for n in (90, 3, 40, 1, 66)]),
    "sum and rows": (
        lambda *xs: (y := torch.cat(xs)).sum(0) + y.amax(-1).sum(),
        [(n, 90) for n in (90, 3, 40, 1, 66)],
    ),
    "stacked": (lambda *xs: torch.stack([x.exp() for x in xs]).transpose(0, 1), [(60, 40)] * 5),
    "within": (
        lambda *xs: torch.cat([torch.cat(xs[:3], 1), torch.cat(xs[3:], 1)], -1),
        [(4, c, 60) for c in (6, 20, 4)] + [(4, c, 33) for c in (10, 11, 9)],
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("threads", [1, 2])
def test_joins_along_outer_loops(name: str, threads: int, tmp_path: Path) -> None:
    f, shapes = OUTSIDE[name]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        text = same(f, *(torch.randn(s) for s in shapes), tmp_path=tmp_path)
    finally:
        torch.set_num_threads(before)
    if name in ("channels", "rows", "stacked"):
        assert not any(" ? p" in x for x in loops(text)), "a row asks which part it is of"


JOINS: dict[str, Callable[..., Any]] = {
    "rows": lambda *xs: torch.cat([x + 1 for x in xs]),
    "columns": lambda *xs: torch.cat([x.t() for x in xs], 1).contiguous().sum(0),
    "lanes": lambda *xs: torch.cat([x.t().contiguous() for x in xs], 1).amax(0) * 2,
}


@pytest.mark.parametrize("name", JOINS)
def test_a_join_of_changing_sizes(name: str) -> None:
    torch._dynamo.reset()
    f = torch.compile(JOINS[name], backend="deuteron", dynamic=True)
    for k in (3, 50, 1):
        xs = [torch.randn(n, 64) for n in (k, 2 * k + 5, 30, k + 7)]
        torch.testing.assert_close(f(*xs), JOINS[name](*xs), rtol=1e-5, atol=1e-5)


def test_few_points_are_not_cut() -> None:
    def joined(*xs: Tensor) -> Tensor:
        return torch.cat([x * 2 for x in xs])

    xs = [torch.randn(n, 5) for n in (3, 1, 4, 2)]
    torch.testing.assert_close(torch.compile(joined, backend="deuteron")(*xs), joined(*xs))


CROSSED: dict[str, tuple[Callable[..., Any], torch.memory_format]] = {
    "to channels last": (
        lambda *xs: (torch.cat(xs, 1) * 2).relu().contiguous(memory_format=torch.channels_last),
        torch.channels_last,
    ),
    "to contiguous": (
        lambda *xs: torch.cat(xs, 1).sigmoid().contiguous(memory_format=torch.contiguous_format),
        torch.contiguous_format,
    ),
    "padded": (
        lambda *xs: F.pad(torch.cat(xs, 1), (0, 0, 0, 0, 3, 4)).contiguous(
            memory_format=torch.channels_last
        ),
        torch.channels_last,
    ),
}


@pytest.mark.parametrize("name", CROSSED)
@pytest.mark.parametrize("channels", [(24, 12, 12), (3, 40, 9, 33, 130)], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_joins_of_several_memory_orders(
    name: str, channels: tuple[int, ...], threads: int, tmp_path: Path
) -> None:
    """Tiles, too, have one part of what is joined each; asked at every element which part it is of,
    a dense block's joins took 12 times as long."""
    f, order = CROSSED[name]
    first, *rest = channels
    xs = [torch.randn(2, first, 19, 23)]
    xs += [torch.randn(2, c, 19, 23).to(memory_format=torch.channels_last) for c in rest]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        text = same(f, *xs, tmp_path=tmp_path)
    finally:
        torch.set_num_threads(before)
    assert f(*xs).is_contiguous(memory_format=order)
    if name == "to contiguous":  # most of it is read along another axis
        assert "d_transpose" in text
    assert not any(" ? p" in x for x in loops(text)), "an element asks which part it is of"
