"""The loop IR: a program is a list of tensors, each defined once.

    Input                a graph input (activation, parameter, buffer), strides as the caller gives
                         them
    Constant             a tensor known at compile time
    Extern(op, args)     a library call, one or more results
    Compute(axes, body)  ``name[axes] = body`` for every point of the axes (row-major, first axis
                         outermost)

A `Compute` with `target` writes into the memory of an earlier tensor instead of its own (scatter,
mutation of an input): for every point, ``target[index] (accumulate)= body``; afterwards `name` is
that memory and `target` may not be read again. With an `index` and no target it is a permutation:
each of its elements is the place of one point.

Invariants (`ir.verify`): names are defined once and before use; axes are distinct; index arity
equals rank; dtypes agree; every load is in range or masked; a target has no reader after its
overwriter.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Index, Sym, const, hint, product
from deuteron.ir.operations import ITEMSIZE


@dataclass(frozen=True)
class Layout:
    """Where the elements are: ``address = offset + sum(index[d] * strides[d])``, in elements."""

    shape: tuple[Index, ...]
    strides: tuple[Index, ...]
    dtype: str
    device: str = "cpu"
    offset: Index = field(default_factory=lambda: const(0))

    @cached_property
    def numel(self) -> Index:
        return product(self.shape)

    @cached_property
    def nbytes_hint(self) -> int:
        """Bytes of the elements at the hinted sizes."""
        return hint(self.numel) * ITEMSIZE[self.dtype]

    def extent(self) -> Index:
        """Elements of memory spanned (largest address + 1), for non-empty tensors."""
        total = const(1)
        for n, s in zip(self.shape, self.strides, strict=True):
            total = total + (n - 1) * s
        return total

    def address(self, indices: tuple[Index, ...]) -> Index:
        total = self.offset
        for i, s in zip(indices, self.strides, strict=True):
            total = total + i * s
        return total


def contiguous_strides(shape: tuple[Index, ...]) -> tuple[Index, ...]:
    out: list[Index] = []
    step = const(1)
    for n in reversed(shape):
        out.append(step)
        step = step * n
    return tuple(reversed(out))


def contiguous(shape: tuple[Index, ...], dtype: str, device: str = "cpu") -> Layout:
    return Layout(shape, contiguous_strides(shape), dtype, device)


@dataclass(frozen=True)
class Origin:
    """Where a tensor comes from: FX node, ATen operator, the user's source line
    ("file:line: code" or "")."""

    node: str
    op: str
    line: str = ""


@dataclass(frozen=True)
class Input:
    name: str
    layout: Layout
    position: int  # place in the compiled function's argument list


@dataclass(frozen=True)
class Constant:
    name: str
    layout: Layout
    digest: str  # content hash; the tensor itself travels in Program.constants


@dataclass(frozen=True)
class ViewArg:
    """An argument of a library call: a strided view (shape, strides, offset in elements) of a
    tensor."""

    tensor: str
    shape: tuple[Index, ...]
    strides: tuple[Index, ...]
    offset: Index


@dataclass(frozen=True)
class Given:
    """An argument of the compiled function that is neither a tensor nor a number (a device mesh, a
    process group, a generator): library calls get it and results hold it, as it is."""

    position: int


@dataclass(frozen=True)
class Extern:
    """A library call. `args` and `kwargs` hold Python scalars, `Index` (sizes), `ViewArg`, `Given`,
    and tuples of these.

    `results` are the output tensors in order (None: an output that is no tensor or that nobody
    reads); `names` likewise; `sizes[k]` names the symbol that output k defines at run time when it
    is an integer. `mutates` lists tensors that the call writes in place (their memory is read and
    written; order is kept). `reason` says why it is a library call.
    """

    names: tuple[str | None, ...]
    op: str  # "aten.mm.default" as found under torch.ops, or a key of Program.callables
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    layouts: tuple[Layout | None, ...]
    mutates: tuple[str, ...] = ()
    aliases: tuple[str | None, ...] = ()  # for output k: the tensor whose memory it shares, if any
    sizes: tuple[Sym | None, ...] = ()
    origins: tuple[Origin, ...] = ()
    reason: str = ""
    impure: bool = (
        False  # keeps its place relative to other impure calls (random state, collectives, effects)
    )
    # Of a product of matrices: the same result as computations, the last of which has its name.
    product: tuple[Compute, ...] = field(default=(), compare=False)

    @property
    def is_view(self) -> bool:
        """Whether it only gives its results another shape or another name."""
        return any(self.aliases) and not self.mutates


@dataclass(frozen=True)
class Compute:
    name: str
    axes: tuple[Axis, ...]
    body: Expr
    layout: Layout
    target: str | None = None
    index: tuple[Index, ...] | None = (
        None  # where each point is stored; None: at the axes themselves
    )
    accumulate: str | None = (
        None  # None assigns; "sum", "prod", "max", "min" combine with what is there
    )
    origins: tuple[Origin, ...] = ()
    mask: Expr | None = None  # points where it is false store nothing (only with `target`)
    unique: bool = False  # no two points that store have one place, although places are loaded

    @property
    def store_index(self) -> tuple[Index, ...]:
        return self.index if self.index is not None else tuple(a.index for a in self.axes)

    @property
    def is_reduction(self) -> bool:
        return self.body.op == "reduce"


Def = Input | Constant | Extern | Compute


@dataclass(frozen=True)
class Output:
    """One result of the program: a strided view of a tensor, or (tensor None) a size, or a Python
    literal."""

    tensor: str | None
    shape: tuple[Index, ...] = ()
    strides: tuple[Index, ...] = ()
    offset: Index = field(default_factory=lambda: const(0))
    value: Any = None  # Index, Given, or None/number, when tensor is None
    dtype: str | None = None  # torch dtype name where the view reinterprets (else the tensor's)
    # Another Python object than the earlier results that are the same view of the same tensor:
    # autograd may mark one of them as not differentiable.
    distinct: bool = False


@dataclass(frozen=True)
class Check:
    """What must hold of numbers that are known only at run time. `condition`: Python text over the
    names of sizes; `message`: what is said where it does not hold; `where`: the user's line. It is
    evaluated as soon as all that it names is known, before any kernel that reads one of them."""

    condition: str
    message: str
    where: str = ""


@dataclass(frozen=True)
class Program:
    """`sizes[s]` says where symbol s is read: (input position, dimension or None for the integer
    input itself)."""

    defs: tuple[Def, ...]
    outputs: tuple[Output, ...]
    sizes: tuple[
        tuple[Sym, tuple[str, int, int]], ...
    ] = ()  # (symbol, ("int"|"shape"|"stride", input position, dim))
    constants: dict[str, Any] = field(default_factory=dict, compare=False)
    callables: dict[str, Any] = field(default_factory=dict, compare=False)
    num_inputs: int = 0
    # Tensor -> the node of the traced graph whose value it is, for the self-check.
    nodes: dict[str, str] = field(default_factory=dict, compare=False)
    checks: tuple[Check, ...] = ()
    # Results in which nobody looks for equal elements (a maximum that the backward subtracts).
    uncompared: frozenset[str] = field(default_factory=frozenset, compare=False)

    def computes(self) -> tuple[Compute, ...]:
        return tuple(d for d in self.defs if isinstance(d, Compute))

    def layouts(self) -> dict[str, Layout]:
        out: dict[str, Layout] = {}
        for d in self.defs:
            if isinstance(d, Extern):
                out.update({n: lay for n, lay in zip(d.names, d.layouts, strict=True) if n and lay})
            else:
                out[d.name] = d.layout
        return out


# What Python text of sizes may name beside sizes.
KNOWN_FUNCTIONS = frozenset(
    ("math", "torch", "min", "max", "abs", "int", "float", "round", "bool", "pow")
)


@lru_cache(maxsize=4096)
def names_in(text: str) -> frozenset[str]:
    """The sizes that Python text of sizes names."""
    names = (n.id for n in ast.walk(ast.parse(text, mode="eval")) if isinstance(n, ast.Name))
    return frozenset(names) - KNOWN_FUNCTIONS


def symbols_read(d: Def) -> set[Sym]:
    """The sizes that a definition depends on."""
    indices: list[Index] = []
    if isinstance(d, Compute):
        indices += [*(a.extent for a in d.axes), *(d.index or ()), *d.layout.strides]
        for e in (d.body, *([d.mask] if d.mask is not None else [])):
            indices += e.indices()
            for n in e.walk():
                if n.op == "reduce":
                    indices += [a.extent for a in n.attr[1]]
    elif isinstance(d, Extern):

        def visit(x: Any) -> None:
            if isinstance(x, ViewArg):
                indices.extend((*x.shape, *x.strides, x.offset))
            elif isinstance(x, Index):
                indices.append(x)
            elif isinstance(x, (tuple, list)):
                for y in x:
                    visit(y)

        visit((d.args, tuple(v for _, v in d.kwargs)))
    return {s for i in indices for s in i.syms()}


def tensors_read(d: Def) -> tuple[str, ...]:
    """Names of the tensors that a definition reads (its target included, since it keeps what is not
    overwritten)."""
    names: dict[str, None] = {}
    if isinstance(d, Compute):
        exprs = [d.body] + ([d.mask] if d.mask is not None else [])
        for e in exprs:
            for n in e.walk():
                if n.op == "load":
                    names[n.attr[0]] = None
        for i in d.index or ():
            from deuteron.ir.index import Value

            for a in i.atoms():
                if isinstance(a, Value):
                    for n in a.expr.loads():
                        names[n.attr[0]] = None
        if d.target is not None:
            names[d.target] = None
    elif isinstance(d, Extern):

        def visit(x: Any) -> None:
            if isinstance(x, ViewArg):
                names[x.tensor] = None
            elif isinstance(x, (tuple, list)):
                for y in x:
                    visit(y)

        visit(d.args)
        visit(tuple(v for _, v in d.kwargs))
    return tuple(names)


def objects_used(p: Program) -> tuple[Given, ...]:
    """What `p` is given, beside tensors and numbers, and uses."""
    objects: dict[Given, None] = {}

    def visit(x: Any) -> None:
        if isinstance(x, Given):
            objects[x] = None
        elif isinstance(x, (tuple, list)):
            for y in x:
                visit(y)

    visit([(d.args, [v for _, v in d.kwargs]) for d in p.defs if isinstance(d, Extern)])
    visit([o.value for o in p.outputs])
    return tuple(objects)


def memory_of(program: Program) -> dict[str, str]:
    """For each tensor that lives in another's memory, the owner."""
    owner: dict[str, str] = {}
    for d in program.defs:
        if isinstance(d, Compute) and d.target is not None:
            owner[d.name] = owner.get(d.target, d.target)
        elif isinstance(d, Extern):
            for name, other in zip(d.names, d.aliases):
                if name is not None and other is not None:
                    owner[name] = owner.get(other, other)
    return owner
