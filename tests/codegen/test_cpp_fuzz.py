"""Random nests: generated C++ against the reference executor of kernels.

Each seed makes kernels of random axes, layouts (permuted, padded, reversed, reshaped), reductions
that depend on each other, masks, scans, gathers and stores; all kernels of a seed are one
translation unit.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace

import pytest
import torch

from deuteron.base.options import Options
from deuteron.base.passes import Context
from deuteron.codegen.cpp import Machine, Task, translation_unit, write_kernel
from deuteron.ir.expr import Expr, as_position, cast, index_value, literal, load, op
from deuteron.ir.index import Axis, Index, Sym, as_index, atom
from deuteron.ir.program import Layout
from deuteron.schedule.kernel import Kernel, Nest, Reduce, Scan, Store
from deuteron.schedule.reference import run_kernel
from tests.codegen.cpp_tools import build, kernel

DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "bool": torch.bool,
    "i32": torch.int32,
}
SEEDS = range(3)  # groups of 16 kernels


class Maker:
    """Makes one random kernel with its tensors."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.seed = seed
        self.tensors: dict[str, torch.Tensor] = {}
        self.layouts: dict[str, Layout] = {}
        self.writes: dict[str, Layout] = {}
        self.sizes: dict[Sym, int] = {}
        self.count = 0
        torch.manual_seed(seed)

    def axis(self, name: str) -> Axis:
        n = self.r.choice([1, 2, 3, 5, 8, 12, 16, 17, 33, 64, 70, 130])
        if self.r.random() < 0.2:
            s = Sym(f"s{len(self.sizes)}", 0, 50)
            self.sizes[s] = n
            return Axis(name, atom(s))
        return Axis(name, n)

    def extent(self, a: Axis) -> int:
        value = a.extent.value
        return value if value is not None else self.sizes[next(iter(a.extent.syms()))]

    def tensor(self, shape: list[Index], dtype: str, write: bool = False) -> str:
        """A tensor whose memory is a random permutation of its dimensions, perhaps padded."""
        name = f"{'out' if write else 'in'}{self.count}"
        self.count += 1
        real = [self.real(n) for n in shape]
        order = list(range(len(shape)))
        if self.r.random() < 0.5:
            self.r.shuffle(order)
        strides: list[Index] = [as_index(1)] * len(shape)
        step, real_step, real_strides = as_index(1), 1, [1] * len(shape)
        for d in reversed(order):
            strides[d], real_strides[d] = step, real_step
            pad = self.r.choice([0, 0, 0, 3])
            step, real_step = step * (shape[d] + pad), real_step * (real[d] + pad)
        lay = Layout(tuple(shape), tuple(strides), dtype)
        size = max(1, real_step)
        if dtype == "bool":
            data = torch.rand(size) < 0.5
        elif dtype in ("i64", "i32"):
            data = torch.randint(-5, 6, (size,), dtype=DTYPES[dtype])
        else:
            data = torch.randn(size, dtype=torch.float64).to(DTYPES[dtype])
        self.tensors[name] = data.as_strided(real, real_strides)
        (self.writes if write else self.layouts)[name] = lay
        return name

    def real(self, n: Index) -> int:
        return eval_size(n, {s.name: v for s, v in self.sizes.items()})

    def load(self, axes: list[Axis]) -> Expr:
        """A load over some of the axes, as f32."""
        some = [a for a in axes if self.r.random() < 0.75]
        self.r.shuffle(some)
        shape, idx = [], []
        for a in some:
            n = a.extent
            kind = self.r.random()
            if kind < 0.1:
                shape.append(n)
                idx.append(n - 1 - a.index)
            elif kind < 0.2 and n.value is not None and n.value % 2 == 0:
                shape += [as_index(n.value // 2), as_index(2)]
                idx += [a.index // 2, a.index % 2]
            elif kind < 0.3:
                shape.append(n + 2)
                idx.append(a.index + 1)
            elif kind < 0.35:
                shape.append(n * 2)
                idx.append(a.index * 2)
            else:
                shape.append(n)
                idx.append(a.index)
        dtype = self.r.choice(["f32", "f32", "f32", "f64", "bf16", "i64", "bool"])
        name = self.tensor(shape, dtype)
        mask = None
        if some and self.r.random() < 0.2:
            a = self.r.choice(some)
            edge = self.r.randint(0, self.extent(a))
            mask = op(self.r.choice(["lt", "ge"]), index_value(a.index), literal(edge, "i64"))
        return cast(load(name, tuple(idx), dtype, mask, 1), "f32")

    def gather(self, axes: list[Axis]) -> Expr:
        if not axes:
            return literal(0.5, "f32")
        a = self.r.choice(axes)
        where = self.tensor([a.extent], "i64")
        self.tensors[where].abs_()
        table = self.tensor([as_index(6)], "f32")
        at = as_position(load(where, (a.index,), "i64"))
        return load(table, (at,), "f32")

    def expr(self, axes: list[Axis], known: list[Expr], depth: int) -> Expr:
        choice = self.r.random()
        if depth == 0 or choice < 0.15:
            kind = self.r.random()
            if known and kind < 0.4:
                return self.r.choice(known)
            if kind < 0.5:
                return self.gather(axes)
            if kind < 0.6 and axes:
                return cast(index_value(self.r.choice(axes).index), "f32")
            return self.load(axes)
        if choice < 0.3:
            inner = self.expr(axes, known, depth - 1)
            return op(self.r.choice(["sigmoid", "neg", "abs", "tanh"]), inner)
        a, b = (self.expr(axes, known, depth - 1) for _ in range(2))
        if choice < 0.4:
            return op("where", op("lt", a, b), op("sigmoid", a), b)
        if choice < 0.5:
            return op("sub", op("sigmoid", a), op("sigmoid", b))
        return op(self.r.choice(["add", "mul", "maximum", "minimum"]), a, op("tanh", b))

    def bounded(self, axes: list[Axis], known: list[Expr]) -> Expr:
        return op("tanh", self.expr(axes, known, 2))

    def nest(self) -> Nest:
        axes = [self.axis(f"x{i}") for i in range(self.r.randint(1, 4))]
        cut = self.r.randint(0, min(2, len(axes)))
        reduced, parallel = axes[:cut], axes[cut:]
        self.r.shuffle(axes)
        known: list[Expr] = []
        points: list[Expr] = []
        stmts: list[Reduce | Scan | Store] = []
        scanned = len(reduced) == 1 and self.r.random() < 0.2
        for k in range(self.r.randint(1, 3) if reduced else 0):
            kind = self.r.choice(["sum", "sum", "max", "min", "prod", "any", "argmax", "argmin"])
            if kind.startswith("arg") and len(reduced) > 1:
                kind = "max"
            body = self.bounded(axes, known + points)
            if kind.startswith("arg"):
                body = op("round", op("mul", body, literal(3.0, "f32")))
            if kind == "any":
                body = op("gt", body, literal(0.9, "f32"))
            if kind == "prod":
                body = op("add", literal(1.0, "f32"), op("mul", body, literal(0.001, "f32")))
            stmts.append(Reduce(f"f{k}", kind, body))
            dtype = "i64" if kind.startswith("arg") else body.dtype
            value = load(f"f{k}", (), dtype)
            known.append(cast(value, "f32"))
            if scanned and k == 0:
                stmts.append(Scan("c", self.r.choice(["sum", "max"]), self.bounded(axes, known)))
                points.append(load("c", (), "f32"))
        stmts += self.stores(axes, parallel, reduced, known, points)
        return Nest(tuple(parallel), tuple(reduced), tuple(stmts))

    def stores(
        self,
        axes: list[Axis],
        parallel: list[Axis],
        reduced: list[Axis],
        known: list[Expr],
        points: list[Expr],
    ) -> list[Store]:
        out = []
        for level in ["row"] * bool(reduced) + ["point"] * self.r.randint(not reduced, 2):
            over = parallel if level == "row" else axes
            value = self.expr(over, known + (points if level == "point" else []), 2)
            dtype = self.r.choice(["f32", "f32", "bf16", "f64"])
            index = [a.index for a in over]
            shape = [a.extent for a in over]
            mask, accumulate = None, None
            if over and self.r.random() < 0.15:
                mask = op("lt", self.bounded(over, []), literal(0.1, "f32"))
            if over and self.r.random() < 0.25:
                accumulate = self.r.choice(["sum", "max", "min"])
                dtype = "f64" if accumulate == "sum" else dtype
                if self.r.random() < 0.6:  # scatter along one axis, perhaps onto the same element
                    a = self.r.choice(over)
                    where = self.tensor([a.extent], "i64")
                    self.tensors[where].abs_()
                    k = over.index(a)
                    index[k] = as_position(load(where, (a.index,), "i64"))
                    shape[k] = as_index(6)
            name = self.tensor(shape, dtype, write=True)
            out.append(Store(name, tuple(index), cast(value, dtype), level, accumulate, mask))
        return out

    def split_nest(self) -> Nest:
        """Row results, and cross-row reductions over chunks of the rows."""
        i, j = self.axis("i"), self.axis("j")
        k = self.axis("k") if self.r.random() < 0.3 else None
        axes, reduced = [i, j] + ([k] if k else []), [j] + ([k] if k else [])
        count = self.r.choice([1, 3, 4])
        stmts: list[Reduce | Scan | Store] = [Reduce("f", "sum", self.bounded(axes, []))]
        known = [load("f", (), "f32")]
        for kind in self.r.sample(["sum", "max", "min"], 2):
            name = self.tensor([as_index(count), *(a.extent for a in reduced)], "f32", write=True)
            stmts.append(Reduce(name, kind, self.bounded(axes, known), True))
        stmts += self.stores(axes, [i], reduced, known, [])
        # A split's cross-row reductions need its rows in one place: no scatter along the rows.
        keep = [s for s in stmts if not isinstance(s, Store) or s.accumulate is None]
        self.writes = {n: lay for n, lay in self.writes.items() if self.used(n, keep)}
        return Nest((i,), tuple(reduced), tuple(keep), (i, count))

    def used(self, name: str, stmts: list[Reduce | Scan | Store]) -> bool:
        return any((s.tensor if isinstance(s, Store) else s.name) == name for s in stmts)

    def kernel(self) -> Kernel:
        if self.r.random() < 0.15:
            nests = [self.split_nest()]
        else:
            nests = [self.nest() for _ in range(self.r.choice([1, 1, 2]))]
        return replace(kernel(nests, self.layouts, self.writes), name=f"k{self.seed}")


def eval_size(n: Index, env: dict[str, int]) -> int:
    from deuteron.ir.index import evaluate

    return evaluate(n, env)


@pytest.mark.parametrize("group", SEEDS)
@pytest.mark.parametrize("threads,nontemporal", [(1, False), (2, False), (2, True)])
def test_random_kernels(
    group: int, threads: int, nontemporal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nontemporal`: with every store non-temporal that can be."""
    if threads > 1:  # share among threads whatever can be shared, however small
        monkeypatch.setattr("deuteron.codegen.cpp.kernels.PARALLEL_US", -1.0)
        monkeypatch.setattr("deuteron.codegen.cpp.row_nests.MIN_SPLIT_OPS", 16)
        monkeypatch.setattr("deuteron.codegen.cpp.columns.MIN_SPLIT_OPS", 16)
    if nontemporal:
        monkeypatch.setattr("deuteron.codegen.cpp.nontemporal.MIN_ROW_LINES", 0)
    machine = Machine(threads, 1 << 20, int(nontemporal))
    made = [(m, m.kernel()) for m in (Maker(1000 * group + i) for i in range(16))]
    cpps = [write_kernel(Task(k, machine), Context(Options(verify=True))) for _, k in made]
    assert any("d_nontemporal" in c.source for c in cpps) == nontemporal
    library = build(translation_unit(cpps))
    for (m, k), cpp in zip(made, cpps, strict=True):
        want = {n: t.clone() if n in m.writes else t for n, t in m.tensors.items()}
        for n in m.writes:
            base = m.tensors[n]
            want[n] = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype).copy_(base)
        run_kernel(k, want, {s.name: v for s, v in m.sizes.items()})
        ptrs = (ctypes.c_void_p * len(cpp.args))(*[m.tensors[n].data_ptr() for _, n in cpp.args])
        sizes = (ctypes.c_longlong * max(1, len(cpp.sizes)))(*[m.sizes[s] for s in cpp.sizes])
        getattr(library, f"cpp_{k.name}")(ptrs, sizes)
        for n in m.writes:
            tolerance = 2e-2 if m.tensors[n].dtype == torch.bfloat16 else 2e-4
            torch.testing.assert_close(
                m.tensors[n],
                want[n],
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
                msg=lambda s, k=k, n=n, cpp=cpp: f"{k.name} {n}\n{s}\n{cpp.source}",
            )
