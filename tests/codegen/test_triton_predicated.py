"""What comparisons of positions do not choose is not read, and what is comes 16 bytes at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from deuteron.base.options import Options
from deuteron.codegen.triton.generate import TritonKernel, generate
from deuteron.runtime.build_triton import build
from tests.codegen.cubins import loads
from tests.schedule.tools import scheduled, spec_of

X = torch.empty(64, 1024, 1024, dtype=torch.bfloat16)


def causal(x: Tensor) -> Tensor:
    keep = torch.ones(x.shape[-2:], dtype=torch.bool).tril()
    return x.masked_fill(~keep, float("-inf")).softmax(-1)


def kernel(f: Callable[..., Any], *args: Tensor) -> TritonKernel:
    (scheduled_kernel,) = scheduled(f, *args, device="H200", check=False).kernels
    return generate(scheduled_kernel, spec_of("H200"))


def masked(k: TritonKernel) -> list[bool]:
    return [", other=" in line for line in k.source.splitlines() if "tl.load(" in line]


@pytest.mark.parametrize(
    "f", [causal, lambda x: x.triu(5).sum(-1), lambda x: x.float().tril(-3).softmax(-1)]
)
def test_half_is_not_read(f: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    k = kernel(f, X)
    assert masked(k) == [True]
    options = Options.make(options={"cache_dir": str(tmp_path)})
    instructions = loads(build(k, k.configs[0], 90, options).code, tmp_path)
    assert {n.replace(".EL", "") for n in instructions} == {
        "LDG.E.128"
    }  # EL: it stays in the cache


def test_what_is_used_elsewhere_is_read() -> None:
    assert masked(kernel(lambda x: x.tril().amax(-1, keepdim=True) + x, X)) == [False]
    assert masked(kernel(lambda x: (x.tril().amax(-1), x.sum(-1)), X)) == [False]
    assert masked(kernel(lambda x: torch.where(x > 0, x, 0.0).sum(-1), X)) == [False]


def test_vectors_that_begin_elsewhere_are_read() -> None:
    k = kernel(lambda x: x[:, :, 1:].tril().sum(-1), X)
    assert "// 8" not in k.source
