"""Results that are views of inputs which the program writes to, as views of these inputs.

In: a graph of AOTAutograd and its description of the graph's inputs and results. Out: the same
graph, in place. What AOTAutograd traced for such a result is a view of the value that the input is
given. It makes the result again from the caller's input, and where sizes change it takes strides
and offset for that from what the graph returned. Those of the traced view are not the input's: an
offset counts from where the value begins, which may be another tensor, dense, or the view alone.
A view of the input itself has the right ones, wherever the input begins.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from deuteron.graph import ops
from deuteron.graph.edit import Editor


def views_of_inputs(gm: fx.GraphModule, metadata: Any) -> None:
    """`metadata`: AOTAutograd's ``ViewAndMutationMeta`` of a forward or inference graph."""
    output = gm.graph.output_node()
    results, inputs = list(output.args[0]), gm.graph.find_nodes(op="placeholder")
    written = metadata.mutated_inp_runtime_indices
    if not one_to_one(metadata, inputs):
        return
    editor = Editor(gm)
    made: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
    for k, info in enumerate(metadata.output_info, len(written)):
        if info.output_type.name != "alias_of_input":
            continue
        given = metadata.input_info[info.base_idx]
        if not given.mutates_data or given.mutates_metadata:
            continue
        base = inputs[info.base_idx]
        # AOTAutograd writes to some inputs itself, after the call; all others by `copy_`.
        values = [(results[j], base) for j, i in enumerate(written) if i == info.base_idx]
        values += [(n.args[1], n) for n in base.users if copies_into(n, base)]
        for value, now in values:
            steps = views_between(value, results[k])
            if steps is None:
                continue
            with editor.before(output):
                for step in steps:
                    key = (step, now)
                    if key not in made:
                        others = step.args[1:]
                        made[key] = editor.call(step.target, now, *others, like=step, **step.kwargs)
                    now = made[key]
            results[k] = now
            break
    output.args = (type(output.args[0])(results),)


def one_to_one(metadata: Any, inputs: Sequence[fx.Node]) -> bool:
    """Whether the graph's inputs and results are those described: no tensor subclasses, which are
    several tensors, and no tokens."""
    plain = metadata.subclass_inp_meta is None or all(
        type(m).__name__ == "PlainTensorMeta" or isinstance(m, int)
        for m in metadata.subclass_inp_meta
    )
    return plain and not metadata.tokens and len(metadata.input_info) == len(inputs)


def copies_into(n: fx.Node, base: fx.Node) -> bool:
    return ops.packet(n.target) == "aten.copy_" and n.args[0] is base


def views_between(value: Any, result: Any) -> list[fx.Node] | None:
    """The view operators that lead from `value` to `result`, in order; None if others do."""
    steps: list[fx.Node] = []
    while result is not value:
        if not isinstance(result, fx.Node) or result.op != "call_function":
            return None
        of_view = result.target is operator.getitem and ops.is_view(result.args[0])
        if not of_view and not ops.is_view(result):
            return None
        steps.append(result)
        result = result.args[0]
    return steps[::-1]


__all__ = ["views_of_inputs"]
