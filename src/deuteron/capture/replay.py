"""Library calls that draw random numbers and that the backward repeats: the same numbers again.

In: a joint graph whose checkpointed regions draw (attention with dropout, ``randperm``,
``multinomial``; with ``eager_random`` every draw), and its forward and backward. Out: the same
graphs, in which such a call of the forward also returns the generator's state before it
(``run_and_save_rng_state``), which is saved, and the backward's draws from that
(``run_with_rng_state``). The generator goes on in the forward as it does in eager and is left alone
by the backward, so ``torch.manual_seed`` decides the numbers.

Draws that are functions of a seed (`graph.random`) need none of this.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._functorch import partitioners as P
from torch.utils._pytree import tree_leaves

from deuteron.graph import ops
from deuteron.graph.edit import Editor

SAVES, REPLAYS = "run_and_save_rng_state", "run_with_rng_state"


def undrawn(joint: fx.GraphModule) -> None:
    """Attention without dropout is marked as random all the same; repeated as any other call, it
    saves no state."""
    for n in joint.graph.nodes:
        if n.op == "call_function" and ops.is_overload(n) and ops.without_dropout(n):
            n.meta["recompute"] = None


def replayed(
    joint: fx.GraphModule, forward: fx.GraphModule, backward: fx.GraphModule, results: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two graphs with states handed over; `results`: how many of the forward's results are the
    program's. `joint` is of no use afterwards."""
    undrawn(joint)
    if not P.has_recomputable_rng_ops(joint):
        return forward, backward
    # Autograd keeps tensors, then other objects, then sizes. Torch is told of more sizes than were
    # chosen to be saved: those that other sizes are made of.
    saved = forward.graph.output_node().args[0][results:]  # type: ignore[index]
    last = sum(1 for n in saved if P.is_sym_node(n) or is_opaque(n))
    with states_as_bytes():
        forward, backward = P.functionalize_rng_ops(joint, forward, backward, last)
    tensors_first(backward.graph)
    for gm in (forward, backward):
        editor = Editor(gm)
        editor.complete()
        fixed_sizes(gm, editor)
    return forward, backward


def is_opaque(n: Any) -> bool:
    """An object that is neither a tensor nor a number, by torch's rule."""
    return bool(getattr(P, "is_opaque_node", lambda n: False)(n))


def tensors_first(backward: fx.Graph) -> None:
    """Moves states before other objects among what the backward is given."""
    given = backward.find_nodes(op="placeholder")
    states = {n.args[0] for n in backward.nodes if ops.packet(n.target) == REPLAYS}
    objects = [n for n in given if is_opaque(n)]
    for n in given:
        if objects and n in states:
            objects[0].prepend(n)


def states_as_bytes() -> AbstractContextManager[Any]:
    """Torch's rewrite with the generator's state as a tensor on every device. Its other form for
    GPUs draws from generators of its own, which ``torch.manual_seed`` does not reach."""
    config = torch._functorch.config
    if not hasattr(config, "graphsafe_rng_functionalization"):
        return nullcontext()
    patch: AbstractContextManager[Any] = config.patch(graphsafe_rng_functionalization=False)
    return patch


def fixed_sizes(gm: fx.GraphModule, editor: Editor) -> None:
    """States have as many bytes in every call; torch describes them by a symbol."""
    for n in gm.graph.nodes:
        if ops.packet(n.target) == SAVES:
            n.meta["val"] = (state_like(editor, n), n.meta["val"][1])
            for u in n.users:
                if u.args[1] == 0:
                    u.meta["val"] = n.meta["val"][0]
        elif ops.packet(n.target) == REPLAYS:
            state = n.args[0]
            assert isinstance(state, fx.Node)
            state.meta["val"] = state_like(editor, n)


def state_like(editor: Editor, node: fx.Node) -> torch.Tensor:
    """A state of the generator that a call draws from, as a fake tensor (which lies on the CPU)."""
    drawn = tree_leaves(node.meta["val"])
    gpu = any(isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in drawn)
    with torch.utils._python_dispatch._disable_current_modes():
        real = torch.cuda.get_rng_state() if gpu else torch.get_rng_state()
    assert editor.mode is not None
    return editor.mode.from_tensor(real, static_shapes=True)
