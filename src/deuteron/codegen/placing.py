"""Where a value is written: into the outermost scope that gives all that it depends on.

What values depend on is the target's to say: axes of loops (C++), dimensions of a tile (Triton). A
scope gives some of them. What is hoisted out of a loop stands before it, because the loop is
appended to the scope around it when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Div, Index, MinMax, Mod, Value

D = TypeVar("D", Axis, str)


class Scope(Generic[D]):
    """One loop level: its lines so far, what it gives, and the values that it holds."""

    __slots__ = ("given", "lines", "texts")
    given: frozenset[D]

    def __init__(self, given: frozenset[D]) -> None:
        self.given = given  # cumulative: what the scopes around it give too
        self.lines: list[str] = []
        self.texts: dict[Expr, str] = {}

    def add(self, *lines: str) -> None:
        self.lines.extend(lines)


S = TypeVar("S", bound="Scope")  # type: ignore[type-arg]


class Placing(Generic[D, S]):
    """The chain of scopes, names, and what each value depends on. `kind` makes a scope."""

    kind: type[S]

    def __init__(self, numbers: Iterator[int]) -> None:
        self.numbers = numbers
        self.chain: list[S] = [self.kind(frozenset())]
        self.result_deps: dict[str, frozenset[D]] = {}  # on what the nest's own results depend
        self._deps: dict[Expr, frozenset[D]] = {}

    def fresh(self, stem: str = "tmp") -> str:
        return f"{stem}{next(self.numbers)}"

    @property
    def scope(self) -> S:
        return self.chain[-1]

    @contextmanager
    def inside(self, *given: D) -> Iterator[S]:
        """A scope within the current one that gives more. The caller places its lines."""
        scope = self.kind(self.scope.given | frozenset(given))
        self.chain.append(scope)
        yield scope
        popped = self.chain.pop()
        assert popped is scope

    def deps(self, root: Expr) -> frozenset[D]:
        """What the value depends on; results of the nest depend on what they live on."""
        known = self._deps.get(root)
        if known is not None:
            return known
        for node in root.walk(self._deps.__contains__):
            if node in self._deps:
                continue
            out: frozenset[D] = frozenset()
            if node.op == "load" and node.attr[0] in self.result_deps:
                out = self.result_deps[node.attr[0]]
            else:
                if node.op == "load":
                    out = out.union(*(self.index_deps(i) for i in node.attr[1]))
                elif node.op == "index":
                    out = self.index_deps(node.attr)
                elif node.op == "random":
                    out = self.index_deps(node.attr[2])
                for a in node.args:
                    out |= self._deps[a]
                if node.op == "reduce":
                    out -= frozenset(map(self.bound_dep, node.attr[1]))
            self._deps[node] = out
        return self._deps[root]

    def index_deps(self, index: Index) -> frozenset[D]:
        out: set[D] = set()
        todo = [a for m, _ in index.terms for a in m]
        while todo:
            a = todo.pop()
            if isinstance(a, Axis):
                self.add_deps_of_axis(a, out)
            elif isinstance(a, Value):
                out |= self.deps(a.expr)
            elif isinstance(a, (Div, Mod)):
                todo.extend(x for i in (a.num, a.den) for m, _ in i.terms for x in m)
            elif isinstance(a, MinMax):
                todo.extend(x for i in (a.a, a.b) for m, _ in i.terms for x in m)
        return frozenset(out)

    def level(self, deps: frozenset[D]) -> int:
        for k, scope in enumerate(self.chain):
            if deps <= scope.given:
                return k
        raise AssertionError(f"no scope gives {sorted(map(str, deps - self.scope.given))}")

    def lookup(self, node: Expr) -> str | None:
        """The text of a value that is known."""
        for scope in reversed(self.chain):
            text = scope.texts.get(node)
            if text is not None:
                return text
        return self.literal(node) if node.op == "literal" else None

    def value(self, root: Expr) -> str:
        """The text of a value; whatever it needs is written first."""
        stack: list[tuple[Expr, bool]] = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if self.lookup(node) is not None:
                continue
            if ready:
                self.define(node)
                continue
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(self.needed(node)))
        text = self.lookup(root)
        assert text is not None
        return text

    # -- what a target adds ------------------------------------------------------------------------

    def bound_dep(self, axis: Axis) -> D:
        """What stands for an axis of a reduction inside an expression."""
        raise NotImplementedError

    def add_deps_of_axis(self, axis: Axis, out: set[D]) -> None:
        raise NotImplementedError

    def literal(self, node: Expr) -> str:
        raise NotImplementedError

    def needed(self, node: Expr) -> Sequence[Expr]:
        """The values that are written before `node` is."""
        raise NotImplementedError

    def define(self, node: Expr) -> None:
        """Writes a node whose needs are written."""
        raise NotImplementedError


__all__ = ["Placing", "Scope"]
