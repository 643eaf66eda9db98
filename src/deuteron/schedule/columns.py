"""Folds over a nest's rows, beside what the nest does along its rows: chunked nests.

In: a nest of rows (or the loops for one) and a group whose folds run over those rows. Out: one nest
in which every worker walks its share of the rows and keeps partial results of the column folds, and
the computations that combine the partial results afterwards, in a fixed order. A tensor that both
read is read once (a norm's backward: dx beside the gradients of weight and bias).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from deuteron.base.device import DeviceSpec
from deuteron.ir import expr as E
from deuteron.ir.index import Axis, const, floordiv, hint, mod, product
from deuteron.ir.program import Compute, Layout, contiguous
from deuteron.schedule.group import Group, Member
from deuteron.schedule.legality import Refusal, consistent
from deuteron.schedule.space import Map, Space, dense, flat, image, one_to_one
from deuteron.schedule.teams import HELD, LONG, share

# Workers per multiprocessor of a GPU: few, since each leaves partial results, but more for short
# rows, which leave a worker waiting. H200, layer norm forward and backward, 2, 4, 8 workers: rows
# of 1024 (bf16) 102, 91, 94 us, of 256 191, 200, 184 us, of 768 (f32) 256, 250, 255 us; of 4096 no
# difference.
WORKERS = 2
MOST_WORKERS = 8
# Rows that are so many apart begin alike between multiples of 16 bytes: of that many workers or a
# multiple each has rows of one kind (see `codegen.triton.turn`).
ALIKE = 8
# The least that a thread of a worker has. H200, layer norm and GELU, forward and backward, rows of
# 4096 (bf16), with 166 and 128 registers: 659 and 547 us.
LEAST_REGISTERS = 128


@dataclass(frozen=True)
class Chunked:
    """`main` leaves partial results in new tensors (`layouts`); `tail` finishes them, then does
    what depended on the folds."""

    main: Group
    tail: tuple[tuple[Compute, int], ...]  # with their positions in the program
    layouts: dict[str, Layout]


def workers(space: Space, folds: bool, spec: DeviceSpec) -> tuple[Axis, int]:
    """The axis that is cut into chunks, and into how many. `folds`: along the rows there are some,
    so that a worker walks whole rows."""
    rows = space.parallel
    axis = max(rows, key=lambda a: (hint(a.extent), -rows.index(a)))
    row = hint(product(a.extent for a in space.reduced))
    each = min(MOST_WORKERS, max(WORKERS, 4096 // max(1, row))) if folds else WORKERS
    team = 1
    if folds and row > LONG and spec.kind == "cuda":  # then a worker is a team
        team = -(-row // share(HELD, row))
    most = spec.cores if spec.kind == "cpu" else each * spec.cores // team
    if spec.kind == "cuda" and row % ALIKE and most > ALIKE:
        most -= most % ALIKE
    return axis, most if axis.extent.value is None else max(1, min(most, axis.extent.value))


def registers(warps: int, spec: DeviceSpec) -> int:
    """The most registers (of 4 bytes) of a thread of a worker that has so many warps, so that a
    multiprocessor has room for all its workers; 0: no matter how many."""
    most = spec.registers // 4 // (WORKERS * 32 * warps)
    return most if LEAST_REGISTERS <= most < 256 else 0


def columns(
    base: Group,
    guest: Group,
    table: Map,
    layouts: Mapping[str, Layout],
    owner: Mapping[str, str],
    spec: DeviceSpec,
) -> Chunked | Refusal:
    """`guest`, whose folds run over the base's rows, as column folds of the base's nest."""
    rows, cols = image(table, guest.space.reduced), image(table, guest.space.parallel)
    space = base.space
    if not base.fixed:
        space = Space(
            tuple(a for a in space.parallel if a in rows),
            tuple(a for a in space.parallel if a in cols),
        )
    if set(space.parallel) != rows or set(space.reduced) != cols or not rows or not cols:
        return Refusal(
            "iteration spaces differ", "the columns of one are not the rows of the other"
        )
    if (
        guest.space.points is not space.points
        or guest.space.rows is not product(a.extent for a in space.reduced)
        or not one_to_one(guest.space.axes, table)
    ):
        return Refusal("iteration spaces differ", "rows and columns of different extents")
    chunk = base.chunk or workers(space, bool(base.folds), spec)
    parts = _parts(guest)
    if isinstance(parts, Refusal):
        return parts
    points, folds, after = parts
    moved = [m.moved(table, level="point") for m in points]
    partials = dict(base.partials)
    made: dict[str, Layout] = {}
    tail: list[tuple[Compute, int]] = []
    for m in folds:
        moved.append(m.moved(table, level="point", kind="column"))
        name = f"{m.name}.part"
        partials[m.name] = name
        shape = (const(chunk[1]), *(a.extent for a in space.reduced))
        made[name] = contiguous(shape, m.compute.body.dtype, m.compute.layout.device)
        combine = _combine(moved[-1], name, space, chunk[1])
        if combine is None:
            return Refusal("iteration spaces differ", f"{m.name} has no place among the columns")
        tail.append((combine, m.position))
    tail += [(m.compute, m.position) for m in after]
    both = sorted((*base.members, *moved), key=lambda m: m.position)
    main = Group(space, tuple(both), chunk, partials)
    names = {m.name for m in after}
    for m in both:
        if any(r.tensor in names for r in m.reads):
            return Refusal("columns", f"{m.name} needs what is computed per column")
    bad = consistent(main, layouts, owner)
    return bad if bad is not None else Chunked(main, tuple(tail), made)


def _parts(guest: Group) -> tuple[list[Member], list[Member], list[Member]] | Refusal:
    """The guest's members: at points, folds, and those that wait for the folds."""
    points: list[Member] = []
    folds: list[Member] = []
    after: list[Member] = []
    late: set[str] = set()
    for m in guest.members:
        waits = any(r.tensor in late for r in m.reads)
        if m.compute.target is not None or m.kind in ("scan", "column", "write"):
            return Refusal("chunked", f"{m.name} cannot be part of a chunked nest")
        if m.kind == "fold" and not waits:
            if m.compute.body.attr[0].startswith("arg"):
                return Refusal("chunked", f"{m.name} keeps positions, which partial results lose")
            folds.append(m)
            late.add(m.name)
        elif m.level == "point" and m.kind == "point" and not waits:
            points.append(m)
        elif m.kind == "point" and m.level == "row":
            after.append(m)
            late.add(m.name)
        else:
            return Refusal("chunked", f"{m.name} needs all rows before it can start")
    return points, folds, after


