"""Channels-last memory (`graph/layout.py`): which graphs are left as they are, and that what reads
what moved finds it as it was traced (`graph/strides.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map_only

from deuteron.backend import collecting
from deuteron.base.record import Record
from deuteron.graph.layout import CONVOLUTIONS, channels_last
from deuteron.graph.strides import follows

aten = torch.ops.aten
LAST, ROWS = torch.channels_last, torch.contiguous_format


def network(kernel: int, stride: int) -> Callable[..., Tensor]:
    """A strided convolution in front of one that makes channels-last worth while."""

    def f(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = F.conv2d(x, first, stride=stride, padding=kernel // 2)
        return F.conv2d(y.relu(), second, padding=1)

    return f


def traced(channels: int, kernel: int, stride: int, backward: bool = False) -> fx.GraphModule:
    f = network(kernel, stride)
    given = [
        torch.randn(2, channels, 16, 16),
        torch.randn(32, channels, kernel, kernel),
        torch.randn(32, 32, 3, 3),
    ]
    if not backward:
        return make_fx(f, tracing_mode="fake")(*given)

    def step(*args: Tensor) -> tuple[Tensor, ...]:
        leaves = [a.detach().requires_grad_() for a in args]
        return torch.autograd.grad(f(*leaves).sum(), leaves)

    return make_fx(step, tracing_mode="fake")(*given)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("channels", [4, 8])
def test_where_the_library_would_write_out_of_bounds(channels: int, backward: bool) -> None:
    """The CPU's weight gradient of strided 1x1 convolutions of few channels destroys memory in
    channels-last order (torch 2.13: eager does, too), so the whole graph keeps its order."""
    gm = traced(channels, kernel=1, stride=2, backward=backward)
    before = [str(n) for n in gm.graph.nodes]
    assert channels_last(gm, Record()) == 0
    assert [str(n) for n in gm.graph.nodes] == before


@pytest.mark.parametrize(
    ("channels", "kernel", "stride"), [(4, 3, 2), (4, 1, 1), (16, 1, 2), (32, 1, 2)]
)
def test_others_are_converted(channels: int, kernel: int, stride: int) -> None:
    assert channels_last(traced(channels, kernel, stride), Record()) > 0
    assert channels_last(traced(channels, kernel, stride, backward=True), Record()) > 0


IMAGE_SHAPE = (2, 160, 6, 10)  # images; weights of 3 x 3 to 200 channels have 1.1 MiB


def narrow_then_wide(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    y = F.conv2d(x, first, padding=1)
    return F.conv2d(F.max_pool2d(y.relu(), 4), second, padding=1)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("order", [ROWS, LAST])
def test_weights_larger_than_images(order: torch.memory_format, backward: bool) -> None:
    """Such a convolution reads contiguous images, whatever is in front of it and behind it, unless
    its weight lies channels-last, too."""
    given = [torch.randn(2, 16, 24, 40), torch.randn(160, 16, 3, 3), torch.randn(200, 160, 3, 3)]
    given[2] = given[2].to(memory_format=order)

    def step(*args: Tensor) -> tuple[Tensor, ...]:
        if not backward:
            return (narrow_then_wide(*args),)
        leaves = [a.detach().requires_grad_() for a in args]
        return torch.autograd.grad(narrow_then_wide(*leaves).sum(), leaves)

    gm = make_fx(step, tracing_mode="fake")(*given)
    want = gm(*given)
    assert channels_last(gm, Record()) > 0
    gm.graph.eliminate_dead_code()
    convolutions = [n for n in gm.graph.nodes if n.target in CONVOLUTIONS]
    assert len(convolutions) >= 2
    for n in convolutions:
        count = 2 if n.target is aten.convolution_backward.default else 1
        wide = n.args[count].meta["val"].shape[0] == 200
        images = [a.meta["val"] for a in n.args[:count]]
        assert all(
            t.is_contiguous(memory_format=ROWS if wide and order is ROWS else LAST) for t in images
        )
    for got, value in zip(gm(*given), want, strict=True):
        assert got.stride() == value.stride()
        torch.testing.assert_close(got, value, rtol=1e-3, atol=1e-2)


def test_only_weights_larger_than_images() -> None:
    """Nothing is converted for the sake of nothing."""
    given = [torch.randn(IMAGE_SHAPE), torch.randn(200, IMAGE_SHAPE[1], 3, 3)]
    gm = make_fx(lambda x, w: F.conv2d(x, w).relu(), tracing_mode="fake")(*given)
    assert channels_last(gm, Record()) == 0
    gm = make_fx(lambda x, w: F.conv2d(x, w).relu(), tracing_mode="fake")(
        given[0].repeat(1, 1, 8, 8), given[1]
    )
    assert channels_last(gm, Record()) == 1


@pytest.mark.parametrize(
    ("kernel", "dilation", "slow"),
    [((3, 3), 1, False), ((7, 7), 1, False), ((9, 9), 1, True), ((1, 11), 1, True),
     ((3, 3), 2, True)],
)  # fmt: skip
@pytest.mark.parametrize("order", [ROWS, LAST])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_each_channel_by_itself(
    device: str, order: torch.memory_format, kernel: tuple[int, int], dilation: int, slow: bool
) -> None:
    """Where a GPU's library is slow at them, such convolutions read images as they were traced,
    while those around them are converted; others, and all on a CPU, are as any convolution."""
    shapes = (40, 1, *kernel), (32, 40, 1, 1), (40, 32, 1, 1)
    padding = [dilation * (k // 2) for k in kernel]
    settings = [kernel[0] // 4 + 1] * 2, padding, [dilation] * 2, False, [0, 0], 40

    def step(x: Tensor, own: Tensor, narrow: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
        x = x.relu()
        y = F.conv2d(aten.convolution(x, own, None, *settings).relu(), narrow)
        dy = F.conv2d(y, wide).relu()
        dx, dw, _ = aten.convolution_backward(dy, x, own, None, *settings, [True, True, False])
        return F.conv2d(dx.relu(), narrow), dw

    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(3, 40, 16, 20, device=device, dtype=torch.bfloat16, memory_format=order)
        weights = [torch.empty(s, device=device, dtype=torch.bfloat16) for s in shapes]
        gm = make_fx(step)(x, *weights)
    assert channels_last(gm, Record()) > 0 or device == "cpu"
    gm.graph.eliminate_dead_code()
    convolutions = [n for n in gm.graph.nodes if n.target in CONVOLUTIONS]
    assert len(convolutions) == 5
    for n in convolutions:
        count = 2 if n.target is aten.convolution_backward.default else 1
        by_itself = n.args[count].meta["val"].shape[1] == 1 and device == "cuda"
        wanted = ROWS if slow and by_itself and order is ROWS else LAST
        assert all(a.meta["val"].is_contiguous(memory_format=wanted) for a in n.args[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("channels", "window", "order"), [(1280, 5, LAST), (1344, 5, ROWS), (3760, 3, LAST)]
)
def test_weights_whose_gradient_takes_pages(
    channels: int, window: int, order: torch.memory_format, dtype: torch.dtype
) -> None:
    """On a CPU the weight's gradient of channels by themselves may be slow channels-last from
    128 KiB of f32 on, but of small windows; the convolution itself is not."""
    own, wide = (channels, 1, window, window), (channels, 32, 1, 1)
    settings = [1, 1], [window // 2] * 2, [1, 1], False, [0, 0], channels

    def step(x: Tensor, own: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
        x = F.conv2d(x, wide).relu()
        y = aten.convolution(x, own, None, *settings).relu()
        return aten.convolution_backward(y, x, own, None, *settings, [True, True, False])[:2]

    given = [torch.randn(s, dtype=dtype) for s in ((2, 32, 16, 16), own, wide)]
    gm = make_fx(step, tracing_mode="fake")(*given)
    want = gm(*given)
    assert channels_last(gm, Record()) > 0
    gm.graph.eliminate_dead_code()
    for n in (n for n in gm.graph.nodes if n.target in CONVOLUTIONS):
        count = 2 if n.target is aten.convolution_backward.default else 1
        wanted = order if count == 2 else LAST
        assert all(a.meta["val"].is_contiguous(memory_format=wanted) for a in n.args[:count])
    if dtype == torch.float32:
        for got, value in zip(gm(*given), want, strict=True):
            torch.testing.assert_close(got, value, rtol=1e-3, atol=1e-2)


def test_training_of_such_a_network() -> None:
    """Values and strides of the gradients, through the compiler."""
    f = network(1, 2)
    shapes = ((2, 4, 16, 16), (32, 4, 1, 1), (32, 32, 3, 3))
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]
    want = torch.autograd.grad(f(*given).square().mean(), given)
    got = torch.autograd.grad(
        torch.compile(f, backend="deuteron", fullgraph=True)(*given).square().mean(), given
    )
    for a, b in zip(got, want, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# -- what reads what moved -------------------------------------------------------------------------
LIBRARY = torch.library.Library("layout_tests", "DEF")
LIBRARY.define("as_it_lies(Tensor x) -> Tensor")
LIBRARY.define("of_strides(Tensor x) -> int")


def as_it_lies(x: Tensor) -> Tensor:
    """What somebody's kernel does that goes through memory."""
    assert x.is_contiguous(), "given in another order than traced"
    return x.flatten() * 2


