"""What must run before what: groups and library calls as nodes of a directed acyclic graph.

In: a program's definitions. Out: a `Dag` whose nodes can be merged. An edge means that one node
needs the other's results, or overwrites what it reads, or that the order of two calls with effects
must be kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from deuteron.ir.program import Compute, Extern, Program, tensors_read
from deuteron.schedule.group import Group, alone

# Paths are searched at most this far; a pair that is farther apart is not merged.
FARTHEST = 4096


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


@dataclass
class Dag:
    nodes: dict[int, Node]
    home: dict[str, int]  # tensor -> the node that makes it
    readers: dict[str, set[int]]  # tensor -> nodes that read it
    owner: Mapping[str, str]
    next_id: int = 0

    @staticmethod
    def of(program: Program, computes: Mapping[str, Compute], owner: Mapping[str, str]) -> Dag:
        dag = Dag({}, {}, {}, owner)
        writer: dict[str, int] = {}  # memory -> its last writer
        since: dict[str, set[int]] = {}  # memory -> readers since then
        impure: int | None = None
        for position, d in enumerate(program.defs):
            if isinstance(d, Compute):
                if d.name not in computes:
                    continue
                c = computes[d.name]
                node = dag.add(alone(c, position), position, position)
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
            for name in dict.fromkeys(reads):
                memory = owner.get(name, name)
                if memory in writer:
                    dag.edge(writer[memory], node.id)
                if name in dag.home:
                    dag.edge(dag.home[name], node.id)
                dag.readers.setdefault(name, set()).add(node.id)
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

    def add(self, content: Group | Extern, first: int, last: int) -> Node:
        node = Node(self.next_id, content, first, last, rank=last)
        self.nodes[node.id] = node
        self.next_id += 1
        return node

    def edge(self, a: int, b: int) -> None:
        if a != b:
            self.nodes[a].after.add(b)
            self.nodes[b].before.add(a)

    def path_around(self, a: Node, b: Node) -> Node | None:
        """A node on a path from `a` to `b`, or back, that leaves the pair: merging would make a
        cycle through it."""
        return self._path(a, b) or self._path(b, a)

    def _path(self, a: Node, b: Node) -> Node | None:
        # Every edge leads from an earlier definition to a later one.
        seen = {a.id, b.id}
        stack = [(n, n) for n in sorted(a.after - seen) if self.nodes[n].first < b.last]
        while stack:
            n, start = stack.pop()
            if n in seen:
                continue
            seen.add(n)
            node = self.nodes[n]
            if b.id in node.after or len(seen) > FARTHEST:
                return self.nodes[start]
            stack += [(k, start) for k in node.after - seen if self.nodes[k].first < b.last]
        return None

    def merge(self, a: Node, b: Node, content: Group) -> Node:
        new = self.add(content, min(a.first, b.first), max(a.last, b.last))
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
            for name in old.content.inputs:
                self.readers[name].discard(old.id)
            del self.nodes[old.id]
        for name in content.inputs:
            self.readers.setdefault(name, set()).add(new.id)
        return new

    def remove(self, node: Node) -> None:
        """Forgets a node whose results nobody needs; what it ordered stays ordered."""
        assert isinstance(node.content, Group)
        for a in node.before:
            self.nodes[a].after = self.nodes[a].after - {node.id} | node.after
        for b in node.after:
            self.nodes[b].before = self.nodes[b].before - {node.id} | node.before
        for name in node.content.inputs:
            self.readers[name].discard(node.id)
        del self.nodes[node.id]

    def finish(self, main: Node, tail: Sequence[tuple[Compute, int]]) -> list[Node]:
        """Nodes for computations that took names over from members of `main`."""
        later = set(main.after)
        nodes: list[Node] = []
        for c, position in tail:
            node = self.add(alone(c, position), position, position)
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
                self.readers.setdefault(name, set()).add(node.id)
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


__all__ = ["Dag", "Node"]
