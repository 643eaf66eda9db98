"""The backend's contract with Dynamo and AOTAutograd, on graphs that run as traced."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deuteron.backend import collecting, deuteron_backend
from deuteron.base.errors import BuildError, DeuteronError, OptionError
from deuteron.base.options import Options, _make
from tests.capture.helpers import Traced, same

T = torch.randn


def grad(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


# -- aliasing and mutation -------------------------------------------------------------------------
def test_views_as_outputs():
    same(lambda x: (x.view(-1), x[1:], x.t(), x + 1), T(4, 6))
    same(lambda x: ((y := x * 2), y.view(-1), y.t()), grad(4, 6))
    same(lambda x: (x.expand(3, 4, 6), x.clone(), x.contiguous()), T(4, 6))


def test_equal_outputs_stay_apart():
    """Two equal results are two tensors: a caller may write to one of them."""
    traced = Traced()
    f = traced.compile(lambda x: (x + 1, x + 1, (x * 2).clone()))
    a, b, c = f(x := T(4))
    a.zero_()
    assert torch.equal(b, x + 1)
    same(lambda x: ((y := x * 2), y.clone(), y.clone()), T(4))


def test_input_mutation():
    def f(x, y):
        x.mul_(2)
        y[1:].add_(x[1:])
        return x + y, x[0]

    same(f, T(4), T(4))
    same(f, T(4), T(4), dynamic=True)


def test_copy_before_the_write():
    def f(x):
        old = x.clone()
        x.add_(1)
        return old, old * x

    same(f, T(5))


def test_mutation_under_grad():
    def f(x, buffer):
        buffer.copy_(buffer * 0.9 + x.detach().mean(0) * 0.1)
        return (x - buffer).sigmoid()

    same(f, grad(8, 3), T(3))


def test_aliased_inputs():
    def f(a, b):
        a.add_(1)
        return a * b

    base_e, base_c = torch.arange(6.0), torch.arange(6.0)
    compiled = Traced().compile(f)
    expected, got = f(base_e[:4], base_e[2:]), compiled(base_c[:4], base_c[2:])
    assert torch.equal(expected, got) and torch.equal(base_e, base_c)


def test_batch_norm_buffers():
    torch.manual_seed(0)
    x = T(8, 3, 5, 5)
    nets = []
    for _ in range(2):
        torch.manual_seed(1)
        nets.append(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    compiled = Traced().compile(nets[1])
    for _ in range(2):
        e, g = nets[0](x), compiled(x)
        torch.testing.assert_close(e, g)
        e.square().sum().backward()
        g.square().sum().backward()
    for (name, a), b in zip(nets[0].state_dict().items(), nets[1].state_dict().values()):
        torch.testing.assert_close(a, b, msg=name)
    for p, q in zip(nets[0].parameters(), nets[1].parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


# -- modes -----------------------------------------------------------------------------------------
def test_phases():
    traced = Traced()
    net = nn.Linear(4, 4)
    f = traced.compile(lambda x: net(x).relu())
    f(T(2, 4)).sum().backward()
    assert traced.phases() == ["forward", "backward"]
    with torch.no_grad():
        f(T(2, 4))
    with torch.inference_mode():
        torch.testing.assert_close(f(x := T(2, 4)), net(x).relu())
    assert set(traced.phases()[2:]) == {"inference"}


def test_autocast():
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))

    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net(x).float().softmax(-1)

    same(f, grad(4, 8), tolerance=2e-2)


def test_graph_breaks():
    def f(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y * x.sum()

    traced = same(f, grad(6))
    assert len(traced.graphs) == 4


def test_dynamic_shapes_compile_once():
    torch._dynamo.reset()
    traced = Traced()
    f = traced.compile(
        lambda x: F.layer_norm(x, (x.shape[-1],)).softmax(-1).mean() * x.shape[0], dynamic=True
    )
    for n in (8, 12, 13, 400):
        x = grad(n, 16)
        y = x.detach().clone().requires_grad_()
        f(x).backward()
        (F.layer_norm(y, (16,)).softmax(-1).mean() * n).backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6)
    assert traced.phases() == ["forward", "backward"]


def test_retain_graph():
    x = grad(4)
    y = Traced().compile(lambda x: x.exp() * x.sin())(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y.sum(), x)[0])


def test_data_dependent_size():
    torch._dynamo.reset()

    def f(x, n):
        k = n.item()
        torch._check(k >= 0)
        torch._check(k <= 6)
        return x.narrow(0, 0, k).sum(), torch.zeros(k)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        same(f, T(6), torch.tensor(4), fullgraph=True)


def test_custom_op():
    @torch.library.custom_op("deuteron_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, g: g * 2)

    @torch.library.custom_op("deuteron_test::fill", mutates_args=("x",))
    def fill(x: torch.Tensor, value: float) -> None:
        x.fill_(value)

    traced = same(lambda x: twice(x.sin()).cos() + twice(x.sin()), grad(5))
    assert traced.targets("forward").count("deuteron_test.twice.default") == 2, "not ours to merge"

    def f(x):
        y = x + 1
        fill(y, 3.0)
        fill(x, 4.0)
        return y * x

    same(f, T(5))


def test_higher_order_ops():
    same(lambda x: torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,)), T(4))


def test_writes_through_views():
    def f(x):
        y = x.clone()
        y[1:3] += 1
        y[:, 0].mul_(2)
        y.t()[0] = 5
        return y

    same(f, grad(5, 6))
    same(f, T(5, 6), dynamic=True)


def test_per_sample_gradients():
    same(lambda x: torch.func.vmap(torch.func.grad(lambda v: (v**3).sum()))(x), T(4, 5))


def test_hooks_and_autograd_functions():
    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x.exp()

    def f(x):
        y = Exponential.apply(x)
        y.register_hook(lambda g: g * 2)
        return y.cos()

    same(f, grad(4))


def test_boolean_masks_and_scalars():
    config = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(**config):
        same(lambda x: x[x > 0] * 2, T(10), fullgraph=True)
        same(lambda x: x[torch.nonzero(x[:, 0] > 0).squeeze(1)] ** 2, grad(10, 3), fullgraph=True)
        same(lambda x, y: (x * y.sum().item()).sin(), grad(10), T(3), fullgraph=True)


def test_complex_numbers_and_transforms():
    same(lambda x: torch.fft.rfft(x).abs().log1p(), grad(4, 16), tolerance=1e-5)


def test_whole_layers():
    same(
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        grad(2, 5, 16),
        tolerance=1e-5,
    )
    rnn = nn.LSTM(8, 8, batch_first=True)
    same(lambda x: rnn(x)[0], grad(2, 5, 8), tolerance=1e-5)
    same(nn.EmbeddingBag(10, 4), torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2]))


def test_backward_in_another_thread():
    traced = Traced()
    with collecting() as records:
        y = traced.compile(lambda x: x.exp())(x := grad(3))
    worker = threading.Thread(target=lambda: y.sum().backward())
    worker.start()
    worker.join()
    assert traced.phases() == ["forward", "backward"]
    assert [r.of("graph")[0]["phase"] for r in records] == ["forward", "backward"]
    assert x.grad is not None


# -- options and errors ----------------------------------------------------------------------------
def test_options():
    assert Options.make("max-autotune").autotune
    assert Options.make("max-autotune", {"autotune": False}).autotune is False
    plain = Options.make("max-autotune-no-cudagraphs")
    assert plain.autotune and not plain.cudagraphs
    assert Options.make(None, {"mode": "reduce-overhead"}).cudagraphs
    assert _make(None, None, {"DEUTERON_DEBUG": "out", "DEUTERON_VERIFY": "1"}).debug_dir == "out"
    assert _make(None, {"verify": False}, {"DEUTERON_VERIFY": "1"}).verify is False
    assert Options.make().codegen_key() != Options.make(None, {"fusion": False}).codegen_key()
    assert Options.make().codegen_key() == Options.make(None, {"workers": 3}).codegen_key()


@pytest.mark.parametrize(
    "mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
)
def test_modes_of_torch(mode):
    x = T(5)
    f = torch.compile(lambda x: x.sin() * 2, backend="deuteron", mode=mode)
    torch.testing.assert_close(f(x), x.sin() * 2)


@pytest.mark.parametrize(
    ("mode", "options", "environment", "hint"),
    [
        ("max-autotun", None, {}, "max-autotune"),
        (None, {"fuson": True}, {}, "fusion"),
        (None, {"fallback": "atn"}, {}, "aten"),
        (None, {"workers": -1}, {}, ""),
        (None, {"fusion": 1}, {}, ""),
        (None, None, {"DEUTERON_VERFY": "1"}, "DEUTERON_VERIFY"),
        (None, None, {"DEUTERON_VERIFY": "maybe"}, "0 or 1"),
    ],
)
def test_wrong_options(mode, options, environment, hint):
    with pytest.raises(OptionError) as e:
        _make(mode, options, environment)
    assert hint in str(e.value)


def test_backend_rejects_unknown_options():
    torch._dynamo.reset()
    f = torch.compile(lambda x: x + 1, backend=deuteron_backend, options={"nonsense": 1})
    with pytest.raises(Exception, match="no option 'nonsense'"):
        f(T(2))


def test_errors_survive_pickling():
    e = BuildError("failed", hint="look", source="a.cpp", output="no ;", command="g++ a.cpp")
    again = pickle.loads(pickle.dumps(e))
    assert type(again) is BuildError and str(again) == str(e) and "g++ a.cpp" in str(again)


def test_fallback_is_a_choice():
    def refuses(part, context):
        raise DeuteronError("no")

    def backend(options):
        return lambda gm, inputs: deuteron_backend(gm, inputs, options=options, runner=refuses)

    torch._dynamo.reset()
    with collecting() as records:
        f = torch.compile(lambda x: x.sin() + 1, backend=backend({"fallback": "aten"}))
        torch.testing.assert_close(f(x := T(4)), x.sin() + 1)
    assert "no" in records[0].of("fallback")[0]["reason"]
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no"):
        torch.compile(lambda x: x.sin() + 1, backend=backend({}))(T(4))
