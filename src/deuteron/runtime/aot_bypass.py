"""Calls of compiled graphs without the general code that AOTAutograd puts around them.

In: the callable that AOTAutograd made of one Dynamo graph, and the compiled graphs inside it. Out:
a callable that does the same. What AOTAutograd does around a graph is written for all programs
(results that alias inputs, tensor subclasses, random states, effects) and takes longer than to
start a few kernels. For most programs all of it comes to passing on what it got.

Whether it does is not taken on trust. The first call goes through AOTAutograd and is watched. Only
if the graph was given the very objects that the caller gave, the caller got the very objects that
the graph returned, and autograd's node keeps what the graph returned behind them, do later calls
bypass AOTAutograd. The first backward is watched likewise. The `autograd.Function` is derived from
AOTAutograd's, whose node and saved state it keeps: so each call can still take the usual way. It
does under hooks, modes and transforms, for a double backward, with tangents of another layout, and
to compile the backward; compiled autograd sees AOTAutograd's node. What was decided, and why, is in
the Record.

Private names of torch are looked up once; where one is missing nothing is bypassed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from deuteron.base.record import Record

Boxed = Callable[[list[Any]], Sequence[Any]]
Call = Callable[..., Sequence[Any]]

# What must be empty, zero or false in AOTAutograd's description of a graph (`ViewAndMutationMeta`).
UNSUPPORTED_METADATA = (
    "num_mutated_inp_runtime_indices",
    "num_intermediate_bases",
    "num_outputs_aliased",
    "tokens",
    "num_backward_tokens",
    "num_graphsafe_rng_states",
    "is_rng_op_functionalized",
    "act_input_indices",
    "num_tensors_saved_with_no_vc_check",
    "num_opaque_objects_saved_for_bw",
    "indices_of_inputs_that_requires_grad_with_mutations_in_bw",
)
# What AOTAutograd's `forward` leaves on autograd's node, and all that it may.
NODE_ATTRIBUTES = {"symints", "opaque_objects", "_tensors_no_vc_check"}
PLAIN_TYPES = (Tensor, torch.nn.Parameter, int, float, bool)
# A backward that was not as expected is watched again at most this many times.
MAX_WATCHED_BACKWARDS = 4
# How AOTAutograd says to Dynamo which sizes of a tensor may change, in 2.13 and 2.11.
WRAPPERS_MODULE = "_functorch._aot_autograd.runtime_wrappers"
DYNAMIC_MARKS = ("mark_dynamo_propagated_dynamic_indices", "maybe_mark_dynamic_helper")


class TorchInternals:
    """Names of torch that are not public; `complete` says whether this torch has all of them."""

    def __init__(self) -> None:
        self.autocast = torch_name("_C._is_any_autocast_enabled")
        self.no_autocast = torch_name("_C._DisableAutocast")
        self.transformed = torch_name("_C._are_functorch_transforms_active")
        self.hooks = torch_name("_C._autograd._top_saved_tensors_default_hooks")
        self.tracing_callback = torch_name("_C._dynamo.eval_frame.get_eval_frame_callback")
        self.skip = torch_name("_dynamo.eval_frame.skip_code")
        self.complete = all(value is not None for value in vars(self).values())
        marks = (torch_name(f"{WRAPPERS_MODULE}.{name}") for name in DYNAMIC_MARKS)
        self.mark: Any = next((value for value in marks if value is not None), None)
        # From 2.13 on, compiled backwards run in the context (`contextvars`) of who called them.
        self.stashed = torch_name("_C._is_key_in_tls") or (lambda key: False)
        self.context = torch_name("_C._get_obj_in_tls")


def torch_name(path: str) -> Any:
    """What torch calls ``torch.path``; None if it has no such thing."""
    value: Any = torch
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


@cache
def torch_internals() -> TorchInternals:
    return TorchInternals()


@dataclass
class WatchedCall:
    """A call of a compiled graph, from the inside."""

    run: Boxed
    given: list[Any]
    returned: Sequence[Any]
    autocast: bool


@dataclass(frozen=True)
class ForwardResults:
    """How a forward graph's results are divided, as seen in a call."""

    results: int
    tensors: int  # saved for the backward, behind the results; sizes follow
    differentiable: tuple[int, ...]
    constant: tuple[int, ...]  # tensors that are not
    views: tuple[int, ...]


