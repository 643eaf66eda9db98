"""Random programs of fixed seeds and of a seed that changes daily; that a failure would be seen,
and cut down to what fails."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._decomp import decomposition_table

from dev.check import test_cases
from dev.check.differences import differences
from dev.check.minimize import reduced
from dev.check.oracle import Oracle, see
from dev.check.perturbed import PerturbedResults
from dev.check.test_cases import Failure, How, Line, Straight, file_text, load, straight
from dev.coverage.run import PROCESS_SPENT, Lost, Worker
from dev.fuzz.programs import program
from dev.fuzz.run import Task, fuzz, largest, lost, run_task, runnable
from tests.interpreting import interpret

ROOT = Path(__file__).resolve().parent.parent.parent
FIXED = 7_000_013
TODAY = 10_000_000 + 1000 * int(time.strftime("%j"))


@pytest.mark.parametrize(
    "first, count",
    [
        pytest.param(FIXED, 6, id="fixed"),
        pytest.param(TODAY, 8, id="of today"),
        pytest.param(FIXED + 6, 30, id="more", marks=pytest.mark.slow),
    ],
)
def test_random_programs(first: int, count: int, tmp_path: Path) -> None:
    """In worker processes, as `python -m dev fuzz` runs them."""
    lines: list[str] = []
    task = Task(first, cut=False, folder=str(tmp_path))
    tally = fuzz(first, None, count, 1, task, lines.append)
    assert sum(tally.verdicts.values()) == count
    assert not tally.bad(), f"python -m dev fuzz --seed {first} --count {count}\n" + "\n".join(
        lines
    )
    assert tally.verdicts["right"] > count / 2


# Each was wrong, or could not be compiled, before its fix: grids of several nests behind a barrier,
# sizes whose names begin alike, sizes that only tell how wide indices are, a checked place that is
# one for a whole block of masks, blocks too short to begin at a multiple of 16 bytes, sums of
# negative zeros.
INTERPRETED = (500_004, 500_008, 1_000_004, 1_000_193, 14_001_877, 31_000_468, 31_301_048)


def test_interpreted_programs(tmp_path: Path) -> None:
    """Triton kernels, run by Triton's interpreter, which a process has on from its start."""
    code = (
        "import sys\n"
        "from dev.fuzz.run import Task, run_task\n"
        "for s in map(int, sys.argv[2:]):\n"
        "    row = run_task(Task(s, backend='interpreted', cut=False, folder=sys.argv[1]))\n"
        "    assert row['verdict'] in ('right', 'refused', 'torch'), row\n"
    )
    seeds = [str(s) for s in (*INTERPRETED, FIXED)]
    interpret("-c", code, tmp_path, *seeds)


def test_a_seed_is_a_program() -> None:
    a, b = program(FIXED), program(FIXED)
    assert a == b and a.straight().text() == b.straight().text()
    assert program(FIXED + 1).lines != a.lines


# -- a failure is cut down -------------------------------------------------------------------------
def cosine_for_sine(gm: Any, inputs: list[Tensor]) -> Any:
    """A compiler with a bug."""
    for n in gm.graph.nodes:
        if n.target is torch.sin:
            n.target = torch.cos
    gm.recompile()
    return gm.forward


def test_a_file_has_its_inputs(tmp_path: Path) -> None:
    """Elements, strides, and where in its memory each begins."""
    small = torch.arange(20.0).as_strided((2, 3), (7, 2), 3).requires_grad_()
    large = torch.ones(1000).as_strided((20, 30), (31, 1), 5)
    p = Straight({"x": (small,), "y": (large,)}, (), ("x",))
    file = tmp_path / "a.py"
    file.write_text(file_text(p, How(), ""))
    [[x, y]] = load(file).sets
    assert x.tolist() == small.tolist() and x.requires_grad
    for got, want in ((x, small), (y, large)):
        assert got.stride() == want.stride() and got.storage_offset() == want.storage_offset()


