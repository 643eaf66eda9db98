"""Random numbers of Triton kernels, interpreted: those of torch's own implementation, bit by bit,
however the elements lie in the tile."""

from __future__ import annotations

import pytest

from tests.interpreting import interpret

SCRIPT = """
import tempfile, torch
from pathlib import Path
import deuteron.graph.random_ops
from deuteron.codegen.triton import tiling
from deuteron.codegen.triton.generate import generate
from tests.codegen.triton_programs import run
from tests.schedule.tools import scheduled, spec_of

def rand(seed, *size, dtype=torch.float32):
    return torch.ops.deuteron.rand.default(seed, 3, size, dtype)

def rows(seed, x):
    return x.amax(-1, keepdim=True) * 0 + rand(seed, *x.shape)

seed = torch.tensor(-1234567890123)
LANES, EACH = "rand_lanes", "libm.rand("
CASES = {
    "flat": (lambda s: rand(s, 3001) * 1, (seed,), LANES),
    "rows": (rows, (seed, torch.randn(5, 64)), LANES),
    "rows that begin anywhere": (rows, (seed, torch.randn(5, 62)), EACH),
    "chances": (lambda s: rand(s, 3001) < 0.9, (seed,), "rand_below"),
    "chances of rows": (lambda s, x: rows(s, x) < 0.3, (seed, torch.randn(5, 64)), "rand_lanes"),
    "hardly ever": (lambda s: rand(s, 3001) < 2.0**-24, (seed,), "rand_below"),
    "always": (lambda s: rand(s, 3001) < 1.5, (seed,), LANES),
    "few": (lambda s: rand(s, 3) * 1, (seed,), EACH),
    "one": (lambda s: rand(s) * 1, (seed,), EACH),
    "a part": (lambda s: rand(s, 8, 12)[1:, 4:] * 1, (seed,), EACH),
    "transposed": (lambda s: rand(s, 8, 12).t().contiguous(), (seed,), "libm.rand"),
    "double": (lambda s: rand(s, 50, dtype=torch.float64) * 1, (seed,), "rand64"),
    "rows in a loop": (rows, (seed, torch.randn(3, 3000)), LANES),
}
for name, (f, args, what) in CASES.items():
    if name == "rows in a loop":
        tiling.ROW_LIMIT = 64
    plan = scheduled(f, *args, device="H200", check=False)
    with tempfile.TemporaryDirectory() as folder:
        (got,) = run(plan, list(args), Path(folder), "")
    assert torch.equal(got, f(*args)), name
    texts = [generate(k, spec_of("H200")).source for k in plan.kernels]
    assert any(what in t for t in texts), name
    assert ("for roffset" in texts[0]) == ("loop" in name), name
print("done")
"""


def test_interpreted() -> None:
    pytest.importorskip("triton")
    assert interpret("-c", SCRIPT).endswith("done\n")
