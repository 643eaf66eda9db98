"""The process of `deuteron bench` that compiles and times the user's function.

In: a `Request` as JSON on standard input. Out: lines of JSON after `MARK` on standard output:
``{"stage": compiler}`` when it begins to compile, and last ``{"usage": what is wrong}``, or
``{"cold_s": seconds}``, or ``{"about": facts of the run, "rows": {compiler: facts}}``. The facts:
``ms`` (median time per call), ``rounds``, ``peak_mb``, ``breaks`` (graph breaks), ``error`` (the
largest against float64), ``problems`` (results whose error is too large, in words), or ``failure``.

All compilers call the same function on the same arguments; what a call changes is put back before
another compiler's first call.
"""

from __future__ import annotations

import json
import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import graph_break_reasons
from torch.utils._pytree import tree_leaves

from deuteron.base.device import device_spec
from deuteron.tools.bench_errors import Judge, State, Values, afterwards
from deuteron.tools.measuring import (
    distinct,
    error_line,
    interleaved,
    others_of,
    peak_bytes,
    synchronize,
    warm_up,
)
from deuteron.tools.report_data import breaks_of
from deuteron.tools.target import Target, UsageError, target_of

MARK = "@deuteron-bench "
CAPTURING = ("reduce-overhead", "max-autotune")  # modes that replay CUDA graphs
SETTLING = 4  # calls until a mode has recorded its graphs, and Dynamo has seen what a call changes


@dataclass(frozen=True)
class Request:
    """`compilers`: without eager. `task`: "time", or "cold": the first call of the one compiler."""

    target: str
    shapes: tuple[str, ...]
    device: str
    backward: bool
    mode: str
    compilers: tuple[str, ...]
    seconds: float
    task: str = "time"


def emit(**message: Any) -> None:
    print(MARK + json.dumps(message), flush=True)


class Contender:
    """The function under one compiler ("eager" is none)."""

    def __init__(self, name: str, target: Target, request: Request) -> None:
        self.name, self.target = name, target
        self.device, self.backward = request.device, request.backward
        self.captures = name != "eager" and request.mode in CAPTURING and self.device == "cuda"
        self.call: Callable[..., Any] = distinct(target.function, name)
        if name != "eager":
            mode = None if request.mode == "default" else request.mode
            self.call = torch.compile(self.call, backend=backend(name), mode=mode)
        self.gradients: list[Tensor] = []
        self.facts: dict[str, Any] = {}

    def step(self) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
        """One call, and its backward from fixed gradients: the results, and the gradients of
        `Target.leaves`."""
        if self.captures:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(self.backward):
            leaves = tree_leaves(self.call(*self.target.args))
        results = [t for t in leaves if isinstance(t, Tensor)]
        if not self.backward:
            return results, ()
        ends, starts = [t for t in results if t.requires_grad], list(self.target.leaves.values())
        if not ends or not starts:
            raise UsageError("there is no backward: no result depends on what requires a gradient")
        if not self.gradients:
            self.gradients = [fixed_gradient(t, k) for k, t in enumerate(ends)]
        given = [g.to(t.dtype) for g, t in zip(self.gradients, ends)]
        return results, torch.autograd.grad(ends, starts, given, allow_unused=True)

    def values(self) -> Values:
        """What a step computes, by name."""
        results, gradients = self.step()
        named = {f"result {k}": t for k, t in enumerate(results)}
        for name, g in zip(self.target.leaves, gradients):
            if g is not None:
                named[f"gradient of {name}"] = g
        return {k: t.detach().clone() for k, t in named.items()}

    def first(self, state: State) -> Values:
        """The first call, on the state before any; also what it leaves in what it writes to."""
        state.restore()
        torch.manual_seed(0)
        before = len(graph_break_reasons)
        values = self.values()
        synchronize(self.device)
        self.facts["breaks"] = len(breaks_of(graph_break_reasons[before:]))
        return values | {afterwards(k): t.detach().clone() for k, t in state.changed().items()}


def backend(name: str) -> Any:
    if name != "deuteron":
        return name
    from deuteron.backend import deuteron_backend  # from a checkout too, where nothing is installed

    return deuteron_backend


def fixed_gradient(t: Tensor, seed: int) -> Tensor:
    """Of a result: one for a number, else multiples of 1/8, which every dtype holds."""
    if t.dim() == 0:
        return torch.ones_like(t)
    generator = torch.Generator().manual_seed(seed)
    eighths = torch.randint(-8, 9, t.shape, generator=generator)
    return (eighths.double() / 8).to(t.device, t.dtype)


def measured(target: Target, request: Request) -> dict[str, Any]:
    """The message that ends the task "time"."""
    state = State(target)
    eager = Contender("eager", target, request)
    emit(stage="eager")
    judge = Judge(eager_values(eager, state), eager.values, state)
    contenders = [eager]
    eager.facts["error"] = judge.eager_error
    rows = {"eager": eager.facts}
    for name in request.compilers:
        emit(stage=name)
        c = Contender(name, target, request)
        rows[name] = c.facts
        try:
            values = c.first(state)
            c.facts["error"], c.facts["problems"] = judge.of(values)
            del values
            for _ in range(SETTLING):
                c.step()
            contenders.append(c)
        except Exception as error:  # noqa: BLE001 - what a compiler raises is its result
            traceback.print_exc()
            c.facts["failure"] = error_line(error)
    emit(stage="timing")
    about: dict[str, Any] = {}
    with others_of(about):
        times = interleaved([c.step for c in contenders], request.seconds, request.device)
    for c, seconds in zip(contenders, times):
        c.facts["ms"] = statistics.median(seconds) * 1e3
        c.facts["rounds"] = len(seconds)
        c.facts["peak_mb"] = peak_bytes(c.step, request.device) / 1e6
    about |= {"machine": device_spec(request.device).name, "torch": torch.__version__}
    return {"about": {**about, "compared_with": judge.reference, "note": judge.note}, "rows": rows}


def eager_values(eager: Contender, state: State) -> Values:
    """Of eager's first call. What it raises is the function's own fault."""
    try:
        return eager.first(state)
    except UsageError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise UsageError(
            f"{eager.target.name} fails without a compiler: {error_line(error)}"
        ) from None


def cold(target: Target, request: Request) -> dict[str, Any]:
    """Seconds of the first call under a compiler, in this process and with its caches."""
    import time

    warm_up(request.device)
    state = State(target)
    eager_values(Contender("eager", target, request), state)
    (name,) = request.compilers
    emit(stage=name)
    contender = Contender(name, target, request)
    state.restore()
    start = time.perf_counter()
    contender.step()
    synchronize(request.device)
    return {"cold_s": time.perf_counter() - start}


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.stdin.read())
    asked |= {k: tuple(asked[k]) for k in ("shapes", "compilers")}
    request = Request(**asked)
    try:
        torch.manual_seed(0)
        target = target_of(request.target, request.shapes, request.device, request.backward)
        emit(**(cold if request.task == "cold" else measured)(target, request))
    except UsageError as error:
        emit(usage=str(error))


if __name__ == "__main__":
    main()
