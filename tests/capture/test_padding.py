"""Products of odd sizes as products of padded matrices (`graph/padding.py`), which happens on GPUs;
here where their devices are not asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from deuteron.backend import collecting
from deuteron.graph import padding
from deuteron.runtime.support import HOOKS_SEEN

R = torch.randn
WORTH = padding._worth


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(node: Any) -> bool:
        sizes = padding._sizes(node)
        return all(type(n) is int for n in sizes) and any(n % 8 for n in sizes)

    monkeypatch.setattr(padding, "_worth", odd)


class Head(nn.Module):
    """Logits of an odd number of classes, and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.classes = nn.Linear(16, 24), nn.Linear(24, 61)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(self.classes(F.gelu(self.inner(x))).flatten(0, 1), t.flatten())


def saved_by(f: Callable[[], Tensor]) -> tuple[Tensor, list[tuple[int, ...]]]:
    """What a forward returns, and the strides of what it saves."""
    strides: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (strides.append(t.stride()), t)[1], id_
    ):
        out = f()
    return out, strides


def id_(t: Tensor) -> Tensor:
    return t


@pytest.mark.parametrize("hooked", [False, True])
def test_saved_logits_stay_as_the_product_left_them(hooked: bool) -> None:
    torch.manual_seed(0)
    net = Head()
    compiled = torch.compile(net, backend="deuteron", fullgraph=True)
    x, t = R(4, 10, 16, requires_grad=True), torch.randint(0, 61, (4, 10))
    with collecting() as records:
        out, strides = saved_by(lambda: compiled(x, t))
    assert any(e["subject"] == "pad" for r in records for e in r.of("decision"))
    assert (64, 1) in strides and (61, 1) not in strides
    HOOKS_SEEN.clear()
    for _ in range(2):
        if hooked:
            pack = lambda t: torch.empty(t.shape, dtype=t.dtype).copy_(t)  # noqa: E731
            with torch.autograd.graph.saved_tensors_hooks(pack, id_):
                out = compiled(x, t)
        else:
            out = compiled(x, t)
        inputs = (x, *net.parameters())
        torch.testing.assert_close(out, net(x, t))
        for a, b in zip(
            torch.autograd.grad(out, inputs), torch.autograd.grad(net(x, t), inputs), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            assert a.stride() == b.stride()


def views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Views of the product that are returned keep their strides, as what is saved does not."""
    y = x @ w
    return y.view(5, 5, -1), (y.sin() * y).sum(0), y.t().reshape(-1).exp()


def shared(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A gradient is what was saved."""
    y = x @ w
    return ((y * w[:1]).sum(), y.tanh() @ w.t())


@pytest.mark.parametrize("f", [views, shared])
def test_results_keep_their_strides(f: Callable[..., tuple[Tensor, ...]]) -> None:
    torch.manual_seed(0)
    x, w = R(25, 13, requires_grad=True), R(13, 27, requires_grad=True)
    compiled = torch.compile(f, backend="deuteron", fullgraph=True)
    want, got = f(x, w), compiled(x, w)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert a.stride() == b.stride()
    back = [torch.autograd.grad([o.square().sum() for o in out], (x, w)) for out in (got, want)]
    for a, b in zip(*back, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("bias", [False, True])
def test_the_last_columns_of_what_is_returned_are_a_product_of_their_own(bias: bool) -> None:
    torch.manual_seed(0)
    net = nn.Linear(16, 27, bias=bias)
    compiled = torch.compile(net, backend="deuteron", fullgraph=True)
    x = R(5, 5, 16)
    with collecting() as records, torch.no_grad():
        got = compiled(x)
    (record,) = records
    (pad,) = [e for e in record.of("decision") if e["subject"] == "pad"]
    assert pad["reason"] == "the last columns are a product of their own"
    torch.testing.assert_close(got, net(x), rtol=1e-5, atol=1e-6)
    assert got.stride() == net(x).stride()


def test_columns_are_not_cut_off_where_that_copies() -> None:
    """Neither from weights of odd rows, nor where the depth is odd as well."""
    for w in (R(16, 27), R(27, 15).t()):
        compiled = torch.compile(
            lambda x, w: x @ w, backend="deuteron", fullgraph=True, dynamic=False
        )
        x = R(25, w.shape[0])
        with collecting() as records:
            got = compiled(x, w)
        (pad,) = [e for e in records[0].of("decision") if e["subject"] == "pad"]
        assert pad["reason"] == "rows of 16 bytes"
        torch.testing.assert_close(got, x @ w, rtol=1e-4, atol=1e-5)


def pairs(*rows: Tensor) -> Tensor:
    """All products of rows (DLRM): the rows are joined with those that are padding."""
    joined = torch.stack(rows, 1)
    return (joined @ joined.transpose(1, 2)).tanh().sum((1, 2))


def many(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Rows and columns odd, transposed or not; the second is returned as it is."""
    return (a @ b).sin(), b @ c, (a.transpose(1, 2).contiguous().transpose(1, 2) @ b).cos()


def turned(a: Tensor, b: Tensor) -> Tensor:
    """Of odd rows, and read transposed only, together with another of that shape."""
    return (torch.bmm(a, b).transpose(1, 2) + torch.bmm(b.transpose(1, 2), a.mT)).sin()


MANY: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "pairs": (pairs, ((5, 8),) * 3),
    "pairs of odd rows": (pairs, ((5, 9),) * 4),
    "many": (many, ((3, 5, 9), (3, 9, 8), (3, 8, 11))),
    "many of one": (many, ((1, 1, 9), (1, 9, 1), (1, 1, 3))),
    "turned": (turned, ((4, 16, 7), (4, 7, 5))),
    "turned, deep": (turned, ((2, 8, 16), (2, 16, 27))),
}


@pytest.mark.parametrize("name", MANY)
def test_many_small_products(name: str) -> None:
    torch.manual_seed(0)
    f, shapes = MANY[name]
    inputs = [R(s, requires_grad=True) for s in shapes]
    compiled = torch.compile(f, backend="deuteron", fullgraph=True, dynamic=False)
    with collecting() as records:
        got = compiled(*inputs)
    assert any(e["subject"] == "pad" for r in records for e in r.of("decision"))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    results = []
    for out, xs in ((got, inputs), (f(*inputs), inputs), (f(*exact), exact)):
        outs = out if isinstance(out, tuple) else (out,)
        results.append((*outs, *torch.autograd.grad(sum(o.square().sum() for o in outs), xs)))
    for a, b, c in zip(*results, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a.double(), c, rtol=1e-4, atol=1e-4)


def test_a_product_that_is_read_transposed_is_computed_transposed() -> None:
    a, b = R(4, 16, 7), R(4, 7, 5)
    with collecting() as records:
        torch.compile(turned, backend="deuteron", fullgraph=True, dynamic=False)(a, b)
    (record,) = records
    assert {e["detail"] for e in record.of("decision") if e["subject"] == "pad"} == {"4x5x7x16"}


@pytest.mark.parametrize("rows,worth", [(1, False), (3, True)])
def test_products_of_one_row_stay(rows: int, worth: bool) -> None:
    """They are bound by memory: tensor cores gain nothing, and heads that share keys are no rows
    any more."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    node = graph.call_function(torch.ops.aten.bmm.default, (a, b))
    with FakeTensorMode():
        a.meta["val"] = torch.empty(256, rows, 128, device="cuda", dtype=torch.bfloat16)
        b.meta["val"] = torch.empty(256, 128, 8192, device="cuda", dtype=torch.bfloat16)
        node.meta["val"] = torch.empty(256, rows, 8192, device="cuda", dtype=torch.bfloat16)
    assert WORTH(node) is worth
