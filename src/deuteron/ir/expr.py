"""Scalar expressions: the bodies of computations.

An `Expr` is frozen and interned; equality is identity. `op` says what it is:

    literal   attr = Python value, rounded to the dtype
    index     attr = Index; the integer value of an index expression (i64)
    load      attr = (tensor name, index per dimension, fill); args = () or (mask,): where the
              mask is false nothing is read and the value is `fill`
    cast      args = (x,); converts to `dtype` as C and ATen do; to f8e4m3 it saturates. With attr
              `UNROUNDED`, from a half type to f32: the f32 number that x was rounded from, where
              the same kernel has it, else x (see `unrounded`); `FACTOR`: x, and that number
              where no tensor cores multiply
    reduce    attr = (kind, axes); args = (body,): reduces body over the axes (see `REDUCTIONS`)
    scan      attr = (kind, axis); args = (body,): inclusive scan along the axis
    random    attr = (distribution, stream, element index); args = (seed,): Philox-4x32-10, counted
              by element (f32 "rand" on [0, 1): by four), "randn", "rand_bits" (i64)
    check     attr = extent; args = (x,) or (x, mask): x (i64), which must be at least 0 and below
              the extent where the mask holds: generated code reports where not
    otherwise a scalar operation of `SCALAR_OPS` with its arguments

Data types are short names (`DTYPES`). Arithmetic is done in the dtype of the node: what computes in
f32 and is rounded to bf16 says so with casts. Nothing in a code generator decides precision.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deuteron.base.memo import MEMO
from deuteron.ir.float8 import float8_bits, float8_value
from deuteron.ir.index import (
    Atom,
    Axis,
    Index,
    IndexLike,
    Value,
    as_index,
    atom,
    fits,
    in_range,
    is_nonneg,
    substitute,
)
from deuteron.ir.operations import (
    COMPARE,
    COMPARISONS,
    EXACT_OPS,
    FLOAT8,
    FLOATS,
    FLOATS_ONLY,
    HALF,
    ITEMSIZE,
    NO_OP,
    SCALAR_OPS,
    widens,
)

UNROUNDED, FACTOR = "unrounded", "factor"


_COUNT = itertools.count()


def _interning_key(op: str, dtype: str, args: tuple[Expr, ...], attr: Any) -> tuple[Any, ...]:
    # 0, 0.0, -0.0 and False are equal in Python, NaN is not equal to itself; here text decides.
    number = attr[2] if op == "load" else attr
    if isinstance(number, (int, float)):
        rest = attr[:2] if op == "load" else None
        return (op, dtype, args, rest, type(number), repr(number))
    return (op, dtype, args, attr)


class Expr:
    """One node; build it with the functions of this module, never directly."""

    __slots__ = ("_axes", "_children", "_flops", "_indices", "_issued", "_key", "_loads") + (
        "__weakref__",
        "args",
        "attr",
        "dtype",
        "id",
        "op",
    )
    _interned: dict[tuple[Any, ...], Expr] = MEMO.nodes(
        lambda e: _interning_key(e.op, e.dtype, e.args, e.attr)
    )

    op: str
    dtype: str
    args: tuple[Expr, ...]
    attr: Any
    id: int  # counts nodes in this process: arguments before users
    _axes: frozenset[Axis] | None
    _children: tuple[Expr, ...] | None
    _flops: float | None
    _issued: float | None
    _indices: tuple[Index, ...] | None
    _key: str | None
    _loads: tuple[Expr, ...] | None

    def __new__(cls, op: str, dtype: str, args: tuple[Expr, ...] = (), attr: Any = None) -> Expr:
        key = _interning_key(op, dtype, args, attr)
        interned = cls._interned.get(key)
        if interned is None:
            interned = object.__new__(cls)
            interned.op, interned.dtype, interned.args, interned.attr = op, dtype, args, attr
            interned.id = next(_COUNT)
            interned._axes = interned._children = interned._flops = None
            interned._indices = interned._issued = interned._key = interned._loads = None
            interned = cls._interned.setdefault(key, interned)
        return interned

    def __reduce__(self) -> tuple[Any, ...]:
        return Expr, (self.op, self.dtype, self.args, self.attr)

    def __repr__(self) -> str:
        return show(self)

    @property
    def key(self) -> str:
        """Identifies the node by its structure, in every process (gathers are ordered by it)."""
        if self._key is None:
            for n in self.walk():
                if n._key is None:
                    text = f"{n.op}|{n.dtype}|{_attr_text(n)}|{','.join(a.key for a in n.args)}"
                    n._key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return self._key or ""

    def indices(self) -> tuple[Index, ...]:
        """Every index used in the expression, at any depth."""
        if self._indices is None:
            used: dict[Index, None] = {}
            for node in self.walk(lambda n: n._indices is not None):
                for i in own_indices(node) if node._indices is None else node._indices:
                    used[i] = None
            self._indices = tuple(used)
        return self._indices

    def walk(self, known: Callable[[Expr], bool] | None = None) -> Iterator[Expr]:
        """Every node once, arguments before users, loaded indices included; depth has no limit.
        Nothing below a node of which `known` holds."""
        seen: set[Expr] = set()
        stack = [self]
        while stack:
            node = stack[-1]
            if node in seen:
                stack.pop()
                continue
            if known is not None and known(node):
                seen.add(node)
                stack.pop()
                yield node
                continue
            below = node._children
            if below is None:
                below = children(node)
            if below:
                todo = [c for c in below if c not in seen]
                if todo:
                    stack.extend(reversed(todo))
                    continue
            seen.add(node)
            stack.pop()
            yield node

    def loads(self) -> tuple[Expr, ...]:
        """Every load, at any depth, arguments before users."""
        if self._loads is None:
            nodes: dict[Expr, None] = {}
            for node in self.walk(lambda n: n._loads is not None):
                if node._loads is not None:
                    nodes.update(dict.fromkeys(node._loads))
                elif node.op == "load":
                    nodes[node] = None
            if self.op == "load":  # a node that held itself would never be freed
                return tuple(nodes)
            self._loads = tuple(nodes)
        return self._loads

    def axes(self) -> frozenset[Axis]:
        """Free and bound axes used."""
        if self._axes is None:
            self._axes = frozenset().union(*(i.axes() for i in self.indices()))
        return self._axes

    def substitute(
        self, table: Mapping[Atom, Index], loads: Mapping[Expr, Expr] | None = None
    ) -> Expr:
        """Replaces atoms in every index and, where given, whole nodes (`loads`, tried first)."""
        return rewrite(self, lambda n, args: None, table, loads)


def own_indices(node: Expr) -> tuple[Index, ...]:
    if node.op == "load":
        return node.attr[1]
    if node.op in ("index", "check"):
        return (node.attr,)
    if node.op == "random":
        return (node.attr[2],)
    return ()


def children(node: Expr) -> tuple[Expr, ...]:
    """Arguments, and expressions whose value is used as an index."""
    below = node._children
    if below is None:
        out = list(node.args)
        for i in own_indices(node):
            out.extend(a.expr for a in i.atoms() if a.rank == 3 and isinstance(a, Value))
        below = node._children = tuple(out)
    return below


def _attr_text(node: Expr) -> str:
    """What a node is besides its operation, dtype and arguments, as text."""
    if node.op == "load":
        name, idx, fill = node.attr
        return f"{name}[{','.join(i.key for i in idx)}]{fill!r}"
    if node.op in ("index", "check"):
        return node.attr.key
    if node.op == "random":
        dist, stream, i = node.attr
        return f"{dist},{stream},{i.key}"
    if node.op in ("reduce", "scan"):
        kind, axes = node.attr
        return f"{kind},{','.join(a.key for a in (axes if isinstance(axes, tuple) else (axes,)))}"
    return repr(node.attr)


def rewrite(
    root: Expr,
    rule: Callable[[Expr, tuple[Expr, ...]], Expr | None],
    table: Mapping[Atom, Index] | None = None,
    nodes: Mapping[Expr, Expr] | None = None,
) -> Expr:
    """Rebuilds bottom-up. `rule(node, new_args)` may return a replacement.

    `table` replaces atoms in indices, `nodes` whole nodes (tried first).
    """
    done: dict[Expr, Expr] = dict(nodes or {})
    table = table or {}
    for node in root.walk():
        if node in done:
            continue
        args = tuple(done[a] for a in node.args)
        new = rule(node, args)
        done[node] = rebuild(node, args, table, done) if new is None else new
    return done[root]


def rebuild(
    node: Expr, args: tuple[Expr, ...], table: Mapping[Atom, Index], done: Mapping[Expr, Expr]
) -> Expr:
    """`node` with new arguments and with atoms in its indices replaced."""

    def move(i: Index) -> Index:
        changed: dict[Atom, Index] = {
            a: as_position(done[a.expr])
            for a in i.atoms()
            if a.rank == 3 and isinstance(a, Value) and done.get(a.expr, a.expr) is not a.expr
        }
        return substitute(i, {**table, **changed} if changed else table)

    if node.op == "load":
        name, idx, fill = node.attr
        mask = args[0] if args else None
        return load(name, tuple(move(i) for i in idx), node.dtype, mask, fill)
    if node.op == "index":
        return index_value(move(node.attr))
    if node.op == "check":
        return Expr("check", "i64", args, move(node.attr))
    if node.op == "random":
        dist, stream, i = node.attr
        return Expr("random", node.dtype, args, (dist, stream, move(i)))
    if node.op in ("reduce", "scan") and table:
        kind, axes = node.attr
        bound = axes if isinstance(axes, tuple) else (axes,)
        moved = tuple(_moved_axis(a, table) for a in bound)
        return Expr(
            node.op, node.dtype, args, (kind, moved if isinstance(axes, tuple) else moved[0])
        )
    if all(a is b for a, b in zip(args, node.args, strict=True)):
        return node
    if node.op == "cast":
        if node.attr == FACTOR:
            return Expr("cast", "f32", args, FACTOR)
        return unrounded(args[0]) if node.attr == UNROUNDED else cast(args[0], node.dtype)
    if node.op in SCALAR_OPS:
        return op(node.op, *args, dtype=node.dtype)
    return Expr(node.op, node.dtype, args, node.attr)


def _moved_axis(axis: Axis, table: Mapping[Atom, Index]) -> Axis:
    new = table.get(axis)
    if new is None:
        return axis
    (only,) = new.terms
    (moved,) = only[0]
    assert isinstance(moved, Axis) and only[1] == 1, "a bound axis can only be renamed"
    return moved


def literal(value: Any, dtype: str) -> Expr:
    if dtype == "bool":
        value = bool(value)
    elif dtype in FLOAT8:
        value = float8_value(float8_bits(float(value), dtype), dtype)
    elif dtype in FLOATS:
        value = _rounded(float(value), dtype)
    else:
        bits = 8 * ITEMSIZE[dtype]
        value = int(value) & ((1 << bits) - 1)
        if dtype != "u8" and value >= 1 << (bits - 1):
            value -= 1 << bits
    return Expr("literal", dtype, (), value)


def _rounded(value: float, dtype: str) -> float:
    """The nearest number of `dtype`; through f32 for the half types, as ATen's scalars go."""
    if dtype == "f64" or not math.isfinite(value):
        return value
    value = ctypes.c_float(value).value
    if dtype == "f32" or not math.isfinite(value):
        return value
    if dtype == "f16":
        try:
            return struct.unpack("<e", struct.pack("<e", value))[0]
        except OverflowError:
            return math.copysign(math.inf, value)
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def index_value(index: IndexLike) -> Expr:
    """The value of an index as an i64 scalar."""
    index = as_index(index)
    return (
        literal(index.value, "i64") if index.value is not None else Expr("index", "i64", (), index)
    )


