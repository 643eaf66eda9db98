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

import random
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from deuteron.base.errors import VerifyError
from deuteron.base.memo import MEMO
from deuteron.ir.expr import (
    COMPARISONS,
    DTYPES,
    FLOAT8,
    FLOATS,
    HALF,
    ITEMSIZE,
    REDUCTIONS,
    SCALAR_OPS,
    SCANS,
    Expr,
    own_indices,
)
from deuteron.ir.index import (
    Atom,
    Axis,
    Div,
    Index,
    MinMax,
    Mod,
    Sym,
    Value,
    evaluate,
    in_range,
    is_nonneg,
    product,
)
from deuteron.ir.masks import lets_through
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

ACCUMULATES = ("sum", "prod", "max", "min")
DISTRIBUTIONS = {"rand": FLOATS, "randn": FLOATS, "rand_bits": ("i64",)}


class Fault(Exception):
    """A broken invariant, before it is known in which definition."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(message)
        self.invariant, self.message = invariant, message


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

_FREE: dict[Expr, frozenset[Axis]] = MEMO.answers()
_FACTS: dict[Expr, Facts] = MEMO.answers()
_NONE: frozenset[Axis] = frozenset()
_INDEX_AXES: dict[Index, frozenset[Axis]] = MEMO.answers()


def _parts(a: Atom) -> tuple[Index, ...]:
    if isinstance(a, MinMax):
        return a.a, a.b
    return (a.num, a.den) if isinstance(a, (Div, Mod)) else ()


def index_axes(index: Index) -> frozenset[Axis]:
    """The axes free in an index: its own, and those free in the expressions that it loads."""
    own_axes = _INDEX_AXES.get(index)
    if own_axes is None:
        own_axes = _NONE
        todo = [a for m, _ in index.terms for a in m]
        while todo:
            a = todo.pop()
            if isinstance(a, Axis):
                own_axes |= {a}
            elif isinstance(a, Value):
                if a.expr.dtype != "i64":
                    raise Fault("dtypes", f"{a!r} is used as an index and is {a.expr.dtype}")
                own_axes |= facts(a.expr).free
            else:
                todo.extend(x for i in _parts(a) for m, _ in i.terms for x in m)
        _INDEX_AXES[index] = own_axes
    return own_axes


class Facts(NamedTuple):
    """What is true of an expression in every program."""

    free: frozenset[
        Axis
    ]  # axes that it depends on and does not bind (a scan runs along a free one)
    bound: tuple[Axis, ...]  # axes that reduces inside bind
    loads: tuple[Expr, ...]
    indices: tuple[Index, ...]


def facts(root: Expr) -> Facts:
    """Checks every node that is new, arguments first."""
    known = _FACTS.get(root)
    if known is None:
        bound: dict[Axis, None] = {}
        loads: list[Expr] = []
        indices: dict[Index, None] = {}
        for n in root.walk():
            if n not in _FREE:
                _FREE[n] = _check_node(n)
            if n.op == "load":
                loads.append(n)
                indices.update(dict.fromkeys(n.attr[1]))
            elif n.op == "reduce":
                bound.update(dict.fromkeys(n.attr[1]))
            elif n.op in ("index", "random", "check"):
                indices.update(dict.fromkeys(own_indices(n)))
        known = Facts(_FREE[root], tuple(bound), tuple(loads), tuple(indices))
        _FACTS[root] = known
    return known


def _check_node(n: Expr) -> frozenset[Axis]:
    """The node's own invariants hold; returns its free axes."""
    if n.dtype not in DTYPES:
        raise Fault("dtypes", f"{n!r} has no dtype {n.dtype!r}")
    special = _SPECIAL.get(n.op)
    free = _NONE
    for a in n.args:
        theirs = _FREE[a]
        free = theirs if not free or free is theirs else free | theirs
    if special is not None:
        return special(n, free)
    if n.op not in SCALAR_OPS:
        raise Fault("kinds", f"no operation {n.op!r}")
    if len(n.args) != SCALAR_OPS[n.op][0]:
        raise Fault("kinds", f"{n!r} has {len(n.args)} arguments")
    values = n.args
    if n.op == "where":
        if values[0].dtype != "bool":
            raise Fault("dtypes", f"the condition of {n!r} is {values[0].dtype}")
        values = values[1:]
    dtype = values[0].dtype
    for v in values:
        if v.dtype != dtype:
            raise Fault("dtypes", f"arguments of {n!r} are {dtype} and {v.dtype}")
    expected = "bool" if n.op in COMPARISONS else dtype
    if n.dtype != expected:
        raise Fault("dtypes", f"{n!r} is {n.dtype}, of arguments that make it {expected}")
    return free


