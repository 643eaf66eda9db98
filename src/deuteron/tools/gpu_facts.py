"""What a built GPU kernel uses of the device: registers, spills, shared memory, waves.

In: a Triton kernel and its loaded variants. Out: plain values, empty where nothing was loaded. The
driver says it of the loaded function; `tensor_cores`: whether its source multiplies tiles.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from deuteron.codegen.triton.generate import TritonKernel
from deuteron.runtime.launch_cuda import KernelVariants, LoadedKernel

# CUfunction_attribute: bytes of local memory of a thread (registers that were spilled, arrays), and
# registers of a thread.
LOCAL_BYTES, REGISTERS = 3, 4


def gpu_facts(
    kernel: TritonKernel, variants: KernelVariants | None, sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Of the variant that was loaded first: the configuration that runs."""
    if variants is None or not variants.loaded:
        return {}
    (config, _, _), loaded = next(iter(variants.loaded.items()))
    driver = ctypes.CDLL("libcuda.so.1")
    function = ctypes.c_void_p(loaded.function)
    programs = kernel.grid(kernel.configs[config], sizes)
    at_once = resident(driver, function, loaded)
    cores = torch.cuda.get_device_properties(variants.device).multi_processor_count
    return {
        "config": config,
        "registers": attribute(driver, function, REGISTERS),
        "spilled_bytes": attribute(driver, function, LOCAL_BYTES),
        "shared_bytes": loaded.shared,
        "threads": loaded.block,
        "programs": programs,
        "programs_per_core": at_once,
        "waves": round(programs / max(1, at_once * cores), 2),
        "tensor_cores": "tl.dot" in kernel.source,
    }


def attribute(driver: ctypes.CDLL, function: ctypes.c_void_p, which: int) -> int:
    """0 where the driver says none."""
    value = ctypes.c_int(0)
    driver.cuFuncGetAttribute(ctypes.byref(value), which, function)
    return value.value


def resident(driver: ctypes.CDLL, function: ctypes.c_void_p, loaded: LoadedKernel) -> int:
    """Programs that a multiprocessor runs at once."""
    count = ctypes.c_int(0)
    driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(count), function, loaded.block, ctypes.c_size_t(loaded.shared)
    )
    return count.value


__all__ = ["gpu_facts"]
