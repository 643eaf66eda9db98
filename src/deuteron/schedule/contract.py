"""Products of matrices in one kernel with what surrounds them, where that is faster.

In: groups and library calls in execution order. Out: the same, with runs of them as one
`Contracted` step: whole alternatives are compared, the library calls and the kernels beside them
with the best tiling of one nest (`closure`, `tile`). What was taken and what was not is in the
Record, with the times of both.

A region begins with a product (what the library multiplies, or a group that does so with one row)
and grows: by the groups that read its result, by the product that reads theirs, by its readers
(attention, which never stores its scores), and by a group that only makes an operand (a norm).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from deuteron.base.device import DeviceSpec
from deuteron.base.memo import MEMO
from deuteron.base.products import Product, library_us, share_kernels, tf32
from deuteron.base.record import Record
from deuteron.ir.nest import Nest
from deuteron.ir.program import Compute, Extern, Layout, tensors_read
from deuteron.schedule.alike import Naming, numbered, restored, restored_text
from deuteron.schedule.cache_tile import sole_product
from deuteron.schedule.closure import closure, factors_dtype
from deuteron.schedule.cover import Computes, Kernels, Layouts, Names, cover, predicted_us, tilings
from deuteron.schedule.data_masks import tabled
from deuteron.schedule.group import Group, group_of_one
from deuteron.schedule.legality import Refusal, fits
from deuteron.schedule.loop_passes import DATA_SHARE
from deuteron.schedule.profit import cost, launch_us
from deuteron.schedule.tile import Estimate
from deuteron.schedule.tiling import Tiling

# How much shorter a kernel must be predicted than the library's calls and the kernels beside them.
# H100, 60 products (``python -m dev.gpu.epilogues``): those predicted 0.10 to 0.15 shorter were
# 0.04 and 0.08, those predicted more 0.02 to 0.54.
MIN_GAIN = 0.1
# What a byte of memory that others could use counts, beside writing and reading it, in bytes of
# traffic; as `capture.partition` counts what is saved.
MEMORY_COST = 2.0
# Of a kernel's time, what tables of what data hides of it (`data_masks`) may take: how much they
# save is known at run time only, an assumption.
TABLE_SHARE = 0.1
# Computations of one nest at most; steps of a region; products in a chain, each of which reads the
# one before.
MAX_COMPUTES, MAX_STEPS, CHAINED = 64, 12, 2
# Results of a region at most: the kernels that `cover` tries grow with their square. BridgeTower
# (f32, two layers, gradients), seconds of one core for all regions: of up to 21 results 93, of
# which those of up to 10 33; no kernel was taken. Attention's tests take some of up to 10.
MAX_SINKS = 10
T = TypeVar("T")
_RECKONED: dict[Hashable, Any] = MEMO.answers()  # of alike regions, of whatever layer


@dataclass(frozen=True)
class Contracted:
    """One kernel with products: its computations, its nest, and how that is tiled."""

    computes: tuple[Compute, ...]
    nest: Nest
    tiling: Tiling
    estimate: Estimate
    device: str
    made: tuple[tuple[str, Layout], ...] = ()  # tensors that are no computations
    apart: tuple[tuple[str, Refusal], ...] = ()  # see `cover.Tiled`


@dataclass(frozen=True)
class Offer:
    """Kernels for the steps of a region, and the microseconds that they save; `left`: what beyond
    its traffic the memory counts that the region reads, and another could do without."""

    region: frozenset[int]
    us: float
    left: float
    text: str
    steps: tuple[Contracted, ...]

    def beaten(self, by: Offer, what: str) -> Refusal:
        """Why `by`, which is `what`, was taken: the figures that decided."""
        why = f"{self.us:.1f} us saved less {self.left:.1f} for memory that only it reads; {what}: "
        why += f"{by.us:.1f} less {by.left:.1f}; {self.text}"
        more = self.us > by.us
        return Refusal("leaves more in memory", why) if more else Refusal("another saves more", why)


def contracted(kernels: Kernels, computes: Computes, naming: Naming) -> Iterator[Contracted]:
    """Kernels of alike computations as those of `computes`."""
    for k in kernels:
        inside = tuple(computes[naming(n)] for n in k.computes)
        made = tuple((naming(n), x) for n, x in k.made)
        nest, device = restored(k.nest, naming), inside[-1].layout.device
        apart = tuple((naming(n), replace(r, detail=naming(r.detail))) for n, r in k.apart)
        yield Contracted(inside, nest, k.tiling, k.estimate, device, made, apart)


def called(
    computes: Computes, sinks: Names, layouts: Layouts, spec: DeviceSpec, wide: str
) -> float | None:
    """Microseconds of the library's call for one product; None where that is no nest."""
    nest = closure(computes, sinks, wide)
    return None if isinstance(nest, Refusal) else tilings(spec).library_us(nest, layouts, spec)