@dataclass(frozen=True)
class BypassFacts:
    """What calls that bypass AOTAutograd need to know. `metadata` is AOTAutograd's, or says the
    same."""

    metadata: Any
    saved: ForwardResults | None = None


@dataclass
class CompiledGraphs:
    """The compiled graphs of one Dynamo graph."""

    forward: list[Boxed] = field(default_factory=list)  # or the graph without gradients
    phase: str = ""
    metadata: Any = None
    record: Record = field(default_factory=Record)  # of the forward
    watches: dict[int, list[WatchedCall]] = field(default_factory=dict)  # by thread
    backward: Boxed | None = None  # where it is known beforehand
    on_bypass: Callable[[BypassFacts], None] = lambda facts: (
        None
    )  # gets what later calls need to know

    def add(self, run: Boxed, phase: str, metadata: Any, record: Record) -> Boxed:
        """A graph that has been compiled. Returns what AOTAutograd shall call, which tells whoever
        watches."""
        if phase != "backward":
            self.forward.append(run)
            self.phase, self.metadata, self.record = phase, metadata, record
        watches, autocast = self.watches, torch_internals().autocast or bool

        def watched(args: list[Any]) -> Sequence[Any]:
            seen = watches.get(get_ident())
            if seen is None:
                return run(args)
            given, casts = list(args), autocast()
            returned = run(args)
            seen.append(WatchedCall(run, given, returned, casts))
            return returned

        watched._boxed_call = True  # type: ignore[attr-defined]
        return watched

    def watch(self, call: Call, *args: Any) -> tuple[Any, list[WatchedCall]]:
        """What a call returns, and which graphs ran meanwhile in this thread."""
        me, seen = get_ident(), list[WatchedCall]()
        before = self.watches.get(me)
        self.watches[me] = seen
        try:
            return call(*args), seen
        finally:
            del self.watches[me]
            if before is not None:
                self.watches[me] = before

    def record_decision(self, reason: str) -> None:
        """The decision in the Record; `reason` is why calls do not bypass AOTAutograd, if they do
        not."""
        self.record.add(
            "decision",
            subject="bypass",
            first="calls",
            accepted=not reason,
            reason="refused" if reason else "passes on",
            detail=reason,
        )


def bypass(aot: Call, graphs: CompiledGraphs) -> Call:
    """What AOTAutograd made of one Dynamo graph (`aot`), or a callable that bypasses it once it
    saw a call that allows it. To be called in the state (autocast) in which `aot` was made."""
    if len(graphs.forward) != 1:
        return aot
    reason = (
        why_unsupported(graphs.metadata)
        if torch_internals().complete
        else "this torch lacks what that needs"
    )
    if not reason and torch._functorch.config.debug_assert:
        reason = "AOTAutograd's own assertions are on"
    if reason:
        graphs.record_decision(reason)
        return aot
    call = (bypass_training if graphs.phase == "forward" else bypass_inference)(aot, graphs)
    return for_dynamo(call, aot)


def for_dynamo(call: Call, like: Any) -> Call:
    """A callable as Dynamo wants it, with what it finds on `like`."""
    for name in ("zero_grad", "named_parameters", "named_buffers", "serialize"):
        if hasattr(like, name):
            setattr(call, name, getattr(like, name))
    return torch._dynamo.disable(call, reason="do not trace compiled graphs")


# ------------------------------------------------------------------------- what a call must be like


def why_unsupported(metadata: Any) -> str:
    """Why AOTAutograd has more to do than to pass on; empty if it has not."""
    if not hasattr(metadata, "output_info") or not hasattr(metadata, "grad_enabled_mutation"):
        return "AOTAutograd does not describe the graph"
    for name in UNSUPPORTED_METADATA:
        if getattr(metadata, name, None):
            return f"AOTAutograd says: {name} = {getattr(metadata, name)!r}"
    if torch_internals().mark is None and (dynamic_results(metadata) or dynamic_saved(metadata)):
        return "sizes change, and this torch has no known mark for that"
    if metadata.grad_enabled_mutation is not None:
        return "the graph switches gradients on or off"
    kinds = {alias_kind(i) for i in metadata.output_info} - {"non_alias", "unsafe_view_alias"}
    return f"results of kind {', '.join(sorted(kinds))}" if kinds else ""


