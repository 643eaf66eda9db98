"""PyTorch's own samples of its operators, compiled and compared with eager: some of them always,
some by turns, all of them where time does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deuteron.tools.coverage import failure_text, jobs_for
from deuteron.tools.coverage_cases import entries
from deuteron.tools.coverage_worker import Job, run_job, seedless
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
