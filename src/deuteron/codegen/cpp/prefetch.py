"""What the passes over a row prefetch: its end, the next row, results to come.

In: the plan of a nest's passes. Out: C++ lines for one step of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from deuteron.codegen.cpp.nests import PassWriter
from deuteron.codegen.cpp.prefetch_streaming import PREFETCH_BYTES, prefetch_lines
from deuteron.codegen.loops import Write, points_visited, read_of, unique_nodes
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Index, hint
from deuteron.ir.operations import ITEMSIZE

NEXT_ROW_BYTES = (1 << 10, 1 << 18)  # bytes of a row whose successor is worth a prefetch
MAX_STORED_ROW_BYTES = 1 << 15  # most bytes of it where the pass that fetches also stores


class PrefetchingWriter(PassWriter):
    """A writer of passes over rows. `step`: the parallel axis along which this thread goes on."""

    step: Axis | None = None

    def prefetches(self, k: int, base: str, lanes: int) -> list[str]:
        """In the second pass over a row: prefetches of the next row's operands and of results to
        come.

        The caches' own prefetchers stop at the end of a page, and the wait for a row's first pass
        is not hidden by its later ones (softmax of 4096 x 2048 f32, one core: 4.9 ms without, 2.8
        ms with). Where the second pass stores too, short rows gain (AVX2: quantizing rows of 8 KiB
        takes 0.62, norms of 4 KiB and their gradients 0.88 to 0.98 of the time); rows of 64 KiB, on
        which the caches' prefetchers work for longer, lose 4%. With AVX-512 such fetches get in the
        way of stores (1.4 times slower), unless these are non-temporal and arithmetic is costly;
        where it is cheap, `prefetch_later_pages` does it; but not on AMD's, where it is cheap
        (quantizing 0.73, RMS norm's gradients 0.95 of the time; with exponentials 1.0 to 1.1).
        """
        step, passes = self.step, self.plan.passes
        if k == 0 and (len(passes) == 1 or self.exceeds_caches) and not self.late_nontemporal:
            return self.prefetch_loads(self.new_loads(0), base, lanes)
        out = self.prefetch_later_pages(k, base, lanes)
        if k != 1 or step is None:
            return out
        stores, most = self.next_row
        next_reads: dict[tuple[str, Index, Write | None], int] = {}
        for n in self.new_loads(0):
            c = n.attr[1][0].coefficient(step)
            if c is not None and c.value != 0:
                next_reads[n.attr[0], n.attr[1][0] + c, None] = ITEMSIZE[n.dtype]
        for q in passes[2:]:
            for w in q.writes:
                if w.mask is None and (w not in self.late_nontemporal or self.has_costly_pass):
                    next_reads[w.tensor, w.address, w] = ITEMSIZE[w.dtype]
        nontemporal, costly = bool(self.late_nontemporal), self.has_costly_pass
        narrow_only = stores and not nontemporal if costly else stores or nontemporal
        for (tensor, address, late), item in next_reads.items():
            in_reach = NEXT_ROW_BYTES[0] <= item * hint(self.row_size) <= most
            if in_reach and len(out) <= 16:
                lines = prefetch_lines(
                    self.env, self.v, tensor, address, item, base, lanes, 0, late is not None
                )
                where = (
                    "d_short_vectors"
                    if costly or late in self.late_nontemporal
                    else "!d_reads_stall"
                )
                only = f"if ({where}) " if late in self.late_nontemporal or narrow_only else ""
                out += [only + line for line in lines]
        self.env.em.used |= (
            {"d_short_vectors", "d_reads_stall"} if narrow_only or nontemporal else set()
        )
        return out

    @cached_property
    def next_row(self) -> tuple[bool, int]:
        """Whether the second pass stores; the most bytes of a row that it fetches."""
        stores = any(isinstance(w, Write) for w in self.plan.passes[1].statements)
        return stores, MAX_STORED_ROW_BYTES if stores else NEXT_ROW_BYTES[1]

    @cached_property
    def late_nontemporal(self) -> list[Write]:
        """The non-temporal stores of the later passes of several."""
        later = [p for p in self.plan.passes[1:] if not p.reductions]
        return [w for p in later for w in self.nontemporal_stores(p.statements, self.v)]

    def prefetch_later_pages(self, k: int, base: str, lanes: int) -> list[str]:
        """With AVX-512, in one of several passes: prefetches of what comes two pages later, where
        rows are short (softmax of 131072 rows of 64 f32 takes 0.69 of the time), or where the last
        pass has non-temporal stores (RMS norm of 8192 rows of 1024, two cores: 2.75 ms with
        ordinary stores, whatever is fetched, 2.30 ms with non-temporal ones, 1.88 ms with fetches;
        of the next row in the last pass 2.27 ms). In a costly pass the next row is better, if it is
        near (softmax 1.38, 1.29 and 1.12 ms), beside what earlier passes have not read."""
        if len(self.plan.passes) == 1:
            return []
        row = 4 * hint(self.row_size)
        not_next_row = k or not self.has_costly_pass or row > self.next_row[1]
        if not (self.late_nontemporal and not_next_row or k == 0 and row < NEXT_ROW_BYTES[0]):
            return []
        loops, most = self.env.loops, self.env.machine.l2_bytes
        axes = (*loops.parallel, *loops.reduced)
        beyond_cache = [
            n
            for n in self.new_loads(k)
            if read_of(n).itemsize * points_visited(n.attr[1][0], axes) > most
        ]
        lines = self.prefetch_loads(beyond_cache, base, lanes, wide=True)
        self.env.em.used |= {"d_short_vectors"} if lines else set()
        return [f"if (!d_short_vectors) {line}" for line in lines]

    def new_loads(self, k: int) -> list[Expr]:
        """What a pass reads and, unless each reads the row from memory, no earlier one does."""
        passes = self.plan.passes
        seen = (
            unique_nodes(r for p in passes[:k] for r in p.roots())
            if not self.exceeds_caches
            else []
        )
        known = {(n.attr[0], n.attr[1]) for n in seen if n.op == "load"}
        return [
            n
            for n in unique_nodes(passes[k].roots())
            if n.op == "load" and n.attr[1] and not n.args and (n.attr[0], n.attr[1]) not in known
        ]

    @property
    def exceeds_caches(self) -> bool:
        """Whether a row is so long that each pass reads it from memory."""
        return 4 * hint(self.row_size) > NEXT_ROW_BYTES[1]

    def prefetch_loads(
        self, loads: Sequence[Expr], base: str, lanes: int, wide: bool = False
    ) -> list[str]:
        """In the only pass over rows: fetches of what comes two pages later, where that is the same
        row or the next (sum of 4096 rows of 4096 bf16, one core: 1.38 ms without, 0.70 ms with;
        1024 elements ahead 0.91 ms). Norm of 8192 rows of 1024 f32: 0.82 and 0.59 ms; argmax of
        512 rows of 32000, two cores: 2.4 and 1.2 ms. On AMD's rows of bf16 take 0.85 to 0.92 of the
        time with, those of f32 1.05 to 1.11 (AVX2), and 1.0 to 1.25 (AVX-512, 262144 rows of 64).
        """
        if not wide and any(isinstance(w, Write) for w in self.plan.passes[0].statements):
            return []
        out: list[str] = []
        for n in loads:
            if len(out) > 16:
                break
            c = n.attr[1][0].coefficient(self.step) if self.step is not None else None
            separate = c is None or c.axes() or hint(c) != hint(self.row_size)
            item = ITEMSIZE[n.dtype]
            row = item * hint(self.v.extent)
            if separate and row < 4 * PREFETCH_BYTES:
                continue
            lines = prefetch_lines(
                self.env, self.v, n.attr[0], n.attr[1][0], item, base, lanes, PREFETCH_BYTES // item
            )
            if item > 2 and not wide:
                self.env.em.used.add("d_reads_stall")
                lines = [f"if (d_reads_stall) {line}" for line in lines]
            out += lines
        return out
