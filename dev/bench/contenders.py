"""The compilers that are compared, and eager: each turns a function into another one.

A contender whose mode captures CUDA graphs by itself cannot be captured once more; it is timed by
the wall clock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deuteron.base.record import Record
from deuteron.tools.measuring import distinct
from dev.bench.cases import Absent, Program


@dataclass(frozen=True)
class Contender:
    """`backend` "" is eager; `captures`: the mode makes CUDA graphs of its own."""

    name: str
    backend: str
    mode: str | None = None
    captures: bool = False


_ALL = (
    Contender("eager", ""),
    Contender("inductor", "inductor"),
    Contender("inductor-max", "inductor", "max-autotune-no-cudagraphs"),
    Contender("inductor-reduce", "inductor", "reduce-overhead", captures=True),
    Contender("deuteron", "deuteron"),
    Contender("deuteron-max", "deuteron", "max-autotune", captures=True),
    Contender("deuteron-reduce", "deuteron", "reduce-overhead", captures=True),
    Contender("handwritten", "handwritten"),
    Contender("handwritten-cuda", "handwritten"),
)
CONTENDERS = {c.name: c for c in _ALL}


def settings() -> None:
    """What holds for all: full fp32, and timings of Inductor's own choices are not kept on disk.

    Kernels are compiled beforehand by processes that share the device; what Inductor measured there
    would be noise, so that it measures again, alone, in the process that times.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    import torch._inductor.config as inductor

    if hasattr(inductor, "autotune_local_cache"):
        inductor.autotune_local_cache = False


def compiled(contender: Contender, program: Program, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` under a contender; raises `Absent` where there is no hand-written kernel."""
    if contender.backend == "handwritten":
        make = program.handwritten.get(contender.name)
        if make is None:
            raise Absent("no kernel was written by hand")
        return make()
    call = distinct(fn, contender.name.replace("-", "_"))
    if not contender.backend:
        return call
    backend: Any = contender.backend
    if backend == "deuteron":  # from a checkout too, where no entry point is installed
        from deuteron.backend import deuteron_backend as backend
    return torch.compile(call, backend=backend, mode=contender.mode, dynamic=False)


@contextlib.contextmanager
def records(contender: Contender) -> Iterator[list[Record]]:
    """Collects what Deuteron records of the graphs compiled inside; nothing of the others."""
    if contender.backend != "deuteron":
        yield []
        return
    from deuteron.backend import collecting

    with collecting() as collected:
        yield collected
