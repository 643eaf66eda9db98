"""Verifier of memory plans: names the first broken invariant, the tensor and the guilty pass.

In: a `MemoryPlan`, the `Schedule` and the `Program` that it is for. Out: nothing, or a
`VerifyError`. Invariants by name

    placed  a tensor that a kernel writes, and that is nobody else's, is a buffer or has a slot,
            which is there from before it is written until it is read last
    alive   nothing is let go before its memory is read last
    shared  tensors that share memory do not live at once: each is written when the one before it is
            read last, or later
"""

from __future__ import annotations

from deuteron.ir.program import Program
from deuteron.ir.verify import Fault, error
from deuteron.memory.lifetimes import Lifetimes
from deuteron.memory.plan import MemoryPlan
from deuteron.schedule.kernel import Kernel, Schedule


def verify_plan(plan: MemoryPlan, schedule: Schedule, program: Program, guilty: str) -> None:
    """Raises `VerifyError` for the first invariant that the plan breaks."""
    life = Lifetimes.of(schedule, program)
    last = last_uses(plan, life)
    for k, step in enumerate(schedule.steps):
        written = [n for n, _ in step.writes] if isinstance(step, Kernel) else ()
        for name in written:
            try:
                verify_placed(plan, schedule, life, name, k, last)
            except Fault as fault:
                raise error(fault, name, step.origins, guilty) from None
    for k, names in plan.dies.items():
        for name in names:
            until = last.get(home_of(plan, schedule, name), -1)
            if until > k:
                lost = Fault("alive", f"it is let go after step {k}, and needed in step {until}")
                raise error(lost, name, (), guilty)
    verify_shared(plan, schedule, life, guilty)


def home_of(plan: MemoryPlan, schedule: Schedule, name: str) -> str:
    """The tensor at whose address another one is."""
    name = schedule.aliases.get(name, name)
    return plan.home.get(name, name)


def last_uses(plan: MemoryPlan, life: Lifetimes) -> dict[str, int]:
    """The step that touches a memory last."""
    last: dict[str, int] = {}
    for name, k in life.last.items():
        root = plan.home.get(name, name)
        last[root] = max(k, last.get(root, k))
    return last


def verify_placed(
    plan: MemoryPlan,
    schedule: Schedule,
    life: Lifetimes,
    name: str,
    step: int,
    last: dict[str, int],
) -> None:
    root = home_of(plan, schedule, name)
    if root in life.external or root in plan.given.values():
        return
    if root in plan.buffers:
        if plan.buffers[root] > step:
            raise Fault("placed", f"step {step} writes it before {root} is allocated")
        return
    if root not in plan.slot:
        if not any(root in s.names for s in schedule.steps if not isinstance(s, Kernel)):
            raise Fault("placed", f"{root} has no memory")
        return
    device, number = plan.slot[root]
    slot = plan.arenas[device].slots[number]
    if slot.first > step or slot.last < last[root]:
        uses = f"steps {step} to {last[root]}"
        raise Fault("placed", f"{root} has memory in steps {slot.first} to {slot.last}, not {uses}")


def verify_shared(plan: MemoryPlan, schedule: Schedule, life: Lifetimes, guilty: str) -> None:
    tenants: dict[str, list[str]] = {}
    for name, root in plan.home.items():
        if name in life.first and name not in schedule.aliases:
            tenants.setdefault(root, [root] if root in life.first else []).append(name)
    for names in tenants.values():
        names = sorted(dict.fromkeys(names), key=lambda n: (life.first[n], life.last[n]))
        for one, other in zip(names, names[1:]):
            if life.last[one] > life.first[other]:
                fault = Fault(
                    "shared",
                    f"step {life.first[other]} writes it over {one}, "
                    f"which step {life.last[one]} needs",
                )
                raise error(fault, other, (), guilty)


__all__ = ["verify_plan"]
