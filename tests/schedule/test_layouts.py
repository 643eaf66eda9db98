"""Tensors that only kernels read lie as what they are computed with; the rest as traced."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.schedule.planning import Plan, planned


def strides_of(plan: Plan, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Of every tensor of a shape that kernels store."""
    found = []
    for k in plan.kernels:
        for _, layout in k.writes:
            if tuple(n.value for n in layout.shape) == shape:
                found.append(tuple(s.value for s in layout.strides))
    return found


def close(plan: Plan, wanted: Tensor | tuple[Tensor, ...]) -> bool:
    got, want = (x if isinstance(x, tuple) else (x,) for x in (plan.results, wanted))
    same = all(g.stride() == w.stride() for g, w in zip(got, want, strict=True))
    return same and all(torch.allclose(g, w, rtol=1e-4, atol=1e-5) for g, w in zip(got, want))


def block(image: Tensor, a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of an image, transposed, are what a residual stream begins with."""
    x = image.flatten(2).transpose(1, 2).sin() + a
    for _ in range(2):
        x = x + F.linear(F.layer_norm(x, x.shape[-1:]), w)
    return x.sum((0, 1)), x


def test_a_residual_stream_is_not_transposed() -> None:
    args = torch.randn(3, 40, 5, 7), torch.randn(3, 35, 40), torch.randn(40, 40)
    wanted = block(*args)
    assert wanted[1].stride() == (1400, 1, 35)
    with torch.no_grad():
        plan = planned(block, *args)
    assert close(plan, wanted)
    streams = strides_of(plan, (3, 35, 40))
    # What the program returns has the strides that it was traced with, and nothing else.
    assert sorted(streams) == [(1400, 1, 35), (1400, 40, 1)]
    decisions = [d for r in plan.records for d in r.of("decision") if d["subject"] == "layout"]
    assert {d["detail"] for d in decisions} == {"strides 1400, 40, 1"}


def test_images_stay_as_what_they_are_computed_with() -> None:
    """All operands are channels last: so is what lies between kernels."""

    def f(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        z = (x + y).exp()
        return z * F.conv2d(z / z.sum((1, 2, 3), keepdim=True), w) + y

    args = [torch.randn(2, 24, 6, 6).to(memory_format=torch.channels_last) for _ in range(2)]
    w = torch.randn(24, 24, 1, 1)
    with torch.no_grad():
        plan = planned(f, *args, w)
        assert close(plan, f(*args, w))
    assert set(strides_of(plan, (2, 24, 6, 6))) == {(864, 1, 144, 24)}


def test_a_copy_for_a_library_is_the_tensor_itself() -> None:
    """The product needs rows one after the other, and the gradients' sums read the same."""

    def f(a: Tensor, image: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        x = image.flatten(2).transpose(1, 2).cos() * a
        x = x - x.mean(-1, keepdim=True)
        rows = x.reshape(-1, x.shape[-1])
        y = rows.t() @ (rows @ w)
        return y, (x + y.sum()).softmax(-1).sum((0, 1))

    shapes = (4, 33, 48), (4, 48, 3, 11), (48, 48)
    args = [torch.randn(shape) for shape in shapes]
    with torch.no_grad():
        plan = planned(f, *args)
        assert close(plan, f(*args))
    written, read = (
        [n for k in plan.kernels for n, _ in getattr(k, w)] for w in ("writes", "reads")
    )
    assert "clone" in written and "sub" not in written, "x itself is read from there, too"
    assert "clone" in read
    (maker,) = [k for k in plan.kernels if "clone" in dict(k.writes)]
    assert {"aten.sub.Tensor", "aten.clone.default"} <= {o.op for o in maker.origins}


def test_memory_that_others_see_stays() -> None:
    """An argument that is written, and what views it."""

    def f(x: Tensor, a: Tensor) -> Tensor:
        x.add_(a)
        return x.sum(0) + a.softmax(-1).sum(0)

    x, a = torch.randn(9, 7).t().contiguous().t(), torch.randn(9, 7)
    mine, theirs = x.clone(memory_format=torch.preserve_format), x.clone()
    with torch.no_grad():
        plan = planned(f, mine, a)
        wanted = f(theirs, a)
    assert close(plan, wanted) and torch.equal(mine, theirs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_copy_that_is_written_is_not_the_tensor_itself(dynamic: bool) -> None:
    """Where it is written depends on what it is a copy of."""

    def f(x: Tensor) -> Tensor:
        y = x.detach().argmin(-2)
        y[y % y.shape[0]] = 3
        return y // y.abs().max().clamp(min=1)

    x = torch.randn(11, 7).t().contiguous().t()
    compiled = torch.compile(f, backend="deuteron", dynamic=dynamic, options={"verify": True})
    assert torch.equal(compiled(x), f(x))
