"""Half precision: inside a kernel values stay in f32, and are rounded where they are stored.

In: a `Program` whose operators compute in f32 and round each result, as eager does. Out: the same,
in which readers of a result of a half type ask for the f32 number that it was rounded from
(``unrounded(x)``, see `ir.expr.unrounded`). They get it where the schedule puts producer and reader
into one kernel; what comes from memory is what was stored. Nothing else in the compiler decides
this: ``precision="eager"`` leaves the pass out.

A rounding is kept where more than the last digits of a result depend on it, or it is wanted:

    jumps      A tensor that is compared, or becomes a whole number, a truth value or an 8-bit
               number, is for all readers what memory would hold. So everyone who decides the same
               thing decides alike, whatever shares a kernel with what, and who computes with a
               value has the one that a guard has seen (``where(y > 1, 0, sqrt(1 - y))``).
               Comparisons with 0 ask for the sign, which a rounding only changes to 0.
    equality   Two tensors that are compared for being equal, the operand of which a position of an
               extreme element is found, and that of a maximum which leaves the graph (its gradient
               goes to where the operand equals it; not one of which the partition knows that the
               backward does not compare it): they, and all from which they are computed, are
               rounded as eager does, for all readers. Then each kernel that computes such a tensor
               anew, in the backward too, has the same bits.
    sums       What leaves the graph beside a reduction that is computed from it, for the backward:
               that computes exponentials, or a norm, of what memory holds, and their sums agree
               (a softmax of ±40 did not sum to 1 by 2 %; the gradient of a bias had 13 times
               eager's error).
    factors    What is multiplied and summed over an axis that both factors have, where they differ
               in others, is rounded as tensor cores take it where they multiply (``factor(x)``).

Where a result is rounded, whole powers are products (`multiplied`).

Library calls, inputs and constants are in memory: what is beyond them is not asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.operations import FLOATS, HALF, INTS
from deuteron.ir.program import Compute, Extern, Program, tensors_read

# Operations whose result jumps where a float argument crosses a number.
ORDER_COMPARISONS = ("lt", "le", "gt", "ge")
DISCONTINUOUS = {
    *ORDER_COMPARISONS,
    *("eq", "ne", "isinf", "floor", "ceil", "trunc", "round", "sign", "nextafter"),
    *("floordiv", "truncdiv", "fmod", "remainder"),
}
# Operations that give an argument, or its negative: it is what jumps.
MAX_POWER = 16  # that is multiplied
PASSED_THROUGH = ("neg", "abs", "where", "maximum", "minimum", "fmax", "fmin")
VALUE_MOVES = ("cast", "where", "neg", "abs")


def unrounded(program: Program) -> Program:
    """The program with f32 readings of unrounded halves, but where a rounding is kept."""
    computes = {d.name: d for d in program.computes()}
    for d in program.defs:  # products may be generated
        computes.update({c.name: c for c in d.product} if isinstance(d, Extern) else {})
    rounded_names = compared(program, computes)
    stored = {n for n in program.layouts() if n not in computes} | rounded_names
    stored |= deciding(computes) | beside_sums(program, computes)
    return replace(
        program,
        defs=tuple(
            multiplied(relaxed(d, stored))
            if isinstance(d, Compute) and d.name not in rounded_names
            else d
            for d in program.defs
        ),
    )


def roots(c: Compute) -> list[Expr]:
    """What it evaluates: its value, where it stores it and where not."""
    return [c.body, *([c.mask] if c.mask is not None else []), *map(E.index_value, c.index or ())]


def widening(n: Expr) -> bool:
    return n.op == "cast" and n.dtype == "f32" and n.args[0].dtype in HALF


# -- what is compared for being equal --------------------------------------------------------------
def compared(program: Program, computes: dict[str, Compute]) -> set[str]:
    """Computations that are rounded as in eager: those on which an equality depends."""
    leaving = {o.tensor for o in program.outputs if o.tensor is not None} - program.uncompared
    todo = [load.attr[0] for seed in seeds(computes, leaving) for load in seed.loads()]
    names: set[str] = set()
    while todo:
        d = computes.get(todo.pop())
        if d is not None and d.name not in names:
            names.add(d.name)
            todo += tensors_read(d)
    return names


def seeds(computes: dict[str, Compute], leaving: set[str]) -> Iterator[Expr]:
    """Operands of equalities, of positions of extremes, and of extremes that leave the graph."""
    for c in computes.values():
        for root in roots(c):
            yield from equated(root)
    todo, seen = list(leaving), set(leaving)
    while todo:
        d = computes.get(todo.pop())
        if d is None:
            continue
        for n in moved(d.body):
            if n.op in ("reduce", "scan") and n.attr[0] in ("max", "min"):
                yield n.args[0]
            elif n.op == "load" and n.attr[0] not in seen:
                seen.add(n.attr[0])
                todo.append(n.attr[0])


def beside_sums(program: Program, computes: dict[str, Compute]) -> set[str]:
    """Halves that leave the graph as reductions do that are computed from them."""
    leaving = {o.tensor for o in program.outputs if o.tensor is not None}
    todo = [(n, False) for n in leaving]  # and whether a reduction is computed from it
    seen = set(todo)
    while todo:
        name, reduced = todo.pop()
        d = computes.get(name)
        if d is None:
            continue
        sums = (n for n in d.body.walk() if n.op in ("reduce", "scan"))
        inner = {load.attr[0] for n in sums for load in n.args[0].loads()}
        below = {(n, reduced or n in inner) for n in tensors_read(d)} - seen
        seen |= below
        todo += below
    return {n for n, reduced in seen if reduced} & leaving


def equated(root: Expr) -> Iterator[Expr]:
    for n in root.walk():
        if n.op in ("eq", "ne") and n.args[0].dtype in FLOATS and n.args[0] is not n.args[1]:
            if all(a.op != "literal" for a in n.args):
                yield from n.args
        elif n.op == "reduce" and n.attr[0].startswith("arg") and n.args[0].dtype in FLOATS:
            yield from n.args


def moved(root: Expr) -> Iterator[Expr]:
    """Of what the value is a copy: `root` through conversions and choices."""
    todo, seen = [root], {root}
    while todo:
        n = todo.pop()
        yield n
        below = (n.args[1:] if n.op == "where" else n.args) if n.op in VALUE_MOVES else ()
        todo += [a for a in below if a not in seen]
        seen.update(below)


# -- what is decided by ----------------------------------------------------------------------------
def deciding(computes: dict[str, Compute]) -> set[str]:
    """Computations of halves by which something is decided."""
    names: set[str] = set()
    todo = [h for c in computes.values() for root in roots(c) for h in decided_by(root)]
    while todo:
        for n in moved(todo.pop().args[0]):
            if n.op == "load" and n.dtype in HALF and n.attr[0] not in names:
                names.add(n.attr[0])
                d = computes.get(n.attr[0])
                if d is not None and d.body.op in ("load", "where"):  # a copy
                    todo.append(Expr("cast", "f32", (d.body,)))
    return names


def decided_by(root: Expr) -> Iterator[Expr]:
    """Conversions to f32 of the halves by which something is decided."""
    for n in root.walk():
        if n.op in DISCONTINUOUS or n.op == "cast" and n.dtype not in (*HALF, "f32", "f64"):
            if n.op not in ORDER_COMPARISONS or all(
                a.op != "literal" or a.attr != 0 for a in n.args
            ):
                yield from filter(
                    widening, passed_through(a for a in n.args if a.dtype not in INTS)
                )


def passed_through(operands: Iterable[Expr]) -> Iterator[Expr]:
    """The operands, and every expression whose value reaches one of them unchanged but for its
    sign."""
    todo = list(operands)
    seen = set(todo)
    while todo:
        n = todo.pop()
        yield n
        if n.op in PASSED_THROUGH:
            below = n.args[1:] if n.op == "where" else n.args
            todo += [a for a in below if a not in seen]
            seen.update(below)


# -- readings --------------------------------------------------------------------------------------
def relaxed(c: Compute, stored: set[str]) -> Compute:
    """`c` reading halves unrounded, but what is in memory in any case."""
    if not any(widening(n) for root in roots(c) for n in root.walk()):
        return c
    exact = {n for root in roots(c) for n in rounded(root)}
    multiplied = {n for root in roots(c) for n in factors(root)}

    def rule(n: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if not widening(n) or n in exact:
            return None
        new = E.unrounded(args[0])
        known = new.op == "cast" and new.attr is not None
        if known and from_memory(args[0], stored):
            return E.cast(args[0], "f32")
        return Expr("cast", "f32", args, E.FACTOR) if n in multiplied else new

    def change(e: Expr) -> Expr:
        return E.rewrite(e, rule)

    index = c.index
    if index is not None:
        index = tuple(E.as_position(change(E.index_value(i))) for i in index)
    mask = change(c.mask) if c.mask is not None else None
    return replace(c, body=change(c.body), index=index, mask=mask)


def multiplied(c: Compute) -> Compute:
    """`c` with whole powers of what it rounds to a half type as products, which lose 3 of the 12
    bits and more that the rounding takes: pow takes 117 instructions (sm_90)."""

    def rule(n: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if n.op != "pow" or n.dtype != "f32" or args[1].op != "literal":
            return None
        power = args[1].attr
        if power not in range(4, MAX_POWER + 1):
            return None
        out, square = None, args[0]
        for bit in reversed(f"{int(power):b}"):
            if bit == "1":
                out = square if out is None else E.op("mul", out, square)
            square = E.op("mul", square, square)
        return out

    return replace(c, body=E.rewrite(c.body, rule)) if c.body.dtype in HALF else c


def from_memory(h: Expr, stored: set[str]) -> bool:
    """Whether a half is an element of what nobody computes, or everyone reads rounded."""
    return all(n.attr[0] in stored for n in moved(h) if n.op == "load")


def rounded(root: Expr) -> Iterator[Expr]:
    """The conversions to f32 that give the half itself: see above."""
    for operand in equated(root):
        yield from filter(widening, operand.walk())
    yield from decided_by(root)


def factors(root: Expr) -> Iterator[Expr]:
    """The conversions to f32 of halves that tensor cores may multiply."""
    for n in root.walk():
        if n.op == "reduce" and n.attr[0] == "sum" and n.args[0].op == "mul":
            a, b = n.args[0].args
            if widening(a) and widening(b) and a.axes() != b.axes():
                yield from (a, b)


# -- for checks ------------------------------------------------------------------------------------
def fully_unrounded(program: Program) -> dict[str, Compute]:
    """The computations of a program as one kernel would run all of them: those of a half type give
    the f32 number that would be rounded, and readers round it who must. What kernels find lies
    between this and the program's own definitions. Empty where nothing is read unrounded."""
    computes = program.computes()
    nodes = (n for c in computes for r in roots(c) for n in r.walk())
    if not any(n.op == "cast" and n.attr is not None for n in nodes):
        return {}
    written = {c.target for c in computes} | {c.name for c in computes if c.target is not None}
    wide = {c.name for c in computes if c.body.dtype in HALF} - written

    done: dict[Expr, Expr] = {}

    def widened(root: Expr) -> Expr:
        for n in root.walk():  # what is loaded decides places, too
            new = E.rebuild(n, tuple(done[a] for a in n.args), {}, done)
            new = E.unrounded(new.args[0]) if new.op == "cast" and new.attr == E.FACTOR else new
            if n.op == "load" and n.attr[0] in wide and n.dtype in HALF:
                (name, index, fill), mask = new.attr, new.args[0] if new.args else None
                new = E.cast(E.load(name, index, "f32", mask, 0 if fill is None else fill), n.dtype)
            done[n] = new
        return done[root]

    out = {}
    for c in computes:
        body, layout = widened(c.body), c.layout
        if c.name in wide:
            body, layout = E.unrounded(body), replace(layout, dtype="f32")
        out[c.name] = replace(c, body=plain(body), layout=layout)
    return out


def plain(root: Expr) -> Expr:
    """With the halves themselves, where they are asked for as what they were rounded from."""

    def rule(n: Expr, args: tuple[Expr, ...]) -> Expr | None:
        return E.cast(args[0], n.dtype) if n.op == "cast" and n.attr is not None else None

    return E.rewrite(root, rule)


__all__ = ["fully_unrounded", "unrounded"]