def alias_kind(info: Any) -> str:
    """Of a result: whether it aliases something, by AOTAutograd's name for that."""
    return str(getattr(getattr(info, "output_type", None), "name", "unknown"))


def why_not_passed_on(
    args: Sequence[Any], results: Any, seen: list[WatchedCall], metadata: Any, views: Sequence[int]
) -> str:
    """Why a watched call was more than passing on `args` and the first results, of which those in
    `views` were passed on as views. Empty if it was not more."""
    if len(seen) != 1:
        return f"a call runs {len(seen)} graphs"
    made = seen[0].returned
    if not same_objects(args, seen[0].given):
        return "the graph gets other inputs than the caller gives"
    if seen[0].autocast:
        return "the graph runs under autocast"
    other = {type(a).__name__ for a in args if type(a) not in PLAIN_TYPES}
    if other:
        return f"inputs of types {sorted(other)}"
    if not isinstance(results, (list, tuple)) or len(results) != len(metadata.output_info):
        return "the caller gets other results than the graph has"
    tensors = [t for t in results if isinstance(t, Tensor)]
    if any(type(t) is not Tensor or t._is_view() for t in tensors):
        return "results of other types, or that are views"
    marks = dynamic_results(metadata)
    for k, t in enumerate(results):
        dims = [marks[k]] if k in marks else []
        if isinstance(t, Tensor) and list(vars(t).values()) != dims:
            return f"a result with {sorted(vars(t))}"
    given = {id(a) for a in args}
    if len(given.union(map(id, tensors))) != len(given) + len(tensors):
        return "results that are inputs or each other"
    for k, result in enumerate(results):
        if k in views and (result is made[k] or not same_memory(result, made[k])):
            return "a result that is no view of what the graph returns"
        if k not in views and result is not made[k]:
            return "a result that is not what the graph returns"
    return ""


def same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """The very same objects."""
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def same_memory(a: Any, b: Any) -> bool:
    return a is b or (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.data_ptr() == b.data_ptr()
        and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    )


def dynamic_results(metadata: Any) -> dict[int, set[int]]:
    """The sizes that may change, by result."""
    if not getattr(metadata, "dynamic_outputs", False):
        return {}
    dims = {k: getattr(i, "dynamic_dims", None) for k, i in enumerate(metadata.output_info)}
    return {k: dynamic_dims for k, dynamic_dims in dims.items() if dynamic_dims is not None}


def dynamic_saved(metadata: Any) -> dict[int, set[int]]:
    """The sizes that may change, by saved tensor."""
    return dict(getattr(metadata, "dynamic_saved_tensors_idxs", ()))


def mutated_inputs(metadata: Any) -> tuple[int, ...]:
    """Inputs that the graph itself writes to, and whose versions AOTAutograd counts up."""
    return tuple(getattr(metadata, "mutated_graph_handled_indices_seen_by_autograd", ()))


# ------------------------------------------------------------------------------- without gradients


def bypass_inference(aot: Call, graphs: CompiledGraphs, known: bool = False) -> Call:
    """`known`: that calls may bypass AOTAutograd."""
    autocast, grads_on = torch_internals().autocast, torch.is_grad_enabled
    switch = torch._C._set_grad_enabled
    amp, written = autocast(), mutated_inputs(graphs.metadata)
    marks, mark = tuple(dynamic_results(graphs.metadata).items()), torch_internals().mark
    run = without_autocast(graphs.forward[0]) if amp else graphs.forward[0]
    bypasses: bool | None = True if known else None  # None while unknown

    def call(*args: Any) -> Sequence[Any]:
        nonlocal bypasses
        if not bypasses or autocast() is not amp:
            if bypasses is not None or autocast() is not amp:
                return aot(*args)
            results, seen = graphs.watch(aot, *args)
            reason = why_not_passed_on(args, results, seen, graphs.metadata, ())
            graphs.record_decision(reason)
            bypasses = not reason
            if bypasses:
                graphs.on_bypass(BypassFacts(graphs.metadata))
            return results
        if written:
            increment_version([args[i] for i in written])
        if grads_on():
            switch(False)
            try:
                results = run(list(args))
            finally:
                switch(True)
        else:
            results = run(list(args))
        for k, dims in marks:
            mark(results[k], dims)
        return results

    return call


def without_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    """A graph that was captured under autocast has its casts; nobody shall add others."""
    without = torch_internals().no_autocast

    def run(*args: Any) -> Any:
        with without():
            return call(*args)

    return run