def sole(
    computes: Computes, sinks: Names, layouts: Layouts, spec: DeviceSpec, wide: str
) -> Product | None:
    """One product that may have a kernel of its own; None where programs share tiles."""
    nest = Refusal("no nest") if spec.shared else closure(computes, sinks, wide)
    return None if isinstance(nest, Refusal) else sole_product(nest, layouts)


PlainStep = tuple[Group, float] | Extern
OrderedStep = PlainStep | Contracted


class Contraction:
    def __init__(
        self,
        steps: Sequence[PlainStep],
        layouts: dict[str, Layout],
        owner: Mapping[str, str],
        outside: set[str],
        specs: Mapping[str, DeviceSpec],
        record: Record,
        unfused: AbstractSet[str] = frozenset(),
    ) -> None:
        self.unfused = unfused
        self.steps, self.layouts, self.owner = list(steps), layouts, owner
        self.outside, self.specs, self.record = outside, specs, record
        self.wide = "tf32" if tf32() else "f32"
        self.judged: set[frozenset[int]] = set()
        self.order = list(range(len(steps)))
        self.whole: dict[int, tuple[int, ...]] = {}  # a step of a kernel -> all of that
        self.made: list[set[str]] = [names_made(s) for s in steps]
        self.read: list[set[str]] = [names_read(s) for s in steps]
        self.home = {n: k for k, names in enumerate(self.made) for n in names}
        self.us = [self.time(s) for s in steps]
        self.products = [
            isinstance(s, Extern) and us is not None for s, us in zip(steps, self.us, strict=True)
        ]
        # What the library does not multiply (one row) may be inside of a kernel as products are.
        self.inner = [x or self.multiplies(s) for x, s in zip(self.products, steps, strict=True)]
        self.readers: dict[str, list[int]] = {}
        for k, names in enumerate(self.read):
            for n in names:
                self.readers.setdefault(n, []).append(k)

    def run(self) -> tuple[OrderedStep, ...]:
        taken: dict[int, tuple[OrderedStep, ...]] = {}  # last step of a region -> what runs there
        gone: set[int] = set()
        for k in range(len(self.steps)):
            if k in gone or not self.inner[k]:
                continue
            offers: list[Offer] = []
            for region in (r for r in dict.fromkeys(self.regions(k)) if r not in self.judged):
                if not self.products[k] and sum(self.inner[m] for m in region) < 2:
                    continue
                self.judged.add(region)
                if other := gone & region:
                    what = " to ".join(self.ends(other))
                    self.refuse(region, Refusal("in another kernel", f"{what} is in one already"))
                elif found := self.offer(region):
                    offers.append(found)
            if offers:
                best = max(offers, key=lambda o: o.us - o.left)
                what = " to ".join(self.ends(best.region))
                for worse in (o for o in offers if o is not best):
                    self.refuse(worse.region, worse.beaten(best, what), worse.us)
                self.layouts.update(x for s in best.steps for x in s.made)
                steps = [x for s in best.steps for x in self.with_tables(s)]
                cuts = [c for s in steps if isinstance(s, Contracted) for c in s.nest.cuts]
                data = ", ".join(sorted({n.attr[0] for c in cuts for n in c.hidden.loads()}))
                told = f"; {data} may hide tiles, {1 - DATA_SHARE:.0%} assumed" * bool(cuts)
                ends = self.ends(best.region)
                self.note(ends, True, "saves memory traffic", best.text + told, best.us)
                for step in best.steps:
                    for goal, why in step.apart:
                        ends = goal, step.nest.stores[-1].tensor
                        self.note(ends, False, why.reason, why.detail)
                gone |= best.region
                taken[max(best.region)] = tuple(steps)
                self.move(best.region)
        out: list[OrderedStep] = []
        for k in self.order:
            if k in taken:
                out += taken[k]
            elif k not in gone:
                out += self.alone(k)
        if self.whole:
            self.judge_again(out)
        return tuple(out)

    def judge_again(self, steps: Sequence[OrderedStep]) -> None:
        """Two kernels that were not merged as a third stands between may have it in one of them
        now: that is the reason then."""
        fused = (d for d in self.record.of("decision") if d["subject"] == "fuse")
        cycles = [d for d in fused if d["reason"] == "cycle"]
        stood, stands = (Between(s if cycles else ()) for s in (self.steps, steps))
        for d in cycles:
            ends = d["first"], d["second"]
            if stood.any(*ends) and not stands.any(*ends):
                why = "what stood between them is in one kernel with a product of theirs"
                self.record.add(**d | {"reason": "in another kernel", "detail": why})

    def alone(self, k: int) -> Sequence[OrderedStep]:
        """A step that shares no kernel. Of products a kernel of its own, where that is faster than
        the call, and the guard has not found otherwise; not where programs share tiles."""
        call = self.steps[k]
        if not self.products[k] or not isinstance(call, Extern):
            return (call,)
        node, computes = call.origins[-1].node, {c.name: c for c in call.product}
        spec = self.specs[call.product[-1].layout.device]
        p = self.reckon(sole, computes, [call.product[-1].name], spec)[0]
        if p is None or node in self.unfused:
            return (call,)
        us, steps = library_us(p, spec), tuple[Contracted, ...]()
        kernels, naming = self.reckon(cover, computes, [call.product[-1].name], spec)
        if isinstance(kernels, Refusal):
            ours, text = None, restored_text(kernels.detail, naming)
        else:
            ours = predicted_us(kernels)
            text = f"generated {ours:.1f} us"
            steps = tuple(contracted(kernels, computes, naming)) if ours <= us else ()
        text = f"{p}: {text}, the library {us:.1f} us"
        self.record.add(
            "decision", subject="product", accepted=bool(steps),
            reason="generated" if steps else "library", detail=text, first=node,
            us=round(us - (ours or us), 3), generated_us=ours, library_us=us, along=list(p.sides),
        )  # fmt: skip
        self.layouts.update(x for s in steps for x in s.made)
        return steps or (replace(call, reason=text),)

    def move(self, region: frozenset[int]) -> None:
        """The region's steps follow one another, and what needs them follows."""
        late = self.behind(region) or []
        end = max(self.order.index(k) for k in region) + 1
        before = [k for k in self.order[:end] if k not in region and k not in late]
        self.order = [*before, *sorted(region), *late, *self.order[end:]]
        self.whole.update(dict.fromkeys(region, tuple(sorted(region))))

    def with_tables(self, step: Contracted) -> Iterator[OrderedStep]:
        """A kernel, after those of its tables where data masks it and they take little of its
        time."""
        spec = self.specs[step.device]
        masks = [c for c in step.computes if c.layout.dtype == "bool"] or step.computes
        origins = dict.fromkeys(o for c in masks for o in c.origins)
        nest, computes = tabled(step.nest, step.tiling, step.device, tuple(origins))
        layouts = self.layouts | {c.name: c.layout for c in computes}
        groups: list[Group] = []
        for new in map(group_of_one, computes):
            both = fits(groups[-1], new, layouts, self.owner, spec) if groups else None
            groups[-1:] = [both] if isinstance(both, Group) else [*groups[-1:], new]
        each = [cost(g, layouts, list(g.names), spec).us for g in groups]
        us = sum(us + launch_us(spec) for us in each)
        taken = us <= TABLE_SHARE * step.estimate.us
        text = f"{len(groups)} kernels, {us:.1f} us, tell one of {step.estimate.us:.1f} us"
        if groups:
            self.record.add(
                "decision", subject="tables", accepted=taken, bytes=0, us=round(-us, 3),
                reason="where masks leave something", detail=f"{text} which tiles have any",
                first=step.nest.stores[0].tensor, second=groups[0].members[0].name,
            )  # fmt: skip
        if taken:
            self.layouts.update((c.name, c.layout) for c in computes)
            yield from zip(groups, each, strict=True)
            step = replace(step, nest=nest)
        yield step

    def is_product(self, step: PlainStep) -> bool:
        """Whether it is a product that may share a kernel."""
        if not isinstance(step, Extern) or not step.product:
            return False
        layout = self.layouts[step.product[-1].name]
        spec = self.specs[layout.device]
        empty = any(a.extent.value == 0 for c in step.product for a in c.axes)
        return not empty and share_kernels(layout.dtype, spec)

    def multiplies(self, step: PlainStep) -> bool:
        """Whether a group sums products of factors that do not both have all axes, where programs
        have tiles to share: one may compute all of it."""
        if not isinstance(step, tuple) or not self.whole_group(step[0]):
            return False
        for c in (m.compute for m in step[0].members):
            sides = c.body.args[0].args if c.body.op == "reduce" else ()
            kind = factors_dtype(c.body.args[0]) if sides else None
            spec = self.specs[c.layout.device]
            if kind and spec.shared and share_kernels(kind, spec):
                a, b = (x.axes() for x in sides)
                if a != b and a & b >= set(c.body.attr[1]):
                    return True
        return False

    # -- regions -----------------------------------------------------------------------------------

    def regions(self, k: int) -> Iterator[frozenset[int]]:
        """Runs of steps around a product, each alone and with what only makes its operands."""
        region = frozenset((k,))
        for _ in range(CHAINED):
            for grow in (self.next_groups, self.next_products):
                region = region | grow(region)
                if len(region) > MAX_STEPS:
                    return
                found = (region, self.with_makers(region, 1, False), self.with_makers(region))
                yield from (*found, *map(self.without_sums, found))

    def without_sums(self, region: frozenset[int]) -> frozenset[int]:
        """Without the groups that sum products which are ready (heads' gradients, of keys that they
        share), and that nothing else of the region needs."""

        def sums(k: int) -> bool:
            step = self.steps[k]
            if self.products[k] or not isinstance(step, tuple) or self.readers_of(k) & region:
                return False
            makers = {self.home[n] for n in self.read[k] if n in self.home} & region
            reduced = any(m.compute.body.op == "reduce" for m in step[0].members)
            return reduced and bool(makers) and all(self.products[m] for m in makers)

        return region - {k for k in region if sums(k)}

    def with_makers(
        self, region: frozenset[int], steps: int = 2, groups: bool = True
    ) -> frozenset[int]:
        """With the steps that only make what the region reads, and those that only make theirs;
        of products only where not `groups`."""
        for _ in range(steps):
            makers = {self.home[n] for k in region for n in self.read[k] if n in self.home}
            makers = {m for m in makers - region if groups and self.joins(m) or self.products[m]}
            region = region | {m for m in makers if self.readers_of(m) <= region}
        return region

    def joins(self, k: int) -> bool:
        """Whether it is a group of which a nest may compute all."""
        step = self.steps[k]
        return isinstance(step, tuple) and self.whole_group(step[0])

    def whole_group(self, group: Group) -> bool:
        return group.row_split is None and not group.partials and not group.targets

    def readers_of(self, k: int) -> set[int]:
        return {r for n in self.made[k] for r in self.readers.get(n, ())}

    def next_groups(self, region: frozenset[int]) -> frozenset[int]:
        found = {r for k in region for r in self.readers_of(k)} - region
        return frozenset(r for r in found if self.joins(r))

    def next_products(self, region: frozenset[int]) -> frozenset[int]:
        found = {r for k in region for r in self.readers_of(k)} - region
        return frozenset(r for r in found if self.products[r])

    # -- whether one may be had, and pays ----------------------------------------------------------

    def offer(self, region: frozenset[int]) -> Offer | None:
        """One kernel for the region, where it may be had and pays."""
        if region == {min(region)}:
            return None
        computes = self.computes(region)
        if len(computes) > MAX_COMPUTES or self.behind(region) is None:
            return None
        device, *others = {c.layout.device for c in computes.values()}
        if others:
            return None
        spec = self.specs[device]
        before = sum(self.us[k] or 0.0 for k in region) + launch_us(spec) * (len(region) - 1)
        beside = sum(self.us[k] or 0.0 for k in region if not self.products[k])
        most = beside + launch_us(spec) * (len(region) - 1)
        chained = sum(self.inner[k] for k in region) > 1  # masks may hide much of them
        if most < MIN_GAIN * before and not chained:
            why = f"at least {before - most:.1f} us in one kernel, {before:.1f} us apart"
            self.refuse(region, Refusal("no gain", why))
            return None
        if self.unfused & computes.keys():
            self.refuse(region, Refusal("kept unfused", "measured: see the decisions of the guard"))
            return None
        needed = {n for n in computes if not region.issuperset(self.readers.get(n, ()))}
        sinks = [n for n in computes if n in self.outside | needed]
        if len(sinks) > MAX_SINKS:
            self.refuse(region, Refusal("many results", f"{len(sinks)} are stored"))
            return None
        found, naming = self.reckon(cover, computes, sinks, spec)
        if isinstance(found, Refusal):
            self.refuse(region, replace(found, detail=restored_text(found.detail, naming)))
            return None
        us = predicted_us(found)
        kernels = "one kernel" if len(found) == 1 else f"{len(found)} kernels"
        tilings = "; ".join(str(k.tiling) for k in found)
        text = f"{us:.1f} us in {kernels} ({tilings}), {before:.1f} us apart"
        if chained and (memory := self.between(region, sinks, spec)):
            text += f", and {memory:.1f} us for what lies in memory between"
            before += memory
        if us > (1 - MIN_GAIN) * before:
            self.refuse(region, Refusal("no gain", text))
            return None
        made = tuple(contracted(found, computes, naming))
        return Offer(region, before - us, self.left(region, spec), text, made)

    def between(self, region: frozenset[int], sinks: Sequence[str], spec: DeviceSpec) -> float:
        """Microseconds for what the steps of a region store for one another, and one kernel does
        not: what a cache keeps apart."""
        read = {n for k in region for n in self.read[k]}
        names = {n for k in region for n in self.made[k]} & read - set(sinks)
        size = sum(self.layouts[n].nbytes_hint for n in names)
        return 0.0 if spec.keeps(size) else MEMORY_COST * spec.memory_us(size)

    def left(self, region: frozenset[int], spec: DeviceSpec) -> float:
        """Microseconds for products outside of a region that only it reads, and could have."""
        read = {n for k in region for n in self.read[k] if n in self.home}
        names = {n for n in read if self.home[n] not in region}
        alone = {n for n in names if self.products[self.home[n]] and n not in self.outside}
        alone = {n for n in alone if set(self.readers[n]) <= region}
        size = sum(self.layouts[n].nbytes_hint for n in alone)
        return MEMORY_COST * spec.memory_us(size)

    def time(self, step: PlainStep) -> float | None:
        """Microseconds of a step; None of a call that is no product, or whose product is no
        nest."""
        if isinstance(step, tuple):
            return step[1]
        if not self.is_product(step):
            return None
        product = step.product
        computes = {c.name: c for c in product}
        spec = self.specs[product[-1].layout.device]
        return self.reckon(called, computes, [product[-1].name], spec)[0]

    def reckon(
        self,
        how: Callable[[Computes, Names, Layouts, DeviceSpec, str], T],
        computes: Computes,
        sinks: Sequence[str],
        spec: DeviceSpec,
    ) -> tuple[T, Naming]:
        """What `how` says of alike computations; the names here of what it names."""
        alike, numbers = numbered(computes.values())
        names = {number: n for n, number in numbers.items()}
        layouts = {
            k: computes[n].layout if n in computes else self.layouts[n] for k, n in names.items()
        }
        inner = [numbers[n] for n in sinks]
        wide = self.wide if spec.shared else "f32"
        key = (how, alike, tuple(inner), tuple(layouts.items()), spec, wide)
        if key not in _RECKONED:
            _RECKONED[key] = how({c.name: c for c in alike}, inner, layouts, spec, wide)
        # A sum may be called after what is stored.
        return _RECKONED[key], partial(restored_text, naming=names.__getitem__)

    def computes(self, region: frozenset[int]) -> dict[str, Compute]:
        out: dict[str, Compute] = {}
        for k in sorted(region):
            step = self.steps[k]
            if isinstance(step, Extern):
                out.update((c.name, c) for c in step.product)
            else:
                out.update((m.name, m.compute) for m in step[0].members)
        return out

    def behind(self, region: frozenset[int]) -> list[int] | None:
        """The steps between the region's that have to follow it, as they need what it makes; None
        where it needs one of them, or where another overwrites what it reads."""
        places = [self.order.index(k) for k in region]
        made = set().union(*(self.made[k] for k in region))
        read = {self.owner.get(n, n) for k in region for n in self.read[k]}
        late: list[int] = []
        late_read: set[str] = set()
        late_made: set[str] = set()
        for k in self.order[min(places) : max(places)]:
            if k in region or k in late:
                continue
            steps = self.whole.get(k, (k,))
            reads = set().union(*(self.read[m] for m in steps))
            writes = set().union(*(self.overwritten(self.steps[m]) for m in steps))
            ordered = is_impure(self.steps[k]) and any(is_impure(self.steps[m]) for m in late)
            if (made | late_made) & reads or writes & late_read or ordered:
                late += steps
                late_read |= {self.owner.get(n, n) for n in reads}
                late_made = late_made.union(*(self.made[m] for m in steps))
            elif writes & read:
                return None
        return None if any(late_made & self.read[k] for k in region) else late

    def overwritten(self, step: PlainStep) -> set[str]:
        if isinstance(step, Extern):
            return {self.owner.get(n, n) for n in step.mutates}
        targets = [m.name for m in step[0].members if m.compute.target is not None]
        return {self.owner.get(n, n) for n in targets}

    def refuse(self, region: frozenset[int], why: Refusal, us: float = 0.0) -> None:
        self.note(self.ends(region), False, why.reason, why.detail, us)

    def ends(self, region: AbstractSet[int]) -> tuple[str, str]:
        """The last tensors that the first and the last of its steps make."""
        return max(self.made[min(region)]), max(self.made[max(region)])

    def note(
        self, ends: tuple[str, str], taken: bool, reason: str, detail: str, us: float = 0.0
    ) -> None:
        self.record.add(
            "decision", subject="contract", accepted=taken, reason=reason, detail=detail,
            first=ends[0], second=ends[1], bytes=0, us=round(us, 3),
        )  # fmt: skip


