"""Whole programs through ``torch.compile``: what the memory plan, the emitted module and its launch
must get right, whatever the kernels are."""

from __future__ import annotations

import json
import linecache
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import deuteron.pipeline as pipeline
import deuteron.stages as stages
from deuteron.backend import collecting, deuteron_backend
from deuteron.base.errors import BuildError, DeuteronError
from deuteron.runtime import build_cpp

Function = Callable[..., Any]


def compiled(f: Function, **kw: Any) -> Function:
    return torch.compile(f, backend=deuteron_backend, fullgraph=True, **kw)


def leaves(x: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(x) if isinstance(t, Tensor)]


def same(f: Function, *args: Any, **kw: Any) -> Function:
    """Checks values, types, strides, sharing of memory, mutation; returns the compiled function."""
    g = compiled(f, **kw)
    check(f, g, *args)
    check(f, g, *args)
    return g


def copies(args: tuple[Any, ...]) -> list[Any]:
    """Clones that keep strides and share memory with one another as the originals do."""
    storages: dict[int, Tensor] = {}
    out: list[Any] = []
    for a in args:
        if not isinstance(a, Tensor):
            out.append(a)
            continue
        key = a.untyped_storage().data_ptr()
        if key not in storages:
            whole = torch.empty(0, dtype=a.dtype).set_(a.untyped_storage())
            storages[key] = whole.clone()
        t = storages[key].as_strided(a.shape, a.stride(), a.storage_offset())
        out.append(t.detach().requires_grad_() if a.requires_grad else t)
    return out


def sharing(tensors: list[Tensor]) -> list[int]:
    """For each tensor the first one of the list whose memory it shares."""
    ptrs = [t.untyped_storage().data_ptr() if t.numel() else -k for k, t in enumerate(tensors)]
    return [ptrs.index(p) for p in ptrs]


def check(f: Function, g: Function, *args: Any) -> None:
    a, b = copies(args), copies(args)
    want, got = f(*a), g(*b)
    wants, gots = leaves(want), leaves(got)
    assert len(wants) == len(gots)
    for w, o in zip(wants, gots, strict=True):
        assert o.stride() == w.stride(), (o.stride(), w.stride())
        assert o.requires_grad == w.requires_grad
        torch.testing.assert_close(o, w, equal_nan=True)
    assert sharing(leaves(b) + gots) == sharing(leaves(a) + wants)
    for x, y in zip(leaves(a), leaves(b), strict=True):
        torch.testing.assert_close(y.detach(), x.detach(), equal_nan=True)
    if any(w.requires_grad for w in wants):
        grads = [torch.randn_like(w) for w in wants if w.requires_grad]
        torch.autograd.backward([w for w in wants if w.requires_grad], grads)
        torch.autograd.backward([o for o in gots if o.requires_grad], grads)
        for x, y in zip(leaves(a), leaves(b), strict=True):
            if x.grad is not None:
                assert y.grad is not None
                torch.testing.assert_close(y.grad, x.grad)


R = torch.randn


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 8), (1, 1), (0, 8), (4, 0), (3, 17)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_chain(shape: tuple[int, ...], dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = (x.sin() + 1) * 2
        return y, y.softmax(-1), y.sum(0), y.mean()

    same(f, R(shape), dynamic=dynamic)
    same(f, R(shape, requires_grad=True), dynamic=dynamic)


def test_training_of_a_network() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
    g = compiled(net)
    x = R(5, 8)
    for _ in range(2):
        net.zero_grad()
        net(x).square().mean().backward()
        want = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        net.zero_grad()
        g(x).square().mean().backward()
        for p, w in zip(net.parameters(), want, strict=True):
            torch.testing.assert_close(p.grad, w)


# -- outputs -----------------------------------------------------------------------------------


def test_outputs_survive_later_calls() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.softmax(-1)
        return y, (y @ y.T).relu()

    g = compiled(f)
    xs = [R(6, 6) for _ in range(4)]
    kept = [g(x) for x in xs]
    for x, (a, b) in zip(xs, kept, strict=True):
        torch.testing.assert_close((a, b), f(x))


def test_one_result_returned_several_times() -> None:
    same(lambda x: ((y := x + 1), y, y.T, y[1:], y.view(-1)), R(4, 6))


def test_inputs_and_their_views_are_returned() -> None:
    same(lambda x, y: (x, y.T, x[0], y + 1), R(4, 6), R(2, 3))


def test_numbers_and_none_are_returned() -> None:
    same(lambda x: (x.shape[0], None, x + 1, x.shape[0] * x.shape[1]), R(4, 6), dynamic=True)


def test_constants() -> None:
    c = torch.arange(6.0)
    same(lambda x: (x + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), c * 1, torch.ones(3)), R(6))


