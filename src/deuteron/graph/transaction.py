"""Rewrites that may fail: what one did is undone, the Record says so, and the compile goes on.

In: a graph and a `Rewrite`. Out: what the rewrite returns; where it raises, None, and the module
has a graph with the same nodes, arguments and fake values as before. Nodes held from before are
then no longer the graph's. A `Snapshot` takes about a microsecond for a node; only `restore` makes
nodes.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from deuteron.base.record import Record

# The attribute by which an exception says at which node a rewrite was.
FAILED_NODE_ATTRIBUTE = "deuteron_node"
PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Rewrite:
    """`apply` changes a graph in place and returns how much; 0: it is as it was."""

    name: str
    apply: Callable[[fx.GraphModule, Record], Any]


class Snapshot:
    """What a graph was like."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm, self.codegen = gm, gm.graph._codegen
        self.nodes = [
            (n, n.op, n.target, n.args, n.kwargs, n.name, n.type, dict(n.meta))
            for n in gm.graph.nodes
        ]

    def restore(self) -> None:
        """Gives the module a graph like that."""
        graph = fx.Graph(tracer_cls=getattr(self.gm.graph, "_tracer_cls", None))
        made: dict[fx.Node, fx.Node] = {}
        for node, op, target, args, kwargs, name, kind, meta in self.nodes:
            args, kwargs = fx.map_arg((args, kwargs), made.__getitem__)
            made[node] = graph.create_node(op, target, args, kwargs, name, kind)
            made[node].meta = dict(meta)
        graph.set_codegen(self.codegen)
        self.gm.graph = graph


def attempt(
    gm: fx.GraphModule, record: Record, rewrite: Rewrite, before: Snapshot | None = None
) -> Any:
    """What the rewrite returns; None where it failed. `before`: the graph as it is now."""
    before, count = before or Snapshot(gm), len(record.entries)
    try:
        return rewrite.apply(gm, record)
    except Exception as e:  # noqa: BLE001 - whatever it is, it ends the rewrite and not the compile
        before.restore()
        del record.entries[count:]  # decisions that do not hold
        failed(record, rewrite.name, e)
        return None


def failed(record: Record, name: str, e: Exception) -> None:
    """Says in the Record that a rewrite failed: which, at which node, where in its code, why."""
    frames = traceback.extract_tb(e.__traceback__)
    ours = [f for f in frames if Path(f.filename).is_relative_to(PACKAGE)] or frames
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
    record.add(
        "decision",
        subject="rewrite",
        accepted=False,
        reason="it failed and was undone",
        detail=f"{type(e).__name__} at {place}: {e}".splitlines()[0],
        first=name,
        second=getattr(e, FAILED_NODE_ATTRIBUTE, ""),
        bytes=0,
        us=0.0,
    )


__all__ = ["FAILED_NODE_ATTRIBUTE", "Rewrite", "Snapshot", "attempt", "failed"]
