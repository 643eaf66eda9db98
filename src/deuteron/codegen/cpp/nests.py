"""Loops over the points of a pass: by index sets, in vectors, with stores that pass the caches, in
blocks of bf16 or of random numbers.

In: a `bodies.PassBody`. Out: C++ lines in the emitter's scopes. `rows`, `columns` and `points`
decide which loops run where.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

from deuteron.codegen.cpp.axes import flops_of
from deuteron.codegen.cpp.bf16_blocks import (
    bf16_loads,
    bf16_stores,
    blocks_as_floats,
)
from deuteron.codegen.cpp.bodies import IndexSet, PassBody
from deuteron.codegen.cpp.emit import smaller
from deuteron.codegen.cpp.nontemporal import nontemporal_stores, store_address, store_buffer
from deuteron.codegen.cpp.prefetch_streaming import nontemporal_prefetches
from deuteron.codegen.cpp.random_blocks import RANDOM_BLOCK, neighbouring_randoms, random_block
from deuteron.codegen.cpp.reductions import Accumulator
from deuteron.codegen.cpp.row_passes import MIN_BUFFERED_FLOPS
from deuteron.codegen.cpp.short_loops import short_loop
from deuteron.codegen.loops import (
    Statement,
    Write,
    roots_of,
    unique_nodes,
)
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, hint
from deuteron.ir.operations import ITEMSIZE

# Elements that a long loop of costly arithmetic takes at a time where registers are short: four
# vectors share what the loop itself costs (layer norm and GELU of f32, AVX2: 0.83 of the time with
# 32, 0.87 with 16; with AVX-512 and g++ 13 from 1.00 to 1.09).
UNROLLED_ELEMENTS = 32


class PassWriter(PassBody):
    """Writes passes: the loops over index sets, and bodies in them."""

    def index_set_loop(
        self,
        index_set: IndexSet,
        low: str,
        high: str,
        position: str,
        simd: bool,
        accs: dict[str, Accumulator] | None = None,
        prefetch: Callable[[str, int], list[str]] | None = None,
    ) -> None:
        """One loop over an index set. `position` may be ``@``: the loop's variable.

        Non-temporal stores write whole lines, from the first one on; a loop
        before that does the ends. `prefetch` gives the prefetches that go with each line.
        """
        em = self.env.em
        random = (
            neighbouring_randoms(self.env, index_set.statements, (index_set.axis, self.v))
            if simd
            else []
        )
        if random:
            self.random_block_loop(index_set, low, high, position, random, accs)
            return
        if simd and short_loop(self, index_set, low, high, accs or {}):
            return
        nontemporal = self.nontemporal_stores(index_set.statements, index_set.axis) if simd else []
        loop = partial(self.point_loop, index_set, position, simd, accs or {})
        if nontemporal:
            self.nontemporal_loop(index_set, low, high, nontemporal, loop, prefetch)
            return
        name = em.fresh("i_")
        if simd and self.is_costly(index_set):
            em.used.add("d_short_vectors")
            with (
                em.inside() as block,
                blocks_as_floats(self, index_set, name, UNROLLED_ELEMENTS) as conversion,
            ):
                block.add(*conversion.before)
                loop(name, f"for (int l = 0; l < {UNROLLED_ELEMENTS}; ++l)", "l")
                block.add(*conversion.after)
            em.scope.add(f"long long {name} = {low};")
            count = UNROLLED_ELEMENTS
            head = f"for (; d_short_vectors && {name} + {count} <= {high}; {name} += {count})"
            em.scope.loop(head, block.lines)
            low, name = name, em.fresh("i_")
        loop(name, f"for (long long {name} = {low}; {name} < {high}; ++{name})", "")

    def point_loop(
        self,
        index_set: IndexSet,
        position: str,
        simd: bool,
        accs: dict[str, Accumulator],
        name: str,
        head: str,
        lane: str,
    ) -> None:
        """A loop over the body at ``name``, or (in a `lane`) at ``name + l``."""
        em = self.env.em
        em.name_axis(index_set.axis, f"({name} + l)" if lane else name)
        with em.inside(index_set.axis, self.v) as scope:
            at = position.replace("@", em.axis_text[index_set.axis])
            self.body(index_set, accs, lane or "0", at)
        if simd:
            em.scope.add(em.simd(scope))
        em.scope.loop(head, scope.lines)

    def nontemporal_loop(
        self,
        index_set: IndexSet,
        low: str,
        high: str,
        nontemporal: Sequence[Write],
        loop: Callable[[str, str, str], None],
        prefetch: Callable[[str, int], list[str]] | None,
    ) -> None:
        """Whole lines by stores that pass the caches, and a loop before them for the ends."""
        em, name = self.env.em, self.env.em.fresh("i_")
        lanes = max(64 // ITEMSIZE[w.dtype] for w in nontemporal)
        copy_out = (
            "d_nontemporal_last"
            if not self.is_single_pass and self.has_costly_pass
            else "d_nontemporal_lanes"
        )
        first, last, end, upto = (em.fresh(s) for s in ("first", "last", "end", "upto"))
        address = store_address(self.env, nontemporal[0], index_set.axis, low)
        em.scope.add(
            f"const long long {first} = d_line_start({address}, {low}, {high});",
            f"const long long {last} = {high} - ({high} - {first}) % {lanes};",
        )
        with em.inside() as ends:
            ends.add(f"const long long {upto} = {end} ? {high} : {first};")
            head = f"for (long long {name} = {end} ? {last} : {low}; {name} < {upto}; ++{name})"
            loop(name, head, "")
        em.scope.loop(f"for (int {end} = 0; {end} < 2; ++{end})", ends.lines)
        with em.inside() as block:
            buffers = {w: store_buffer(self.env, w, lanes) for w in nontemporal}
            self.store_cells |= {w: f"{text}[l]" for w, text in buffers.items()}
            if prefetch:
                block.add(*prefetch(name, lanes))
            elif self.is_single_pass and index_set.axis == self.v:
                block.add(
                    *nontemporal_prefetches(self.env, index_set.statements, self.v, name, lanes)
                )
            with blocks_as_floats(self, index_set, name, lanes, buffers) as conversion:
                block.add(*conversion.before)
                loop(name, f"for (int l = 0; l < {lanes}; ++l)", "l")
                block.add(*conversion.after)
            for w, text in buffers.items():
                del self.store_cells[w]
                address = store_address(self.env, w, index_set.axis, name)
                block.add(f"{copy_out}<{lanes}>({address}, {text});")
        em.scope.loop(
            f"for (long long {name} = {first}; {name} < {last}; {name} += {lanes})", block.lines
        )

    @property
    def is_single_pass(self) -> bool:
        """Whether the nest has one pass, and stores nothing behind it."""
        return len(self.plan.passes) == 1 and not self.plan.row_writes

    def nontemporal_stores(self, statements: Sequence[Statement], axis: Axis) -> list[Write]:
        """The non-temporal stores of a vector loop; of one of several passes, some of which are
        costly, only with AVX-512 (see `nontemporal`)."""
        return nontemporal_stores(self.env, statements, axis)

    @cached_property
    def has_costly_pass(self) -> bool:
        """Whether some pass has costly arithmetic at every point."""
        reduced = frozenset(self.env.loops.reduced)
        return any(
            flops_of(n for n in unique_nodes(p.roots()) if self.env.em.deps(n) & reduced)
            > MIN_BUFFERED_FLOPS
            for p in self.plan.passes
        )

    def is_costly(self, index_set: IndexSet) -> bool:
        """Whether the arithmetic of a long loop, or how its elements become floats, is worth more
        than one vector at a time."""
        nodes = unique_nodes(r for p in index_set.statements for r in roots_of(p))
        costly = flops_of(nodes) > MIN_BUFFERED_FLOPS or bool(
            bf16_loads(index_set) or bf16_stores(index_set)
        )
        return hint(index_set.count) >= 2 * UNROLLED_ELEMENTS and costly

    def random_block_loop(
        self,
        index_set: IndexSet,
        low: str,
        high: str,
        position: str,
        random: Sequence[Expr],
        accs: dict[str, Accumulator] | None,
    ) -> None:
        """A loop by blocks that start with the drawing of their random numbers."""
        em, length = self.env.em, 4 * RANDOM_BLOCK
        start, end, name = em.fresh("b"), em.fresh("e"), em.fresh("i_")
        with em.inside() as block:
            block.add(f"const long long {end} = {smaller(f'{start} + {length}', high)};")
            names = [random_block(self.env, n, index_set.axis, start, length) for n in random]
            self.staged |= {n: f"{x}[{name} - {start}]" for n, x in zip(random, names, strict=True)}
            em.name_axis(index_set.axis, name)
            with em.inside(index_set.axis, self.v) as scope:
                self.body(index_set, accs or {}, "0", position.replace("@", name))
            block.add(em.simd(scope))
            block.loop(f"for (long long {name} = {start}; {name} < {end}; ++{name})", scope.lines)
        for n in random:
            del self.staged[n]
        em.scope.loop(
            f"for (long long {start} = {low}; {start} < {high}; {start} += {length})", block.lines
        )
