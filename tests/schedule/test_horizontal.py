"""Kernels that may not be joined."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from deuteron.codegen.triton.generate import generate
from tests.schedule.tools import scheduled, spec_of


def test_cooperative_rows_have_a_kernel_of_their_own() -> None:
    x, y = torch.empty(2048, 131072, dtype=torch.bfloat16), torch.empty(4096)
    for f in (lambda x, y: (x.softmax(-1), y + 1), lambda x, y: (y + 1, x.softmax(-1))):
        kernels = scheduled(f, x, y, device="H200", check=False).kernels
        made = [generate(k, spec_of("H200")) for k in kernels]
        assert sorted(k.programs_per_row for k in made) == [1, 16]
