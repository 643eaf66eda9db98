"""The one shim for the likely values of symbolic sizes. Asks nothing that would add a guard.

In: a Python number, SymInt or fake tensor. Out: an int. A size that is known only at run time
(unbacked) counts as `FALLBACK_SIZE`.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch

# Elements that an unbacked size is taken to have: only the order of magnitude matters, and only to
# a cost model.
FALLBACK_SIZE = 4096


class Hints:
    """Likely values, each expression evaluated once."""

    def __init__(self) -> None:
        self._cache: dict[Any, int] = {}

    def size(self, x: Any) -> int:
        if not isinstance(x, torch.SymInt):
            return int(x)
        expr = x.node.expr
        known = self._cache.get(expr)
        if known is None:
            known = self._cache[expr] = self._evaluate(expr, getattr(x.node, "shape_env", None))
        return known

    def numel(self, t: torch.Tensor) -> int:
        n = 1
        for s in t.shape:
            n *= self.size(s)
        return n

    def bytes(self, val: Any) -> int:
        """Bytes of a tensor's elements, or of all tensors in a tuple, list or dict."""
        if isinstance(val, torch.Tensor):
            return self.numel(val) * val.dtype.itemsize
        if isinstance(val, (tuple, list)):
            return sum(self.bytes(v) for v in val)
        if isinstance(val, dict):
            return sum(self.bytes(v) for v in val.values())
        return 0

    def _evaluate(self, expr: Any, env: Any) -> int:
        # The table of likely values has one name in torch 2.13 and another in 2.11.
        known = getattr(env, "backed_var_to_val", None)
        if known is None:
            known = getattr(env, "var_to_val", {})
        try:
            values = {s: sympy.Integer(int(known.get(s, FALLBACK_SIZE))) for s in expr.free_symbols}
            return max(0, int(expr.xreplace(values)))
        except (TypeError, ValueError, ZeroDivisionError, OverflowError):
            return FALLBACK_SIZE
