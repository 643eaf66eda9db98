"""What shares a kernel: counts of kernels, values by the reference executor, on both devices."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.base.device import named_gpu
from deuteron.ir.index import product
from deuteron.schedule.columns import split_registers
from deuteron.schedule.dag import Node
from deuteron.schedule.fuse import Fusion, Offer
from deuteron.schedule.kernel import Reduce, Store
from deuteron.schedule.legality import Refusal
from tests.schedule.tools import Scheduled, scheduled

DEVICES = ["cpu", "H200"]
ROWS, COLS = 96, 64


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (ROWS, COLS)))


def norm_backward(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    d = x - x.mean(-1, keepdim=True)
    rstd = (d.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    xh, g = d * rstd, dy * w
    dx = (g - g.mean(-1, keepdim=True) - xh * (g * xh).mean(-1, keepdim=True)) * rstd
    rows = tuple(range(x.ndim - 1))
    return dx, (dy * xh).sum(rows), dy.sum(rows)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def swiglu_backward(dy: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(a)
    return dy * b * (s + a * s * (1 - s)), dy * a * s


def gated_gradient(g: Tensor, x: Tensor) -> Tensor:
    """A value that two operations read, both of them within a half of what is concatenated."""
    a, b = x.chunk(2, -1)
    s = torch.sigmoid(a)
    return torch.cat([g * b * s * (1 + a * (1 - s)), g * F.silu(a)], -1)


COUNTS: list[tuple[str, Any, tuple[Any, ...], int]] = [
    ("sin((x+1)*2)", lambda x: ((x + 1) * 2).sin(), (x(),), 1),
    ("written-out GELU", gelu, (x(),), 1),
    ("softmax", lambda x: torch.softmax(x, -1), (x(),), 1),
    ("softmax of columns", lambda x: torch.softmax(x, 0), (x(),), 1),
    ("layer norm", lambda x, w, b: F.layer_norm(x, (COLS,), w, b), (x(), x(COLS), x(COLS)), 1),
    ("layer norm backward", norm_backward, (x(), x(), x(COLS)), 2),
    ("RMS norm", rms_norm, (x(), x(COLS)), 1),
    ("cross-entropy", F.cross_entropy, (x(), torch.randint(0, COLS, (ROWS,))), 1),
    ("SwiGLU", lambda a, b: F.silu(a) * b, (x(), x()), 1),
    ("SwiGLU of halves", lambda x: F.silu(x[:, :32]) * x[:, 32:], (x(),), 1),
    ("SwiGLU backward", swiglu_backward, (x(), x(), x()), 1),
    ("GroupNorm + SiLU", lambda x: F.silu(F.group_norm(x, 4)), (x(8, 16, 6, 6),), 2),
    ("row and column sums", lambda x: (x.sum(0), x.sum(1)), (x(),), 2),
    ("transpose and add", lambda a, b: a.t().contiguous() + b, (x(8, 9), x(9, 8)), 1),
    ("heads", lambda x: x.view(ROWS, 4, 16).transpose(0, 1).exp().sum(-1), (x(),), 1),
    ("cat of products", lambda a, b: torch.cat([a * 2, b.exp()], 1).relu(), (x(), x()), 1),
    ("scan", lambda x: x.exp().cumsum(-1) * 2, (x(),), 1),
    ("all pairs", lambda x, y: ((x + y).amax(), (x[:, None] - x).amax()), (x(9), x(9, 9)), 1),
    ("three outputs", lambda x: (x + 1, (x + 1).exp(), x.sum(-1)), (x(),), 1),
]


def test_no_merge_saves_more_than_is_reckoned_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the largest saving is found first although most pairs are never looked at."""
    seen: list[tuple[float, float]] = []
    offer = Fusion.offer

    def noted(self: Fusion, a: Node, b: Node) -> Offer | Refusal:
        most, verdict = self.max_saving(a, b), offer(self, a, b)
        if isinstance(verdict, Offer):
            seen.append((verdict.us, most))
        return verdict

    monkeypatch.setattr(Fusion, "offer", noted)
    for device in DEVICES:
        for _, f, args, _ in COUNTS:
            scheduled(f, *args, device=device)
    assert len(seen) > 100 and all(us <= most + 1e-9 for us, most in seen)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name,f,args,most", COUNTS, ids=[c[0] for c in COUNTS])
def test_counts(name: str, f: Any, args: tuple[Any, ...], most: int, device: str) -> None:
    """On a GPU a mean over everything, behind its rows' statistics, has a kernel of its own."""
    plan = scheduled(f, *args, device=device)
    assert len(plan.kernels) <= most + (device != "cpu" and name == "cross-entropy")


