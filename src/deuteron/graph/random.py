"""Random operators become functions of one seed per device and call.

In: an FX graph (joint, or of inference) with ATen's random operators. Out: the same graph with one
``deuteron::seed`` per device and pure ``deuteron::rand``/``randn``/``randint64`` calls, each with
a stream of its own. So forward and backward agree on every number, saving 8 bytes instead of a
mask, and a number can be recomputed where it is used. ``torch.manual_seed`` determines the seeds,
hence the numbers; they are not eager's numbers.

Operators without a row here (`multinomial`, `randperm`, `poisson`, ...), and calls with a
generator of their own, stay calls of ATen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from deuteron.base.record import Record
from deuteron.graph import ops
from deuteron.graph.edit import Editor
from deuteron.graph.random_ops import RAND, RANDINT64, RANDN, SEED
from deuteron.graph.strides import as_was

aten = torch.ops.aten
# Bits of a uniform number that the type holds exactly; eager draws the same grid (f64: 53 there,
# 52 here).
MANTISSA_BITS = {torch.float16: 11, torch.bfloat16: 8}


@dataclass
class Draw:
    """One random node being replaced: what a row of the table works with."""

    editor: Editor
    node: fx.Node
    seed: fx.Node
    stream: int
    extra: list[fx.Node] = field(default_factory=list)

    @property
    def val(self) -> torch.Tensor:
        val = self.node.meta["val"]
        return val[0] if isinstance(val, (tuple, list)) else val

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        args = self.node.args
        return args[position] if len(args) > position else self.node.kwargs.get(name, default)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.editor.call(target, *args, like=self.node, **kwargs)

    def sizes(self, tensor: fx.Node | None) -> list[Any]:
        """The sizes as graph values: those of `tensor`, else the node's own `size` argument."""
        if tensor is None:
            size = self.arg(0, "size")
            return list(size)
        shape = tensor.meta["val"].shape
        return [
            s if isinstance(s, int) else self.call(aten.sym_size.int, tensor, d)
            for d, s in enumerate(shape)
        ]

    def draw(self, target: Callable[..., Any], size: Sequence[Any], *args: Any) -> fx.Node:
        """Drawn in storage order and permuted, so that the strides are the traced ones."""
        order = storage_order(self.val)
        if order == list(range(len(size))):
            return self.call(target, *args, list(size), *self.dtype_of(target))
        drawn = self.call(target, *args, [size[d] for d in order], *self.dtype_of(target))
        return self.call(aten.permute.default, drawn, [order.index(d) for d in range(len(size))])

    def dtype_of(self, target: Callable[..., Any]) -> list[torch.dtype]:
        if target is RANDINT64:
            return []
        return [torch.float64 if self.val.dtype == torch.float64 else torch.float32]

    def uniform(self, size: Sequence[Any]) -> fx.Node:
        """Uniform on [0, 1) in the node's dtype; never rounds up to 1."""
        u = self.draw(RAND, size, self.seed, self.stream)
        digits = MANTISSA_BITS.get(self.val.dtype)
        if digits is not None:
            grid = self.call(aten.mul.Tensor, u, 2.0**digits)
            whole = self.call(aten.floor.default, grid)
            u = self.call(aten.mul.Tensor, whole, 2.0**-digits)
        return self.cast(u)

    def normal(self, size: Sequence[Any]) -> fx.Node:
        return self.cast(self.draw(RANDN, size, self.seed, self.stream))

    def integer(self, low: Any, high: Any, size: Sequence[Any]) -> fx.Node:
        return self.cast(self.draw(RANDINT64, size, self.seed, self.stream, low, high))

    def cast(self, x: fx.Node) -> fx.Node:
        if x.meta["val"].dtype == self.val.dtype:
            return x
        return self.call(aten._to_copy.default, x, dtype=self.val.dtype)


def storage_order(val: torch.Tensor) -> list[int]:
    """Dimensions from the outermost in memory to the innermost, without asking a symbolic stride a
    question."""
    strides = val.stride()
    dims = list(range(val.dim()))
    if not all(isinstance(s, int) for s in (*strides, *val.shape)):
        return dims
    return (
        sorted(dims, key=lambda d: (-strides[d] if val.shape[d] != 1 else 0, d))
        if not val.is_contiguous()
        else dims
    )


def _rand(d: Draw) -> fx.Node:
    return d.uniform(d.sizes(None))


def _rand_like(d: Draw) -> fx.Node:
    return d.uniform(d.sizes(d.node.args[0]))


def _randn(d: Draw) -> fx.Node:
    return d.normal(d.sizes(None))


def _randn_like(d: Draw) -> fx.Node:
    return d.normal(d.sizes(d.node.args[0]))


def _bernoulli_p(d: Draw) -> fx.Node:
    # Compared in f32 whatever the dtype: on the grid of bf16 a probability of 0.001 would be one
    # of 0.004.
    u = d.draw(RAND, d.sizes(d.node.args[0]), d.seed, d.stream)
    return d.cast(d.call(aten.lt.Scalar, u, d.arg(1, "p", 0.5)))


