"""Saved tensors whose memory a backward may write into."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

DONATED_META = "deuteron_donated"


def mark_donated(forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Marks the backward's placeholders whose memory nobody else sees: tensors saved for it alone.
    It may overwrite them, unless the graph is retained for another backward."""
    results = list(next(iter(reversed(forward.graph.nodes))).args[0])
    seen: dict[Any, int] = {}
    others = [
        *forward.graph.find_nodes(op="placeholder"),
        *results,
        *next(iter(reversed(backward.graph.nodes))).args[0],
    ]
    for n in dict.fromkeys(n for n in others if isinstance(n, fx.Node)):
        for memory in _memories(n):
            seen[memory] = seen.get(memory, 0) + 1
    saved = {
        n.name
        for n in results[num_fwd_outputs:]
        if isinstance(n, fx.Node) and n.op != "placeholder" and n not in results[:num_fwd_outputs]
        if [seen[m] for m in _memories(n)] == [1]
    }
    for n in backward.graph.find_nodes(op="placeholder"):
        if n.name in saved:
            n.meta[DONATED_META] = True


def _memories(n: fx.Node) -> list[Any]:
    val = n.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.layout != torch.strided:
        return []
    return [torch.multiprocessing.reductions.StorageWeakRef(val.untyped_storage())]


def donated_inputs(gm: fx.GraphModule) -> frozenset[int]:
    """Positions of the inputs that `mark_donated` marked."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return frozenset(i for i, n in enumerate(placeholders) if n.meta.get(DONATED_META))
