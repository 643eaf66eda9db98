"""Tilings: how programs and loops walk the axes of a nest with products.

    Tiling    every axis is in one dimension, an ordered group of axes that is walked as one:
              grid    a program has `block` neighbouring places of it (1: a scalar)
              loop    a program walks it in blocks
              whole   a program has all of it at once, in a block that is a power of two

`schedule.tile` lists and estimates them; a printer gets one and chooses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property

from deuteron.ir.index import Axis, Index, hint, product


@dataclass(frozen=True)
class Dim:
    name: str
    axes: tuple[Axis, ...]
    mode: str  # "grid" | "loop" | "whole"
    block: int

    @cached_property
    def size(self) -> Index:
        """Places; how many may be known at run time only."""
        return product(a.extent for a in self.axes)

    @cached_property
    def extent(self) -> int:
        """Places, as far as estimates go."""
        return hint(self.size)

    @cached_property
    def count(self) -> int:
        """Blocks."""
        return -(-self.extent // self.block)

    @property
    def ragged(self) -> bool:
        """Whether the last block may have places that do not exist."""
        return (self.size % self.block).value != 0

    def varies(self, axes: AbstractSet[Axis]) -> tuple[bool, bool]:
        """Whether a value on these axes can differ within a block, and between two blocks: in
        blocks of 64, the quotient of a place by 64 is one number, and the remainder what it was."""
        extents = [a.extent.value for a in self.axes if a.extent.value is not None]
        if self.ragged or len(self.axes) == 1 or len(extents) < len(self.axes):
            here = not axes.isdisjoint(self.axes)
            return here and self.block > 1, here
        inside, between, below = False, False, 1
        for a, extent in zip(reversed(self.axes), reversed(extents), strict=True):
            if a in axes:
                inside |= below % self.block != 0
                between |= self.block % (below * extent) != 0
            below *= extent
        return inside, between


@dataclass(frozen=True)
class Tiling:
    """`dims` in the order in which values have them: for each contraction m, k, n."""

    dims: tuple[Dim, ...]
    num_warps: int  # 0: a program is a thread
    num_stages: int
    efficiency: float = 1.0  # the share of the tensor cores' rate that such blocks reach
    fetches: bool = False  # factors of contractions come as boxes (`boxes.box_of`), where they can
    puts: bool = False  # results go as boxes
    persistent: int = 0  # programs at most, which then walk the blocks of the grid; 0: one for each

    def dim_of(self, axis: Axis) -> Dim:
        return next(d for d in self.dims if axis in d.axes)

    def programs(self) -> int:
        return math.prod(d.count for d in self.dims if d.mode == "grid")

    def grid(self) -> int:
        """Programs that are launched."""
        return min(self.programs(), self.persistent or self.programs())

    def __str__(self) -> str:
        parts = [f"{d.name} {d.mode} {d.block}" for d in self.dims]
        launch = f"; {self.num_warps} warps, {self.num_stages} stages" if self.num_warps else ""
        launch += ", fetches" * self.fetches + ", puts" * self.puts
        launch += f", {self.persistent} persistent" if self.persistent else ""
        return ", ".join(parts) + launch


__all__ = ["Dim", "Tiling"]
