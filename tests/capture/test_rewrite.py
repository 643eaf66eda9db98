"""The rewrites of ATen graphs: what each row does, and what none may do."""

from __future__ import annotations

import time

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from deuteron.base.passes import Context
from deuteron.base.record import Record
from deuteron.graph.rewrite import rewrite
from deuteron.graph.rules import RULES_OF
from tests.capture.helpers import check_values

aten = torch.ops.aten


def traced(f, *args, symbolic=False):
    return make_fx(f, tracing_mode="symbolic" if symbolic else "fake")(*args)


def calls(gm: fx.GraphModule) -> list[str]:
    return [str(n.target).removeprefix("aten.") for n in gm.graph.nodes if n.op == "call_function"]


def check(f, *args, symbolic=False) -> list[str]:
    """Rewrites the trace of `f`; results stay bit-identical with the same layout and sharing.
    Returns the calls left."""
    gm = traced(f, *args, symbolic=symbolic)
    expected = gm(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args))
    record = Record()
    out = rewrite(gm, Context(record=record))
    assert out is gm and record.of("rewrite")
    check_values(gm)
    gm.recompile()
    got = gm(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args))
    for e, g in zip(
        torch.utils._pytree.tree_leaves(expected), torch.utils._pytree.tree_leaves(got)
    ):
        assert (e.dtype, e.shape, e.stride()) == (g.dtype, g.shape, g.stride())
        assert torch.equal(e, g) and torch.equal(torch.signbit(e), torch.signbit(g))
    before = len(gm.graph.nodes)
    rewrite(gm, Context())
    assert len(gm.graph.nodes) == before, "idempotent"
    return calls(gm)


x = torch.randn(4, 6)
n = torch.arange(24).view(4, 6)


@pytest.mark.parametrize(
    ("f", "left"),
    [
        (lambda x: x.view(4, 6).sin(), ["sin.default"]),
        (lambda x: x.expand(4, 6).sin(), ["sin.default"]),
        (lambda x: aten.slice.Tensor(x, 0, 0, 4).sin(), ["sin.default"]),
        (lambda x: aten.permute.default(x, [0, 1]).sin(), ["sin.default"]),
        (lambda x: aten.alias.default(x).sin(), ["sin.default"]),
        (lambda x: x.clone().sin(), ["sin.default"]),
        (lambda x: aten._to_copy.default(x, dtype=torch.float32).sin(), ["sin.default"]),
        (lambda x: x.double().float().sin(), ["sin.default"]),
        (lambda x: (x * 1).sin(), ["sin.default"]),
        (lambda x: (x / 1.0).sin(), ["sin.default"]),
        (lambda x: (x**1).sin(), ["sin.default"]),
        (lambda x: (x - 0).sin(), ["sin.default"]),
        (lambda x: x.neg().neg().sin(), ["sin.default"]),
        (lambda x: torch.cat([x]).sin(), ["sin.default"]),
        (lambda x: aten.copy.default(x.cos(), x).sin(), ["sin.default"]),
        (lambda x: aten.slice_scatter.default(x.cos(), x).sin(), ["sin.default"]),
        (lambda x: x.sin() * x.sin(), ["sin.default", "mul.Tensor"]),
        (lambda x: (x.sin(), x.cos())[0], ["sin.default"]),
        (lambda x: torch.full((4, 6), 2.0).mul(3).neg() + x, ["full.default", "add.Tensor"]),
        (lambda x: torch.zeros(6).expand(4, 6).add(1).view(24), ["full.default", "view.default"]),
    ],
)
def test_removed(f, left):
    assert check(f, x) == left


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.t().sin(),  # another layout
        lambda x: aten.permute.default(x[:, :4], [1, 0]).sin(),
        lambda x: x[:, ::2].sin(),
        lambda x: x.flip(0).sin(),
        lambda x: x.t().contiguous(),
        lambda x: x + 0.0,  # -0.0 + 0.0 is 0.0
        lambda x: x * -1,
        lambda x: x.bfloat16().float().sin(),  # rounds
        lambda x: x.sin() * x.sin().cos().add(1).sub(1),
        lambda x: aten.slice_scatter.default(x, x[:2].cos(), 0, 1, 3),
        lambda x: torch.empty(3).fill_(1.0) + torch.empty(3).fill_(2.0),
    ],
)
def test_kept(f):
    gm = traced(f, x)
    before = len(set(calls(gm)))
    assert len(set(check(f, x))) == before


