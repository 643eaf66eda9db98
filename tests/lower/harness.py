"""Lowers small traced graphs and compares the reference executor's results with eager's.

`lowered` is the smallest driver that lowering functions need: placeholders become inputs, a result
that is not a view becomes a tensor, and what a lowering declines is a failure unless expected.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import deuteron.lower.factories
import deuteron.lower.indexing
import deuteron.lower.nn
import deuteron.lower.pointwise
import deuteron.lower.pooling
import deuteron.lower.reductions
import deuteron.lower.views  # noqa: F401
from deuteron.base.record import Record
from deuteron.capture.decompositions import table
from deuteron.graph import ops
from deuteron.ir.expr import Expr
from deuteron.ir.index import Index, atom
from deuteron.ir.index import Value as Loaded
from deuteron.ir.program import Input, Output, Program
from deuteron.ir.reference import run_program
from deuteron.ir.verify import verify_program
from deuteron.lower.core import (
    LOWERINGS,
    Declined,
    LowerContext,
    Value,
    supported,
    whole_tensor,
)
from deuteron.lower.symfloats import number_value

# Lowered directly although torch knows a decomposition, whose indices would come from memory.
WHOLE = frozenset(
    f"aten.{n}"
    for n in (
        "max_pool2d_with_indices_backward",
        "_adaptive_avg_pool2d",
        "index_select",
        "roll",
        *(f"{p}_pad{d}d" for p in ("reflection", "replication") for d in (1, 2, 3)),
        *(f"{u}{d}d" for u in ("upsample_nearest", "_upsample_nearest_exact") for d in (1, 2, 3)),
    )
)


@dataclass
class Lowered:
    program: Program
    graph: fx.GraphModule
    values: dict[str, Any]

    def run(self, *inputs: Any) -> list[Any]:
        return run_program(self.program, list(inputs))


def trace(f: Callable[..., Any], args: Sequence[Any], dynamic: bool = False) -> fx.GraphModule:
    mode = "symbolic" if dynamic else "fake"
    rules = {t: r for t, r in table().items() if ops.packet(t) not in WHOLE}
    gm = make_fx(torch.func.functionalize(f), decomposition_table=rules, tracing_mode=mode)(*args)
    if any(ops.is_mutating(n) for n in gm.graph.nodes):  # decompositions that write in place
        gm = make_fx(torch.func.functionalize(gm), decomposition_table=rules, tracing_mode=mode)(
            *args
        )
    gm.graph.eliminate_dead_code()
    return gm


def is_view(e: Expr) -> bool:
    if e.op not in ("load", "literal", "index"):
        return False
    return not any(isinstance(a, Loaded) for i in e.indices() for a in i.atoms())


def find(target: Any) -> Callable[..., Any] | None:
    name = str(target)
    return LOWERINGS.get(name) or LOWERINGS.get(name.rsplit(".", 1)[0])


def lowered(gm: fx.GraphModule, products: str | None = None) -> Lowered:
    """`products`: "generated", or None where the library multiplies all matrices."""
    ctx = LowerContext(Record(), "cpu", choose_contraction=lambda *_: products)
    sizes: list[Any] = []
    position = 0
    outputs: list[Output] = []
    for node in gm.graph.nodes:
        ctx.node = node
        val = node.meta.get("val")
        if node.op == "placeholder":
            if isinstance(val, torch.Tensor):
                name = ctx.fresh_name(node.name)
                layout = ctx.layout_of(val)
                ctx.add(Input(name, layout, position))
                ctx.env[node] = ctx.load(name)
                for kind, parts in (("shape", layout.shape), ("stride", layout.strides)):
                    for d, n in enumerate(parts):
                        for s in n.syms():
                            if n is atom(s) and s not in [k for k, _ in sizes]:
                                sizes.append((s, (kind, position, d)))
            else:
                ctx.env[node] = ctx.size(val)
                for s in ctx.env[node].syms():
                    if s not in [k for k, _ in sizes]:
                        sizes.append((s, ("int", position, 0)))
            position += 1
        elif node.op == "get_attr":
            ctx.env[node] = _constant(ctx, gm, node)
        elif node.op == "call_function":
            ctx.env[node] = call(ctx, node)
        elif node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (tuple, list)) else [node.args[0]]
            for r in results:
                outputs.append(output(ctx, r))
    program = Program(
        tuple(ctx.defs), tuple(outputs), tuple(sizes), dict(ctx.constants), {}, position
    )
    verify_program(program, "lowering")
    return Lowered(program, gm, {n.name: v for n, v in ctx.env.items()})


def _constant(ctx: LowerContext, gm: fx.GraphModule, node: fx.Node) -> Value:
    from deuteron.ir.program import Constant

    tensor = getattr(gm, str(node.target))
    name = ctx.fresh_name(node.name)
    ctx.constants[name] = tensor
    ctx.add(Constant(name, ctx.layout_of(tensor), name))
    return ctx.load(name)


def call(ctx: LowerContext, node: fx.Node) -> Any:
    val = node.meta.get("val")

    def value(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return ctx.env[x]
        if isinstance(x, (list, tuple)):
            return type(x)(value(y) for y in x)
        return x

    args, kwargs = value(node.args), value(node.kwargs if not node.kwargs else dict(node.kwargs))
    kwargs = {k: value(v) for k, v in node.kwargs.items()}
    if node.target.__name__ == "getitem":
        return args[0][args[1]]
    if isinstance(val, (torch.SymInt, int)):
        return ctx.size(val)
    if isinstance(val, torch.SymFloat):
        return number_value(ctx, val)
    f = find(node.target)
    if not all(supported(v) for v in tensors(val)):
        raise Declined("a type that the loop IR does not hold")
    if f is None:
        raise Declined(f"no lowering for {node.target}")
    out = f(ctx, *args, **kwargs)
    if isinstance(out, tuple):
        return tuple(settle(ctx, v, f) for v, f in zip(out, val))
    return settle(ctx, out, val)


def settle(ctx: LowerContext, v: Any, fake: torch.Tensor) -> Any:
    if v is None:
        return None
    assert isinstance(v, Value)
    shape = ctx.shape_of(fake)
    assert v.shape == shape, f"{ctx.node}: lowered to {v.shape}, traced as {shape}"
    from deuteron.lower.core import TORCH_DTYPES

    assert v.dtype == TORCH_DTYPES[fake.dtype], f"{ctx.node}: {v.dtype} for {fake.dtype}"
    return v if is_view(v.expr) else ctx.define(v, ctx.dense_layout(fake))


def output(ctx: LowerContext, r: Any) -> Output:
    if r is None:
        return Output(None)
    v = ctx.env[r]
    if isinstance(v, Index):
        return Output(None, value=v)
    name = whole_tensor(v) or ctx.define(v).expr.attr[0]
    if ctx.layouts[name].shape != v.shape:  # the first part of a tensor
        name = ctx.define(v).expr.attr[0]
    layout = ctx.layouts[name]
    return Output(name, layout.shape, layout.strides)


# -- comparisons -----------------------------------------------------------------------------------
def tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [t for y in x for t in tensors(y)]
    return []


def check(
    f: Callable[..., Any],
    *args: Any,
    dynamic: bool = False,
    others: Sequence[Sequence[Any]] = (),
    rtol: float | None = None,
    atol: float | None = None,
) -> Lowered:
    """`f` lowers completely, and gives eager's values: on `args`, and on `others` with the same
    graph."""

    def listed(*xs: Any) -> Any:
        out = f(*xs)
        return tensors(out) if isinstance(out, (list, tuple)) else [out]

    gm = trace(listed, args, dynamic)
    low = lowered(gm)
    for inputs in (args, *others):
        expected = listed(*clones(inputs))
        got = low.run(*clones(inputs))
        assert len(got) == len(expected)
        for g, e in zip(got, expected, strict=True):
            same(g, e, rtol, atol)
    return low


def check_half(f: Callable[..., Any], *args: Any) -> Lowered:
    """As `check`, for half types: the error against f64 is at most twice eager's (plus one
    rounding of the result)."""

    def listed(*xs: Any) -> Any:
        return tensors([f(*xs)])

    low = lowered(trace(listed, args))
    wide = [
        a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
    ]
    exact, eager, got = listed(*wide), listed(*clones(args)), low.run(*clones(args))
    for g, e, x in zip(got, eager, exact, strict=True):
        no_worse(g, e, x)
    return low


def no_worse(g: torch.Tensor, e: torch.Tensor, exact: torch.Tensor) -> None:
    """`g` is `e`, or about as near to the exact value as `e`."""
    assert (g.shape, g.dtype) == (e.shape, e.dtype), f"{g.shape} {g.dtype}, {e.shape} {e.dtype}"
    if not e.is_floating_point() or e.numel() == 0:
        assert torch.equal(g, e)
        return
    known = exact.isfinite() & e.isfinite()
    assert torch.equal(g[~known], e[~known]) or bool(g[~known].isnan().any())
    if not known.any():
        return
    x, e, g = exact[known].double(), e[known], g[known]
    bound = 2 * (e.double() - x).abs().max() + x.abs().max() * torch.finfo(e.dtype).eps + 1e-6
    assert (g.double() - x).abs().max() <= bound


def clones(xs: Sequence[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in xs]


def same(g: Any, e: Any, rtol: float | None, atol: float | None) -> None:
    if not isinstance(e, torch.Tensor):
        assert g == e
        return
    assert (g.shape, g.dtype) == (e.shape, e.dtype), f"{g.shape} {g.dtype}, {e.shape} {e.dtype}"
    given = {} if rtol is None else dict(rtol=rtol, atol=atol if atol is not None else rtol)
    torch.testing.assert_close(g, e, equal_nan=True, **given)


def declines(f: Callable[..., Any], *args: Any) -> str:
    """The reason for which `f` is not lowered."""
    try:
        lowered(trace(f, args))
    except Declined as d:
        return d.reason
    raise AssertionError(f"{inspect.getsource(f)} lowers")
