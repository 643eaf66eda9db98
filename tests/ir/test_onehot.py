"""Sums of one term are what their loops give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import deuteron
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Sym, atom, const
from deuteron.ir.onehot import single_term
from deuteron.ir.reference import Evaluator

ROW, CLASS = Axis("i", 7), Axis("c", 5)
TARGETS = torch.tensor([0, 4, 2, 2, -1, 5, 3])
GRADS = torch.tensor([1.5, -2.0, float("inf"), float("nan"), 3.0, -1.0, 0.0])
TENSORS = {"t": TARGETS, "g": GRADS, "m": torch.randn(7, 5)}

target = E.load("t", (ROW.index,), "i64")
grad = E.load("g", (ROW.index,), "f32")
here = E.op("eq", E.index_value(CLASS.index), target)
back = E.op("eq", target, E.index_value(CLASS.index))


def number(x: float) -> Expr:
    return E.literal(x, "f32")


def pick(condition: Expr, there: Expr, elsewhere: Expr) -> Expr:
    return E.op("where", condition, there, elsewhere)


ONES = (
    pick(here, number(-1.0), number(0.0)),
    pick(back, grad, number(-0.0)),
    E.op("mul", pick(here, number(-1.0), number(0.0)), grad),
    E.op("mul", grad, E.op("neg", pick(back, number(2.0), number(0.0)))),
    E.op("abs", E.op("mul", pick(here, grad, number(0.0)), number(3.0))),
    E.cast(E.cast(pick(here, grad, number(0.0)), "bf16"), "f32"),
    pick(E.op("logical_and", here, E.op("gt", grad, number(0.0))), grad, number(0.0)),
    E.cast(pick(here, target, E.literal(0, "i64")), "f32"),
    E.op("mul", pick(here, grad, number(0.0)), pick(back, number(2.0), number(0.0))),
    pick(here, number(1.0), number(2.0)),
    pick(back, number(-0.5), grad),
    E.op("add", pick(here, number(-1.0), number(0.0)), E.op("neg", grad)),
)
OTHERS = (
    pick(here, target, E.literal(1, "i64")),
    pick(here, grad, E.load("m", (ROW.index, CLASS.index), "f32")),
    pick(here, E.load("m", (ROW.index, CLASS.index), "f32"), number(0.0)),
    pick(E.op("ne", E.index_value(CLASS.index), target), grad, number(0.0)),
    pick(E.op("eq", E.index_value(CLASS.index * 2), target), grad, number(0.0)),
    E.op("mul", pick(here, number(1.0), number(0.0)), E.cast(E.index_value(CLASS.index), "f32")),
    E.op("add", pick(here, grad, number(0.0)), pick(E.op("eq", E.index_value(CLASS.index),
        E.literal(1, "i64")), number(1.0), number(0.0))),
)  # fmt: skip


def terms(e: Expr) -> torch.Tensor:
    """A row of terms for each target."""
    return Evaluator((ROW, CLASS), {}, TENSORS, "cpu").value(e).expand(7, 5)


@pytest.mark.parametrize("body", ONES)
def test_the_term_is_the_sum(body: Expr) -> None:
    term = single_term(body, CLASS)
    assert term is not None and CLASS not in term.axes() and term.dtype == body.dtype
    torch.testing.assert_close(
        terms(term)[:, 0], terms(body).sum(-1), equal_nan=True, rtol=0, atol=0
    )


@pytest.mark.parametrize("body", OTHERS)
def test_other_sums_stay(body: Expr) -> None:
    assert single_term(body, CLASS) is None


def test_axes_of_one_or_unknown_length_stay() -> None:
    for extent in (const(1), const(0), atom(Sym("s", 2))):
        axis = Axis("c", extent)
        body = pick(E.op("eq", E.index_value(axis.index), target), grad, number(0.0))
        assert single_term(body, axis) is None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_of_a_loss_has_no_sum(smoothing: float) -> None:
    """Cross-entropy's gradient is computed point by point, whatever the targets and gradients."""

    def loss(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, t, reduction="none", label_smoothing=smoothing)

    x = torch.randn(6, 40, requires_grad=True)
    t = torch.tensor([0, 39, -100, 7, 7, 20])
    g = torch.tensor([1.0, -2.0, 3.0, float("inf"), 0.0, 2.0])
    (got,) = torch.autograd.grad(torch.compile(loss, backend="deuteron", dynamic=False)(x, t), x, g)
    (want,) = torch.autograd.grad(loss(x, t), x, g)
    torch.testing.assert_close(got, want, equal_nan=True)
    kernels = deuteron.explain(loss, x, t, backward=True).graphs[1].of("kernel")
    assert len(kernels) == 1 and "_poi_" in kernels[0]["name"]
