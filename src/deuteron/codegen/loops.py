"""From a scheduled nest to loops that code can be written for: addresses, axes, statements.

In: a `schedule.kernel.Nest` and the layouts of its tensors. Out: `Loops`, in which

* every load and store has one index, its linear address in elements; loads of the nest's own
  results have none,
* axes of extent 1 are gone, an axis seen as ``a // k`` and ``a % k`` with ``k`` dividing its extent
  is two axes, and neighbouring axes that every address walks as one are one axis,
* conditions that became constant, or cannot hold (`ranges`), are reduced.

The order of axes carries no meaning: `ordered` takes it from strides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from deuteron.codegen.ranges import is_never_true
from deuteron.ir.expr import Expr, as_position, children, literal, load, own_indices, rebuild
from deuteron.ir.index import (
    Atom,
    Axis,
    Div,
    Index,
    Mod,
    Value,
    const,
    divide_exact,
    hint,
    product,
    split_points,
    substitute,
)
from deuteron.ir.operations import ITEMSIZE
from deuteron.ir.program import Layout
from deuteron.schedule.kernel import Nest, Reduce, Scan


@dataclass(frozen=True)
class Write:
    """A store at a linear address; or of several neighbours, `value` and `others` at the points of
    the axis `phase`, which lie behind those of `along` (see `codegen.triton.unroll_and_jam`)."""

    tensor: str
    address: Index
    value: Expr
    level: str
    accumulate: str | None
    mask: Expr | None
    dtype: str
    scattered: bool = False
    others: tuple[Expr, ...] = ()
    unrolled_axis: Axis | None = None
    along: Axis | None = None


@dataclass(frozen=True)
class CrossRowReduce:
    """A `Reduce` over the split axis. The program of split k stores its result at ``address``, in
    which `SPLIT` stands for k."""

    name: str
    kind: str
    body: Expr
    tensor: str
    address: Index


Statement = Reduce | Scan | Write | CrossRowReduce
SPLIT = Axis("split", 1 << 30)  # the number k of a split of the rows


@dataclass(frozen=True)
class Loops:
    parallel: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    statements: tuple[Statement, ...]
    row_split: tuple[Axis, int] | None = None
    results: frozenset[str] = field(default_factory=frozenset)  # names of reductions and scans
    group_axes: tuple[Axis, ...] = ()  # reduced axes along one group of a row's elements

    def roots(self) -> list[Expr]:
        out: list[Expr] = []
        for p in self.statements:
            out.extend(roots_of(p))
        return out

    @property
    def group_index_axes(self) -> tuple[Axis, ...]:
        """The reduced axes that number the groups of a row, or all where there are no groups."""
        return tuple(a for a in self.reduced if a not in self.group_axes)

    def addresses(self) -> list[Index]:
        return [p.address for p in self.statements if isinstance(p, (Write, CrossRowReduce))]

    @cached_property
    def nodes(self) -> list[Expr]:
        """Every node of all expressions once, arguments before users."""
        return unique_nodes(self.roots())

    @cached_property
    def accesses(self) -> list[Access]:
        """The distinct reads and writes of memory."""
        accesses: dict[Access, None] = {}
        for n in self.nodes:
            if n.op == "load" and n.attr[1]:
                accesses[read_of(n)] = None
        for p in self.statements:
            if isinstance(p, Write):
                accesses[written_by(p)] = None
        return list(accesses)


def unique_nodes(roots: Iterable[Expr]) -> list[Expr]:
    """Every node under `roots` once, arguments before users."""
    seen: dict[Expr, None] = {}
    for root in roots:
        stack: list[tuple[Expr, bool]] = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if node in seen:
                continue
            if ready:
                seen[node] = None
            else:
                stack.append((node, True))
                stack.extend((c, False) for c in children(node) if c not in seen)
    return list(seen)


def roots_of(s: Statement) -> list[Expr]:
    if isinstance(s, Write):
        out = [s.value, *s.others] + ([s.mask] if s.mask is not None else [])
    else:
        out = [s.body]
    if isinstance(s, (Write, CrossRowReduce)):
        out.extend(a.expr for a in s.address.atoms() if isinstance(a, Value))
    return out


class Rewriter:
    """Replaces atoms in indices, in many roots that share nodes; folds what becomes
    constant."""

    def __init__(
        self,
        table: Mapping[Atom, Index],
        layouts: Mapping[str, Layout] | None = None,
        results: frozenset[str] = frozenset(),
    ) -> None:
        self.table, self.layouts, self.results = dict(table), layouts, results
        self.maxima: dict[str, Expr] = {}  # of the reductions that were met: see `ranges`
        self.done: dict[Expr, Expr] = {}

    def expr(self, root: Expr) -> Expr:
        known = self.done.get(root)
        if known is not None:
            return known
        for node in root.walk():
            if node not in self.done:
                self.done[node] = self._node(node)
        return self.done[root]

    def _node(self, node: Expr) -> Expr:
        args = tuple(self.done[a] for a in node.args)
        if node.op == "load" and node.attr[0] in self.results:
            return Expr("load", node.dtype, (), (node.attr[0], (), None))
        new = rebuild(node, args, self.table, self.done)
        if is_never_true(new, self.maxima):
            return literal(False, "bool")
        # What is no load may become one, of what was rewritten already: where(c, x, x).
        if node.op == new.op == "load" and self.layouts is not None:
            name, idx, fill = new.attr
            mask = new.args[0] if new.args else None
            return load(name, (self.layouts[name].address(idx),), new.dtype, mask, fill)
        return new

    def index(self, index: Index) -> Index:
        table = dict(self.table)
        for a in index.atoms():
            if isinstance(a, Value):
                table[a] = as_position(self.expr(a.expr))
        return substitute(index, table)

    def statement(self, s: Statement) -> Statement:
        if isinstance(s, Write):
            mask = self.expr(s.mask) if s.mask is not None else None
            return replace(
                s,
                address=self.index(s.address),
                value=self.expr(s.value),
                others=tuple(map(self.expr, s.others)),
                mask=mask,
            )
        if isinstance(s, CrossRowReduce):
            return replace(s, address=self.index(s.address), body=self.expr(s.body))
        return replace(s, body=self.expr(s.body))


def prepare(nest: Nest, layouts: Mapping[str, Layout]) -> Loops:
    """The loops of a nest, with linear addresses and canonical axes."""
    results = frozenset(nest.locals())
    flat = Rewriter({}, layouts, results)
    statements: list[Statement] = []
    for s in nest.stmts:
        if isinstance(s, Reduce) and s.partial:
            index = (SPLIT.index, *(a.index for a in nest.reduced))
            statements.append(
                CrossRowReduce(
                    s.name, s.kind, flat.expr(s.body), s.name, layouts[s.name].address(index)
                )
            )
        elif isinstance(s, (Reduce, Scan)):
            body = flat.expr(s.body)
            statements.append(replace(s, body=body))
            if isinstance(s, Reduce) and s.kind == "max":
                flat.maxima[s.name] = body
        else:
            mask = flat.expr(s.mask) if s.mask is not None else None
            lay = layouts[s.tensor]
            address = flat.index(lay.address(s.index))
            value = flat.expr(s.value)
            statements.append(
                Write(s.tensor, address, value, s.level, s.accumulate, mask, lay.dtype, s.scattered)
            )
    loops = Loops(
        nest.parallel, nest.reduced, tuple(statements), nest.row_split, results, nest.group_axes
    )
    return _merge(_split(_drop_unit(loops)))


def _fixed(loops: Loops) -> set[Axis]:
    """Axes that must stay what they are: the split one, and reduced ones whose positions or order
    are results.
    """
    out = {loops.row_split[0]} if loops.row_split else set()
    for p in loops.statements:
        if isinstance(p, Scan) or (isinstance(p, Reduce) and p.kind.startswith("arg")):
            out |= set(loops.reduced)
    return out


def rearranged(
    loops: Loops,
    table: Mapping[Atom, Index],
    parallel: Iterable[Axis],
    reduced: Iterable[Axis],
    group_axes: Iterable[Axis] = (),
) -> Loops:
    """The nest over other axes; `table` says what those of before are."""
    move = Rewriter(table, None, loops.results)
    return replace(
        loops,
        parallel=tuple(parallel),
        reduced=tuple(reduced),
        group_axes=tuple(group_axes),
        statements=tuple(move.statement(p) for p in loops.statements),
    )


def restricted(loops: Loops, axis: Axis, low: Index, piece: Axis) -> Loops:
    """The nest where ``low <= axis < low + extent of piece``."""
    there = {axis: piece}
    parallel, reduced = ([there.get(a, a) for a in x] for x in (loops.parallel, loops.reduced))
    moved = rearranged(loops, {axis: low + piece.index}, parallel, reduced, loops.group_axes)
    return _merge(_drop_unit(moved))


def _drop_unit(loops: Loops) -> Loops:
    reductions = any(isinstance(p, (Reduce, Scan)) for p in loops.statements)
    drop = {
        a
        for a in (*loops.parallel, *loops.reduced)
        if a.extent.value == 1 and a not in _fixed(loops)
    }
    if reductions and loops.reduced and all(a in drop for a in loops.reduced):
        drop.discard(loops.reduced[-1])  # a reduction needs a loop
    if not drop:
        return loops
    table: dict[Atom, Index] = {a: const(0) for a in drop}
    return rearranged(
        loops,
        table,
        (a for a in loops.parallel if a not in drop),
        (a for a in loops.reduced if a not in drop),
        (a for a in loops.group_axes if a not in drop),
    )


def all_indices(loops: Loops) -> list[Index]:
    indices: dict[Index, None] = dict.fromkeys(loops.addresses())
    for node in loops.nodes:
        indices.update(dict.fromkeys(own_indices(node)))
    return list(indices)


def _split(loops: Loops) -> Loops:
    """Splits axes until no ``a // k`` or ``a % k`` with ``k`` dividing the extent is left."""
    for count in range(12):
        axes = set(loops.parallel) | set(loops.reduced)
        candidate = next(
            (
                c
                for i in all_indices(loops)
                for a in i.atoms()
                if isinstance(a, (Div, Mod))
                for c in split_points(a)
                if c[0] in axes and c[0] not in _fixed(loops)
            ),
            None,
        )
        if candidate is None:
            return loops
        axis, size, outer_extent = candidate
        outer = Axis(f"{axis.name}o{count}", outer_extent)
        inner = Axis(f"{axis.name}i{count}", size)

        def put(
            group: Sequence[Axis], axis: Axis = axis, pair: tuple[Axis, Axis] = (outer, inner)
        ) -> list[Axis]:
            return [x for a in group for x in (pair if a == axis else (a,))]

        groups = map(put, (loops.parallel, loops.reduced, loops.group_axes))
        loops = rearranged(loops, {axis: outer.index * size + inner.index}, *groups)
    return loops


