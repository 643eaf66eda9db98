"""Before fusion: computations with canonical axes, and producers that have no place of their own.

In: a `Program`. Out: its computations by name, in which

* the k-th axis is called ``d<k>`` and the k-th bound axis ``r<k>``, so that loops over equal shapes
  are the same axes and most substitutions are none,
* a pointwise producer is written into its one reader, whatever index map the reader uses (pads,
  flips, slices, reshapes), unless that computes elements more often than memory traffic would cost,
* what is cheaper to compute than to read (casts, masks, positions) is written into every reader,
* a sum of which all terms but one are zero is that term.

Tensors that are needed in memory (outputs, library calls, targets) keep their definitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from deuteron.base.device import DeviceSpec
from deuteron.base.record import Record
from deuteron.ir import elements
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, const, hint, product
from deuteron.ir.onehot import single_term
from deuteron.ir.operations import ITEMSIZE
from deuteron.ir.program import Compute, Extern, Layout, Program, memory_of, tensors_read
from deuteron.schedule.group import MAX_CODE, bound_axes, code_of, kind_of, reads_of
from deuteron.schedule.lanes import LINE_FLOPS, picking
from deuteron.schedule.space import Map

# A producer of at most this many FLOPs an element, reading no more bytes than it writes, is
# computed at every use: the arithmetic hides behind the load that remains.
FREE_FLOPS = 2.0
# At most this much arithmetic on single numbers is repeated in each kernel that needs the result.
SCALAR_FLOPS = 64.0
# Expressions do not grow without end (a chain of a thousand producers with one reader each).
MAX_INLINED_CODE = MAX_CODE / 2


def canonical(c: Compute) -> Compute:
    """The computation with axes named by position."""
    axes = tuple(Axis(f"d{k}", a.extent) for k, a in enumerate(c.axes))
    table: Map = {a: b.index for a, b in zip(c.axes, axes, strict=True)}
    if c.body.op == "reduce":
        bound = (Axis(f"r{k}", a.extent) for k, a in enumerate(bound_axes(c)))
        table.update({a: b.index for a, b in zip(bound_axes(c), bound)})
    index = None
    if c.index is not None:
        index = tuple(E.as_position(E.index_value(i).substitute(table)) for i in c.index)
    mask = c.mask.substitute(table) if c.mask is not None else None
    return replace(c, axes=axes, body=c.body.substitute(table), index=index, mask=mask)


class Inliner:
    """Writes producers into their readers, in program order."""

    def __init__(
        self,
        program: Program,
        layouts: Mapping[str, Layout],
        specs: Mapping[str, DeviceSpec],
        unfused: frozenset[str] = frozenset(),
    ) -> None:
        self.layouts, self.specs, self.unfused = layouts, specs, unfused
        self.memory = {o.tensor for o in program.outputs}
        self.computes: dict[str, Compute] = {}
        self.sites: dict[str, int] = {}  # tensor -> places that read it
        self.size: dict[Expr, float] = {}  # at most so much code
        self.counted: set[Expr] = set()  # exactly so much
        for d in program.defs:
            if isinstance(d, Extern):
                self.memory.update((*tensors_read(d), *d.mutates))
            elif isinstance(d, Compute):
                if d.target is not None:
                    self.memory.update((d.name, d.target))
                for r in reads_of(d):
                    self.sites[r.tensor] = self.sites.get(r.tensor, 0) + 1
        calls = [d for d in program.defs if isinstance(d, Extern)]
        self.overwritten = {
            d.target for d in program.defs if isinstance(d, Compute) and d.target is not None
        }
        self.overwritten.update(n for d in calls for n in d.mutates)
        # Views that the library made of such memory have names of their own.
        owner = memory_of(program)
        memory = {owner.get(n, n) for n in self.overwritten}
        views = {n for d in calls for n, a in zip(d.names, d.aliases) if n and a}
        self.overwritten.update(n for n in views if owner.get(n, n) in memory)

    def add(self, c: Compute) -> None:
        c = canonical(c)
        if self.widens(c):
            # Every reader widens, so that memory has what is narrow.
            self.sites[c.body.args[0].attr[0]] += self.sites[c.name] - 1
            self.computes[c.name] = c
        elif self.sites.get(c.name, 0) or c.name in self.memory:
            # What producers read beside their own points, a reader may read elsewhere: again.
            while (new := self.inlined(c, False)) is not c:
                c = new
            # What is read at loaded places waits until those places are expressions.
            c = self.inlined(c, True)
            self.computes[c.name] = self.without_loop(c) or c

    def widens(self, c: Compute) -> bool:
        """Whether it is a wider copy of a tensor that is made for it alone, and has several
        readers."""
        if c.body.op != "cast" or c.name in self.memory or self.sites.get(c.name, 0) < 2:
            return False
        (e,) = c.body.args
        p = self.computes.get(e.attr[0]) if e.op == "load" and not _gathers(e) else None
        if p is None or self.sites[p.name] > 1 or not self.repeatable(c):
            return False
        return ITEMSIZE[e.dtype] < ITEMSIZE[c.body.dtype]

    def inlined(self, c: Compute, gathers: bool) -> Compute:
        loads = {n for root in roots(c) for n in root.loads()}
        table: dict[Expr, Expr] = {}
        total = self.code(c.body)
        for n in sorted(loads, key=lambda n: n.id):
            p = self.computes.get(n.attr[0])
            if p is None or _gathers(n) is not gathers:
                continue
            more = self.code(p.body)
            if total + more > MAX_INLINED_CODE or not self.worth(p, n, c):
                continue
            total += more
            table[n] = element(p, n, self.layouts)
        new = written_into(c, table, [self.computes[n.attr[0]] for n in table])
        self.size[new.body] = min(total, self.size.get(new.body, total))
        return new

    def without_loop(self, c: Compute) -> Compute | None:
        """A sum of a single term, as that."""
        if c.body.op != "reduce" or c.body.attr[0] != "sum" or len(c.body.attr[1]) != 1:
            return None
        (axis,), (body,) = c.body.attr[1], c.body.args
        table: dict[Expr, Expr] = {}
        for n in body.loads():
            p = self.computes.get(n.attr[0])
            if axis in n.axes() and p is not None and _aligned(n, c) and self.repeatable(p):
                table[n] = element(p, n, self.layouts)
        term = single_term(body.substitute({}, table) if table else body, axis)
        if term is None or self.code(term) > MAX_INLINED_CODE:
            return None
        made = written_into(c, table, [self.computes[n.attr[0]] for n in table])
        made = replace(made, body=term)
        for k, d in ((-1, c), (1, made)):
            for r in reads_of(d):
                self.sites[r.tensor] = self.sites.get(r.tensor, 0) + k
        return made

    def repeatable(self, p: Compute) -> bool:
        """Whether its elements may be computed by whoever reads them."""
        reads = reads_of(p)  # what is overwritten later is read in its own order
        known = kind_of(p) == "point" and p.target is None
        known = known and not p.body.axes() - set(p.axes)  # without reductions of its own
        return known and not any(r.tensor in self.overwritten for r in reads)

    def code(self, e: Expr) -> float:
        """`code_of`, or a number that is not smaller: what an expression shares with those that
        are written into it counts twice until that matters."""
        known = self.size.get(e)
        if known is None or known > MAX_INLINED_CODE / 2 and e not in self.counted:
            known = self.size[e] = code_of(e)
            self.counted.add(e)
        return known

    def worth(self, p: Compute, load: Expr, c: Compute) -> bool:
        """Whether the reader should compute the element itself."""
        if not self.repeatable(p) or is_unfused(p, self.unfused) or is_unfused(c, self.unfused):
            return False
        if gathers_again(load, p):
            return False
        reads, lay = reads_of(p), self.layouts[p.name]
        spec = self.specs[lay.device]
        points = hint(product(a.extent for a in (*c.axes, *_inner(c))))
        if spec.kind == "cpu" and load.args and _shifted(load, c):
            points = min(points, hint(lay.numel))  # loops are cut where masks begin and end
        often = points / max(1, hint(lay.numel))
        if spec.kind == "cuda" and c.body.op == "reduce" and self.beside_rows(p):
            return False
        if p.name not in self.memory and self.sites[p.name] == 1 and often <= 1.0:
            return True
        work = E.flops(p.body)
        if spec.kind == "cuda":
            along = lanes(p, load, c)
            lines = sum(picking(r.index, self.layouts[r.tensor], along) for r in reads)
            work += LINE_FLOPS * lines
        moved = sum(ITEMSIZE[self.layouts[r.tensor].dtype] for r in reads)
        if work <= FREE_FLOPS and moved <= ITEMSIZE[p.body.dtype]:
            return True
        if p.name in self.memory:
            return False
        if lay.numel.value == 1:
            return work <= SCALAR_FLOPS  # computed once, outside of all loops
        if _aligned(load, c):
            return False  # the same loops: fusion decides
        more = spec.compute_us(work * (points - hint(lay.numel)))
        if self.sites[p.name] == 1:
            saved = spec.launch_us + spec.memory_us(2 * hint(lay.numel) * ITEMSIZE[lay.dtype])
        else:
            # The other readers may share a kernel with the producer, which then stores nothing.
            touched = min(points, hint(lay.numel)) + hint(lay.numel)
            saved = spec.memory_us(touched * ITEMSIZE[lay.dtype])
            more += spec.memory_us(min(points, hint(lay.numel)) * moved)
        return more < saved

    def beside_rows(self, p: Compute) -> bool:
        """Whether it reads something of each row of a tensor, at a loaded place, beside what the
        row reduces to: who reduces the row has that at hand, others fetch a line of memory for it
        (on a CPU, rows and the sum over them are one kernel). H200, cross entropy of 262144 x 128,
        bf16, forward and backward, us: 68.8 and 63.9."""
        rows = hint(self.layouts[p.name].numel)
        placed = {n.attr[0] for n in p.body.loads() if _gathers(n)}
        reduced, todo = set(), [n.attr[0] for n in p.body.loads() if not _gathers(n)]
        while todo:
            q = self.computes.get(todo.pop())
            if q is not None and hint(self.layouts[q.name].numel) == rows:
                todo += [r.tensor for r in reads_of(q) if q.body.op != "reduce"]
                reduced |= {r.tensor for r in reads_of(q) if q.body.op == "reduce"}
        return bool(placed & reduced)


def is_unfused(c: Compute, nodes: frozenset[str]) -> bool:
    """Whether it does one of these nodes of the graph."""
    return bool(nodes) and any(o.node in nodes for o in c.origins)


def roots(c: Compute) -> list[Expr]:
    """The expressions in which a computation reads."""
    out = [c.body] + ([c.mask] if c.mask is not None else [])
    return out + [E.index_value(i) for i in c.index or ()]


def written_into(c: Compute, table: Mapping[Expr, Expr], producers: Iterable[Compute]) -> Compute:
    """`c` with loads replaced by what `producers` compute."""
    if not table:
        return c
    body = c.body.substitute({}, table)
    mask = c.mask.substitute({}, table) if c.mask is not None else None
    index = c.index
    if index is not None:
        index = tuple(E.as_position(E.index_value(i).substitute({}, table)) for i in index)
    origins = dict.fromkeys(o for p in producers for o in p.origins) | dict.fromkeys(c.origins)
    return replace(c, body=body, mask=mask, index=index, origins=tuple(origins))


def inlined(c: Compute, producer: Compute, layouts: Mapping[str, Layout]) -> Compute:
    """`c` computing the producer's elements itself, wherever it reads them."""
    loads = {n for root in roots(c) for n in root.walk() if n.op == "load"}
    table = {n: element(producer, n, layouts) for n in loads if n.attr[0] == producer.name}
    return written_into(c, table, [producer])


