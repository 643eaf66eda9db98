"""Loads of whole blocks of rows where lanes that load for themselves would ask too often.

In: the state inside of a nest of rows, an unconditional load. Out: text, or None.

    runs    what is the same for runs of a row's elements (a scale for 128 weights) is read once for
            each run
    pairs   of what is read at even and at odd elements both come in one block: lanes that skip
            elements read them one by one

Instructions of a thread (sm_90): group norm of bf16 with weights of channels of 64 584 and so 432,
rows of 32 x 64 with a scale for each 64 320 and 224, one row by int8 weights with one for each 128
408 and 296; by int4 weights 520 (80 registers), with runs 464 (64), with runs and pairs 384 (37).
"""

from __future__ import annotations

from math import gcd

from deuteron.codegen.triton.scope import Dim
from deuteron.codegen.triton.state import TileState
from deuteron.ir.expr import Expr
from deuteron.ir.index import Index, const

MIN_RUN = 16  # elements


def row_load(em: TileState, node: Expr) -> str | None:
    r = em.dims.get("r")
    if r is None or em.rank != 2 or em.rotation is not None or r.parts or "r" not in em.starts:
        return None
    return _of_runs(em, node, r) or _of_pair(em, node, r)


def _of_runs(em: TileState, node: Expr, r: Dim) -> str | None:
    address = node.attr[1][0]
    used = [a for a in r.axes if a in address.axes()]
    steps = [address.coefficient(a) or const(0) for a in used]
    base = address - sum((a.index * s for a, s in zip(used, steps, strict=True)), const(0))
    digits = [em.digit(r, a) for a in used]
    run = gcd(*(below.value or 1 for below, _ in digits))
    run &= -run  # lanes are powers of two
    if run < MIN_RUN or em.starts["r"] != "0" or "r" in em.index_deps(base):
        return None
    number = _lanes(em, r, f"{r.block} // {run}")
    place = []
    for (below, inner), a, step in zip(digits, used, steps, strict=True):
        digit = number if below.value == run else f"({number} // {(below.value or run) // run})"
        digit += f" % ({em.index(a.extent)})" * inner
        place.append(digit if step.value == 1 else f"{digit} * ({em.index(step)})")
    block = _block(em, node, base, " + ".join(place), f"{number} * {run} < rnumel" * r.masked)
    return f"libm.in_runs({block}, {run})"


def _of_pair(em: TileState, node: Expr, r: Dim) -> str | None:
    name, (address, *_), _ = node.attr
    pairs = sum((2 * a.index * em.digit(r, a)[0] for a in r.axes), const(0))
    odd = dict((address - pairs).terms).get((), 0) % 2
    base = address - pairs - odd
    if "r" in em.index_deps(base) or (name, (address + (1 - 2 * odd),)) not in em.read:
        return None
    scope, key = em.chain[em.level(em.index_deps(address))], (name, base, "pairs")
    if key not in scope.sums:
        start = em.starts["r"]
        number = _lanes(em, r, f"2 * {r.block}") + f" + 2 * ({start})" * (start != "0")
        block = _block(em, node, base, number, f"{number} < 2 * rnumel" * r.masked)
        scope.sums[key] = f"{em.fresh('even')}, {em.fresh('odd')}"
        scope.add(f"{scope.sums[key]} = libm.in_pairs({block})")
    return scope.sums[key].split(", ")[odd]


def _lanes(em: TileState, r: Dim, count: str) -> str:
    wide = "" if em.index_type == "tl.int32" else f".to({em.index_type})"
    return f"tl.arange(0, {count}){r.slice(em.rank)}{wide}"


def _block(em: TileState, node: Expr, base: Index, place: str, inside: str) -> str:
    """What is read at places along r behind `base`, which does not depend on r."""
    name, (address, *_), _ = node.attr
    rows = em.index_deps(address) - {"r"}
    first = em.spread(em.index(base), em.index_deps(base), rows)
    where = " & ".join(filter(None, [f"({inside})" * bool(inside), em.mask(rows)]))
    policy = em.policies.get(node)
    more = f", {where}, other=0" * bool(where)
    more += f', eviction_policy="{policy}"' if policy else ""
    return f"tl.load({em.pointers[name]} + {first} + {place}{more})"


__all__ = ["row_load"]
