"""Best-first search over legal merges, largest predicted saving first.

In: the `Dag` of single computations and library calls. Out: the same graph with groups merged, and
every pair that was considered in the Record, fused or refused, with the reason.

Candidates are pairs of groups that share a tensor: a maker and a reader, or two readers. What a
merge saves is reckoned when nothing that may save more is left (`Fusion.max_saving`): of most pairs
one is merged with another before. Ties go to the earlier pair, so that the result depends on the
program alone.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from deuteron.base.device import DeviceSpec
from deuteron.base.record import Record
from deuteron.ir.program import Compute, Extern, Layout
from deuteron.schedule import profit
from deuteron.schedule.columns import RowSplit, columns
from deuteron.schedule.dag import Dag, Node
from deuteron.schedule.group import MAX_CODE, Group
from deuteron.schedule.legality import Refusal, correspond, fits

# Offers take time in proportion to it.
MAX_MEMBERS = 64
# Readers of one tensor that are paired as siblings, each with this many that follow.
SIBLINGS_TRIED = 6
# Readers of one tensor that are tried with its maker: the first ones; when they are merged, the
# next come up.
READERS_TRIED = 64


@dataclass(frozen=True)
class Offer:
    """A merge that may be done: what it saves, and the group that results."""

    us: float
    bytes: int
    group: Group
    row_split: RowSplit | None = None  # then `group` is its main part


class Fusion:
    def __init__(
        self,
        dag: Dag,
        layouts: dict[str, Layout],
        owner: Mapping[str, str],
        outside: set[str],
        specs: Mapping[str, DeviceSpec],
        record: Record,
    ) -> None:
        self.dag, self.layouts, self.owner = dag, layouts, owner
        self.outside, self.specs, self.record = outside, specs, record
        self.unfused: set[str] = set()  # computations that share no kernel
        self.partial: set[str] = set()  # tensors of partial results
        self.costs: dict[int, profit.Cost] = {}
        self.verdicts: dict[tuple[int, int], tuple[Refusal, Offer | None]] = {}
        self.judged: dict[int, set[tuple[int, int]]] = {}  # node -> its pairs in `verdicts`
        self.heap: list[tuple[float, int, int, int, int]] = []
        self.offers: dict[tuple[int, int], Offer | None] = {}  # None: not reckoned yet
        self.read_sizes: dict[int, dict[str, int]] = {}  # node -> bytes of what it reads

    # -- what a group leaves in memory ----------------------------------------------------------
    def stored(self, group: Group, inside: set[int]) -> list[str]:
        """Members whose tensors somebody else needs."""
        readers, outside, nobody = self.dag.readers, self.outside, frozenset[int]()
        return [
            m.name
            for m in group.members
            if m.kind != "column"
            and (
                m.name in outside
                or m.compute.target is not None
                or not inside.issuperset(readers.get(m.name, nobody))
            )
        ]

    def cost(self, node: Node) -> profit.Cost:
        known = self.costs.get(node.id)
        if known is None:
            assert isinstance(node.content, Group)
            keep = self.stored(node.content, {node.id})
            known = self.costs[node.id] = profit.cost(
                node.content, self.layouts, keep, self.spec(node.content)
            )
        return known

    def spec(self, group: Group) -> DeviceSpec:
        return self.specs[self.layouts[group.members[0].name].device]

    # -- candidates -----------------------------------------------------------------------------
    def neighbours(self, node: Node) -> Iterable[Node]:
        """Groups that share a tensor with `node`."""
        nearby: dict[int, None] = {}
        group = node.content
        assert isinstance(group, Group)
        for name in group.reads:
            home = self.dag.home.get(name)
            if home is not None:
                nearby[home] = None
            readers_in_order = self.dag.readers_in_order[name]
            at = bisect_left(readers_in_order, (node.first, node.id))
            nearby.update(
                (k, None)
                for _, k in readers_in_order[max(0, at - SIBLINGS_TRIED) : at + SIBLINGS_TRIED + 1]
            )
        for m in group.members:
            nearby.update(
                (k, None) for _, k in self.dag.readers_in_order.get(m.name, ())[:READERS_TRIED]
            )
        nearby.pop(node.id, None)
        return [n for k in nearby if isinstance((n := self.dag.nodes[k]).content, Group)]

    def consider(self, x: Node, y: Node) -> None:
        a, b = (x, y) if (x.first, x.id) < (y.first, y.id) else (y, x)
        key = (a.id, b.id)
        if key in self.offers or key in self.verdicts:
            return
        self.offers[key] = None
        heapq.heappush(self.heap, (-self.max_saving(a, b), a.first, b.first, a.id, b.id))

    def max_saving(self, a: Node, b: Node) -> float:
        """What a merge saves at most, in microseconds: as if the loops had all of the device, and
        nothing but what each reads and others need were moved."""
        one, two = self.cost(a), self.cost(b)
        assert isinstance(a.content, Group) and isinstance(b.content, Group)
        spec, inside = self.spec(a.content), {a.id, b.id}
        read, other = self.read(a), self.read(b)
        moved = 0
        for n in read.keys() | other.keys():
            if n not in a.content.names and n not in b.content.names:
                moved += max(read.get(n, 0), other.get(n, 0))
        for g in (a.content, b.content):
            points = g.space.size()
            for n in dict.fromkeys(self.stored(g, inside)):
                moved += profit.bytes_written(g.names[n], self.layouts[n], points)
        return one.us + two.us + profit.launch_us(spec) - profit.time_us(moved, 0.0, 1.0, spec)

    def read(self, node: Node) -> dict[str, int]:
        """Bytes of each tensor that a group reads."""
        sizes = self.read_sizes.get(node.id)
        if sizes is None:
            g = node.content
            assert isinstance(g, Group)
            sizes = {n: profit.bytes_read(g, n, self.layouts[n]) for n in g.reads}
            self.read_sizes[node.id] = sizes
        return sizes

    def offer(self, a: Node, b: Node) -> Offer | Refusal:
        """The merge of two groups, or why it is not to be had (cycles are asked for later)."""
        assert isinstance(a.content, Group) and isinstance(b.content, Group)
        if self.unfused and any(
            m.name in self.unfused for g in (a.content, b.content) for m in g.members
        ):
            return Refusal("kept unfused", "measured: see the decisions of the guard")
        if len(a.content.members) + len(b.content.members) > MAX_MEMBERS:
            return Refusal("too large", f"more than {MAX_MEMBERS} operations in one kernel")
        if a.content.code + b.content.code > MAX_CODE:
            size = f"{a.content.code:.0f} and {b.content.code:.0f} units of code"
            return Refusal("too large", f"{size} would take the compiler too long in one kernel")
        spec = self.spec(a.content)
        merged = fits(a.content, b.content, self.layouts, self.owner, spec)
        verdict: Offer | Refusal
        if isinstance(merged, Group):
            verdict = self.score(a, b, merged)
            if isinstance(verdict, Offer) or verdict.reason != "parallelism lost":
                return verdict
        else:
            verdict = merged
            if merged.reason not in ("rows against columns", "index maps differ"):
                return merged
        other = self.across(a, b)
        return verdict if other is None else other

    def score(
        self, a: Node, b: Node, merged: Group, row_split: RowSplit | None = None
    ) -> Offer | Refusal:
        assert isinstance(a.content, Group)
        spec = self.spec(a.content)
        layouts: Mapping[str, Layout] = self.layouts
        if row_split is not None:  # the partial results are this candidate's alone
            layouts = ChainMap(row_split.layouts, self.layouts)
        if not profit.scanned_in_blocks(merged, layouts, spec):
            for g in (a.content, b.content):
                assert isinstance(g, Group)
                if profit.scanned_in_blocks(g, self.layouts, spec):
                    name = g.members[-1].name
                    detail = f"programs scan blocks of the rows of {name}, beside points only"
                    return Refusal("scanned in blocks", detail)
        keep = self.stored(merged, {a.id, b.id})
        one, two = self.cost(a), self.cost(b)
        both = profit.cost(merged, layouts, keep, spec)
        us, moved = both.us, both.bytes
        saved = one.us + two.us + profit.launch_us(spec)
        if row_split is not None:
            late = profit.combination_cost(row_split.layouts.values(), spec)
            us, moved, saved = us + late.us, moved + late.bytes, saved - profit.launch_us(spec)
        saved -= us
        moved = one.bytes + two.bytes - moved
        if saved > 0.0:
            return Offer(saved, moved, merged, row_split)
        share = min(one.occupancy, two.occupancy)
        if both.occupancy < share:
            return Refusal(
                "parallelism lost",
                f"together {both.occupancy:.0%} of the device is busy, separate {share:.0%}: "
                f"{us:.1f} us against {one.us + two.us:.1f} us, {moved} bytes would be saved",
            )
        return Refusal("no gain", f"{us:.1f} us against {one.us + two.us:.1f} us")

    def across(self, a: Node, b: Node) -> Offer | None:
        """One group's reductions as cross-row reductions of the other's nest, where that is legal
        and pays."""
        best: Offer | None = None
        for x, y in ((a, b), (b, a)):
            base, guest = x.content, y.content
            assert isinstance(base, Group) and isinstance(guest, Group)
            if not guest.reductions or guest.row_split is not None:
                continue
            table = correspond(base, guest, self.layouts)
            if isinstance(table, Refusal):
                continue
            spec = self.spec(base)
            row_split = columns(base, guest, table, self.layouts, self.owner, spec)
            if isinstance(row_split, Refusal):
                continue
            offer = self.score(a, b, row_split.main, row_split)
            if isinstance(offer, Offer) and (best is None or offer.us > best.us):
                best = offer
        return best

    # -- the search -------------------------------------------------------------------------------
    def run(self) -> None:
        self.resume([n for n in self.dag.nodes.values() if isinstance(n.content, Group)])

    def resume(self, nodes: Sequence[Node]) -> None:
        """Merges whatever pays among these nodes and their neighbours."""
        for node in nodes:
            if not isinstance(node.content, Group):
                continue
            for other in self.neighbours(node):
                self.consider(node, other)
        while self.heap:
            _, _, _, i, j = heapq.heappop(self.heap)
            a, b = self.dag.nodes.get(i), self.dag.nodes.get(j)
            if (i, j) not in self.offers:
                continue
            offer = self.offers.pop((i, j))
            if a is None or b is None:
                continue
            if offer is None:
                verdict = self.offer(a, b)
                if isinstance(verdict, Refusal):
                    self.judge((i, j), verdict, None)
                else:
                    self.offers[i, j] = verdict
                    heapq.heappush(self.heap, (-verdict.us, a.first, b.first, i, j))
                continue
            between = self.dag.path_around(a, b)
            if between is not None:
                self.judge((i, j), _cycle(between), offer)
                continue
            self.accept(a, b, offer)

    def replace(self, node: Node, group: Group, tail: Sequence[tuple[Compute, int]]) -> list[Node]:
        """Another way to do a node's work: `group` first, then `tail`."""
        self.report(node.id)
        new = self.dag.merge(node, node, group)
        return [new, *self.dag.finish(new, tail)]

    def prune(self) -> None:
        """Removes members that nobody needs any more, and groups without others."""
        for node in reversed(list(self.dag.order())):
            if not isinstance(node.content, Group):
                continue
            needed = set(self.stored(node.content, {node.id}))
            live = []
            for m in reversed(node.content.members):
                if m.name in needed or m.kind == "column":
                    live.append(m)
                    needed.update(r.tensor for r in m.reads)
                    if m.compute.target is not None:
                        needed.add(m.compute.target)
            if not live:
                self.forget(node.id)
                self.dag.remove(node)
            elif len(live) < len(node.content.members):
                self.replace(node, replace(node.content, members=tuple(reversed(live))), ())

    def accept(self, a: Node, b: Node, offer: Offer) -> None:
        first, second = self.link(a, b)
        self.record.add(
            "decision",
            subject="fuse",
            accepted=True,
            reason="saves memory traffic" if offer.bytes > 0 else "saves a launch",
            detail="",
            first=first,
            second=second,
            bytes=offer.bytes,
            us=round(offer.us, 3),
        )
        touched = {*a.content.reads, *b.content.reads}  # type: ignore[union-attr]
        self.forget(a.id)
        self.forget(b.id)
        node = self.dag.merge(a, b, offer.group)
        late: list[Node] = []
        if offer.row_split is not None:
            self.keep(offer.row_split.layouts)
            late = self.dag.finish(node, offer.row_split.tail)
        for name in touched:  # who makes what the pair shared may now store less
            home = self.dag.home.get(name)
            if home is not None:
                self.costs.pop(home, None)
        for new in (node, *late):
            for other in self.neighbours(new):
                self.consider(new, other)

    def keep(self, partial: Mapping[str, Layout]) -> None:
        """Partial results that are there to stay."""
        self.layouts.update(partial)
        self.partial.update(partial)

    def link(self, a: Node, b: Node) -> tuple[str, str]:
        """The two computations by which a pair is known: a maker and a reader, or two readers."""
        for x, y in ((a, b), (b, a)):
            assert isinstance(x.content, Group) and isinstance(y.content, Group)
            for m in y.content.members:
                for r in m.reads:
                    if r.tensor in x.content.names:
                        return (r.tensor, m.name)
        return (_last(a), _last(b))

    def report(self, of: int | None = None) -> None:
        """Writes down the pairs that were not merged, with the reason: those of one node that is
        about to be done in another way, or all that are left."""
        for key in list(self.verdicts) if of is None else sorted(self.judged.get(of, ())):
            why, offer = self.verdicts[key]
            a, b = (self.dag.nodes[k] for k in key)
            first, second = self.link(a, b)
            self.record.add(
                "decision",
                subject="fuse",
                accepted=False,
                reason=why.reason,
                detail=why.detail,
                first=first,
                second=second,
                bytes=offer.bytes if offer else self.shared(a, b),
                us=round(offer.us, 3) if offer else 0.0,
            )
        if of is not None:
            self.forget(of)

    def judge(self, key: tuple[int, int], why: Refusal, offer: Offer | None) -> None:
        self.verdicts[key] = (why, offer)
        for k in key:
            self.judged.setdefault(k, set()).add(key)

    def forget(self, node: int) -> None:
        """Verdicts about a node that is about to go."""
        for key in self.judged.pop(node, ()):
            del self.verdicts[key]
            other = key[0] if key[1] == node else key[1]
            self.judged[other].discard(key)

    def shared(self, a: Node, b: Node) -> int:
        """Bytes of the tensors that both touch."""
        assert isinstance(a.content, Group) and isinstance(b.content, Group)
        touch = [{*g.reads, *g.names} for g in (a.content, b.content)]
        return sum(self.layouts[n].nbytes_hint for n in touch[0] & touch[1])


def _last(n: Node) -> str:
    assert isinstance(n.content, Group)
    return n.content.members[-1].name


def _cycle(through: Node) -> Refusal:
    what = through.content
    name = what.op if isinstance(what, Extern) else what.members[0].name
    return Refusal("cycle", f"{name} needs one of them and the other needs {name}")


__all__ = ["Fusion"]
