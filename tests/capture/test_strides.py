"""Rules for strides: what is traced of pointwise operators on expanded tensors is eager's."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx

from deuteron.capture import pointwise
from deuteron.capture.decompositions import table
from deuteron.graph import ops

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.int32)


def operand(rng: random.Random, shape: list[int], dtype: torch.dtype, broadcast: bool) -> Tensor:
    """Some of its axes may be missing or of size 1, and some are expanded."""
    sizes = [1 if broadcast and rng.random() < 0.4 else n for n in shape]
    stored = [1 if rng.random() < 0.25 else n for n in sizes]
    if rng.random() < 0.5:
        order = rng.sample(range(len(sizes)), len(sizes))
        back = [order.index(d) for d in range(len(order))]
        made = torch.ones([stored[d] for d in order]).permute(back).to(dtype)
    else:
        made = spread(rng, stored, dtype=dtype).fill_(1)
    new = rng.randint(0, 1) if broadcast else 0
    return made.expand(sizes)[(0,) * new]


def traced(op: Any, args: list[Tensor]) -> fx.GraphModule:
    """As AOTAutograd does, where torch's rules in Python come before its kernels."""
    with enable_python_dispatcher():
        return make_fx(lambda *a: op(*a), tracing_mode="fake", decomposition_table=table())(*args)


def significant(t: Tensor) -> list[int]:
    return [s for s, n in zip(t.stride(), t.shape) if n > 1]


def spread(rng: random.Random, shape: list[int], **how: Any) -> Tensor:
    """Any order of the axes in memory, with holes, also behind axes of one element."""
    strides, step = [0] * len(shape), 1
    for d in rng.sample(range(len(shape)), len(shape)):
        strides[d], step = step, step * (shape[d] + rng.randint(0, 1))
    return torch.empty_strided(shape, strides, **how).zero_()


NUMBERS = {  # what else the operators are given
    "aten.elu_backward.default": lambda a, b: (a, 1, 1, 1, False, b),
    "aten.leaky_relu_backward.default": lambda a, b: (a, b, 0.1, False),
    "aten.hardtanh_backward.default": lambda a, b: (a, b, -1, 1),
    "aten.softplus_backward.default": lambda a, b: (a, b, 1, 20),
    "aten.threshold_backward.default": lambda a, b: (a, b, 0),
    "aten.mse_loss.default": lambda a, b: (a, b, 0),
    "aten.smooth_l1_loss.default": lambda a, b: (a, b, 0),
    "aten.huber_loss.default": lambda a, b: (a, b, 0),
    "aten.binary_cross_entropy.default": lambda a, b: (a, b, None, 0),
    "aten.where.self": lambda a, b: (b.bool(), a, b),
    "aten.addcmul.default": lambda a, b: (a, b, a),
    "aten.addcdiv.default": lambda a, b: (a, b, a),
    "aten.lerp.Tensor": lambda a, b: (a, b, a),
    "aten.lerp.Scalar": lambda a, b: (a, b, 0.5),
}
ONE_TENSOR_ARGUMENTS = {  # those of one tensor
    "aten.clamp.default": lambda a: (a, 0),
    "aten.clamp_min.default": lambda a: (a, 0),
    "aten.clamp_max.default": lambda a: (a, 0),
    "aten.threshold.default": lambda a: (a, 0, 1),
    "aten.polygamma.default": lambda a: (1, a),
    "aten.pow.Tensor_Scalar": lambda a: (a, 2),
    "aten.xlogy.Scalar_Self": lambda a: (2, a),
    "aten.remainder.Scalar_Tensor": lambda a: (2, a),
}


def with_a_number(name: str) -> Callable[..., Any] | None:
    """The arguments of an operator of one tensor."""
    if name in ONE_TENSOR_ARGUMENTS:
        return ONE_TENSOR_ARGUMENTS[name]
    if name in pointwise.UNARY_LOOPS:
        return lambda a: (a,)
    if name.endswith("Scalar_Tensor"):
        return lambda a: (1, a)
    more = name.endswith(("Scalar", "Scalar_Other", "Scalar_mode")) and name != "aten.lerp.Scalar"
    return (lambda a: (a, 1)) if more else None


