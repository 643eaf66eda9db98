"""Groups in execution order become the `Schedule`.

In: steps (groups and library calls) and the program. Out: kernels with names that say what is
inside, their nests, and what each moves, computes and is predicted to take.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from deuteron.base.device import DeviceSpec
from deuteron.ir.expr import Expr
from deuteron.ir.program import (
    Compute,
    Extern,
    Layout,
    Origin,
    Program,
    memory_of,
    tensors_read,
)
from deuteron.schedule.contract import Contracted
from deuteron.schedule.group import Group, Member
from deuteron.schedule.horizontal import Call, Launch
from deuteron.schedule.kernel import Kernel, Nest, Reduce, Schedule, Step, Store
from deuteron.schedule.picked import picked
from deuteron.schedule.profit import Cost, cost, kernel_us

MAX_NAME_LENGTH = 72


def needed_outside(program: Program) -> set[str]:
    """Tensors that outputs view."""
    return {o.tensor for o in program.outputs if o.tensor is not None}


class Namer:
    """Distinct kernel names."""

    def __init__(self) -> None:
        self.count = 0

    def name(self, groups: Sequence[Group]) -> str:
        members = [m for g in groups for m in g.members]
        kind = "poi"
        if any(m.kind in ("reduction", "column", "scan") for m in members):
            kind = "con" if any(_contracts(m) for m in members) else "red"
        return self.made(kind, [m.compute for m in members])

    def contraction(self, computes: Sequence[Compute]) -> str:
        return self.made("con", computes)

    def made(self, kind: str, computes: Iterable[Compute]) -> str:
        words = dict.fromkeys(_word(o.op) for c in computes for o in c.origins)
        text = "_".join(w for w in words if w) or "fused"
        if len(text) > MAX_NAME_LENGTH:
            text = text[:MAX_NAME_LENGTH].rsplit("_", 1)[0]
        out = f"{kind}_fused_{text}_{self.count}"
        self.count += 1
        return out


def _word(op: str) -> str:
    """ "aten.add.Tensor" -> "add"."""
    parts = op.split(".")
    return re.sub(r"\W", "", parts[1] if len(parts) > 1 else parts[0], flags=re.ASCII).strip("_")


def _contracts(m: Member) -> bool:
    """Whether it is a sum of products of two tensors that do not both have all axes."""
    body = m.compute.body
    if body.op != "reduce" or body.attr[0] != "sum":
        return False
    inner = body.args[0]
    while inner.op == "cast":
        inner = inner.args[0]
    if inner.op != "mul":
        return False
    axes = [
        frozenset(a for r in x.loads() for i in r.attr[1] for a in i.axes()) for x in inner.args
    ]
    return bool(axes[0] - axes[1]) and bool(axes[1] - axes[0])


def origins_of(groups: Iterable[Group]) -> tuple[Origin, ...]:
    origins: dict[Origin, None] = {}
    for g in groups:
        for m in g.members:
            origins.update(dict.fromkeys(m.compute.origins))
    return tuple(origins)


def accesses(nest: Nest) -> tuple[dict[str, None], dict[str, None]]:
    """Tensors in memory that a nest reads and writes."""
    local = nest.locals()
    reads: dict[str, None] = {}
    writes: dict[str, None] = {}

    def visit(e: Expr) -> None:
        for n in e.loads():
            if n.attr[0] not in local:
                reads[n.attr[0]] = None

    for s in nest.stmts:
        if isinstance(s, Store):
            visit(s.value)
            if s.mask is not None:
                visit(s.mask)
            for i in s.index:
                for a in i.atoms():
                    if a.rank == 3:
                        visit(a.expr)  # type: ignore[attr-defined]
            writes[s.tensor] = None
        else:
            visit(s.body)
            if isinstance(s, Reduce) and s.partial:
                writes[s.name] = None
    return reads, writes


def kernel(
    groups: Sequence[Group],
    stored: set[str],
    layouts: dict[str, Layout],
    spec: DeviceSpec,
    name: str,
    device: str,
    barriers: tuple[int, ...],
    owner: Mapping[str, str],
) -> Kernel:
    """One launch: a nest per group. `owner`: of tensors that live in another's memory."""
    nests: list[Nest] = []
    costs: list[Cost] = []
    reads: dict[str, None] = {}
    writes: dict[str, None] = {}
    for g in groups:
        keep = [m.name for m in g.members if m.name in stored and m.kind != "column"]
        nest = g.nest(layouts, keep)
        r, w = accesses(nest)
        reads.update(r)
        writes.update(w)
        nests.append(nest)
        costs.append(cost(g, layouts, keep, spec, whole=True))  # what was split is split
    overwrites = [m.name for g in groups for m in g.members if m.compute.target is not None]
    lost = {owner.get(n, n) for n in overwrites}
    return Kernel(
        name=name,
        nests=tuple(nests),
        reads=tuple((n, layouts[n]) for n in reads),
        writes=tuple((n, layouts[n]) for n in writes),
        origins=origins_of(groups),
        device=device,
        bytes=sum(c.bytes for c in costs),
        flops=sum(c.flops for c in costs),
        predicted_us=kernel_us(costs, spec),
        barriers=barriers,
        overwrites=frozenset(overwrites),
        overwritten=frozenset(n for n in reads if owner.get(n, n) in lost),
    )


def contracted(step: Contracted, layouts: dict[str, Layout], name: str) -> Kernel:
    """The kernel of products with what surrounds them."""
    reads, writes = step.nest.tensors()
    return Kernel(
        name=name,
        nests=(),
        reads=tuple((n, layouts[n]) for n in reads),
        writes=tuple((n, layouts[n]) for n in writes),
        origins=tuple(dict.fromkeys(o for c in step.computes for o in c.origins)),
        device=step.device,
        bytes=round(step.estimate.bytes),
        flops=step.estimate.flops,
        predicted_us=step.estimate.us,
        contraction=picked(step.nest, step.tiling),
    )


def readers(steps: Sequence[Launch | Call]) -> dict[str, set[int]]:
    """Who reads each tensor: groups are counted one by one, calls after them."""
    out: dict[str, set[int]] = {}
    k = 0
    for step in steps:
        if not isinstance(step, Launch):
            if isinstance(step, Extern):
                names = [*tensors_read(step), *step.mutates]
            else:
                names = [*step.nest.tensors()[0]]
            for n in names:
                out.setdefault(n, set()).add(k)
            k += 1
            continue
        for g in step.groups:
            for n in g.inputs:
                out.setdefault(n, set()).add(k)
            k += 1
    return out


def build(
    steps: Sequence[Launch | Call],
    program: Program,
    layouts: dict[str, Layout],
    specs: dict[str, DeviceSpec],
) -> Schedule:
    """The schedule; `steps` are in execution order."""
    read, outside, namer = readers(steps), needed_outside(program), Namer()
    owner = memory_of(program)
    out: list[Step] = []
    for step in steps:
        if isinstance(step, Extern):
            out.append(step)
            continue
        if isinstance(step, Contracted):
            out.append(contracted(step, layouts, namer.contraction(step.computes)))
            continue
        made = {m.name for g in step.groups for m in g.members if m.kind != "column"}
        stored = {n for n in made if n in outside or read.get(n)}
        spec, name = specs[step.device], namer.name(step.groups)
        where = (step.device, tuple(step.barriers), owner)
        out.append(kernel(step.groups, stored, layouts, spec, name, *where))
    return Schedule(tuple(out), owner, layouts)


__all__ = ["accesses", "build", "kernel", "needed_outside"]
