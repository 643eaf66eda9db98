"""Checks of expressions and of where they read: dtypes, axes, ranges of indices."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

from deuteron.base.memo import MEMO
from deuteron.ir.expr import Expr, own_indices
from deuteron.ir.index import (
    Atom,
    Axis,
    Div,
    Index,
    MinMax,
    Mod,
    Sym,
    Value,
    evaluate,
    in_range,
)
from deuteron.ir.masks import lets_through
from deuteron.ir.operations import (
    COMPARISONS,
    DTYPES,
    FLOAT8,
    FLOATS,
    HALF,
    ITEMSIZE,
    REDUCTIONS,
    SCALAR_OPS,
    SCANS,
)
from deuteron.ir.program import (
    Layout,
)

DISTRIBUTIONS = {"rand": FLOATS, "randn": FLOATS, "rand_bits": ("i64",)}


class Fault(Exception):
    """A broken invariant, before it is known in which definition."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(message)
        self.invariant, self.message = invariant, message


_FREE: dict[Expr, frozenset[Axis]] = MEMO.answers()


_FACTS: dict[Expr, Facts] = MEMO.answers()


_NO_AXES: frozenset[Axis] = frozenset()


_INDEX_AXES: dict[Index, frozenset[Axis]] = MEMO.answers()


def _parts(a: Atom) -> tuple[Index, ...]:
    if isinstance(a, MinMax):
        return a.a, a.b
    return (a.num, a.den) if isinstance(a, (Div, Mod)) else ()


def index_axes(index: Index) -> frozenset[Axis]:
    """The axes free in an index: its own, and those free in the expressions that it loads."""
    own_axes = _INDEX_AXES.get(index)
    if own_axes is None:
        own_axes = _NO_AXES
        todo = [a for m, _ in index.terms for a in m]
        while todo:
            a = todo.pop()
            if isinstance(a, Axis):
                own_axes |= {a}
            elif isinstance(a, Value):
                if a.expr.dtype != "i64":
                    raise Fault("dtypes", f"{a!r} is used as an index and is {a.expr.dtype}")
                own_axes |= facts(a.expr).free
            else:
                todo.extend(x for i in _parts(a) for m, _ in i.terms for x in m)
        _INDEX_AXES[index] = own_axes
    return own_axes


class Facts(NamedTuple):
    """What is true of an expression in every program."""

    free: frozenset[
        Axis
    ]  # axes that it depends on and does not bind (a scan runs along a free one)
    bound: tuple[Axis, ...]  # axes that reduces inside bind
    loads: tuple[Expr, ...]
    indices: tuple[Index, ...]


def facts(root: Expr) -> Facts:
    """Checks every node that is new, arguments first."""
    known = _FACTS.get(root)
    if known is None:
        bound: dict[Axis, None] = {}
        loads: list[Expr] = []
        indices: dict[Index, None] = {}
        for n in root.walk():
            if n not in _FREE:
                _FREE[n] = _check_node(n)
            if n.op == "load":
                loads.append(n)
                indices.update(dict.fromkeys(n.attr[1]))
            elif n.op == "reduce":
                bound.update(dict.fromkeys(n.attr[1]))
            elif n.op in ("index", "random", "check"):
                indices.update(dict.fromkeys(own_indices(n)))
        known = Facts(_FREE[root], tuple(bound), tuple(loads), tuple(indices))
        _FACTS[root] = known
    return known


def _check_node(n: Expr) -> frozenset[Axis]:
    """The node's own invariants hold; returns its free axes."""
    if n.dtype not in DTYPES:
        raise Fault("dtypes", f"{n!r} has no dtype {n.dtype!r}")
    special = _SPECIAL.get(n.op)
    free = _NO_AXES
    for a in n.args:
        theirs = _FREE[a]
        free = theirs if not free or free is theirs else free | theirs
    if special is not None:
        return special(n, free)
    if n.op not in SCALAR_OPS:
        raise Fault("kinds", f"no operation {n.op!r}")
    if len(n.args) != SCALAR_OPS[n.op][0]:
        raise Fault("kinds", f"{n!r} has {len(n.args)} arguments")
    values = n.args
    if n.op == "where":
        if values[0].dtype != "bool":
            raise Fault("dtypes", f"the condition of {n!r} is {values[0].dtype}")
        values = values[1:]
    dtype = values[0].dtype
    for v in values:
        if v.dtype != dtype:
            raise Fault("dtypes", f"arguments of {n!r} are {dtype} and {v.dtype}")
    expected = "bool" if n.op in COMPARISONS else dtype
    if n.dtype != expected:
        raise Fault("dtypes", f"{n!r} is {n.dtype}, of arguments that make it {expected}")
    return free


