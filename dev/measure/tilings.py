"""What tilings of products reach of a GPU's units: the figures of `schedule/tilings.json`.

    python -m dev.measure.tilings [--table FILE] [--units half,tf32,f32] [--kinds KINDS] [--write]

Each row of the table is a kernel of one product (bias and ReLU behind it, with weights in both
orders of memory), of one attention, or of its gradients, built and timed on this machine's GPU: the
median of some launches, by CUDA events. Prints the rows with what they reach of the unit's rate in
both orders, and what the library reaches; --write puts that into the table.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.base.device import DeviceSpec, device_spec
from deuteron.base.errors import DeuteronError
from deuteron.base.options import Options
from deuteron.codegen.triton.contraction import contraction_kernel
from deuteron.codegen.triton.kernel import TritonKernel
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, atom, const
from deuteron.ir.nest import Nest, Reduce, Store
from deuteron.ir.program import Layout
from deuteron.runtime.build_triton import submit
from deuteron.runtime.launch_cuda import Launcher
from deuteron.schedule import tile
from deuteron.schedule.dimensions import dimensions
from deuteron.schedule.kernel import Kernel

TABLE = Path(tile.__file__).with_name("tilings.json")
UNITS = {"half": "bf16", "tf32": "tf32", "f32": "f32"}
TORCH = {"bf16": torch.bfloat16, "f32": torch.float32}
M, K, N = 8192, 4096, 4096
WHAT = "products of 8192 x 4096 by 4096 x 4096, chains and gradients of 64 heads of 4096 x 128"
HEADS, LENGTH, WIDTH = 64, 4096, tile.FIGURES["widths"]


@dataclass(frozen=True)
class Case:
    """A nest with its tensors, FLOPs, the same by eager, and of that what the library does."""

    nest: Nest
    layouts: dict[str, Layout]
    flops: float
    eager: Callable[..., Tensor]
    library: Callable[..., Tensor]


def layout(*shape: int, dtype: str, turned: bool = False) -> Layout:
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    if turned:
        strides[-2:] = [1, shape[-2]]
    return Layout(tuple(map(const, shape)), tuple(map(const, strides)), dtype, "cuda:0")


def axes(**extents: int) -> list[Axis]:
    return [Axis(name, const(n)) for name, n in extents.items()]


def product_case(unit: str, turned: bool) -> Case:
    operands = UNITS[unit]
    dtype = "bf16" if unit == "half" else "f32"
    i, k, j = axes(i=M, k=K, j=N)

    def load(name: str, *at: Axis) -> Expr:
        return E.cast(E.load(name, tuple(map(atom, at)), dtype), "f32")

    sum_ = Reduce("s", "sum", (k,), E.op("mul", load("x", i, k), load("w", k, j)), operands)
    total = E.op("add", E.load("s", (atom(i), atom(j)), "f32"), load("b", j))
    out = E.cast(E.op("maximum", total, E.literal(0, "f32")), dtype)
    nest = Nest((i, k, j), (sum_, Store("y", (atom(i), atom(j)), out)))
    layouts = {
        "x": layout(M, K, dtype=dtype),
        "w": layout(K, N, dtype=dtype, turned=turned),
        "b": layout(N, dtype=dtype),
        "y": layout(M, N, dtype=dtype),
    }
    multiplied: Callable[..., Tensor] = lambda x, w, b: F.linear(x, w.t(), b)  # noqa: E731
    work = 2.0 * M * K * N
    return Case(nest, layouts, work, lambda *args: multiplied(*args).relu_(), multiplied)


def chain_case(unit: str, turned: bool) -> Case:
    operands, d_ = UNITS[unit], WIDTH[unit]
    dtype = "bf16" if unit == "half" else "f32"
    h, i, d, j, e = axes(h=HEADS, i=LENGTH, d=d_, j=LENGTH, e=d_)

    def load(name: str, *at: Axis) -> Expr:
        return E.cast(E.load(name, tuple(map(atom, at)), dtype), "f32")

    def result(name: str, *at: Axis) -> Expr:
        return E.load(name, tuple(map(atom, at)), "f32")

    s = E.op("mul", result("s", h, i, j), E.literal(d_**-0.5, "f32"))
    p = E.op("exp", E.op("sub", s, result("m", h, i)))
    out = E.cast(E.op("div", result("o", h, i, e), result("l", h, i)), dtype)
    nest = Nest(
        (h, i, d, j, e),
        (
            Reduce("s", "sum", (d,), E.op("mul", load("q", h, i, d), load("k", h, j, d)), operands),
            Reduce("m", "max", (j,), s),
            Reduce("l", "sum", (j,), p),
            Reduce("o", "sum", (j,), E.op("mul", p, load("v", h, j, e)), operands),
            Store("y", (atom(h), atom(i), atom(e)), out),
        ),
    )
    layouts = {n: layout(HEADS, LENGTH, d_, dtype=dtype) for n in "qkvy"}
    attention = F.scaled_dot_product_attention
    return Case(nest, layouts, 4.0 * HEADS * LENGTH**2 * d_, attention, attention)


def gradient_case(unit: str, turned: bool, of_keys: bool) -> Case:
    """Of an attention's queries; or of its keys and values together, which live on the same axes:
    their sum is stored."""
    operands, d_ = UNITS[unit], WIDTH[unit]
    dtype = "bf16" if unit == "half" else "f32"
    h, j, i, d = axes(h=HEADS, j=LENGTH, i=LENGTH, d=d_)

    def load(name: str, *at: Axis) -> Expr:
        return E.cast(E.load(name, tuple(map(atom, at)), dtype), "f32")

    def result(name: str, *at: Axis) -> Expr:
        return E.load(name, tuple(map(atom, at)), "f32")

    def summed(name: str, axis: Axis, a: Expr, b: Expr) -> Reduce:
        return Reduce(name, "sum", (axis,), E.op("mul", a, b), operands)

    scale = E.literal(d_**-0.5, "f32")
    scores = E.op("mul", result("s", h, j, i), scale)
    p = E.op("exp", E.op("sub", scores, result("m", h, i)))
    ds = E.op("mul", p, E.op("sub", result("dp", h, j, i), result("r", h, i)))
    q, k, v, g = (load(n, h, a, d) for n, a in zip("qkvg", (i, j, j, i), strict=True))
    inner = (summed("s", d, q, k), summed("dp", d, g, v))
    if of_keys:
        outer: tuple[Reduce, ...] = (summed("dv", i, p, g), summed("dk", i, ds, q))
        at, value = (h, j, d), E.op("add", result("dk", h, j, d), result("dv", h, j, d))
    else:
        outer, at, value = (summed("dq", j, ds, k),), (h, i, d), result("dq", h, i, d)
    store = Store("y", tuple(map(atom, at)), E.cast(value, dtype))
    nest = Nest((h, j, i, d), (*inner, *outer, store))
    layouts = {n: layout(HEADS, LENGTH, d_, dtype=dtype) for n in "qkvg"}
    layouts |= {n: layout(HEADS, LENGTH, dtype="f32") for n in "mr"}
    layouts["y"] = layout(HEADS, LENGTH, d_, dtype=dtype)

    def eager(q: Tensor, k: Tensor, v: Tensor, g: Tensor, m: Tensor, r: Tensor) -> Tensor:
        p = torch.exp((q @ k.mT).float() * d_**-0.5 - m[..., None])
        ds = (p * ((g @ v.mT).float() - r[..., None])).to(q.dtype)
        return p.to(q.dtype).mT @ g + ds.mT @ q if of_keys else ds @ k

    return Case(nest, layouts, 8.0 * HEADS * LENGTH**2 * d_, eager, eager)


CASES: dict[str, Callable[[str, bool], Case]] = {
    "products": product_case,
    "chains": chain_case,
    "wide chains": partial(gradient_case, of_keys=False),
    "gradients": partial(gradient_case, of_keys=True),
}


def kernel_of(case: Case, tiling: tile.Tiling, name: str) -> TritonKernel:
    named = case.layouts.items()
    reads = tuple((n, lay) for n, lay in named if n != "y")
    kernel = Kernel(
        name, (), reads, (("y", case.layouts["y"]),), (), "cuda:0", 0, 0.0, 0.0,
        contraction=(case.nest, tiling),
    )  # fmt: skip
    return contraction_kernel(kernel)


def tensors(case: Case) -> dict[str, Tensor]:
    out = {}
    for n, lay in case.layouts.items():
        shape, strides = ([x.value for x in side] for side in (lay.shape, lay.strides))
        t = torch.empty_strided(shape, strides, dtype=TORCH[lay.dtype], device="cuda")
        out[n] = t.normal_(0, K**-0.5 if n == "w" else 1.0)
    return out


def timed(f: Callable[[], Any]) -> float:
    """Microseconds: the median."""
    from triton.testing import do_bench

    return float(do_bench(f, warmup=4, rep=20, return_mode="median")) * 1e3


def measured(
    case: Case, made: list[TritonKernel], options: Options
) -> Iterator[tuple[float, float]]:
    """Microseconds of each kernel, and its error beside eager's result."""
    given = tensors(case)
    *inputs, out = given.values()
    wanted = case.eager(*inputs).float()
    for kernel in made:
        out.fill_(float("nan"))
        launcher = Launcher([kernel], [range(len(given))], [], "cuda:0", options)
        pointers = (ctypes.c_void_p * len(given))(*(t.data_ptr() for t in given.values()))
        stream = torch.cuda.current_stream().cuda_stream
        try:
            us = timed(partial(launcher, stream, pointers))
        except DeuteronError as e:
            print(kernel.name, e, flush=True)
            yield float("inf"), 0.0
            continue
        yield us, float((out.float() - wanted).norm() / wanted.norm())
    yield timed(lambda: case.library(*inputs)), 0.0


