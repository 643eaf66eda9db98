"""Uniform random numbers by blocks: four neighbours share a counter, so 64 cost what 16 cost alone.

In: the parts of a vector loop, its axis, and where a block begins. Out: the lines that fill a
block's numbers (`d_rand_lanes` of `support.h`), and where the loop finds them.
"""

from __future__ import annotations

from collections.abc import Iterable

from deuteron.codegen.cpp.environment import Env
from deuteron.codegen.loops import Statement, roots_of, unique_nodes
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis

RANDOM_BLOCK = 64  # a block is a multiple of it


def neighbouring_randoms(
    env: Env, parts: Iterable[Statement], axes: tuple[Axis, ...]
) -> list[Expr]:
    """The numbers of neighbouring elements along the loop's axis (the first of `axes`)."""
    axis, inner = axes[0], frozenset(axes)
    out = []
    for n in unique_nodes(r for p in parts for r in roots_of(p)):
        if n.op == "random" and n.attr[0] == "rand" and n.dtype == "f32":
            c = n.attr[2].coefficient(axis)
            if c is not None and c.value == 1 and not env.em.deps(n.args[0]) & inner:
                out.append(n)
    return out


def random_block(env: Env, node: Expr, axis: Axis, start: str, count: int) -> str:
    """Declares an array with the numbers from `start` on and fills it; returns its name."""
    em = env.em
    name = em.fresh("random")
    seed = em.value(node.args[0])
    em.name_axis(axis, start)
    with em.inside(axis) as scope:
        first = em.index(node.attr[2])
    em.used |= {"d_rand_lanes", "d_philox"}
    em.scope.add(
        *scope.lines,
        f"alignas(64) float {name}[{count}];",
        f"d_rand_lanes<{count}>({name}, {seed}, {node.attr[1]}, {first});",
    )
    return name


__all__ = ["RANDOM_BLOCK", "neighbouring_randoms", "random_block"]
