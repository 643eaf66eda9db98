"""Modules emitted for a GPU, run without one: their kernels by the reference executor, on tensors
found at the addresses that the module passes."""

from __future__ import annotations

import ctypes
import functools
import gc
import struct
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deuteron.stages as stages
from deuteron.backend import deuteron_backend
from deuteron.base.passes import Context
from deuteron.capture.stages import Part
from deuteron.codegen.launch_groups import Launches
from deuteron.codegen.products import Product, Side
from deuteron.codegen.triton.generate import TritonKernel
from deuteron.ir.index import evaluate
from deuteron.ir.program import Layout
from deuteron.lower.core import TO_TORCH
from deuteron.memory import out_variants
from deuteron.memory.plan import span
from deuteron.pipeline import compiled
from deuteron.runtime import build_cpp
from deuteron.runtime.launch import load
from deuteron.schedule import contract
from deuteron.schedule.kernel import Kernel, Schedule
from deuteron.schedule.reference import run_kernel
from deuteron.stages import Emitted
from tests.schedule.tools import spec_of

R = torch.randn
DEVICE = "cuda:1"


def on_gpu(lay: Layout) -> Layout:
    return replace(lay, device=DEVICE)


def moved(s: Schedule) -> Schedule:
    """The schedule as if its tensors were on a GPU."""
    steps = [
        replace(
            k,
            device=DEVICE,
            reads=tuple((n, on_gpu(lay)) for n, lay in k.reads),
            writes=tuple((n, on_gpu(lay)) for n, lay in k.writes),
        )
        if isinstance(k, Kernel)
        else k
        for k in s.steps
    ]
    return Schedule(tuple(steps), s.aliases, {n: on_gpu(lay) for n, lay in s.layouts.items()})


def tensor_at(address: int, lay: Layout, sizes: dict[str, int]) -> Tensor:
    shape = [evaluate(n, sizes) for n in lay.shape]
    strides = [evaluate(n, sizes) for n in lay.strides]
    dtype = TO_TORCH[lay.dtype]
    nbytes = evaluate(span(lay), sizes) * dtype.itemsize
    if not nbytes:
        return torch.empty_strided(shape, strides, dtype=dtype)
    assert address % dtype.itemsize == 0
    buffer = (ctypes.c_char * nbytes).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, strides)


class Multiplied:
    """What cuBLAS does for a product, on the CPU."""

    def __init__(self, product: Product) -> None:
        self.product = product

    def matrix(self, address: int, rows: int, columns: int, side: Side) -> Tensor:
        """A factor of the transposed product: columns are contiguous unless it is transposed."""
        p = self.product
        shape = (p.batch, columns, rows) if side.transposed else (p.batch, rows, columns)
        assert side.column >= shape[1]
        strides = (side.batch, 1, side.column)
        last = (p.batch - 1) * side.batch + (shape[2] - 1) * side.column + shape[1]
        dtype = TO_TORCH[p.dtype]
        buffer = (ctypes.c_char * (last * dtype.itemsize)).from_address(address)
        out = torch.frombuffer(buffer, dtype=dtype).as_strided(shape, strides)
        return out.transpose(1, 2) if side.transposed else out

    def __call__(self, stream: int, given: bytes, sizes: tuple[int, ...] = ()) -> None:
        p, (a, b, out, *bias) = self.product, struct.unpack(f"{len(given) // 8}P", given)
        first, second = self.matrix(b, p.n, p.k, p.b), self.matrix(a, p.k, p.m, p.a)
        made = first.double() @ second.double()
        if p.bias:
            made = made + self.matrix(bias[0], p.n, 1, Side(False, p.n, 0)).double()
        self.matrix(out, p.n, p.m, p.out).copy_(made)


