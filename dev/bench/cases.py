"""What a benchmark case is: a function, descriptions of its inputs, the bytes that it must move.

A `Program` says what runs at one shape; a `Case` adds the name under which a suite lists it. `Work`
is a case made real on a device: several sets of inputs, so that a set is not in the cache when its
turn comes again, and `step`, which is one forward, or one forward and backward.

The *unavoidable bytes* of a forward are its inputs, read once, and its outputs, written once. A
backward reads the gradients of the outputs and the inputs named in `again` (all floating ones,
unless the program says otherwise), and writes the gradients of the inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deuteron.tools.bench_errors import InFloat64

TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "i64": torch.int64,
    "bool": torch.bool,
}


@dataclass(frozen=True)
class Spec:
    """One input: normal numbers, or whole numbers below `high`, or True with a chance of 7 in 8."""

    shape: tuple[int, ...]
    dtype: str
    grad: bool = False
    high: int = 0
    scale: float = 1.0
    shift: float = 0.0
    channels_last: bool = False
    softmax: bool = False  # rows that sum to one

    def make(self, device: str, generator: torch.Generator) -> Tensor:
        """A tensor as described; the same for the same state of `generator`."""
        if self.dtype == "i64":
            return torch.randint(
                0, self.high, self.shape, device=device, generator=generator, dtype=torch.int64
            )
        if self.dtype == "bool":
            return torch.rand(self.shape, device=device, generator=generator) < 0.875
        x = torch.randn(self.shape, device=device, generator=generator)
        x = x.mul_(self.scale).add_(self.shift)
        if self.softmax:
            x = x.softmax(-1)
        x = x.to(TORCH_DTYPES[self.dtype])
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        return x.requires_grad_(self.grad)


@dataclass(frozen=True)
class Program:
    """A function at one shape. `touched` replaces the number of elements that the forward must
    read of an input (a table that is gathered from); `extra` adds bytes that have to move besides.
    """

    fn: Callable[..., Any]
    inputs: tuple[Spec, ...]
    again: tuple[int, ...] | None = None
    touched: tuple[tuple[int, int], ...] = ()
    extra: int = 0
    flops: float = 0.0
    random: bool = False  # eager draws other numbers: results are not compared
    # Contender -> what makes its function: kernels written by hand. Raises `Absent`.
    handwritten: Mapping[str, Callable[[], Callable[..., Any]]] = field(default_factory=dict)
    module: Callable[[], torch.nn.Module] | None = None  # takes the inputs; `fn` is not used


@dataclass(frozen=True)
class Case:
    """A program as a suite lists it. `clock`: "device", or "wall" where the host's time counts."""

    suite: str
    name: str
    dtype: str
    backward: bool
    make: Callable[[], Program]
    quick: bool = False
    clock: str = "device"


class Absent(Exception):
    """A hand-written kernel that this machine cannot build or run, with the reason."""


def tensors(results: Any) -> list[Tensor]:
    """The tensors among a function's results, in order."""
    if isinstance(results, Tensor):
        return [results]
    if isinstance(results, (tuple, list)):
        return [t for r in results for t in tensors(r)]
    if isinstance(results, dict):
        return [t for r in results.values() for t in tensors(r)]
    return []


def size(tensor: Tensor) -> int:
    """Bytes of a tensor; expanded dimensions count once."""
    n = tensor.element_size()
    for extent, stride in zip(tensor.shape, tensor.stride()):
        n *= extent if stride else 1
    return n


