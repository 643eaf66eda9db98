"""Transposes through registers, of elements of every size and of extents that no square divides."""

from __future__ import annotations

import pytest
import torch

from deuteron.codegen.cpp.tiles import FEW_ROWS, SHORT_TILE_V, TILE_U, TILE_V
from tests.codegen.cpp_tools import Runner
from tests.schedule.tools import scheduled

DTYPES = [torch.bool, torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("shape", [(100, 530), (64, 256), (331, 97), (531, 150)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transpose(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = (torch.randn(shape) * 50).to(dtype)
    program = scheduled(lambda x: x.t().contiguous(), x, check=False)
    (kernel,) = program.kernels
    runner = Runner(kernel)
    ((name, _),) = kernel.writes
    ((source, _),) = kernel.reads
    out = torch.empty(shape[::-1], dtype=dtype)
    runner({source: x, name: out})
    assert torch.equal(out, x.t())


@pytest.mark.parametrize("rows,columns", [(200, 333), (531, 333), (200, 97)])
def test_with_a_cast(rows: int, columns: int) -> None:
    """Tiles are short where rows are few and long."""
    x = torch.randn(rows, columns)
    program = scheduled(lambda x: (x * 2).t().to(torch.bfloat16).contiguous(), x, check=False)
    (kernel,) = program.kernels
    runner = Runner(kernel)
    side = SHORT_TILE_V if rows <= FEW_ROWS and columns > TILE_V else TILE_V
    assert "d_transpose" in runner.cpp.source and f"[{TILE_U * side}];" in runner.cpp.source
    ((name, _),) = kernel.writes
    ((source, _),) = kernel.reads
    out = torch.empty(columns, rows, dtype=torch.bfloat16)
    runner({source: x, name: out})
    assert torch.equal(out, (x * 2).t().to(torch.bfloat16))
