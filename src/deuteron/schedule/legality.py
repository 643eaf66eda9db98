"""Whether two groups may share a nest, from index maps and dependences alone.

In: two groups. Out: the group that computes both, or a `Refusal` that says why there is none, with
both index maps where they differ. Cost plays no part here (`profit`), nor do paths through other
kernels (`fuse` asks for those).

One nest stays as it is (the base); the other's loops (the guest's) become indices over the base's,
found from the tensors that both touch. Rows stay rows: a guest with reductions fits where its
parallel loops are the base's parallel ones and its reduced loops the reduced ones. A guest whose
reductions run over the base's rows becomes cross-row reductions of a row split. On a GPU a guest
may reduce over groups of the base's rows (`grouped`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from deuteron.base.device import DeviceSpec
from deuteron.ir.index import Axis, Index, as_index, product
from deuteron.ir.program import Layout
from deuteron.schedule import grouped
from deuteron.schedule.group import Group, Member, bound_axes
from deuteron.schedule.space import (
    Equation,
    Map,
    Space,
    flat,
    image,
    match_rest,
    one_to_one,
    same_element,
    solve,
)

# From what one value of a row serves to what each point has.
LEVELS = ("row", "group", "point")


@dataclass(frozen=True)
class Refusal:
    """Why not. `reason` is a class of reasons, `detail` the case with its index maps."""

    reason: str
    detail: str = ""


def fits(
    a: Group,
    b: Group,
    layouts: Mapping[str, Layout],
    owner: Mapping[str, str],
    spec: DeviceSpec | None = None,
) -> Group | Refusal:
    """The nest that computes both groups, `a`'s members before `b`'s where they depend. Without a
    device, or on a CPU, rows have no groups."""
    cuda = spec is not None and spec.kind == "cuda"
    for g, other in ((a, b), (b, a)):
        if any(m.kind == "write" for m in g.members) and not (cuda and may_store(g, other)):
            return Refusal("scatter", f"{_writers(g)} stores at computed places")
    devices = {layouts[g.members[0].name].device for g in (a, b)}
    if len(devices) > 1:
        return Refusal("device", " and ".join(sorted(devices)))
    first: Refusal | None = None
    for base, guest in _orders(a, b):
        table = correspond(base, guest, layouts)
        if isinstance(table, Refusal):
            first = first or table
            continue
        placed = in_one_nest(base, guest, table, cuda)
        if isinstance(placed, Refusal):
            first = first or placed
            continue
        if placed.group_axes and spec is not None and (why := grouped.unfit(placed, layouts, spec)):
            first = first or Refusal("grouped reductions", why)
            continue
        bad = consistent(placed, layouts, owner, (base, guest))
        if bad is None:
            return placed
        first = first or bad
    assert first is not None
    return first


def may_store(g: Group, other: Group) -> bool:
    """Whether a group is one store at places of its own for each point, which may be done where
    `other` has computed what it needs: nothing else of that is in the memory that it writes to."""
    (m, *more) = g.members
    if more or not m.compute.unique or m.compute.accumulate is not None:
        return False
    return m.compute.target not in other.names and not other.names.keys().isdisjoint(g.inputs)


def _writers(g: Group) -> str:
    return ", ".join(m.name for m in g.members if m.kind == "write")


def _orders(a: Group, b: Group) -> tuple[tuple[Group, Group], ...]:
    """Who is base: the one with a row split, else one with reductions, else one with more points,
    else the first."""
    if (a.row_split is None) != (b.row_split is None):
        return ((b, a),) if a.row_split is None else ((a, b),)
    if a.fixed != b.fixed:
        return ((a, b),) if a.fixed else ((b, a),)
    if b.space.size() > a.space.size():
        return ((b, a), (a, b))
    return ((a, b), (b, a))


# -- which loop is which ---------------------------------------------------------------------------
def equations(base: Group, guest: Group, layouts: Mapping[str, Layout]) -> list[Equation]:
    """What both nests say of the elements of the tensors that both touch."""
    out: list[Equation] = []

    def add(name: str, ours: Sequence[Index], theirs: Sequence[Index], exact: bool) -> None:
        lay = layouts[name]
        out.append(Equation(name, flat(ours, lay.shape), flat(theirs, lay.shape), exact, lay.numel))

    for name, indices in guest.reads.items():
        m = base.names.get(name)
        if m is not None:
            for theirs in indices:
                add(name, m.index, theirs, True)
        for ours in base.reads.get(name, ()):
            for theirs in indices:
                add(name, ours, theirs, False)
    for name, indices in base.reads.items():
        m = guest.names.get(name)
        if m is not None:
            for ours in indices:
                add(name, ours, m.index, False)
    return out


def correspond(base: Group, guest: Group, layouts: Mapping[str, Layout]) -> Map | Refusal:
    """Each loop of the guest as an index over the base's loops."""
    theirs = guest.space.axes
    table = solve(equations(base, guest, layouts), base.space, theirs)
    missing = [x for x in theirs if x not in table]
    if missing:
        used = image(table, [x for x in theirs if x in table])
        free = [x for x in base.space.axes if x not in used]
        if not match_rest(table, free, theirs):
            return Refusal(
                "iteration spaces differ",
                f"{_loops(base.space)} and {_loops(guest.space)}: nothing relates {missing}",
            )
    return table


