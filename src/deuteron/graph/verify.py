"""Verifier of ATen graphs: names the first broken invariant, the node and the guilty pass.

In: a graph with fake values. Out: nothing, or a `VerifyError`. Invariants by name

    order    a node's arguments are nodes of this graph, each before it
    values   what an operator returns has a fake value; not asked of what Dynamo captured
    results  the graph ends with one output node
"""

from __future__ import annotations

import torch
from torch import fx

from deuteron.ir.verify import Fault, error


def verify_graph(gm: fx.GraphModule, guilty: str, traced: bool = True) -> None:
    """Raises `VerifyError` for the first invariant that the graph breaks."""
    seen: set[fx.Node] = set()
    last = None
    for last in gm.graph.nodes:
        try:
            verify_node(last, seen, traced)
        except Fault as fault:
            raise error(fault, last.name, (), guilty) from None
        seen.add(last)
    if last is None or last.op != "output":
        missing = Fault("results", "the last node is no output")
        raise error(missing, getattr(last, "name", "the whole graph"), (), guilty)


def verify_node(node: fx.Node, seen: set[fx.Node], traced: bool) -> None:
    for given in node.all_input_nodes:
        if given not in seen:
            raise Fault("order", f"its argument {given} does not come before it")
    if node.op == "output" and node.users:
        raise Fault("results", "it is read")
    returns = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.returns
    if traced and returns and "val" not in node.meta:
        raise Fault("values", f"{node.target} has no fake value")


def graph_text(gm: fx.GraphModule) -> str:
    """The graph as a Python program."""
    text: str = gm.print_readable(print_output=False)
    return text


__all__ = ["graph_text", "verify_graph"]