def as_position(expr: Expr) -> Index:
    """An integer expression used as an index (a gather). Undoes `index_value`."""
    if expr.op == "index":
        return expr.attr
    if expr.op == "literal":
        return as_index(int(expr.attr))
    return atom(Value(cast(expr, "i64")))


def load(
    name: str, indices: tuple[Index, ...], dtype: str, mask: Expr | None = None, fill: Any = 0
) -> Expr:
    if mask is None or (mask.op == "literal" and mask.attr):
        return Expr("load", dtype, (), (name, indices, None))
    if mask.op == "literal":
        return literal(fill, dtype)
    return Expr("load", dtype, (mask,), (name, indices, literal(fill, dtype).attr))


def _sign_of(x: Expr, dtype: str) -> bool:
    """Whether it is a number of `dtype` but for its sign, which no rounding changes."""
    if x.op not in ("neg", "abs") or x.args[0].op != "cast" or dtype not in FLOATS:
        return False
    return x.args[0].args[0].dtype == dtype


def cast(x: Expr, dtype: str) -> Expr:
    if x.dtype == dtype:
        return x
    if x.op == "literal" and _exact(x.attr, dtype):
        return literal(x.attr, dtype)
    if x.op == "cast" and x.args[0].dtype == dtype and widens(dtype, x.dtype):
        return x.args[0]
    if x.op == "cast" and x.args[0].dtype == dtype and _sign_of(x.args[0], x.dtype):
        return x.args[0]
    whole = x.op == "cast" and x.args[0].dtype in ("u8", "i8")
    if whole and widens(x.args[0].dtype, x.dtype) and widens(x.dtype, dtype):
        return cast(x.args[0], dtype)
    return Expr("cast", dtype, (x,))


