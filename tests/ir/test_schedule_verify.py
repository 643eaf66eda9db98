"""Each invariant of schedules has broken schedules that the verifier catches, by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deuteron.base.errors import VerifyError
from deuteron.ir import expr as E
from deuteron.ir.expr import literal, op
from deuteron.ir.index import Axis, const
from deuteron.ir.nest import Nest as ContractionNest
from deuteron.ir.nest import Reduce as ContractionReduce
from deuteron.ir.nest import Statement as ContractionStatement
from deuteron.ir.nest import Store as ContractionStore
from deuteron.ir.program import Compute, Extern, Input, Layout, Program, ViewArg
from deuteron.schedule.kernel import Kernel, Nest, Reduce, Scan, Schedule, Step, Stmt, Store
from deuteron.schedule.tiling import Dim, Tiling
from deuteron.schedule.verify import verify_schedule
from tests.ir.samples import at, fused_softmax, lay, read, softmax, whole

i, j, p, q = Axis("i", 8), Axis("j", 4), Axis("p", 8), Axis("q", 4)
SQUARE, ROW = lay(8, 4), lay(8)
x = read("x", i, j)
total = E.reduce("sum", (j,), x)
point = Store("y", at(i, j), op("neg", x), "point")
reduction = Reduce("r", "sum", x)
row = Store("s", at(i), read("r", i), "row")
LAYOUTS: dict[str, Layout] = {
    "x": SQUARE, "y": SQUARE, "s": ROW, "c": lay(8), "part": lay(4, 4), "new": SQUARE,
    "h": lay(8, 4, dtype="f16"), "pp": lay(8, 8),
}  # fmt: skip
CALL = Extern(
    ("c",),
    "aten.rand.default",
    (ViewArg("s", (const(8),), (const(1),), const(0)),),
    (),
    (ROW,),
    impure=True,
)
# new overwrites x; s and y are computed from x
PROGRAM = Program(
    (
        Input("x", SQUARE, 0),
        Compute("y", (i, j), op("neg", x), SQUARE),
        Compute("s", (i,), total, ROW),
        CALL,
        Compute("new", (i, j), op("exp", x), SQUARE, "x", at(i, j)),
    ),
    (whole("y", SQUARE), whole("new", SQUARE), whole("c", ROW)),
)  # fmt: skip
in_place = Store("new", at(i, j), op("exp", x), "point")


def nest(*stmts: Stmt, **kwargs: Any) -> Nest:
    return Nest(**{"parallel": (i,), "reduced": (j,), "stmts": stmts, **kwargs})


def kernel(*nests: Nest, **kwargs: Any) -> Kernel:
    reads: dict[str, None] = {}
    writes: dict[str, None] = {}
    for n in nests:
        local = n.locals()
        for e in n.exprs():
            reads.update({a.attr[0]: None for a in e.loads() if a.attr[0] not in local})
        for s in n.stmts:
            if isinstance(s, Store):
                writes[s.tensor] = None
            elif isinstance(s, Reduce) and s.partial:
                writes[s.name] = None
    fields: dict[str, Any] = {
        "reads": tuple((n, LAYOUTS.get(n, ROW)) for n in reads),
        "writes": tuple((n, LAYOUTS.get(n, ROW)) for n in writes),
        **kwargs,
    }
    return Kernel(
        "k", nests, origins=(), device="cpu", bytes=0, flops=0.0, predicted_us=0.0, **fields
    )


def schedule(*steps: Step) -> Schedule:
    return Schedule(steps, {"new": "x"}, LAYOUTS)


# A kernel with a product: its nest has two results and a store.
k = Axis("k", 4)
product = ContractionReduce("r", "sum", (k,), op("mul", read("x", i, k), read("x", p, k)))
TILED = Tiling(tuple(Dim(a.name, (a,), "whole", 8) for a in (i, p, k)), 4, 1)


def contraction(
    *statements: ContractionStatement, axes: tuple[Axis, ...] = (i, p, k), tiling: Tiling = TILED
) -> Kernel:
    wanted = ContractionNest(axes, statements)
    reads, writes = wanted.tensors()
    fields: dict[str, Any] = {
        "reads": tuple((t, LAYOUTS.get(t, ROW)) for t in reads),
        "writes": tuple((t, LAYOUTS.get(t, ROW)) for t in writes),
    }
    return Kernel("c", (), origins=(), device="cpu", bytes=0, flops=0.0, predicted_us=0.0,
                  contraction=(wanted, tiling), **fields)  # fmt: skip


def contracted(*statements: ContractionStatement, **kwargs: Any) -> Schedule:
    return schedule(kernel(nest(reduction, point, row)), CALL, contraction(*statements, **kwargs))


used = ContractionStore("pp", at(i, p), read("r", i, p))
FIRST = kernel(nest(reduction, point, row))
LAST = kernel(nest(in_place))
partial = Reduce("part", "sum", x, partial=True)


def broken(*stmts: Stmt, **kwargs: Any) -> Schedule:
    return schedule(FIRST, CALL, LAST, kernel(nest(*stmts, **kwargs)))


def only(*stmts: Stmt, **kwargs: Any) -> Schedule:
    return schedule(kernel(nest(*stmts, **kwargs)), CALL, LAST)


def grouped(last: Stmt) -> Schedule:
    """One row, of which each `i` is a group."""
    reduced_axes = replace(reduction, grouped=True)
    return only(reduced_axes, point, last, parallel=(), reduced=(i, j), group_axes=(j,))


BROKEN: dict[str, tuple[str, Callable[[], Schedule]]] = {
    "read before written": ("written", lambda: schedule(CALL, FIRST, LAST)),
    "output not written": ("written", lambda: schedule(FIRST, CALL)),
    "no layout": ("written", lambda: only(reduction, row, replace(point, tensor="zzz"))),
    "nest reads another's": (
        "nests", lambda: schedule(kernel(nest(reduction, point, row), nest(
            Store("c", at(i), read("s", i), "row"))))),
    "nests write one tensor": ("nests",
        lambda: schedule(kernel(nest(point), nest(reduction, point)))),
    "nest overwrites what another reads": (
        "nests", lambda: schedule(kernel(nest(point), nest(in_place)))),
    "nest reads its own store": (
        "nests", lambda: schedule(FIRST, kernel(nest(
            Store("part", at(j, j), x, "point", scattered=True),
            Store("h", at(i, j), E.cast(read("part", j, j), "f16"), "point"))))),
    "register before definition": ("locals", lambda: only(row, reduction, point)),
    "register twice": ("locals", lambda: only(reduction, reduction, row, point)),
    "register with a tensor's name": ("locals", lambda: only(
        Reduce("x", "sum", literal(1.0, "f32")), Store("s", at(i), read("x", i), "row"))),
    "partial result read": ("locals", lambda: only(
        partial, Store("s", at(i), read("part", i, 0), "row"), point, row_split=(i, 4))),
    "row store of points": ("levels", lambda: only(reduction, row, replace(point, level="row"))),
    "row store of a scan": ("levels", lambda: only(
        Scan("r", "sum", x), replace(row, value=read("r", i, 0)), point)),
    "store index of other loops": (
        "levels", lambda: only(reduction, row, replace(point, index=at(p, j)))),
    "reduction of other loops": ("levels",
        lambda: only(Reduce("r", "sum", read("x", p, j)), row, point)),
    "unknown level": ("levels", lambda: only(reduction, row, replace(point, level="grid"))),
    "scan along two loops": ("levels", lambda: only(
        Scan("r", "sum", x), point, parallel=(), reduced=(i, j))),
    "partial without a row split": ("levels", lambda: only(reduction, row, point, partial)),
    "loop twice": ("axes", lambda: only(reduction, row, point, parallel=(i, j))),
    "splits of no loop": ("axes", lambda: only(reduction, row, point, row_split=(p, 4))),
    "body binds a loop": ("axes", lambda: only(reduction, replace(row, value=total), point)),
    "groups of no row": ("axes", lambda: only(reduction, row, point, group_axes=(p,))),
    "groups that are whole rows": ("axes", lambda: only(reduction, row, point, group_axes=(j,))),
    "reduction of groups without any": (
        "levels", lambda: only(replace(reduction, grouped=True), row, point)),
    "value of a group stored by row": ("levels", lambda: grouped(row)),
    "store by group of a row without": (
        "levels", lambda: only(reduction, replace(row, level="group"), point)),
    "partial of another shape": ("layouts",
        lambda: only(reduction, row, point, partial, row_split=(i, 3))),
    "written twice": ("once", lambda: schedule(FIRST, CALL, FIRST, LAST)),
    "one place along a loop": (
        "once", lambda: only(reduction, row, replace(point, index=(i.index, const(0))))),
    "call twice": ("once", lambda: schedule(FIRST, CALL, CALL, LAST)),
    "call forgotten": ("once", lambda: schedule(FIRST, LAST)),
    "read after overwriting": ("overwritten", lambda: schedule(LAST, FIRST, CALL)),
    "neighbour of the overwritten": (
        "overwritten", lambda: schedule(FIRST, CALL, kernel(nest(
            Store("new", at(i, j), read("x", i, 3 - j.index), "point"))))),
    "later loop reads the overwritten": (
        "overwritten", lambda: schedule(kernel(nest(point, in_place, reduction, row)), CALL)),
    "unlisted read": ("interface", lambda: schedule(
        kernel(nest(reduction, point, row), reads=()), CALL, LAST)),
    "unlisted write": ("interface", lambda: schedule(
        kernel(nest(reduction, point, row), writes=(("s", ROW),)), CALL, LAST)),
    "listed and not written": ("interface", lambda: schedule(
        kernel(nest(reduction, row), writes=(("s", ROW), ("y", SQUARE))), CALL, LAST)),
    "another layout": ("interface", lambda: schedule(
        kernel(nest(reduction, point, row), reads=(("x", lay(4, 8)),)), CALL, LAST)),
    "store of another dtype": ("dtypes", lambda: only(reduction, row, replace(point, tensor="h"))),
    "register of another dtype": ("dtypes", lambda: only(
        reduction, point, Store("s", at(i), E.cast(read("r", i, dtype="f64"), "f32"), "row"))),
    "unknown reduction": ("kinds", lambda: only(replace(reduction, kind="xor"), row, point)),
    "unknown accumulation": ("kinds",
        lambda: only(reduction, row, replace(point, accumulate="xor"))),
    "store outside": (
        "range", lambda: only(reduction, row, replace(point, index=(i.index + 1, j.index)))),
    "load outside": ("range", lambda: only(
        reduction, row, replace(point, value=read("x", i, j.index + 1)))),
    "partial of another dtype": ("dtypes", lambda: only(
        reduction, row, point, replace(partial, body=E.cast(x, "f16")), row_split=(i, 4))),
    "mask is a number": ("dtypes", lambda: only(reduction, row, replace(point, mask=x))),
    "part without a nest": ("nests", lambda: schedule(
        kernel(nest(reduction, row, point), barriers=(1,)), CALL, LAST)),
    "axes that are not tiled": ("tiling", lambda: contracted(
        product, used, tiling=replace(TILED, dims=TILED.dims[:2]))),
    "product over no axis of the nest": ("axes", lambda: contracted(
        product, replace(used, value=read("x", q, q)))),
    "result read where it does not live": ("locals", lambda: contracted(
        product, replace(used, value=read("r", p, i)))),
    "result before its statement": ("locals", lambda: contracted(used, product)),
    "product stored in another dtype": ("dtypes", lambda: contracted(
        product, ContractionStore("h", at(i, k), read("r", i, p)))),
    "product stored in one place": ("once", lambda: contracted(
        product, ContractionStore("s", at(i), read("r", i, p)))),
    "unknown scan": ("kinds", lambda: only(Scan("r", "any", x), point, row)),
    "position along two loops": ("levels", lambda: only(
        Reduce("r", "argmax", x), point, parallel=(), reduced=(i, j))),
    "mask that lets through": ("range", lambda: only(
        reduction, row, replace(point, index=(i.index, j.index + 1),
                           mask=op("lt", E.index_value(i.index), literal(3, "i64"))))),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_schedule_is_caught(case: str) -> None:
    invariant, build = BROKEN[case]
    with pytest.raises(VerifyError) as caught:
        verify_schedule(build(), PROGRAM, "tiling")
    assert caught.value.invariant == invariant, str(caught.value)
    assert caught.value.guilty == "tiling" and caught.value.node


def test_good_schedules_pass() -> None:
    verify_schedule(fused_softmax(), softmax(), strict=True)
    verify_schedule(schedule(FIRST, CALL, LAST), PROGRAM, strict=True)
    last = replace(point, value=op("mul", x, literal(2.0, "f32")))
    # in place behind the reads, and beside a store that uses the same element
    verify_schedule(schedule(kernel(nest(reduction, row, last, in_place)), CALL), PROGRAM)
    verify_schedule(schedule(kernel(nest(reduction, row, in_place, last)), CALL), PROGRAM)
    verify_schedule(grouped(replace(row, level="group")), PROGRAM, strict=True)
    row_split = schedule(kernel(nest(reduction, partial, row, point, row_split=(i, 4))), CALL, LAST)
    verify_schedule(row_split, PROGRAM)


def test_good_products_pass() -> None:
    verify_schedule(schedule(FIRST, CALL, contraction(product, used), LAST), PROGRAM)


def test_indices_of_registers_mean_nothing() -> None:
    stray = replace(row, value=read("r", p))
    verify_schedule(schedule(kernel(nest(reduction, stray, point)), CALL, LAST), PROGRAM)


def test_impure_calls_keep_their_order() -> None:
    second = replace(CALL, names=("d",))
    program = replace(PROGRAM, defs=(*PROGRAM.defs[:4], second, PROGRAM.defs[4]))
    verify_schedule(schedule(FIRST, CALL, second, LAST), program)
    with pytest.raises(VerifyError, match="another order"):
        verify_schedule(schedule(FIRST, second, CALL, LAST), program)
