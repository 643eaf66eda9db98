"""The guard's stage: what it is told of a graph, and how it has the graph compiled otherwise.

In: a loaded graph, and `recompile`, which takes a rewritten graph through the stages behind
"rewrite". Out: the same graph, whose first call measures uncertain kernels where nobody has yet
(`runtime.guard`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from deuteron.base.options import Options
from deuteron.base.passes import Context
from deuteron.base.record import Record
from deuteron.runtime import guard
from deuteron.runtime.artifact import next_number
from deuteron.runtime.guard import Clock, TimedForm
from deuteron.runtime.launch import Call
from deuteron.schedule.uncertain import uncertain
from deuteron.stages import Loaded, Rewritten

Recompile = Callable[[Rewritten, Context], Loaded]


def guarded(before: Loaded, context: Context, recompile: Recompile) -> Loaded:
    """The graph as it is, or with a first call that measures."""
    options, record = context.options, context.record
    if options.guard == "off":
        return before
    specs = {k.device: context.spec(k.device) for k in before.steps}
    reasons = {k.name: uncertain(k, specs[k.device]) for k in before.steps}
    reasons = {n: r for n, r in reasons.items() if r}
    effect = guard.effects(before.program)
    known = guard.remembered(before.key, options)
    why = "no kernel is uncertain" if not reasons else f"{effect} has effects" if effect else ""
    if known is not None:
        why = f"remembered, unfused: {', '.join(sorted(known)) or 'nothing'}"
    if why:
        record.add("decision", subject="guard", accepted=bool(known), reason=why, detail="")
        return before

    def again(options: Options) -> Context:
        """The context of the graph as another one of this process."""
        number = next_number()
        return replace(
            context, options=options, number=number, clock=None, path=(), place="", log=None
        )

    def timed_form(unfused: frozenset[str]) -> TimedForm:
        """The graph with these nodes unfused, and a clock around each step."""
        clock = Clock(any(k.device != "cpu" for k in before.steps))
        quiet = replace(options, guard="off", autotune=False, cudagraphs=False, debug_dir=None)
        loaded = recompile(
            replace(before, donated=frozenset(), traced=None),
            replace(again(quiet), record=Record(), unfused=unfused, clock=clock),
        )
        return TimedForm(loaded.call, loaded.schedule.steps, clock)

    def other_form(unfused: frozenset[str]) -> Call:
        """The graph with these nodes unfused, as it will run from now on."""
        usual = replace(options, guard="off", debug_dir=None)
        return recompile(replace(before, traced=None), replace(again(usual), unfused=unfused)).call

    measure = guard.Guard(
        before.program,
        before.schedule,
        reasons,
        timed_form,
        other_form,
        before.key,
        options,
        record,
    )
    return replace(before, call=measure.around(before.call))


__all__ = ["Recompile", "guarded"]
