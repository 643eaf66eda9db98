"""Arithmetic of points that is the same along an axis: a program of a GPU that has several points
along it side by side does it once for them.

In: the expressions of a nest of points, its axes. Out: the `Shared` axis. The estimate (`profit`)
and the tiling of points ask the same question.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deuteron.ir.expr import Expr, own_flops
from deuteron.ir.index import Axis
from deuteron.schedule.group import Group
from deuteron.schedule.space import Map

# Points side by side at most, of a block of 2048, of which a thread has 16. H200, bf16, 8360
# queries of 32 channels that sample three images (200 FLOPs a place, once for all channels), us,
# with 1 channel, 4, 8, 16, 32 at a time: 805, 102, 53, 44, 59.
MOST_POINTS = 16
# FLOPs of a point that are saved at least, for it is read and stored in less: an assumption.
MIN_SAVED = 32.0


@dataclass(frozen=True)
class Shared:
    axis: Axis
    points: int  # along it, of one program
    share: float  # of the FLOPs, what is left


def shared(roots: Iterable[tuple[Expr, Map | None]], axes: Sequence[Axis]) -> Shared | None:
    """The axis along which most is the same, None where that is little. Each root may have its own
    axes, as indices over `axes`."""
    same, total = dict.fromkeys(axes, 0.0), 0.0
    seen: set[Expr] = set()
    for root, at in roots:
        for n in root.walk():
            each = own_flops(n)
            if not each or n in seen:
                continue
            seen.add(n)
            total += each
            own = n.axes() if at is None else {b for a in n.axes() if a in at for b in at[a].axes()}
            for a in same.keys() - own:
                same[a] += each
    best: Shared | None = None
    for a in axes:
        extent = a.extent.value or 1
        points = min(MOST_POINTS, extent & -extent)
        saved = same[a] * (1 - 1 / points)
        if saved >= max(MIN_SAVED, total / 2) and (best is None or 1 - saved / total < best.share):
            best = Shared(a, points, 1 - saved / total)
    return best


def shared_of(group: Group) -> Shared | None:
    """The same of what a group that only computes points does at each."""
    if group.reductions or any(m.kind != "point" for m in group.members):
        return None
    points = [m for m in group.members if m.level == "point"]
    if sum(m.effort for m in points) < MIN_SAVED:
        return None
    return shared(((m.compute.body, m.at) for m in points), group.space.axes)


__all__ = ["Shared", "shared", "shared_of"]
