"""Reductions that end where each row says (`ir.dynamic_bounds`), in a tile of rows and columns.

In: such a reduction and the emitter that is to write it. Out: a loop up to the end of the longest
row of the tile, which reads nothing of terms that do not exist. Of long rows a program has one at a
time: then what there is once per row and term is a number, and several terms are read at once. The
order of additions is that of the terms.
"""

from __future__ import annotations

from collections.abc import Sequence

from deuteron.codegen.loops import Loops, Write, stride
from deuteron.codegen.triton import scalars
from deuteron.codegen.triton.scope import Scope, bound_name
from deuteron.codegen.triton.state import TileState
from deuteron.ir.dynamic_bounds import end_of, ends, expected
from deuteron.ir.expr import Expr, literal
from deuteron.ir.index import Axis, const, hint, product
from deuteron.ir.operations import REDUCTIONS

# Columns in a tile at most, elements of a thread, and terms at once. H200, gradient of an embedding
# of 50257 x 768 (bf16), 32768 positions: any, half of them the same, most of them few; us:
#     4 terms, 8, 16, 32 elements    59, 51, 43     99, 147, 86      78, 88, 72
#     2 terms                        50, 43, 38    142, 154, 211    109, 81, 106
MAX_COLUMNS, ELEMENTS_PER_THREAD, TERMS_AT_ONCE = 1024, 32, 4
# Fewer columns where rows are few, at least so many. H200, the rows of one place that 4096 points
# have, in 32 splits of 128 points, 768 columns (f32), us: 1024 columns (33 programs) 43.4, 256
# (97) 27.4, 128 (193) 27.2, with 8 terms at once 22.9; of an embedding's (bf16) 1024 20.9, 128 9.5.
MIN_COLUMNS = 128
# Registers of a thread at most, so that more programs wait for memory: all that it has (96) is for
# terms that most rows do not have.
MAX_REGISTERS = 80
# Rows that a program takes one after the other, where there are so many times as many for each
# multiprocessor: 1640 programs start in a microsecond. They are far apart, since frequent words are
# neighbours. H200, the same gradient, us: one row, any 38.3, half of them the same 88.5, most of
# them few 88.2; two far apart 36.4, 84.1, 79.5; two neighbours 35.9, 80.9, 107, four 35.9, 80.2,
# 174.
ROWS_PER_PROGRAM, MIN_ROWS_PER_CORE = 2, 32
# Of rows of at least so many terms on average, of which a thread has so few columns, it reads twice
# as many terms at once, and one row: starts do not count. H200, 65536 x 128 (f32), 524288 points,
# us: 4 terms of one and two rows 80.3, 80.5, so 77.4, 78.3, 16 terms of two rows 84.1.
MIN_LONG_ROW_TERMS, MAX_NARROW_COLUMNS = 8, 4
# With fewer columns a tile has several rows instead of several terms, and so many elements; of long
# rows it has both. H200, 1000 x 16 (f32), 262144 points, frequent places: 141 us, so 106.
MIN_WIDE_COLUMNS, TILE_ELEMENTS = 64, 256
# Elements of a tile whose rows lie side by side.
ROWS_ACROSS_ELEMENTS = 2048

Dims = tuple[tuple[str, tuple[Axis, ...]], ...]
Sizes = tuple[tuple[str, int], ...]


