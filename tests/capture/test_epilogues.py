"""Activations that the library applies to a product (`graph/epilogues.py`), which happens on GPUs;
here where their devices are not asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from deuteron.backend import collecting
from deuteron.base.record import Record
from deuteron.codegen.products import ADDMM_ACTIVATION, product_of
from deuteron.graph import epilogues
from deuteron.graph.verify import verify_graph
from deuteron.ir.index import const
from deuteron.ir.program import Extern, ViewArg, contiguous, contiguous_strides
from deuteron.runtime import launch_blas

R = torch.randn


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epilogues, "_of_gpu", lambda x: True)


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def compiled(f: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """What f gives, and the activations that were joined."""
    torch._dynamo.reset()
    with collecting() as records:
        out = torch.compile(f, backend="deuteron", fullgraph=True, dynamic=False)(*args)
    return out, [
        e["detail"] for r in records for e in r.of("decision") if e["subject"] == "epilogue"
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(33, 48, 40), (64, 7, 130), (5, 3, 2)])
@pytest.mark.parametrize("act", [torch.relu, tanh_gelu])
def test_values(act: Callable[[Tensor], Tensor], sizes: tuple[int, ...], dtype: Any) -> None:
    torch.manual_seed(0)
    m, k, n = sizes
    x, w, b = R(m, k).to(dtype), R(n, k).to(dtype), R(n).to(dtype)

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return act(F.linear(x, w, b))

    out, joined = compiled(f, x, w, b)
    # GELU: of half precision, whose rows begin at multiples of 16 bytes.
    apart = dtype is torch.float32 or k % 8 or n % 8
    assert joined == (["ReLU"] if act is torch.relu else [] if apart else ["GELU"])
    exact = f(x.double(), w.double(), b.double())
    eager = f(x, w, b)
    assert out.dtype == dtype and out.stride() == eager.stride()
    unit = torch.finfo(dtype).eps * exact.abs().max().item()
    off = (eager.double() - exact).abs().max().item()
    assert (out.double() - exact).abs().max().item() <= 2 * off + unit


def test_training_keeps_what_gelu_is_of_and_joins_relu() -> None:
    torch.manual_seed(0)
    inputs = [t.requires_grad_() for t in (R(33, 48), R(40, 48), R(40), R(24, 40), R(24))]

    def f(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
        return tanh_gelu(F.linear(torch.relu(F.linear(x, w, b)), v, c))

    out, joined = compiled(f, *inputs)
    assert joined.count("GELU") == 0 and joined.count("ReLU") == 1
    want = f(*inputs)
    torch.testing.assert_close(out, want)
    for a, b in zip(
        *(torch.autograd.grad(o.square().sum(), inputs) for o in (out, want)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6 * b.abs().max().item())
        assert a.stride() == b.stride()


def test_views_between_them() -> None:
    """A linear layer of batches is a product of all rows."""
    torch.manual_seed(0)
    x, w, b = R(3, 11, 48), R(40, 48), R(40)

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.relu(F.linear(x, w, b)).view(33, 40)

    def g(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, w, b)
        return torch.relu(y), y.view(33, 40)

    for function, expected in ((f, ["ReLU"]), (g, [])):
        out, joined = compiled(function, x, w, b)
        assert joined == expected
        torch.testing.assert_close(out, function(x, w, b), rtol=1e-4, atol=1e-5)


def read_twice(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.addmm(b, x, w)
    return torch.relu(y), y


def scaled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.relu(torch.addmm(b, x, w, beta=2.0))


def rows(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.relu(torch.addmm(b.expand(x.shape[0], -1), x, w))


def erf(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(torch.addmm(b, x, w))


@pytest.mark.parametrize("f", [read_twice, scaled, rows, erf])
def test_others_stay(f: Callable[..., Any]) -> None:
    x, w, b = R(33, 48), R(48, 40), R(40)
    out, joined = compiled(f, x, w, b)
    assert not joined
    torch.testing.assert_close(out, f(x, w, b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("settings", "name"), [((), "relu"), ((("use_gelu", True),), "gelu")])
def test_small_products_are_given_to_cublas_with_their_activation(settings: Any, name: str) -> None:
    sizes = {"b": (48,), "x": (40, 64), "w": (64, 48), "y": (40, 48)}
    shapes = {n: tuple(const(k) for k in v) for n, v in sizes.items()}
    layouts = {n: contiguous(v, "bf16", "cuda") for n, v in shapes.items()}
    views = [ViewArg(n, shapes[n], contiguous_strides(shapes[n]), const(0)) for n in "bxw"]
    made = (layouts["y"],)
    call = Extern(
        ("y",), ADDMM_ACTIVATION, tuple(views), settings, made, aliases=(None,), reason=""
    )
    matched = product_of(call, layouts)
    assert matched is not None
    product, operands = matched
    assert product.bias and product.activation == name and operands == [*views[1:], views[0]]
    assert name in launch_blas.WITH_BIAS


def linears(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """One whose result a function reads, and one whose result a library call does."""
    return F.linear(x, w, b).tanh(), F.linear(x, w, b * 2) @ v


@pytest.mark.parametrize("dtype,parted", [(torch.float32, 1), (torch.bfloat16, 0)])
def test_biases_of_f32_are_added_by_readers(dtype: torch.dtype, parted: int) -> None:
    torch.manual_seed(0)
    args = [t.to(dtype) for t in (R(9, 12), R(7, 12), R(7, 5), R(7))]
    gm = make_fx(linears, tracing_mode="fake")(*args)
    assert epilogues.part_biases(gm, Record()) == parted
    verify_graph(gm, "biases")
    gm.recompile()
    for got, wanted in zip(gm(*args), linears(*args), strict=True):
        torch.testing.assert_close(got, wanted)
    for got, wanted in zip(compiled(linears, *args)[0], linears(*args), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2 if parted == 0 else 1e-5)
