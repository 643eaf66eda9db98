"""Convolutions as products and as convolutions of blocks (`graph/convolutions.py`), which happens
on GPUs; here where their devices and sizes are not asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from deuteron.backend import collecting
from deuteron.base.passes import Context
from deuteron.base.record import Record
from deuteron.graph import convolutions
from deuteron.graph.convolutions import rewrite_convolutions
from deuteron.graph.cse import merge_common
from deuteron.graph.rewrite import remove_dead, rewrite

aten = torch.ops.aten
LAST = torch.channels_last


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "on_tensor_cores", lambda t: t.is_floating_point())
    monkeypatch.setattr(convolutions, "MIN_FLOPS", 0)


class Checked(fx.Interpreter):
    """Runs a graph; every value is what its fake says."""

    def run_node(self, n: fx.Node) -> Any:
        result, fake = super().run_node(n), n.meta.get("val")
        if isinstance(result, Tensor) and isinstance(fake, Tensor):
            assert (result.shape, result.dtype) == (fake.shape, fake.dtype), n
            # A fake view's dimensions of size 1 may have other strides.
            strides = [[s for s, k in zip(t.stride(), t.shape) if k > 1] for t in (result, fake)]
            assert strides[0] == strides[1], n
        return result


def traced(
    args: Sequence[Tensor], wanted: Sequence[int], given: Sequence[Tensor] = (), **settings: Any
) -> fx.GraphModule:
    """A convolution of x, weight, bias, and its gradients of the `wanted` arguments."""

    def step(dy: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        leaves = [a.detach().requires_grad_() for a in args]
        y = convolve(leaves, **settings)
        if not wanted:
            return (y.detach(),)
        return (y.detach(), *torch.autograd.grad(y, [leaves[k] for k in wanted], dy))

    dy = given[0] if given else torch.empty_like(convolve(args, **settings))
    gm: fx.GraphModule = make_fx(step, tracing_mode="fake")(dy, *args)
    # Autograd's rule asks for the gradients of those that are read.
    remove_dead(gm.graph)
    return gm


def convolve(args: Sequence[Tensor], **settings: Any) -> Tensor:
    f = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[args[0].dim()]
    return f(*args, **settings)  # type: ignore[operator]


def operands(shapes: Sequence[Sequence[int]], bias: bool, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(s).to(dtype) for s in shapes]
    return [*made, torch.randn(shapes[1][0]).to(dtype)] if bias else made


def bounded(got: Tensor, eager: Tensor, exact: Tensor) -> None:
    """An error of at most twice eager's, and of a unit in the last place of the largest."""
    errors = [(t.double() - exact).abs().max().item() for t in (got, eager)]
    unit = torch.finfo(got.dtype).eps * exact.abs().max().item()
    assert errors[0] <= 2 * errors[1] + unit, errors


# name: shapes of x and weight, settings, which arguments' gradients are asked for
PATCHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "square": (((2, 3, 32, 32), (24, 3, 8, 8)), {"stride": 8}),
    "batch of one": (((1, 3, 16, 48), (5, 3, 4, 4)), {"stride": 4}),
    "high windows": (((2, 6, 12, 20), (7, 6, 3, 5)), {"stride": (3, 5)}),
    "one row": (((2, 4, 2, 6), (8, 4, 2, 2)), {"stride": 2}),
    "one window": (((3, 4, 4, 4), (8, 4, 4, 4)), {"stride": 4}),
    "flat windows": (((2, 4, 6, 6), (8, 4, 1, 2)), {"stride": (1, 2)}),
    "one channel": (((2, 1, 8, 8), (3, 1, 2, 2)), {"stride": 2}),
    "one result": (((2, 3, 8, 8), (1, 3, 2, 2)), {"stride": 2}),
    "sound": (((2, 4, 30), (6, 4, 5)), {"stride": 5}),
    "film": (((1, 3, 4, 8, 6), (5, 3, 2, 4, 3)), {"stride": (2, 4, 3)}),
}
STEMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "residual network": (((2, 3, 32, 32), (16, 3, 7, 7)), {"stride": 2, "padding": 3}),
    "small": (((2, 3, 16, 24), (8, 3, 3, 3)), {"stride": 2, "padding": 1}),
    "odd image": (((1, 3, 17, 23), (8, 3, 7, 7)), {"stride": 2, "padding": 3}),
    "cut": (((2, 3, 18, 19), (8, 3, 3, 3)), {"stride": 2}),
    "high windows": (((2, 3, 16, 15), (8, 3, 7, 4)), {"stride": 2, "padding": (3, 0)}),
    "fours": (((2, 1, 19, 21), (5, 1, 7, 5)), {"stride": 4, "padding": (2, 1)}),
    "patches apart": (((2, 3, 18, 18), (8, 3, 2, 2)), {"stride": 2, "padding": 1}),
    "four channels": (((2, 4, 16, 16), (1, 4, 3, 3)), {"stride": 2, "padding": 1}),
    "one window": (((2, 3, 5, 5), (8, 3, 5, 5)), {"stride": 2}),
}
CASES = [(k, *v, (0, 1, 2)) for k, v in PATCHES.items()]
CASES += [(k, *v, (1, 2)) for k, v in STEMS.items()]