@pytest.mark.parametrize("name,f,args,most", COUNTS[:8], ids=[c[0] for c in COUNTS[:8]])
def test_symbolic_sizes_fuse_alike(name: str, f: Any, args: tuple[Any, ...], most: int) -> None:
    if name == "layer norm":
        pytest.skip("normalized_shape is a number here")
    assert len(scheduled(f, *args, dynamic=True).kernels) <= most


@pytest.mark.parametrize("device", DEVICES)
def test_a_value_for_a_part_of_its_reader(device: str) -> None:
    """However slow arithmetic is: nothing is computed more than once."""
    plan = scheduled(gated_gradient, x(4096, 1024), x(4096, 2048), device=device, check=False)
    assert len(plan.kernels) == 1


def test_unfused() -> None:
    """The option that bisects: one kernel per operation."""
    plan = scheduled(lambda x: ((x + 1) * 2).sin(), x(), fusion=False)
    assert len(plan.kernels) == 3


def divergence(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.kl_div(x.log_softmax(-1), y.log_softmax(-1), log_target=True, reduction="batchmean")


@pytest.mark.parametrize("device", ["H200", "cpu"])
def test_a_loss_is_summed_where_its_statistics_are_known(device: str) -> None:
    """Whole rows as parts of the sum over everything: it runs beside the softmax's own
    reductions."""
    x, y = (torch.randn(1024, 4096) for _ in "xy")
    plan = scheduled(divergence, x, y, device=device, check=False)
    assert plan.accepted("split") and len(plan.kernels) == 1 + (device != "cpu")


def test_rows_are_read_once_on_a_cpu() -> None:
    """A sum over everything is cut into rows for what else reads them only."""
    plan = scheduled(divergence, torch.randn(40, 300), torch.randn(40, 300), device="cpu")
    [taken] = plan.accepted("split")
    assert taken["reason"] == "rows are read once"
    for f in (lambda x: (x * 2).sum(), lambda x: (x * x.flip(0)[:1]).sum()):
        assert not scheduled(f, torch.randn(40, 300), device="cpu").accepted("split")
    short = scheduled(divergence, torch.randn(4000, 30), torch.randn(4000, 30), device="cpu")
    assert not short.accepted("split")


def normalised_total(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mean, var = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    scale = (var + 1e-6).rsqrt()
    return mean, scale, ((x - mean) * scale * w).sum()


@pytest.mark.parametrize("device", ["H200", "cpu"])
@pytest.mark.parametrize("rows, width", [(600, 320), (3000, 257), (600_000, 64)])
def test_a_total_of_normalised_rows_reads_them_once(device: str, rows: int, width: int) -> None:
    """Rows of one sum beside their own statistics; more partial results than one program combines
    are split again. H200, 600,000 rows of 640 (bf16), us: 893 when everything was read again."""
    if device == "cpu" and width < 256:
        return  # what short rows leave is not little
    long = rows > 1 << 14
    plan = scheduled(normalised_total, x(rows, width), x(width), device=device, check=not long)
    readers = [k.name for k in plan.kernels if "arg0_1" in dict(k.reads)]
    assert len(readers) == 1 and len(plan.kernels) <= 2 + (long and device != "cpu")
    again = any(n.endswith(".part2") for k in plan.kernels for n, _ in k.writes)
    assert again == long


@pytest.mark.parametrize("columns, least", [(24, 5), (100, 4), (64, 8), (2048, 2)])
def test_few_columns_keep_a_gpu_busy(columns: int, least: int) -> None:
    """Programs per multiprocessor of a column reduction without row reductions."""
    spec = named_gpu("H200")
    assert spec is not None

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.sum(0)

    plan = scheduled(f, x(1 << 18, columns), device="H200", check=False)
    (row_split,) = [n.row_split for k in plan.kernels for n in k.nests if n.row_split is not None]
    assert row_split[1] * -(-columns // 64) >= least * spec.cores
    few = scheduled(f, x(512, columns), device="H200", check=False)
    row_splits = [n.row_split for k in few.kernels for n in k.nests if n.row_split is not None]
    assert all(c[1] <= 2 * spec.cores for c in row_splits)


def test_long_rows_are_split() -> None:
    plan = scheduled(lambda x: x.sum(-1), x(4, 300_000), device="H200")
    assert plan.accepted("split")
    assert plan.kernels[0].nests[0].parallel[-1].extent.value > 16


@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_of_nothing_are_not_split(dynamic: bool) -> None:
    """Places in rows were computed with their sizes as divisors (seed 16000000)."""
    plan = scheduled(
        lambda x, y: x.sum((0, 1)) * y.sin() + 1,
        x(2, 0, 8, 8),
        x(8, 8),
        device="H200",
        dynamic=dynamic,
    )
    assert len(plan.kernels) == 1


def test_columns_are_split() -> None:
    plan = scheduled(lambda x: (x * 2).sum(0), x(4096, 64), device="H200")
    assert plan.accepted("split")
    assert plan.kernels[0].nests[0].row_split is not None


def cross_row_reductions(plan: Scheduled) -> list[list[str]]:
    """For each nest with a row split, the tensors of its partial results."""
    nests = [n for k in plan.kernels for n in k.nests if n.row_split is not None]
    return [[s.name for s in n.stmts if isinstance(s, Reduce) and s.partial] for n in nests]


@pytest.mark.parametrize("axis", [0, 1])
def test_sums_of_places_beside_sums_of_all_rows(axis: int) -> None:
    """Each split has one place: the sum of what the nest stores over the place's rows is complete
    when it is done."""

    def f(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        dx, dw, db = norm_backward(dy, x, w)
        return dx, dx.sum(axis), dw, db

    shape = (16, 512, 128) if axis == 0 else (512, 16, 128)
    plan = scheduled(f, x(*shape), x(*shape), x(128), device="H200")
    assert len(plan.kernels) == 2
    (reductions,) = cross_row_reductions(plan)
    assert len(reductions) == 3
    # Nothing is left to reduce of the places.
    [places] = [n for n in plan.kernels[1].nests if not n.reduced]
    assert [a.extent.value for a in places.parallel] == [512, 128]


def test_rows_of_several_short_axes_are_split_together() -> None:
    """A norm over the channels of images: no axis has places for all multiprocessors."""

    def f(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return norm_backward(dy.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1), w)

    images = [torch.randn(3, 9, 11, 40).permute(0, 3, 1, 2) for _ in range(2)]
    plan = scheduled(f, *images, torch.randn(40), device="H200")
    (split,) = [n for k in plan.kernels for n in k.nests if n.row_split is not None]
    assert [a.extent.value for a in split.parallel] == [3 * 9 * 11]


def test_sums_of_places_alone() -> None:
    def f(dy: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        dx = dy - x * (dy * x).mean(-1, keepdim=True)
        return dx, dy.sum(0), dx.sum(0)

    plan = scheduled(f, x(8, 8192, 64), x(8, 8192, 64), device="H200")
    assert len(plan.kernels) == 2 and len(cross_row_reductions(plan)[0]) == 2


def test_places_of_several_splits_stay_apart() -> None:
    """Splits that have rows of many places, and part of each place's, cannot reduce by place."""

    def f(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        dx, dw, db = norm_backward(dy, x, w)
        return dx, dx.sum(0), dw, db

    plan = scheduled(f, x(512, 16, 128), x(512, 16, 128), x(128), device="H200")
    assert [len(reductions) for reductions in cross_row_reductions(plan)] == [2]


def test_positions_survive() -> None:
    """Partial positions are combined in the order of the parts: the first of equals wins."""
    ties = torch.zeros(4, 100_000)
    ties[:, [70_000, 30_000, 90_000]] = 1
    plan = scheduled(lambda x: x.argmax(-1), ties, device="H200")
    assert plan.accepted("split")


def test_recomputed_in_readers() -> None:
    """What three kernels of different loops read is cheaper to compute than to store."""

    def f(a: Tensor) -> tuple[Tensor, ...]:
        s = (a * 2 + 1) / 3
        return s.exp().sum(0), s.reshape(-1, 25).amax(-1), s.reshape(-1, 20).amin(-1)

    plan = scheduled(f, x(2000, 50), device="H200")
    written = {name for k in plan.kernels for name, _ in k.writes}
    assert "div" not in written


def test_mutation_in_place() -> None:
    """The overwritten tensor is read in the same kernel, at the point that overwrites it."""

    def f(a: Tensor) -> Tensor:
        y = (a * 2).exp()
        return y / y.sum(-1, keepdim=True)

    assert len(scheduled(f, x()).kernels) == 1


@pytest.mark.parametrize("n", [500, 1000])
def test_long_chains(n: int) -> None:
    def f(x: Tensor) -> Tensor:
        for k in range(n):
            x = x.sin() if k % 3 else x + 1.5
        return x

    plan = scheduled(f, x(4, 5))
    assert len(plan.kernels) <= n // 30 + 1


def test_registers_of_a_split() -> None:
    """The splits of a multiprocessor, two at least, share its 65,536; what is fewer than 128, or
    all, is not asked for."""
    spec = named_gpu("H200")
    assert spec is not None
    assert [split_registers(264, w, spec) for w in (4, 6, 8, 16)] == [0, 170, 128, 0]
    assert [split_registers(n, 4, spec) for n in (1, 396, 512, 528, 529)] == [0, 170, 128, 128, 0]
    small = replace(spec, registers=spec.registers // 2)
    assert [split_registers(264, w, small) for w in (2, 4, 8)] == [0, 128, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_memory_has_what_is_narrow(device):
    """A wider copy with several readers is made by each of them."""

    def f(x: Tensor, g: Tensor, h: Tensor) -> Tensor:
        wide = torch.where(x > 0, g.exp(), h.sin()).float()
        return (wide - wide.sum()) * wide

    rows = 4096
    plan = scheduled(f, *(x(rows, COLS).bfloat16() for _ in range(3)), device=device, check=False)
    assert len(plan.kernels) > 1
    stored = [lay for k in plan.kernels for _, lay in k.writes if lay.numel.value == rows * COLS]
    assert sorted(lay.dtype for lay in stored) == ["bf16", "f32"]  # what is narrow, and the result


def test_what_computes_is_no_nest_beside_what_reads() -> None:
    """Ranks of many places and sums of columns would have one number of warps."""
    places = torch.randint(0, 1 << 30, (16384,), dtype=torch.int32)

    def ranks(i: Tensor) -> Tensor:
        return (i[:, None] > i[None, :]).sum(1, dtype=torch.int32)

    def f(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return ranks(i), x.sum(0)

    plan = scheduled(f, places, torch.randn(64, 4096), device="H200", check=False)
    assert len(plan.kernels) == 2
    short = scheduled(f, places[:64], torch.randn(64, 4096), device="H200", check=False)
    assert len(short.kernels) == 1


def test_what_is_taken_from_a_row_is_computed_beside_its_reductions() -> None:
    """Not where the rows are summed up, which would fetch a line of memory for each."""

    def loss(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x, t)

    x, t = torch.empty(1 << 17, 64), torch.empty(1 << 17, dtype=torch.int64)
    first, *others = scheduled(loss, x, t, device="H200", check=False).kernels
    assert {"arg0_1", "arg1_1"} <= {n for n, _ in first.reads}
    assert others and not any("arg0_1" in dict(k.reads) for k in others)


@pytest.mark.parametrize("parts", [(24, 24), (16, 40, 8)])
def test_statistics_of_a_join_of_two_layouts_are_split(parts: tuple[int, ...]) -> None:
    """Its first part lies as the input, others as convolutions leave them: a tile has several
    channels, so that few programs would walk everything (H200, a dense block in bf16: 7.9 ms)."""
    first, *others = (torch.randn(4, c, 40, 48) for c in parts)
    others = [x.to(memory_format=torch.channels_last) for x in others]

    def f(*xs: torch.Tensor) -> torch.Tensor:
        x = torch.cat(xs, 1)
        m, v = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True)
        return ((x - m) * (v + 1e-5).rsqrt()).relu()

    plan = scheduled(f, first, *others, device="H200")
    assert plan.accepted("split")
    for k in plan.kernels:
        for nest in k.nests:
            row = product(a.extent for a in nest.reduced)
            assert nest.row_split is not None or (row.value or 1) <= 4 * 40 * 48


def placed(d: Tensor) -> Tensor:
    """Windows of 8 x 8 [B * windows, 64, C] back in an image of 32 x 32, rolled."""
    a = d.view(-1, 4, 4, 8, 8, d.shape[-1]).permute(0, 1, 3, 2, 4, 5)
    return a.reshape(-1, 32, 32, d.shape[-1]).roll((4, 4), (1, 2))


@pytest.mark.parametrize("device", DEVICES)
def test_a_permuted_copy_and_its_sum_are_one_nest(device: str) -> None:
    def f(d: Tensor) -> tuple[Tensor, Tensor]:
        a = placed(d)
        return a, a.sum((0, 1, 2))

    plan = scheduled(f, torch.randn(32, 64, 40), device=device)
    readers = [
        nest
        for k in plan.kernels
        for nest in k.nests
        if any(n.attr[0] == "arg0_1" for e in nest.exprs() for n in e.loads())
    ]
    assert len(readers) == 1
    assert any(isinstance(s, Store) and s.level == "point" for s in readers[0].stmts)