def _merge(loops: Loops) -> Loops:
    fixed = _fixed(loops)
    while True:
        indices = all_indices(loops)
        pair = next(
            (
                p
                for group in (loops.parallel, loops.group_index_axes, loops.group_axes)
                for p in _pairs(group)
                if p[0] not in fixed and p[1] not in fixed and _mergeable(indices, *p)
            ),
            None,
        )
        if pair is None:
            return loops
        a, b = pair
        both = Axis(f"{a.name}{b.name}", a.extent * b.extent)
        table: dict[Atom, Index] = {a: both.index // b.extent, b: both.index % b.extent}

        def put(
            group: Sequence[Axis], gone: Axis = a, last: Axis = b, both: Axis = both
        ) -> list[Axis]:
            return [both if x == last else x for x in group if x != gone]

        loops = rearranged(
            loops, table, *map(put, (loops.parallel, loops.reduced, loops.group_axes))
        )


def _pairs(group: Sequence[Axis]) -> list[tuple[Axis, Axis]]:
    return [(a, b) for a in group for b in group if a != b]


def _mergeable(indices: Sequence[Index], a: Axis, b: Axis) -> bool:
    """Whether every index sees the pair only as ``a*extent(b) + b``."""
    if b.extent.value == 0:
        return False
    for i in indices:
        ca, cb = i.coefficient(a), i.coefficient(b)
        if ca is None or cb is None or ca is not cb * b.extent:
            return False
    return True


@dataclass(frozen=True)
class Access:
    """One distinct address that is read or written, and the bytes of its elements."""

    tensor: str
    address: Index
    itemsize: int
    store: bool


def read_of(node: Expr) -> Access:
    return Access(node.attr[0], node.attr[1][0], ITEMSIZE[node.dtype], False)


def written_by(part: Write) -> Access:
    size, address = ITEMSIZE[part.dtype], part.address
    if part.unrolled_axis is not None:  # an element is as many as are stored together
        count = len(part.others) + 1
        whole = divide_exact(address - part.unrolled_axis.index, const(count))
        assert whole is not None, address
        size, address = size * count, whole
    return Access(part.tensor, address, size, True)


def stride(address: Index, axis: Axis) -> int | None:
    """Elements from one point of the axis to the next at hinted sizes; None where it is not
    constant.
    """
    c = address.coefficient(axis)
    return None if c is None or c.axes() else hint(c)


def points_visited(address: Index, axes: Iterable[Axis]) -> int:
    """How many elements the address visits, at hinted sizes."""
    used = address.axes()
    return max(1, hint(product(a.extent for a in axes if a in used)))


def outermost_first(loops: Loops, axes: Iterable[Axis]) -> list[Axis]:
    """Axes from the outermost loop to the innermost: large strides outside."""
    accesses = loops.accesses
    index = {a: i for i, a in enumerate((*loops.parallel, *loops.reduced))}

    def weight(a: Axis) -> float:
        total = 0.0
        for x in accesses:
            step = stride(x.address, a)
            total += x.itemsize * (abs(step) if step is not None else 64) * (2 if x.store else 1)
        return total

    return sorted(axes, key=lambda a: (-weight(a), index[a]))
