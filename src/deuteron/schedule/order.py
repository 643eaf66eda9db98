"""A total order of nodes in which nodes can be moved, inserted and compared in constant time.

In: nodes by number, appended in order. Out: `label`, numbers that grow along the order. A node that
is inserted takes a label between its neighbours'; where there is none left, all get new ones, which
is rare enough not to count (amortised).
"""

from __future__ import annotations

from collections.abc import Iterable

# Room for nodes between two neighbours: 40 insertions at one place, each halving it.
LABEL_GAP = 1 << 40


class Order:
    def __init__(self) -> None:
        self.label: dict[int, int] = {}
        self.next: dict[int, int | None] = {}
        self.previous: dict[int, int | None] = {}
        self.first: int | None = None
        self.last: int | None = None

    def insert(self, node: int, after: int | None) -> None:
        """Puts a node right after another (None: before all)."""
        following = self.first if after is None else self.next[after]
        self._link(after, node)
        self._link(node, following)
        if after is None and following is None:
            self.label[node] = 0
        elif following is None:
            assert after is not None
            self.label[node] = self.label[after] + LABEL_GAP
        elif after is None:
            self.label[node] = self.label[following] - LABEL_GAP
        else:
            low, high = self.label[after], self.label[following]
            if high - low < 2:
                self._relabel()
            else:
                self.label[node] = (low + high) // 2

    def append(self, node: int) -> None:
        self.insert(node, self.last)

    def remove(self, node: int) -> None:
        before, after = self.previous.pop(node), self.next.pop(node)
        if before is None:
            self.first = after
        else:
            self.next[before] = after
        if after is None:
            self.last = before
        else:
            self.previous[after] = before
        del self.label[node]

    def replace(self, old: int, new: int) -> None:
        """`new` at the place of `old`."""
        self.insert(new, old)
        self.remove(old)

    def move(self, nodes: Iterable[int], after: int | None) -> None:
        """Puts nodes, in the order that they have, right after another (None: before all)."""
        for k in sorted(nodes, key=self.label.__getitem__):
            self.remove(k)
            self.insert(k, after)
            after = k

    def _link(self, a: int | None, b: int | None) -> None:
        if a is None:
            self.first = b
        else:
            self.next[a] = b
        if b is None:
            self.last = a
        else:
            self.previous[b] = a

    def _relabel(self) -> None:
        k, label = self.first, 0
        while k is not None:
            self.label[k] = label
            k, label = self.next[k], label + LABEL_GAP


__all__ = ["Order"]