class Pretended:
    """Compiles for a GPU and loads for the CPU."""

    # Products are calls of the library, whatever they would cost.
    contraction: Callable[..., str] = staticmethod(lambda *_: "the library multiplies")

    def __init__(self, part: Part, context: Context) -> None:
        self.context = replace(
            context, specs=lambda _: spec_of("H200"), contraction=self.contraction
        )
        self.record = context.record
        lowered = compiled("rewrite", "lower", part, self.context)
        scheduled = compiled("schedule", "schedule", lowered, context)  # as for this machine
        self.original = {k.name: k for k in scheduled.steps}
        there = replace(scheduled, schedule=moved(scheduled.schedule))
        self.artifact: Emitted = compiled("memory", "emit", there, self.context)
        self.kernels, self.emitted = self.artifact.kernels, self.artifact.module
        self.call = self.loaded()

    def loaded(self) -> Callable[..., Any]:
        assert not self.emitted.unit
        self.device = 0
        self.entered: list[int] = []
        extra: dict[str, Any] = {q.name: self.launcher(q) for q in self.emitted.sequences}
        extra |= {"stream": lambda d: 70 + d, "enter_device": self.enter}
        extra |= {"leave_device": self.enter, "empty_cuda": self.empty}
        extra |= {n: Multiplied(p) for n, (p, _) in self.emitted.products.items()}
        return load(self.emitted, None, extra, compile(self.emitted.text, "<test>", "exec"))

    def enter(self, device: int) -> int:
        before, self.device = self.device, device
        self.entered.append(device)
        return before

    left: int | None = None  # allocations until there is no memory

    def empty(self, shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        assert self.device == 1
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        out = torch.empty_strided(shape, strides, dtype=dtype)
        if not out.dim() or not out.numel():
            return out
        if out.stride(-1) != 1:
            return out.fill_(torch.nan)
        return out.view(torch.uint8).fill_(0xFF).view(dtype)

    def launcher(self, q: Launches) -> Callable[..., None]:
        def call(stream: int, given: bytes, sizes: tuple[int, ...]) -> None:
            pointers = struct.unpack(f"{len(given) // 8}P", given)
            assert stream == 71 and q.device == DEVICE and self.device == 1
            env = dict(zip(q.sizes, sizes, strict=True))
            for name, operands in zip(q.kernels, q.operands, strict=True):
                made, kernel = self.kernels[name], self.original[name]
                assert isinstance(made, TritonKernel)
                layouts = dict(kernel.reads) | dict(kernel.writes)
                names = [str(what) for kind, what in made.args if kind == "tensor"]
                tensors = {
                    n: tensor_at(pointers[p], layouts[n], env)
                    for n, p in zip(names, operands, strict=True)
                }
                run_kernel(kernel, tensors, env)

        return call


def builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither Triton's kernels nor what launches them."""
    # Products stay calls: what the CPU's figures make of them is no kernel of a GPU.
    monkeypatch.setattr(contract, "share_kernels", lambda *_: False)
    monkeypatch.setattr(stages, "KernelVariants", lambda *_: None)
    monkeypatch.setattr(build_cpp, "compiler", lambda *_: ("", ""))


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[..., Any]]:
    builds_nothing(monkeypatch)

    def runner(part: Part, context: Context) -> Any:
        seen.append(Pretended(part, context))
        return seen[-1].call

    seen: list[Pretended] = []

    def pretended(f: Callable[..., Any], **kw: Any) -> Callable[..., Any]:
        backend = functools.partial(deuteron_backend, runner=runner)
        g = torch.compile(f, backend=backend, fullgraph=True, **kw)
        g.seen = seen
        return g

    return pretended