def unrounded(x: Expr) -> Expr:
    """The f32 number that `x`, of a half type, was rounded from, as far as the expression says it
    (what was rounded from whole numbers or f64 stays rounded).
    What it loads may say more once its producer is written in: such a cast is marked, and asked
    again whenever it is rebuilt. Choices are looked through only where one of their branches is
    rounded; others only move halves."""
    done: dict[Expr, Expr] = {}
    has_cast, stack = False, [x]
    while stack:
        n = stack[-1]
        below = n.args[1:] if n.op == "where" else n.args if n.op == "cast" else ()
        below = tuple(a for a in below if a.dtype in HALF)
        todo = [a for a in below if a not in done]
        if todo and n not in done:
            stack += todo
            continue
        stack.pop()
        if n.op == "where":
            done[n] = op("where", n.args[0], *(done[a] for a in below))
        elif n.op == "cast":
            has_cast = True
            inner = n.args[0]
            done[n] = done[inner] if below else inner if inner.dtype == "f32" else cast(n, "f32")
        elif n.op == "literal":
            done[n] = cast(n, "f32")
        else:
            done[n] = Expr("cast", "f32", (n,), UNROUNDED)
    return done[x] if has_cast or x.op == "literal" else Expr("cast", "f32", (x,), UNROUNDED)