# ---------------------------------------------------------------------------------- with gradients


def bypass_training(aot: Call, graphs: CompiledGraphs, known: Call | None = None) -> Call:
    """`known`: what applies the graph without AOTAutograd, if that is known beforehand."""
    autocast, hooks, grads_on = (
        torch_internals().autocast,
        torch_internals().hooks,
        torch.is_grad_enabled,
    )
    transformed, amp, written = (
        torch_internals().transformed,
        autocast(),
        mutated_inputs(graphs.metadata),
    )
    apply, refused = known, False
    if known is not None and amp:
        apply = without_autocast(known)

    def call(*args: Any) -> Sequence[Any]:
        nonlocal apply, refused
        usual = autocast() is amp and grads_on() and hooks(False) is None and not transformed()
        if apply is None or not usual:
            if refused or not usual:
                return aot(*args)
            results, node = watch_first_call(aot, graphs, args)
            refused = node is None
            if node is not None and apply is None:  # not by another thread meanwhile
                apply = autograd_function(graphs, *node)
                apply = without_autocast(apply) if amp else apply
            return results
        if written:
            increment_version([args[i] for i in written])
        return apply(*args)

    return call


Node = tuple[
    Any, ForwardResults
]  # AOTAutograd's subclass of `autograd.Function`, what its node keeps


def watch_first_call(
    aot: Call, graphs: CompiledGraphs, args: Sequence[Any]
) -> tuple[Sequence[Any], Node | None]:
    """The first call: its results, and autograd's node, if that is as known here."""
    results, seen = graphs.watch(aot, *args)
    info = graphs.metadata.output_info
    # AOTAutograd hides from autograd that these share memory with what is saved.
    views = tuple(k for k, i in enumerate(info) if alias_kind(i) == "unsafe_view_alias")
    node: Node | None = None
    reason = why_not_passed_on(args, results, seen, graphs.metadata, views)
    if not reason:
        node, reason = forward_results(results, seen[0].returned, views)
    graphs.record_decision(reason)
    return results, node


def forward_results(
    results: Sequence[Any], made: Sequence[Any], views: tuple[int, ...]
) -> tuple[Node | None, str]:
    tensors = [k for k, t in enumerate(results) if isinstance(t, Tensor)]
    differentiable = tuple(k for k in tensors if results[k].requires_grad)
    nodes = {results[k].grad_fn for k in differentiable}
    if len(nodes) != 1:
        return None, f"results of {len(nodes)} nodes"
    node = nodes.pop()
    parent: Any = getattr(node, "_forward_cls", None)
    if not hasattr(parent, "_aot_id") or not hasattr(parent, "metadata"):
        return None, "the node is not AOTAutograd's"
    if reason := why_unsupported(parent.metadata):
        return None, reason
    if set(vars(node)) != NODE_ATTRIBUTES or node.opaque_objects or node._tensors_no_vc_check:
        return None, f"the node keeps {sorted(vars(node))}"
    saved, n = node.saved_tensors, len(results)
    end = n + len(saved)
    same_tensors = len(made) >= end and all(map(same_memory, saved, made[n:end]))
    if not same_tensors or not same_objects(node.symints, made[end:]):
        return None, "the node keeps something else than the graph returns"
    constant = tuple(k for k in tensors if k not in differentiable)
    return (parent, ForwardResults(n, len(saved), differentiable, constant, views)), ""


def autograd_function(graphs: CompiledGraphs, parent: Any, info: ForwardResults) -> Call:
    """Applies AOTAutograd's subclass of `autograd.Function`, with methods that bypass it where
    they can. Its node is AOTAutograd's to all others, compiled autograd for one."""
    run, results, views, constant = graphs.forward[0], info.results, info.views, info.constant
    end, view = results + info.tensors, torch.ops.aten._unsafe_view.default
    marks, mark = tuple(dynamic_results(parent.metadata).items()), torch_internals().mark
    saved_marks = tuple(dynamic_saved(parent.metadata).items())

    def forward(ctx: Any, *args: Any) -> Any:
        made = run(list(args))
        # As a view, a tensor would keep its base and where it came from.
        saved = [t.detach() if t._is_view() else t for t in made[results:end]]
        for k, dims in saved_marks:
            mark(saved[k], dims)
        ctx.save_for_backward(*saved)
        ctx.symints = made[end:]
        ctx.opaque_objects, ctx._tensors_no_vc_check = [], []
        out = made[:results]
        if views:
            out = [view(t, t.shape) if k in views else t for k, t in enumerate(out)]
        for k, dims in marks:
            mark(out[k], dims)
        if constant:
            ctx.mark_non_differentiable(*[out[k] for k in constant])
        ctx._materialize_non_diff_grads = False
        return tuple(out)

    methods = {"forward": forward, "backward": backward_method(graphs, parent, info)}
    made = type(parent)(
        parent.__name__,
        (parent,),
        {name: staticmethod(method) for name, method in methods.items()},
    )
    # `Function.apply` itself looks for transforms, and for wrappers that outlived one; guards on
    # the dispatch keys of inputs let none of these come here.
    apply: Call = super(torch.autograd.Function, made).apply
    return apply