def _literal(n: Expr, free: frozenset[Axis]) -> frozenset[Axis]:
    kind = bool if n.dtype == "bool" else float if n.dtype in (*FLOATS, *FLOAT8) else int
    if type(n.attr) is not kind:
        raise Fault("kinds", f"the {n.dtype} literal {n.attr!r} is a {type(n.attr).__name__}")
    return free


def _index(n: Expr, free: frozenset[Axis]) -> frozenset[Axis]:
    if n.dtype != "i64":
        raise Fault("dtypes", f"the index {n!r} is {n.dtype}")
    return index_axes(n.attr)


def _load(n: Expr, free: frozenset[Axis]) -> frozenset[Axis]:
    name, indices, fill = n.attr
    if n.args:
        if n.args[0].dtype != "bool":
            raise Fault("dtypes", f"the mask of {n!r} is {n.args[0].dtype}")
        if fill is None:
            raise Fault("kinds", f"{n!r} has a mask and no fill")
    for i in indices:
        theirs = index_axes(i)
        free = theirs if not free or free is theirs else free | theirs
    return free


def _cast(n: Expr, free: frozenset[Axis]) -> frozenset[Axis]:
    if len(n.args) != 1:
        raise Fault("kinds", f"a cast of {len(n.args)} values")
    if n.attr is not None and (n.args[0].dtype not in HALF or n.dtype != "f32"):
        raise Fault("dtypes", f"{n!r} is {n.dtype}, of what was never rounded from f32")
    return free


def _reduce(n: Expr, free: frozenset[Axis]) -> frozenset[Axis]:
    kind, axes = n.attr
    if kind not in REDUCTIONS:
        raise Fault("kinds", f"no reduction {kind!r}")
    if not (len(set(axes)) == len(axes) > 0):
        raise Fault("axes", f"{n!r} reduces over {axes}")
    positional = kind.startswith("arg")
    if positional and len(axes) != 1:
        raise Fault("kinds", f"{kind} over {len(axes)} axes")
    expected = "i64" if positional else n.args[0].dtype
    if n.dtype != expected:
        raise Fault("dtypes", f"{n!r} is {n.dtype}, its reduction {expected}")
    flags = kind in ("any", "all")
    if flags and n.dtype != "bool":
        raise Fault("dtypes", f"{kind} of {n.dtype}")
    return free - set(axes)


def _scan(n: Expr, free: frozenset[Axis]) -> frozenset[Axis]:
    kind, axis = n.attr
    if kind not in SCANS:
        raise Fault("kinds", f"no scan {kind!r}")
    if not isinstance(axis, Axis):
        raise Fault("kinds", f"{n!r} scans along {axis!r}")
    if n.dtype != n.args[0].dtype:
        raise Fault("dtypes", f"{n!r} is {n.dtype}, its reduction {n.args[0].dtype}")
    return free | {axis}


def _random(n: Expr, free: frozenset[Axis]) -> frozenset[Axis]:
    dist, stream, element = n.attr
    if dist not in DISTRIBUTIONS:
        raise Fault("kinds", f"no distribution {dist!r}")
    if n.dtype not in DISTRIBUTIONS[dist]:
        raise Fault("dtypes", f"{dist} of {n.dtype}")
    if n.args[0].dtype != "i64":
        raise Fault("dtypes", f"the seed of {n!r} is {n.args[0].dtype}")
    if not isinstance(stream, int):
        raise Fault("kinds", f"the stream of {n!r} is {stream!r}")
    return free | index_axes(element)


def _check(n: Expr, free: frozenset[Axis]) -> frozenset[Axis]:
    if n.dtype != "i64" or n.args[0].dtype != "i64":
        raise Fault("dtypes", f"{n!r} checks {n.args[0].dtype}")
    if any(a.dtype != "bool" for a in n.args[1:]):
        raise Fault("dtypes", f"the mask of {n!r} is {n.args[1].dtype}")
    if index_axes(n.attr):
        raise Fault("axes", f"the bound of {n!r} depends on axes")
    return free


_SPECIAL = {
    "literal": _literal,
    "index": _index,
    "load": _load,
    "cast": _cast,
    "reduce": _reduce,
    "scan": _scan,
    "random": _random,
    "check": _check,
}


# -- ranges --------------------------------------------------------------------------------------

_RANGES: dict[tuple[Index, Index], str] = MEMO.answers()


