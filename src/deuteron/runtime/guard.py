"""The guard (option `guard`): fused kernels are measured against the unfused form where the cost
model's prediction is uncertain, and the better one stays.

In: a graph's compilation, and functions that compile it anew, with some nodes unfused (each
operation a kernel of its own, products library calls) and a clock around every step. Out: a
callable. Its first call runs both forms a few times on the call's own tensors; what they write to
is a copy, random states are put back. Steps that do the same nodes are compared as one. What was
found is kept in the cache under the program's text, so that later processes compile the better form
at once. With changing sizes the first call's decide.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from deuteron.base.errors import DeuteronError
from deuteron.base.options import Options
from deuteron.base.record import Record
from deuteron.ir.program import Compute, Extern, Input, Program
from deuteron.runtime.cache import Cache, fingerprint, key_of
from deuteron.schedule.kernel import Kernel, Schedule, Step

Call = Callable[[list[Any]], Sequence[Any]]

# Times that both forms run: the first of each is not counted.
ROUNDS = 4
# Another form is taken only if it saves this part of the time.
MIN_GAIN = 0.05
# Cycles that a GPU waits before a step, so that the host is ahead of it: about 100 us.
HEAD_START_CYCLES = 200_000


class Clock:
    """Least microseconds of each step. `start` is what a module calls before one, what it returns
    is called after it."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.us: dict[int, float] = {}
        self.events: list[tuple[int, Any, Any]] = []

    def start(self, step: int) -> Callable[[], None]:
        if self.cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HEAD_START_CYCLES)
            begin.record()
            self.events.append((step, begin, end))
            return end.record  # type: ignore[no-any-return]
        before = perf_counter()

        def stop() -> None:
            self.note(step, (perf_counter() - before) * 1e6)

        return stop

    def note(self, step: int, us: float) -> None:
        self.us[step] = min(us, self.us.get(step, us))

    def settle(self) -> None:
        """Reads what a GPU's events say, after a call."""
        if self.cuda:
            torch.cuda.synchronize()
        for step, begin, end in self.events:
            self.note(step, float(begin.elapsed_time(end)) * 1e3)
        self.events.clear()


@dataclass(frozen=True)
class TimedForm:
    """One way to run the graph, with a clock around each step."""

    call: Call
    steps: tuple[Step, ...]
    clock: Clock


def nodes_of(step: Step) -> frozenset[str]:
    """The graph's nodes that a step does."""
    return frozenset(o.node for o in step.origins)


@dataclass
class Comparison:
    """Steps of both forms that do the same nodes, directly or by way of others."""

    nodes: set[str]
    fused: list[int] = field(default_factory=list)
    unfused: list[int] = field(default_factory=list)


def compared(fused: Sequence[Step], unfused: Sequence[Step]) -> list[Comparison]:
    """All steps, in groups that share no node."""
    groups: list[Comparison] = []
    for which, steps in enumerate((fused, unfused)):
        for k, step in enumerate(steps):
            nodes = set(nodes_of(step))
            met = [g for g in groups if g.nodes & nodes]
            groups = [g for g in groups if not g.nodes & nodes]
            one = Comparison(nodes.union(*(g.nodes for g in met)))
            for g in met:
                one.fused += g.fused
                one.unfused += g.unfused
            (one.unfused if which else one.fused).append(k)
            groups.append(one)
    return groups


def written_inputs(program: Program) -> tuple[int, ...]:
    """Positions of the inputs that a call may write to."""
    owner: dict[str, str] = {}
    written: set[str] = set()
    for d in program.defs:
        if isinstance(d, Compute) and d.target is not None:
            owner[d.name] = owner.get(d.target, d.target)
            written.add(owner[d.name])
        elif isinstance(d, Extern):
            owner.update({n: owner.get(a, a) for n, a in zip(d.names, d.aliases) if n and a})
            written.update(owner.get(n, n) for n in d.mutates)
    return tuple(d.position for d in program.defs if isinstance(d, Input) and d.name in written)


def effects(program: Program) -> str:
    """A call that must not be repeated; empty without one. Random states are put back."""
    for d in program.defs:
        if isinstance(d, Extern) and d.impure and not d.mutates and not _seeded(d.op):
            return d.op
    return ""


