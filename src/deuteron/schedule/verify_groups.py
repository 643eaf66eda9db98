"""Verifier of groups, between the passes of scheduling: names the first broken invariant, the group
and the guilty pass.

In: the `Dag` of groups and library calls. Out: nothing, or a `VerifyError`. Invariants by name

    edges   what comes before a node knows that the node comes after it, and the other way round
    order   nodes stand behind what must come before them, so that there are no cycles
    home    who makes a tensor that somebody reads is a node of the graph, and makes it
    groups  every member finds what it reads at its point of the loops, and before it is overwritten
"""

from __future__ import annotations

from collections.abc import Mapping

from deuteron.ir.program import Extern, Layout
from deuteron.ir.verify import Fault, error, label
from deuteron.schedule.dag import Dag, Node
from deuteron.schedule.legality import consistent


def verify_groups(dag: Dag, layouts: Mapping[str, Layout], guilty: str) -> None:
    """Raises `VerifyError` for the first invariant that the graph breaks."""
    for node in dag.nodes.values():
        try:
            verify_edges(dag, node)
            if not isinstance(node.content, Extern):
                refusal = consistent(node.content, layouts, dag.owner)
                if refusal is not None:
                    raise Fault("groups", f"{refusal.reason}: {refusal.detail}")
        except Fault as fault:
            origins = node.content.origins if isinstance(node.content, Extern) else ()
            raise error(fault, name_of(node), origins, guilty) from None
    for tensor, home in dag.home.items():
        try:
            verify_home(dag, tensor, home)
        except Fault as fault:
            raise error(fault, tensor, (), guilty) from None


def verify_edges(dag: Dag, node: Node) -> None:
    label_of = dag.order_of.label
    for k in node.before | node.after:
        if k not in dag.nodes:
            raise Fault("edges", f"node {k} is gone")
    for k in node.before:
        if node.id not in dag.nodes[k].after:
            raise Fault("edges", f"{name_of(dag.nodes[k])} does not know that it comes first")
        if label_of[k] >= label_of[node.id]:
            raise Fault("order", f"it stands before {name_of(dag.nodes[k])}, which it needs")
    for k in node.after:
        if node.id not in dag.nodes[k].before:
            raise Fault("edges", f"{name_of(dag.nodes[k])} does not know that it comes later")


def verify_home(dag: Dag, tensor: str, home: int) -> None:
    readers = dag.readers.get(tensor, ())
    if not readers:
        return
    if home not in dag.nodes:
        raise Fault("home", f"nobody makes it, and {len(readers)} nodes read it")
    made = dag.nodes[home].content
    names = made.names if isinstance(made, Extern) else {*made.names, *made.partials.values()}
    if tensor not in names:
        raise Fault("home", f"{name_of(dag.nodes[home])} does not make it")


def name_of(node: Node) -> str:
    if isinstance(node.content, Extern):
        return label(node.content)
    return f"the group of {', '.join(m.name for m in node.content.members)}"


__all__ = ["verify_groups"]
