"""What users write, against eager: higher-order operators, custom operators, complex numbers,
library calls, mutation, random numbers, sizes known at run time only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from deuteron.backend import deuteron_backend

R = torch.randn
Function = Callable[..., Any]


def tensors(x: Any) -> list[Tensor]:
    return [t for t in tree_leaves(x) if isinstance(t, Tensor)]


def run(f: Function, args: tuple[Any, ...]) -> tuple[list[Tensor], list[Any], list[Tensor]]:
    """Results, gradients of the arguments, arguments afterwards."""
    torch.manual_seed(0)
    given = [
        a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a
        for a in args
    ]
    results = tensors(f(*given))
    grads: list[Any] = []
    wanted = [t for t in results if t.requires_grad]
    if wanted:
        total = sum((t.abs() if t.is_complex() else t).float().square().sum() for t in wanted)
        assert isinstance(total, Tensor)
        total.backward()
        grads = [a.grad for a in given if isinstance(a, Tensor)]
    return results, grads, [a.detach() for a in tensors(given)]


def same(f: Function, *args: Any, dynamic: bool | None = None, **options: Any) -> None:
    """Two calls of the compiled function give what eager gives, with its strides."""
    g = torch.compile(f, backend=deuteron_backend, dynamic=dynamic, options=options or None)
    for _ in range(2):
        (want, grads, after), (got, my_grads, my_after) = run(f, args), run(g, args)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4, equal_nan=True)
        torch.testing.assert_close(my_grads, grads, rtol=1e-3, atol=1e-3, equal_nan=True)
        torch.testing.assert_close(my_after, after)
        assert [t.stride() for t in got] == [t.stride() for t in want]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


# -- plain functions ---------------------------------------------------------------------------


def conjugated(x: Tensor) -> Tensor:
    return (torch.view_as_complex(x + 1).conj() * 2j).abs().sum(0)


def complex_parts(x: Tensor) -> Tensor:
    c = torch.view_as_complex(x.clone())
    c.real.add_(1)
    c.imag.mul_(2)
    return torch.view_as_real(c * c)


def transformed(x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x * 2).abs() + 0j).sin()


def attention(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q * 2, q + 1, is_causal=True)


def assigned(x: Tensor, i: Tensor) -> Tensor:
    y = x.clone()
    y[i] = 0
    y[:, 1] += 3
    y[y > 1] = 7
    return y


def several_views(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    return y.T, y[1:], y.view(-1)[3]


def whole_numbers(x: Tensor) -> tuple[Tensor, ...]:
    return (x > 3) & (x < 7), x // 2, x % 3, x << 1, ~x


def with_hook(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda g: g * 3)
    return y.sin()


def rounded(x: Tensor) -> Tensor:
    return torch.clamp((x / 0.1).round(), -128, 127).to(torch.int8)


def three(x: Tensor) -> tuple[Tensor, ...]:
    return x.sin().softmax(-1), x.cumsum(0), x.argmax(1)


PLAIN: list[tuple[str, Function, tuple[Any, ...]]] = [
    ("fft", transformed, (leaf(4, 8),)),
    ("conjugated", conjugated, (leaf(4, 8, 2),)),
    ("parts", lambda x: (x * 1j).real.sin() + (x + 2j).imag, (R(4, 8, dtype=torch.complex64),)),
    ("written parts", complex_parts, (R(4, 8, 2),)),
    ("inverse", lambda x: torch.linalg.inv(x @ x.T + torch.eye(6)).sum(0), (leaf(6, 6),)),
    ("singular values", lambda x: torch.linalg.svdvals(x * 2).exp(), (R(6, 4),)),
    ("topk", lambda x: x.exp().topk(3), (leaf(6, 14),)),
    ("unique", lambda x: torch.unique(x) * 2, (torch.randint(5, (20,)),)),
    ("mask", lambda x: x[x > 0].sum() * 2, (R(20),)),
    ("attention", attention, (leaf(2, 3, 16, 8),)),
    ("as_strided", lambda x: x.as_strided((3, 3), (2, 1), 1) * 2, (leaf(20),)),
    ("unfold", lambda x: x.unfold(0, 3, 2).sin(), (leaf(20),)),
    ("several views", several_views, (leaf(4, 5),)),
    ("whole numbers", whole_numbers, (torch.arange(10),)),
    ("dtypes", lambda x: x.double().softmax(-1).to(torch.bfloat16), (leaf(4, 5),)),
    ("sparse", lambda x: torch.sparse.mm(torch.eye(4).to_sparse(), x) * 2, (R(4, 5),)),
    ("assigned", assigned, (R(6, 4), torch.tensor([1, 2]))),
    ("hook", with_hook, (leaf(4),)),
    ("grad", lambda x: torch.func.grad(lambda y: (y.sin() * y).sum())(x), (R(4),)),
    ("vmap", lambda x: torch.func.vmap(lambda y: y.softmax(0))(x), (R(4, 5),)),
    ("long cat", lambda *a: torch.cat([x * i for i, x in enumerate(a)]), (R(3, 4),) * 1),
    ("number", lambda x, s: x * s + s, (R(3), 2.5)),
    ("no dimensions", lambda x, y: (x * y, x + 1), (torch.tensor(2.0), leaf())),
    ("half product", lambda a, b: (a @ b).relu(), (R(40, 64).bfloat16(), R(64, 64).bfloat16())),
    ("int product", lambda a, b: (a @ b) * 2, (torch.arange(60).view(6, 10),) * 2),
    ("rounded", rounded, (R(30, 40),)),
    ("dictionary", lambda d: {"a": d["x"] + 1, "b": [d["x"] * 2]}, ({"x": R(3)},)),
    (
        "numbers for NaN",
        lambda x: torch.nan_to_num(x / x),
        (torch.zeros(4, 8, dtype=torch.complex64),),
    ),
    ("signs of fractions", lambda x: 1 / torch.frac(x), (torch.tensor([-0.0, 0.0, -3.0, -0.5]),)),
]
PLAIN = [(n, f, (a[0], a[1].T.contiguous()) if n == "int product" else a) for n, f, a in PLAIN]
PLAIN += [("longer cat", PLAIN[20][1], tuple(R(3, 4) for _ in range(40)))]


@pytest.mark.parametrize(("f", "args"), [p[1:] for p in PLAIN], ids=[p[0] for p in PLAIN])
def test_function(f: Function, args: tuple[Any, ...]) -> None:
    same(f, *args)


@pytest.mark.parametrize(
    ("f", "shape"),
    [
        (attention, (2, 3, 16, 8)),
        (lambda x: (x.view(2, -1).sum(0), x[::2].T, x.flip(0).reshape(-1)), (8, 6)),
        (lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"), (1, 2, 8, 6)),
        (lambda x: x / (x.shape[-1] ** 0.5) + x.shape[0] / 3, (8, 6)),
    ],
)
def test_changing_sizes(f: Function, shape: tuple[int, ...]) -> None:
    same(f, R(shape), dynamic=True)


@pytest.mark.parametrize("option", ["verify", "fusion", "eager_random"])
def test_options(option: str) -> None:
    same(three, leaf(30, 40), **{option: option != "fusion"})
    if option == "eager_random":
        same(lambda x: (F.dropout(x, 0.5), torch.rand(4, 5) + x), R(4, 5), eager_random=True)


# -- modules -----------------------------------------------------------------------------------


def test_modules() -> None:
    lstm = nn.LSTM(8, 16, 2)
    same(lambda x: lstm(x)[0] * 2, R(5, 3, 8))
    convolutions = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 3)
    )
    same(lambda x: convolutions(x).sigmoid(), leaf(2, 3, 9, 9))
    last = R(2, 3, 9, 9).contiguous(memory_format=torch.channels_last)
    same(lambda x: convolutions[0](x).relu() * 2, last)
    bag = nn.EmbeddingBag(10, 4, mode="sum")
    same(lambda i: bag(i) * 2, torch.randint(10, (3, 5)))
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    same(lambda x: normed(x), leaf(2, 4))


def test_parameters_are_overwritten() -> None:
    p = nn.Parameter(R(3))

    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            p.mul_(1.0)
        return x * p

    same(f, R(3))


def test_checkpoint() -> None:
    linear = nn.Linear(8, 8)

    def inside(y: Tensor) -> Tensor:
        return F.gelu(linear(y)).softmax(-1)

    same(lambda x: checkpoint(inside, x, use_reentrant=False) * 2, leaf(4, 8))


def test_autocast() -> None:
    linear = nn.Linear(8, 8)

    def f(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return linear(x).softmax(-1)

    same(f, leaf(4, 8))


def test_inference_mode() -> None:
    g = torch.compile(lambda x: x.softmax(-1), backend=deuteron_backend)
    x = R(3, 4)
    with torch.inference_mode():
        torch.testing.assert_close(g(x), x.softmax(-1))


def test_optimizer() -> None:
    models = [nn.Linear(4, 4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = R(2, 4)
    for m, use in zip(models, (False, True), strict=True):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
        m(x).square().sum().backward()
        step = optimizer.step
        for _ in range(3):
            torch.compile(step, backend=deuteron_backend)() if use else step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)


# -- higher-order and custom operators ---------------------------------------------------------


def test_branches() -> None:
    def f(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos(), (x + 1,))

    same(f, R(4, 4).abs())
    same(f, -R(4, 4).abs())


def test_loops() -> None:
    from torch._higher_order_ops.scan import scan
    from torch._higher_order_ops.while_loop import while_loop

    def body(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, y * 2

    same(lambda x: while_loop(lambda i, y: i < 3, body, (torch.tensor(0), x + 1))[1], R(4, 4))
    same(lambda x: scan(lambda c, y: (c + y, c * y), x[0] * 2, x)[1], R(5, 4))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = R(1, 2, 16, 16)
    same(lambda q: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + i - j), q)


@torch.library.custom_op("deuteron_tests::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("deuteron_tests::increase", mutates_args=("x",))
def increase(x: Tensor) -> None:
    x.add_(1)


def test_custom_operators() -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        increase(y)
        increase(x)
        return y.sin()

    same(lambda x: double(x + 1).sin(), R(4, 5))
    same(f, R(4, 5))


# -- numbers that only the run decides ---------------------------------------------------------


def test_numbers_from_tensors() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        same(lambda x, i: x[: i.item()] * 2 + i.item(), R(8, 4), torch.tensor(3))
        same(lambda x, i: [p * 2 for p in x.split(i.tolist())], R(8, 4), torch.tensor([3, 5]))
        g = torch.compile(lambda x, i: x * (i.item() // 2) + i.item() % 3, backend=deuteron_backend)
        for k in (2, -5, 4):
            torch.testing.assert_close(
                g(torch.ones(3), torch.tensor(k)), torch.ones(3) * (k // 2) + k % 3
            )


@pytest.mark.parametrize("dynamic", [None, True])
def test_negative_numbers(dynamic: bool | None) -> None:
    def f(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return x * (k // 2) + (k % 3), x.roll(k, 0)

    g = torch.compile(f, backend=deuteron_backend, dynamic=dynamic)
    x = R(9)
    for k in (2, -5, 4, -1, 7, 0, 1, -8):
        torch.testing.assert_close(g(x, k), f(x, k))


def test_random_numbers_run() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            F.dropout(x, 0.5),
            torch.rand(4, 5) + x,
            torch.randn_like(x),
            torch.randint(0, 10, (4,)),
            torch.bernoulli(x.sigmoid()),
            torch.randperm(5),
        )

    x = R(4, 5)
    out = torch.compile(f, backend=deuteron_backend)(x)
    for a, b in zip(out, f(x), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    assert sorted(out[5].tolist()) == list(range(5))


def test_double_backward_is_refused() -> None:
    x = leaf(4)
    y = torch.compile(lambda x: x.sin(), backend=deuteron_backend)(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.sum(), x)


REFUSED: dict[str, Function] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "variance": lambda x: x.var(-1),
    "hypot": lambda x: torch.hypot(x, x),
    "frac": torch.frac,
    "nextafter": lambda x: torch.nextafter(x, x + 1),
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8])
@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_ends_in_its_error(name: str, dtype: torch.dtype) -> None:
    """Tracing lets numbers through that the operator does not take: eager's call says so."""
    torch._dynamo.reset()
    x = torch.ones(8, 8, dtype=dtype)
    with pytest.raises(Exception) as eager:
        REFUSED[name](x)
    with pytest.raises(eager.type) as ours:
        torch.compile(REFUSED[name], backend="deuteron")(x)
    assert str(ours.value) == str(eager.value)