@pytest.mark.parametrize("write", ["index_put", "clone().index_put_"])
def test_elements_that_are_written_again_and_again_count(write: str) -> None:
    """4e7 of them took a quarter of an hour where programs are interpreted (seed 55000271)."""
    x, at = torch.ones(30, 40), torch.zeros(500, dtype=torch.int64)
    f = eval(f"lambda x, at: x.{write}((at,), x.sum(), accumulate=True)")
    assert largest(f, [x, at]) == 500 * 40


def test_nothing_attends_to_nothing() -> None:
    """This seed's program did; torch 2.11 ends the process there."""
    assert "attention" not in program(5000299, 40).straight().text()


@pytest.mark.parametrize("before", ["x + 1", "x[x > -9]"], ids=["", "after what needs values"])
def test_sizes_that_make_large_tensors_are_left_out(before: str) -> None:
    """2e9 elements with a seed's third sizes took the memory of the machine."""
    sizes = (3, 200_000, 500, 2000)
    inputs = {"x": tuple(torch.ones(n, requires_grad=True) for n in sizes)}
    lines = (Line("torch.outer(x, x)", "v0"), Line(before, "v1"))
    p = Straight(inputs, lines, ("v0", "v1"))
    assert runnable(p, True) == [0, 2]
    small = Straight({"x": inputs["x"][::2]}, lines[::-1], ("v0", "v1"))
    assert runnable(small, True) == [0, 1]  # nothing is known behind the line that needs values


def test_a_planted_error_is_cut_down_to_its_line() -> None:
    lines = (
        Line("x * 2 + y", "v0"),
        Line("v0.sum(0)", "v1"),
        Line("torch.softmax(v0, -1)", "v2"),
        Line("torch.sin(v2)", "v3"),
        Line("v3 @ y.mT", "v4"),
        Line("v4.exp() + 1", "v5"),
    )
    g = torch.Generator().manual_seed(0)
    inputs = {n: (torch.randn(4, 4, generator=g),) for n in "xy"}
    whole = Straight(inputs, lines, ("v1", "v5"))
    how = How(backend=cosine_for_sine)
    failure = whole.check(how)
    assert failure is not None and failure.kind == "wrong"
    small, failure, _ = reduced(whole, how, failure, 60.0)
    assert [x.text.split("(")[0] for x in small.lines] == ["torch.sin"]
    assert failure.kind == "wrong" and len(small.inputs) == 1


# -- the oracle ------------------------------------------------------------------------------------
def seen_by(f: Any, *inputs: Tensor) -> tuple[Oracle, Any]:
    def run(xs: list[Tensor]) -> Any:
        return see(lambda ys: f(*ys), xs, False)

    return Oracle(run, run, inputs), run([t.clone() for t in inputs])


def changed(got: Any, change: Any) -> Any:
    got.values["out0"] = change(got.values["out0"].clone())
    return got


def put(at: int, value: float) -> Any:
    def change(t: Tensor) -> Tensor:
        t.view(-1)[at] = value
        return t

    return change


def test_the_oracle_sees_what_is_wrong() -> None:
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))

    def judged(change: Any, f: Any = lambda x: (x * 3).exp()) -> list[str]:
        oracle, got = seen_by(f, x)
        return differences(changed(got, change), oracle)

    assert judged(lambda t: t) == []
    assert judged(lambda t: t * (1 + 1e-7)) == [], "an ulp is rounding"
    assert judged(lambda t: t * (1 + 1e-4)), "a thousand are not"
    assert judged(put(7, 99.0)), "one wrong element"
    assert judged(put(7, float("nan"))) and judged(put(7, float("inf")))
    assert judged(lambda t: t.double()) and judged(lambda t: t[:49])
    one = {"f": lambda x: torch.where(x > 1, float("nan"), x)}
    assert judged(lambda t: t, **one) == []
    assert judged(lambda t: t.nan_to_num(0.0), **one), "NaN where eager has it"
    assert judged(lambda t: t + 1, lambda x: (x * 9).int()), "whole numbers are exact"


