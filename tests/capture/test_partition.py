"""What the partitioner saves and recomputes, and the cut that decides it."""

from __future__ import annotations

import functools
import random
import time
from typing import Any

import networkx
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from deuteron.capture.cut import INFINITE, Network, NoCut
from deuteron.ir.program import Input
from tests.capture.helpers import Traced, same
from tests.schedule.planning import trained


def saved(traced: Traced) -> list[torch.Tensor]:
    """The tensors that cross from forward to backward, except inputs and incoming gradients."""
    backward = dict(traced.graphs)["backward"]
    return [
        n.meta["val"]
        for n in backward.graph.find_nodes(op="placeholder")
        if isinstance(n.meta["val"], torch.Tensor)
        and not n.name.startswith(("primals", "tangents"))
    ]


def test_chain_is_recomputed_from_its_input():
    traced = same(
        lambda x: (x.sin() * 2 + 1).exp().cos(),
        torch.randn(1000, requires_grad=True),
        tolerance=1e-5,
    )
    assert saved(traced) == []


def test_saves_all_when_told():
    traced = Traced(options={"recompute": False})
    same(
        lambda x: (x.sin() * 2 + 1).exp().cos(),
        torch.randn(100, requires_grad=True),
        backend=traced,
        tolerance=1e-5,
    )
    assert saved(traced)
    assert "aten.exp.default" not in traced.targets("backward")


def test_small_statistics_are_saved_not_recomputed():
    traced = same(
        lambda x: F.layer_norm(x, (512,)).sin(),
        torch.randn(64, 512, requires_grad=True),
        tolerance=1e-5,
    )
    assert sorted(tuple(v.shape) for v in saved(traced)) == [(64, 1), (64, 1)]
    assert not any("mean" in t and "var" in t for t in traced.targets("backward"))


@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointed"])
def test_what_an_element_is_selected_of_is_rounded_once(again):
    def norms(x):
        return F.batch_norm(x, None, None, None, None, True) * F.instance_norm(x)

    def f(x):
        v = checkpoint(norms, x, use_reentrant=False) if again else norms(x)
        return (v - v.amax(1, keepdim=True)).exp()

    compiled = torch.compile(f, backend="deuteron", dynamic=True)
    for shape in [(3, 8, 2), (3, 64, 2), (5, 33, 3), (7, 5, 31)]:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
        # Of what is not the maximum bit for bit nothing is left to divide by: NaN (79002084).
        grads = [torch.autograd.grad(h(x).sum(), x)[0] for h in (compiled, f)]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


def test_library_calls_are_never_repeated():
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64))
    traced = same(lambda x: net(x), torch.randn(16, 64, requires_grad=True), tolerance=1e-4)
    assert traced.targets("backward").count("aten.mm.default") == 4
    assert not any("addmm" in t for t in traced.targets("backward"))
    # The product of the first layer, the residue of the second, two statistics; not the activation.
    assert sorted(v.numel() for v in saved(traced)) == [16, 16, 16 * 64, 16 * 128]