def layouts(args: list[Tensor], layout: str) -> list[Tensor]:
    """Operands in the order of memory that is named."""
    if layout == "strided":
        wide = torch.stack([args[0], args[0]], -1)
        args[0] = wide[..., 0]
    if layout in ("last", "image last"):
        rank = args[0].dim()
        order = [0, *range(2, rank), 1]
        back = [0, rank - 1, *range(1, rank - 1)]
        for k in range(2 if layout == "last" else 1):
            args[k] = args[k].permute(order).contiguous().permute(back)
    return args


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", ["first", "last", "image last", "strided"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0])
def test_values(case: Any, layout: str, bias: bool, anywhere: None) -> None:
    _, shapes, settings, wanted = case
    wanted = [k for k in wanted if k < 2 + bias]
    for dtype in (torch.float32, torch.bfloat16):
        args = layouts(operands(shapes, bias, dtype), layout)
        dy = torch.randn(convolve(args, **settings).shape).to(dtype)
        if layout == "last":
            dy = layouts([dy, dy], layout)[0]
        gm = traced(args, wanted, [dy], **settings)
        eager = gm(dy, *args)
        strides = [n.meta["val"].stride() for n in gm.graph.output_node().all_input_nodes]
        assert rewrite_convolutions(gm, Record()) == 2
        gm.graph.lint()
        after = [n.meta["val"].stride() for n in gm.graph.output_node().all_input_nodes]
        assert after == strides
        assert rewrite_convolutions(gm, Record()) == 0
        got = Checked(gm).run(dy, *args)
        leaves = [a.double().requires_grad_() for a in args]
        y = convolve(leaves, **settings)
        grads = torch.autograd.grad(y, [leaves[k] for k in wanted], dy.double())
        for g, e, r in zip(got, eager, (y, *grads), strict=True):
            assert (g.shape, g.dtype) == (e.shape, e.dtype)
            bounded(g, e, r.detach())


