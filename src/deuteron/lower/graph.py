"""The driver of lowering: an FX graph, node by node, becomes a `Program`.

In: a functional FX graph with fake tensors in ``meta["val"]``, as AOTAutograd and `graph.rewrite`
leave it. Out: a `Program`. A call becomes what its `lowering` makes of it, or, where there is none,
where it declines, or where a tensor is of a kind that the loop IR does not hold, a library call
with the reason in the Record. Views stay values; everything else is a tensor of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

import deuteron.lower.factories
import deuteron.lower.indexing
import deuteron.lower.nn
import deuteron.lower.pointwise
import deuteron.lower.pooling
import deuteron.lower.reductions
import deuteron.lower.views  # noqa: F401
from deuteron.base.errors import DeuteronError, UnsupportedOp
from deuteron.base.passes import Context
from deuteron.graph import ops
from deuteron.graph.aliasing import exposed
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Index, Sym, as_index, const
from deuteron.ir.index import Value as Loaded
from deuteron.ir.operations import FLOAT8
from deuteron.ir.program import (
    Compute,
    Constant,
    Extern,
    Given,
    Input,
    Output,
    Program,
    ViewArg,
)
from deuteron.lower import assertions, calls, numbers
from deuteron.lower.access import nothing
from deuteron.lower.contractions import choose_contraction
from deuteron.lower.core import (
    LOWERINGS,
    TORCH_DTYPES,
    Declined,
    LibraryMultiplies,
    LowerContext,
    Opaque,
    Value,
    flat_values,
    make,
    source_line,
    supported,
    whole_tensor,
)
from deuteron.lower.held import (
    as_index_of,
    digest,
    elements_are_distinct,
    kind_text,
    leaves,
    makes_tensors,
    terms,
)
from deuteron.lower.pointwise import WITH_NUMBERS, broadcast, converted, scalar
from deuteron.lower.products import keep_product
from deuteron.lower.quantized import quantized
from deuteron.lower.symfloats import element, in_memory, number_value

ASSERTIONS = ("aten._assert_scalar", "aten.sym_constrain_range", "aten._assert_tensor_metadata")


class Driver:
    def __init__(self, gm: fx.GraphModule, context: Context) -> None:
        self.gm = gm
        self.ctx = LowerContext(
            context.record,
            choose_contraction=partial(contraction, context),
            like=context.like,
            specs=context.spec,
        )
        self.sizes: dict[Sym, tuple[str, Any, int]] = {}
        self.position = 0
        self.outputs: list[Output] = []
        self.returned: dict[str, Any] = {}  # tensor -> the storage that it was returned as
        self.givers: dict[Output, Any] = {}  # result -> the first node that gave it
        self.exposed: set[Any] = set()  # storages that are one tensor in memory, as traced
        self.nodes: dict[str, str] = {}  # see `Program.nodes`

    def run(self) -> Program:
        self.exposed = {calls.storage(n.meta["val"]) for n in exposed(self.gm.graph)}
        given = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        for node in self.gm.graph.nodes:
            self.ctx.node = node
            try:
                self.node(node)
                if given and node is given[-1]:
                    self.solve(given)
            except Declined as d:
                raise self.unsupported(node, d.reason) from None
            except DeuteronError:
                raise
            except Exception as e:
                raise UnsupportedOp(
                    f"the compiler failed to lower {node.target}: {type(e).__name__}: {e}",
                    hint='please report it; options={"fallback": "aten"} runs the graph as traced',
                    where=source_line(node),
                    op=str(node.target),
                ) from e
        ctx = self.ctx
        for sym, source in ctx.symbols.computed.values():
            self.sizes.setdefault(sym, ("expr", source, 0))
        for sym, (name, dim) in ctx.sized.items():
            self.sizes.setdefault(sym, ("result", name, dim))
        calls_made = [d for d in ctx.defs if isinstance(d, Extern)]
        called = {s.name for d in calls_made for s in d.sizes if s is not None}
        return Program(
            tuple(ctx.defs),
            tuple(self.outputs),
            tuple(self.sizes.items()),
            dict(ctx.constants),
            dict(ctx.callables),
            self.position,
            self.nodes,
            assertions.checks(ctx, {s.name for s in self.sizes} | called),
        )

    def unsupported(self, node: fx.Node, reason: str) -> UnsupportedOp:
        return UnsupportedOp(
            f"{node.target} can be neither generated nor called: {reason}",
            hint='options={"fallback": "aten"} runs the whole graph as traced',
            where=source_line(node),
            op=str(node.target),
        )

    def node(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.ctx.env[node] = self.placeholder(node)
            self.position += 1
        elif node.op == "get_attr":
            self.ctx.env[node] = self.attribute(node)
        elif node.op == "call_function":
            if quantized(node, self.ctx.quantized):
                self.ctx.quantized.add(node)
            self.ctx.env[node] = made = self.call(node)
            self.note(node, made)
        elif node.op == "output":
            results = node.args[0]
            for r in results if isinstance(results, (tuple, list)) else [results]:
                self.outputs.append(self.distinct(r, self.output(r)))
        else:
            raise self.unsupported(node, f"FX nodes of kind {node.op!r}")

    def note(self, node: fx.Node, made: Any) -> None:
        """Which tensor a node of the traced graph is, where that has the traced strides."""
        traced, val = node.meta.get("traced"), node.meta.get("val")
        name = whole_tensor(made) if isinstance(made, Value) else None
        if traced is None or name is None or name in self.nodes:
            return
        if isinstance(val, torch.Tensor):
            lay, ctx = self.ctx.layouts[name], self.ctx
            strides = ctx.strides_of(val)
            if lay.shape == ctx.shape_of(val) and lay.strides == strides:
                self.nodes[name] = traced

    # -- what the graph is given ------------------------------------------------------------------
    def solve(self, given: list[fx.Node]) -> None:
        """Sizes that inputs tell only as parts of sums and products."""
        for position, node in enumerate(given):
            val = node.meta.get("val")
            if isinstance(val, torch.Tensor):
                for whole, d in assertions.solved(self.ctx, node, list(val.shape)):
                    self.sizes[whole] = ("shape", position, d)

    def placeholder(self, node: fx.Node) -> Any:
        ctx, val = self.ctx, node.meta.get("val")
        if isinstance(val, torch.Tensor):
            name = ctx.fresh_name(node.name)
            layout = ctx.layout_of(val)
            ctx.storages[name] = calls.storage(val)
            ctx.add(Input(name, layout, self.position))
            self.givers[Output(name, layout.shape, layout.strides)] = node
            for kind, parts in (("shape", layout.shape), ("stride", layout.strides)):
                for d, n in enumerate(parts):
                    (sym, *more) = n.syms() or (None,)
                    if sym is not None and not more and n is as_index_of(sym):
                        self.sizes.setdefault(sym, (kind, self.position, d))
                        assertions.sourced(ctx, sym.name)
            for d, n in enumerate(val.shape):
                own = ("shape", self.position, d) in (self.sizes.get(s) for s in ctx.size(n).syms())
                raw = assertions.given(ctx, node, n, own, d)
                if raw is not None:
                    self.sizes[Sym(raw, 0)] = ("shape", self.position, d)
            return ctx.load(name)
        if isinstance(val, (torch.SymInt, int)) and not isinstance(val, bool):
            size = ctx.size(val)
            for sym in size.syms():
                if size is as_index_of(sym):
                    self.sizes[sym] = ("int", self.position, 0)
                    assertions.sourced(ctx, sym.name)
            own = any(size is as_index_of(s) for s in size.syms())
            raw = assertions.given(ctx, node, val, own)
            if raw is not None:
                ctx.number_text[node] = raw
                self.sizes[Sym(raw, 0)] = ("int", self.position, 0)
            return size
        if val is None:
            return None
        if calls.is_object(val):
            return Given(self.position)
        raise self.unsupported(node, f"an argument of type {type(val).__name__}")

    def attribute(self, node: fx.Node) -> Any:
        ctx = self.ctx
        held: Any = self.gm
        for part in str(node.target).split("."):
            held = getattr(held, part)
        if not isinstance(held, torch.Tensor):
            key = ctx.fresh_name(node.name)
            ctx.callables[key] = held
            return Opaque(key)
        fake = node.meta.get("val", held)
        if supported(held) and held.numel() == 1 and held.device.type == "cpu":
            with torch.utils._python_dispatch._disable_current_modes():  # a real tensor
                value = held.item()
            number = E.literal(value, TORCH_DTYPES[held.dtype])
            return make(ctx, ctx.shape_of(fake), lambda idx: number)
        name = ctx.fresh_name(node.name)
        ctx.constants[name] = held
        with torch.utils._python_dispatch._disable_current_modes():
            ctx.add(Constant(name, ctx.layout_of(fake), digest(held)))
        return ctx.load(name)

    # -- calls ------------------------------------------------------------------------------------
    def call(self, node: fx.Node) -> Any:
        ctx, val = self.ctx, node.meta.get("val")
        args = tuple(self.value(a) for a in node.args)
        kwargs = {k: self.value(v) for k, v in node.kwargs.items()}
        if node.target is operator.getitem:
            return args[0][args[1]]
        name = str(node.target)
        if name.startswith(ASSERTIONS):
            assertions.asserted(ctx, node)
            return None
        if not isinstance(node.target, torch._ops.OpOverload) and isinstance(
            val, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
        ):
            return self.number(val, node)
        if name.startswith("aten.sym_") and isinstance(val, (torch.SymInt, int)):
            return ctx.size(val)
        reason = self.obstacle(node, val)
        if reason is None and name == "aten._local_scalar_dense.default":
            constant = element(ctx, args[0], val)
            if constant is not None:
                return constant
        if node.meta.get("unbacked_bindings") and leaves(val):
            reason = reason or "the result's size is known only at run time"
        f = LOWERINGS.get(name) or LOWERINGS.get(name.rsplit(".", 1)[0])
        if name == "aten.copy_.default":
            f = nothing_at_all  # `copied` knows the target
        if reason is None and f is None:
            reason = f"{name} is not generated"
        if reason is None and f is not None:
            mark = len(ctx.defs)
            try:
                given = self.moved(node, self.numbers_as_tensors(node, args))
                return self.lowered(node, f, given, kwargs, val)
            except (Declined, E.WrongDtype) as d:
                del ctx.defs[mark:]
                reason = str(d)  # of a wrong dtype: eager's call says what it says in eager
                if isinstance(d, LibraryMultiplies):
                    return keep_product(ctx, f, (node, args, kwargs, reason), given)
        assert reason is not None
        if name == "aten.copy_.default":
            reason = f"copy into an input: {reason}"
        return calls.emit(ctx, node, args, kwargs, reason)

    def value(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            return self.ctx.env[x]
        if isinstance(x, (list, tuple)):
            return (
                type(x)(self.value(y) for y in x)
                if type(x) in (list, tuple)
                else [self.value(y) for y in x]
            )
        if isinstance(x, dict):
            return {k: self.value(v) for k, v in x.items()}
        if isinstance(x, slice):
            return slice(self.value(x.start), self.value(x.stop), self.value(x.step))
        return x

    def number(self, val: Any, node: fx.Node) -> Any:
        """A size, or a number made of sizes and elements."""
        if isinstance(val, (torch.SymInt, int)) and not isinstance(val, bool):
            return self.ctx.size(val)
        if isinstance(val, (torch.SymFloat, torch.SymBool)):
            return number_value(self.ctx, val, node)
        return val

    def obstacle(self, node: fx.Node, val: Any) -> str | None:
        """Why the loop IR cannot hold a tensor of this call."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return f"{node.target} is a function of its own"
        devices = set()
        if not self.ctx.quantized.isdisjoint((node, *node.all_input_nodes)):
            return "quantized tensors are not generated"
        for n in node.all_input_nodes:
            fake = n.meta.get("val")
            for t in leaves(fake):
                if not supported(t):
                    return kind_text(t)
                if t.dim():
                    devices.add(str(t.device))
        for t in leaves(val):
            if not supported(t):
                return kind_text(t)
            if terms(self.ctx, t) > MAX_SIZE_TERMS:
                return f"the number of elements is a sum of {terms(self.ctx, t)} products of sizes"
            devices.add(str(t.device))
        return f"tensors on {' and '.join(sorted(devices))}" if len(devices) > 1 else None

    def numbers_as_tensors(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, with numbers in place of tensors (`vmap` and `copy_` trace these) made
        tensors without dimensions. Operators that promote numbers more weakly than tensors
        (`WITH_NUMBERS`) keep them."""
        if ops.packet(node.target) in WITH_NUMBERS:
            return args
        kinds = [str(a.type) for a in node.target._schema.arguments]  # type: ignore[union-attr]

        def tensor(x: Any, kind: str) -> Any:
            if "Tensor" not in kind or not isinstance(x, (bool, int, float, Index)):
                return x
            dtype = "bool" if isinstance(x, bool) else "i64"
            if isinstance(x, float):
                dtype = TORCH_DTYPES[torch.get_default_dtype()]
            return make(self.ctx, (), lambda idx: scalar(x, dtype))

        return tuple(tensor(x, kind) for x, kind in zip(args, kinds, strict=False))

    def moved(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments with single CPU numbers brought to the device of the result."""
        fakes = leaves(node.meta.get("val"))
        if not fakes:
            return args
        device = fakes[0].device

        def move(x: Any, n: Any) -> Any:
            if isinstance(n, fx.Node) and isinstance(x, Value):
                fake = n.meta["val"]
                if isinstance(fake, torch.Tensor):
                    away = fake.device != device and device.type != "cpu"
                else:  # a number that is an element of some tensor
                    away = self.ctx.set_device_of(x) not in (None, str(device))
                if away:
                    return self.to_device(x, device)
            if isinstance(n, (list, tuple)):
                return type(n)(move(a, b) for a, b in zip(x, n, strict=True))
            return x

        return tuple(move(a, n) for a, n in zip(args, node.args, strict=True))

    def to_device(self, x: Value, device: torch.device) -> Value:
        ctx = self.ctx
        number = ctx.hosted.get(whole_tensor(x) or "")
        if number is not None:
            return in_memory(ctx, number, x.dtype, str(device))
        name = ctx.fresh_name("moved")
        layout = ctx.default_layout(x, str(device))
        ctx.add(
            Extern(
                (name,),
                "aten._to_copy.default",
                (ctx.view_arg(x),),
                (("device", device),),
                (layout,),
                origins=ctx.origins(),
                reason="a number on the CPU is used on the device",
            )
        )
        return ctx.load(name)

    def lowered(
        self, node: fx.Node, f: Callable[..., Any], args: Any, kwargs: Any, val: Any
    ) -> Any:
        fakes = leaves(val)
        if fakes:
            self.ctx.device = str(fakes[0].device)
        if str(node.target) == "aten.copy_.default":
            return self.copied(node, args)
        if fakes and all(self.empty(t) for t in fakes) and makes_tensors(node.target):
            f = nothing_at_all
        mark = len(self.ctx.defs)
        out = f(self.ctx, *args, **kwargs)
        given = [t for n in node.all_input_nodes for t in leaves(n.meta.get("val"))]
        if any(TORCH_DTYPES.get(t.dtype) in FLOAT8 for t in (*given, *fakes)):
            self.only_moved([v.expr for v in flat_values(out)], mark)
        if isinstance(out, (tuple, list)):
            return type(out)(self.settle(v, t) for v, t in zip(out, val, strict=True))
        return self.settle(out, val)

    def only_moved(self, roots: list[E.Expr], mark: int) -> None:
        """8-bit floats are moved and converted; what else the library does with them it does."""
        made = [d.body for d in self.ctx.defs[mark:] if isinstance(d, Compute)]
        for n in (n for root in (*roots, *made) for n in root.walk()):
            moves = n.op in ("load", "cast", "literal", "where")
            if not moves and any(x.dtype in FLOAT8 for x in (n, *n.args)):
                raise Declined(f"{n.op} of 8-bit floats")

    def empty(self, fake: torch.Tensor) -> bool:
        return any(n.value == 0 for n in self.ctx.shape_of(fake))

    def copied(self, node: fx.Node, args: Any) -> Value:
        """``aten.copy_`` into an input, or into a strided view of one."""
        ctx, dst, src = self.ctx, args[0], args[1]
        e = dst.expr
        if e.op != "load" or e.args or ctx.strided(dst) is None:
            raise ctx.decline("not a plain view of a tensor")
        old = e.attr[0]
        newest = ctx.renamed.get(old, old)
        memory = ctx.storages.get(newest)
        # Views that the library made of it have names of their own.
        views = {n for n, s in ctx.storages.items() if s == memory and memory is not None}
        self.keep_old(node, {old, newest} | views)
        src = self.value(node.args[1])
        if any(
            n.attr[0] in views - {old, newest}
            or n.attr[0] in (old, newest)
            and n.attr[1] != e.attr[1]
            for n in src.expr.loads()
        ):
            src = ctx.define(src)
        index = e.attr[1]
        body = converted(broadcast(src, [a.index for a in dst.axes]), dst.dtype)
        name = ctx.fresh_name(f"{old}_new")
        plain = index == tuple(a.index for a in dst.axes)
        layout = ctx.layouts[newest]
        ctx.add(
            Compute(
                name,
                dst.axes,
                body,
                layout,
                newest,
                None if plain else index,
                origins=ctx.origins(),
            )
        )
        if newest in ctx.storages:
            ctx.storages[name] = ctx.storages[newest]
        ctx.renamed[old] = name
        ctx.overwritten.update((old, newest, *views))
        at: dict[Any, Any] = {}
        return Value(dst.axes, E.load(name, index, dst.dtype).substitute(at))

    def keep_old(self, node: fx.Node, names: set[str]) -> None:
        """Gives values that still read memory about to be overwritten a tensor of their own."""
        ctx = self.ctx
        later = set()
        n = node.next
        while n.op != "root":
            later.update(n.all_input_nodes)
            n = n.next
        for n in later:
            v = ctx.env.get(n)
            if n is node.args[0] or not isinstance(v, Value):
                continue
            if any(x.attr[0] in names for x in v.expr.loads()) and n.op != "placeholder":
                ctx.env[n] = self.stored_once(v, n.name)

    def stored_once(self, v: Value, name: str) -> Value:
        """A copy of a value, in which what is repeated along a dimension is stored once: a result
        that repeats it has steps of 0."""
        used = v.expr.axes()
        once = [a.index if a in used or a.extent.value == 0 else const(0) for a in v.axes]
        axes = tuple(
            a if i is a.index else Axis(a.name, 1) for a, i in zip(v.axes, once, strict=True)
        )
        return Value(v.axes, self.ctx.define(Value(axes, v.at(once)), wish=name).at(once))

    def settle(self, v: Any, fake: Any) -> Any:
        """A result: a view stays a value, anything else gets a tensor."""
        if v is None or not isinstance(v, Value):
            return v
        ctx = self.ctx
        assert v.shape == ctx.shape_of(fake), f"{ctx.node}: {v.shape}, traced {tuple(fake.shape)}"
        assert v.dtype == TORCH_DTYPES[fake.dtype], f"{ctx.node}: {v.dtype}, traced {fake.dtype}"
        memory = calls.storage(fake) if self.exposed else None
        if is_view(v.expr):
            if memory not in self.exposed:
                return v
            source = ctx.strided(v)
            mine = ctx.storages.get(source.tensor) if source is not None else None
            if mine is not None and mine == memory:
                return v
        if memory not in self.exposed:
            return ctx.define(v, ctx.dense_layout(fake))
        made = self.placed(v, fake)
        ctx.storages[made.expr.attr[0]] = memory
        return made

    def placed(self, v: Value, fake: torch.Tensor) -> Value:
        """`v` in memory with the traced strides, holes included."""
        ctx, layout, wanted = self.ctx, self.ctx.dense_layout(fake), self.ctx.strides_of(fake)
        stored = v
        empty = any(n.value == 0 for n in v.shape)
        if not empty and layout.strides != wanted and elements_are_distinct(v.shape, wanted):
            stored, layout = calls.with_strides(v, layout, wanted)
        made = ctx.define(stored, layout)
        return made if stored is v else make(ctx, v.shape, lambda idx: broadcast(made, idx))

    # -- what the graph gives ---------------------------------------------------------------------
    def output(self, r: Any) -> Output:
        if not isinstance(r, fx.Node):
            return Output(None, value=as_index(r) if type(r) is int else r)
        ctx, v, fake = self.ctx, self.ctx.env[r], r.meta.get("val")
        if not isinstance(v, Value):
            return Output(None, value=v)
        ctx.node = r
        if not isinstance(fake, torch.Tensor):
            return Output(None, value=as_index_of(numbers.fetched(ctx, v)))
        ctx.device = str(fake.device)
        if r.op == "placeholder" and r.name in ctx.renamed:  # returned after copies into it
            v = ctx.load(ctx.renamed[r.name])
        view = ctx.strided(v)
        other = fake.layout != torch.strided or r in ctx.quantized
        if view is not None and other:  # only the call itself can return it
            layout = ctx.layouts[view.tensor]
            return Output(view.tensor, layout.shape, layout.strides)
        wanted = ctx.strides_of(fake)
        memory = calls.storage(fake)
        if view is not None and self.may_return(view, memory, wanted, v):
            self.returned[view.tensor] = memory
            return Output(view.tensor, view.shape, wanted, view.offset)
        name = self.placed(v, fake).expr.attr[0]
        self.returned[name] = memory
        empty = any(n.value == 0 for n in v.shape)
        return Output(name, v.shape, wanted if empty else ctx.layouts[name].strides)

    def distinct(self, r: Any, o: Output) -> Output:
        """Nodes that give the same view of a tensor give two Python objects, but for those that
        write into what they give."""
        if o.tensor is None or r in self.ctx.quantized or ops.is_mutating(r):
            return o
        if self.givers.setdefault(o, r) is r:
            return o
        return replace(o, distinct=True)

    def may_return(self, view: ViewArg, memory: Any, wanted: Any, v: Value) -> bool:
        """Whether the view has the traced strides, and shares memory only as traced."""
        if view.tensor in self.ctx.overwritten:
            return False
        empty = any(n.value == 0 for n in v.shape)
        if not empty and any(
            a is not b and n.value != 1
            for a, b, n in zip(view.strides, wanted, v.shape, strict=True)
        ):
            return False
        source = self.ctx.storages.get(view.tensor)
        if source is not None and source != memory:
            return False
        return self.returned.get(view.tensor, memory) == memory


def contraction(context: Context, ctx: LowerContext, a: Any, b: Any) -> str | None:
    """Who multiplies two matrices; the library where the guard has found that faster."""
    if ctx.node is not None and ctx.node.name in context.unfused:
        return "measured: see the decisions of the guard"
    return (context.contraction or choose_contraction)(ctx, a, b)


def nothing_at_all(ctx: LowerContext, *args: Any, **kwargs: Any) -> Any:
    """Results without elements: nothing is read."""
    assert ctx.node is not None
    val = ctx.node.meta["val"]
    made = [nothing(ctx, ctx.shape_of(t), TORCH_DTYPES[t.dtype]) for t in leaves(val)]
    return made[0] if isinstance(val, torch.Tensor) else made


def is_view(e: Expr) -> bool:
    """Whether the expression only says where an element is."""
    if e.op not in ("load", "literal", "index"):
        return False
    return not any(isinstance(a, Loaded) for i in e.indices() for a in i.atoms())


# Places in such a tensor are longer sums still, as are the divisions that take them apart: 6 MB of
# C++ for one load of a 3-d convolution whose strides and padding are symbols, too.
MAX_SIZE_TERMS = 32


__all__ = ["Driver"]
