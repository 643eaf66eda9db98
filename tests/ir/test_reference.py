"""The reference executors against torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deuteron.ir import expr as E
from deuteron.ir import operations, reference, reference_ops
from deuteron.ir.expr import literal, op
from deuteron.ir.index import Axis, Sym, Value, atom, const
from deuteron.ir.program import Check, Compute, Input, Output, Program
from deuteron.ir.reference import run_program
from deuteron.ir.verify import verify_program
from deuteron.schedule.kernel import Nest, Reduce, Scan, Store
from deuteron.schedule.reference import run_kernel
from tests.ir.samples import at, everything, fused_softmax, lay, read, schedule_of, softmax, whole


@pytest.mark.parametrize("rows", [2, 5, 300])
def test_softmax(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference.blocks, "__defaults__", (256,))  # several blocks
    x = torch.randn(rows, 8)
    (y,) = run_program(softmax(), [x])
    torch.testing.assert_close(y, x.softmax(-1))


def test_numbers_that_are_computed_and_asserted() -> None:
    """Of sizes; floats stay floats."""
    p = softmax()
    rows = p.sizes[0][0].name
    share = (Sym("share", low=-(2**62)), ("expr", f"2.0 / {rows}", 0))
    p = replace(p, sizes=(*p.sizes, share), checks=(Check(f"{rows} <= 3", "too many"),))  # type: ignore[arg-type]
    assert reference.Execution(p, [torch.randn(3, 8)]).sizes["share"] == 2 / 3
    with pytest.raises(RuntimeError, match="too many"):
        run_program(p, [torch.randn(4, 8)])


def test_everything() -> None:
    program, inputs = everything()
    verify_program(program, "test", strict=True)
    x, ids, table, seed = inputs
    n = x.shape[0]
    kept, scan, counts, best, ordered, half, size, none, number = run_program(program, inputs)
    expected_half = (x * torch.tensor(0.1)).bfloat16().float()
    torch.testing.assert_close(half, expected_half.t(), rtol=0, atol=0)
    assert half.stride() == (1, 4)
    got = torch.zeros(n, 4)
    got[:, :3] = table[ids, 1:]
    from deuteron.graph import random_ops

    noise = torch.ops.deuteron.rand(seed, 3, [n, 4], torch.float32)
    torch.testing.assert_close(kept, torch.where(noise < 0.5, got, 0.0), rtol=0, atol=0)
    product = expected_half @ (torch.arange(16.0).view(4, 4) / 7).t()
    expected_scan = product.flip(1).cumsum(1)
    torch.testing.assert_close(scan, expected_scan)
    expected = torch.ones(5).index_add(0, ids[:5], kept[:5, 0])
    torch.testing.assert_close(counts, expected)
    assert torch.equal(best, scan.argmax(1))
    assert torch.equal(ordered, ids.sort(stable=True).indices)
    assert (size, none, number) == (2 * n, None, 1.5) and random_ops.RAND is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_numbers_are_those_of_the_operators(dtype: torch.dtype) -> None:
    import deuteron.graph.random_ops  # noqa: F401

    short = "f32" if dtype == torch.float32 else "f64"
    element = torch.arange(1000)
    for seed in (0, -1, 2**63 - 1, -(2**63), 123456789):
        key = torch.tensor(seed)
        for dist, f in (("rand", torch.ops.deuteron.rand), ("randn", torch.ops.deuteron.randn)):
            got = reference_ops.random_values(dist, key, 7, element, short)
            torch.testing.assert_close(got, f(key, 7, [1000], dtype), rtol=0, atol=0)


def test_philox_known_answers() -> None:
    """The vectors of Random123's kat_vectors, philox4x32 with 10 rounds."""
    zero = reference_ops.philox(torch.tensor(0), 0, torch.tensor(0))
    assert [int(w) for w in zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = reference_ops.philox(torch.tensor(-1), -1, torch.tensor(-1))
    assert [int(w) for w in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


REDUCTIONS = {
    "sum": lambda x: x.double().sum((0, 2)).to(x.dtype),
    "prod": lambda x: x.double().prod(2).prod(0).to(x.dtype),
    "max": lambda x: x.amax((0, 2)), "min": lambda x: x.amin((0, 2)),
}  # fmt: skip


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["f32", "f64", "i64", "bf16"])
def test_reductions(kind: str, dtype: str) -> None:
    x = (torch.randn(3, 4, 5) * 3).to(reference_ops.TO_TORCH[dtype])
    got = reference_ops.reduce(kind, x, (0, 2), dtype)
    torch.testing.assert_close(got[0, :, 0], REDUCTIONS[kind](x))
    empty = reference_ops.reduce(kind, x[:, :, :0], (2,), dtype)
    assert torch.all(empty == torch.tensor(operations.REDUCTIONS[kind].identity(dtype)).to(x.dtype))


def test_extremes_keep_nan_and_the_first_position() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, float("nan"), float("nan")]])
    assert reference_ops.reduce("argmax", x, (1,), "f32").flatten().tolist() == [1, 1]
    assert reference_ops.reduce("argmax_last_nan", x, (1,), "f32").flatten().tolist() == [1, 2]
    assert reference_ops.reduce("max", x, (1,), "f32")[1].isnan().all()
    assert reference_ops.scan("max", x, 1)[1].isnan().tolist() == [False, True, True]