def test_nothing_to_compute() -> None:
    same(lambda x: x.view(-1), R(2, 3))
    same(lambda x: (x, x.detach()), R(2, 3))


# -- mutation ----------------------------------------------------------------------------------


def test_inputs_are_overwritten() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        z = x * 2
        x.add_(y)
        y.mul_(3)
        return z + x

    same(f, R(4, 6), R(4, 6))
    same(f, R(4, 6), R(4, 6), dynamic=True)


def test_views_of_inputs_are_overwritten() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        before = x.clone()
        x[1:].add_(y)
        x.T[0] = 7
        return before + x

    same(f, R(4, 6), R(3, 6))


def test_swapped_inputs() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        t = x.clone()
        x.copy_(y)
        y.copy_(t)
        return x - y

    same(f, R(4, 6), R(4, 6))


def test_inputs_that_share_memory() -> None:
    whole = R(24)

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return (x.sum() + y).sin()

    same(f, whole[:16].view(4, 4), whole[8:].view(4, 4))


def test_batch_norm_updates_its_statistics() -> None:
    net = nn.BatchNorm2d(3)
    other = nn.BatchNorm2d(3)
    g = compiled(other)
    for _ in range(3):
        x = R(2, 3, 5, 5)
        torch.testing.assert_close(g(x), net(x))
    torch.testing.assert_close(dict(other.named_buffers()), dict(net.named_buffers()))


# -- library calls -----------------------------------------------------------------------------


def test_library_calls_between_kernels() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a = (x + 1) @ w
        b = a.relu() @ w
        values, where = b.sort(dim=-1)
        top = values.exp().topk(3)
        return top.values * 2, where, (a + b).cumsum(1)

    w = R(64, 64) / 32
    same(f, R(40, 64), w)
    same(f, R(40, 64, requires_grad=True), w.requires_grad_(), dynamic=True)


@torch.library.custom_op("deuteron_pipeline::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    return x * 3


@thrice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("deuteron_pipeline::onto", mutates_args=("x",))
def onto(x: Tensor, y: Tensor) -> None:
    x.add_(y)
    x.mul_(y)


def padded(x: Tensor) -> Tensor:
    return nn.functional.pad(x, (0, 3))


def test_one_copy_for_all_calls_that_read_the_same_elements() -> None:
    def both(x: Tensor) -> tuple[Tensor, ...]:
        return thrice(padded(x)), thrice(padded(x).t())

    def other(x: Tensor) -> tuple[Tensor, ...]:
        return thrice(padded(x)), thrice(padded(x.t()))  # the same shape, other elements

    moved: list[list[int]] = []
    for f in (both, other):
        with collecting() as records:
            same(f, R(61, 61))
        moved.append([e["bytes"] for r in records for e in r.of("kernel")])
    read, written = 61 * 61 * 4, 61 * 64 * 4
    assert sum(moved[0]) == read + written
    assert sum(moved[1]) >= read + 2 * written


def test_what_a_call_writes_no_other_call_shares() -> None:
    def twins(x: Tensor) -> tuple[Tensor, ...]:
        a, b = padded(x), padded(x)
        onto(a, b)
        return a.sin(), b.cos()

    def in_turn(x: Tensor) -> tuple[Tensor, ...]:
        a = padded(x)
        b = thrice(a)
        onto(a, b)
        c = thrice(padded(x).t())
        onto(a, c.t())
        return a, b, thrice(a)

    def overwritten(x: Tensor) -> tuple[Tensor, ...]:
        a = thrice(padded(x))
        x.add_(1)
        return a, thrice(padded(x)), thrice(padded(x).t())

    for f in (twins, in_turn, overwritten):
        same(f, R(40, 61))


def test_library_results_that_share_memory_with_their_argument() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        c = torch.view_as_complex(x * 2)
        d = c * c.conj()
        r = torch.view_as_real(d)
        return r.sin() + x, c.abs(), torch.view_as_real(c) + 1

    same(f, R(5, 7, 2))
    same(lambda c: (torch.view_as_real(c).sin(), c * 2), R(5, 7, dtype=torch.complex64))


def test_convolution_network() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    )
    x = R(2, 3, 8, 8, requires_grad=True)
    want = net(x)
    want.sum().backward()
    grad, x.grad = x.grad, None
    out = compiled(net)(x)
    out.sum().backward()
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(x.grad, grad, atol=1e-5, rtol=1e-4)


