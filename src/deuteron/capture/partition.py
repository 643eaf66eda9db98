"""Divides a joint graph into forward and backward, and decides what is saved and what is
recomputed.

In: AOTAutograd's joint graph. Out: the forward graph (outputs, then saved values) and the backward
graph.

The decision is a minimum cut. Each forward value v has two vertices; which side of the cut they
are on says what happens:

    both on the forward's side     the backward does not need v
    in | out divided               v is saved:       pay save(v)
    both on the backward's side    v is recomputed:  pay recompute(v)

Costs are bytes of memory traffic, or what takes as long (`Costs`): what a library call wants is
also written, and what it is computed from read, where nobody else reads that then. What may not be
recomputed (library calls, random draws, effects, collectives, sums on which a maximum depends)
costs an infinite amount; what must be (tags of torch.utils.checkpoint) is forced to the backward's
side. A product of matrices whose result is larger than what it multiplies (attention's scores) is
computed again at the rate of the units that multiply, where `schedule.contract` may have it in one
kernel with what surrounds it: then none of what is computed from it goes through memory. Of equal
cuts the one nearest to the backward is taken: fewest operations repeated.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._functorch import partitioners as P
from torch.utils.checkpoint import CheckpointPolicy

from deuteron.base.device import DeviceSpec, device_spec
from deuteron.base.errors import DeuteronError
from deuteron.base.options import Options
from deuteron.base.passes import Context
from deuteron.base.products import MAX_WHOLE, computed_again, share_kernels
from deuteron.base.record import Record
from deuteron.capture import selections
from deuteron.capture.cut import INFINITE, Network, NoCut
from deuteron.capture.hints import Hints
from deuteron.graph import ops
from deuteron.graph.edit import Editor
from deuteron.ir.reference_ops import TO_TORCH

aten = torch.ops.aten

# Saved bytes stay allocated from forward to backward; a saved byte counts this much beyond its
# traffic. Memory is what limits batch sizes on GPUs, and on CPU pages that come back from the
# system are faulted in again.
SAVED_BYTE_COST = 2.0
# What one computed from scores counts beyond, where the last cache cannot keep it: scores are
# written and read, too, and two products read it. Cascade Lake, one thread, attention of f32 with
# gradients, saved, again, ms: 8 x 1024 x 64 causal 115, 56, no mask 120, 100; 96 x 128 x 64 21, 24.
SCORES_BYTE_COST = 4.0
# Vector FLOPs that take as long as moving one byte: H200 67 TFLOP/s (f32) at 4.8 TB/s; a server
# core 50 GFLOP/s at 6 GB/s. Only their order of magnitude matters.
FLOPS_PER_BYTE = {"cuda": 14.0, "cpu": 8.0}
SIMPLE_FLOPS, TRANSCENDENTAL_FLOPS, PHILOX_FLOPS = 1.0, 16.0, 40.0

DTYPES = {v: k for k, v in TO_TORCH.items()}
PRODUCTS = ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm")

SAVE_TAGS = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
RECOMPUTE_TAGS = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def must_recompute(node: fx.Node) -> bool:
    return node.meta.get("recompute") in RECOMPUTE_TAGS


def must_save(node: fx.Node) -> bool:
    return node.meta.get("recompute") in SAVE_TAGS


@dataclass
class Costs:
    """What saving and recomputing each forward value costs, in bytes."""

    info: Any
    options: Options
    hints: Hints = field(default_factory=Hints)
    depth: dict[fx.Node, int] = field(default_factory=dict)
    outputs: frozenset[fx.Node] = frozenset()
    spec: Callable[[str], DeviceSpec] = device_spec
    exact: set[fx.Node] = field(init=False)  # needed bit for bit, so not recomputed
    # Products that may be computed block by block beside their readers; what is computed of them.
    scores: set[fx.Node] = field(default_factory=set)
    scored: set[fx.Node] = field(default_factory=set)
    _uses: dict[fx.Node, tuple[bool, bool]] = field(default_factory=dict)
    # Library calls of the backward, each a bit, and for every node those that come before it.
    _calls: dict[fx.Node, int] = field(default_factory=dict)
    _before: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.exact = selections.rounded_before_selections(self.info.fw_order, must_recompute)
        for n in self.info.fw_order:  # in graph order
            base = max((self.depth.get(p, 0) for p in n.all_input_nodes), default=0)
            self.depth[n] = base if n.op != "call_function" or ops.is_generated(n) else base + 1
        late = self.info.tangents_closure
        for n in next(iter(late)).graph.nodes if late else ():
            if n not in late:
                continue
            if n.op == "call_function" and not ops.is_generated(n):
                self._calls[n] = 1 << len(self._calls)
            before = 0
            for p in n.all_input_nodes:
                before |= self._before.get(p, 0) | self._calls.get(p, 0)
            self._before[n] = before
        for n in next(iter(self.depth)).graph.nodes if self.depth else ():
            if self.shares(n) and self.expands(n):
                self.scores.add(n)
            elif not (ops.is_generated(n) and any(p in self.scored for p in n.all_input_nodes)):
                continue
            self.scored.add(n)
        rounded = set(self.exact)
        for n in self.info.fw_order:
            again = n in self.scores or ops.is_generated(n) and not selections.keeps_bits(n)
            if n in rounded or not (again or any(p in rounded for p in n.all_input_nodes)):
                continue
            rounded.add(n)
            # Kernels with products have exponentials and multiply-adds of their own: not equal.
            if ops.is_generated(n) and self.compared(n, itself=True):
                self.exact.add(n)

    def forward(self, n: fx.Node) -> bool:
        return n in self.depth

    def materialized(self, n: fx.Node) -> bool:
        """Does the forward write `n` to memory even if it is not saved?"""
        if n.op == "placeholder" or n in self.outputs:
            return True
        if not ops.is_generated(n) and n not in self.scores:
            return True
        if n.target is operator.getitem and not ops.is_generated(n.args[0]):
            return True
        for u in n.users:
            if u not in self.depth:
                continue
            if ops.is_view(u):
                if self.materialized(u):
                    return True
            elif not self.in_blocks(u) and (
                not ops.is_generated(u) or self.depth[u] > self.depth[n]
            ):
                return True
        return False

    def backward_uses(self, n: fx.Node) -> tuple[bool, bool]:
        """Is `n`, or a view of it, read in the backward by (generated code, a library call)?"""
        known = self._uses.get(n)
        if known is not None:
            return known
        generated = library = False
        for u in n.users:
            if u.op == "output":
                continue
            if ops.is_view(u):
                g, l = self.backward_uses(u)
                generated, library = generated or g, library or l
            elif u in self.depth:
                continue
            elif ops.is_generated(u) or self.in_blocks(u):
                generated = True
            else:
                library = True
        self._uses[n] = generated, library
        return generated, library

    def readers(self, n: fx.Node, but: fx.Node) -> list[fx.Node]:
        """What reads `n` in the backward, or what is computed from it and not written to memory;
        `but` apart."""
        readers: dict[fx.Node, None] = {}
        todo, seen = [n], {n, but}
        while todo:
            for u in todo.pop().users:
                if u in seen:
                    continue
                seen.add(u)
                if u in self._before:
                    readers[u] = None
                elif ops.is_view(u) or u.op == "call_function" and not self.materialized(u):
                    todo.append(u)
        return list(readers)

    def sources(self, n: fx.Node) -> list[fx.Node]:
        """The tensors in memory from which `n` is computed, reductions apart."""
        in_memory: dict[fx.Node, None] = {}
        todo, seen = [n], {n}
        while todo:
            for p in todo.pop().all_input_nodes:
                if p in seen:
                    continue
                seen.add(p)
                if isinstance(p.meta.get("val"), torch.Tensor) and not ops.is_reduction(p):
                    if ops.is_view(p) or p.op == "call_function" and not self.materialized(p):
                        todo.append(p)
                    else:
                        in_memory[p] = None
        return list(in_memory)

    def reread_bytes(self, n: fx.Node) -> int:
        """Bytes that are read only to compute `n` again for a library call: nobody else reads them
        at that time, since everybody else waits for what the call returns."""
        calls = 0
        for u in self.readers(n, n):
            calls |= self._calls.get(u, 0)
        total = 0
        for p in self.sources(n):
            others = [u for u in self.readers(p, n) if ops.is_generated(u)]
            if all(self._before[u] & calls for u in others):
                total += self.hints.bytes(p.meta["val"])
        return total

    def save(self, n: fx.Node) -> int:
        val = n.meta.get("val")
        if isinstance(val, torch.SymInt):
            return 1
        if n.op == "placeholder" and not isinstance(val, torch.Tensor):
            return 1  # backward state, opaque objects: handed over, not stored
        if not isinstance(val, torch.Tensor) or n.op == "get_attr":
            return INFINITE  # tuples by their elements; floats and bools of sizes by the sizes
        size = self.hints.bytes(val)
        generated, library = self.backward_uses(n)
        cost = (
            0.0 if library and not generated else 1.0
        )  # read back, beyond the read that a library call does anyway
        if not self.materialized(n):
            cost += 1.0
        if n.op != "placeholder" and n not in self.outputs:
            cost += SAVED_BYTE_COST
        if n in self.scored and not self.spec(str(val.device)).keeps(size):
            cost += SCORES_BYTE_COST
        # Four units per byte; the one more prefers fewer tensors and keeps empty ones from being
        # free.
        return int(4 * size * cost) + 1

    def recompute(self, n: fx.Node) -> int:
        """The cost of computing `n` once more in the backward, given its inputs."""
        if n.op == "placeholder":
            return INFINITE
        if n.op == "get_attr" or not self.forward(n):
            return 0
        if ops.is_symbolic(n):
            return INFINITE if _reads_data(n) and isinstance(n.meta["val"], torch.SymInt) else 0
        if must_save(n):
            return INFINITE
        if ops.packet(n.target) in PRODUCTS:
            return self.multiply_again(n)
        if not ops.is_generated(n):
            return INFINITE
        if ops.is_view(n) or n.target is operator.getitem:
            return 0
        if not self.options.recompute:
            return INFINITE
        val = n.meta.get("val")
        size = self.hints.bytes(val)
        if n in self.exact:
            return INFINITE
        if ops.is_reduction(n):
            # Not fused into its consumer for free: reads its input once more.
            return int(4 * sum(self.hints.bytes(p.meta.get("val")) for p in n.all_input_nodes)) + 1
        name = ops.packet(n.target)
        if name in ops.SCATTERS:
            return int(4 * 2 * size) + 1
        first = val[0] if isinstance(val, (tuple, list)) else val
        per_byte = FLOPS_PER_BYTE["cuda" if self.spec(str(first.device)).shared else "cpu"]
        flops = SIMPLE_FLOPS
        if name in ops.TRANSCENDENTAL:
            flops = TRANSCENDENTAL_FLOPS
        elif name in ops.GENERATED:
            flops = PHILOX_FLOPS
        cost = self.hints.numel(first) * flops / per_byte
        if self.backward_uses(n)[1]:
            cost += size + self.reread_bytes(n)  # a library call wants it in memory
        return int(4 * cost) + 1

    def in_blocks(self, n: fx.Node) -> bool:
        """Whether it is a product that may be computed block by block beside its readers, or one
        that may read such blocks."""
        return n in self.scores or (
            self.shares(n) and any(p in self.scored for p in n.all_input_nodes)
        )

    def shares(self, n: fx.Node) -> bool:
        """Whether it is a product that may be in one kernel with what surrounds it. Not on the f32
        units of a GPU: H200, f32, in training, products computed again took 4.9 of 87 ms of a
        Swin2SR, 1.5 of 10 of an ImageGPT."""
        if ops.packet(n.target) not in PRODUCTS or self.options.precision == "eager":
            return False
        val = n.meta["val"]
        kind, spec = DTYPES.get(val.dtype, ""), self.spec(str(val.device))
        return share_kernels(kind, spec) and computed_again(kind, spec.kind)

    def expands(self, n: fx.Node) -> bool:
        """Whether a product's result is larger than its operands, and its sum short."""
        size, *sizes = (self.hints.bytes(p.meta["val"]) for p in (n, *n.all_input_nodes))
        return size > sum(sizes) and self.inner(n) <= MAX_WHOLE

    def inner(self, n: fx.Node) -> int:
        """How many products a product of matrices sums for each element."""
        return self.hints.size(n.all_input_nodes[-1].meta["val"].shape[-2])

    def multiply_again(self, n: fx.Node) -> int:
        """The cost of a product's second computation, block by block in kernels of the backward."""
        if not self.options.recompute or n not in self.scores or self.compared(n):
            return INFINITE
        val, spec = n.meta["val"], self.spec(str(n.meta["val"].device))
        unit = "tf32" if val.dtype == torch.float32 and spec.shared else DTYPES[val.dtype]
        us = spec.compute_us(2.0 * self.hints.numel(val) * self.inner(n), unit)
        return int(4 * us * spec.bandwidth_gbps * 1e3) + 1

    def compared(self, n: fx.Node, itself: bool = False) -> bool:
        """Whether the backward looks for equal elements in what is computed from `n` (or in that
        alone): the gradient of a maximum, which another kernel's rounding would lose."""
        todo, seen = [n], {n}
        while todo:
            for u in todo.pop().users:
                if u in seen or u.op == "output":
                    continue
                if ops.packet(u.target) == "aten.eq" and (u in self._before or in_backward(u)):
                    return True
                seen.add(u)
                moved = ops.is_view(u) or ops.packet(u.target) == "aten._to_copy"
                if moved or not itself and u in self.depth and ops.is_generated(u):
                    todo.append(u)
        return False


