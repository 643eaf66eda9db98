"""The table of rewrites."""
from __future__ import annotations
from torch import fx
from deuteron.base.record import Record

def rewrite(gm: fx.GraphModule, record: Record) -> fx.GraphModule:
    gm.graph.eliminate_dead_code()
    return gm
