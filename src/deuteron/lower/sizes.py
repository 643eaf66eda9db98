"""Symbolic sizes of torch (SymInt, sympy) as `Index`, without adding guards.

`Symbols` also knows where each symbol's value is found at run time: an integer input, a dimension
or stride of an input, the result of a library call (unbacked sizes), or a Python expression of
other symbols for what index algebra cannot hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from deuteron.ir.index import (
    Index,
    Sym,
    as_index,
    atom,
    const,
    floordiv,
    is_nonneg,
    maximum,
    minimum,
    mod,
)

# What is known of a whole number of which nothing is known.
UNKNOWN_LOW = -(2**62)


@dataclass
class Symbols:
    cache: dict[Any, Index] = field(default_factory=dict)
    known: dict[str, Sym] = field(default_factory=dict)
    computed: dict[str, tuple[Sym, str]] = field(
        default_factory=dict
    )  # symbol -> Python source over other symbols
    shape_env: Any = None

    def index(self, x: Any) -> Index:
        if type(x) is int:  # nearly always
            return const(x)
        if isinstance(x, Index):
            return x
        if isinstance(x, (bool, int)):
            return const(int(x))
        if isinstance(x, torch.SymInt):
            self.shape_env = self.shape_env or getattr(x.node, "shape_env", None)
            return self.from_sympy(x.node.expr)
        if isinstance(x, sympy.Basic):
            return self.from_sympy(x)
        raise TypeError(f"not a size: {x!r} ({type(x).__name__})")

    def stride(self, x: Any) -> Index:
        """A stride. Torch's products count sizes of at least one: a tensor of none has no elements
        to be found."""
        if isinstance(x, torch.SymInt):
            self.shape_env = self.shape_env or getattr(x.node, "shape_env", None)
            x = x.node.expr.replace(_at_least_one, lambda e: e.func(*(a for a in e.args if a != 1)))
        return self.index(x)

    def from_sympy(self, e: Any) -> Index:
        known = self.cache.get(e)
        if known is None:
            known = self.cache[e] = self._convert(e)
        return known

    def symbol(self, s: Any) -> Sym:
        sym = self.known.get(s.name)
        if sym is None:
            low, hint = 0, None
            env = self.shape_env
            if env is not None:
                low = _lowest(env, s)
                hint = _hint(env, s)
            sym = self.known[s.name] = Sym(s.name, low, hint)
        return sym

    def _convert(self, e: Any) -> Index:
        if e.is_Integer:
            return const(int(e))
        if e.is_Symbol:
            return atom(self.symbol(e))
        known = self.guarded(e)
        if known is not None:
            return const(known)
        kind = type(e).__name__
        if e.is_Add:
            total = const(0)
            for a in e.args:
                total = total + self.from_sympy(a)
            return total
        if e.is_Mul and all(a.is_integer for a in e.args):
            out = const(1)
            for a in e.args:
                out = out * self.from_sympy(a)
            return out
        if e.is_Pow and e.exp.is_Integer and 0 <= int(e.exp) <= 8:
            out = const(1)
            for _ in range(int(e.exp)):
                out = out * self.from_sympy(e.base)
            return out
        if kind in ("FloorDiv", "CleanDiv", "Mod", "PythonMod"):
            if not all(a.is_integer for a in e.args):
                return self._computed(e)
            num, den = (self.from_sympy(a) for a in e.args)
            if den.value == 0 or not is_nonneg(den):  # Python divides by such, or raises
                return self._computed(e)
            return (floordiv if kind in ("FloorDiv", "CleanDiv") else mod)(num, den)
        if kind == "ModularIndexing":
            base, div, m = (self.from_sympy(a) for a in e.args)
            return mod(floordiv(base, div), m)
        if kind in ("Max", "Min"):
            pick = maximum if kind == "Max" else minimum
            out = self.from_sympy(e.args[0])
            for a in e.args[1:]:
                out = pick(out, self.from_sympy(a))
            return out
        return self._computed(e)

    def guarded(self, e: Any) -> int | None:
        """The value of a size that torch has guarded on: a broadcast was decided. Sums are many and
        seldom guarded on: only those that are 1 now are asked for."""
        env = self.shape_env
        if env is None or not hasattr(env, "_maybe_evaluate_static"):
            return None
        values = {s: _hint(env, s) for s in e.free_symbols}
        if any(v is None for v in values.values()):
            return None
        value = e.xreplace({s: sympy.Integer(v) for s, v in values.items()})
        if not value.is_Integer or (e.is_Add and value != 1):
            return None
        same = env._maybe_evaluate_static(sympy.Eq(e, value), axioms=None)
        return int(value) if same is not None and bool(same) else None

    def _computed(self, e: Any) -> Index:
        """A size that index algebra has no form for: a new symbol, evaluated at run time in
        Python."""
        from torch.utils._sympy.printers import PythonPrinter

        for s in e.free_symbols:
            self.symbol(s)
        hint = None
        values = {s: self.known[s.name].hint for s in e.free_symbols}
        if all(v is not None for v in values.values()):
            value = e.xreplace({s: sympy.Integer(v) for s, v in values.items()})
            hint = int(value) if value.is_number else None
        sym = self.number(PythonPrinter().doprint(e), self.lower_end(e), hint)
        return as_index(atom(sym))

    def number(self, text: str, low: int = UNKNOWN_LOW, hint: int | None = None) -> Sym:
        """A new symbol, whose value is that of a Python text over other symbols."""
        sym = Sym(f"z{len(self.computed)}", low, hint)
        self.known[sym.name] = sym
        self.computed[sym.name] = (sym, text)
        return sym

    def lower_end(self, e: Any) -> int:
        """What the number cannot be below, as far as torch knows the ranges of its symbols."""
        from torch.utils._sympy.value_ranges import bound_sympy

        env = self.shape_env
        if e.is_nonnegative or env is None:
            return 0
        try:
            end = bound_sympy(e, {s: env.var_to_range[s] for s in e.free_symbols}).lower
            return int(end) if end.is_finite else UNKNOWN_LOW
        except (KeyError, TypeError, ValueError, AttributeError, NotImplementedError):
            return UNKNOWN_LOW  # no range is known


def _at_least_one(e: Any) -> bool:
    return type(e).__name__ == "Max" and len(e.args) > 1 and sympy.Integer(1) in e.args


def _lowest(env: Any, s: Any) -> int:
    """The known lower end of a symbol's range; asks nothing that would add a guard."""
    value_range = getattr(env, "var_to_range", {}).get(s)
    if value_range is None:
        return 0
    lower = value_range.lower
    return int(lower) if getattr(lower, "is_Integer", False) else UNKNOWN_LOW


def _hint(env: Any, s: Any) -> int | None:
    """The value of a symbol in the traced call. The length of a nested tensor's jagged dimension
    has none: it stands for as many lengths as there are rows."""
    for table in ("backed_var_to_val", "var_to_val"):  # the newer name, the older
        if hasattr(env, table):
            value = getattr(env, table).get(s)
            return int(value) if getattr(value, "is_Integer", isinstance(value, int)) else None
    return None
