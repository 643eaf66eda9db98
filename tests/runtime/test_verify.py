"""The self-check names the kernel that is wrong, and leaves what runs it alone."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deuteron.stages as stages
from deuteron.backend import deuteron_backend
from deuteron.base.errors import VerifyError
from deuteron.ir.expr import op
from deuteron.ir.program import Compute, Program
from deuteron.memory import plan as memory_plan
from deuteron.runtime.rounding import Roundings, moved
from deuteron.runtime.verify import compare

R = torch.randn


def checked(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    asked = {"verify": True, **options}
    return torch.compile(f, backend=deuteron_backend, fullgraph=True, options=asked)


def planted(monkeypatch: pytest.MonkeyPatch, right: str, wrong: str) -> None:
    """A bug in every generated kernel with that text."""
    row = stages.CPP_ROW

    def write(*args: Any) -> Any:
        made = row.run(*args)
        return replace(made, source=re.sub(right, wrong, made.source))

    monkeypatch.setattr(stages, "CPP_ROW", replace(row, run=write))


def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = torch.softmax(x @ w, -1) * 3
    z = torch.nn.functional.layer_norm(y @ w, (x.shape[1],))
    return z, y.sum(0), (z > 0.5), z.argmax(-1), z.to(torch.bfloat16).cumsum(0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_right_kernels_pass(dynamic: bool) -> None:
    x, w = R(48, 64), R(64, 64)
    asked = {"verify": True}
    g = torch.compile(f, backend=deuteron_backend, dynamic=dynamic, options=asked)
    for n in (48, 7) if dynamic else (48,):
        torch.testing.assert_close(g(x[:n], w)[:2], f(x[:n], w)[:2])


def test_overwritten_inputs_pass() -> None:
    def g(x: Tensor, i: Tensor) -> Tensor:
        x.add_(1)
        x.index_add_(0, i, torch.ones(3, 4))
        return x * 2

    x, i = R(5, 4), torch.tensor([1, 1, 4])
    a, b = x.clone(), x.clone()
    torch.testing.assert_close(checked(g)(a, i), g(b, i))
    torch.testing.assert_close(a, b)


def test_wrong_kernel_is_named_and_runs_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def program(x: Tensor) -> Tensor:
        y = torch.sort(x.sin() + 1).values
        return (y * 1.25).sum(0)

    planted(monkeypatch, r"1\.25f?", "1.26f")
    with pytest.raises(VerifyError) as caught:
        checked(program, debug_dir=str(tmp_path))(R(6, 8))
    error = caught.value
    assert "mul" in error.node
    assert "test_verify.py" in error.where and "1.25" in error.where
    assert "sum" in str(error) or "mul" in str(error)
    (folder,) = tmp_path.glob("wrong_*")
    assert str(folder) in error.hint
    assert "1.26f" in (folder / "kernel.cpp").read_text()
    command = [sys.executable, "-m", "deuteron.runtime.standalone", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "differs by up to" in done.stdout


def sorts(x: Tensor) -> Tensor:
    a = torch.sort(x, 0)[0].cumsum(1)
    b = torch.sort(a * x, 0)[0].cumsum(1)
    return torch.sort(b - a, 0)[0] * a + b


def test_who_reads_overwritten_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor of the workspace at its start: the plan is wrong, no kernel is."""
    x = R(40, 30)
    torch.testing.assert_close(checked(sorts)(x), sorts(x), rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()
    monkeypatch.setattr(
        memory_plan, "assign_offsets", lambda need, lives: ([0] * len(need), max(need))
    )
    with pytest.raises(VerifyError) as caught:
        checked(sorts)(x)
    assert caught.value.guilty == "memory" and caught.value.node
    assert "overwritten" in str(caught.value)


def test_kernel_of_another_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule whose kernel stores something else than the program says."""
    real = stages.schedule

    def schedule(*args: Any, **more: Any) -> Any:
        made = real(*args, **more)

        def wrong(k: Any) -> Any:
            (nest,) = k.nests
            stmts = tuple(replace(s, value=op("neg", s.value)) for s in nest.stmts)
            return replace(k, nests=(replace(nest, stmts=stmts),))

        return replace(made, steps=tuple(wrong(s) for s in made.steps))

    monkeypatch.setattr(stages, "schedule", schedule)
    with pytest.raises(VerifyError) as caught:
        checked(lambda x: x.exp() * 3)(R(6, 8))
    assert caught.value.guilty == "schedule" and "mul" in caught.value.node


def test_right_kernel_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the folder holds is enough: with the bug taken out by hand it is right."""
    planted(monkeypatch, r"1\.25f?", "1.26f")
    with pytest.raises(VerifyError):
        checked(lambda x: x * 1.25, debug_dir=str(tmp_path))(R(6, 8))
    (folder,) = tmp_path.glob("wrong_*")
    text = (folder / "kernel.cpp").read_text()
    (folder / "kernel.cpp").write_text(text.replace("1.26f", "1.25f"))
    command = [sys.executable, "-m", "deuteron.runtime.standalone", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal" in done.stdout


def test_comparison() -> None:
    want = R(100)
    other = want * (1 + 1e-7)
    assert compare("t", want.clone(), want, other) is None
    got = want.clone()
    got[7] = got[7] + 1e-3
    difference = compare("t", got, want, other)
    assert difference is not None and difference.at == (7,) and difference.wrong == 1
    got[7] = float("nan")
    assert compare("t", got, want, other) is not None
    want[7] = other[7] = float("nan")
    assert compare("t", got, want, other) is None
    whole = torch.arange(5)
    assert compare("t", whole + 1, whole, whole) is not None
    assert compare("t", whole, whole, whole) is None
    # What rounding decides may differ as often as it does under moved inputs.
    flags, flipped = torch.zeros(5, dtype=torch.bool), torch.zeros(5, dtype=torch.bool)
    flipped[2] = True
    assert compare("t", flipped, flags, flipped) is None
    assert compare("t", ~flags, flags, flipped) is not None


def test_moved_inputs() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = R(1000).to(dtype)
        y = moved(x)
        change = ((y.double() - x.double()) / x.double()).abs().max()
        assert 0 < change <= 2 * torch.finfo(dtype).eps
    i = torch.arange(4)
    assert torch.equal(moved(i), i)
    exact = torch.tensor([0.0, -0.0, 1.0, -3.0, torch.inf, -torch.inf])
    assert torch.equal(moved(exact), exact)
    assert moved(torch.tensor(torch.nan)).isnan() and moved(torch.tensor(3e38)) != 3e38
    x = R(50, 40)  # what is computed twice moves alike
    assert torch.equal(moved(x.amax(1)), moved(x).gather(1, x.argmax(1, True))[:, 0])


def test_what_references_compute_is_moved() -> None:
    """By as much as terms that cancel are rounded; what is only chosen stays."""
    x = R(1000)
    y = torch.cat([x, -x[torch.randperm(1000)]])
    with Roundings():
        total, largest, shifted, half = y.sum(), y.amax(), y + 1, y.bfloat16() + 1
    unit = torch.finfo(torch.float32).eps * y.abs().sum()
    assert 0.1 * unit < abs(total - y.sum()) < 2 * unit
    assert largest == y.amax() and torch.equal(half, y.bfloat16() + 1)
    assert bool((shifted != y + 1).float().mean() > 0.9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_cancels_is_right(dtype: torch.dtype) -> None:
    """What is left are the roundings of values that inputs' roundings do not reach."""

    def program(x: Tensor) -> Tensor:
        y = x.exp()
        return (y - y.mean(-1, keepdim=True)).sum()

    g = checked(program)
    for seed in range(25):
        made = torch.Generator().manual_seed(seed)
        g(torch.randn(8, 64, generator=made).to(dtype))
        g(torch.randn(8, 64, generator=made, dtype=dtype))


def test_small_faults_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of norms do not hide them."""

    def program(x: Tensor) -> Tensor:
        y = torch.nn.functional.instance_norm(torch.nn.functional.gelu(x))
        return torch.nn.functional.group_norm(y * y * 1.25 + y, 1)

    planted(monkeypatch, r"1\.25f?", "1.2505f")
    with pytest.raises(VerifyError) as caught:
        checked(program)(R(2, 8, 30))
    assert caught.value.guilty == "generate"


def test_what_a_kernel_itself_overwrites_is_right() -> None:
    """It fills a tensor, and writes another into its memory."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.as_strided_scatter(x.new_zeros(4), x[:4, :3].sum(0) / x.sum(), (3,), (1,))
        return y, x[:, :4] / 12 * y

    x = R(6, 7)
    torch.testing.assert_close(checked(program)(x), program(x))


# -- against the traced graph ----------------------------------------------------------------------


def lowered_wrongly(monkeypatch: pytest.MonkeyPatch, change: Callable[[Program], Program]) -> None:
    """Everything behind lowering believes a program that is not what was traced."""
    real = stages.lower
    monkeypatch.setattr(stages, "lower", lambda *args, **kw: change(real(*args, **kw)))


def test_wrong_lowering_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel agrees with its program, and the program is wrong: only ATen tells."""

    def negated(p: Program) -> Program:
        return replace(p, defs=tuple(
            replace(d, body=op("neg", d.body)) if isinstance(d, Compute) and d.name == "mul" else d
            for d in p.defs
        ))  # fmt: skip

    lowered_wrongly(monkeypatch, negated)
    with pytest.raises(VerifyError) as caught:
        checked(lambda x: (torch.sort(x.exp() * 3)[0].sum(0), x))(R(6, 8))
    assert caught.value.guilty == "lower" and "mul" in caught.value.node
    assert "traced" in str(caught.value)


def test_wrong_view_of_a_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is wrong, the view that is returned is."""

    def turned(p: Program) -> Program:
        (out,) = p.outputs
        return replace(p, outputs=(replace(out, offset=out.offset + 1),))

    lowered_wrongly(monkeypatch, turned)
    with pytest.raises(VerifyError) as caught:
        checked(lambda x: x.exp()[1:3])(R(6, 8))
    assert caught.value.guilty == "lower" and "exp" in caught.value.node
    assert "output 0" in str(caught.value)


def test_rewrites_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that ATen runs is the one before any rewrite."""
    real = stages.rewrite

    def wrong(gm: Any, context: Any) -> Any:
        for n in gm.graph.nodes:
            if n.target is torch.ops.aten.sin.default:
                n.target = torch.ops.aten.cos.default
        return real(gm, context)

    monkeypatch.setattr(stages, "rewrite", wrong)
    with pytest.raises(VerifyError) as caught:
        checked(lambda x: x.sin() * 2)(R(6, 8))
    assert caught.value.guilty == "lower"


@pytest.mark.parametrize("dynamic", [False, True])
def test_right_programs_agree_with_what_was_traced(dynamic: bool) -> None:
    """Random numbers, writes, views of results, library calls, numbers made of sizes."""

    def g(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        y = torch.dropout(x @ x.t(), 0.5, True) + x.shape[0]
        z = torch.sort(y, 0)[0][1:].t()
        x.mul_(2)
        parts = x.split(2, 0)
        return z, parts[0].clone().roll(1, 0), x[i], y.to(torch.bfloat16).cumsum(0), x.flip(0) + 1

    f2 = torch.compile(
        g, backend=deuteron_backend, dynamic=dynamic, options={"verify": True, "eager_random": True}
    )
    for n in (8, 5) if dynamic else (8,):
        x, i = R(n, 6), torch.tensor([0, 3, 3])
        a, b = x.clone(), x.clone()
        torch.manual_seed(0)
        got = f2(a, i)
        torch.manual_seed(0)
        torch.testing.assert_close(got, g(b, i))


def test_training_agrees_with_what_was_traced() -> None:
    m = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.GELU(), torch.nn.Flatten(),
        torch.nn.Linear(4 * 36, 5),
    )  # fmt: skip
    x = R(2, 3, 8, 8)
    g = checked(lambda x: m(x).log_softmax(-1).square().mean())
    g(x).backward()
    first = [p.grad.clone() for p in m.parameters() if p.grad is not None]
    m.zero_grad()
    m(x).log_softmax(-1).square().mean().backward()
    for a, p in zip(first, m.parameters()):
        torch.testing.assert_close(a, p.grad, rtol=1e-3, atol=1e-4)


def test_halves_that_decide_places_are_compared_unrounded_too() -> None:
    """A binary search among numbers that a kernel has before they are rounded."""

    def f(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        b = b * 1.5 + 0.25
        return torch.bucketize(x * 3 - 1, b), (x * 3 - 1).relu() * 2 + b.sum()

    x, b = torch.randn(5, 7).bfloat16(), torch.tensor([-1.0, 0.0, 0.5]).bfloat16()
    made = torch.compile(f, backend="deuteron", options={"verify": True})(x, b)
    assert torch.equal(made[0], f(x, b)[0]) and made[1].shape == (5, 7)


def test_what_is_the_same_along_a_dimension_is_right() -> None:
    """Kernels have one place of it, the program all."""

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y * x[:, None].expand(-1, 6, 10).exp().sum(0), (y + 1).sum()

    x, y = torch.randn(4096, 10), torch.randn(300, 6, 10)
    made = torch.compile(f, backend="deuteron", options={"verify": True})(x, y)
    for got, wanted in zip(made, f(x, y), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)


def test_what_is_overwritten_before_it_is_read_needs_no_maker() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.softmax(-1)
        return torch.as_strided_scatter(torch.zeros(4), y.sum(0)[:4] / x.sum(), (4,), (1,)), y

    x = torch.randn(6, 5)
    made = torch.compile(f, backend="deuteron", options={"verify": True})(x)
    for got, wanted in zip(made, f(x), strict=True):
        torch.testing.assert_close(got, wanted)
