"""Indices as integers: for given axes and sizes, and for the sizes that costs assume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deuteron.ir.polynomial import Axis, Div, Index, IndexLike, MinMax, Mod, Sym, Value, as_index


def evaluate(
    index: Index, env: Mapping[str, int], value: Callable[[Any], int] | None = None
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
    env = assumed(index)
    for a in index.axes():
        env[a.name] = max(0, hint(a.extent) - 1)
    index._hint = evaluate(index, env, lambda e: 0)
    return index._hint


def assumed(index: Index) -> dict[str, int]:
    """The sizes that the cost model assumes, by name."""
    return {s.name: s.hint if s.hint is not None else max(s.low, 128) for s in index.syms()}