def _gathers(load: Expr) -> bool:
    return any(map(elements.is_loaded, load.attr[1]))


def gathers_again(load: Expr, p: Compute) -> bool:
    """Whether many places along several loops, as along diagonals, read one element, which is read
    at a loaded place: nests of products read no such place, but what is stored of them."""
    return any(map(_gathers, p.body.loads())) and any(
        len(i.axes()) > 1 and hint(product(a.extent for a in i.axes())) > hint(d.extent)
        for i, d in zip(load.attr[1], p.axes, strict=True)
    )


def _inner(c: Compute) -> tuple[Axis, ...]:
    return bound_axes(c) if c.body.op == "reduce" else ()


def _aligned(load: Expr, c: Compute) -> bool:
    """Whether the load walks the reader's own loops, some of them or all, in order."""
    axes = (*c.axes, *_inner(c))
    used = [i for i in load.attr[1] if i.value != 0]
    plain = {a.index: k for k, a in enumerate(axes)}
    return not load.args and len(used) == len(set(used)) and all(i in plain for i in used)


def lanes(p: Compute, load: Expr, c: Compute) -> frozenset[Axis]:
    """The loops of `p` along which lanes of its reader `c` go, which are beside one another."""
    inner = [a for a in (*c.axes, *_inner(c)) if a.extent.value != 1][-1:]
    return frozenset(a for a, i in zip(p.axes, load.attr[1], strict=True) if i.axes() & set(inner))


