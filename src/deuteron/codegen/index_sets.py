"""Where to cut the vector axis so that conditions on it become constant (pad, cat, fixed edges),
minima and maxima in the indices of loads (upsampling, replicated padding) one of their sides, and
remainders (roll) sums: what is read between the cuts then follows one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from deuteron.ir.expr import Expr, as_position
from deuteron.ir.index import (
    Axis,
    Index,
    MinMax,
    Mod,
    bound,
    const,
    divide_exact,
    is_nonneg,
    substitute,
)

# Cuts, each of which repeats the body: at most so many. More, where the pieces have no more code
# between them all the same, since each is one part of what is joined (`repeats`).
MAX_CUTS = 5
MAX_INDEX_SETS = 64
# Of loops that are cut for the indices of loads: a shorter one is over before vectors pay.
MIN_CUT_EXTENT = 32
MAX_MINMAX_SIDES = 8  # of what is compared, minima and maxima in it replaced by theirs


def cut_positions(
    roots: Sequence[Expr], axis: Axis, most: int = MAX_CUTS, of_loads: bool = True
) -> list[Index]:
    """Positions ``0 < p < extent`` in increasing order, at most `most`, at which a comparison of
    `axis` with a constant changes, or (with `of_loads`) the index of a load changes its form.

    Empty when the order of the positions is not proven, or when there are too many; without those
    of loads, when there are too many with them.
    """
    of_comparisons: dict[Index, None] = {}
    of_minima: dict[Index, None] = {}
    for r in roots:
        for n in r.walk():
            if n.op in ("lt", "le", "gt", "ge") and all(
                a.op in ("index", "literal") for a in n.args
            ):
                of_comparisons |= dict.fromkeys(_comparison_changes(n, axis))
            elif of_loads and n.op == "load" and (axis.extent.value or 0) >= MIN_CUT_EXTENT:
                of_minima |= dict.fromkeys(
                    const(p)
                    for i in n.indices()
                    for p in (*_minmax_changes(i, axis), *_wraps(i, axis))
                )
    return _ordered([*(of_comparisons | of_minima)], axis, most) or _ordered(
        [*of_comparisons], axis, most
    )


def _ordered(positions: Sequence[Index], axis: Axis, most: int) -> list[Index]:
    inside = [p for p in positions if is_nonneg(p - 1) and is_nonneg(axis.extent - 1 - p)]
    if (
        not inside
        or len(inside) > most
        or len(inside)
        != len([p for p in positions if not (is_nonneg(-p) or is_nonneg(p - axis.extent))])
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


def repeats_code(body: Iterable[Expr], parts: Iterable[Iterable[Expr]]) -> bool:
    """Whether the pieces of a loop have more code than `MOST` cuts make at most."""
    return sum(operation_count(p) for p in parts) > (MAX_CUTS + 1) * operation_count(body)


def operation_count(roots: Iterable[Expr]) -> int:
    """Distinct nodes under `roots`."""
    return len({n for r in roots for n in r.walk()})


def _comparison_changes(n: Expr, axis: Axis) -> list[Index]:
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
    if any(x.rank == 3 for x in rest.atoms()):
        return []
    if rest.axes():
        return _block_changes(n.op, c.value, rest)
    round_up = (n.op in ("lt", "ge")) == (c.value > 0)
    if rest.value is not None:
        low = -rest.value // c.value  # floor of where a == b
        exact = low * c.value == -rest.value
        return [const(low if exact and round_up else low + 1)]
    zero = divide_exact(-rest, c)
    if zero is None:
        return []
    return [zero if round_up else zero + 1]


def _block_changes(op: str, step: int, rest: Index) -> list[Index]:
    """Where the axis counts blocks of `step` places, `rest` is a place in one and a whole number of
    blocks: between those a comparison with 0 does not change, if it is one of these."""
    if step < 0:
        op, step, rest = {"gt": "lt", "le": "ge"}.get(op, ""), -step, rest * -1
    first = const(dict(rest.terms).get((), 0))
    inside = is_nonneg(rest - first) and is_nonneg(first + step - 1 - rest)
    blocks = inside and op in ("lt", "ge") and (first % step).value == 0
    return [const(-(first.value or 0) // step)] if blocks else []


def _minmax_changes(index: Index, axis: Axis) -> Iterator[int]:
    """Positions between which the minima and maxima in an index are one of their sides."""
    for m in index.atoms():
        if not isinstance(m, MinMax) or axis not in m.a.axes() | m.b.axes():
            continue
        for difference in _minmax_sides(m.a - m.b):
            yield from _sign_changes(difference, axis)


def _wraps(index: Index, axis: Axis) -> Iterator[int]:
    """Where the remainder of a position in an index begins again (`roll`), if it does so once."""
    extent = axis.extent.value
    for m in index.atoms():
        if not isinstance(m, Mod) or extent is None or m.num.coefficient(axis) != const(1):
            continue
        rest, size = (m.num - axis.index).value, m.den.value
        if rest is not None and size:
            first = -rest % size or size
            yield from (first,) if first < extent <= first + size else ()


def index_between_cuts(index: Index, axis: Axis) -> Index:
    """The index of a load between the outermost cuts, where the loop is cut: minima and maxima are
    the side that depends on the axis."""
    if (axis.extent.value or 0) < MIN_CUT_EXTENT:
        return index
    for m in index.atoms():
        if isinstance(m, MinMax) and (axis in m.a.axes()) != (axis in m.b.axes()):
            return index_between_cuts(
                substitute(index, {m: m.a if axis in m.a.axes() else m.b}), axis
            )
    return index


def _minmax_sides(index: Index) -> list[Index]:
    """The index with either side of each minimum and maximum in it."""
    variants = [index]
    while len(variants) < MAX_MINMAX_SIDES:
        k, m = next(
            ((k, m) for k, i in enumerate(variants) for m in i.atoms() if isinstance(m, MinMax)),
            (0, None),
        )
        if m is None:
            break
        variants[k : k + 1] = [substitute(variants[k], {m: side}) for side in (m.a, m.b)]
    return variants


def _sign_changes(difference: Index, axis: Axis) -> Iterator[int]:
    """Where the sign of a difference changes: one position, or the two ends of the stretch in
    which it depends on other loops' positions."""
    c = difference.coefficient(axis)
    if c is None or not c.value:
        return
    if c.value < 0:
        yield from _sign_changes(-difference, axis)
        return
    rest = difference - axis.index * c
    low, high = bound(rest, False), bound(rest, True)
    if low is None or high is None or low.value is None or high.value is None:
        return
    rises = -(low.value // c.value)  # nowhere negative from here on
    falls = -high.value // c.value + 1  # nowhere positive before
    yield from (rises,) if rises <= falls else (falls, rises)


def row_masks(
    roots: Sequence[Expr], inner: Callable[[Expr], bool]
) -> dict[frozenset[Expr], list[Expr]]:
    """What guards loads in the inner loop and is the same for all of the loop: sets of conditions,
    with the masks that need them.

    `inner(expr)` tells what depends on the inner loop.
    """
    masks_by_row: dict[frozenset[Expr], dict[Expr, None]] = {}
    for r in roots:
        for n in r.walk():
            if n.op == "load" and n.args and inner(n):
                mask = n.args[0]
                row = [c for c in _conjuncts(mask) if not inner(c) and c.op != "literal"]
                if row:
                    masks_by_row.setdefault(frozenset(row), {})[mask] = None
    return {row: list(masks) for row, masks in masks_by_row.items()}


def _conjuncts(mask: Expr) -> list[Expr]:
    if mask.op != "logical_and":
        return [mask]
    return [c for a in mask.args for c in _conjuncts(a)]
