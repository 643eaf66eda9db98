"""Operators on some of the rows: a graph of ATen operators in which every row is computed by
itself, for a number of rows that is another than the traced one.

In: nodes of a graph, one after the other, and where rows come in. Out: a graph of the same
operators for `count` rows, with one dimension for what may be several in the traced graph
(sequences of a batch). `Mixed` is raised at the first operator that may read one row to compute
another; a sum over rows is a result, which nothing else in the graph may read.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from deuteron.graph import ops
from deuteron.graph.edit import Editor
from deuteron.graph.repeat import Result

aten = torch.ops.aten
PRODUCTS = ("aten.mm", "aten.addmm")
VIEWS = ("aten.view", "aten._unsafe_view", "aten.reshape")
# One element for each of a tensor's, beside what is pointwise.
ALIKE = ("aten._to_copy", "aten.full_like", "aten.expand", "aten.alias", "aten.detach")
# Along the dimensions of their argument "dim" alone.
ALONG = frozenset(
    f"aten.{name}"
    for name in (
        "amax", "amin", "sum", "mean", "prod", "any", "all", "argmax", "argmin", "max", "min",
        "var", "std", "var_mean", "logsumexp", "cumsum", "gather", "scatter", "scatter_add",
        "_softmax", "_log_softmax", "unsqueeze", "squeeze", "slice", "select", "topk", "sort",
        "cat", "flip", "roll", "select_scatter", "slice_scatter",
    )
)  # fmt: skip
SUMS = ("aten.sum", "aten.mean")


# The sizes of a tensor of positions, and the tensors that its elements are of, or numbers.
Positions = tuple[tuple[int, ...], frozenset[fx.Node]]
CHOOSING = ("aten.where", "aten.unsqueeze", "aten.squeeze", "aten.scalar_tensor", "aten.full")


class Mixed(Exception):
    """Why rows cannot be computed by themselves."""


@dataclass(frozen=True)
class Lies:
    """Where rows are in a tensor: its first `lead` dimensions together, or the last of two."""

    lead: int = 1
    last: bool = False


class RowGraph:
    """The graph for `count` of `rows` rows. `inputs`: what it takes, in order: a node and how its
    rows lie, None where it is whole; `replaced`: nodes that are numbers; `scattered`: the
    positions that the graph also writes to, and so checks."""

    def __init__(
        self,
        gm: fx.GraphModule,
        rows: int,
        count: int,
        replaced: dict[fx.Node, float],
        scattered: Collection[Positions] = (),
    ) -> None:
        self.rows, self.count, self.replaced, self.scattered = rows, count, replaced, scattered
        self.mode = Editor(gm).mode
        self.gm = fx.GraphModule(torch.nn.Module(), fx.Graph())
        self.editor = Editor(self.gm)
        self.editor.mode = self.mode
        self.lies: dict[fx.Node, Lies] = {}
        self.sums: dict[fx.Node, Result] = {}
        self.made: dict[fx.Node, fx.Node] = {}
        self.inputs: dict[tuple[fx.Node, Lies | None], fx.Node] = {}
        self.matrices: dict[fx.Node, fx.Node] = {}

    # -- what comes in -----------------------------------------------------------------------------
    def given(self, node: fx.Node, lies: Lies | None) -> fx.Node:
        """An argument from outside, as this graph has it."""
        if node in self.replaced:
            return self.number(node)
        known = self.inputs.get((node, lies))
        if known is None:
            val = node.meta["val"]
            shape, strides = tuple(val.shape), val.stride()
            if lies is not None and lies.last:
                shape = (*shape[:-1], self.count)
            elif lies is not None:
                flat = flattened(val, lies.lead, self.rows)
                shape, strides = (self.count, *flat.shape[1:]), flat.stride()
            known = self.inputs[node, lies] = self.placeholder(shape, strides, node)
        return known

    def placeholder(self, shape: Sequence[int], strides: Sequence[int], like: fx.Node) -> fx.Node:
        val = like.meta["val"]
        graph = self.gm.graph
        last = next((n for n in reversed(graph.nodes) if n.op == "placeholder"), None)
        first = graph._root if last is None else last
        with graph.inserting_after(first):
            made = graph.placeholder(f"{like.name}_{len(graph.nodes)}")
        with self.mode:
            made.meta["val"] = torch.empty_strided(
                tuple(shape), tuple(strides), dtype=val.dtype, device=val.device
            )
        return made

    def is_whole(self, node: fx.Node) -> bool:
        """Whether what reads no rows has none either: numbers, what is the same for every row."""
        product = ops.packet(node.target) in PRODUCTS
        return not product and (is_number(node) or not self.leading(node.meta["val"].shape))

    def number_or_whole(self, node: fx.Node) -> fx.Node:
        return self.made[node] if node in self.made else self.given(node, None)

    def number(self, node: fx.Node) -> fx.Node:
        if node not in self.made:
            val = node.meta["val"]
            about = {"dtype": val.dtype, "device": val.device, "pin_memory": False}
            self.made[node] = self.editor.call(
                aten.full.default, list(val.shape), self.replaced[node], like=node, **about
            )
        return self.made[node]

    def read(self, node: fx.Node, dims: int, lead: int) -> fx.Node:
        """An argument that is aligned, from its last dimension on, with a result of `dims`
        dimensions, of which the first `lead` are rows."""
        val = node.meta["val"]
        if node in self.lies:
            if self.lies[node].last or val.dim() != dims or self.lies[node].lead != lead:
                raise Mixed(f"the rows of {node} lie otherwise than those of what it is used with")
            return self.made[node]
        beside = val.shape[: max(0, val.dim() - (dims - lead))]  # what it has where rows are
        if all(n == 1 for n in beside) or node in self.replaced:
            made = self.number_or_whole(node)
            if len(beside) <= 1 or node in self.replaced:
                return made
            shape = [1, *val.shape[len(beside) :]]
            return self.editor.call(aten.reshape.default, made, shape, like=node)
        if len(beside) == lead and math.prod(beside) == self.rows:
            return self.given(node, Lies(lead))
        raise Mixed(f"{node} is repeated along some of the rows")

    # -- operators ---------------------------------------------------------------------------------
    def add(self, node: fx.Node) -> None:
        """The same operator for fewer rows."""
        name = ops.packet(node.target)
        if any(a in self.sums for a in node.all_input_nodes):
            raise Mixed(f"{node} waits for a sum over all rows")
        if not any(a in self.lies for a in node.all_input_nodes) and self.is_whole(node):
            args, kwargs = fx.map_arg((node.args, node.kwargs), self.number_or_whole)
            self.made[node] = self.editor.call(node.target, *args, like=node, **kwargs)
        elif name in PRODUCTS:
            self.product(node)
        elif node.target is operator.getitem:
            (source,) = node.all_input_nodes
            self.keep(node, self.lies[source], self.made[source], node.args[1])
        elif name in VIEWS:
            self.view(node)
        elif name == "aten.permute":
            self.permute(node)
        elif name == "aten.full":
            lead = self.leading(node.meta["val"].shape)
            size = [self.count, *node.args[0][lead:]]  # type: ignore[index]
            self.keep(node, Lies(lead), size, *node.args[1:], **node.kwargs)
        elif is_elementwise(node) or name in ALIKE:
            self.aligned(node)
        elif name in ALONG:
            self.along(node)
        elif name == "aten.constant_pad_nd" and node.args[0] in self.lies:
            self.pad(node)
        else:
            raise Mixed(f"{node.target} may mix rows")

    def keep(self, node: fx.Node, lies: Lies, *args: Any, **kwargs: Any) -> None:
        self.made[node] = self.editor.call(node.target, *args, like=node, **kwargs)
        self.lies[node] = lies
        made = tree_leaves(self.made[node].meta["val"])
        for whole, mine in zip(tree_leaves(node.meta["val"]), made, strict=True):
            start, end = (whole.shape[:-1], ()) if lies.last else ((), whole.shape[lies.lead :])
            if tuple(mine.shape) != (*start, self.count, *end):
                raise Mixed(f"{node} has no rows of its own")

    def leading(self, shape: Sequence[int]) -> int:
        """How many dimensions, the first, are all rows together; 0 where none are."""
        leads = (n for n in range(1, len(shape) + 1) if math.prod(shape[:n]) == self.rows)
        return next(leads, 0)

    def aligned(self, node: fx.Node) -> None:
        known = [self.lies[a] for a in node.all_input_nodes if a in self.lies]
        if known and all(lies.last for lies in known):
            (source, *more) = node.all_input_nodes
            if more or ops.packet(node.target) == "aten.expand":
                raise Mixed(f"{node} joins transposed rows with others")
            self.keep(node, self.lies[source], self.made[source], *node.args[1:], **node.kwargs)
            return
        shape = node.meta["val"].shape
        dims, lead = len(shape), known[0].lead if known else self.leading(shape)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a: self.read(a, dims, lead))
        if ops.packet(node.target) == "aten.expand":
            args = (args[0], [self.count, *shape[lead:]])
        self.keep(node, Lies(lead), *args, **kwargs)

    def view(self, node: fx.Node) -> None:
        (source,) = node.all_input_nodes
        shape = node.meta["val"].shape
        if source not in self.lies:
            raise Mixed(f"{node} has no rows")
        if self.lies[source].last:
            raise Mixed(f"{node} reshapes transposed rows")
        lead = self.leading(shape)
        self.keep(node, Lies(lead), self.made[source], [self.count, *shape[lead:]])

    def permute(self, node: fx.Node) -> None:
        (source,) = node.all_input_nodes
        lies, dims = self.lies[source], [d % node.meta["val"].dim() for d in node.args[1]]  # type: ignore[union-attr]
        if dims == [1, 0] and lies.lead == 1:
            self.keep(node, Lies(last=not lies.last), self.made[source], dims)
        elif not lies.last and dims[: lies.lead] == list(range(lies.lead)):
            moved = [0, *(d - lies.lead + 1 for d in dims[lies.lead :])]
            self.keep(node, lies, self.made[source], moved)
        else:
            raise Mixed(f"{node} moves rows between other dimensions")

    def pad(self, node: fx.Node) -> None:
        source, pad, *value = node.args
        lies = self.lies[source]  # type: ignore[index]
        if lies.last or len(pad) // 2 > node.meta["val"].dim() - lies.lead:  # type: ignore[arg-type]
            raise Mixed(f"{node} pads rows")
        self.keep(node, lies, self.made[source], pad, *value)  # type: ignore[index]

    def along(self, node: fx.Node) -> None:
        """Operators along dimensions that they name; sums over all rows among them."""
        first = node.args[0]
        source: fx.Node = first[0] if isinstance(first, (list, tuple)) else first  # type: ignore
        val = source.meta["val"]
        known = [self.lies[a] for a in node.all_input_nodes if a in self.lies]
        if any(lies.last for lies in known):
            raise Mixed(f"{node} works along dimensions of transposed rows")
        lead = known[0].lead if known else self.leading(val.shape)
        if not lead:
            raise Mixed(f"{node} has no rows of its own")
        schema = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
        given = dict(zip(schema, node.args)) | dict(node.kwargs)
        named = next((k for k in ("dim", "dims") if k in schema), None)
        raw = given.get(named) if named else None
        extra = ops.packet(node.target) == "aten.unsqueeze"
        count = val.dim() + extra
        dims = list(range(count)) if raw in (None, []) else raw
        dims = [d % count for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
        if set(range(lead)) <= set(dims):
            self.sum(node, source, given)
            return
        if any(d < lead for d in dims):
            raise Mixed(f"{node} works along the rows")
        shifted = [d - lead + 1 for d in dims]
        if named is not None:
            given[named] = shifted if isinstance(raw, (list, tuple)) else shifted[0]

        def read(a: fx.Node) -> fx.Node:
            selected = ops.packet(node.target) == "aten.select_scatter" and a is node.args[1]
            return self.read(a, val.dim() - selected, lead)

        given = fx.map_arg(given, read)
        if ops.packet(node.target) == "aten.gather" and self.is_checked(node):
            self.made[node] = self.select(node, given["self"], given["dim"], given["index"])
            self.lies[node] = Lies(lead)
            return
        positional = [a for a in node.target._schema.arguments if not a.kwarg_only]  # type: ignore[union-attr]
        args: list[Any] = []
        for a in positional:
            if a.name not in given and not any(b.name in given for b in positional[len(args) :]):
                break
            args.append(given.get(a.name, a.default_value))
        kwargs = {
            a.name: given[a.name]
            for a in node.target._schema.arguments
            if a.kwarg_only and a.name in given
        }  # type: ignore[union-attr]
        self.keep(node, Lies(lead), *args, **kwargs)

    def is_checked(self, node: fx.Node) -> bool:
        """Whether one element of each row is read whose position a scatter checks."""
        shape, at = node.meta["val"].shape, node.args[2]
        last = shape[-1] == 1 and node.args[1] in (-1, len(shape) - 1)
        return last and positions(at) in self.scattered  # type: ignore[arg-type]

    def select(self, node: fx.Node, x: fx.Node, dim: int, index: fx.Node) -> fx.Node:
        """One element of each row as a sum over it: then nothing reads a row at another place than
        where it may be overwritten, and what is computed of it takes its memory."""
        val = x.meta["val"]
        about = {"dtype": torch.int64, "device": val.device}
        call = self.editor.call
        at = call(aten.arange.start_step, 0, val.shape[dim], 1, like=node, **about)
        hit = call(aten.eq.Tensor, index, at, like=node)
        zero = call(aten.full.default, [], 0, like=node, dtype=val.dtype, device=val.device)
        picked = call(aten.where.self, hit, x, zero, like=node)
        return call(aten.sum.dim_IntList, picked, [dim], True, like=node, dtype=val.dtype)

    def sum(self, node: fx.Node, source: fx.Node, given: dict[str, Any]) -> None:
        """A sum over all rows, and maybe over more; its mean is that of sums."""
        name, val = ops.packet(node.target), node.meta["val"]
        if name not in SUMS or source not in self.lies:
            raise Mixed(f"{node} reduces over all rows")
        whole, lead = source.meta["val"], self.lies[source].lead
        raw = given.get("dim") or list(range(whole.dim()))
        dims = sorted({d % whole.dim() for d in raw} - set(range(lead)))
        over = [0, *(d - lead + 1 for d in dims)]
        wide = (
            torch.promote_types(val.dtype, torch.float32) if val.is_floating_point() else val.dtype
        )
        made = self.editor.call(
            aten.sum.dim_IntList, self.made[source], over, like=node, dtype=wide
        )
        if name == "aten.mean":
            made = self.editor.call(
                aten.div.Tensor, made, whole.numel() // max(1, val.numel()), like=node
            )
        self.made[node] = made
        self.sums[node] = Result("sum", tuple(made.meta["val"].shape), wide, val.device)

    def product(self, node: fx.Node) -> None:
        *bias, a, b = node.args[:3] if ops.packet(node.target) == "aten.addmm" else node.args
        lies_a, lies_b = self.lies.get(a), self.lies.get(b)
        if lies_b is None and (lies_a is None or lies_a == Lies()):
            left = self.made[a] if lies_a else self.given(a, Lies())
            added = [self.read(x, 2, 1) for x in bias]
            self.keep(node, Lies(), *added, left, self.given(b, None), **node.kwargs)
            return
        summed = lies_a == Lies(last=True) and lies_b in (None, Lies())
        summed = summed or (lies_a is None and lies_b == Lies())
        if bias or not summed:
            raise Mixed(f"{node} multiplies along other dimensions than rows")
        left = self.made[a] if lies_a else self.given(a, Lies(last=True))
        right = self.made[b] if lies_b else self.given(b, Lies())
        val = node.meta["val"]
        matrix = self.placeholder(val.shape, row_major(val.shape), node)
        self.matrices[node] = matrix
        self.made[node] = self.editor.call(aten.addmm_.default, matrix, left, right, like=node)
        self.sums[node] = Result("product", tuple(val.shape), val.dtype, val.device)

    # -- what goes out -----------------------------------------------------------------------------
    def finish(self, results: Sequence[fx.Node]) -> list[Result]:
        """Ends the graph; `results`: what others read. Returns what becomes of each."""
        out, kinds = [], []
        for n in results:
            if n in self.sums:
                kinds.append(self.sums[n])
            elif self.lies[n].last:
                raise Mixed(f"{n}, transposed, is read by others")
            else:
                val = self.made[n].meta["val"]
                shape = (self.rows, *val.shape[1:])
                kinds.append(Result("rows", shape, val.dtype, val.device))
            if kinds[-1].kind != "product":
                out.append(self.made[n])
        self.gm.graph.output(tuple(out))
        for n in results:  # matrices stand behind the other arguments, in the order of results
            last = next(n for n in reversed(self.gm.graph.nodes) if n.op == "placeholder")
            if (matrix := self.matrices.get(n, last)) is not last:
                last.append(matrix)
        self.gm.recompile()
        return kinds


def positions(n: fx.Node) -> Positions:
    found: set[fx.Node] = set()
    todo = [n]
    while todo:
        a = todo.pop()
        name = ops.packet(a.target) if a.op == "call_function" else ""
        if name in CHOOSING or name in VIEWS:
            todo += a.all_input_nodes[1:] if name == "aten.where" else a.all_input_nodes
        else:
            found.add(a)
    return tuple(n.meta["val"].shape), frozenset(found)


def is_elementwise(n: fx.Node) -> bool:
    """Each element of the result from those at the same place, and nothing else."""
    if not ops.is_overload(n) or ops.is_random(n) or ops.is_mutating(n):
        return False
    return torch.Tag.pointwise in n.target.tags  # type: ignore[union-attr]


def is_number(n: fx.Node) -> bool:
    val = n.meta.get("val")
    return isinstance(val, torch.Tensor) and val.numel() == 1


def flattened(val: torch.Tensor, lead: int, rows: int) -> torch.Tensor:
    return val.reshape(rows, *val.shape[lead:]) if lead != 1 else val


def row_major(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


__all__ = ["PRODUCTS", "Lies", "Mixed", "RowGraph", "is_number", "positions"]
