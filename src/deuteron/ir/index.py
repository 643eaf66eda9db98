"""Integer index algebra: canonical polynomials over axes, sizes, div, mod and loaded values.

An `Index` is an immutable, interned sum of monomials with integer coefficients. Its atoms are

* `Sym`    a symbolic size (a non-negative integer known at run time),
* `Axis`   a loop variable that runs over ``0 <= axis < extent``,
* `Div`, `Mod`  floor division and modulo by a positive index,
* `MinMax` the smaller or larger of two indices,
* `Value`  an integer that the program computes (a gather's index).

Equal polynomials are the same object, so ``is`` and ``==`` agree and hashing is cheap. All
rewriting that needs facts about ranges (``(i*64 + j)//64 == i`` for ``0 <= j < 64``) asks
`is_nonneg` and `in_range`, which work on symbolic sizes: a polynomial in sizes is
non-negative when it is so after substituting ``size = lowest + t`` with ``t >= 0``.

The parts, each importing those before: `ir.polynomial` (atoms, sums, products), `ir.division`
(quotients and proofs about ranges), `ir.evaluate` (integers), `ir.ranges` (limits as numbers).
Import the names from here.
"""

from __future__ import annotations

from deuteron.ir.division import (
    bound,
    floordiv,
    in_range,
    is_nonneg,
    maximum,
    minimum,
    mod,
    split_points,
    substitute,
)
from deuteron.ir.evaluate import evaluate, hint
from deuteron.ir.polynomial import (
    Atom,
    Axis,
    Div,
    Index,
    IndexLike,
    MinMax,
    Mod,
    Monomial,
    Sym,
    Value,
    as_index,
    atom,
    const,
    divide_exact,
    product,
)
from deuteron.ir.ranges import determined, fits, fits_int

__all__ = [
    "Atom",
    "Axis",
    "Div",
    "Index",
    "IndexLike",
    "MinMax",
    "Mod",
    "Monomial",
    "Sym",
    "Value",
    "as_index",
    "atom",
    "bound",
    "const",
    "determined",
    "divide_exact",
    "evaluate",
    "fits",
    "fits_int",
    "floordiv",
    "hint",
    "in_range",
    "is_nonneg",
    "maximum",
    "minimum",
    "mod",
    "product",
    "split_points",
    "substitute",
]
