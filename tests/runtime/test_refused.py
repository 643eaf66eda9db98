"""What eager refuses when it runs on a CPU, the compiled program refuses, too, and nothing more.

Each row: a program, a second argument that it takes, one that eager refuses by an error. Errors of
indices are `IndexError`s here, of divisions by zero `RuntimeError`s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import tensor
from torch.utils._pytree import tree_leaves

import deuteron  # noqa: F401
from deuteron.runtime.support import DivisionByZero, IndexOutOfRange

Rows = dict[str, tuple[Callable[..., Any], torch.Tensor, torch.Tensor]]
WHOLE = tensor([3, 1, -2])

INDICES: Rows = {
    "index": (lambda x, i: x[i] * 2, tensor([0, -6]), tensor([0, 6])),
    "index below": (lambda x, i: x[i] * 2, tensor([0, 5]), tensor([0, -7])),
    "mask of bools": (lambda x, i: x[i > 0] * 2, tensor([0, 1, 1, 0, 1, 1]), tensor([0, 1])),
    "gather": (lambda x, i: x.gather(0, i) * 2, tensor([[0, 5, 1]]), tensor([[0, 6, 1]])),
    "take": (lambda x, i: x.take(i) + 1, tensor([0, -18]), tensor([0, 18])),
    "put": (lambda x, i: x.put(i, x[0, :2]) + 1, tensor([0, 17]), tensor([0, 18])),
    "index_select": (lambda x, i: x.index_select(0, i) + 1, tensor([0, 5]), tensor([0, 6])),
    "index_select below": (lambda x, i: x.index_select(1, i) + 1, tensor([2]), tensor([-1])),
    "scatter": (lambda x, i: x.scatter(0, i, 1.0) * 2, tensor([[0, 5, 1]]), tensor([[0, 6, 1]])),
    "scatter_add": (
        lambda x, i: x.scatter_add(0, i, x) * 2, tensor([[0, 5, 1]]), tensor([[0, -1, 1]])),
    "scatter_reduce": (
        lambda x, i: x.scatter_reduce(0, i, x, "amin"), tensor([[0, 5]]), tensor([[0, 9]])),
    "index_put": (
        lambda x, i: x.index_put((i,), x[:2], accumulate=True), tensor([1, -1]), tensor([1, 6])),
    "index_add": (lambda x, i: x.index_add(0, i, x[:2]), tensor([1, 2]), tensor([1, 6])),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:2]), tensor([1, 2]), tensor([1, 6])),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.0) + x, tensor([1, -2]), tensor([1, 7])),
    "embedding": (
        lambda x, i: F.embedding(i, x, padding_idx=1) * 2, tensor([5, 1]), tensor([6, 1])),
    "embedding below": (lambda x, i: F.embedding(i, x) * 2, tensor([5, 1]), tensor([0, -1])),
    "cross entropy": (
        lambda x, i: F.cross_entropy(x, i),
        tensor([0, 1, 2, 0, -100, 2]), tensor([0, 1, 2, 0, 3, 2])),
    "nll below": (
        lambda x, i: F.nll_loss(x, i), tensor([0, 1, 2, 0, 1, 2]), tensor([0, 1, 2, 0, -1, 2])),
    "multi margin": (
        lambda x, i: F.multi_margin_loss(x, i),
        tensor([0, 1, 2, 0, 1, 2]), tensor([0, 1, 2, 0, 3, 2])),
}  # fmt: skip
# Reads that fold away, or that are at other places of memory than the position says.
FOLDED: Rows = {
    "positions": (lambda x, i: torch.arange(5)[i] * 2, tensor([0, -5]), tensor([0, 5])),
    "a difference of positions": (
        lambda x, i: torch.arange(5)[i] - torch.arange(5)[i], tensor([0, -5]), tensor([0, -6])),
    "a place that positions tell": (
        lambda x, i: x[torch.arange(5)[i] // 5], tensor([0, 4]), tensor([0, 5])),
    "ones": (lambda x, i: torch.full((5, 2), 2.0)[i] + x[:2, :2], tensor([0, 4]), tensor([0, 5])),
    "zeros": (lambda x, i: torch.zeros(5, 3).index_select(1, i), tensor([0, 2]), tensor([0, 3])),
    "zeros in zeros": (
        lambda x, i: torch.zeros(9)[torch.arange(5)[i]], tensor([0, 4]), tensor([0, 5])),
    "a pattern": (lambda x, i: torch.eye(5)[i].tril(), tensor([0, -5]), tensor([0, -6])),
    "expanded": (lambda x, i: x[:1].expand(5, 3)[i], tensor([4]), tensor([5])),
    "one element": (lambda x, i: x[:1, :1].take(i) + 1, tensor([0, -1]), tensor([0, 1])),
    "put in one element": (
        lambda x, i: torch.zeros(1, 1).put(i, x[0, :2]), tensor([0, 0]), tensor([0, 1])),
    "a row of ones": (lambda x, i: F.embedding(i, torch.ones(5, 3)), tensor([4]), tensor([-1])),
    "bytes": (
        lambda x, i: torch.zeros(300)[torch.zeros(5, dtype=torch.uint8)[i].long()],
        tensor([0, 4]), tensor([0, 5])),
    "a slice": (lambda x, i: x[:4][i] * 2, tensor([0, -4]), tensor([0, 4])),
    "a slice's row": (lambda x, i: F.embedding(i, x[:4]), tensor([0, 3]), tensor([0, 4])),
    "a slice's elements": (
        lambda x, i: x[:4].gather(0, i), tensor([[0, 3]]), tensor([[0, 4]])),
    "some of a block": (lambda x, i: x[:2, :2].take(i), tensor([0, 3]), tensor([0, 4])),
    "reshaped": (lambda x, i: x[:4].reshape(3, 4)[i, 1], tensor([0, 2]), tensor([0, 3])),
    "rolled": (lambda x, i: x[:4].roll(1, 0)[i], tensor([0, 3]), tensor([0, 4])),
    "repeated": (lambda x, i: x[:2].repeat(2, 1)[i], tensor([0, 3]), tensor([0, 4])),
    "joined": (lambda x, i: torch.cat([x[:2], x[2:4]])[i], tensor([0, 3]), tensor([0, 4])),
    "padded before": (
        lambda x, i: F.pad(x[:2], (0, 0, 1, 1))[i], tensor([0, -4]), tensor([0, -5])),
    "padded after": (
        lambda x, i: F.pad(x[:4][i], (0, 0, 1, 1)), tensor([0, 3]), tensor([0, 4])),
    "written into its reader": (
        lambda x, i: (x[:4] * 0 + 1)[i].sum(), tensor([0, 3]), tensor([0, 4])),
}  # fmt: skip
DIVISIONS: Rows = {
    "quotient": (lambda x, i: WHOLE // i * 2, tensor([1, -3, 2]), tensor([1, 0, 2])),
    "remainder": (lambda x, i: WHOLE % i + 1, tensor([1, -3, 2]), tensor([1, 0, 2])),
    "fmod": (lambda x, i: torch.fmod(WHOLE, i) + 1, tensor([1, -3, 2]), tensor([1, 0, 2])),
    "truncated": (
        lambda x, i: torch.div(WHOLE, i, rounding_mode="trunc"),
        tensor([1, -3, 2]), tensor([0, 1, 2])),
    "of 32 bits": (lambda x, i: WHOLE.int() // i.int(), tensor([5, 7, 9]), tensor([1, 1, 0])),
    "of 16 bits": (lambda x, i: WHOLE.short() % i.short(), tensor([5, 7, 9]), tensor([1, 1, 0])),
    "of 8 bits": (
        lambda x, i: i.to(torch.uint8) // (i - 1).to(torch.uint8), tensor([5]), tensor([1])),
    "by one number": (lambda x, i: (x * 9).long() // i[0], tensor([5]), tensor([0])),
    "in a sum": (
        lambda x, i: (x * 9).long().remainder(i).sum(1), tensor([1, 2, 3]), tensor([0, 1, 1])),
    "padded": (  # what is beside the elements has no divisor
        lambda x, i: F.pad(WHOLE // i, (2, 3)) + 1, tensor([1, 2, 3]), tensor([1, 2, 0])),
    "joined": (
        lambda x, i: torch.cat([WHOLE, WHOLE % i, i]) * 2, tensor([1, 2, 3]), tensor([0, 1, 2])),
    "shifted": (
        lambda x, i: F.pad((WHOLE // i)[1:], (0, 1)) + WHOLE // i,
        tensor([1, 2, 3]), tensor([1, 0, 3])),
}  # fmt: skip
OTHERS: Rows = {
    "one_hot": (lambda x, i: F.one_hot(i, 4) + x[0, 0], tensor([0, 3]), tensor([0, 4])),
    "one_hot below": (lambda x, i: F.one_hot(i, 4) + x[0, 0], tensor([0, 3]), tensor([0, -1])),
    "counts": (
        lambda x, i: torch.repeat_interleave(x, i, 0, output_size=7) * 2,
        tensor([1, 1, 2, 1, 1, 1]), tensor([1, 1, 2, 2, 1, 1])),
    "negative counts": (
        lambda x, i: torch.repeat_interleave(x, i, 0) * 2,
        tensor([0, 1, 2, 1, 1, 1]), tensor([0, 1, -2, 1, 1, 1])),
    "bincount": (lambda x, i: torch.bincount(i, minlength=3) * 2, tensor([0, 2]), tensor([0, -2])),
    "multinomial": (
        lambda x, i: torch.multinomial(i.float(), 1) * 0 + 1, tensor([0, 1]), tensor([0, 0])),
    "multinomial below": (
        lambda x, i: torch.multinomial(i.float(), 1) * 0 + 1, tensor([0, 1]), tensor([2, -1])),
    "bernoulli": (
        lambda x, i: torch.bernoulli(i.float()) * x, tensor([0, 1, 1]), tensor([0, 2, 1])),
    "cholesky": (
        lambda x, i: torch.linalg.cholesky(torch.eye(3) * i) + 1, tensor([2]), tensor([-2])),
    "inverse": (lambda x, i: torch.linalg.inv(torch.eye(3) * i) + 1, tensor([2]), tensor([0])),
    "offsets of bags": (
        lambda x, i: F.embedding_bag(tensor([0, 1, 2]), x, i) * 2, tensor([0, 2]), tensor([1, 2])),
    "bags": (
        lambda x, i: F.embedding_bag(i, x, tensor([0, 2])), tensor([0, 1, 5]), tensor([0, 1, 6])),
    "masked_scatter": (
        lambda x, i: x.masked_scatter(x > 0, i * 1.0) * 2, torch.arange(18), torch.arange(2)),
}  # fmt: skip


def refused(rows: Rows, name: str, kind: type[BaseException]) -> None:
    torch._dynamo.reset()
    f, right, wrong = rows[name]
    x = torch.linspace(0.1, 2, 18).view(6, 3)
    compiled = torch.compile(f, backend="deuteron")
    for a, b in zip(tree_leaves(f(x, right)), tree_leaves(compiled(x, right)), strict=True):
        torch.testing.assert_close(b, a)
    with pytest.raises(Exception):  # noqa: B017
        f(x, wrong)
    with pytest.raises(kind):
        compiled(x, wrong)
    compiled(x, right)


@pytest.mark.parametrize("name", INDICES)
def test_indices(name: str) -> None:
    refused(INDICES, name, IndexError if name == "mask of bools" else IndexOutOfRange)


@pytest.mark.parametrize("name", FOLDED)
def test_indices_of_what_folds_away(name: str) -> None:
    refused(FOLDED, name, IndexOutOfRange)


def test_gradients_of_what_folds_away() -> None:
    """Values and gradients are eager's, with positions in range."""

    def f(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        rows = x[:4][i] * torch.arange(5)[i][:, None] + F.embedding(i, x[:1].expand(4, 3))
        return (rows * x.roll(1, 0)[:4][i]).sum()

    torch._dynamo.reset()
    i = tensor([0, 3, 3, 1])
    ours, eager = (torch.linspace(-1, 2, 18).view(6, 3).requires_grad_() for _ in range(2))
    torch.testing.assert_close(torch.compile(f, backend="deuteron")(ours, i), f(eager, i))
    for g, x in ((torch.compile(f, backend="deuteron"), ours), (f, eager)):
        g(x, i).backward()
    torch.testing.assert_close(ours.grad, eager.grad)


# Numbers that eager converts to the dtype of the tensor.
NUMBERS: dict[str, Callable[[torch.Tensor, float], Any]] = {
    "clamp": lambda x, n: x.clamp(0, n),
    "clip below": lambda x, n: x.clip(max=n),
    "clamp in place": lambda x, n: x.clone().clamp_(-1, n),
    "hardtanh": lambda x, n: F.hardtanh(x, min(1, n), n),
    "threshold": lambda x, n: F.threshold(x, n, 2),
    "masked_fill": lambda x, n: x.masked_fill(x > 3, n),
    "index_fill": lambda x, n: x.index_fill(0, tensor([0]), n),
    "scatter": lambda x, n: x.scatter(0, tensor([0]), n),
    "pad": lambda x, n: F.pad(x, (1, 1), value=n),
    "fill": lambda x, n: x.clone().fill_(n),
    "full": lambda x, n: x + torch.full((3,), n, dtype=x.dtype),
    "full_like": torch.full_like,
    "new_full": lambda x, n: x.new_full((2,), n),
    "where": lambda x, n: torch.where(x > 3, x, n),
    "where it does not hold": lambda x, n: torch.where(x > 3, n, x),
    "scalar_tensor": lambda x, n: x + torch.scalar_tensor(n, dtype=x.dtype),
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=n),
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "alpha of a difference": lambda x, n: torch.sub(x, x, alpha=-n),
    "alpha of a turned difference": lambda x, n: torch.rsub(x, x, alpha=-n),
    "alpha of a product": lambda x, n: torch.addmm(x[None], x[None, :1], x[None], alpha=n),
    "beta of products": lambda x, n: torch.baddbmm(
        x[None, None], x[None, None, :1], x[None, None], beta=n
    ),
    "alpha of a vector": lambda x, n: torch.addmv(x, x[:, None], x[:1], alpha=n),
    "alpha of an outer product": lambda x, n: torch.addr(x[:, None], x, x[:1], alpha=n),
    "addcmul in place": lambda x, n: x.clone().addcmul_(x, x, value=n),
    "scatter_add": lambda x, n: x.scatter(0, tensor([0]), n, reduce="add"),
    "linspace": lambda x, n: torch.linspace(0, n, 3, dtype=x.dtype),
}
# Of numbers with fractions, and negative ones of a dtype without a sign.
FRACTIONS = ("masked_fill", "pad", "fill", "addcmul", "addcmul in place", "linspace", "where")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_numbers_that_do_not_fit(name: str, dtype: torch.dtype) -> None:
    f, x, most = NUMBERS[name], tensor([1, 100, 7]).to(dtype), torch.iinfo(dtype).max
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(f, backend="deuteron")(x, most), f(x, most))
    for n in (most + 1, 3 * most):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="without overflow"):
            f(x, n)
        with pytest.raises(Exception, match="without overflow"):
            torch.compile(f, backend="deuteron", dynamic=False)(x, n)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_numbers_that_are_converted(name: str, dtype: torch.dtype) -> None:
    f, x = NUMBERS[name], tensor([1, 100, 7]).to(dtype)
    for n in (-1, -torch.iinfo(dtype).max, -torch.iinfo(dtype).max - 1, 2.5, -2.5):
        if isinstance(n, float) and name not in FRACTIONS:
            continue
        torch._dynamo.reset()
        g = torch.compile(f, backend="deuteron", dynamic=False)
        try:
            expected = f(x, n)
        except RuntimeError:
            with pytest.raises(Exception, match=r"without overflow|negative limits"):
                g(x, n)
        else:
            torch.testing.assert_close(g(x, n), expected)