def test_integers():
    assert check(lambda n: (n + 0) * 2, n) == ["mul.Tensor"]
    assert check(lambda n: (n.bool().int().bool()).logical_not().logical_not(), n) == [
        "_to_copy.default"
    ]
    assert "add.Tensor" in check(lambda n: n.float() + 0, n)


def test_square_transposition_is_no_identity():
    s = torch.randn(3, 3)
    assert "t.default" in check(lambda s: s.expand(3, 3).t().sin(), s)
    e = torch.ones(1).expand(4, 4)
    assert check(lambda e: aten.permute.default(e, [1, 0]).sin(), e) == [
        "permute.default",
        "sin.default",
    ]


def test_outputs_keep_their_storage():
    def pointers(f):
        gm = traced(f, x)
        rewrite(gm, Context())
        gm.recompile()
        a = x.clone()
        return [t.untyped_storage().data_ptr() for t in (a, *gm(a))]

    for f in (
        lambda x: (x.clone(),),
        lambda x: (x * 1,),
        lambda x: (x + 1, x + 1),
        lambda x: ((y := x + 1), y.clone(), (y * 1)),
        lambda x: (x + 1, (x + 1).view(-1)),
        lambda x: (torch.zeros(3), torch.zeros(3)),
    ):
        addresses = pointers(f)
        assert len(set(addresses)) == len(addresses)
    shared = pointers(lambda x: ((y := x + 1), y.view(-1), x.view(-1)))
    assert shared[1] == shared[2] and shared[0] == shared[3]


def test_nothing_moves_across_a_write():
    def f(x):
        before = x.sin()
        old = x.clone()
        x.copy_(x.cos())
        return before + x.sin(), old.exp()

    gm = traced(f, x)
    expected = gm(x.clone())
    rewrite(gm, Context())
    gm.recompile()
    assert calls(gm).count("sin.default") == 2 and "clone.default" in calls(gm)
    assert all(torch.equal(a, b) for a, b in zip(expected, gm(x.clone())))


def test_random_calls_never_merge():
    left = traced(
        lambda x: (
            torch.rand_like(x) + torch.rand_like(x) + torch.empty_like(x) * torch.empty_like(x)
        ),
        x,
    )
    rewrite(left, Context())
    assert (
        calls(left).count("rand_like.default") == 2 and calls(left).count("empty_like.default") == 2
    )


def test_arguments_are_told_apart():
    assert (
        len(check(lambda n: (n.sum(1), n.sum(1, True), n * 1.0, n * 2, n * True, n * 2.0), n)) == 6
    )
    assert check(lambda x: (x * 0.0) + (x * -0.0), x).count("mul.Tensor") == 2


def test_symbolic_sizes():
    assert (
        check(lambda x: x.view(x.shape).expand(x.shape[0], -1).sin(), x, symbolic=True)[-1]
        == "sin.default"
    )
    assert "view.default" not in check(lambda x: x.view(x.shape).sin(), x, symbolic=True)


def test_linear_time():
    def f(x):
        for i in range(600):
            x = (x.view(4, 6) * 1 + i).clone()
        return x

    gm = traced(f, x)
    start = time.perf_counter()
    rewrite(gm, Context())
    assert time.perf_counter() - start < 1.0
    assert len(calls(gm)) == 600


def test_every_row_is_named_and_says_what_it_does():
    rows = {r.name: r for group in RULES_OF.values() for r in group}
    assert all(r.rewrite.__doc__ for r in rows.values())
