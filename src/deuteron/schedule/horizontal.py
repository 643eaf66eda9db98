"""Horizontal fusion: one launch for kernels that share no loops.

In: groups and calls in execution order. Out: that order, with neighbouring groups as nests of one
kernel where a launch costs more than it is worth. Nests side by side are independent; where one
needs another's results, on a CPU, a barrier stands between them. (On a GPU the program that
finishes last could go on alone: H200, 94 kernels of 24 models drawn by date took 1.9 us longer so
than two kernels each, as long as a launch.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deuteron.base.device import DeviceSpec
from deuteron.base.record import Record
from deuteron.ir.index import hint
from deuteron.ir.program import Extern, Layout
from deuteron.schedule import profit
from deuteron.schedule.contract import Contracted, OrderedStep
from deuteron.schedule.cooperative import MIN_COOPERATIVE_ROW
from deuteron.schedule.group import Group

# Nests of one kernel, at most: registers and code size are those of the largest.
MAX_NESTS = 12
# Kernels up to this long are worth fusing, in launches; longer ones hide the launch.
SHORT_LAUNCHES = 4.0
CPU_SHORT_US = 30.0
# How much longer arithmetic takes than memory where it decides. H200, us: ranks of 32768 places in
# blocks of 1024, and sums of columns: 5.4 and 6.1, in one kernel 29.8.
COMPUTE_BOUND_RATIO = 4.0


Call = Extern | Contracted  # what runs alone


@dataclass
class Launch:
    """The nests of one kernel."""

    groups: list[Group]
    device: str
    us: float
    barriers: list[int] = field(default_factory=list)

    @staticmethod
    def of(group: Group, us: float, layouts: Mapping[str, Layout]) -> Launch:
        return Launch([group], layouts[group.members[0].name].device, us)

    def since_barrier(self) -> list[Group]:
        return self.groups[self.barriers[-1] if self.barriers else 0 :]


def made(groups: Iterable[Group]) -> set[str]:
    """Tensors in memory that the groups may write."""
    out: set[str] = set()
    for g in groups:
        out.update(m.name for m in g.members)
        out.update(g.partials.values())
    return out


def may_be_cooperative(groups: Iterable[Group]) -> bool:
    """Whether programs may share the rows of any, which they do in kernels of one nest."""
    return any(g.reductions and hint(g.space.row) >= MIN_COOPERATIVE_ROW for g in groups)


class HorizontalFusion:
    def __init__(
        self,
        layouts: Mapping[str, Layout],
        owner: Mapping[str, str],
        specs: Mapping[str, DeviceSpec],
        record: Record,
    ) -> None:
        self.layouts, self.owner, self.specs, self.record = layouts, owner, specs, record

    def memory(self, names: Iterable[str]) -> set[str]:
        return {self.owner.get(n, n) for n in names}

    def needs(self, first: Sequence[Group], second: Group) -> bool:
        """Whether `second` reads or overwrites what `first` touches, or the other way round."""
        written = self.memory(made(first))
        read = self.memory(n for g in first for n in g.inputs)
        theirs = self.memory(made([second]))
        return bool(written & self.memory(second.inputs) or (read | written) & theirs)

    def run(self, steps: Sequence[OrderedStep]) -> list[Launch | Call]:
        out: list[Launch | Call] = []
        for step in steps:
            if isinstance(step, Call):
                out.append(step)
                continue
            group, us = step
            last = out[-1] if out else None
            if isinstance(last, Launch) and self.fuse(last, group, us):
                continue
            out.append(Launch.of(group, us, self.layouts))
        return out

    def fuse(self, k: Launch, group: Group, us: float) -> bool:
        device = self.layouts[group.members[0].name].device
        if device != k.device or len(k.groups) >= MAX_NESTS:
            return False
        spec = self.specs[device]
        depends = self.needs(k.since_barrier(), group)
        writes = any(m.kind == "write" for g in (*k.groups, group) for m in g.members)
        if depends and (writes or spec.kind != "cpu" or us > CPU_SHORT_US):
            return False
        alike = self.computes(k.groups[-1], spec) == self.computes(group, spec)
        if not depends and (min(us, k.us) > short(spec) or not alike):
            return False
        if not depends and spec.kind == "cuda" and may_be_cooperative([*k.groups, group]):
            return False
        k.barriers += [len(k.groups)] * depends
        reason = "a barrier costs less than a launch" if depends else "independent and short"
        self.note(k.groups[-1], group, reason, device)
        k.groups.append(group)
        k.us += us
        return True

    def note(self, first: Group, second: Group, reason: str, device: str) -> None:
        self.record.add(
            "decision",
            subject="horizontal",
            accepted=True,
            reason=reason,
            detail="",
            first=first.members[-1].name,
            second=second.members[-1].name,
            bytes=0,
            us=round(profit.launch_us(self.specs[device]), 3),
        )

    def computes(self, group: Group, spec: DeviceSpec) -> bool:
        """Whether it takes the time of its arithmetic: beside others, with their warps and
        registers, it takes longer."""
        if spec.kind == "cpu":
            return False
        cost = self.cost(group, spec)
        return spec.compute_us(cost.flops) > COMPUTE_BOUND_RATIO * spec.memory_us(cost.bytes)

    def cost(self, group: Group, spec: DeviceSpec) -> profit.Cost:
        keep = [m.name for m in group.members if m.name in group.names]
        return profit.cost(group, dict(self.layouts), keep, spec)


def short(spec: DeviceSpec) -> float:
    """Microseconds up to which a kernel is short."""
    return CPU_SHORT_US if spec.kind == "cpu" else SHORT_LAUNCHES * spec.launch_us


__all__ = ["Call", "HorizontalFusion", "Launch"]
