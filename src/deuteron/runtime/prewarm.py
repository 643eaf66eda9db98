"""What can start before there is anything to build.

In: a graph that was captured, and its inputs. Out: processes that build Triton kernels, started and
with their imports done while AOTAutograd traces and Deuteron schedules (the first kernel then
compiles at once), and the function that launches kernels. A graph that this cache has seen before
needs none: all is there. The first process starts before there is a graph (`begin`): one kernel
takes no longer to capture and schedule than a process to start.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from deuteron.base import package
from deuteron.base.errors import CacheError, DeuteronError
from deuteron.base.options import Options
from deuteron.runtime import build_triton, launch_cuda
from deuteron.runtime.cache import Cache, key_of

# Processes that are started for a graph: one, and one more for so many operations.
NODES_PER_PROCESS = 16
MAX_PROCESSES = 16
# What a process sets up is the same for every GPU; asking which there is would set up CUDA.
ANY_CAPABILITY = 90
_SUFFIX = ".seen"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def start_process() -> None:
    """Starts one process where a program that has a GPU becomes a user of this compiler."""
    if torch.version.cuda is None or not torch.cuda.device_count():
        return
    with contextlib.suppress(DeuteronError):  # who compiles says what is wrong
        build_triton.prepare(ANY_CAPABILITY, 1, Options.make())


def prepare(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Callable[[], None]:
    """Starts what the graph will need. The result is to be called when the graph has been
    compiled."""
    device = next(
        (x.device for x in inputs if isinstance(x, torch.Tensor) and x.device.type == "cuda"), None
    )
    if device is None or not torch.cuda.is_available():
        return _nothing
    cache, key = Cache.open(options), _key(gm, inputs, options)
    if cache.get(key, _SUFFIX) is not None:
        return _nothing
    major, minor = torch.cuda.get_device_capability(device)
    count = min(MAX_PROCESSES, 1 + len(gm.graph.nodes) // NODES_PER_PROCESS)
    with contextlib.suppress(DeuteronError):  # who builds says what is missing
        build_triton.prepare(10 * major + minor, count, options)
        launch_cuda.prepare(options)

    def done() -> None:
        with contextlib.suppress(CacheError):  # who puts kernels there says so
            cache.put(key, _SUFFIX, b"")

    return done


def _nothing() -> None:
    pass


def _key(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> str:
    """What a graph is called in the cache. Two graphs with one name would only start late."""
    return key_of(package.VERSION, options.codegen_key(), _text(gm, inputs))


def _text(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """A graph as text that is the same in every process: functions without their addresses."""
    nodes = (_ADDRESS.sub("", f"{n.name} {n.op} {n.target}") for n in gm.graph.nodes)
    kinds = (f"{x.dtype}{list(x.shape)}" for x in inputs if isinstance(x, torch.Tensor))
    return "\n".join((*nodes, *kinds))


__all__ = ["start_process", "prepare"]
