"""Attention in many forms of plain code: kernels and memory of a plan, values and gradients on the
CPU and interpreted, and what must stay the same when code or inputs are changed."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from deuteron.base.record import Record
from deuteron.ir.index import hint
from deuteron.ir.program import Extern
from deuteron.schedule import contract
from deuteron.schedule.kernel import Kernel, Schedule
from tests.codegen.attention_values import problems
from tests.interpreting import reported
from tests.schedule.attention_variants import VARIANTS
from tests.schedule.planning import Plan, planned, trained

SCRIPT = Path(__file__).parents[1] / "codegen" / "attention_values.py"
QUICK = ("causal_mask", "grouped", "sinks", "t5")  # the others take minutes
IN_A_PROCESS = 8
HEADS, LENGTH = 16, 2048
# Of lengths known at run time only there are more steps, or scores in memory: sums over all scores
# are split for the GPU in parts whose lengths are not whole, and read the scores at two places;
# a maximum's gradient (`graph.vanishing`) and what is read once for each distance
# (`lower.diagonals`) are told of fixed lengths only; a step is a kernel of its own, or a product a
# library's call; whether places are in a table of blocks is checked.
SUMS_OF_SCORES = ("bounded_scale", "learned_scale", "normed")
OF_FIXED_LENGTHS = ("maximum_by_hand", "shifted_sinks", "t5_buckets", "table_of_blocks")
ONE_STEP_MORE = ("differential", "hidden_rows", "largest_weights", "merged")


def some(quick: tuple[str, ...] = QUICK) -> list[object]:
    """All variants, of which most are slow."""
    return [
        pytest.param(n, marks=[] if n in quick else [pytest.mark.slow]) for n in sorted(VARIANTS)
    ]


def of_queries_and_keys(plan: Plan, points: int) -> list[str]:
    """What kernels and calls write that has so many elements."""
    written = [(n, lay) for k in plan.kernels for n, lay in k.writes]
    written += [x for c in plan.calls for x in zip(c.names, c.layouts, strict=True) if x[1]]
    return [n for n, lay in written if hint(lay.numel) >= points]


def plan_of_variant(name: str, dynamic: bool) -> Plan:
    """Forward and backward of a variant at 1024 places, which may be known at run time only."""
    v = VARIANTS[name]
    sizes = [
        v.inputs(n, torch.bfloat16, heads=HEADS, width=64, empty=True) for n in (LENGTH, LENGTH + 1)
    ]
    floats = [a for a in sizes[0] if a.is_floating_point()]
    ints = sizes[0][len(floats) :]
    for x, other in zip(*sizes, strict=True) if dynamic else ():
        for d in (d for d in range(x.dim()) if x.shape[d] != other.shape[d]):
            torch._dynamo.maybe_mark_dynamic(x, d)
    return trained(lambda *x: v.f(*x, *ints), *floats, run=False, device="H200")


def without_tables(schedule: Schedule) -> list[Kernel | Extern]:
    """Kernels and calls but those that find what masks leave, which the Record has as "tables"."""
    steps = (s for s in schedule.steps if isinstance(s, Kernel | Extern))
    return [s for s in steps if isinstance(s, Extern) or any(".cut" not in n for n, _ in s.writes)]


def without_reason(schedule: Schedule, record: Record) -> list[Kernel]:
    """Kernels of which the Record does not say why they are not one with another."""
    steps = without_tables(schedule)
    of = [{o.node for o in s.origins} | set(written(s)) for s in steps]
    refused = [d for d in record.of("decision") if d["subject"] in ("contract", "fuse")]
    pairs = [(d["first"], d["second"]) for d in refused if not d["accepted"]]

    def told(own: set[str], other: set[str]) -> bool:
        return any(a in own and b in other or a in other and b in own for a, b in pairs)

    return [
        s
        for k, s in enumerate(steps)
        if isinstance(s, Kernel) and not any(told(of[k], x) for j, x in enumerate(of) if j != k)
    ]


def written(step: Kernel | Extern) -> list[str]:
    names = [n for n, _ in step.writes] if isinstance(step, Kernel) else step.names
    return [n for n in names if n]


@pytest.mark.parametrize("name", some())
def test_kernels_and_memory(name: str) -> None:
    v, plan = VARIANTS[name], plan_of_variant(name, False)
    steps = [len(without_tables(s)) for s in plan.schedules]
    for schedule, record in zip(plan.schedules, plan.records, strict=True):
        assert len(without_reason(schedule, record)) <= 1
    assert len(steps) == 2 and all(n <= m for n, m in zip(steps, v.steps, strict=True)), steps
    square = of_queries_and_keys(plan, 2 * HEADS * LENGTH * v.keys(LENGTH))
    assert bool(square) is v.square, square
    saved = [d for d in plan.records[0].of("decision") if d["subject"] == "save"]
    reasons = [f"{d['reason']}: {d['detail']}" for d in (*plan.decisions(False), *saved)]
    assert any(v.why in r for r in reasons) or not v.why, reasons


@pytest.mark.parametrize("name", some())
def test_lengths_known_at_run_time_only(name: str) -> None:
    """The same kernels, and nothing of queries times keys that fixed lengths would not have."""
    v, plan = VARIANTS[name], plan_of_variant(name, True)
    steps = [len(without_tables(s)) for s in plan.schedules]
    square = of_queries_and_keys(plan, 2 * HEADS * LENGTH * v.keys(LENGTH))
    few = len(steps) == 2 and all(n <= m for n, m in zip(steps, v.steps, strict=True))
    as_fixed = few and bool(square) is v.square
    assert as_fixed is (name not in SUMS_OF_SCORES + OF_FIXED_LENGTHS + ONE_STEP_MORE), (
        steps,
        square,
    )


@pytest.mark.parametrize("name", some())
def test_values_on_the_cpu(name: str) -> None:
    assert problems(name, [37], torch.float32, "deuteron") == []


@pytest.mark.parametrize("name", some())
def test_values_of_one_graph_for_all_lengths(name: str) -> None:
    assert problems(name, [37, 130, 64], torch.float32, "deuteron") == []


# Known to be less exact than twice eager's error in bfloat16: of few numbers, sums of terms that
# cancel, and of weights that are nearly all of one key.
LESS_EXACT = ("learned_scale", "learned_slopes")
NAMES = sorted(VARIANTS.keys() - set(LESS_EXACT))
CHUNKS = [QUICK, *(tuple(NAMES[k : k + IN_A_PROCESS]) for k in range(0, len(NAMES), IN_A_PROCESS))]


@pytest.mark.parametrize("lengths", ["19", "19,24,33"])
@pytest.mark.parametrize(
    "names", [CHUNKS[0], *(pytest.param(c, marks=pytest.mark.slow) for c in CHUNKS[1:])]
)
def test_values_interpreted(names: tuple[str, ...], lengths: str) -> None:
    rows = reported(SCRIPT, lengths, *names)
    assert {r["name"]: r["problems"] for r in rows} == {n: [] for n in names}


@pytest.mark.parametrize(
    ("length", "names"),
    [("79", ["least_numbers"]), ("31", ["largest_weights", "projected_queries:f32"])],
)
def test_numbers_that_are_none(length: str, names: list[str]) -> None:
    """Found by the fuzzer on a GPU: blocks of least numbers, weights that are looked for, places
    that do not exist of a factor that is a result."""
    rows = reported(SCRIPT, length, *names)
    assert {r["name"]: r["problems"] for r in rows} == {n: [] for n in names}


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="gradients of scales and slopes in bfloat16, see LESS_EXACT")
@pytest.mark.parametrize("name", LESS_EXACT)
def test_values_that_are_less_exact(name: str) -> None:
    (row,) = reported(SCRIPT, "19", name)
    assert row["problems"] == []


# -- the same, written otherwise -------------------------------------------------------------------


def softmax(s: Tensor) -> Tensor:
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def hidden(s: Tensor) -> Tensor:
    i, j = (torch.arange(n) for n in s.shape[-2:])
    return s.masked_fill(i[:, None] < j, float("-inf"))


def spelled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(hidden(q @ k.mT * 0.125), -1) @ v


def times_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT * 0.125
    return torch.softmax(hidden(s * (1 + 0 * q[..., :1])), -1) @ v


def other_base(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = hidden(q @ k.mT * (0.125 * 1.4426950408889634))
    e = torch.exp2(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True) @ v


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = hidden((k @ q.mT).mT * 0.125)
    return (v.mT @ torch.softmax(s.mT, -2)).mT


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(hidden(q @ k.mT * 0.125)) @ v


def escaping(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = hidden(q @ k.mT * 0.125)
    return torch.softmax(s, -1) @ v, torch.cumsum(s.exp(), -1)


def sorted_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each weight needs all scores of the row, in their order."""
    s = q @ k.mT * 0.125
    return torch.cumsum(torch.softmax(s, -1), -1) @ v