def test_the_oracle_sees_the_signs_of_zeros() -> None:
    """Where the operators define them: not where a sum of other order, or an underflow, does."""
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    programs: list[tuple[Any, Any]] = [
        (lambda x: -x.abs() * 0, torch.abs),
        (lambda x: x - x, torch.neg),
        (lambda x: torch.copysign(x * 0, -x.abs()), torch.abs),
        (lambda x: torch.where(x > 0, x, -0.0).half(), lambda t: t + 0.0),
    ]
    for f, change in programs:
        oracle, got = seen_by(f, x)
        assert differences(got, oracle) == []
        assert "zeros of another sign" in "".join(differences(changed(got, change), oracle))
    oracle, got = seen_by(lambda x: (x * 1e-30) * (x.sum() - x.double().sum()).float() * 1e-20, x)
    assert differences(changed(got, torch.neg), oracle) == []
    zeros = torch.where(torch.rand(500) < 0.5, 0.0, -0.0)  # of the largest of both, either is right
    oracle, got = seen_by(lambda x: torch.maximum(x, -x), zeros)
    assert differences(changed(got, torch.neg), oracle) == []

    def norm(x: Tensor) -> Tensor:  # its formula happens to give either
        y, mean, rstd = torch.native_layer_norm(x, [50], None, None, 1e-5)
        backward = torch.ops.aten.native_layer_norm_backward
        return backward(y * 0, x, [50], mean, rstd, None, None, [True, False, False])[0]

    oracle, got = seen_by(norm, x)
    assert differences(changed(got, torch.neg), oracle) == []


def test_where_float64_has_no_number() -> None:
    """Eager's number is the measure there, to units in the last place."""
    x = torch.rand(50, generator=torch.Generator().manual_seed(0)) + 1

    def wide(x: Tensor) -> Tensor:
        return torch.where(x > 1.5, float("nan"), x)

    def seen(f: Any) -> Any:
        return lambda xs: see(lambda ys: f(*ys), xs, False)

    oracle = Oracle(seen(lambda x: x * 1), seen(wide), [x])
    for shift, right in ((0, True), (2, True), (200, False)):
        got = changed(seen(lambda x: x * 1)([x.clone()]), lambda t, n=shift: t * (1 + n * 2**-23))
        assert (differences(got, oracle) == []) == right
    got = changed(seen(lambda x: x * 1)([x.clone()]), lambda t: torch.where(t > 1.5, t + 1, t))
    assert differences(got, oracle)


def test_gradients_of_what_torch_itself_cannot_run() -> None:
    """Which inputs have gradients is not the backend's to decide: zeros are as good as none. Here
    `aot_eager` cannot say so, since a value that it saved is overwritten."""
    x, y, z = torch.randn(31, 16), *(torch.randn(31, 16, requires_grad=True) for _ in "yz")
    text = "def fn(x, y, z):\n    x.mul_(y)\n    x.fill_(5)\n    return (z.sin(),)\n"
    program = straight(text, [[x, y, z]])
    assert program is not None
    failure = program.check(How(backward=True))
    assert failure is None or failure.kind == "torch"


def answer(connection: Any) -> None:
    """A worker that says which process it is."""
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send({"pid": os.getpid(), PROCESS_SPENT: job})


def test_a_process_whose_gpu_is_spent_does_no_other_job() -> None:
    worker = Worker(answer)
    first, second, third = (worker.run(job, 60.0) for job in (False, True, False))
    worker.stop()
    assert first == second != third and set(third) == {"pid"}


class Hanging(Worker):
    """Never answers tasks of a backend that the task's folder names."""

    def run(self, job: Any, limit: float) -> dict[str, Any]:
        if job.backend in job.folder.split(","):
            raise Lost(f"no result after {limit:.0f} s")
        return {"verdict": "right"}


@pytest.mark.parametrize("hangs, verdict", [("deuteron", "error"), ("deuteron,aot_eager", "torch")])
def test_a_capture_that_hangs_is_torch_s(hangs: str, verdict: str) -> None:
    worker, task = Hanging(), Task(7, folder=hangs)
    with pytest.raises(Lost) as caught:
        worker.run(task, 2.0)
    row = lost(worker, task, 2.0, caught.value)
    assert row["verdict"] == verdict and row["seed"] == 7 and "no result" in row["text"]