def backward_method(graphs: CompiledGraphs, parent: Any, info: ForwardResults) -> Call:
    differentiable = info.differentiable
    grads_on, deterministic = torch.is_grad_enabled, torch.are_deterministic_algorithms_enabled
    autocast, transformed = torch_internals().autocast, torch_internals().transformed
    tracing_callback, stashed, context = (
        torch_internals().tracing_callback,
        torch_internals().stashed,
        torch_internals().context,
    )
    run = graphs.backward
    metas = getattr(parent.metadata, "subclass_tangent_meta", ())
    layouts = [getattr(m, "memory_format", None) for m in metas]
    watches_left = MAX_WATCHED_BACKWARDS

    def backward(ctx: Any, *given: Any) -> Any:
        nonlocal run, watches_left
        # No Python function may be called before this: Dynamo would compile it.
        if (
            tracing_callback() is not None
            or grads_on()
            or deterministic()
            or autocast()
            or transformed()
        ):
            return parent.backward(ctx, *given)
        grads: Any = given
        boxed = len(given) == 1 and type(given[0]) is list  # from torch 2.13 on
        if boxed:
            grads = given[0]
        tangents = [grads[k] for k in differentiable]
        if not has_layouts(tangents, layouts) or (run is None and not watches_left):
            del tangents
            return parent.backward(ctx, *given)
        if run is None:
            watches_left -= 1
            saved_values = [*ctx.symints, *ctx.saved_tensors]
            out, seen = graphs.watch(parent.backward, ctx, *given)
            run = seen[0].run if backward_passed_on(seen, saved_values, tangents, out) else None
            if run is not None:
                graphs.on_bypass(BypassFacts(parent.metadata, info))
            return out
        args = [*ctx.symints, *ctx.saved_tensors, *tangents]
        # The graph frees what is in `args` as soon as it can, if nobody else holds it.
        del tangents
        if boxed:
            grads.clear()
        ctx.maybe_clear_saved_tensors()
        within = context("context") if stashed("context") else None
        return tuple(run(args) if within is None else within.run(run, args))

    torch_internals().skip(backward.__code__)
    return backward


def has_layouts(tangents: Sequence[Any], layouts: Sequence[Any]) -> bool:
    """Whether all have the layout that AOTAutograd would give them."""
    if len(tangents) != len(layouts):
        return False
    for t, layout in zip(tangents, layouts):
        if type(t) is not Tensor or layout is None:
            return False
        if layout.memory_format is not None:
            if not t.is_contiguous(memory_format=layout.memory_format):
                return False
        elif t.shape != layout.size or t.stride() != layout.stride:
            return False
    return True


def backward_passed_on(
    seen: list[WatchedCall],
    saved_values: Sequence[Any],
    tangents: Sequence[Any],
    out: Sequence[Any],
) -> bool:
    """Whether a watched backward passed on what was saved, the tangents, and the gradients."""
    if len(seen) != 1:
        return False
    given, returned = seen[0].given, seen[0].returned
    n = len(saved_values)
    return (
        len(given) == n + len(tangents)
        and all(map(same_memory, saved_values, given))
        and same_objects(given[n:], tangents)
        and type(out) is tuple
        and same_objects(out, returned)
    )


__all__ = [
    "CompiledGraphs",
    "ForwardResults",
    "BypassFacts",
    "bypass",
    "for_dynamo",
    "autograd_function",
    "bypass_inference",
    "torch_internals",
    "bypass_training",
    "mutated_inputs",
]
