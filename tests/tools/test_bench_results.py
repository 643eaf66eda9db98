"""Results have the same bits from call to call, however threads run; the bench says where not. They
are compared with those of float64."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from dev.bench.cases import Case, Work
from dev.bench.command import SECONDS_PER_CASE, Asked
from dev.bench.contenders import CONTENDERS
from dev.bench.families import FAMILIES
from dev.bench.measure import Runner, identical
from dev.bench.report import OURS, remarks

FORWARD, TRAIN = (False,), (False, True)
PROGRAMS = {
    "layer_norm": ((3000, 257), TRAIN),
    "batch_norm": ((8, 16, 20, 20), TRAIN),
    "cross_entropy": ((700, 1001), TRAIN),
    "embedding": ((500, 64, 4096), TRAIN),
    "scatter_add": ((300, 32, 5000), FORWARD),
    "sum_all": ((1 << 20,), FORWARD),
    "sum_columns": ((5000, 130), FORWARD),
    "softmax_outer": ((900, 400), FORWARD),
    "cumsum": ((40, 20_000), FORWARD),
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_repeat(name: str) -> None:
    shape, ways = PROGRAMS[name]
    torch._dynamo.reset()
    case = Case("", name, "fp32", ways[-1], functools.partial(FAMILIES[name], shape, "fp32"))
    runner = Runner(CONTENDERS["deuteron"], Work(case, "cpu", 0))
    first = runner.first()
    assert runner.facts["unordered"] == []
    assert all(runner.repeats(first) for _ in range(5))


def test_bits() -> None:
    x = torch.tensor([float("nan"), 0.0, 1.0]).bfloat16()
    assert identical(x, x.clone()) and identical(x.t(), x) and identical(x[2], x[2].clone())
    assert not identical(x, torch.tensor([float("nan"), -0.0, 1.0]).bfloat16())


def test_the_bench_says_so() -> None:
    facts = {"repeats": False, "unordered": ["added in no fixed order"]}
    assert remarks({"results": {OURS: facts}}) == "differs from run to run"
    assert "does not say so" in remarks({"results": {OURS: {**facts, "unordered": []}}})
    assert remarks({"results": {OURS: {**facts, "repeats": True}}}) == ""


@pytest.mark.parametrize("name", ["entropy", "mean_square", "rms_norm_fp8_rows"])
def test_references_are_of_float64(name: str) -> None:
    shape = (64, 300)
    made = functools.partial(FAMILIES[name], shape, "bf16")
    work = Work(Case("", name, "bf16", name != "rms_norm_fp8_rows", made), "cpu", 0)
    references = work.reference()
    assert references is not None
    kept = [t for t in references if t.dtype != torch.float8_e4m3fn]
    assert kept and all(t.dtype == torch.float64 for t in kept)
    eager = work.step(work.function)
    apart = max(float((e.double() - t.double()).abs().max()) for e, t in zip(eager, references))
    assert 0 < apart < 40  # a unit in the last place of the largest fp8 number


def test_results_name_the_command_that_gives_them() -> None:
    def command(each: float, what: str = "time") -> str:
        return Asked(("norms",), "", "cpu", "", "", False, -1, each, 60.0, what, 2).command()

    assert command(SECONDS_PER_CASE) == "python -m dev bench norms --device cpu"
    assert command(2.0) == "python -m dev bench norms --device cpu --each 2"
    assert command(2.0, "cold") == "python -m dev bench norms --device cpu --cold --repeats 2"