@pytest.mark.parametrize("is_spent", [True, False])
def test_after_a_failed_assertion_torch_is_no_witness(
    is_spent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs on a GPU then: that the capture fails as well shows nothing (seed 25300030)."""

    def fails(fn: Any, sets: Any, how: How) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(test_cases, "run", fails)
    monkeypatch.setattr(test_cases, "spent", lambda: is_spent)
    failure = test_cases.check(torch.cos, torch.cos, [[torch.ones(2)]], How())
    assert failure is not None and failure.kind == ("error" if is_spent else "torch")


def test_a_failure_without_its_gpu_has_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs that lie there cannot be written any more; the row still says what happened."""

    def fails(self: Straight, how: How) -> Failure:
        return Failure("error", "CUDA error: device-side assert triggered")

    monkeypatch.setattr(Straight, "check", fails)
    for is_spent in (True, False):
        monkeypatch.setattr("dev.fuzz.run.spent", lambda now=is_spent: now)
        row = run_task(Task(FIXED, cut=False, folder=str(tmp_path)))
        assert row["verdict"] == "error" and "device-side" in row["text"]
        assert bool(row["file"]) is not is_spent


@pytest.mark.parametrize("dynamo", [True, False])
def test_what_dynamo_alone_gets_wrong(dynamo: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo of torch 2.11 takes a norm along the last of `[2, 1]` for one number, so that what is
    counted with its size is wrong, and AOTAutograd ends on it (seed 14500480)."""
    x, run = torch.randn(5, generator=torch.Generator().manual_seed(0)), test_cases.run

    def torch_2_11(fn: Any, sets: Any, how: How) -> Any:
        if how.backend == "aot_eager":
            raise RuntimeError("shape '[2, 1]' is invalid for input of size 1")
        wrong = dynamo or how.backend == "deuteron"
        return run(torch.sin if wrong else torch.cos, sets, replace(how, backend="eager"))

    monkeypatch.setattr(test_cases, "run", torch_2_11)
    failure = test_cases.check(torch.cos, torch.cos, [[x]], How())
    assert failure is not None and failure.kind == ("torch" if dynamo else "wrong")


@pytest.mark.parametrize("other_shape", [True, False])
def test_errors_where_torch_takes_results_for_others(
    other_shape: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of torch 2.11's norm the result has another shape, AOTAutograd ends on ours (79000720)."""
    run = test_cases.run

    def torch_2_11(fn: Any, sets: Any, how: How) -> Any:
        if how.backend == "deuteron":
            raise RuntimeError("shape '[5, 5, 2]' is invalid for input of size 10")
        wrong = torch.atleast_2d if other_shape else torch.sin
        return run(wrong, sets, replace(how, backend="eager"))

    monkeypatch.setattr(test_cases, "run", torch_2_11)
    failure = test_cases.check(torch.cos, torch.cos, [[torch.ones(5)]], How())
    assert failure is not None and failure.kind == ("torch" if other_shape else "error")


def test_what_torch_takes_for_strides() -> None:
    """For `one_hot` of what is not contiguous they are not eager's: AOTAutograd ends on its view
    of what follows, a compiler does not (seed 59001146)."""

    def rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hot = torch.nn.functional.one_hot(x, 5)
        chosen = hot[:, hot % 2]
        return chosen, chosen.reshape(-1) + 1

    x = torch.tensor([[1, 0], [4, 3]]).t()
    with pytest.raises(Exception, match="view size is not compatible"):
        torch.compile(rows, backend="aot_eager")(x)
    failure = test_cases.check(rows, rows, [[x]], How())
    assert failure is not None and failure.kind == "torch"


def test_strides_that_torch_takes_where_its_elements_differ_too() -> None:
    """The strides of what is written in place are lost in AOTAutograd; without a compiler, eager's
    gelu then has NaN for infinities of bfloat16, which is not to hide that (seed 72002970)."""

    def added(x: torch.Tensor) -> torch.Tensor:
        x.index_add_(0, torch.tensor([1]), x[:1].clone())
        return torch.nn.functional.gelu(x)

    x = torch.randn(2, 2, 8).bfloat16()
    x[1, 1, 4] = torch.inf
    failure = test_cases.check(added, added, [[x.permute(1, 0, 2)]], How())
    assert failure is not None and failure.kind == "torch", failure


def test_the_oracle_moves_sums_at_positions() -> None:
    """What is put at positions is exact, what is added there is not."""
    x, at, y = torch.full((9,), 0.3), torch.arange(9) % 2, torch.full((9,), 0.1)
    for accumulate in (False, True):
        with PerturbedResults(0, None):
            got = torch.index_put(x, (at,), y, accumulate=accumulate)
        want = torch.index_put(x, (at,), y, accumulate=accumulate)
        assert torch.equal(got, want) != accumulate


def test_the_oracle_knows_what_rounding_decides() -> None:
    """Moved inputs show nothing where what is computed of them cancels: moved results do."""
    x = torch.randn(17, 9, generator=torch.Generator().manual_seed(0))

    def cancelled(x: Tensor) -> Tensor:
        return (torch.nn.functional.cosine_similarity(x, x, dim=1)).to(torch.int64)

    oracle, got = seen_by(cancelled, x)
    other = 0 if got.values["out0"][3] else 1
    assert differences(changed(got, put(3, other)), oracle) == []
    assert differences(changed(got, put(3, 2)), oracle), "what no rounding gives"
    oracle, got = seen_by(lambda x: torch.maximum(x * 0, x * -0.0).sign() / 0.5, x)
    assert differences(changed(got, put(3, 2.0)), oracle), "zeros have two signs, and no third"


def test_the_oracle_knows_a_number_that_is_the_mean() -> None:
    """Eager's normalised number is about -1e-8 there, the remainder of that 3 (seed 8501592)."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    x[7] = torch.tensor([5.0, -7, -2, -5, 0, 7, -4, 6]) / 64
    oracle, got = seen_by(lambda x: torch.nn.functional.layer_norm((x * 64).round(), (8,)) % 3, x)
    assert differences(changed(got, put(60, 0.0)), oracle) == []
    assert differences(changed(got, put(61, 0.0)), oracle)


def test_the_oracle_knows_what_may_be_equal() -> None:
    """A sum that is 0 but for rounding may be 0 exactly, which no run that is moved shows (seeds
    8504466, 57001262)."""
    x = torch.tensor(
        [
            [-0.04487057030200958, 0.8443390727043152, -1.2242048978805542],
            [0.522580623626709, 0.021275494247674942, -0.3360234498977661],
            [0.9400777220726013, 3.033039093017578, 0.15837465226650238],
        ]
    )

    def compared(x: Tensor) -> Tensor:
        divergence = torch.nn.functional.kl_div
        total = divergence(x.log_softmax(-1), x.softmax(-1), reduction="sum")
        truths = [total.logical_and(x[0, 1]), total.logical_not(), total.to(torch.bool)]
        own = x.logsumexp(-1).sum() == 0  # the steps of which compare, too (seed 60003098)
        return torch.stack(
            [total == 0, total != 0, *truths, total.any(), x.sum() == 0, x.sum().logical_not(), own]
        )

    oracle, got = seen_by(compared, x)
    for k in range(6):
        assert differences(changed(got, put(k, not got.values["out0"][k])), oracle) == []
    for k in (6, 7, 8):
        assert differences(changed(got, put(k, True)), oracle), "no rounding makes that 0"


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_oracle_knows_that_far_below_0_a_gelu_is_not_0(approximate: str) -> None:
    """Only where 1 is added to what is nearly -1, as eager does (seed 82001114)."""
    x = torch.tensor([-9.25, -3.0, 0.0, 1.0], dtype=torch.bfloat16)
    oracle, got = seen_by(lambda x: torch.nn.functional.gelu(x, approximate=approximate) != 0, x)
    assert got.values["out0"].tolist() == [False, True, False, True]
    assert differences(changed(got, put(0, True)), oracle) == []
    for k in (1, 2, 3):
        assert differences(changed(got, put(k, k == 2)), oracle)


def test_the_oracle_knows_that_large_numbers_of_halves_are_rounded() -> None:
    """Above 128 every bf16 number is whole, and even or odd by rounding (seed 54002857)."""
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(2, 7, generator=generator)
    at = torch.randint(0, 2, (56,), generator=generator.manual_seed(9))

    def odd(x: Tensor) -> Tensor:
        total = torch.index_put(x, (at,), x[:1].sum(), accumulate=True)
        return torch.fmod(total, 2).to(torch.bool)

    for dtype, known in ((torch.bfloat16, True), (torch.float32, False)):
        oracle, got = seen_by(odd, x.to(dtype))
        assert got.values["out0"][0, 1]
        assert (differences(changed(got, put(1, False)), oracle) == []) == known


def test_the_oracle_knows_that_means_of_equal_numbers_may_be_off() -> None:
    """By some units in the last place, in eager as elsewhere (seed 12506477)."""
    x = torch.randn(121, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def off(x: Tensor) -> Tensor:
        rows = x.expand(11, 121).clone()
        return (rows - rows.mean(0)) != 0

    oracle, got = seen_by(off, x)
    assert bool(got.values["out0"].any()) and not bool(got.values["out0"].all())
    for other in (torch.zeros_like, torch.ones_like):
        assert differences(changed(got, other), oracle) == []
    oracle, got = seen_by(lambda x: (x - x.mean()) != 0, x)
    assert differences(changed(got, torch.zeros_like), oracle)


def test_the_oracle_knows_that_weights_of_attention_are_rounded() -> None:
    """With scores of 10**7 they are off by far, and means of nearly equal numbers by some units in
    the last place, in eager, too (seed 64009395)."""
    x = torch.randn(31, 31, generator=torch.Generator().manual_seed(0))
    rows = torch.hypot(torch.tensor(1940.0425), x)[None, None]
    attention = torch.nn.functional.scaled_dot_product_attention
    want = attention(rows, rows, rows)
    unit = torch.finfo(torch.float32).eps * want
    off = (want - attention(*[rows.double()] * 3)).abs() / unit
    assert float(off.max()) > 3, "eager's own"
    for seed in (1, 3):
        with PerturbedResults(seed, None):
            got = attention(rows, rows, rows)
        assert 3 < float(((got - want).abs() / unit).max()) < 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_oracle_knows_that_means_are_rounded(dtype: torch.dtype) -> None:
    """The variance of equal numbers is exactly 0 in eager's recurrence; about a rounded mean it is
    the square of that rounding (seed 68005119). Of others it is as near as it was."""
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float64).eps)
    size = min(eps, torch.finfo(torch.float32).eps)
    x = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    equal = x.expand(3, 50)
    others = torch.stack([x[0] - 1, x[0], x[0] + 1]).to(dtype)
    want = others.double().var(0)
    for seed in (1, 3):
        with PerturbedResults(seed, None):
            zeros, got = equal.var(0), others.var(0)
        assert 0 < float((zeros.double() / (size * x[0].double()).square()).max()) < 4
        steps = 6 if dtype is torch.float64 else 1  # each is moved, where nothing is wider
        assert float(((got.double() - want) / want).abs().max()) < 2 * steps * eps
    with PerturbedResults(1, None):
        assert x.var(0).isnan().all()


def test_runs_with_other_numbers_that_the_cpu_refuses_are_not_made_on_a_gpu() -> None:
    """There they end the process: the numbers of an expanded tensor tie, and only where they do is
    its largest one's position in range (seed 73002997)."""

    def index(t: Tensor) -> Tensor:
        where = t.argmax(0)
        return t.index_fill(-1, where.reshape(-1)[:1] % 5, 1.0) + t.exp()

    x = torch.arange(1.0, 4.0)[:, None].expand(3, 1)[None].expand(5, 3, 1)
    made: list[bool] = []

    def run(ts: list[Tensor]) -> Any:
        made.append(int(ts[0].argmax(0)[0]) == 0)
        return see(lambda xs: index(xs[0]), ts, False)

    oracle = Oracle(run, run, [x])
    assert len(oracle.others) > 4
    assert not all(made), "these inputs move apart, else the test shows nothing"
    made.clear()

    def on_cpu(ts: list[Tensor]) -> Any:
        return see(lambda xs: index(xs[0]), ts, False)

    oracle, cpu = Oracle(run, run, [x]), Oracle(on_cpu, on_cpu, [x])
    oracle.__dict__["on_cpu"] = cpu  # as where `x` is on a GPU
    assert any(seen is None for seen, _ in oracle.others)
    assert any(seen is not None for seen, _ in oracle.others[1:])
    assert len(made) > 4 and all(made)


def test_the_oracle_moves_sums_by_the_size_of_their_terms() -> None:
    """What is 0 in eager's order of the terms, at any inputs, is not in another."""
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([1.7e308, 1.7e308, -1.7e308, -1.7e308] * 5, dtype=torch.float64)

    def judged(f: Any, x: Tensor, value: float) -> list[str]:
        oracle, got = seen_by(f, x)
        return differences(changed(got, put(0, value)), oracle)

    def pairs(x: Tensor) -> Tensor:
        return torch.stack([x, -x], 1).flatten().sum()

    assert judged(pairs, x, 1e-5) == [] and judged(pairs, x, 1e-3)
    for value in (0.0, torch.inf, -torch.inf, torch.nan):
        assert judged(torch.sum, ends, value) == []


def test_the_oracle_knows_the_units_of_subnormal_numbers() -> None:
    """Eager rounds each step of a product of halves, here 0.7 units to 1 again and again; 0.34 of
    them are 0 (seed 26000240)."""
    x = torch.tensor([[2.0**-12], [2.0**-12], [0.7], [0.7], [0.7]], dtype=torch.float16)

    def some(x: Tensor) -> Tensor:
        return torch.stack([x.prod(0), x[1:].prod(0)]).count_nonzero(1)

    oracle, got = seen_by(some, x)
    assert got.values["out0"].tolist() == [1, 1]
    assert differences(changed(got, put(0, 0)), oracle) == []
    assert differences(changed(got, put(1, 0)), oracle), "far from 0"


def test_the_oracle_knows_infinities_from_nan() -> None:
    """Eager's formula for CPUs gives NaN in the whole row, that for GPUs does not (seed
    13002177)."""
    x, w = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)), torch.ones(8)
    w[6], grad = -torch.inf, torch.full((2, 8), 0.5)

    aten = torch.ops.aten.native_layer_norm_backward.default

    def gradient(call: Any) -> Any:
        def f(x: Tensor, w: Tensor) -> Tensor:
            _, mean, scale = torch.native_layer_norm(x, [8], w, w, 1e-5)
            return call(grad.to(x), x, [8], mean, scale, w, w, [True, False, False])[0]

        return f

    oracle, got = seen_by(gradient(aten), x, w)
    steps = gradient(decomposition_table[aten])(x, w)
    assert bool(got.values["out0"].isnan().all()) and bool(steps.isinf().any())
    assert differences(changed(got, lambda t: steps), oracle) == []
    assert differences(changed(got, lambda t: -steps), oracle)
    assert differences(changed(got, lambda t: steps.nan_to_num(1.0)), oracle)