def _literal(n: Expr, free: frozenset[Axis]) -> frozenset[Axis]:
    kind = bool if n.dtype == "bool" else float if n.dtype in (*FLOATS, *FLOAT8) else int
    if type(n.attr) is not kind:
        raise Fault("kinds", f"the {n.dtype} literal {n.attr!r} is a {type(n.attr).__name__}")
    return free


def _index(n: Expr, free: frozenset[Axis]) -> frozenset[Axis]:
    if n.dtype != "i64":
        raise Fault("dtypes", f"the index {n!r} is {n.dtype}")
    return index_axes(n.attr)


def _load(n: Expr, free: frozenset[Axis]) -> frozenset[Axis]:
    name, indices, fill = n.attr
    if n.args:
        if n.args[0].dtype != "bool":
            raise Fault("dtypes", f"the mask of {n!r} is {n.args[0].dtype}")
        if fill is None:
            raise Fault("kinds", f"{n!r} has a mask and no fill")
    for i in indices:
        theirs = index_axes(i)
        free = theirs if not free or free is theirs else free | theirs
    return free


def _cast(n: Expr, free: frozenset[Axis]) -> frozenset[Axis]:
    if len(n.args) != 1:
        raise Fault("kinds", f"a cast of {len(n.args)} values")
    if n.attr is not None and (n.args[0].dtype not in HALF or n.dtype != "f32"):
        raise Fault("dtypes", f"{n!r} is {n.dtype}, of what was never rounded from f32")
    return free


def _reduce(n: Expr, free: frozenset[Axis]) -> frozenset[Axis]:
    kind, axes = n.attr
    if kind not in REDUCTIONS:
        raise Fault("kinds", f"no reduction {kind!r}")
    if not (len(set(axes)) == len(axes) > 0):
        raise Fault("axes", f"{n!r} reduces over {axes}")
    positional = kind.startswith("arg")
    if positional and len(axes) != 1:
        raise Fault("kinds", f"{kind} over {len(axes)} axes")
    expected = "i64" if positional else n.args[0].dtype
    if n.dtype != expected:
        raise Fault("dtypes", f"{n!r} is {n.dtype}, its reduction {expected}")
    flags = kind in ("any", "all")
    if flags and n.dtype != "bool":
        raise Fault("dtypes", f"{kind} of {n.dtype}")
    return free - set(axes)


def _scan(n: Expr, free: frozenset[Axis]) -> frozenset[Axis]:
    kind, axis = n.attr
    if kind not in SCANS:
        raise Fault("kinds", f"no scan {kind!r}")
    if not isinstance(axis, Axis):
        raise Fault("kinds", f"{n!r} scans along {axis!r}")
    if n.dtype != n.args[0].dtype:
        raise Fault("dtypes", f"{n!r} is {n.dtype}, its reduction {n.args[0].dtype}")
    return free | {axis}


def _random(n: Expr, free: frozenset[Axis]) -> frozenset[Axis]:
    dist, stream, element = n.attr
    if dist not in DISTRIBUTIONS:
        raise Fault("kinds", f"no distribution {dist!r}")
    if n.dtype not in DISTRIBUTIONS[dist]:
        raise Fault("dtypes", f"{dist} of {n.dtype}")
    if n.args[0].dtype != "i64":
        raise Fault("dtypes", f"the seed of {n!r} is {n.args[0].dtype}")
    if not isinstance(stream, int):
        raise Fault("kinds", f"the stream of {n!r} is {stream!r}")
    return free | index_axes(element)


def _check(n: Expr, free: frozenset[Axis]) -> frozenset[Axis]:
    if n.dtype != "i64" or n.args[0].dtype != "i64":
        raise Fault("dtypes", f"{n!r} checks {n.args[0].dtype}")
    if any(a.dtype != "bool" for a in n.args[1:]):
        raise Fault("dtypes", f"the mask of {n!r} is {n.args[1].dtype}")
    if index_axes(n.attr):
        raise Fault("axes", f"the bound of {n!r} depends on axes")
    return free


