"""Sizes of a Triton kernel: which it takes, how wide its indices are, how many programs run.

In: loops, tilings, layouts. Out: symbols, and Python text over the names of sizes and of
constexprs, which who launches evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from deuteron.codegen.loops import SPLIT, Loops
from deuteron.codegen.triton.emit import size_name
from deuteron.codegen.triton.scanning import flag_count_text
from deuteron.codegen.triton.tiling import Tiling
from deuteron.ir.expr import Expr, own_indices
from deuteron.ir.index import Div, Index, MinMax, Mod, Sym, atom, bound, is_nonneg, product
from deuteron.ir.nest import Nest as ContractionNest
from deuteron.ir.nest import Store as ContractionStore
from deuteron.ir.nest import roots as contraction_roots
from deuteron.ir.program import Layout
from deuteron.schedule.tiling import Tiling as ContractionTiling

# An index may pass the end of its tensor by a block before its mask is applied.
MAX_INT32_INDEX = 2**31 - 2**20


def all_indices(nests: Iterable[Loops]) -> list[Index]:
    """Every index that a kernel computes: addresses, index values, extents of its axes, and what
    those divide, compare and choose from. (Sums may wrap around and come back, these may not.)"""
    indices: dict[Index, None] = {}
    for n in nests:
        indices.update(dict.fromkeys(indices_of(n.roots())))
        indices.update(dict.fromkeys(n.addresses()))
        indices.update(dict.fromkeys(a.extent for a in (*n.parallel, *n.reduced)))
        indices[product(a.extent for a in n.parallel)] = None
        indices[product(a.extent for a in n.reduced)] = None
    return with_parts(indices)


def contraction_indices(
    nest: ContractionNest, tiling: ContractionTiling, layouts: Mapping[str, Layout]
) -> list[Index]:
    """The same of a kernel with products."""
    roots = [e for s in nest.statements for e in contraction_roots(s)]
    roots += [c.end for c in nest.cuts]
    places = [n.attr[:2] for e in roots for n in e.loads()]
    places += [(s.tensor, s.index) for s in nest.statements if isinstance(s, ContractionStore)]
    indices = dict.fromkeys(indices_of(roots))
    indices.update((layouts[n].address(at), None) for n, at in places if n in layouts)
    for d in tiling.dims:
        indices.update(dict.fromkeys((d.size, *(a.extent for a in d.axes))))
    return with_parts(indices)


def indices_of(roots: Iterable[Expr]) -> Iterator[Index]:
    for root in roots:
        for node in root.walk():
            yield from own_indices(node)
            if node.op == "check":
                yield node.attr


def with_parts(indices: dict[Index, None]) -> list[Index]:
    """With what they divide, compare and choose from."""
    for i in list(indices):
        for a in i.atoms():
            if isinstance(a, (Div, Mod)):
                indices[a.num] = indices[a.den] = None
            elif isinstance(a, MinMax):
                indices[a.a] = indices[a.b] = None
    return list(indices)


def symbols_of(indices: Iterable[Index], layouts: Mapping[str, Layout]) -> tuple[Sym, ...]:
    """The sizes that indices depend on, and those that tell how wide indices are."""
    symbols: set[Sym] = set()
    for i in indices:
        symbols |= i.syms()
    for lay in layouts.values():
        symbols |= (lay.extent() + lay.offset).syms()
    return tuple(sorted(symbols))


def index_width(
    indices: Iterable[Index], layouts: Mapping[str, Layout]
) -> tuple[bool, str | None, bool]:
    """(whether the sizes are known, Python test for 64-bit indices where not, whether they are
    needed where known), of a kernel that computes these indices."""
    ends: dict[Index, None] = {}
    for lay in layouts.values():
        ends[lay.extent() + lay.offset] = None
    for i in indices:
        if SPLIT in i.axes():  # within the tensor of partial results, which is a layout
            continue
        top, low = bound(i, True), bound(i, False)
        if top is not None:
            ends[top] = None
        if low is not None and not is_nonneg(low):
            ends[-low] = None
        if top is None:  # what it loads is within some tensor, what it is multiplied by need not be
            ends.update((atom(s), None) for s in i.syms())
    known = [e.value for e in ends if e.value is not None]
    unknown = [e for e in ends if e.value is None]
    if any(v > MAX_INT32_INDEX for v in known):
        return True, None, True
    if not unknown:
        return True, None, False
    tests = sorted({f"{python_text(e)} > {MAX_INT32_INDEX}" for e in unknown})
    return False, " or ".join(tests), False


def aligned_sizes(symbols: Iterable[Sym]) -> Iterator[str]:
    """Sizes that may be declared multiples of 16: those whose hint is."""
    return (size_name(s) for s in symbols if s.hint and s.hint % 16 == 0)


def python_text(index: Index, name: Callable[[Sym], str] = lambda s: s.name) -> str:
    """An index of sizes as a Python expression over their names."""
    parts = []
    for m, c in index.terms:
        factors = [_python_atom(a, name) for a in m]
        parts.append("*".join([str(c), *factors] if c != 1 or not factors else factors))
    return "(" + (" + ".join(parts) or "0") + ")"


def _python_atom(a: object, name: Callable[[Sym], str]) -> str:
    if isinstance(a, Sym):
        return name(a)
    if isinstance(a, MinMax):
        return f"{a.kind}({python_text(a.a, name)}, {python_text(a.b, name)})"
    assert isinstance(a, (Div, Mod)), f"{a!r} is no size"
    sign = "//" if isinstance(a, Div) else "%"
    return f"({python_text(a.num, name)} {sign} {python_text(a.den, name)})"


def blocks_text(count: Index, block: str) -> str:
    return f"-(-{python_text(count)} // {block})"


def grids_text(
    tilings: Sequence[Tiling],
    blocks: Sequence[Mapping[str, str]],
    nests: Sequence[Loops],
) -> str:
    """Programs of all nests."""
    return " + ".join(grid_text(f, b, n) for f, b, n in zip(tilings, blocks, nests, strict=True))


def flag_count(tiling: Tiling, blocks: Mapping[str, str], nest: Loops) -> str | None:
    if tiling.kind != "scan":
        return None
    rows, length = (python_text(product(a.extent for a in axes)) for _, axes in tiling.dims)
    return flag_count_text(nest, tiling, rows, length, blocks["r"])


def grid_text(tiling: Tiling, blocks: Mapping[str, str], nest: Loops) -> str:
    """Python text of the number of programs of a nest."""
    counts = {d: product(a.extent for a in axes) for d, axes in tiling.dims}
    if tiling.kind == "points":
        each = [blocks_text(counts[d], b) for d, b in blocks.items()]
        rows = (
            [python_text(product(a.extent for a in tiling.program_axes))]
            if tiling.program_axes
            else []
        )
        text = " * ".join([*rows, *each])
        return text if tiling.serial_blocks == 1 else f"-(-({text}) // {tiling.serial_blocks})"
    per_row = f"{tiling.programs_per_row} * " if tiling.programs_per_row > 1 else ""
    if tiling.kind == "scan":
        return f"{python_text(counts['x'])} * {blocks_text(counts['r'], blocks['r'])}"
    if tiling.kind == "rows":
        return per_row + blocks_text(counts["x"], blocks["x"])
    assert nest.row_split is not None
    return (
        f"{nest.row_split[1]} * {blocks_text(counts['r'], blocks['r'])}"
        if tiling.tiled
        else f"{per_row}{nest.row_split[1]}"
    )


__all__ = [
    "MAX_INT32_INDEX",
    "aligned_sizes",
    "all_indices",
    "contraction_indices",
    "flag_count",
    "grids_text",
    "index_width",
    "python_text",
    "symbols_of",
]
