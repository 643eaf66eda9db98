"""Verifier of programs: names the first broken invariant, the definition and the guilty stage.

In: a `Program`. Out: nothing, or a `VerifyError`. Time is linear in what was not seen before: what
is true of an expression whatever program it is in (arity, dtypes, which axes are free) is
remembered per interned node.

Invariants by name

    names        each name is defined once, before use; outputs, targets and views name such tensors
    layouts      shape and strides have one length; an index has an entry per dimension; axes span
                 the shape; strides of what a library call reads are not negative
    axes         a definition's axes are distinct; every axis used is one of them or bound by a
                 reduction
    dtypes       arguments of an operation share a dtype; loads and stores have their tensor's
    kinds        operations, reductions, distributions and attributes exist and fit
    range        every load and store is inside its tensor: proven, or masked (by what no example
                 gets past), or at a loaded position (which lowering wraps and checks). What can
                 neither be proven nor refuted by an example passes, unless `strict`
    overwritten  after a target is overwritten nobody reads it, nor its memory by an older name; the
                 overwriter itself reads it only where it writes
    sizes        every symbol used has a source by then: the inputs (Dynamo guards those), an
                 earlier call, or an expression of such; those of a call's result have one by the
                 time that somebody reads it; checks name what has one
    calls        names, layouts, aliases and sizes of a library call's results fit
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deuteron.base.errors import VerifyError
from deuteron.ir.expr import Expr
from deuteron.ir.index import (
    Axis,
    Index,
    Sym,
    Value,
    is_nonneg,
    product,
)
from deuteron.ir.program import (
    Compute,
    Constant,
    Def,
    Extern,
    Input,
    Layout,
    Origin,
    Program,
    ViewArg,
    names_in,
)
from deuteron.ir.verify_expr import (
    Fault,
    check_layout,
    check_load,
    check_position,
    facts,
    index_axes,
)

ACCUMULATES = ("sum", "prod", "max", "min")


def verify_program(p: Program, stage: str, strict: bool = False) -> None:
    """Raises `VerifyError` for the first invariant that `p` breaks; `stage` is who made it."""
    state = _State(p, strict)
    for d in p.defs:
        try:
            state.define(d)
        except Fault as fault:
            raise error(
                fault, label(d), d.origins if isinstance(d, (Compute, Extern)) else (), stage
            ) from None
    try:
        state.outputs()
    except Fault as fault:
        raise error(fault, "outputs", (), stage) from None


def error(fault: Fault, node: str, origins: Iterable[Origin], stage: str) -> VerifyError:
    where = next((o.line for o in origins if o.line), "")
    return VerifyError(
        f"{stage} broke the invariant {fault.invariant!r} at {node}: {fault.message}",
        hint="this is a bug of Deuteron; please report it with the program",
        where=where,
        invariant=fault.invariant,
        node=node,
        guilty=stage,
    )


def label(d: Def) -> str:
    if isinstance(d, Extern):
        return f"{d.op} -> {', '.join(n or '_' for n in d.names)}"
    return d.name


# -- expressions ---------------------------------------------------------------------------------


# -- ranges --------------------------------------------------------------------------------------


# -- programs ------------------------------------------------------------------------------------


def views(x: Any) -> Iterable[ViewArg]:
    """Every `ViewArg` among a library call's arguments."""
    if isinstance(x, ViewArg):
        yield x
    elif isinstance(x, (tuple, list)):
        for y in x:
            yield from views(y)


