"""Stores of a Triton kernel: masks, neighbours stored together, atomic updates."""

from __future__ import annotations

from deuteron.base.errors import UnsupportedOp
from deuteron.codegen.loops import Loops, Write
from deuteron.codegen.triton.emit import Emitter
from deuteron.codegen.triton.scope import FULL, Dims
from deuteron.ir.expr import Expr
from deuteron.ir.operations import ITEMSIZE


def reads_once(loops: Loops) -> bool:
    """Whether no element is read in two ways, of which one could come after what overwrites it."""
    reads = [n.attr[:2] for n in loops.nodes if n.op == "load" and n.attr[1]]
    return len(set(reads)) == len(reads)


def stores(em: Emitter, writes: list[tuple[Write, Dims]], once: str = "") -> None:
    """Stores at the dimensions given; all values first. `once`: a condition that one of the
    programs that share a row fulfils, which stores what they all have of it.

    A row's value is read by every thread that has elements of the row, and stored by one. Where
    the memory that is stored to may be what others still have to read, they meet before.
    """
    lines = []
    if "r" in em.dims and any(
        "r" not in d and (w.tensor, w.address) in em.barrier_stores for w, d in writes
    ):
        lines.append("tl.debug_barrier()")
    for w, dims in writes:
        if w.unrolled_axis is not None:
            lines.append(together(em, w, dims))
            continue
        value = em.value(w.value)
        masks = [em.value(w.mask)] if w.mask is not None else []
        place = em.pointer_text(w.tensor, w.address, dims)
        bounds = em.mask(dims)
        alone = [once] if once and "r" not in dims else []
        where = " & ".join([*([bounds] if bounds else []), *masks, *alone])
        mask = f", {where}" if where else ""
        em.guard("store", w.tensor, w.address, dims, where, em.scope)
        if w.accumulate is None:
            # Beside what is read again, what is stored should not stay.
            policy = ', eviction_policy="evict_first"' if em.passing and dims == FULL else ""
            if em.rotation is not None and not masks and em.rotation.covers(em, w.address):
                lines += em.rotation.store(em, w.tensor, ITEMSIZE[w.dtype], value, policy)
            else:
                lines.append(f"tl.store({place}, {value}{mask}{policy})")
        else:
            lines.append(accumulate(em, w, dims, value, where))
    em.scope.add(*lines)


def together(em: Emitter, w: Write, dims: Dims) -> str:
    """A store of all points of an unrolled axis: neighbours in memory are neighbours in the
    tile."""
    assert w.unrolled_axis is not None and w.along is not None
    values = [full_value(em, v, dims) for v in (w.value, *w.others)]
    while len(values) > 1:  # bits of the point from the highest: even and odd ones, joined last
        half = len(values) // 2
        values = [f"tl.interleave({a}, {b})" for a, b in zip(values[:half], values[half:])]
    wide = em.widened(w.unrolled_axis, w.along)
    place, where = wide.pointer_text(w.tensor, w.address, dims), wide.mask(dims)
    wide.guard("store", w.tensor, w.address, dims, where, em.scope)
    em.checked |= wide.checked
    return f"tl.store({place}, {values[0]}{', ' if where else ''}{where})"


def full_value(em: Emitter, value: Expr, dims: Dims) -> str:
    """A value, converted to what it is stored as, that spans the dimensions."""
    text = em.value(value)
    have = em.deps(value)
    return text if have == dims else f"tl.broadcast_to({text}, {em.shape(dims)})"


# What `tl.atomic_add`, `_max` and `_min` do on sm_80 and later as eager does.
ATOMICS = {
    "sum": ("f16", "f32", "f64", "i32", "i64"),
    "max": ("i32", "i64"),
    "min": ("i32", "i64"),
}


def accumulate(em: Emitter, w: Write, dims: Dims, value: str, where: str) -> str:
    """An atomic update; by compare and swap where there is no instruction for it."""
    assert w.accumulate is not None
    pointer = em.pointers[w.tensor]
    index = em.spread(em.index(w.address), em.index_deps(w.address), dims)
    if w.dtype in ATOMICS.get(w.accumulate, ()):
        name = {"sum": "add"}.get(w.accumulate, w.accumulate)
        mask = where or "None"
        return f'tl.atomic_{name}({pointer} + {index}, {value}, {mask}, sem="relaxed")'
    if ITEMSIZE[w.dtype] < 2:
        raise UnsupportedOp(
            f"no atomic {w.accumulate} of {w.dtype}",
            hint="accumulate in a wider type, or call the library",
        )
    everything = f"tl.full({em.shape(dims)}, 1, tl.int1)"
    mask = f"{everything} & {where}" if where else everything
    return f'libm.atomic_update({pointer}, {index}, {value}, {mask}, "{w.accumulate}")'
