"""Where to cut the vector axis so that conditions on it become constant (pad, cat, fixed edges)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deuteron.codegen.loops import Rewriter
from deuteron.ir.expr import Expr, as_position
from deuteron.ir.index import Axis, Index, const, divide_exact, is_nonneg

MOST = 5  # cuts; each repeats the body


def cuts(roots: Sequence[Expr], axis: Axis) -> list[Index]:
    """Positions ``0 < p < extent`` in increasing order at which a comparison of `axis` with a
    constant changes.

    Empty when the order of the positions is not proven, or when there are too many.
    """
    found: dict[Index, None] = {}
    for r in roots:
        for n in r.walk():
            if n.op in ("lt", "le", "gt", "ge") and all(
                a.op in ("index", "literal") for a in n.args
            ):
                for p in _edges(n, axis):
                    found[p] = None
    inside = [p for p in found if is_nonneg(p - 1) and is_nonneg(axis.extent - 1 - p)]
    if (
        not inside
        or len(inside) > MOST
        or len(inside)
        != len([p for p in found if not (is_nonneg(-p) or is_nonneg(p - axis.extent))])
    ):
        return []
    out: list[Index] = []
    for p in inside:
        k = 0
        while k < len(out) and is_nonneg(p - out[k]):
            k += 1
        if k < len(out) and not is_nonneg(out[k] - p):
            return []
        out.insert(k, p)
    return out


def pieces(axis: Axis, marks: Sequence[Index]) -> list[tuple[Index, Axis]]:
    """Between two marks each: where it starts, and the axis from there on."""
    edges = [const(0), *marks, axis.extent]
    ends = zip(edges[:-1], edges[1:], strict=True)
    return [(low, Axis(f"{axis.name}s{i}", high - low)) for i, (low, high) in enumerate(ends)]


def settled(conditions: Sequence[Expr], axis: Axis, marks: Sequence[Index]) -> bool:
    """Whether none of these varies along a piece of the axis."""
    for low, piece in pieces(axis, marks) if conditions else ():
        move = Rewriter({axis: low + piece.index})
        if any(piece in move.expr(c).axes() for c in conditions):
            return False
    return True


def _edges(n: Expr, axis: Axis) -> list[Index]:
    """The first positions at which the comparison may have another value than before."""
    if any(
        a.dtype == "bool" or (a.op == "literal" and not isinstance(a.attr, int)) for a in n.args
    ):
        return []
    a, b = (as_position(x) for x in n.args)
    d = a - b
    c = d.coefficient(axis)
    if c is None or c.value is None or c.value == 0:
        return []
    rest = d - axis.index * c
    if rest.axes() or any(x.rank == 3 for x in rest.atoms()):
        return []
    round_up = (n.op in ("lt", "ge")) == (c.value > 0)
    if rest.value is not None:
        low = -rest.value // c.value  # floor of where a == b
        exact = low * c.value == -rest.value
        return [const(low if exact and round_up else low + 1)]
    zero = divide_exact(-rest, c)
    if zero is None:
        return []
    return [zero if round_up else zero + 1]


def row_masks(
    roots: Sequence[Expr], inner: Callable[[Expr], bool]
) -> dict[frozenset[Expr], list[Expr]]:
    """What guards loads in the inner loop and is the same for all of the loop: sets of conditions,
    with the masks that need them.

    `inner(expr)` tells what depends on the inner loop.
    """
    found: dict[frozenset[Expr], dict[Expr, None]] = {}
    for r in roots:
        for n in r.walk():
            if n.op == "load" and n.args and inner(n):
                mask = n.args[0]
                row = [c for c in _conjuncts(mask) if not inner(c) and c.op != "literal"]
                if row:
                    found.setdefault(frozenset(row), {})[mask] = None
    return {row: list(masks) for row, masks in found.items()}


def _conjuncts(mask: Expr) -> list[Expr]:
    if mask.op != "logical_and":
        return [mask]
    return [c for a in mask.args for c in _conjuncts(a)]