def _shifted(load: Expr, c: Compute) -> bool:
    """Whether no two points of the reader read the same element: one beside each of its own."""
    used: list[Axis] = []
    for i in load.attr[1]:
        for a in i.atoms():
            if not isinstance(a, Axis) or i.coefficient(a) is not const(1):
                return False
            used.append(a)
    loops = {a for a in (*c.axes, *_inner(c)) if a.extent.value != 1}
    return len(used) == len(set(used)) and loops <= set(used)


def element(p: Compute, load: Expr, layouts: Mapping[str, Layout]) -> Expr:
    """The producer's body at the place where it is read."""
    _, index, fill = load.attr
    value = elements.element(p.axes, p.body, index, layouts)
    if not load.args:
        return value
    mask = load.args[0]
    value = E.with_mask(value, mask, unused=True)
    return E.op("where", mask, value, E.literal(fill, value.dtype))


def normalize(
    program: Program,
    layouts: Mapping[str, Layout],
    specs: Mapping[str, DeviceSpec],
    record: Record,
    unfused: frozenset[str] = frozenset(),
) -> dict[str, Compute]:
    """The computations that fusion starts from. Those of the nodes `unfused` stay as they are."""
    inliner = Inliner(program, layouts, specs, unfused)
    for d in program.defs:
        if isinstance(d, Compute):
            inliner.add(d)
    # What every reader computes for itself is gone.
    live: dict[str, Compute] = {}
    needed = set(inliner.memory)
    for name, c in reversed(inliner.computes.items()):
        if name in needed:
            live[name] = c
            needed.update(r.tensor for r in reads_of(c))
            if c.target is not None:
                needed.add(c.target)
        else:
            record.add(
                "decision",
                subject="inline",
                accepted=True,
                reason="one reader or cheaper than a read",
                detail="",
                first=name,
                second="",
                bytes=2 * layouts[name].nbytes_hint,
                us=0.0,
            )
    return dict(reversed(live.items()))


__all__ = ["canonical", "gathers_again", "inlined", "is_unfused", "normalize"]