@pytest.mark.parametrize("name", pointwise.LOOP_OPERATORS)
def test_pointwise(name: str) -> None:
    """Of one or two operands, in any order of the axes in memory, with any steps of axes of one
    element and axes that are repeated."""
    (op,) = ops.resolved([name])
    one = with_a_number(name)
    given = one or NUMBERS.get(name, lambda a, b: (a, b))
    more = {"rounding_mode": "floor"} if name.endswith("_mode") else {}
    rng = random.Random(name)
    ran = 0
    for _ in range(30):
        shape = [rng.choice([1, 2, 3]) for _ in range(rng.randint(2, 4))]
        broadcast = rng.random() < 0.5 and pointwise.LOOP_OPERANDS.get(name) != (0,)
        whole = any(k in name for k in ("bitwise", "gcd", "lcm"))
        kinds = (torch.int32, torch.bool) if whole else DTYPES
        first, second = rng.choice(kinds), rng.choice(kinds)
        alone = name in NUMBERS and "where" not in name
        if alone or "backward" in name or rng.random() < 0.6:
            second = first
        args = [operand(rng, shape, d, broadcast) for d in (first, second)][: 1 if one else 2]
        if one and rng.random() < 0.5:
            args = [torch.empty_strided(shape, dense(rng, shape), dtype=first).fill_(1)]
        try:
            want = op(*given(*args), **more)
        except (RuntimeError, NotImplementedError):  # gradients of whole numbers
            continue
        got = traced(lambda *a: op(*given(*a), **more), args)
        got = got.graph.output_node().args[0].meta["val"]
        where = [(a.dtype, a.shape, a.stride()) for a in args]
        assert got.stride() == want.stride(), where
        ran += 1
    assert ran > 5


@pytest.mark.parametrize("kind", ["a sum with a factor", "positions"])
def test_strides_of_one_element_count(kind: str) -> None:
    """Where nothing else orders two dimensions of the result, eager compares them with those of one
    element."""
    rng = random.Random(kind)
    for _ in range(150):
        shape = [rng.choice([1, 2, 3]) for _ in range(rng.randint(2, 4))]
        if kind == "positions":
            x = spread(rng, shape)
            at = spread(
                rng, [rng.choice([1, 2, 3]) for _ in range(rng.randint(1, 3))], dtype=torch.int64
            )
            args, op = [x, at], lambda x, at: aten.index.Tensor(x, [None, at])
        else:
            sizes = [[rng.choice([1, n]) for n in shape][rng.randint(0, 1) :] for _ in range(2)]
            args = [spread(rng, s) for s in sizes]
            op = lambda a, b: aten.add.Tensor(a, b, alpha=2)  # noqa: E731
        got = traced(op, args).graph.output_node().args[0].meta["val"]
        where = [(a.shape, a.stride()) for a in args]
        assert significant(got) == significant(op(*args)), where


def test_views_of_one_element() -> None:
    """Also the strides of dimensions of one element are eager's, wherever a view puts them."""
    rng = random.Random(0)
    ran = 0
    for _ in range(120):
        x = operand(
            rng, [rng.choice([1, 2, 3]) for _ in range(rng.randint(1, 4))], torch.float32, False
        )
        if x.dim() == 0:
            continue
        flat = [n for n in x.shape if n > 1]
        if len(flat) > 1 and rng.random() < 0.5:
            at = rng.randrange(len(flat) - 1)
            flat[at : at + 2] = [flat[at] * flat[at + 1]]
        for _ in range(rng.randint(0, 3)):
            flat.insert(rng.randint(0, len(flat)), 1)
        wide = [rng.choice([1, 2]) for _ in range(rng.randint(0, 2))]
        wide += [rng.choice([1, 2]) if n == 1 else n for n in x.shape]
        for op in (lambda x, to=flat: x.view(to), lambda x, to=wide: x.expand(to)):
            try:
                want = op(x)
            except RuntimeError:  # no view
                continue
            got = traced(op, [x]).graph.output_node().args[0].meta["val"]
            assert got.stride() == want.stride(), (x.shape, x.stride(), want.shape)
            ran += 1
    assert ran > 150


LIKE: dict[str, Callable[[Tensor], Any]] = {
    "zeros": torch.zeros_like,
    "other dtype": lambda x: torch.full_like(x, 2, dtype=torch.int64),
    "contiguous": lambda x: torch.ones_like(x, memory_format=torch.contiguous_format),
    "random": torch.rand_like,
    "flip": lambda x: x.flip(0),
    "sort": lambda x: x.sort(-1)[1],
    "nan_to_num": torch.nan_to_num,
    "index_fill": lambda x: x.index_fill(0, torch.tensor([0]), 1.0),
    "hardtanh": torch.nn.functional.hardtanh,
    "degrees": torch.rad2deg,
}


@pytest.mark.parametrize("name", LIKE)
def test_results_that_are_made_like_their_input(name: str) -> None:
    """With the strides of dimensions of one element."""
    rng = random.Random(1)
    for _ in range(30):
        shape = [rng.choice([1, 1, 2, 3]) for _ in range(rng.randint(2, 4))]
        x = torch.empty_strided(shape, dense(rng, shape)).normal_()
        got = traced(LIKE[name], [x]).graph.output_node().args[0].meta["val"]
        assert got.stride() == LIKE[name](x).stride(), (x.shape, x.stride())