class _State:
    """What is defined so far."""

    def __init__(self, p: Program, strict: bool) -> None:
        self.program, self.strict = p, strict
        self.layouts: dict[str, Layout] = {}
        self.stale: dict[str, str] = {}  # name -> who overwrote it
        self.memory: dict[str, str] = {}  # name -> name of the tensor that owns its memory
        self.group: dict[str, list[str]] = {}  # owner -> names of its memory that are not stale
        self.sizes: dict[str, Sym] = {}  # symbols with a source so far
        self.later = {s.name: (s, str(w)) for s, (kind, w, _) in p.sizes if kind == "result"}
        self.made = {s.name: (s, str(w)) for s, (kind, w, _) in p.sizes if kind == "expr"}
        self.add_sources(s for s, (kind, _, _) in p.sizes if kind in ("int", "shape", "stride"))
        self.open: list[tuple[str, Index]] = []  # of calls' results: sizes without a source so far
        self.known: set[Index] = set()
        self.positions: set[int] = set()

    def define(self, d: Def) -> None:
        if isinstance(d, Input):
            if d.position in self.positions or d.position < 0:
                raise Fault("names", f"input position {d.position} twice or negative")
            if self.program.num_inputs and d.position >= self.program.num_inputs:
                raise Fault("names", f"input position {d.position} of {self.program.num_inputs}")
            self.positions.add(d.position)
            self.add(d.name, d.layout)
        elif isinstance(d, Constant):
            known = self.program.constants
            if d.name not in known and d.digest not in known:
                raise Fault("names", "its tensor is not among the constants")
            self.add(d.name, d.layout)
        elif isinstance(d, Extern):
            self.extern(d)
        else:
            self.compute(d)

    def add(
        self,
        name: str,
        layout: Layout,
        memory: str | None = None,
        parts: tuple[Index, ...] | None = None,
    ) -> None:
        if name in self.layouts:
            raise Fault("names", f"{name} is defined twice")
        check_layout(name, layout)
        own = (*layout.shape, *layout.strides, layout.offset)
        self.indices(own if parts is None else parts)
        self.layouts[name] = layout
        owner = self.memory.get(memory, memory) if memory is not None else name
        self.memory[name] = owner
        self.group.setdefault(owner, []).append(name)

    def add_sources(self, symbols: Iterable[Sym]) -> None:
        """The symbols have a source from now on, and what is computed from them."""
        self.sizes.update((s.name, s) for s in symbols)
        ready = [n for n, (_, text) in self.made.items() if names_in(text) <= self.sizes.keys()]
        computed = [self.made.pop(n)[0] for n in ready]
        if computed:
            self.add_sources(computed)

    def indices(self, indices: Iterable[Index]) -> None:
        """Every symbol used is defined."""
        for i in indices:
            if i in self.known:
                continue
            for s in i.syms():
                if self.sizes.get(s.name) is not s:
                    raise Fault("sizes", f"nothing defines the size {s!r} of {i!r}")
            self.known.add(i)

    def readable(self, name: str) -> Layout:
        layout = self.layouts.get(name)
        if layout is None:
            raise Fault("names", f"{name} is read and not defined")
        if self.open:
            self.indices(i for n, i in self.open if n == name)
            self.open = [(n, i) for n, i in self.open if n != name]
        if name in self.stale:
            raise Fault(
                "overwritten", f"{name} is read after {self.stale[name]} overwrote its memory"
            )
        return layout

    def expr(self, root: Expr, axes: tuple[Axis, ...]) -> None:
        known = facts(root)
        missing = known.free.difference(axes)
        if missing:
            raise Fault("axes", f"axes {sorted(a.name for a in missing)} are not the definition's")
        for n in known.loads:
            check_load(n, self.readable(n.attr[0]), self.strict)
        self.indices(known.indices)

    def compute(self, d: Compute) -> None:
        if len({a.name for a in d.axes}) != len(d.axes):
            raise Fault("axes", f"axes {d.axes} are not distinct")
        self.indices(a.extent for a in d.axes)
        self.expr(d.body, d.axes)
        self._bound(d)
        if d.body.dtype != d.layout.dtype:
            raise Fault("dtypes", f"{d.body.dtype} values for {d.layout.dtype}")
        if d.index is None:
            if tuple(a.extent for a in d.axes) != d.layout.shape:
                raise Fault(
                    "layouts", f"axes {[a.extent for a in d.axes]} for shape {list(d.layout.shape)}"
                )
        if d.mask is not None:
            if d.target is None:
                raise Fault("kinds", "a mask and no target: its other points would be undefined")
            if d.mask.dtype != "bool":
                raise Fault("dtypes", f"the mask is {d.mask.dtype}")
            self.expr(d.mask, d.axes)
        check_position(f"store to {d.name}", d.store_index, d.layout, d.mask, self.strict)
        for i in d.index or ():
            missing = index_axes(i).difference(d.axes)
            if missing:
                raise Fault(
                    "axes",
                    f"the store's axes {sorted(map(repr, missing))} are not the definition's",
                )
            for a in i.atoms():
                if isinstance(a, Value):
                    self.expr(a.expr, d.axes)
        if d.accumulate is not None and d.accumulate not in ACCUMULATES:
            raise Fault("kinds", f"no accumulation {d.accumulate!r}")
        if d.target is None:
            if d.accumulate is not None:
                raise Fault("kinds", "accumulates into no target")
            count = product(a.extent for a in d.axes)
            if d.unique and (d.index is None or d.mask is not None or count is not d.layout.numel):
                raise Fault("kinds", "places that are unique, in no target, do not fill the tensor")
            self.add(d.name, d.layout)
        else:
            self._overwrite(d, d.target)

    def _bound(self, d: Compute) -> None:
        for a in facts(d.body).bound:
            if a in d.axes:
                raise Fault(
                    "axes", f"a reduction in the body binds {a!r}, an axis of the definition"
                )
            self.indices((a.extent,))

    def _overwrite(self, d: Compute, target: str) -> None:
        layout = self.readable(target)
        if layout.dtype != d.layout.dtype:
            raise Fault("dtypes", f"{d.layout.dtype} over {target}, which is {layout.dtype}")
        roots = [d.body] + ([d.mask] if d.mask is not None else [])
        for n in (n for r in roots for n in facts(r).loads):
            if self.memory[n.attr[0]] == self.memory[target]:
                if not (n.attr[0] == target and n.attr[1] == d.store_index):
                    raise Fault(
                        "overwritten",
                        f"reads {n!r} of the memory that it writes at {list(d.store_index)}",
                    )
        owner = self.memory[target]
        for name in self.group[owner]:
            self.stale[name] = d.name
        self.group[owner] = []
        self.add(d.name, d.layout, owner)

    def extern(self, d: Extern) -> None:
        for v in views((d.args, tuple(v for _, v in d.kwargs))):
            own = self.readable(v.tensor).strides
            if len(v.shape) != len(v.strides):
                raise Fault("layouts", f"the view of {v.tensor} has two ranks")
            for stride in v.strides:
                # Extents of several symbols need no provable sign; no tensor's own stride goes back
                if not is_nonneg(stride) and stride not in own:
                    raise Fault("layouts", f"the view of {v.tensor} may go back by {stride!r}")
            self.indices((*v.shape, *v.strides, v.offset))
        for written in d.mutates:
            self.readable(written)
        if len(d.names) != len(d.layouts):
            raise Fault("calls", f"{len(d.names)} names, {len(d.layouts)} layouts")
        for part, what in ((d.aliases, "aliases"), (d.sizes, "sizes")):
            if len(part) not in (0, len(d.names)):
                raise Fault("calls", f"{len(part)} {what} for {len(d.names)} results")
        for s in d.sizes:
            if s is not None:
                if s.name in self.sizes:
                    raise Fault("sizes", f"{s!r} is defined twice")
                self.add_sources((s,))
        ready = [n for n, (_, tensor) in self.later.items() if tensor in d.names]
        self.add_sources(self.later.pop(n)[0] for n in ready)
        for k, name in enumerate(d.names):
            if name is None:
                continue
            layout = d.layouts[k]
            alias = d.aliases[k] if d.aliases else None
            if layout is None:
                raise Fault("calls", f"result {name} has no layout")
            if alias is not None:
                self.readable(alias)
            parts = (*layout.shape, *layout.strides, layout.offset)
            self.open += [(name, i) for i in parts]
            self.add(name, layout, alias, parts=())

    def outputs(self) -> None:
        for c in self.program.checks:
            missing = names_in(c.condition) - self.sizes.keys()
            if missing:
                raise Fault("sizes", f"nothing defines {sorted(missing)} of {c.condition}")
        for k, o in enumerate(self.program.outputs):
            if o.tensor is not None:
                self.readable(o.tensor)
                if len(o.shape) != len(o.strides):
                    raise Fault("layouts", f"output {k} has shape and strides of two lengths")
                self.indices((*o.shape, *o.strides, o.offset))
            elif isinstance(o.value, Index):
                self.indices((o.value,))
