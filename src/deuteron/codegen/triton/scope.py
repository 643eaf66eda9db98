"""Dimensions of a tile, and loop levels: where an `emit.Emitter` writes its lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deuteron.codegen import placing
from deuteron.ir.index import Axis, Index, product

Dims = frozenset[str]
NONE: Dims = frozenset()
X: Dims = frozenset("x")
R: Dims = frozenset("r")
PART: Dims = frozenset(("part",))  # what a block of r has one of: see `Dim.parts`
FULL: Dims = X | R


@dataclass(frozen=True)
class Dim:
    """A dimension of the tile: `axes` flattened (the last one fastest), walked in blocks of `block`
    (a constexpr).
    """

    name: str  # "x", "y", "p" (which group of a row), "r"
    axes: tuple[Axis, ...]
    block: str
    place: int  # position in the tile
    masked: bool  # whether a block may reach beyond the end
    prefix: str = ""  # of its variables: see `Emitter.widened`
    fixed: tuple[Axis, ...] = ()  # axes of which a block has one place
    # Outer axes, each place of which is a part: a whole number of blocks, walked one by one.
    parts: tuple[Axis, ...] = ()

    @property
    def stem(self) -> str:
        """What the names of its variables begin with."""
        return self.prefix + self.name

    @property
    def count(self) -> Index:
        return product(a.extent for a in self.axes)

    def slice(self, rank: int) -> str:
        """What turns a one-dimensional tensor into one along this dimension of the tile."""
        each = [":" if k == self.place else "None" for k in range(rank)]
        return "" if rank == 1 else f"[{', '.join(each)}]"


class Scope(placing.Scope[str]):
    """One loop level, which gives the dimensions that are known in it."""

    __slots__ = ("axes", "sums")

    def __init__(self, given: Dims) -> None:
        super().__init__(given)
        self.sums: dict[object, str] = {}
        self.axes: dict[Axis, str] = {}

    def block(self, head: str, lines: Sequence[str]) -> None:
        """Appends ``head:`` and the lines under it."""
        self.lines.append(f"{head}:")
        self.lines.extend("    " + line for line in lines or ["pass"])


def bound_name(axis: Axis) -> str:
    """The dimension that stands for an axis of a reduction inside an expression."""
    return f"bound {axis.key}"


__all__ = ["FULL", "NONE", "PART", "R", "X", "Dim", "Dims", "Scope", "bound_name"]
