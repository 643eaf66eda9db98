"""What lies between products of matrices is computed in chunks of rows, where it is large: a loss
over the classes of a linear layer keeps no logits in memory.

In: a joint graph of forward and backward, or a graph of inference. Out: the same with one call of
a `Repeat` in place of each region: the products whose results are larger than the option
``chunk_mib``, what is computed of these row by row, and the products and sums that make it small
again. The gradients of such a region are made in its forward: they are linear in the gradient of
the loss, which is one number, so they are computed for 1 and multiplied with that number in the
backward. Where that cannot be (several numbers per row come back, float16 that a scale protects,
rows that read each other, results that others read whole) the Record says why and the graph stays
as it is. Sums over rows are added chunk by chunk in their own dtype: with ``precision="eager"``,
which rounds such a sum once, regions with one stay as well.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from deuteron.base.options import Options
from deuteron.base.record import Record
from deuteron.graph import ops
from deuteron.graph.edit import Editor
from deuteron.graph.repeat import Repeat, Result, row_counts
from deuteron.graph.rows import PRODUCTS, VIEWS, Lies, Mixed, RowGraph, is_number, positions

aten = torch.ops.aten
# Of a power of two rows, where there are as many: blocks of products are full.
ROWS = 128
# Chunks whose sums are added in a half type: n roundings of partial sums are about as far off as
# sqrt((n + 1) / 2) of the whole sum (for terms without a common sign), twice that for 8.
HALF_CHUNKS = 8
# Linear in each argument that depends on the gradient that comes in, if no other one does.
FACTORS = ("aten.mul", "aten.mm", "aten.addmm_")
SCATTERS = ("aten.scatter", "aten.scatter_add")
LINEAR = frozenset(
    f"aten.{name}"
    for name in (
        "neg", "_to_copy", "clone", "alias", "detach", "expand", "permute", "unsqueeze", "squeeze",
        "slice", "select", "sum", "mean", "view", "_unsafe_view", "reshape", "cumsum", "flip",
        "roll",
    )
)  # fmt: skip


def in_chunks(gm: fx.GraphModule, record: Record, options: Options) -> int:
    """Replaces regions that keep more than `chunk_mib` between products; their number."""
    budget, eager = options.chunk_mib << 20, options.precision == "eager"
    count = 0
    tried: set[str] = set()
    while True:
        roots = (n for n in gm.graph.nodes if n.name not in tried and is_large(n, budget))
        root = next(roots, None)
        if root is None:
            return count
        tried.add(root.name)
        try:
            region = Region(gm, root)
            tried |= {n.name for n in region.nodes}
            step = region.replace(budget, eager)
        except Mixed as e:
            decided(record, root, False, str(e))
        else:
            decided(record, root, True, f"{step.text()}: what lies between is in memory for one")
            count += 1


def decided(record: Record, root: fx.Node, accepted: bool, reason: str) -> None:
    mib = root.meta["val"].numel() * root.meta["val"].dtype.itemsize / 2**20
    record.add(
        "decision",
        subject="chunks",
        accepted=accepted,
        reason=reason,
        detail=f"{root.name}: {mib:.0f} MiB between products",
    )


def is_large(n: fx.Node, budget: int) -> bool:
    if n.op != "call_function" or ops.packet(n.target) not in PRODUCTS:
        return False
    val = n.meta["val"]
    if not all(type(s) is int for s in val.shape):
        return False
    return bool(val.numel() * val.dtype.itemsize > budget)


class Region:
    """The nodes between products around `root`."""

    def __init__(self, gm: fx.GraphModule, root: fx.Node) -> None:
        self.gm, self.root = gm, root
        self.rows, self.numel = int(root.meta["val"].shape[0]), root.meta["val"].numel()
        self.order = {n: k for k, n in enumerate(gm.graph.nodes)}
        self.back = dependent(n for n in gm.graph.nodes if is_tangent(n))
        self.nodes: set[fx.Node] = {root}
        self.roots = [root]
        self.spread()
        self.close()
        self.incoming = self.take_in_gradients()

    # -- which nodes -------------------------------------------------------------------------------
    def wide(self, n: fx.Node) -> bool:
        """As large as what is to be kept out of memory."""
        val = n.meta.get("val")
        return (
            n.op == "call_function"
            and isinstance(val, torch.Tensor)
            and 2 * val.numel() > self.numel
        )

    def spread(self) -> None:
        """What is as large, from neighbour to neighbour, and who reads that."""
        todo = [self.root]
        while todo:
            n = todo.pop()
            for u in n.users:
                if u.op == "output":
                    raise Mixed(f"{n} is a result of the graph")
                if u not in self.nodes:
                    parts = [] if isinstance(u.meta["val"], torch.Tensor) else list(u.users)
                    self.nodes |= {u, *parts}
                    if ops.packet(u.target) not in PRODUCTS:
                        todo += [m for m in (u, *parts) if self.wide(m)]
            if ops.packet(n.target) in PRODUCTS:
                continue
            for a in n.all_input_nodes:
                if a not in self.nodes and self.wide(a):
                    self.nodes.add(a)
                    todo.append(a)
                    if ops.packet(a.target) in PRODUCTS:
                        self.roots.append(a)

    def close(self) -> None:
        """What lies on a way from one of the nodes to another."""
        below = dependent(self.nodes)
        above: set[fx.Node] = set()
        todo = list(self.nodes)
        while todo:
            for a in todo.pop().all_input_nodes:
                if a in below and a not in above and not is_number(a):
                    above.add(a)
                    todo.append(a)
        self.nodes |= above

    def take_in_gradients(self) -> fx.Node | None:
        """Adds what comes between the gradient of the loss and the rows; that gradient, or a number
        that is a multiple of it. None where no gradient comes in."""
        numbers: set[fx.Node] = set()
        todo = list(self.nodes)
        below = dependent(self.nodes)
        while todo:
            for a in todo.pop().all_input_nodes:
                if a in self.nodes or a in numbers or a not in self.back:
                    continue
                if is_number(a):
                    numbers.add(a)
                elif is_tangent(a) or a in below:
                    raise Mixed(f"the gradient that comes in ({a}) is more than a number")
                else:
                    self.nodes.add(a)
                    todo.append(a)
        while len(numbers) > 1:  # the last is a multiple of those before it
            last = max(numbers, key=self.order.__getitem__)
            if is_tangent(last) or last in below:
                raise Mixed("gradients of several numbers come in")
            numbers.remove(last)
            self.nodes.add(last)
            numbers |= {a for a in last.all_input_nodes if a in self.back and a not in self.nodes}
            if not all(map(is_number, numbers)):
                raise Mixed("the gradient that comes in is more than a number")
        (incoming,) = numbers or {None}
        if incoming is not None:
            self.check_linear(incoming)
        return incoming

    def check_linear(self, incoming: fx.Node) -> None:
        """Raises `Mixed` where what depends on the gradient is no multiple of it."""
        linear = {incoming}
        for n in sorted(self.nodes, key=self.order.__getitem__):
            given = [a for a in n.all_input_nodes if a in linear]
            if not given:
                continue
            if n.meta["val"].dtype == torch.float16:
                raise Mixed(f"{n} is float16, whose small gradients need the loss's scale")
            if not is_linear(n, linear):
                raise Mixed(f"{n} is no multiple of the gradient that comes in")
            linear.add(n)
        self.linear = linear

    # -- replacing them ----------------------------------------------------------------------------
    def replace(self, budget: int, eager: bool) -> Repeat:
        """One call in place of the nodes."""
        inside = sorted(self.nodes, key=self.order.__getitem__)
        results = [n for n in inside if any(u not in self.nodes for u in n.users)]
        row_bytes = sum(
            r.meta["val"].numel() * r.meta["val"].dtype.itemsize // self.rows for r in self.roots
        )
        most = max(1, budget // row_bytes)
        graphs, kinds = self.written(inside, results, most)
        halves = any(k.kind == "product" and k.dtype.itemsize < 4 for k in kinds)
        if halves and most * HALF_CHUNKS < self.rows:
            most = -(-self.rows // HALF_CHUNKS)
            graphs, kinds = self.written(inside, results, most)
        graph = next(iter(graphs.values()))
        if eager and any(k.kind != "rows" for k in kinds):
            raise Mixed("precision='eager' rounds sums over rows once")
        for n in results:
            if self.wide(n) and n not in graph.sums:
                raise Mixed(f"{n} is read whole by {next(iter(n.users))}")
        inputs = list(graph.inputs)
        along = tuple(None if lies is None else int(lies.last) for _, lies in inputs)
        step = Repeat(
            self.rows, max(graphs), along, tuple(kinds), {c: g.gm for c, g in graphs.items()}
        )
        self.insert(step, inputs, results)
        return step

    def written(
        self, inside: Sequence[fx.Node], results: Sequence[fx.Node], most: int
    ) -> tuple[dict[int, RowGraph], list[Result]]:
        """The graphs of chunks of at most `most` rows, by their numbers of rows."""
        replaced = {self.incoming: 1.0} if self.incoming is not None else {}
        scatters = [n for n in inside if ops.packet(n.target) in SCATTERS]
        checked = {positions(n.args[2]) for n in scatters}  # type: ignore[arg-type]
        graphs: dict[int, RowGraph] = {}
        kinds: list[Result] = []
        for count in row_counts(self.rows, chunk_of(self.rows, most)):
            graph = graphs[count] = RowGraph(self.gm, self.rows, count, replaced, checked)
            for n in inside:
                if n in results or any(u in self.nodes for u in n.users):
                    graph.add(n)
            kinds = graph.finish(results)
        return graphs, kinds

    def insert(
        self, step: Repeat, inputs: Sequence[tuple[fx.Node, Lies | None]], results: list[fx.Node]
    ) -> None:
        readers = {u for n in results for u in n.users if u not in self.nodes}
        first = min(readers, key=self.order.__getitem__)
        self.move_before(first, [n for n, _ in inputs])
        editor = Editor(self.gm)
        with editor.before(first):
            args = [self.cut(editor, n, lies) for n, lies in inputs]
            call = editor.call(step, *args, like=self.root)
            call.meta.pop("partitioner_tag", None)
            made = []
            for k, n in enumerate(results):
                part = self.root.graph.call_function(operator.getitem, (call, k))
                part.meta["val"] = call.meta["val"][k]
                made.append((n, self.like(editor, part, n)))
        for n, part in made:
            scaled = part
            if self.incoming is not None and n in self.linear:
                with editor.before(self.after(part)):
                    by = self.incoming
                    if by.meta["val"].dim():
                        by = editor.call(aten.reshape.default, by, [], like=n)
                    scaled = editor.call(aten.mul.Tensor, part, by, like=n)
            n.replace_all_uses_with(scaled, delete_user_cb=lambda u: u not in self.nodes)
        for n in sorted(self.nodes, key=self.order.__getitem__, reverse=True):
            self.gm.graph.erase_node(n)

    def after(self, part: fx.Node) -> fx.Node:
        """The first node behind which both `part` and the gradient stand."""
        assert self.incoming is not None
        for n in self.gm.graph.nodes:
            if n is part or n is self.incoming:
                last = n
        return last.next

    def cut(self, editor: Editor, n: fx.Node, lies: Lies | None) -> fx.Node:
        """An argument with its rows in one dimension."""
        if lies is None or lies.last or lies.lead == 1:
            return n
        shape = [self.rows, *n.meta["val"].shape[lies.lead :]]
        return editor.call(aten.reshape.default, n, shape, like=n)

    def like(self, editor: Editor, part: fx.Node, n: fx.Node) -> fx.Node:
        """A result in the sizes and the dtype of the node that it stands for."""
        val = n.meta["val"]
        if part.meta["val"].dtype != val.dtype:
            part = editor.call(aten._to_copy.default, part, like=self.root, dtype=val.dtype)
        if part.meta["val"].shape != val.shape:
            part = editor.call(aten.reshape.default, part, list(val.shape), like=self.root)
        return part

    def move_before(self, first: fx.Node, needed: Iterable[fx.Node]) -> None:
        """Puts what is needed, and what that needs, before `first`."""
        late: set[fx.Node] = set()
        todo = list(needed)
        while todo:
            n = todo.pop()
            n.meta.pop("partitioner_tag", None)  # it is of the forward now
            if n not in late and self.order[n] >= self.order[first]:
                late.add(n)
            todo += [a for a in n.all_input_nodes if a.op == "call_function"]
        for n in sorted(late, key=self.order.__getitem__):
            first.prepend(n)


def chunk_of(rows: int, most: int) -> int:
    """Rows of a chunk, at most `most`: chunks as even as full blocks allow."""
    count = -(-rows // most)
    even = -(-rows // count)
    rounded = -(-even // ROWS) * ROWS
    return rounded if rounded <= most else max(1, most // ROWS * ROWS or even)


def is_tangent(n: fx.Node) -> bool:
    return n.op == "placeholder" and "tangents" in str(n.target)


def dependent(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that is computed from them."""
    found = set(nodes)
    todo = list(found)
    while todo:
        for u in todo.pop().users:
            if u not in found and u.op != "output":
                found.add(u)
                todo.append(u)
    return found