def _reads_data(n: fx.Node) -> bool:
    """A size that depends on a tensor's elements (`item`, `nonzero`): computed once."""
    return (
        n.op == "call_function"
        and ops.is_overload(n)
        and (
            torch.Tag.data_dependent_output in n.target.tags
            or torch.Tag.dynamic_output_shape in n.target.tags
        )
    )


def costs_of(joint: fx.GraphModule, info: Any, context: Context) -> Costs:
    results = next(iter(reversed(joint.graph.nodes))).all_input_nodes
    outputs = frozenset(n for n in results if n in info.fw_order)
    return Costs(info, context.options, outputs=outputs, spec=context.spec)


def recompute_beside_calls(joint: fx.GraphModule, costs: Costs) -> bool:
    """Gives generated code of the backward a value of its own where a library call needs the same
    one, which is then saved for that call: what it is computed from is read there anyway (the sign
    of a ReLU behind a norm). Returns whether there was one."""
    editor, changed = Editor(joint), False
    for n in costs.info.fw_order:
        if n.op != "call_function" or not ops.is_generated(n) or ops.is_view(n):
            continue
        if costs.backward_uses(n) != (True, True) or costs.recompute(n) >= INFINITE:
            continue
        own = costs.hints.bytes(n.meta["val"])
        large = [p for p in costs.sources(n) if 2 * costs.hints.bytes(p.meta["val"]) >= own]
        if len(large) != 1 or not any(map(ops.is_generated, costs.readers(large[0], n))):
            continue
        late = [u for u in n.users if u.op != "output" and u not in costs.depth]
        late = [u for u in late if ops.is_generated(u) and not ops.is_view(u)]
        if late:
            with editor.before(n.next):
                again = editor.call(n.target, *n.args, like=n, **n.kwargs)
            for u in late:
                u.replace_input_with(n, again)
            changed = True
    return changed


