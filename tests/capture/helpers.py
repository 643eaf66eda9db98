"""Runs graphs as traced, through FX, so that capture and graph rewrites are tested without
lowering or code generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from deuteron.backend import deuteron_backend, run_as_traced
from deuteron.base.passes import Context
from deuteron.base.record import Record
from deuteron.capture.stages import Part


@dataclass
class Traced:
    """A backend that keeps what it was given. `graphs` holds (phase, graph) in the order of
    compilation."""

    graphs: list[tuple[str, fx.GraphModule]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def runner(self, part: Part, context: Context) -> Any:
        check_values(part.gm)
        self.graphs.append((context.phase, part.gm))
        self.records.append(context.record)
        return run_as_traced(part.gm)

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return deuteron_backend(gm, inputs, options=self.options, runner=self.runner)

    def phases(self) -> list[str]:
        return [p for p, _ in self.graphs]

    def targets(self, phase: str | None = None) -> list[str]:
        return [
            str(n.target)
            for p, g in self.graphs
            for n in g.graph.nodes
            if n.op == "call_function" and phase in (None, p)
        ]

    def compile(self, f: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
        return torch.compile(f, backend=self, **kwargs)


def check_values(gm: fx.GraphModule) -> None:
    """Every tensor node has a fake value; the graph is well formed."""
    gm.graph.lint()
    for n in gm.graph.nodes:
        if n.op in ("placeholder", "call_function"):
            no_result = isinstance(n.target, torch._ops.OpOverload) and not n.target._schema.returns
            assert "val" in n.meta or no_result, f"{n} has no value"


def tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        return [t for v in x.values() for t in tensors(v)]
    if isinstance(x, (tuple, list)):
        return [t for v in x for t in tensors(v)]
    return []


def fresh(args: Sequence[Any]) -> list[Any]:
    """Copies with the same strides and requires_grad."""
    return [
        a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
        for a in args
    ]


def same(
    f: Callable[..., Any],
    *args: Any,
    backend: Traced | None = None,
    tolerance: float = 1e-6,
    **kwargs: Any,
) -> Traced:
    """Compiled and eager agree: outputs (values, dtype, strides, sharing), gradients, and what
    became of the inputs."""
    torch._dynamo.reset()
    backend = backend or Traced()
    compiled = backend.compile(f, **kwargs)
    eager_args, args_c = fresh(args), fresh(args)
    expected, got = f(*eager_args), compiled(*args_c)
    es, gs = tensors(expected), tensors(got)
    assert len(es) == len(gs)
    for e, g in zip(es, gs):
        assert (e.shape, e.dtype, e.requires_grad) == (g.shape, g.dtype, g.requires_grad)
        assert e.numel() == 0 or e.stride() == g.stride()
        torch.testing.assert_close(g, e, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert sharing(es, eager_args) == sharing(gs, args_c)
    for e, g in zip(tensors(eager_args), tensors(args_c)):
        torch.testing.assert_close(g, e, rtol=tolerance, atol=tolerance, equal_nan=True)
    losses = [(e, g) for e, g in zip(es, gs) if e.requires_grad]
    if losses:
        for pick, inputs in ((0, eager_args), (1, args_c)):
            sum((pair[pick].float() * 1.5).sum() for pair in losses).backward()
            del inputs
        for e, g in zip(tensors(eager_args), tensors(args_c)):
            assert (e.grad is None) == (g.grad is None)
            if e.grad is not None:
                torch.testing.assert_close(
                    g.grad, e.grad, rtol=tolerance, atol=tolerance, equal_nan=True
                )
    return backend


def sharing(outputs: list[torch.Tensor], inputs: list[Any]) -> list[list[int]]:
    """For each output the positions, among inputs and outputs, of those that share its storage."""
    everything = [*tensors(inputs), *outputs]
    where = [t.untyped_storage().data_ptr() if t.numel() else -i for i, t in enumerate(everything)]
    return [
        [i for i, w in enumerate(where) if w == where[len(everything) - len(outputs) + k]]
        for k in range(len(outputs))
    ]
