"""Masks that data decides: which places of a loop its tables leave, and what kernels do with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from deuteron.ir.nest import Cut
from deuteron.schedule import contract
from deuteron.tools.tile_data import tile_classes
from tests.codegen.attention_values import problems
from tests.interpreting import reported
from tests.schedule.attention_variants import INF, VARIANTS, documents, places, scores
from tests.schedule.planning import Plan, planned, trained

SCRIPT = Path(__file__).parents[1] / "codegen" / "attention_values.py"
S, T = 150, 278  # queries, the last of so many places, and keys
ROWS = 16  # of a block, for so few
Mask = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# Of ids a of queries and b of keys, their places i and j, and a table of blocks: what is hidden.
MASKS: dict[str, Mask] = {
    "documents": lambda a, b, i, j, t: a != b,
    "causal": lambda a, b, i, j, t: (a != b) | (i < j),
    "padding": lambda a, b, i, j, t: (a != b) | (b < 0) | (a < 0),
    "later": lambda a, b, i, j, t: ~(a >= b),
    "both": lambda a, b, i, j, t: (a < b) & (a + 3 > 4),
    "neither": lambda a, b, i, j, t: ~((a == b) | (b <= 1)),
    "equal": lambda a, b, i, j, t: a == b,
    "blocks": lambda a, b, i, j, t: t[i // 16, j // 16],
    "blocks or near": lambda a, b, i, j, t: t[i // 16, j // 16] & (i != j),
    "floats": lambda a, b, i, j, t: a.float() / 2 <= b.float(),
}


def ids(count: int, seed: int, ordered: bool) -> Tensor:
    """Of six documents, of which one is padding."""
    found = torch.randint(-1, 5, (count,), generator=torch.Generator().manual_seed(seed))
    return found.sort().values if ordered else found


def cuts_of(plan: Plan) -> list[list[Cut]]:
    found = [list(k.contraction[0].cuts) for k in plan.contractions if k.contraction]
    return [c for c in found if c]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_nothing_is_left_out_that_counts(name: str, ordered: bool) -> None:
    """The tables hold, of each block of rows, where the first and the last place is that its least
    and largest numbers do not rule out."""
    a, b = ids(S, 1, ordered), ids(T, 2, ordered)
    table = torch.rand(18, 18, generator=torch.Generator().manual_seed(3)) < 0.8
    hidden = MASKS[name](a[:, None], b[None, :], *places(torch.empty(S, T)), table)

    def f(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, table: Tensor) -> Tensor:
        s = scores(q, k)
        mask = MASKS[name](a[:, None], b[None, :], *places(s), table)
        return torch.softmax(s.masked_fill(mask, INF), -1) @ v

    heads = [torch.randn(1, 2, n, 32) for n in (S, T, T)]
    with torch.no_grad(), mock.patch.multiple(contract, MIN_GAIN=-1e9, TABLE_SHARE=1e9):
        plan = planned(f, *heads, a, b, table, device="H100")
    assert torch.allclose(plan.results, f(*heads, a, b, table), atol=1e-5, equal_nan=True)
    ((first, last),) = cuts_of(plan)
    assert (first.upper, last.upper) == (False, True)
    start, stop = (plan.tensors[c.end.attr[0]] for c in (first, last))  # of each part of the keys
    each = -(-T // start.shape[1]) if start.dim() == 2 else T
    least, most = torch.full_like(start.flatten(), each), torch.zeros_like(stop.flatten())
    parts = [p for rows in (~hidden).split(ROWS) for p in rows.any(0).split(each)]
    for k, visible in enumerate(parts):
        at = visible.nonzero().flatten().tolist()
        if at:
            least[k], most[k] = at[0], at[-1] + 1
    assert (start.flatten() <= least).all() and (stop.flatten() >= most).all()
    if ordered and name in ("documents", "later", "floats"):
        assert torch.equal(start.flatten(), least) and torch.equal(stop.flatten(), most)
    else:
        assert name == "equal" or not ordered or (stop - start).sum() < T * len(start)


@pytest.mark.parametrize(
    ("device", "dtype", "heads", "width"),
    [("H100", torch.bfloat16, 16, 128), ("cpu", torch.float32, 4, 64)],
)
def test_each_loop_of_long_rows_is_cut(
    device: str, dtype: torch.dtype, heads: int, width: int
) -> None:
    """Forward and backward; the Record says what is assumed of it."""
    *given, numbers = VARIANTS["documents"].inputs(8192, dtype, heads, width, empty=True)
    one = [x[:1].clone() for x in given]
    plan = trained(lambda *x: documents(*x, numbers), *one, run=False, device=device)
    assert len(plan.contractions) == 3 and [len(c) for c in cuts_of(plan)] == [2, 2, 2]
    for nest, tiling in (k.contraction for k in plan.contractions if k.contraction):
        (found,) = [tile_classes(nest, tiling, d) for d in tiling.dims if d.mode == "loop"]
        read = {n.attr[0] for n in nest.cuts[0].hidden.loads()}
        assert set(found["loaded"]) == read and found["full"] is None and found["skipped"] > 0
    told = [d["detail"] for d in plan.decisions(True)]
    assert len(told) == 2 and all(x.endswith("may hide tiles, 10% assumed") for x in told)


def test_short_rows_are_not_worth_tables() -> None:
    v = VARIANTS["documents"]
    args = v.inputs(256, torch.bfloat16, heads=2, width=64, empty=True)
    plan = planned(v.f, *args, run=False, device="H100")
    assert plan.contractions and not cuts_of(plan)


CUT = ("documents", "ended_documents", "padded_segments", "ranked", "table_of_blocks")


@pytest.mark.parametrize("name", CUT)
def test_values_of_several_blocks(name: str) -> None:
    """Documents that end in blocks, rows without elements: whatever is not visited, as eager."""
    assert problems(name, [300], torch.float32, "deuteron") == []


@pytest.mark.xdist_group("data_masks")
@pytest.mark.parametrize("name", CUT)
def test_values_of_several_blocks_interpreted(name: str) -> None:
    rows = {r["name"]: r["problems"] for r in reported(SCRIPT, "144", *CUT)}
    assert rows[name] == []


def test_cut_loops_are_built_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from deuteron.base.device import named_gpu
    from deuteron.base.options import Options
    from deuteron.codegen.triton.generate import generate
    from deuteron.runtime.build_triton import build
    from tests.codegen.cubins import resources

    *given, numbers = VARIANTS["documents"].inputs(8192, torch.bfloat16, 16, 128, empty=True)
    one = [x[:1].clone() for x in given]
    plan = trained(lambda *x: documents(*x, numbers), *one, run=False, device="H100")
    spec = named_gpu("H100")
    assert spec is not None
    options = Options.make(options={"cache_dir": str(tmp_path)})
    for kernel in plan.contractions:
        code = generate(kernel, spec)
        binary = build(code, code.configs[0], 90, options, True)
        _, local = resources(binary.code, tmp_path)
        # Of the kernel of the gradients of keys and values, which has all 255 registers, one; of
        # the forward, whose 8 warps compute 128 rows, eight. H200, 8 documents: 214 us so, 161 in
        # blocks of 64 x 64, which the estimate takes for 1 % slower.
        most = {2: 8, 3: 32}.get(len(kernel.writes), 0)
        assert local <= most, f"{kernel.name}: {local} bytes are spilled"
