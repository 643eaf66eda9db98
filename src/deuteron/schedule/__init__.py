"""Scheduling: which computations share a kernel.

In: a `Program`. Out: a `Schedule`, and every decision in the Record. The passes, in order:

    normalize    canonical axes; producers written into their readers
    dag          what must run before what
    fuse         best-first merges: `legality` says whether, `profit` says how much
    reindex      reductions over permuted points in the order of memory
    split        reductions with few rows in two steps
    recompute    what is cheaper to compute again than to read
    join         short kernels in one launch
    build        kernels with names, nests and costs
"""

from __future__ import annotations

from deuteron.base.device import DeviceSpec, device_spec_for
from deuteron.base.options import Options
from deuteron.base.record import Record
from deuteron.ir.program import Extern, Program, memory_of
from deuteron.schedule.build import build, needed_outside
from deuteron.schedule.dag import Dag
from deuteron.schedule.fuse import Fusion
from deuteron.schedule.horizontal import Joiner, Launch
from deuteron.schedule.kernel import Schedule
from deuteron.schedule.normalize import canonical, keeps_apart, normalize
from deuteron.schedule.recompute import recompute
from deuteron.schedule.reindex import reindex
from deuteron.schedule.split import relieve


def schedule(
    program: Program,
    options: Options,
    record: Record,
    spec: DeviceSpec | None = None,
    apart: frozenset[str] = frozenset(),
) -> Schedule:
    """Kernels and library calls in execution order. `spec` stands for every device, where kernels
    are not made for the one that the tensors are on. What does the graph's nodes `apart` shares no
    kernel (`runtime.guard`)."""
    layouts = program.layouts()
    specs: dict[str, DeviceSpec] = {
        d: spec or device_spec_for(d, options)
        for d in sorted({lay.device for lay in layouts.values()})
    }
    owner = memory_of(program)
    if options.fusion:
        computes = normalize(program, layouts, specs, record, apart)
    else:
        computes = {d.name: canonical(d) for d in program.computes()}
    dag = Dag.of(program, computes, owner)
    fusion = Fusion(dag, layouts, owner, needed_outside(program), specs, record)
    fusion.apart = {n for n, c in computes.items() if keeps_apart(c, apart)}
    if options.fusion:
        fusion.run()
        reindex(fusion)
        while relieve(fusion):  # many partial results are split again
            pass
        recompute(fusion)
        fusion.report()
    groups = [
        n.content if isinstance(n.content, Extern) else (n.content, fusion.cost(n).us)
        for n in dag.order()
    ]
    if options.fusion:
        launches = Joiner(layouts, owner, specs, record).run(groups)
    else:
        launches = [s if isinstance(s, Extern) else Launch.of(*s, layouts) for s in groups]
    return build(launches, program, layouts, specs)


__all__ = ["schedule"]
