"""When each tensor is born and dies, and which kernels may write over an operand.

In: a `Schedule` and its `Program`. Out: `Lifetimes`: for each tensor the step that writes it first
and the last step that touches it. Memory that lives in another's counts for its owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deuteron.ir.expr import Expr
from deuteron.ir.index import Value
from deuteron.ir.operations import ITEMSIZE
from deuteron.ir.program import Constant, Input, Layout, Program, tensors_read
from deuteron.schedule.kernel import Kernel, Nest, Reduce, Schedule, Stmt, Store


@dataclass(frozen=True)
class Lifetimes:
    """Steps by number; `end` is the number of steps for what outlives the call."""

    first: dict[str, int]
    last: dict[str, int]
    external: frozenset[str]  # inputs and constants: not ours to reuse
    called: frozenset[str]  # tensors that library calls read or write
    pinned: frozenset[str]  # tensors that others may hold on to: views of them, or calls of unknown
    returned: frozenset[str]  # code, which may still read them when they have returned
    end: int

    @staticmethod
    def of(schedule: Schedule, program: Program) -> Lifetimes:
        owner = schedule.aliases

        def root(name: str) -> str:
            return owner.get(name, name)

        first: dict[str, int] = {}
        last: dict[str, int] = {}
        called: set[str] = set()
        pinned: set[str] = set()
        for k, step in enumerate(schedule.steps):
            if isinstance(step, Kernel):
                touched = [n for n, _ in (*step.reads, *step.writes)]
            else:
                touched = [*tensors_read(step), *(n for n in step.names if n)]
                called.update(root(n) for n in touched)
                if not step.op.startswith(("aten.", "prims.")):
                    pinned.update(root(n) for n in touched)
                pinned.update(root(n) for n in step.aliases if n is not None)
            for name in touched:
                first.setdefault(root(name), k)
                last[root(name)] = k
        end = len(schedule.steps)
        returned = {root(o.tensor) for o in program.outputs if o.tensor is not None}
        for name in returned:
            last[name] = end
        external = {d.name for d in program.defs if isinstance(d, (Input, Constant))}
        return Lifetimes(
            first,
            last,
            frozenset(external),
            frozenset(called),
            frozenset(pinned),
            frozenset(returned),
            end,
        )


def overwritable(kernel: Kernel, written: str, read: str, layouts: dict[str, Layout]) -> bool:
    """Whether `kernel` may write `written` into the memory of `read`, which dies there: every point
    reads only the element that it overwrites, and nobody reads it later."""
    a, b = layouts[written], layouts[read]
    if ITEMSIZE[a.dtype] != ITEMSIZE[b.dtype] or a.shape != b.shape or a.strides != b.strides:
        return False
    if any(name == read for name, _ in kernel.writes):
        return False
    touching = [
        nest
        for nest in kernel.nests
        if any(_reads(s, read) or _writes(s, written) for s in nest.stmts)
    ]
    return len(touching) == 1 and _in_place(touching[0], written, read)


def _expressions(s: Stmt) -> list[Expr]:
    """What a statement evaluates, loaded positions of a store included."""
    if not isinstance(s, Store):
        return [s.body]
    loaded = [a.expr for i in s.index for a in i.atoms() if isinstance(a, Value)]
    return [s.value, *loaded, *([s.mask] if s.mask is not None else [])]


def _loads(s: Stmt) -> Iterator[Expr]:
    for e in _expressions(s):
        yield from e.loads()


def _reads(s: Stmt, name: str) -> bool:
    return any(n.attr[0] == name for n in _loads(s))


def _writes(s: Stmt, name: str) -> bool:
    if isinstance(s, Store):
        return s.tensor == name
    return isinstance(s, Reduce) and s.partial and s.name == name


def _in_place(nest: Nest, written: str, read: str) -> bool:
    """Who generates code runs a statement as soon as the reductions that it uses are known, and
    statements of one loop in their order, stores last but those that stand before all reductions.
    So the overwriting store comes last when it uses all reductions that other readers of the
    operand use, and the operand has been read where the store stands."""
    stores = [s for s in nest.stmts if _writes(s, written)]
    if len(stores) != 1:
        return False
    store = stores[0]
    if not isinstance(store, Store) or store.accumulate is not None or store.mask is not None:
        return False
    if store.level != "point" and nest.reduced:
        return False  # it is little, and all threads of a row need what is read once per row
    waits = _dependences(nest)
    mine = waits[id(store)]
    seen = loaded = False
    for s in nest.stmts:
        loaded |= isinstance(s, Store) and not seen and _reads(s, read)
        if not _reads(s, read):
            seen = seen or s is store
            continue
        if any(n.attr[1] != store.index for n in _loads(s) if n.attr[0] == read):
            return False
        if s is store:
            seen = True
        elif isinstance(s, Store):
            if seen or s.level != store.level or not waits[id(s)] <= mine:
                return False
        elif seen and not loaded:
            return False
        elif s.name not in mine and not waits[id(s)] <= mine:
            return False  # it would run in a later pass
    return True


def _dependences(nest: Nest) -> dict[int, frozenset[str]]:
    """For each statement the reductions and scans that it uses, those that they use included."""
    local = nest.locals()
    known: dict[str, frozenset[str]] = {}
    out: dict[int, frozenset[str]] = {}
    for s in nest.stmts:
        needed: frozenset[str] = frozenset()
        for name in {n.attr[0] for n in _loads(s)} & local.keys():
            needed |= known.get(name, frozenset()) | {name}
        out[id(s)] = needed
        if not isinstance(s, Store):
            known[s.name] = needed
    return out


__all__ = ["Lifetimes", "overwritable"]
