"""The state of writing one nest as Triton text: the tile, the scopes, what values depend on.

`emit.Emitter` writes values on it. What is beside (`peephole`, `dynamic_bounds`, `misaligned`)
knows this class alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deuteron.codegen.placing import Placing
from deuteron.codegen.precision import (
    Inexact,
)
from deuteron.codegen.triton import scalars
from deuteron.codegen.triton.scope import PART, Dim, Dims, Scope, bound_name
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Index, Value, product

R: Dims = frozenset("r")
# Of a tensor whose accesses are checked: the elements that its memory has, and the kernel's name.
Limits = Mapping[str, tuple[Index, str]]


def _without_part(deps: Dims) -> Dims:
    """What spans a block of r has its part beside it."""
    return deps - PART if "r" in deps else deps


class TileState(Placing[str, Scope]):
    """The state of writing one nest: the tile, the chain of scopes, names of pointers and sizes."""

    kind = Scope

    def __init__(
        self,
        dims: Sequence[Dim],
        pointers: Mapping[str, str],
        numbers: Iterator[int],
        index_type: str,
    ) -> None:
        super().__init__(numbers)
        self.dims = {d.name: d for d in dims}
        self.rank = len(dims)
        self.whole: Dims = frozenset(self.dims)
        self.along: Dims = self.whole & {"p", "r"}  # of a row
        self.pointers = pointers
        self.index_type = index_type  # "tl.int32", "tl.int64" or the kernel's constexpr name
        self.dim_of = {a: d.name for d in dims for a in d.axes if a not in d.fixed}
        self.dim_of |= {a: "part" for d in dims for a in d.parts}
        self.inexact = Inexact()
        self.softmax_sums: frozenset[str] = frozenset()  # likewise: names of reductions
        self.policies: dict[Expr, str] = {}  # load -> eviction policy
        self.bound: set[Axis] = set()  # axes of reductions inside expressions
        self.read: set[tuple[str, tuple[Index, ...]]] = set()  # what is read under no condition
        self.divisions = Counter[Expr]()  # of f32, by their divisors
        self.lane_elements, self.terms = 1, 1  # see `tiling.Tiling`
        self.block = 0  # the most elements of a block along r, a power of two
        self.within: Expr | None = (
            None  # which terms of such a reduction there are, inside its loop
        )
        self.stages = "1"  # text of the number of stages of software pipelines
        self.float8 = ""  # see `scalars.convert`
        self.starts: dict[str, str] = {}  # dimension -> where its current block begins
        self.barrier_stores: set[tuple[str, Index]] = (
            set()
        )  # stores before which threads meet: see `nests`
        # A `misaligned.Rotation`, where rows are walked from their first whole vector.
        self.rotation: Any = None
        self.passing = False  # whether rows are read in several passes
        self.checked = False  # whether the text has assertions
        self.limits: Limits = {}  # where every access is checked: see `guard`
        self._digits: dict[Axis, tuple[Index, bool]] = {}

    def shape(self, dims: Dims) -> str:
        """The text of the shape of a value that depends on `dims`."""
        places = sorted(self.dims.values(), key=lambda d: d.place)
        return "[" + ", ".join(d.block if d.name in dims else "1" for d in places) + "]"

    def spread(self, index: str, have: Dims, want: Dims) -> str:
        """An index text made to span the dimensions `want`."""
        if have == want:
            return f"({index})"
        return f"({index} + tl.zeros({self.shape(want)}, tl.int32))"

    def mask(self, dims: Dims, at: int | None = None) -> str:
        """The text of the mask of the dimensions that need one, or nothing."""
        names = [f"{d.stem}mask" for d in self.dims.values() if d.masked and d.name in dims]
        if len(names) < 2:
            return names[0] if names else ""
        scope = self.chain[self.level(dims)]
        if "mask" not in scope.sums:
            scope.sums["mask"] = f"{self.dims['x'].prefix}mask"
            scope.add(f"{scope.sums['mask']} = {' & '.join(names)}")
        return scope.sums["mask"]

    def places_of(self, axes: Sequence[Axis]) -> Iterator[tuple[Axis, Index, bool]]:
        """Of each axis what its unit is worth, and whether others are worth more."""
        for k, a in enumerate(axes):
            yield a, product(b.extent for b in axes[k + 1 :]), k > 0

    def digit(self, dim: Dim, axis: Axis) -> tuple[Index, bool]:
        """An axis is a digit of its dimension's index: (what its unit is worth, whether others are
        worth more).
        """
        return next((n, inner) for a, n, inner in self.places_of(dim.axes) if a == axis)

    def bound_dep(self, axis: Axis) -> str:
        return bound_name(axis)

    def deps(self, root: Expr) -> Dims:
        return _without_part(super().deps(root))

    def index_deps(self, index: Index) -> Dims:
        return _without_part(super().index_deps(index))

    def add_deps_of_axis(self, axis: Axis, out: set[str]) -> None:
        if axis in self.dim_of:
            out.add(self.dim_of[axis])
            if self.rotation is not None and self.rotation.first is None and out & R:
                out.add("x")  # which element a lane has
        elif axis in self.bound:
            out.add(bound_name(axis))

    def literal(self, node: Expr) -> str:
        return scalars.literal(node.attr, node.dtype, typed=True)

    def shared(self, load: Expr) -> bool:
        """Whether all rows read the same of it."""
        address = load.attr[1][0]
        if self.rotation is None or any(isinstance(a, Value) for a in address.atoms()):
            return self.deps(load) == self.along
        return {self.dim_of.get(a) for a in address.axes()} == {"r"} and not load.args

    # -- what the emitter adds ---------------------------------------------------------------------

    def index(self, index: Index) -> str:
        """The text of an index."""
        raise NotImplementedError

    def neighbours(self, element: Index) -> str | None:
        """The text of an index of which four lanes in a row have one word of random numbers."""
        raise NotImplementedError