def test_sizes_that_a_call_decides() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        i = x.nonzero()
        return i * 2 + 1, i.sum(0)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        g = compiled(f)
        for x in (R(6).relu(), torch.zeros(6), torch.ones(6)):
            torch.testing.assert_close(g(x), f(x))


def test_indices_out_of_range() -> None:
    g = compiled(lambda x, i: x[i] * 2)
    x = R(5, 3)
    torch.testing.assert_close(g(x, torch.tensor([4, -5, 0])), x[torch.tensor([4, -5, 0])] * 2)
    with pytest.raises(IndexError):
        g(x, torch.tensor([0, 5, 1]))
    torch.testing.assert_close(g(x, torch.tensor([1, 1, 1])), x[torch.tensor([1, 1, 1])] * 2)


# -- changing sizes ----------------------------------------------------------------------------


def test_sizes_change_without_compiling_again() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x.softmax(-1)
        z = (y * 2) @ w
        return y.sum(0), z.relu(), torch.cat([z, y @ w]).T, y[1:] - y[:-1]

    g = compiled(f, dynamic=True)
    w = R(7, 5)
    for n in (4, 2, 11, 31, 2, 4, 97):
        x = R(n, 7)
        torch.testing.assert_close(g(x, w), f(x, w))


def test_strided_inputs() -> None:
    same(lambda x: (x + 1, x.sum(0)), R(8, 6).T)
    same(lambda x: (x + 1, x.sum(0)), R(8, 6)[::2, 1::2])
    same(lambda x: (x * 2).sum(1), R(1, 6).expand(8, 6))
    same(lambda x: x * 2, R(30)[3:])


# -- autograd ----------------------------------------------------------------------------------


def test_backward_twice() -> None:
    x = R(4, 6, requires_grad=True)
    y = compiled(lambda x: (x.sin().softmax(-1) * x).sum())(x)
    y.backward(retain_graph=True)
    first = x.grad.clone() if x.grad is not None else None
    x.grad = None
    y.backward()
    torch.testing.assert_close(x.grad, first)


def test_backward_once_then_twice() -> None:
    g = compiled(lambda x: x.sin().softmax(-1) * x)
    for retain in (False, True, False):
        x = R(4, 6, requires_grad=True)
        y = g(x)
        y.backward(torch.ones(4, 6), retain_graph=retain)
        if retain:
            y.backward(torch.ones(4, 6))


def test_gradients_with_other_strides() -> None:
    x = R(4, 6, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return x.sin() * 2

    y = compiled(f)(x)
    for grad in (R(6, 4).T, torch.ones(()).expand(4, 6), R(8, 6)[::2]):
        (got,) = torch.autograd.grad(y, x, grad, retain_graph=True)
        (want,) = torch.autograd.grad(f(x), x, grad)
        torch.testing.assert_close(got, want)


def test_some_outputs_without_gradient() -> None:
    x = R(4, 6, requires_grad=True)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x.sin(), x.detach() * 2, (x > 0), x.exp()

    out = compiled(f)(x)
    out[3].sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())


# -- calls at once -----------------------------------------------------------------------------


def test_threads() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).softmax(-1).T @ x).sum(0) * 2

    g = compiled(f)
    w = R(64, 64)
    g(R(96, 64), w)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x = torch.randn(96, 64, generator=made)
            if not torch.allclose(g(x, w), f(x, w), atol=1e-3, rtol=1e-4):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# -- what is left behind -----------------------------------------------------------------------


