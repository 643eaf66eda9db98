"""What a program makes on the CPU for another device is made there.

In: a functional ATen graph with fake values. Out: the same, in place, where copies from the CPU to
another device (``mask.to(x.device)``) whose argument depends on no tensor from outside are replaced
by the same operators on that device. A model that builds its masks or positions on the CPU in every
call otherwise waits for its copies, and for the CPU's kernels.

Invariants: what is moved are constructors (`full`, `arange`) and pure operators of such results;
random numbers, held tensors, effects and library calls stay where they are. What the CPU's tensors
are also used for on the CPU still reads those.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from deuteron.base.record import Record
from deuteron.graph import ops
from deuteron.graph.edit import Editor, outside_of_modes

aten = torch.ops.aten
DEVICE_COPIES = frozenset(ops.resolved(("aten._to_copy.default", "prims.device_put.default")))
# What depends on the elements of a tensor as a size or a number would make the device wait.
SYNCHRONIZING_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
# Nodes that one copy may depend on: the search stays linear in the graph.
MAX_CLOSURE_NODES = 4096


def move_constructors(gm: fx.GraphModule, record: Record) -> int:
    """What is made on the CPU and copied to another device is made there. Returns how many
    copies."""
    editor = Editor(gm)
    known: dict[fx.Node, bool] = {}
    made: dict[tuple[fx.Node, torch.device], fx.Node] = {}
    moved = 0
    for node in list(gm.graph.nodes):
        device = destination(node)
        if device is None:
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        chain = closure(editor, source, known)
        if not chain or chain[-1] is not source:
            continue
        for n in chain:
            if (n, device) not in made:
                with editor.before(node):
                    made[n, device] = on_device(editor, n, device, made)
        node.update_arg(0, made[source, device])
        moved += 1
        record.add(
            "decision",
            subject="device",
            accepted=True,
            reason="made where it is read",
            detail=f"{len(chain)} operations of the CPU for {device}",
            first=source.name,
            second=node.name,
            bytes=0,
            us=0.0,
        )
    return moved


def destination(node: fx.Node) -> torch.device | None:
    """The device to which a node copies a tensor of the CPU."""
    if node.target not in DEVICE_COPIES or not isinstance(node.args[0], fx.Node):
        return None
    out, source = ops.tensor_of(node), ops.tensor_of(node.args[0])
    if out is None or source is None or source.device.type != "cpu":
        return None
    return None if out.device.type in ("cpu", "meta") else out.device


def closure(editor: Editor, source: fx.Node, known: dict[fx.Node, bool]) -> list[fx.Node] | None:
    """`source` and what it is made of, in the graph's order; None where something of it must stay
    on the CPU."""
    nodes: dict[fx.Node, None] = {}
    open_ = [source]
    while open_:
        n = open_.pop()
        if n in nodes or n.op == "get_attr" or ops.is_symbolic(n):
            continue  # of held tensors who reads them decides
        if n not in known:
            known[n] = is_movable(n) or number(editor, n) is not None
        if not known[n] or len(nodes) > MAX_CLOSURE_NODES:
            return None
        nodes[n] = None
        open_ += n.all_input_nodes
    return sorted(nodes)


def is_movable(n: fx.Node) -> bool:
    """Whether a call makes a tensor of numbers alone, or of tensors, as it would on any device."""
    parts = values(n)
    if n.op != "call_function" or not parts:
        return False
    if any(v.device.type != "cpu" or v.is_complex() or v.is_quantized for v in parts):
        return False
    if n.target is operator.getitem:
        return True
    if not ops.is_overload(n) or n.target.namespace not in ("aten", "prims"):  # type: ignore[union-attr]
        return False
    if ops.has_effect(n) or ops.is_random(n) or ops.is_mutating(n):
        return False
    if any(tag in n.target.tags for tag in SYNCHRONIZING_TAGS):  # type: ignore[union-attr]
        return False
    if any(a.op == "get_attr" for a in n.all_input_nodes):
        return False
    return is_constructor(n) or any(values(a) for a in n.all_input_nodes)


def values(n: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node stands for."""
    val = n.meta.get("val")
    parts = val if isinstance(val, (tuple, list)) else [val]
    return [v for v in parts if isinstance(v, torch.Tensor)]


def is_constructor(n: fx.Node) -> bool:
    """Whether an operator takes no tensor, and a device."""
    schema = getattr(n.target, "_schema", None)
    takes = schema is not None and any(a.name == "device" for a in schema.arguments)
    return takes and not any(values(a) for a in n.all_input_nodes)


def number(editor: Editor, n: fx.Node) -> bool | int | float | None:
    """The number of a held tensor of one element, as tracing leaves it of ``mask[1:3] = 2``."""
    if ops.packet(n.target) != "aten.lift_fresh_copy" or not isinstance(n.args[0], fx.Node):
        return None
    source = n.args[0]
    if source.op != "get_attr":
        return None
    held = getattr(editor.gm, str(source.target), None)
    held = getattr(held, "constant", None) if isinstance(held, FakeTensor) else held
    if not isinstance(held, torch.Tensor) or held.dim() or held.is_complex():
        return None
    with torch.no_grad(), outside_of_modes():
        return held.item()


def on_device(
    editor: Editor,
    n: fx.Node,
    device: torch.device,
    made: dict[tuple[fx.Node, torch.device], fx.Node],
) -> fx.Node:
    """The same call on a device, at the current insertion point."""
    held = number(editor, n)
    if held is not None:
        dtype = n.meta["val"].dtype
        return editor.call(aten.full.default, [], held, like=n, dtype=dtype, device=device)
    args, kwargs = fx.map_arg((n.args, n.kwargs), lambda a: made.get((a, device), a))
    changed: dict[str, Any] = dict(kwargs)
    if is_constructor(n) or changed.get("device") is not None:
        changed["device"] = device
        changed.pop("pin_memory", None)
    return editor.call(n.target, *args, like=n, **changed)  # type: ignore[arg-type]


__all__ = ["move_constructors"]