def _bernoulli(d: Draw) -> fx.Node:
    if d.val.device.type == "cpu":  # eager looks at all of them before it draws
        p = d.node.args[0]
        low, high = d.call(aten.ge.Scalar, p, 0), d.call(aten.le.Scalar, p, 1)
        fine = d.call(aten.all.default, d.call(aten.logical_and.default, low, high))
        said = "Expected p_in >= 0 && p_in <= 1 to be true, but got false."
        d.call(aten._assert_async.msg, fine, said)
    u = d.draw(RAND, d.sizes(d.node.args[0]), d.seed, d.stream)
    return d.cast(d.call(aten.lt.Tensor, u, d.node.args[0]))


def _uniform(d: Draw) -> fx.Node:
    low, high = d.arg(1, "from", 0.0), d.arg(2, "to", 1.0)
    u = d.uniform(d.sizes(d.node.args[0]))
    return d.call(aten.add.Tensor, d.call(aten.mul.Tensor, u, high - low), low)


def _normal(d: Draw) -> fx.Node:
    mean, std = d.arg(1, "mean", 0.0), d.arg(2, "std", 1.0)
    z = d.normal(d.sizes(d.node.args[0]))
    return d.call(aten.add.Tensor, d.call(aten.mul.Tensor, z, std), mean)


def _randint(d: Draw) -> fx.Node:
    return d.integer(0, d.arg(0, "high"), list(d.arg(1, "size")))


def _randint_low(d: Draw) -> fx.Node:
    return d.integer(d.arg(0, "low"), d.arg(1, "high"), list(d.arg(2, "size")))


def _randint_like(d: Draw) -> fx.Node:
    return d.integer(0, d.arg(1, "high"), d.sizes(d.node.args[0]))


def _randint_like_low(d: Draw) -> fx.Node:
    return d.integer(d.arg(1, "low"), d.arg(2, "high"), d.sizes(d.node.args[0]))


RANDOM_RULES: dict[str, Callable[[Draw], fx.Node]] = {
    "aten.rand.default": _rand,
    "aten.rand_like.default": _rand_like,
    "aten.randn.default": _randn,
    "aten.randn_like.default": _randn_like,
    "aten.bernoulli.default": _bernoulli,
    "aten.bernoulli.p": _bernoulli_p,
    "aten.uniform.default": _uniform,
    "aten.normal_functional.default": _normal,
    "aten.randint.default": _randint,
    "aten.randint.low": _randint_low,
    "aten.randint_like.default": _randint_like,
    "aten.randint_like.low_dtype": _randint_like_low,
}
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def why_not(node: fx.Node) -> str | None:
    """The reason for which a random node stays a call of ATen; None: it has a row and is
    replaced."""
    if str(node.target) not in RANDOM_RULES:
        return "no rule makes this operator a function of a seed"
    if node.kwargs.get("generator") is not None:
        return "it draws from a generator of its own"
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return "its result is no tensor"
    if val.device.type not in ("cpu", "cuda"):
        return f"device {val.device.type}"
    drawn_as_float = "randint" not in str(node.target) and "bernoulli" not in str(node.target)
    if drawn_as_float and val.dtype not in FLOAT_DTYPES:
        return f"dtype {val.dtype}"
    if node.kwargs.get("layout") not in (None, torch.strided):
        return "sparse layout"
    return refused(node)


def refused(node: fx.Node) -> str | None:
    """Why eager raises, if it does: the library says so itself."""
    at = {
        "aten.bernoulli.p": (0.0, (1, "p", 0.5), 1.0),
        "aten.uniform.default": ((1, "from", 0.0), (2, "to", 1.0)),
        "aten.normal_functional.default": (0.0, (2, "std", 1.0)),
    }
    numbers = []
    for x in at.get(str(node.target), ()):
        if isinstance(x, tuple):
            position, name, default = x
            given = len(node.args) > position
            x = node.args[position] if given else node.kwargs.get(name, default)
        numbers.append(x)
    if all(isinstance(n, (int, float)) for n in numbers) and numbers != sorted(numbers):
        return f"its numbers are out of range: {numbers}"
    return None


def functionalize(gm: fx.GraphModule, record: Record) -> int:
    """Random numbers become functions of a seed and a position, so that a backward can draw them
    again. In place, idempotent, without recompiling the module. Returns how many nodes."""
    nodes = [
        n
        for n in gm.graph.nodes
        if n.op == "call_function" and ops.is_random(n) and n.target is not SEED
    ]
    random_nodes = []
    for n in nodes:
        reason = why_not(n)
        if reason is None:
            random_nodes.append(n)
        record.add(
            "decision",
            subject="random",
            accepted=reason is None,
            first=n.name,
            second=str(n.target),
            reason="function of a seed" if reason is None else "library",
            detail=reason or "",
        )
    if not random_nodes:
        return 0
    editor = Editor(gm)
    seeds: dict[torch.device, fx.Node] = {}
    taken = sum(1 for n in gm.graph.nodes if n.target in (RAND, RANDN, RANDINT64))
    for stream, n in enumerate(random_nodes, start=taken):
        device = n.meta["val"].device
        with editor.before(editor.first_call()):
            if device not in seeds:
                seeds[device] = editor.call(SEED, device, like=n)
                # A seed is drawn once and never again, whatever a checkpoint asks of the numbers
                # made from it.
                seeds[device].meta["recompute"] = CheckpointPolicy.MUST_SAVE
                seeds[device].meta.pop("ac_graph_id", None)
        with editor.before(n):
            new = RANDOM_RULES[str(n.target)](Draw(editor, n, seeds[device], stream))
            editor.replace(n, as_was(editor, new, n))
    return len(random_nodes)