def is_linear(n: fx.Node, linear: set[fx.Node]) -> bool:
    """Whether a node is a multiple of the gradient, as some of its arguments are."""
    name, args = ops.packet(n.target), n.args
    dependent_args = [a for a in args if isinstance(a, fx.Node) and a in linear]
    if name in LINEAR or name in VIEWS:
        return True
    if name == "aten.constant_pad_nd":
        return len(args) < 3 or args[2] == 0
    if name in FACTORS:
        return len(dependent_args) == 1
    if name == "aten.div":
        return len(dependent_args) == 1 and args[0] is dependent_args[0]
    if name in ("aten.add", "aten.sub"):
        return all(a in linear or is_zero(a) for a in args[:2])
    if name == "aten.where":
        return args[0] not in linear and all(a in linear or is_zero(a) for a in args[1:])
    if name in ("aten.gather", "aten.index_select"):
        return args[0] in linear and args[2] not in linear
    if name in ("aten.select_scatter", "aten.slice_scatter"):
        return all(a in linear or is_zero(a) for a in args[:2])
    if name in SCATTERS:
        return args[2] not in linear and all(a in linear or is_zero(a) for a in (args[0], args[3]))
    return False


def is_zero(x: Any) -> bool:
    """Whether a number, or a tensor, is 0 for all one can see."""
    if isinstance(x, (int, float)):
        return x == 0
    if not isinstance(x, fx.Node) or x.op != "call_function":
        return False
    name = ops.packet(x.target)
    if name in ("aten.full", "aten.full_like"):
        return bool(x.args[1] == 0)
    if name == "aten.scalar_tensor":
        return bool(x.args[0] == 0)
    return name in ("aten.zeros", "aten.zeros_like") or (
        name in ("aten.expand", "aten._to_copy") and is_zero(x.args[0])
    )


__all__ = ["in_chunks"]
