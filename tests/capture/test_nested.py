"""Jagged nested tensors: their jagged length is a symbol without a number, and every call has other
lengths."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from deuteron.backend import collecting

LENGTHS = ((3, 6), (2, 7, 4), (5,))


def nested(lengths, grad):
    torch.manual_seed(len(lengths))
    rows = [torch.randn(n, 6) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=grad)


def parts(result):
    leaves = torch.utils._pytree.tree_leaves(result)
    return [t.values() if t.is_nested else t for t in leaves]


def step(f, lengths, grad):
    n = nested(lengths, grad)
    out = parts(f(n))
    if grad:
        sum(t.square().sum() for t in out).backward()
        out = [*out, n.grad.values()]
    return [t.detach() for t in out]


def as_eager(f, grad, **options):
    compiled = torch.compile(f, backend="deuteron", options=options)
    for lengths in LENGTHS:
        want = step(f, lengths, grad)
        for got, expected in zip(step(compiled, lengths, grad), want, strict=True):
            torch.testing.assert_close(got, expected)


def mixed(n):
    return F.gelu(n * 2) + n.sin(), torch.where(n > 0, n, 0.5)


def normed(n):
    return n * torch.rsqrt(n.square().mean(-1, keepdim=True) + 1e-5)


def spread(n):
    return n.softmax(-1) * torch.linspace(-1, 1, 6)


def along(n):
    return n.softmax(1).cos()


def padded(n):
    return torch.nested.to_padded_tensor(n.sin(), 0.0)


def rebuilt(n):
    return torch.nested.nested_tensor_from_jagged(n.values().exp(), n.offsets())


def heads(n):
    return n.unflatten(-1, (2, 3)).transpose(1, 2).contiguous() * 2


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("f", [mixed, spread, along], ids=lambda f: f.__name__)
def test_values_and_gradients(f, grad):
    as_eager(f, grad)


@pytest.mark.parametrize("f", [normed, padded, rebuilt, heads], ids=lambda f: f.__name__)
def test_values(f):
    as_eager(f, False)


def test_chains_are_kernels():
    compiled = torch.compile(lambda n: F.gelu(n * 2) + n, backend="deuteron")
    with collecting() as records:
        compiled(nested((4, 3), False))
    assert not [e for r in records for e in r.of("library")]


def test_layers():
    net = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.ReLU())
    as_eager(net, True)


@pytest.mark.parametrize("options", [{"verify": True}, {"fusion": False}])
def test_debug_options(options, tmp_path):
    as_eager(mixed, True, **options, debug_dir=str(tmp_path))
