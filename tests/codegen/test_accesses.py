"""The option `check_accesses`: every load and store of generated kernels is checked when it runs.

Right programs stay right under it; kernels with planted wrong addresses raise, and the error names
the kernel, the tensor and the element.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import deuteron.stages as stages
from deuteron.backend import deuteron_backend
from deuteron.ir.expr import Expr, rebuild
from deuteron.runtime.support import AccessError, IndexOutOfRange
from deuteron.schedule.kernel import Kernel, Nest, Store
from tests.interpreting import interpret

R = torch.randn
OPTIONS = {"check_accesses": True}


def points(x: Tensor) -> tuple[Tensor, ...]:
    return x.sin() + 1, x.flip(0) * 2, torch.cat([x[3:], x[:3]]), F.pad(x, (2, 1)), x[:, ::3].exp()


def transposed(x: Tensor) -> tuple[Tensor, ...]:
    return x.t().contiguous() + 1, x.t().contiguous(), x.t().reshape(-1).roll(5)


def rows(x: Tensor) -> tuple[Tensor, ...]:
    return torch.softmax(x, 1), F.layer_norm(x, x.shape[1:]), x.sum(1), x.argmax(1), x.cumsum(1)


def columns(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(0), torch.softmax(x, 0), x.amax(0), x.cumsum(0), (x - x.mean(0)).pow(2).sum(0)


def windows(x: Tensor) -> tuple[Tensor, ...]:
    image = x[None, None]
    return (
        F.max_pool2d(image, 3, 2, 1),
        F.avg_pool2d(image, 3, 1, 1),
        F.interpolate(image, scale_factor=2.0),
    )


def indexed(x: Tensor) -> tuple[Tensor, ...]:
    i = torch.arange(9, device=x.device) * 2
    return x[i], x.index_add(0, i, x[:9]), x[:, i % x.shape[1]], x.index_put((i,), x[1:10])


def written(x: Tensor) -> Tensor:
    y = x.clone()
    y[2:5] = 1
    y.t()[1].mul_(3)
    return y


PROGRAMS = (points, transposed, rows, columns, windows, indexed, written)


@pytest.mark.parametrize("step", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16], ids=str)
def test_few_elements_that_are_apart(step: int, dtype: torch.dtype) -> None:
    """Parts of complex numbers, and elements that are a step apart of small tensors: what gathers
    them for a loop of vectors is checked, too."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x.reshape(-1), x + 1, (x * 2).unsqueeze(0).expand(3, *x.shape)

    for n in (3, 24, 41):
        x = torch.arange(2 * step * n).to(dtype).view(2, n, step)[..., 1]
        torch._dynamo.reset()
        for a, b in zip(
            torch.compile(f, backend="deuteron", options=OPTIONS)(x), f(x), strict=True
        ):
            torch.testing.assert_close(a, b)
    torch._dynamo.reset()
    part = torch.randn(4, 6, dtype=torch.complex64).imag
    for a, b in zip(
        torch.compile(f, backend="deuteron", options=OPTIONS)(part), f(part), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(24, 20), (200, 300)], ids=str)
@pytest.mark.parametrize("f", PROGRAMS)
def test_right_programs_stay_right(f: Callable[..., Any], shape: tuple[int, int]) -> None:
    x = R(shape)
    for dynamic in (False, True):
        torch._dynamo.reset()
        g = torch.compile(f, backend=deuteron_backend, dynamic=dynamic, options=OPTIONS)
        torch.testing.assert_close(g(x), f(x), rtol=1e-4, atol=1e-4)


def moved(kernel: Kernel, by: int, loads: bool) -> Kernel:
    """The kernel with its loads (or stores) at other places."""

    def expr(root: Expr) -> Expr:
        done: dict[Expr, Expr] = {}
        local = set().union(*(n.locals() for n in kernel.nests))
        for n in root.walk():
            new = rebuild(n, tuple(done[a] for a in n.args), {}, done)
            if loads and new.op == "load" and new.attr[0] not in local and new.attr[1]:
                name, index, fill = new.attr
                new = Expr("load", new.dtype, new.args, (name, (*index[:-1], index[-1] + by), fill))
            done[n] = new
        return done[root]

    def stmt(s: Any) -> Any:
        if not isinstance(s, Store):
            return replace(s, body=expr(s.body))
        index = s.index if loads else (*s.index[:-1], s.index[-1] + by)
        return replace(s, value=expr(s.value), index=index)

    def nest(n: Nest) -> Nest:
        return replace(n, stmts=tuple(stmt(s) for s in n.stmts))

    return replace(kernel, nests=tuple(nest(n) for n in kernel.nests))


