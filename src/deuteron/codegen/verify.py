"""Verifier and printer of loops, what both code generators work on.

In: `loops.Loops` of a kernel. Out: nothing, or a `VerifyError`; lines of text. Invariants by name

    axes       the loops of a nest are distinct; a split axis is a parallel one; those of a group
               are some of a row's
    addresses  a load from memory has one index, its linear address; one of a result of the nest has
               none
    levels     what is computed or stored depends on loops that exist at its place

Further ones, of expressions, are those of `ir.verify`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from deuteron.codegen.loops import SPLIT, CrossRowReduce, Loops, Statement, Write, roots_of
from deuteron.ir.index import Axis
from deuteron.ir.printer import Expressions, index_text, name_text
from deuteron.ir.program import Layout
from deuteron.ir.verify import error
from deuteron.ir.verify_expr import Fault, facts, index_axes
from deuteron.schedule.kernel import Kernel, Scan


def verify_loops(kernel: Kernel, nests: Iterable[Loops], guilty: str) -> None:
    """Raises `VerifyError` for the first invariant that a nest of the kernel breaks."""
    for k, loops in enumerate(nests):
        try:
            verify_nest(loops)
        except Fault as fault:
            raise error(fault, f"nest {k} of {kernel.name}", kernel.origins, guilty) from None


def verify_nest(loops: Loops) -> None:
    axes = (*loops.parallel, *loops.reduced)
    if len({a.name for a in axes}) != len(axes):
        raise Fault("axes", f"the loops {list(axes)} are not distinct")
    if loops.row_split is not None and loops.row_split[0] not in loops.parallel:
        raise Fault("axes", f"{loops.row_split[0]!r} is split, and no parallel loop")
    if not {*loops.group_axes} <= {*loops.reduced}:
        raise Fault("axes", f"groups along {list(loops.group_axes)} of rows along {loops.reduced}")
    for n in loops.nodes:
        if n.op == "load" and len(n.attr[1]) != (n.attr[0] not in loops.results):
            raise Fault("addresses", f"{n!r} has {len(n.attr[1])} indices")
    for s in loops.statements:
        verify_levels(s, loops)


def verify_levels(s: Statement, loops: Loops) -> None:
    there: set[Axis] = {*loops.parallel, *loops.reduced}
    if isinstance(s, Write):
        inner = {"row": loops.reduced, "group": loops.group_axes}.get(s.level, ())
        there -= {*inner}
    for e in roots_of(s):
        outside = facts(e).free - there
        if outside:
            raise Fault("levels", f"{name_of(s)} depends on {sorted(outside)}")
    if isinstance(s, (Write, CrossRowReduce)):
        there |= (
            {SPLIT}
            if isinstance(s, CrossRowReduce)
            else {*filter(None, (s.unrolled_axis, s.along))}
        )
        outside = index_axes(s.address) - there
        if outside:
            raise Fault("levels", f"the address of {name_of(s)} depends on {sorted(outside)}")


def name_of(s: Statement) -> str:
    return f"the store to {s.tensor}" if isinstance(s, Write) else s.name


# -- text ------------------------------------------------------------------------------------------


def loops_text(kernel: Kernel, nests: Sequence[Loops]) -> str:
    """The nests of a kernel; loads and stores are at linear addresses."""
    lines = [f"kernel {kernel.name}:"]
    for k, loops in enumerate(nests):
        lines += ["    barrier"] * (k in kernel.barriers)
        lines += [
            f"    {line}" for line in nest_lines(loops, dict((*kernel.reads, *kernel.writes)))
        ]
    return "\n".join(lines)


def nest_lines(loops: Loops, layouts: Mapping[str, Layout]) -> list[str]:
    head = f"for {axes_text(loops.parallel)}" if loops.parallel else "once"
    head += f"; over {axes_text(loops.reduced)}" if loops.reduced else ""
    if loops.row_split is not None:
        head += f"; {loops.row_split[0]!r} in {loops.row_split[1]} splits"
    dtypes = {n: lay.dtype for n, lay in layouts.items()}
    ex = Expressions(dtypes, (r for s in loops.statements for r in roots_of(s)), loops.results)
    out = [f"{head}:"]
    for s in loops.statements:
        shown = len(ex.lines)
        text = statement_text(s, ex)
        out += [f"    {line}" for line in (*ex.lines[shown:], text)]
    return out


def axes_text(axes: Iterable[Axis]) -> str:
    return ", ".join(f"{a!r} < {index_text(a.extent)}" for a in axes)


def statement_text(s: Statement, ex: Expressions) -> str:
    texts = ex.print(roots_of(s))
    if not isinstance(s, Write):
        kind = f"scan_{s.kind}" if isinstance(s, Scan) else s.kind
        place = f"[{ex.index(s.address)}]" if isinstance(s, CrossRowReduce) else ""
        return f"{name_text(s.name)}{place} = {kind}({texts[0]})"
    sign = "=" if s.accumulate is None else f"={s.accumulate}="
    values = ", ".join(texts[: 1 + len(s.others)])
    text = f"{name_text(s.tensor)}[{ex.index(s.address)}] {sign} {values}"
    if s.mask is not None:
        text += f"  where {texts[1 + len(s.others)]}"
    return f"{text}  # {s.level}"


__all__ = ["loops_text", "verify_loops"]
