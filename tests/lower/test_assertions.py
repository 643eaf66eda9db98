"""What a program asserts about numbers that data decides is checked before a kernel relies on it.

Each row: a program, inputs that it takes, inputs that eager refuses. Compiled, it refuses the same,
as a RuntimeError in the program's words where it has any; other inputs give eager's results.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import tensor
from torch.utils._pytree import tree_leaves

import deuteron  # noqa: F401
import deuteron.pipeline as pipeline
from deuteron.base.errors import FailedAssertion
from deuteron.codegen.results import relied_on
from deuteron.ir.program import Extern, names_in
from deuteron.stages import Loaded

Inputs = tuple[Any, ...]


def five(x: torch.Tensor) -> torch.Tensor:
    z = x.nonzero()
    torch._check(z.size(0) == 5)
    return z + 3


def two_selected(x: torch.Tensor) -> torch.Tensor:
    s = torch.masked_select(x, x > 0)
    torch._check(s.numel() == 2, lambda: "two please")
    return s.flip(0) + s.sum()


def as_many(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = x.nonzero().squeeze(1), y.nonzero().squeeze(1)
    torch._check(a.size(0) == b.size(0), lambda: "as many")
    return a * b


def as_the_input(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    u = x.unique()
    torch._check(u.shape[0] == y.shape[0])
    return u * y


def as_the_number(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    a, k = x.nonzero().squeeze(1), n.sum().item()
    torch._check(a.size(0) == k)
    return torch.arange(k) - a


def repeated(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    y = torch.repeat_interleave(x, r)
    torch._check(y.shape[0] == 8)
    return y.view(4, 2).sin()


def parts(x: torch.Tensor, n: torch.Tensor) -> tuple[Any, ...]:
    a, b, c = n.tolist()
    u, v, w = torch.split(x, [a, b, c])
    return u.exp(), v.sort(descending=True).values, w * 2, u.shape[0] + v.shape[0]


def narrowed(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    a, b = n.tolist()
    torch._check(a >= 0)
    torch._check(b >= 0)
    torch._check(a + b <= x.shape[0], lambda: "no room")
    return x.narrow(0, a, b) * 2


def viewed(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    a, b = n.tolist()
    return x.view(a, b).t().contiguous()


def sliced(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    k = n.sum().item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    return x[:k].cumsum(0)


def made(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    k = n.max().item()
    torch._check(k > 1, lambda: "more than one")
    torch._check(k <= 6)
    return torch.full((k, 2), 1.5) + torch.zeros(k, 1) + x[0]


def positive(x: torch.Tensor) -> torch.Tensor:
    a = x.mean().item()
    torch._check(a > 0, lambda: "positive mean")
    return x * a


def flag(x: torch.Tensor) -> torch.Tensor:
    ok = (x > 0).all().item()
    torch._check(ok, lambda: "all positive")
    return x.sqrt()


def two_words(x: torch.Tensor) -> torch.Tensor:
    k = x.sum().item()
    torch._check(k % 2 == 0, lambda: "even")
    torch._check(k != 4, lambda: "not four")
    return x + k


def distributions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of any number of elements, none included."""
    v = torch.masked_select(x, x > 0)
    return v.softmax(0), v.log_softmax(0), v[None].expand(3, -1).double().softmax(1)


