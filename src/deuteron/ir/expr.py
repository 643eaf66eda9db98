"""Scalar expressions: the bodies of computations.

An `Expr` is frozen and interned; equality is identity. `op` says what it is:

    literal   attr = Python value
    index     attr = Index; the integer value of an index expression (i64)
    load      attr = (tensor name, index per dimension, fill); args = () or (mask,): where the mask is false nothing is
              read and the value is `fill`
    cast      args = (x,); converts to `dtype` as C and ATen do
    reduce    attr = (kind, axes); args = (body,): folds body over the axes (see `REDUCTIONS`)
    scan      attr = (kind, axis); args = (body,): inclusive prefix fold along the axis
    random    attr = (distribution, stream, element index); args = (seed,): Philox-4x32-10, counter = element index
    otherwise a scalar operation of `SCALAR_OPS` with its arguments

Data types are short names (`DTYPES`). Arithmetic is done in the dtype of the node: what computes in f32 and is
rounded to bf16 says so with casts. Nothing in a code generator decides precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deuteron.ir.index import Atom, Axis, Index, IndexLike, Value, as_index, atom, substitute

DTYPES = ("bool", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64")
ITEMSIZE = {"bool": 1, "u8": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8}
FLOATS = ("f16", "bf16", "f32", "f64")
INTS = ("u8", "i8", "i16", "i32", "i64")

# Scalar operations: number of arguments and approximate cost in vector FLOPs (used by the cost model only).
SCALAR_OPS: dict[str, tuple[int, float]] = {
    **{n: (1, 1.0) for n in ("neg", "abs", "sign", "floor", "ceil", "trunc", "round", "reciprocal", "logical_not",
                             "bitwise_not", "isnan", "isinf", "signbit")},
    **{n: (1, 4.0) for n in ("sqrt", "rsqrt")},
    **{n: (1, 12.0) for n in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "sigmoid")},
    **{n: (1, 20.0) for n in ("tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf",
                              "erfc")},
    **{n: (1, 40.0) for n in ("erfinv", "lgamma", "digamma", "i0", "i0e", "i1", "i1e", "ndtri")},
    **{n: (2, 1.0) for n in ("add", "sub", "mul", "maximum", "minimum", "fmax", "fmin", "lt", "le", "gt", "ge", "eq",
                             "ne", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or",
                             "bitwise_xor", "lshift", "rshift", "copysign")},
    **{n: (2, 4.0) for n in ("div", "floordiv", "truncdiv", "fmod", "remainder")},
    **{n: (2, 30.0) for n in ("pow", "atan2", "nextafter", "hypot", "ldexp")},
    "where": (3, 1.0), "fma": (3, 1.0),
}
COMPARISONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or", "logical_xor", "logical_not",
                         "isnan", "isinf", "signbit"))


@dataclass(frozen=True)
class Reduction:
    """A fold. `identity(dtype)` is its neutral element; `scalar_op` combines two partial results (None: own rule)."""

    identity: Callable[[str], Any]
    scalar_op: str | None


def _lowest(dtype: str) -> Any:
    if dtype in FLOATS:
        return -math.inf
    return {"bool": False, "u8": 0}.get(dtype, -(2 ** (8 * ITEMSIZE[dtype] - 1)))


def _highest(dtype: str) -> Any:
    if dtype in FLOATS:
        return math.inf
    return {"bool": True, "u8": 255}.get(dtype, 2 ** (8 * ITEMSIZE[dtype] - 1) - 1)


# max and min propagate NaN, as ATen's do. argmax and argmin return the i64 position along the single reduced axis of the
# first extreme element (the first NaN where there is one); their partial results are (value, position) pairs.
REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(lambda d: 0, "add"),
    "prod": Reduction(lambda d: 1, "mul"),
    "max": Reduction(_lowest, "maximum"),
    "min": Reduction(_highest, "minimum"),
    "any": Reduction(lambda d: False, "logical_or"),
    "all": Reduction(lambda d: True, "logical_and"),
    "argmax": Reduction(_lowest, None),
    "argmin": Reduction(_highest, None),
}
SCANS = ("sum", "prod", "max", "min")


class Expr:
    """One node; build it with the functions of this module, never directly."""

    __slots__ = ("_hash", "_indices", "args", "attr", "dtype", "id", "op")
    _interned: dict[tuple[Any, ...], Expr] = {}

    op: str
    dtype: str
    args: tuple[Expr, ...]
    attr: Any
    id: int

    def __new__(cls, op: str, dtype: str, args: tuple[Expr, ...] = (), attr: Any = None) -> Expr:
        mark = (type(attr), math.copysign(1.0, attr)) if isinstance(attr, (int, float)) and attr == attr else None
        key = (op, dtype, args, "nan" if isinstance(attr, float) and attr != attr else attr, mark)
        found = cls._interned.get(key)
        if found is None:
            found = object.__new__(cls)
            found.op, found.dtype, found.args, found.attr = op, dtype, args, attr
            found.id, found._hash, found._indices = len(cls._interned), hash(key), None
            cls._interned[key] = found
        return found

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return show(self)

    @property
    def key(self) -> str:
        """Identifies the node within the process (indices of gathers are ordered by it)."""
        return f"e{self.id}"

    def indices(self) -> tuple[Index, ...]:
        """Every index used in the expression, at any depth."""
        if self._indices is None:
            found: dict[Index, None] = {}
            for node in self.walk():
                for i in own_indices(node):
                    found[i] = None
            self._indices = tuple(found)
        return self._indices

    def walk(self) -> Iterator[Expr]:
        """Every node once, arguments before users, loaded indices included. Iterative: depth has no limit."""
        seen: set[Expr] = set()
        stack: list[tuple[Expr, bool]] = [(self, False)]
        while stack:
            node, ready = stack.pop()
            if ready:
                yield node
                continue
            if node in seen:
                continue
            seen.add(node)
            stack.append((node, True))
            for arg in children(node):
                if arg not in seen:
                    stack.append((arg, False))

    def loads(self) -> tuple[Expr, ...]:
        return tuple(n for n in self.walk() if n.op == "load")

    def axes(self) -> set[Axis]:
        """Free and bound axes used."""
        out: set[Axis] = set()
        for i in self.indices():
            out |= i.axes()
        return out

    def substitute(self, table: Mapping[Atom, Index], loads: Mapping[Expr, Expr] | None = None) -> Expr:
        """Replaces atoms in every index and, where given, whole nodes (`loads`: node -> node, tried first)."""
        return rewrite(self, lambda n, args: None, table, loads)


def own_indices(node: Expr) -> tuple[Index, ...]:
    if node.op == "load":
        return node.attr[1]
    if node.op == "index":
        return (node.attr,)
    if node.op == "random":
        return (node.attr[2],)
    return ()


def children(node: Expr) -> tuple[Expr, ...]:
    """Arguments, and expressions whose value is used as an index."""
    out = list(node.args)
    for i in own_indices(node):
        out.extend(a.expr for a in i.atoms() if isinstance(a, Value))
    return tuple(out)


def rewrite(
    root: Expr,
    rule: Callable[[Expr, tuple[Expr, ...]], Expr | None],
    table: Mapping[Atom, Index] | None = None,
    nodes: Mapping[Expr, Expr] | None = None,
) -> Expr:
    """Rebuilds bottom-up. `rule(node, new_args)` may return a replacement; `table` replaces atoms in indices."""
    done: dict[Expr, Expr] = dict(nodes or {})
    table = table or {}
    for node in root.walk():
        if node in done:
            continue
        args = tuple(done[a] for a in node.args)
        new = rule(node, args)
        done[node] = rebuild(node, args, table, done) if new is None else new
    return done[root]


def rebuild(node: Expr, args: tuple[Expr, ...], table: Mapping[Atom, Index], done: Mapping[Expr, Expr]) -> Expr:
    """`node` with new arguments and with atoms in its indices replaced."""
    def move(i: Index) -> Index:
        full: dict[Atom, Index] = dict(table)
        for a in i.atoms():
            if isinstance(a, Value) and a.expr in done:
                full[a] = atom(Value(done[a.expr]))
        return substitute(i, full)

    if node.op == "load":
        name, idx, fill = node.attr
        return Expr("load", node.dtype, args, (name, tuple(move(i) for i in idx), fill))
    if node.op == "index":
        return index_value(move(node.attr))
    if node.op == "random":
        dist, stream, i = node.attr
        return Expr("random", node.dtype, args, (dist, stream, move(i)))
    if node.op in ("reduce", "scan") and table:
        kind, axes = node.attr
        bound = axes if isinstance(axes, tuple) else (axes,)
        moved = tuple(_moved_axis(a, table) for a in bound)
        return Expr(node.op, node.dtype, args, (kind, moved if isinstance(axes, tuple) else moved[0]))
    if all(a is b for a, b in zip(args, node.args, strict=True)):
        return node
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
    elif dtype in FLOATS:
        value = float(value)
    else:
        bits = 8 * ITEMSIZE[dtype]
        value = int(value) & ((1 << bits) - 1)
        if dtype != "u8" and value >= 1 << (bits - 1):
            value -= 1 << bits
    return Expr("literal", dtype, (), value)


def index_value(index: IndexLike) -> Expr:
    """The value of an index as an i64 scalar."""
    index = as_index(index)
    return literal(index.value, "i64") if index.value is not None else Expr("index", "i64", (), index)


def as_position(expr: Expr) -> Index:
    """An integer expression used as an index (a gather). Undoes `index_value`."""
    if expr.op == "index":
        return expr.attr
    if expr.op == "literal":
        return as_index(int(expr.attr))
    return atom(Value(cast(expr, "i64")))


def load(name: str, indices: tuple[Index, ...], dtype: str, mask: Expr | None = None, fill: Any = 0) -> Expr:
    if mask is None or (mask.op == "literal" and mask.attr):
        return Expr("load", dtype, (), (name, indices, None))
    if mask.op == "literal":
        return literal(fill, dtype)
    return Expr("load", dtype, (mask,), (name, indices, literal(fill, dtype).attr))


def cast(x: Expr, dtype: str) -> Expr:
    if x.dtype == dtype:
        return x
    if x.op == "literal" and not (dtype in INTS and isinstance(x.attr, float) and not math.isfinite(x.attr)):
        if dtype not in ("f16", "bf16", "f32") or _exact(x.attr, dtype):
            return literal(x.attr, dtype)
    if x.op == "cast" and x.args[0].dtype == dtype and _widens(dtype, x.dtype):
        return x.args[0]
    return Expr("cast", dtype, (x,))


def _exact(value: Any, dtype: str) -> bool:
    bits = {"f16": 11, "bf16": 8, "f32": 24}[dtype]
    if isinstance(value, float) and not math.isfinite(value):
        return True
    mantissa, exponent = math.frexp(float(value))
    limit = 16 if dtype == "f16" else 128
    return float(mantissa * 2**bits).is_integer() and -limit + 4 < exponent <= limit - (dtype == "f16")


def _widens(a: str, b: str) -> bool:
    """Whether every value of `a` is exact in `b`."""
    if a == b:
        return True
    if a == "bool":
        return True
    if a in INTS and b in INTS:
        signed = (a != "u8", b != "u8")
        return ITEMSIZE[b] > ITEMSIZE[a] and (signed[1] or not signed[0])
    if a in FLOATS and b in FLOATS:
        return b == "f64" or (b == "f32" and a in ("f16", "bf16"))
    return a in ("u8", "i8", "i16") and b in ("f32", "f64") or (a == "i32" and b == "f64")


def op(name: str, *args: Expr, dtype: str | None = None) -> Expr:
    """A scalar operation. All arguments share one dtype (for `where`: the last two)."""
    arity = SCALAR_OPS[name][0]
    assert len(args) == arity, f"{name} takes {arity} arguments, got {len(args)}"
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
    if name == "logical_and":
        for x, y in (args, args[::-1]):
            if x.op == "literal":
                return y if x.attr else x
        return args[0] if args[0] is args[1] else None
    if name == "logical_or":
        for x, y in (args, args[::-1]):
            if x.op == "literal":
                return x if x.attr else y
        return args[0] if args[0] is args[1] else None
    if name == "logical_not" and args[0].op == "literal":
        return literal(not args[0].attr, "bool")
    if name == "mul" and args[-1].dtype in FLOATS:
        for x, y in (args, args[::-1]):
            if x.op == "literal" and x.attr == 1.0:
                return y
    if name in ("add", "sub", "mul") and all(a.op in ("index", "literal") and a.dtype == "i64" for a in args):
        a, b = (as_position(x) for x in args)
        return index_value(a + b if name == "add" else a - b if name == "sub" else a * b)
    if name in ("lt", "le", "gt", "ge") and all(a.op in ("index", "literal") and a.dtype == "i64" for a in args):
        return _compare(name, as_position(args[0]), as_position(args[1]))
    return None


def _compare(name: str, a: Index, b: Index) -> Expr | None:
    from deuteron.ir.index import is_nonneg

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


def with_mask(root: Expr, mask: Expr) -> Expr:
    """`root` with every load restricted to where `mask` holds (what it reads elsewhere is its fill)."""
    def rule(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op != "load":
            return None
        name, idx, fill = node.attr
        both = op("logical_and", mask, args[0]) if args else mask
        return load(name, idx, node.dtype, both, fill if fill is not None else 0)

    return rewrite(root, rule)


def flops(root: Expr) -> float:
    """Approximate vector FLOPs of one evaluation."""
    return sum(SCALAR_OPS[n.op][1] for n in root.walk() if n.op in SCALAR_OPS) + sum(
        30.0 for n in root.walk() if n.op == "random"
    )


def show(root: Expr) -> str:
    """The expression as text, shared parts repeated (the printer of programs names them instead)."""
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
            text[n] = f"{n.dtype}({args})"
        elif n.op == "random":
            text[n] = f"random_{n.attr[0]}({args}, {n.attr[1]}, {n.attr[2]!r})"
        else:
            text[n] = f"{n.op}({args})"
        if len(text[n]) > 2000:
            text[n] = f"<{n.key}>"
    return text[root]