def _loops(s: Space) -> str:
    text = "x".join(repr(a.extent) for a in s.parallel) or "1"
    return f"[{text} | {'x'.join(repr(a.extent) for a in s.reduced)}]" if s.reduced else f"[{text}]"


# -- where the guest's members live ---------------------------------------------------------------
def in_one_nest(base: Group, guest: Group, table: Map, cut: bool = False) -> Group | Refusal:
    """Base and guest in one nest. `cut`: whether rows may be cut into groups for it."""
    space = base.space
    if guest.row_split is not None:
        assert base.row_split is not None
        (axis, count), (other, n) = base.row_split, guest.row_split
        if table[other] is not axis.index or n != count:
            return Refusal(
                "row split", f"rows split along {axis} into {count}, along {other} into {n}"
            )
    rows, cols = set(space.parallel), set(space.reduced)
    everything = image(table, guest.space.axes)
    if guest.fixed:
        p, r = image(table, guest.space.parallel), image(table, guest.space.reduced)
        if p <= rows and r <= cols:
            if not one_to_one(guest.space.axes, table) or guest.space.rows is not space.rows:
                return _different(base, guest, "rows")
            if guest.space.points is not space.points:
                return _different(base, guest, "reduced loops")
            if guest.group_axes and image(table, guest.group_axes) != set(base.group_axes):
                return _different(base, guest, "groups of a row")
            return _merged(base, guest, [m.moved(table) for m in guest.members])
        division = grouped.cut(base, guest, table) if cut else None
        if division is not None:
            (base, table) = division
            if not one_to_one(guest.space.axes, table) or guest.space.points is not space.points:
                return _different(base, guest, "groups of a row")
            at = [m.moved(table, grouped.GROUP_LEVELS[m.level]) for m in guest.members]
            return _merged(base, guest, at)
        groups = rows - r if base.row_split is None else {base.row_split[0]}
        if r <= rows and p <= cols | groups:
            return Refusal("rows against columns", "one reduces over the other's rows")
        return _different(base, guest, "reduced loops")
    if guest.space.points is space.points and one_to_one(guest.space.axes, table):
        return _merged(base, guest, [m.moved(table) for m in guest.members])
    if not space.reduced and not guest.space.reduced:
        # The guest becomes the rows of a nest whose other loops are reduced ones.
        whole = _whole_axes(table, guest.space.axes)
        if whole is None or not whole < rows:
            return _different(base, guest, "loops")
        parallel = tuple(a for a in space.parallel if a in whole)
        if product(a.extent for a in parallel) is not guest.space.points:
            return _different(base, guest, "loops")
        space = Space(parallel, tuple(a for a in space.parallel if a not in whole))
        members = [m.moved(table, level="row") for m in guest.members]
        return _merged(replace(base, space=space), guest, members)
    if everything <= rows and guest.space.points is space.rows:
        if not one_to_one(guest.space.axes, table):
            return _different(base, guest, "rows")
        return _merged(base, guest, [m.moved(table, level="row") for m in guest.members])
    group_index_axes = grouped.group_index_axes(base)
    if base.group_axes and everything <= group_index_axes:
        if guest.space.points is product(a.extent for a in group_index_axes):
            if one_to_one(guest.space.axes, table):
                return _merged(base, guest, [m.moved(table, "group") for m in guest.members])
    return _different(base, guest, "loops")


def _whole_axes(table: Map, axes: Sequence[Axis]) -> set[Axis] | None:
    out: set[Axis] = set()
    for a in axes:
        if a.extent.value == 1:
            continue
        (*_,) = used = tuple(table[a].axes())
        if len(used) != 1 or table[a] is not used[0].index or used[0] in out:
            return None
        out.add(used[0])
    return out


def _different(base: Group, guest: Group, what: str) -> Refusal:
    return Refusal(
        "iteration spaces differ", f"{what} of {_loops(base.space)} and {_loops(guest.space)}"
    )