def planted(monkeypatch: pytest.MonkeyPatch, by: int, loads: bool) -> None:
    row = stages.CPP_ROW

    def write(task: Any, context: Any) -> Any:
        return row.run(replace(task, kernel=moved(task.kernel, by, loads)), context)

    monkeypatch.setattr(stages, "CPP_ROW", replace(row, run=write))


@pytest.mark.parametrize("by", [-1, 1, 10**6, -(2**40)])
@pytest.mark.parametrize("loads", [True, False], ids=["loads", "stores"])
@pytest.mark.parametrize(
    "f",
    [lambda x: x.sin() + 1, lambda x: torch.softmax(x, 1), lambda x: x.sum(0), lambda x: x.t() + 0,
     lambda x: x.t().contiguous()],
    ids=["points", "rows", "columns", "tiles", "copies"],
)  # fmt: skip
def test_wrong_addresses_are_named(
    f: Callable[..., Any], loads: bool, by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, by, loads)
    x = R(40, 48)
    with pytest.raises(AccessError) as caught:
        torch.compile(f, backend=deuteron_backend, options=OPTIONS)(x)
    text = str(caught.value)
    match = re.search(r"kernel (\w+): tensor ([\w.]+), which has (\d+) elements.* (-?\d+)\n", text)
    assert match, text
    count, at = int(match[3]), int(match[4])
    assert not 0 <= at < count
    assert match[1].startswith(("poi_", "red_"))
    assert match[2].startswith("arg") is loads


def test_the_next_call_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, 1, True)
    g = torch.compile(lambda x: x.sin(), backend=deuteron_backend, options=OPTIONS)
    for _ in range(3):
        with pytest.raises(AccessError):
            g(R(64))


def test_users_indices_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index of the program that is out of range is no fault of the compiler."""
    g = torch.compile(lambda x, i: x[i], backend=deuteron_backend, options=OPTIONS)
    with pytest.raises(IndexOutOfRange):
        g(R(8), torch.tensor([3, 9]))


# What reads no memory at the very position that the program gives: a slice, a pattern, numbers.
FOLDED = (
    lambda x, i: x[:4][i] * 2,
    lambda x, i: x.roll(1, 0)[:4][i] + 1,
    lambda x, i: torch.arange(4)[i] * 2,
    lambda x, i: torch.zeros(4)[i] + 1,
    lambda x, i: torch.eye(4)[i],
)


# -- Triton ----------------------------------------------------------------------------------------


def process() -> None:
    """What the process of `test_interpreted` does."""
    import dev.check.interpret as tools

    for f in (points, rows, columns, indexed):
        x = R(24, 20)
        g = torch.compile(f, backend=tools.interpreted, options=OPTIONS)
        torch.testing.assert_close(g(x), f(x), rtol=1e-4, atol=1e-4)
    for f in FOLDED:
        torch._dynamo.reset()
        x, inside = R(8), torch.tensor([0, 3, -1])
        g = torch.compile(f, backend=tools.interpreted)
        torch.testing.assert_close(g(x, inside), f(x, inside))
        with pytest.raises(IndexOutOfRange):
            g(x, torch.tensor([0, 4, 1]))
    real = tools.generate
    for loads in (True, False):
        for f in (lambda x: x.sin() + 1, lambda x: torch.softmax(x, 1), lambda x: x.sum(0)):
            torch._dynamo.reset()
            generated = []

            def generate(
                kernel: Kernel, *args: Any, loads: bool = loads, f: Any = generated
            ) -> Any:
                f.append(real(moved(kernel, 2**20, loads), *args))
                return f[-1]

            tools.generate = generate
            try:
                torch.compile(f, backend=tools.interpreted, options=OPTIONS)(R(24, 20))
            except Exception as e:  # noqa: BLE001 - told by its text
                text, cause = "", e
                while cause is not None:
                    text, cause = text + str(cause), cause.__cause__
                assert f"{'load' if loads else 'store'} outside" in text, text
                assert "kernel" in text and ("arg" in text) is loads, text
            else:
                raise AssertionError(f"not found: {generated[0].source}")
            finally:
                tools.generate = real


def test_interpreted() -> None:
    interpret(__file__)


if __name__ == "__main__":
    process()
