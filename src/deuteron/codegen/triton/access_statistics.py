"""What a nest reads and writes, in bytes, elements and values: what its tile is chosen by.

In: `Loops`. Out: numbers; sizes that change count as their hints.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from deuteron.codegen.loops import Loops, points_visited, roots_of, stride, unique_nodes
from deuteron.codegen.triton.misaligned import misaligned_rows
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Index, Sym, hint, product


def below(n: int) -> int:
    """The largest power of two that is at most `n` (at least 1)."""
    return 1 << (max(1, n).bit_length() - 1)


def size(axes: Sequence[Axis]) -> int:
    return max(1, hint(product(a.extent for a in axes)))


def unit_bytes(loops: Loops, axis: Axis, beside: Collection[Axis] = ()) -> int:
    """Bytes that are contiguous along `axis`, of what depends on one of the axes `beside`, if there
    are any. A tensor that is read at several places counts once; what is written counts twice,
    since lines that are written in parts are read as well."""
    axes = (*loops.parallel, *loops.reduced)
    moved: dict[tuple[str, bool], int] = {}
    for a in loops.accesses:
        if stride(a.address, axis) == 1 and (not beside or a.address.axes() & set(beside)):
            size = a.itemsize * points_visited(a.address, axes) * (2 if a.store else 1)
            moved[a.tensor, a.store] = max(size, moved.get((a.tensor, a.store), 0))
    return sum(moved.values())


def widest(loops: Loops) -> int:
    """Bytes of the elements that most of the traffic consists of."""
    moved: dict[int, int] = {}
    axes = (*loops.parallel, *loops.reduced)
    for a in loops.accesses:
        moved[a.itemsize] = moved.get(a.itemsize, 0) + a.itemsize * points_visited(a.address, axes)
    return max(moved, key=lambda n: moved[n], default=4)


def row_loads(loops: Loops) -> int:
    """Distinct values that are read for every element of every row."""
    axes, loads = (*loops.parallel, *loops.reduced), set()
    for root in loops.roots():
        for n in root.walk():
            if n.op == "load" and n.attr[1]:
                own = n.attr[1][0].axes()
                along = own & set(loops.reduced) and (
                    own & set(loops.parallel) or not loops.parallel
                )
                if along and 2 * points_visited(n.attr[1][0], axes) > size(axes):
                    loads.add(n)
    return max(1, len(loads))


def loads_along(loops: Loops) -> int:
    """Distinct values that are read for every element of a row, also those of all rows."""
    loads = {a for a in loops.accesses if not a.store and a.address.axes() & set(loops.reduced)}
    return len(loads)


def shared_along(loops: Loops) -> int:
    """Distinct values that are read for every element of a row and are the same for all rows."""
    axes_of = {(a.tensor, a.address): a.address.axes() for a in loops.accesses if not a.store}
    along, rows = set(loops.reduced), set(loops.parallel)
    return sum(bool(axes & along) and not axes & rows for axes in axes_of.values())


def streamed(loops: Loops) -> int:
    """Bytes that are read for every element of every row."""
    axes = (*loops.parallel, *loops.reduced)
    itemsizes = {
        (a.tensor, a.address): a.itemsize
        for a in loops.accesses
        if not a.store and 2 * points_visited(a.address, axes) > size(axes)
    }
    return sum(itemsizes.values())


def tile_bytes(loops: Loops, x: Sequence[Axis], r: Sequence[Axis]) -> int:
    """Bytes that are read for each element of a tile, whatever of them is the same."""
    itemsizes = {
        (a.tensor, a.address): a.itemsize
        for a in loops.accesses
        if not a.store and a.address.axes() & set(x) and a.address.axes() & set(r)
    }
    return sum(itemsizes.values())


def bytes_along(loops: Loops, rows: Sequence[Axis] | None = None) -> int:
    """Bytes of all that is read for a point of a row; with `rows`, of what differs by row. Of what
    rotated rows share (weights of columns) a lane reads parts of two vectors."""
    rotated = misaligned_rows(loops, loops.reduced) is not None
    bytes_of = {
        (a.tensor, a.address): a.itemsize
        * (2 if rotated and a.itemsize == 2 and not a.address.axes() & set(loops.parallel) else 1)
        for a in loops.accesses
        if not a.store
    }
    along, by_row = set(loops.reduced), None if rows is None else set(rows)
    return max(
        1,
        sum(
            n
            for (_, i), n in bytes_of.items()
            if i.axes() & along and (by_row is None or i.axes() & by_row)
        ),
    )


def read_along(loops: Loops, kinds: type | tuple[type, ...]) -> set[Expr]:
    """What these parts read along a row."""
    roots = [root for p in loops.statements if isinstance(p, kinds) for root in roots_of(p)]
    loads = [n for n in unique_nodes(roots) if n.op == "load" and n.attr[1]]
    return {n for n in loads if n.attr[1][0].axes() & set(loops.reduced)}


# Bytes of a run of memory below which a pipeline does not pay: each run is a copy of its own to
# shared memory. H200, group norm of channels-last bf16, 384 groups of 8 channels and 3136 pixels
# (runs of 16 bytes), us: 430 with three stages, 33 with one.
MIN_RUN_BYTES = 128


def uneven(loops: Loops, axes_at_hand: Sequence[Axis]) -> bool:
    """Whether what most is read of has lines that start at no multiple of 16 bytes, or comes in
    short runs of memory, walked by a tile that spans `axes_at_hand`."""
    axes = (*loops.parallel, *loops.reduced)
    for a in loops.accesses:
        inner = [x for x in axes if stride(a.address, x) == 1]
        if a.store or not inner or 2 * points_visited(a.address, axes) <= size(axes):
            continue
        run = run_of(a.address, axes_at_hand)
        if run * a.itemsize < MIN_RUN_BYTES and points_visited(a.address, axes_at_hand) > run:
            return True
        rest = a.address - inner[-1].index
        if any(
            not any(isinstance(f, Sym) for f in m) and c * a.itemsize % 16 for m, c in rest.terms
        ):
            return True
    return False


def run_of(address: Index, axes: Sequence[Axis]) -> int:
    """Elements that lie side by side in memory, of those that the axes walk over."""
    run, left = 1, list(axes)
    while True:
        following = next(
            (x for x in left if hint(x.extent) > 1 and stride(address, x) == run), None
        )
        if following is None:
            return run
        left.remove(following)
        run *= hint(following.extent)
