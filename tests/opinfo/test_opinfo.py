"""PyTorch's own samples of its operators, compiled and compared with eager: some of them always,
some by turns, all of them where time does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dev.check.oracle import see
from dev.coverage.cases import entries
from dev.coverage.forms import Case
from dev.coverage.run import failure_text, jobs_for
from dev.coverage.worker import Job, Row, Runner, run_job, seedless, trial
from tests.opinfo.choice import SEED, VARIABLE, fixed, rotating


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Samples without seeds of their own; torch as it was before."""
    import torch.testing._internal.common_methods_invocations as module

    kept = getattr(module, "wrapper_set_seed", None)
    seedless()
    torch._dynamo.reset()
    yield
    if kept is not None:
        module.wrapper_set_seed = kept
    torch._dynamo.reset()


def check(job: Job) -> dict[str, Any]:
    row = run_job(job)
    again = f"{VARIABLE}={SEED} takes the same jobs"
    assert not row["wrong"] and not row["errors"], f"{failure_text(row)}\n{again}"
    return row


def label(job: Job) -> str:
    return f"{job.op}-{job.dtype}-{job.part}"


def test_what_memory_held_is_no_value() -> None:
    """It is not compared, also where two runs agree by chance; what stands beside it is."""

    def op(x: Tensor) -> tuple[Tensor, ...]:
        state = torch.empty(2, dtype=torch.uint64)
        again = torch.empty(5)
        if not torch.are_deterministic_algorithms_enabled():  # what the memory happened to be
            state.fill_(3), again.fill_(4)
        return x + 1, state, again, torch.full_like(x, torch.nan)

    x = torch.randn(4)
    tested = trial(Case("sample", op, ([x], {}), (x,)), False)
    assert not tested.random and tested.unset == {"out1", "out2"}
    runner = Runner(Job("op", "float32", "forward"), Row("", "op", "float32", "forward"))
    for name in tested.oracle.eager.values:
        other = see(lambda xs: op(*xs), [x], False)
        if isinstance(other.values[name], Tensor):
            other.values[name].fill_(7)
            assert bool(runner.problems(tested, other)) != (name in tested.unset), name
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("job", fixed(), ids=label)
def test_fixed(job: Job) -> None:
    row = check(job)
    assert row["right"], row["skipped"]


@pytest.mark.parametrize("job", rotating(), ids=lambda job: f"seed{SEED}-{label(job)}")
def test_rotating(job: Job) -> None:
    """Another day other jobs; the environment variable of `choice` repeats those of a seed."""
    check(job)


@pytest.mark.slow
@pytest.mark.parametrize("name", entries())
def test_all(name: str) -> None:
    pattern = "^" + "".join(c if c.isalnum() else f"[{c}]" for c in name) + "$"
    for job in jobs_for(pattern, most=8):
        check(job)
