"""What must run before what: groups and library calls as nodes of a directed acyclic graph.

In: a program's definitions. Out: a `Dag` whose nodes can be merged. An edge means that one node
needs the other's results, or overwrites what it reads, or that the order of two calls with effects
must be kept.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from deuteron.ir.program import Compute, Extern, Program, symbols_read, tensors_read
from deuteron.schedule.group import Group, group_of_one
from deuteron.schedule.order import Order


@dataclass
class Node:
    """A group or a call; `first` and `last` are positions of its definitions in the program, `rank`
    is where it would like to run."""

    id: int
    content: Group | Extern
    first: int
    last: int
    before: set[int] = field(default_factory=set)
    after: set[int] = field(default_factory=set)
    rank: float = 0.0


@dataclass(frozen=True)
class Region:
    """Nodes between `first` and `last` in the order: all that depend on the first (`forward`), or
    all that the last depends on."""

    first: Node
    last: Node
    forward: bool
    nodes: set[int]


class _Search:
    """What can be reached from `start` without passing `end` in the order, one edge at a time."""

    def __init__(self, dag: Dag, start: Node, end: Node, forward: bool) -> None:
        self.dag, self.end, self.forward, self.done = dag, end.id, forward, False
        self.seen: set[int] = set()
        self.limit = dag.order_of.label[end.id]
        self.stack = [(start.id, iter(start.after if forward else start.before))]
        self.start = start.id

    def step(self, others: set[int]) -> int | None:
        """Follows one edge; a node on a path, where it finds one."""
        while self.stack:
            here, edges = self.stack[-1]
            k = next(edges, None)
            if k is None:
                self.stack.pop()
                continue
            if k == self.end:
                return None if here == self.start else here
            if k in self.seen or (self.dag.order_of.label[k] > self.limit) is self.forward:
                return None
            if k in others:
                return k
            self.seen.add(k)
            node = self.dag.nodes[k]
            self.stack.append((k, iter(node.after if self.forward else node.before)))
            return None
        self.done = True
        return None


@dataclass
class Dag:
    nodes: dict[int, Node]
    home: dict[str, int]  # tensor -> the node that makes it
    readers: dict[str, set[int]]  # tensor -> nodes that read it
    owner: Mapping[str, str]
    next_id: int = 0
    order_of: Order = field(default_factory=Order)  # nodes, each after what it needs
    # tensor -> (first, id) of the nodes that read it, in order
    readers_in_order: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    @staticmethod
    def of(program: Program, computes: Mapping[str, Compute], owner: Mapping[str, str]) -> Dag:
        dag = Dag({}, {}, {}, owner)
        writer: dict[str, int] = {}  # memory -> its last writer
        since: dict[str, set[int]] = {}  # memory -> readers since then
        impure: int | None = None
        tellers = results_that_tell(program)
        teller: dict[str, int] = {}  # size -> the call that tells it
        for position, d in enumerate(program.defs):
            if isinstance(d, Compute):
                if d.name not in computes:
                    continue
                c = computes[d.name]
                node = dag.add(group_of_one(c, position), position, position)
                reads, names = list(tensors_read(c)), [c.name]
                writes = [owner[c.name]] if c.target is not None else []
            elif isinstance(d, Extern):
                node = dag.add(d, position, position)
                reads, names = [*tensors_read(d)], [n for n in d.names if n]
                writes = [owner.get(n, n) for n in d.mutates]
                if d.impure:
                    if impure is not None:
                        dag.edge(impure, node.id)
                    impure = node.id
            else:
                continue
            if tellers:
                for s in symbols_read(c if isinstance(d, Compute) else d):
                    for source in tellers.get(s.name, ()):
                        if source in teller:
                            dag.edge(teller[source], node.id)
                if isinstance(d, Extern):
                    teller.update((s.name, node.id) for s in d.sizes if s is not None)
                    teller.update((n, node.id) for n in names)
            for name in dict.fromkeys(reads):
                memory = owner.get(name, name)
                if memory in writer:
                    dag.edge(writer[memory], node.id)
                if name in dag.home:
                    dag.edge(dag.home[name], node.id)
                dag.reads(name, node)
                since.setdefault(memory, set()).add(node.id)
            for memory in writes:
                for other in since.get(memory, ()):
                    dag.edge(other, node.id)
                if memory in writer:
                    dag.edge(writer[memory], node.id)
                writer[memory], since[memory] = node.id, set()
            for name in names:
                dag.home[name] = node.id
                if name in owner:
                    writer.setdefault(owner[name], node.id)
        return dag

    def add(
        self, content: Group | Extern, first: int, last: int, after: Node | None = None
    ) -> Node:
        """A node without edges, at the end of the order or right after another."""
        node = Node(self.next_id, content, first, last, rank=last)
        self.nodes[node.id] = node
        self.next_id += 1
        self.order_of.insert(node.id, self.order_of.last if after is None else after.id)
        return node

    def reads(self, name: str, node: Node) -> None:
        readers = self.readers.setdefault(name, set())
        if node.id not in readers:
            readers.add(node.id)
            insort(self.readers_in_order.setdefault(name, []), (node.first, node.id))

    def reads_no_more(self, name: str, node: Node) -> None:
        self.readers[name].remove(node.id)
        readers_in_order = self.readers_in_order[name]
        del readers_in_order[bisect_left(readers_in_order, (node.first, node.id))]

    def edge(self, a: int, b: int) -> None:
        if a != b:
            self.nodes[a].after.add(b)
            self.nodes[b].before.add(a)

    def path_around(self, a: Node, b: Node) -> Node | None:
        """A node on a path from `a` to `b`, or back, that leaves the pair: merging would make a
        cycle through it."""
        between = self._between(a, b)
        return self.nodes[between] if isinstance(between, int) else None

    def _between(self, a: Node, b: Node) -> int | Region:
        """A node on a path between the two, or the nodes that keep them apart in the order.

        Only nodes that stand between the two in the order can be on a path. Two searches meet, from
        the earlier forward and from the later back, edge by edge in turn: who has seen all that it
        can reach ends both.
        """
        if self.order_of.label[a.id] > self.order_of.label[b.id]:
            a, b = b, a
        ahead, behind = _Search(self, a, b, True), _Search(self, b, a, False)
        while True:
            for one, other in ((behind, ahead), (ahead, behind)):
                met = one.step(other.seen)
                if met is not None:
                    return met
                if one.done:
                    return Region(a, b, one.forward, one.seen - {b.id, a.id})

    def merge(self, a: Node, b: Node, content: Group) -> Node:
        place = self._place(a, b)
        new = self.add(content, min(a.first, b.first), max(a.last, b.last), place)
        new.rank = max(a.rank, b.rank)
        new.before = (a.before | b.before) - {a.id, b.id}
        new.after = (a.after | b.after) - {a.id, b.id}
        gone = {a.id, b.id}
        for k in new.before:
            self.nodes[k].after = (self.nodes[k].after - gone) | {new.id}
        for k in new.after:
            self.nodes[k].before = (self.nodes[k].before - gone) | {new.id}
        for old in {a.id: a, b.id: b}.values():
            assert isinstance(old.content, Group)
            for m in old.content.members:
                if m.kind != "column":
                    self.home[m.name] = new.id
            for name in old.content.partials.values():
                self.home[name] = new.id
        for name in (*content.names, *content.partials.values()):
            self.home.setdefault(name, new.id)
        for old in {a.id: a, b.id: b}.values():
            assert isinstance(old.content, Group)
            self._forget(old)
        for name in content.inputs:
            self.reads(name, new)
        return new

    def _place(self, a: Node, b: Node) -> Node:
        """Makes room in the order for both in one place: the one after which they may stand."""
        if a is b:
            return a
        region = self._between(a, b)
        assert isinstance(region, Region), "merging these would make a cycle"
        if region.forward:
            self.order_of.move(region.nodes, region.last.id)
            return region.last
        self.order_of.move(region.nodes, self.order_of.previous[region.first.id])
        return region.first

    def _forget(self, node: Node) -> None:
        assert isinstance(node.content, Group)
        for name in node.content.inputs:
            self.reads_no_more(name, node)
        self.order_of.remove(node.id)
        del self.nodes[node.id]

    def remove(self, node: Node) -> None:
        """Forgets a node whose results nobody needs; what it ordered stays ordered."""
        assert isinstance(node.content, Group)
        for a in node.before:
            self.nodes[a].after = self.nodes[a].after - {node.id} | node.after
        for b in node.after:
            self.nodes[b].before = self.nodes[b].before - {node.id} | node.before
        self._forget(node)

    def finish(self, main: Node, tail: Sequence[tuple[Compute, int]]) -> list[Node]:
        """Nodes for computations that took names over from members of `main`."""
        later = set(main.after)
        nodes: list[Node] = []
        for c, position in tail:
            node = self.add(
                group_of_one(c, position), position, position, nodes[-1] if nodes else main
            )
            node.rank = -1.0  # at once: the partial results are still in the caches
            nodes.append(node)
            self.edge(main.id, node.id)
            assert isinstance(node.content, Group)
            memory = {self.owner.get(n, n) for n in node.content.inputs}
            for k in later:
                if memory & self.overwrites(self.nodes[k]):
                    self.edge(node.id, k)
            for k in self.readers.get(c.name, ()):
                self.edge(node.id, k)
            for name in node.content.inputs:
                self.reads(name, node)
                if name in self.home:
                    self.edge(self.home[name], node.id)
            self.home[c.name] = node.id
        return nodes

    def overwrites(self, node: Node) -> set[str]:
        """Memory that a node writes into although it is another's."""
        what = node.content
        if isinstance(what, Extern):
            return {self.owner.get(n, n) for n in what.mutates}
        return {self.owner[m.name] for m in what.members if m.compute.target is not None}

    def order(self) -> Iterator[Node]:
        """Nodes in an order that respects the edges, as near to the program's as can be."""
        waiting = {k: len(n.before) for k, n in self.nodes.items()}
        ready = [(n.rank, k) for k, n in self.nodes.items() if not n.before]
        heapq.heapify(ready)
        while ready:
            _, k = heapq.heappop(ready)
            yield self.nodes[k]
            for j in self.nodes[k].after:
                waiting[j] -= 1
                if waiting[j] == 0:
                    heapq.heappush(ready, (self.nodes[j].rank, j))


def results_that_tell(program: Program) -> dict[str, tuple[str, ...]]:
    """Size -> what tells it while the program runs: numbers or tensors that calls give."""
    calls = [d for d in program.defs if isinstance(d, Extern)]
    makers: dict[str, tuple[str, ...]] = {
        s.name: (s.name,) for d in calls for s in d.sizes if s is not None
    }
    makers |= {s.name: (str(where),) for s, (kind, where, _) in program.sizes if kind == "result"}
    if makers:  # sizes made of others
        for s, (kind, text, _) in program.sizes:
            if kind == "expr":
                names = re.findall(r"\w+", str(text))
                makers[s.name] = tuple(t for n in names for t in makers.get(n, ()))
    return makers


__all__ = ["Dag", "Node", "results_that_tell"]
