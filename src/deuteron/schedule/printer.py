"""Schedules as text: each kernel's loops and what happens in them, each library call.

In: a `Schedule`. Out: text for people (debug folders, reports); it does not read back. Expressions
are those of `ir.printer`; registers (reductions and scans of the nest) appear by their names::

    kernel softmax_0 on cpu: 4096 bytes, 9000 flops, 1.2 us
        reads x: f32[s0, 8]
        writes y: f32[s0, 8]
        for i < s0; over j < 8:
            top = max[j](x[i, j])
            _1 = exp(x[i, j] - top)
            total = sum[j](_1)
            y[i, j] = _1 / total
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Value
from deuteron.ir.nest import Nest as ContractionNest
from deuteron.ir.nest import Store as ContractionStore
from deuteron.ir.nest import roots
from deuteron.ir.printer import (
    Expressions,
    call_text,
    index_text,
    layout_text,
    name_text,
    origin_lines,
)
from deuteron.ir.program import Extern, Layout
from deuteron.schedule.group import Group
from deuteron.schedule.kernel import Kernel, Nest, Reduce, Scan, Schedule, Stmt, Store
from deuteron.schedule.tiling import Tiling


def print_schedule(schedule: Schedule) -> str:
    """The schedule as text, one step after the other."""
    lines = [f"{name} is memory of {owner}" for name, owner in sorted(schedule.aliases.items())]
    for step in schedule.steps:
        if isinstance(step, Kernel):
            lines += origin_lines(step.origins)
            lines += kernel_lines(step, schedule.layouts)
        else:
            lines += call_lines(step)
    return "\n".join(lines) + "\n"


def call_lines(call: Extern) -> list[str]:
    """One library call."""
    return [*origin_lines(call.origins), call_text(call)]


def group_lines(group: Group, stored: Iterable[str], layouts: dict[str, Layout]) -> list[str]:
    """One group as the nest that it will be. `stored`: its members that others need."""
    names = ", ".join(m.name for m in group.members)
    return [f"group of {names}:", *nest_lines(group.nest(layouts, stored), layouts)]


def kernel_lines(k: Kernel, layouts: Mapping[str, Layout] | None = None) -> list[str]:
    """One kernel. `layouts`: those of all tensors, where loads may be of others than it lists."""
    cost = f"{k.bytes} bytes, {k.flops:.0f} flops, {k.predicted_us:.1f} us"
    out = [f"kernel {k.name} on {k.device}: {cost}"]
    for what, listed in (("reads", k.reads), ("writes", k.writes)):
        out += [f"    {what} {name}: {layout_text(layout)}" for name, layout in listed]
    if k.contraction is not None:
        out += contraction_lines(*k.contraction)
    known = {**(layouts or {}), **dict(k.reads), **dict(k.writes)}
    for i, nest in enumerate(k.nests):
        if i in k.barriers:
            out.append("    barrier")
        out += [f"    {line}" for line in nest_lines(nest, known)]
    return out


def contraction_lines(nest: ContractionNest, tiling: Tiling) -> list[str]:
    """One nest of products: its axes and tiling, then its statements in order."""
    return [f"    for {_loops(nest.axes)}: {tiling}", *(f"        {s}" for s in statements(nest))]


def statements(nest: ContractionNest) -> Iterator[str]:
    """The statements of a nest of products, each after what it shares with others."""
    bodies = [e for s in nest.statements for e in roots(s)]
    bodies += [c.end for c in nest.cuts]
    ex = Expressions({n.attr[0]: n.dtype for e in bodies for n in e.loads()}, bodies)
    for c, text in zip(nest.cuts, ex.print([c.end for c in nest.cuts]), strict=True):
        yield f"{c.axis!r} {'<' if c.upper else '>='} {text}"
    for s in nest.statements:
        shown = len(ex.lines)
        (value,) = ex.print(roots(s))
        yield from ex.lines[shown:]
        if isinstance(s, ContractionStore):
            place = ", ".join(map(index_text, s.index)) or "()"
            yield f"{name_text(s.tensor)}[{place}] = {value}"
        else:
            axes, lives = (", ".join(map(repr, found)) for found in (s.over, nest.lives(s)))
            kind = f"{s.kind} of {s.operands}" if s.operands else s.kind
            yield f"{name_text(s.name)}[{lives}] = {kind}[{axes}]({value})"


def nest_lines(nest: Nest, layouts: Mapping[str, Layout]) -> list[str]:
    """One nest: its loops, then its statements in order."""
    head = f"for {_loops(nest.parallel)}" if nest.parallel else "once"
    if nest.reduced:
        head += f"; over {_loops(nest.reduced)}"
    if nest.row_split is not None:
        head += f"; {nest.row_split[0]!r} in {nest.row_split[1]} splits"
    out = [f"{head}:"]
    dtypes = {n: lay.dtype for n, lay in layouts.items()}
    ex = Expressions(dtypes, (r for s in nest.stmts for r in _roots(s)), nest.locals())
    for s in nest.stmts:
        shown = len(ex.lines)
        if isinstance(s, Store):
            text = _store(s, nest, ex)
        else:
            text = _local(s, nest, ex)
        out += [f"    {line}" for line in (*ex.lines[shown:], text)]
    return out


def _roots(s: Stmt) -> list[Expr]:
    if not isinstance(s, Store):
        return [s.body]
    positions = [a.expr for i in s.index for a in i.atoms() if isinstance(a, Value)]
    return [s.value, *([s.mask] if s.mask is not None else []), *positions]


def _loops(axes: Iterable[Axis]) -> str:
    return ", ".join(f"{a!r} < {index_text(a.extent)}" for a in axes)


def _local(s: Reduce | Scan, nest: Nest, ex: Expressions) -> str:
    (body,) = ex.print([s.body])
    over = nest.reduced_axes(s) if isinstance(s, Reduce) else nest.reduced
    axes = ", ".join(repr(a) for a in over)
    kind = f"scan_{s.kind}" if isinstance(s, Scan) else s.kind
    name = name_text(s.name)
    if isinstance(s, Reduce) and s.partial:
        name += f"[split, {', '.join(repr(a) for a in nest.reduced)}]"
    return f"{name} = {kind}[{axes}]({body})"


def _store(s: Store, nest: Nest, ex: Expressions) -> str:
    texts = ex.print(_roots(s))
    sign = "=" if s.accumulate is None else f"={s.accumulate}="
    place = ", ".join(map(ex.index, s.index)) or "()"
    text = f"{name_text(s.tensor)}[{place}] {sign} {texts[0]}"
    if s.mask is not None:
        text += f"  where {texts[1]}"
    # What the indices do not show: a store per row in a nest with inner loops.
    inner = {a for i in s.index for a in i.axes()} & set(nest.reduced)
    return (
        text if not nest.reduced or (s.level == "point") == bool(inner) else f"{text}  # {s.level}"
    )


__all__ = [
    "call_lines",
    "group_lines",
    "kernel_lines",
    "nest_lines",
    "print_schedule",
    "statements",
]
