"""Library calls that write their result into memory of ours.

In: an `Extern`. Out: what is called instead, with ``out=``: a function of torch's, or `convolve` of
`runtime.support`. Such results are placed like those of kernels; where a CUDA graph returns them,
nothing is copied out of it (ResNet-50's step: 1.4 GB of convolutions that the backward needs).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from deuteron.ir.index import Index
from deuteron.ir.program import Extern, Layout, ViewArg, contiguous_strides
from deuteron.ir.reference_ops import TO_TORCH

_PRODUCTS = {
    f"aten.{n}.default": f"torch.{n}"
    for n in ("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv", "_addmm_activation")
}


def out_variant(d: Extern) -> str | None:
    """What writes the call's result into given memory, as emitted text; None where nothing does."""
    if d.op == "aten.convolution.default":
        return "convolve" if is_one_cudnn_call(d) else None
    if d.op == "aten.cat.default":
        return "torch.cat" if is_contiguous(d.layouts[0]) else None
    return _PRODUCTS.get(d.op)


def is_contiguous(lay: Layout | None) -> bool:
    if lay is None or lay.dtype == "quantized":
        return False
    return lay.strides == contiguous_strides(lay.shape)


def is_one_cudnn_call(d: Extern) -> bool:
    """Whether eager's convolution is one call of cuDNN's, on this machine: two or three dimensions
    of known sizes, not transposed, no bias."""
    x, w, bias, *settings = d.args
    transposed = settings[3]
    layout = d.layouts[0]
    if layout is None or not layout.device.startswith("cuda") or bias is not None or transposed:
        return False
    numbers = [known_int(v) for v in (*x.shape, *x.strides, *w.shape, *w.strides)]
    if len(x.shape) not in (4, 5) or None in numbers or 0 in numbers[: len(x.shape)]:
        return False
    with FakeTensorMode():
        fakes = [fake_tensor(v, layout.dtype, layout.device) for v in (x, w)]
        backend = torch._C._select_conv_backend(
            *fakes, None, *(known_numbers(s) for s in settings), None
        )
    return bool(backend == torch._C._ConvBackend.Cudnn)


def fake_tensor(v: ViewArg, dtype: str, device: str) -> torch.Tensor:
    shape, strides = ([known_int(n) for n in ns] for ns in (v.shape, v.strides))
    return torch.empty_strided(shape, strides, dtype=TO_TORCH[dtype], device=device)  # type: ignore[arg-type]


def known_numbers(x: Any) -> Any:
    return [known_int(n) for n in x] if isinstance(x, tuple) else known_int(x)


def known_int(n: Any) -> int | None:
    value = n.value if isinstance(n, Index) else n
    return value if isinstance(value, int) else None


__all__ = ["out_variant"]