def test_the_oracle_takes_numbers_for_eagers_nan() -> None:
    """Eager's vectors of float32 have NaN for GELU of inf, its float64 inf (seed 22000081): what
    follows from that is judged by float64 alone, where that has numbers."""
    x = torch.linspace(-2, 2, 9)

    def f(x: Tensor) -> Tensor:
        return x.exp() if x.dtype == torch.float64 else x.exp().index_fill(0, at, torch.nan)

    at = torch.tensor([3])
    oracle, got = seen_by(f, x)
    assert differences(changed(got, lambda t: x.exp()), oracle) == []
    assert differences(changed(got, lambda t: x.exp() * (1 + 1e-4)), oracle)
    assert differences(changed(got, put(3, float(x[3].exp() * 1.001))), oracle)
    assert differences(changed(got, put(3, torch.inf)), oracle)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_hardswish_at_nan(dtype: torch.dtype) -> None:
    """Eager's own answer depends on where in a tensor the NaN is."""
    x = torch.linspace(-4, 4, 37).to(dtype)
    x[[3, 36]] = torch.nan
    text = "def fn(x):\n    return (torch.nn.functional.hardswish(x),)\n"
    program = straight(text, [[x.requires_grad_()]])
    assert program is not None and program.check(How(backward=True)) is None


