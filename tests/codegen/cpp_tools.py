"""Builds kernels by hand, compiles them with g++ and runs them on torch tensors."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from deuteron.base.options import Options
from deuteron.base.passes import Context
from deuteron.codegen.cpp import (
    KERNEL_CXX_FLAGS,
    CppKernel,
    Machine,
    Task,
    translation_unit,
    write_kernel,
)
from deuteron.ir.expr import Expr, literal, load, op
from deuteron.ir.index import Axis, IndexLike, Sym, as_index
from deuteron.ir.program import Layout, Origin
from deuteron.schedule.kernel import Kernel, Nest, Reduce, Store

MACHINE = Machine(threads=2, l2_bytes=1 << 20)
NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.bool: "bool",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}
CACHE = Path(tempfile.gettempdir()) / "deuteron_cpp_tests"


def layout(t: torch.Tensor) -> Layout:
    return Layout(
        tuple(as_index(n) for n in t.shape), tuple(as_index(s) for s in t.stride()), NAMES[t.dtype]
    )


def kernel(
    nests: Sequence[Nest],
    reads: Mapping[str, Layout],
    writes: Mapping[str, Layout],
    name: str = "test",
) -> Kernel:
    return Kernel(
        name,
        tuple(nests),
        tuple(reads.items()),
        tuple(writes.items()),
        (Origin("n", "aten.test", ""),),
        "cpu",
        0,
        0.0,
        0.0,
    )


def build(source: str, extra: Sequence[str] = ()) -> ctypes.CDLL:
    CACHE.mkdir(exist_ok=True)
    stem = (
        CACHE
        / hashlib.sha256((source + " ".join((*KERNEL_CXX_FLAGS, *extra))).encode()).hexdigest()[:20]
    )
    library = stem.with_suffix(".so")
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as own:  # others may build the same
            text, made = Path(own) / "unit.cpp", Path(own) / "unit.so"
            text.write_text(source)
            command = ["g++", *KERNEL_CXX_FLAGS, *extra, str(text), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, f"{done.stderr[:3000]}\n{source}"
            made.replace(library)
    return ctypes.CDLL(str(library))


class Runner:
    """One compiled kernel; call it with its tensors by name and sizes by symbol."""

    def __init__(self, k: Kernel, machine: Machine = MACHINE) -> None:
        self.cpp: CppKernel = write_kernel(Task(k, machine), Context(Options(verify=True)))
        self.source = translation_unit([self.cpp])
        self.library = build(self.source)
        self.function = getattr(self.library, f"cpp_{k.name}")

    def pack(
        self, tensors: Mapping[str, torch.Tensor], sizes: Mapping[Sym, int] | None = None
    ) -> tuple[object, object]:
        ptrs = (ctypes.c_void_p * max(1, len(self.cpp.args)))(
            *[tensors[n].data_ptr() for _, n in self.cpp.args]
        )
        values = (ctypes.c_longlong * max(1, len(self.cpp.sizes)))(
            *[(sizes or {})[s] for s in self.cpp.sizes]
        )
        return ptrs, values

    def __call__(
        self, tensors: Mapping[str, torch.Tensor], sizes: Mapping[Sym, int] | None = None
    ) -> None:
        self.function(*self.pack(tensors, sizes))


def run(
    nests: Sequence[Nest] | Nest,
    tensors: Mapping[str, torch.Tensor],
    outputs: Sequence[str],
    machine: Machine = MACHINE,
    reads: Sequence[str] | None = None,
) -> Runner:
    """Compiles and runs; tensors named in `outputs` are written."""
    nests = [nests] if isinstance(nests, Nest) else list(nests)
    all_reads = [n for n in tensors if n not in outputs] if reads is None else reads
    k = kernel(
        nests, {n: layout(tensors[n]) for n in all_reads}, {n: layout(tensors[n]) for n in outputs}
    )
    r = Runner(k, machine)
    r(tensors)
    return r


SERIAL = Machine(threads=1, l2_bytes=1 << 20)


def ax(name: str, n: IndexLike) -> Axis:
    return Axis(name, n)


def ld(name: str, *axes: Axis | IndexLike, dtype: str = "f32") -> Expr:
    return load(name, tuple(a.index if isinstance(a, Axis) else as_index(a) for a in axes), dtype)


def ref(name: str, dtype: str = "f32") -> Expr:
    return load(name, (), dtype)


def idx(*axes: Axis) -> tuple:
    return tuple(a.index for a in axes)


def lit(x: object, d: str = "f32") -> Expr:
    return literal(x, d)


def softmax_nest(p: tuple[Axis, ...], r: Axis, *where: Axis) -> Nest:
    x = ld("x", *where)
    e = op("exp", op("sub", x, ref("m")))
    return Nest(
        p,
        (r,),
        (
            Reduce("m", "max", x),
            Reduce("s", "sum", e),
            Store("y", idx(*where), op("div", e, ref("s")), "point"),
        ),
    )


def layer_norm_nest(p: Axis, r: Axis, n: int) -> Nest:
    x = ld("x", p, r)
    mean = op("mul", ref("s"), lit(1.0 / n))
    d = op("sub", x, mean)
    rstd = op("rsqrt", op("add", op("mul", ref("q"), lit(1.0 / n)), lit(1e-5)))
    y = op("add", op("mul", op("mul", d, rstd), ld("w", r)), ld("b", r))
    return Nest(
        (p,),
        (r,),
        (
            Reduce("s", "sum", x),
            Reduce("q", "sum", op("mul", d, d)),
            Store("mean", idx(p), mean, "row"),
            Store("rstd", idx(p), rstd, "row"),
            Store("y", idx(p, r), y, "point"),
        ),
    )


def sum_nest(shape: tuple[int, int], dim: int, kind: str = "sum") -> Nest:
    a, b = ax("i", shape[0]), ax("j", shape[1])
    p, r = (b, a) if dim == 0 else (a, b)
    dtype = "i64" if kind.startswith("arg") else "f32"
    reduction = Reduce("f", kind, ld("x", a, b))
    return Nest((p,), (r,), (reduction, Store("y", idx(p), ref("f", dtype), "row")))
