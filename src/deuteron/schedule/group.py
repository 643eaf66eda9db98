"""Groups: computations that share a nest, each placed in its loops.

In: `Compute` definitions. Out: a `Group`, whose `nest()` is what code generators read. A group is a
value; merging makes a new one. Inside, every member's result is an expression at the nest's current
point: what a member reads from another is that expression, and interning shares it.

    point      a pointwise computation, one element per point (or per row or group: its level)
    reduction  a reduction over all reduced axes, its result lives on rows; or, level "group",
               over those of a group of each row (see `kernel`)
    column     a reduction over the rows of a row split: partial results, one row per split
    scan       a scan along the reduced axis
    write      anything that stores at computed places or combines with what is there
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from deuteron.base.memo import MEMO
from deuteron.ir import dynamic_bounds
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, flops, issued, own_flops
from deuteron.ir.index import Atom, Axis, Index, Value, atom, const, hint, product, substitute
from deuteron.ir.program import Compute, Layout, tensors_read
from deuteron.lower.unrounded import plain
from deuteron.schedule.kernel import Nest, Reduce, Scan, Stmt, Store
from deuteron.schedule.space import Map, Space, same_element


class Misplaced(Exception):
    """A member reads another at an element that the nest does not have at that point."""

    def __init__(self, tensor: str, wanted: Sequence[Index], there: Sequence[Index]) -> None:
        super().__init__(f"{tensor} is at {list(there)}, read at {list(wanted)}")
        self.tensor, self.wanted, self.there = tensor, tuple(wanted), tuple(there)


@dataclass(frozen=True)
class Read:
    """One place where a computation reads a tensor: the indices over its own axes."""

    tensor: str
    index: tuple[Index, ...]


def kind_of(c: Compute) -> str:
    """What a computation is when it stands alone."""
    if c.body.op == "reduce":
        return "reduction"
    if c.body.op == "scan":
        return "scan"
    plain = c.index is None or c.index == tuple(a.index for a in c.axes)
    return "point" if plain and c.accumulate is None and c.mask is None else "write"


def bound_axes(c: Compute) -> tuple[Axis, ...]:
    """The axes that its reduction binds, or that its scan runs along."""
    if c.body.op == "reduce":
        return c.body.attr[1]
    return (c.body.attr[1],) if c.body.op == "scan" else ()


# More code in one kernel takes compilers more than proportionally long: a chain of sin + 0.5 (13
# units) of 832 units 1.1 s (g++ 12), 2.7 s (Triton 3.6 for sm_90); of 1664 units 3.1 and 7.5 s.
# A kernel of that size computes for longer than it moves data, so that little is lost by a cut.
MAX_CODE = 1024.0
FUNCTION_CODE = 12.0  # of a library's function, whatever it computes


_CODE: dict[Expr, float] = MEMO.answers()


def code_of(body: Expr) -> float:
    """How much code an expression becomes: about its FLOPs and its loads."""
    if body not in _CODE:
        _CODE[body] = sum(min(own_flops(n), FUNCTION_CODE) for n in body.walk()) + len(body.loads())
    return _CODE[body]


_READS: dict[tuple[Expr, ...], tuple[Read, ...]] = MEMO.answers()


def reads_of(c: Compute) -> tuple[Read, ...]:
    """Every place where `c` reads memory (its target is no read)."""
    roots = [c.body] + ([c.mask] if c.mask is not None else [])
    roots += [a.expr for i in c.index or () for a in i.atoms() if isinstance(a, Value)]
    key = tuple(roots)
    known = _READS.get(key)
    if known is None:
        reads = {Read(n.attr[0], n.attr[1]): None for r in roots for n in r.loads()}
        known = _READS[key] = tuple(reads)
    return known


@dataclass(frozen=True)
class Member:
    """A computation in a group. `at`: its own axes (bound ones too) as indices over the nest's."""

    compute: Compute
    at: Map
    kind: str
    level: str  # "row" | "group" | "point": on which axes it, or a reduction's result, is evaluated
    position: int = 0  # in the program; members are evaluated in this order

    @cached_property
    def name(self) -> str:
        return self.compute.name

    @cached_property
    def index(self) -> tuple[Index, ...]:
        """Where the element of the current point is."""
        return tuple(substitute(i, self.at) for i in self.compute.store_index)

    @cached_property
    def reads(self) -> tuple[Read, ...]:
        """Reads, over the nest's axes."""
        return tuple(
            Read(r.tensor, tuple(substitute(i, self.at) for i in r.index))
            for r in reads_of(self.compute)
        )

    def moved(self, table: Map, level: str | None = None, kind: str | None = None) -> Member:
        """The member in another nest whose loops are given by `table`."""
        level, kind = level or self.level, kind or self.kind
        if any(i is not atom(a) for a, i in table.items()):
            at = {a: substitute(i, table) for a, i in self.at.items()}
            return replace(self, at=at, kind=kind, level=level)
        if (level, kind) == (self.level, self.kind):
            return self
        new = replace(self, kind=kind, level=level)
        known = {
            k: v for k, v in self.__dict__.items() if k in ("index", "reads", "effort", "issued")
        }
        new.__dict__.update(known)  # the same loops: what was derived from them stays
        return new

    @cached_property
    def effort(self) -> float:
        """FLOPs of one evaluation, at one point or row."""
        return self.each_of(flops)

    @cached_property
    def issued(self) -> float:
        """What one evaluation takes on a GPU, as FLOPs."""
        return self.each_of(issued)

    def each_of(self, of: Callable[[Expr], float]) -> float:
        each, body = 0.0, self.compute.body
        if self.kind in ("reduction", "scan", "column"):
            each, body = 1.0, body.args[0]
        nested = body.axes() - self.at.keys()
        if not nested:
            return each + of(body)
        ends = dynamic_bounds.ends(body)
        inner = hint(product(a.extent for a in nested if a not in ends))
        inner *= max(1, sum(dynamic_bounds.expected(a, ends[a]) for a in nested if a in ends))
        return each + of(body) * inner