class Work:
    """A case on a device."""

    def __init__(self, case: Case, device: str, cache: int) -> None:
        self.case, self.program, self.device = case, case.make(), device
        generator = torch.Generator(device=device)
        self.module = self.program.module() if self.program.module else None
        if self.module is not None:
            self.module = self.module.to(device, TORCH_DTYPES[case.dtype])
            self.module.train(case.backward)
        self.generator = generator.manual_seed(20)
        self.sets = [self.make()]
        outs = self.forward(self.function, self.sets[0])
        self.out_bytes = [size(t) for t in outs]
        # A gradient for each output that has one; a loss is differentiated by itself.
        self.grads_of = [i for i, t in enumerate(outs) if t.requires_grad]
        self.ones = case.backward and len(outs) == 1 and outs[0].dim() == 0
        self.grad_outs: list[list[Tensor]] = []
        self.bytes = self.traffic(outs)
        self.flops = self.program.flops
        working = sum(map(size, self.sets[0])) + sum(self.out_bytes)
        # Three times the cache's size passes before a set is read again.
        more = 1 if self.module is not None else min(64, -(-3 * cache // max(1, working)))
        self.sets += [self.make() for _ in range(more - 1)]
        if case.backward:
            self.grad_outs = [self.make_grads(outs) for _ in self.sets]
        del outs
        if self.module is not None:
            self.flops = self.counted()

    def counted(self) -> float:
        """FLOPs of the products and convolutions of a step, by torch's own counter."""
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            self.step(self.function)
        return float(counter.get_total_flops())

    @property
    def function(self) -> Callable[..., Any]:
        return self.module if self.module is not None else self.program.fn

    def make(self) -> list[Tensor]:
        made = [s.make(self.device, self.generator) for s in self.program.inputs]
        if not self.case.backward:
            made = [t.detach() for t in made]
        return made

    def make_grads(self, outs: Sequence[Tensor]) -> list[Tensor]:
        if self.ones:
            return [torch.ones_like(outs[0])]
        return [
            torch.empty_like(outs[i]).normal_(generator=self.generator).detach()
            for i in self.grads_of
        ]

    def forward(self, fn: Callable[..., Any], args: Sequence[Tensor]) -> list[Tensor]:
        with torch.set_grad_enabled(self.case.backward):
            return tensors(fn(*args))

    def leaves(self, args: Sequence[Tensor], module: torch.nn.Module | None = None) -> list[Tensor]:
        module = module or self.module
        own = list(module.parameters()) if module is not None else []
        return [t for t in (*args, *own) if t.requires_grad]

    def step(self, fn: Callable[..., Any], k: int = 0) -> list[Tensor]:
        """Results of one call on the k-th set: outputs, and gradients of what has them."""
        args = self.sets[k]
        outs = self.forward(fn, args)
        if not self.case.backward:
            return outs
        differentiable = [outs[i] for i in self.grads_of]
        grads = torch.autograd.grad(
            differentiable, self.leaves(args), self.grad_outs[k], allow_unused=True
        )
        return [t.detach() for t in outs] + [g for g in grads if g is not None]

    def traffic(self, outs: Sequence[Tensor]) -> int:
        """The unavoidable bytes of a step."""
        p, args = self.program, self.sets[0]
        touched = dict(p.touched)
        read = sum(
            touched[i] * t.element_size() if i in touched else size(t) for i, t in enumerate(args)
        )
        own = sum(size(t) for t in self.module.parameters()) if self.module is not None else 0
        total = read + own + sum(self.out_bytes) + p.extra
        if not self.case.backward:
            return total
        floating = [i for i, t in enumerate(args) if t.is_floating_point()]
        total += sum(size(args[i]) for i in (floating if p.again is None else p.again))
        if not self.ones:
            total += sum(size(outs[i]) for i in self.grads_of)
        return total + own + sum(size(t) for t in self.leaves(args))

    def reference(self) -> list[Tensor] | None:
        """The first set's results in float64; None where chance decides."""
        if self.program.random:
            return None
        module = copy.deepcopy(self.module).double() if self.module is not None else None

        def wide(t: Tensor) -> Tensor:
            if not t.is_floating_point():
                return t.clone()
            return t.detach().double().requires_grad_(t.requires_grad)

        args = [wide(t) for t in self.sets[0]]
        with InFloat64():
            outs = self.forward(self.program.fn if module is None else module, args)
        if not self.case.backward:
            return outs
        grads = torch.autograd.grad(
            [outs[i] for i in self.grads_of],
            self.leaves(args, module),
            [g.double() for g in self.grad_outs[0]],
            allow_unused=True,
        )
        return [t.detach() for t in outs] + [g for g in grads if g is not None]
