"""Masked accesses: points at which a mask lets an access outside of its tensor through.

In: the indices of an access, the extents of its tensor, its mask. Out: such a point in words, or
None where none was found among corners and a few more points (that is no proof). A mask is known as
far as it is made of comparisons of indices; what else it is made of may be true or false.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

from deuteron.base.memo import MEMO
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Index, Sym, Value, evaluate
from deuteron.ir.operations import COMPARE

TRIED_POINTS = 24
_EXAMPLES: dict[tuple[tuple[Index, ...], tuple[Index, ...], Expr], str | None] = MEMO.answers()


def lets_through(indices: Sequence[Index], shape: Sequence[Index], mask: Expr) -> str | None:
    """An example of axes and sizes for which the mask holds and an index is out of range."""
    key = (tuple(indices), tuple(shape), mask)
    if key not in _EXAMPLES:
        _EXAMPLES[key] = _search(*key)
    return _EXAMPLES[key]


def _search(indices: tuple[Index, ...], shape: tuple[Index, ...], mask: Expr) -> str | None:
    known = [k for k, i in enumerate(indices) if not _loads(i) and not _loads(shape[k])]
    used = [i for k in known for i in (indices[k], shape[k])] + list(mask.indices())
    axes = sorted({a for i in used for a in i.axes()}, key=lambda a: a.name)
    syms = sorted({s for i in used for s in i.syms()}, key=lambda s: s.name)
    syms = sorted({*syms, *(s for a in axes for s in a.extent.syms())}, key=lambda s: s.name)
    for env in points(axes, syms):
        try:
            if truth(mask, env) is not True:
                continue
            for k in known:
                at, end = evaluate(indices[k], env), evaluate(shape[k], env)
                if not 0 <= at < end:
                    where = ", ".join(f"{n} = {v}" for n, v in env.items())
                    return f"index {indices[k]!r} of dimension {k} is {at} of {end} where {where}"
        except (ZeroDivisionError, KeyError):
            continue  # sizes for which an index has no meaning
    return None


def _loads(index: Index) -> bool:
    return any(isinstance(a, Value) for a in index.atoms())


def points(axes: Sequence[Axis], syms: Sequence[Sym]) -> Iterator[dict[str, int]]:
    """Corners first: the first and the last value of each axis; then points between them. Sizes are
    those that were seen, which satisfy what the traced program demands of them."""
    if any(s.hint is None for s in syms):
        return
    sizes = {s.name: s.hint or 0 for s in syms}
    extents = [evaluate(a.extent, sizes) for a in axes]
    if any(n <= 0 for n in extents):
        return
    rng = random.Random(0)
    corners = itertools.product(*(sorted({0, n - 1}) for n in extents))
    others = ([rng.randrange(n) for n in extents] for _ in itertools.count())
    tried = itertools.chain(itertools.islice(corners, TRIED_POINTS // 2), others)
    for values in itertools.islice(tried, TRIED_POINTS):
        yield {**sizes, **{a.name: v for a, v in zip(axes, values, strict=True)}}


def truth(mask: Expr, env: Mapping[str, int]) -> bool | None:
    """Whether a mask holds at a point; None where that depends on values."""
    if mask.op == "literal":
        return bool(mask.attr)
    if mask.op in ("logical_and", "logical_or"):
        sides = [truth(a, env) for a in mask.args]
        decides = mask.op == "logical_or"
        if decides in sides:
            return decides
        return None if None in sides else not decides
    if mask.op == "logical_not":
        inner = truth(mask.args[0], env)
        return None if inner is None else not inner
    compare = COMPARE.get(mask.op)
    if compare is None or any(a.op not in ("index", "literal") for a in mask.args):
        return None
    a, b = (_number(x, env) for x in mask.args)
    return None if a is None or b is None else compare(a, b)


def _number(e: Expr, env: Mapping[str, int]) -> float | None:
    if e.op == "literal":
        return e.attr
    return None if _loads(e.attr) else evaluate(e.attr, env)


__all__ = ["lets_through", "truth"]
