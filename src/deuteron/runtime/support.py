"""What emitted modules call: memory, views, addresses.

Everything here is on the path of every call, so each function does one thing and checks nothing.
What torch keeps for its own compilers (allocation and views without the dispatcher) is used where
this torch has it: 0.4 us instead of 1.0 for an allocation, 0.5 instead of 0.9 for a view.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves as leaves

from deuteron.base.errors import DeuteronError, FailedAssertion
from deuteron.memory.plan import assign_offsets
from deuteron.runtime.host_memory import POOL
from deuteron.runtime.results import checked_result, exact_count

# Layouts of the workspace that are kept, by sizes; who sees more shapes than this computes again.
MAX_LAYOUTS = 4096
_FAST = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


@cache
def address_array(n: int) -> Callable[..., bytes]:
    """Makes an array of n addresses: 0.1 us for nine, where a ctypes array takes 0.9."""
    return struct.Struct(f"{n}P").pack


@cache
def size_array(n: int) -> Any:
    """The ctypes array type of n sizes."""
    return ctypes.c_longlong * n


def empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _empty_cpu(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


def _empty_cuda(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


def _view(t: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    return torch.as_strided(t, shape, strides, t.storage_offset() + offset)


# Allocate on the CPU, where the pool has nothing to gain, and on the current GPU.
empty_cpu: Callable[..., Tensor] = POOL.empty_strided
empty_small: Callable[..., Tensor] = getattr(_FAST, "_empty_strided_cpu", _empty_cpu)
empty_cuda: Callable[..., Tensor] = getattr(_FAST, "_empty_strided_cuda", _empty_cuda)
# A strided view (tensor, shape, strides, offset); the offset is in elements from its first one.
view: Callable[..., Tensor] = getattr(_FAST, "_reinterpret_tensor", _view)


def as_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The same memory as elements of another type."""
    return t.view(dtype)


def with_strides(t: Tensor | None, strides: Sequence[int]) -> Tensor | None:
    """What hooks made of a saved tensor, with the strides that the rest of the program was compiled
    for."""
    if t is None or t.stride() == strides:
        return t
    if all(a == b or n <= 1 for a, b, n in zip(t.stride(), strides, t.shape)) or not t.numel():
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def convolve(x: Tensor, w: Tensor, bias: None, *settings: Any, out: Tensor) -> None:
    """`aten.convolution`, with its arguments, where that is one call of cuDNN's
    (`memory.out_variants`): with what ``torch.backends.cudnn`` says at this moment, into given
    memory."""
    if not torch._C._get_cudnn_enabled():
        out.copy_(torch.ops.aten.convolution.default(x, w, bias, *settings))
        return
    stride, padding, dilation, _, _, groups = settings
    rank = x.dim() - 2  # a list of one element stands for all dimensions; cuDNN's own takes no such
    stride, padding, dilation = (
        list(s) * rank if len(s) == 1 else s for s in (stride, padding, dilation)
    )
    benchmark = torch._C._get_cudnn_benchmark()
    exact = torch._C._get_cudnn_deterministic() or torch._C._get_deterministic_algorithms()
    tf32 = x.dtype != torch.float32 or torch.backends.cudnn.conv.fp32_precision == "tf32"
    torch.ops.aten.cudnn_convolution.out(
        x, w, padding, stride, dilation, groups, benchmark, exact, tf32, out=out
    )


def fail_assertion(message: str, where: str, **seen: Any) -> None:
    """Something that the program asserts of numbers does not hold; these were seen."""
    values = ", ".join(f"{name} = {value}" for name, value in seen.items())
    raise FailedAssertion(message, hint=f"in this call {values}", where=where)


def cache_layout(table: dict[Any, Any], sizes: Any, layout: Callable[..., Any]) -> Any:
    """The layout for new sizes."""
    if len(table) >= MAX_LAYOUTS:
        table.clear()
    offsets = table[sizes] = layout(*sizes)
    return offsets


def _no_cuda(*args: Any) -> int:
    raise DeuteronError("this program is for a GPU, and torch has no CUDA here")


# The current CUDA stream of a device, by its number.
stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)
# Makes a device the current one and returns which one was; sets it back.
enter_device: Callable[[int], int] = getattr(torch._C, "_cuda_exchangeDevice", _no_cuda)
leave_device: Callable[[int], int] = getattr(torch._C, "_cuda_maybeExchangeDevice", enter_device)

# Gives a thread that never ran a parallel loop torch's number of OpenMP threads; 0.02 us.
threads: Callable[[], int] = torch.get_num_threads


def _keeps_graph() -> bool:
    return True


# Whether the backward that is running may be followed by another (``retain_graph=True``), or none
# is running. If not, tensors that were saved for it alone may be overwritten.
keeps_graph: Callable[[], bool] = getattr(
    getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", _keeps_graph
)


# Not empty once a forward ran under hooks on saved tensors: what a backward gets may then have
# other strides than what was saved (`torch.autograd.graph.save_on_cpu` gives contiguous ones), and
# be memory of the hooks'.
HOOKS_SEEN: list[bool] = []


def _no_hooks(ignoring_tracing: bool) -> None:
    return None


_top_hooks: Callable[[bool], Any] = getattr(
    getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", _no_hooks
)


def look_for_hooks() -> None:
    """Called by forwards whose results autograd saves; 0.2 us."""
    if _top_hooks(False) is not None and not HOOKS_SEEN:
        HOOKS_SEEN.append(True)


class IndexOutOfRange(DeuteronError, IndexError):
    """An index that the program loaded from a tensor is outside the tensor that it indexes."""


class DivisionByZero(DeuteronError):
    """A whole number is divided by 0 on the CPU, where eager raises a RuntimeError."""


class AccessError(DeuteronError):
    """A generated kernel loads or stores outside of a tensor (found by ``check_accesses``)."""


__all__ = [
    "HOOKS_SEEN",
    "AccessError",
    "DivisionByZero",
    "IndexOutOfRange",
    "address_array",
    "as_dtype",
    "assign_offsets",
    "cache_layout",
    "checked_result",
    "empty",
    "empty_cpu",
    "empty_cuda",
    "empty_small",
    "enter_device",
    "exact_count",
    "fail_assertion",
    "keeps_graph",
    "leave_device",
    "leaves",
    "look_for_hooks",
    "size_array",
    "stream",
    "threads",
    "view",
    "with_strides",
]
