"""Inputs that share memory, some of which are written to: AOTAutograd hands over one tensor and
views of it with strides, which the library makes where sizes change. Whoever reads such a view
reads before what it lies in is overwritten."""

import pytest
import torch

import deuteron  # noqa: F401


def turned(a, b):
    c = b * 2
    t = (a + a).flip(0)
    a.add_(c)
    return t


def both(a, b):
    a.mul_(2)
    b.add_(a.sum())
    return a + 1, b * 2


def copied(a, b):
    t = a.exp()
    b.copy_(t * 2)
    return t + b


def read_before_and_after(a, b):
    t = a * b
    b.add_(1)
    return t.sum(0), b.cos(), a * 3


FORMS = {
    "shifted": lambda x: (x[:15], x[4:19]),
    "same": lambda x: (x[:15], x[:15]),
    "transposed": lambda x: (x[:25].view(5, 5), x[:25].view(5, 5).t()),
    "rows": lambda x: (x.view(5, 6)[:4], x.view(5, 6)[1:]),
    "columns": lambda x: (x.view(5, 6)[:, :4], x.view(5, 6)[:, 2:]),
    "alternating": lambda x: (x[::2], x[1::2]),
    "one element": lambda x: (x[:15], x[3:4].expand(15)),
}


def as_eager(f, form, **kw):
    compiled = torch.compile(f, backend="deuteron", **kw)
    for _ in range(2):
        x, y = (torch.arange(30.0) / 30 for _ in "xy")
        try:
            want = f(*form(y))
        except RuntimeError:  # eager does not write into what repeats elements
            return
        got = compiled(*form(x))
        leaves = torch.utils._pytree.tree_leaves
        for a, b in zip([*leaves(got), x], [*leaves(want), y], strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("f", [turned, read_before_and_after], ids=lambda f: f.__name__)
def test_changing_sizes(f, form):
    as_eager(f, FORMS[form], dynamic=True)


@pytest.mark.parametrize("form", ["shifted", "rows", "same"])
@pytest.mark.parametrize("f", [both, copied], ids=lambda f: f.__name__)
def test_several_writes(f, form):
    as_eager(f, FORMS[form], dynamic=True)


def test_fixed_sizes():
    as_eager(turned, FORMS["shifted"])
    as_eager(both, FORMS["columns"])


@pytest.mark.parametrize("options", [{"fusion": False}, {"verify": True}, {"check_accesses": True}])
def test_debug_options(options):
    as_eager(turned, FORMS["shifted"], dynamic=True, options=options)


def test_gradients():
    def f(a, b, w):
        y = ((a + w).cos() + b).flip(0)
        a.add_(b.sin())
        return y * a

    def step(g):
        x = torch.arange(20.0) / 20
        w = torch.linspace(-1, 1, 12).requires_grad_()
        y = g(x[:12], x[5:17], w)
        y.sum().backward()
        return y.detach(), w.grad, x

    compiled = torch.compile(f, backend="deuteron", dynamic=True)
    for a, b in zip(step(compiled), step(f), strict=True):
        torch.testing.assert_close(a, b)
