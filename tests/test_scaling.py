"""Compile time is linear in the size of a graph: counted in function calls, which no other program
on the machine changes. ``dev/measure/scaling.py`` measures seconds."""

from __future__ import annotations

import cProfile
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from deuteron.backend import deuteron_backend
from deuteron.base import device

SCRIPT = Path(__file__).parent.parent / "dev" / "measure" / "scaling.py"
# Between these sizes everything that is bounded (members of a kernel, its code) reaches its bound.
SMALL, LARGE = 400, 700
# Calls per node at the large size over those at the small one. A part that grows with the square of
# the nodes is found where it is a quarter of the calls at 1,000 nodes.
MAX_GROWTH = 1.1
# The shape with the most members of a kernel, where the cores decide how many: most of
# them on 64.
FAN = [pytest.param("fan", n, marks=pytest.mark.slow) for n in (1, 4)]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


scaling = script()


class Counted(scaling.Stages):  # type: ignore[name-defined]
    """The stages, with the number of function calls that they make."""

    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        profile = cProfile.Profile()
        try:
            return profile.runcall(super().__call__, *args, **kwargs)
        finally:
            self.calls += sum(entry.callcount for entry in profile.getstats())


def compiled(make: Callable[[int], Any], nodes: int, stages: Any) -> Any:
    torch._dynamo.reset()
    f, args = make(nodes)

    def backend(gm: Any, inputs: Any) -> Any:
        return deuteron_backend(gm, inputs, runner=stages)

    out = torch.compile(f, backend=backend, fullgraph=True)(*args)
    if isinstance(out, torch.Tensor) and out.requires_grad:
        out.backward()
    return stages


@pytest.fixture
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many the machine seems to have: what a kernel may hold depends on it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(request.param)))
    device._detect.cache_clear()
    yield request.param
    device._detect.cache_clear()


@pytest.mark.parametrize(
    ("shape", "cores"),
    [*((s, 4) for s in ("chain", "gathered", "norms", "lstm", "mlp")), ("fan", 64), *FAN],
    indirect=["cores"],
)
def test_calls_are_proportional_to_nodes(shape: str, cores: int) -> None:
    assert device.device_spec("cpu").cores == cores
    make = scaling.SHAPES[shape]
    compiled(make, SMALL // 2, scaling.Stages(False))  # what is computed once in a process
    small, large = (compiled(make, n, Counted(False)) for n in (SMALL, LARGE))
    assert large.nodes > 1.5 * small.nodes
    ratio = (large.calls / large.nodes) / (small.calls / small.nodes)
    print(f"{shape}, {cores} cores: {small.calls / small.nodes:.0f} calls, then {ratio:.2f} times")
    assert ratio <= MAX_GROWTH
    if shape == "chain":  # a deep graph has bounded kernels: 13 units of code for each sin(x) + 0.5
        assert large.kernels >= LARGE // 2 * 13 // 1024
