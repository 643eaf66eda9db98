"""Minimum cut of a network whose vertices are 0..n-1 with a source and a sink.

In: edges (u, v, capacity), capacities non-negative integers or `INFINITE`. Out: the set of
vertices on the sink's side of the minimum cut that lies nearest to the sink. Every finite cut must
exist; else `NoCut` names the path.

Dinic's algorithm, run for each connected component by itself: what cannot be recomputed divides a
joint graph into many small components, so that the whole is close to linear in practice.
"""

from __future__ import annotations

from collections import deque

INFINITE = 1 << 60


class NoCut(Exception):
    """There is a path of infinite capacity from source to sink: `path` holds its vertices."""

    def __init__(self, path: list[int]) -> None:
        super().__init__(f"no finite cut; path {path}")
        self.path = path


class Network:
    """Edges come in pairs: edge e and its reverse e ^ 1."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.source, self.sink = n, n + 1
        self.out: list[list[int]] = [[] for _ in range(n + 2)]
        self.head: list[int] = []
        self.room: list[int] = []
        self._level = [0] * (n + 2)
        self._current = [0] * (n + 2)

    def edge(self, u: int, v: int, capacity: int) -> None:
        if capacity <= 0:
            return
        self.out[u].append(len(self.head))
        self.head.append(v)
        self.room.append(capacity)
        self.out[v].append(len(self.head))
        self.head.append(u)
        self.room.append(0)

    def sink_side(self) -> set[int]:
        """Pushes the maximum flow and returns the vertices that can still reach the sink."""
        for part in self._components():
            self._maximize(part)
        return self._reaches_sink()

    def _components(self) -> list[list[int]]:
        """Vertices that hang together without source and sink, and touch both (others carry no
        flow)."""
        seen = [False] * self.n
        components = []
        for start in range(self.n):
            if seen[start]:
                continue
            seen[start] = True
            part, todo, touches = [], [start], 0
            while todo:
                u = todo.pop()
                part.append(u)
                for e in self.out[u]:
                    v = self.head[e]
                    if v >= self.n:
                        touches |= 1 if v == self.source else 2
                    elif not seen[v]:
                        seen[v] = True
                        todo.append(v)
            if touches == 3:
                components.append(part)
        return components

    def _maximize(self, part: list[int]) -> None:
        """Dinic on one component. Distances are counted backwards from the sink."""
        entries = [e ^ 1 for u in part for e in self.out[u] if self.head[e] == self.source]
        level, current = self._level, self._current
        while self._distances(part, level):
            for u in part:
                current[u] = 0
            for e in entries:
                u = self.head[e]
                if level[u] > 0:
                    while self.room[e] > 0 and self._push(e, level, current):
                        pass

    def _distances(self, part: list[int], level: list[int]) -> bool:
        """Sets level[u] = 1 + edges from u to the sink through free edges (0: none); is the source
        reached?"""
        for u in part:
            level[u] = 0
        reached = False
        queue: deque[int] = deque()
        for u in part:
            if any(self.head[e] == self.sink and self.room[e] > 0 for e in self.out[u]):
                level[u] = 1
                queue.append(u)
        while queue:
            v = queue.popleft()
            for e in self.out[v]:
                u, free = self.head[e], self.room[e ^ 1]
                if free <= 0 or u == self.sink:
                    continue
                if u == self.source:
                    reached = True
                elif level[u] == 0:
                    level[u] = level[v] + 1
                    queue.append(u)
        return reached

    def _push(self, entry: int, level: list[int], current: list[int]) -> bool:
        """One augmenting path that starts with edge `entry`; False when there is none in this
        level graph."""
        path = [entry]
        while True:
            u = self.head[path[-1]]
            if u == self.sink:
                break
            edges, i = self.out[u], current[u]
            while i < len(edges):
                e = edges[i]
                v = self.head[e]
                if self.room[e] > 0 and (
                    (v == self.sink and level[u] == 1)
                    or (v < self.n and 0 < level[v] == level[u] - 1)
                ):
                    break
                i += 1
            current[u] = i
            if i < len(edges):
                path.append(edges[i])
                continue
            dead = path.pop()  # nothing leads on from u: the edge that led here is passed over
            if not path:
                return False
            current[self.head[dead ^ 1]] += 1
        amount = min(self.room[e] for e in path)
        if amount >= INFINITE // 2:
            raise NoCut([self.head[e] for e in path[:-1]])
        for e in path:
            self.room[e] -= amount
            self.room[e ^ 1] += amount
        return True

    def _reaches_sink(self) -> set[int]:
        reaching = {self.sink}
        todo = [self.sink]
        while todo:
            v = todo.pop()
            for e in self.out[v]:
                u = self.head[e]
                if self.room[e ^ 1] > 0 and u not in reaching:
                    reaching.add(u)
                    todo.append(u)
        if self.source in reaching:
            raise NoCut([])
        reaching.discard(self.sink)
        return reaching