def test_debug_folder_holds_every_artifact(tmp_path: Path) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.sort(torch.softmax(x @ w, -1)).values + torch.arange(32)

    x, w = R(24, 32), R(32, 32)
    g = torch.compile(f, backend=deuteron_backend, options={"debug_dir": str(tmp_path)})
    torch.testing.assert_close(g(x, w), f(x, w))
    (folder,) = tmp_path.glob("inference_*")
    for name in ("graph", "program", "schedule", "memory", "kernels"):
        assert (folder / f"{name}.txt").read_text()
    text = (folder / "module.py").read_text()
    assert "test_pipeline.py" in text and "softmax" in text and "def call(args):" in text
    assert {e["kind"] for e in json.loads((folder / "record.json").read_text())} >= {
        *("stage", "kernel", "library", "buffer", "decision")
    }
    done = subprocess.run(
        [sys.executable, str(folder / "module.py")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ calls, median [\d.]+ us, best [\d.]+ us\n", done.stdout)


def test_module_with_constants_and_changing_sizes_runs_alone(tmp_path: Path) -> None:
    c = torch.rand(5, 3)

    def f(x: Tensor, i: Tensor) -> Tensor:
        return (x @ c.T)[i].relu() + torch.tensor([[1.0, 2, 3, 4, 5]])

    asked = {"debug_dir": str(tmp_path)}
    g = torch.compile(f, backend=deuteron_backend, dynamic=True, options=asked)
    x, i = R(4, 3), torch.tensor([0, 3, 3])
    torch.testing.assert_close(g(x, i), f(x, i))
    (folder,) = tmp_path.glob("inference_*")
    done = subprocess.run(
        [sys.executable, str(folder / "module.py")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_names_and_lines_of_the_user_stay_in_comments(tmp_path: Path) -> None:
    """A source line with quotes, line ends and code in it changes nothing."""
    nasty = 'x = (x + 1)  # """ \\\\ \'\'\' */ R"( ??/ \f import os; os.abort()'
    path = tmp_path / 'we"""ird\\.py'
    path.write_text(f"def f(x):\n    {nasty}\n    return x.sin().sum(0)\n")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    linecache.checkcache()
    x = R(4, 6)
    asked = {"debug_dir": str(tmp_path / "out")}
    g = torch.compile(names["f"], backend=deuteron_backend, options=asked)
    torch.testing.assert_close(g(x), (x + 1).sin().sum(0))
    (folder,) = (tmp_path / "out").glob("inference_*")
    done = subprocess.run(
        [sys.executable, str(folder / "module.py")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


# -- failures ----------------------------------------------------------------------------------


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program runs through ATen, forward and backward, and says so once."""

    def none(cxx: str | None = None) -> None:
        raise build_cpp.NoCompiler("no C++ compiler was found", hint="install one")

    monkeypatch.setattr(build_cpp, "compiler", none)
    pipeline.warn_once.cache_clear()
    x = R(4, 6, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x.sin(), 0.5).softmax(-1).sum(0) * torch.tensor(2.0)

    with collecting() as records, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = compiled(f)(x)
        out.sum().backward()
    assert out.shape == (6,)
    assert x.grad is not None
    assert len([w for w in caught if "C++ compiler" in str(w.message)]) == 1
    assert [r.of("fallback") != [] for r in records] == [True, True]


def test_failures_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(stages, "CPP_ROW", replace(stages.CPP_ROW, run=broken))
    x = R(4, 6)
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(lambda x: x + 1)(x)
    error = caught.value.inner_exception
    assert isinstance(error, DeuteronError)
    assert "stage 'generate', pass 'cpp': ZeroDivisionError: oh" in error.message
    assert 'options={"fallback": "aten"}' in error.hint
    g = torch.compile(lambda x: x + 1, backend=deuteron_backend, options={"fallback": "aten"})
    with collecting() as records:
        torch.testing.assert_close(g(x), x + 1)
    assert "oh" in records[0].of("fallback")[0]["reason"]


def test_compiler_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error shows the source's path, the compiler's words and a command that repeats them."""
    row = stages.CPP_ROW

    def write(*args: Any) -> Any:
        made = row.run(*args)
        return replace(made, source=made.source + "\nint broken(;\n")

    monkeypatch.setattr(stages, "CPP_ROW", replace(row, run=write))
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(lambda x: x + 1)(R(4, 6))
    error = caught.value.inner_exception
    assert isinstance(error, BuildError)
    assert "broken" in Path(error.source).read_text()
    assert "broken" in error.output
    done = subprocess.run(error.command, shell=True, capture_output=True, text=True)
    assert done.returncode != 0 and "broken" in done.stderr


def test_threads_of_the_option() -> None:
    x = R(300, 1000)
    g = torch.compile(lambda x: x.softmax(-1), backend=deuteron_backend, options={"threads": 1})
    torch.testing.assert_close(g(x), x.softmax(-1))
