"""What is known of every load and store of a schedule's kernels: a statement, not a check.

In: a `Schedule`. Out: an `Access` for each load of and store to memory, with why it stays inside
its tensor:

    proven   for all values of the loops and sizes (`ir.ranges`)
    masked   it is not done where a mask is false
    loaded   at a position that the program loads, which lowering wraps and the kernel checks
             (option `bounds_check`)
    open     neither proven nor refuted by an example; `check_accesses` checks it when it runs
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deuteron.ir.expr import Expr
from deuteron.ir.index import Index, Value
from deuteron.ir.program import Layout
from deuteron.ir.verify_expr import range_verdict
from deuteron.schedule.kernel import Kernel, Nest, Reduce, Schedule, Store

ACCESS_STATES = ("proven", "masked", "loaded", "open")


@dataclass(frozen=True)
class Access:
    kernel: str
    kind: str  # load or store
    tensor: str
    index: tuple[Index, ...]
    state: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.kind} of {self.tensor}{list(self.index)}: {self.state}"


def access_state(index: tuple[Index, ...], layout: Layout, mask: Expr | None) -> str:
    """Why an access is inside its tensor."""
    if mask is not None:
        return "masked"
    verdicts = {range_verdict(i, n) for i, n in zip(index, layout.shape, strict=True)}
    if verdicts != {"proven"} and verdicts:
        return "open"
    return "loaded" if any(isinstance(a, Value) for i in index for a in i.atoms()) else "proven"


def accesses(schedule: Schedule) -> list[Access]:
    """Every access of every kernel, in order, each once."""
    listed: dict[Access, None] = {}
    for step in schedule.steps:
        if isinstance(step, Kernel):
            layouts = dict(step.reads) | dict(step.writes)
            for nest in step.nests:
                listed.update(dict.fromkeys(_of_nest(step.name, nest, layouts)))
    return list(listed)


def _of_nest(kernel: str, nest: Nest, layouts: dict[str, Layout]) -> Iterator[Access]:
    local = nest.locals()
    for s in nest.stmts:
        roots = [s.value, *([s.mask] if s.mask is not None else [])] if isinstance(s, Store) else []
        roots = roots or [s.body]  # type: ignore[union-attr]
        if isinstance(s, Store):
            roots += [a.expr for i in s.index for a in i.atoms() if isinstance(a, Value)]
        for root in roots:
            for n in root.loads():
                name, index, _ = n.attr
                if name not in local:
                    mask = n.args[0] if n.args else None
                    yield Access(
                        kernel, "load", name, index, access_state(index, layouts[name], mask)
                    )
        if isinstance(s, Reduce) and s.partial:  # split k stores row k of a tensor of that shape
            place = tuple(a.index for a in nest.reduced)
            yield Access(kernel, "store", s.name, place, "proven")
        if isinstance(s, Store):
            known = access_state(s.index, layouts[s.tensor], s.mask)
            yield Access(kernel, "store", s.tensor, s.index, known)


def summary(schedule: Schedule) -> dict[str, Any]:
    """How many accesses there are of each state, and those that are open."""
    listed = accesses(schedule)
    counts = {name: sum(a.state == name for a in listed) for name in ACCESS_STATES}
    return {**counts, "which": [str(a) for a in listed if a.state == "open"]}


__all__ = ["ACCESS_STATES", "Access", "accesses", "access_state", "summary"]
