"""Tensors of several processes (DTensor), and what else a graph is given that is neither a tensor
nor a number: device meshes and process groups are handed on."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import deuteron  # noqa: F401
from deuteron.backend import collecting

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def plain(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def step(f, xs):
    """Results and gradients, gathered."""
    xs = [x.detach().clone().requires_grad_(x.requires_grad) for x in xs]
    y = f(*xs)
    if y.requires_grad:
        plain(y).square().sum().backward()
    return [plain(t).detach() for t in (y, *(x.grad for x in xs if x.requires_grad))]


def as_eager(f, *xs, **kw):
    compiled = torch.compile(f, backend="deuteron", **kw)
    want = step(f, xs)
    for _ in range(2):
        for got, expected in zip(step(compiled, xs), want, strict=True):
            torch.testing.assert_close(got, expected)


def programs(mesh, n):
    """Name -> (function, its inputs)."""
    from torch.distributed._functional_collectives import all_gather_tensor, all_reduce
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(3)
    rows = distribute_tensor(torch.randn(6, 10), mesh, [Shard(0)])
    whole = distribute_tensor(torch.randn(6, 10), mesh, [Replicate()])
    first = distribute_tensor(torch.randn(10, 4), mesh, [Shard(1)]).requires_grad_()
    second = distribute_tensor(torch.randn(4, 10), mesh, [Shard(0)]).requires_grad_()
    plain = torch.randn(5, 4)
    everywhere = [Replicate()]
    grad = rows.detach().clone().requires_grad_()

    def layers(x, a, b):
        return (torch.relu(x @ a) @ b).redistribute(mesh, everywhere)

    def repeated(x):
        return checkpoint(
            lambda y: y.exp().redistribute(mesh, everywhere).sin(), x, use_reentrant=False
        )

    def collectives(x):
        both = all_reduce(x.sin(), "sum", mesh) - all_gather_tensor(x.cos(), 0, mesh)[: len(x)]
        return all_reduce(both * 2, "max", mesh) + x

    return {
        "rows": (lambda d: (d.cos() * 2).softmax(-1).sum(0), [rows]),
        "gradient": (lambda d: (d.cos() * 2).softmax(-1), [grad]),
        "redistributed": (lambda d: d.cos().redistribute(mesh, everywhere).exp(), [grad]),
        "local": (lambda d: d.exp().to_local() * 2, [rows]),
        "layers": (layers, [whole, first, second]),
        "checkpoint": (repeated, [grad]),
        "collectives": (collectives, [plain]),
    }


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    from torch.distributed.device_mesh import init_device_mesh

    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


NAMES = ("rows", "gradient", "redistributed", "local", "layers", "checkpoint", "collectives")


@pytest.mark.parametrize("name", NAMES)
def test_one_process(mesh, name):
    f, xs = programs(mesh, 1)[name]
    as_eager(f, *xs)


def test_changing_sizes(mesh):
    f, xs = programs(mesh, 1)["gradient"]
    as_eager(f, *xs, dynamic=True)


@pytest.mark.parametrize("options", [{"verify": True}, {"fusion": False}])
def test_debug_options(mesh, options, tmp_path):
    f, xs = programs(mesh, 1)["gradient"]
    as_eager(f, *xs, options={**options, "debug_dir": str(tmp_path)})


def test_sharded_layers(mesh):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    net = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
    net = parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(4, 6)

    def training(model):
        net.zero_grad()
        y = model(x)
        y.square().sum().backward()
        return [y.detach(), *(p.grad.full_tensor() for p in net.parameters())]

    want = training(net)
    compiled = torch.compile(net, backend="deuteron")
    for _ in range(2):
        for got, expected in zip(training(compiled), want, strict=True):
            torch.testing.assert_close(got, expected)


def test_the_mesh_is_handed_on(mesh):
    """Chains of a DTensor are kernels, and what says how it is spread comes back as it was."""
    f, (d,) = programs(mesh, 1)["rows"]
    with collecting() as records:
        y = torch.compile(f, backend="deuteron")(d)
    assert y.device_mesh is d.device_mesh or y.device_mesh == d.device_mesh
    assert not [e for r in records for e in r.of("library")]


def together(rank, n, store):
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n)
    mesh = init_device_mesh("cpu", (n,))
    for name in ("layers",):
        f, xs = programs(mesh, n)[name]
        as_eager(f, *xs)
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    mp.spawn(together, (2, str(tmp_path / "store")), 2)