@pytest.mark.parametrize("shape", [(0, 6), (5, 0), (0, 1), (2, 0, 6)])
def test_nothing_that_is_turned_keeps_its_strides(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for y in (x[:, ::2], x.transpose(0, 1), x):
        for f in (lambda x: x.flip(0), lambda x: x.flip((0, 1)), lambda x: x.rot90()):
            got = traced(f, [y]).graph.output_node().args[0].meta["val"]
            assert got.stride() == f(y).stride(), (y.shape, y.stride())


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "number": lambda x: x + 1,
    "comparison": lambda x: x > 1,
    "function": torch.sin,
    "two": lambda x: x * x.clone(),
    "filled": lambda x: x.masked_fill(x > 0, 1.0),
    "triangle": torch.tril,
    "view": lambda x: x.view(1, *x.shape, 1),
    "expanded": lambda x: x.expand(1, *x.shape),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_one_element_where_sizes_change(name: str) -> None:
    """The strides of dimensions of one element are eager's with symbolic sizes, too."""
    moved = (0, 2, 1, 3), (0, 3, 1, 2), (1, 0, 2, 3), (3, 0, 1, 2)
    for at in (0, 1, 3):
        for order in moved:
            shape = [3, 4, 5]
            shape.insert(at, 1)
            back = partial(lambda order, x: STEPS[name](x.permute(order)), order)
            x = torch.randn(shape)
            with enable_python_dispatcher():
                made = make_fx(back, tracing_mode="symbolic", decomposition_table=table())(x)
            got = made.graph.output_node().args[0].meta["val"].stride()
            hints = [s if type(s) is int else s.node.hint for s in got]
            assert tuple(hints) == back(x).stride(), (shape, order)
            assert not made.shape_env.guards, made.shape_env.guards


def test_nothing_is_added_where_the_order_is_clear() -> None:
    x, bias = torch.ones(3, 4, 5, dtype=torch.bfloat16), torch.ones(5, dtype=torch.bfloat16)
    for args in ([x, bias], [x, torch.ones((), dtype=torch.bfloat16).expand(3, 4, 5)]):
        graph = traced(torch.mul, args).graph
        assert not graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)])
def test_results_that_are_contiguous_in_any_case(order: tuple[int, ...]) -> None:
    back = [order.index(d) for d in range(4)]

    def laid_out(x: Tensor) -> Tensor:
        return x.permute(order).contiguous().permute(back)

    image, grid = laid_out(torch.randn(2, 3, 5, 4)), laid_out(torch.rand(2, 6, 7, 2))
    cases = [
        (lambda x, g: aten.grid_sampler_2d.default(x, g, 0, 0, False), [image, grid]),
        (aten.angle.default, [laid_out(torch.randn(2, 3, 5, 4, dtype=torch.complex64))]),
    ]
    for op, args in cases:
        got = traced(op, args).graph.output_node().args[0].meta["val"]
        assert got.stride() == op(*args).stride()


@pytest.mark.parametrize("sizes", [(6, 4), (5, 7)])
def test_averages_keep_channels_last(sizes: tuple[int, int]) -> None:
    """Also where the windows do not divide the image, and where one dimension of one element is
    what makes it channels last."""
    last = torch.randn(2, *sizes, 3).permute(0, 3, 1, 2)
    one = torch.randn(2).as_strided((1, 2, 1, 1), (2, 1, 2, 2))
    pooled = lambda x: aten._adaptive_avg_pool2d.default(x, [3, 2])  # noqa: E731
    for x in (last, one, last.contiguous(), last[0]):
        got = traced(pooled, [x]).graph.output_node().args[0].meta["val"]
        assert significant(got) == significant(pooled(x))


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch": lambda x: F.batch_norm(x, None, None, training=True),
    "group": lambda x: F.group_norm(x, 1),
    "layer": lambda x: F.layer_norm(x, x.shape[1:]),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dims", [4, 5])
def test_norms_keep_what_lies_as_channels_last(dims: int, name: str) -> None:
    """Also where strides of dimensions of one element do not say so, or alone do."""
    rng = random.Random(dims)
    shapes = ([rng.choice([1, 1, 2, 3]) for _ in range(dims)] for _ in range(40))
    seen = [[2, 3, *[1] * (dims - 2)], *shapes]
    for shape in (s for s in seen if s[0] * s[2] * s[-1] > 1 and max(s) > 1):
        x = torch.empty_strided(shape, dense(rng, shape)).normal_()
        got = traced(NORMS[name], [x]).graph.output_node().args[0].meta["val"]
        assert got.stride() == NORMS[name](x).stride(), (x.shape, x.stride())


def dense(rng: random.Random, shape: list[int]) -> list[int]:
    """Strides that fill the memory, in the usual order, channels last or any, and any strides of
    one element."""
    dims = list(range(len(shape)))
    usual = [*dims[::-1]], [1, *dims[:1:-1], 0], rng.sample(dims, len(dims))
    strides, step = [0] * len(shape), 1
    for d in rng.choice(usual):
        strides[d], step = step, step * shape[d]
    odd = rng.random() < 0.5
    return [rng.choice([1, 2, 6]) if odd and n == 1 else s for n, s in zip(shape, strides)]