def test_what_takes_away_fills_nothing() -> None:
    torch._dynamo.reset()
    f = lambda x: F.pad(x, (0, -1), value=300)  # noqa: E731
    x = torch.arange(4, dtype=torch.uint8)
    torch.testing.assert_close(torch.compile(f, backend="deuteron")(x), f(x))


# What eager computes of floating numbers only, and the dtypes of which it says so.
LONG, TRUTH = torch.int64, torch.bool
REFUSED = r"not implemented|Boolean inputs|cast to|making fake tensor call"  # the last by Dynamo
FLOATING: dict[str, tuple[Callable[[torch.Tensor], Any], tuple[torch.dtype, ...]]] = {
    **{
        n: (getattr(F, n), (LONG, torch.uint8))
        for n in (
            *("celu", "elu", "hardswish", "hardsigmoid", "softplus", "hardshrink", "softshrink"),
            *("mish", "logsigmoid", "glu", "leaky_relu"),
        )
    },
    "relu": (F.relu, (TRUTH,)),
    "threshold": (lambda x: F.threshold(x, 1, 2), (TRUTH,)),
    "softmax": (lambda x: x.softmax(-1), (LONG, torch.uint8)),
    "log_softmax": (lambda x: x.log_softmax(1), (LONG, torch.uint8)),
    "logaddexp": (lambda x: torch.logaddexp(x, x), (LONG,)),
    "addcmul": (lambda x: torch.addcmul(x, x, x), (TRUTH,)),
    "unfold": (lambda x: F.unfold(x, 2), (LONG,)),
    "avg_pool": (lambda x: F.avg_pool2d(x, 2), (TRUTH,)),
    "max_pool": (lambda x: F.max_pool2d(x, 2), (TRUTH,)),
    "adaptive_max_pool": (lambda x: F.adaptive_max_pool2d(x, 2), (LONG, TRUTH)),
    "adaptive_avg_pool": (lambda x: F.adaptive_avg_pool2d(x, 2), (LONG,)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), (LONG, TRUTH)),
    "bilinear": (lambda x: F.interpolate(x, size=(3, 5), mode="bilinear"), (LONG,)),
    "grid_sample": (
        lambda x: F.grid_sample(x, torch.zeros(2, 2, 2, 2).to(x.dtype), align_corners=True),
        (LONG, torch.uint8),
    ),
    "smooth_l1": (lambda x: F.smooth_l1_loss(x, x + 1), (LONG, torch.uint8)),
    "huber": (lambda x: F.huber_loss(x, x + 1), (LONG,)),
    "soft_margin": (lambda x: F.soft_margin_loss(x, x), (LONG,)),
}