STRIDED = {
    "padded and cut": lambda x: F.pad(x * 2, (0, 3))[:, :5],
    "flipped and selected": lambda x: (x * 2).flip(0).select(1, 2),
    "expanded": lambda x: (x * 2).amax(1, keepdim=True).expand(4, 7),
    "windows": lambda x: (x * 2).unfold(1, 3, 1),
    "windows of what was flattened": lambda x: (x * 2).expand(3, 4, 5).reshape(-1).unfold(0, 3, 2),
    "every second": lambda x: (x * 2)[:, ::2],
    "transposed": lambda x: (x * 2)[:, 1:3].t(),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", STRIDED)
def test_strides_of_results(name: str, dynamic: bool) -> None:
    """Views of computed values have eager's strides; a saved one is read by a library call that
    was traced with them."""
    torch._dynamo.reset()
    f, x = STRIDED[name], torch.randn(4, 5)
    want = f(x)
    got = torch.compile(f, backend="deuteron", dynamic=dynamic)(x)
    assert torch.equal(got, want)
    assert got.stride() == want.stride()


@torch.library.custom_op("deuteron_tests::strides_of", mutates_args=())
def strides_of(x: Tensor) -> Tensor:
    return torch.tensor(x.stride())


@strides_of.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.dim(), dtype=torch.int64)


@pytest.mark.parametrize("dynamic", [False, True])
def test_strides_along_one_element(dynamic: bool) -> None:
    """A library call that looks at strides finds those of dimensions of one element, too: attention
    refuses a mask of one key whose last stride is not 1 (attention, seed 7510118, on a GPU)."""
    torch._dynamo.reset()

    def f(x: Tensor) -> tuple[Tensor, ...]:
        cut = x[..., :1]
        return strides_of(cut.expand(3, 4, 5, 1)), strides_of(cut[:, 0]), strides_of(cut.mT)

    x = torch.randn(3, 1, 1, 8)
    for got, want in zip(torch.compile(f, backend="deuteron", dynamic=dynamic)(x), f(x)):
        assert torch.equal(got, want)