def _exact(value: Any, dtype: str) -> bool:
    """Whether a literal's conversion has one right answer that needs no rounding mode."""
    if dtype == "bool" or isinstance(value, float) and value != value and dtype in FLOATS:
        return True
    if dtype in FLOAT8:
        return literal(value, dtype).attr == value
    if dtype in FLOATS:
        try:
            return dtype == "f64" or _rounded(float(value), dtype) == value
        except OverflowError:
            return False
    if isinstance(value, float):  # C truncates what fits; what does not fit is the machine's affair
        return math.isfinite(value) and literal(int(value), dtype).attr == int(value)
    return True


class WrongDtype(TypeError):
    """An operation of numbers that do not have it, as a root of integers."""


def op(name: str, *args: Expr, dtype: str | None = None) -> Expr:
    """A scalar operation. All arguments share one dtype (for `where`: the last two). Raises
    `WrongDtype` for one that this dtype does not have."""
    arity = SCALAR_OPS[name][0]
    assert len(args) == arity, f"{name} takes {arity} arguments, got {len(args)}"
    if name in FLOATS_ONLY and args[0].dtype not in FLOATS and args[0].dtype not in FLOAT8:
        raise WrongDtype(f"{name} of {args[0].dtype}")
    out = dtype or ("bool" if name in COMPARISONS else args[-1].dtype)
    folded = _fold(name, args)
    return folded if folded is not None else Expr(name, out, args)


def _fold(name: str, args: tuple[Expr, ...]) -> Expr | None:
    """Exact identities only: nothing that changes a rounding, a NaN or the sign of a zero."""
    if name == "where":
        cond, a, b = args
        if cond.op == "literal":
            return a if cond.attr else b
        return a if a is b else None
    if name == "logical_and" and all(a.dtype == "bool" for a in args):
        for x, y in (args, args[::-1]):
            if x.op == "literal":
                return y if x.attr else x
        return args[0] if args[0] is args[1] else None
    if name == "logical_or" and all(a.dtype == "bool" for a in args):
        for x, y in (args, args[::-1]):
            if x.op == "literal":
                return x if x.attr else y
        return args[0] if args[0] is args[1] else None
    if name == "logical_not" and args[0].op == "literal":
        return literal(not args[0].attr, "bool")
    if name == "isnan" and args[0].op == "literal":
        return literal(args[0].attr != args[0].attr, "bool")
    if name in COMPARE and all(a.op == "literal" for a in args):
        return literal(COMPARE[name](args[0].attr, args[1].attr), "bool")
    if name == "mul" and args[-1].dtype in FLOATS:
        for x, y in (args, args[::-1]):
            if x.op == "literal" and x.attr == 1.0:
                return y
    positions = all(a.dtype == "i64" and a.op in ("index", "literal") for a in args)
    if positions and name in ("add", "sub", "mul"):
        i, j = (as_position(x) for x in args)
        exact = i + j if name == "add" else i - j if name == "sub" else i * j
        # Numbers of 64 bits wrap around, an index does not; two literals may do as they do.
        if fits(exact) or exact.value is not None:
            return index_value(exact)
    if positions and name in ("lt", "le", "gt", "ge"):
        return _compare(name, as_position(args[0]), as_position(args[1]))
    return None


