"""A run of steps that is repeated chunk by chunk along rows (`Repeat`), so that what lies between
them is in memory for one chunk only.

In: a graph of ATen operators that computes some rows (`capture.chunks` makes it). Out: the target
of one call of the graph around it, which gives what all rows give: rows one behind the other, sums
over rows added up. The chunks run one after the other, from the first row on; sums are added in
that order, so that results repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx


@dataclass(frozen=True)
class Result:
    """What the chunks' results become. `kind`: "rows" (one behind the other), "sum" (added, in
    float32 or a wider type), "product" (a product of matrices that sums over rows: each chunk adds
    to the same matrix, of this dtype)."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(eq=False, repr=False)
class Repeat:
    """`rows` in chunks of `chunk`. `along`: for each argument the dimension that is cut, None where
    every chunk has the whole; `bodies`: for each number of rows that a chunk has the graph of its
    steps. A body takes the arguments and, behind them, the matrices of the results that are
    products, to which it adds; it returns the other results. `artifacts`: of compiled bodies, as a
    cache keeps them."""

    rows: int
    chunk: int
    along: tuple[int | None, ...]
    results: tuple[Result, ...]
    bodies: dict[int, fx.GraphModule]
    compiled: dict[int, Callable[[list[Any]], Sequence[Any]]] = field(default_factory=dict)
    artifacts: dict[int, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "repeat"

    @property
    def __name__(self) -> str:
        return "repeat"

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.chunk)

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        made = [self.allocated(r) for r in self.results]
        if isinstance(args[0], torch._subclasses.FakeTensor):
            return tuple(made)
        products = [t for t, r in zip(made, self.results) if r.kind == "product"]
        others = [(t, r.kind) for t, r in zip(made, self.results) if r.kind != "product"]
        for start in range(0, self.rows, self.chunk):
            count = min(self.chunk, self.rows - start)
            given = [
                a if dim is None else a.narrow(dim, start, count)
                for a, dim in zip(args, self.along)
            ]
            parts = self.run(count, [*given, *products])
            for (whole, kind), part in zip(others, parts, strict=True):
                if kind == "rows":
                    whole.narrow(0, start, count).copy_(part)
                else:
                    whole.add_(part)
            del parts, part
        return tuple(made)

    def run(self, count: int, args: list[Any]) -> Sequence[Any]:
        call = self.compiled.get(count)
        return call(args) if call is not None else self.bodies[count](*args)

    def allocated(self, result: Result) -> Tensor:
        make = torch.empty if result.kind == "rows" else torch.zeros
        return make(result.shape, dtype=result.dtype, device=result.device)

    def compile(
        self, compiler: Callable[[fx.GraphModule, list[Any]], Callable[[list[Any]], Sequence[Any]]]
    ) -> None:
        """`compiler`: of a graph and fake values of its inputs."""
        for count, body in self.bodies.items():
            if count not in self.compiled:
                given = (n for n in body.graph.nodes if n.op == "placeholder")
                call = compiler(body, [n.meta["val"] for n in given])
                self.compiled[count] = call
                self.artifacts[count] = getattr(call, "artifact", None)

    def text(self) -> str:
        return f"{self.rows} rows in {self.chunks} chunks of {self.chunk}"


def row_counts(rows: int, chunk: int) -> list[int]:
    """The numbers of rows that chunks have."""
    return list(dict.fromkeys(n for n in (min(chunk, rows), rows % chunk) if n))


def repeats(graph: fx.Graph) -> list[Repeat]:
    targets = (n.target for n in graph.nodes if n.op == "call_function")
    return [t for t in targets if isinstance(t, Repeat)]


__all__ = ["Repeat", "Result", "repeats", "row_counts"]
