"""Scans of few long rows on a GPU: a team of programs (a cluster) walks along each in turns.

In: `Loops` that scan, and the device; then the nest's emitter. Out: a `Form` of rows that is not
persistent and has a team; its text. A turn is a block of the row for each program, side by side:
each publishes what its block folds to, scans it meanwhile, and collects what the others published;
what comes before its block, in this turn and in earlier ones, it adds in a fixed order, so that
results repeat bit for bit.

    block = first; publish(fold(block))
    for each turn:
        ahead = block of the next turn
        scanned = scan(block)
        start, carry = through(carry, collect())
        publish(fold(ahead))
        store(start + scanned)
        block = ahead

The next block is on its way while this one is scanned, and what it folds to while this one is
stored: nobody waits for the memory or the team's slowest. H200, 64 rows of 1048576 (f32), us: a
copy 127; so, by 8 programs a row of 4 warps with 2048 elements each, 151.6, by 4 with 4096 elements
158, by 8 of 8 warps with 4096 163; in parts (`lower.nn`) 194. On another day by 8 programs 150 (155
where what is read is marked to be let go first), by 10 149.

What blocks read that is needed again where results are stored is kept with them. Rows are scanned
so only beside what is computed point by point (`schedule.profit.scanned_by`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from deuteron.base.device import DeviceSpec
from deuteron.base.scans import EXCHANGED, LIGHT_ROOM, MOST_SCANS, ROOM, scan_team
from deuteron.codegen.loops import Loops, Write, roots_of, unique_nodes
from deuteron.codegen.triton import scalars
from deuteron.codegen.triton.emit import Emitter
from deuteron.codegen.triton.folds import clean, identity, masked_value, scan_result, uses
from deuteron.codegen.triton.reading import read_along, row_loads, size, unit_bytes, widest
from deuteron.codegen.triton.scalars import fold_step
from deuteron.codegen.triton.scope import R
from deuteron.codegen.triton.teams import PARAM, WARP, begin
from deuteron.codegen.triton.tiling import Blocks, Form
from deuteron.ir.expr import ITEMSIZE
from deuteron.schedule.kernel import Prefix

# Elements of a block, where elements have 4 bytes and fewer, and warps that scan it (see above).
# Half of them where more is held of each or a lane's are no neighbours: registers are enough for
# `ROOM` programs, one or two more than are there at once, since some multiprocessors take fewer
# clusters.
BLOCK, NARROW, WARPS, LEAST = 2048, 4096, 4, 512


def scan_form(loops: Loops, spec: DeviceSpec) -> Form | None:
    """The form of scans by teams; None where rows have none (`base.scans`), or are not only scanned
    and written point by point."""
    scans = [p for p in loops.parts if isinstance(p, Prefix)]
    x, r = loops.parallel, loops.reduced
    if not 0 < len(scans) <= MOST_SCANS or len(scans) + len(points(loops)) < len(loops.parts):
        return None
    if loops.chunk is not None or loops.section or any(a.extent.value is None for a in r):
        return None
    names = {p.name for p in scans}
    if any(p.body.dtype not in EXCHANGED or uses(p.body, names) for p in scans):
        return None
    if any(unit_bytes(loops, a) > unit_bytes(loops, r[-1]) for a in x):
        return None  # rows lie side by side
    each, held = widest(loops), max(len(scans), row_loads(loops))
    light = held == 1 and each >= 4 and not read_along(loops, Write)
    team = scan_team(size(x), size(r), spec, light)
    if not team:
        return None
    room = LIGHT_ROOM if light else ROOM
    most = spec.registers // 4 // (room * WARP * WARPS) // 8 * 8
    block = (BLOCK if each >= 4 else NARROW) // (1 if held == 1 else 2 if held <= 3 else 4)
    block = max(LEAST, block // (1 if size(r) * each % 16 == 0 else 2 if each >= 4 else 4))
    tiles = tuple(
        Blocks((("x", 1), ("r", n)), WARPS, 1, most) for n in (block, max(LEAST, block // 2))
    )
    return Form("rows", (("x", x), ("r", r)), tiles, team=team, cluster=True)


def points(loops: Loops) -> list[Write]:
    """What is stored, an element at every point."""
    found = [p for p in loops.parts if isinstance(p, Write)]
    return [w for w in found if w.level == "point" and w.accumulate is None and not w.scattered]


class TeamScans:
    """The scans of one nest."""

    def __init__(self, loops: Loops, form: Form, em: Emitter) -> None:
        self.em, self.count, self.cluster = em, form.team, int(form.cluster)
        self.scans = [p for p in loops.parts if isinstance(p, Prefix)]
        names = {p.name for p in self.scans}
        reads = [n for n in loops.nodes if n.op == "load" and n.attr[1] and em.deps(n) >= R]
        later = set(unique_nodes(root for w in points(loops) for root in roots_of(w)))
        own = set(unique_nodes(p.body for p in self.scans))
        # Where they are narrower than what is scanned, they are kept in its place.
        self.narrow = [
            p
            for p in self.scans
            if sum(ITEMSIZE[n.dtype] for n in set(reads) & set(unique_nodes([p.body]))) < 4
        ]
        self.whole = [p for p in self.scans if p not in self.narrow]
        again = later | set(unique_nodes(p.body for p in self.narrow))
        self.kept = [n for n in reads if n in own & again]
        self.late = [n for n in reads if n in later - own and not uses(n, names)]
        em.policies = {n: "evict_last" for n in reads if em.shared(n)}

    @contextmanager
    def turns(self) -> Iterator[None]:
        """The walk over the team's rows. The caller writes, in the scope of a turn whose scans are
        complete, what is stored."""
        em, r = self.em, self.em.dims["r"]
        step = f"{self.count} * {r.block}"
        begin(em, self.count, len(self.scans), self.cluster)
        em.scope.add("rfirst = roffset")
        with em.inside() as row:
            em.enter(em.dims["x"], "xoffset")
            row.add("roffset = rfirst")
            kept, values = self._read("block", r.masked)
            carries = [em.fresh("carry") for _ in self.scans]
            for p, carry in zip(self.scans, carries, strict=True):
                neutral = identity(p.kind, p.body.dtype)
                row.add(f"{carry} = tl.full([], {neutral}, {scalars.TYPE[p.body.dtype]})")
            row.add(*self._published(values))
            with em.inside() as turn:
                turn.add(f"roffset = rturn + {step} + rfirst")
                ahead, values = self._read("ahead", True)
                turn.add("roffset = rturn + rfirst")
                em.enter(r, "roffset")
                blocks = dict(zip(self.whole, kept))
                turn.texts.update(zip(self.kept, kept[len(blocks) :], strict=True))
                for n in self.late:  # on their way, too, while the team is waited for
                    em.value(n)
                own = [blocks.get(p) or self._scanned(p) for p in self.scans]
                self._scan(own, carries)
                turn.add("tag += 1")
                turn.block(f"if rturn + {step} < rnumel", self._published(values))
                yield
                turn.add(*(f"{b} = {a}" for b, a in zip(kept, ahead, strict=True)))
            stages = f"num_stages={em.stages}"
            row.block(f"for rturn in tl.range(0, rnumel, {step}, {stages})", turn.lines)
        em.scope.block("for xoffset in range(team, xnumel, teams)", row.lines)
        rounds = f"tl.cdiv(xnumel, teams) * tl.cdiv(rnumel, {step})"
        em.scope.add(f"libm.end({PARAM}, before, {rounds}, {self.cluster})")

    def _scanned(self, p: Prefix) -> str:
        return masked_value(self.em, p.kind, p.body, self.em.mask(R))

    def _read(self, stem: str, masked: bool) -> tuple[list[str], list[str]]:
        """The block at `roffset`: what is kept of it, and what each scan scans."""
        em, r = self.em, self.em.dims["r"]
        em.dims["r"] = replace(r, masked=masked)
        with em.inside() as scope:
            em.enter(em.dims["r"], "roffset")
            values = [em.fresh("value") for _ in self.scans]
            scope.add(*(f"{v} = {self._scanned(p)}" for v, p in zip(values, self.scans)))
            texts = [v for v, p in zip(values, self.scans) if p in self.whole]
            texts += [em.value(n) for n in self.kept]
            kept = [em.fresh(stem) for _ in texts]
            scope.add(*(f"{name} = {text}" for name, text in zip(kept, texts, strict=True)))
        em.scope.add(*scope.lines)
        em.dims["r"] = r
        return kept, values

    def _published(self, blocks: list[str]) -> list[str]:
        which = f"{len(self.scans)}, {self.count}"
        return [
            f"libm.publish(words, {k}, {which}, libm.fold_{p.kind}({blocks[k]}), tag, "
            f"{self.cluster})"
            for k, p in enumerate(self.scans)
        ]

    def _scan(self, blocks: list[str], carries: list[str]) -> None:
        """The scan of each block, which begins with what comes before it."""
        em, which = self.em, f"{len(self.scans)}, {self.count}, tag, {self.cluster}"
        own = [em.fresh("own") for _ in self.scans]
        em.scope.add(
            *(
                f"{name} = libm.scan_{p.kind}({block})"
                for name, p, block in zip(own, self.scans, blocks)
            )
        )
        for k, (p, carry) in enumerate(zip(self.scans, carries, strict=True)):
            told, start, name = em.fresh("told"), em.fresh("start"), em.fresh(f"{clean(p.name)}_")
            neutral = identity(p.kind, p.body.dtype)
            values = f"libm.told({told}, {carry}, {neutral}, {self.count})"
            em.scope.add(
                f"{told} = libm.collect(words, {k}, {which}, {WARP})",
                f'{start}, {carry} = libm.through({carry}, {values}, place, {neutral}, "{p.kind}")',
                f"{name} = {fold_step(p.kind, p.body.dtype, start, own[k])}",
            )
            em.scope.texts[scan_result(p)] = name


__all__ = ["TeamScans", "scan_form"]