LIBRARY.impl("as_it_lies", as_it_lies, "CompositeExplicitAutograd")
torch.library.register_fake(
    "layout_tests::as_it_lies", lambda x: x.new_empty(x.numel()), lib=LIBRARY
)

READERS: dict[str, Callable[[Tensor], Any]] = {
    "flatten": lambda y: torch.flatten(y, 1),
    "view": lambda y: y.view(y.shape[0] * y.shape[1], -1),
    "view_as": lambda y: y.view_as(torch.empty(y.shape[0], y.shape[1] * y.shape[2], y.shape[3])),
    "unflatten": lambda y: y.flatten(1, 2).unflatten(1, (-1, 4)),
    "reshape": lambda y: y.reshape(-1, 2).sin(),
    "as_strided": lambda y: y.as_strided((3, 5), (7, 2), 4).clone(),
    "as_strided of a view": lambda y: y[1].as_strided((3, 5), (7, 2)).clone(),
    "another dtype": lambda y: y.view(torch.int32) >> 1,
    "a smaller dtype": lambda y: y.view(torch.int16)[..., 1::2] >> 4,
    "complex": lambda y: torch.view_as_complex(y.view(*y.shape[:-1], -1, 2)).abs(),
    "diagonal": lambda y: y.diagonal(0, 2, 3).clone(),
    "pieces": lambda y: [p.flatten(1) for p in y.split(2, 1)],
    "unbound": lambda y: [p.flatten(1) for p in y.unbind(1)][1:3],
    "windows": lambda y: y.unfold(2, 3, 2).flatten(2),
    "expanded": lambda y: y[:, :1].expand_as(y).reshape(-1),
    "a custom operator": lambda y: torch.ops.layout_tests.as_it_lies(y),
    "a branch": lambda y: torch.cond(
        y.sum() > 0, lambda t: t.view(-1).exp(), lambda t: t.view(-1).sin(), [y]
    ),
    "itself and a view": lambda y: (y, y.view(y.shape[0], -1)),
    "itself and what follows": lambda y: (y, y.relu(), y.transpose(1, 3)),
    "every second": lambda y: y[:, :, ::2],
    "every second and more": lambda y: (y[..., ::2], y.mean((2, 3))),
    "sorted": lambda y: torch.sort(y.flatten(1), 1)[0],
    "order": lambda y: y.nonzero()[:7],
    "products": lambda y: y @ y.mT,
    "scattered": lambda y: y.scatter_add(1, torch.zeros_like(y, dtype=torch.int64), y).view(-1),
    "rolled": lambda y: y.roll(1, 1),
    "instance norm": lambda y: F.instance_norm(y) / 2,
    "group norm": lambda y: F.group_norm(y, 2).view(-1),
    "pools": lambda y: F.max_pool2d(y, 2, return_indices=True),
    "written": lambda y: y.add_(1).view(-1).mul_(2),
}