def blocks(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = torch.softmax(x @ w, -1)
    z = torch.sort(y * x).values @ w
    return z + x, y.sum(0), z[1:].T


@pytest.mark.parametrize("dynamic", [False, True])
def test_forward(pretend: Any, dynamic: bool) -> None:
    g = pretend(blocks, dynamic=dynamic)
    w = R(40, 40) / 40
    for n in (48, 48, 7) if dynamic else (48, 48):
        x = R(n, 40)
        torch.testing.assert_close(g(x, w), blocks(x, w), rtol=1e-4, atol=1e-4)
    assert g.seen[0].entered[:2] == [1, 0]


def test_training(pretend: Any) -> None:
    net = nn.Sequential(
        *[nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))] * 2
    )
    x = R(33, 32, requires_grad=True)
    out = pretend(net)(x)
    out.square().sum().backward()
    got, x.grad = [x.grad, *(p.grad for p in net.parameters())], None
    net.zero_grad()
    want = net(x)
    want.square().sum().backward()
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    for a, b in zip(got, [x.grad, *(p.grad for p in net.parameters())], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_out_of_memory(pretend: Any, left: int) -> None:
    """The error is torch's, nothing is held, and the next call is right."""
    g = pretend(blocks)
    x, w = R(48, 40), R(40, 40) / 40
    want = blocks(x, w)
    g(x, w)
    (graph,) = g.seen
    made: list[weakref.ref[Tensor]] = []
    empty = graph.call.__globals__["empty_cuda"]

    def watched(*args: Any) -> Tensor:
        out: Tensor = empty(*args)
        made.append(weakref.ref(out))
        return out

    graph.call.__globals__["empty_cuda"] = watched
    graph.left = left
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        g(x, w)
    assert graph.device == 0 and len(made) == left
    gc.collect()
    assert not any(ref() is not None for ref in made)
    graph.left = None
    torch.testing.assert_close(g(x, w), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_products_without_aten(
    pretend: Any, monkeypatch: pytest.MonkeyPatch, dynamic: bool
) -> None:
    monkeypatch.setattr(stages, "multiply", lambda product, device, options: True)
    net = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))

    def f(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        y = net(x) @ w.t()
        z = torch.bmm(h, torch.softmax(h, -1).transpose(1, 2)) + torch.bmm(h.sin(), h.mT)
        return y + torch.addmm(w[0], y, w[:, :64]) + z.sum(0) + torch.addmm(y, y, y, beta=2)

    x, w = R(64, 64, requires_grad=True), R(64, 128)[:, :64].requires_grad_()
    h = R(3, 64, 65, requires_grad=True)
    g = pretend(f, dynamic=dynamic)
    for _ in range(2):
        got, want = [], []
        for run, results in ((g, got), (f, want)):
            out = run(x, w, h)
            out.square().mean().backward()
            leaves = [x, w, h, *net.parameters()]
            results += [out, *(t.grad for t in leaves)]
            for t in leaves:
                t.grad = None
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    products = [p for c in g.seen for p, _ in c.emitted.products.values()]
    if dynamic:
        return
    assert len(products) >= 8 and any(p.bias for p in products)
    assert any(p.batch == 3 for p in products) and any(p.a.transposed for p in products)
    assert "torch.addmm" in g.seen[0].emitted.text  # with a beta, ATen does it


def test_convolutions_into_given_memory(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cuDNN, which may be switched off at any time, the result is copied there."""
    monkeypatch.setattr(out_variants, "is_one_cudnn_call", lambda d: True)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 1, bias=False),
    )
    x = R(2, 3, 9, 9)
    g = pretend(net)
    with torch.backends.cudnn.flags(enabled=False):
        for _ in range(2):
            got, want = [], []
            for run, results in ((g, got), (net, want)):
                out = run(x)
                out.square().mean().backward()
                results += [out, *(p.grad for p in net.parameters())]
                net.zero_grad()
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
                assert a.stride() == b.stride()
    assert g.seen[0].emitted.text.count("convolve(") == 2


def test_large_and_odd_products_stay_aten(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "multiply", lambda product, device, options: True)
    g = pretend(lambda x, y: (x.sin() @ y.cos()) @ y.double().sum(0).float()[:, None] * 2)
    g(R(1024, 600), R(600, 1100))
    text = g.seen[0].emitted.text
    assert "torch.mm(" in text


def test_the_device_is_left_as_it_was_found(pretend: Any) -> None:
    """Also where the call fails."""
    g = pretend(lambda x, i: x[i].sin())
    g(R(5), torch.tensor([1]))
    with pytest.raises(IndexError):
        g(R(5), torch.tensor([7]))
    assert g.seen[0].device == 0
