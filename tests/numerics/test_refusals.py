"""What eager refuses for its operands' dtypes, a compiled program refuses in eager's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

f32, f64, bf16, i64 = torch.float32, torch.float64, torch.bfloat16, torch.int64
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "mm": (torch.mm, (3, 5), (5, 2)),
    "matmul": (torch.matmul, (2, 3, 5), (5, 2)),
    "mv": (torch.mv, (3, 5), (5,)),
    "linear": (F.linear, (2, 3, 5), (4, 5)),
    "bias": (lambda x, b: F.linear(x, x, b), (3, 5), (3,)),
    "sums and products": (lambda x, y: torch.addmm(x, x, y), (4, 4), (4, 4)),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ik", x, y), (3, 5), (5, 2)),
    "convolution": (F.conv2d, (1, 4, 7, 7), (6, 4, 3, 3)),
    "grouped": (lambda x, w: F.conv1d(x, w, stride=2, padding=3, groups=2), (2, 4, 9), (6, 2, 3)),
    "layer norm": (lambda x, w: F.layer_norm(x, (5,), w, w), (3, 5), (5,)),
    "group norm": (lambda x, w: F.group_norm(x, 2, w, w), (3, 6, 4), (6,)),
    "index_add": (lambda x, y: x.index_add(1, torch.tensor([0, 2]), y), (2, 5), (2, 2)),
    "index_put": (lambda x, y: x.index_put((torch.tensor([1, 0]),), y), (5,), (2,)),
    "add_": (lambda x, y: x.clone().add_(y), (5,), (5,)),
    "mul_": (lambda x, y: x.clone().mul_(y), (5,), (5,)),
    "a number": (lambda x, y: x.clone().mul_(y).mul_(2.5), (5,), (5,)),
    "cross": (torch.linalg.cross, (4, 3), (4, 3)),
    "cross entropy": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y), (5,), (5,)),
    "a number less truths": (lambda x, y: x - y.bool(), (5,), (5,)),
    "truths less a number": (lambda x, y: (x > y) - 1, (5,), (5,)),
    "a number less than truths": (lambda x, y: 1 - (x > y), (5,), (5,)),
    "truths less a truth": (lambda x, y: (x > y) - True, (5,), (5,)),
    "truths reversed": (lambda x, y: torch.rsub(x > y, 2.5), (5,), (5,)),
    "a difference of truths": (lambda x, y: x.bool() - y.bool(), (5,), (5,)),
}


@pytest.mark.parametrize("dtypes", [(f32, f64), (f32, bf16), (bf16, f32), (i64, f32), (i64, i64)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_dtypes(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    f, left, right = PROGRAMS[name]
    x, y = torch.ones(left).to(dtypes[0]), torch.ones(right).to(dtypes[1])
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="deuteron")
    try:
        usual = f(x, y)
    except RuntimeError as e:
        said = str(e)
    else:
        assert torch.equal(compiled(x, y), usual)
        return
    with pytest.raises(RuntimeError) as raised:
        compiled(x, y)
    if "fake tensor" not in str(raised.value):  # which has words of its own
        assert said.splitlines()[0] in str(raised.value)


def test_sizes() -> None:
    of_mm = torch.mm, (4, 3), (4, 4)
    for f, x, y in (of_mm, (F.linear, (2, 3), (4, 4)), (Tensor.add, (3,), (4,))):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError):
            torch.compile(f, backend="deuteron")(torch.ones(x), torch.ones(y))


@pytest.mark.parametrize("name", ["max", "min"])
def test_extremes_of_nothing(name: str) -> None:
    """Torch's fake kernels let them pass."""
    programs = (
        lambda x: getattr(x[:, :0], name)(),
        lambda x: getattr(x[:, :0], name)(1).values,
    )
    for f in programs:
        torch._dynamo.reset()
        for g in (f, torch.compile(f, backend="deuteron")):
            with pytest.raises((RuntimeError, IndexError)):
                g(torch.randn(3, 2))
    g = torch.compile(lambda x: getattr(x[:0], name)(1).values, backend="deuteron")
    assert g(torch.randn(3, 2)).shape == (0,)


def test_one_times_an_infinite_complex_number() -> None:
    """It is no identity: infinity times the imaginary zero of that 1 is NaN."""
    x = torch.tensor([float("inf"), 0.0, -1.5])
    for f in (lambda z: z * 1, lambda z: z / 1 + 0):
        torch._dynamo.reset()
        z = torch.complex(x, -x)
        got, want = torch.compile(f, backend="deuteron")(z), f(z)
        assert torch.equal(torch.view_as_real(got).isnan(), torch.view_as_real(want).isnan())


@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize("loss", [F.smooth_l1_loss, F.huber_loss, F.mse_loss, F.l1_loss])
def test_gradients_of_nan(loss: Callable[..., Any], dtype: torch.dtype) -> None:
    """What has no value does not train as if it were right."""
    torch._dynamo.reset()
    gradients = []
    for f in (loss, torch.compile(loss, backend="deuteron")):
        x = torch.tensor([float("nan"), float("inf"), 2, -0.25] * 5).to(dtype).requires_grad_()
        f(x, torch.tensor([1, float("inf"), 0, 0] * 5).to(dtype), reduction="sum").backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0], equal_nan=True)
