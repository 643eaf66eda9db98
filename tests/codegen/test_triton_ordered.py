"""Additions at places that tensors hold, in a fixed order: values under Triton's interpreter, and
what becomes of them in the compiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from deuteron.base.device import named_gpu
from deuteron.base.options import Options
from deuteron.base.passes import Context
from deuteron.base.record import Record
from deuteron.codegen.triton.generate import TritonKernel, generate
from deuteron.ir.parser import parse_program
from deuteron.ir.printer import print_program
from deuteron.ir.program import Program
from deuteron.ir.reference import run_program
from deuteron.ir.verify import verify_program
from deuteron.lower import additions, ordered
from deuteron.lower.ordered import Ordered
from deuteron.lower.passes import lower
from deuteron.runtime.build_triton import build
from deuteron.schedule import schedule
from deuteron.schedule.kernel import Kernel, Reduce, Schedule, Store
from deuteron.schedule.unordered import UNORDERED_SUM, reasons
from deuteron.schedule.verify import verify_schedule
from tests.codegen.ordered_programs import SORTED, cases
from tests.interpreting import reported
from tests.lower.harness import trace

SCRIPT = Path(__file__).with_name("ordered_programs.py")
SORT = "aten.sort.stable"


@pytest.fixture(autouse=True)
def never_compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.function.__name__ != "test_few_rows_are_compared":
        monkeypatch.setattr(additions, "COMPARED_US", 1e9)


@pytest.mark.xdist_group("ordered")
@pytest.mark.parametrize("name", cases())
def test_values(name: str) -> None:
    entries = [e for e in reported(SCRIPT) if e["program"] == name]
    assert len(entries) == len(cases()[name][1]) * (4 if name in SORTED else 2)
    for e in entries:
        assert "failure" not in e, e["failure"]
        assert e["error"] <= 2 * e["eager"] + 1e-6 * e["size"], e
        assert e["repeats"]


def planned(f: Callable[..., Any], *args: Any) -> tuple[Program, Schedule]:
    record, spec = Record(), named_gpu("H200")
    assert spec is not None
    program = lower(trace(f, args), Context(record=record, like="cuda"))
    verify_program(program, "lower")
    plan = schedule(program, Context(record=record, specs=lambda _: spec))
    verify_schedule(plan, program, "schedule")
    return program, plan


def kernels(plan: Schedule) -> list[Kernel]:
    return [s for s in plan.steps if isinstance(s, Kernel)]


def calls(plan: Schedule) -> list[str]:
    return [s.op for s in plan.steps if not isinstance(s, Kernel)]


def add(x: Any, i: Any, v: Any) -> Any:
    return x.index_add(0, i, v)


ROWS = (torch.randn(50, 32), torch.arange(300) % 7, torch.randn(300, 32))
POINTS = (torch.randn(50), torch.arange(300) % 7, torch.randn(300))


def test_nothing_is_added_atomically() -> None:
    _, plan = planned(add, *ROWS)
    stores = [s for k in kernels(plan) for n in k.nests for s in n.stmts if isinstance(s, Store)]
    assert calls(plan) == []
    # Ranks are places of one point each.
    assert {(s.accumulate, s.unique) for s in stores if s.scattered} == {(None, True)}
    assert not [r for k in kernels(plan) for r in reasons(k)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_few_rows_are_compared(dtype: torch.dtype) -> None:
    """Buckets of distances: one reduction, after the places themselves."""
    points = torch.randn(4, 64, 64).to(dtype), torch.randint(8, (64, 64))
    _, plan = planned(
        lambda g, i: g.new_zeros(8, 4).index_put((i,), g.permute(1, 2, 0), accumulate=True), *points
    )
    statements = [s for k in kernels(plan) for n in k.nests for s in n.stmts]
    assert calls(plan) == [] and any(isinstance(s, Reduce) for s in statements)
    assert not any(isinstance(s, Store) and (s.accumulate or s.scattered) for s in statements)


@pytest.mark.parametrize("extent", [(3, 3, 1, 2), (2, 5, 2, 1), (4, 4, 1, 4), (3, 2, 1, 3)])
def test_overlapping_windows_are_gathered(extent: tuple[int, ...]) -> None:
    high, wide, dilation, stride = extent
    size = [1 + (n - 1) * dilation + 4 * stride for n in (high, wide)]
    x = torch.randn(2, 3 * high * wide, 25)
    fold = lambda x: F.fold(x, size, (high, wide), dilation, 0, stride)  # noqa: E731
    program, plan = planned(fold, x)
    stores = [s for k in kernels(plan) for n in k.nests for s in n.stmts if isinstance(s, Store)]
    assert len(kernels(plan)) == 1 and not any(s.accumulate or s.scattered for s in stores)
    (given,) = run_program(program, [x])
    torch.testing.assert_close(given, fold(x))


def test_many_places_are_sorted_by_the_library() -> None:
    """To count who goes before each of them takes longer."""
    _, plan = planned(add, ROWS[0], torch.arange(100_000) % 7, torch.randn(100_000, 32))
    stores = [s for k in kernels(plan) for n in k.nests for s in n.stmts if isinstance(s, Store)]
    assert calls(plan) == [SORT] and not any(s.accumulate or s.scattered for s in stores)


def test_ranks_are_counted_by_many_programs() -> None:
    """Not behind a barrier, by the program that finishes last."""
    _, plan = planned(add, ROWS[0], torch.arange(3000) % 7, torch.randn(3000, 32))
    assert not any(k.barriers for k in kernels(plan) if k.flops > 3000 * 3000)


def test_blocks_are_counted_where_there_are_more_places() -> None:
    """By kernels that are spread over the device, one of them for each of two levels."""
    sizes = ordered.block_of(1000, "i32"), ordered.block_of(32768, "i32")
    assert sizes[0] == 0 and sizes[1] in additions.RANK_BLOCKS
    _, plan = planned(add, ROWS[0], torch.arange(32768) % 7, torch.randn(32768, 32))
    assert calls(plan) == []
    counting = [k for k in kernels(plan) if k.flops > 32768 * sizes[1] / 4]
    assert len(counting) >= 2 and not any(k.barriers for k in counting)
    assert sum(k.flops for k in kernels(plan)) < 32768**2 / 2


def test_places_are_checked_once() -> None:
    """Not in every comparison, where numbers of 64 bits are not narrower than positions."""
    f = lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, 2**20, -1, False)  # noqa: E731
    assert additions.packed_dtype(1 << 15, 2**20) == "i64"
    _, plan = planned(f, torch.empty(1 << 15, 16).bfloat16(), torch.zeros(1 << 15).long())
    nests = [nest for k in kernels(plan) for nest in k.nests]
    roots = [root for nest in nests for root in nest.exprs()]
    reductions = [n for root in roots for n in root.walk() if n.op == "reduce"]
    ranks = [s.body for nest in nests for s in nest.stmts if isinstance(s, Reduce)]
    assert reductions and len(ranks) == 2
    assert not any(n.op == "check" for reduction in (*reductions, *ranks) for n in reduction.walk())
    assert any(n.op == "check" for root in roots for n in root.walk())


@pytest.mark.parametrize(("rows", "turns"), [(50257, 2), (500, 1)])
def test_programs_have_two_rows_where_there_are_many(rows: int, turns: int) -> None:
    """Far apart, and of each the first point is known where its list begins."""
    i = torch.arange(32768) % rows
    _, plan = planned(add, torch.zeros(rows, 768), i, torch.zeros(32768, 768))
    made = [generate(k, named_gpu("H200")) for k in kernels(plan)]
    sums = made[-1]
    assert sums.grid(sums.configs[0], {}) == -(-rows // turns)
    assert ("in tl.range(pid, numbers, programs):" in sums.source) == (turns > 1)
    before = sums.source.split(" in tl.range(0, ")[0]
    assert len(re.findall(r"tl\.load\(.*_first_ptr", before)) == 2
    assert "_put_2_ptr + " in sums.source and "_put_2_ptr + " not in before


def test_one_accumulator_for_parts_of_one_shape(tmp_path: Path) -> None:
    """A row's points and its whole chunks; where all columns get the same, both are numbers."""
    spec, alike = named_gpu("H200"), r"reduction\d+ = reduction\d+\n"
    assert spec is not None
    for f in (add, lambda x, i, v: add(x, i, x.new_ones(v.shape))):
        args = torch.zeros(500, 64), torch.arange(32768) % 7, torch.zeros(32768, 64)
        _, plan = planned(f, *args)
        made = [generate(k, spec) for k in kernels(plan)]
        assert any(re.search(alike, k.source) for k in made)
        for kernel in made:
            build(kernel, kernel.configs[0], 90, Options(cache_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("points", "rows", "dtype"),
    [
        (32768, 50257, "i32"),
        (32768, 2**16, "i32"),
        (32768, 2**16 + 1, "i64"),
        (8192, 10**7, "i64"),
        (2**20, 2**44, None),
    ],
)
def test_the_numbers_of_places_and_points(points: int, rows: int, dtype: str | None) -> None:
    assert additions.packed_dtype(points, rows) == dtype


KINDS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "any": lambda n, rows: torch.randint(0, rows, (n,)),
    "few": lambda n, rows: torch.randint(0, 3, (n,)) * (rows // 3),
    "same": lambda n, rows: torch.full((n,), rows - 1),
    "reversed": lambda n, rows: torch.arange(n).flip(0) % rows,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 31, 32, 33, 255, 256, 257, 1000])
