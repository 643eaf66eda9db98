"""From a scheduled nest to loops that are good for C++: addresses, axes, statements.

In: a `schedule.kernel.Nest` and the layouts of its tensors. Out: `Loops`, in which

* every load and store has one index, its linear address in elements; loads of the nest's own
results have none,
* axes of extent 1 are gone, an axis seen as ``a // k`` and ``a % k`` with ``k`` dividing its
extent is two axes, and
  neighbouring axes that every address walks as one are one axis,
* conditions that became constant are folded.

The order of axes carries no meaning: `vector` picks the one for vector lanes, `ordered` the loop
order, from strides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from deuteron.ir.expr import (
    ITEMSIZE,
    SCALAR_OPS,
    Expr,
    as_position,
    children,
    index_value,
    load,
    own_indices,
    rebuild,
)
from deuteron.ir.index import (
    Atom,
    Axis,
    Div,
    Index,
    Mod,
    Value,
    atom,
    const,
    divide_exact,
    hint,
    in_range,
    is_nonneg,
    product,
    substitute,
)
from deuteron.ir.program import Layout
from deuteron.schedule.kernel import Fold, Nest, Prefix


@dataclass(frozen=True)
class Write:
    """A store at a linear address."""

    tensor: str
    address: Index
    value: Expr
    level: str
    accumulate: str | None
    mask: Expr | None
    dtype: str
    scattered: bool


@dataclass(frozen=True)
class ColumnFold:
    """A `Fold` over the chunked axis; worker k stores its result at ``address`` (with `worker`
    standing for k).
    """

    name: str
    kind: str
    body: Expr
    tensor: str
    address: Index


Part = Fold | Prefix | Write | ColumnFold
WORKER = Axis("worker", 1 << 30)


@dataclass(frozen=True)
class Loops:
    parallel: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    parts: tuple[Part, ...]
    chunk: tuple[Axis, int] | None = None
    results: frozenset[str] = field(default_factory=frozenset)  # names of folds and prefixes

    def roots(self) -> list[Expr]:
        out: list[Expr] = []
        for p in self.parts:
            out.extend(roots_of(p))
        return out

    @cached_property
    def nodes(self) -> list[Expr]:
        """Every node of all expressions once, arguments before users."""
        return unique_nodes(self.roots())

    @cached_property
    def flops(self) -> float:
        """Vector FLOPs of one point."""
        return flops_of(self.nodes)

    @cached_property
    def accesses(self) -> list[Access]:
        """The distinct reads and writes of memory."""
        found: dict[Access, None] = {}
        for n in self.nodes:
            if n.op == "load" and n.attr[1]:
                found[read_of(n)] = None
        for p in self.parts:
            if isinstance(p, Write):
                found[written_by(p)] = None
        return list(found)

    def addresses(self) -> list[Index]:
        return [p.address for p in self.parts if isinstance(p, (Write, ColumnFold))]


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


def flops_of(nodes: Iterable[Expr]) -> float:
    """Approximate vector FLOPs of computing these nodes once."""
    return sum(
        SCALAR_OPS[n.op][1] if n.op in SCALAR_OPS else 30.0 * (n.op == "random") for n in nodes
    )


def roots_of(part: Part) -> list[Expr]:
    if isinstance(part, Write):
        out = [part.value] + ([part.mask] if part.mask is not None else [])
    else:
        out = [part.body]
    if isinstance(part, (Write, ColumnFold)):
        out.extend(a.expr for a in part.address.atoms() if isinstance(a, Value))
    return out


class Rewriter:
    """Replaces atoms in indices, in many roots that share nodes; folds what becomes constant."""

    def __init__(
        self,
        table: Mapping[Atom, Index],
        layouts: Mapping[str, Layout] | None = None,
        results: frozenset[str] = frozenset(),
        checked: bool = False,
    ) -> None:
        self.table, self.layouts, self.results = dict(table), layouts, results
        self.checked = checked
        self.done: dict[Expr, Expr] = {}

    def expr(self, root: Expr) -> Expr:
        found = self.done.get(root)
        if found is not None:
            return found
        for node in root.walk():
            if node not in self.done:
                self.done[node] = self._node(node)
        return self.done[root]

    def _node(self, node: Expr) -> Expr:
        args = tuple(self.done[a] for a in node.args)
        if node.op == "load" and node.attr[0] in self.results:
            return Expr("load", node.dtype, (), (node.attr[0], (), None))
        new = rebuild(node, args, self.table, self.done)
        if new.op == "check" and not self.checked and self.layouts is not None:
            return new.args[0]
        # What is no load may become one, of what was rewritten already: where(c, x, x).
        if node.op == new.op == "load" and self.layouts is not None:
            name, idx, fill = new.attr
            mask = new.args[0] if new.args else None
            return load(name, (self.address(name, idx, mask),), new.dtype, mask, fill)
        return new

    def address(self, name: str, index: tuple[Index, ...], mask: Expr | None) -> Index:
        """The linear address; where `checked`, dimensions that loaded values index are checked."""
        assert self.layouts is not None
        lay = self.layouts[name]
        if self.checked:
            index = tuple(_check(i, n, mask) for i, n in zip(index, lay.shape, strict=True))
        return lay.address(index)

    def index(self, index: Index) -> Index:
        table = dict(self.table)
        for a in index.atoms():
            if isinstance(a, Value):
                table[a] = as_position(self.expr(a.expr))
        return substitute(index, table)

    def part(self, part: Part) -> Part:
        if isinstance(part, Write):
            mask = self.expr(part.mask) if part.mask is not None else None
            return replace(
                part, address=self.index(part.address), value=self.expr(part.value), mask=mask
            )
        if isinstance(part, ColumnFold):
            return replace(part, address=self.index(part.address), body=self.expr(part.body))
        return replace(part, body=self.expr(part.body))


def _check(index: Index, extent: Index, mask: Expr | None) -> Index:
    """The index, through a node ``check(value[, mask])`` with the extent as its attribute.

    The node's value is the index where that is in range and 0 elsewhere, after it was reported.
    """
    if not any(isinstance(a, Value) for a in index.atoms()) or in_range(index, extent):
        return index
    args = (index_value(index),) if mask is None else (index_value(index), mask)
    return atom(Value(Expr("check", "i64", args, extent)))


def prepare(nest: Nest, layouts: Mapping[str, Layout], checked: bool = False) -> Loops:
    """The loops of a nest, with linear addresses and canonical axes."""
    results = frozenset(nest.locals())
    flat = Rewriter({}, layouts, results, checked)
    parts: list[Part] = []
    for s in nest.stmts:
        if isinstance(s, Fold) and s.partial:
            place = (WORKER.index, *(a.index for a in nest.reduced))
            parts.append(
                ColumnFold(
                    s.name, s.kind, flat.expr(s.body), s.name, layouts[s.name].address(place)
                )
            )
        elif isinstance(s, (Fold, Prefix)):
            parts.append(replace(s, body=flat.expr(s.body)))
        else:
            mask = flat.expr(s.mask) if s.mask is not None else None
            lay = layouts[s.tensor]
            address = flat.address(s.tensor, tuple(flat.index(i) for i in s.index), mask)
            value = flat.expr(s.value)
            parts.append(
                Write(s.tensor, address, value, s.level, s.accumulate, mask, lay.dtype, s.scattered)
            )
    loops = Loops(nest.parallel, nest.reduced, tuple(parts), nest.chunk, results)
    return _merge(_split(_drop_unit(loops)))


def _fixed(loops: Loops) -> set[Axis]:
    """Axes that must stay what they are: the chunked one, and reduced ones whose positions or order
    are results.
    """
    out = {loops.chunk[0]} if loops.chunk else set()
    for p in loops.parts:
        if isinstance(p, Prefix) or (isinstance(p, Fold) and p.kind.startswith("arg")):
            out |= set(loops.reduced)
    return out


def _apply(
    loops: Loops, table: Mapping[Atom, Index], parallel: Iterable[Axis], reduced: Iterable[Axis]
) -> Loops:
    move = Rewriter(table, None, loops.results)
    return replace(
        loops,
        parallel=tuple(parallel),
        reduced=tuple(reduced),
        parts=tuple(move.part(p) for p in loops.parts),
    )


def _drop_unit(loops: Loops) -> Loops:
    folds = any(isinstance(p, (Fold, Prefix)) for p in loops.parts)
    drop = {
        a
        for a in (*loops.parallel, *loops.reduced)
        if a.extent.value == 1 and a not in _fixed(loops)
    }
    if folds and loops.reduced and all(a in drop for a in loops.reduced):
        drop.discard(loops.reduced[-1])  # a fold needs a loop
    if not drop:
        return loops
    table: dict[Atom, Index] = {a: const(0) for a in drop}
    return _apply(
        loops,
        table,
        (a for a in loops.parallel if a not in drop),
        (a for a in loops.reduced if a not in drop),
    )


def all_indices(loops: Loops) -> list[Index]:
    found: dict[Index, None] = dict.fromkeys(loops.addresses())
    for node in loops.nodes:
        found.update(dict.fromkeys(own_indices(node)))
    return list(found)


def _split(loops: Loops) -> Loops:
    """Splits axes until no ``a // k`` or ``a % k`` with ``k`` dividing the extent is left."""
    for count in range(12):
        axes = set(loops.parallel) | set(loops.reduced)
        found = next(
            (
                c
                for i in all_indices(loops)
                for a in i.atoms()
                if isinstance(a, (Div, Mod))
                for c in _split_points(a)
                if c[0] in axes and c[0] not in _fixed(loops)
            ),
            None,
        )
        if found is None:
            return loops
        axis, size, outer_extent = found
        outer = Axis(f"{axis.name}o{count}", outer_extent)
        inner = Axis(f"{axis.name}i{count}", size)

        def put(
            group: Sequence[Axis], axis: Axis = axis, pair: tuple[Axis, Axis] = (outer, inner)
        ) -> list[Axis]:
            return [x for a in group for x in (pair if a == axis else (a,))]

        loops = _apply(
            loops, {axis: outer.index * size + inner.index}, put(loops.parallel), put(loops.reduced)
        )
    return loops