def _merged(base: Group, guest: Group, members: Sequence[Member]) -> Group:
    both = sorted((*base.members, *members), key=lambda m: m.position)
    return replace(base, members=tuple(both), partials={**base.partials, **guest.partials})


# -- dependences inside ---------------------------------------------------------------
def consistent(
    g: Group,
    layouts: Mapping[str, Layout],
    owner: Mapping[str, str],
    merged: tuple[Group, Group] | None = None,
) -> Refusal | None:
    """Every member finds what it reads at the nest's current point, and nothing is overwritten
    before it is read. Where `merged`, which are consistent, have no member that was moved, only
    what one reads of the other is looked at."""
    partial = {*g.partials, *g.partials.values()}
    shared: Set[str] = g.names.keys()
    if (
        merged is not None
        and not partial
        and {*map(id, g.members)} == {id(m) for p in merged for m in p.members}
    ):
        (a, b) = merged
        shared = (a.reads.keys() & b.names.keys()) | (b.reads.keys() & a.names.keys())
        if not shared and not g.targets and not any(m.kind != "point" for m in g.members):
            return None
    seen: dict[str, Member] = {}
    for m in g.members:
        if not in_line(m, g.space):
            return Refusal("positions", f"{m.name} counts along one loop, not {_loops(g.space)}")
        for r in m.reads:
            if r.tensor in partial:
                return Refusal("columns", f"{m.name} reads {r.tensor}, complete after all rows")
            if r.tensor not in shared:
                continue
            p = g.names[r.tensor]
            if p.name not in seen:
                return Refusal("order", f"{m.name} reads {p.name} before it is there")
            if not same_element(p.index, r.index, layouts[r.tensor].shape):
                return Refusal(
                    "index maps differ",
                    f"{p.name} is made at {_text(p.index)} and read by {m.name} at "
                    f"{_text(r.index)}",
                )
            if LEVELS.index(m.level) < LEVELS.index(p.level) and m.kind not in (
                "reduction",
                "scan",
            ):
                return Refusal("levels", f"{m.name} is per {m.level}, {p.name} per {p.level}")
        seen[m.name] = m
    return overwritten(g, owner) if g.targets else None


def in_line(m: Member, space: Space) -> bool:
    """Whether a scan or a reduction of positions runs along the nest's one reduced loop, as it
    must."""
    if m.kind != "scan" and not (
        m.kind == "reduction" and m.compute.body.attr[0].startswith("arg")
    ):
        return True
    (along, *more), loops = bound_axes(m.compute), space.reduced
    if along.extent.value == 1:
        return product(a.extent for a in loops).value == 1
    return not more and len(loops) == 1 and m.at[along] is loops[0].index


def overwritten(g: Group, owner: Mapping[str, str]) -> Refusal | None:
    """Reads of memory that the nest writes into: only by the point that writes there. Stores into
    targets come last in a nest, in the order of the members (`Group.nest`)."""
    for k, m in enumerate(g.members):
        if m.compute.target is None:
            continue
        memory = owner[m.name]
        old = _reads_old(g, owner, memory)
        for other in g.members[k + 1 :]:
            if other.compute.target is None or other.name not in old:
                continue
            if m.name not in old or m.level != other.level:  # else both take the value first
                return Refusal("overwritten", f"{other.name} is of {memory} before {m.name}")
        for j, other in enumerate(g.members):
            for r in other.reads:
                if owner.get(r.tensor, r.tensor) != memory or r.tensor in g.names:
                    continue
                if r.index != m.index or j > k and other is not m:
                    return Refusal(
                        "overwritten",
                        f"{other.name} reads {r.tensor} at {_text(r.index)}, {m.name} overwrites "
                        f"it at {_text(m.index)}",
                    )
            if other is not m and other.compute.target is not None and owner[other.name] == memory:
                return Refusal("overwritten", f"{other.name} and {m.name} write {memory}")
    return None


def _reads_old(g: Group, owner: Mapping[str, str], memory: str) -> set[str]:
    """Members whose value is computed from `memory` at the moment that it is stored: what
    reductions and scans make is in registers by then."""
    readers: set[str] = set()
    for m in g.members:
        if m.kind in ("reduction", "scan", "column"):
            continue
        for r in m.reads:
            inside = r.tensor in g.names
            if r.tensor in readers or not inside and owner.get(r.tensor, r.tensor) == memory:
                readers.add(m.name)
    return readers


def _text(index: Sequence[Index]) -> str:
    return "[" + ", ".join(repr(as_index(i)) for i in index) + "]"


__all__ = ["Refusal", "correspond", "fits", "in_one_nest"]
