"""The passes that make a program of a graph.

In: an ATen graph, as `graph.rewrite` leaves it. Out: a `Program`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from torch import fx

from deuteron.base.passes import Context, Pass, Table, run_passes
from deuteron.graph import ops
from deuteron.ir.printer import print_program
from deuteron.ir.program import Compute, Constant, Extern, Input, Program, tensors_read
from deuteron.ir.verify import verify_program
from deuteron.lower.diagonals import with_lines
from deuteron.lower.graph import Driver
from deuteron.lower.unrounded import unrounded


def lower_nodes(gm: fx.GraphModule, context: Context) -> Program:
    """Every node becomes loops, a library call, or a view of something."""
    program = Driver(gm, context).run()
    results = itertools.chain(*ops.results_of(gm.graph.output_node()))
    compared = {
        o.tensor
        for o, r in zip(program.outputs, results, strict=True)
        if not (isinstance(r, fx.Node) and r.meta.get(ops.UNCOMPARED_META))
    }
    names = {o.tensor for o in program.outputs if o.tensor is not None}
    return replace(program, uncompared=frozenset(names - compared))


def drop_dead(program: Program, context: Context) -> Program:
    """Definitions that nobody needs go."""
    return live(program)


def read_along_lines(program: Program, context: Context) -> Program:
    """What a difference of two positions decides is computed once for each; then nobody needs what
    it was computed from."""
    return live(with_lines(program))


def keep_unrounded(program: Program, context: Context) -> Program:
    """Half types are rounded where they are stored, and stay f32 inside kernels."""
    return unrounded(program) if context.options.precision == "float32" else program


def live(p: Program) -> Program:
    """The program without pure definitions that nobody reads."""
    needed = {o.tensor for o in p.outputs} | {s[1] for _, s in p.sizes if s[0] == "result"}
    targets = {d.name for d in p.defs if isinstance(d, Input)}
    needed_defs = []
    for d in reversed(p.defs):
        if isinstance(d, Compute):
            keep = d.name in needed or d.target in targets
            if keep and d.target is not None:
                targets.add(d.name)
        elif isinstance(d, Extern):
            keep = d.impure or bool(d.mutates) or any(n in needed for n in d.names)
            keep = keep or any(s is not None for s in d.sizes)
        else:
            keep = isinstance(d, Input) or d.name in needed
        if keep:
            needed_defs.append(d)
            needed.update(tensors_read(d))
    constants = {d.name for d in needed_defs if isinstance(d, Constant)}
    return Program(
        tuple(reversed(needed_defs)),
        p.outputs,
        p.sizes,
        {k: v for k, v in p.constants.items() if k in constants},
        p.callables,
        p.num_inputs,
        p.nodes,
        p.checks,
        p.uncompared,
    )


LOWERING: Table = (
    Pass("nodes", lower_nodes, verify_program, print_program),
    Pass("dead definitions", drop_dead, verify_program, print_program),
    Pass("diagonals", read_along_lines, verify_program, print_program),
    Pass("roundings", keep_unrounded, verify_program, print_program),
)


def lower(gm: fx.GraphModule, context: Context) -> Program:
    """The program of a graph. Raises `UnsupportedOp` for a node that can neither be generated nor
    called."""
    program: Program = run_passes(LOWERING, gm, context)
    return program


__all__ = ["LOWERING", "lower"]