@pytest.mark.parametrize("name", FLOATING)
def test_what_is_computed_of_floating_numbers_only(name: str) -> None:
    """Of other dtypes eager's values, or its error."""
    f, refused_dtypes = FLOATING[name]
    x = torch.arange(60).view(2, 5, 2, 3).repeat(1, 1, 2, 2) % 3
    for dtype in (torch.float32, torch.uint8, LONG, TRUTH):
        torch._dynamo.reset()
        compiled, given = torch.compile(f, backend="deuteron"), x.to(dtype)
        try:
            expected = f(given)
        except RuntimeError as e:
            assert dtype != torch.float32, e
            with pytest.raises(Exception, match=REFUSED):
                compiled(given)
        else:
            assert dtype not in refused_dtypes
            if (name, dtype) != ("bilinear", torch.uint8):  # eager has other weights
                torch.testing.assert_close(compiled(given), expected)


@pytest.mark.parametrize("name", DIVISIONS)
def test_divisions(name: str) -> None:
    refused(DIVISIONS, name, DivisionByZero)


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    refused(OTHERS, name, RuntimeError)


@pytest.mark.parametrize(
    "f",
    (
        lambda x: torch.bernoulli(x, 1.5),
        lambda x: x.clone().uniform_(3, 1),
        lambda x: torch.bernoulli(x, -0.5) + 1,
    ),
)
def test_numbers_of_draws(f: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="expects"):
        torch.compile(f, backend="deuteron")(torch.randn(5))
