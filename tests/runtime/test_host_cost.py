"""What Deuteron itself costs in a call. The limits are several times what is measured (2 us for one
kernel on the machine of `dev/measure/host_cost.py`'s table), so that only a mistake passes them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deuteron.pipeline as pipeline
from deuteron.backend import collecting

R = torch.randn


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., float]]:
    """Microseconds (processor time) that one step spends in Deuteron's calls."""
    usual = pipeline.compile_graph
    spent = [0.0]

    def compile_graph(*args: Any, **kwargs: Any) -> Any:
        call = usual(*args, **kwargs)

        def measured(given: list[Any]) -> Any:
            start = time.thread_time()
            out = call(given)
            spent[0] += time.thread_time() - start
            return out

        measured._boxed_call = True  # type: ignore[attr-defined]
        return measured

    def of(step: Callable[[], Any]) -> float:
        for _ in range(10):
            step()
        times = []
        for _ in range(100):
            spent[0] = 0.0
            step()
            times.append(spent[0])
        return statistics.median(times) * 1e6

    monkeypatch.setattr(pipeline, "compile_graph", compile_graph)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield of
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_kernel(inside: Any, dynamic: bool) -> None:
    g = torch.compile(lambda x: ((x + 1) * 2).sin(), backend="deuteron", dynamic=dynamic)
    x = R(8, 16)
    assert inside(lambda: g(x)) < 20


def test_a_train_step(inside: Any) -> None:
    norm = nn.LayerNorm(32)
    g, x, dy = torch.compile(norm, backend="deuteron"), R(4, 32, requires_grad=True), R(4, 32)

    def step() -> None:
        x.grad = None
        g(x).backward(dy)

    assert inside(step) < 60


def test_each_kernel(inside: Any) -> None:
    """Kernels with a library call between each two: a pair costs little more than the library."""

    def body(x: Tensor) -> Tensor:
        for _ in range(12):
            x = torch.sort(F.softmax(x, -1) + x.sin(), -1).values
        return x

    x = R(2, 8)
    with collecting() as records:
        g = torch.compile(body, backend="deuteron")
        ours = inside(lambda: g(x))
    assert len(records[0].of("kernel")) >= 12
    y = R(2, 8)
    start = time.thread_time()
    for _ in range(100):
        for _ in range(12):
            torch.sort(y, -1)
    library = (time.thread_time() - start) * 1e4
    assert ours - library < 12 * 20


def test_workspaces_are_kept_and_calls_may_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that runs while another one does has a workspace of its own."""
    from concurrent.futures import ThreadPoolExecutor

    def body(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = F.layer_norm(x @ w, (96,))
        return x

    w = R(96, 96) / 10
    g = torch.compile(body, backend="deuteron")
    xs = [R(64, 96) for _ in range(40)]
    g(xs[0], w)
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda x: g(x, w), xs))
    for x, out in zip(xs, got, strict=True):
        torch.testing.assert_close(out, body(x, w), rtol=1e-4, atol=1e-4)


def test_a_call_that_fails_leaves_the_next_one_right() -> None:
    def body(x: Tensor, i: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(F.layer_norm(x @ w, (96,))[i] @ w, (96,))

    w, x = R(96, 96) / 10, R(64, 96)
    g = torch.compile(body, backend="deuteron")
    good, bad = torch.arange(64).flip(0), torch.full((64,), 64)
    for _ in range(3):
        torch.testing.assert_close(g(x, good, w), body(x, good, w), rtol=1e-4, atol=1e-4)
        with pytest.raises(IndexError):
            g(x, bad, w)
