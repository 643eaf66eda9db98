"""Strides of a graph's values, when those of some have changed.

A rewrite that lets results lie elsewhere than traced says so to a `Relayout`, which walks on: what
reads such a result follows it, or reads a copy that lies as traced. So no node finds its arguments
otherwise than it was traced for, unless `follows` says that it does not mind.

A forward says here which strides its saved tensors have got (`report`), and a backward is given
them (`as_saved`): what is saved need not lie as it was traced, since nobody else sees it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from deuteron.base.record import Record
from deuteron.graph import ops
from deuteron.graph.aliasing import exposed
from deuteron.graph.edit import Editor
from deuteron.graph.rules import same_numbers
from deuteron.graph.transaction import Rewrite, attempt

aten = torch.ops.aten
Strides = tuple[Any, ...] | None

# Views that say which elements of their argument they show, not where those lie. They are refused
# where no strides show them so.
LOGICAL_VIEWS = frozenset(
    "aten." + n
    for n in [
        "alias",
        "detach",
        "diagonal",
        "expand",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
        "_unsafe_view",
    ]
)
# Library calls that take their arguments wherever they lie, and of which torch's rule (the fake
# kernel) knows the strides of the results: tests/capture/test_layout.py compares both.
ANY_STRIDES = frozenset(
    "aten." + n
    for n in [
        "convolution",
        "convolution_backward",
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "reshape",
        "max_pool2d_with_indices",
        "max_pool2d_with_indices_backward",
        "avg_pool2d",
        "avg_pool2d_backward",
        "_adaptive_avg_pool2d",
        "_adaptive_avg_pool2d_backward",
        "upsample_nearest2d",
        "upsample_bilinear2d",
    ]
) | {"deuteron.max_pool", "deuteron.max_pool_backward"}
KNOWN_NAMESPACES = ("aten", "prims", "deuteron")


def strides_of(value: Any) -> Strides:
    val = value.meta.get("val") if isinstance(value, fx.Node) else None
    return steps(val)


def steps(val: Any) -> Strides:
    return tuple(val.stride()) if isinstance(val, Tensor) and val.layout == torch.strided else None


def follows(node: fx.Node) -> bool:
    """Whether a call computes the same from arguments that lie elsewhere, and only its results'
    strides may change: not what draws (in memory's order), writes, asks for strides, makes sizes
    that are known at run time only, or is somebody else's."""
    if node.target is operator.getitem:
        return True
    if not ops.is_overload(node) or node.target.namespace not in KNOWN_NAMESPACES:
        return False
    if ops.is_random(node) or ops.is_mutating(node) or "unbacked_bindings" in node.meta:
        return False
    name = ops.packet(node.target)
    if name in LOGICAL_VIEWS:
        return str(node.target) != "aten.view.dtype"
    if (
        ops.is_view(node) or name in ops.STRIDED_OPERATORS or name == "aten.roll"
    ):  # torch's rule is not true
        return False
    of_elements = ops.is_pointwise(node) or ops.is_reduction(node)
    return of_elements or name in ops.SCATTERS or name in ANY_STRIDES


class Relayout:
    """Results of one graph that lie elsewhere than they were traced.

    `moved` and `replace` say which; `follow`, for every later node in graph order, lets it follow;
    `finish` gives the caller what was traced. In memory that several results share, or of which
    positions are read (`aliasing.exposed`), elements stay where they were traced.
    """

    def __init__(self, editor: Editor) -> None:
        self.editor, self.graph = editor, editor.graph
        self.traced: dict[fx.Node, Any] = {}  # what moved -> its fake value as traced
        self.copies: dict[fx.Node, fx.Node] = {}  # what moved -> the same, as traced
        self.exposed_storages = {ops.storage_of(n) for n in exposed(editor.graph)}

    def moved(self, node: fx.Node, traced: Any) -> None:
        """Says that a node lies elsewhere than `traced`, its fake value before, does."""
        if isinstance(traced, Tensor) and same_steps(node.meta["val"], traced):
            return
        self.traced[node] = traced
        if isinstance(traced, Tensor) and ops.storage(traced) in self.exposed_storages:
            readers = list(node.users)
            copy = self.as_traced(node)
            for u in readers:
                u.replace_input_with(node, copy)

    def beside(self, copy: fx.Node, original: fx.Node) -> None:
        """Says that `copy` holds what `original` does, and lies elsewhere."""
        self.traced[copy] = self.traced.get(original, original.meta["val"])
        self.copies[copy] = self.as_traced(original)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """`new` takes the place of `old`, wherever it lies."""
        traced = self.traced.pop(old, old.meta["val"])
        if old in self.copies:
            self.copies[new] = self.copies.pop(old)
        self.editor.replace(old, new)
        self.moved(new, traced)

    def follow(self, node: fx.Node, copied: bool = False) -> None:
        """To be called for every node after one that moved, in graph order. `copied`: it reads
        copies, whatever it is."""
        moved = [a for a in node.all_input_nodes if a in self.traced]
        if not moved or node.op != "call_function":
            return
        old = node.meta.get("val")
        new = self.evaluated(node, old) if follows(node) and not copied else None
        if new is None:
            for a in moved:
                node.replace_input_with(a, self.as_traced(a))
            return
        node.meta["val"] = new
        self.moved(node, old)

    def evaluated(self, node: fx.Node, old: Any) -> Any:
        """The fake result for arguments that lie elsewhere; None where there is none, or none of
        which a copy can lie as traced."""
        of_view = ops.viewed(node) is not None or node.target is operator.getitem
        if not of_view and not all(map(orderable, parts(old))):
            return None
        try:
            return self.editor.evaluate(node)
        except (RuntimeError, ValueError):
            if not of_view:
                raise
            return None  # no strides show what it does

    def as_traced(self, node: fx.Node) -> fx.Node:
        """What moved, as it was traced."""
        if node not in self.traced:
            return node
        if node not in self.copies:
            traced = self.traced[node]
            with self.editor.before(after(node)):
                if isinstance(traced, Tensor) and orderable(traced):
                    made = laid(self.editor, node, steps(traced))
                else:  # a view, of what lay as traced
                    args, kwargs = fx.map_arg((node.args, node.kwargs), self.as_traced)
                    made = self.editor.call(node.target, *args, like=node, **kwargs)  # type: ignore[arg-type]
            self.copies[node] = made
        return self.copies[node]

    def finish(self) -> None:
        """What the graph returns lies as traced; what it saves need not, if copies of it could."""
        output = self.graph.output_node()
        results, saved = ops.results_of(output)
        strict = [n for n in saved if n in self.traced and not orderable(self.traced[n])]
        for n in dict.fromkeys((*results, *strict)):
            if isinstance(n, fx.Node) and n in self.traced:
                output.replace_input_with(n, self.as_traced(n))
        if self.traced:  # views of copies lie in these
            self.editor.view_again()


def after(node: fx.Node) -> fx.Node:
    """The first node behind `node` at which calls can be inserted."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following


def parts(val: Any) -> Sequence[Any]:
    return val if isinstance(val, (tuple, list)) else [val]


def same_steps(a: Tensor, b: Tensor) -> bool:
    """Equal strides, as far as that is known without a guard."""
    one, other = steps(a), steps(b)
    return one == other if one is None or other is None else same_numbers(one, other)


def orderable(val: Any) -> bool:
    """Whether a copy can lie as a fake value does; of what is no tensor, nothing is asked."""
    return not isinstance(val, Tensor) or order_of(steps(val), val) is not None


def order_of(strides: Strides, t: Tensor) -> list[int] | None:
    """The dimensions in the order in which elements with these strides lie side by side; None where
    they do not."""
    if strides is None:
        return None
    orders = [[*range(t.dim())]]
    orders += [[0, 2, 3, 1]] if t.dim() == 4 else []
    if all(type(s) is int for s in strides):
        orders.append(sorted(orders[0], key=lambda d: (-strides[d], -t.shape[d])))
    for order in orders:
        dense = torch.empty([t.shape[d] for d in order], device="meta").stride()
        if same_numbers([strides[d] for d in order], dense):
            return order
    return None


def laid(editor: Editor, node: fx.Node, strides: Strides) -> fx.Node:
    """The node, or a copy of it that has these strides."""
    if strides is None or same_numbers(strides_of(node) or (), strides):
        return node
    order = order_of(strides, node.meta["val"])
    assert order is not None, f"{node}: nothing lies {strides} apart side by side"
    kwargs = {"memory_format": torch.contiguous_format}
    if order == sorted(order):
        return editor.call(aten.clone.default, node, like=node, **kwargs)
    moved = editor.call(aten.permute.default, node, order, like=node)
    moved = editor.call(aten.clone.default, moved, like=node, **kwargs)
    back = sorted(range(len(order)), key=order.__getitem__)
    return editor.call(aten.permute.default, moved, back, like=node)


def as_was(editor: Editor, new: fx.Node, old: fx.Node) -> fx.Node:
    """`new`, or a copy of it, with the strides of `old`."""
    a, b = ops.tensor_of(new), ops.tensor_of(old)
    if a is None or b is None or same_steps(a, b) or not orderable(b):
        return new
    return laid(editor, new, steps(b))


def as_saved(gm: fx.GraphModule, inputs: Sequence[Any], record: Record) -> None:
    """Gives a backward's inputs, and every value that follows from them, the strides of what the
    forward saved. What it returns keeps those that were traced."""

    def lies_elsewhere(node: fx.Node, given: Any) -> bool:
        old = strides_of(node)
        known = old is not None and isinstance(given, Tensor) and all(type(s) is int for s in old)
        return known and tuple(given.stride()) != old

    placeholders = gm.graph.find_nodes(op="placeholder")
    where = [k for k, n in enumerate(placeholders) if lies_elsewhere(n, inputs[k])]
    assert len(placeholders) == len(inputs), "an input of the backward for each of its tensors"
    if not where:
        return
    moved = {k: inputs[k] for k in where}
    rewrite = Rewrite("strides of saved tensors", lambda gm, _: _follow_saved(gm, moved))
    if attempt(gm, record, rewrite) is None:
        _follow_saved(gm, moved, copied=True)


def _follow_saved(gm: fx.GraphModule, given: Mapping[int, Tensor], copied: bool = False) -> int:
    """`copied`: copies of what is given lie as traced, and nothing else changes."""
    relayout = Relayout(Editor(gm))
    for k, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if k in given:
            traced, node.meta["val"] = node.meta["val"], given[k]
            relayout.moved(node, traced)
    for node in list(gm.graph.nodes):
        relayout.follow(node, copied)
    relayout.finish()
    return len(given)


def saved_strides(gm: fx.GraphModule) -> list[Strides]:
    """Of what the forward returns; None for what is its caller's."""
    results, saved = ops.results_of(gm.graph.output_node())
    return [*(None for _ in results), *map(strides_of, saved)]


def report(gm: fx.GraphModule, traced: Sequence[Strides]) -> None:
    """Tells AOTAutograd which saved tensors of a compiled forward no longer have the strides that
    were traced (see `saved_strides`); it gives `as_saved` tensors like them."""
    context = torch._guards.TracingContext.try_get()
    reported = getattr(context, "output_strides", None)
    if reported is not None:
        now = saved_strides(gm)
        reported.extend(b if a != b else None for a, b in zip(traced, now, strict=True))


__all__ = [
    "Relayout",
    "Strides",
    "as_saved",
    "as_was",
    "follows",
    "laid",
    "order_of",
    "report",
    "saved_strides",
    "strides_of",
]