@pytest.fixture
def any_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deuteron.graph.layout.MIN_CHANNELS", 1)


def moved(records: list[Record]) -> bool:
    return any(e["subject"] == "layout" for r in records for e in r.of("decision"))


def shared(results: list[Tensor]) -> list[int]:
    """Of each result the first that lies in the same memory."""
    where = [t.untyped_storage().data_ptr() for t in results]
    return [where.index(w) for w in where]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", READERS)
def test_readers_find_it_as_traced(name: str, training: bool, any_channels: None) -> None:
    """Values, strides and sharing of memory of results, and gradients, are eager's."""
    if training and name in ("another dtype", "a smaller dtype", "a custom operator"):
        pytest.skip("no gradient")
    read = READERS[name]

    def f(x: Tensor, w: Tensor) -> Any:
        return read(F.conv2d(x, w, padding=1).sin())

    given = [torch.randn(2, 3, 8, 6), torch.randn(8, 3, 3, 3)]
    both = [[t.clone().requires_grad_(training) for t in given] for _ in range(2)]
    want = tree_leaves(f(*both[0]))
    with collecting() as records:
        got = tree_leaves(torch.compile(f, backend="deuteron", fullgraph=True)(*both[1]))
        losses = [
            sum((y * y).sum() for y in out if y.requires_grad) if training else None
            for out in (want, got)
        ]
        for loss in losses:
            if isinstance(loss, Tensor):
                loss.backward()
    assert moved(records)
    assert shared(got) == shared(want)
    for a, b in zip(want, got, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
    for p, q in zip(*both, strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-3)


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight.reshape(1, self.out_channels, -1)
        w = F.batch_norm(w, None, None, training=True, eps=1e-5).reshape_as(self.weight)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


def networks() -> Iterator[tuple[nn.Module, Tensor]]:
    yield (
        nn.Sequential(
            nn.Conv2d(3, 20, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 36, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(36 * 9, 10),
        ),
        torch.randn(3, 3, 12, 14),
    )
    yield (
        nn.Sequential(
            nn.Conv2d(17, 24, 3), nn.InstanceNorm2d(24, affine=True), nn.Conv2d(24, 8, 1)
        ),
        torch.randn(2, 17, 11, 9),
    )
    yield (
        nn.Sequential(
            Standardised(16, 24, 3, padding=1),
            nn.SiLU(),
            Standardised(24, 16, 3, padding=1, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ),
        torch.randn(2, 16, 10, 13),
    )


@pytest.mark.parametrize("order", [ROWS, LAST])
@pytest.mark.parametrize("number", range(3))
def test_networks(number: int, order: torch.memory_format) -> None:
    net, x = list(networks())[number]
    x = x.contiguous(memory_format=order)
    compiled = torch.compile(net, backend="deuteron", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)
    want = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
    got = torch.autograd.grad(compiled(x).square().mean(), list(net.parameters()))
    for a, b in zip(got, want, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_convolutions_with_lists_of_one() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = F.conv2d(x, w, None, [2], [1], [1], 1)
        return F.conv_transpose2d(y, v, None, [2], [1], [1], 1, [2])

    given = [torch.randn(s) for s in ((2, 5, 9, 8), (6, 5, 3, 3), (6, 4, 3, 3))]
    for order in (ROWS, LAST):
        both = [
            [t.contiguous(memory_format=order).clone().requires_grad_() for t in given]
            for _ in range(2)
        ]
        want, got = f(*both[0]), torch.compile(f, backend="deuteron", fullgraph=True)(*both[1])
        assert want.stride() == got.stride()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        for run in (want, got):
            run.square().sum().backward()
        for p, q in zip(*both, strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-3)


# -- that torch's rules know where results lie -----------------------------------------------------
def library_calls(x: Tensor) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Calls that follow an image which moved."""
    c = x.shape[1]
    settings = [
        (8, 1, False, 3, 1, 1),
        (8, 1, False, 1, 1, 1),
        (c, c, False, 3, 1, 1),
        (2 * c, c, False, 3, 2, 1),
        (8, 1, False, 3, 1, 2),
        (8, 1, True, 3, 2, 1),
        (c, c, True, 3, 1, 1),
    ]
    for (out, groups, turned, k, s, d), order in itertools.product(settings, (LAST, ROWS)):
        if min(x.shape[2:]) + 2 <= (k - 1) * d:
            continue
        shape = (c, out // groups, k, k) if turned else (out, c // groups, k, k)
        w = torch.randn(shape).to(x.dtype).contiguous(memory_format=order)
        common = ([s, s], [1, 1], [d, d], turned, [0, 0], groups)
        yield aten.convolution.default, (x, w, None, *common)
        dy = torch.randn_like(aten.convolution.default(x, w, None, *common))
        for g in (dy.contiguous(memory_format=LAST), dy.contiguous()):
            yield aten.convolution_backward.default, (g, x, w, [out], *common, [True] * 3)
    for g in (LAST, ROWS):
        window = ([2, 2], [2, 2], [1, 1])
        y, at = aten.max_pool2d_with_indices.default(x, *window)
        y = y.contiguous(memory_format=g)
        yield aten.max_pool2d_with_indices.default, (x, *window)
        backward = aten.max_pool2d_with_indices_backward.default
        yield backward, (y, x, *window, [1, 1], False, at)
        yield aten.avg_pool2d.default, (x, *window)
        yield aten.avg_pool2d_backward.default, (y, x, *window, False, True, None)
        small = aten._adaptive_avg_pool2d.default(x, [2, 3])
        yield aten._adaptive_avg_pool2d.default, (x, [2, 3])
        yield aten._adaptive_avg_pool2d_backward.default, (small.contiguous(memory_format=g), x)
    yield aten.upsample_nearest2d.default, (x, [9, 9])
    yield aten.upsample_bilinear2d.default, (x, [9, 9], False)
    places = torch.zeros(x.shape, dtype=torch.int64)
    yield aten.gather.default, (x, 1, places)
    yield aten.scatter_add.default, (x, 1, places, x)
    yield aten.index_add.default, (x, 1, torch.zeros(c, dtype=torch.int64), x)
    yield aten.index_put.default, (x, [torch.tensor([0, 1])], x[:2].clone(), True)
    yield aten.cummax.default, (x, 1)
    yield aten.logcumsumexp.default, (x, 2)
    yield aten.max.dim, (x, 1, True)
    yield aten.masked_scatter.default, (x, x > 0, x)
    yield aten.cat.default, ([x, x], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 16, 7, 6), (2, 3, 5, 5), (3, 8, 1, 5)])
def test_rules_know_where_results_lie(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def long(t: Any) -> list[int]:
        return [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]

    x = torch.randn(shape).to(dtype).contiguous(memory_format=LAST)
    for target, args in library_calls(x):
        node = fx.Graph().call_function(target, ())
        assert follows(node), target
        with FakeTensorMode() as mode:
            fakes = tree_map_only(Tensor, mode.from_tensor, args)
            expected = tree_leaves(target(*fakes))
        for real, fake in zip(tree_leaves(target(*args)), expected, strict=True):
            assert long(real) == long(fake), target
