"""Tensors of more than 2**31 elements: addresses have 64 bits in every kernel that needs them.

Most of the memory is never touched: views of few elements lie far apart in it. Triton kernels are
compiled for a GPU, where each address must be a pointer with an offset of 64 bits, and interpreted
on such views (in a process of their own: a wrong address is a segmentation fault).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deuteron.backend import deuteron_backend
from deuteron.base.device import named_gpu
from deuteron.base.passes import Context
from deuteron.codegen.triton.generate import TritonKernel, generate
from deuteron.graph.rewrite import rewrite
from deuteron.lower.passes import lower
from deuteron.schedule import schedule
from deuteron.schedule.kernel import Kernel
from tests.interpreting import interpret

FAR = 2**29 + 7  # between rows: the fifth begins beyond 2**31
MOST_PROGRAMS = 2**31 - 1  # of a grid's first dimension; the others are not used


@functools.cache
def far(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> Tensor:
    """A view of a large tensor of bytes, filled."""
    reach = offset + sum((n - 1) * s for n, s in zip(shape, strides)) + 1
    out = torch.empty(reach, dtype=torch.int8).as_strided(shape, strides, offset)
    made = torch.Generator().manual_seed(0)
    return out.copy_(torch.randint(-9, 9, shape, generator=made))


def rows() -> Tensor:
    return far((5, 48), (FAR, 1))


def points(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    return x * 2, x.flip(0) + x, x.t().contiguous() + 1, x.roll((1, 5), (0, 1)) * 3


def reductions(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    y = x.float()
    return x.sum(1), y.amax(0), y.softmax(1), x.argmin(1), x.argmax(0), y.sum()


def indexed(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    return x[i], x[:, i], x.gather(0, i[:, None].expand(4, 48)), x.float().cumsum(1), x.cumsum(0)


def joined(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    return torch.cat([x[3:], x[:2] * 2]), x.repeat(2, 1), x.unfold(0, 2, 1).sum(-1)


def written(x: Tensor, i: Tensor) -> Tensor:
    x.add_(1)
    x[3:, 5:9] = 7
    x.index_add_(0, i, torch.ones(4, 48, dtype=torch.int8))
    return x.sum(0)


PROGRAMS: tuple[Callable[..., Any], ...] = (points, reductions, indexed, joined, written)
PLACES = (4, 0, 3, 4)


def results(f: Callable[..., Any], x: Tensor) -> list[Tensor]:
    made = f(x, torch.tensor(PLACES))
    return [*(made if isinstance(made, tuple) else [made]), x.clone()]


def compare(f: Callable[..., Any], g: Callable[..., Any]) -> None:
    x = rows()
    kept = x.clone()
    want = results(f, x)
    x.copy_(kept)
    got = results(g, x)
    x.copy_(kept)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("f", PROGRAMS)
def test_cpp(f: Callable[..., Any], dynamic: bool) -> None:
    compare(f, torch.compile(f, backend=deuteron_backend, dynamic=dynamic, fullgraph=True))


@pytest.mark.slow
def test_cpp_whole() -> None:
    """All of 2**31 + 64 bytes are read."""
    x = torch.ones(2**31 + 64, dtype=torch.int8)
    x[-3:] = 5

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x.sum(), x.argmax(), x.reshape(-1, 2**26 + 2).amax(1)

    got = torch.compile(f, backend=deuteron_backend)(x)
    assert int(got[0]) == 2**31 + 64 + 12 and int(got[1]) == 2**31 + 61
    assert got[2].tolist() == [1] * 31 + [5]


def process() -> None:
    """What the process of `test_interpreted` does."""
    from dev.check.interpret import interpreted

    for f in PROGRAMS:
        for dynamic in (False, True):
            torch._dynamo.reset()
            compare(f, torch.compile(f, backend=interpreted, dynamic=dynamic, fullgraph=True))


def test_interpreted() -> None:
    interpret(__file__)


# -- for a GPU -------------------------------------------------------------------------------------


class Done(Exception):
    """The kernels are made; nothing is to be run."""


def kernels(f: Callable[..., Any], *args: Any, dynamic: bool = False) -> list[TritonKernel]:
    """The Triton kernels of a program for an H200. Its tensors may be larger than memory."""

    generated: list[TritonKernel] = []
    spec = named_gpu("H200")
    assert spec is not None

    def runner(part: Any, context: Context) -> Any:
        rewrite(part.gm, Context())
        plan = schedule(lower(part.gm, Context()), Context(specs=lambda _: spec))
        generated.extend(generate(k, spec) for k in plan.steps if isinstance(k, Kernel))
        raise Done

    backend = functools.partial(deuteron_backend, runner=runner)
    with pytest.raises(Exception, match=".*") as caught:
        torch.compile(f, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    assert isinstance(caught.value, Done) or "Done" in repr(caught.value), caught.value
    return generated


def offsets(kernel: TritonKernel, wide: bool, folder: Path) -> list[str]:
    """The types of all offsets of pointers in a kernel built for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from deuteron.runtime.build_triton import module

    path = folder / f"{kernel.name}.py"
    path.write_text(kernel.source, encoding="utf-8")
    config = kernel.configs[0]
    source = ASTSource(
        fn=getattr(module(path), kernel.name),
        signature=kernel.signature(wide),
        constexprs=kernel.constants(config, wide),
    )
    options = {"num_warps": config.num_warps, "debug": kernel.debug, "sanitize_overflow": False}
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder / "triton")
        done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text = done.asm["ttir"]
    # A constant that is added behind the index is small.
    constants = set(re.findall(r"(%[\w#]+) = arith.constant", text))
    lines = [
        re.findall(r"\b(?:\d+x)*(i\d+)>? ", line)[-1]
        for line in text.split("\n")
        if (m := re.search(r"tt\.addptr %[\w#]+, (%[\w#]+)", line)) and m[1] not in constants
    ]
    assert lines
    return lines