def _compare(name: str, a: Index, b: Index) -> Expr | None:
    if name in ("gt", "ge"):
        a, b, name = b, a, {"gt": "lt", "ge": "le"}[name]
    slack = 1 if name == "lt" else 0
    if is_nonneg(b - a - slack):
        return literal(True, "bool")
    if is_nonneg(a - b - (1 - slack)):
        return literal(False, "bool")
    return None


def reduce(kind: str, axes: tuple[Axis, ...], body: Expr) -> Expr:
    return Expr("reduce", "i64" if kind.startswith("arg") else body.dtype, (body,), (kind, axes))


def scan(kind: str, axis: Axis, body: Expr) -> Expr:
    return Expr("scan", body.dtype, (body,), (kind, axis))


def random(dist: str, seed: Expr, stream: int, element: Index, dtype: str) -> Expr:
    return Expr("random", dtype, (seed,), (dist, stream, element))


def with_mask(root: Expr, mask: Expr, unused: bool = False) -> Expr:
    """`root` with every check and load (also inside indices) only where `mask` holds; elsewhere a
    load gives its fill, or if what comes of it is `unused` 1: 0 takes longer to divide by."""
    if mask.op == "literal" and mask.attr:
        return root
    one = unused and (root.args[0] if root.op == "cast" else root).op != "load"
    done: dict[Expr, Expr] = {}
    for node in root.walk():
        new = rebuild(node, tuple(done[a] for a in node.args), {}, done)
        if new.op == "load":
            name, idx, fill = new.attr
            when = op("logical_and", mask, new.args[0]) if new.args else mask
            other = int(one and new.dtype in FLOATS) if fill is None else fill
            new = load(name, idx, new.dtype, when, other)
        elif new.op == "check":
            when = op("logical_and", mask, *new.args[1:]) if new.args[1:] else mask
            new = Expr("check", "i64", (new.args[0], when), new.attr)
        done[node] = new
    return done[root]


def checked(value: Expr, extent: Index) -> Expr:
    """`value` (i64), which must be at least 0 and below `extent`: generated code reports where not,
    as it does for positions at which memory is read."""
    if value.op == "index" and in_range(value.attr, extent):
        return value
    return Expr("check", "i64", (value,), extent)


def own_flops(n: Expr) -> float:
    """Of one operation, what it is computed from not included."""
    return 30.0 if n.op == "random" else SCALAR_OPS.get(n.op, NO_OP)[1]


def issued(root: Expr) -> float:
    """What one evaluation takes with exact functions, its loads and casts included, as vector
    FLOPs."""
    if root._issued is None:
        root._issued = sum(
            EXACT_OPS.get(n.op, own_flops(n)) if n.dtype in FLOATS else own_flops(n)
            for n in root.walk()
        )
    return root._issued


def flops(root: Expr) -> float:
    """Approximate vector FLOPs of one evaluation, its functions as fast as the device can."""
    if root._flops is None:
        root._flops = sum(map(own_flops, root.walk()))
    return root._flops


def show(root: Expr) -> str:
    """The expression as text, shared parts repeated (the printer of programs names them)."""
    text: dict[Expr, str] = {}
    for n in root.walk():
        args = ", ".join(text[a] for a in n.args)
        if n.op == "literal":
            text[n] = repr(n.attr)
        elif n.op == "index":
            text[n] = f"({n.attr!r})"
        elif n.op == "load":
            name, idx, fill = n.attr
            tail = f" if {args} else {fill!r}" if n.args else ""
            text[n] = f"{name}[{', '.join(map(repr, idx))}{tail}]"
        elif n.op in ("reduce", "scan"):
            axes = n.attr[1] if isinstance(n.attr[1], tuple) else (n.attr[1],)
            text[n] = f"{n.op}_{n.attr[0]}({', '.join(repr(a) for a in axes)}; {args})"
        elif n.op == "cast":
            text[n] = f"{n.attr or n.dtype}({args})"
        elif n.op == "random":
            text[n] = f"random_{n.attr[0]}({args}, {n.attr[1]}, {n.attr[2]!r})"
        else:
            text[n] = f"{n.op}({args})"
        if len(text[n]) > 2000:
            text[n] = f"<{n.key}>"
    return text[root]