def program_of(compute: Compute, *inputs: Any) -> Program:
    defs = tuple(Input(name, layout, k) for k, (name, layout) in enumerate(inputs))
    return Program((*defs, compute), (whole(compute.name, compute.layout),))


def test_reads_outside_a_tensor_are_errors() -> None:
    i = Axis("i", 4)
    shifted = E.load("x", (i.index + 1,), "f32")
    bad = program_of(Compute("y", (i,), shifted, lay(4)), ("x", lay(4)))
    with pytest.raises(IndexError, match="x: index 4 in dimension 0 of size 4"):
        run_program(bad, [torch.randn(4)])
    gather = E.load("x", (atom(Value(read("ids", i, dtype="i64"))),), "f32")
    bad = program_of(
        Compute("y", (i,), gather, lay(4)), ("x", lay(4)), ("ids", lay(4, dtype="i64"))
    )
    with pytest.raises(IndexError, match="index -1"):
        run_program(bad, [torch.randn(4), torch.tensor([0, 1, -1, 2])])


def test_empty_tensors_and_zero_sizes() -> None:
    n = atom(Sym("n", 0, 4))
    i, j = Axis("i", 3), Axis("j", n)
    total = E.reduce("sum", (j,), read("x", i, j))
    p = Program(
        (Input("x", lay(3, n), 0), Compute("y", (i,), total, lay(3))), (whole("y", lay(3)),),
        ((Sym("n", 0, 4), ("shape", 0, 1)),),
    )  # fmt: skip
    assert run_program(p, [torch.randn(3, 0)])[0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
def test_accumulating_scatter(kind: str) -> None:
    i = Axis("i", 6)
    place = atom(Value(read("ids", i, dtype="i64")))
    store = Compute("y", (i,), read("v", i), lay(4), "x", (place,), kind)
    p = program_of(store, ("x", lay(4)), ("ids", lay(6, dtype="i64")), ("v", lay(6)))
    x, ids, v = torch.randn(4), torch.tensor([0, 3, 3, 1, 0, 3]), torch.randn(6)
    torch_kind = {"max": "amax", "min": "amin"}.get(kind, kind)
    expected = x.scatter_reduce(0, ids, v, torch_kind)
    mine = x.clone()
    (y,) = run_program(p, [mine, ids, v])
    torch.testing.assert_close(y, expected)
    assert y.data_ptr() == mine.data_ptr()  # the input's memory


def test_outputs_have_the_programs_strides_and_share_memory() -> None:
    program, inputs = everything()
    x = Output("x", (const(4), const(2)), (const(1), const(4)), const(4))
    p = Program(program.defs, (x, x), program.sizes, program.constants)
    a, b = run_program(p, inputs)
    assert a.stride() == (1, 4) and a.data_ptr() == b.data_ptr() == inputs[0].data_ptr() + 16


@pytest.mark.parametrize("rows", [1, 7])
def test_kernel_softmax(rows: int) -> None:
    schedule = fused_softmax()
    x = torch.randn(rows, 8)
    tensors = {"x": x, "y": torch.empty(rows, 8)}
    run_kernel(schedule.steps[0], tensors, {"s0": rows})
    torch.testing.assert_close(tensors["y"], x.softmax(-1))


def test_kernel_with_partial_column_sums_and_a_scan() -> None:
    i, j = Axis("i", 10), Axis("j", 6)
    x = read("x", i, j)
    nest = Nest(
        (i,), (j,),
        (
            Reduce("row", "sum", x),
            Reduce("part", "sum", op("mul", x, read("row", i)), partial=True),
            Store("y", at(i), op("neg", read("row", i)), "row"),
        ),
        (i, 4),
    )  # fmt: skip
    layouts = {"x": lay(10, 6), "part": lay(4, 6), "y": lay(10)}
    kernel = schedule_of((nest,), ("x",), ("part", "y"), layouts).steps[0]
    data = torch.randn(10, 6)
    t = {"x": data, "part": torch.full((4, 6), 9.0), "y": torch.empty(10)}
    run_kernel(kernel, t, {})
    torch.testing.assert_close(t["y"], -data.sum(1))
    weighted = data * data.sum(1, keepdim=True)
    expected = torch.stack([weighted[k : k + 3].sum(0) for k in (0, 3, 6, 9)])
    torch.testing.assert_close(t["part"], expected)

    scan = Nest((i,), (j,), (Scan("s", "sum", x), Store("x", at(i, j), read("s", i, j), "point")))
    kernel = schedule_of((scan,), ("x",), ("x",), layouts).steps[0]
    t = {"x": data.clone()}
    run_kernel(kernel, t, {})
    torch.testing.assert_close(t["x"], data.cumsum(1))


def test_integer_division_by_zero_is_defined() -> None:
    a, b = torch.tensor([7, -7, 5]), torch.tensor([2, 2, 0])
    got = {
        n: reference_ops.scalar_op(n, (a, b)).tolist()
        for n in ("floordiv", "truncdiv", "remainder", "fmod")
    }
    assert got == {
        "floordiv": [3, -4, 0],
        "truncdiv": [3, -3, 0],
        "remainder": [1, 1, 5],
        "fmod": [1, -1, 5],
    }


def test_half_types_compute_in_f32_and_round_once() -> None:
    a = torch.randn(200).bfloat16()
    got = reference_ops.scalar_op("mul", (a, a))
    assert got.dtype == torch.float32
    assert torch.equal(got.bfloat16(), a * a)
    i = Axis("i", 200)
    x = read("x", i, dtype="bf16")
    body = op("add", op("mul", x, x), literal(1.0, "bf16"))
    p = program_of(Compute("y", (i,), body, lay(200, dtype="bf16")), ("x", lay(200, dtype="bf16")))
    assert torch.equal(run_program(p, [a])[0], a * a + 1)


def test_an_input_may_have_fewer_dimensions_of_one_element() -> None:
    i, j = Axis("i", 1), Axis("j", 3)
    body = op("add", read("x", i, j), literal(1.0, "f32"))
    p = program_of(Compute("y", (i, j), body, lay(1, 3)), ("x", lay(1, 3)))
    assert torch.equal(run_program(p, [torch.arange(3.0)])[0], torch.tensor([[1.0, 2.0, 3.0]]))
    with pytest.raises(AssertionError, match="its layout"):
        run_program(p, [torch.arange(4.0)])