def needed_by_backward(graph: fx.Graph, info: Any) -> list[fx.Node]:
    """Everything before the tangents that some gradient depends on, in graph order."""
    needed: set[fx.Node] = set()
    for n in reversed(graph.nodes):
        if n.op == "output" or n in info.tangents_closure:
            continue
        if n in info.required_bw_nodes or any(
            u in needed or (u in info.tangents_closure and u.op != "output") for u in n.users
        ):
            needed.add(n)
    return [n for n in graph.nodes if n in needed]


def choose_saved(graph: fx.Graph, info: Any, costs: Costs) -> list[fx.Node]:
    """The values to save, in graph order: tensors and sizes alike."""
    order = needed_by_backward(graph, info)
    number = {n: i for i, n in enumerate(order)}
    forced = {n for n in order if must_recompute(n) and n.op == "call_function"} - costs.exact
    again = {n: 0 if n in forced else costs.recompute(n) for n in order}
    net = Network(2 * len(order))
    for n, i in number.items():
        enter, leave = 2 * i, 2 * i + 1
        net.edge(net.source, enter, again[n])
        if n in forced:
            net.edge(enter, net.sink, INFINITE)
            continue
        net.edge(enter, leave, costs.save(n))
        if (
            n in info.required_bw_nodes
        ):  # itself a gradient, one that does not depend on the incoming ones
            net.edge(leave, net.sink, INFINITE)
        for u in n.users:
            if u not in number:
                if u in info.tangents_closure and u.op != "output":
                    net.edge(leave, net.sink, INFINITE)
            elif again[u] < INFINITE:  # what is never recomputed never needs its arguments again
                net.edge(leave, 2 * number[u], INFINITE)
    try:
        late = net.sink_side()
    except NoCut as e:
        raise DeuteronError(
            "a value that the backward pass needs can be neither saved nor recomputed: "
            + " -> ".join(order[v // 2].name for v in e.path),
            hint="a checkpoint policy may contradict itself",
        ) from e
    return [n for n, i in number.items() if 2 * i not in late and 2 * i + 1 in late]


def in_backward(n: fx.Node) -> bool:
    """Whether tracing marked a node as part of the backward."""
    return "backward" in str(n.meta.get("partitioner_tag", ""))


def before_writes(joint: fx.GraphModule, saved: list[fx.Node], info: Any) -> list[fx.Node]:
    """What to save, with copies in place of inputs that the forward overwrites: the backward would
    find their new values."""
    output = next(iter(reversed(joint.graph.nodes)))
    written = {
        a
        for n in joint.graph.nodes
        if n.op == "call_function" and ops.is_mutating(n)
        if n not in info.tangents_closure and not in_backward(n)
        for a, what in zip(n.args, n.target._schema.arguments)
        if what.alias_info is not None and what.alias_info.is_write and isinstance(a, fx.Node)
    }
    storages = {ops.storage_of(n): n for n in written if n.op == "placeholder"}
    storages |= {ops.storage_of(n): n for n in written_later(joint)}
    editor = Editor(joint)
    out = list(saved)
    for n in saved:
        source = storages.pop(ops.storage_of(n), None) if ops.tensor_of(n) is not None else None
        if source is None:
            continue
        views = {u for u in output.all_input_nodes if ops.storage_of(u) == ops.storage_of(n)}
        readers = [
            u for u in source.users if u is not output and not ops.is_mutating(u) and u not in views
        ]
        with editor.before(editor.first_call()):
            copy = editor.call(aten.clone.default, source, like=n)
        for u in readers:
            u.replace_input_with(source, copy)
        out = [copy if k is source else k for k in out]
    return out


def written_later(joint: fx.GraphModule) -> list[fx.Node]:
    """Inputs that AOTAutograd overwrites with a result after the forward: the description of
    such a result names the input that it mutates."""
    output = next(iter(reversed(joint.graph.nodes)))
    results = output.meta.get("desc") or ()
    later = [d.mutated_input for d in results if hasattr(d, "mutated_input")]
    return [n for n in joint.graph.nodes if n.op == "placeholder" and n.meta.get("desc") in later]


def record_saved(
    record: Record, saved: Sequence[fx.Node], costs: Costs, info: Any, graph: fx.Graph
) -> None:
    """Writes to the Record what is saved, and what the backward recomputes instead of reading."""
    saved_nodes = set(saved)
    for n in saved:
        if n.op != "placeholder" and isinstance(n.meta.get("val"), torch.Tensor):
            record.add(
                "decision",
                subject="save",
                accepted=True,
                first=n.name,
                second=str(n.target),
                reason="must save"
                if must_save(n)
                else "another kernel may round it otherwise"
                if n in costs.exact
                else "cheaper than recomputing",
                detail="",
                bytes=costs.hints.bytes(n.meta["val"]),
            )
    for n in graph.nodes:
        if (
            n.op != "call_function"
            or n in saved_nodes
            or n not in costs.depth
            or ops.is_symbolic(n)
        ):
            continue
        if any(u in info.tangents_closure and u.op != "output" for u in n.users):
            record.add(
                "decision",
                subject="recompute",
                accepted=True,
                first=n.name,
                second=str(n.target),
                reason="checkpoint" if must_recompute(n) else "cheaper than saving",
                detail="",
                bytes=costs.hints.bytes(n.meta.get("val")),
            )


def extract(
    joint: fx.GraphModule, saved: Sequence[fx.Node], num_fwd_outputs: int, info: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two graphs, as AOTAutograd's runtime wants them: saved tensors, then opaque objects,
    then sizes."""
    is_opaque = getattr(P, "is_opaque_node", lambda n: False)
    symbols = [n for n in saved if P.is_sym_node(n)]
    opaque = [n for n in saved if is_opaque(n)]
    others = {*symbols, *opaque}
    tensors = [n for n in saved if n not in others]
    known = inspect.signature(P._extract_fwd_bwd_modules).parameters
    extra: dict[str, Any] = {"static_lifetime_input_nodes": info.static_lifetime_input_nodes}
    if "saved_opaque_nodes" in known:
        extra["saved_opaque_nodes"] = opaque
    else:
        tensors += opaque
    extra = {k: v for k, v in extra.items() if k in known}
    return P._extract_fwd_bwd_modules(
        joint, tensors, saved_sym_nodes=symbols, num_fwd_outputs=num_fwd_outputs, **extra
    )


def random_calls(graph: fx.Graph) -> list[fx.Node]:
    """Draws that do not depend on incoming gradients."""
    late: set[fx.Node] = set()
    for n in graph.nodes:
        if "tangents" in str(n.target) or any(a in late for a in n.all_input_nodes):
            late.add(n)
    return [n for n in graph.nodes if ops.is_random(n) and n not in late]


def replay_random(
    forward: fx.Graph, backward: fx.Graph, random_nodes: Sequence[fx.Node], order: Mapping[str, int]
) -> None:
    """Puts draws that are in neither graph, since nobody reads them, into the forward, where the
    joint graph's `order` has them: as in eager, those after them have other numbers without. Not
    those that read what is not there."""
    there = {n.name: n for n in forward.nodes}
    others = {n.name for n in backward.nodes}
    for draw in random_nodes:
        missing = any(a.name not in there for a in draw.all_input_nodes)
        if draw.name in there or draw.name in others or missing:
            continue
        calls = (n for n in forward.nodes if n.op != "placeholder")
        after = (n for n in calls if n.op == "output" or order.get(n.name, -1) > order[draw.name])
        with forward.inserting_before(next(after)):
            there[draw.name] = forward.node_copy(draw, lambda a: there[a.name])


def recompute_late(graph: fx.Graph) -> None:
    """Moves what does not depend on incoming gradients to just before its first use by what does:
    what is recomputed lives briefly. The order among the others, and of effects, stays."""
    late: set[fx.Node] = set()
    for n in graph.nodes:
        if n.op == "placeholder":
            if "tangents" in str(n.target):
                late.add(n)
        elif ops.has_effect(n) or any(a in late for a in n.all_input_nodes):
            late.add(n)
    placed: set[fx.Node] = {n for n in graph.nodes if n.op == "placeholder"}
    output = next(iter(reversed(graph.nodes)))
    for n in list(graph.nodes):
        if n in late and n.op not in ("placeholder", "output"):
            _append_with_arguments(n, placed, output)
    for n in output.all_input_nodes:
        _append_with_arguments(n, placed, output)


def _append_with_arguments(node: fx.Node, placed: set[fx.Node], output: fx.Node) -> None:
    """Moves `node`, after its arguments, to the end of what is placed."""
    todo = [node]
    while todo:
        n = todo[-1]
        missing = [a for a in n.all_input_nodes if a not in placed]
        if missing:
            todo += missing
            continue
        todo.pop()
        if n not in placed:
            placed.add(n)
            output.prepend(n)