def dynamic_bounds_tile(
    loops: Loops, order: Sequence[Axis], cores: int
) -> tuple[Dims, Sizes, tuple[Axis, ...]] | None:
    """The dimensions of a tile, their sizes, and the axes of which it has one value: rows are what
    ends depend on. None where nothing has an end of its own. Rows that lie side by side in memory
    are for neighbouring lanes."""
    bounds = [end for root in loops.roots() for end in ends(root).values()]
    own = {a for end in bounds for a in end.axes()}
    y, x = tuple(a for a in order if a in own), tuple(a for a in order if a not in own)
    if not y:
        return None
    columns, rows = (max(1, hint(product(a.extent for a in axes))) for axes in (x, y))
    if beside(loops, y[-1]):
        wide = min(1 << (rows - 1).bit_length(), TILE_ELEMENTS)
        high = min(1 << (columns - 1).bit_length(), ROWS_ACROSS_ELEMENTS // wide)
        return (("y", x), ("x", y)), (("y", high), ("x", wide)), ()
    wide = min(1 << (columns - 1).bit_length(), MAX_COLUMNS)
    while wide > MIN_COLUMNS and rows * -(-columns // wide) < cores:
        wide //= 2
    high = min(1 << (rows - 1).bit_length(), TILE_ELEMENTS // wide)
    if wide >= MIN_WIDE_COLUMNS or high == 1:
        return (("x", x),), (("x", wide),), y
    return (("y", y), ("x", x)), (("y", high), ("x", wide)), ()


def in_flight(loops: Loops, each: int, rows: int, cores: int) -> tuple[int, int]:
    """Terms that a program reads at once, and rows that it takes one after the other, of which each
    thread has so many columns; `rows`: 0 where it has several at a time."""
    lengths = (expected(a, end) for root in loops.roots() for a, end in ends(root).items())
    long = max(lengths, default=0) >= MIN_LONG_ROW_TERMS
    if not rows:
        return TERMS_AT_ONCE if long else 1, 1
    if long and each <= MAX_NARROW_COLUMNS:
        return 2 * TERMS_AT_ONCE, 1
    return (
        TERMS_AT_ONCE,
        ROWS_PER_PROGRAM if rows >= ROWS_PER_PROGRAM * MIN_ROWS_PER_CORE * cores else 1,
    )


def beside(loops: Loops, row: Axis) -> bool:
    """Whether all that is stored is contiguous along the rows."""
    stored = [p.address for p in loops.statements if isinstance(p, Write)]
    return bool(stored) and all(stride(a, row) == 1 for a in stored)


def continues(em: TileState, node: Expr) -> bool:
    """Whether it is a sum whose second part, a reduction, goes on where the first one ends, in its
    registers: another such reduction, or a term that there may be, of the same shape."""
    if node.op != "add" or end_of(node.args[1]) is None or node.args[1].attr[0] != "sum":
        return False
    first, second = node.args
    reduction = end_of(first) is not None and first.attr[0] == "sum"
    term = first.op == "where" and first.args[2] is literal(0, first.dtype)
    if not (reduction or term or continues(em, first)):
        return False
    return em.deps(first) == em.deps(second) and first is not second


def write_reduction(em: TileState, node: Expr, start: str | None = None) -> str:
    """Writes a reduction inside an expression, a loop over single elements, where all that it
    depends on is known; its value. `start`: what it begins with."""
    kind, axes = node.attr
    body = node.args[0]
    assert not kind.startswith("arg"), f"a long {kind} inside an expression"
    at, dtype = em.level(em.deps(node)), body.dtype
    outer, name = em.chain[at], em.fresh("reduction")
    if start is None:
        identity = scalars.literal(REDUCTIONS[kind].identity(dtype), dtype)
        start = f"tl.full({em.shape(em.deps(node))}, {identity}, {scalars.TRITON_TYPES[dtype]})"
    outer.add(f"{name} = {start}")
    kept, em.chain = em.chain, em.chain[: at + 1]
    if (end := end_of(node)) is not None:
        _write_dynamic_bounds(em, node, end, name)
        em.chain = kept
        return name
    heads = []
    for a in axes:
        text = em.fresh("k")
        heads.append(f"for {text} in range(0, {em.index(a.extent)})")
        em.chain.append(Scope(em.scope.given | {bound_name(a)}))
        em.scope.axes[a] = text
    em.scope.add(f"{name} = {scalars.reduction_step(kind, dtype, name, em.value(body))}")
    for head in reversed(heads):
        inner = em.chain.pop()
        em.scope.block(head, inner.lines)
    em.chain = kept
    return name


def _write_dynamic_bounds(em: TileState, reduction: Expr, end: Expr, name: str) -> None:
    """Writes the loop of such a reduction into the current scope; `name` is its value so far."""
    (kind, (axis,)), (body,), outer = reduction.attr, reduction.args, em.scope
    text, last, first, k = em.value(end), em.fresh("end"), em.fresh("k"), em.fresh("k")
    longest = f"tl.max({text})" if em.deps(end) else text
    outer.add(f"{last} = tl.minimum({longest}, {em.index(axis.extent)}).to({em.index_type})")
    em.chain.append(Scope(outer.given | {bound_name(axis)}))
    em.scope.axes[axis] = k
    more = "" if em.terms == 1 else " + term"
    em.scope.add(f"{k} = tl.full([], 0, {em.index_type}) + {first}{more}")
    before, em.within = em.within, body.args[0]
    term = em.value(body.args[1] if kind == "sum" and _zero_without(em, body) else body)
    em.scope.add(f"{name} = {scalars.reduction_step(kind, body.dtype, name, term)}")
    em.within = before
    lines = em.chain.pop().lines
    if more:  # written out, so that all are read before the first is added
        lines = [f"for term in tl.static_range({em.terms}):", *(f"    {x}" for x in lines)]
    outer.block(f"for {first} in tl.range(0, {last}, {em.terms})", lines)


def _zero_without(em: TileState, body: Expr) -> bool:
    """Whether what is read of terms that do not exist is zero (see `Emitter._load`)."""
    within, term = body.args[:2]
    while term.op == "cast":
        (term,) = term.args
    return term.op == "load" and not term.attr[2] and em.deps(within) < em.deps(term)


def enter_row(em: TileState, axes: Sequence[Axis], program: str) -> None:
    """The axes of which a program has one value, from its number."""
    below = const(1)
    for a in reversed(axes):
        name = em.fresh("row")
        above = f"({program}) // ({em.index(below)})" if below.value != 1 else f"({program})"
        text = above if a is axes[0] else f"({above}) % ({em.index(a.extent)})"
        em.scope.add(f"{name} = {text}")
        em.scope.axes[a] = name
        below = below * a.extent


__all__ = [
    "ELEMENTS_PER_THREAD",
    "MAX_REGISTERS",
    "continues",
    "enter_row",
    "in_flight",
    "dynamic_bounds_tile",
    "write_reduction",
]