@pytest.mark.parametrize("dtype", ["i32", "i64"])
def test_two_levels(n: int, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the last block."""
    monkeypatch.setattr(ordered, "packed_dtype", lambda points, rows: dtype)
    check_order(KINDS[kind](n, 41), 41, 8, monkeypatch)


@pytest.mark.parametrize(("n", "block"), [(4097, 128), (8192, 512), (10_000, 128), (32768, 256)])
def test_two_levels_of_many(n: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_order(KINDS["any"](n, 50257), 50257, block, monkeypatch)


def check_order(i: torch.Tensor, rows: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of places and points is the library's; the sums are eager's, of whole numbers."""
    monkeypatch.setattr(ordered, "block_of", lambda points, dtype: block)
    x, v = torch.zeros(rows, 1), torch.randint(-9, 9, (len(i), 1)).float()
    monkeypatch.setattr(additions, "MIN_ORDERED_WIDTH", 1)
    program = lower(trace(add, (x, i, v)), Context(like="cuda"))
    verify_program(program, "lower")
    (sums,) = program.outputs
    _, order = [d for d in program.computes() if d.unique and d.name != sums.tensor]
    list_ = replace(sums, tensor=order.name, shape=order.layout.shape, strides=order.layout.strides)
    kept = replace(program, outputs=(sums, list_))
    got, keys = run_program(kept, [x, i, v])
    assert torch.equal(got, add(x, i, v))
    places, points = torch.sort(i, stable=True)
    assert torch.equal(keys.long(), places << additions.bits_of(len(i)) | points)


def test_the_result_is_written_once_in_its_own_dtype() -> None:
    """And nothing else is of its size: neither zeros nor sums in float32."""
    f = lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, 50257, 1, False)  # noqa: E731
    _, plan = planned(f, torch.empty(8, 512, 768).bfloat16(), torch.zeros(8, 512).long())
    written = [lay for k in kernels(plan) for _, lay in k.writes]
    large = [lay for lay in written if lay.nbytes_hint >= 50257 * 768]
    assert {lay.dtype for lay in large} == {"bf16"} and len({lay.shape for lay in large}) == 1


