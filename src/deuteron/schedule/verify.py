"""Verifier of schedules: names the first broken invariant, the step and the guilty stage.

In: a `Schedule` and the `Program` that it executes. Out: nothing, or a `VerifyError`.

Invariants by name (those of expressions are `ir.verify`'s)

    written      a tensor is written before it is read; every output of the program is written
    nests        no nest of a kernel reads or overwrites memory that another nest of it writes
    locals       registers of a nest are defined before use, once, and are no tensors in memory
    levels       what is stored or reduced depends on axes that exist at its place
    axes         loops of a nest are distinct; a split axis is a parallel one; those of a group
                 are some of a row's
    once         every library call of the program is executed once, impure ones in their order; a
                 tensor is written by one step, and at each point of its loops in another place
    overwritten  a reader of memory comes before its overwriter; in one nest the overwriter reads it
                 only where it writes, and no later loop reads it
    interface    a kernel's `reads` and `writes` are the tensors that its nests read and write
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deuteron.ir.expr import Expr, own_indices
from deuteron.ir.index import Axis, Value
from deuteron.ir.nest import Reduce as ContractionReduce
from deuteron.ir.nest import roots as contraction_roots
from deuteron.ir.operations import REDUCTIONS, SCANS
from deuteron.ir.program import Compute, Constant, Extern, Input, Layout, Program
from deuteron.ir.verify import ACCUMULATES, error, label, views
from deuteron.ir.verify_expr import Fault, check_load, check_position, facts, index_axes
from deuteron.schedule.kernel import Kernel, Nest, Reduce, Scan, Schedule, Stmt, Store


def verify_schedule(
    schedule: Schedule, program: Program, stage: str = "schedule", strict: bool = False
) -> None:
    """Raises `VerifyError` for the first invariant that `schedule` breaks; `stage` is who made
    it.
    """
    state = _State(schedule, program, strict)
    for step in schedule.steps:
        name = label(step) if isinstance(step, Extern) else f"kernel {step.name}"
        try:
            if isinstance(step, Extern):
                state.call(step)
            else:
                state.kernel(step)
        except Fault as fault:
            raise error(fault, name, step.origins, stage) from None
    try:
        state.finish()
    except Fault as fault:
        raise error(fault, "the whole schedule", (), stage) from None


def loads_of(e: Expr) -> tuple[Expr, ...]:
    return facts(e).loads


def free_outside(root: Expr, local: Mapping[str, Stmt]) -> frozenset[Axis]:
    """The free axes of an expression, without the indices of registers, which mean nothing."""
    free: dict[Expr, frozenset[Axis]] = {}
    for n in root.walk():
        inside = frozenset[Axis]().union(*(free[a] for a in n.args))
        if n.op == "reduce":
            inside -= set(n.attr[1])
        elif n.op == "scan":
            inside |= {n.attr[1]}
        elif n.op != "load" or n.attr[0] not in local:
            for i in own_indices(n):
                inside |= index_axes(i)
        free[n] = inside
    return free[root]


def stmt_exprs(s: Stmt) -> tuple[Expr, ...]:
    """What a statement evaluates, the positions of a store included."""
    if not isinstance(s, Store):
        return (s.body,)
    values = [a.expr for i in s.index for a in i.atoms() if isinstance(a, Value)]
    return (s.value, *values) if s.mask is None else (s.value, s.mask, *values)


class _State:
    """What is written so far, and which names of a memory are stale."""

    def __init__(self, schedule: Schedule, program: Program, strict: bool) -> None:
        self.schedule, self.program, self.strict = schedule, program, strict
        self.layouts = schedule.layouts
        self.written = {d.name for d in program.defs if isinstance(d, (Input, Constant))}
        self.target = {
            d.name: d.target
            for d in program.defs
            if isinstance(d, Compute) and d.target is not None
        }
        self.stale: dict[str, str] = {}  # name -> who overwrote its memory
        self.names: dict[str, list[str]] = {}  # memory -> names that were written into it
        for name in self.written:
            self.names.setdefault(self.memory(name), []).append(name)
        self.calls: list[Extern] = []

    def memory(self, name: str) -> str:
        """The tensor whose memory `name` lives in."""
        seen = set()
        while name in self.schedule.aliases and name not in seen:
            seen.add(name)
            name = self.schedule.aliases[name]
        return name

    def layout(self, name: str) -> Layout:
        layout = self.layouts.get(name)
        if layout is None:
            raise Fault("written", f"{name} has no layout")
        return layout

    def readable(self, name: str) -> None:
        if name not in self.written:
            raise Fault("written", f"{name} is read before it is written")
        if name in self.stale:
            by = self.stale[name]
            raise Fault("overwritten", f"{name} is read after {by} overwrote its memory")

    def define(self, name: str) -> None:
        """`name` is written: older names of its memory are stale from now on."""
        if name in self.written:
            raise Fault("once", f"{name} is written by two steps")
        memory = self.memory(name)
        if name in self.target or memory != name:
            for older in self.names.get(memory, ()):
                self.stale[older] = name
            self.names[memory] = []
        self.names.setdefault(memory, []).append(name)
        self.written.add(name)

    def call(self, step: Extern) -> None:
        for v in views((step.args, tuple(v for _, v in step.kwargs))):
            self.readable(v.tensor)
        for name in step.mutates:
            self.readable(name)
        self.calls.append(step)
        for k, result in enumerate(step.names):
            if result is None:
                continue
            if result in self.written:
                raise Fault("once", f"{result} is written by two steps")
            shared = step.aliases[k] if step.aliases else None
            memory = self.memory(result if shared is None else shared)
            self.names.setdefault(memory, []).append(result)
            self.written.add(result)

    def finish(self) -> None:
        calls = [d for d in self.program.defs if isinstance(d, Extern)]
        for d in calls:
            n = sum(c is d or c == d for c in self.calls)
            if n != 1 and not (n == 0 and d.product):  # a kernel has the product
                raise Fault("once", f"the call {label(d)} is executed {n} times")
        wanted = [d.names for d in calls if d.impure]
        if [c.names for c in self.calls if c.impure] != wanted:
            raise Fault("once", "impure calls are executed in another order than the program's")
        for o in self.program.outputs:
            if o.tensor is not None:
                self.readable(o.tensor)

    # -- kernels -----------------------------------------------------------------------------------

    def kernel(self, k: Kernel) -> None:
        reads: set[str] = set()
        writes: set[str] = set()
        inside: set[str] = set()
        if k.contraction is not None:
            self.contraction(k)
            return
        for part in k.nests_between_barriers():
            if not part:
                raise Fault("nests", f"a part of {k.name} between barriers has no nest")
            touched = [self.nest(nest) for nest in part]
            if len(part) > 1:
                self.independent([r for r, _ in touched], [w for _, w in touched])
            for name in sorted(set().union(*(r for r, _ in touched))):
                if name not in inside:
                    self.readable(name)
            reads |= set().union(*(r for r, _ in touched))
            for name in dict.fromkeys(n for _, w in touched for n in sorted(w)):
                self.define(name)
                inside.add(name)
            writes |= set().union(*(w for _, w in touched))
        self.interface(k, reads, writes)

    def contraction(self, k: Kernel) -> None:
        """Each result is defined before it is read and read where it lives; every axis is tiled
        once; a store has one point of its value's axes."""
        assert k.contraction is not None
        nest, tiling = k.contraction
        tiled = sorted(a for d in tiling.dims for a in d.axes)
        if tiled != sorted(nest.axes):
            raise Fault("tiling", f"the axes {list(nest.axes)} are tiled as {tiled}")
        lives: dict[str, tuple[Axis, ...]] = {}
        for s in nest.statements:
            for e in contraction_roots(s):
                outside = e.axes() - set(nest.axes)
                if outside:
                    raise Fault("axes", f"{sorted(outside)} are no axes of the nest")
                for n in loads_of(e):
                    name, index, _ = n.attr
                    if name in lives:
                        if index != tuple(a.index for a in lives[name]):
                            raise Fault("locals", f"{name} lives on {lives[name]}, read at {index}")
                    elif name in nest.reductions:
                        raise Fault("locals", f"{name} is used, which comes later")
                    else:
                        check_load(n, self.layout(name), self.strict)
            if isinstance(s, ContractionReduce):
                lives[s.name] = nest.lives(s)
                continue
            layout = self.layout(s.tensor)
            if s.value.dtype != layout.dtype:
                raise Fault("dtypes", f"{s.value.dtype} is stored to {s.tensor}: {layout.dtype}")
            lost = s.value.axes().difference(*map(index_axes, s.index))
            if lost:
                raise Fault("once", f"{s.tensor} is stored in the same place along {sorted(lost)}")
            check_position(f"store to {s.tensor}", s.index, layout, None, self.strict)
        for c in nest.cuts:
            check_load(c.end, self.layout(c.end.attr[0]), self.strict)
        reads, writes = nest.tensors()
        for name in reads:
            self.readable(name)
        for name in writes:
            self.define(name)
        self.interface(k, set(reads), set(writes))

    def independent(self, reads: list[set[str]], writes: list[set[str]]) -> None:
        owner: dict[str, tuple[int, str]] = {}
        for k, names in enumerate(writes):
            for name in names:
                j, other = owner.setdefault(self.memory(name), (k, name))
                if j != k:
                    raise Fault("nests", f"nests {j} and {k} write {other} and {name}, one memory")
        for k, names in enumerate(reads):
            for name in names:
                j, other = owner.get(self.memory(name), (k, name))
                if j != k:
                    raise Fault("nests", f"nest {k} reads {name}, nest {j} writes {other}")

    def interface(self, k: Kernel, reads: set[str], writes: set[str]) -> None:
        for what, listed, present in (("reads", k.reads, reads), ("writes", k.writes, writes)):
            names = {n for n, _ in listed}
            for name in sorted(present - names):
                raise Fault("interface", f"{name} is not among the kernel's {what}")
            for name, layout in listed:
                if layout != self.layout(name):
                    raise Fault("interface", f"{name} has another layout in the kernel's {what}")
        unwritten = {n for n, _ in k.writes} - writes
        if unwritten:
            raise Fault("interface", f"{sorted(unwritten)} are listed and not written")

    def nest(self, nest: Nest) -> tuple[set[str], set[str]]:
        """Checks one nest; returns the tensors in memory that it reads and writes."""
        _check_axes(nest)
        whole = frozenset(nest.loops("point"))
        local = nest.locals()
        depends: dict[str, frozenset[Axis]] = {}  # registers defined so far -> axes they live on
        reads: set[str] = set()
        writes: set[str] = set()
        names = set()
        for s in nest.stmts:
            free = frozenset[Axis]()
            for e in stmt_exprs(s):
                known = facts(e)
                bound = whole.intersection(known.bound)
                if bound:
                    raise Fault("axes", f"a reduction inside a body binds the loop {sorted(bound)}")
                own = known.free if not local else free_outside(e, local)
                free |= own | self.loads(known.loads, local, depends, reads)
            if not isinstance(s, Store):
                if s.name in names:
                    raise Fault("locals", f"{s.name} is defined twice")
                names.add(s.name)
            depends.update(self.stmt(s, nest, free, writes))
        clash = reads & writes
        if clash:
            raise Fault("nests", f"a nest reads {sorted(clash)}, which it stores itself")
        self.in_place(nest)
        return reads, writes

    def loads(
        self,
        loads: Iterable[Expr],
        local: dict[str, Stmt],
        depends: dict[str, frozenset[Axis]],
        reads: set[str],
    ) -> frozenset[Axis]:
        """Checks what an expression loads; returns the axes on which its registers live."""
        registers = frozenset[Axis]()
        for n in loads:
            name = n.attr[0]
            if name not in local:
                check_load(n, self.layout(name), self.strict)
                reads.add(name)
                continue
            s = local[name]
            if name not in depends:
                later = (
                    "is a partial result" if isinstance(s, Reduce) and s.partial else "comes later"
                )
                raise Fault("locals", f"{name} is used, which {later}")
            assert not isinstance(s, Store)
            dtype = "i64" if s.kind.startswith("arg") else s.body.dtype
            if n.dtype != dtype:
                raise Fault("dtypes", f"register {name} is {dtype}, its load {n.dtype}")
            registers |= depends[name]
        return registers

    def stmt(
        self,
        s: Stmt,
        nest: Nest,
        free: frozenset[Axis],
        writes: set[str],
    ) -> dict[str, frozenset[Axis]]:
        """Checks one statement; returns the register that it defines with the axes it lives on."""
        if isinstance(s, Store):
            self.store(s, nest, free, writes)
            return {}
        whole = frozenset(nest.loops("point"))
        outside = free - whole
        if outside:
            raise Fault("levels", f"{s.name} depends on {sorted(outside)}, no loops of its nest")
        if isinstance(s, Scan):
            if len(nest.reduced) != 1:
                raise Fault("levels", f"the scan {s.name} runs along {len(nest.reduced)} axes")
            if s.kind not in SCANS:
                raise Fault("kinds", f"no scan {s.kind!r}")
        else:
            if s.kind not in REDUCTIONS:
                raise Fault("kinds", f"no reduction {s.kind!r}")
            if s.kind.startswith("arg") and len(nest.reduced) != 1:
                raise Fault("levels", f"{s.name} counts along {len(nest.reduced)} axes")
            if s.grouped and (s.partial or not nest.group_axes):
                raise Fault("levels", f"{s.name} is a grouped reduction in a nest without groups")
            if s.partial:
                return self.partial(s, nest, writes)
        if s.name in self.layouts and s.name in self.written:
            raise Fault("locals", f"the register {s.name} has the name of a tensor in memory")
        if isinstance(s, Scan):
            return {s.name: whole}
        return {s.name: frozenset(nest.loops("group" if s.grouped else "row"))}

    def partial(self, s: Reduce, nest: Nest, writes: set[str]) -> dict[str, frozenset[Axis]]:
        if nest.row_split is None:
            raise Fault("levels", f"{s.name} is a partial reduction of a nest without a row split")
        layout, count = self.layout(s.name), nest.row_split[1]
        shape = [a.extent for a in nest.reduced]
        if layout.shape[0].value != count or list(layout.shape[1:]) != shape:
            raise Fault("layouts", f"{s.name} is {list(layout.shape)}, not {[count, *shape]}")
        dtype = "i64" if s.kind.startswith("arg") else s.body.dtype
        if layout.dtype != dtype:
            raise Fault("dtypes", f"{s.name} is {layout.dtype}, its reduction {dtype}")
        writes.add(s.name)
        return {}

    def store(self, s: Store, nest: Nest, free: frozenset[Axis], writes: set[str]) -> None:
        if s.level not in (("row", "group", "point") if nest.group_axes else ("row", "point")):
            raise Fault("levels", f"no level {s.level!r}")
        there = frozenset(nest.loops(s.level))
        for i in s.index:
            free |= index_axes(i)
        outside = free - there
        if outside:
            raise Fault("levels", f"the {s.level} store to {s.tensor} depends on {sorted(outside)}")
        layout = self.layout(s.tensor)
        if s.value.dtype != layout.dtype:
            raise Fault(
                "dtypes", f"{s.value.dtype} is stored to {s.tensor}, which is {layout.dtype}"
            )
        if s.mask is not None and s.mask.dtype != "bool":
            raise Fault("dtypes", f"the mask of the store to {s.tensor} is {s.mask.dtype}")
        if s.accumulate is not None and s.accumulate not in ACCUMULATES:
            raise Fault("kinds", f"no accumulation {s.accumulate!r}")
        lost = {a for a in there if a.extent.value != 1}.difference(*map(index_axes, s.index))
        if lost and s.accumulate is None and not s.scattered:
            raise Fault("once", f"{s.tensor} is stored in the same place along {sorted(lost)}")
        check_position(f"store to {s.tensor}", s.index, layout, s.mask, self.strict)
        writes.add(s.tensor)

    def in_place(self, nest: Nest) -> None:
        """Loads of memory that the nest overwrites: at the stored place, and before it is lost."""
        stores = [(k, s) for k, s in enumerate(nest.stmts) if isinstance(s, Store)]
        owners = {self.memory(s.tensor): (k, s) for k, s in reversed(stores)}
        local = nest.locals()
        for k, stmt in enumerate(nest.stmts):
            for n in (n for e in stmt_exprs(stmt) for n in loads_of(e)):
                if n.attr[0] in local or self.memory(n.attr[0]) not in owners:
                    continue
                at, store = owners[self.memory(n.attr[0])]
                if n.attr[1] != store.index or store.accumulate is not None:
                    raise Fault(
                        "overwritten",
                        f"{n!r} is read in the nest that overwrites it at {list(store.index)}",
                    )
                same_pass = (
                    isinstance(stmt, Store)
                    and stmt.level == store.level
                    and not any(isinstance(x, (Reduce, Scan)) for x in nest.stmts[at:k])
                    and any(n in loads_of(e) for e in stmt_exprs(store))
                )
                if k > at and not same_pass:
                    raise Fault("overwritten", f"{n!r} is read after the store to {store.tensor}")


def _check_axes(nest: Nest) -> None:
    axes = (*nest.parallel, *nest.reduced)
    if len({a.name for a in axes}) != len(axes):
        raise Fault("axes", f"the loops {list(axes)} are not distinct")
    if nest.row_split is not None:
        axis, count = nest.row_split
        if axis not in nest.parallel or count < 1:
            raise Fault("axes", f"{count} splits of {axis!r}, among parallel {list(nest.parallel)}")
    if nest.group_axes and (nest.row_split is not None or not {*nest.group_axes} < {*nest.reduced}):
        raise Fault("axes", f"groups along {list(nest.group_axes)} of rows along {nest.reduced}")


__all__ = ["verify_schedule"]