def range_verdict(index: Index, extent: Index) -> str:
    """ "proven", "open", or the example that refutes ``0 <= index < extent``."""
    if len(index.terms) == 1 and index.terms[0][1] == 1:
        m = index.terms[0][0]
        if len(m) == 1 and isinstance(m[0], Axis) and m[0].extent is extent:
            return "proven"
    verdict = _RANGES.get((index, extent))
    if verdict is None:
        verdict = "proven" if in_range(index, extent) else _example(index, extent)
        _RANGES[index, extent] = verdict
    return verdict


def _example(index: Index, extent: Index) -> str:
    """Tries corners and random points: all points of a small static space decide."""
    if any(isinstance(a, Value) for i in (index, extent) for a in i.atoms()):
        return "proven"  # a loaded position: wrapped and checked where it was made
    axes = sorted(index.axes() | extent.axes(), key=lambda a: a.name)
    syms = sorted(index.syms() | extent.syms(), key=lambda s: s.name)
    rng = random.Random(0)
    # Sizes that were seen satisfy whatever the traced program demands of them; others may not
    # (two products of sizes that are known to be equal).
    seen = bool(syms) and all(s.hint is not None for s in syms)
    if any(s.hint is None and re.fullmatch(r"u\d+", s.name) for s in syms):
        return "open"  # a size that torch itself knows only at run time, checked there
    for size in range(1 if seen else 4):
        env = {s.name: _sample(s, size, rng) for s in syms}
        try:
            extents = [evaluate(a.extent, env) for a in axes]
            points = 1
            for n in extents:
                points *= n
            whole = points <= 4096
            for k in range(points if whole else 200):
                for a, n in zip(axes, extents):
                    env[a.name] = k % n if whole else rng.choice((0, n - 1, rng.randrange(n)))
                    k //= n if whole else 1
                at, end = evaluate(index, env), evaluate(extent, env)
                if not 0 <= at < end:
                    return f"{at} of {end} where {', '.join(f'{k} = {v}' for k, v in env.items())}"
        except (ZeroDivisionError, KeyError):
            continue  # sizes for which the index has no meaning: no example
        if not syms:
            return "proven" if whole else "open"
    return "open"


def _sample(s: Sym, k: int, rng: random.Random) -> int:
    """Sizes to try: the hint, then small ones. Below 1 the tensors are empty and prove nothing."""
    if k == 0 and s.hint is not None:
        return s.hint
    return max(s.low, 1) + (0, 1, 5, rng.randrange(64))[k]


def check_position(
    what: str, indices: tuple[Index, ...], layout: Layout, mask: Expr | None, strict: bool = False
) -> None:
    """Arity and range of an access to a tensor."""
    if len(indices) != len(layout.shape):
        raise Fault("layouts", f"{what}: {len(indices)} indices for rank {len(layout.shape)}")
    if mask is not None:
        escape = lets_through(indices, layout.shape, mask)
        if escape is not None:
            raise Fault("range", f"the mask of the {what} lets it outside: {escape}")
        return
    for d, (i, n) in enumerate(zip(indices, layout.shape)):
        verdict = range_verdict(i, n)
        if verdict != "proven" and (strict or verdict != "open"):
            raise Fault(
                "range",
                f"{what}: index {i!r} of dimension {d} is not below {n!r}"
                + ("" if verdict == "open" else f": {verdict}"),
            )


def check_load(n: Expr, layout: Layout, strict: bool = False) -> None:
    name, indices, _ = n.attr
    if n.dtype != layout.dtype:
        raise Fault("dtypes", f"load of {name} is {n.dtype}, the tensor {layout.dtype}")
    check_position(f"load of {name}", indices, layout, n.args[0] if n.args else None, strict)


def check_layout(name: str, layout: Layout) -> None:
    if len(layout.shape) != len(layout.strides):
        raise Fault("layouts", f"{name} has shape and strides of two lengths")
    if layout.dtype not in ITEMSIZE:
        raise Fault("dtypes", f"{name} has no dtype {layout.dtype!r}")


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
        self.tell(s for s, (kind, _, _) in p.sizes if kind in ("int", "shape", "stride"))
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

    def tell(self, symbols: Iterable[Sym]) -> None:
        """The symbols have a source from now on, and what is computed from them."""
        self.sizes.update((s.name, s) for s in symbols)
        ready = [n for n, (_, text) in self.made.items() if names_in(text) <= self.sizes.keys()]
        computed = [self.made.pop(n)[0] for n in ready]
        if computed:
            self.tell(computed)

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
                self.tell((s,))
        told = [n for n, (_, tensor) in self.later.items() if tensor in d.names]
        self.tell(self.later.pop(n)[0] for n in told)
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


def overwriters(p: Program) -> Mapping[str, str]:
    """Target -> the definition that overwrites it."""
    return {d.target: d.name for d in p.defs if isinstance(d, Compute) and d.target is not None}