def _seeded(op: str) -> bool:
    operator: Any = torch.ops
    for part in op.split("."):
        operator = getattr(operator, part, None)
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


@dataclass
class Guard:
    """What a graph's first call decides. `form(unfused)` compiles it anew."""

    program: Program
    schedule: Schedule
    reasons: dict[str, str]  # uncertain kernel -> why
    form: Callable[[frozenset[str]], TimedForm]
    final: Callable[[frozenset[str]], Call]
    key: str
    options: Options
    record: Record

    def around(self, call: Call) -> Call:
        """The graph's callable: `call`, or after the first call what is better."""
        now: list[Call] = [call]
        still = [True]

        def guarded(args: list[Any]) -> Sequence[Any]:
            if still[0] and not recording():
                still[0] = False
                now[0] = self.measured(call, args)
            return now[0](args)

        guarded._boxed_call = True  # type: ignore[attr-defined]
        return guarded

    def measured(self, call: Call, args: list[Any]) -> Call:
        """The better form for these arguments, which stay as they are."""
        try:
            unfused = self.measure(args)
        except (torch.OutOfMemoryError, RuntimeError, DeuteronError) as e:
            # What the program raises it raises again in the call itself.
            self.note(False, f"not measured: {type(e).__name__}: {str(e)[:200]}")
            return call
        remember(self.key, unfused, self.options)
        return self.final(unfused) if unfused else call

    def measure(self, args: list[Any]) -> frozenset[str]:
        """The nodes that are better unfused."""
        wanted = {
            k: s
            for k, s in enumerate(self.schedule.steps)
            if isinstance(s, Kernel) and s.name in self.reasons
        }
        every = frozenset(n for s in wanted.values() for n in nodes_of(s))
        forms = [self.form(frozenset()), self.form(every)]
        written = set(written_inputs(self.program))
        devices = sorted({x.device.index or 0 for x in args if isinstance(x, Tensor) and x.is_cuda})
        with torch.random.fork_rng(devices=devices):
            for r in range(ROUNDS):
                for f in forms:
                    if r == 1:
                        f.clock.us.clear()
                    f.call([x.clone() if k in written else x for k, x in enumerate(args)])
                    f.clock.settle()
        better: set[str] = set()
        for c in compared(forms[0].steps, forms[1].steps):
            names = [wanted[k].name for k in c.fused if k in wanted]
            if not names:
                continue
            one, two = (
                sum(f.clock.us.get(k, 0.0) for k in steps)
                for f, steps in zip(forms, (c.fused, c.unfused), strict=True)
            )
            take = two < (1 - MIN_GAIN) * one
            why = ", ".join(dict.fromkeys(self.reasons[n] for n in names))
            self.note(take, f"{', '.join(names)} ({why}): fused {one:.1f} us, unfused {two:.1f} us")
            if take:
                better |= c.nodes & every
        return frozenset(better)

    def note(self, unfused: bool, detail: str) -> None:
        self.record.add(
            "decision",
            subject="guard",
            accepted=unfused,
            reason="unfused is faster" if unfused else "fused stays",
            detail=detail,
        )


def recording() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_current_stream_capturing())


def key(text: str, program: Program, where: str, options: Options) -> str:
    """Under which a decision is kept: the program, its nodes, the machine, the options, and the
    compiler, whose kernels were measured."""
    nodes = repr([getattr(d, "origins", ()) and [o.node for o in d.origins] for d in program.defs
                  if isinstance(d, (Compute, Extern))])  # fmt: skip
    threads = options.threads or torch.get_num_threads()
    return key_of("guard", fingerprint(), text, nodes, where, str(threads), options.codegen_key())


def remember(key: str, unfused: frozenset[str], options: Options) -> None:
    if options.cache:
        entry = json.dumps({"unfused": sorted(unfused)}).encode()
        Cache.open(options).put(key, ".json", entry)


def remembered(key: str, options: Options) -> frozenset[str] | None:
    """The nodes that some process found better unfused; None where none has measured."""
    path = Cache.open(options).get(key, ".json") if options.cache else None
    return None if path is None else frozenset(json.loads(path.read_text()).get("unfused", ()))


__all__ = ["Clock", "TimedForm", "Guard", "effects", "key", "remembered"]
