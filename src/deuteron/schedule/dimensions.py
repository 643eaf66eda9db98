"""Groups of a nest's axes that tilings walk as one, in the order in which values have them.

In: an `ir.nest.Nest` with contractions. Out: `Group`s with their roles, from which `tile` lists
tilings.

An axis on which some contraction does not live, though it is parallel, is whole where its programs
would compute that contraction again (the columns of what attention weights).
"""

from __future__ import annotations

from collections.abc import Sequence

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, hint
from deuteron.ir.nest import Nest, Reduce

Group = tuple[tuple[Axis, ...], str]  # axes and their role


def dimensions(nest: Nest) -> list[Group]:
    """The groups of axes with one role each ("batch", "turns", "grid", "whole", "loop" or "inner"),
    in the order in which values have them."""
    products = nest.contractions
    reduced = {a for s in nest.reductions.values() for a in s.over}
    signatures: dict[tuple[object, ...], list[Axis]] = {}
    for a in nest.axes:
        roles: list[object] = [
            "over"
            if a in c.over
            else "m"
            if a in c.m
            else "n"
            if a in c.n
            else "batch" * (a in c.batch)
            for c in products.values()
        ]
        roles += [a in s.over for s in nest.reductions.values()]
        signatures.setdefault(tuple(roles), []).append(a)
    out: list[Group] = []
    for roles_of, axes in signatures.items():
        roles_here = roles_of[: len(products)]
        lacking = any(a not in nest.lives(nest.reductions[n]) for n in products for a in axes)
        inside = [n for n, c in products.items() if set(c.over) & set(axes)]
        if set(axes) & reduced and "batch" in roles_here:
            role = "turns"
        elif set(axes) & reduced:
            nested = any(is_nested(nest, nest.reductions[n]) for n in inside)
            role = "inner" if nested else "loop"
        elif not {"m", "n"} & set(roles_here):
            role = "batch"
        else:
            role = "whole" if lacking else "grid"
        out.append((tuple(axes), role))
    return _in_order(nest, out)


def apart(nest: Nest, groups: Sequence[Group]) -> list[Group]:
    """The groups where each place of axes that some factor lacks, as keys lack the heads that share
    them, has a program of its own: it reads that factor again, but masks can cut its loop."""
    found = nest.contractions.values()
    batches, first, rest = {a for c in found for a in c.batch}, [], []
    for axes, role in groups:
        longest = max(reversed(axes), key=lambda a: hint(a.extent))
        if role != "grid" or axes == (longest,) and longest not in batches:
            rest.append((axes, role))
            continue
        kept = () if longest in batches else (longest,)
        first += [((a,), "batch") for a in axes if a not in kept]
        rest += [(kept, role)] if kept else []
    return [*first, *rest]


def makers(nest: Nest, name: str) -> list[tuple[Expr, str]]:
    """The factors of a contraction, and of what each is computed: of "results" of contractions, of
    "memory", or "" where tensor cores read it as it lies there."""
    s, products = nest.reductions[name], nest.contractions
    out = []
    for side in (products[name].a, products[name].b):
        chained = any(n.attr[0] in products for n in side.loads())
        plain = E.cast(side, s.factors).op == "load"
        out.append((side, "results" if chained else "" if plain else "memory"))
    return out


def is_nested(nest: Nest, s: Reduce) -> bool:
    """Whether a reduction stands in the body of another, over an axis on which it lives."""
    lives = set(nest.lives(s))
    others = (r for r in nest.reductions.values() if lives & set(r.over))
    return any(n.attr[0] == s.name for r in others for n in r.body.loads())


def _in_order(nest: Nest, dims: list[Group]) -> list[Group]:
    """Batches first. Then so that what is made of a product is the left factor of the next one, in
    the order in which it is made (registers hold it), and what is made of memory the right one
    (`in_flight`), as far as can be; then so that m stands before k and k before n."""
    needed: set[tuple[Axis, Axis]] = set()
    liked: set[tuple[Axis, Axis]] = set()
    for name, c in nest.contractions.items():
        made = [of for _, of in makers(nest, name)]
        sides = [(c.m, c.n), (c.n, c.m)]
        for (own, other), of in zip(sides, made, strict=True):
            if of == "results":
                needed |= {(x, y) for x in own for y in (*c.over, *other)}
            elif of == "memory":
                needed |= {(x, y) for x in (*other, *c.over) for y in own}
        if not any(made):
            liked |= {(x, y) for x in c.m for y in (*c.over, *c.n)}
            liked |= {(x, y) for x in c.over for y in c.n}

    order = [d for d in dims if d[1] == "batch"]
    left = [d for d in dims if d[1] != "batch"]
    while left:
        free = left
        for pairs in (needed, needed | liked):
            free = [
                d
                for d in free
                if not any((x, y) in pairs for e in left if e is not d for x in e[0] for y in d[0])
            ] or free
        order.append(free[0])
        left.remove(free[0])
    return order


__all__ = ["Group", "apart", "dimensions", "is_nested", "makers"]
