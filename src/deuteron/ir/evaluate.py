"""Indices with their atoms replaced: by other indices, by integers, by the sizes that costs assume.

Part of `deuteron.ir.index`; import these names from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from deuteron.base.memo import MEMO
from deuteron.ir.index import (
    Atom,
    Axis,
    Div,
    Index,
    IndexLike,
    MinMax,
    Mod,
    Sym,
    Value,
    as_index,
    atom,
    const,
    floordiv,
    maximum,
    minimum,
    mod,
)

if TYPE_CHECKING:
    from deuteron.ir.expr import Expr


_SUBSTITUTED: dict[tuple[Index, tuple[tuple[Atom, Index], ...]], Index] = MEMO.answers()


def substitute(index: Index, table: Mapping[Atom, Index]) -> Index:
    """`index` with atoms replaced, re-simplified."""
    if not table or table.keys().isdisjoint(index.atoms()):
        return index
    key = (index, tuple(table.items()))
    known = _SUBSTITUTED.get(key)
    if known is None:
        known = _SUBSTITUTED[key] = _substitute(index, table)
    return known


def _substitute(index: Index, table: Mapping[Atom, Index]) -> Index:
    total = const(0)
    for m, c in index.terms:
        part = const(c)
        for a in m:
            part = part * _substitute_atom(a, table)
        total = total + part
    return total


def _substitute_atom(a: Atom, table: Mapping[Atom, Index]) -> Index:
    replacement = table.get(a)
    if replacement is not None:
        return replacement
    if isinstance(a, Div):
        return floordiv(substitute(a.num, table), substitute(a.den, table))
    if isinstance(a, Mod):
        return mod(substitute(a.num, table), substitute(a.den, table))
    if isinstance(a, MinMax):
        pick = minimum if a.kind == "min" else maximum
        return pick(substitute(a.a, table), substitute(a.b, table))
    if isinstance(a, Value):
        return atom(Value(a.expr.substitute(table)))
    return atom(a)


def evaluate(
    index: Index, env: Mapping[str, int], value: Callable[[Expr], int] | None = None
) -> int:
    """The integer for given axis and size values (by name)."""
    total = 0
    for m, c in index.terms:
        for a in m:
            if isinstance(a, (Sym, Axis)):
                c *= env[a.name]
            elif isinstance(a, Div):
                c *= evaluate(a.num, env, value) // evaluate(a.den, env, value)
            elif isinstance(a, Mod):
                c *= evaluate(a.num, env, value) % evaluate(a.den, env, value)
            elif isinstance(a, MinMax):
                pick = min if a.kind == "min" else max
                c *= pick(evaluate(a.a, env, value), evaluate(a.b, env, value))
            elif isinstance(a, Value) and value is not None:
                c *= value(a.expr)
            else:
                raise TypeError(f"cannot evaluate {a!r} in {index!r}")
        total += c
    return total


def hint(index: IndexLike) -> int:
    """What the cost model assumes: symbols at their hints, axes at their ends, loaded values 0."""
    index = as_index(index)
    if index._hint is not None:
        return index._hint
    if index.value is not None:
        index._hint = index.value
        return index.value
    env = {s.name: s.hint if s.hint is not None else max(s.low, 128) for s in index.syms()}
    for a in index.axes():
        env[a.name] = max(0, hint(a.extent) - 1)
    index._hint = evaluate(index, env, lambda e: 0)
    return index._hint