def group_of_one(c: Compute, position: int = 0) -> Group:
    """The group of one computation."""
    kind = kind_of(c)
    bound = bound_axes(c)
    loops = tuple(a for a in bound if a.extent.value != 1) or bound[:1]
    space = Space(tuple(a for a in c.axes if a not in bound and a.extent.value != 1), loops)
    at: Map = {a: a.index if a in space.axes else const(0) for a in (*c.axes, *bound)}
    return Group(space, (Member(c, at, kind, "row" if kind == "reduction" else "point", position),))


@dataclass(frozen=True)
class Group:
    space: Space
    members: tuple[Member, ...]
    row_split: tuple[Axis, int] | None = None
    partials: dict[str, str] = field(default_factory=dict)  # column member -> its partial tensor
    group_axes: tuple[Axis, ...] = ()  # reduced axes along one group of a row's elements

    @cached_property
    def names(self) -> dict[str, Member]:
        """Members by name; a cross-row reduction's name belongs to who combines its partial
        results."""
        return {m.name: m for m in self.members if m.kind != "column"}

    @cached_property
    def targets(self) -> bool:
        """Whether a member writes into another tensor's memory."""
        return any(m.compute.target is not None for m in self.members)

    @cached_property
    def scans(self) -> tuple[Member, ...]:
        return tuple(m for m in self.members if m.kind == "scan")

    @cached_property
    def code(self) -> float:
        """How much code the nest becomes, in units of `code_of`."""
        return sum(code_of(m.compute.body) for m in self.members)

    @cached_property
    def reductions(self) -> bool:
        """Whether the nest's reduced loops mean something (they cannot become parallel)."""
        return any(m.kind in ("reduction", "scan", "column") for m in self.members)

    @property
    def fixed(self) -> bool:
        """Whether rows and reduced loops are told apart."""
        return bool(self.space.reduced)

    @cached_property
    def reads(self) -> dict[str, dict[tuple[Index, ...], None]]:
        """Tensors in memory that are read, with each index vector."""
        out: dict[str, dict[tuple[Index, ...], None]] = {}
        for m in self.members:
            for r in m.reads:
                if r.tensor not in self.names:
                    out.setdefault(r.tensor, {})[r.index] = None
        return out

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """What must exist before the nest starts: tensors read, and targets written into."""
        names: dict[str, None] = {}
        for m in self.members:
            for name in tensors_read(m.compute):
                if name not in self.names:
                    names[name] = None
        return tuple(names)

    def values(self, shapes: dict[str, Layout]) -> dict[str, Expr]:
        """Each member's expression at the current point; a reduction's or scan's is the body that
        it reductions."""
        return Builder(self, shapes).build()

    def nest(self, layouts: dict[str, Layout], stored: Iterable[str]) -> Nest:
        """The nest; `stored` names the members that are needed in memory. What waits for no
        reduction comes first, so that registers do not keep it; what overwrites comes last, behind
        what reads the old value."""
        values = self.values(layouts)
        keep = set(stored)
        stmts: list[Stmt] = []
        late: list[Stmt] = []
        for m in self.members:
            c = m.compute
            if m.kind == "column":
                kind = c.body.attr[0]
                stmts.append(Reduce(self.partials[m.name], kind, values[m.name], partial=True))
                continue
            if m.kind == "reduction":
                grouped = m.level == "group"
                stmts.append(
                    Reduce(result_name(m), c.body.attr[0], values[m.name], grouped=grouped)
                )
            elif m.kind == "scan":
                stmts.append(Scan(result_name(m), c.body.attr[0], values[m.name]))
            if m.name in keep or c.target is not None:
                where = late if c.target is not None else stmts
                where.append(self._store(m, values, layouts))
        space = self.space
        stmts = [*stores_first(stmts, set(space.axes)), *late]
        return Nest(space.parallel, space.reduced, tuple(stmts), self.row_split, self.group_axes)

    def _store(self, m: Member, values: dict[str, Expr], layouts: dict[str, Layout]) -> Store:
        c = m.compute
        value = result_of(m) if m.kind in ("reduction", "scan") else values[m.name]
        index, mask = m.index, None
        if m.kind == "write":
            builder = Builder(self, layouts, values)
            index = tuple(builder.index(i, m.at) for i in c.store_index)
            mask = builder.expr(c.mask, m.at) if c.mask is not None else None
        scattered = m.kind == "write"
        return Store(m.name, index, value, m.level, c.accumulate, mask, scattered, c.unique)


