"""The kernels that compute what a region around products stores.

In: computations in order of execution, the names of those that others need (sinks), layouts, a
device. Out: for each kernel its nest, the best of its tilings and what that is estimated to take;
or a `Refusal`. Each kernel computes what it needs from what is in memory: what several need
(the scores of an attention's backward) each of them computes. Where one would reduce over what it
has blocks of, an earlier one stores that reduction.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import ModuleType

from deuteron.base.device import DeviceSpec
from deuteron.base.memo import MEMO
from deuteron.ir.nest import Nest
from deuteron.ir.program import Compute, Layout
from deuteron.schedule import cache_tile, tile
from deuteron.schedule.alike import numbered, restored, restored_text
from deuteron.schedule.closure import closure
from deuteron.schedule.legality import Refusal
from deuteron.schedule.parts import Parted, parted
from deuteron.schedule.tile import Estimate
from deuteron.schedule.tiling import Tiling

# Programs of each multiprocessor that loops in parts may be walked by; places of a part at least.
PROGRAMS, LEAST = (1, 2, 4), 128
# What a kernel may take that does the work of two, of these: estimates are no better than that.
FEWER = 1.15


@dataclass(frozen=True)
class Tiled:
    """A kernel: the names of its computations, their nest, how that is tiled; `apart`: what an
    earlier kernel stores, and why they are not one."""

    computes: tuple[str, ...]
    nest: Nest
    tiling: Tiling
    estimate: Estimate
    made: tuple[tuple[str, Layout], ...] = ()  # tensors that are no computations: of parts
    apart: tuple[tuple[str, Refusal], ...] = ()


Kernels = tuple[Tiled, ...]
Computes = Mapping[str, Compute]
Layouts = Mapping[str, Layout]
Names = Sequence[str]
_TILED: dict[Hashable, Tiled | Refusal] = MEMO.answers()  # of alike computations
NO_TILING = Refusal(
    "no tiling",
    f"no block fits on chip, a width is over {tile.MAX_WHOLE} or not fixed, or rows begin between "
    "multiples of 4 bytes",
)

CROSSED = Refusal(
    "crossed sums",
    "one is summed over what the other has rows of, and that over the rows of the one",
)


def crossed(nest: Nest) -> bool:
    """Whether of two sums each lives on what the other is over: gradients of queries and keys."""
    each = [(set(s.over), set(nest.lives(s))) for s in nest.reductions.values()]
    return any(a & y and b & x for a, x in each for b, y in each)


def tilings(spec: DeviceSpec) -> ModuleType:
    """Who knows tilings for a device: by whether it has memory that programs share."""
    return tile if spec.shared else cache_tile


def cover(
    computes: Computes, sinks: Names, layouts: Layouts, spec: DeviceSpec, wide: str
) -> Kernels | Refusal:
    """The fastest kernels that store `sinks`, in order of execution; `wide`: see `closure`."""
    return _Cover(computes, layouts, spec, wide).kernels(sinks)


def predicted_us(kernels: Sequence[Tiled]) -> float:
    return sum(k.estimate.us for k in kernels)


class _Cover:
    def __init__(self, computes: Computes, layouts: Layouts, spec: DeviceSpec, wide: str) -> None:
        self.computes, self.layouts, self.spec, self.wide = computes, layouts, spec, wide
        self.order = list(computes)
        self.rows = False  # whether kernels without products are taken
        self.tiled = cache(self.best)  # goals are divided several times

    def kernels(self, sinks: Sequence[str]) -> Kernels | Refusal:
        """In execution order. Where several are needed, and one of them would reduce over what it
        has blocks of, an earlier one stores that reduction. What is made of such rows only may have
        a kernel without products."""
        made = self.found(sinks)
        self.rows = True
        other = self.found(sinks) if len(sinks) > 1 else made
        if isinstance(made, Refusal) or isinstance(other, Refusal):
            return other if isinstance(made, Refusal) else made
        return tuple(x for k in min(made, other, key=predicted_us) for x in self.in_parts(k))

    def in_parts(self, k: Tiled) -> Kernels:
        """A kernel whose grid keeps too little of the device busy: as one of which several programs
        share a loop, and one that merges their partial results, if these are faster."""
        few = k.tiling.programs() < self.spec.cores * max(PROGRAMS)
        loops = [d for d in k.tiling.dims if d.mode == "loop" and len(d.axes) == 1]
        device = self.layouts[k.nest.stores[0].tensor].device
        best: Kernels = (k,)
        for d in loops if self.spec.shared and few else ():
            wish = (self.spec.cores * n // k.tiling.programs() for n in PROGRAMS)
            for count in dict.fromkeys(min(n, d.extent // LEAST) for n in wish):
                p = parted(k.nest, d.axes[0], count, device) if count > 1 else None
                if p is not None:
                    both = self.merged(k, p)
                    best = min(best, both, key=predicted_us) if both else best
        return best

    def merged(self, k: Tiled, p: Parted) -> Kernels:
        """The kernels of a nest in parts; none where one has no tiling."""
        layouts = {**self.layouts, **p.layouts}
        found = [tile.candidates(n, layouts, self.spec) for n in (p.partial, p.merger)]
        if not all(found):
            return ()
        made, merged = (f[0] for f in found)
        partial = Tiled(k.computes, p.partial, *made, tuple(p.layouts.items()), k.apart)
        return partial, Tiled(k.computes, p.merger, *merged)

    def found(self, sinks: Sequence[str]) -> Kernels | Refusal:
        one = self.kernel(sinks, ())
        tried: list[Kernels | Refusal] = [one if isinstance(one, Refusal) else (one,)]
        if len(sinks) > 1:
            tried.append(self.divided(sinks))
            needed = self.needed(sinks, ())
            rows = [n for n, c in needed.items() if reduces_rows(c) and n not in sinks]
            if rows:
                tried.append(self.used(self.divided([*rows, *sinks]), sinks))
        made = [t for t in tried if not isinstance(t, Refusal)]
        return min(made, key=predicted_us) if made else tried[0]

    def used(self, made: Kernels | Refusal, sinks: Sequence[str]) -> Kernels | Refusal:
        """The same, and nothing stored that nobody reads."""
        if isinstance(made, Refusal):
            return made
        wanted = {*sinks, *(n for k in made for n in k.nest.tensors()[0])}
        stored = {n for k in made for n in k.nest.tensors()[1]}
        if stored <= wanted:
            return made
        return self.divided([n for n in self.order if n in stored & wanted])

    def divided(self, goals: Sequence[str]) -> Kernels | Refusal:
        """Each goal in the first kernel that can have it and gains by it."""
        parts: list[list[str]] = []
        made: list[Tiled] = []
        alone: Tiled | Refusal = Refusal("no nest", "nothing is stored")
        waiting: list[str] = []  # what has no kernel without a later goal
        for goal in sorted(goals, key=self.order.index):
            new = [*waiting, goal]
            alone, why = self.kernel(new, [n for part in parts for n in part]), []
            for k, part in enumerate(parts):
                memory = [n for p in parts[:k] for n in p]
                both = self.kernel([*part, *new], memory)
                if isinstance(both, Refusal):
                    why.append((part[-1], both))
                    continue
                us = 0.0 if isinstance(alone, Refusal) else made[k].estimate.us + alone.estimate.us
                if isinstance(alone, Refusal) or both.estimate.us <= FEWER * us:
                    part += new
                    made[k] = replace(both, apart=made[k].apart)
                    waiting = []
                    break
                text = f"{both.estimate.us:.1f} us in one kernel, {us:.1f} us apart"
                why.append((part[-1], Refusal("no gain", text)))
            else:
                waiting = new if isinstance(alone, Refusal) else []
                if isinstance(alone, Tiled):
                    parts.append(new)
                    made.append(replace(alone, apart=tuple(why)))
        return alone if waiting and isinstance(alone, Refusal) else tuple(made)

    def kernel(self, sinks: Sequence[str], memory: Sequence[str]) -> Tiled | Refusal:
        """One kernel that stores `sinks`, where `memory` has been stored before."""
        made = self.tiled(tuple(sinks), tuple(self.needed(sinks, memory)))
        if isinstance(made, Refusal) or self.rows or made.nest.contractions:
            return made
        return NO_TILING

    def best(self, sinks: Sequence[str], names: tuple[str, ...]) -> Tiled | Refusal:
        """One kernel that computes `names` and stores `sinks`; regions share many."""
        alike, numbers = numbered(self.computes[n] for n in names)
        layouts = {number: self.layouts[n] for n, number in numbers.items()}
        inner = tuple(numbers[n] for n in sinks)
        key = (alike, inner, tuple(layouts.items()), self.spec, self.wide)
        if key not in _TILED:
            _TILED[key] = self.tiled_alike({c.name: c for c in alike}, inner, layouts)
        found = _TILED[key]
        back = {number: n for n, number in numbers.items()}
        naming = partial(restored_text, naming=back.__getitem__)
        if isinstance(found, Refusal):
            return replace(found, detail=naming(found.detail))
        return replace(found, computes=names, nest=restored(found.nest, naming))

    def tiled_alike(self, computes: Computes, sinks: Names, layouts: Layouts) -> Tiled | Refusal:
        nest = closure(computes, sinks, self.wide)
        if isinstance(nest, Refusal):
            return nest
        found = tilings(self.spec).candidates(nest, layouts, self.spec)
        if not found:
            return CROSSED if crossed(nest) else NO_TILING
        return Tiled(tuple(computes), nest, *found[0])

    def needed(self, sinks: Sequence[str], memory: Sequence[str]) -> dict[str, Compute]:
        """What the sinks are computed from, in execution order."""
        needed = set(sinks)
        for name in reversed(self.order):
            if name in needed:
                loads = self.computes[name].body.loads()
                needed.update(n.attr[0] for n in loads if n.attr[0] not in memory)
        return {n: c for n, c in self.computes.items() if n in needed}


def reduces_rows(c: Compute) -> bool:
    """Whether it is a reduction, and no product of matrices."""
    if c.body.op != "reduce":
        return False
    body = c.body.args[0]
    sides = [x.axes() for x in body.args] if body.op == "mul" else []
    return not (sides and sides[0] - sides[1] and sides[1] - sides[0])


__all__ = ["Computes", "Kernels", "Layouts", "Names", "Tiled", "cover", "predicted_us", "tilings"]