# What makes a case one that is left as it is.
ORDINARY: dict[str, tuple[Any, dict[str, Any]]] = {
    "windows of one": (((2, 3, 8, 8), (8, 3, 1, 1)), {}),
    "windows of one, strided": (((2, 3, 8, 8), (8, 3, 1, 1)), {"stride": 2}),
    "windows apart": (((2, 32, 9, 9), (8, 32, 2, 2)), {"stride": 3}),
    "padding, many channels": (((2, 32, 8, 8), (8, 32, 2, 2)), {"stride": 2, "padding": 1}),
    "a row left over": (((2, 32, 9, 8), (8, 32, 2, 2)), {"stride": 2}),
    "groups": (((2, 4, 8, 8), (8, 2, 2, 2)), {"stride": 2, "groups": 2}),
    "holes": (((2, 3, 16, 16), (8, 3, 7, 7)), {"stride": 2, "padding": 3, "dilation": 2}),
    "many channels": (((2, 8, 16, 16), (8, 8, 3, 3)), {"stride": 2, "padding": 1}),
    "two strides": (((2, 3, 16, 16), (8, 3, 3, 3)), {"stride": (2, 1), "padding": 1}),
    "one stride": (((2, 3, 16, 16), (8, 3, 3, 3)), {"padding": 1}),
    "a line": (((2, 3, 16, 16), (8, 3, 7, 1)), {"stride": 2}),
    "sound": (((2, 3, 16), (8, 3, 3)), {"stride": 2}),
    "no image": (((0, 3, 16, 16), (8, 3, 2, 2)), {"stride": 2}),
    "no channel": (((2, 0, 16, 16), (8, 0, 2, 2)), {"stride": 2}),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_others_stay(name: str, anywhere: None) -> None:
    shapes, settings = ORDINARY[name]
    gm = traced(operands(shapes, False, torch.float32), (1,), **settings)
    before = gm.graph.python_code("self").src
    assert rewrite_convolutions(gm, Record()) == 0
    assert gm.graph.python_code("self").src == before


def test_transposed_ones_stay(anywhere: None) -> None:
    f = lambda x, w: F.conv_transpose2d(x, w, stride=2)  # noqa: E731
    gm = make_fx(f, tracing_mode="fake")(torch.randn(2, 3, 8, 8), torch.randn(3, 5, 2, 2))
    assert rewrite_convolutions(gm, Record()) == 0


def test_symbolic_sizes_stay(anywhere: None) -> None:
    f = lambda x, w: F.conv2d(x, w, stride=2)  # noqa: E731
    gm = make_fx(f, tracing_mode="symbolic")(torch.randn(2, 3, 8, 8), torch.randn(5, 3, 2, 2))
    assert any(n.target is aten.convolution.default for n in gm.graph.nodes)
    assert rewrite_convolutions(gm, Record()) == 0


def test_a_backward_that_needs_the_image_s_gradient_stays(anywhere: None) -> None:
    """The forward does not."""
    shapes, settings = STEMS["small"]
    gm = traced(operands(shapes, False, torch.float32), (0, 1), **settings)
    assert rewrite_convolutions(gm, Record()) == 1
    targets = [n.target for n in gm.graph.nodes]
    assert targets.count(aten.convolution_backward.default) == 1


@pytest.mark.parametrize(
    ("device", "dtype", "size", "count"),
    [
        ("cuda", torch.bfloat16, 224, 1),
        ("cuda", torch.float16, 224, 1),
        ("cuda", torch.float32, 224, 0),
        ("cpu", torch.bfloat16, 224, 0),
        ("cuda", torch.bfloat16, 32, 0),
    ],
)
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "reason"),
    [(16, 16, 0, "windows side by side"), (7, 2, 3, "few channels")],
)
def test_where_it_pays(
    kernel: int, stride: int, padding: int, reason: str,
    device: str, dtype: torch.dtype, size: int, count: int,
) -> None:  # fmt: skip
    """Large ones in half precision on GPUs, and the record says so."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(1, 3, size, size, device=device, dtype=dtype)
        w = torch.empty(768, 3, kernel, kernel, device=device, dtype=dtype)
        f = lambda x, w: F.conv2d(x, w, stride=stride, padding=padding)  # noqa: E731
        gm = make_fx(f)(x, w)
    record = Record()
    assert rewrite_convolutions(gm, record) == count
    decisions = record.of("decision")
    assert [e["subject"] for e in decisions] == ["convolution"] * count
    for e in decisions:
        assert e["reason"].startswith(reason)
        assert e["detail"] == f"1x3x{size}x{size} by 768x3x{kernel}x{kernel}"


@pytest.mark.parametrize("case", [PATCHES["square"], STEMS["residual network"]], ids=["p", "s"])
def test_forward_and_backward_share_what_is_made_of_the_image(case: Any, anywhere: None) -> None:
    shapes, settings = case
    args = operands(shapes, False, torch.float32)
    gm = traced(args, (1,), **settings)
    rewrite(gm, Context())
    targets = [n.target for n in gm.graph.nodes]
    assert targets.count(aten.clone.default) >= 1
    x = next(
        n for n in gm.graph.nodes if n.op == "placeholder" and n.meta["val"].shape == shapes[0]
    )
    assert sum(u.op != "output" for u in x.users) == 1
    assert merge_common(gm) == 0


class Net(nn.Module):
    """A stem of few channels, patches of its result, and a head."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 7, 2, 3, bias=bias)
        self.norm = nn.BatchNorm2d(16)
        self.patch = nn.Conv2d(16, 24, 4, 4, bias=bias)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.relu(self.norm(self.stem(x)))
        p = self.patch(y)
        return p, self.head(F.gelu(p.flatten(2).transpose(1, 2)).mean(1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("train", [False, True])
def test_networks(train: bool, layout: Any, bias: bool, anywhere: None) -> None:
    """Values, gradients and all strides, through the compiler."""
    torch.manual_seed(0)
    net = Net(bias).to(memory_format=layout).train(train)
    x = torch.randn(2, 3, 32, 48).to(memory_format=layout)
    compiled = torch.compile(net, backend="deuteron", fullgraph=True)

    def step(f: Any) -> list[Tensor]:
        p, y = f(x)
        if not train:
            return [p, y]
        (p.square().mean() + y.sin().sum()).backward()
        values = [p.detach(), y.detach(), *(w.grad for w in net.parameters())]
        net.zero_grad()
        return values

    with torch.set_grad_enabled(train), collecting() as records:
        got, want = step(compiled), step(net)
    decisions = [e for r in records for e in r.of("decision") if e["subject"] == "convolution"]
    assert len(decisions) == (4 if train else 2)
    for g, e in zip(got, want, strict=True):
        assert g.stride() == e.stride()
        torch.testing.assert_close(g, e, rtol=1e-3, atol=1e-4)


def test_a_result_and_a_view_of_it_share_memory(anywhere: None) -> None:
    """What is returned keeps its strides and is not overwritten."""
    torch.manual_seed(0)
    w = torch.randn(8, 3, 4, 4, requires_grad=True)
    x = torch.randn(2, 3, 16, 16)

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.conv2d(x, w, stride=4)
        return y, y.flatten(2), y.flatten(2).sigmoid()

    compiled = torch.compile(f, backend="deuteron", fullgraph=True)
    got, want = compiled(x, w), f(x, w)
    kept = [t.detach().clone() for t in got]
    grads = [torch.autograd.grad(sum(t.square().sum() for t in ts), w)[0] for ts in (got, want)]
    for g, e, k in zip(got, want, kept, strict=True):
        assert g.stride() == e.stride()
        torch.testing.assert_close(g, e, rtol=1e-5, atol=1e-5)
        assert torch.equal(g, k)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    assert got[0].untyped_storage().data_ptr() == got[1].untyped_storage().data_ptr()


@pytest.mark.parametrize("case", [PATCHES["square"], STEMS["small"]], ids=["p", "s"])
def test_results_that_share_memory_lie_as_they_were_traced(case: Any, anywhere: None) -> None:
    """And so does what follows from them: nobody else's strides may change then."""
    shapes, settings = case

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.conv2d(x, w, **settings)
        return y, y.as_strided((3, 4), (5, 2), 1), y + 1

    args = operands(shapes, False, torch.float32)
    gm = make_fx(f, tracing_mode="fake")(*args)
    assert rewrite_convolutions(gm, Record()) == 1
    got, want = Checked(gm).run(*args), f(*args)
    for g, e in zip(got, want, strict=True):
        assert g.stride() == e.stride()
        torch.testing.assert_close(g, e, rtol=1e-5, atol=1e-5)
    assert got[0].untyped_storage().data_ptr() == got[1].untyped_storage().data_ptr()


def test_an_image_is_rearranged_by_one_kernel(anywhere: None) -> None:
    """Padded, regrouped, padded again: written once, together with the weights."""
    torch.manual_seed(0)
    shapes, settings = STEMS["residual network"]
    x, w = (t.requires_grad_(k == 1) for k, t in enumerate(operands(shapes, False, torch.float32)))
    f = lambda x, w: F.conv2d(x, w, **settings).square().sum()  # noqa: E731
    with collecting() as records:
        torch.compile(f, backend="deuteron", fullgraph=True)(x, w).backward()
    first = [next(iter(r.of("kernel"))) for r in records]
    image, weight = 2 * 19 * 19 * 16, 16 * 4 * 4 * 16
    assert first[0]["bytes"] == 4 * (x.numel() + w.numel() + image + weight), first[0]
