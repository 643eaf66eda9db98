"""Gradients that are 0, because a sum over rows is.

Who subtracts a number of each row from it (its maximum, so that no power overflows) before what
does not depend on it (a softmax) has a gradient of that number, too: minus the sum of the row's
gradients, which is 0.

    x[i, j] + f(sum over j of x[i, j])  =  x[i, j]        where the sum is 0, and f(0) is

In: a joint graph. Out: the same, in place, without what is added. That is less exact in no row: the
sum is what rounding left of 0. Where a row has infinities or no numbers, it keeps them.

That a sum is 0 follows from what is linear: products are taken apart into sums of monomials, whose
factors are nodes and sums of monomials over the same dimensions, so that ``sum e / sum e`` is 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import fx

from deuteron.base.record import Record
from deuteron.graph import ops
from deuteron.graph.edit import Editor, remove_dead

Monomial = frozenset[tuple[Any, int]]  # factors and their exponents; those are nodes, and `Total`s
Polynomial = dict[Monomial, float]
Total = tuple[Monomial, tuple[int, ...]]  # the sum of a monomial over dimensions, from the last one
ONE: Monomial = frozenset()
MAX_TERMS, MAX_DEPTH = 8, 10
EXACT = 1e-9  # coefficients that are as small beside those that they were summed from are 0
SAME = ("aten._to_copy", "aten.clone", "aten.alias", "aten.expand")  # of each place
ZERO_OF_ZERO = (*SAME, "aten.neg", "aten.mul", "aten.view", "aten.unsqueeze", "aten.squeeze")


def drop_vanishing(gm: fx.GraphModule, record: Record) -> int:
    """Takes away what is 0 of gradients; returns how many such terms there were."""
    count = 0
    for n in list(gm.graph.nodes):
        if name(n) != "aten.sum" or not keeps_dims(n):
            continue
        row = same(n.args[0])
        row = same(row.args[0]) if name(row) == "aten.neg" else row
        ends = list(added(n, row))
        if not ends or Sums().reduced(n, 0):
            continue
        for u, whole in ends:
            Editor(gm).replace(u, whole)
        count += len(ends)
    if count:
        remove_dead(gm.graph)
    return count


def name(n: Any) -> str:
    return ops.packet(n.target) if isinstance(n, fx.Node) and n.op == "call_function" else ""


def tensor(n: Any) -> bool:
    return isinstance(n, fx.Node) and isinstance(n.meta.get("val"), torch.Tensor)


def keeps_dims(n: fx.Node) -> bool:
    known = tensor(n) and all(type(e) is int for e in n.args[0].meta["val"].shape)
    return known and len(n.args) == 3 and bool(n.args[1]) and n.args[2] is True


def same(n: Any) -> Any:
    """The node whose numbers these are, but for repetition, and for rounding of other things than
    sums: what is divided by a rounded sum does not add up to 1."""
    while name(n) in SAME and n.meta["val"].is_floating_point():
        (source,) = n.all_input_nodes
        kind = source.meta["val"].dtype
        if not kind.is_floating_point or name(source) == "aten.sum" and n.meta["val"].dtype != kind:
            break
        n = source
    return n


def added(zero: fx.Node, row: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Sums of `row` and what is 0 where `zero` is, and of these `row` as it is added."""
    todo, seen = [zero], {zero}
    while todo:
        z = todo.pop()
        for u in z.users:
            if name(u) == "aten.add" and len(u.args) == 2 and not u.kwargs:
                others = [a for a in u.args if a is not z and tensor(a) and same(a) is row]
                for a in others:
                    old, new = u.meta["val"], a.meta["val"]
                    if (old.shape, old.dtype, old.stride()) == (new.shape, new.dtype, new.stride()):
                        yield u, a
            if u not in seen and is_zero(u, z):
                seen.add(u)
                todo.append(u)


