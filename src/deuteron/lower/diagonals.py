"""What is read at computed places that only a difference of two positions decides, once for each.

    bias[i, j, h] = table[bucket(j - i), h]
        becomes   line[h, d] = table[bucket(d - m + 1), h],   bias[i, j, h] = line[h, j - i + m - 1]

for i below m. In: a program. Out: the same with such lines in memory: a kernel of its own computes
the few elements, and a nest (an attention's) reads them as any tensor, at positions of its axes.

That nothing but the difference decides is no pattern: shifted along both axes a body is the same
expression. All elements that are read are those that were read before.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import combinations

from deuteron.ir import elements
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import Atom, Axis, Index, atom, const, substitute
from deuteron.ir.program import Compute, Def, Extern, Layout, Program, contiguous

# A line is at most this share of what it replaces: it is a kernel more.
SHARE = 1 / 8
MAX_NODES, MAX_ROUNDS = 200, 32
OTHER = ("reduce", "scan", "random")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def with_lines(program: Program) -> Program:
    """The program with a line for each computation that has one."""
    layouts = program.layouts()
    overwritten = {d.target for d in program.defs if isinstance(d, Compute)}
    overwritten |= {n for d in program.defs if isinstance(d, Extern) for n in d.mutates}
    computes: dict[str, Compute] = {}
    defs: list[Def] = []
    for d in program.defs:
        if not isinstance(d, Compute) or not plain(d):
            defs.append(d)
            continue
        computes[d.name] = d
        loaded = any(elements.is_loaded(i) for n in d.body.loads() for i in n.attr[1])
        defs += line_of(d, computes, layouts, overwritten) if loaded else (d,)
    return replace(program, defs=tuple(defs)) if len(defs) > len(program.defs) else program


def plain(c: Compute) -> bool:
    """Whether an element of it can be computed anywhere."""
    return c.target is None and c.index is None and all(n.op not in OTHER for n in c.body.walk())


def line_of(
    c: Compute,
    computes: Mapping[str, Compute],
    layouts: Mapping[str, Layout],
    overwritten: AbstractSet[str | None],
) -> tuple[Compute, ...]:
    """The line and what reads it; what was given where there is none, or that is not small."""
    for a, b in combinations(c.axes, 2):
        m, n = a.extent.value or 0, b.extent.value or 0
        if m * n == 0 or m + n - 1 > SHARE * m * n:
            continue
        body = difference(c, a, b, computes, layouts)
        if body is None or overwritten & {x.attr[0] for x in body.loads()}:
            continue
        others = tuple(x for x in c.axes if x not in (a, b))
        d, name = Axis(f"{a.name}{b.name}", const(m + n - 1)), f"{c.name}_line"
        shape = tuple(x.extent for x in (*others, d))
        line = replace(
            c,
            name=name,
            axes=(*others, d),
            body=body.substitute({a: const(m - 1), b: atom(d)}),
            layout=contiguous(shape, c.layout.dtype, c.layout.device),
        )
        place = (*(atom(x) for x in others), atom(b) - atom(a) + (m - 1))
        return line, replace(c, body=E.load(name, place, c.body.dtype))
    return (c,)


def difference(
    c: Compute, a: Axis, b: Axis, computes: Mapping[str, Compute], layouts: Mapping[str, Layout]
) -> Expr | None:
    """The body, of what is in memory alone, where nothing but ``b - a`` decides it."""
    step: dict[Atom, Index] = {a: atom(a) + 1, b: atom(b) + 1}
    body = c.body
    for _ in range(MAX_ROUNDS):
        table: dict[Expr, Expr] = {}
        for n in body.loads():
            name, index, _ = n.attr
            p = computes.get(name)
            if p is not None and not n.args:
                table[n] = elements.element(p.axes, p.body, index, layouts)
            elif not any(map(elements.is_loaded, index)):
                if any(substitute(i, step) is not i for i in index):
                    return None
        if not table:
            moved = of_differences(body.substitute(step))
            return body if moved is of_differences(body) else None
        body = body.substitute({}, table)
        if sum(1 for _ in body.walk()) > MAX_NODES:
            return None
    return None


def of_differences(body: Expr) -> Expr:
    """Positions are compared by their difference."""

    def rule(n: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if n.op not in COMPARISONS or any(x.op != "index" for x in args):
            return None
        a, b = (E.as_position(x) for x in args)
        return E.op(n.op, E.index_value(a - b), E.literal(0, "i64"))

    return E.rewrite(body, rule)


__all__ = ["with_lines"]