class Between:
    """Whether a third stands between two steps: which needs the one and is needed by the other."""

    def __init__(self, steps: Sequence[OrderedStep]) -> None:
        self.home = {n: k for k, s in enumerate(steps) for n in names_made(s)}
        for k, s in enumerate(steps):  # what is stored nowhere is not read either
            inside = s.computes if isinstance(s, Contracted) else ()
            self.home |= {c.name: k for c in inside if c.name not in self.home}
        self.needs = [
            {self.home[n] for n in names_read(s) if self.home.get(n, k) < k}
            for k, s in enumerate(steps)
        ]
        self.reached: list[int] = []  # bits of all that a step needs
        for needed in self.needs:
            self.reached.append(0)
            for n in needed:
                self.reached[-1] |= self.reached[n] | 1 << n

    def any(self, first: str, second: str) -> bool:
        if first not in self.home or second not in self.home:
            return False
        ends = self.home[first], self.home[second]
        both = (ends, ends[::-1])
        return any(self.reached[n] >> a & 1 for a, b in both for n in self.needs[b] - {a})


def names_made(step: OrderedStep) -> set[str]:
    if isinstance(step, Contracted):
        return set(step.nest.tensors()[1])
    if isinstance(step, Extern):
        return {n for n in step.names if n}
    return {m.name for m in step[0].members} | set(step[0].partials.values())


def is_impure(step: PlainStep) -> bool:
    return isinstance(step, Extern) and step.impure


def names_read(step: OrderedStep) -> set[str]:
    if isinstance(step, Contracted):
        return set(step.nest.tensors()[0])
    if isinstance(step, Extern):
        return {*tensors_read(step), *step.mutates}
    return set(step[0].inputs)


__all__ = ["Contracted", "Contraction", "OrderedStep", "PlainStep"]