def _split_points(a: Div | Mod) -> list[tuple[Axis, Index, Index]]:
    """(axis, size of its inner part, extent of its outer part) that would simplify a div or mod."""
    out = []
    for axis in sorted(a.num.axes()):
        c = a.num.coefficient(axis)
        if c is None or c.value == 0 or a.den.axes():
            continue
        size = divide_exact(a.den, c)
        if size is not None and not is_nonneg(size):  # the axis is walked backwards
            size = -size
        if size is None or size.value == 1 or not is_nonneg(size):
            continue
        outer = divide_exact(axis.extent, size)
        if outer is not None and outer.value != 1:
            out.append((axis, size, outer))
    return out


def _merge(loops: Loops) -> Loops:
    fixed = _fixed(loops)
    while True:
        indices = all_indices(loops)
        pair = next(
            (
                p
                for group in (loops.parallel, loops.reduced)
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

        loops = _apply(loops, table, put(loops.parallel), put(loops.reduced))


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
    return Access(part.tensor, part.address, ITEMSIZE[part.dtype], True)


def stride(address: Index, axis: Axis) -> int | None:
    """Elements from one point of the axis to the next at hinted sizes; None where it is not
    constant.
    """
    c = address.coefficient(axis)
    return None if c is None or c.axes() else hint(c)


def points(address: Index, axes: Iterable[Axis]) -> int:
    """How many elements the address visits, at hinted sizes."""
    used = address.axes()
    return max(1, hint(product(a.extent for a in axes if a in used)))


def _strided_cost(step: int | None, store: bool) -> float:
    """Cost per byte of a vector access with this stride, a contiguous one being 1 (measured, f32,
    AVX-512).
    """
    if step == 1:
        return 1.0
    if step is not None and abs(step) <= 4:
        return 2.0  # neighbours that shuffles sort out
    return 5.0 if store else 6.0  # one element at a time, a cache line each


def lane_cost(loops: Loops, axis: Axis, found: Sequence[tuple[Access, int]]) -> float:
    """Bytes moved with vector lanes along `axis`, those that are not contiguous weighted; short
    axes waste lanes.

    `found` are accesses with the number of passes that do them.
    """
    axes = (*loops.parallel, *loops.reduced)
    total = 4.0 * size_of(axes)
    for a, times in found:
        if axis in a.address.axes():
            cost = _strided_cost(stride(a.address, axis), a.store)
            total += cost * times * a.itemsize * points(a.address, axes)
    return total / min(1.0, max(1, hint(axis.extent)) / 16)


def size_of(axes: Iterable[Axis]) -> int:
    return max(1, hint(product(a.extent for a in axes)))


def vector(loops: Loops, candidates: Sequence[Axis]) -> Axis | None:
    """The axis for vector lanes: the one along which memory is read and written most cheaply."""
    if not candidates:
        return None
    found = [(a, 1 if a.store else max(1, times)) for a, times in _times_read(loops).items()]
    return min(
        candidates,
        key=lambda a: (lane_cost(loops, a, found), a not in loops.reduced, -hint(a.extent), a.name),
    )


def _times_read(loops: Loops) -> dict[Access, int]:
    """Accesses and the number of passes over the reduced axes that do them (one per depth of
    dependent folds).
    """
    depth: dict[str, int] = {}
    seen: dict[Access, set[int]] = {}
    for p in loops.parts:
        nodes = unique_nodes(roots_of(p))
        need = max((depth.get(n.attr[0], 0) for n in nodes if n.op == "load"), default=0)
        if isinstance(p, Fold):
            depth[p.name] = need + 1
        elif isinstance(p, Prefix):
            depth[p.name] = need
        for n in nodes:
            if n.op == "load" and n.attr[1]:
                seen.setdefault(read_of(n), set()).add(need)
        if isinstance(p, Write):
            seen.setdefault(written_by(p), set()).add(need)
    return {a: len(ks) for a, ks in seen.items()}


def ordered(loops: Loops, axes: Iterable[Axis]) -> list[Axis]:
    """Axes from the outermost loop to the innermost: large strides outside."""
    found = loops.accesses
    index = {a: i for i, a in enumerate((*loops.parallel, *loops.reduced))}

    def weight(a: Axis) -> float:
        total = 0.0
        for x in found:
            step = stride(x.address, a)
            total += x.itemsize * (abs(step) if step is not None else 64) * (2 if x.store else 1)
        return total

    return sorted(axes, key=lambda a: (-weight(a), index[a]))
