"""Every example runs alone on the CPU, and the kernels written by hand are right at odd sizes. In
processes of their own: Triton's interpreter is chosen when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.interpreting import ROOT, interpret

EXAMPLES = Path(ROOT) / "examples"
FILES = sorted(p.name for p in EXAMPLES.glob("*.py") if p.name != "__init__.py")
SAYS = {"first.py": "kernels", "gelu_cuda.py": "CUDA C++ needs"}


def run(*words: str, **variables: str) -> str:
    """What an example (or Python, given these arguments) prints that is started as users do, from
    another folder."""
    usual = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join(p for p in sys.path if p and Path(p) != Path(ROOT))
    done = subprocess.run(
        [sys.executable, *(str(EXAMPLES / w) if w in FILES else w for w in words)],
        env={**usual, "PYTHONPATH": path, **variables},
        cwd=EXAMPLES.parent.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("file", SAYS)
def test_an_example_runs_alone_on_the_cpu(file: str) -> None:
    printed = run(file, CUDA_VISIBLE_DEVICES="")
    assert SAYS[file] in printed and "wrong" not in printed
    if file == "gelu_cuda.py":  # what Deuteron generates, and its time beside eager's
        assert "#pragma omp" in printed and "TB/s" in printed


# Files one after the other, each as a program; what each prints ends with its name.
IN_TURN = """
import runpy, sys
for file in sys.argv[1:]:
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as e:
        assert not e.code, file
    print("\\n--- end of", file)
"""


def test_examples_in_triton_run_on_the_cpu() -> None:
    """In one process: each begins by choosing the interpreter, for all the same."""
    pytest.importorskip("triton")
    files = [f for f in FILES if f not in SAYS]
    printed = run("-c", IN_TURN, *(str(EXAMPLES / f) for f in files), CUDA_VISIBLE_DEVICES="")
    *told, rest = printed.split("--- end of ")
    assert len(told) == len(files) == 5 and not rest.partition("\n")[2].strip()
    assert all("interpreter" in one and "wrong" not in one for one in told)


@pytest.mark.gpu
@pytest.mark.parametrize("file", FILES)
def test_an_example_runs_alone_on_a_gpu(file: str) -> None:
    printed = run(file)
    assert "wrong" not in printed
    assert file == "first.py" or "B/s" in printed or "FLOP/s" in printed or "nvcc" in printed


def test_every_example_is_in_the_table() -> None:
    table = (EXAMPLES / "README.md").read_text()
    assert all(f"[{f}]({f})" in table for f in FILES)


PROGRAM = """
import torch, torch.nn.functional as F
from examples import attention, gelu_triton, layer_norm, linear_relu, softmax

def same(got, want, tolerance=2e-5):
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)

torch.manual_seed(0)
x = torch.randn(5, 1003)
same(gelu_triton.gelu(x * 4), F.gelu(x * 4, approximate="tanh"))
ends = torch.tensor([-1e4, -90.0, 0.0, 90.0])
same(gelu_triton.gelu(ends), torch.tensor([0.0, 0.0, 0.0, 90.0]))
same(softmax.softmax(x), x.softmax(-1))
softmax.ROW_LIMIT = 512  # the online form
long = torch.randn(2, 20_001) * 9
long[0, :9000] = float("-inf")
same(softmax.softmax(long), long.softmax(-1))
w, b = torch.randn(1003), torch.randn(1003)
same(layer_norm.layer_norm(x + 7, w, b), F.layer_norm(x + 7, (1003,), w, b), 2e-4)
a, w, b = torch.randn(70, 45), torch.randn(45, 50), torch.randn(50)
same(linear_relu.linear_relu(a, w, b, (32, 32, 16)), F.relu(a @ w + b), 1e-4)
q, k, v = (torch.randn(1, 2, 75, 16) for _ in range(3))
want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
same(attention.attention(q, k, v, (32, 16)), want, 1e-4)
same(attention.plain(q, k, v), want, 1e-4)
print("right")
"""


def test_kernels_written_by_hand() -> None:
    pytest.importorskip("triton")
    assert interpret("-c", PROGRAM).endswith("right\n")


def test_the_suite_seeds_finds_them() -> None:
    """Under the names that the benchmarks give them; on the CPU they say why they are absent."""
    from dev.bench.cases import Absent
    from dev.bench.seeds import seeds

    programs = {c.name.split(" ")[0]: c.make() for c in seeds("cpu")}
    named = {n: sorted(p.handwritten) for n, p in programs.items() if p.handwritten}
    assert named.pop("gelu") == ["handwritten", "handwritten-cuda"]
    assert named == dict.fromkeys(("softmax", "layer", "linear", "attention"), ["handwritten"])
    if not torch.cuda.is_available():
        for make in programs["gelu"].handwritten.values():
            with pytest.raises(Absent, match="GPU"):
                make()


def test_a_wrong_kernel_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    from deuteron.tools.side_by_side import side_by_side

    x = torch.randn(64)
    assert side_by_side(torch.sin, lambda x: x.sin() * 1.01, (x,), 1.0, "B") == 1
    assert "wrong" in capsys.readouterr().out
    assert side_by_side(torch.sin, torch.sin, (x,), 1.0, "B") == 0