_SPECIAL = {
    "literal": _literal,
    "index": _index,
    "load": _load,
    "cast": _cast,
    "reduce": _reduce,
    "scan": _scan,
    "random": _random,
    "check": _check,
}


_RANGES: dict[tuple[Index, Index], str] = MEMO.answers()


def range_verdict(index: Index, extent: Index) -> str:
    """ "proven", "open", or the example that refutes ``0 <= index < extent``."""
    if len(index.terms) == 1 and index.terms[0][1] == 1:
        m = index.terms[0][0]
        if len(m) == 1 and isinstance(m[0], Axis) and m[0].extent is extent:
            return "proven"
    verdict = _RANGES.get((index, extent))
    if verdict is None:
        verdict = "proven" if in_range(index, extent) else _example(index, extent)
        _RANGES[index, extent] = verdict
    return verdict


def _example(index: Index, extent: Index) -> str:
    """Tries corners and random points: all points of a small static space decide."""
    if any(isinstance(a, Value) for i in (index, extent) for a in i.atoms()):
        return "proven"  # a loaded position: wrapped and checked where it was made
    axes = sorted(index.axes() | extent.axes(), key=lambda a: a.name)
    syms = sorted(index.syms() | extent.syms(), key=lambda s: s.name)
    rng = random.Random(0)
    # Sizes that were seen satisfy whatever the traced program demands of them; others may not
    # (two products of sizes that are known to be equal).
    seen = bool(syms) and all(s.hint is not None for s in syms)
    if any(s.hint is None and re.fullmatch(r"u\d+", s.name) for s in syms):
        return "open"  # a size that torch itself knows only at run time, checked there
    for size in range(1 if seen else 4):
        env = {s.name: _sample(s, size, rng) for s in syms}
        try:
            extents = [evaluate(a.extent, env) for a in axes]
            points = 1
            for n in extents:
                points *= n
            whole = points <= 4096
            for k in range(points if whole else 200):
                for a, n in zip(axes, extents):
                    env[a.name] = k % n if whole else rng.choice((0, n - 1, rng.randrange(n)))
                    k //= n if whole else 1
                at, end = evaluate(index, env), evaluate(extent, env)
                if not 0 <= at < end:
                    return f"{at} of {end} where {', '.join(f'{k} = {v}' for k, v in env.items())}"
        except (ZeroDivisionError, KeyError):
            continue  # sizes for which the index has no meaning: no example
        if not syms:
            return "proven" if whole else "open"
    return "open"


def _sample(s: Sym, k: int, rng: random.Random) -> int:
    """Sizes to try: the hint, then small ones. Below 1 the tensors are empty and prove nothing."""
    if k == 0 and s.hint is not None:
        return s.hint
    return max(s.low, 1) + (0, 1, 5, rng.randrange(64))[k]


def check_position(
    what: str, indices: tuple[Index, ...], layout: Layout, mask: Expr | None, strict: bool = False
) -> None:
    """Arity and range of an access to a tensor."""
    if len(indices) != len(layout.shape):
        raise Fault("layouts", f"{what}: {len(indices)} indices for rank {len(layout.shape)}")
    if mask is not None:
        escape = lets_through(indices, layout.shape, mask)
        if escape is not None:
            raise Fault("range", f"the mask of the {what} lets it outside: {escape}")
        return
    for d, (i, n) in enumerate(zip(indices, layout.shape)):
        verdict = range_verdict(i, n)
        if verdict != "proven" and (strict or verdict != "open"):
            raise Fault(
                "range",
                f"{what}: index {i!r} of dimension {d} is not below {n!r}"
                + ("" if verdict == "open" else f": {verdict}"),
            )


def check_load(n: Expr, layout: Layout, strict: bool = False) -> None:
    name, indices, _ = n.attr
    if n.dtype != layout.dtype:
        raise Fault("dtypes", f"load of {name} is {n.dtype}, the tensor {layout.dtype}")
    check_position(f"load of {name}", indices, layout, n.args[0] if n.args else None, strict)


def check_layout(name: str, layout: Layout) -> None:
    if len(layout.shape) != len(layout.strides):
        raise Fault("layouts", f"{name} has shape and strides of two lengths")
    if layout.dtype not in ITEMSIZE:
        raise Fault("dtypes", f"{name} has no dtype {layout.dtype!r}")