def stores_first(stmts: Sequence[Stmt], axes: set[Axis]) -> list[Stmt]:
    """What is stored at points and waits for nothing comes first, in an order in which few values
    are alive: next is what needs the fewest elements that nobody before it has read (of a chain of
    sums each sum, then what is made of it)."""
    local = {s.name for s in stmts if not isinstance(s, Store)}
    left = {
        s: {n for n in s.value.loads() if axes <= {a for i in n.attr[1] for a in i.axes()}}
        for s in stmts
        if isinstance(s, Store) and s.level == "point" and not s.scattered
        if not local & {n.attr[0] for n in s.value.loads()}
    }
    first: list[Stmt] = []
    seen: set[Expr] = set()
    while left:
        one = min(left, key=lambda s: len(left[s] - seen))
        seen |= left.pop(one)
        first.append(one)
    return [*first, *(s for s in stmts if s not in first)]


def result_name(m: Member) -> str:
    """The name of a reduction's or scan's value inside its nest."""
    return f"{m.name}.r"


def result_of(m: Member) -> Expr:
    """A reduction's or scan's value as an expression."""
    return E.load(result_name(m), m.index, m.compute.body.dtype)


class Builder:
    """Writes the members' expressions over the nest's axes."""

    def __init__(
        self, group: Group, layouts: dict[str, Layout], values: dict[str, Expr] | None = None
    ) -> None:
        self.group, self.layouts = group, layouts
        self.values: dict[str, Expr] = dict(values or {})

    def build(self) -> dict[str, Expr]:
        for m in self.group.members:
            root = m.compute.body
            if m.kind in ("reduction", "scan", "column"):
                root = root.args[0]
            self.values[m.name] = self.expr(root, m.at)
        return self.values

    def expr(self, root: Expr, at: Map) -> Expr:
        table: Map = {a: i for a, i in at.items() if not (isinstance(a, Axis) and i is a.index)}
        done: dict[Expr, Expr] = {}
        for node in root.walk():
            args = tuple(done[a] for a in node.args)
            new = E.rebuild(node, args, table, done)
            if new.op == "load" and new.attr[0] in self.group.names:
                new = self.local(new)
            elif new.op == "cast" and new.attr is not None:  # what is in memory is rounded
                new = plain(E.unrounded(new.args[0]))
            done[node] = new
        return done[root]

    def index(self, i: Index, at: Map) -> Index:
        """An index over a member's axes, over the nest's; what it loads is resolved too."""
        table: dict[Atom, Index] = dict(at)
        for a in i.atoms():
            if isinstance(a, Value):
                table[a] = E.as_position(self.expr(a.expr, at))
        return substitute(i, table)

    def local(self, load: Expr) -> Expr:
        """What a load of a member's tensor is at this point."""
        name, index, fill = load.attr
        m = self.group.names[name]
        if not same_element(m.index, index, self.layouts[name].shape):
            raise Misplaced(name, index, m.index)
        value = result_of(m) if m.kind in ("reduction", "scan") else self.values[name]
        if not load.args:
            return value
        return E.op("where", load.args[0], value, E.literal(fill, value.dtype))


__all__ = [
    "Group",
    "Member",
    "Misplaced",
    "Read",
    "group_of_one",
    "bound_axes",
    "kind_of",
    "reads_of",
    "result_name",
]
