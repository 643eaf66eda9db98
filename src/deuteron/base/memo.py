"""What the process remembers from one compilation to the next, in one object: `MEMO`.

Nodes of the IR are interned, and what follows from a node (bounds, proofs, maps between loops) is
computed once. Both kinds of table are registered here, so that they can be emptied together:
`clear` is what ``torch._dynamo.reset()`` calls, and a compilation that leaves more than
`MAX_ENTRIES` behind does so itself. Nothing is emptied while a compilation runs, or a call that
makes nodes (the self-check): both are `compiling`.

Answers are only dropped. Interned nodes that somebody still holds stay interned, since equality of
nodes is identity.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# About 1 GB. A training step of a model with a billion parameters leaves some 300,000.
MAX_ENTRIES = 2_000_000


class Memo:
    """Tables of interned nodes, and of answers about them."""

    def __init__(self) -> None:
        self._answers: list[dict[Any, Any]] = []
        self._nodes: list[tuple[dict[Any, Any], Callable[[Any], Any]]] = []
        self._lock = threading.Lock()
        self._running = 0
        self._wanted = False  # somebody asked for `clear` while a compilation ran

    def answers(self) -> dict[Any, Any]:
        """A new table of what follows from its keys alone."""
        table: dict[Any, Any] = {}
        self._answers.append(table)
        return table

    def nodes(self, key_of: Callable[[Any], Any]) -> dict[Any, Any]:
        """A new table of interned nodes, which allow weak references; `key_of(node)` is the key."""
        table: dict[Any, Any] = {}
        self._nodes.append((table, key_of))
        return table

    def __len__(self) -> int:
        """How many entries there are."""
        return sum(map(len, self._answers)) + sum(len(t) for t, _ in self._nodes)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Keeps all tables as they are inside the block."""
        with self._lock:
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running and (self._wanted or len(self) > MAX_ENTRIES):
                    self._clear()

    def clear(self) -> None:
        """Drops all answers, and the nodes that nobody holds; waits for compilations that run."""
        with self._lock:
            if self._running:
                self._wanted = True
            else:
                self._clear()

    def _clear(self) -> None:
        self._wanted = False
        for table in self._answers:
            table.clear()
        # A key holds the node's parts: keys go first, and are computed again for nodes that live.
        living = []
        for table, _ in self._nodes:
            nodes = list(table.values())
            table.clear()
            living.append([weakref.ref(n) for n in nodes])
            del nodes
        for (table, key_of), references in zip(self._nodes, living, strict=True):
            for reference in references:
                node = reference()
                if node is not None:
                    table.setdefault(key_of(node), node)


MEMO = Memo()
