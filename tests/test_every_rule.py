"""Every rule and every invariant has a test: these tests fail when a new one has none.

* Each place where a verifier raises a fault is reached by a broken artifact of `tests/ir`.
* Each ``return`` of the index algebra, of its proofs and of the folding of expressions is reached
  by the random tests that compare with brute force (an answer that none of them gives is untested).
* Each row of the rewrites of ATen graphs is applied by a program that is compared with eager, and
  each rule for dependent reductions by one of `tests/schedule/test_online.py`.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, get_args

import hypothesis
import pytest
import torch

import deuteron.ir.division as division_module
import deuteron.ir.evaluate as evaluate_module
import deuteron.ir.expr as expr_module
import deuteron.ir.polynomial as polynomial_module
import deuteron.ir.ranges as ranges_module
import deuteron.ir.verify as program_verifier
import deuteron.ir.verify_expr as expression_verifier
import deuteron.schedule.online as online
import deuteron.schedule.verify as schedule_verifier
from deuteron.base.errors import VerifyError
from deuteron.base.memo import MEMO
from deuteron.base.passes import Context
from deuteron.base.record import Record
from deuteron.graph.rewrite import rewrite
from deuteron.graph.rules import RULES_OF
from tests.capture.test_rewrite import check, traced
from tests.ir import test_expr, test_folding, test_index
from tests.ir.test_schedule_verify import BROKEN as BROKEN_SCHEDULES
from tests.ir.test_schedule_verify import CALL, FIRST, LAST, PROGRAM, schedule
from tests.ir.test_verify import BROKEN as BROKEN_PROGRAMS

Place = tuple[str, int]


def source(module: ModuleType) -> Path:
    assert module.__file__ is not None
    return Path(module.__file__)


def nodes(module: ModuleType) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(source(module).read_text(encoding="utf-8")))


# -- invariants ------------------------------------------------------------------------------------


def raised(check: Callable[[], None]) -> tuple[Path, int] | None:
    """Where the fault behind a `VerifyError` was raised."""
    try:
        check()
    except VerifyError as e:
        fault: BaseException | None = e.__context__
        assert isinstance(fault, expression_verifier.Fault)
        trace = fault.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        assert trace is not None
        return Path(trace.tb_frame.f_code.co_filename), trace.tb_lineno
    return None


def faults(module: ModuleType) -> dict[range, str]:
    """The lines of each ``raise Fault(...)``, with its text."""
    out = {}
    for n in nodes(module):
        if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call):
            if getattr(n.exc.func, "id", "") == "Fault":
                out[range(n.lineno, (n.end_lineno or n.lineno) + 1)] = ast.unparse(n)
    return out


def test_every_fault_has_a_broken_artifact() -> None:
    places = set()
    for _, make in BROKEN_PROGRAMS.values():
        places.add(raised(lambda m=make: program_verifier.verify_program(m(), "lower")))
    for _, broken in BROKEN_SCHEDULES.values():
        places.add(
            raised(lambda m=broken: schedule_verifier.verify_schedule(m(), PROGRAM, "schedule"))
        )
    second = replace(CALL, names=("d",))
    program = replace(PROGRAM, defs=(*PROGRAM.defs[:4], second, PROGRAM.defs[4]))
    turned = schedule(FIRST, second, CALL, LAST)
    places.add(raised(lambda: schedule_verifier.verify_schedule(turned, program, "schedule")))
    missing = []
    for module in (program_verifier, expression_verifier, schedule_verifier):
        lines = {line for place in places if place and place[0] == source(module) for line in
                 [place[1]]}  # fmt: skip
        missing += [text for where, text in faults(module).items() if not lines & set(where)]
    assert not missing, "no broken artifact is caught by:\n" + "\n".join(missing)


# -- rules -----------------------------------------------------------------------------------------


@contextmanager
def crossing_off(wanted: set[Place]) -> Iterator[None]:
    """Takes away the lines that run inside. Functions of which none is left are not traced."""
    lines: dict[CodeType, set[Place]] = {}

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            wanted.discard((frame.f_code.co_filename, frame.f_lineno))
        return local

    def calls(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code not in lines:
            numbers = (line for _, _, line in code.co_lines() if line is not None)
            lines[code] = {(code.co_filename, line) for line in numbers} & wanted
        return None if lines[code].isdisjoint(wanted) else local

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        yield
    finally:
        sys.settrace(before)


# Functions whose answers are rules; in the order of the files.
RULES: dict[ModuleType, tuple[str, ...]] = {
    polynomial_module: ("only", "divide_term", "divide_exact", "coefficient"),
    division_module: (
        *("_recombine", "_with_remainder", "_split", "_factored", "_floordiv", "_just_below"),
        *("_mod", "minimum", "maximum", "substitute", "_substitute_atom"),
        *("_nonempty", "atom_bound", "bound", "_size_nonneg", "_nonneg_by_cases", "_replace"),
        *("_plainly_nonneg", "is_nonneg", "_where_nonempty", "in_range"),
    ),
    ranges_module: ("determined",),
    evaluate_module: ("evaluate",),
    expr_module: ("_fold", "_compare", "cast", "load"),
}
# Tests that seldom give an answer that others do not give: run where something is still missing.
SELDOM = (
    "test_equal_text_is_the_same_object",
    "test_in_range_holds_everywhere",
    "test_intervals_hold",
    "test_proof_of_nonneg_holds_everywhere",
    "test_simplified_index_has_the_same_value",
    "test_windows_of_a_tensor_that_was_flattened",
)
# Those of single cases, and the random tests (hypothesis).
RANDOM = (
    test_expr.test_folding_keeps_the_dtype,
    test_expr.test_isnan_of_a_number_is_known,
    test_expr.test_positions_fold_and_compare,
    test_expr.test_substitute_reaches_loaded_indices_and_masks,
    *(getattr(test_folding, n) for n in dir(test_folding) if n.startswith("test_")),
    *sorted(
        (getattr(test_index, n) for n in dir(test_index) if n.startswith("test_")),
        key=lambda test: test.__name__ in SELDOM,
    ),
)


def answers(module: ModuleType, functions: tuple[str, ...]) -> dict[int, str]:
    """The lines of the ``return`` statements of some functions, with their text."""
    out = {}
    seen = set()
    for n in nodes(module):
        if isinstance(n, ast.FunctionDef) and n.name in functions:
            seen.add(n.name)
            for r in ast.walk(n):
                if isinstance(r, ast.Return):
                    out[r.lineno] = f"line {r.lineno}, {n.name}: {ast.unparse(r)}"
    assert seen == set(functions), f"{module.__name__} has no {set(functions) - seen}"
    return out


def every_case(test: Callable[..., Any]) -> Iterator[Callable[[], Any]]:
    """The calls that pytest would make of a test."""
    choices: list[list[dict[str, Any]]] = []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args
            names = names.split(",") if isinstance(names, str) else names
            choices.append([dict(zip(names, v if len(names) > 1 else (v,))) for v in values])
    for chosen in itertools.product(*choices):
        yield partial(test, **{k: v for some in chosen for k, v in some.items()})


def test_every_answer_of_the_algebra_is_tested() -> None:
    MEMO.clear()  # what was computed before is not computed again
    wanted = {
        (str(source(module)), line): text
        for module, functions in RULES.items()
        for line, text in answers(module, functions).items()
    }
    missing = set(wanted)
    # Sets come in another order in every process: there are more draws than are needed.
    for draw, test in itertools.product(range(8), RANDOM):
        drawn = hasattr(test, "hypothesis")
        if not missing or (draw and not drawn):
            continue
        with crossing_off(missing):
            if drawn:
                hypothesis.seed(draw)(test)  # the same trees in every run of this test
            for case in every_case(test):
                case()
    assert not missing, "no random test reaches:\n" + "\n".join(wanted[m] for m in missing)


# -- rewrites of graphs ----------------------------------------------------------------------------

aten = torch.ops.aten
# A program for each row; `tests/capture/test_rewrite.py` has more.
REWRITES: dict[str, Callable[..., Any]] = {
    "view of the same layout": lambda x: x.view(4, 6).sin(),
    "copy of the same layout": lambda x: x.clone().sin(),
    "cast there and back": lambda x: x.double().float().sin(),
    "times one": lambda x: (x * 1).sin(),
    "plus nothing": lambda x: (x - 0).sin(),
    "negated twice": lambda x: x.neg().neg().sin(),
    "concatenation of one": lambda x: torch.cat([x]).sin(),
    "writes everything": lambda x: aten.slice_scatter.default(x.cos(), x).sin(),
    "constant": lambda x: torch.full((4, 6), 2.0).mul(3).neg() + x,
}


def names_of_rows() -> list[str]:
    return sorted({r.name for rows in RULES_OF.values() for r in rows})


@pytest.mark.parametrize("name", names_of_rows())
def test_every_rewrite_is_applied(name: str) -> None:
    assert name in REWRITES, f"the row {name!r} has no program here"
    for seed in range(5):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        x[0, 0], x[0, 1], x[0, 2], x[0, 3] = float("nan") * 0 if seed == 9 else -0.0, 0.0, 1e38, -1
        gm = traced(REWRITES[name], x)
        record = Record()
        rewrite(gm, Context(record=record))
        assert record.of("rewrite")[0]["rules"].get(name)
        check(REWRITES[name], x)


# -- dependent reductions
# -------------------------------------------------------------------------------


def test_every_rule_of_dependent_reductions_has_an_identity() -> None:
    from tests.schedule import test_online

    kinds = {kind for kind, *_ in test_online.RULES.values()}
    assert set(get_args(online.Rule)) <= kinds