def plan_of(f: object, length: int = 512, width: int = 64) -> Plan:
    assert callable(f)
    args = [torch.zeros(1, 4, length, width, dtype=torch.bfloat16) for _ in range(3)]
    with torch.no_grad():
        return planned(f, *args, run=False, device="H200")


@pytest.mark.parametrize("f", [spelled, times_one, other_base, turned, by_hand])
def test_other_words_have_the_same_kernels(f: object) -> None:
    for length, width in ((512, 64), (128, 128)):  # as many keys as a head is wide, too
        plan = plan_of(f, length, width)
        assert len(plan.contractions) == len(plan.kernels) == 1 and not plan.calls
        assert of_queries_and_keys(plan, 4 * length * length) == (
            [] if length > width else [plan.kernels[0].writes[0][0]]
        )


@pytest.mark.parametrize("f", [escaping, sorted_scores])
def test_what_does_not_separate_is_refused(f: object) -> None:
    plan = plan_of(f)
    assert of_queries_and_keys(plan, 4 * 512 * 512)
    assert any(d["reason"] == "no nest" for d in plan.decisions(False)), plan.decisions(False)


# -- metamorphic -----------------------------------------------------------------------------------


def heads() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, 2, 70, 32, generator=generator) for _ in range(3)]


def merged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.mT * 0.125
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1, keepdim=True)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((q @ k.mT * 0.125).masked_fill(~mask, float("-inf")), -1) @ v


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with products whether they pay or not."""
    from deuteron.schedule import contract

    monkeypatch.setattr(contract, "MIN_GAIN", -1e9)


@pytest.mark.usefixtures("always")
def test_what_must_not_change() -> None:
    torch._dynamo.reset()
    q, k, v = heads()
    with torch.no_grad():
        causal = torch.compile(spelled, backend="deuteron")
        before, later = causal(q, k, v), [k.clone(), v.clone()]
        for x in later:
            x[:, :, 41:] = torch.randn_like(x[:, :, 41:])
        after = causal(q, *later)
        assert torch.equal(before[:, :, :41], after[:, :, :41]), "later keys change earlier rows"
        assert not torch.equal(before[:, :, 41:], after[:, :, 41:])

        both = torch.compile(merged, backend="deuteron")
        whole, total = both(q, k, v)
        order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(both(q, k[:, :, order], v[:, :, order])[0], whole)
        parts = [both(q, k[:, :, part], v[:, :, part]) for part in (slice(0, 30), slice(30, 70))]
        shares = [torch.exp(lse - total) for _, lse in parts]
        torch.testing.assert_close(sum(w * o for w, (o, _) in zip(shares, parts)), whole)

        everywhere = torch.compile(masked, backend="deuteron")
        got = everywhere(q, k, v, torch.ones(70, 70, dtype=torch.bool))
        torch.testing.assert_close(got, whole)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_one_graph_for_any_length_one_place_included(dropout: float) -> None:
    """Of queries and keys, whose numbers nothing is known of; with a scaler of gradients."""

    def f(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        p = torch.softmax(hidden(q @ k.mT * 0.125), -1)
        return (F.dropout(p, dropout) @ v).sum(-1) * scale

    torch._dynamo.reset()
    counters.clear()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    compiled = torch.compile(f, backend="deuteron", fullgraph=True, options={"eager_random": True})
    for queries, keys in ((127, 127), (128, 301), (1, 127), (513, 64), (1, 1)):
        args = [torch.randn(1, 2, n, 16, requires_grad=True) for n in (queries, keys, keys)]
        for x in args if queries == 127 else ():
            torch._dynamo.decorators.mark_unbacked(x, 2)
        found = []
        with mock.patch.object(contract, "MIN_GAIN", -1e9):
            for each in (compiled, f):
                torch.manual_seed(3)
                out = each(*args, torch.tensor(0.5))
                found.append([out, *torch.autograd.grad(scaler.scale(out.sum()), args)])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)
    assert counters["stats"]["unique_graphs"] == 1
