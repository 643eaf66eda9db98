"""The schedule's artifacts: nests of loops, kernels, steps. What code generators read.

A `Nest` iterates ``parallel x reduced`` and runs its statements in order, each at every point where
it lives:

    Reduce  name[parallel] = reduction of `body` over all reduced axes: the value lives on rows.
            If `grouped`, over one group of a row; if `partial`, over the rows of one split
            (both below)
    Scan    name[parallel, reduced] = scan of `body` along the one reduced axis
    Store   tensor[index] = value, at every row, group or point (its level)

Bodies and values are expressions whose loads are of tensors in memory, or of results of the same
nest: registers, whose name is in `Nest.locals()` and whose indices are to be ignored. A Store makes
nothing readable: who needs the value in the same nest uses the stored expression, which interning
shares.

A row split does a row and a cross-row reduction of one tensor in one pass: ``row_split = (axis,
count)``. The parallel axis is cut into `count` splits. Split k has the rows ``k*ceil(n/count) <=
axis < (k+1)*ceil(n/count)``; a persistent program (on a CPU a thread) walks them. A `Reduce` with
`partial` reduces its body, which lives on parallel x reduced, over the split's rows and stores the
result in ``name[k, reduced...]``. A later nest reduces the partial results in order, so that
results repeat.

Grouped reductions are over groups of neighbours in a row (blocks of 128 that have a scale each).
`group_axes` are the reduced axes along one group, the other reduced axes number the groups. A
`Reduce` with `grouped` reduces each group; its value lives on the parallel axes and those others.
Such rows are held whole on chip.
"""

from __future__ import annotations

from dataclasses import dataclass

from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Index
from deuteron.ir.nest import Nest as ContractionNest
from deuteron.ir.program import Extern, Layout, Origin
from deuteron.schedule.tiling import Tiling


@dataclass(frozen=True)
class Reduce:
    name: str
    kind: str  # a key of ir.expr.REDUCTIONS
    body: Expr
    # then `name` is also the tensor in memory [count, *reduced extents] that receives the results
    partial: bool = False
    grouped: bool = False


@dataclass(frozen=True)
class Scan:
    name: str
    kind: str
    body: Expr


@dataclass(frozen=True)
class Store:
    tensor: str
    index: tuple[Index, ...]
    value: Expr
    level: str  # "row" | "group" | "point"
    accumulate: str | None = None  # atomics or an ordered loop, as the target must; None assigns
    mask: Expr | None = None
    scattered: bool = False  # at places that are computed: two points may have the same
    unique: bool = False  # though they have not


Stmt = Reduce | Scan | Store


@dataclass(frozen=True)
class Nest:
    parallel: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    stmts: tuple[Stmt, ...]
    row_split: tuple[Axis, int] | None = None
    group_axes: tuple[Axis, ...] = ()

    def loops(self, level: str) -> tuple[Axis, ...]:
        """The axes on which what is of a level lives."""
        inside = {"row": self.reduced, "group": self.group_axes, "point": ()}[level]
        return (*self.parallel, *(a for a in self.reduced if a not in inside))

    def reduced_axes(self, s: Reduce) -> tuple[Axis, ...]:
        """The axes that a reduction reductions."""
        if s.partial:
            return self.parallel
        return self.group_axes if s.grouped else self.reduced

    def locals(self) -> dict[str, Stmt]:
        return {s.name: s for s in self.stmts if isinstance(s, (Reduce, Scan))}

    def exprs(self) -> tuple[Expr, ...]:
        out: list[Expr] = []
        for s in self.stmts:
            out.append(s.value if isinstance(s, Store) else s.body)
            if isinstance(s, Store) and s.mask is not None:
                out.append(s.mask)
        return tuple(out)


@dataclass(frozen=True)
class Kernel:
    """One launch. More than one nest: side by side, where no nest reads what another writes.

    `barriers` (on CPUs) are positions in `nests` before which all earlier nests are complete, in
    all threads; what they wrote may then be read.

    `reads` and `writes` are tensors in memory with their layouts (a tensor both read and written is
    in both); `overwrites` are those of `writes` that live in another tensor's memory, `overwritten`
    those of `reads` that are lost thereby;
    `bytes`/`flops` are what one call moves and computes at hinted sizes; `predicted_us` is the cost
    model's time.
    """

    name: str  # without target prefix: "red_fused_softmax_0"
    nests: tuple[Nest, ...]
    reads: tuple[tuple[str, Layout], ...]
    writes: tuple[tuple[str, Layout], ...]
    origins: tuple[Origin, ...]
    device: str
    bytes: int
    flops: float
    predicted_us: float
    barriers: tuple[int, ...] = ()
    overwrites: frozenset[str] = frozenset()
    overwritten: frozenset[str] = frozenset()
    # Then it has no other nests: statements with products (`ir.nest`), and how they are tiled.
    contraction: tuple[ContractionNest, Tiling] | None = None

    @property
    def unit(self) -> str:
        """What does most of its arithmetic (`DeviceSpec.peak`)."""
        nest, _ = self.contraction or (None, None)
        return nest.unit if nest is not None and self.device != "cpu" else "f32"

    def nests_between_barriers(self) -> tuple[tuple[Nest, ...], ...]:
        """Nests between barriers."""
        cuts = (0, *self.barriers, len(self.nests))
        return tuple(self.nests[a:b] for a, b in zip(cuts, cuts[1:]))


Step = Kernel | Extern


@dataclass(frozen=True)
class Schedule:
    """Steps in execution order. `aliases[name] = owner` for tensors that live in another's
    memory."""

    steps: tuple[Step, ...]
    aliases: dict[str, str]
    layouts: dict[str, Layout]
