"""The state of writing one nest as Triton text: the tile, the scopes, what values depend on.

`emit.Emitter` writes values on it. What is beside (`peephole`, `dynamic_bounds`, `misaligned`)
knows this class alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from deuteron.codegen.precision import (
    Inexact,
)
from deuteron.codegen.triton import scalars
from deuteron.codegen.triton.scope import NONE, Dim, Dims, Scope, bound_name
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Div, Index, MinMax, Mod, Value

R: Dims = frozenset("r")
# Of a tensor whose accesses are checked: the elements that its memory has, and the kernel's name.
Limits = Mapping[str, tuple[Index, str]]


class TileState:
    """The state of writing one nest: the tile, the chain of scopes, names of pointers and sizes."""

    def __init__(
        self,
        dims: Sequence[Dim],
        pointers: Mapping[str, str],
        numbers: Iterator[int],
        index_type: str,
    ) -> None:
        self.dims = {d.name: d for d in dims}
        self.rank = len(dims)
        self.whole: Dims = frozenset(self.dims)
        self.along: Dims = self.whole & {"p", "r"}  # of a row
        self.pointers = pointers
        self.numbers = numbers
        self.index_type = index_type  # "tl.int32", "tl.int64" or the kernel's constexpr name
        self.dim_of = {a: d.name for d in dims for a in d.axes}
        self.chain: list[Scope] = [Scope(NONE)]
        self.result_dims: dict[str, Dims] = {}
        self.inexact = Inexact()
        self.packed_bf16: frozenset[Expr] = frozenset()  # see `precision`
        self.softmax_sums: frozenset[str] = frozenset()  # likewise: names of reductions
        self.policies: dict[Expr, str] = {}  # load -> eviction policy
        self.retained: frozenset[str] = frozenset()  # what is to stay in the L2 as it streams
        self._deps: dict[Expr, Dims] = {}
        self.bound: set[Axis] = set()  # axes of reductions inside expressions
        self.lane_elements, self.strided, self.terms = 1, False, 1  # see `tiling.Tiling`
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

    def fresh(self, stem: str = "tmp") -> str:
        return f"{stem}{next(self.numbers)}"

    @property
    def scope(self) -> Scope:
        return self.chain[-1]

    @contextmanager
    def inside(self) -> Iterator[Scope]:
        """A scope within the current one. The caller puts its lines where they belong."""
        scope = Scope(self.scope.dims)
        self.chain.append(scope)
        yield scope
        popped = self.chain.pop()
        assert popped is scope

    def shape(self, dims: Dims) -> str:
        """The text of the shape of a value that depends on `dims`."""
        places = sorted(self.dims.values(), key=lambda d: d.place)
        return "[" + ", ".join(d.block if d.name in dims else "1" for d in places) + "]"

    def deps(self, root: Expr) -> Dims:
        """The dimensions on which the value depends."""
        known = self._deps.get(root)
        if known is not None:
            return known
        for node in root.walk(self._deps.__contains__):
            if node in self._deps:
                continue
            out: Dims = NONE
            if node.op == "load" and node.attr[0] in self.result_dims:
                out = self.result_dims[node.attr[0]]
            else:
                if node.op == "load":
                    out = out.union(*(self.index_deps(i) for i in node.attr[1]))
                elif node.op == "index":
                    out = self.index_deps(node.attr)
                elif node.op == "random":
                    out = self.index_deps(node.attr[2])
                for a in node.args:
                    out |= self._deps[a]
                if node.op == "reduce":
                    out -= {bound_name(a) for a in node.attr[1]}
            self._deps[node] = out
        return self._deps[root]

    def index_deps(self, index: Index) -> Dims:
        out: set[str] = set()
        todo = [a for m, _ in index.terms for a in m]
        while todo:
            a = todo.pop()
            if isinstance(a, Axis):
                if a in self.dim_of:
                    out.add(self.dim_of[a])
                    if self.rotation is not None and self.rotation.first is None and out & R:
                        out.add("x")  # which element a lane has
                elif a in self.bound:
                    out.add(bound_name(a))
            elif isinstance(a, Value):
                out |= self.deps(a.expr)
            elif isinstance(a, (Div, Mod)):
                todo.extend(x for i in (a.num, a.den) for m, _ in i.terms for x in m)
            elif isinstance(a, MinMax):
                todo.extend(x for i in (a.a, a.b) for m, _ in i.terms for x in m)
        return frozenset(out)

    def shared(self, load: Expr) -> bool:
        """Whether all rows read the same of it."""
        address = load.attr[1][0]
        if self.rotation is None or any(isinstance(a, Value) for a in address.atoms()):
            return self.deps(load) == self.along
        return {self.dim_of.get(a) for a in address.axes()} == {"r"} and not load.args

    def level(self, dims: Dims) -> int:
        for k, scope in enumerate(self.chain):
            if dims <= scope.dims:
                return k
        raise AssertionError(f"no scope provides {sorted(dims - self.scope.dims)}")

    def lookup(self, node: Expr) -> str | None:
        for scope in reversed(self.chain):
            text = scope.texts.get(node)
            if text is not None:
                return text
        if node.op == "literal":
            return scalars.literal(node.attr, node.dtype, typed=True)
        return None

    # -- what the emitter adds ---------------------------------------------------------------------

    def value(self, root: Expr) -> str:
        """The text of a value; whatever it needs is written first."""
        raise NotImplementedError

    def index(self, index: Index) -> str:
        """The text of an index."""
        raise NotImplementedError

    def neighbours(self, element: Index) -> str | None:
        """The text of an index of which four lanes in a row have one word of random numbers."""
        raise NotImplementedError
