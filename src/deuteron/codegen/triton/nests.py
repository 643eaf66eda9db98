"""Writes the body of one nest: loops over blocks, reductions, scans and stores.

In: `Loops`, its `Tiling`, the block sizes that will be used (they decide which masks are needed).
Out: lines of Triton.

Within a pass all values are computed before the first store, but for stores that stand before all
reductions: a result may have the memory of an operand that dies here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deuteron.codegen.loops import SPLIT, CrossRowReduce, Loops, Write, stride, unique_nodes
from deuteron.codegen.precision import inexact, softmax_sums
from deuteron.codegen.triton.columns import (
    Columns,
    clear_columns,
    in_threads,
    update_column_in_memory,
)
from deuteron.codegen.triton.cooperative import CooperativeRows
from deuteron.codegen.triton.dynamic_bounds import enter_row
from deuteron.codegen.triton.emit import Emitter, Limits
from deuteron.codegen.triton.misaligned import rotation_of
from deuteron.codegen.triton.reductions import (
    Accumulators,
    bind,
    clean,
    constant,
    masked_value,
    paired,
    reduce_rows,
    scan_result,
)
from deuteron.codegen.triton.row_passes import RowPass, plan, single
from deuteron.codegen.triton.scalars import reduction_step
from deuteron.codegen.triton.scanning import scan_block
from deuteron.codegen.triton.scope import FULL, Dim, Dims, R, X, bound_name
from deuteron.codegen.triton.stores import reads_once, stores
from deuteron.codegen.triton.tiling import Tiling, cross_row_reductions
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Index, const, product
from deuteron.ir.operations import ITEMSIZE
from deuteron.ir.program import Layout
from deuteron.schedule.kernel import Reduce, Scan

# Bytes of a thread that it reads before it has a row's reductions. H200, 2048 rows of 131072, bf16,
# us: RMS norm (64 bytes) 303 without and 278 with that, layer norm (128) 353 and 425.
MAX_PRELOADED_BYTES = 64
# A split that has so many blocks of rows has no part of one.
MIN_BLOCKS_PER_SPLIT = 12


@dataclass(frozen=True)
class Names:
    """How a nest's function refers to things: constexprs of block sizes by dimension, pointers by
    tensor.
    """

    blocks: Mapping[str, str]
    pointers: Mapping[str, str]
    index_type: str
    layouts: Mapping[str, Layout]  # of tensors
    stages: str = "1"  # of the loops' software pipelines
    float8: str = ""  # see `scalars.convert`
    limits: Limits = field(default_factory=dict)  # see `Emitter.guard`
    overwrites: frozenset[str] = frozenset()  # see `schedule.kernel.Kernel`
    overwritten: frozenset[str] = frozenset()
    averages: bool = True  # see `precision.inexact`


def dims_of(loops: Loops, tiling: Tiling, names: Names) -> tuple[Dim, ...]:
    """The dimensions of a tiling; one is masked unless every candidate block divides it."""
    out = []
    for place, (name, axes) in enumerate(tiling.dims):
        parts, axes = (tiling.parts, axes[len(tiling.parts) :]) if name == "r" else ((), axes)
        dim = Dim(name, axes, names.blocks[name], place, True)
        count = dim.count.value
        exact = bool(count) and all((count or 1) % b.of(name) == 0 for b in tiling.candidates)
        if tiling.kind == "row_split" and name == "x":
            exact = whole_blocks(loops, tiling)
        exact |= tiling.programs_per_row > 1 and name == "x"  # whose blocks are of one row
        exact &= tiling.misaligned is None or name != "r"
        fixed = _fixed(axes, max(b.of(name) for b in tiling.candidates))
        if tiling.kind != "points" or tiling.program_axes:
            fixed = ()
        out.append(Dim(name, axes, dim.block, place, not exact, fixed=fixed, parts=parts))
    return tuple(out)


def _fixed(axes: Sequence[Axis], block: int) -> tuple[Axis, ...]:
    """Axes of a dimension of which every block has one place: what depends on no others is
    computed once for a block."""
    if block == 1:
        return ()
    below = [product(a.extent for a in axes[k + 1 :]).value for k in range(len(axes))]
    return tuple(a for a, n in zip(axes, below, strict=True) if n is not None and n % block == 0)


def write_nest(
    loops: Loops, tiling: Tiling, names: Names, numbers: Iterator[int]
) -> tuple[list[str], bool]:
    """The lines of a nest's function, which has `pid`, the program's number within the nest; and
    whether it asserts anything.
    """
    em = Emitter(dims_of(loops, tiling, names), names.pointers, numbers, names.index_type)
    em.stages, em.float8 = names.stages, names.float8
    em.lane_elements, em.terms = tiling.lane_elements, tiling.terms
    em.block = max((b.of("r") for b in tiling.candidates if "r" in dict(b.sizes)), default=0)
    em.limits = names.limits
    if tiling.kind == "points" and names.overwrites:  # all are read before
        tiling = replace(tiling, crowded=False)
    if tiling.misaligned is not None:
        single_row = all(b.of("x") == 1 for b in tiling.candidates)
        em.rotation = rotation_of(loops, tiling.misaligned, single_row)
    nodes = unique_nodes(loops.roots())
    em.bound.update(a for n in nodes if n.op == "reduce" for a in n.attr[1])
    em.read.update(n.attr[:2] for n in nodes if n.op == "load" and not n.args)
    em.divisions.update(n.args[1] for n in nodes if n.op == "div" and n.dtype == "f32")
    declare_results(loops, em)
    em.barrier_stores = stores_behind_barriers(loops, names, lambda e: em.deps(e) <= em.whole - R)
    row = em.whole - em.along
    em.inexact = inexact(loops, lambda e: em.deps(e) <= row, names.averages)
    em.softmax_sums = softmax_sums(loops, lambda e: em.deps(e) <= row)
    if em.rotation is not None:
        em.rotation.declare(em)
    writers = {
        "points": write_points,
        "rows": write_rows,
        "scan": write_scan,
        "row_split": write_row_split,
    }
    writers[tiling.kind](loops, tiling, em)
    return used(em.chain[0].lines), em.checked


def used(lines: list[str]) -> list[str]:
    """The lines without definitions that nothing uses (comparisons in 32 bits leave some)."""
    while True:
        count = Counter(w for line in lines for w in re.findall(r"[A-Za-z_]\w*", line))
        kept = []
        for line in lines:
            name = re.match(r"\s*([a-z]+\d+) = ", line)
            if name is None or count[name[1]] > 1:
                kept.append(line)
        if len(kept) == len(lines):
            return kept
        lines = kept


def pid(em: Emitter) -> str:
    return "pid" if em.index_type == "tl.int32" else f"tl.cast(pid, {em.index_type})"


def header(em: Emitter) -> None:
    """The number of elements along each dimension."""
    for d in em.dims.values():
        if d.parts:
            em.scope.add(f"rlength = {em.index(d.count)}")
            em.scope.add(f"rspan = tl.cdiv(rlength, {d.block}) * {d.block}")
            em.scope.add(f"rnumel = {em.index(product(a.extent for a in d.parts))} * rspan")
        elif d.masked or d.name == "r" or em.rank >= 2:
            em.scope.add(f"{d.name}numel = {em.index(d.count)}")


def write_points(loops: Loops, tiling: Tiling, em: Emitter) -> None:
    header(em)
    x = em.dims["x"]
    before = 0
    if tiling.program_axes:
        em.scope.add(f"xblocks = tl.cdiv({em.index(x.count)}, {x.block})")
        before, number = len(em.scope.lines), pid(em) if tiling.serial_blocks == 1 else "number"
        em.scope.add(f"xoffset = ({number} % xblocks) * {x.block}")
        enter_row(em, tiling.program_axes, f"{number} // xblocks")
    elif em.rank == 1:
        em.scope.add(f"xoffset = {pid(em)} * {x.block}")
    else:
        y = em.dims["y"]
        em.scope.add(
            f"xblocks = tl.cdiv(xnumel, {x.block})",
            f"yoffset = ({pid(em)} // xblocks) * {y.block}",
            f"xoffset = ({pid(em)} % xblocks) * {x.block}",
        )
        em.enter(y, "yoffset")
    em.enter(x, "xoffset")
    everything = frozenset(em.dims)
    if x.axes and any(isinstance(w, Write) and w.accumulate for w in loops.statements):
        # What is added to stays in the cache, not what is read once.
        loads = [n for root in loops.roots() for n in root.walk() if n.op == "load" and n.attr[1]]
        streamed = [n for n in loads if stride(n.attr[1][0], x.axes[-1]) == 1]
        em.policies = dict.fromkeys(streamed, "evict_first")
    writes = [(w, everything) for w in loops.statements if isinstance(w, Write)]
    for some in [[w] for w in writes] if tiling.crowded and reads_once(loops) else [writes]:
        stores(em, some)
    if tiling.serial_blocks > 1:
        lines = em.scope.lines[before:]
        del em.scope.lines[before:]
        em.scope.add(
            f"numbers = {em.index(product(a.extent for a in tiling.program_axes))} * xblocks",
            f"programs = tl.cdiv(numbers, {tiling.serial_blocks})",
        )
        em.scope.block(f"for number in tl.range({pid(em)}, numbers, programs)", lines)


# -- stores ----------------------------------------------------------------------------------------


def stores_behind_barriers(
    loops: Loops, names: Names, row_level: Callable[[Expr], bool]
) -> set[tuple[str, Index]]:
    """Stores into the memory of others (inputs that a program changes) where something lies that
    is read once per row. Loops in which threads wait for one another Triton does not pipeline:
    backward of layer norm over gathered rows, 32768 x 768, bf16, H200, us: 64, without 51."""
    read = {
        n.attr[1][0]
        for root in loops.roots()
        for n in root.walk()
        if n.op == "load" and n.attr[0] in names.overwritten and n.attr[1] and row_level(n)
    }
    return {
        (w.tensor, w.address)
        for w in loops.statements
        if isinstance(w, Write) and w.tensor in names.overwrites and w.address in read
    }


# -- rows ------------------------------------------------------------------------------------------


def write_rows(loops: Loops, tiling: Tiling, em: Emitter) -> None:
    header(em)
    x = em.dims["x"]
    if tiling.programs_per_row > 1:
        cooperative = CooperativeRows(tiling, em, loops)
        cooperative.begin()
        step = f"row_groups * {x.block}"
        em.scope.add(f"xfirst = {cooperative.first} * {x.block}")
        write_cooperative_rows(loops, em, cooperative, step, Columns(FULL))
        cooperative.end(f"tl.cdiv(xnumel, {step})")
        return
    em.scope.add(f"xoffset = {pid(em)} * {x.block}")
    em.enter(x, "xoffset")
    if tiling.persistent:
        for name in sorted(em.along):
            em.enter(em.dims[name], "0")
        hints(em, [single(loops)])
        one_pass(loops, em)
    else:
        Passes(loops, em).write()


def write_scan(loops: Loops, tiling: Tiling, em: Emitter) -> None:
    header(em)
    scan_block(loops, tiling, em, pid(em))
    stores(em, [(w, FULL) for w in loops.statements if isinstance(w, Write)])


def declare_results(loops: Loops, em: Emitter) -> None:
    for p in loops.statements:
        if isinstance(p, Reduce):
            em.result_deps[p.name] = em.whole - R if p.grouped else X
        elif isinstance(p, Scan):
            em.result_deps[p.name] = FULL


def hints(em: Emitter, passes: list[RowPass]) -> None:
    """Eviction policies: what a later pass or another row reads again stays, the last reading of
    the rest lets go.
    """
    em.policies = {}
    for q in passes:
        for root in q.roots():
            for n in root.walk():
                if n.op == "load" and n.attr[1] and em.shared(n):
                    em.policies[n] = "evict_last"


def one_pass(loops: Loops, em: Emitter, columns: Columns | None = None) -> None:
    """Everything of whole rows: the scope has both dimensions."""
    there = {"row": X, "group": em.whole - R, "point": em.whole}
    bound: set[str] = set()
    # Stores that come before all reductions are written at once: see `Group.nest`.
    early = reads_once(loops) and any(not isinstance(p, Write) for p in loops.statements)
    writes: list[tuple[Write, Dims]] = []
    for k, p in enumerate(loops.statements):
        early &= isinstance(p, Write)
        if isinstance(p, Reduce):
            if p.name not in bound:
                pair = paired(p, loops.statements[k + 1 :]) if em.rank == 2 else [p]
                for f, name in zip(pair, reduce_rows(em, pair), strict=True):
                    bind(em, f, name)
                    bound.add(f.name)
        elif isinstance(p, Scan):
            name = em.fresh(f"{clean(p.name)}_")
            em.scope.add(
                f"{name} = libm.scan_{p.kind}({masked_value(em, p.kind, p.body, em.mask(R))})"
            )
            em.scope.texts[scan_result(p)] = name
        elif isinstance(p, CrossRowReduce):
            assert columns is not None
            columns.update(em, p)
        else:
            writes.append((p, there[p.level]))
            if early and p.level == "point":
                stores(em, [writes.pop()])
    stores(em, writes)


def write_cooperative_rows(
    loops: Loops, em: Emitter, cooperative: CooperativeRows, step: str, columns: Columns
) -> None:
    """The rows that cooperating programs walk over: from `xfirst` to before `xnumel`."""
    outer, stages = em.scope, f"num_stages={em.stages}"
    with em.inside() as loop:
        em.enter(em.dims["x"], "xoffset")
        if "r" not in loop.given:
            em.enter(em.dims["r"], "roffset")  # else what only depends on it stays in registers
        hints(em, [single(loops)])
        cooperative.reduce_all()
        same = [n for n in loops.nodes if n.op == "load" and n.attr[1] and em.shared(n)]
        if same:
            rest_outside_pipeline(loops, em, cooperative, columns, same)
        else:
            rest_of_row(loops, em, cooperative, columns)
        loop.add("tag += 1")
    outer.block(f"for xoffset in tl.range(xfirst, xnumel, {step}, {stages})", loop.lines)


def rest_outside_pipeline(
    loops: Loops, em: Emitter, cooperative: CooperativeRows, columns: Columns, same: Sequence[Expr]
) -> None:
    """The rest of a row behind a condition that always holds: what is the same for all rows is then
    read from the cache, not brought to shared memory with each row by the loop's pipeline. It is on
    its way while reductions are exchanged, where there are registers for it."""
    loop, outer = em.scope, em.chain[-2]
    with em.inside() as rest:
        kept, loop.given = loop.given, outer.given
        if sum(ITEMSIZE[n.dtype] for n in same) * cooperative.each <= MAX_PRELOADED_BYTES:
            for n in same:
                em.value(n)
        rest_of_row(loops, em, cooperative, columns)
        loop.given = kept
    loop.block("if xoffset < xnumel", rest.lines)


def rest_of_row(loops: Loops, em: Emitter, cooperative: CooperativeRows, columns: Columns) -> None:
    """All but the reductions of a row."""
    for p in loops.statements:
        if isinstance(p, CrossRowReduce):
            cooperative.await_for(p.body)
            columns.update(em, p)
    cooperative.await_all()
    writes = [p for p in loops.statements if isinstance(p, Write)]
    stores(em, [(p, X if p.level == "row" else FULL) for p in writes], once="rank == 0")


class Passes:
    """Rows in blocks of r, pass by pass."""

    def __init__(self, loops: Loops, em: Emitter) -> None:
        self.loops, self.em, self.backwards = loops, em, False
        row = frozenset(em.dims) - R
        self.passes, self.row_writes = plan(loops, lambda e: em.deps(e) <= row)
        em.passing = len(self.passes) > 1

    def write(self) -> None:
        em = self.em
        for k, q in enumerate(self.passes):
            self.policies(k)
            accs = Accumulators(em, q)
            accs.declare()
            carries = self.declare_carries(q)
            r = em.dims["r"]
            # What a pass has read last is the likeliest to be in the cache still.
            self.backwards = k % 2 == 1 and not carries
            # Of rotated rows the first elements come last.
            accs.ascending = not self.backwards and em.rotation is None
            if em.rotation is not None:
                em.scope.add(f"rwhole = tl.maximum(rnumel - rrotation, 0) // {r.block} * {r.block}")
                em.dims["r"] = replace(r, masked=False)
                self.blocks(q, accs, carries, "rwhole")
                em.dims["r"] = r
                accs.ends()
                rest = f"for roffset in tl.range(rwhole, rring, {r.block})"
                self.loop(q, accs, carries, rest, tail=accs.counted)
            elif r.masked and not r.parts and (accs.reductions or carries):
                # Whole blocks without masks, then the rest: selects cost as much as the reduction.
                em.scope.add(f"rwhole = rnumel // {r.block} * {r.block}")
                em.dims["r"] = replace(r, masked=False)
                self.blocks(q, accs, carries, "rwhole")
                em.dims["r"] = r
                em.scope.add("roffset = rwhole")
                self.loop(q, accs, carries, "if rwhole < rnumel")
            else:
                self.blocks(q, accs, carries, "rnumel")
            accs.finish()
        stores(em, [(w, X) for w in self.row_writes])

    def blocks(self, q: RowPass, accs: Accumulators, carries: Mapping[str, str], end: str) -> None:
        """A loop over the blocks up to `end`."""
        block = self.em.dims["r"].block
        inner = f"tl.range(0, {end}, {block}, num_stages={self.em.stages})"
        if self.backwards:
            last = f"({end} - 1) // {block} * {block}"
            accs.walked = "rback"
            self.loop(q, accs, carries, f"for rback in {inner}", f"roffset = {last} - rback")
            accs.walked = "roffset"
        else:
            self.loop(q, accs, carries, f"for roffset in {inner}")

    def loop(
        self,
        q: RowPass,
        accs: Accumulators,
        carries: Mapping[str, str],
        head: str,
        *first: str,
        tail: Sequence[str] = (),
    ) -> None:
        em = self.em
        with em.inside() as scope:
            scope.add(*first)
            em.enter(em.dims["r"], "roffset")
            self.body(q, accs, carries)
            scope.add(*tail)
        em.scope.block(head, scope.lines)

    def policies(self, k: int) -> None:
        """What a later pass reads again stays in the cache; the last reading lets go."""
        em = self.em
        later = {
            n
            for q in self.passes[k + 1 :]
            for root in q.roots()
            for n in root.walk()
            if n.op == "load"
        }
        em.policies = {}
        for root in self.passes[k].roots():
            for n in root.walk():
                if n.op == "load" and n.attr[1] and em.deps(n) & R:
                    keep = n in later or em.shared(n)
                    em.policies[n] = "evict_last" if keep else "evict_first"

    def declare_carries(self, q: RowPass) -> dict[str, str]:
        em, out = self.em, {}
        shape = em.shape(X)
        for p in q.statements:
            if isinstance(p, Scan):
                out[p.name] = em.fresh("carry")
                em.scope.add(f"{out[p.name]} = {constant(shape, p.kind, p.body.dtype)}")
        return out

    def body(self, q: RowPass, accs: Accumulators, carries: Mapping[str, str]) -> None:
        em = self.em
        writes: list[tuple[Write, Dims]] = []
        for p in q.statements:
            if isinstance(p, Reduce):
                accs.update(p)
            elif isinstance(p, Scan):
                name, carry, block = (
                    em.fresh(f"{clean(p.name)}_"),
                    carries[p.name],
                    em.fresh("block"),
                )
                dtype = p.body.dtype
                scanned, total = (f"libm.{how}_{p.kind}({block})" for how in ("scan", "reduce"))
                em.scope.add(
                    f"{block} = {masked_value(em, p.kind, p.body, em.mask(R))}",
                    f"{name} = {reduction_step(p.kind, dtype, carry, scanned)}",
                    f"{carry} = {reduction_step(p.kind, dtype, carry, total)}",
                )
                em.scope.texts[scan_result(p)] = name
            elif isinstance(p, CrossRowReduce):
                update_column_in_memory(em, p)
            else:
                writes.append((p, FULL))
        stores(em, writes)


# -- row splits ----------------------------------------------------------------------------------


def write_row_split(loops: Loops, tiling: Tiling, em: Emitter) -> None:
    """Split k walks its rows; what it reduces along them it stores at the end."""
    assert loops.row_split is not None
    axis, count = loops.row_split
    r = em.dims["r"]
    em.scope.add(f"rnumel = {em.index(r.count)}")
    if tiling.programs_per_row > 1:
        cooperative = CooperativeRows(tiling, em, loops)
        cooperative.begin()
        em.bound.add(SPLIT)  # what depends on it stays in the loop over splits
        with em.inside() as scope:
            scope.given |= {bound_name(SPLIT)}
            walk_split(loops, tiling, em, cooperative)
        em.scope.block(
            f"for split in tl.range({cooperative.first}, {count}, row_groups)", scope.lines
        )
        rows = f"{em.index((axis.extent + (count - 1)) // count)} * {em.index(_others(loops))}"
        cooperative.end(f"tl.cdiv({count}, row_groups) * {rows}")
        return
    split = "pid"
    if tiling.tiled:
        em.scope.add(f"rblocks = tl.cdiv(rnumel, {r.block})")
        split = "(pid // rblocks)"
    wide = "" if em.index_type == "tl.int32" else f".to({em.index_type})"
    em.scope.add(f"split = {split}{wide}")
    if tiling.tiled:
        em.scope.add(f"roffset = (pid % rblocks){wide} * {r.block}")
    walk_split(loops, tiling, em, None)


def walk_split(
    loops: Loops, tiling: Tiling, em: Emitter, cooperative: CooperativeRows | None
) -> None:
    """The rows of one split."""
    assert loops.row_split is not None
    axis, count = loops.row_split
    x, r = em.dims["x"], em.dims["r"]
    outer = em.scope
    outer.axes[SPLIT] = "split"
    inner = em.index(_others(loops))
    step = x.block
    if em.rotation is not None:  # rows of one alignment class
        outer.add("low = split", f"xnumel = {em.index(x.count)}")
        step = f"{count} * {x.block}"
        em.rotation.begin(em)
    elif axis in x.axes:
        each = em.index(rows_per_split(loops, tiling))
        outer.add(f"low = split * ({each}) * ({inner})")
        outer.add(f"xnumel = tl.minimum(low + ({each}) * ({inner}), {em.index(x.count)})")
    else:
        outer.axes[axis] = "split"
        outer.add("low = 0", f"xnumel = {inner}")
    whole = tiling.persistent or tiling.tiled
    first = "roffset" if tiling.tiled or cooperative is not None else "0"
    reductions = cross_row_reductions(loops)
    columns = Columns(R if in_threads(tiling) else FULL)
    if whole:
        if not tiling.crowded:
            em.enter(r, first)
        hints(em, [single(loops)])
        for p in reductions:
            columns.declare(em, p)
    else:
        clear_columns(em, reductions)
    if cooperative is not None:
        outer.add("xfirst = low")
        write_cooperative_rows(loops, em, cooperative, step, columns)
    else:
        with em.inside() as scope:
            if tiling.crowded:
                em.enter(r, first)
            em.enter(x, "xoffset")
            if whole:
                one_pass(loops, em, columns)
            else:
                Passes(loops, em).write()
        stages = f", num_stages={em.stages}" if whole else ""
        outer.block(f"for xoffset in tl.range(low, xnumel, {step}{stages})", scope.lines)
    if tiling.crowded:
        em.enter(r, first)
    for p in reductions if whole else ():
        columns.store(em, p)


def rows_per_split(loops: Loops, tiling: Tiling) -> Index:
    """Places of the split axis that a split has: blocks of them, where they are many."""
    assert loops.row_split is not None
    axis, count = loops.row_split
    each, block = (axis.extent + (count - 1)) // count, max(b.of("x") for b in tiling.candidates)
    if each.value is None or each.value < MIN_BLOCKS_PER_SPLIT * block:
        return each
    return const(-(-each.value // block) * block)


def whole_blocks(loops: Loops, tiling: Tiling) -> bool:
    """Whether the rows of every split are whole blocks: then none is masked, which would cost a
    selection of every value that is kept over the rows."""
    assert loops.row_split is not None
    axes, (axis, _) = dict(tiling.dims)["x"], loops.row_split
    rows, each = product(a.extent for a in axes).value, _others(loops).value
    if axis in axes and each is not None:
        each *= rows_per_split(loops, tiling).value or 0
    if rows is None or each is None or tiling.misaligned is not None:
        return all(b.of("x") == 1 for b in tiling.candidates)
    return all(n % b.of("x") == 0 for n in (rows, each) for b in tiling.candidates)


def _others(loops: Loops) -> Index:
    assert loops.row_split is not None
    return product(a.extent for a in loops.parallel if a != loops.row_split[0])


__all__ = ["Names", "dims_of", "write_nest"]
