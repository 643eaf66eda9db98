"""Emitted modules and single kernels run by themselves, without the program they come from.

``python module.py`` calls `main`: inputs of the traced sizes, the kernels built as ever, one call
timed. ``python -m deuteron.runtime.standalone FOLDER`` runs a kernel that the self-check found
wrong, on the inputs that it had, and compares again.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from deuteron.base.options import Options
from deuteron.codegen.cpp.kernels import KERNEL_CXX_FLAGS
from deuteron.runtime import build_cpp
from deuteron.runtime.launch import bind

TIMING_SECONDS = 1.0  # of timing
Example = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, str]


def example(about: Example) -> Tensor:
    """A tensor: floating elements are random, whole numbers 0, which are good as indices."""
    shape, strides, dtype, device = about
    out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if 0 in strides and out.numel() > 1:  # elements that share memory
        flat = torch.zeros(1 + sum((n - 1) * s for n, s in zip(shape, strides)), dtype=dtype)
        return flat.to(device).as_strided(shape, strides)
    return out.normal_() if dtype.is_floating_point or dtype.is_complex else out.zero_()


def main(
    module: dict[str, Any],
    inputs: Sequence[Example | int | None],
    constants: dict[str, Example],
    missing: Sequence[str],
    launch_groups: Sequence[str],
    sequences: Sequence[tuple[Any, ...]],
    products: Mapping[str, tuple[Any, str]] = MappingProxyType({}),
) -> None:
    """Times the module's ``call``."""
    if missing:
        sys.exit(
            f"this program needs {', '.join(missing)}, which have no text: it cannot run alone"
        )
    options = Options.make()
    if "CPP" in module:
        bind(module, launch_groups, build_cpp.build(module["CPP"], KERNEL_CXX_FLAGS, options))
    for name, device, operands, sizes, kernels in sequences:
        from deuteron.runtime.launch_cuda import Launcher

        module[name] = Launcher(kernels, operands, sizes, device, options)
    for name, (product, device) in products.items():
        from deuteron.runtime.launch_blas import multiply

        module[name] = multiply(product, device, options)
    module.update({n: example(x) for n, x in constants.items()})
    args = [example(x) if isinstance(x, tuple) else x for x in inputs]
    times = time_calls(module["call"], args)
    print(
        f"{len(times)} calls, median {median(times) * 1e6:.1f} us, best {min(times) * 1e6:.1f} us"
    )


def time_calls(call: Any, args: list[Any]) -> list[float]:
    """Seconds of calls, after a few that are not counted."""
    gpu = any(isinstance(a, Tensor) and a.is_cuda for a in args)
    times: list[float] = []
    end = perf_counter() + TIMING_SECONDS
    while len(times) < 8 or perf_counter() < end:
        start = perf_counter()
        call(list(args))
        if gpu:
            torch.cuda.synchronize()
        times.append(perf_counter() - start)
    return times[3:]


def rerun(folder: Path) -> int:
    """Runs the kernel of a folder that the self-check left; 1 if it is wrong."""
    about = json.loads((folder / "about.json").read_text())
    tensors = torch.load(folder / "tensors.pt", weights_only=True)
    given, want = tensors["given"], tensors["want"]
    if "triton" in about:
        launch_triton(about, (folder / "kernel.py").read_text(encoding="utf-8"), given)
    else:
        unit = (folder / "kernel.cpp").read_text(encoding="utf-8")
        lib = build_cpp.build(unit, KERNEL_CXX_FLAGS, Options.make())
        addresses = [given[n].data_ptr() for n in about["args"]]
        sizes = [about["sizes"][s] for s in about["symbols"]]
        torch.get_num_threads()
        getattr(lib, f"cpp_{about['name']}")(
            (ctypes.c_void_p * max(1, len(addresses)))(*addresses),
            (ctypes.c_longlong * max(1, len(sizes)))(*sizes),
        )
    wrong = 0
    for name, w in want.items():
        got = given[name].to(torch.float64)
        worst = float((got - w.to(torch.float64)).abs().nan_to_num(torch.inf).max())
        same = torch.equal(given[name], w)
        print(f"{name}: {'equal' if same else f'differs by up to {worst:g}'}")
        wrong |= not torch.allclose(got, w.to(torch.float64), rtol=1e-4, atol=1e-6, equal_nan=True)
    return int(wrong)


def launch_triton(about: dict[str, Any], source: str, given: dict[str, Tensor]) -> None:
    from deuteron.codegen.assemble import triton_kernel
    from deuteron.runtime.launch_cuda import Launcher

    kernel = triton_kernel(about["triton"], source)
    names = [what for kind, what in kernel.args if kind == "tensor"]
    symbols = list(dict.fromkeys(about["sizes"]))
    operands = [tuple(range(len(names)))]
    launch = Launcher([kernel], operands, symbols, about["device"], Options.make())
    addresses = [given[str(n)].data_ptr() for n in names]
    now = torch.cuda.current_stream(about["device"]).cuda_stream
    array = (ctypes.c_void_p * max(1, len(addresses)))(*addresses)
    launch(now, array, tuple(about["sizes"][s] for s in symbols))
    torch.cuda.synchronize()


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python -m deuteron.runtime.standalone FOLDER")
    sys.exit(rerun(Path(sys.argv[1])))