def reached(case: Case, tiling: tile.Tiling, us: float, spec: DeviceSpec) -> float:
    """The share of the unit's rate with which the estimate is what was measured."""
    estimator = tile.Estimator(case.nest, case.layouts, spec)

    def estimated(share: float) -> float:
        return estimator.of(replace(tiling, efficiency=share)).us

    low, high = 0.01, 2.0
    for _ in range(20):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if estimated(middle) > us else (low, middle)
    return round(high, 3)


def rows_of(
    kind: str, unit: str, rows: list[Any], spec: DeviceSpec, options: Options
) -> tuple[list[Any], float]:
    """The rows that can be, with what they reach; and what the library does."""
    torch.backends.cuda.matmul.allow_tf32 = unit == "tf32"
    shares: list[list[float]] = [[] for _ in rows]
    library = []
    for turned in (False, True) if kind == "products" else (False,):
        case = CASES[kind](unit, turned)
        groups = dimensions(case.nest)
        usual = [[*row[:3], [1.0, 1.0], row[4]] for row in rows]
        listed = list(tile.listed(case.nest, groups, case.layouts, spec, usual))
        fit = [tile.feasible(case.nest, t, case.layouts, spec) for t in listed]
        made = {
            k: kernel_of(case, t, f"{kind.replace(' ', '_')}_{unit}_{k}{'t' * turned}")
            for k, t in enumerate(listed)
            if fit[k]
        }
        for code in made.values():
            submit(code, code.configs[0], 90, options)
        *found, own = measured(case, list(made.values()), options)
        library.append(case.flops / own[0] / spec.peak(UNITS[unit]) / 1e3)
        for k, (us, error) in zip(made, found, strict=True):
            shares[k].append(reached(case, listed[k], us, spec))
            what = f"{kind} {unit} {'[N, K]' * turned} {rows[k]}"
            share = f"{us:.0f} us, {shares[k][-1]}, library {own[0]:.0f}"
            print(f"{what}: {share}; error {error:.1e}", flush=True)
    out = [
        [*row[:3], (found * 2)[:2], row[4]]
        for row, found in zip(rows, shares, strict=True)
        if len(found) == (2 if kind == "products" else 1)
    ]
    return out, round(math.prod(library) ** (1 / len(library)), 2)


def written(x: Any, indent: str = "") -> str:
    """JSON with a line for each row."""
    deeper = indent + "  "
    if isinstance(x, dict):
        parts = [f"{deeper}{json.dumps(k)}: {written(v, deeper)}" for k, v in x.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    if isinstance(x, list) and any(isinstance(y, list) for y in x):
        return "[\n" + ",\n".join(f"{deeper}{json.dumps(y)}" for y in x) + f"\n{indent}]"
    return json.dumps(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--units", default="half,tf32,f32")
    parser.add_argument("--kinds", default=",".join(CASES))
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    table: dict[str, Any] = json.loads(arguments.table.read_text(encoding="utf-8"))
    spec, options = device_spec("cuda"), Options.make()
    for unit in arguments.units.split(","):
        for kind in (k for k in arguments.kinds.split(",") if unit in table[k]):
            rows, library = rows_of(kind, unit, table[kind][unit], spec, options)
            table[kind][unit] = rows
            table["about"] = f"{spec.name}, {date.today()}: {WHAT}"
            if kind == "products":
                table["library"][unit] = library
    text = written(table)
    print(text)
    if arguments.write:
        arguments.table.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
