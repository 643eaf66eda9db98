"""Which library calls write their result into memory of ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deuteron.base.passes import Context
from deuteron.ir.program import Extern
from deuteron.lower.passes import lower
from deuteron.memory.out_variants import out_variant
from deuteron.runtime import support
from tests.lower.harness import trace

R = torch.randn
CUDNN = torch._C._ConvBackend.Cudnn
W = R(8, 4, 3, 3)


def call(f: Any, *args: Any, dynamic: bool = False) -> Extern:
    """The only library call of a function, on a GPU."""
    program = lower(trace(f, args, dynamic), Context())
    (d,) = [d for d in program.defs if isinstance(d, Extern)]
    layouts = tuple(replace(lay, device="cuda") for lay in d.layouts if lay is not None)
    return replace(d, layouts=layouts)


def convolve(x: Any, w: Any, bias: Any = None, transposed: bool = False) -> Any:
    """aten.convolution's arguments, written out."""
    n = x.dim() - 2
    rest = ([1] * n, [1] * n, [1] * n, transposed, [0] * n, 1)
    return torch.ops.aten.convolution.default(x, w, bias, *rest)


def plain(x: Any, w: Any) -> Any:
    return convolve(x, w)


def variant(d: Extern, backend: Any = CUDNN) -> tuple[str | None, list[Any]]:
    """What is called instead where eager would choose a backend, and for what that was asked."""
    asked: list[Any] = []

    def select(*args: Any) -> Any:
        asked.append(args)
        return backend

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C, "_select_conv_backend", select)
        return out_variant(d), asked


def test_convolutions_that_are_one_call_of_cudnn() -> None:
    d = call(plain, R(2, 4, 6, 6), W)
    function, ((x, w, *rest),) = variant(d)
    assert function == "convolve" and w.shape == W.shape
    assert (x.shape, x.stride(), x.device.type) == ((2, 4, 6, 6), (144, 36, 6, 1), "cuda")
    assert rest == [None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, None]
    assert variant(d, torch._C._ConvBackend.CudaDepthwise2d)[0] is None
    assert variant(call(plain, R(2, 4, 6, 6, 6), R(8, 4, 3, 3, 3)))[0] == "convolve"


def test_other_convolutions() -> None:
    d = call(plain, R(2, 4, 6, 6), W)
    same = replace(d, layouts=tuple(replace(lay, device="cpu") for lay in d.layouts if lay))
    assert variant(same)[0] is None
    x, transposed = R(2, 8, 6, 6), lambda x, w: convolve(x, w, None, True)  # noqa: E731
    assert variant(call(transposed, x, W))[0] is None
    biased = lambda x, w, b: convolve(x, w, b)  # noqa: E731
    assert variant(call(biased, R(2, 4, 6, 6), W, R(8)))[0] is None
    assert variant(call(plain, R(2, 4, 6), R(8, 4, 3)))[0] is None
    assert variant(call(plain, R(2, 4, 6, 6), W, dynamic=True))[0] is None


def test_products() -> None:
    assert out_variant(call(torch.mm, R(600, 700), R(700, 800))) == "torch.mm"
    assert out_variant(call(torch.sort, R(3))) is None


def test_joined_tensors() -> None:
    many = [R(3, 4) for _ in range(20)]
    assert out_variant(call(lambda *xs: torch.cat(xs, 1), *many)) == "torch.cat"
    last = [R(2, 4, 3, 3).to(memory_format=torch.channels_last) for _ in range(20)]
    assert out_variant(call(lambda *xs: torch.cat(xs, 1), *last)) is None


def test_lists_of_one_stand_for_all_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's own operator takes no such list."""
    seen: list[Any] = []
    monkeypatch.setattr(torch._C, "_get_cudnn_enabled", lambda: True)
    monkeypatch.setattr(
        torch.ops.aten.cudnn_convolution, "out", lambda *args, out: seen.append(args[2:5])
    )
    x, w = torch.randn(1, 2, 4, 4, 4), torch.randn(3, 2, 1, 1, 1)
    support.convolve(x, w, None, [2], [0], [1], False, [0], 1, out=torch.empty(1, 3, 2, 2, 2))
    assert seen == [([0] * 3, [2] * 3, [1] * 3)]