def test_eager_s_own_error_in_float64_is_seen() -> None:
    """Seed 32000399: eager's variance of a long row is off by some hundred units in the last place
    on the CPU, and float64 has no wider dtype to show it."""
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(31, 64, 31, dtype=torch.float64, generator=drawn)
    x[..., :20] = torch.randn(20, dtype=torch.float64, generator=drawn)
    wanted = math.fsum(((x - x.mean()) ** 2).flatten().tolist()) / x.numel()
    oracle, got = seen_by(lambda x: x.var((2, 1, 0), correction=0), x)
    assert differences(changed(got, lambda t: t.fill_(wanted)), oracle) == []
    assert differences(changed(got, lambda t: t.fill_(wanted * (1 + 1e-10))), oracle)


def test_what_cancels_inside_an_operator_is_seen() -> None:
    """Seed 38001222: of a row with one large number the logarithm is that of nearly 1, and by how
    much it is more than that is rounded before."""
    x = torch.tensor([0.0, -8.0, -10.0])
    oracle, got = seen_by(lambda x: x.log_softmax(-1).abs().sqrt(), x)
    exact = float(x.double().log_softmax(-1).abs().sqrt()[0])
    for part, fine in ((4e-4, True), (1e-2, False)):
        seen = changed(got, put(0, exact * (1 + part)))
        assert (differences(seen, oracle) == []) == fine