@pytest.mark.parametrize(("rows", "dtype"), [(2**16, "i16"), (2**16 + 1, "i32")])
def test_places_are_sorted_in_few_bits(
    rows: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library sorts eight bits at a time: 29, 43 and 70 us for 32768 of 16, 32, 64 bits."""
    i = torch.tensor([0, rows - 1, 5, rows - 1, 2**15, 2**15 - 1])
    args = (torch.randn(rows, 16), i, torch.randn(6, 16))
    monkeypatch.setattr(Ordered, "few", lambda self: False)
    program, plan = planned(add, *args)
    (key,) = [d for d in program.computes() if d.name.endswith("_places")]
    assert key.layout.dtype == dtype
    (got,) = run_program(program, list(args))
    assert torch.allclose(got, add(*args))


def test_sums_of_single_elements_are_as_ever() -> None:
    _, plan = planned(add, *POINTS)
    assert calls(plan) == []
    assert [r for k in kernels(plan) for r in reasons(k)] == [UNORDERED_SUM]
    whole = [t.long() for t in ROWS]
    assert calls(planned(add, *whole)[1]) == [], "the order of whole numbers does not matter"


def test_large_tables_of_which_little_is_touched() -> None:
    """100,000 rows of 128, 8192 of them touched: the others are only filled, and who stores a row
    is alone, so that results repeat."""
    f = lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, 100_000, -1, False)  # noqa: E731
    _, plan = planned(f, torch.empty(8192, 128).bfloat16(), torch.zeros(8192).long())
    large = [k for k in kernels(plan) for _, lay in k.writes if lay.nbytes_hint >= 100_000 * 128]
    assert large and calls(plan) == []
    assert all(k.bytes < 1.3 * 100_000 * 128 * 2 for k in large)
    assert not [r for k in kernels(plan) for r in reasons(k)]


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_single_elements_where_results_are_to_repeat() -> None:
    with deterministic():
        program, plan = planned(add, *POINTS)
    assert not [r for k in kernels(plan) for r in reasons(k)]
    (got,) = run_program(program, list(POINTS))
    assert torch.allclose(got, add(*POINTS), atol=1e-5)


def test_programs_run_by_reference_and_read_back() -> None:
    sparse = torch.randn(900, 32), torch.arange(300) % 70 * 3, ROWS[2]
    many = ROWS[0], torch.arange(6000) % 50, torch.randn(6000, 32)
    for args in (ROWS, (*ROWS[:1], torch.zeros(300).long(), ROWS[2]), sparse, many):
        program, _ = planned(add, *args)
        text = print_program(program)
        assert print_program(parse_program(text)) == text
        (got,) = run_program(program, list(args))
        assert torch.allclose(got, add(*args), atol=1e-3)


def test_who_is_said_to_be_alone_is_alone() -> None:
    """What the executor finds otherwise is reported: the Record would not name the kernel."""
    x, v = torch.randn(900, 32), torch.randn(300, 32)
    program, _ = planned(add, x, torch.arange(300) % 70, v)
    (d,) = [d for d in program.computes() if d.unique and d.mask is not None]
    everywhere = [replace(e, mask=None) if e is d else e for e in program.defs]
    with pytest.raises(ValueError, match="one place"):
        run_program(replace(program, defs=tuple(everywhere)), [x, torch.arange(300) % 70, v])
    run_program(replace(program, defs=tuple(everywhere)), [x, torch.arange(300), v])


def test_positions_outside_are_reported() -> None:
    x, i, v = ROWS
    program, _ = planned(add, x, i, v)
    with pytest.raises(IndexError):
        run_program(program, [x, i + 49, v])


@pytest.mark.parametrize("capability", [80, 90])
def test_builds_ahead_of_time(capability: int, tmp_path: Path) -> None:
    options = Options.make(options={"cache_dir": str(tmp_path)})
    spec = named_gpu("H200")
    assert spec is not None
    for name in ("embedding, bfloat16, any", "narrow rows", "most words unused, any"):
        f, (args,) = cases()[name]
        for k in kernels(planned(f, *args)[1]):
            kernel: TritonKernel = generate(k, spec)
            assert build(kernel, kernel.configs[0], capability, options).code


@pytest.mark.parametrize("points", [1024, 4096])
def test_few_chunks_are_a_loop(points: int) -> None:
    """Rows mostly have none: written out, each would read all of them."""

    def f(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return x.index_add(0, i, v)

    args = torch.zeros(700, 256), torch.randint(0, 700, (points,)), torch.randn(points, 256)
    _, plan = planned(f, *args)
    spec = named_gpu("H200")
    assert spec is not None
    text = generate(kernels(plan)[-1], spec).source
    assert text.count("tl.load(") < 30 and text.count("in tl.range(") >= 2
