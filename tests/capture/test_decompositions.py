"""Decomposed operators are as exact as eager's: error against float64 at most twice eager's in the
same dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.capture import decompositions, fourier, numbers, pointwise, refusals, results, strides
from deuteron.graph import ops
from tests.capture.helpers import Traced, fresh, tensors

T = torch.randn
image = (2, 4, 9, 10)

CASES: dict[str, tuple[Callable[..., object], tuple[object, ...]]] = {
    "softmax": (lambda x: F.softmax(x * 3, -1), ((32, 100),)),
    "log_softmax": (lambda x: F.log_softmax(x * 3, 0), ((40, 16),)),
    "logsumexp": (lambda x: x.logsumexp(1), ((16, 64),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (64,), w, b), ((16, 64), (64,), (64,))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (64,), w), ((16, 64), (64,))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (image, (4,), (4,))),
    "instance_norm": (lambda x: F.instance_norm(x), (image,)),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, w.detach() * 0, w.detach() * 0 + 1, w, b, training=True),
        (image, (4,), (4,)),
    ),
    "batch_norm_eval": (
        lambda x, w, b: F.batch_norm(x, w.detach(), w.detach().abs() + 1, w, b),
        (image, (4,), (4,)),
    ),
    "normalize": (lambda x: F.normalize(x, dim=1), ((16, 64),)),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), ((8, 16), (8, 1))),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x, 3, dim=-1), ((8, 32),)),
    "cosine": (lambda x, y: F.cosine_similarity(x, y), ((8, 32), (8, 32))),
    "std_mean": (lambda x: torch.std_mean(x, -1), ((8, 64),)),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.arange(64) % 50), ((64, 50),)),
    "smoothed": (
        lambda x: F.cross_entropy(x, torch.arange(64) % 50, label_smoothing=0.1),
        ((64, 50),),
    ),
    "nll_2d": (lambda x: F.nll_loss(F.log_softmax(x, 1), torch.ones(2, 9, 10).long()), (image,)),
    "bce": (lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x) * 0.25), ((8, 32),)),
    "bce_logits": (lambda x, y: F.binary_cross_entropy_with_logits(x, y.detach()), ((64,), (64,))),
    "huber": (lambda x, y: F.huber_loss(x, y, delta=0.5), ((64, 8), (64, 8))),
    "smooth_l1": (lambda x, y: F.smooth_l1_loss(x, y), ((64, 8), (64, 8))),
    "kl_div": (lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1)), ((16, 8), (16, 8))),
    "gelu": (lambda x: F.gelu(x * 2), ((512,),)),
    "gelu_tanh": (lambda x: F.gelu(x * 2, approximate="tanh"), ((512,),)),
    "silu": (lambda x: F.silu(x * 2), ((512,),)),
    "mish": (lambda x: F.mish(x * 2), ((512,),)),
    "elu": (lambda x: F.elu(x) + F.selu(x) + F.celu(x, 0.5), ((512,),)),
    "hard": (lambda x: F.hardswish(x) + F.hardsigmoid(x) + F.hardtanh(x), ((512,),)),
    "leaky": (lambda x, w: F.leaky_relu(x, 0.2) * F.prelu(x, w), ((16, 4), (4,))),
    "softplus": (lambda x: F.softplus(x, 2.0) + F.logsigmoid(x), ((512,),)),
    "glu": (lambda x: F.glu(x, 1), ((16, 64),)),
    "threshold": (lambda x: F.threshold(x, 0.1, -1) + F.softshrink(x) + F.hardshrink(x), ((512,),)),
    "special": (
        lambda x: torch.special.ndtr(x) + torch.logit(x.sigmoid()) + torch.sinc(x),
        ((99,),),
    ),
    "logaddexp": (lambda x, y: torch.logaddexp(x * 5, y * 5), ((99,), (99,))),
    "bilinear": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False),
        (image,),
    ),
    "bicubic": (lambda x: F.interpolate(x, size=(7, 13), mode="bicubic"), (image,)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), (image,)),
    "grid_sample": (
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
        (image, (2, 5, 5, 2)),
    ),
    "adaptive_pool": (lambda x: F.adaptive_avg_pool2d(x, (3, 5)), (image,)),
    "max_pool": (lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2), (image,)),
    "pad": (lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect") * 2, (image,)),
    "replicate": (lambda x: F.pad(x, (1, 2, 2, 1), mode="replicate") * 2, (image,)),
    "unfold": (lambda x: F.unfold(x, 3) * 2, (image,)),
    "reduction": (lambda x: F.fold(x, (5, 5), 3), ((2, 18, 9),)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (image,)),
    "embedding": (lambda w: F.embedding(torch.arange(30) % 7, w, padding_idx=2), ((10, 16),)),
    "indexing": (
        lambda x: x[torch.tensor([0, 2, 2, 5])].cumsum(0) + x.index_select(0, torch.arange(4)),
        ((8, 16),),
    ),
    "index_add": (
        lambda x, y: x.index_add(0, torch.tensor([1, 1, 0]), y, alpha=2),
        ((8, 4), (3, 4)),
    ),
    "index_put": (
        lambda x, y: x.index_put((torch.tensor([1, 1, 0]),), y, accumulate=True),
        ((8, 4), (3, 4)),
    ),
    "masked": (lambda x: x.masked_fill(torch.ones(8, 8).tril() == 0, -1e4).softmax(-1), ((8, 8),)),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ((2, 2, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8)),
    ),
    "attention_mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m.detach()),
        ((2, 2, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8), (16, 16)),
    ),
    "convolution": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        (image, (3, 4, 3, 3), (3,)),
    ),
    "matmul": (lambda x, y, b: torch.addmm(b, x, y, beta=0.5).relu(), ((9, 32), (32, 7), (7,))),
    "vectors": (lambda x, y: x @ y[0] + torch.outer(x[:, 0], y[0, :9]).sum(1), ((16, 9), (2, 9))),
    "cumulative": (lambda x: x.cumsum(1) * x.cumprod(0), ((8, 8),)),
    "distance": (
        lambda x, y: torch.dist(x, y) + F.pairwise_distance(x, y)[:, None],
        ((5, 9), (5, 9)),
    ),
    "round": (lambda x: torch.round(x * 10, decimals=1) + x.frac() + x.trunc(), ((64,),)),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3) + torch.addcmul(x, x, y, value=2), ((64,), (64,))),
    "trace": (lambda x: x.diagonal().sum() + x.tril().sum() + x.diagonal(1).sum(), ((8, 8),)),
    "rotate": (lambda x: x.roll(1, 0).flip(1).rot90(), ((8, 8),)),
}


def evaluate(f: Callable[..., object], args: list[Tensor]) -> list[Tensor]:
    """Outputs, then gradients of a weighted sum of them."""
    outs = tensors(f(*args))
    weights = [torch.linspace(0.5, 1.5, o.numel()).view(o.shape).to(o.dtype) for o in outs]
    gradients = torch.autograd.grad(outs, args, weights, allow_unused=True)
    return [o.detach() for o in outs] + [g for g in gradients if g is not None]


def error(a: Tensor, reference: Tensor) -> float:
    return float((a.double() - reference.double()).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_as_exact_as_eager(name, dtype):
    f, shapes = CASES[name]
    torch.manual_seed(len(name))
    args = [T(*s).to(dtype).requires_grad_() for s in shapes]
    reference = evaluate(f, [a.detach().double().requires_grad_() for a in args])
    eager = evaluate(f, fresh(args))
    traced = Traced()
    ours = evaluate(traced.compile(f, fullgraph=True, dynamic=False), args)
    assert traced.graphs and len(ours) == len(eager)
    for r, e, o in zip(reference, eager, ours):
        assert (e.dtype, e.shape, e.stride()) == (o.dtype, o.shape, o.stride())
        room = (2e-6 if dtype == torch.float32 else 2e-3) * (1 + float(r.abs().max()))
        assert error(o, r) <= 2 * error(e, r) + room
    private = [t for t in traced.targets() if t.startswith("prims.")]
    assert set(private) <= {"prims.convert_element_type.default"}


def test_mixed_batch_norm_keeps_f32_statistics():
    """bf16 images with f32 parameters, as autocast makes them."""
    x, w, b = T(16, 4, 9, 9).bfloat16().requires_grad_(), torch.rand(4) + 0.5, T(4)
    w.requires_grad_()
    traced = Traced()

    def f(x, w, b):
        return F.batch_norm(x, torch.zeros(4), torch.ones(4), w, b, training=True)

    traced.compile(f)(x, w, b)
    backward = [n for n in traced.graphs[0][1].graph.nodes if n.op == "output"][0].all_input_nodes
    statistics = [
        n.meta["val"] for n in backward if n.meta["val"].numel() == 4 and n.op != "placeholder"
    ]
    assert statistics and all(v.dtype == torch.float32 for v in statistics)


def test_optimizer_lists():
    p = [T(5), T(3, 4)]
    g = [T(5), T(3, 4)]

    def step(p, g):
        m = torch._foreach_mul(g, 0.1)
        v = torch._foreach_addcmul(torch._foreach_mul(g, 0.0), g, g, value=0.001)
        d = torch._foreach_add(torch._foreach_sqrt(v), 1e-8)
        n = torch._foreach_norm(g)
        return torch._foreach_addcdiv(p, m, d, value=-0.01), torch._foreach_maximum(p, 0.5), n

    traced = Traced()
    for a, b in zip(tensors(step(p, g)), tensors(traced.compile(step)(p, g))):
        torch.testing.assert_close(a, b)
    assert not any("foreach" in t for t in traced.targets())


def test_compiled_optimizer():
    nets = [torch.nn.Linear(4, 3) for _ in range(2)]
    for p in nets[0].parameters():  # no smaller than a step's rounding allows for
        torch.nn.init.uniform_(p, 1, 2)
    nets[1].load_state_dict(nets[0].state_dict())
    for i, net in enumerate(nets):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        step = Traced().compile(optimizer.step) if i else optimizer.step
        for _ in range(3):
            net(torch.ones(2, 4)).square().sum().backward()
            step()
            optimizer.zero_grad()
    for a, b in zip(nets[0].parameters(), nets[1].parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_tables_name_what_exists():
    """A misspelled operator would be silently left out: each name exists in this torch."""
    only_elsewhere = {"aten.unique_dim"}
    for name in (
        *decompositions.NOT_DECOMPOSED,
        *decompositions.ALSO_DECOMPOSED,
        *decompositions.RANDOM_DECOMPOSED,
    ):
        assert list(ops.resolved((name,))) or name in only_elsewhere, name
    table = decompositions.table()
    for name in decompositions.ALSO_DECOMPOSED + decompositions.RANDOM_DECOMPOSED:
        assert any(t in table for t in ops.resolved((name,))), name
    own = {
        *pointwise.LOOP_OPERATORS,
        *pointwise.LOOP_OPERANDS,
        *strides.RULES,
        *fourier.RULES,
        *results.RULES,
    }
    own |= {*refusals.SAME_DTYPE_OPERANDS}  # rules that only look at dtypes
    own |= {*numbers.CONVERTED, *numbers.RULES}  # and at numbers
    for name in own:
        assert list(ops.resolved((name,))), name
    for name in decompositions.NOT_DECOMPOSED:
        left = [t for t in ops.resolved((name,)) if str(t) not in own]
        assert not any(t in table for t in left if name not in decompositions.OWN_RULES), name


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_operators_made_of_others_are_taken_apart(mode):
    """The table has no rules for them: the dispatcher does it, whether there are gradients."""

    def f(x, y, w, image):
        return (
            torch.einsum("bij,bkj->bik", x, y) + torch.cdist(x, y),
            F.cosine_similarity(x, y, -1) + torch.square(x).std(-1) + torch.clip(y, -1, 1).sum(-1),
            F.interpolate(image, scale_factor=2, mode="nearest-exact") * 2,
            F.interpolate(image[:, :, None], scale_factor=2, mode="trilinear") * 2,
            F.conv1d(x, w) + torch.argsort(x[..., :6], stable=True)[:, :5],
            torch.take_along_dim(x, y.argsort(), 2).diff(),
            x.transpose(-1, 0).mT + 1,
            x[0].t() @ y[0],
            x[0, 0].t() * 2,
        )

    args = (T(4, 6, 8), T(4, 6, 8), T(5, 6, 3), T(2, 3, 5, 7))
    traced = Traced()
    with mode():
        for a, b in zip(f(*args), traced.compile(f)(*args)):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()
    nodes = [n for _, graph in traced.graphs for n in graph.graph.nodes if ops.is_overload(n)]
    assert len(nodes) > 50 and not [n for n in nodes if n.target._can_decompose()]