def test_what_is_moved_stays_a_probability() -> None:
    """Seed 25300030: a bernoulli of what is beyond 1 ended the process's use of its GPU."""
    x = torch.linspace(-9, 9, 99, dtype=torch.float64)
    for seed in range(4):
        with PerturbedResults(seed, torch.bfloat16):
            p = x.sigmoid()
        assert bool((p <= 1).all()) and bool((p != x.sigmoid()).any())


def test_the_oracle_sees_strides_and_sharing() -> None:
    x = torch.randn(6, 5)
    oracle, got = seen_by(lambda x: (x.t(), x + 1), x)
    assert differences(got, oracle) == []
    got.strides["out0"] = (5, 1)
    assert any("strides" in p for p in differences(got, oracle))
    oracle, got = seen_by(lambda x: (x.t(), x + 1), x)
    got.shared.clear()
    assert any("memory" in p for p in differences(got, oracle))
    oracle, got = seen_by(lambda x: (x.exp()[1:], x[2:], x[3:].exp()), x)
    assert got.shared == {"out1": "shares in0 at byte 40"}
    oracle, got = seen_by(lambda x: (y := x.select_scatter(x[0], 0, 1), y[2:], y[0]), x[1:])
    assert got.shared == {"out1": "shares out0 at byte 40", "out2": "shares out0 at byte 0"}
    got.shared["out1"] = "shares out0 at byte 20"
    assert any("shares" in p for p in differences(got, oracle))


def test_the_oracle_knows_a_kernel_that_contradicts_itself() -> None:
    """Eager's batch norm takes weights with steps for contiguous ones in its backward."""
    x, weight = torch.randn(8, 4), torch.tensor([1.0, 9.0, 2.0, 9.0, 3.0, 9.0, 4.0])[::2]

    def gradient(x: Tensor, weight: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = torch.nn.functional.batch_norm(x, None, None, weight, None, True)
        return torch.autograd.grad(y.square().sum(), x)[0]

    oracle, got = seen_by(gradient, x, weight)
    assert not torch.allclose(gradient(x, weight), gradient(x, weight.contiguous()), rtol=0.1)
    right = changed(got, lambda t: gradient(x, weight.contiguous()))
    assert differences(right, oracle) == []
    assert differences(changed(right, put(3, 0.5)), oracle), "neither kernel gives that"
    oracle, got = seen_by(lambda x: x.as_strided((4,), (2,)), x.t())
    assert differences(changed(got, lambda t: x.t().contiguous().as_strided((4,), (2,))), oracle)
