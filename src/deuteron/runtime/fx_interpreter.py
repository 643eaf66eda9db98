"""The graph as it was traced, run by ATen node by node: what the self-check compares lowering with.

In: an FX graph before any rewrite, and which of its nodes the program's tensors are
(`Program.nodes`). Out: `FxInterpreter.value`, that of a node, made of tensors that were found right
before and of the call's arguments. A node that draws random numbers, writes in place or calls what
is no operator has a value only if a kernel or a call has made it.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

ATEN = torch.ops.aten
# On tensors whose strides are not the traced ones a view may be a copy.
COPYING_VARIANTS = {
    ATEN.view.default: ATEN.reshape.default,
    ATEN._unsafe_view.default: ATEN.reshape.default,
}


class UnknownValue(Exception):
    """A node whose value cannot be computed apart from the program."""


class FxInterpreter:
    """A copy of a graph, made before it is rewritten."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        for n in gm.graph.nodes:
            n.meta["traced"] = n.name  # rewrites may use its name again, for something else
        graph = copy.deepcopy(gm.graph)
        self.nodes = {n.name: n for n in graph.nodes}
        self.placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        outputs = next(n for n in graph.nodes if n.op == "output").args[0]
        self.outputs: list[Any] = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        self.tensors: dict[str, str] = {}  # node -> the program's tensor that it is

    def name(self, nodes: Mapping[str, str]) -> None:
        """`nodes`: for a tensor of the program the node that it is."""
        self.tensors = {node: tensor for tensor, node in nodes.items() if node in self.nodes}

    def value(
        self,
        node: fx.Node,
        args: Sequence[Any],
        known: Mapping[str, Tensor],
        change: Callable[[Tensor], Tensor] = lambda t: t,
    ) -> Any:
        """The value of a node; raises `UnknownValue`. `known`: tensors of the program that are
        right. `change` is done to every tensor that it starts from."""
        given = dict(zip(self.placeholders, args, strict=True))
        made: dict[fx.Node, Any] = {}
        todo = [node]
        while todo:
            n = todo[-1]
            if n in made:
                todo.pop()
                continue
            if n in given:
                x = given[n]
                made[n] = change(x) if isinstance(x, Tensor) else x
                continue
            if n is not node and self.tensors.get(n.name) in known:
                made[n] = change(known[self.tensors[n.name]])
                continue
            missing = [a for a in n.all_input_nodes if a not in made]
            if missing:
                todo += missing
                continue
            made[todo.pop()] = self.run(n, made)
        return made[node]

    def run(self, n: fx.Node, made: Mapping[fx.Node, Any]) -> Any:
        if n.op == "get_attr":
            return operator.attrgetter(str(n.target))(self.gm)
        target: Any = n.target
        if isinstance(target, torch._ops.OpOverload):
            random = torch.Tag.nondeterministic_seeded in target.tags
            if random or target._schema.is_mutable or target is ATEN.as_strided.default:
                raise UnknownValue(str(target))
        elif n.op != "call_function" or isinstance(target, torch._ops.HigherOrderOperator):
            raise UnknownValue(str(target))
        args = fx.map_arg(n.args, lambda a: made[a])
        kwargs = fx.map_arg(n.kwargs, lambda a: made[a])
        return COPYING_VARIANTS.get(target, target)(*args, **kwargs)


__all__ = ["FxInterpreter", "UnknownValue"]
