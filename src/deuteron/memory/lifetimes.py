"""When each tensor is born and dies, and which kernels may write over an operand.

In: a `Schedule` and its `Program`. Out: `Lifetimes`: for each tensor the step that writes it first
and the last step that touches it. Memory that lives in another's counts for its owner.
"""

from __future__ import annotations

from dataclasses import dataclass

from deuteron.ir.expr import ITEMSIZE, Expr
from deuteron.ir.program import Constant, Input, Layout, Program, tensors_read
from deuteron.schedule.kernel import Fold, Kernel, Nest, Schedule, Store


@dataclass(frozen=True)
class Lifetimes:
    """Steps by number; `end` is the number of steps for what outlives the call."""

    first: dict[str, int]
    last: dict[str, int]
    external: frozenset[str]  # inputs and constants: not ours to reuse
    called: frozenset[str]  # tensors that library calls read or write
    returned: frozenset[str]
    end: int

    @staticmethod
    def of(schedule: Schedule, program: Program) -> Lifetimes:
        owner = schedule.aliases

        def root(name: str) -> str:
            return owner.get(name, name)

        first: dict[str, int] = {}
        last: dict[str, int] = {}
        called: set[str] = set()
        for k, step in enumerate(schedule.steps):
            if isinstance(step, Kernel):
                touched = [n for n, _ in (*step.reads, *step.writes)]
            else:
                touched = [*tensors_read(step), *(n for n in step.names if n)]
                called.update(root(n) for n in touched)
            for name in touched:
                first.setdefault(root(name), k)
                last[root(name)] = k
        end = len(schedule.steps)
        returned = {root(o.tensor) for o in program.outputs if o.tensor is not None}
        for name in returned:
            last[name] = end
        external = {d.name for d in program.defs if isinstance(d, (Input, Constant))}
        return Lifetimes(
            first, last, frozenset(external), frozenset(called), frozenset(returned), end
        )


def overwritable(kernel: Kernel, written: str, read: str, layouts: dict[str, Layout]) -> bool:
    """Whether `kernel` may write `written` into the memory of `read`, which dies there: every point
    reads only the element that it overwrites, and nobody reads it later."""
    a, b = layouts[written], layouts[read]
    if ITEMSIZE[a.dtype] != ITEMSIZE[b.dtype] or a.shape != b.shape or a.strides != b.strides:
        return False
    if any(name == read for name, _ in kernel.writes):
        return False
    found: Nest | None = None
    for nest in kernel.nests:
        touches = any(n.attr[0] == read for e in nest.exprs() for n in e.loads())
        stores = any(_writes(s, written) for s in nest.stmts)
        if touches or stores:
            if found is not None:
                return False
            found = nest
    return found is not None and _in_place(found, written, read)


def _writes(s: object, name: str) -> bool:
    return (
        isinstance(s, Store)
        and s.tensor == name
        or isinstance(s, Fold)
        and s.partial
        and s.name == name
    )


def _in_place(nest: Nest, written: str, read: str) -> bool:
    stores = [k for k, s in enumerate(nest.stmts) if _writes(s, written)]
    if len(stores) != 1:
        return False
    store = nest.stmts[stores[0]]
    if not isinstance(store, Store) or store.accumulate is not None or store.mask is not None:
        return False
    for k, s in enumerate(nest.stmts):
        roots: list[Expr] = [s.value] if isinstance(s, Store) else [s.body]
        if isinstance(s, Store) and s.mask is not None:
            roots.append(s.mask)
        loads = [n for e in roots for n in e.loads() if n.attr[0] == read]
        if loads and (k > stores[0] or any(n.attr[1] != store.index for n in loads)):
            return False
    return True


__all__ = ["Lifetimes", "overwritable"]
