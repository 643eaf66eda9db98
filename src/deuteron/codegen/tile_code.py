"""Tile code: what a program of a kernel does, in operations on tiles. Between nests and text.

A `Value` spans some of the tiling's dimensions, in their order; operations spread what they are
given over the dimensions of their result. A target prints this and chooses nothing.

    Let(value, kind, args, attr)
        place    args (), attr (dimension, below, extent): the value of an axis
        index    args the axes' values, attr (Index, {axis: value}): a number of an index
        load     args (address[, mask]), attr (tensor, fill)
        fetch    args (first place along each of its dimensions), attr (tensor, `Box`): what is
                 there, 0 outside of the tensor
        put      args (x, first place along each of its dimensions), attr (tensor, `Box`): stores x
                 there; what lies outside of the tensor is left out
        op       args of a scalar operation, attr its name
        cast     args (x,), attr the source's dtype
        literal  attr the number
        random   args (seed, element), attr (distribution, stream, dimension or None): numbers of
                 elements, as `ir.expr.random`; with a dimension, which the element lacks, those of
                 4 * element and its neighbours along it. "rand<n": whether below n * 2^-24
        full     attr the number: a tile of it
        inside   args (), attr the dimension: where its places exist
        spread   args (x,): x over all of the value's dimensions
        reduce   args (x,), attr (kind, dimensions): those of x that the value lacks
        dot      args (a, b, accumulator), attr (m, k, n, operands): a[m, k] b[k, n], whose
                 factors are of this dtype, or f32 that are rounded to "tf32"
        edge     args (), attr (dimension, whether the last): the first or last place of its block
    Loop(dim, start, stop, carried, body)
        over the blocks of a dimension, of those with places from `start` to before `stop` (None:
        all); `carried` are (variable, next value) pairs, of which the
        variables exist before the loop and have the last value after it
    Write(tensor, address, value, mask)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Value:
    name: str
    dims: tuple[str, ...]
    dtype: str


@dataclass(frozen=True)
class Let:
    value: Value
    kind: str
    args: tuple[Value, ...] = ()
    attr: Any = None


@dataclass
class Loop:
    dim: str
    start: Value | None = None
    stop: Value | None = None
    carried: list[tuple[Value, Value]] = field(default_factory=list)
    body: list[Code] = field(default_factory=list)


@dataclass(frozen=True)
class Write:
    tensor: str
    address: Value
    value: Value
    mask: Value | None


Code = Let | Loop | Write

__all__ = ["Code", "Let", "Loop", "Value", "Write"]
