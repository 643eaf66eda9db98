"""Writes into inputs: stores of kernels, not copies of the library's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import deuteron
import deuteron.schedule as scheduling
from deuteron.base.passes import Context
from deuteron.codegen.triton.generate import generate
from deuteron.ir.program import Program
from tests.schedule.tools import spec_of
from tests.test_pipeline import R, same

BETAS = 0.9, 0.99


def running(x: Tensor, m: Tensor, v: Tensor) -> Tensor:
    return F.batch_norm(x, m, v, training=True)


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
    """All three overwritten; the parameter's new value is made of the moments' new values."""
    with torch.no_grad():
        m.mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
        v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
        p.sub_(0.1 * m / (v.sqrt() + 1e-8))
        return m.sum()


def swapped(x: Tensor, y: Tensor) -> Tensor:
    t = x.clone()
    x.copy_(y)
    y.copy_(t)
    return x - y


def old_of_rows(x: Tensor, m: Tensor) -> Tensor:
    """Every element of a row reads what one store overwrites."""
    y = x - m[:, None]
    m.mul_(0.5)
    return y


def shifted(x: Tensor) -> Tensor:
    """Reads at other places than it writes."""
    x[1:].add_(x[:-1].clone())
    return x.sum(0)


def cast(x: Tensor, y: Tensor) -> Tensor:
    y.copy_(x * 2)
    return y * 3


def old_and_new(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    before = x * 2
    x.add_(y)
    return before + x, x.amax(-1)


def averaged(x: Tensor, m: Tensor) -> Tensor:
    m.lerp_(x.mean(0), 0.1)
    return x - m


def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return R(*shape).to(dtype)


# function, arguments, most kernels
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "running statistics": (running, (make(4, 3, 5, 6), make(3), make(3)), 1),
    "adam": (adam, (make(65), make(65), make(65), make(65).abs()), 2),
    "swapped": (swapped, (make(4, 6), make(4, 6)), 3),
    "old values of rows": (old_of_rows, (make(40, 70), make(40)), 1),
    "shifted": (shifted, (make(9, 5),), 4),
    "cast": (cast, (make(4, 6), make(4, 6, dtype=torch.bfloat16)), 1),
    "transposed": (cast, (make(4, 6), make(6, 4).T), 1),
    "old and new": (old_and_new, (make(4, 6), make(4, 6)), 2),
    "averaged": (averaged, (make(50, 6), make(6)), 2),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dynamic: bool) -> None:
    f, args, _ = CASES[name]
    same(f, *args, dynamic=dynamic)


@pytest.mark.parametrize("name", CASES)
def test_no_library_calls(name: str) -> None:
    f, args, most = CASES[name]
    report = deuteron.explain(f, *[a.clone() for a in args])
    assert not report.library_calls
    assert len(report.kernels) <= most


def test_a_row_is_stored_when_all_have_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[Program] = []
    original = scheduling.schedule

    def listen(program: Program, context: Context) -> Any:
        programs.append(program)
        return original(program, context)

    monkeypatch.setattr("deuteron.stages.schedule", listen)
    f, args, _ = CASES["old values of rows"]
    deuteron.explain(f, *[a.clone() for a in args])
    spec = spec_of("H200")
    (kernel,) = original(programs[0], Context(specs=lambda _: spec)).steps
    lines = generate(kernel, spec).source.splitlines()
    barrier = next(k for k, line in enumerate(lines) if "debug_barrier" in line)
    assert all(k < barrier for k, line in enumerate(lines) if "tl.load" in line)
    assert all(k > barrier for k, line in enumerate(lines) if "tl.store" in line)
