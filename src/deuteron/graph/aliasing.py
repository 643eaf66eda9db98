"""Which results share memory, and which replacements would change what a caller can observe of it.

In: a functional graph. Two graph outputs that share storage behave as one tensor for the caller's
in-place writes, and so does an output that shares storage with an input. A rewrite may not create
such sharing where the traced program has none, and may not read an input's storage where the
traced program reads a copy made before the input is written.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import sympy
import torch
from torch import fx

from deuteron.graph import ops


def exposed(graph: fx.Graph) -> list[fx.Node]:
    """Nodes whose layout in memory must stay as traced: results that share a storage or whose
    elements overlap, and what `ops.STRIDED_OPERATORS` read."""
    nodes = graph.output_node().all_input_nodes
    results = graph.output_node().args[0]
    given = results if isinstance(results, (tuple, list)) else [results]
    times = Counter(ops.storage_of(n) for n in given if isinstance(n, fx.Node))
    shown = [n for n in nodes if times[ops.storage_of(n)] > 1 or overlaps(ops.tensor_of(n))]
    read = [b for n in graph.nodes for b in ops.placed(n)]
    return [n for n in dict.fromkeys((*shown, *read)) if ops.storage_of(n) is not None]


def overlaps(t: torch.Tensor | None) -> bool:
    """Whether elements share memory, but for those of broadcast dimensions: one dimension's stride
    is so many of another's that the other reaches it, or the innermost ones tell as far as they are
    numbers."""
    if t is None or t.layout != torch.strided:
        return False
    pairs = [(s, n) for s, n in zip(t.stride(), t.shape) if type(n) is not int or n > 1]
    steps = [s if type(s) is int else s.node.expr for s, _ in pairs]
    if any(s != 0 and s in steps[:k] for k, s in enumerate(steps)):
        return True
    for (a, (_, n)), (b, (_, m)) in itertools.permutations(zip(steps, pairs), 2):
        ratio = times(b, a) if type(n) is int else None  # windows: their elements, and their starts
        if ratio and 0 < ratio.p < n and (type(m) is not int or ratio.q < m):
            return True
    reach = 1
    known = [(s, n) for s, n in pairs if type(s) is int and s]
    for stride, n in sorted(known, key=lambda pair: pair[0]):
        if stride < reach:
            return True
        if type(n) is not int:
            return False
        reach += stride * (n - 1)
    return False


def times(a: Any, b: Any) -> Any:
    """The number k with a = k * b for all sizes, as far as that shows; else None."""
    if type(a) is int or type(b) is int:
        return None
    x, y = (sympy.expand(e).as_coefficients_dict() for e in (a, b))
    ratios = {x[term] / y[term] for term in y} if x.keys() == y.keys() else set()
    return ratios.pop() if len(ratios) == 1 else None


class Aliasing:
    """Storages of a graph's inputs and outputs, kept up to date while nodes are replaced."""

    def __init__(self, graph: fx.Graph) -> None:
        self._storage: dict[fx.Node, Any] = {}
        self.inputs = {self.storage(n) for n in graph.find_nodes(op="placeholder")} - {None}
        output = next(iter(reversed(graph.nodes)))
        self.outputs = {self.storage(n) for n in output.all_input_nodes} - {None}
        self.direct = set(output.all_input_nodes)
        self.exposed = {self.storage(n) for n in exposed(graph)}
        self.written: set[Any] = set()
        for n in graph.nodes:
            if n.op == "call_function" and ops.is_mutating(n):
                for a, s in zip(n.target._schema.arguments, n.args):
                    if (
                        a.alias_info is not None
                        and a.alias_info.is_write
                        and isinstance(s, fx.Node)
                    ):
                        self.written.add(self.storage(s))

    def storage(self, n: fx.Node) -> Any:
        """The storage that `n` has at run time; a node that took another's place has its own."""
        if n not in self._storage:
            self._storage[n] = ops.storage_of(n)
        return self._storage[n]

    def may_replace(self, old: fx.Node, new: fx.Node) -> bool:
        """May the users of `old` read `new` instead?"""
        a, b = self.storage(old), self.storage(new)
        if a is None or b is None or a == b:
            # The same storage: only the identity of the tensor object changes. An output stays an
            # own tensor.
            return not (old in self.direct and (new in self.direct or new.op == "placeholder"))
        # Of an exposed storage other nodes are views, whose traces would still say so.
        if b in self.written or a in self.exposed:
            return False
        if a in self.outputs:
            return b not in self.inputs and b not in self.outputs
        return True

    def replaced(self, old: fx.Node, new: fx.Node) -> None:
        """To be called when `new` took the place of `old`, before `old` is erased."""
        a, b = self.storage(old), self.storage(new)
        if a != b and a is not None and a in self.outputs:
            self.outputs.add(b)
        if old in self.direct:
            self.direct.add(new)