def unread(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """Nothing but assertions asks for it."""
    v = x[m > 0]
    torch._check(v.size(0) < 4)
    torch._check(v.size(0) >= 3)
    return m.nonzero() + 1


def later(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Intermediate tensors of a size that is told late."""
    k = n.sum().item()
    torch._check(k >= 1)
    torch._check(k <= x.shape[0])
    y = x[:k].sin() * 2
    w = (y + y.sort().values).cumsum(0)
    return (w.exp() / w.exp().sum()).sort().values + 1


X = torch.arange(6.0) + 1


def twice_the_number(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    k = n.item()  # of an input: Dynamo guards on it
    torch._check(x.shape[0] == 2 * k)
    return x.view(k, 2).sum(1) * 3


def one_more(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    k = n.sum().item()
    torch._check(x.shape[0] == 3 * k + 1)
    return x[1:].view(k, 3).amax(1) + x[:1]


def pairs(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    n = chosen.nonzero().shape[0]
    torch._check(x.shape[1] == 2 * n)
    return x.view(-1, n, 2).softmax(-1)


ROWS: dict[str, tuple[Callable[..., Any], list[Inputs], list[Inputs]]] = {
    "five": (
        five, [(tensor([1, 0, 3, 4, 2, 9]),)], [(tensor([0, 0, 0, 1, 0, 0]),), (X.long(),)]),
    "two_selected": (
        two_selected, [(tensor([1.0, -2, 3]),)],
        [(tensor([1.0, 2, 3]),), (tensor([-1.0, 2, -3]),)]),
    "as_many": (
        as_many, [(tensor([1, 0, 2]), tensor([0, 4, 5])), (tensor([1, 0, 0]), tensor([0, 0, 5]))],
        [(tensor([1, 0, 2]), tensor([0, 0, 5])), (tensor([1, 0, 0]), tensor([0, 4, 5]))]),
    "as_the_input": (
        as_the_input, [(tensor([1.0, 2, 2]), X[:2]), (tensor([1.0, 2, 3]), X[:3])],
        [(tensor([1.0, 1, 1]), X[:2]), (tensor([1.0, 2, 3]), X[:2])]),
    "as_the_number": (
        as_the_number, [(tensor([1, 0, 2]), tensor([1, 1]))],
        [(tensor([1, 0, 2]), tensor([2, 1])), (tensor([1, 0, 0]), tensor([0, 0]))]),
    "repeated": (
        repeated, [(X[:3], tensor([1, 3, 4]))], [(X[:3], tensor([1, 2, 2])),
                                               (X[:3], tensor([9, 3, 4]))]),
    "parts": (
        parts, [(X, tensor([3, 2, 1])), (X[:5], tensor([1, 0, 4]))],
        [(X[:5], tensor([1, 0, 5])), (X[:5], tensor([1, 0, 3])), (X[:5], tensor([-1, 2, 4]))]),
    "narrowed": (
        narrowed, [(X, tensor([3, 2])), (X[:5], tensor([0, 5]))],
        [(X[:5], tensor([3, 3])), (X[:5], tensor([-1, 2]))]),
    "viewed": (viewed, [(X, tensor([3, 2])), (X, tensor([1, 6]))], [(X, tensor([3, 3]))]),
    "sliced": (
        sliced, [(X, tensor([3, 2])), (X, tensor([0, 0]))],
        [(X, tensor([3, 4])), (X, tensor([0, -1]))]),
    "made": (
        made, [(X, tensor([3, 2])), (X, tensor([2, 0]))],
        [(X, tensor([1, 0])), (X, tensor([7, 7]))]),
    "later": (
        later, [(X, tensor([3, 2])), (X, tensor([1, 0]))],
        [(X, tensor([3, 4])), (X, tensor([0, 0]))]),
    "positive": (positive, [(X,)], [(-X,)]),
    "distributions": (distributions, [(X.abs() + 1,), (X,), (-X.abs(),)], []),
    "unread": (
        unread, [(X[:4], tensor([1, 0, 2, 3]))],
        [(X[:4], tensor([1, 1, 2, 3])), (X[:4], tensor([0, 0, 2, 3]))]),
    "twice_the_number": (
        twice_the_number, [(torch.randn(6), tensor(3)), (torch.randn(10), tensor(5))], []),
    "one_more": (
        one_more, [(torch.randn(7), tensor([1, 1])), (torch.randn(13), tensor([1, 3]))],
        [(torch.randn(13), tensor([1, 2])), (torch.randn(13), tensor([4, 1]))]),
    "pairs": (
        pairs, [(torch.randn(2, 6), tensor([1, 0, 2, 3])), (torch.randn(3, 4), tensor([0, 1, 1]))],
        [(torch.randn(2, 6), tensor([1, 0, 2]))]),
    "flag": (flag, [(X,)], [(X - 2,)]),
    "two_words": (two_words, [(tensor([1, 5]),)], [(tensor([1, 2]),), (tensor([1, 3]),)]),
}  # fmt: skip


def message(f: Callable[..., Any], inputs: Inputs) -> str:
    with pytest.raises(RuntimeError) as raised:
        f(*inputs)
    assert "backend=" not in str(raised.value) and "fake tensor" not in str(raised.value)
    return str(raised.value).splitlines()[0]


@pytest.mark.parametrize("name", ROWS)
def test_asserted(name: str) -> None:
    f, right, wrong = ROWS[name]
    settings = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    torch._dynamo.reset()
    with torch._dynamo.config.patch(settings):
        compiled = torch.compile(f, backend="deuteron", fullgraph=True)
        for inputs in right:
            for a, b in zip(tree_leaves(f(*inputs)), tree_leaves(compiled(*inputs)), strict=True):
                torch.testing.assert_close(b, a)
        for inputs in wrong:
            ours, eager = message(compiled, inputs), message(f, inputs)
            if "Expected cond" not in eager and re.fullmatch(r"[a-z ]+", eager):
                assert ours == eager
        for inputs in right:  # afterwards all is as before
            for a, b in zip(tree_leaves(f(*inputs)), tree_leaves(compiled(*inputs)), strict=True):
                torch.testing.assert_close(b, a)


@pytest.mark.parametrize("name", ("twice_the_number", "as_the_number", "one_more", "made"))
@pytest.mark.parametrize("option", ("verify", "check_accesses"))
def test_debug_options(name: str, option: str) -> None:
    """What watches kernels knows sizes that data decides."""
    f, right, wrong = ROWS[name]
    settings = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    torch._dynamo.reset()
    with torch._dynamo.config.patch(settings):
        g = torch.compile(f, backend="deuteron", dynamic=True, options={option: True})
        for inputs in right:
            torch.testing.assert_close(g(*inputs), f(*inputs))
        for inputs in wrong:
            message(g, inputs)


@pytest.mark.parametrize("split", (False, True))
def test_gradients(split: bool) -> None:
    """Sizes that data decides, in backward graphs."""

    def f(x: torch.Tensor, w: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        if split:
            a, b = n.tolist()
            u, v = torch.split(x * w, [a, b])
            return u.sin().sum() + (v * v).sum()
        y = x[(x > 2).nonzero().squeeze(1)] * w
        return (y * y).sum() + y.exp().mean()

    settings = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    torch._dynamo.reset()
    results = []
    with torch._dynamo.config.patch(settings):
        for g in (f, torch.compile(f, backend="deuteron", fullgraph=True)):
            x, w = (X / 2).requires_grad_(), tensor(1.5, requires_grad=True)
            out = g(x, w, tensor([2, 4]))
            results.append((out.detach(), *torch.autograd.grad(out, (x, w))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a)


def test_values_are_told() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(five, backend="deuteron", fullgraph=True)
        compiled(tensor([1, 0, 3, 4, 2, 9]))
        with pytest.raises(FailedAssertion) as raised:
            compiled(tensor([1, 0, 3, 4, 0, 0]))
    assert " = 3" in raised.value.hint and "test_assertions.py" in raised.value.where


def test_unguarded_sizes_of_inputs() -> None:
    """Sizes of which Dynamo was told to guard nothing."""

    def f(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] <= 9, lambda: "nine at most")
        torch._check(x.shape[0] % 2 == 0)
        return (x * 2).view(2, -1).sum(1)

    def marked(n: int) -> torch.Tensor:
        out = torch.randn(n, 3)
        torch._dynamo.decorators.mark_unbacked(out, 0)
        return out

    compiled = torch.compile(f, backend="deuteron", fullgraph=True)
    for n in (4, 8):
        x = marked(n)
        torch.testing.assert_close(compiled(x), f(x))
    for n in (10, 5, 7):  # Dynamo guards some of it all the same, and says so by an AssertionError
        with pytest.raises((RuntimeError, AssertionError)):
            compiled(marked(n))


@pytest.mark.parametrize("name", ROWS)
def test_every_size_has_a_source(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is emitted, each name of a size is set before it is used, each result of a library
    call that kernels read is compared, and each check stands before the kernels that come after
    what it names."""
    seen: list[Loaded] = []
    guarded = pipeline.guarded
    monkeypatch.setattr(pipeline, "guarded", lambda c, *_: (seen.append(c), guarded(c, *_))[1])
    f, right, _ = ROWS[name]
    settings = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    torch._dynamo.reset()
    with torch._dynamo.config.patch(settings):
        torch.compile(f, backend="deuteron", fullgraph=True)(*right[0])
    assert any(c.program.checks for c in seen)
    for c in seen:
        text = c.module.text
        for check in c.program.checks:
            at = text.index(f"if not {check.condition}:")
            for size in names_in(check.condition):
                assert re.search(rf"\b{size}\b,? .*=", text[:at]), f"{size} is not known"
        relied = relied_on(c.program, c.schedule)
        for step in c.schedule.steps:
            if isinstance(step, Extern) and not step.aliases and "out=" not in text:
                for made in step.names:
                    if made in relied:
                        test = f"if {made} is None or ({made}.shape != |FIRST or )"
                        assert re.search(test, text)