class Block(nn.Module):
    """Two convolutions with norms, and what skips them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16, track_running_stats=False) for _ in range(2))

    def forward(self, x):
        y = F.relu(self.norms[0](self.convs[0](x)))
        return F.relu(self.norms[1](self.convs[1](y)) + x)


def test_what_a_maximum_is_looked_for_in_is_saved() -> None:
    """Another kernel may compute it with multiply-adds, and no element equals the maximum: its
    gradient, divided by how many do, was NaN (GPU fuzz 7510758)."""

    def f(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, scale: torch.Tensor) -> Any:
        scores = (b @ a.mT).mT
        moved = (scores * 0.17 + c) * (1 + 0 * scale[:, None, None]) + c
        return moved.amax(-1), torch.tanh(moved.nan_to_num(neginf=0.0)) @ b

    sizes = (1, 3, 65, 33), (1, 3, 65, 33), (1, 65), (3,)
    plan = trained(f, *[torch.randn(s) for s in sizes], device="H200", run=False)
    given = [d.name for d in plan.programs[-1].defs if isinstance(d, Input)]
    print(given)
    assert "add_2" in given  # not computed again


def test_what_a_convolution_reads_again_is_saved_and_masks_are_recomputed():
    torch.manual_seed(0)
    # Between the blocks there is one value with two summands.
    net = nn.Sequential(Block(), Block())
    traced = same(
        lambda x: net(x).square(), torch.randn(4, 16, 8, 8, requires_grad=True), tolerance=1e-4
    )
    graph = dict(traced.graphs)["backward"].graph
    names = [n.name.split("_")[0] for n in graph.find_nodes(op="placeholder")]
    # What each norm reads, what each convolution reads but the first.
    assert names.count("convolution") == 4 and names.count("relu") == 3
    calls = [n for n in graph.nodes if "convolution_backward" in str(n.target)]
    assert len(calls) == 4 and all(n.args[1].op == "placeholder" for n in calls)
    # In a block the first ReLU's sign is that of a norm, which its backward reads anyway; the value
    # between the blocks is read.
    inside = {n.args[1] for n in calls if any("relu" in str(u.target) for u in n.args[1].users)}
    assert not inside
    signs = [n.args[0] for n in graph.nodes if n.target is torch.ops.aten.le.Scalar]
    assert sum(s.op == "placeholder" for s in signs) == 1 and len(signs) == 4


def test_views_save_their_base():
    torch.manual_seed(0)

    def f(x, w):
        q, k, v = (x @ w).chunk(3, -1)
        return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)

    traced = same(
        f,
        torch.randn(2, 8, 16, requires_grad=True),
        torch.randn(16, 48, requires_grad=True),
        tolerance=1e-4,
    )
    assert sum(v.numel() for v in saved(traced)) <= 2 * 8 * 48 + 2 * 8 * 8 + 2 * 2 * 8


def test_sizes_are_saved_as_numbers():
    traced = Traced()
    x = torch.randn(8, 1000, requires_grad=True)
    traced.compile(lambda x: x.sum(0).sin() * x.shape[0], dynamic=True)(x).sum().backward()
    backward = dict(traced.graphs)["backward"]
    shapes = [
        tuple(n.meta["val"].shape)
        for n in backward.graph.find_nodes(op="placeholder")
        if isinstance(n.meta["val"], torch.Tensor)
    ]
    assert all(len(s) == 1 for s in shapes), "x itself is not needed, only how long it is"


def test_checkpoint_recomputes_a_matmul():
    w = torch.randn(32, 32, requires_grad=True)

    def block(x):
        return torch.tanh(x @ w) @ w

    def f(x):
        return checkpoint(
            block, checkpoint(block, x, use_reentrant=False), use_reentrant=False
        ).sum()

    traced = same(f, torch.randn(4, 32, requires_grad=True), tolerance=1e-4)
    assert len(saved(traced)) == 1, "only what lies between the two regions"
    forward, backward = (
        traced.targets("forward").count("aten.mm.default"),
        traced.targets("backward"),
    )
    assert forward == 4 and backward.count("aten.mm.default") >= 4 + 4 + 1


def test_selective_checkpoint_saves_what_the_policy_says():
    w = torch.randn(32, 32, requires_grad=True)

    def policy(ctx, op, *args, **kwargs):
        keep = op == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def f(x):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(
            lambda v: torch.tanh(torch.sin(v) @ w) @ w, x, use_reentrant=False, context_fn=contexts
        )

    traced = same(f, torch.randn(4, 32, requires_grad=True), tolerance=1e-4)
    assert traced.targets("backward").count("aten.mm.default") == 4
    assert "aten.sin.default" in traced.targets("backward")


def test_checkpoint_with_changing_shapes():
    w = torch.randn(32, 32, requires_grad=True)

    def f(x):
        block = checkpoint(lambda v: F.layer_norm(torch.tanh(v @ w), (32,)), x, use_reentrant=False)
        return block.sum() * x.shape[0]

    same(f, torch.randn(5, 32, requires_grad=True), tolerance=1e-4, dynamic=True)


def test_effects_keep_their_order_in_the_backward():
    """What is recomputed moves to its use; writes to inputs stay where they are."""

    def f(x, seen):
        y = (x * 2).sin()
        y.register_hook(lambda g: (seen.add_(g.sum()), None)[1])
        return y.exp()

    x = torch.randn(6, requires_grad=True)
    a, b = torch.zeros(()), torch.zeros(())
    f(x, a).sum().backward()
    Traced().compile(f)(x, b).sum().backward()
    torch.testing.assert_close(a, b)


def test_gradient_that_does_not_depend_on_the_incoming_one():
    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return x.cos()

    same(lambda x: Constant.apply(x * 2), torch.randn(7, requires_grad=True))


def test_decisions_are_recorded():
    traced = same(
        lambda x: F.layer_norm(x, (64,)).exp(),
        torch.randn(8, 64, requires_grad=True),
        tolerance=1e-5,
    )
    entries = [e for e in traced.records[0].of("decision") if e["subject"] in ("save", "recompute")]
    assert {e["subject"] for e in entries} == {"save", "recompute"}
    assert all(e["bytes"] > 0 and e["reason"] for e in entries)


# -- the cut ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(20))
def test_cut_against_networkx(seed):
    rng = random.Random(seed)
    n = rng.randint(2, 30)
    net, graph = Network(n), networkx.DiGraph()
    graph.add_nodes_from(("s", "t"))
    edges = []
    for _ in range(rng.randint(1, 4 * n)):
        u, v = rng.randrange(n), rng.randrange(n)
        if u != v:
            edges.append((u, v, INFINITE if rng.random() < 0.2 else rng.randint(1, 20)))
    edges += [("s", rng.randrange(n), rng.randint(1, 30)) for _ in range(n // 2 + 1)]
    edges += [(rng.randrange(n), "t", rng.randint(1, 30)) for _ in range(n // 2 + 1)]
    place = {"s": net.source, "t": net.sink}
    for u, v, c in edges:
        net.edge(place.get(u, u), place.get(v, v), c)
        before = graph.edges[u, v]["capacity"] if graph.has_edge(u, v) else 0
        graph.add_edge(u, v, capacity=before + c)
    late = {*net.sink_side(), net.sink}
    crossing = sum(
        c for u, v, c in edges if place.get(u, u) not in late and place.get(v, v) in late
    )
    assert crossing == networkx.minimum_cut_value(graph, "s", "t")


def test_no_finite_cut_names_the_path():
    net = Network(3)
    for u, v in ((net.source, 0), (0, 1), (1, 2), (2, net.sink)):
        net.edge(u, v, INFINITE)
    with pytest.raises(NoCut) as e:
        net.sink_side()
    assert e.value.path == [0, 1, 2]


def test_nearest_to_the_sink():
    net = Network(3)
    for u, v in ((net.source, 0), (0, 1), (1, 2), (2, net.sink)):
        net.edge(u, v, 5)
    assert net.sink_side() == set()


def test_long_chain_is_fast():
    """A graph like a residual network of 3000 values: every tenth is never recomputed, all are
    wanted later."""
    rng = random.Random(0)
    n = 3000
    net = Network(2 * n)
    for i in range(n):
        net.edge(net.source, 2 * i, INFINITE if i % 10 == 0 else rng.randint(1, 9))
        net.edge(2 * i, 2 * i + 1, rng.randint(1000, 4000))
        for j in (i + 1, i + 10, i + 11):
            if j < n and j % 10:
                net.edge(2 * i + 1, 2 * j, INFINITE)
        if i % 3 == 0:
            net.edge(2 * i + 1, net.sink, INFINITE)
    start = time.perf_counter()
    net.sink_side()
    assert time.perf_counter() - start < 2.0