def _combine(m: Member, partial: str, space: Space, count: int) -> Compute | None:
    """The fold of the partial results, under the name of the column fold."""
    c = m.compute
    form = dense(flat(m.index, [a.extent for a in c.axes]), space.reduced)
    whole = {a for a in space.reduced if a.extent.value != 1}
    if form is None or {a for a, _ in form} != whole:
        return None
    here = flat([a.index for a in c.axes], [a.extent for a in c.axes])
    at: Map = {a: const(0) for a in space.reduced}
    for k, (a, w) in enumerate(form):
        at[a] = floordiv(here, w) if k == len(form) - 1 else mod(floordiv(here, w), a.extent)
    worker = Axis("r0", count)
    index = (worker.index, *(at[a] for a in space.reduced))
    body = E.reduce(c.body.attr[0], (worker,), E.load(partial, index, c.body.dtype))
    return replace(c, body=body)


def rows_of(guest: Group) -> tuple[Group, Map]:
    """An empty nest of the guest's rows, in one loop, to turn a group of column folds by itself."""
    table: Map = {a: a.index for a in guest.space.axes}
    rows = guest.space.reduced
    if len(rows) > 1:
        whole = Axis("rows", product(a.extent for a in rows))
        left = whole.index
        for a in reversed(rows[1:]):
            table[a] = mod(left, a.extent)
            left = floordiv(left, a.extent)
        table[rows[0]] = left
        rows = (whole,)
    return Group(Space(rows, guest.space.parallel), ()), table


__all__ = ["Chunked", "columns", "rows_of"]
