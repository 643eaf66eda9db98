"""What library calls return is compared with what the program was compiled for.

Operators whose fake kernels are untrue in each way there is, and quantized tensors, of which
torch's own fake kernels say that they are plain: right, or refused by an error that names the
operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch.utils._pytree import tree_leaves

import deuteron  # noqa: F401
from deuteron.base.errors import UntrueFakeKernel

LIBRARY = torch.library.Library("untrue", "FRAGMENT")


@pytest.fixture(autouse=True)
def aliasing_only_warned_of() -> Iterator[None]:
    """torch itself refuses a custom operator that returns its argument where `CI` is set.

    Outside of a CI run it warns and goes on, which is what users have and what is tested here.
    """
    config = torch._functorch.config
    if not hasattr(config, "error_on_custom_op_aliasing"):
        yield
        return
    with config.patch(error_on_custom_op_aliasing=False):
        yield


def operator(name: str, real: Callable[..., Any], fake: Callable[..., Any], out: str) -> None:
    LIBRARY.define(f"{name}(Tensor x) -> {out}")
    LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"untrue::{name}", fake, lib=LIBRARY)


def like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


# name: (what it does, what its fake kernel says, whether that is an error)
WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any], bool]] = {
    "shorter": (lambda x: x[:3].clone(), like, True),
    "longer": (lambda x: torch.cat([x, x]), like, True),
    "another_rank": (lambda x: x.clone()[None], like, True),
    "another_dtype": (lambda x: x.double(), like, True),
    "a_narrower_dtype": (lambda x: x.half(), like, True),
    "another_device": (lambda x: x.to("meta"), like, True),
    "sparse": (lambda x: x.to_sparse(), like, True),
    "packed": (lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.qint8), like, True),
    "other_strides": (lambda x: (x + 1).t().contiguous().t(), like, False),
    "strides_with_holes": (lambda x: torch.cat([x, x], 1)[:, ::2], like, False),
    "expanded": (lambda x: x.new_ones(()).expand(x.shape), like, False),
    "behind_an_offset": (lambda x: torch.cat([x, x])[x.shape[0] :], like, False),
    "negated": (lambda x: torch._neg_view(x + 0), like, False),
    "argument_itself": (lambda x: x, like, False),
    "view_of_argument": (lambda x: x.t().t(), like, False),
    "fresh_after_all": (lambda x: x + 1, lambda x: x, False),
}  # fmt: skip
for way, (does, says, _) in WAYS.items():
    operator(way, does, says, "Tensor")
operator("fewer", lambda x: [x.clone()], lambda x: [like(x), like(x)], "Tensor[]")
operator("more", lambda x: [x.clone()] * 3, lambda x: [like(x), like(x)], "Tensor[]")
operator("second", lambda x: (x + 1, x[:2] + 2), lambda x: (like(x), like(x)), "(Tensor, Tensor)")


def in_kernel(name: str) -> Callable[..., Any]:
    return lambda x: [y * 2 + 1 for y in tree_leaves(getattr(torch.ops.untrue, name)(x.sin()))]


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("name", WAYS)
def test_untrue_fake(name: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    f, x = in_kernel(name), torch.randn(5, 5)
    compiled = torch.compile(f, backend="deuteron", dynamic=dynamic)
    if not WAYS[name][2]:
        for a, b in zip(f(x), compiled(x), strict=True):
            torch.testing.assert_close(b, a)
        return
    with pytest.raises(UntrueFakeKernel, match=f"untrue.{name}") as raised:
        compiled(x)
    assert "traced as sizes (5, 5), strides (5, 1), torch.float32 on cpu" in raised.value.message
    assert "test_results.py" in raised.value.where and "register_fake" in raised.value.hint


@pytest.mark.parametrize("name", ("fewer", "more", "second"))
def test_untrue_number_of_results(name: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(UntrueFakeKernel, match=f"untrue.{name}"):
        torch.compile(in_kernel(name), backend="deuteron")(torch.randn(5, 5))


def test_returned_untouched() -> None:
    """What goes to the caller is compared, too: Dynamo has compiled the caller for it."""
    torch._dynamo.reset()
    with pytest.raises(UntrueFakeKernel, match=r"untrue\.shorter"):
        torch.compile(lambda x: torch.ops.untrue.shorter(x), backend="deuteron")(torch.randn(7, 2))


def q(x: torch.Tensor, dtype: torch.dtype = torch.quint8) -> torch.Tensor:
    return torch.quantize_per_tensor(x, 0.5, 3, dtype)


def per_channel(x: torch.Tensor) -> torch.Tensor:
    scales, points = torch.linspace(0.1, 0.6, 6), torch.arange(6)
    return torch.quantize_per_channel(x, scales, points, 1, torch.qint8)


QUANTIZED: dict[str, Callable[[torch.Tensor], Any]] = {
    "returned": lambda x: q(x),
    "views": lambda x: (q(x).view(-1).dequantize(), q(x).t().dequantize() + 1, q(x)[1:].int_repr()),
    "of views": lambda x: q(x.t()).dequantize() * 2,
    "relu, clamp": lambda x: (q(x).relu().dequantize(), q(x).clamp(0, 1).dequantize()),
    "joined": lambda x: torch.cat([q(x), q(x + 1)]).dequantize().sum(0),
    "ordered": lambda x: (q(x).sort().values.dequantize(), q(x).topk(2).indices + 1, q(x).max()),
    "compared": lambda x: (q(x) == q(x + 0.1)) | (x > 0),
    "moved": lambda x: q(x).t().contiguous().clone().dequantize().exp(),
    "indexed": lambda x: q(x)[torch.tensor([0, 2])].dequantize() - 1,
    "numbers": lambda x: q(x).int_repr() + q(x, torch.qint8).int_repr().sum() + q(x).q_zero_point(),
    "channels": lambda x: per_channel(x).dequantize() + per_channel(x).int_repr(),
    "added": lambda x: torch.ops.quantized.add(q(x), q(x + 1), 0.7, 1).dequantize() - 1,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized(name: str) -> None:
    torch._dynamo.reset()
    f = QUANTIZED[name]
    torch.manual_seed(0)
    x = torch.randn(4, 6) * 3
    got = torch.compile(f, backend="deuteron")(x)
    for a, b in zip(tree_leaves(f(x)), tree_leaves(got), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
