"""The compiler's tables: every pass has a verifier or a reason, is timed and printed, and is named
when what it gives breaks an invariant."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from deuteron.backend import collecting, deuteron_backend
from deuteron.base.errors import DeuteronError, VerifyError
from deuteron.base.options import Options
from deuteron.base.passes import Context, Pass, run_passes
from deuteron.codegen.triton import generate as triton
from deuteron.ir.expr import literal
from deuteron.ir.program import Compute
from deuteron.pipeline import STAGES
from dev.passes import Listed, listed, times
from tests.schedule.tools import scheduled, spec_of

ROWS = list(listed(STAGES))
R = torch.randn


def ids(one: Listed) -> str:
    return "/".join(one.path)


@pytest.mark.parametrize("one", ROWS, ids=ids)
def test_every_pass_says_all_of_itself(one: Listed) -> None:
    assert one.does, "its function has no docstring"
    assert callable(one.row.show)
    if isinstance(one.row.check, str):
        assert len(one.row.check.split()) >= 4, "no sentence"
    else:
        assert one.row.check.__name__.startswith("verify")
    assert one.takes != "_empty" and one.gives != "_empty", "its function is not typed"


def of_module(run: Any) -> dict[str, Any]:
    return vars(sys.modules[(run if callable(run) else type(run)).__module__])


@pytest.mark.parametrize("one", ROWS, ids=ids)
def test_every_table_is_a_chain(one: Listed) -> None:
    """A pass takes what the one before it gives, or something that this extends."""
    for first, second in zip(one.row.passes, one.row.passes[1:]):
        if {first.name, second.name} == {"cpp", "triton"}:
            continue  # a kernel goes through one of them
        before, after = Listed((), (), first), Listed((), (), second)
        if before.gives == after.takes:
            continue
        given = of_module(first.run).get(before.gives)
        taken = of_module(second.run).get(after.takes)
        # What changes a graph in place takes and gives whatever holds the graph.
        assert given is not None and taken is not None, (before.gives, after.takes)
        assert issubclass(given, taken) or issubclass(taken, given), (first.name, second.name)
    names = [row.name for row in one.row.passes]
    assert len(names) == len(set(names))


# -- printed and timed -----------------------------------------------------------------------------


def trained(f: Callable[..., Any], **options: Any) -> list[Any]:
    """The Records of forward and backward."""
    torch._dynamo.reset()
    x = R(24, 32, requires_grad=True)
    with collecting() as records:
        g = torch.compile(f, backend=deuteron_backend, options=options)
        g(x).square().sum().backward()
    return records


def softmax(x: Any) -> Any:
    return torch.softmax(x @ x.t(), -1) * 2


def ran(one: Listed, phase: str) -> bool:
    """Whether a pass runs for a graph of the CPU."""
    early = one.path[0] in ("capture", "partition")
    return (
        "triton" not in one.path
        and (not early or phase == "captured")
        and (early or phase != "captured")
    )


def test_the_debug_folder_has_a_file_for_every_pass(tmp_path: Path) -> None:
    trained(softmax, debug_dir=str(tmp_path))
    for phase in ("captured", "forward", "backward"):
        (folder,) = tmp_path.glob(f"{phase}_*")
        written = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
        inside = {f for f in written if f.startswith("02_partition/02_rewrite/")}
        assert len(inside) == (16 if phase == "captured" else 0)
        expected = {one.file for one in ROWS if ran(one, phase)}
        assert written - inside == {*expected, "record.json"}


def test_the_record_has_a_time_for_every_pass() -> None:
    forward, backward = map(times, trained(softmax))
    for one in ROWS:
        early = ran(one, "captured")
        assert (one.path in forward) == (ran(one, "forward") or early)
        assert (one.path in backward) == ran(one, "backward")
    # What runs once per kernel is summed up.
    inside = [s for path, s in forward.items() if path[:2] == ("generate", "cpp") and path[2:]]
    assert 0 < sum(inside) <= forward["generate", "cpp"] <= forward["generate",]


# -- broken artifacts ------------------------------------------------------------------------------


def without_order(graph: Any) -> Any:
    """The last call stands before its arguments."""
    calls = [n for n in graph.gm.graph.nodes if n.op == "call_function"]
    calls[0].prepend(calls[-1])
    return graph


def of_another_dtype(program: Any) -> Any:
    first = next(d for d in program.defs if isinstance(d, Compute))
    wrong = replace(first, body=literal(1, "i64"))
    return replace(program, defs=tuple(wrong if d is first else d for d in program.defs))


def without_edges(grouped: Any) -> Any:
    node = next(n for n in grouped.fusion.dag.nodes.values() if n.after)
    node.after = set()
    return grouped


def without_kernels(built: Any) -> Any:
    return replace(built, schedule=replace(built.schedule, steps=()))


def let_go_early(placed: Any) -> Any:
    dies = {0: [n for names in placed.plan.dies.values() for n in names]}
    return replace(placed, plan=replace(placed.plan, dies=dies))


def with_equal_axes(looped: Any) -> Any:
    loops = looped.loops[0]
    twice = replace(loops, parallel=(*loops.parallel, *loops.parallel))
    return replace(looped, loops=(twice, *looped.loops[1:]))


def without_launches(called: Any) -> Any:
    called.body.launch_groups.clear()
    return called


BROKEN = {
    "rewrite/rows": ("graph.rewrite", "REWRITES", without_order, "order"),
    "lower/nodes": ("lower.passes", "LOWERING", of_another_dtype, "dtypes"),
    "lower/roundings": ("lower.passes", "LOWERING", of_another_dtype, "dtypes"),
    "schedule/dependencies": ("schedule", "SCHEDULING", without_edges, "edges"),
    "schedule/fuse": ("schedule", "SCHEDULING", without_edges, "edges"),
    "schedule/build": ("schedule", "SCHEDULING", without_kernels, "once"),
    "memory/placement": ("memory.planning", "PLANNING", let_go_early, "alive"),
    "generate/cpp/loops": ("codegen.cpp.kernels", "CPP", with_equal_axes, "axes"),
    "emit/call": ("codegen.emission", "EMITTING", without_launches, "launches"),
}


def broken(table: Any, name: str, change: Callable[[Any], Any]) -> Any:
    """The table with a pass that gives something else."""

    def wrong(row: Pass[Any, Any]) -> Pass[Any, Any]:
        def run(artifact: Any, context: Context) -> Any:
            return change(row.run(artifact, context))

        return replace(row, run=run) if row.name == name else row

    return tuple(map(wrong, table))


def failure(f: Callable[..., Any], **options: Any) -> Any:
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed) as caught:
        torch.compile(f, backend=deuteron_backend, options=options)(R(24, 32))
    return caught.value.inner_exception


def sorted_rows(x: Any) -> Any:
    """Kernels before and behind a library call, with a tensor between them."""
    return torch.sort(torch.softmax(x * 2, -1)).values.sum(0) + 1


@pytest.mark.parametrize("path", BROKEN)
def test_who_breaks_an_invariant_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, table, change, invariant = BROKEN[path]
    where = sys.modules[f"deuteron.{module}"]
    rows = broken(getattr(where, table), path.rsplit("/", 1)[1], change)
    monkeypatch.setattr(where, table, rows)
    error = failure(sorted_rows, verify=True)
    assert isinstance(error, VerifyError)
    assert error.guilty == path and error.invariant == invariant
    assert f"{path} broke the invariant {invariant!r}" in str(error)


@pytest.mark.parametrize("stage", ["rewrite", "lower", "schedule", "memory"])
def test_a_stage_is_verified_without_being_asked(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = {"rewrite": "rows", "lower": "roundings", "schedule": "build", "memory": "placement"}
    module, table, change, invariant = BROKEN[f"{stage}/{last[stage]}"]
    where = sys.modules[f"deuteron.{module}"]
    monkeypatch.setattr(where, table, broken(getattr(where, table), last[stage], change))
    error = failure(sorted_rows)
    assert isinstance(error, VerifyError)
    assert error.guilty == stage and error.invariant == invariant


def test_triton_text_that_is_no_python_is_named() -> None:
    kernel = scheduled(lambda x: x.exp(), R(8, 8), device="H200", check=False).kernels[0]
    rows = broken(triton.TRITON, "function", lambda k: replace(k, source=k.source + "\nreturn ("))
    context = Context(Options(verify=True), path=("generate", "triton"))
    with pytest.raises(VerifyError) as caught:
        run_passes(rows, triton.Task(kernel, spec_of("H200")), context)
    assert caught.value.guilty == "generate/triton/function"
    assert caught.value.invariant == "syntax"


def test_failures_name_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(artifact: Any) -> Any:
        raise ZeroDivisionError("oh")

    where = sys.modules["deuteron.schedule"]
    monkeypatch.setattr(where, "SCHEDULING", broken(where.SCHEDULING, "fuse", fails))
    error = failure(softmax)
    assert isinstance(error, DeuteronError) and not isinstance(error, VerifyError)
    assert "stage 'schedule', pass 'fuse': ZeroDivisionError: oh" in error.message