def whole(n: int, dtype: torch.dtype = torch.int8) -> Tensor:
    """A tensor that is never touched."""
    return torch.empty(n, dtype=dtype)


def many(x: Tensor) -> tuple[Tensor, ...]:
    y = x.reshape(-1, 8)
    return x + 1, y.sum(1), y.flip(0), y.amax(0)


@pytest.mark.parametrize("f", [points, reductions, indexed, joined, written])
def test_views_far_apart(f: Callable[..., Any], tmp_path: Path) -> None:
    """Few elements, addresses beyond 2**31."""
    generated = kernels(f, rows(), torch.tensor(PLACES))
    large = [k for k in generated if f"[{FAR}, 1]" in k.source]  # it reads or writes such a view
    assert large
    for k in large:
        assert set(offsets(k, False, tmp_path)) == {"i64"}, k.source


def test_large_tensors(tmp_path: Path) -> None:
    large = [k for k in kernels(many, whole(2**31 + 64)) if "arg0_1" in k.source]
    assert large  # beside what combines partial results
    for k in large:
        assert set(offsets(k, False, tmp_path)) == {"i64"}, k.source
        assert 0 < k.grid(k.configs[0], {}) <= MOST_PROGRAMS


def test_sizes_decide_at_run_time(tmp_path: Path) -> None:
    """One text for both widths: which one runs is decided by the sizes of a call."""
    for k in kernels(many, whole(4096), dynamic=True):
        names = sorted({w.name for kind, w in k.args if kind == "size"})
        if not names:
            continue
        assert k.wide_source is not None
        assert not k.is_wide(dict.fromkeys(names, 4096))
        assert k.is_wide(dict.fromkeys(names, 2**31))
        assert set(offsets(k, True, tmp_path)) == {"i64"}, k.source
        assert k.grid(k.configs[0], dict.fromkeys(names, 2**37)) <= MOST_PROGRAMS


@pytest.mark.parametrize("shape", [(2**37,), (2**34, 8), (8, 2**34), (2**36, 2), (3, 2**20, 2**14)])
def test_grids(shape: tuple[int, ...]) -> None:
    """As many programs as a GPU's memory can need stay within a grid's first dimension."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x + 1, x.amax(-1), x.flip(0), x.sum(0)

    with FakeTensorMode():
        fake = torch.empty(shape, dtype=torch.int8)
    for k in kernels_of_fake(f, fake):
        assert 0 < k.grid(k.configs[0], {}) <= MOST_PROGRAMS, k.source
        assert "tl.int64" in k.source or "x_1_ptr" not in k.source or max(shape) < 2**31


def kernels_of_fake(f: Callable[..., Any], fake: Tensor) -> list[TritonKernel]:
    from torch.fx.experimental.proxy_tensor import make_fx

    from deuteron.base.record import Record

    spec = named_gpu("H200")
    assert spec is not None
    gm = make_fx(f, tracing_mode="fake")(fake)
    record = Record()
    rewrite(gm, Context(record=record))
    plan = schedule(lower(gm, Context()), Context(specs=lambda _: spec))
    return [generate(k, spec) for k in plan.steps if isinstance(k, Kernel)]


def test_loaded_indices_keep_their_bits(tmp_path: Path) -> None:
    """An index of 2**32 + 1 is out of range; cut to 32 bits it would not be."""

    def f(x: Tensor, i: Tensor) -> Tensor:
        return x[i * 2 + 1]

    g = torch.compile(f, backend=deuteron_backend)
    x, i = torch.randn(16), torch.tensor([0, 2**31])
    with pytest.raises(IndexError):
        g(x, i)
    (k,) = kernels(f, x, i)
    checks = [line for line in k.source.split("\n") if "device_assert" in line]
    assert checks and ".to(tl.int32)" not in "".join(checks)
    name = re.search(r"\(\((\w+) < 0\)", checks[0])
    assert name is not None
    made = next(x for x in k.source.split("\n") if x.strip().startswith(f"{name[1]} ="))
    assert "tl.int32" not in made and "INDEX" not in made


if __name__ == "__main__":
    process()
