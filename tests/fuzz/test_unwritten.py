"""Where eager computes from memory that nobody wrote, no result is right: the fault is torch's, and
in that tensor only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dev.check.oracle import Oracle, see
from dev.check.test_cases import How, check, of_no_memory


def oracle(fn: Callable[..., Any], inputs: list[Tensor], backward: bool = False) -> Oracle:
    def run(xs: list[Tensor]) -> Any:
        return see(lambda ys: fn(*ys), xs, backward)

    return Oracle(run, run, inputs)


def test_memory_that_nobody_wrote_is_seen() -> None:
    def partly(x: Tensor) -> tuple[Tensor, ...]:
        y = x.new_empty(x.shape)
        y[0] = x[0]
        return y, x * 2, y[0] + 1

    x = torch.randn(37, 50)
    clean = [torch.ones_like(x) for _ in range(20)]  # what the run below gets without stains
    del clean
    assert of_no_memory([oracle(partly, [x])], 2) == {
        "out0: elements",
        "call 2, out0: elements",
    }


def test_what_is_written_shows_no_stains() -> None:
    def whole(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return F.conv2d(x, w, padding=1).softmax(1), x.sort(-1)[0].cumsum(-1), x.new_zeros(3)

    given = [torch.randn(2, 3, 9, 7, requires_grad=True), torch.randn(4, 3, 3, 3)]
    assert not of_no_memory([oracle(whole, given, True)], 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_kernels_that_are_larger_than_the_image(dtype: torch.dtype) -> None:
    """oneDNN's gradient of such weights in bfloat16 has elements that nobody wrote (seed 73019379
    of networks): a compiled program that differs there is not wrong, and is wrong elsewhere."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.conv3d(x, w, None, 2, 2)

    def twice(gm: Any, inputs: Any) -> Any:
        """A backend with a bug."""
        return lambda *xs: [2 * y for y in gm(*xs)]

    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 32, 4, 4, 4, generator=g).to(dtype).requires_grad_()
    w = (torch.randn(16, 32, 5, 5, 5, generator=g) / 63).to(dtype).requires_grad_()
    failure = check(fn, fn, [[x, w]], How(backward=True, backend=twice))
    assert failure is not None and failure.kind == "wrong"
    assert "out0" in failure.text and "grad of in0" in failure.text
    if dtype == torch.float32:
        assert "grad of in1" in failure.text
    elif of_no_memory([oracle(fn, [x, w], True)], 3):  # not every processor has this kernel
        assert "grad of in1" not in failure.text