def is_zero(n: fx.Node, zero: fx.Node) -> bool:
    if name(n) == "aten.div":
        return n.args[0] is zero
    if name(n) == "aten.scatter" and len(n.args) == 4:
        into, _, _, what = n.args
        return what is zero and name(into) == "aten.full" and into.args[1] == 0
    return name(n) in ZERO_OF_ZERO


class Sums:
    """Nodes as polynomials, each expanded once."""

    def __init__(self) -> None:
        self.known: dict[fx.Node, Polynomial] = {}

    def of(self, n: Any, depth: int = 0) -> Polynomial:
        if isinstance(n, (int, float)):
            return {ONE: float(n)}
        n = same(n)
        if n not in self.known:
            made = self.expanded(n, depth + 1) if depth < MAX_DEPTH else None
            if made is None or len(made) > MAX_TERMS:
                made = {frozenset({(n, 1)}): 1.0}
            self.known[n] = made
        return self.known[n]

    def expanded(self, n: fx.Node, depth: int) -> Polynomial | None:
        """None where it is no sum of products."""
        kind = name(n)
        if kind == "aten.sum":
            exact = keeps_dims(n) and n.meta["val"].dtype in (torch.float32, torch.float64)
            return self.reduced(n, depth) if exact else None
        if kind == "aten.neg":
            return times(self.of(n.args[0], depth), {ONE: -1.0})
        if kind not in ("aten.add", "aten.sub", "aten.mul", "aten.div"):
            return None
        if len(n.args) != 2 or n.kwargs or not n.meta["val"].is_floating_point():
            return None
        a, b = (self.of(x, depth) for x in n.args)
        if kind == "aten.mul":
            return times(a, b)
        if kind == "aten.div":
            if len(b) != 1:
                return None
            ((m, c),) = b.items()
            return times(a, {frozenset((f, -k) for f, k in m): 1 / c}) if c else None
        sign = 1.0 if kind == "aten.add" else -1.0
        return summed([*a.items(), *((m, sign * c) for m, c in b.items())])

    def reduced(self, n: fx.Node, depth: int) -> Polynomial:
        """A sum, before it is rounded."""
        shape = n.args[0].meta["val"].shape  # type: ignore[union-attr]
        dims = tuple(sorted(d % len(shape) - len(shape) for d in n.args[1]))  # type: ignore
        size = prod(shape[d] for d in dims)
        return summed(total(m, dims, size, c) for m, c in self.of(n.args[0], depth).items())


def summed(terms: Iterable[tuple[Monomial, float]]) -> Polynomial:
    out: Polynomial = {}
    most: Polynomial = {}
    for m, c in terms:
        out[m] = out.get(m, 0.0) + c
        most[m] = max(most.get(m, 0.0), abs(c))
    return {m: c for m, c in out.items() if abs(c) > EXACT * most[m]}


def times(a: Polynomial, b: Polynomial) -> Polynomial:
    return summed((product(m, n), c * d) for m, c in a.items() for n, d in b.items())


def product(m: Monomial, n: Monomial) -> Monomial:
    powers = Counter(dict(m))
    powers.update(dict(n))
    return frozenset((f, k) for f, k in powers.items() if k)


def total(
    m: Monomial, dims: tuple[int, ...], size: int, coefficient: float
) -> tuple[Monomial, float]:
    """The sum of a monomial over as many places: what is constant there is a factor of it."""
    constant = frozenset((f, k) for f, k in m if is_constant(f, dims))
    if constant == m:
        return m, coefficient * size
    return product(constant, frozenset({((m - constant, dims), 1)})), coefficient


def is_constant(factor: Any, dims: tuple[int, ...]) -> bool:
    if isinstance(factor, tuple):
        return set(dims) <= set(factor[1])
    shape = factor.meta["val"].shape if tensor(factor) else ()
    return all(-d > len(shape) or shape[d] == 1 for d in dims)


__all__ = ["drop_vanishing"]
